"""SIGReg: random one-dimensional views of the embeddings should look standard normal.

For a direction `a` and the projections `u_n` of `N` samples, the discrepancy is

    N ∫ | mean_n exp(i t u_n) - exp(-t²/2) |² exp(-t²/2) dt

over an even grid on [0, limit], by the trapezoid rule; the integrand is even, so the half line
counts twice. The statistic is averaged over directions and over agent slots that have samples.
"""

from __future__ import annotations

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
    weight = (valid / jnp.maximum(count, 1.0)[None, None])[..., None, None]
    t = jnp.linspace(0.0, limit, points)
    gauss = jnp.exp(-(t**2) / 2)
    angle = u[..., None] * jnp.expand_dims(t, (0, 1, 2, 3))
    real = jnp.sum(weight * jnp.cos(angle), axis=(0, 1)) - jnp.expand_dims(gauss, (0, 1))
    imaginary = jnp.sum(weight * jnp.sin(angle), axis=(0, 1))
    inner = (jnp.arange(points) > 0) & (jnp.arange(points) < points - 1)
    trapezoid = limit / (points - 1) * jnp.where(inner, 2.0, 1.0)
    measure = jnp.expand_dims(trapezoid * gauss, (0, 1))
    statistic = jnp.sum(measure * (real**2 + imaginary**2), axis=-1)
    nonempty = count > 0
    per_slot = count * jnp.mean(statistic, axis=-1)
    return jnp.sum(jnp.where(nonempty, per_slot, 0.0)) / jnp.maximum(jnp.sum(nonempty), 1)
