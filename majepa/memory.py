"""How much memory learning takes on the device, known once its program is compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from .checks import Memory, in_bytes
from .config import ConfigError, MajepaConfig, TrainConfig


class NoRoom(ConfigError):
    """The device cannot hold what learning takes."""


class Need(NamedTuple):
    """In bytes."""

    state: int
    """What the runs of a program hold from batch to batch."""
    temporaries: int
    """What their learning computes on the way."""

    @property
    def total(self) -> int:
        return self.state + self.temporaries

    def __str__(self) -> str:
        return (
            f"{in_bytes(self.total)} (state {in_bytes(self.state)}, "
            f"temporaries {in_bytes(self.temporaries)})"
        )


def bytes_of(tree: Any) -> int:
    """Of all leaves, which may be shapes alone."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def need_of(stats: Any, held: Any, beside: Any = ()) -> Need | None:
    """Of a program that learns, by its `memory_analysis`; none where the compiler has none.

    `held`: which of its arguments a learner holds anyway; others are there for it alone.
    `beside`: arrays that it is not given, but that are there while it runs.
    """
    if stats is None:
        return None
    state = bytes_of(held)
    used = (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )
    return Need(state, max(0, used - state) + bytes_of(beside))


def require_room(need: Need, there: Memory | None, config: TrainConfig, runs: int = 1) -> None:
    """Refuse what cannot fit, with what to change."""
    if there is None or need.total <= there.total:
        return
    knobs = ["fewer `--seeds`"] if runs > 1 else []
    if isinstance(config.algo, MajepaConfig):
        batch, capacity = config.algo.replay.batch, config.algo.replay.capacity
        knobs += [
            f"a smaller `--algo.replay.batch` (now {batch})",
            f"a smaller `--algo.replay.capacity` (now {capacity})",
            "`--preset small`",
        ]
        if runs == 1 and config.algo.replay.place == "device":
            knobs.append("`--algo.replay.place host`")
    else:
        knobs += ["a smaller `--algo.num-envs`", "`--preset tuned`"]
    raise NoRoom(
        f"learning needs {need} and the device has {in_bytes(there.total)} for JAX; "
        f"use {', or '.join(knobs)}"
    )
