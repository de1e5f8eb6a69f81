"""What scripts use: train a run, judge it, load its agents."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from .config import ConfigError, TrainConfig, require_seed, with_overrides, with_seeds
from .config import preset as make_config
from .envs.base import Env
from .evaluation import EVALUATION_SEED, Evaluation
from .evaluation import evaluate as play_episodes
from .log import JsonLines, episode_records
from .run_folder import EVALUATIONS
from .team import Policy, open_run
from .training import Result, train_together
from .training import train as run_training


def load(run: str | Path, checkpoint: str = "last", *, env: Env | None = None) -> Policy:
    """The agents of a trained run; `act` is one agent's decentralised step.

    `env` is the world of a run whose name alone does not lead to one.
    """
    return Policy(open_run(Path(run), checkpoint, env=env))


def train(
    algorithm: str = "majepa",
    env: str | Env = "sim:3m",
    *,
    preset: str | None = None,
    steps: int | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Result:
    """Train a run to its budget, as `majepa train` does; a report is made by `majepa report`.

    `overrides` maps names of settings, such as "algo.imagination.horizon", to values.
    """
    config = _config(algorithm, env, preset, steps, seed, overrides)
    return run_training(config, None if folder is None else Path(folder), env=_world(env))


def train_seeds(
    seeds: int | Sequence[int],
    algorithm: str = "majepa",
    env: str | Env = "sim:3m",
    *,
    preset: str | None = None,
    steps: int | None = None,
    folder: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> list[Result]:
    """Train several seeds in one program, each in its own folder, as `majepa train --seeds` does.

    A number stands for the seeds from 0 on. In `folder` each run has a folder such as `seed-0`.
    """
    configs = with_seeds(_config(algorithm, env, preset, steps, 0, overrides), seeds)
    folders = None if folder is None else [Path(folder) / f"seed-{one.seed}" for one in configs]
    return train_together(configs, folders, resume=False, env=_world(env))


def _config(
    algorithm: str,
    env: str | Env,
    preset: str | None,
    steps: int | None,
    seed: int,
    overrides: Mapping[str, Any] | None,
) -> TrainConfig:
    name = env if isinstance(env, str) else env.spec.name
    chosen: dict[str, Any] = {"seed": seed, **(overrides or {})}
    if steps is not None:
        chosen["steps"] = steps
    return with_overrides(make_config(algorithm, preset, name), chosen)


def _world(env: str | Env) -> Env | None:
    """An environment that is more than its name."""
    return None if isinstance(env, str) else env


class Judgement(NamedTuple):
    """How good a run is: the same episodes with argmax and with sampled actions."""

    argmax: Evaluation
    sampled: Evaluation
    transitions: int


def evaluate(
    run: str | Path,
    *,
    episodes: int = 100,
    seed: int = EVALUATION_SEED,
    checkpoint: str = "last",
    env: Env | None = None,
) -> Judgement:
    """Play fresh episodes with the agents of a run, and keep every one in its folder."""
    if episodes < 1:
        raise ConfigError(f"episodes is {episodes}; it must be one or more")
    require_seed(seed)
    folder = Path(run)
    opened = open_run(folder, checkpoint, env=env)
    results = [
        play_episodes(
            opened.algorithm,
            opened.env,
            opened.state.learner,
            episodes=episodes,
            key=jax.random.key(seed),
            greedy=greedy,
        )
        for greedy in (True, False)
    ]
    common = {
        "transitions": opened.state.transitions,
        "kind": "asked",
        "seed": seed,
        "checkpoint": checkpoint,
    }
    try:
        file = JsonLines(folder / EVALUATIONS)
        for result in results:
            file.write_all(episode_records(result, **common))
        file.close()
    except OSError as error:
        warnings.warn(f"the episodes are not kept: {error}", stacklevel=2)
    return Judgement(results[0], results[1], opened.state.transitions)
