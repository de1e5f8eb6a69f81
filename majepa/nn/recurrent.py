"""Layers of recurrent agents: orthogonal linear maps, layer normalisation, a GRU with resets."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from .layers import Linear, add_bias, spread


def orthogonal_linear(size_in: int, size_out: int, gain: float, *, key: Key[Array, ""]) -> Linear:
    """A linear map whose weight starts orthonormal along its shorter side, times `gain`."""
    weight = jax.nn.initializers.orthogonal(gain)(key, (size_in, size_out), jnp.float32)
    return eqx.tree_at(lambda linear: linear.weight, Linear(size_in, size_out, key=key), weight)


def uniform_linear(size_in: int, size_out: int, bound: float, *, key: Key[Array, ""]) -> Linear:
    """A linear map whose weights and biases start uniform within `bound` of zero."""
    key_weight, key_bias = jax.random.split(key)
    weight = jax.random.uniform(key_weight, (size_in, size_out), minval=-bound, maxval=bound)
    bias = jax.random.uniform(key_bias, (size_out,), minval=-bound, maxval=bound)
    linear = Linear(size_in, size_out, key=key)
    return eqx.tree_at(lambda linear: (linear.weight, linear.bias), linear, (weight, bias))


class LayerNorm(eqx.Module):
    """Zero mean and unit variance over the last axis, then a learned gain and offset."""

    gain: Float[Array, " D"]
    offset: Float[Array, " D"]
    eps: float = eqx.field(static=True, default=1e-5)

    def __init__(self, size: int) -> None:
        self.gain = jnp.ones(size)
        self.offset = jnp.zeros(size)

    def __call__(self, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + self.eps)
        return add_bias(self.offset, centred * scale * spread(self.gain, x.ndim))


class GRU(eqx.Module):
    """A gated recurrent unit; its gates are in the order reset, update, candidate."""

    from_input: Linear
    from_hidden: Linear

    def __init__(
        self, size_in: int, size: int, *, key: Key[Array, ""], bound: float | None = None
    ) -> None:
        """Both maps start uniform within a bound, orthogonal without one."""
        start, scale = (orthogonal_linear, 1.0) if bound is None else (uniform_linear, bound)
        key_input, key_hidden = jax.random.split(key)
        self.from_input = start(size_in, 3 * size, scale, key=key_input)
        self.from_hidden = start(size, 3 * size, scale, key=key_hidden)

    def __call__(
        self, x: Float[Array, "T *b I"], is_first: Bool[Array, "T *b"], hidden: Float[Array, "*b H"]
    ) -> Float[Array, "T *b H"]:
        """Hidden states after each step; before a first step the state is set to zero."""

        def forward(
            hidden: Float[Array, "*b H"], row: tuple[Float[Array, "*b G"], Bool[Array, "*b"]]
        ) -> tuple[Float[Array, "*b H"], Float[Array, "*b H"]]:
            drive, starts = row
            hidden = self.step(jnp.where(starts[..., None], 0.0, hidden), drive)
            return hidden, hidden

        return jax.lax.scan(forward, hidden, (self.from_input(x), is_first))[1]

    def step(
        self, hidden: Float[Array, "*b H"], drive: Float[Array, "*b 3*H"]
    ) -> Float[Array, "*b H"]:
        """The next hidden state; `drive` is the input after its linear map."""
        reset_in, update_in, candidate_in = jnp.split(drive, 3, axis=-1)
        reset_by, update_by, candidate_by = jnp.split(self.from_hidden(hidden), 3, axis=-1)
        reset = jax.nn.sigmoid(reset_in + reset_by)
        update = jax.nn.sigmoid(update_in + update_by)
        candidate = jnp.tanh(candidate_in + reset * candidate_by)
        return (1 - update) * candidate + update * hidden
