"""Pre-norm Transformers over one axis: a causal one over time and one over agents.

**Time.** Every layer sees a sliding window of `window` records of the same episode, itself
included. Positions are relative (rotary), so a history may be cut anywhere: running on a cache of
the last `window - 1` records and running on the whole sequence give the same result.

**Branches.** Imagination starts at every record of a sequence. `branch` runs one step for all of
these roots at once; they share the keys and values of the sequence and own those of their future.
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int, Key

from .layers import Linear, RMSNorm

FAR_BELOW = -1e9
"""Score of what may not be seen; finite, so that no gradient is NaN."""


class Block(eqx.Module):
    """Attention and a feed-forward layer, each on a residual branch with dropout."""

    norm_attention: RMSNorm
    query_key_value: Linear
    out: Linear
    norm_feed: RMSNorm
    widen: Linear
    narrow: Linear
    heads: int = eqx.field(static=True)
    dropout: float = eqx.field(static=True)

    def __init__(self, width: int, heads: int, dropout: float, *, key: Key[Array, ""]) -> None:
        keys = jax.random.split(key, 4)
        self.norm_attention = RMSNorm(width)
        self.query_key_value = Linear(width, 3 * width, key=keys[0])
        self.out = Linear(width, width, key=keys[1])
        self.norm_feed = RMSNorm(width)
        self.widen = Linear(width, 4 * width, key=keys[2])
        self.narrow = Linear(4 * width, width, key=keys[3])
        self.heads = heads
        self.dropout = dropout

    def project(self, x: Float[Array, "*b D"]) -> tuple[Array, Array, Array]:
        """Queries, keys and values, `[*b, heads, D / heads]` each."""
        parts = jnp.split(self.query_key_value(self.norm_attention(x)), 3, axis=-1)
        query, key, value = (part.reshape(*x.shape[:-1], self.heads, -1) for part in parts)
        return query, key, value

    def finish(
        self, x: Float[Array, "*b D"], mixed: Float[Array, "*b H K"], keys: _DropoutKeys
    ) -> Float[Array, "*b D"]:
        """The rest of the block, given what attention mixed for each head."""
        mixed = self.out(mixed.reshape(*x.shape))
        x = x + drop(mixed, self.dropout, keys.attended)
        fed = self.narrow(jax.nn.silu(self.widen(self.norm_feed(x))))
        return x + drop(fed, self.dropout, keys.fed)


class History(NamedTuple):
    """What a temporal Transformer remembers: keys and values of each layer, `[B N S H K]`."""

    keys: tuple[Float[Array, "B N S H K"], ...]
    """Not rotated yet: a position is a place in the array."""
    values: tuple[Float[Array, "B N S H K"], ...]
    episode: Int[Array, "B S"]
    """Number of the episode a record belongs to; -1 where there is none."""

    def last(self, length: int) -> History:
        return jax.tree.map(lambda leaf: _latest(leaf, length), self)

    def ending_at(self, row: Int[Array, " R"], last: Int[Array, " R"], length: int) -> History:
        """For each `(row, last)`, the `length` records up to place `last`, as a batch."""
        place = last[:, None] + jnp.arange(1 - length, 1)[None, :]

        def window(leaf: Array) -> Array:
            return jax.vmap(lambda b, p: jnp.take(leaf[b], p, axis=1, mode="clip"))(row, place)

        episode = jax.vmap(lambda b, p: jnp.take(self.episode[b], p, mode="clip"))(row, place)
        return History(
            keys=jax.tree.map(window, self.keys),
            values=jax.tree.map(window, self.values),
            episode=jnp.where(place < 0, -1, episode),
        )


class Branches(NamedTuple):
    """Keys and values of imagined records, `[B N R P H K]`: `P` places for each of `R` roots."""

    keys: tuple[Float[Array, "B N R P H K"], ...]
    values: tuple[Float[Array, "B N R P H K"], ...]


class TemporalTransformer(eqx.Module):
    """Causal over the records of each agent; weights are shared by all agents."""

    blocks: tuple[Block, ...]
    norm: RMSNorm
    window: int = eqx.field(static=True)

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        window: int,
        *,
        dropout: float = 0.0,
        key: Key[Array, ""],
    ) -> None:
        self.blocks = tuple(
            Block(width, heads, dropout, key=key) for key in jax.random.split(key, layers)
        )
        self.norm = RMSNorm(width)
        self.window = window

    def empty(self, batch: int, agents: int, dtype: DTypeLike = jnp.float32) -> History:
        """The memory of agents that have seen nothing."""
        width = self.norm.gain.shape[0]
        heads = self.blocks[0].heads
        shape = (batch, agents, self.window - 1, heads, width // heads)
        zeros = tuple(jnp.zeros(shape, dtype) for _ in self.blocks)
        return History(zeros, zeros, jnp.full((batch, self.window - 1), -1))

    def __call__(
        self,
        x: Float[Array, "B N T D"],
        episode: Int[Array, "B T"],
        past: History,
        *,
        key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B N T D"], History]:
        """Outputs for `T` records that follow `past`, and the history with them in it.

        A key switches dropout on.
        """
        length = x.shape[2]
        seen = jnp.concatenate([past.episode, episode], axis=1)
        place = jnp.arange(seen.shape[1])
        mask = _may_see(place[-length:], place, self.window)[None]
        mask = mask & (episode[:, :, None] == seen[:, None, :])
        history_keys, history_values = [], []
        for block, old_key, old_value, dropout in zip(
            self.blocks, past.keys, past.values, _split(key, len(self.blocks)), strict=True
        ):
            query, new_key, new_value = block.project(x)
            all_keys = jnp.concatenate([old_key.astype(new_key.dtype), new_key], axis=2)
            all_values = jnp.concatenate([old_value.astype(new_value.dtype), new_value], axis=2)
            mixed = attend(
                rotate(query, place[-length:]),
                rotate(all_keys, place),
                all_values,
                mask[:, None],
                dropout=block.dropout,
                key=dropout.weights,
            )
            x = block.finish(x, mixed, dropout)
            history_keys.append(all_keys)
            history_values.append(all_values)
        return self.norm(x), History(tuple(history_keys), tuple(history_values), seen)

    def no_branches(self, history: History, roots: int, steps: int) -> Branches:
        """Room for `steps` imagined records after each of `roots` records."""
        room = tuple(
            jnp.zeros((*leaf.shape[:2], roots, steps, *leaf.shape[3:]), leaf.dtype)
            for leaf in history.keys
        )
        return Branches(room, room)

    def branch(
        self,
        x: Float[Array, "B N R D"],
        history: History,
        last: Int[Array, " R"],
        episode: Int[Array, "B R"],
        branches: Branches,
        step: Int[Array, ""],
    ) -> tuple[Float[Array, "B N R D"], Branches]:
        """One more record for each root: number `step` after place `last` of the history."""
        place = jnp.arange(history.episode.shape[1])
        own_place = jnp.arange(branches.keys[0].shape[3])
        now = last + 1 + step
        shared = _may_see(now, place, self.window) & (place[None, :] <= last[:, None])
        shared = shared[None] & (episode[:, :, None] == history.episode[:, None, :])
        own = _may_see(step[None], own_place, self.window)
        own = jnp.broadcast_to(own[None], (*shared.shape[:2], own_place.shape[0]))
        mask = jnp.concatenate([shared, own], axis=-1)[:, None]
        all_keys, all_values = [], []
        for layer, block in enumerate(self.blocks):
            query, new_key, new_value = block.project(x)
            own_keys = jax.lax.dynamic_update_index_in_dim(
                branches.keys[layer], new_key, step, axis=3
            )
            own_values = jax.lax.dynamic_update_index_in_dim(
                branches.values[layer], new_value, step, axis=3
            )
            turned = rotate(query, now)
            to_shared = _scores(turned, rotate(history.keys[layer], place))
            own_now = last[:, None] + 1 + own_place[None, :]
            to_own = jnp.einsum(
                "bnrhk,bnrphk->bnhrp",
                turned,
                rotate(own_keys, own_now),
                preferred_element_type=jnp.float32,
            )
            weight = _weigh(jnp.concatenate([to_shared, to_own], axis=-1), mask, query)
            on_shared, on_own = jnp.split(weight, [place.shape[0]], axis=-1)
            mixed = jnp.einsum("bnhrs,bnshk->bnrhk", on_shared, history.values[layer])
            mixed = mixed + jnp.einsum("bnhrp,bnrphk->bnrhk", on_own, own_values)
            x = block.finish(x, mixed, _DropoutKeys())
            all_keys.append(own_keys)
            all_values.append(own_values)
        return self.norm(x), Branches(tuple(all_keys), tuple(all_values))


class AgentAttention(eqx.Module):
    """Attention of the agents of a team to each other; no order, no identity."""

    blocks: tuple[Block, ...]

    def __init__(
        self, layers: int, width: int, heads: int, *, dropout: float = 0.0, key: Key[Array, ""]
    ) -> None:
        self.blocks = tuple(
            Block(width, heads, dropout, key=key) for key in jax.random.split(key, layers)
        )

    def __call__(
        self,
        x: Float[Array, "*b N D"],
        present: Bool[Array, "*b N"],
        *,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "*b N D"]:
        """Agents see those present and themselves, so that nobody sees nothing."""
        alone = jnp.broadcast_to(jnp.eye(x.shape[-2], dtype=bool), (*x.shape[:-1], x.shape[-2]))
        mask = present[..., None, :] | alone
        for block, dropout in zip(self.blocks, _split(key, len(self.blocks)), strict=True):
            mixed = attend(*block.project(x), mask, dropout=block.dropout, key=dropout.weights)
            x = block.finish(x, mixed, dropout)
        return x


def attend(
    query: Float[Array, "*b T H K"],
    key_: Float[Array, "*b S H K"],
    value: Float[Array, "*b S H K"],
    mask: Bool[Array, "*m T S"],
    *,
    dropout: float,
    key: Key[Array, ""] | None,
) -> Float[Array, "*b T H K"]:
    """Softmax attention in float32."""
    weight = _weigh(_scores(query, key_), mask, query)
    weight = drop(weight, dropout, key)
    return jnp.einsum("...hts,...shk->...thk", weight, value)


def rotate(x: Float[Array, "*b T H K"], place: Int[Array, "*t"]) -> Float[Array, "*b T H K"]:
    """Rotary positions: pairs of features turn with the place, so products know distances."""
    half = x.shape[-1] // 2
    speed = 10_000.0 ** (-jnp.arange(half) / half)
    angle = place[..., None].astype(jnp.float32) * jnp.expand_dims(speed, tuple(range(place.ndim)))
    angle = angle[..., None, :]
    angle = jnp.expand_dims(angle, tuple(range(x.ndim - angle.ndim)))
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    turned = jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)
    return turned.astype(x.dtype)


def drop(x: Array, rate: float, key: Key[Array, ""] | None) -> Array:
    """Dropout; without a key nothing is dropped."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))


