"""What a machine of a cluster does with a job: run its process and send home what it writes."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import json
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from .. import __version__
from .folder import CELLS, JOBS, job_file, log_file
from .local import cache_settings, cpu_settings, gpu_settings, kill_group, start_worker
from .parcels import Changes, unpack

Report = Callable[[str, bytes | None], bool]
"""Tells who works on a job and what is new; answers whether to stop."""


@dataclasses.dataclass(frozen=True)
class Order:
    """A job for a machine that need not see the folder of the grid."""

    job: str
    text: str
    """Of the job's file."""
    parcel: bytes
    """The runs as far as they are."""
    home: str
    """The folder of the grid, where it is on a disk that this machine shares."""
    proof: str | None
    """A file of the folder that only those see who share the disk; none if nobody does."""
    threads: int
    on_gpu: bool
    every: float
    """Seconds between two reports."""
    majepa: str = __version__


def work(order: Order, report: Report) -> int:
    """Work on a job until it ends or is to stop; the exit code of its process."""
    if order.majepa != __version__:
        raise RuntimeError(
            f"{platform.node()} has majepa {__version__}, the grid is run by {order.majepa}; "
            "install the same version on all machines"
        )
    with _workplace(order) as (root, is_home):
        cells = list(json.loads(order.text)["cells"])
        changes = None if is_home else Changes(root, order.job, cells)
        settings = gpu_settings() if order.on_gpu else cpu_settings(order.threads)
        with log_file(root, order.job).open("ab") as log:
            cache = root if is_home else _lasting_folder()
            path = job_file(root, order.job)
            process = start_worker(path, log, settings | cache_settings(cache))
        try:
            _accompany(process, order.every, lambda: _tell(report, changes))
        finally:
            kill_group(process)
            assert process.stdin is not None
            process.stdin.close()
        _tell(report, changes)
        return process.wait()


@contextlib.contextmanager
def _workplace(order: Order) -> Iterator[tuple[Path, bool]]:
    """The folder of the grid where it can be seen, and a copy of what is needed elsewhere."""
    home = Path(order.home)
    if order.proof is not None and (home / order.proof).is_file():
        yield home, True
        return
    with tempfile.TemporaryDirectory(prefix="majepa-job-", ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        for name in (CELLS, JOBS):
            (root / name).mkdir()
        unpack(root, order.parcel)
        job_file(root, order.job).write_text(order.text, encoding="utf-8")
        yield root, False


def _accompany(process: subprocess.Popen[bytes], every: float, tell: Callable[[], bool]) -> None:
    """Report until a process ends, which it is asked to if the answer is to stop."""
    is_asked = False
    while True:
        if tell() and not is_asked:
            process.terminate()
            is_asked = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(every)
            return


def _tell(report: Report, changes: Changes | None) -> bool:
    return report(platform.node(), changes.take() if changes else None)


def _lasting_folder() -> Path:
    """Of this user on this machine, for what the next job can use."""
    return Path(tempfile.gettempdir()) / f"majepa-{getpass.getuser()}"
