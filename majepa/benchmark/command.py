"""`majepa benchmark`: from a grid's name to its results."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..config import ConfigError
from ..interrupt import interruptible
from .folder import cell_folder, claim, default_folder, log_file, require_free
from .grids import Cell, Grid, find_grid
from .jobs import Job, jobs_of
from .live import make_board
from .local import local_workers
from .parcels import recover
from .possible import require_possible_runs
from .runner import INTERRUPTED, Outcome, Runner
from .states import require_own, standing
from .workers import Workers

PROMISE = "stopping: jobs save what they have; Ctrl-C again ends them at once, unsaved"
LOG_LINES = 5
"""Of the log of a job that failed, shown at the end."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How to run a grid."""

    command: str
    """What to call to go on."""
    out: Path | None = None
    jobs: int | None = None
    retries: int = 2
    minutes: float | None = None
    mps: bool = True
    cluster: str | None = None
    cpus_per_job: int | None = None
    gpus_per_job: float | None = None

    def __post_init__(self) -> None:
        for name, value, least in (
            ("--jobs", self.jobs, 1),
            ("--retries", self.retries, 0),
            ("--cpus-per-job", self.cpus_per_job, 1),
            ("--gpus-per-job", self.gpus_per_job, 0),
        ):
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; it must be {least} or more")
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"--minutes is {self.minutes}; it must be more than 0")
        if self.cluster is None and (self.cpus_per_job, self.gpus_per_job) != (None, None):
            raise ConfigError("--cpus-per-job and --gpus-per-job need --cluster")


def benchmark(
    name: str,
    options: Options,
    *,
    methods: Sequence[str] | None = None,
    maps: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    dry_run: bool = False,
    console: Console | None = None,
) -> int:
    """Run what is missing of a grid, or of a part of it; returns an exit code."""
    console = console or Console()
    grid = find_grid(name)
    part = grid.only(methods, maps, seeds)
    root = options.out or default_folder(grid)
    require_free(root, grid)
    require_possible_runs(part)
    for cell in part.cells():
        require_own(cell_folder(root, cell), cell.config())
    jobs = jobs_of(part.cells())
    if dry_run:
        _print_plan(console, root, jobs)
        return 0
    return _run(grid, part, root, jobs, options, console)


def write_output(grid: Grid, root: Path) -> list[Path]:
    """Tables and the page about the results so far."""
    from .output import write

    return write(grid, root)


def _run(
    grid: Grid, part: Grid, root: Path, jobs: Sequence[Job], options: Options, console: Console
) -> int:
    recover(root)
    left = [job for job in jobs if not job.is_finished(root)]
    publisher = _Publisher(grid, root, console)
    seconds = None if options.minutes is None else 60 * options.minutes
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(_make_workers(root, options, left))
        claim(root, grid)
        # After the workers: Ray has a mind of its own about signals.
        is_interrupted = stack.enter_context(interruptible(PROMISE))
        board = stack.enter_context(make_board(root, part, console))
        runner = Runner(
            root, workers, board,
            retries=options.retries, seconds=seconds, when_finished=publisher.publish,
        )  # fmt: skip
        outcome = runner.run(left, is_interrupted)
    publisher.publish()
    _print_end(console, root, jobs, outcome, publisher.written, options.command)
    if outcome.stopped == INTERRUPTED:
        return 130
    return 0 if publisher.error is None and all(job.is_finished(root) for job in jobs) else 1


def _make_workers(
    root: Path, options: Options, jobs: Sequence[Job]
) -> contextlib.AbstractContextManager[Workers]:
    if options.cluster is not None:
        from .cluster import cluster_workers

        return cluster_workers(
            root,
            options.cluster,
            jobs,
            most=options.jobs,
            cpus=options.cpus_per_job,
            gpus=options.gpus_per_job,
        )
    return local_workers(root, jobs, most=options.jobs, mps=options.mps)


class _Publisher:
    """Writes the results down; a table that cannot be written must not end hours of training."""

    def __init__(
        self,
        grid: Grid,
        root: Path,
        console: Console,
    ) -> None:
        self._grid = grid
        self._root = root
        self._console = console
        self.written: list[Path] = []
        self.error: str | None = None

    def publish(self) -> None:
        before, self.error = self.error, None
        try:
            self.written = write_output(self._grid, self._root)
        except Exception as error:
            self.error = f"the tables could not be written: {error!r}"
            if self.error != before:
                _say(self._console, self.error)


def _print_plan(console: Console, root: Path, jobs: Sequence[Job]) -> None:
    for job in jobs:
        _say(console, f"{job.name}{'' if not job.is_finished(root) else '  nothing to do'}")
        for cell, one in zip(job.cells, job.standings(root), strict=True):
            reached = f"{one.transitions:,} of {cell.config().steps:,} transitions"
            _say(console, f"    {one.state:<10}{cell_folder(root, cell)}  {reached}")
    left = sum(not job.is_finished(root) for job in jobs)
    cells = sum(len(job.cells) for job in jobs)
    _say(console, f"{cells} runs in {len(jobs)} jobs, {left} of them left to do")


def _print_end(
    console: Console,
    root: Path,
    jobs: Sequence[Job],
    outcome: Outcome,
    written: Sequence[Path],
    command: str,
) -> None:
    """What there is, what is missing and why, and how to go on."""
    cells = [cell for job in jobs for cell in job.cells]
    missing = [cell for cell in cells if not _is_finished(root, cell)]
    _say(console, "")
    if outcome.stopped:
        _say(console, f"stopped early: {outcome.stopped}")
    for job in jobs:
        if job.name in outcome.failed:
            _print_failure(console, root, job, outcome.failed[job.name])
    _say(console, f"finished     {len(cells) - len(missing)} of {len(cells)} runs")
    if missing:
        _say(console, f"missing      {', '.join(cell.name for cell in missing)}")
    _say(console, f"folder       {root}")
    for path in written:
        _say(console, f"written      {path}")
    if missing:
        _say(console, f"go on with   {command}")


def _print_failure(console: Console, root: Path, job: Job, reason: str) -> None:
    lost = [cell.name for cell in job.cells if not _is_finished(root, cell)]
    log = log_file(root, job.name)
    _say(console, f"failed       {', '.join(lost)}: {reason}; the end of {log}:")
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    for line in text.splitlines()[-LOG_LINES:]:
        _say(console, f"    {line}")


def _is_finished(root: Path, cell: Cell) -> bool:
    return standing(cell_folder(root, cell), cell.config()).state == "finished"


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
