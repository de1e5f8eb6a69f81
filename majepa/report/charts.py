"""Lines with bands over a common axis, as inline SVG.

Colours, fonts and line widths are the stylesheet's; a chart only names classes. A line carries its
values as `data-x` and `data-y` for the read-out under the pointer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from .drawing import (
    CHARACTER,
    Scale,
    Size,
    bottom_axis,
    horizontal_grid,
    pixel,
    points,
    text,
)
from .html import Markup, joined, tag
from .numbers import (
    Unit,
    enclosing_ticks,
    linear_ticks,
    log_labels,
    log_ticks,
    reach,
    tick_labels,
    written,
)

MOST_POINTS = 400
"""Of one line; more are thinned, keeping the extremes."""
MOST_DOTS = 24
"""A line of more points shows none of them singly."""
BOLD_CHARACTER = 6.7
LABEL_HEIGHT = 12.0
MARK_LENGTH = 60.0
Shape = Literal["ring", "diamond"]


@dataclasses.dataclass(frozen=True)
class Series:
    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: str
    """CSS class with the colour."""
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclasses.dataclass(frozen=True)
class Axis:
    unit: Unit = "number"
    title: str = ""
    is_log: bool = False
    domain: tuple[float, float] | None = None
    """Fixed ends; none takes them from the data."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """A value from elsewhere to hold a line against: a dotted line that ends in a hollow shape."""

    label: str
    """Under the pointer."""
    x: float
    y: float
    style: str
    shape: Shape = "ring"


def line_chart(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    size: Size,
    describes: str,
    marks: Sequence[Mark] = (),
) -> Markup:
    """Lines over a common axis, each labelled where it ends; marks must lie on the axes."""
    if y.is_log:
        series = [kept for one in series if (kept := _positive(one)).x]
    series = [one for one in series if len(one.x)]
    if not series:
        return tag("p", "Nothing to draw: no value above 0.", class_="absent")
    x_domain = x.domain or _x_domain(series, x, size.x_ticks)
    y_values = _y_ticks(series, y, size.y_ticks)
    y_labels = log_labels(y_values) if y.is_log else tick_labels(y_values, y.unit)
    left = 8 + CHARACTER * max((len(label) for label in y_labels), default=0)
    labels = [one.label for one in series] if len(series) > 1 or marks else []
    right = size.width - 10 - BOLD_CHARACTER * max((len(label) for label in labels), default=0)
    bottom = size.height - (34 if x.title else 20)
    across = Scale(*x_domain, left, right)
    up = Scale(y_values[0], y_values[-1], bottom, 8, y.is_log)
    x_values = linear_ticks(*x_domain, size.x_ticks, x.unit)
    frame = joined(
        horizontal_grid(up, y_values, y_labels, left, right),
        bottom_axis(across, x_values, tick_labels(x_values, x.unit), bottom),
        text(x.title, right, size.height - 4, "axis-title", "end") if x.title else None,
    )
    drawn = [_thinned(one) for one in series]
    bands = [_band(one, across, up) for one in drawn if one.low is not None]
    lines = [_line(one, across, up, x, y) for one in drawn]
    return tag(
        "svg",
        frame,
        *bands,
        *lines,
        *(_mark(mark, across, up, y) for mark in marks),
        _end_labels(series, up, right + 7, bottom) if labels else None,
        tag("line", class_="cursor", x1=0, x2=0, y1=8, y2=pixel(bottom), visibility="hidden"),
        class_="chart line-chart",
        viewBox=f"0 0 {size.width:g} {size.height:g}",
        role="img",
        aria_label=describes,
        data_x_unit=x.unit,
        data_y_unit=y.unit,
    )


def _x_domain(series: Sequence[Series], axis: Axis, count: int) -> tuple[float, float]:
    """From zero: nothing on this page begins before its run does."""
    high = _extent([one.x for one in series])[1]
    return 0.0, reach(high, count, axis.unit) if high > 0 else 1.0


def _y_ticks(series: Sequence[Series], axis: Axis, count: int) -> list[float]:
    """Around all values, and with zero where they come anywhere near it; the ends are the axis'."""
    if axis.domain:
        return linear_ticks(*axis.domain, count)
    bounds = [values for one in series for values in (one.y, one.low, one.high) if values]
    low, high = _extent(bounds)
    if axis.is_log:
        return log_ticks(low, high, count)
    if 0 < low < 0.6 * high:
        low = 0.0
    if low < 0.6 * high < high <= 0:
        high = 0.0
    return enclosing_ticks(*_padded_if_flat(low, high), count)


