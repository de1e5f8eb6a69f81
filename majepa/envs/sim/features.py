"""Named features of units and pairs of units, batch last: the bricks of observations and states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from .units import UnitType


class Block(NamedTuple):
    """Named features of every unit (`[S, F, B]`) or every pair (`[A, S, F, B]`)."""

    prefix: str
    names: tuple[str, ...]
    values: Float[Array, "... F B"]

    def where(self, shown: Bool[Array, "... B"]) -> Block:
        return self._replace(values=jnp.where(shown[..., None, :], self.values, 0.0))

    def join(self, other: Block) -> Block:
        """With the features of another block, which may lack the axis of the observing agent."""
        shape = (*self.values.shape[:-2], *other.values.shape[-2:])
        values = [self.values, jnp.broadcast_to(other.values, shape)]
        return Block(self.prefix, self.names + other.names, jnp.concatenate(values, axis=-2))

    def of_others(self) -> Block:
        """Row k of agent i is agent k, or k + 1 from i on: SMAC leaves the agent itself out."""
        agents = self.values.shape[0]
        is_before = np.arange(agents - 1)[None] < np.arange(agents)[:, None]
        values = jnp.where(is_before[..., None, None], self.values[:, :-1], self.values[:, 1:])
        return self._replace(values=values)

    def feature_names(self) -> list[str]:
        if self.values.ndim == 3:
            return [f"{self.prefix}/{name}" if self.prefix else name for name in self.names]
        rows = range(self.values.shape[1])
        return [f"{self.prefix}_{row}/{name}" for row in rows for name in self.names]


def one_hot(units: tuple[UnitType, ...], types: list[str]) -> Float[np.ndarray, "S bits 1"]:
    table = [[[unit.name == name] for name in types] for unit in units]
    return np.array(table, np.float32).reshape(len(units), len(types), 1)


def kinds(types: tuple[str, ...], kinds: Float[np.ndarray, "S bits 1"]) -> dict[str, np.ndarray]:
    return {f"is_{name}": kinds[:, index] for index, name in enumerate(types)}


def block_of(
    prefix: str, features: Mapping[str, Array | np.ndarray], shape: tuple[int, ...]
) -> Block:
    """Stack features of unit or pair tables, broadcast to one shape."""
    values = [jnp.broadcast_to(value, shape).astype(jnp.float32) for value in features.values()]
    empty = jnp.zeros((*shape[:-1], 0, shape[-1]), jnp.float32)
    return Block(prefix, tuple(features), jnp.stack(values, axis=-2) if values else empty)


def flat(blocks: list[Block]) -> Float[Array, "A F B"]:
    """One row per agent: block after block, target after target."""
    rows = [jnp.reshape(b.values, (b.values.shape[0], -1, b.values.shape[-1])) for b in blocks]
    return jnp.concatenate(rows, axis=1)
