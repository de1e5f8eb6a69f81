"""Every run of the grid: what it took, what it came to, or why it is not there."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from ...report.bars import parts_bar
from ...report.document import Section, absent
from ...report.html import Markup, joined, tag
from ...report.numbers import duration, number, percent
from ...report.sections import PHASES
from ..grids import Method
from ..results import Gap, Result, Results, clocks, counted
from .parts import legend, wide


def time_section(results: Results) -> Section:
    title = "Wall time"
    figures = [
        _method_time(method, spent)
        for method in results.grid.methods
        if (spent := [one for one in results.finished if one.cell.method.name == method.name])
    ]
    if not figures:
        return Section("time", title, absent("No cell is finished."))
    names = (*PHASES, "other")
    content = joined(
        legend({name: f"phase-{name}" for name in names}),
        tag("div", *figures, class_="large"),
    )
    about = (
        "Of all finished cells of a method together; seeds that train together share one clock and "
        "count once. Runs that share a machine slow each other."
    )
    return Section("time", title, content, about)


def cells_section(results: Results) -> Section:
    heads = (
        "cell", "won", "sampled", "return", "length", "transitions", "time", "environment",
        "majepa",
    )  # fmt: skip
    lines = {one.cell.name: _result_line(one) for one in results.finished}
    lines |= {gap.cell.name: _gap_line(gap, len(heads)) for gap in results.gaps}
    ordered = [lines[cell.name] for cell in results.grid.cells()]
    head = tag("tr", *(tag("th", name, scope="col") for name in heads))
    table = tag("table", tag("thead", head), tag("tbody", *ordered), class_="numbers cells")
    about = "Every run of the grid: its final evaluation, or why there is none."
    return Section("cells", "Cells", wide(table), about)


def _method_time(method: Method, results: Sequence[Result]) -> Markup:
    jobs = clocks(results)
    total = sum(one.seconds for one in jobs)
    spent = {name: sum(one.phases[name] for one in jobs) for name in PHASES}
    spent["other"] = max(0.0, total - sum(spent.values()))
    whole = sum(spent.values()) or 1.0
    parts = [(name, f"phase-{name}", seconds / whole) for name, seconds in spent.items()]
    shares = ", ".join(f"{name} {percent(share)}" for name, _, share in parts)
    note = f"{duration(total)} in {counted(len(results), 'cell')}"
    return tag(
        "figure",
        tag("figcaption", tag("b", method.title), " ", tag("span", note)),
        parts_bar(parts, f"{method.title}: {shares}"),
    )


def _result_line(one: Result) -> Markup:
    values = (
        f"{one.wins} of {one.episodes}",
        f"{one.sampled_wins} of {one.sampled_episodes}",
        number(one.mean_return),
        number(one.mean_length),
        f"{number(one.transitions)} of {number(one.budget)}",
        duration(one.seconds),
        one.environment_version,
        one.majepa_version,
    )
    name = _cell_name(one.cell.name, one.folder)
    return tag("tr", name, *(tag("td", value) for value in values))


def _gap_line(gap: Gap, columns: int) -> Markup:
    told = joined(tag("b", gap.state), f": {gap.reason}")
    return tag(
        "tr",
        _cell_name(gap.cell.name, gap.folder),
        tag("td", told, colspan=columns - 1),
        class_=f"gap {gap.state}",
    )


def _cell_name(name: str, folder: str | None) -> Markup:
    content = name if folder is None else tag("a", name, href=f"{quote(folder)}/")
    return tag("th", content, scope="row")
