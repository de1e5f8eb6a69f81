"""Jobs as processes of this machine: their ends, signals, variables, and the GPU they share."""

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import pytest
from tiny_grids import MAJEPA, MAPPO, TINY

from majepa import machine
from majepa.benchmark import local, mps
from majepa.benchmark.folder import claim, log_file
from majepa.benchmark.grids import Grid
from majepa.benchmark.jobs import jobs_of, write_job
from majepa.benchmark.mps import shared_gpu
from majepa.benchmark.room import GIB
from majepa.benchmark.work import _alone, _clear_unclaimed
from majepa.benchmark.workers import reason_of

FAKE = (sys.executable, "-S", str(Path(__file__).parent / "fake_work.py"))
JOB, OTHER = jobs_of(TINY.cells())


@pytest.fixture
def root(tmp_path):
    claim(tmp_path / "grid", TINY)
    return tmp_path / "grid"


def plan(root, *actions):
    (root / "plan.json").write_text(json.dumps({JOB.name: actions}))


@contextlib.contextmanager
def started(root, *actions):
    plan(root, *actions)
    workers = local.LocalWorkers(root, [local.Device({})], 2, FAKE)
    try:
        workers.start(JOB)
        yield workers
    finally:
        workers.kill()


def end_of(workers):
    ended = workers.wait(20)
    assert len(ended) == 1
    return ended[0]


def until(path):
    while not path.exists() or not path.read_text():
        time.sleep(0.005)
    return path.read_text()


@pytest.mark.parametrize(
    ("action", "reason"),
    [("finish", None), ("fail", "exit code 3"), ("die", "killed by SIGKILL")],
)
def test_the_end_of_a_process_is_told(root, action, reason):
    with started(root, action) as workers:
        assert end_of(workers).reason == reason
    assert JOB.is_finished(root) == (reason is None)
    assert log_file(root, JOB.name).read_text().startswith("attempt 1 of mappo-3m\n")


def test_asked_to_stop_a_process_saves(root):
    with started(root, "wait") as workers:
        until(root / "mappo-3m.ready")
        workers.stop()
        assert end_of(workers).reason == "it was asked to stop"
    assert (root / "mappo-3m.saved").exists()


def test_a_process_that_does_not_listen_is_killed(root):
    with started(root, "stubborn") as workers:
        process = int(until(root / "mappo-3m.ready"))
        workers.stop()
        assert workers.wait(0.05) == []
        workers.kill()
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_ctrl_c_on_the_terminal_does_not_reach_the_process(root):
    with started(root, "wait"):
        process = int(until(root / "mappo-3m.ready"))
        assert os.getpgid(process) == process != os.getpgrp()


