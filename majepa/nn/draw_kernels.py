"""Kernels for GPUs: classes drawn from logits, once through memory.

XLA writes down log-probabilities and sums of them, and reads them again.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Float32, Int

from .attention import exact
from .kernels import Ref, held, launch, suit, total

AT_ONCE = 64
"""Variables of a program."""
MOST_CLASSES = 128


def suits(classes: int) -> bool:
    return suit(classes) and classes <= MOST_CLASSES


def drawn(
    logits: Float[Array, "M K"], noise: Float[Array, " M"], share: float, *, interpret: bool = False
) -> Int[Array, " M"]:
    """`dists.sample_by` of what `dists.unimix` makes of logits."""
    variables, classes = logits.shape

    def drawn_kernel(logits: Ref, noise: Ref, out: Ref) -> None:
        first = pl.program_id(0) * AT_ONCE
        here, there = pl.ds(first, AT_ONCE), first + jnp.arange(AT_ONCE) < variables
        found = held(logits.at[here, :], jnp.broadcast_to(there[:, None], (AT_ONCE, classes)))
        latent = class_of(exact(found), held(noise.at[here], there), share)
        triton.store(out.at[here], latent, mask=there)

    out, grid = jax.ShapeDtypeStruct((variables,), jnp.int32), (math.ceil(variables / AT_ONCE),)
    return launch(drawn_kernel, out, grid, logits, noise, tile="drawn", interpret=interpret)


def class_of(
    logits: Float32[Array, "M K"], noise: Float32[Array, " M"], share: float
) -> Int[Array, " M"]:
    """Within a kernel."""
    classes = logits.shape[1]
    weight = jnp.exp(logits - jnp.max(logits, axis=1, keepdims=True))
    mixed = (1 - share) * weight / total(weight) + share / classes
    passed = jnp.cumsum(mixed, axis=1) <= noise[:, None]
    return jnp.minimum(jnp.sum(passed.astype(jnp.int32), axis=1), classes - 1)
