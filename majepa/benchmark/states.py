"""How far the runs of a grid are, read from their folders alone."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from ..config import ConfigError, TrainConfig
from ..envs.base import EnvError
from ..envs.make import make_env
from ..run_folder import CONFIG, EVALUATIONS, METRICS, reclaim

State = Literal["missing", "begun", "finished"]
Record = Mapping[str, Any]
TAIL = 1 << 18
"""Bytes at the end of a log in which its last evaluation is looked for."""


@dataclasses.dataclass(frozen=True)
class Standing:
    """How far a run is."""

    state: State
    transitions: int = 0
    win_rate: float | None = None
    """With argmax actions: of the final evaluation, or of the last one so far."""


def standing(folder: Path, config: TrainConfig) -> Standing:
    if not (folder / CONFIG).is_file():
        return Standing("missing")
    final = _final_win_rate(folder, config.evaluation.final_episodes)
    if final is not None:
        return Standing("finished", config.steps, final)
    return Standing("begun", *_latest(folder))


def require_own(folder: Path, config: TrainConfig) -> None:
    """Refuse a folder that holds a run of other settings or of another world."""
    if not (folder / CONFIG).is_file():
        return
    try:
        reclaim(folder, config, make_env(config.env).spec)
    except (ConfigError, EnvError) as error:
        raise ConfigError(f"{error}; choose another --out for this grid") from error


def _final_win_rate(folder: Path, episodes: int) -> float | None:
    """Of a final evaluation that was written to its end, the line of the metrics about it too."""
    final = list(filter(_is_final, _records(folder / EVALUATIONS)))
    counts = Counter(record.get("actions") for record in final)
    if counts != {"argmax": episodes, "sampled": episodes}:
        return None
    if not any(map(_is_final, _records(folder / METRICS, tail=TAIL))):
        return None
    return sum(record["won"] for record in final if record["actions"] == "argmax") / episodes


def _is_final(record: Record) -> bool:
    return record.get("kind") == "final"


def _latest(folder: Path) -> tuple[int, float | None]:
    """Transitions and win rate in the last lines that have them."""
    transitions, win_rate = 0, None
    for record in _records(folder / METRICS, tail=TAIL):
        transitions = record.get("transitions", transitions)
        win_rate = record.get("evaluation/win_rate", win_rate)
    return transitions, win_rate


def _records(path: Path, *, tail: int | None = None) -> Iterator[Record]:
    """Whole lines of a file that may be growing at this moment."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        if tail is not None:
            file.seek(max(0, path.stat().st_size - tail))
        for line in file.read().splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record
