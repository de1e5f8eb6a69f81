"""A grid of two maps and two seeds, and runs of it that nobody trained."""

import json
from pathlib import Path

from majepa.benchmark.folder import cell_folder
from majepa.benchmark.grids import Cell, Grid, Method, to_json
from majepa.config import to_json as config_json
from majepa.envs.make import make_env

WORLD = make_env("3m").spec.version
OVERRIDES = {
    "save_every": 300,
    "evaluation.every": 500,
    "evaluation.episodes": 2,
    "evaluation.final_episodes": 4,
}
MAPPO = Method("mappo", "MAPPO", "mappo", "debug", OVERRIDES)
MAJEPA = Method("majepa", "MA-JEPA", "majepa", "debug")
TINY = Grid("tiny", "Tiny", (MAPPO,), ("3m", "2m_vs_1z"), (1, 2), steps=2_000)
MIXED = Grid("mixed", "Mixed", (MAPPO, MAJEPA), ("3m", "corridor"), (1, 2))


def write_grid(grid: Grid, folder: Path) -> str:
    path = folder / f"{grid.name}.json"
    path.write_text(json.dumps(to_json(grid)))
    return str(path)


def begin(root: Path, cell: Cell, version: str = WORLD) -> Path:
    folder = cell_folder(root, cell)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_json(cell.config())))
    (folder / "versions.json").write_text(json.dumps({"environment_version": version}))
    return folder


def progress(folder: Path, transitions: int, win_rate: float) -> None:
    record = {"transitions": transitions, "evaluation/win_rate": win_rate}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def finish(root: Path, cell: Cell, wins: int = 1, version: str = WORLD) -> Path:
    folder = begin(root, cell, version)
    episodes = cell.config().evaluation.final_episodes
    lines = [
        {"transitions": 2_000, "kind": "final", "actions": actions, "won": index < wins}
        for actions in ("argmax", "sampled")
        for index in range(episodes)
    ]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "metrics.jsonl").write_text('{"transitions": 2000, "kind": "final"}\n')
    return folder
