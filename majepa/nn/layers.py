"""Linear maps, norms and perceptrons that every method is made of.

A module computes in the dtype of its parameters; cast the parameters (`cast`) to choose it. Norms
are always taken in float32. Modules hold arrays and sizes only, so their leaves are parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Key, Shaped

Tree = TypeVar("Tree")

ALIGNED = 8
"""Sizes that are multiples of this many entries suit matrix units."""


class Linear(eqx.Module):
    """An affine map of the last axis."""

    weight: Float[Array, "I O"]
    bias: Float[Array, " O"]

    def __init__(
        self,
        size_in: int,
        size_out: int,
        *,
        key: Key[Array, ""],
        scale: float = 1.0,
        bias_scale: float = 0.0,
    ) -> None:
        """Truncated normal weights of fan-in variance, times `scale`; bias zero unless asked.

        Where the input may be all zeros and a norm follows, a zero bias would make the norm blow
        gradients up: such a map needs a bias.
        """
        key_weight, key_bias = jax.random.split(key)
        # A normal cut at two deviations has deviation 0.8796, and 1 / 0.8796 = 1.1368.
        deviation = scale * 1.1368 * size_in**-0.5
        draw = jax.random.truncated_normal(key_weight, -2.0, 2.0, (size_in, size_out))
        self.weight = deviation * draw
        self.bias = jnp.zeros(size_out)
        if bias_scale != 0:  # Draws take long to compile, even those that nobody looks at.
            self.bias = bias_scale * jax.random.normal(key_bias, (size_out,))

    def __call__(self, x: Float[Array, "*b I"]) -> Float[Array, "*b O"]:
        return add_bias(self.bias, product(x, self.weight))

    def of_both(self, x: Float[Array, "*b J"], more: Float[Array, "*b K"]) -> Float[Array, "*b O"]:
        """The map of `[x; more]`, without a copy of a wide `x` next to a few more entries."""
        head, tail = jnp.split(self.weight, [x.shape[-1]])
        return add_bias(self.bias, product(x, head) + product(more, tail))


class RMSNorm(eqx.Module):
    """Division of the last axis by its root mean square, with a learned gain."""

    gain: Float[Array, " D"]
    eps: float = eqx.field(static=True, default=1e-4)

    def __init__(self, size: int) -> None:
        self.gain = jnp.ones(size)

    def __call__(self, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        exact = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(exact**2, axis=-1, keepdims=True) + self.eps)
        return (exact * scale * spread(self.gain.astype(jnp.float32), x.ndim)).astype(x.dtype)


class MLP(eqx.Module):
    """Hidden layers of linear map, norm and SiLU, then a plain linear map."""

    linears: tuple[Linear, ...]
    norms: tuple[RMSNorm, ...]

    def __init__(
        self,
        size_in: int,
        hidden: Sequence[int],
        size_out: int,
        *,
        key: Key[Array, ""],
        out_scale: float = 1.0,
        first_bias: float = 0.0,
    ) -> None:
        """`first_bias` is for inputs that may be all zeros; see `Linear`."""
        sizes = list(itertools.pairwise([size_in, *hidden, size_out]))
        scales = [1.0] * len(hidden) + [out_scale]
        keys = jax.random.split(key, len(sizes))
        biases = [first_bias] + [0.0] * len(hidden)
        self.linears = tuple(
            Linear(*size, key=key, scale=scale, bias_scale=bias)
            for size, key, scale, bias in zip(sizes, keys, scales, biases, strict=True)
        )
        self.norms = tuple(RMSNorm(width) for width in hidden)

    def __call__(self, x: Float[Array, "*b I"]) -> Float[Array, "*b O"]:
        return self.after_first(self.linears[0](x))

    def after_first(self, x: Float[Array, "*b D"]) -> Float[Array, "*b O"]:
        """The rest, given what the first linear map put out."""
        for norm, linear in zip(self.norms, self.linears[1:], strict=True):
            x = linear(jax.nn.silu(norm(x)))
        return x


def product(x: Float[Array, "*b I"], weight: Float[Array, "I O"]) -> Float[Array, "*b O"]:
    """`x @ weight` in the dtype of the weight."""
    # As matrices: of more axes, XLA copies what a gradient of weights multiplies, transposed.
    rows = x.reshape(-1, x.shape[-1]).astype(weight.dtype)
    return (rows @ weight).reshape(*x.shape[:-1], weight.shape[-1])


def add_bias(bias: Float[Array, " D"], x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
    """`x + bias` on the last axis."""
    return x + spread(bias, x.ndim)


def spread(x: Shaped[Array, " D"], ndim: int) -> Shaped[Array, "*ones D"]:
    """A vector with leading axes of one, to meet an array of `ndim` axes."""
    return jnp.expand_dims(x, tuple(range(ndim - 1)))


def cast(tree: Tree, dtype: DTypeLike) -> Tree:
    """A copy of the parameters in another precision; gradients reach the original."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


def count_parameters(tree: object) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
