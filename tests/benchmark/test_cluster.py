"""A grid on a real Ray cluster of this machine, which loses one of its nodes on the way."""

import contextlib
import dataclasses
import functools
import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import ancestors, workers_on
from rich.console import Console
from tiny_grids import TINY, write_grid

from majepa.benchmark import cluster, command
from majepa.benchmark.command import Options, benchmark
from majepa.config import ConfigError

pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("ignore")]
GRID = dataclasses.replace(TINY, steps=6_000)
"""Runs go on for a while after they have first saved something."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The grid as this machine runs it; what was compiled for it is kept."""
    folder = tmp_path_factory.mktemp("whole")
    patch = pytest.MonkeyPatch()
    patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder / "cache"))
    patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setattr(command, "write_output", lambda grid, root: [])
    options = Options("", out=folder / "grid", jobs=2)
    assert benchmark(write_grid(GRID, folder), options, console=Console()) == 0
    yield folder / "grid"
    patch.undo()


@pytest.fixture
def nodes():
    """A head that takes no jobs, and two nodes with room for one job each."""
    from ray.cluster_utils import Cluster

    made = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "object_store_memory": 100 << 20,
            "include_dashboard": False,
        },
    )
    workers = [made.add_node(num_cpus=1, object_store_memory=100 << 20) for _ in range(2)]
    yield made, workers
    made.shutdown()


def saved(root):
    """Runs that have a checkpoint."""
    return {path.parents[1].name for path in root.glob("cells/*/checkpoints/last.safetensors")}


def lose_a_machine(made, workers, root, is_over):
    """Take away the machine of the first job that has saved something, and say which that was.

    The job is held still before, so that it cannot end by itself.
    """
    while not (names := saved(root)):
        assert not is_over.wait(0.01), "nothing was saved"
    job, _, _ = names.pop().rpartition("-")
    (process,) = workers_on(f"/{job}.json")
    above = set(ancestors(process))
    (machine,) = [node for node in workers if raylet_of(node) in above]
    os.kill(process, signal.SIGSTOP)
    try:
        made.remove_node(machine, allow_graceful=False)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)
    return job


def raylet_of(node):
    """The process of Ray that starts all others of a machine."""
    return node.all_processes["raylet"][0].process.pid


def final_episodes(root):
    found = {}
    for cell in GRID.cells():
        text = (root / "cells" / cell.name / "evaluations.jsonl").read_text()
        found[cell.name] = [line for line in text.splitlines() if '"final"' in line]
    return found


@pytest.mark.parametrize("may_share", [False, True])
def test_a_grid_survives_the_loss_of_a_machine(whole, nodes, tmp_path, monkeypatch, may_share):
    made, workers = nodes
    root = tmp_path / "grid"
    patient = functools.partial(cluster.cluster_workers, may_share=may_share, report_seconds=0.2)
    monkeypatch.setattr(cluster, "cluster_workers", patient)
    options = Options("", out=root, cluster=made.address, retries=0)
    is_over = threading.Event()
    with ThreadPoolExecutor() as beside:
        losing = beside.submit(lose_a_machine, made, workers, root, is_over)
        try:
            code = benchmark(write_grid(GRID, tmp_path), options, console=Console())
        finally:
            is_over.set()
    lost = losing.result()
    events = [json.loads(line) for line in (root / "jobs.jsonl").read_text().splitlines()]
    failed = [event for event in events if event["event"] == "failed"]
    assert code == 0, failed
    assert [event["job"] for event in failed] == [lost]
    assert "its machine was lost" in failed[0]["reason"]
    log = (root / "jobs" / f"{lost}.log").read_text()
    # It went on where it was, on the other machine.
    assert " starts; " in log and " continues at " in log
    assert final_episodes(root) == final_episodes(whole)
    assert all(len(episodes) == 8 for episodes in final_episodes(root).values())


def test_an_interruption_brings_home_what_was_saved(whole, nodes, tmp_path, monkeypatch):
    made, _ = nodes
    root = tmp_path / "grid"
    apart = functools.partial(cluster.cluster_workers, may_share=False, report_seconds=0.2)
    monkeypatch.setattr(cluster, "cluster_workers", apart)

    def interrupt():
        while not any(root.glob("cells/*/metrics.jsonl")):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    options = Options("", out=root, cluster=made.address, jobs=1)
    grid = write_grid(GRID, tmp_path)
    assert benchmark(grid, options, console=Console()) == 130
    assert "stopped; the runs are saved" in (root / "jobs" / "mappo-3m.log").read_text()
    assert "mappo-3m-1" in saved(root) and "mappo-2m_vs_1z-1" not in saved(root)
    # Another machine goes on with it: this one.
    assert benchmark(grid, Options("", out=root, jobs=2), console=Console()) == 0
    assert " continues at " in (root / "jobs" / "mappo-3m.log").read_text()
    assert final_episodes(root) == final_episodes(whole)


def test_jobs_that_no_machine_can_hold_are_refused(nodes, tmp_path):
    made, _ = nodes
    options = Options("", out=tmp_path / "grid", cluster=made.address, cpus_per_job=64)
    with pytest.raises(ConfigError, match="no machine of the cluster has the 64 CPUs"):
        benchmark(write_grid(TINY, tmp_path), options)


def test_a_port_where_no_cluster_is(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        options = Options("", out=tmp_path / "grid", cluster=address)
        with pytest.raises(ConfigError, match=f"nobody answers at {address}"):
            benchmark(write_grid(TINY, tmp_path), options)
