"""Several runs in one program: what each of them must know of the others.

A run is traced as if it were alone. A loop that goes on as long as one of the runs needs it takes
its bound from `most` or `least`: a bound for each run would copy everything that the loop carries,
in every iteration. Runs that are done compute along, and `if_wanted` drops what they computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

Tree = TypeVar("Tree")
RUNS = "runs"
"""The axis of packed runs."""


def packed(one: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one run for several, which lie on a first axis of all arrays."""
    return jax.vmap(one, axis_name=RUNS)


def is_packed() -> bool:
    """Whether what is being traced is one of several runs."""
    try:
        jax.lax.axis_size(RUNS)
    except NameError:
        return False
    return True


def most(x: Array) -> Array:
    """The largest over all runs of a program, the same for each of them."""
    return jax.lax.pmax(x, RUNS) if is_packed() else x


def least(x: Array) -> Array:
    """The smallest over all runs of a program, the same for each of them."""
    return jax.lax.pmin(x, RUNS) if is_packed() else x


def if_wanted(wanted: Bool[Array, ""], new: Tree, old: Tree) -> Tree:
    """`new` for a run that wanted it, `old` for one that computed along. Alone, a run computes
    only what it wants."""
    if not is_packed():
        return new
    return jax.tree.map(lambda yes, no: jnp.where(wanted, yes, no), new, old)
