"""Runs on their way between machines that share no disk: files of a grid's folder as one archive.

An archive that arrives is kept beside the folders until all its files are in place, so that a
process that is killed in between does not leave a mixture of two moments.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

from ..files import written_beside
from ..run_folder import CHECKPOINT
from .folder import CELLS, JOBS, log_file

SUFFIX = ".parcel"


def files_of(root: Path, job: str, cells: Iterable[str]) -> list[Path]:
    """What a job has written so far, checkpoints first.

    A log may be ahead of a checkpoint that is packed with it, and is cut back; it must not be
    behind.
    """
    found = [
        path
        for cell in cells
        for path in sorted((root / CELLS / cell).rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    ]
    found.sort(key=lambda path: path.parent.name != CHECKPOINT.parent.name)
    log = log_file(root, job)
    return [*found, log] if log.is_file() else found


def pack(root: Path, files: Iterable[Path]) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path in files:
            content = path.read_bytes()
            entry = tarfile.TarInfo(path.relative_to(root).as_posix())
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return archive.getvalue()


def unpack(root: Path, parcel: bytes) -> None:
    """Put every file in its place, each of them whole."""
    with tarfile.open(fileobj=io.BytesIO(parcel), mode="r") as tar:
        for entry in tar:
            target = (root / entry.name).resolve()
            content = tar.extractfile(entry)
            if content is None or not target.is_relative_to(root.resolve()):
                raise ValueError(f"{entry.name!r} does not belong into the folder of a grid")
            with written_beside(target) as partial:
                partial.write_bytes(content.read())


def receive(root: Path, job: str, parcel: bytes) -> None:
    """Unpack all of a parcel, now or after the next start."""
    kept = root / JOBS / f"{job}{SUFFIX}"
    with written_beside(kept) as partial:
        partial.write_bytes(parcel)
    _unpack_kept(root, kept)


def recover(root: Path) -> None:
    """Unpack what had arrived when a process was killed."""
    for kept in (root / JOBS).glob(f"[!.]*{SUFFIX}"):
        _unpack_kept(root, kept)


def _unpack_kept(root: Path, kept: Path) -> None:
    unpack(root, kept.read_bytes())
    kept.unlink()


class Changes:
    """The files of a job that were written since the last time someone asked."""

    def __init__(self, root: Path, job: str, cells: Iterable[str]) -> None:
        self._root = root
        self._job = job
        self._cells = list(cells)
        self._seen = self._now()

    def take(self) -> bytes | None:
        now = self._now()
        changed = [path for path, version in now.items() if self._seen.get(path) != version]
        self._seen = now
        return pack(self._root, changed) if changed else None

    def _now(self) -> dict[Path, tuple[int, int]]:
        stats = {path: path.stat() for path in files_of(self._root, self._job, self._cells)}
        return {path: (stat.st_mtime_ns, stat.st_size) for path, stat in stats.items()}
