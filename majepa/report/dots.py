"""Single values with intervals, one to a row, and values against values, as inline SVG."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .charts import Axis
from .drawing import CHARACTER, Scale, Size, bottom_axis, horizontal_grid, pixel, text
from .html import Markup, tag
from .numbers import linear_ticks, tick_labels, written

ROW = 26.0
LABEL_CHARACTER = 7.0


@dataclasses.dataclass(frozen=True)
class Dot:
    """One row: a value, and the interval that it lies in where that is known."""

    label: str
    value: float
    style: str
    low: float | None = None
    high: float | None = None


@dataclasses.dataclass(frozen=True)
class Point:
    x: float
    y: float
    style: str
    note: str
    """What it is, under the pointer."""


def dot_plot(
    dots: Sequence[Dot],
    axis: Axis,
    width: float,
    describes: str,
    reference: float | None = None,
) -> Markup:
    """Rows on one axis, whose domain must be given; `reference` is a value to hold them against."""
    notes = [_note(dot, axis) for dot in dots]
    low, high = axis.domain or (0.0, 1.0)
    left = 10 + LABEL_CHARACTER * max(len(dot.label) for dot in dots)
    right = width - 10 - CHARACTER * max(len(note) for note in notes)
    bottom = 6 + ROW * len(dots)
    across = Scale(low, high, left, right)
    ticks = linear_ticks(low, high, 2)
    return tag(
        "svg",
        *(_upright(across(tick), bottom, "grid") for tick in ticks),
        bottom_axis(across, ticks, tick_labels(ticks, axis.unit), bottom),
        _upright(across(reference), bottom, "reference") if reference is not None else None,
        *(
            _dot_row(dot, note, across, 6 + ROW * (index + 0.5), right + 10)
            for index, (dot, note) in enumerate(zip(dots, notes, strict=True))
        ),
        text(axis.title, right, bottom + 28, "axis-title", "end") if axis.title else None,
        class_="chart dot-plot",
        viewBox=f"0 0 {width:g} {bottom + (34 if axis.title else 20):g}",
        role="img",
        aria_label=describes,
    )


def scatter(points: Sequence[Point], x: Axis, y: Axis, size: Size, describes: str) -> Markup:
    """Both axes need a domain; the diagonal, where both are equal, is drawn."""
    (x_low, x_high), (y_low, y_high) = x.domain or (0.0, 1.0), y.domain or (0.0, 1.0)
    y_values = linear_ticks(y_low, y_high, size.y_ticks)
    x_values = linear_ticks(x_low, x_high, size.x_ticks)
    y_labels = tick_labels(y_values, y.unit)
    left = 8 + CHARACTER * max(len(label) for label in y_labels)
    right, top, bottom = size.width - 10, 22.0, size.height - 34
    across, up = Scale(x_low, x_high, left, right), Scale(y_low, y_high, bottom, top)
    from_, to = max(x_low, y_low), min(x_high, y_high)
    return tag(
        "svg",
        horizontal_grid(up, y_values, y_labels, left, right),
        bottom_axis(across, x_values, tick_labels(x_values, x.unit), bottom),
        tag("line", class_="reference", x1=pixel(across(from_)), x2=pixel(across(to)),
            y1=pixel(up(from_)), y2=pixel(up(to))),
        *(
            tag("circle", tag("title", point.note), class_=f"point {point.style}",
                cx=pixel(across(point.x)), cy=pixel(up(point.y)), r=4.5)
            for point in points
        ),
        text(y.title, 0, 10, "axis-title", "start"),
        text(x.title, right, size.height - 4, "axis-title", "end"),
        class_="chart scatter",
        viewBox=f"0 0 {size.width:g} {size.height:g}",
        role="img",
        aria_label=describes,
    )  # fmt: skip


def _dot_row(dot: Dot, note: str, across: Scale, height: float, beside: float) -> Markup:
    at = pixel(height)
    interval = None
    if dot.low is not None and dot.high is not None:
        ends = {"x1": pixel(across(dot.low)), "x2": pixel(across(dot.high))}
        interval = tag("line", class_="interval", y1=at, y2=at, **ends)
    return tag(
        "g",
        tag("title", f"{dot.label}: {note}"),
        text(dot.label, 0, height + 4, "row-label", "start"),
        interval,
        tag("circle", class_="dot", cx=pixel(across(dot.value)), cy=at, r=4),
        text(note, beside, height + 3.5, "value-label", "start"),
        class_=dot.style,
    )


def _note(dot: Dot, axis: Axis) -> str:
    value = written(dot.value, axis.unit)
    if dot.low is None or dot.high is None:
        return value
    return f"{value} [{written(dot.low, axis.unit)}, {written(dot.high, axis.unit)}]"


def _upright(x: float, bottom: float, style: str) -> Markup:
    return tag("line", class_=style, x1=pixel(x), x2=pixel(x), y1=2, y2=pixel(bottom))
