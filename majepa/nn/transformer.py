"""Pre-norm Transformers over one axis: a causal one over time and one over agents.

**Time.** Every layer sees a sliding window of `window` records of the same episode, itself
included. Positions are relative (rotary), so a history may be cut anywhere: running on a cache of
the last `window - 1` records and running on the whole sequence give the same result.

**Branches.** Imagination starts at every record of a sequence. `branch` runs one step for all of
these roots at once; they share the keys and values of the sequence and own those of their future.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Float32, Int, Key

from .layers import ALIGNED, Linear, RMSNorm, Tree

FAR_BELOW = -1e9
"""Score of what may not be seen; finite, so that no gradient is NaN."""
LONGEST_ROW = 64
"""Agents of several teams that attention takes for one sequence."""


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
        self, x: Float[Array, "*b D"], mixed: Float[Array, "*b H K"], keys: DropoutKeys
    ) -> Float[Array, "*b D"]:
        """The rest of the block, given what attention mixed for each head."""
        middle = self.attended(x, mixed, keys)
        return self.fed(middle, self.widened(middle), keys)

    def attended(
        self, x: Float[Array, "*b D"], mixed: Float[Array, "*b H K"], keys: DropoutKeys
    ) -> Float[Array, "*b D"]:
        """Between attention and the feed-forward layer."""
        return x + drop(self.out(mixed.reshape(*x.shape)), self.dropout, keys.attended)

    def widened(self, middle: Float[Array, "*b D"]) -> Float[Array, "*b W"]:
        return self.widen(self.norm_feed(middle))

    def fed(
        self, middle: Float[Array, "*b D"], wide: Float[Array, "*b W"], keys: DropoutKeys
    ) -> Float[Array, "*b D"]:
        return middle + drop(self.narrow(jax.nn.silu(wide)), self.dropout, keys.fed)


class History(NamedTuple):
    """What a temporal Transformer remembers: keys and values of all layers."""

    keys: Float[Array, "L B N S H K"]
    """Not rotated yet: a position is a place in the array."""
    values: Float[Array, "L B N S H K"]
    episode: Int[Array, "B S"]
    """Number of the episode a record belongs to; -1 where there is none."""

    def last(self, length: int) -> History:
        start = self.episode.shape[1] - length
        return History(
            self.keys[:, :, :, start:], self.values[:, :, :, start:], self.episode[:, start:]
        )

    def ending_at(self, row: Int[Array, " R"], last: Int[Array, " R"], length: int) -> History:
        """For each `(row, last)`, the `length` records up to place `last`, as a batch."""
        place = last[:, None] + jnp.arange(1 - length, 1)[None, :]
        inside = jnp.maximum(place, 0)

        def window(leaf: Float[Array, "L B N S H K"]) -> Float[Array, "L R N W H K"]:
            return jnp.moveaxis(leaf[:, row[:, None], :, inside], (0, 1, 2), (1, 3, 0))

        episode = jnp.where(place < 0, -1, self.episode[row[:, None], inside])
        return History(window(self.keys), window(self.values), episode)


class Trace(NamedTuple):
    """Activations of a run over `T` records, all layers, with `S` records to look at."""

    x: Float[Array, "L B N T D"]
    """What entered each layer."""
    query: Float[Array, "L B N T H K"]
    """Turned to its place; so are the keys."""
    keys: Float[Array, "L B N S H K"]
    values: Float[Array, "L B N S H K"]
    weight: Float[Array, "L B N H T S"]
    middle: Float[Array, "L B N T D"]
    wide: Float[Array, "L B N T W"]
    end: Float[Array, "B N T D"]
    """What left the last layer, before the norm."""


class Trunk(NamedTuple):
    """A history that many futures go on from: it is turned, and laid out, once for all steps.

    Places after its end, which nobody sees, make their number one that matrix units like.
    """

    keys: Float[Array, "L B N H S K"]
    """Turned to their places."""
    values: Float[Array, "L B N H S K"]
    episode: Int[Array, "B S"]


class Branches(NamedTuple):
    """Keys, turned, and values of imagined records: `P` places for each of `R` roots."""

    keys: Float[Array, "L B N H R P K"]
    values: Float[Array, "L B N H R P K"]


class TemporalTransformer(eqx.Module):
    """Causal over the records of each agent; weights are shared by all agents."""

    layers: Block | tuple[Block, ...]
    """All layers in one block, stacked on the first axis of every tensor; see `apart`."""
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
        self.layers = _stack(layers, width, heads, dropout, key)
        self.norm = RMSNorm(width)
        self.window = window

    def empty(self, batch: int, agents: int, dtype: DTypeLike = jnp.float32) -> History:
        """The memory of agents that have seen nothing."""
        count, heads = numbers_of(self.layers)
        size = self.norm.gain.shape[0] // heads
        shape = (count, batch, agents, self.window - 1, heads, size)
        return History(
            jnp.zeros(shape, dtype),
            jnp.zeros(shape, dtype),
            jnp.full((batch, shape[3]), -1, jnp.int32),
        )

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
        return self._run(x, episode, past, key, keep=False)[:2]

    def traced(
        self, x: Float[Array, "B N T D"], episode: Int[Array, "B T"], past: History
    ) -> tuple[Float[Array, "B N T D"], History, Trace]:
        """The same without dropout, and the activations on the way."""
        y, history, (end, layers) = self._run(x, episode, past, None, keep=True)
        return y, history, Trace._make((*layers, end))

    def _run(
        self,
        x: Float[Array, "B N T D"],
        episode: Int[Array, "B T"],
        past: History,
        key: Key[Array, ""] | None,
        *,
        keep: bool,
    ) -> tuple[Float[Array, "B N T D"], History, tuple[Array, tuple[Array, ...]]]:
        """And the end of the last layer, with what is kept of each layer."""
        length = x.shape[2]
        seen = jnp.concatenate([past.episode, episode], axis=1)
        place = jnp.arange(seen.shape[1])
        mask = _may_see(place[-length:], place, self.window)[None]
        mask = (mask & (episode[:, :, None] == seen[:, None, :]))[:, None]
        turn = turns(place, past.keys.shape[-1])
        turn_now = jax.tree.map(lambda leaf: leaf[-length:], turn)

        def layer(x: Array, given: tuple) -> tuple[Array, tuple]:
            block, old_keys, old_values, dropout = given
            query, key_, value = block.project(x)
            keys = jnp.concatenate([old_keys.astype(key_.dtype), key_], axis=2)
            values = jnp.concatenate([old_values.astype(value.dtype), value], axis=2)
            turned, turned_keys = rotate(query, turn_now), rotate(keys, turn)
            weight = attention_weights(turned, turned_keys, mask)
            weight = drop(weight, block.dropout, dropout.weights)
            mixed = jnp.einsum("bnhts,bnshk->bnthk", weight, values)
            middle = block.attended(x, mixed, dropout)
            wide = block.widened(middle)
            after = block.fed(middle, wide, dropout)
            kept = (x, turned, turned_keys, values, weight, middle, wide) if keep else ()
            return after, (keys, values, kept)

        given = (past.keys, past.values, _dropout_keys(key, past.keys.shape[0]))
        end, (keys, values, kept) = _through(self.layers, layer, x, given)
        return self.norm(end), History(keys, values, seen), (end, kept)

    def fork(self, history: History, roots: int, steps: int) -> tuple[Trunk, Branches]:
        """The trunk, and room for `steps` imagined records after each of `roots` records."""
        layers, batch, agents, length, heads, size = history.keys.shape
        keys = rotate(history.keys, turns(jnp.arange(length), size))
        room = jnp.zeros((layers, batch, agents, heads, roots, steps, size), history.keys.dtype)

        def laid_out(leaf: Float[Array, "L B N S H K"]) -> Float[Array, "L B N H P K"]:
            return _even(leaf.swapaxes(3, 4), 4, 0)

        trunk = Trunk(laid_out(keys), laid_out(history.values), _even(history.episode, 1, -1))
        return trunk, Branches(room, room)

    def branch(
        self,
        x: Float[Array, "B N R D"],
        trunk: Trunk,
        last: Int[Array, " R"],
        episode: Int[Array, "B R"],
        branches: Branches,
        step: Int[Array, ""],
    ) -> tuple[Float[Array, "B N R D"], Branches]:
        """One more record for each root: number `step` after place `last` of the trunk."""
        place = jnp.arange(trunk.episode.shape[1])
        own_place = jnp.arange(branches.keys.shape[5])
        now = last + 1 + step
        shared = _may_see(now, place, self.window) & (place[None, :] <= last[:, None])
        shared = shared[None] & (episode[:, :, None] == trunk.episode[:, None, :])
        shared = shared[:, None, None]
        own = _may_see(step[None], own_place, self.window) & (own_place < step)[None]
        own = own[:, None, None, None]
        turn = turns(now, trunk.keys.shape[-1])

        def layer(x: Array, given: tuple) -> tuple[Array, tuple[Array, Array]]:
            block, keys, values, own_keys, own_values = given
            query, key_, value = block.project(x)
            query, key_ = rotate(query, turn), rotate(key_, turn)
            query, key_, value = (leaf.swapaxes(2, 3) for leaf in (query, key_, value))
            scale = query.shape[-1] ** -0.5
            to_shared = jnp.einsum(
                "bnhrk,bnhsk->bnhrs", query, keys, preferred_element_type=jnp.float32
            )
            to_shared = jnp.where(shared, scale * to_shared, FAR_BELOW)
            # A handful of places for each root: products and sums beat tiny matrices.
            to_own = jnp.sum(exact(query)[..., None, :] * exact(own_keys), axis=-1)
            to_own = jnp.where(own, scale * to_own, FAR_BELOW)
            to_self = scale * jnp.sum(exact(query) * exact(key_), axis=-1, keepdims=True)
            # One softmax over all three.
            parts = (to_shared, to_own, to_self)
            peak = functools.reduce(jnp.maximum, (part.max(-1, keepdims=True) for part in parts))
            parts = [jnp.exp(part - peak) for part in parts]
            total = sum(part.sum(-1, keepdims=True) for part in parts)
            on_shared, on_own, on_self = (part / total for part in parts)
            mixed = jnp.einsum("bnhrs,bnhsk->bnhrk", on_shared.astype(values.dtype), values)
            mixed = exact(mixed) + jnp.sum(on_own[..., None] * exact(own_values), axis=-2)
            mixed = (mixed + on_self * exact(value)).swapaxes(2, 3).astype(x.dtype)
            return block.finish(x, mixed, DropoutKeys()), (key_, value)

        given = (trunk.keys, trunk.values, branches.keys, branches.values)
        x, new = _through(self.layers, layer, x, given)
        room = (
            jax.lax.dynamic_update_index_in_dim(old, leaf.astype(old.dtype), step, axis=5)
            for old, leaf in zip(branches, new, strict=True)
        )
        return self.norm(x), Branches(*room)


class AgentAttention(eqx.Module):
    """Attention of the agents of a team to each other; no order, no identity."""

    layers: Block | tuple[Block, ...]
    """All layers in one block, stacked on the first axis of every tensor; see `apart`."""

    def __init__(
        self, layers: int, width: int, heads: int, *, dropout: float = 0.0, key: Key[Array, ""]
    ) -> None:
        self.layers = _stack(layers, width, heads, dropout, key)

    def __call__(
        self,
        x: Float[Array, "*b N D"],
        present: Bool[Array, "*b N"],
        *,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "*b N D"]:
        """Agents see those present and themselves, so that nobody sees nothing.

        Several teams make one sequence, in which nobody sees another team: matrix units take one
        such sequence as fast as one team. What is not a number in one spoils all of them.
        """
        shape, agents = x.shape, x.shape[-2]
        rows = agents * teams_together(x.size // (agents * x.shape[-1]), agents)
        x, present = x.reshape(-1, rows, x.shape[-1]), present.reshape(-1, 1, rows)
        team = jnp.arange(rows) // agents
        mask = present & (team[:, None] == team[None, :])[None] | jnp.eye(rows, dtype=bool)[None]

        def layer(x: Array, given: tuple[Block, DropoutKeys]) -> tuple[Array, None]:
            block, dropout = given
            query, key_, value = block.project(x)
            weight = attention_weights(query, key_, mask)
            weight = drop(weight, block.dropout, dropout.weights)
            mixed = jnp.einsum("...hnm,...mhk->...nhk", weight, value)
            return block.finish(x, mixed, dropout), None

        given = (_dropout_keys(key, numbers_of(self.layers)[0]),)
        return _through(self.layers, layer, x, given)[0].reshape(shape)


def teams_together(teams: int, agents: int) -> int:
    """How many teams of so many agents share a sequence: a power of two that divides them."""
    most = max(LONGEST_ROW // agents, 1)
    return max(2**k for k in range(most.bit_length()) if teams % 2**k == 0 and 2**k <= most)


def attention_weights(
    query: Float[Array, "*b T H K"], key: Float[Array, "*b S H K"], mask: Bool[Array, "*m T S"]
) -> Float[Array, "*b H T S"]:
    """Softmax attention, in float32 until the end."""
    return _weigh(_scores(query, key), mask, query)


class Turn(NamedTuple):
    """Cosine and sine of the angle by which each pair of features turns at each place."""

    cos: Float[Array, "*t 1 K/2"]
    sin: Float[Array, "*t 1 K/2"]


def turns(place: Int[Array, "*t"], size: int) -> Turn:
    """Rotary positions: features turn with the place, so that products know distances only."""
    half = size // 2
    speed = 10_000.0 ** (-jnp.arange(half) / half)
    speed = jnp.expand_dims(speed, tuple(range(place.ndim + 1)))
    angle = place[..., None, None].astype(jnp.float32) * speed
    return Turn(jnp.cos(angle), jnp.sin(angle))


def rotate(x: Float[Array, "*b H K"], turn: Turn) -> Float[Array, "*b H K"]:
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    missing = tuple(range(x.ndim - turn.cos.ndim))
    cos, sin = jnp.expand_dims(turn.cos, missing), jnp.expand_dims(turn.sin, missing)
    turned = jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)
    return turned.astype(x.dtype)


def exact(x: Float[Array, "..."]) -> Float32[Array, "..."]:
    return x.astype(jnp.float32)


def drop(x: Array, rate: float, key: Key[Array, ""] | None) -> Array:
    """Dropout; without a key nothing is dropped."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))


