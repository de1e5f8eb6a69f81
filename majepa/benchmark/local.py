"""Jobs as processes on this machine, a few at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import platform
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import IO, NamedTuple

from .. import machine
from .folder import CACHE, log_file
from .jobs import Job, write_job
from .mps import shared_gpu
from .room import gpu_share
from .workers import Ended, reason_of

COMMAND = (sys.executable, "-m", "majepa.benchmark.work")
CORES_PER_JOB = 2
"""Without a GPU; with one, a job needs a core to compile and to start programs."""


def _nothing(job: Job) -> Fraction:
    return Fraction(0)


@dataclasses.dataclass(frozen=True)
class Device:
    """Where processes run: a GPU, or the cores."""

    settings: Mapping[str, str]
    """Environment variables of its processes."""
    share: Callable[[Job], Fraction] = _nothing
    """What a job takes of it."""


@contextlib.contextmanager
def local_workers(
    root: Path, jobs: Sequence[Job], *, most: int | None, mps: bool
) -> Iterator[LocalWorkers]:
    """For these jobs, `most` at a time, or as many as the cores feed and the GPUs hold."""
    gpus = machine.usable_gpus()
    cores = machine.cores()
    fed = cores if gpus else max(1, cores // CORES_PER_JOB)
    at_once = max(1, min(most or fed, len(jobs)))
    with contextlib.ExitStack() as stack:
        common = cache_settings(root)
        if not gpus:
            devices = [Device(common | cpu_settings(max(1, cores // at_once)))]
        else:
            if mps and at_once > 1:
                common |= stack.enter_context(shared_gpu())
            # Whoever names a number knows better what fits.
            share = _nothing if most else functools.partial(gpu_share, memory=machine.gpu_memory())
            devices = [
                Device(common | gpu_settings() | {"CUDA_VISIBLE_DEVICES": gpu}, share)
                for gpu in gpus
            ]
        yield LocalWorkers(root, devices, at_once)


def cache_settings(root: Path) -> dict[str, str]:
    """Where compiled programs are kept, unless the caller has a place."""
    return _unless_set({"JAX_COMPILATION_CACHE_DIR": str((root / CACHE).resolve())})


def gpu_settings() -> dict[str, str]:
    """For a process that shares a GPU with others."""
    return _unless_set({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})


def cpu_settings(threads: int) -> dict[str, str]:
    """For a process that shares the cores with others; XLA makes `NPROC` threads."""
    return _unless_set({"NPROC": str(threads), "OMP_NUM_THREADS": str(threads)})


def _unless_set(settings: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in settings.items() if name not in os.environ}


class _Running(NamedTuple):
    device: Device
    share: Fraction
    process: subprocess.Popen[bytes]


class LocalWorkers:
    """A process for each job, at most `most` at a time and on each device no more than it holds."""

    def __init__(
        self,
        root: Path,
        devices: Sequence[Device],
        most: int,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._root = root
        self._devices = devices
        self._most = most
        self._command = command
        self._running: dict[str, _Running] = {}
        self._ended: queue.SimpleQueue[str] = queue.SimpleQueue()

    def has_room(self, job: Job) -> bool:
        if len(self._running) >= self._most:
            return False
        device = self._emptiest()
        return self._load(device)[0] + device.share(job) <= 1

    def _emptiest(self) -> Device:
        """The device with most room left, or with the fewest processes."""
        return min(self._devices, key=self._load)

    def _load(self, device: Device) -> tuple[Fraction, int]:
        """What is taken of a device, and by how many."""
        shares = [one.share for one in self._running.values() if one.device is device]
        return sum(shares, Fraction(0)), len(shares)

    def start(self, job: Job) -> str:
        device = self._emptiest()
        path = write_job(self._root, job)
        with log_file(self._root, job.name).open("ab") as log:
            process = start_worker(path, log, device.settings, self._command)
        self._running[job.name] = _Running(device, device.share(job), process)
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
        process = self._running.pop(name).process
        assert process.stdin is not None
        process.stdin.close()
        return Ended(name, platform.node(), reason_of(process.returncode))

    def stop(self) -> None:
        for one in self._running.values():
            one.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        for one in self._running.values():
            kill_group(one.process)
        for name in list(self._running):
            self._running[name].process.wait()
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
