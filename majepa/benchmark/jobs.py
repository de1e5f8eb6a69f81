"""What one process does: the runs of a method on a map, or one of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from .. import config as configs
from ..envs.make import make_env
from ..files import written_beside
from .folder import cell_folder, job_file
from .grids import Cell
from .states import Standing, standing


@dataclasses.dataclass(frozen=True)
class Job:
    name: str
    cells: tuple[Cell, ...]

    @property
    def is_packed(self) -> bool:
        """Whether it trains all seeds of a baseline together, and not one run of MA-JEPA."""
        return self.cells[0].method.is_packed

    @property
    def size(self) -> tuple[bool, int]:
        """By which jobs are ordered: those that take longest are the largest."""
        first = self.cells[0]
        work = first.config().steps * make_env(first.env).spec.num_agents
        return not self.is_packed, work

    def standings(self, root: Path) -> list[Standing]:
        return [standing(cell_folder(root, cell), cell.config()) for cell in self.cells]

    def is_finished(self, root: Path) -> bool:
        return all(one.state == "finished" for one in self.standings(root))


def jobs_of(cells: Iterable[Cell]) -> list[Job]:
    """The jobs that the cells make up, the longest first."""
    grouped: dict[str, list[Cell]] = {}
    for cell in cells:
        together = f"{cell.method.name}-{cell.map}"
        name = together if cell.method.is_packed else cell.name
        grouped.setdefault(name, []).append(cell)
    jobs = [Job(name, tuple(members)) for name, members in grouped.items()]
    return sorted(jobs, key=lambda job: job.size, reverse=True)


def write_job(root: Path, job: Job) -> Path:
    """The job as a process reads it: the runs' settings by the names of their folders."""
    settings = {cell.name: configs.to_json(cell.config()) for cell in job.cells}
    path = job_file(root, job.name)
    with written_beside(path) as partial:
        partial.write_text(json.dumps({"job": job.name, "cells": settings}, indent=2) + "\n")
    return path