class _DropoutKeys(NamedTuple):
    weights: Key[Array, ""] | None = None
    attended: Key[Array, ""] | None = None
    fed: Key[Array, ""] | None = None


def _split(key: Key[Array, ""] | None, layers: int) -> list[_DropoutKeys]:
    if key is None:
        return [_DropoutKeys()] * layers
    return [_DropoutKeys(*jax.random.split(layer, 3)) for layer in jax.random.split(key, layers)]


def _may_see(query: Int[Array, " Q"], place: Int[Array, " S"], window: int) -> Bool[Array, "Q S"]:
    distance = query[:, None] - place[None, :]
    return (distance >= 0) & (distance < window)


def _scores(
    query: Float[Array, "*b T H K"], key: Float[Array, "*b S H K"]
) -> Float[Array, "*b H T S"]:
    return jnp.einsum("...thk,...shk->...hts", query, key, preferred_element_type=jnp.float32)


def _weigh(scores: Array, mask: Array, query: Array) -> Array:
    """Attention weights `[*b H T S]` from scores and a mask `[*b T S]`."""
    scaled = scores * query.shape[-1] ** -0.5
    seen = jnp.where(mask[..., None, :, :], scaled, FAR_BELOW)
    return jax.nn.softmax(seen, axis=-1).astype(query.dtype)


def _latest(leaf: Array, length: int) -> Array:
    """The last records; time is the second axis of flags and the third of keys and values."""
    axis = 1 if leaf.ndim == 2 else 2
    return jax.lax.slice_in_dim(leaf, leaf.shape[axis] - length, leaf.shape[axis], axis=axis)