def test_a_process_stops_when_its_parent_is_killed(root, tmp_path):
    plan(root, "wait")
    path = write_job(root, JOB)
    code = (
        "import subprocess, sys, threading\n"
        "subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)\n"
        "threading.Event().wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, *FAKE, str(path)])
    until(root / "mappo-3m.ready")
    parent.kill()
    parent.wait()
    while not (root / "mappo-3m.saved").exists():
        time.sleep(0.005)


def test_the_worker_turns_the_end_of_its_parent_into_a_signal(tmp_path):
    code = (
        "import signal\n"
        "from majepa.benchmark.work import _stop_with_parent\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('asked'), exit(0)))\n"
        "_stop_with_parent()\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout and process.stdin
    assert process.stdout.readline() == "ready\n"
    assert process.poll() is None
    out, _ = process.communicate(timeout=20)
    assert (out, process.returncode) == ("asked\n", 0)


def test_one_process_works_on_a_job_at_a_time(root, capfd):
    lock = root / "jobs" / "x.lock"
    order = []

    def other():
        with _alone(lock):
            order.append("other")

    with _alone(lock):
        thread = threading.Thread(target=other)
        thread.start()
        while "waiting for another process" not in capfd.readouterr().out:
            time.sleep(0.005)
        order.append("first")
    thread.join(20)
    assert order == ["first", "other"]


def test_a_run_killed_before_it_had_settings_is_cleared_away(tmp_path):
    unclaimed, foreign = tmp_path / "unclaimed", tmp_path / "foreign"
    for folder in (unclaimed, foreign):
        folder.mkdir()
        (folder / "versions.json").touch()
        (folder / ".config.12.json").touch()
    (foreign / "notes.txt").touch()
    for folder in (unclaimed, foreign, tmp_path / "missing"):
        _clear_unclaimed(folder)
    assert not unclaimed.exists()
    assert len(list(foreign.iterdir())) == 3


class FakeProcess(subprocess.Popen):
    """Of which nobody asks whether it has ended."""

    def __init__(self):
        pass

    def wait(self, timeout=None):
        return 0


def settings_of(
    monkeypatch, root, jobs, *, gpus, cores, most=None, mps=False, memory=None
) -> list[tuple[str, dict[str, str]]]:
    """Jobs that are begun before any has ended, and variables of their processes."""
    begun = []

    def start(path, log, settings, command):
        begun.append((path.stem, settings))
        return FakeProcess()

    monkeypatch.setattr(machine, "usable_gpus", lambda: gpus)
    monkeypatch.setattr(machine, "cores", lambda: cores)
    monkeypatch.setattr(machine, "gpu_memory", lambda: memory)
    monkeypatch.setattr(local, "start_worker", start)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    with local.local_workers(root, jobs, most=most, mps=mps) as workers:
        for job in itertools.takewhile(workers.has_room, jobs):
            workers.start(job)
    return begun


def baselines(count):
    method = dataclasses.replace(MAPPO, overrides={})
    cell = TINY.cells()[0]
    methods = [dataclasses.replace(method, name=f"m{index}") for index in range(count)]
    return jobs_of(dataclasses.replace(cell, method=method) for method in methods)


def majepas(count):
    return jobs_of(Grid("g", "G", (MAJEPA,), ("3m",), tuple(range(count))).cells())


def test_processes_share_the_cores(monkeypatch, root):
    settings = settings_of(monkeypatch, root, baselines(3), gpus=[], cores=16)
    assert [one["NPROC"] for _, one in settings] == ["5", "5", "5"]
    assert settings[0][1]["JAX_COMPILATION_CACHE_DIR"] == str(root / "cache")


def test_processes_share_the_gpus(monkeypatch, root):
    settings = settings_of(monkeypatch, root, baselines(3), gpus=["0", "1"], cores=16)
    assert [one["CUDA_VISIBLE_DEVICES"] for _, one in settings] == ["0", "1", "0"]
    assert settings[0][1]["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert "NPROC" not in settings[0][1]


def test_what_the_caller_has_set_stays(monkeypatch, root):
    monkeypatch.setenv("NPROC", "7")
    (job,) = settings_of(monkeypatch, root, baselines(1), gpus=[], cores=2)
    assert "NPROC" not in job[1]
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/somewhere")
    assert local.cache_settings(root) == {}


ONE, TWO = ["0"], ["0", "1"]


@pytest.mark.parametrize(
    ("gpus", "cores", "memory", "most", "jobs", "at_once"),
    [
        ([], 1, None, None, baselines(40), 1),
        ([], 2, None, None, majepas(40), 1),
        ([], 16, None, None, baselines(40), 8),
        ([], 16, None, 3, baselines(40), 3),
        (ONE, 4, None, None, baselines(40), 4),
        (ONE, 64, None, None, baselines(40), 14),
        (ONE, 64, 139 * GIB, None, baselines(40), 14),
        (ONE, 64, 24 * GIB, None, baselines(40), 3),
        (ONE, 64, 6 * GIB, None, baselines(40), 1),
        (TWO, 64, None, None, baselines(40), 28),
        (ONE, 64, None, None, majepas(9), 2),
        (ONE, 64, 139 * GIB, None, majepas(9), 2),
        (ONE, 64, 48 * GIB, None, majepas(9), 1),
        (ONE, 64, 24 * GIB, None, majepas(9), 1),
        (TWO, 64, None, None, majepas(9), 4),
        (TWO, 3, None, None, majepas(9), 3),
        (ONE, 64, None, None, majepas(1) + baselines(40), 1 + 7),
        (TWO, 64, None, None, majepas(3) + baselines(40), 3 + 7),
        (ONE, 64, 139 * GIB, None, majepas(1) + baselines(40), 1 + 7),
        # One that waits for room is not overtaken.
        (ONE, 64, None, None, majepas(3) + baselines(40), 2),
        (ONE, 64, None, None, baselines(8) + majepas(1), 8),
        # Who names a number gets it.
        (ONE, 64, 24 * GIB, 5, majepas(9), 5),
        (ONE, 4, 24 * GIB, 20, baselines(40), 20),
        (ONE, 64, None, 1, majepas(9), 1),
    ],
)
def test_as_many_jobs_as_the_machine_holds(
    monkeypatch, root, gpus, cores, memory, most, jobs, at_once
):
    begun = settings_of(monkeypatch, root, jobs, gpus=gpus, cores=cores, memory=memory, most=most)
    assert [name for name, _ in begun] == [job.name for job in jobs[:at_once]]


def test_room_is_free_again_once_a_job_has_ended(root):
    plan(root, "finish")
    whole = local.Device({}, lambda job: Fraction(1))
    workers = local.LocalWorkers(root, [whole], 9, FAKE)
    try:
        workers.start(JOB)
        assert not workers.has_room(OTHER)
        assert end_of(workers).reason is None
        assert workers.has_room(OTHER)
    finally:
        workers.kill()


@pytest.mark.parametrize(
    ("answer", "memory"),
    [("143771\n24564\n", 24564 << 20), ("[N/A]\n", None), ("", None), (" 81559 \n", 81559 << 20)],
)
def test_the_memory_of_gpus_is_asked_of_the_driver(monkeypatch, answer, memory):
    monkeypatch.setattr(machine, "_nvidia_smi", lambda *query: answer)
    assert machine.gpu_memory() == memory


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ["0", "1"]),
        ({"JAX_PLATFORMS": "cpu"}, []),
        ({"JAX_PLATFORMS": "cuda,cpu"}, ["0", "1"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "3,5"}, ["3", "5"]),
    ],
)
def test_gpus_are_found_without_starting_anything_on_them(monkeypatch, variables, expected):
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(machine, "_nvidia_smi", lambda: "GPU 0: H (UUID: a)\nGPU 1: H (UUID: b)\n")
    monkeypatch.setattr(machine, "cuda_plugins", lambda installed: {"jax-cuda13-plugin": "1"})
    assert machine.usable_gpus() == expected
    monkeypatch.setattr(machine, "cuda_plugins", lambda installed: {})
    assert machine.usable_gpus() == []


