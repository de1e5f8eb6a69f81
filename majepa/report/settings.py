"""Settings and versions as tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .data import Run, flat
from .html import Markup, tag


def config_tables(run: Run) -> Markup:
    """One small table for every level of the config, in the order of the file."""
    tables: dict[str, list[Markup]] = {}
    for name, value in flat(run.config).items():
        group, _, field = name.rpartition(".")
        tables.setdefault(group, []).append(_row(run, name, field, value))
    ordered = sorted(tables, key=lambda group: group.count(".") if group else -1)
    return tag("div", *(_table(group, tables[group]) for group in ordered), class_="settings")


def versions_table(run: Run) -> Markup:
    if not run.versions:
        return tag("p", "Not recorded.", class_="absent")
    rows = [
        tag("tr", tag("th", name.replace("_", " "), scope="row"), tag("td", _readable(value)))
        for name, value in run.versions.items()
    ]
    return tag("table", tag("tbody", *rows), class_="versions")


def _table(group: str, rows: list[Markup]) -> Markup:
    return tag("table", tag("caption", group or "run"), tag("tbody", *rows))


def _row(run: Run, name: str, field: str, value: Any) -> Markup:
    if name not in run.changed or run.preset is None:
        return tag("tr", tag("th", field, scope="row"), tag("td", _readable(value)))
    usual = _readable(run.preset.values[name]) if name in run.preset.values else "none"
    note = tag("span", f"{run.preset.name}: {usual}", class_="usual")
    return tag(
        "tr",
        tag("th", field, scope="row"),
        tag("td", tag("b", _readable(value)), " ", note),
        class_="changed",
    )


def _readable(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(_readable(one) for one in value)
    return json.dumps(value) if isinstance(value, Mapping) else str(value)
