"""Run folders of a grid with made-up results, written as training writes them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from majepa.benchmark.grids import Cell, Grid, Method
from majepa.envs import make_env
from majepa.evaluation import Evaluation
from majepa.log import JsonLines, episode_records, evaluation_metrics
from majepa.run_folder import EVALUATIONS, METRICS, claim

EPISODES = 10
SMALL_RUN = {"evaluation.final_episodes": EPISODES, "evaluation.episodes": EPISODES}
WORLD = "9.8"

MAPPO = Method("mappo", "MAPPO", "mappo", overrides=SMALL_RUN)
MAJEPA = Method("majepa", "MA-JEPA", "majepa", overrides=SMALL_RUN)
GRID = Grid("small", "A small grid", (MAJEPA, MAPPO), ("8m", "2s_vs_1sc"), (1, 2))

WINS = {
    ("majepa", "8m"): (9, 10), ("mappo", "8m"): (2, 5),
    ("majepa", "2s_vs_1sc"): (10, 10), ("mappo", "2s_vs_1sc"): (10, 10),
}  # fmt: skip
"""Of ten final episodes, seed by seed."""


def write_grid(folder: Path, grid: Grid = GRID, version: str = WORLD) -> Path:
    """Every cell finished, with the results above."""
    for cell in grid.cells():
        wins = WINS[cell.method.name, cell.map][grid.seeds.index(cell.seed)]
        write_cell(folder, cell, [wins // 2, wins], version=version)
    return folder


def write_cell(
    folder: Path,
    cell: Cell,
    wins: Sequence[int],
    *,
    kind: str = "final",
    version: str = WORLD,
) -> Path:
    """A run that was evaluated at equal distances; the last time at its end, as `kind`."""
    config = cell.config()
    run = folder / "cells" / cell.name
    claim(run, config, dataclasses.replace(_spec(cell.env), version=version))
    metrics, episodes = JsonLines(run / METRICS), JsonLines(run / EVALUATIONS)
    for index, won in enumerate(wins, 1):
        at = config.steps * index // len(wins)
        of_kind = kind if index == len(wins) else "training"
        argmax, sampled = (_evaluation(won, greedy) for greedy in (True, False))
        for one in (argmax, sampled):
            episodes.write_all(episode_records(one, transitions=at, kind=of_kind))
        metrics.write({
            "transitions": at, "seconds": at / 1_000, "updates": index, "kind": of_kind,
            **evaluation_metrics(argmax, sampled),
            "seconds/collecting": at / 10_000, "seconds/learning": at / 2_000,
            "seconds/evaluating": 1.0, "seconds/saving": 0.5, "seconds/compiling": 3.0,
        })  # fmt: skip
    for file in (metrics, episodes):
        file.close()
    return run


def _evaluation(wins: int, greedy: bool) -> Evaluation:
    """Sampled actions win half as often."""
    won = np.arange(EPISODES) < (wins if greedy else wins // 2)
    return Evaluation(won, np.where(won, 20.0, 4.0), np.full(EPISODES, 30), greedy)


@functools.cache
def _spec(env: str):
    return make_env(env).spec
