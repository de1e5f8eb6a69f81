"""Linear maps, norms and perceptrons that every method is made of.

A module computes in the dtype of its parameters; cast the parameters (`cast`) to choose it. Norms
are always taken in float32. Modules hold arrays and sizes only, so their leaves are parameters.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Key, Shaped

from .gpu import may_take_kernels

Tree = TypeVar("Tree")

ALIGNED = 8
"""Sizes that are multiples of this many entries suit matrix units."""
LEAST_ROWS = 1024
"""With fewer, what XLA fuses around a norm is worth more than what kernels of norms save."""


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


class Biased(NamedTuple):
    """`x + bias`, of which the bias is added by what takes it along, or not at all yet."""

    x: Float[Array, "*b D"]
    bias: Float[Array, " D"] | None = None

    def whole(self) -> Float[Array, "*b D"]:
        return self.x if self.bias is None else add_bias(self.bias, self.x)


class RMSNorm(eqx.Module):
    """Division of the last axis by its root mean square, with a learned gain."""

    gain: Float[Array, " D"]
    eps: float = eqx.field(static=True, default=1e-4)

    def __init__(self, size: int) -> None:
        self.gain = jnp.ones(size)

    def __call__(
        self, x: Float[Array, "*b D"], bias: Float[Array, " D"] | None = None
    ) -> Float[Array, "*b D"]:
        """After a bias that has not been added yet; so do the others."""
        return _end(End(self.eps), x, bias, self.gain)

    def beside(
        self, x: Float[Array, "*b D"], bias: Float[Array, " D"] | None = None
    ) -> tuple[Float[Array, "*b D"], Float[Array, "*b D"]]:
        """x itself, without the bias, for a residual branch, and the norm: their gradients are
        added on the way."""
        return _end(End(self.eps, beside=True), x, bias, self.gain)

    def activated(
        self, x: Float[Array, "*b D"], bias: Float[Array, " D"] | None = None
    ) -> Float[Array, "*b D"]:
        """The SiLU of the norm."""
        return _end(End(self.eps, silu=True), x, bias, self.gain)


def activated(x: Float[Array, "*b D"], bias: Float[Array, " D"]) -> Float[Array, "*b D"]:
    """SiLU after a bias."""
    return _end(End(silu=True), x, bias, None)


class End(NamedTuple):
    """What comes after a product: a bias, if there is one, a norm, if there is a gain, a SiLU."""

    eps: float = 0.0
    """Of the norm."""
    silu: bool = False
    beside: bool = False
    """Whether what it is given is returned too, before what it makes of it."""


def _end(end: End, x: Float[Array, "*b D"], bias: Array | None, gain: Array | None) -> Any:
    """GPUs may take kernels for it (`norm_kernels`) that compute the same."""
    shared = [leaf.dtype for leaf in (bias, gain) if leaf is not None]
    if may_take_kernels(x.dtype) and all(dtype == x.dtype for dtype in shared):
        from .norm_kernels import suits

        if suits(math.prod(x.shape[:-1]), x.shape[-1]):
            return _chosen_end(end, x, bias, gain)
    return _plain_end(end, x, bias, gain)


def _plain_end(end: End, x: Array, bias: Array | None, gain: Array | None) -> Any:
    y = x if bias is None else add_bias(bias, x)
    y = y if gain is None else _normed(end.eps, y, gain)
    y = jax.nn.silu(y) if end.silu else y
    return (x, y) if end.beside else y


def _normed(eps: float, x: Float[Array, "*b D"], gain: Float[Array, " D"]) -> Array:
    # As a matrix: XLA cuts more axes into tiles that take three times as long.
    exact = as_rows(x).astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(exact**2, axis=-1, keepdims=True) + eps)
    return (exact * scale * gain.astype(jnp.float32)[None]).astype(x.dtype).reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chosen_end(end: End, *given: Any) -> Any:
    """By the platform. On the way back it is computed again."""
    kernel = functools.partial(_kernel_end, end)
    plain = functools.partial(_traced_end, end)
    return jax.lax.platform_dependent(*given, cuda=kernel, default=plain)


def _end_forward(end: End, *given: Any) -> tuple[Any, tuple]:
    return _chosen_end(end, *given), given


def _end_backward(end: End, given: tuple, gradient: Any) -> tuple:
    kernel = functools.partial(_pull_kernel_end, end)
    plain = functools.partial(_pull_plain_end, end)
    return jax.lax.platform_dependent(*given, gradient, cuda=kernel, default=plain)


_chosen_end.defvjp(_end_forward, _end_backward)

# Traced once for all layers of a size.
_once = functools.partial(jax.jit, static_argnums=0)
_traced_end = _once(_plain_end)


@_once
def _kernel_end(end: End, x: Array, *given: Any) -> Any:
    from .norm_kernels import ended

    y = ended(end, as_rows(x), *given).reshape(x.shape)
    return (x, y) if end.beside else y


@_once
def _pull_kernel_end(
    end: End, x: Array, bias: Array | None, gain: Array | None, gradient: Any
) -> tuple[Array, Array | None, Array | None]:
    from .norm_kernels import pull_ended

    of_x, of_y = gradient if end.beside else (None, gradient)
    of_x = None if of_x is None else as_rows(of_x)
    found = pull_ended(end, as_rows(x), bias, gain, as_rows(of_y), of_x)
    return found[0].reshape(x.shape), *found[1:]


@_once
def _pull_plain_end(
    end: End, x: Array, bias: Array | None, gain: Array | None, gradient: Any
) -> tuple[Array, Array | None, Array | None]:
    return jax.vjp(functools.partial(_plain_end, end), x, bias, gain)[1](gradient)


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
        first = self.linears[0]
        return self._after(product(x, first.weight), first.bias)

    def after_first(self, x: Float[Array, "*b D"]) -> Float[Array, "*b O"]:
        """The rest, given what the first linear map put out."""
        return self._after(x, None)

    def _after(self, x: Float[Array, "*b D"], bias: Float[Array, " D"] | None) -> Array:
        """And given a bias of it that has not been added yet."""
        for norm, linear in zip(self.norms, self.linears[1:], strict=True):
            x, bias = product(norm.activated(x, bias), linear.weight), linear.bias
        return x if bias is None else add_bias(bias, x)


def as_rows(x: Shaped[Array, "*b D"]) -> Shaped[Array, "M D"]:
    return x.reshape(-1, x.shape[-1])


def product(x: Float[Array, "*b I"], weight: Float[Array, "I O"]) -> Float[Array, "*b O"]:
    """`x @ weight` in the dtype of the weight."""
    # As matrices: of more axes, XLA copies what a gradient of weights multiplies, transposed.
    rows = as_rows(x).astype(weight.dtype)
    return (rows @ weight).reshape(*x.shape[:-1], weight.shape[-1])


def add_bias(bias: Float[Array, " D"], x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
    """`x + bias` on the last axis."""
    return x + spread(bias, x.ndim)


def spread(x: Shaped[Array, " D"], ndim: int) -> Shaped[Array, "*ones D"]:
    """A vector with leading axes of one, to meet an array of `ndim` axes."""
    return jnp.expand_dims(x, tuple(range(ndim - 1)))


def make_room(shape: tuple[int, ...], beside: Array) -> Shaped[Array, "..."]:
    """An array that begins with anything, of the type of another one.

    Where there are several of that one, there are several rooms: one for all of them would be
    copied for each.
    """

    @jax.custom_batching.custom_vmap
    def make(beside: Array) -> Array:
        return jax.lax.empty(shape, beside.dtype)

    @make.def_vmap
    def _(count: int, _: list[bool], beside: Array) -> tuple[Array, bool]:
        return make_room((count, *shape), beside), True

    return make(beside)


def cast(tree: Tree, dtype: DTypeLike) -> Tree:
    """A copy of the parameters in another precision; gradients reach the original."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


def count_parameters(tree: object) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
