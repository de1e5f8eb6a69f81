"""Files that are either whole or not there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """A new file in the same folder, renamed to `path` once it is whole.

    A failure leaves nothing behind, and an older file as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _beside(path, str(os.getpid()))
    try:
        yield partial
        partial.replace(path)
    finally:
        # Where the folder is a file, there is nothing to remove and no way to ask.
        with contextlib.suppress(NotADirectoryError):
            partial.unlink(missing_ok=True)


def partials(path: Path) -> list[Path]:
    """What writers of `path` left behind that were killed, or are still writing."""
    return list(path.parent.glob(_beside(path, "*").name))


def _beside(path: Path, writer: str) -> Path:
    return path.with_name(f".{path.stem}.{writer}{path.suffix}")
