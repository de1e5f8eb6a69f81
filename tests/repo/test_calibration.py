"""What docs/calibration.md says is what the kept runs say."""

import csv
import json
import re
import statistics
from pathlib import Path

import pytest

from majepa.benchmark.comparison import compare
from majepa.benchmark.data_files import read_data
from majepa.benchmark.grids import find_grid
from majepa.benchmark.scores import score_rows

ROOT = Path(__file__).parents[2]
DATA = ROOT / "results" / "calibration"
PAGE = (ROOT / "docs" / "calibration.md").read_text()
METHODS = ("mappo", "qmix", "mat")


def wins() -> dict[tuple[str, str], list[int]]:
    found: dict[tuple[str, str], list[int]] = {}
    with (DATA / "results.csv").open() as file:
        for row in csv.DictReader(file):
            assert (row["episodes"], row["environment_version"]) == ("100", "1.1")
            found.setdefault((row["map"], row["method"]), []).append(int(row["wins"]))
    return found


@pytest.mark.parametrize("env", find_grid("calibration").envs)
def test_the_table_holds_the_runs(env):
    (line,) = re.findall(rf"^\| {env} \| \d00k \|(.*)\|$", PAGE, re.M)
    ours = [cell.strip() for cell in line.split("|")]
    for place, method in zip((0, 3, 6), METHODS, strict=True):
        rates = wins()[env, method]
        mean, deviation = statistics.mean(rates), statistics.stdev(rates)
        assert ours[place] == f"{mean:.1f} ({deviation:.1f}): {', '.join(map(str, rates))}"


def test_all_runs_of_the_grid_are_there():
    grid = find_grid("calibration")
    found = wins()
    assert len(found) == len(grid.envs) * len(METHODS)
    assert all(len(rates) == len(grid.seeds) for rates in found.values())
    assert json.loads((DATA / "grid.json").read_text())["seeds"] == list(grid.seeds)


def test_the_agreement_is_that_of_the_runs():
    comparisons = compare(score_rows(read_data(find_grid("calibration"), DATA)))
    names = {"paper": "paper", "MARIE": "MARIE", "mean of paper and MARIE": "mean of both"}
    for comparison in comparisons:
        for over, found in (
            ("all cells", comparison.over_all),
            ("cells above 0 there", comparison.over_nonzero),
        ):
            line = (
                f"| {names[comparison.source]} | {over} | {found.cells} | {found.spearman:.2f} | "
                f"{found.mean_absolute_difference:.1f} | {found.mean_difference:+.1f} |"
            )
            assert line in PAGE
