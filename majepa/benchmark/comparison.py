"""Our means against published ones: the same order, and how far apart."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from ..stats import mean_absolute_difference, spearman
from .published import SOURCES
from .results import Results
from .scores import PUBLISHED, Row, Score
from .tables import NOTHING, decimal, markdown_rows, markdown_text

MEAN_OF_ALL = f"mean of {' and '.join(SOURCES)}"


@dataclasses.dataclass(frozen=True)
class Pair:
    """One method on one map, measured by us and by others, in per cent."""

    map: str
    title: str
    ours: float
    published: float
    seeds: int
    planned: int


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How well numbers of ours go with published ones."""

    cells: int
    spearman: float | None
    """None where either side has no two different numbers, or there are but two cells."""
    mean_absolute_difference: float | None
    mean_difference: float | None
    """Ours less published: above zero where our world is the easier one."""


@dataclasses.dataclass(frozen=True)
class MapOrder:
    """The methods of one map, best first; `=` joins those with equal means."""

    map: str
    ours: str
    published: str
    agreeing: int
    """Pairs of methods in the same order on both sides, of those that the published order tells
    apart."""
    decided: int


@dataclasses.dataclass(frozen=True)
class Comparison:
    """With one published table."""

    source: str
    pairs: tuple[Pair, ...]

    @property
    def over_all(self) -> Agreement:
        return _agreement(self.pairs)

    @property
    def over_nonzero(self) -> Agreement:
        """Without cells that were published as 0, where agreeing is easy."""
        return _agreement([pair for pair in self.pairs if pair.published > 0])

    @property
    def by_method(self) -> dict[str, Agreement]:
        """Whether the same maps are hard for a method."""
        titles = dict.fromkeys(pair.title for pair in self.pairs)
        return {
            title: _agreement([pair for pair in self.pairs if pair.title == title])
            for title in titles
        }

    @property
    def orders(self) -> list[MapOrder]:
        """Of the maps on which at least two methods can be compared."""
        by_map: dict[str, list[Pair]] = {}
        for pair in self.pairs:
            by_map.setdefault(pair.map, []).append(pair)
        return [_order(name, pairs) for name, pairs in by_map.items() if len(pairs) > 1]


def compare(rows: Sequence[Row]) -> list[Comparison]:
    """With every published table, and with the mean of them where all have a number."""
    scores = [score for row in rows for score in row if score.mean is not None]
    found = [
        Comparison(source, tuple(_pairs(scores, [source]))) for source in [*SOURCES]
    ] + [Comparison(MEAN_OF_ALL, tuple(_pairs(scores, list(SOURCES))))]  # fmt: skip
    return [one for one in found if one.pairs]


def comparison_data(results: Results, comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """For a JSON file; rates are in per cent."""
    return {
        "grid": results.grid.name,
        "ours": results.world,
        "environment_version": results.environment_version,
        "published": PUBLISHED,
        "sources": [
            {
                "source": one.source,
                "all": dataclasses.asdict(one.over_all),
                "nonzero": dataclasses.asdict(one.over_nonzero),
                "methods": {
                    title: dataclasses.asdict(agreement)
                    for title, agreement in one.by_method.items()
                },
                "maps": [dataclasses.asdict(order) for order in one.orders],
                "cells": [dataclasses.asdict(pair) for pair in one.pairs],
            }
            for one in comparisons
        ],
    }


def comparison_markdown(results: Results, comparisons: Sequence[Comparison]) -> str:
    parts = [
        "# Ours against published numbers",
        f"Our means over seeds in the {results.world}, theirs in real StarCraft II: another world. "
        "Agreement says that the two rank alike, not that one can stand for the other.",
    ]
    if not comparisons:
        parts.append("There is nothing to compare yet.")
    for one in comparisons:
        parts += [f"## {PUBLISHED}: {one.source}", _agreements(one)]
        if one.orders:
            parts.append(_orders(one.orders))
    return "\n\n".join(parts) + "\n"


def subsets(comparison: Comparison) -> Mapping[str, Agreement]:
    """Every agreement of a comparison under its name."""
    return {
        "all cells": comparison.over_all,
        "published above 0": comparison.over_nonzero,
        **comparison.by_method,
    }


def correlation(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}".replace("-", "−")


def signed(value: float | None) -> str:
    return NOTHING if value is None else f"{value:+.1f}".replace("-", "−")


def _pairs(scores: Sequence[Score], sources: Sequence[str]) -> list[Pair]:
    """Where every one of the sources has a number, with the mean of them."""
    pairs = []
    for score in scores:
        rates = [rate for source in sources if (rate := score.published(source)) is not None]
        if len(rates) == len(sources) and score.mean is not None:
            published = fmean(rate.mean for rate in rates)
            pairs.append(
                Pair(score.map, score.title, score.mean, published, score.seeds, score.planned)
            )
    return pairs


def _agreement(pairs: Sequence[Pair]) -> Agreement:
    ours = [pair.ours for pair in pairs]
    theirs = [pair.published for pair in pairs]
    return Agreement(
        len(pairs),
        spearman(ours, theirs) if len(pairs) > 2 else None,
        mean_absolute_difference(ours, theirs),
        fmean(pair.ours - pair.published for pair in pairs) if pairs else None,
    )


def _order(name: str, pairs: Sequence[Pair]) -> MapOrder:
    ours = {pair.title: pair.ours for pair in pairs}
    theirs = {pair.title: pair.published for pair in pairs}
    decided = [
        (a, b) if theirs[a] > theirs[b] else (b, a)
        for a, b in itertools.combinations(ours, 2)
        if theirs[a] != theirs[b]
    ]
    agreeing = sum(ours[better] > ours[worse] for better, worse in decided)
    return MapOrder(name, _ranked(ours), _ranked(theirs), agreeing, len(decided))


def _ranked(means: Mapping[str, float]) -> str:
    order = sorted(means, key=lambda title: -means[title])
    groups = itertools.groupby(order, key=lambda title: round(means[title], 6))
    return " > ".join(" = ".join(titles) for _, titles in groups)


def _agreements(comparison: Comparison) -> str:
    heads = ["over", "cells", "Spearman", "mean absolute difference", "ours − published"]
    lines = [
        [
            markdown_text(name),
            str(one.cells),
            correlation(one.spearman),
            decimal(one.mean_absolute_difference),
            signed(one.mean_difference),
        ]
        for name, one in subsets(comparison).items()
    ]
    return markdown_rows(heads, lines)


def _orders(orders: Sequence[MapOrder]) -> str:
    lines = [
        [
            one.map,
            markdown_text(one.ours),
            markdown_text(one.published),
            f"{one.agreeing} of {one.decided}",
        ]
        for one in orders
    ]
    heads = ["map", "ours, best first", "published", "pairs in the same order"]
    return markdown_rows(heads, lines, align="---")
