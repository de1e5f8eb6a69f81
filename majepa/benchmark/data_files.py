"""Results without their runs: two small files that a repository can keep.

`results.csv` has one line for each finished cell, `curves.csv` one for each point of its learning
curve. Tables and pages can be made from them alone.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..report.sections import PHASES
from .grids import Cell, Grid
from .results import Gap, Point, Result, Results, ResultsError, counted

RESULTS = "results.csv"
CURVES = "curves.csv"

Key = tuple[str, str, int]
"""Method, map and seed."""
Line = Mapping[str, str]

NUMBERS: Mapping[str, Callable[[str], Any]] = {
    "budget": int, "transitions": int, "wins": int, "episodes": int, "sampled_wins": int,
    "sampled_episodes": int, "mean_return": float, "mean_length": float, "seconds": float,
    "environment_version": str, "majepa_version": str,
}  # fmt: skip
"""Fields of `Result` as they stand in a line."""
PHASE_COLUMNS = {name: f"seconds_{name}" for name in PHASES}
KEY_COLUMNS = ("method", "map", "seed")
RESULT_COLUMNS = (*KEY_COLUMNS, *NUMBERS, *PHASE_COLUMNS.values())
CURVE_COLUMNS = (*KEY_COLUMNS, *Point._fields)


def results_csv(results: Results) -> str:
    lines = [
        (
            *_key(one.cell),
            *(getattr(one, name) for name in NUMBERS),
            *(one.phases[name] for name in PHASE_COLUMNS),
        )
        for one in results.finished
    ]
    return csv_text(RESULT_COLUMNS, lines)


def curves_csv(results: Results) -> str:
    lines = [(*_key(one.cell), *point) for one in results.finished for point in one.curve]
    return csv_text(CURVE_COLUMNS, lines)


def csv_text(columns: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(lines)
    return file.getvalue()


def read_data(grid: Grid, folder: Path) -> Results:
    """The results of a grid as they were kept; cells that were not kept are gaps."""
    cells = {_key(cell): cell for cell in grid.cells()}
    curves: dict[Key, list[Point]] = {}
    for key, point in _parsed(folder / CURVES, CURVE_COLUMNS, _point):
        curves.setdefault(key, []).append(point)
    kept: dict[Key, Result] = {}
    strangers = 0
    for key, make in _parsed(folder / RESULTS, RESULT_COLUMNS, _maker):
        if key in kept:
            raise ResultsError(f"{folder / RESULTS} has {_name(key)} twice")
        if key not in cells:
            strangers += 1
            continue
        kept[key] = make(cells[key], tuple(curves.get(key, ())))
    gaps = [
        Gap(cell, "missing", f"not in {RESULTS}") for key, cell in cells.items() if key not in kept
    ]
    lines = counted(strangers, "line")
    notes = (f"{RESULTS} has {lines} of cells outside this grid.",) if strangers else ()
    # In the order of the grid, whatever that of the lines.
    return Results(grid, tuple(kept[key] for key in cells if key in kept), tuple(gaps), notes)


def _key(cell: Cell) -> Key:
    return cell.method.name, cell.map, cell.seed


def _name(key: Key) -> str:
    method, map_name, seed = key
    return f"{method} on {map_name} with seed {seed}"


def _parsed(
    path: Path, columns: Sequence[str], parse: Callable[[Line], Any]
) -> list[tuple[Key, Any]]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path.name} in {path.parent}")
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in columns if name not in (reader.fieldnames or ())]
        if missing:
            raise ResultsError(f"{path} lacks {counted(len(missing), 'column')}: {missing[0]}")
        found = []
        for line in reader:
            try:
                key = (line["method"], line["map"], int(line["seed"]))
                found.append((key, parse(line)))
            except (TypeError, ValueError) as error:
                raise ResultsError(f"{path}, line {reader.line_num}: {error}") from error
    return found


def _point(line: Line) -> Point:
    return Point(int(line["transitions"]), _share(line["win_rate"]), int(line["episodes"]))


def _maker(line: Line) -> Callable[[Cell, tuple[Point, ...]], Result]:
    """A result but for its cell and curve."""
    fields = {name: parse(line[name]) for name, parse in NUMBERS.items()}
    phases = {name: float(line[column]) for name, column in PHASE_COLUMNS.items()}
    for wins, episodes in (("wins", "episodes"), ("sampled_wins", "sampled_episodes")):
        if not 0 <= fields[wins] <= fields[episodes] or fields[episodes] == 0:
            raise ValueError(f"{fields[wins]} {wins} of {fields[episodes]} {episodes} cannot be")
    return lambda cell, curve: Result(cell=cell, phases=phases, curve=curve, **fields)


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 1:
        raise ValueError(f"a win rate of {text} cannot be")
    return share