class DropoutKeys(NamedTuple):
    """One key for each place where a block drops something."""

    weights: Key[Array, "*l"] | None = None
    attended: Key[Array, "*l"] | None = None
    fed: Key[Array, "*l"] | None = None


def _dropout_keys(key: Key[Array, ""] | None, layers: int) -> DropoutKeys:
    """Keys of every layer, layers first; none at all without a key."""
    if key is None:
        return DropoutKeys()
    return DropoutKeys(*jax.random.split(key, (3, layers)))


def _stack(layers: int, width: int, heads: int, dropout: float, key: Key[Array, ""]) -> Block:
    make = jax.vmap(lambda key: Block(width, heads, dropout, key=key))
    return make(jax.random.split(key, layers))


def numbers_of(layers: Block | tuple[Block, ...]) -> tuple[int, int]:
    """Of layers, and of heads in each."""
    if isinstance(layers, tuple):
        return len(layers), layers[0].heads
    return layers.norm_attention.gain.shape[0], layers.heads


def blocks_of(layers: Block | tuple[Block, ...]) -> tuple[Block, ...]:
    """Each layer by itself."""
    if isinstance(layers, tuple):
        return layers
    leaves, structure = jax.tree.flatten(layers)
    count = leaves[0].shape[0]
    each = [jax.lax.split(leaf, (1,) * count) for leaf in leaves]
    return tuple(
        structure.unflatten([part[number].reshape(part[number].shape[1:]) for part in each])
        for number in range(count)
    )


