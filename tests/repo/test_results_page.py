"""What docs/results.md says is what the kept runs say."""

import csv
import importlib.util
from pathlib import Path

import pytest

from majepa.benchmark.grids import ALL_MAPS
from majepa.config import preset

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text()


def tool():
    spec = importlib.util.spec_from_file_location("results", ROOT / "benchmarks" / "results.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RESULTS = tool()
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
