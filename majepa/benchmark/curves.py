"""Learning curves of one method on one map, put together over seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import fmean

from .grids import POINTS
from .results import Point, Result


@dataclasses.dataclass(frozen=True)
class Curve:
    """Means over seeds, with the lowest and the highest of them."""

    transitions: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    seeds: int


def mean_curve(results: Sequence[Result]) -> Curve:
    """At the evaluations that all seeds with a curve have; it may be empty."""
    by_place = [_by_place(one) for one in results if one.curve]
    common = sorted(set.intersection(*map(set, by_place))) if by_place else []
    points = [[curve[place] for curve in by_place] for place in common]
    rates = [[point.win_rate for point in seeds] for seeds in points]
    return Curve(
        [fmean(point.transitions for point in seeds) for seeds in points],
        [fmean(values) for values in rates],
        [min(values) for values in rates],
        [max(values) for values in rates],
        len(by_place),
    )


def _by_place(result: Result) -> dict[int, Point]:
    """Evaluations by number on the schedule: seeds need not meet them at the same transition."""
    distance = max(1.0, result.budget / POINTS)
    return {round(point.transitions / distance): point for point in result.curve}
