"""The jobs of a grid, one after the other and some at a time, until all have come to an end."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from ..log import JsonLines
from ..progress import clock_time
from .folder import EVENTS
from .jobs import Job
from .workers import Ended, Workers

TICK = 0.5
"""Seconds between two looks at the clock and at the runs."""
LOSSES = 20
"""Machines that may be lost under a job before it counts as failed."""
INTERRUPTED = "interrupted"

Event = Literal["started", "finished", "stopped", "failed"]
"""Of a job, as `jobs.jsonl` has it."""


@runtime_checkable
class View(Protocol):
    """Where a person sees how far the grid is."""

    def started(self, job: Job, attempt: int, machine: str) -> None: ...

    def ended(
        self, job: Job, event: Event, seconds: float, reason: str | None, *, again: bool
    ) -> None: ...

    def refresh(self, waiting: int) -> None:
        """Called again and again; jobs that nobody works on yet."""
        ...


@dataclasses.dataclass(frozen=True)
class Outcome:
    failed: dict[str, str]
    """Why, by the name of the job."""
    stopped: str | None
    """Why the jobs that are left were not worked on; none if they were."""


@dataclasses.dataclass
class _Attempt:
    job: Job
    number: int = 0
    losses: int = 0
    started: float = 0.0


class Runner:
    """Hands out jobs to workers, again if they fail, and writes down what happens."""

    def __init__(
        self,
        root: Path,
        workers: Workers,
        view: View,
        *,
        retries: int,
        seconds: float | None = None,
        when_finished: Callable[[], None] = lambda: None,
    ) -> None:
        self._root = root
        self._workers = workers
        self._view = view
        self._retries = retries
        self._seconds = seconds
        self._when_finished = when_finished
        self._waiting: deque[_Attempt] = deque()
        self._running: dict[str, _Attempt] = {}
        self._failed: dict[str, str] = {}
        self._stopped: str | None = None

    def run(self, jobs: Sequence[Job], is_interrupted: Callable[[], bool]) -> Outcome:
        """Until every job has ended or an end was asked for; a second Ctrl-C kills."""
        began = time.monotonic()
        self._waiting.extend(_Attempt(job) for job in jobs)
        self._events = JsonLines(self._root / EVENTS)
        try:
            while self._waiting or self._running:
                self._stop_if_due(is_interrupted(), time.monotonic() - began)
                if self._stopped:
                    self._waiting.clear()
                self._fill()
                for ended in self._workers.wait(TICK) if self._running else ():
                    self._settle(ended)
                self._view.refresh(len(self._waiting))
        except KeyboardInterrupt:
            self._stopped = INTERRUPTED
        finally:
            # Whatever ends this loop, no job goes on without it.
            self._workers.kill()
            self._events.close()
        return Outcome(self._failed, self._stopped)

    def _stop_if_due(self, is_interrupted: bool, elapsed: float) -> None:
        if self._stopped:
            return
        if is_interrupted:
            self._stopped = INTERRUPTED
        elif self._seconds is not None and elapsed >= self._seconds:
            self._stopped = f"the time limit of {clock_time(self._seconds)} was reached"
        if self._stopped:
            self._workers.stop()

    def _fill(self) -> None:
        while self._waiting and self._workers.has_room(self._waiting[0].job):
            attempt = self._waiting.popleft()
            attempt.number += 1
            attempt.started = time.monotonic()
            machine = self._workers.start(attempt.job)
            self._running[attempt.job.name] = attempt
            self._note("started", attempt, machine=machine)
            self._view.started(attempt.job, attempt.number, machine)

    def _settle(self, ended: Ended) -> None:
        attempt = self._running.pop(ended.job)
        reason = ended.reason
        if reason is None and not attempt.job.is_finished(self._root):
            reason = "it ended without the final evaluations of all its runs"
        if self._stopped and reason is not None:
            self._end(attempt, "stopped", ended.machine, reason)
        elif reason is not None:
            self._fail(attempt, ended, reason)
        else:
            self._end(attempt, "finished", ended.machine, None)
            self._when_finished()

    def _fail(self, attempt: _Attempt, ended: Ended, reason: str) -> None:
        attempt.losses += ended.is_lost
        failures = attempt.number - attempt.losses
        again = attempt.losses <= LOSSES if ended.is_lost else failures <= self._retries
        self._end(attempt, "failed", ended.machine, reason, again=again)
        if again:
            self._waiting.append(attempt)
        else:
            self._failed[attempt.job.name] = reason

    def _end(
        self,
        attempt: _Attempt,
        event: Event,
        machine: str,
        reason: str | None,
        *,
        again: bool = False,
    ) -> None:
        seconds = round(time.monotonic() - attempt.started, 1)
        why = {} if reason is None else {"reason": reason}
        self._note(event, attempt, seconds=seconds, machine=machine, **why)
        self._view.ended(attempt.job, event, seconds, reason, again=again)

    def _note(self, event: Event, attempt: _Attempt, **more: Any) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        about = {"job": attempt.job.name, "attempt": attempt.number}
        self._events.write({"time": now, "event": event, **about, **more})
