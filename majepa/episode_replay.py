"""A replay of whole episodes: the rows of all of them in one ring, and a table of where each lies.

Rows are what a learner stores of them, any tree of arrays. The oldest episodes go first, whether
it is the table or the ring that is full.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key, PyTree


class EpisodeReplay(NamedTuple):
    rows: PyTree[Array]
    """Leaves are `[R, ...]`."""
    start: Int[Array, " C"]
    """Of each episode, in rows ever written."""
    length: Int[Array, " C"]
    """Rows of each episode, the last one included."""
    episodes: Int[Array, ""]
    """Ever stored."""
    head: Int[Array, ""]
    """Rows ever written."""

    @property
    def capacity(self) -> int:
        return self.start.shape[0]

    @property
    def num_rows(self) -> int:
        return jax.tree.leaves(self.rows)[0].shape[0]

    @property
    def size(self) -> Int[Array, ""]:
        """Episodes that can be drawn: the latest ones, as far as their rows are all there."""
        number = jnp.arange(self.capacity)
        is_used = number < self.episodes
        return jnp.sum(is_used & (self.start >= self.head - self.num_rows))


def empty(row: PyTree[Any], *, episodes: int, rows: int) -> EpisodeReplay:
    """Room for so many episodes and rows that look like `row`."""
    zero = jnp.zeros((), jnp.int32)
    return EpisodeReplay(
        jax.tree.map(lambda leaf: jnp.zeros((rows, *leaf.shape), leaf.dtype), row),
        jnp.zeros(episodes, jnp.int32),
        jnp.zeros(episodes, jnp.int32),
        zero,
        zero,
    )


def add(replay: EpisodeReplay, rows: PyTree[Array], length: Int[Array, " B"]) -> EpisodeReplay:
    """Store episodes `[T, B, ...]`, of which the first `length` rows exist."""
    longest, count = jax.tree.leaves(rows)[0].shape[:2]
    start = replay.head + jnp.cumsum(length) - length
    time = jnp.arange(longest)[:, None]
    place = jnp.where(time < length[None], (start[None] + time) % replay.num_rows, replay.num_rows)
    slot = (replay.episodes + jnp.arange(count)) % replay.capacity
    return EpisodeReplay(
        jax.tree.map(lambda kept, new: kept.at[place].set(new, mode="drop"), replay.rows, rows),
        replay.start.at[slot].set(start),
        replay.length.at[slot].set(length),
        replay.episodes + count,
        replay.head + jnp.sum(length),
    )


def sample(
    replay: EpisodeReplay, key: Key[Array, ""], *, episodes: int, rows: int
) -> tuple[PyTree[Array], Int[Array, " B"]]:
    """Episodes `[rows, episodes, ...]`, drawn alike and without repetition, and their lengths.

    The replay must hold that many. What follows the last row of an episode belongs to others.
    """
    age = jnp.arange(replay.capacity)
    lot = jnp.where(age < replay.size, jax.random.uniform(key, age.shape), -1.0)
    slot = (replay.episodes - 1 - jax.lax.top_k(lot, episodes)[1]) % replay.capacity
    place = (replay.start[slot][None] + jnp.arange(rows)[:, None]) % replay.num_rows
    return jax.tree.map(lambda kept: kept[place], replay.rows), replay.length[slot]
