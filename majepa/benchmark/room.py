"""What a job takes of a GPU, and so how many of them share one."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from .jobs import Job


class Need(NamedTuple):
    """Of jobs of one kind."""

    per_gpu: int
    """So many of them fill a GPU."""
    memory: int
    """Bytes of its memory that each may come to use; a generous guess, not a measurement."""


GIB = 1 << 30
BASELINE = Need(14, 8 * GIB)
"""Small programs. So many were run at a time on an H200."""
MAJEPA = Need(2, 40 * GIB)
"""At the paper's sizes one run nearly fills a GPU: two at a time had 1.35 times the throughput of
one; more were not tried."""


def gpu_share(job: Job, memory: int | None = None) -> Fraction:
    """What a job takes of a GPU with so many bytes; all of it if it needs more than there is."""
    need = BASELINE if job.is_packed else MAJEPA
    share = Fraction(1, need.per_gpu)
    if memory is not None:
        share = max(share, Fraction(need.memory, memory))
    return min(share, Fraction(1))
