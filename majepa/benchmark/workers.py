"""Who works on jobs: what a grid asks of processes on this machine and of a cluster alike."""

from __future__ import annotations

import dataclasses
import signal
from typing import Protocol, runtime_checkable

from .jobs import Job
from .work import STOPPED


@dataclasses.dataclass(frozen=True)
class Ended:
    """A job that nobody works on any more."""

    job: str
    machine: str
    reason: str | None = None
    """Why it did not come to its end; none if it did."""
    is_lost: bool = False
    """Whether the machine is gone, which is no fault of the job."""


@runtime_checkable
class Workers(Protocol):
    def has_room(self, job: Job) -> bool:
        """Whether a job can be begun beside those that are worked on; any can if there are none."""
        ...

    def start(self, job: Job) -> str:
        """Begin to work on a job, or go on with it; returns where."""
        ...

    def wait(self, seconds: float) -> list[Ended]:
        """Those that have ended, at once if there are any, or within some seconds."""
        ...

    def stop(self) -> None:
        """Ask for everything to be saved and ended; `wait` tells when."""
        ...

    def kill(self) -> None:
        """End everything at once; what was not saved is lost."""
        ...


def reason_of(code: int) -> str | None:
    """What an exit code says."""
    if code == 0:
        return None
    if code == STOPPED:
        return "it was asked to stop"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
