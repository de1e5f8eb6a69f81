"""SIGReg: random one-dimensional views of the embeddings should look standard normal.

For a direction `a` and the projections `u_n` of `N` samples, the discrepancy is

    N ∫ | mean_n exp(i t u_n) - exp(-t²/2) |² exp(-t²/2) dt

over an even grid on [0, limit], by the trapezoid rule; the integrand is even, so the half line
counts twice. The statistic is averaged over directions and over agent slots that have samples.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key


def sigreg(
    e: Float[Array, "B T N E"],
    valid: Bool[Array, "B T N"],
    key: Key[Array, ""],
    *,
    projections: int = 256,
    points: int = 17,
    limit: float = 3.0,
) -> Float[Array, ""]:
    """About 1 for Gaussian samples of any number, 0.4 N for collapsed ones."""
    a = jax.random.normal(key, (e.shape[-1], projections))
    a = a / jnp.linalg.norm(a, axis=0, keepdims=True)
    u = jnp.einsum("btne,em->btnm", e.astype(jnp.float32), a)
    count = jnp.sum(valid, axis=(0, 1)).astype(jnp.float32)
    weight = (valid / jnp.maximum(count, 1.0)[None, None])[..., None]
    step = limit / (points - 1)
    statistic = jnp.zeros(u.shape[2:])
    for k in range(points):
        t = k * step
        gauss = math.exp(-(t**2) / 2)
        real = jnp.sum(weight * jnp.cos(t * u), axis=(0, 1)) - gauss
        imaginary = jnp.sum(weight * jnp.sin(t * u), axis=(0, 1))
        trapezoid = step if k in (0, points - 1) else 2 * step
        statistic += trapezoid * gauss * (real**2 + imaginary**2)
    nonempty = count > 0
    per_slot = count * jnp.mean(statistic, axis=-1)
    return jnp.sum(jnp.where(nonempty, per_slot, 0.0)) / jnp.maximum(jnp.sum(nonempty), 1)