def apart(tree: Tree) -> Tree:
    """A model whose Transformers hold the tensors of each layer apart.

    Before a loop it saves cutting them out of the stack in every turn.
    """
    return jax.tree.map(
        lambda node: blocks_of(node) if _is_stack(node) else node, tree, is_leaf=_is_stack
    )


def _is_stack(node: Any) -> bool:
    return isinstance(node, Block) and node.norm_attention.gain.ndim == 2


def _through(
    layers: Block | tuple[Block, ...],
    layer: Callable[[Array, tuple], tuple[Array, Any]],
    x: Array,
    given: tuple,
) -> tuple[Array, Any]:
    """All layers in turn; `given` is stacked as they are, and so is what they leave.

    A loop would copy what each layer is given and leaves.
    """
    left = []
    for number, block in enumerate(blocks_of(layers)):
        own = jax.tree.map(lambda leaf, number=number: leaf[number], given)
        x, leaves = layer(x, (block, *own))
        left.append(leaves)
    return x, jax.tree.map(lambda *each: jnp.stack(each), *left)


def _even(x: Array, axis: int, value: int) -> Array:
    """With more of `value` at the end of an axis."""
    more = [(0, -x.shape[axis] % ALIGNED if number == axis else 0) for number in range(x.ndim)]
    return jnp.pad(x, more, constant_values=value)


