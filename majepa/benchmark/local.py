"""Jobs as processes on this machine, a few at a time."""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from .. import machine
from .folder import CACHE, log_file
from .jobs import Job, write_job
from .mps import shared_gpu
from .workers import Ended, reason_of

COMMAND = (sys.executable, "-m", "majepa.benchmark.work")
JOBS_PER_GPU = 14
CORES_PER_JOB = 2
"""Without a GPU; with one, a job needs a core to compile and to start programs."""


def default_jobs() -> int:
    """As many as the cores can feed, and on a GPU no more than it gains from."""
    gpus = len(machine.usable_gpus())
    if gpus:
        return min(machine.cores(), JOBS_PER_GPU * gpus)
    return max(1, machine.cores() // CORES_PER_JOB)


@contextlib.contextmanager
def local_workers(root: Path, jobs: int, *, mps: bool) -> Iterator[LocalWorkers]:
    gpus = machine.usable_gpus()
    with contextlib.ExitStack() as stack:
        common = cache_settings(root)
        if mps and gpus and jobs > 1:
            common |= stack.enter_context(shared_gpu())
        yield LocalWorkers(root, [common | settings for settings in _settings(gpus, jobs)])


def cache_settings(root: Path) -> dict[str, str]:
    """Where compiled programs are kept, unless the caller has a place."""
    return _unless_set({"JAX_COMPILATION_CACHE_DIR": str((root / CACHE).resolve())})


def gpu_settings() -> dict[str, str]:
    """For a process that shares a GPU with others."""
    return _unless_set({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})


def cpu_settings(threads: int) -> dict[str, str]:
    """For a process that shares the cores with others; XLA makes `NPROC` threads."""
    return _unless_set({"NPROC": str(threads), "OMP_NUM_THREADS": str(threads)})


def _settings(gpus: Sequence[str], jobs: int) -> list[dict[str, str]]:
    """Environment variables of each process that may run at the same time."""
    if not gpus:
        return [cpu_settings(max(1, machine.cores() // jobs))] * jobs
    turns = [gpus[slot % len(gpus)] for slot in range(jobs)]
    return [gpu_settings() | {"CUDA_VISIBLE_DEVICES": gpu} for gpu in turns]


def _unless_set(settings: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in settings.items() if name not in os.environ}


class LocalWorkers:
    """A process for each job, at most one for each of `settings`."""

    def __init__(
        self,
        root: Path,
        settings: Sequence[Mapping[str, str]],
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._root = root
        self._settings = settings
        self._command = command
        self._running: dict[str, tuple[int, subprocess.Popen[bytes]]] = {}
        self._ended: queue.SimpleQueue[str] = queue.SimpleQueue()

    @property
    def slots(self) -> int:
        return len(self._settings)

    def start(self, job: Job) -> str:
        taken = {slot for slot, _ in self._running.values()}
        slot = next(slot for slot in range(self.slots) if slot not in taken)
        path = write_job(self._root, job)
        with log_file(self._root, job.name).open("ab") as log:
            process = start_worker(path, log, self._settings[slot], self._command)
        self._running[job.name] = (slot, process)
        threading.Thread(target=self._await, args=(job.name, process), daemon=True).start()
        return platform.node()

    def _await(self, name: str, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self._ended.put(name)

    def wait(self, seconds: float) -> list[Ended]:
        ended = []
        try:
            ended.append(self._take(self._ended.get(timeout=seconds)))
            while True:
                ended.append(self._take(self._ended.get_nowait()))
        except queue.Empty:
            return ended

    def _take(self, name: str) -> Ended:
        _, process = self._running.pop(name)
        assert process.stdin is not None
        process.stdin.close()
        return Ended(name, platform.node(), reason_of(process.returncode))

    def stop(self) -> None:
        for _, process in self._running.values():
            process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        for _, process in self._running.values():
            kill_group(process)
        for name in list(self._running):
            self._running[name][1].wait()
            self._take(name)


def start_worker(
    path: Path,
    log: IO[bytes],
    settings: Mapping[str, str],
    command: Sequence[str] = COMMAND,
) -> subprocess.Popen[bytes]:
    """A process on a job, out of reach of the terminal; it stops when this one is gone."""
    return subprocess.Popen(
        [*command, str(path)],
        # Never written to: its end tells that this process is gone.
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **settings},
    )


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and whatever it started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
