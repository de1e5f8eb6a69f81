"""Everything that comes out of a grid: tables, a comparison, a page, and data to keep."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ..files import written_beside
from .aggregates import aggregate
from .comparison import compare, comparison_data, comparison_markdown
from .data_files import CURVES, RESULTS, curves_csv, read_data, results_csv
from .grids import Grid
from .page import page
from .results import Results, read_folders
from .scores import score_rows
from .tables import csv_table, latex_table, markdown_table

PAGE = "index.html"


def write(grid: Grid, folder: Path) -> list[Path]:
    """From the run folders in `folder/cells`, as far as they are, into `folder`."""
    results = read_folders(grid, folder)
    data = {RESULTS: results_csv(results), CURVES: curves_csv(results)}
    return _write_all(folder, shown(results) | data)


def from_data(grid: Grid, data_folder: Path, out: Path) -> list[Path]:
    """The same from `results.csv` and `curves.csv` alone, into `out`."""
    return _write_all(out, shown(read_data(grid, data_folder)))


def shown(results: Results) -> dict[str, str]:
    """The text of every file for readers, by name."""
    rows, aggregates = score_rows(results), aggregate(results)
    comparisons = compare(rows)
    data = json.dumps(comparison_data(results, comparisons), indent=2, ensure_ascii=False)
    return {
        "table.md": markdown_table(results, rows, aggregates),
        "table.csv": csv_table(rows),
        "table.tex": latex_table(results, rows),
        "comparison.json": f"{data}\n",
        "comparison.md": comparison_markdown(results, comparisons),
        PAGE: page(results, rows, aggregates, comparisons),
    }


def _write_all(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    for name, text in texts.items():
        with written_beside(folder / name) as partial:
            partial.write_text(text, encoding="utf-8")
    return [folder / name for name in texts]
