"""The page of a grid: one file with tables, curves and comparisons, and nothing beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...report.document import document
from ...report.html import Markup, joined, tag
from ..aggregates import Aggregates
from ..comparison import Comparison
from ..results import Results, counted
from ..scores import Row, caution, sources_of
from .cells import cells_section, time_section
from .comparison import comparison_section
from .scores import aggregates_section, curves_section, table_section


def page(
    results: Results,
    rows: Sequence[Row],
    aggregates: Aggregates,
    comparisons: Sequence[Comparison],
) -> str:
    """The whole document; the same results give the same text."""
    sections = [
        table_section(results, rows),
        curves_section(results, rows),
        aggregates_section(results, aggregates),
        comparison_section(results, comparisons),
        time_section(results),
        cells_section(results),
    ]
    style = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    return document(f"Benchmark: {results.grid.title}", _header(results, rows), sections, style)


def _header(results: Results, rows: Sequence[Row]) -> Markup:
    grid = results.grid
    sizes = ((len(grid.methods), "method"), (len(grid.envs), "map"), (len(grid.seeds), "seed"))
    facts = [f"grid {grid.name}", " × ".join(counted(*size) for size in sizes), results.world]
    notes = [note for note in (caution(rows), *results.notes) if note]
    return tag(
        "header",
        tag("p", "Benchmark", class_="eyebrow"),
        tag("h1", grid.title),
        tag("p", " · ".join(facts), class_="facts"),
        _status(results),
        tag("p", _world(results, rows), class_="caveat"),
        tag("ul", *(tag("li", note) for note in notes), class_="notes") if notes else None,
    )


def _status(results: Results) -> Markup:
    done, planned = len(results.finished), len(results.finished) + len(results.gaps)
    if done == planned:
        told = joined(tag("strong", "Complete."), f" All {counted(planned, 'cell')} are finished.")
        return tag("p", told, class_="status finished")
    states = [gap.state for gap in results.gaps]
    parts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    told = f" {done} of {counted(planned, 'cell')} are finished; {', '.join(parts)}."
    return tag("p", tag("strong", "Incomplete."), told, class_="status unfinished")


def _world(results: Results, rows: Sequence[Row]) -> str:
    ours = f"Our numbers are from the {results.world}."
    if not sources_of(rows):
        return ours
    return f"{ours} Published ones are from real StarCraft II: another world, set apart everywhere."
