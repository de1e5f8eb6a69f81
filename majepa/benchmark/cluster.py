"""Jobs as tasks of a Ray cluster, whose machines may or may not share a disk with this one.

Ray decides where a task runs and tells when a machine is lost; what to try again, and from which
checkpoint, is decided here, where everything arrives that a task has to report.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import ConfigError
from .folder import JOBS
from .jobs import Job, write_job
from .local import CORES_PER_JOB
from .node import Order, work
from .parcels import files_of, pack, receive
from .room import gpu_share
from .workers import Ended, reason_of

REPORT_SECONDS = 5.0
CONNECT_SECONDS = 5.0
SOMEWHERE = "the cluster"
UNITS = 10_000
"""Of a CPU or GPU; Ray counts in nothing smaller."""

Share = Mapping[str, float]
"""What a job takes of its machine, by the names of Ray's resources."""


@contextlib.contextmanager
def cluster_workers(
    root: Path,
    address: str,
    jobs: Sequence[Job],
    *,
    most: int | None = None,
    cpus: int | None = None,
    gpus: float | None = None,
    may_share: bool = True,
    report_seconds: float = REPORT_SECONDS,
) -> Iterator[ClusterWorkers]:
    """Join a cluster; its machines work in the grid's folder where they see it and `may_share`."""
    if address != "auto":
        _require_answer(address)
    ray = _import_ray()
    _connect(ray, address)
    proof = Path(JOBS) / f".{uuid.uuid4().hex}" if may_share else None
    try:
        machines = _machines(ray)
        shares = {job.name: _share(job, machines, cpus, gpus) for job in jobs}
        yield ClusterWorkers(ray, root, shares, most, proof, report_seconds)
    finally:
        if proof is not None:
            (root / proof).unlink(missing_ok=True)
        ray.shutdown()


class ClusterWorkers:
    def __init__(
        self,
        ray: Any,
        root: Path,
        shares: Mapping[str, Share],
        most: int | None,
        proof: Path | None,
        report_seconds: float,
    ) -> None:
        self._ray = ray
        self._root = root
        self._shares = shares
        self._most = most
        self._proof = proof
        self._report_seconds = report_seconds
        self._desk = _open_desk(ray)
        self._task = ray.remote(_task)
        self._running: dict[Any, tuple[str, Job]] = {}
        """Tickets and jobs by Ray's names of tasks."""
        self._machines: dict[str, str] = {}
        """By ticket, of tasks that have begun."""

    def has_room(self, job: Job) -> bool:
        if not self._running:
            return True
        if self._most is not None and len(self._running) >= self._most:
            return False
        taken = [self._shares[other.name] for _, other in self._running.values()]
        return _hold(_machines(self._ray), [*taken, self._shares[job.name]])

    def start(self, job: Job) -> str:
        share = self._shares[job.name]
        path = write_job(self._root, job)
        if self._proof is not None:
            (self._root / self._proof).touch()
        files = files_of(self._root, job.name, [cell.name for cell in job.cells])
        order = Order(
            job=job.name,
            text=path.read_text(encoding="utf-8"),
            parcel=pack(self._root, files),
            home=str(self._root.resolve()),
            proof=self._proof and str(self._proof),
            threads=max(1, int(share["CPU"])),
            on_gpu=share["GPU"] > 0,
            every=self._report_seconds,
        )
        ticket = uuid.uuid4().hex
        task = self._task.options(num_cpus=share["CPU"], num_gpus=share["GPU"], max_retries=0)
        self._running[task.remote(order, self._desk, ticket)] = (ticket, job)
        return SOMEWHERE

    def wait(self, seconds: float) -> list[Ended]:
        done, _ = self._ray.wait(list(self._running), timeout=seconds)
        # Whatever a task had to report arrived before its end did.
        self._receive()
        return [self._ended(task) for task in done]

    def _receive(self) -> None:
        jobs = dict(self._running.values())
        for ticket, machine, parcel in self._ray.get(self._desk.collect.remote()):
            # Someone who was given up may still be reporting.
            if ticket in jobs:
                self._machines[ticket] = machine
                if parcel is not None:
                    receive(self._root, jobs[ticket].name, parcel)

    def _ended(self, task: Any) -> Ended:
        errors = self._ray.exceptions
        ticket, job = self._running.pop(task)
        self._desk.close.remote(ticket)
        machine = self._machines.pop(ticket, SOMEWHERE)
        try:
            return Ended(job.name, machine, reason_of(self._ray.get(task)))
        except (errors.RayTaskError, errors.TaskCancelledError, errors.OutOfMemoryError) as error:
            return Ended(job.name, machine, _last_line(error))
        except errors.RayError as error:
            reason = f"its machine was lost ({type(error).__name__})"
            return Ended(job.name, machine, reason, is_lost=True)

    def stop(self) -> None:
        self._receive()
        self._ray.get(self._desk.stop.remote())
        for task, (ticket, _) in self._running.items():
            if ticket not in self._machines:
                self._ray.cancel(task)

    def kill(self) -> None:
        for task in self._running:
            self._ray.cancel(task, force=True)


