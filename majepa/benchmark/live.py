"""What a person sees while a grid runs: a table in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..progress import clock_time, percent
from .folder import cell_folder
from .grids import Cell, Grid
from .jobs import Job
from .runner import Event
from .states import Standing, standing

LOOK_SECONDS = 2.0
"""Between two looks at the files of running jobs."""
LINE_SECONDS = 60.0
"""Between two lines about a running job, where lines are all there is."""


class Board:
    """What is known of a grid while it runs, and plain lines about it."""

    def __init__(self, root: Path, grid: Grid, console: Console) -> None:
        self._root = root
        self._grid = grid
        self.console = console
        self._began = time.monotonic()
        self._looked = self._said = self._began
        self._waiting = 0
        self._running: dict[str, Job] = {}
        self._failed: dict[str, Job] = {}
        """Those that are not tried again."""
        self._failures = 0
        self._standings = {cell.name: self._standing(cell) for cell in grid.cells()}

    def __enter__(self) -> Board:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def started(self, job: Job, attempt: int, machine: str) -> None:
        self._running[job.name] = job
        number = "" if attempt == 1 else f", attempt {attempt}"
        self.say(f"{job.name} started on {machine}{number}")

    def ended(
        self, job: Job, event: Event, seconds: float, reason: str | None, *, again: bool
    ) -> None:
        del self._running[job.name]
        self._look(job)
        after = f"{job.name} {event} after {clock_time(seconds)}"
        if event == "failed":
            self._failures += 1
            if not again:
                self._failed[job.name] = job
            then = "; it will be tried again" if again else ""
            self.say(f"{after}: {reason}{then}")
        elif event == "finished":
            rates = ", ".join(percent(self._standings[cell.name].win_rate) for cell in job.cells)
            self.say(f"{after}: {rates} won")
        else:
            self.say(after)

    def refresh(self, waiting: int) -> None:
        self._waiting = waiting
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            for job in self._running.values():
                self._look(job)
        if now - self._said >= LINE_SECONDS:
            self._said = now
            self.remind()

    def say(self, text: str) -> None:
        self.console.print(
            f"{clock_time(self.elapsed)}  {text}", highlight=False, markup=False, soft_wrap=True
        )

    def remind(self) -> None:
        """How far the running jobs are."""
        for job in self._running.values():
            self.say(f"{job.name} {_running_text(job.cells, self._of(job.cells))}")

    def picture(self) -> RenderableType:
        """Methods × maps: win rates of what is finished, and how far the rest is."""
        table = Table(title=self._grid.title, title_justify="left")
        table.add_column("map")
        for method in self._grid.methods:
            table.add_column(method.title, justify="right")
        for env in self._grid.envs:
            row = [
                [cell for cell in self._grid.cells() if (cell.env, cell.method) == (env, method)]
                for method in self._grid.methods
            ]
            table.add_row(row[0][0].map, *(self._entry(cells) for cells in row))
        return Group(table, Text(self.summary()))

    def summary(self) -> str:
        states = [one.state for one in self._standings.values()]
        return (
            f"{clock_time(self.elapsed)} elapsed; {states.count('finished')} of {len(states)} runs "
            f"finished; jobs: {len(self._running)} running, {self._waiting} waiting, "
            f"{len(self._failed)} failed ({self._failures} failed attempts)"
        )

    def _entry(self, cells: Sequence[Cell]) -> Text:
        standings = self._of(cells)
        names = {cell.name for cell in cells}

        def concerns(jobs: dict[str, Job]) -> bool:
            return any(cell.name in names for job in jobs.values() for cell in job.cells)

        if all(one.state == "finished" for one in standings):
            return Text(_won(standings), style="bold green")
        if concerns(self._running):
            return Text(_running_text(cells, standings), style="yellow")
        if concerns(self._failed):
            return Text("failed", style="bold red")
        if all(one.state == "missing" for one in standings):
            return Text("-", style="dim")
        return Text(_running_text(cells, standings), style="dim")

    def _of(self, cells: Sequence[Cell]) -> list[Standing]:
        return [self._standings[cell.name] for cell in cells]

    def _look(self, job: Job) -> None:
        for cell in job.cells:
            if self._standings[cell.name].state != "finished":
                self._standings[cell.name] = self._standing(cell)

    def _standing(self, cell: Cell) -> Standing:
        return standing(cell_folder(self._root, cell), cell.config())


class Panel(Board):
    """The table at the bottom of a terminal; what happens scrolls by above it."""

    def __init__(self, root: Path, grid: Grid, console: Console) -> None:
        super().__init__(root, grid, console)
        self._live = Live(get_renderable=self.picture, console=console, refresh_per_second=2)

    def __enter__(self) -> Panel:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def remind(self) -> None:
        """The table shows it."""


def make_board(root: Path, grid: Grid, console: Console) -> Board:
    return (Panel if console.is_terminal else Board)(root, grid, console)


def _running_text(cells: Sequence[Cell], standings: Sequence[Standing]) -> str:
    """Such as `42k/100k 31.2%`: transitions of the last of the runs, win rate of them all."""
    budget = cells[0].config().steps
    reached = min(one.transitions for one in standings)
    return f"{_short(reached)}/{_short(budget)} {_won(standings)}".rstrip()


def _won(standings: Sequence[Standing]) -> str:
    rates = [one.win_rate for one in standings if one.win_rate is not None]
    return percent(sum(rates) / len(rates)) if rates else ""


def _short(count: int) -> str:
    return f"{count / 1000:.0f}k" if count >= 10_000 else f"{count}"
