"""Pairs of a root and an action that count, out of all there could be, one after another.

Rows of roots and of actions are handed out to the pairs; on the way back a root adds up what its
own pairs got, in float32 and in a fixed order, and an action does so through a product.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from ..nn.layers import ALIGNED

AT_ONCE = 8
"""Rows in a sum: of more, XLA may write all of them down first."""


class Pairs(NamedTuple):
    """The first `P` places for pairs, of which the last may be empty."""

    counted: Bool[Array, "M A"]
    place: Int[Array, "M A"]
    """Where a pair that counts lies."""
    root: Int[Array, " P"]
    action: Int[Array, " P"]
    """Of an empty place: anything."""

    def first(self, size: int) -> Pairs:
        """With fewer places; the pairs must fit."""
        return self._replace(root=self.root[:size], action=self.action[:size])

    def rows_of_roots(self, x: Shaped[Array, "M *d"]) -> Shaped[Array, "P *d"]:
        return _rows_of_roots(x, self)

    def rows_of_actions(self, x: Float[Array, "A D"]) -> Float[Array, "P D"]:
        return _rows_of_actions(x.shape[0], x, self.action)


def pairs_of(counted: Bool[Array, "M A"]) -> Pairs:
    """With a place for every pair that there could be."""
    flat = counted.reshape(-1)
    place = jnp.cumsum(flat, dtype=jnp.int32) - 1
    # Places for those that do not count lie past the end, where nothing is written.
    unique = jnp.where(flat, place, flat.size + jnp.arange(flat.size, dtype=jnp.int32))
    pair = jnp.zeros(flat.size, jnp.int32).at[unique].set(
        jnp.arange(flat.size, dtype=jnp.int32), mode="drop", unique_indices=True
    )  # fmt: skip
    root, action = jnp.divmod(pair, counted.shape[1])
    return Pairs(counted, jnp.maximum(place, 0).reshape(counted.shape), root, action)


@jax.custom_vjp
def _rows_of_roots(x: Array, pairs: Pairs) -> Array:
    return _rows(x, pairs.root)


def _rows_of_roots_forward(x: Array, pairs: Pairs) -> tuple[Array, Pairs]:
    return _rows_of_roots(x, pairs), pairs


def _rows_of_roots_backward(pairs: Pairs, gradient: Array) -> tuple[Array, None]:
    def sum_of(some: slice) -> Array:
        counted = jnp.expand_dims(pairs.counted[:, some], tuple(range(2, gradient.ndim + 1)))
        own = _rows(gradient, pairs.place[:, some]).astype(jnp.float32)
        return jnp.sum(jnp.where(counted, own, 0.0), axis=1)

    sums = [sum_of(slice(k, k + AT_ONCE)) for k in range(0, pairs.counted.shape[1], AT_ONCE)]
    return functools.reduce(jnp.add, sums).astype(gradient.dtype), None


_rows_of_roots.defvjp(_rows_of_roots_forward, _rows_of_roots_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows_of_actions(actions: int, x: Array, action: Array) -> Array:
    return _rows(x, action)


def _rows_of_actions_forward(actions: int, x: Array, action: Array) -> tuple[Array, Any]:
    return _rows(x, action), action


def _rows_of_actions_backward(actions: int, action: Array, gradient: Array) -> tuple[Array, None]:
    wide = -(-actions // ALIGNED) * ALIGNED
    chosen = jax.nn.one_hot(action, wide, dtype=gradient.dtype)
    found = jnp.einsum("pa,pd->ad", chosen, gradient, preferred_element_type=jnp.float32)
    return found[:actions].astype(gradient.dtype), None


_rows_of_actions.defvjp(_rows_of_actions_forward, _rows_of_actions_backward)


def _rows(x: Array, index: Array) -> Array:
    return x.at[index].get(mode="promise_in_bounds")
