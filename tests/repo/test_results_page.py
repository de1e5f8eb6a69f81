"""What docs/results.md says is what the kept runs say."""

import csv
from pathlib import Path

import numpy as np
import pytest
from scripts import benchmark

from majepa.benchmark.grids import ALL_MAPS
from majepa.config import preset

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text()


RESULTS = benchmark("results")
RUNS = list(RESULTS.lines_of(RESULTS.RUNS))
runs = pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['map']}-{run['seed']}")


def test_the_table_is_the_one_of_the_data():
    assert RESULTS.table([RESULTS.read(run) for run in RUNS]) in PAGE


@runs
def test_a_run_is_what_its_episodes_say(run):
    path = ROOT / "results" / "majepa" / f"{run['map']}-{run['seed']}.csv"
    with path.open(newline="") as file:
        final = [line for line in csv.DictReader(file) if line["kind"] == "final"]
    for actions, wins in (("argmax", "wins"), ("sampled", "sampled_wins")):
        won = [int(line["won"]) for line in final if line["actions"] == actions]
        assert (len(won), sum(won)) == (100, int(run[wins])), actions
    assert {line["transitions"] for line in final} == {run["transitions"]}


@runs
def test_a_run_has_its_budget_and_its_command_on_the_page(run):
    assert run["map"] in ALL_MAPS and run["environment_version"] == "1.1"
    budget = preset("majepa", "paper", run["map"]).steps
    assert int(run["budget"]) == budget and 0.99 * budget < int(run["transitions"]) <= budget
    line = (
        f"| {run['map']} | `{run['command']}` | {run['commit']} | {run['machine']} "
        f"| {run['minutes']} |"
    )
    assert line in PAGE


@runs
def test_facts_are_told_of_every_run(run):
    told = RESULTS.facts(f"{run['map']}-{run['seed']}")
    begin = f"| {int(run['transitions']):,} |"
    last = next(line for line in told.splitlines() if line.startswith(begin))
    assert last.split(" | ")[1:4] == [run["wins"], run["sampled_wins"], str(100 - int(run["wins"]))]


def test_facts_are_counted_from_the_episodes():
    told = RESULTS.facts("3s_vs_4z-1302")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in told.splitlines()]
    last = next(row for row in rows if row and row[0] == "99,990")
    assert last[:5] == ["99,990", "81", "82", "19", "14"]
    with (ROOT / "results" / "majepa" / "3s_vs_4z-1302.csv").open(newline="") as file:
        won = [line for line in csv.DictReader(file) if line["won"] == "1"]
    lengths, returns = ([float(line[name]) for line in won] for name in ("length", "return"))
    assert f"All {len(won)} victories" in told
    assert f"length and return {np.corrcoef(lengths, returns)[0, 1]:.3f}" in told
    end = ("99990", "argmax")
    at_the_end = [line for line in won if (line["transitions"], line["actions"]) == end]
    mean_length = sum(int(line["length"]) for line in at_the_end) / len(at_the_end)
    assert float(last[5]) == pytest.approx(mean_length, abs=0.05)
    # Nobody wins at first: there is nothing to take a mean of.
    assert rows[3][1:3] == ["0", "0"] and rows[3][5:] == ["-", "-"]