def _line(one: Series, across: Scale, up: Scale, x: Axis, y: Axis) -> Markup:
    places = [(across(a), up(b)) for a, b in zip(one.x, one.y, strict=True)]
    dots = []
    if len(places) <= MOST_DOTS:
        for (left, top), a, b in zip(places, one.x, one.y, strict=True):
            note = f"{one.label}: {written(b, y.unit)} at {written(a, x.unit)}"
            dots.append(
                tag("circle", tag("title", note), class_="dot", cx=pixel(left), cy=pixel(top),
                    r=2)
            )  # fmt: skip
    return tag(
        "g",
        tag("polyline", points=points(places)),
        *dots,
        class_=f"series {one.style}",
        data_label=one.label,
        data_x=" ".join(f"{value:.10g}" for value in one.x),
        data_y=" ".join(f"{value:.5g}" for value in one.y),
    )


def _band(one: Series, across: Scale, up: Scale) -> Markup:
    lows = [(across(a), up(b)) for a, b in zip(one.x, one.low or (), strict=True)]
    highs = [(across(a), up(b)) for a, b in zip(one.x, one.high or (), strict=True)]
    return tag("polygon", class_=f"band {one.style}", points=points([*highs, *reversed(lows)]))


def _mark(mark: Mark, across: Scale, up: Scale, y: Axis) -> Markup:
    at, height = across(mark.x), pixel(up(mark.y))
    start = pixel(max(across.start, at - MARK_LENGTH))
    return tag(
        "g",
        tag("title", f"{mark.label}: {written(mark.y, y.unit)}"),
        tag("line", x1=start, x2=pixel(at), y1=height, y2=height),
        hollow(mark.shape, at, up(mark.y)),
        class_=f"mark {mark.style}",
    )


def hollow(shape: Shape, x: float, y: float) -> Markup:
    if shape == "ring":
        return tag("circle", cx=pixel(x), cy=pixel(y), r=3.5)
    corners = [(x, y - 4.5), (x + 4.5, y), (x, y + 4.5), (x - 4.5, y)]
    return tag("polygon", points=points(corners))


def _end_labels(series: Sequence[Series], up: Scale, x: float, bottom: float) -> Markup:
    """Names beside the ends of lines, moved apart where they would touch."""
    order = sorted(series, key=lambda one: up(one.y[-1]))
    tops: list[float] = []
    for one in order:
        lowest = tops[-1] + LABEL_HEIGHT if tops else 10.0
        tops.append(max(up(one.y[-1]) + 3.5, lowest))
    overflow = tops[-1] - (bottom + 3.5)
    if overflow > 0:
        for index in reversed(range(len(tops))):
            ceiling = bottom + 3.5 if index == len(tops) - 1 else tops[index + 1] - LABEL_HEIGHT
            tops[index] = min(tops[index], ceiling)
    return joined(
        *(
            text(one.label, x, top, f"end-label {one.style}", "start")
            for one, top in zip(order, tops, strict=True)
        )
    )


def _extent(many: Sequence[Sequence[float]]) -> tuple[float, float]:
    return min(min(values) for values in many), max(max(values) for values in many)


def _padded_if_flat(low: float, high: float) -> tuple[float, float]:
    if high - low > 1e-12 * max(abs(low), abs(high), 1e-300):
        return low, high
    return (low - 0.5 * abs(low), high + 0.5 * abs(high)) if low else (0.0, 1.0)


def _positive(one: Series) -> Series:
    """What a logarithmic axis can show."""
    kept = [(a, b) for a, b in zip(one.x, one.y, strict=True) if b > 0]
    return Series(one.label, [a for a, _ in kept], [b for _, b in kept], one.style)


def _thinned(one: Series) -> Series:
    """At most `MOST_POINTS` points: the lowest and highest of equal stretches of the line."""
    if len(one.x) <= MOST_POINTS:
        return one
    stretches = MOST_POINTS // 2 - 1
    kept = {0, len(one.x) - 1}
    for index in range(stretches):
        begin = index * len(one.x) // stretches
        end = (index + 1) * len(one.x) // stretches
        kept.add(min(range(begin, end), key=lambda at: one.y[at]))
        kept.add(max(range(begin, end), key=lambda at: one.y[at]))
    order = sorted(kept)

    def pick(values: Sequence[float]) -> list[float]:
        return [values[at] for at in order]

    low = pick(one.low) if one.low is not None else None
    high = pick(one.high) if one.high is not None else None
    return Series(one.label, pick(one.x), pick(one.y), one.style, low, high)
