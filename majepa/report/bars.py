"""Histograms, one bar of parts, and an interval, as inline SVG."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

from .drawing import LARGE, Scale, Size, bottom_axis, horizontal_grid, pixel, text
from .html import Markup, tag
from .numbers import enclosing_ticks, linear_ticks, percent, tick_labels, written


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
        horizontal_grid(up, y_values, tick_labels(y_values), left, right),
        *_columns(groups, counts, edges, across, up),
        bottom_axis(across, x_values, tick_labels(x_values), bottom),
        text(title, right, size.height - 4, "axis-title", "end"),
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
                tag("rect", x=pixel(start), y=0, width=pixel(long), height=height, class_=style),
                text(note, start + long / 2, 17, "on-bar", "middle") if note else None,
            )
        )
        start += long
    box = f"0 0 {width:g} {height:g}"
    return tag("svg", *pieces, class_="chart parts", viewBox=box, role="img", aria_label=describes)


def interval_strip(rate: float, low: float, high: float, style: str) -> Markup:
    """A rate and its interval on a line from 0 to 1."""
    along = Scale(0, 1, 6, 314)
    ticks = [
        tag("line", class_="grid", x1=pixel(along(at)), x2=pixel(along(at)), y1=3, y2=21)
        for at in (0, 0.25, 0.5, 0.75, 1)
    ]
    return tag(
        "svg",
        *ticks,
        tag("line", class_="grid", x1=6, x2=314, y1=12, y2=12),
        tag("line", class_=f"interval {style}", x1=pixel(along(low)), x2=pixel(along(high)),
            y1=12, y2=12),
        tag("circle", class_=f"dot {style}", cx=pixel(along(rate)), cy=12, r=5),
        class_="chart strip",
        viewBox="0 0 320 24",
        role="img",
        aria_label=f"{percent(rate)}, 95 % interval {percent(low)} to {percent(high)}",
    )  # fmt: skip


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
                    x=pixel(across(a) + 0.5), y=pixel(top),
                    width=pixel(max(1.0, across(b) - across(a) - 1)),
                    height=pixel(bottom - top))
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
