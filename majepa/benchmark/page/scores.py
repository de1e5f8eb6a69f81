"""How good the methods are: the table, the learning curves, and all maps at once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import get_args

from ...report.charts import Mark, Series, Shape, hollow, line_chart
from ...report.document import Section, absent
from ...report.dots import Dot, dot_plot
from ...report.drawing import LARGE
from ...report.html import Markup, joined, tag
from ...report.numbers import percent
from ...report.sections import SHARE, TRANSITIONS
from ..aggregates import Aggregates
from ..curves import mean_curve
from ..published import SOURCES
from ..results import Results
from ..scores import PUBLISHED, Row, Score, sources_of
from ..tables import NOTHING, about_table, bounds, decimal, plain_rate, seeds_note
from .parts import styles_of, wide

SHAPES: Mapping[str, Shape] = dict(zip(SOURCES, itertools.cycle(get_args(Shape)), strict=False))
"""Of the marks of each published table."""


def table_section(results: Results, rows: Sequence[Row]) -> Section:
    titles = [method.title for method in results.grid.methods]
    head = tag(
        "tr", tag("th", "map", scope="col"), *(tag("th", title, scope="col") for title in titles)
    )
    blocks = [_block(f"Ours: {results.world}", rows, [[_score(one) for one in r] for r in rows])]
    for source in sources_of(rows):
        rates = [[tag("td", plain_rate(one.published(source))) for one in row] for row in rows]
        blocks.append(_block(f"{PUBLISHED}: {source}", rows, rates, "elsewhere"))
    table = wide(tag("table", tag("thead", head), *blocks, class_="results"))
    return Section("table", "Win rates", table, about_table(results))


def curves_section(results: Results, rows: Sequence[Row]) -> Section:
    figures = [
        figure
        for env, row in zip(results.maps, rows, strict=True)
        if (figure := _curves(results, env, row)) is not None
    ]
    introduction = (
        "Win rate with argmax actions while training, against real transitions: the mean over the "
        "finished seeds, in a band from the lowest to the highest of them. The last point is the "
        "final evaluation."
    )
    if not figures:
        return Section("curves", "Learning curves", absent("No cell is finished."))
    content = joined(_shapes(sources_of(rows)), tag("div", *figures, class_="large"))
    return Section("curves", "Learning curves", content, introduction)


def aggregates_section(results: Results, aggregates: Aggregates) -> Section:
    title = "Over all maps"
    about = aggregates.describe(len(results.maps))
    if not aggregates.methods:
        return Section("aggregates", title, absent(about))
    styles = styles_of(results.grid.methods)
    means = [
        Dot(one.title, one.iqm, styles[one.title], *(one.interval or (None, None)))
        for one in aggregates.methods
    ]
    figures = [_dots("Interquartile mean of the win rates of single runs", means, None)]
    if aggregates.pairs:
        pairs = [
            Dot(f"{one.title} over {one.other}", one.probability, styles[one.title],
                *(one.interval or (None, None)))
            for one in aggregates.pairs
        ]  # fmt: skip
        figures.append(_dots("Probability of improvement", pairs, 0.5))
    introduction = (
        f"{about} Lines are 95 % bootstrap intervals over seeds, redrawn within each map; they are "
        "left out where a map has one seed. The probability of improvement is that of a run of the "
        "first method to beat one of the second on the same map, ties counted half: at 50 % "
        "neither is ahead."
    )
    return Section("aggregates", title, tag("div", *figures, class_="large"), introduction)


def _block(
    label: str, rows: Sequence[Row], cells: Sequence[Sequence[Markup]], style: str = "ours"
) -> Markup:
    """The rows of one world under its name."""
    head = tag("tr", tag("th", label, scope="rowgroup", colspan=len(rows[0]) + 1), class_="world")
    lines = [
        tag("tr", tag("th", row[0].map, scope="row"), *tds)
        for row, tds in zip(rows, cells, strict=True)
    ]
    return tag("tbody", head, *lines, class_=style)


def _score(score: Score) -> Markup:
    note = seeds_note(score)
    lacking = tag("span", note, class_="lacking") if note else None
    if score.mean is None:
        return tag("td", NOTHING, lacking)
    mean = tag("strong", decimal(score.mean)) if score.is_best else decimal(score.mean)
    return tag(
        "td",
        mean,
        f" ({decimal(score.deviation)})",
        tag("span", bounds(score.interval), class_="bounds"),
        lacking,
        class_="best" if score.is_best else None,
    )


def _curves(results: Results, env: str, row: Row) -> Markup | None:
    series, marks = [], []
    styles = styles_of(results.grid.methods)
    for method, score in zip(results.grid.methods, row, strict=True):
        if not score.results:
            continue
        style = styles[method.title]
        curve = mean_curve(score.results)
        low, high = (curve.low, curve.high) if curve.seeds > 1 else (None, None)
        series.append(Series(method.title, curve.transitions, curve.mean, style, low, high))
        marks += _marks(score, style)
    if not any(one.x for one in series):
        return None
    map_name = results.maps[env]
    published = [f"{mark.label} {percent(mark.y)}" for mark in marks]
    describes = "; ".join([f"Win rates on {map_name} against transitions", *published])
    budget = max(one.budget for score in row for one in score.results)
    x = dataclasses.replace(TRANSITIONS, domain=(0, budget))
    chart = line_chart(series, x, SHARE, LARGE, describes, marks)
    return tag("figure", tag("figcaption", tag("b", map_name)), chart)


def _marks(score: Score, style: str) -> list[Mark]:
    """Published results at our budget, which was theirs."""
    budget = score.results[0].budget
    return [
        Mark(f"{score.title}, published by {source}", budget, rate.mean / 100, style, shape)
        for source, shape in SHAPES.items()
        if (rate := score.published(source)) is not None
    ]


def _shapes(sources: Sequence[str]) -> Markup | None:
    """Which published table a mark is from."""
    if not sources:
        return None
    entries = [
        tag(
            "span",
            tag("svg", hollow(SHAPES[source], 6, 6), class_="mark", viewBox="0 0 12 12"),
            f"{PUBLISHED}: {source}",
        )
        for source in sources
    ]
    return tag("p", *entries, class_="legend entries shapes")


def _dots(title: str, dots: Sequence[Dot], reference: float | None) -> Markup:
    chart = dot_plot(dots, SHARE, LARGE.width, title, reference)
    return tag("figure", tag("figcaption", tag("b", title)), chart)
