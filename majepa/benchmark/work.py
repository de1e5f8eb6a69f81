"""The process that works on one job of a grid:

    python -m majepa.benchmark.work FOLDER/jobs/JOB.json

It starts the job's runs or goes on with them. It ends with code 0 when all are finished and with
`STOPPED` when a signal, or the end of whoever holds its standard input, asked it to save and stop.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from .folder import CELLS, lock_file

STOPPED = 75
"""Exit code of a process that saved and stopped before its job was finished."""


def main(path: Path) -> int:
    _stop_with_parent()
    root = path.resolve().parents[1]
    job = json.loads(path.read_text(encoding="utf-8"))
    with _alone(lock_file(root, job["job"])):
        return _train(root, job["cells"])


def _train(root: Path, cells: dict[str, dict]) -> int:
    from rich.console import Console

    from ..config import from_json
    from ..training import INTERRUPTED, train_together

    folders = [root / CELLS / name for name in cells]
    for folder in folders:
        _clear_unclaimed(folder)
    configs = [from_json(settings) for settings in cells.values()]
    results = train_together(configs, folders, console=Console())
    if any(result.stopped == INTERRUPTED for result in results):
        print("stopped; the runs are saved", flush=True)
        return STOPPED
    return 0


def _stop_with_parent() -> None:
    """Turn the end of whoever started this process, killed or not, into the signal to stop."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait for another process on the same job, such as one that outlives its parent to save."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another process that works on this job", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _clear_unclaimed(folder: Path) -> None:
    """Remove a folder whose run was killed before it had written its settings."""
    from ..run_folder import CONFIG, VERSIONS

    if not folder.is_dir() or (folder / CONFIG).exists():
        return
    if all(entry.name == VERSIONS or entry.name.startswith(".") for entry in folder.iterdir()):
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
