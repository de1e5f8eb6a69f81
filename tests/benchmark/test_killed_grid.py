"""A grid whose processes are killed at random moments ends with the same episodes."""

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_grids import TINY, write_grid

from majepa.benchmark.folder import EVENTS

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


def workers_of(out: Path) -> list[int]:
    """Processes that work on jobs of a grid, whoever started them."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"majepa.benchmark.work" in command and str(out).encode() in command[-2]:
                found.append(int(folder.name))
    return found


def evaluations(out: Path) -> dict[str, str]:
    """Every episode of every evaluation."""
    return {
        cell.name: (out / "cells" / cell.name / "evaluations.jsonl").read_text()
        for cell in GRID.cells()
    }


def wait_for_more(out: Path, pattern: str, mark: str, process: subprocess.Popen[str]) -> None:
    """Until a mark stands in the files once more than now."""

    def count() -> int:
        return sum(path.read_text().count(mark) for path in out.glob(pattern))

    before = count()
    while count() <= before:
        assert process.poll() is None, "nothing was left to kill"
        time.sleep(0.02)


def kill_a_worker(out: Path, rng: random.Random) -> None:
    os.kill(rng.choice(workers_of(out)), signal.SIGKILL)


def wait_for_orphans(out: Path) -> None:
    """Whose parent is gone, they save and end by themselves."""
    while workers_of(out):
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
    assert evaluations(out) == evaluations(whole)
