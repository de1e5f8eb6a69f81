"""`majepa benchmark` as its caller meets it; processes stand in for the training."""

import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from tiny_grids import MAPPO, TINY, finish, write_grid

from majepa import interrupt
from majepa.benchmark import command
from majepa.benchmark.command import Options, benchmark
from majepa.benchmark.folder import claim
from majepa.benchmark.local import Device, LocalWorkers
from majepa.config import ConfigError

FAKE = (sys.executable, "-S", str(Path(__file__).parent / "fake_work.py"))
GO_ON = "majepa benchmark tiny.json"


class Told:
    """A run of the command in this process."""

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        self.text = text


@pytest.fixture
def tell(monkeypatch, tmp_path):
    """Runs the command; remembers what was asked of the tables."""

    @contextlib.contextmanager
    def fake_workers(root, jobs, *, most, mps):
        yield LocalWorkers(root, [Device({})], most, FAKE)

    def fake_output(grid, root):
        told.written.append(grid)
        return [root / "table.md"]

    def told(grid=TINY, plan=None, filters=None, **options) -> Told:
        root = tmp_path / "grid"
        claim(root, grid)
        (root / "plan.json").write_text(json.dumps(plan or {}))
        console = Console(file=io.StringIO(), width=100)
        chosen = Options(GO_ON, out=root, **{"jobs": 2, **options})
        code = benchmark(write_grid(grid, tmp_path), chosen, console=console, **(filters or {}))
        assert isinstance(console.file, io.StringIO)
        return Told(code, console.file.getvalue())

    told.written = []
    told.root = tmp_path / "grid"
    monkeypatch.setattr(command, "local_workers", fake_workers)
    monkeypatch.setattr(command, "write_output", fake_output)
    return told


def tries(root, job):
    path = root / f"{job}.tries"
    return len(path.read_text()) if path.exists() else 0


def test_a_grid_runs_to_its_end(tell):
    result = tell()
    assert result.code == 0, result.text
    assert "finished     4 of 4 runs" in result.text
    assert f"written      {tell.root / 'table.md'}" in result.text
    assert "go on with" not in result.text
    # After each job, and at the end: always the whole grid.
    assert tell.written == [TINY] * 3


def test_what_is_finished_is_not_run_again(tell):
    for cell in TINY.cells():
        if cell.map == "3m":
            finish(tell.root, cell)
    # Seeds train together: one that is finished comes along.
    finish(tell.root, TINY.cells()[2])
    (tell.root / "grid.json").write_text(Path(write_grid(TINY, tell.root)).read_text())
    assert tell().code == 0
    assert tries(tell.root, "mappo-3m") == 0
    assert tries(tell.root, "mappo-2m_vs_1z") == 1
    job = json.loads((tell.root / "jobs" / "mappo-2m_vs_1z.json").read_text())
    assert list(job["cells"]) == ["mappo-2m_vs_1z-1", "mappo-2m_vs_1z-2"]


def test_a_finished_grid_only_writes_its_tables(tell):
    tell()
    tell.written.clear()
    result = tell()
    assert result.code == 0 and tell.written == [TINY]
    assert tries(tell.root, "mappo-3m") == 1


def test_a_part_of_a_grid(tell):
    result = tell(filters={"maps": ["3m"], "seeds": [2]})
    assert result.code == 0
    assert [path.name for path in (tell.root / "cells").iterdir()] == ["mappo-3m-2"]
    assert tell.written[-1] == TINY
    assert tell().code == 0
    assert len(list((tell.root / "cells").iterdir())) == 4


def test_a_failure_is_reported_and_the_rest_goes_on(tell):
    result = tell(plan={"mappo-3m": ["fail"]}, retries=1)
    assert result.code == 1
    assert tries(tell.root, "mappo-3m") == 2
    assert "failed       mappo-3m-1, mappo-3m-2: exit code 3" in result.text
    assert "    the weights are too heavy" in result.text
    assert "finished     2 of 4 runs" in result.text
    assert "missing      mappo-3m-1, mappo-3m-2" in result.text
    assert f"go on with   {GO_ON}" in result.text


def test_a_killed_job_is_tried_again(tell):
    result = tell(plan={"mappo-3m": ["die", "fail", "finish"]})
    assert result.code == 0, result.text
    assert tries(tell.root, "mappo-3m") == 3
    assert "killed by SIGKILL; it will be tried again" in result.text


def test_tables_that_cannot_be_written_do_not_end_the_grid(tell, monkeypatch):
    def broken(grid, root):
        raise ValueError("no ink")

    monkeypatch.setattr(command, "write_output", broken)
    result = tell()
    assert result.code == 1
    assert result.text.count("the tables could not be written: ValueError('no ink')") == 1
    assert "finished     4 of 4 runs" in result.text