def _may_see(query: Int[Array, " Q"], place: Int[Array, " S"], window: int) -> Bool[Array, "Q S"]:
    distance = query[:, None] - place[None, :]
    return (distance >= 0) & (distance < window)


@jax.custom_vjp
def _scores(
    query: Float[Array, "*b T H K"], key: Float[Array, "*b S H K"]
) -> Float32[Array, "*b H T S"]:
    """In float32. Gradients are multiplied in the precision of query and key, as these are."""
    return jnp.einsum("...thk,...shk->...hts", query, key, preferred_element_type=jnp.float32)


def _scores_forward(query: Array, key: Array) -> tuple[Array, tuple[Array, Array]]:
    return _scores(query, key), (query, key)


def _scores_backward(kept: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    query, key = kept
    gradient = gradient.astype(query.dtype)
    return (
        jnp.einsum("...hts,...shk->...thk", gradient, key),
        jnp.einsum("...hts,...thk->...shk", gradient, query),
    )


_scores.defvjp(_scores_forward, _scores_backward)


def _weigh(scores: Array, mask: Array, query: Array) -> Array:
    """Attention weights `[*b H T S]` from scores and a mask `[*b T S]`."""
    scaled = scores * query.shape[-1] ** -0.5
    seen = jnp.where(mask[..., None, :, :], scaled, FAR_BELOW)
    return jax.nn.softmax(seen, axis=-1).astype(query.dtype)
