"""Classes drawn from logits whose softmax is mixed with a share of the uniform distribution.

GPUs may take a kernel for it (`draw_kernels`) that computes the same.
"""

from __future__ import annotations

import functools

import jax
from jaxtyping import Array, Float, Int

from .dists import sample_by, unimix
from .gpu import may_take_kernels
from .layers import as_rows


def sample_mixed(
    logits: Float[Array, "*b S K"], share: float, noise: Float[Array, "*b S"]
) -> Int[Array, "*b S"]:
    """A sample of `unimix(logits, share)`, for noise between zero and one. It has no gradient."""
    logits, plain = jax.lax.stop_gradient(logits), functools.partial(_plain, share)
    if may_take_kernels(logits.dtype):
        from .draw_kernels import suits

        if suits(logits.shape[-1]):
            kernel = functools.partial(_kernel, share)
            return jax.lax.platform_dependent(logits, noise, cuda=kernel, default=plain)
    return plain(logits, noise)


def _plain(share: float, logits: Array, noise: Array) -> Array:
    return sample_by(unimix(logits, share), noise)


def _kernel(share: float, logits: Array, noise: Array) -> Array:
    from .draw_kernels import drawn

    return drawn(as_rows(logits), noise.reshape(-1), share).reshape(noise.shape)
