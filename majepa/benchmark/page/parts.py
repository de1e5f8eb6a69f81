"""What several sections of the page are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...report.html import Markup, tag
from ...report.sections import COLOURS
from ..grids import Method


def styles_of(methods: Sequence[Method]) -> dict[str, str]:
    """The colour of each method, by its title; the same in every chart."""
    return {method.title: COLOURS[index % len(COLOURS)] for index, method in enumerate(methods)}


def legend(styles: Mapping[str, str]) -> Markup:
    entries = [
        tag("span", tag("span", class_=f"swatch {style}"), label) for label, style in styles.items()
    ]
    return tag("p", *entries, class_="legend entries")


def wide(table: Markup) -> Markup:
    """A table that scrolls by itself where the page is too narrow, also with the keyboard."""
    return tag("div", table, class_="wide", tabindex=0, role="region", aria_label="table")


def details(
    summary: str, heads: Sequence[str], rows: Sequence[Sequence[str]], style: str
) -> Markup | None:
    """A table to unfold; none without rows."""
    if not rows:
        return None
    return tag("details", tag("summary", summary), plain_table(heads, rows, style))


def plain_table(heads: Sequence[str], rows: Sequence[Sequence[str]], style: str) -> Markup:
    head = tag("tr", *(tag("th", name, scope="col") for name in heads))
    lines = [
        tag("tr", tag("th", first, scope="row"), *(tag("td", cell) for cell in others))
        for first, *others in rows
    ]
    return wide(tag("table", tag("thead", head), tag("tbody", *lines), class_=style))
