"""What the cells of a grid came to, read from their folders.

A cell counts once its run has spent its budget and its final evaluation is whole; every other cell
is a gap with a reason. Runs that are not those of the grid, or that were made in different worlds,
are refused: a table must not mix them.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from ..config import ConfigError, TrainConfig, to_json
from ..report.data import Actions, Record, ReportError, Run, as_stored, finite, flat, read_run
from ..report.numbers import number
from ..report.sections import PHASES
from ..run_folder import CONFIG, EVALUATIONS, METRICS
from .folder import CELLS
from .grids import Cell, Grid, Method

SIMULATORS = ("", "sim")
"""Families of environments that are the embedded simulator."""
WITHOUT_EFFECT = ("log.", "save_every")
"""Settings that change no result."""
IDENTITY = ("env", "seed", "steps", "algo.algorithm")
"""Settings that every version has known."""


class ResultsError(ValueError):
    """Results that do not belong into one table; the message says which and why."""


class Point(NamedTuple):
    """Of a learning curve."""

    transitions: int
    win_rate: float
    """With argmax actions."""
    episodes: int


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished cell."""

    cell: Cell
    budget: int
    transitions: int
    wins: int
    """Of the final evaluation with argmax actions, as are `mean_return` and `mean_length`."""
    episodes: int
    sampled_wins: int
    sampled_episodes: int
    mean_return: float
    mean_length: float
    seconds: float
    phases: Mapping[str, float]
    """Seconds by what they were spent on; less than all of them."""
    environment_version: str
    majepa_version: str
    curve: tuple[Point, ...]
    folder: str | None = None
    """From the grid's folder; none for a result that was kept without its run."""

    @property
    def win_rate(self) -> float:
        return self.wins / self.episodes

    @property
    def sampled_win_rate(self) -> float:
        return self.sampled_wins / self.sampled_episodes


@dataclasses.dataclass(frozen=True)
class Gap:
    """A cell without a result."""

    cell: Cell
    state: Literal["missing", "unfinished", "damaged"]
    reason: str
    folder: str | None = None


@dataclasses.dataclass(frozen=True)
class Results:
    """Every cell of a grid, as a result or as a gap."""

    grid: Grid
    finished: tuple[Result, ...]
    gaps: tuple[Gap, ...]
    notes: tuple[str, ...] = ()
    """What else a reader should know, in sentences."""

    def __post_init__(self) -> None:
        _require_one_version(self.finished)

    @property
    def environment_version(self) -> str | None:
        return self.finished[0].environment_version if self.finished else None

    @property
    def world(self) -> str:
        """Where our numbers come from, for the head of a table."""
        families = {env.rpartition(":")[0] for env in self.grid.envs}
        name = "simulator" if families <= set(SIMULATORS) else ", ".join(sorted(families))
        version = self.environment_version
        return f"{name} v{version}" if version else f"{name} (no results yet)"

    @property
    def maps(self) -> dict[str, str]:
        """Their names, by environment."""
        return {cell.env: cell.map for cell in self.grid.cells()}

    def of(self, method: Method, env: str) -> list[Result]:
        """Seed by seed."""
        wanted = (method.name, env)
        return [one for one in self.finished if (one.cell.method.name, one.cell.env) == wanted]


def read_folders(grid: Grid, folder: Path) -> Results:
    """What stands in `folder/cells` by now."""
    read = [_read(cell, folder) for cell in grid.cells()]
    foreign = [one for one in read if isinstance(one, _Foreign)]
    if foreign:
        more = f" (and {len(foreign) - 1} more cells differ)" if len(foreign) > 1 else ""
        raise ResultsError(
            f"{foreign[0].what}{more}; move such folders away and run their cells again, or name "
            "the grid that they were run for"
        )
    return Results(
        grid,
        tuple(one.result for one in read if isinstance(one, _Finished)),
        tuple(one for one in read if isinstance(one, Gap)),
        (*_notes(read), *_strangers(grid, folder)),
    )


def clocks(results: Sequence[Result]) -> list[Result]:
    """Runs whose times together are those of their jobs: of seeds that train together the longest.

    They share one clock, so that the time of each is the time of all.
    """
    longest: dict[tuple[str, ...], Result] = {}
    for one in results:
        cell = one.cell
        key = (cell.method.name, cell.env) if cell.method.is_packed else (cell.name,)
        if key not in longest or longest[key].seconds < one.seconds:
            longest[key] = one
    return list(longest.values())


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


@dataclasses.dataclass(frozen=True)
class _Foreign:
    """A folder that holds another run than its cell's."""

    what: str


@dataclasses.dataclass(frozen=True)
class _Finished:
    result: Result
    notes: Sequence[str]


def _read(cell: Cell, folder: Path) -> _Finished | Gap | _Foreign:
    place = f"{CELLS}/{cell.name}"
    if not (folder / place).is_dir():
        return Gap(cell, "missing", "not started")
    try:
        return _judged(cell, read_run(folder / place), cell.config(), place)
    except ReportError:
        return Gap(cell, "unfinished", "started, nothing is logged yet", place)
    except (ConfigError, OSError, _Damage) as error:
        return Gap(cell, "damaged", str(error), place)


