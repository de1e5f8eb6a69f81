"""What every drawing is made of: sizes, scales, axes and text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

from .html import Markup, joined, tag

CHARACTER = 5.9
"""Mean width of a character of a tick's label, in pixels of the drawing."""
Anchor = Literal["start", "middle", "end"]


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


def horizontal_grid(
    up: Scale, values: Sequence[float], labels: Sequence[str], left: float, right: float
) -> Markup:
    parts = []
    for value, label in zip(values, labels, strict=True):
        height = pixel(up(value))
        parts.append(
            tag("line", class_="grid", x1=pixel(left), x2=pixel(right), y1=height, y2=height)
        )
        parts.append(text(label, left - 5, up(value) + 3.5, "tick", "end"))
    return joined(*parts)


def bottom_axis(
    across: Scale, values: Sequence[float], labels: Sequence[str], bottom: float
) -> Markup:
    line = tag(
        "line", class_="axis", x1=pixel(across.start), x2=pixel(across.end),
        y1=pixel(bottom), y2=pixel(bottom),
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
            tag("line", class_="axis", x1=pixel(at), x2=pixel(at), y1=pixel(bottom),
                y2=pixel(bottom + 3))
        )  # fmt: skip
        ticks.append(text(label, at + shift, bottom + 14, "tick", anchor))
        free_from = at + half + 6
    return joined(line, *ticks)


def text(content: str, x: float, y: float, style: str, anchor: Anchor) -> Markup:
    return tag("text", content, class_=style, x=pixel(x), y=pixel(y), text_anchor=anchor)


def points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{pixel(x)},{pixel(y)}" for x, y in places)


def pixel(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
