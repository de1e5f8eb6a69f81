"""A grid whose processes are killed at random moments ends with the same evaluations and tables."""

import csv
import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import workers_on
from tiny_grids import TINY, write_grid

from majepa.benchmark import output
from majepa.benchmark.data_files import CURVES, RESULTS
from majepa.benchmark.folder import EVENTS, cell_folder
from majepa.benchmark.grids import Cell
from majepa.run_folder import EVALUATIONS

pytestmark = pytest.mark.slow
GRID = dataclasses.replace(TINY, steps=6_000)
ROUNDS = ("parent", "worker, then parent", "parent and worker")
SCRIPT = """
import sys
from majepa.benchmark import command
from majepa.cli import main

command.write_output = lambda grid, root: []
main()
"""


def start(grid: str, out: Path, cache: Path) -> subprocess.Popen[str]:
    """`majepa benchmark`, in a process group of its own."""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    arguments = ["benchmark", grid, "--out", str(out), "--jobs", "2"]
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finish(grid: str, out: Path, cache: Path) -> str:
    text, _ = (process := start(grid, out, cache)).communicate(timeout=200)
    assert process.returncode == 0, text
    return text


def episodes(out: Path, cell: Cell) -> list[str]:
    """Of every evaluation of a run."""
    return (cell_folder(out, cell) / EVALUATIONS).read_text().splitlines()


def written(out: Path) -> tuple[str, list[dict[str, str]], str]:
    """The table, the results but for the time that they took, and the learning curves."""
    output.write(GRID, out)
    with (out / RESULTS).open() as file:
        lines = list(csv.DictReader(file))
    timeless = [
        {name: value for name, value in line.items() if not name.startswith("seconds")}
        for line in lines
    ]
    return (out / "table.md").read_text(), timeless, (out / CURVES).read_text()


def wait_for_more(out: Path, pattern: str, mark: str, process: subprocess.Popen[str]) -> None:
    """Until a mark stands in the files once more than now."""

    def count() -> int:
        return sum(path.read_text().count(mark) for path in out.glob(pattern))

    before = count()
    while count() <= before:
        assert process.poll() is None, "nothing was left to kill"
        time.sleep(0.02)


def kill_a_worker(out: Path, rng: random.Random) -> None:
    os.kill(rng.choice(workers_on(str(out))), signal.SIGKILL)


def wait_for_orphans(out: Path) -> None:
    """Whose parent is gone, they save and end by themselves."""
    while workers_on(str(out)):
        time.sleep(0.02)


def test_a_grid_survives_kills_of_any_of_its_processes(tmp_path):
    grid = write_grid(GRID, tmp_path)
    whole, out, cache = tmp_path / "whole", tmp_path / "killed", tmp_path / "cache"
    finish(grid, whole, cache)
    rng = random.Random(0)
    for victims in ROUNDS:
        wait_for_orphans(out)
        process = start(grid, out, cache)
        wait_for_more(out, "jobs/*.log", f" / {GRID.steps:,}", process)
        time.sleep(rng.uniform(0.0, 0.5))
        if "worker" in victims:
            kill_a_worker(out, rng)
        if victims == "worker, then parent":
            wait_for_more(out, EVENTS, '"failed"', process)
            time.sleep(rng.uniform(0.0, 3.0))
        process.kill()
        process.communicate()
    text = finish(grid, out, cache)
    assert " started on " in text, "nothing was left to do"
    assert "killed by SIGKILL" in (out / "jobs.jsonl").read_text()
    for cell in GRID.cells():
        assert episodes(out, cell) == episodes(whole, cell) != []
    table, results, curves = written(whole)
    assert len(results) == len(GRID.cells()) and "seconds" not in results[0]
    assert written(out) == (table, results, curves)
