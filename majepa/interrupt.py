"""Ctrl-C as a request: what runs comes to an orderly end, unless one insists."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

IMPATIENT = 1.0
"""Seconds after which another Ctrl-C is a second one, not an echo of the first."""


@contextlib.contextmanager
def interruptible(promise: str) -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C or SIGTERM ask for an end, answered with a promise; another Ctrl-C is raised."""
    asked: list[float] = []

    def ask(number: int, _: object) -> None:
        if asked and number == signal.SIGINT and time.monotonic() - asked[0] > IMPATIENT:
            raise KeyboardInterrupt
        if not asked:
            asked.append(time.monotonic())
            # Not through the console, which may be in the middle of a line.
            os.write(2, f"{promise}\n".encode())

    if threading.current_thread() is not threading.main_thread():
        yield lambda: bool(asked)
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in previous:
        signal.signal(number, ask)
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