def _task(order: Order, desk: Any, ticket: str) -> int:
    """Runs on a machine of the cluster."""
    ray = _import_ray()

    def report(machine: str, parcel: bytes | None) -> bool:
        return ray.get(desk.report.remote(ticket, machine, parcel))

    return work(order, report)


class _Desk:
    """Where tasks report and learn whether to stop; lives beside the process that runs the grid."""

    def __init__(self) -> None:
        self._reports: list[tuple[str, str, bytes | None]] = []
        self._closed: set[str] = set()
        self._is_stopped = False

    def report(self, ticket: str, machine: str, parcel: bytes | None) -> bool:
        if ticket not in self._closed:
            self._reports.append((ticket, machine, parcel))
        return self._is_stopped or ticket in self._closed

    def collect(self) -> list[tuple[str, str, bytes | None]]:
        reports, self._reports = self._reports, []
        return reports

    def close(self, ticket: str) -> None:
        self._closed.add(ticket)

    def stop(self) -> None:
        self._is_stopped = True


def _open_desk(ray: Any) -> Any:
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    node = ray.get_runtime_context().get_node_id()
    here = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(_Desk).options(num_cpus=0, scheduling_strategy=here).remote()


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            "--cluster needs the package ray, which is not installed; "
            "`uv sync --extra cluster` or `pip install '.[cluster]'` brings it"
        ) from error


def _connect(ray: Any, address: str) -> None:
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"cannot join a Ray cluster at {address}: {_last_line(error)}") from error


def _require_answer(address: str) -> None:
    """Refuse an address where nobody listens, sooner than Ray would."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise ConfigError(f"{address!r} is no address of a cluster; it must be HOST:PORT or auto")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"nobody answers at {address} ({error}); `ray start --head` starts a cluster and "
            "tells its address"
        ) from error


def _machines(ray: Any) -> list[Mapping[str, float]]:
    """Resources of those that are alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _share(
    job: Job, machines: Sequence[Mapping[str, float]], cpus: int | None, gpus: float | None
) -> Share:
    """What a job takes of its machine; Ray does not tell how much memory GPUs have."""
    has_gpus = any(machine.get("GPU", 0) > 0 for machine in machines)
    if gpus is None:
        gpus = math.floor(UNITS * gpu_share(job)) / UNITS if has_gpus else 0.0
    if cpus is None:
        most = max((int(machine.get("CPU", 0)) for machine in machines), default=0)
        cpus = 1 if gpus > 0 else max(1, min(CORES_PER_JOB, most))
    share = {"CPU": float(cpus), "GPU": float(gpus)}
    if not _hold(machines, [share]):
        raise ConfigError(
            f"no machine of the cluster has the {share['CPU']:g} CPUs and {share['GPU']:g} GPUs "
            "of a job; see --cpus-per-job and --gpus-per-job"
        )
    return share


def _hold(machines: Sequence[Mapping[str, float]], shares: Sequence[Share]) -> bool:
    """Whether jobs find room, each on the first machine that has some left."""
    free = [{name: _units(machine.get(name, 0)) for name in ("CPU", "GPU")} for machine in machines]
    for share in shares:
        needed = {name: _units(part) for name, part in share.items()}
        room = next((one for one in free if all(one[name] >= needed[name] for name in one)), None)
        if room is None:
            return False
        for name, units in needed.items():
            room[name] -= units
    return True


def _units(amount: float) -> int:
    return round(UNITS * amount)


def _last_line(error: BaseException) -> str:
    """The end of a remote traceback, or the only line of a message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
