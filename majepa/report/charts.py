"""Charts as inline SVG: lines with bands, stacked histograms, one bar of parts, an interval.

Colours, fonts and line widths are the stylesheet's; a chart only names classes. A line carries its
values as `data-x` and `data-y` for the read-out under the pointer.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Literal

from .html import Markup, joined, tag
from .numbers import (
    Unit,
    enclosing_ticks,
    linear_ticks,
    log_labels,
    log_ticks,
    percent,
    reach,
    tick_labels,
    written,
)

MOST_POINTS = 400
"""Of one line; more are thinned, keeping the extremes."""
MOST_DOTS = 24
"""A line of more points shows none of them singly."""
CHARACTER = 5.9
"""Mean width of a character of a tick's label, in pixels of the drawing."""
BOLD_CHARACTER = 6.7
LABEL_HEIGHT = 12.0


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
class Size:
    width: float
    height: float
    x_ticks: int
    y_ticks: int


LARGE = Size(460, 270, x_ticks=5, y_ticks=5)
SMALL = Size(330, 168, x_ticks=3, y_ticks=4)


class Scale:
    """From values to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float, is_log: bool = False):
        self.low, self.high, self.start, self.end = low, high, start, end
        self._shape: Callable[[float], float] = math.log10 if is_log else float

    def __call__(self, value: float) -> float:
        low, high = self._shape(self.low), self._shape(self.high)
        return self.start + (self._shape(value) - low) / (high - low) * (self.end - self.start)


def line_chart(series: Sequence[Series], x: Axis, y: Axis, size: Size, describes: str) -> Markup:
    """Lines over a common axis, each labelled where it ends."""
    if y.is_log:
        series = [kept for one in series if (kept := _positive(one)).x]
    series = [one for one in series if len(one.x)]
    if not series:
        return tag("p", "Nothing to draw: no value above 0.", class_="absent")
    x_domain = x.domain or _x_domain(series, x, size.x_ticks)
    y_values = _y_ticks(series, y, size.y_ticks)
    y_labels = log_labels(y_values) if y.is_log else tick_labels(y_values, y.unit)
    left = 8 + CHARACTER * max((len(label) for label in y_labels), default=0)
    labels = [one.label for one in series] if len(series) > 1 else []
    right = size.width - 10 - BOLD_CHARACTER * max((len(label) for label in labels), default=0)
    bottom = size.height - (34 if x.title else 20)
    across = Scale(*x_domain, left, right)
    up = Scale(y_values[0], y_values[-1], bottom, 8, y.is_log)
    x_values = linear_ticks(*x_domain, size.x_ticks, x.unit)
    frame = joined(
        _horizontal_grid(up, y_values, y_labels, left, right),
        _bottom_axis(across, x_values, tick_labels(x_values, x.unit), bottom),
        _text(x.title, right, size.height - 4, "axis-title", "end") if x.title else None,
    )
    drawn = [_thinned(one) for one in series]
    bands = [_band(one, across, up) for one in drawn if one.low is not None]
    lines = [_line(one, across, up, x, y) for one in drawn]
    return tag(
        "svg",
        frame,
        *bands,
        *lines,
        _end_labels(series, up, right + 5, bottom) if labels else None,
        tag("line", class_="cursor", x1=0, x2=0, y1=8, y2=_pixel(bottom), visibility="hidden"),
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


def histogram(
    groups: Sequence[tuple[str, str, Sequence[float]]],
    edges: Sequence[float],
    title: str,
    size: Size,
    describes: str,
) -> Markup:
    """How often values occur between edges; groups of (label, style, values) are stacked."""
    counts = [_counts(group, edges) for _, _, group in groups]
    tallest = max(1, *(sum(column) for column in zip(*counts, strict=True)))
    y_values = [tick for tick in enclosing_ticks(0, tallest, size.y_ticks) if tick == int(tick)]
    left, right, bottom = 34.0, size.width - 10, size.height - 34
    across = Scale(edges[0], edges[-1], left, right)
    up = Scale(0, y_values[-1], bottom, 8)
    x_values = linear_ticks(edges[0], edges[-1], size.x_ticks)
    return tag(
        "svg",
        _horizontal_grid(up, y_values, tick_labels(y_values), left, right),
        *_columns(groups, counts, edges, across, up),
        _bottom_axis(across, x_values, tick_labels(x_values), bottom),
        _text(title, right, size.height - 4, "axis-title", "end"),
        class_="chart",
        viewBox=f"0 0 {size.width:g} {size.height:g}",
        role="img",
        aria_label=describes,
    )


def bin_edges(values: Sequence[float], is_whole: bool) -> list[float]:
    """Round edges from zero, or below, past all values; whole numbers lie between theirs."""
    low, high = min(0.0, *values), max(1.0, *values)
    first, second, *_ = linear_ticks(low, high, 40)
    step = second - first
    if is_whole:
        step = max(1.0, step)
    start = math.floor(low / step) * step
    count = math.ceil((high - start) / step - 1e-9) + is_whole
    return [round(start + index * step - 0.5 * is_whole, 12) for index in range(count + 1)]


def parts_bar(parts: Sequence[tuple[str, str, float]], describes: str) -> Markup:
    """One bar of (label, style, share), the shares adding up to 1."""
    width, height, start = LARGE.width, 26.0, 0.0
    pieces = []
    for label, style, share in parts:
        long = share * width
        note = percent(share) if long > 44 else ""
        pieces.append(
            tag(
                "g",
                tag("title", f"{label}: {percent(share)}"),
                tag("rect", x=_pixel(start), y=0, width=_pixel(long), height=height, class_=style),
                _text(note, start + long / 2, 17, "on-bar", "middle") if note else None,
            )
        )
        start += long
    box = f"0 0 {width:g} {height:g}"
    return tag("svg", *pieces, class_="chart parts", viewBox=box, role="img", aria_label=describes)


def interval_strip(rate: float, low: float, high: float, style: str) -> Markup:
    """A rate and its interval on a line from 0 to 1."""
    along = Scale(0, 1, 6, 314)
    ticks = [
        tag("line", class_="grid", x1=_pixel(along(at)), x2=_pixel(along(at)), y1=3, y2=21)
        for at in (0, 0.25, 0.5, 0.75, 1)
    ]
    return tag(
        "svg",
        *ticks,
        tag("line", class_="grid", x1=6, x2=314, y1=12, y2=12),
        tag("line", class_=f"interval {style}", x1=_pixel(along(low)), x2=_pixel(along(high)),
            y1=12, y2=12),
        tag("circle", class_=f"dot {style}", cx=_pixel(along(rate)), cy=12, r=5),
        class_="chart strip",
        viewBox="0 0 320 24",
        role="img",
        aria_label=f"{percent(rate)}, 95 % interval {percent(low)} to {percent(high)}",
    )  # fmt: skip


def _horizontal_grid(
    up: Scale, values: Sequence[float], labels: Sequence[str], left: float, right: float
) -> Markup:
    parts = []
    for value, label in zip(values, labels, strict=True):
        height = _pixel(up(value))
        parts.append(
            tag("line", class_="grid", x1=_pixel(left), x2=_pixel(right), y1=height, y2=height)
        )
        parts.append(_text(label, left - 5, up(value) + 3.5, "tick", "end"))
    return joined(*parts)


def _bottom_axis(
    across: Scale, values: Sequence[float], labels: Sequence[str], bottom: float
) -> Markup:
    line = tag(
        "line", class_="axis", x1=_pixel(across.start), x2=_pixel(across.end),
        y1=_pixel(bottom), y2=_pixel(bottom),
    )  # fmt: skip
    ticks = []
    free_from = -math.inf
    for value, label in zip(values, labels, strict=True):
        at, half = across(value), CHARACTER * len(label) / 2
        if at - half < free_from:
            continue
        anchor = "end" if at + half > across.end + 8 else "middle"
        shift = 8 if anchor == "end" else 0
        ticks.append(
            tag("line", class_="axis", x1=_pixel(at), x2=_pixel(at), y1=_pixel(bottom),
                y2=_pixel(bottom + 3))
        )  # fmt: skip
        ticks.append(_text(label, at + shift, bottom + 14, "tick", anchor))
        free_from = at + half + 6
    return joined(line, *ticks)


def _line(one: Series, across: Scale, up: Scale, x: Axis, y: Axis) -> Markup:
    places = [(across(a), up(b)) for a, b in zip(one.x, one.y, strict=True)]
    dots = []
    if len(places) <= MOST_DOTS:
        for (left, top), a, b in zip(places, one.x, one.y, strict=True):
            note = f"{one.label}: {written(b, y.unit)} at {written(a, x.unit)}"
            dots.append(
                tag("circle", tag("title", note), class_="dot", cx=_pixel(left), cy=_pixel(top),
                    r=2)
            )  # fmt: skip
    return tag(
        "g",
        tag("polyline", points=_points(places)),
        *dots,
        class_=f"series {one.style}",
        data_label=one.label,
        data_x=" ".join(f"{value:.10g}" for value in one.x),
        data_y=" ".join(f"{value:.5g}" for value in one.y),
    )


def _band(one: Series, across: Scale, up: Scale) -> Markup:
    lows = [(across(a), up(b)) for a, b in zip(one.x, one.low or (), strict=True)]
    highs = [(across(a), up(b)) for a, b in zip(one.x, one.high or (), strict=True)]
    return tag("polygon", class_=f"band {one.style}", points=_points([*highs, *reversed(lows)]))


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
            _text(one.label, x, top, f"end-label {one.style}", "start")
            for one, top in zip(order, tops, strict=True)
        )
    )


def _columns(
    groups: Sequence[tuple[str, str, Sequence[float]]],
    counts: Sequence[Sequence[int]],
    edges: Sequence[float],
    across: Scale,
    up: Scale,
) -> list[Markup]:
    drawn = []
    for index, (a, b) in enumerate(itertools.pairwise(edges)):
        below = 0
        for (label, style, _), column in zip(groups, counts, strict=True):
            count = column[index]
            if count == 0:
                continue
            top, bottom = up(below + count), up(below)
            note = f"{label}: {count} from {written(a)} to {written(b)}"
            drawn.append(
                tag("rect", tag("title", note), class_=f"column {style}",
                    x=_pixel(across(a) + 0.5), y=_pixel(top),
                    width=_pixel(max(1.0, across(b) - across(a) - 1)),
                    height=_pixel(bottom - top))
            )  # fmt: skip
            below += count
    return drawn


def _counts(values: Sequence[float], edges: Sequence[float]) -> list[int]:
    """Values of every bin; a bin has its upper edge, the first one its lower edge, too."""
    counts = [0] * (len(edges) - 1)
    slack = 1e-6 * (edges[1] - edges[0])
    for value in values:
        counts[max(0, bisect.bisect_left(edges, value - slack) - 1)] += 1
    return counts


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


Anchor = Literal["start", "middle", "end"]


def _text(content: str, x: float, y: float, style: str, anchor: Anchor) -> Markup:
    return tag("text", content, class_=style, x=_pixel(x), y=_pixel(y), text_anchor=anchor)


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{_pixel(x)},{_pixel(y)}" for x, y in places)


def _pixel(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
