"""Whether GPUs may take kernels of our own in the place of XLA's.

Where a kernel may be taken, `jax.lax.platform_dependent` chooses between it and the plain version
when a program is compiled; this is about what is known before.
"""

from __future__ import annotations

import functools
import importlib
import os

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

from ..config import ConfigError

SWITCH = "MAJEPA_KERNELS"
"""A variable of the environment: with 0, GPUs use what XLA makes of the plain versions; the names
of trials, with commas between them, or `all` add what has not been measured on a card yet."""
FEW_ROWS, EARLY = TRIALS = ("few_rows", "early")
"""Blocks for few rows; kernels that let the next one start while they still run."""


def may_take_kernels(dtype: DTypeLike) -> bool:
    """Of numbers of a type. What kernels are written in takes a while to load: not before this."""
    if dtype != jnp.bfloat16 or wishes() == ["0"]:
        return False
    device = jax.devices()[0]
    if device.platform == "gpu" and not has_room(getattr(device, "compute_capability", "")):
        return False
    return _is_there()


def is_asked_for(trial: str) -> bool:
    """Whether what has not been measured yet is asked for."""
    return trial in wishes() or "all" in wishes()


def wishes() -> list[str]:
    """What the environment asks for; what cannot be is an error."""
    value = os.environ.get(SWITCH, "")
    found = value.replace(",", " ").split()
    if found != ["0"] and not set(found) <= {*TRIALS, "all"}:
        raise ConfigError(
            f"{SWITCH} is {value!r}; it may be 0 alone, all, or some of {', '.join(TRIALS)} with "
            "commas between them"
        )
    return found


@functools.cache
def _is_there() -> bool:
    """Whether what kernels are written in can be loaded."""
    try:
        importlib.import_module("jax.experimental.pallas.triton")
    except ImportError:
        return False
    return True


def has_room(capability: str) -> bool:
    """Whether a processor of such a card can hold what a kernel works on: 9.0 and 10 were made for
    data centres."""
    major = capability.split(".", maxsplit=1)[0]
    return major in ("9", "10")
