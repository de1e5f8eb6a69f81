"""The folder of a grid: where everything is, and which grid may write into it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..config import ConfigError
from ..files import written_beside
from ..run_folder import differences
from .grids import Cell, Grid, is_folder_name, to_json

GRID = "grid.json"
EVENTS = "jobs.jsonl"
CELLS = "cells"
JOBS = "jobs"
CACHE = "cache"


def default_folder(grid: Grid) -> Path:
    return Path("runs") / f"benchmark-{grid.name}"


def cell_folder(root: Path, cell: Cell) -> Path:
    """An ordinary folder of a run."""
    return root / CELLS / cell.name


def job_file(root: Path, job: str) -> Path:
    """What the process that works on a job reads."""
    return root / JOBS / f"{job}.json"


def log_file(root: Path, job: str) -> Path:
    """What the process that works on a job prints."""
    return root / JOBS / f"{job}.log"


def lock_file(root: Path, job: str) -> Path:
    """Locked by the process that works on a job."""
    return root / JOBS / f"{job}.lock"


def claim(root: Path, grid: Grid) -> None:
    """Make a folder this grid's own; the folder of another grid is left as it is."""
    require_free(root, grid)
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not (root / GRID).exists():
            with written_beside(root / GRID) as partial:
                partial.write_text(json.dumps(_plain(grid), indent=2) + "\n", encoding="utf-8")
        for name in (CELLS, JOBS):
            (root / name).mkdir(exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot write into {root}: {error.strerror or error}") from error


def require_free(root: Path, grid: Grid) -> None:
    """Refuse a folder that holds anything but this very grid, and names that no folder can have."""
    _require_folder_names(grid)
    if root.exists() and not root.is_dir():
        raise ConfigError(f"{root} is a file; choose another --out")
    if not (root / GRID).exists():
        if root.exists() and any(not entry.name.startswith(".") for entry in root.iterdir()):
            raise ConfigError(
                f"{root} is not an empty folder, nor that of a grid; choose another --out"
            )
        return
    for name, before, now in differences(_by_name(_stored(root)), _by_name(_plain(grid))):
        raise ConfigError(
            f"{root} holds another grid: there {name} is {before!r}, here it is {now!r}; "
            "choose another --out"
        )


def _require_folder_names(grid: Grid) -> None:
    names = [cell.name for cell in grid.cells()]
    for name in names:
        if not is_folder_name(name):
            raise ConfigError(f"{name!r} cannot be the name of a folder; rename the method or map")
        if names.count(name) > 1:
            raise ConfigError(f"two runs of the grid would share the folder {name!r}")


def _stored(root: Path) -> dict[str, Any]:
    try:
        stored = json.loads((root / GRID).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{root / GRID} is not JSON: {error}") from error
    if not isinstance(stored, dict):
        raise ConfigError(f"{root / GRID} is not a grid")
    return stored


def _plain(grid: Grid) -> dict[str, Any]:
    """As JSON gives it back: lists, not tuples."""
    return json.loads(json.dumps(to_json(grid)))


def _by_name(data: dict[str, Any]) -> dict[str, Any]:
    """With methods by their names, so that a difference can be told by its own."""
    methods = {str(method.get("name")): method for method in data.get("methods", [])}
    return {**data, "methods": methods}