def send(root, job, *signals):
    """Once a job is under way, signals to this process, each a while after the one before."""

    def wait_and_send():
        ready = root / f"{job}.ready"
        while not ready.exists():
            time.sleep(0.005)
        for index, number in enumerate(signals):
            if index:
                time.sleep(interrupt.IMPATIENT + 0.1)
            os.kill(os.getpid(), number)

    threading.Thread(target=wait_and_send, daemon=True).start()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_says_how_to_go_on(tell, capfd, number):
    send(tell.root, "mappo-3m", number)
    result = tell(plan={"mappo-3m": ["wait", "finish"]}, jobs=1)
    assert result.code == 130
    assert (tell.root / "mappo-3m.saved").exists()
    assert tries(tell.root, "mappo-2m_vs_1z") == 0
    assert "stopped early: interrupted" in result.text
    assert f"go on with   {GO_ON}" in result.text
    assert command.PROMISE in capfd.readouterr().err
    assert tell(plan={"mappo-3m": ["wait", "finish"]}, jobs=1).code == 0


def test_a_second_ctrl_c_kills(tell, monkeypatch):
    monkeypatch.setattr(interrupt, "IMPATIENT", 0.1)
    send(tell.root, "mappo-3m", signal.SIGINT, signal.SIGINT)
    result = tell(plan={"mappo-3m": ["stubborn"]}, jobs=1)
    assert result.code == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int((tell.root / "mappo-3m.ready").read_text()), 0)


def test_the_time_limit_saves_and_says_how_to_go_on(tell):
    result = tell(plan={"mappo-3m": ["wait"]}, jobs=1, minutes=0.5 / 60)
    assert result.code == 1
    assert (tell.root / "mappo-3m.saved").exists()
    assert "stopped early: the time limit of 0:00:00 was reached" in result.text
    assert f"go on with   {GO_ON}" in result.text


def test_a_dry_run_shows_the_plan_and_does_nothing(tell):
    finish(tell.root, TINY.cells()[0])
    (tell.root / "grid.json").write_text(Path(write_grid(TINY, tell.root)).read_text())
    result = tell(filters={"dry_run": True})
    assert result.code == 0 and tell.written == []
    assert "4 runs in 2 jobs, 2 of them left to do" in result.text
    assert f"finished  {tell.root / 'cells' / 'mappo-3m-1'}  2,000 of 2,000" in result.text
    assert f"missing   {tell.root / 'cells' / 'mappo-3m-2'}  0 of 2,000" in result.text
    assert not list(tell.root.glob("*.tries"))


def test_a_dry_run_makes_no_folder(tmp_path):
    out = tmp_path / "grid"
    assert benchmark("paper", Options("", out=out), methods=["mappo"], dry_run=True,
                     console=Console(quiet=True)) == 0  # fmt: skip
    assert not out.exists()


def test_results_of_another_world_are_not_mixed_in(tell):
    finish(tell.root, TINY.cells()[0], version="0.9")
    (tell.root / "grid.json").write_text(Path(write_grid(TINY, tell.root)).read_text())
    with pytest.raises(ConfigError, match="choose another --out"):
        tell()
    assert tell(filters={"maps": ["2m_vs_1z"]}).code == 0


def test_another_grid_is_not_mixed_in(tell, tmp_path):
    tell()
    other = dataclasses.replace(TINY, steps=1_000)
    path = write_grid(other, tmp_path)
    with pytest.raises(ConfigError, match="there steps is 2000, here it is 1000"):
        benchmark(path, Options("", out=tell.root))


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "taken").touch()
    with pytest.raises(ConfigError, match="is a file; choose another --out"):
        benchmark(write_grid(TINY, tmp_path), Options("", out=tmp_path / "taken"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jobs": 0}, "--jobs is 0; it must be 1 or more"),
        ({"retries": -1}, "--retries is -1; it must be 0 or more"),
        ({"minutes": 0.0}, "--minutes is 0.0; it must be more than 0"),
        ({"gpus_per_job": 1.0}, "need --cluster"),
        ({"cluster": "x:1", "cpus_per_job": 0}, "--cpus-per-job is 0"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        Options("", **options)


def test_a_cluster_needs_its_package(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="`uv sync --extra cluster`"):
        benchmark(write_grid(TINY, tmp_path), Options("", tmp_path / "grid", cluster="auto"))
    assert not (tmp_path / "grid").exists()


def test_the_process_that_runs_a_grid_starts_no_device():
    code = (
        "import majepa.benchmark.command as c\n"
        "from rich.console import Console\n"
        "c.benchmark('paper', c.Options(''), dry_run=True,"
        " console=Console(quiet=True))\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_methods_keep_their_own_names(tmp_path):
    twins = (MAPPO, dataclasses.replace(MAPPO, name="wide", overrides={"algo.width": 32}))
    grid = dataclasses.replace(TINY, methods=twins)
    console = Console(file=io.StringIO(), width=200)
    benchmark(write_grid(grid, tmp_path), Options("", tmp_path / "grid"), dry_run=True,
              console=console)  # fmt: skip
    assert isinstance(console.file, io.StringIO)
    assert "8 runs in 4 jobs" in console.file.getvalue()
