"""Ours against published numbers: points, agreement and order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...report.charts import Axis
from ...report.document import Section, absent
from ...report.dots import Point, scatter
from ...report.drawing import Size
from ...report.html import Markup, joined, tag
from ..comparison import Comparison, correlation, signed, subsets
from ..results import Results
from ..scores import PUBLISHED
from ..tables import decimal
from .parts import details, legend, plain_table, styles_of

SQUARE = Size(460, 420, x_ticks=5, y_ticks=5)


def comparison_section(results: Results, comparisons: Sequence[Comparison]) -> Section:
    title = "Against published numbers"
    if not comparisons:
        return Section("published", title, absent("There is nothing to compare."))
    introduction = (
        "Each point is one method on one map: our mean over the finished seeds against the "
        "published one. On the diagonal both are equal. Spearman's correlation compares the order "
        "alone; differences are in percentage points."
    )
    styles = styles_of(results.grid.methods)
    parts = [_comparison(one, results.world, styles) for one in comparisons]
    return Section("published", title, joined(legend(styles), *parts), introduction)


def _comparison(comparison: Comparison, world: str, styles: Mapping[str, str]) -> Markup:
    points = [
        Point(pair.published / 100, pair.ours / 100, styles[pair.title],
              f"{pair.title} on {pair.map}: ours {decimal(pair.ours)}, "
              f"{comparison.source} {decimal(pair.published)}")
        for pair in comparison.pairs
    ]  # fmt: skip
    x = _share(f"{PUBLISHED}: {comparison.source}")
    chart = scatter(points, x, _share(f"ours: {world}"), SQUARE, comparison.source)
    agreements = [
        [name, str(one.cells), correlation(one.spearman), decimal(one.mean_absolute_difference),
         signed(one.mean_difference)]
        for name, one in subsets(comparison).items()
    ]  # fmt: skip
    orders = [
        [one.map, one.ours, one.published, f"{one.agreeing} of {one.decided}"]
        for one in comparison.orders
    ]
    cells = [
        [pair.map, pair.title, decimal(pair.ours), decimal(pair.published),
         signed(pair.ours - pair.published)]
        for pair in comparison.pairs
    ]  # fmt: skip
    return tag(
        "div",
        tag("h3", f"{PUBLISHED}: {comparison.source}"),
        tag(
            "div",
            tag("figure", chart),
            tag(
                "div",
                plain_table(("over", "cells", "Spearman", "mean |difference|", "ours − published"),
                             agreements, "numbers"),
                details("Order of methods on each map",
                         ("map", "ours", "published", "same order"), orders, "texts"),
                details("Every cell", ("map", "method", "ours", "published", "difference"),
                         cells, "numbers"),
            ),
            class_="large",
        ),
    )  # fmt: skip


def _share(title: str) -> Axis:
    return Axis("percent", title, domain=(0, 1))
