"""SIGReg: random one-dimensional views of the embeddings should look standard normal.

For a direction `a` and the projections `u_n` of `N` samples, the discrepancy is

    N ∫ | mean_n exp(i t u_n) - exp(-t²/2) |² exp(-t²/2) dt

over an even grid on [0, limit], by the trapezoid rule; the integrand is even, so the half line
counts twice. The statistic is averaged over directions and over agent slots that have samples.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Key

from ..nn.gpu import may_take_kernels


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
    real, imaginary = _means(e.dtype)(u, weight, t)
    real = real - jnp.expand_dims(gauss, (0, 1))
    inner = (jnp.arange(points) > 0) & (jnp.arange(points) < points - 1)
    trapezoid = limit / (points - 1) * jnp.where(inner, 2.0, 1.0)
    measure = jnp.expand_dims(trapezoid * gauss, (0, 1))
    statistic = jnp.sum(measure * (real**2 + imaginary**2), axis=-1)
    nonempty = count > 0
    per_slot = count * jnp.mean(statistic, axis=-1)
    return jnp.sum(jnp.where(nonempty, per_slot, 0.0)) / jnp.maximum(jnp.sum(nonempty), 1)


def _means(dtype: DTypeLike) -> Callable[..., tuple[Array, Array]]:
    """What finds the mean of exp(i t u), for numbers that were computed from others of a type.

    A GPU finds cosines and sines sooner again than it reads them back.
    """
    return jax.checkpoint(_mean_of_circle) if may_take_kernels(dtype) else _mean_of_circle


def _mean_of_circle(
    u: Float[Array, "B T N M"], weight: Float[Array, "B T N 1 1"], t: Float[Array, " P"]
) -> tuple[Float[Array, "N M P"], Float[Array, "N M P"]]:
    angle = u[..., None] * jnp.expand_dims(t, (0, 1, 2, 3))
    real, imaginary = (jnp.sum(weight * wave(angle), axis=(0, 1)) for wave in (jnp.cos, jnp.sin))
    return real, imaginary
