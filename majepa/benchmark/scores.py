"""The numbers of a table: each method's win rate on each map, over seeds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from statistics import fmean

from ..config import ConfigError
from ..stats import FEW_SEEDS, Interval, deviation, mean_rate_interval
from .grids import Cell, Method
from .published import SOURCES, TITLES, Rate
from .results import Result, Results, counted

OURS = "win rate with argmax actions after the budget, in per cent"
PUBLISHED = "Real StarCraft II, published"
TOLERANCE = 1e-9
"""Between means that are the same but for rounding."""


@dataclasses.dataclass(frozen=True)
class Score:
    """Of one method on one map, in per cent."""

    cell: Cell
    """With the first seed."""
    results: tuple[Result, ...]
    """Of the seeds that are finished."""
    planned: int
    """Seeds of the grid."""
    is_best: bool = False
    """Whether no other method has a higher mean on this map, and anyone won at all."""

    @property
    def title(self) -> str:
        """Of the method."""
        return self.cell.method.title

    @property
    def map(self) -> str:
        return self.cell.map

    @property
    def seeds(self) -> int:
        return len(self.results)

    @property
    def is_complete(self) -> bool:
        return self.seeds == self.planned

    @property
    def rates(self) -> list[float]:
        return [100 * one.win_rate for one in self.results]

    @property
    def mean(self) -> float | None:
        return fmean(self.rates) if self.results else None

    @property
    def deviation(self) -> float | None:
        return deviation(self.rates)

    @functools.cached_property
    def interval(self) -> Interval | None:
        wins = [one.wins for one in self.results]
        interval = mean_rate_interval(wins, [one.episodes for one in self.results])
        return interval and Interval(100 * interval.low, 100 * interval.high)

    @functools.cached_property
    def is_published(self) -> bool:
        """Whether this is what others ran: the paper's settings and budget under its name."""
        method = self.cell.method
        if method.title != TITLES.get(method.algorithm):
            return False
        plain = Cell(Method(method.name, method.title, method.algorithm), self.cell.env, 0)
        try:
            ours, theirs = self.cell.config(), plain.config()
        except ConfigError:
            return False
        return (ours.algo, ours.steps) == (theirs.algo, theirs.steps)

    def published(self, source: str) -> Rate | None:
        return SOURCES[source].get(self.map, {}).get(self.title) if self.is_published else None


Row = tuple[Score, ...]
"""Of one map, method by method."""


def score_rows(results: Results) -> list[Row]:
    """Map by map in the order of the grid."""
    grid = results.grid
    return [
        _with_best_marked([
            Score(
                Cell(method, env, grid.seeds[0], grid.steps),
                tuple(results.of(method, env)),
                len(grid.seeds),
            )
            for method in grid.methods
        ])
        for env in grid.envs
    ]  # fmt: skip


def sources_of(rows: Sequence[Row]) -> list[str]:
    """Published tables that have a number for any of these."""
    return [
        source
        for source in SOURCES
        if any(score.published(source) is not None for row in rows for score in row)
    ]


def caution(rows: Sequence[Row]) -> str | None:
    """A sentence about how few seeds there are, where they are."""
    counts = [score.seeds for row in rows for score in row if score.seeds]
    if not counts or min(counts) > FEW_SEEDS:
        return None
    if max(counts) == 1:
        return (
            "Every number is from one seed: there is neither a deviation nor an interval over "
            "seeds, and another seed may lie far off."
        )
    which = "All" if min(counts) == max(counts) else "Some"
    least = counted(min(counts), "seed")
    return (
        f"{which} numbers are from only {least}: deviations and intervals over so few are rough, "
        "and differences between methods may be chance."
    )


def _with_best_marked(scores: Sequence[Score]) -> Row:
    means = [score.mean for score in scores if score.mean is not None]
    best = max(means, default=0.0)
    return tuple(
        dataclasses.replace(
            score,
            is_best=best > 0 and score.mean is not None and score.mean >= best - TOLERANCE,
        )
        for score in scores
    )
