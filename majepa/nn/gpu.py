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
"""A variable of the environment: with 0, GPUs use what XLA makes of the plain versions."""


def may_take_kernels(dtype: DTypeLike) -> bool:
    """Of numbers of a type. What kernels are written in takes a while to load: not before this."""
    if dtype != jnp.bfloat16 or kernels_are_off():
        return False
    device = jax.devices()[0]
    if device.platform == "gpu" and not has_room(getattr(device, "compute_capability", "")):
        return False
    return _is_there()


def kernels_are_off() -> bool:
    """Whether the environment wants none; what it cannot want is an error."""
    value = os.environ.get(SWITCH, "").strip()
    if value not in ("", "0"):
        raise ConfigError(f"{SWITCH} is {value!r}; it may be 0, for none of our kernels, or unset")
    return value == "0"


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
