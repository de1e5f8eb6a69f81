"""The reductions of every loss: means over the entries that count, zero where none does."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def masked_mean(x: Float[Array, "*b"], valid: Bool[Array, "*b"]) -> Float[Array, ""]:
    """Mean over valid entries, whatever the others hold."""
    kept = jnp.where(valid, x.astype(jnp.float32), 0.0)
    return jnp.sum(kept) / jnp.maximum(jnp.sum(valid), 1)


def weighted_mean(x: Float[Array, "*b"], weight: Float[Array, "*b"]) -> Float[Array, ""]:
    """Mean under non-negative weights; entries of weight zero may hold anything."""
    weight = weight.astype(jnp.float32)
    kept = jnp.where(weight > 0, x.astype(jnp.float32), 0.0)
    total = jnp.sum(weight)
    return jnp.sum(weight * kept) / jnp.where(total > 0, total, 1.0)


def standardise(
    x: Float[Array, "*b"], weight: Float[Array, "*b"], floor: float = 1e-8
) -> Float[Array, "*b"]:
    """`x` with weighted mean 0 and variance 1; `floor` keeps a near-constant `x` near 0."""
    centred = x.astype(jnp.float32) - weighted_mean(x, weight)
    variance = weighted_mean(jnp.square(centred), weight)
    return centred / jnp.sqrt(variance + floor)
