"""From a name to an environment: `sim:2s3z`, or just `2s3z`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence

from .base import Env, EnvError

LARGEST_SEED = 2**32 - 1
"""Keys take 32 bits of a seed: larger ones would be no seeds of their own."""


def make_env(name: str) -> Env:
    """`family:map`; a bare map name means the embedded simulator, `sim:`."""
    if not isinstance(name, str):
        raise EnvError(f"an environment is named by a string such as '2s3z', not {name!r}")
    family, colon, map_name = name.strip().rpartition(":")
    if not colon:
        family = "sim"
    if family not in FAMILIES:
        hint = nearest_names(family, FAMILIES)
        raise EnvError(f"unknown environment family {family!r} in {name!r}; {hint}")
    return FAMILIES[family](map_name)


def nearest_names(wrong: str, names: Sequence[str] | Mapping[str, object]) -> str:
    """A sentence that leads from a wrong name to the right ones."""
    by_folded = {known.lower(): known for known in names}
    close = difflib.get_close_matches(wrong.lower(), by_folded, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(by_folded[match] for match in close)}?"
    return f"choose one of {', '.join(names)}"


def _make_sim(map_name: str) -> Env:
    from .sim import SCENARIOS, BattleEnv

    if map_name not in SCENARIOS:
        hint = nearest_names(map_name, SCENARIOS)
        raise EnvError(f"unknown map {map_name!r}; {hint} (`majepa maps` lists all)")
    return BattleEnv(SCENARIOS[map_name])


FAMILIES: Mapping[str, Callable[[str], Env]] = {"sim": _make_sim}