def fake_daemon(monkeypatch, folder, code, *, serves=True):
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(
        f'#!/bin/sh\necho "$@" "$(cat)" "$CUDA_MPS_PIPE_DIRECTORY" >> {folder}/calls\nexit {code}\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setattr(mps, "_serves", lambda places: serves)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)


def test_the_daemon_lives_as_long_as_the_jobs(monkeypatch, tmp_path, root):
    fake_daemon(monkeypatch, tmp_path, 0)
    with shared_gpu() as places:
        folder = places["CUDA_MPS_PIPE_DIRECTORY"]
        assert Path(folder).is_dir()
        assert (tmp_path / "calls").read_text().split() == ["-d", folder]
    assert (tmp_path / "calls").read_text().split() == ["-d", folder, "quit", folder]
    assert not Path(folder).exists()


def test_a_daemon_that_does_not_start_is_done_without(monkeypatch, tmp_path):
    fake_daemon(monkeypatch, tmp_path, 1)
    with shared_gpu() as places:
        assert places == {}
    assert (tmp_path / "calls").read_text().split()[0] == "-d"
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with shared_gpu() as places:
        assert places == {}


def test_a_daemon_that_serves_nobody_is_ended_and_done_without(monkeypatch, tmp_path):
    fake_daemon(monkeypatch, tmp_path, 0, serves=False)
    with shared_gpu() as places:
        assert places == {}
    assert "quit" in (tmp_path / "calls").read_text()


def test_the_daemon_is_for_several_jobs_on_a_gpu_that_want_it(monkeypatch, tmp_path, root):
    fake_daemon(monkeypatch, tmp_path, 0)
    for count, gpus, wanted in ((1, ["0"], True), (2, [], True), (2, ["0"], False)):
        settings_of(monkeypatch, root, baselines(count), gpus=gpus, cores=8, mps=wanted)
    assert not (tmp_path / "calls").exists()
    settings = settings_of(monkeypatch, root, baselines(2), gpus=["0"], cores=8, mps=True)
    assert "CUDA_MPS_PIPE_DIRECTORY" in settings[1][1]


def test_signals_have_names():
    assert reason_of(-signal.SIGSEGV) == "killed by SIGSEGV"
