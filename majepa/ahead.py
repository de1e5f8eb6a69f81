"""Programs compiled side by side, ahead of the calls that need them.

Tracing takes turns, for it is Python; the compiler works in threads. JAX keeps what was compiled,
so that a call with arguments of the same shapes and places finds its program there.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

CORES_EACH = 4
"""Of a compiler, which has threads of its own: with fewer, two at a time take longer than one after
the other."""


class Ahead:
    """Compiles what it is given while its owner goes on: in turn, or side by side if there are
    cores enough."""

    def __init__(self, cores: int) -> None:
        workers = max(1, cores // CORES_EACH)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="compiler")
        self._begun: list[Future[Any]] = []

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        """Whoever leaves early, by an error or Ctrl-C, does not wait here for what nobody needs;
        the process still ends after what is being compiled."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def begin(self, compiling: Callable[[], Any]) -> Future[Any]:
        """Let a thread do it; what it raises is raised where its end is waited for."""
        begun = self._pool.submit(compiling)
        self._begun.append(begun)
        return begun

    def wait(self) -> None:
        """Until all that was begun is done."""
        for begun in self._begun:
            begun.result()
