"""How much memory the state of a run will take, known before anything is allocated."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from .checks import RunSize
from .config import MajepaConfig, TrainConfig
from .envs.make import make_env
from .memory import bytes_of
from .training import RunState, make_algorithm, run_shapes

PART_OF: Mapping[str, str] = {
    "params": "parameters",
    "target_encoder": "parameters",
    "actor": "parameters",
    "critic": "parameters",
    "network": "parameters",
    "networks": "parameters",
    "target": "parameters",
    "optimizers": "optimizers",
    "actor_optimizer": "optimizers",
    "critic_optimizer": "optimizers",
    "optimizer": "optimizers",
    "replay": "replay",
}
"""What the fields of a learner count as; any other is `other`."""


def run_size(config: TrainConfig) -> RunSize:
    """Of the run that a config describes. What its learner computes on the way comes on top."""
    env = make_env(config.env)
    size = state_size(run_shapes(make_algorithm(config, env.spec), env))
    may_leave = isinstance(config.algo, MajepaConfig) and config.algo.replay.place != "device"
    return dataclasses.replace(size, may_leave=may_leave)


def state_size(state: RunState) -> RunSize:
    """Of a state, whose leaves may be shapes alone."""
    parts: Counter[str] = Counter()
    for field, value in state.learner._asdict().items():
        parts[PART_OF.get(field, "other")] += bytes_of(value)
    parts["environments"] = bytes_of(state.stream)
    parts["other"] += bytes_of((state.key, state.transitions, state.updates))
    replay = getattr(state.learner, "replay", None)
    return RunSize(dict(parts), 0 if replay is None else replay.num_rows)
