"""Methods compared over all maps at once.

Only maps count on which every method with any result has one, so that nobody is ahead for having
met easier maps.
"""

from __future__ import annotations

import dataclasses
import itertools

from ..stats import Interval, Strata, improvement, improvement_interval, iqm, iqm_interval
from .grids import Method
from .results import Results


@dataclasses.dataclass(frozen=True)
class Aggregate:
    """The interquartile mean of a method's win rates, each of one run."""

    title: str
    iqm: float
    interval: Interval | None
    runs: int


@dataclasses.dataclass(frozen=True)
class Improvement:
    """How likely a run of one method beats a run of another on the same map; a tie is half."""

    title: str
    other: str
    probability: float
    interval: Interval | None


@dataclasses.dataclass(frozen=True)
class Aggregates:
    maps: tuple[str, ...]
    methods: tuple[Aggregate, ...]
    pairs: tuple[Improvement, ...]
    """Each two methods once, in the order of the grid."""

    def describe(self, planned: int) -> str:
        """What they are over."""
        if not self.maps:
            return "There is no map yet on which every method that was begun has a result."
        which = "" if len(self.maps) == planned else f": {', '.join(self.maps)}"
        return (
            f"Over {len(self.maps)} of {planned} maps, those on which every method that was begun "
            f"has a result{which}."
        )


def aggregate(results: Results) -> Aggregates:
    begun = [
        method
        for method in results.grid.methods
        if any(results.of(method, env) for env in results.maps)
    ]
    common = [
        env for env in results.maps if begun and all(results.of(method, env) for method in begun)
    ]
    if not common:
        return Aggregates((), (), ())
    strata = {
        method.name: [[one.win_rate for one in results.of(method, env)] for env in common]
        for method in begun
    }
    return Aggregates(
        tuple(results.maps[env] for env in common),
        tuple(_aggregate(method.title, strata[method.name]) for method in begun),
        tuple(
            _improvement(a, b, strata[a.name], strata[b.name])
            for a, b in itertools.combinations(begun, 2)
        ),
    )


def _aggregate(title: str, strata: Strata) -> Aggregate:
    runs = list(itertools.chain(*strata))
    return Aggregate(title, iqm(runs), iqm_interval(strata), len(runs))


def _improvement(one: Method, other: Method, x: Strata, y: Strata) -> Improvement:
    return Improvement(one.title, other.title, improvement(x, y), improvement_interval(x, y))
