"""NVIDIA's multi-process service: kernels of several processes on one GPU at the same time."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping

PROGRAM = "nvidia-cuda-mps-control"
PATIENCE = 20.0
"""Seconds that the daemon may take to answer."""


@contextlib.contextmanager
def shared_gpu() -> Iterator[Mapping[str, str]]:
    """A daemon of our own while jobs run: what they need to find it, nothing if there is none."""
    if shutil.which(PROGRAM) is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="majepa-mps-", ignore_cleanup_errors=True) as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        if not _call(["-d"], places):
            yield {}
            return
        try:
            yield places
        finally:
            _call([], places, "quit\n")


def _call(arguments: list[str], places: Mapping[str, str], text: str = "") -> bool:
    """Whether the program could be told something."""
    try:
        # Its output goes nowhere: the daemon would hold a pipe open for as long as it lives.
        answer = subprocess.run(
            [PROGRAM, *arguments],
            env={**os.environ, **places},
            input=text,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE,
            check=False,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0