def _judged(cell: Cell, run: Run, config: TrainConfig, place: str) -> _Finished | Gap | _Foreign:
    differing = _differing(flat(run.config), flat(as_stored(to_json(config))))
    if differing:
        return _Foreign(f"{place} is not the run of its cell: {differing}")
    if run.status != "finished":
        return Gap(cell, "unfinished", _progress(run, config), place)
    return _Finished(_result(cell, run, config, place), run.notes)


def _differing(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """The first setting that a run has otherwise; one that its version did not know may be."""
    for name in IDENTITY:
        if name not in stored:
            raise _Damage(f"{CONFIG} does not tell {name}")
    for name, value in wanted.items():
        if not name.startswith(WITHOUT_EFFECT) and stored.get(name, value) != value:
            return f"it has {name} = {stored[name]!r}, the cell {value!r}"
    return None


def _progress(run: Run, config: TrainConfig) -> str:
    how = "stopped early" if run.status == "stopped" else "not finished"
    return f"{how}, at {number(run.last['transitions'])} of {number(config.steps)} transitions"


class _Damage(ValueError):
    """Why a finished run has no result."""


def _result(cell: Cell, run: Run, config: TrainConfig, place: str) -> Result:
    expected = config.evaluation.final_episodes
    argmax = _final_episodes(run, "argmax", expected)
    sampled = _final_episodes(run, "sampled", expected)
    version = run.versions.get("environment_version")
    if not isinstance(version, str):
        raise _Damage("versions.json does not tell the version of its environment")
    seconds = run.seconds
    if seconds is None:
        raise _Damage(f"{METRICS} does not tell how long the run took")
    return Result(
        cell=cell,
        budget=config.steps,
        transitions=int(run.last["transitions"]),
        wins=_wins(argmax),
        episodes=expected,
        sampled_wins=_wins(sampled),
        sampled_episodes=expected,
        mean_return=fmean(one["return"] for one in argmax),
        mean_length=fmean(one["length"] for one in argmax),
        seconds=seconds,
        phases={name: run.last_value(f"seconds/{name}") or 0.0 for name in PHASES},
        environment_version=version,
        majepa_version=str(run.versions.get("majepa", "unknown")),
        curve=_curve(run),
        folder=place,
    )


def _final_episodes(run: Run, actions: Actions, expected: int) -> list[Record]:
    """The episodes behind the last line of the metrics: all of them, once, and in agreement."""
    episodes = run.episodes_of(run.last, actions)
    numbers = {one for episode in episodes if isinstance(one := episode.get("episode"), int)}
    if len(episodes) != expected or numbers != set(range(expected)):
        raise _Damage(
            f"{EVALUATIONS} holds {len(numbers)} different final {actions} episodes in "
            f"{counted(len(episodes), 'line')}, not {expected}"
        )
    if not all(_is_whole(one) for one in episodes):
        raise _Damage(f"{EVALUATIONS} holds a final {actions} episode without its outcome")
    name = "evaluation/win_rate" if actions == "argmax" else "evaluation/sampled_win_rate"
    logged, wins = finite(run.last.get(name)), _wins(episodes)
    if logged is None or abs(logged - wins / expected) > 1e-6:
        raise _Damage(f"{METRICS} has {name} = {logged}, but {EVALUATIONS} {wins} of {expected}")
    return episodes


def _is_whole(episode: Record) -> bool:
    numbers = (finite(episode.get("return")), finite(episode.get("length")))
    return isinstance(episode.get("won"), bool) and None not in numbers


def _wins(episodes: Sequence[Record]) -> int:
    return sum(one["won"] for one in episodes)


def _curve(run: Run) -> tuple[Point, ...]:
    return tuple(
        Point(int(record["transitions"]), rate, int(finite(record.get("evaluation/episodes")) or 0))
        for record, rate in run.values("evaluation/win_rate")
    )


def _notes(read: Sequence[_Finished | Gap | _Foreign]) -> list[str]:
    """Lines that could not be read; what else a run folder may lack does not matter here."""
    return [
        f"{one.result.folder}: {note}"
        for one in read
        if isinstance(one, _Finished)
        for note in one.notes
        if note.startswith((METRICS, EVALUATIONS))
    ]


def _strangers(grid: Grid, folder: Path) -> list[str]:
    """Folders beside those of the grid's cells."""
    known = {cell.name for cell in grid.cells()}
    there = sorted(path.name for path in (folder / CELLS).glob("*") if path.is_dir())
    return [f"{CELLS}/{name} is no cell of this grid." for name in there if name not in known]


def _require_one_version(finished: Sequence[Result]) -> None:
    versions = collections.Counter(one.environment_version for one in finished)
    if len(versions) < 2:
        return
    examples = {one.environment_version: one.cell.name for one in reversed(finished)}
    seen = ", ".join(
        f"{version} ({counted(count, 'cell')}, such as {examples[version]})"
        for version, count in versions.most_common()
    )
    raise ResultsError(
        f"the cells were run in different versions of the environment: {seen}; "
        "run those of the older version again"
    )
