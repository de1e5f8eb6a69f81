"""How far the runs of a grid are, read from their folders alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from ..config import ConfigError, TrainConfig
from ..envs.base import EnvError
from ..envs.make import make_env
from ..log import TAIL, read_final, whole_lines
from ..run_folder import CONFIG, EVALUATIONS, METRICS, reclaim

State = Literal["missing", "begun", "finished"]


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
    episodes = config.evaluation.final_episodes
    final = read_final(folder / METRICS, folder / EVALUATIONS, episodes)
    if final is not None:
        wins = sum(one["won"] for one in final.argmax)
        return Standing("finished", config.steps, wins / episodes)
    return Standing("begun", *_latest(folder))


def require_own(folder: Path, config: TrainConfig) -> None:
    """Refuse a folder that holds a run of other settings or of another world."""
    if not (folder / CONFIG).is_file():
        return
    try:
        reclaim(folder, config, make_env(config.env).spec)
    except (ConfigError, EnvError) as error:
        raise ConfigError(f"{error}; choose another --out for this grid") from error


def _latest(folder: Path) -> tuple[int, float | None]:
    """Transitions and win rate in the last lines that have them."""
    transitions, win_rate = 0, None
    for record in whole_lines(folder / METRICS, tail=TAIL):
        transitions = record.get("transitions", transitions)
        win_rate = record.get("evaluation/win_rate", win_rate)
    return transitions, win_rate
