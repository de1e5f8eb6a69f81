"""NVIDIA's multi-process service: kernels of several processes on one GPU at the same time."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence

PROGRAM = "nvidia-cuda-mps-control"
PATIENCE = 30.0
"""Seconds that the daemon may take to answer."""
TRIAL = """
import ctypes

cuda = ctypes.CDLL("libcuda.so.1")
device, context = ctypes.c_int(), ctypes.c_void_p()
assert cuda.cuInit(0) == 0
assert cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
"""


@contextlib.contextmanager
def shared_gpu() -> Iterator[Mapping[str, str]]:
    """A daemon of our own while jobs run: what they need to find it, nothing if there is none."""
    if shutil.which(PROGRAM) is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="majepa-mps-", ignore_cleanup_errors=True) as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        if not _call([PROGRAM, "-d"], places):
            yield {}
            return
        try:
            yield places if _serves(places) else {}
        finally:
            _call([PROGRAM], places, "quit\n")


def _serves(places: Mapping[str, str]) -> bool:
    """Whether a process gets hold of the GPU through the daemon, which starts even if none can."""
    return _call([sys.executable, "-S", "-c", TRIAL], places)


def _call(command: Sequence[str], places: Mapping[str, str], text: str = "") -> bool:
    """Whether a program ends well."""
    try:
        # Its output goes nowhere: the daemon would hold a pipe open for as long as it lives.
        answer = subprocess.run(
            command,
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
