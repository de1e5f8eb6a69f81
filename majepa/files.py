"""Files that are either whole or not there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """A new file in the same folder, renamed to `path` once it is whole.

    A failure leaves nothing behind, and an older file as it was; one of the system names `path`.
    """
    partial = _beside(path, str(os.getpid()))
    try:
        with told_of(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield partial
            partial.replace(path)
    finally:
        # Where there is no folder, there is nothing to remove; why is told already.
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def told_of(path: Path) -> Iterator[None]:
    """What the system refuses is told of the path that was asked for, in one sentence."""
    try:
        yield
    except OSError as error:
        is_file = isinstance(error, FileExistsError) and error.filename
        reason = f"{error.filename} is a file" if is_file else error.strerror or error
        raise OSError(f"cannot write {path}: {reason}") from error


def partials(path: Path) -> list[Path]:
    """What writers of `path` left behind that were killed, or are still writing."""
    return list(path.parent.glob(_beside(path, "*").name))


def _beside(path: Path, writer: str) -> Path:
    return path.with_name(f".{path.stem}.{writer}{path.suffix}")
