"""Pre-norm Transformers over one axis: a causal one over time and one over agents.

**Time.** Every layer sees a sliding window of `window` records of the same episode, itself
included. Positions are relative (rotary), so a history may be cut anywhere: running on a cache of
the last `window - 1` records and running on the whole sequence give the same result.

**Branches.** Imagination starts at every record of a sequence. `branch` runs one step for all of
these roots at once; they share the keys and values of the sequence and own those of their future.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int, Key, Shaped

from .attention import (
    Limb,
    Past,
    Twigs,
    attention_weights,
    drop,
    heads_of,
    kept,
    mix,
    mix_branches,
    rotate,
    turns,
)
from .layers import (
    ALIGNED,
    LEAST_ROWS,
    Biased,
    Linear,
    RMSNorm,
    Tree,
    activated,
    as_rows,
    make_room,
    product,
)

LONGEST_ROW = 32
"""Agents of several teams that attention takes for one sequence."""


class DropoutKeys(NamedTuple):
    """One key for each place where a block drops something."""

    weights: Key[Array, "*l"] | None = None
    attended: Key[Array, "*l"] | None = None
    fed: Key[Array, "*l"] | None = None


class Block(eqx.Module):
    """Attention and a feed-forward layer, each on a residual branch with dropout.

    Where rows are many, the biases of the branches are one vector beside what they add to: norms
    take it along, so that nothing goes through all rows for a bias. What is dropped has its bias at
    once.
    """

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

    def projected(self, x: Biased) -> tuple[Biased, Float[Array, "*b Q"]]:
        """x, for what goes on beside attention; and queries, then keys, then values, of one head
        after another."""
        same, normed = self.norm_attention.beside(*x)
        return Biased(same, x.bias), self.query_key_value(normed)

    def finish(self, x: Biased, mixed: Float[Array, "*b D"], keys: DropoutKeys) -> Biased:
        """The rest of the block, given what attention mixed."""
        middle = self._added(x, self.out, mixed, keys.attended)
        same, normed = self.norm_feed.beside(*middle)
        active = activated(product(normed, self.widen.weight), self.widen.bias)
        return self._added(Biased(same, middle.bias), self.narrow, active, keys.fed)

    def widened(
        self, middle: Float[Array, "*b D"]
    ) -> tuple[Float[Array, "*b D"], Float[Array, "*b W"]]:
        """What goes on beside the wide layer, and that layer before its SiLU."""
        middle, normed = self.norm_feed.beside(middle)
        return middle, self.widen(normed)

    def _added(
        self, x: Biased, linear: Linear, given: Float[Array, "*b I"], key: Key[Array, ""] | None
    ) -> Biased:
        """x and what a residual branch puts out."""
        if key is None and as_rows(given).shape[0] >= LEAST_ROWS:
            bias = linear.bias if x.bias is None else x.bias + linear.bias
            return Biased(x.x + product(given, linear.weight), bias)
        put_out = linear(given)
        keep = kept(key, self.dropout, put_out.shape)
        return Biased(x.whole() + drop(put_out, self.dropout, keep))


class History(NamedTuple):
    """What a temporal Transformer remembers: keys and values of each layer."""

    keys: tuple[Float[Array, "B N S H K"], ...]
    """Not rotated yet: a position is a place in the array."""
    values: tuple[Float[Array, "B N S H K"], ...]
    episode: Int[Array, "B S"]
    """Number of the episode a record belongs to; -1 where there is none."""

    def last(self, length: int) -> History:
        start = self.episode.shape[1] - length
        return self._of_each(lambda leaf: leaf[:, :, start:], self.episode[:, start:])

    def of(self, row: Int[Array, " R"]) -> History:
        """Of some sequences of the batch, in this order."""
        return self._of_each(lambda leaf: leaf[row], self.episode[row])

    def _of_each(self, part: Callable[[Array], Array], episode: Int[Array, "..."]) -> History:
        return History(tuple(map(part, self.keys)), tuple(map(part, self.values)), episode)

    def ending_at(self, row: Int[Array, " R"], last: Int[Array, " R"], length: int) -> History:
        """For each `(row, last)`, the `length` records up to place `last`, as a batch."""
        place = last[:, None] + jnp.arange(1 - length, 1)[None, :]
        inside = jnp.maximum(place, 0)

        def window(leaf: Float[Array, "B N S H K"]) -> Float[Array, "R N W H K"]:
            return leaf[row[:, None], :, inside].swapaxes(1, 2)

        episode = jnp.where(place < 0, -1, self.episode[row[:, None], inside])
        return self._of_each(window, episode)


class Trace(NamedTuple):
    """Activations of a run over `T` records, of each layer, with `S` records to look at."""

    x: tuple[Float[Array, "B N T D"], ...]
    """What entered each layer."""
    query: tuple[Float[Array, "B N T H K"], ...]
    """Turned to its place; so are the keys."""
    keys: tuple[Float[Array, "B N S H K"], ...]
    values: tuple[Float[Array, "B N S H K"], ...]
    weight: tuple[Float[Array, "B N H T S"], ...]
    middle: tuple[Float[Array, "B N T D"], ...]
    wide: tuple[Float[Array, "B N T W"], ...]
    end: Float[Array, "B N T D"]
    """What left the last layer, before the norm."""


class Trunk(NamedTuple):
    """A history that many futures go on from: it is turned, and laid out, once for all steps.

    Places after its end, which nobody sees, make their number one that matrix units like.
    """

    layers: tuple[Limb, ...]
    episode: Int[Array, "B S"]


Branches = tuple[Twigs, ...]
"""What was imagined after each root, layer by layer."""


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
        shape = (batch, agents, self.window - 1, heads, size)
        keys, values = (
            tuple(jnp.zeros(shape, dtype) for _ in range(count)) for _ in range(2)
        )  # fmt: skip
        return History(keys, values, jnp.full((batch, self.window - 1), -1, jnp.int32))

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
        return self._run(x, episode, past, key, trace=False)[:2]

    def traced(
        self, x: Float[Array, "B N T D"], episode: Int[Array, "B T"], past: History
    ) -> tuple[Float[Array, "B N T D"], History, Trace]:
        """The same without dropout, and the activations on the way."""
        y, history, (end, layers) = self._run(x, episode, past, None, trace=True)
        return y, history, Trace._make((*zip(*layers, strict=True), end))

    def _run(
        self,
        x: Float[Array, "B N T D"],
        episode: Int[Array, "B T"],
        past: History,
        key: Key[Array, ""] | None,
        *,
        trace: bool,
    ) -> tuple[Float[Array, "B N T D"], History, tuple[Array, tuple[tuple[Array, ...], ...]]]:
        """And the end of the last layer, with what is kept of each layer."""
        length = x.shape[2]
        seen = jnp.concatenate([past.episode, episode], axis=1)
        place = jnp.arange(seen.shape[1])
        mask = _may_see(place[-length:], place, self.window)[None]
        mask = mask & (episode[:, :, None] == seen[:, None, :])
        turn = turns(place, past.keys[0].shape[-1])
        turn_now = jax.tree.map(lambda leaf: leaf[-length:], turn)

        def layer(x: Biased, block: Block, given: tuple) -> tuple[Biased, tuple]:
            old_keys, old_values, dropout = given
            x, qkv = block.projected(x)
            query, key_, value = heads_of(qkv, block.heads)
            keys = jnp.concatenate([old_keys.astype(key_.dtype), key_], axis=2)
            values = jnp.concatenate([old_values.astype(value.dtype), value], axis=2)
            if trace:
                turned, turned_keys = rotate(query, turn_now), rotate(keys, turn)
                weight = attention_weights(turned, turned_keys, mask[:, None])
                mixed = jnp.einsum("bnhts,bnshk->bnthk", weight, values).reshape(x.x.shape)
                middle, wide = block.widened(x.x + block.out(mixed))
                after = Biased(middle + block.narrow(jax.nn.silu(wide)))
                traced = (x.x, turned, turned_keys, values, weight, middle, wide)
                return after, (keys, values, traced)
            shape = (*x.x.shape[:2], block.heads, length, seen.shape[1])
            mixed = mix(
                qkv, Past(old_keys, old_values, turn), mask,
                kept(dropout.weights, block.dropout, shape),
                heads=block.heads, rate=block.dropout,
            )  # fmt: skip
            return block.finish(x, mixed, dropout), (keys, values, ())

        dropout = _dropout_keys(key, len(past.keys))
        given = list(zip(past.keys, past.values, dropout, strict=True))
        end, left = _through(self.layers, layer, Biased(x), given)
        keys, values, traced = zip(*left, strict=True)
        return self.norm(*end), History(keys, values, seen), (end.x, traced)

    def recall(
        self,
        x: Float[Array, "B C N T D"],
        episode: Int[Array, "B C T"],
        last: int,
        *,
        outputs: bool,
    ) -> tuple[Float[Array, "B C N T D"] | None, History]:
        """Outputs for `C` chunks of `T` records that follow nothing, if they are asked for, and the
        history of the `last` records.

        A layer takes all chunks at once, none of which is shorter than what a window looks back on.
        Without outputs it takes only those that the layers above it look back on.
        """
        batch, chunks, _, length = x.shape[:4]
        before, blocks = self.window - 1, blocks_of(self.layers)
        seen = jnp.concatenate([_ends_before(episode[:, :, None], before, -1)[:, :, 0], episode], 2)
        place = jnp.arange(before + length)
        mask = _may_see(place[before:], place, self.window)[None, None]
        mask = mask & (episode[..., :, None] == seen[..., None, :])
        turn = turns(place, x.shape[-1] // blocks[0].heads)

        def taken(above: int) -> int:
            """Chunks that a layer takes which has so many others above it."""
            reach = last + above * before
            return chunks if outputs else min(max(math.ceil(reach / length), 1), chunks)

        keys, values, stream = [], [], Biased(x)
        for above, block in zip(reversed(range(len(blocks))), blocks, strict=True):
            stream, qkv = block.projected(stream._replace(x=stream.x[:, -taken(above) :]))
            _, *new = heads_of(qkv, block.heads)
            for remembered, leaf in zip((keys, values), new, strict=True):
                remembered.append(_end_of(leaf, last))
            if not above and not outputs:
                break
            wanted, old = taken(above - 1), (_ends_before(leaf, before, 0) for leaf in new)
            qkv, old_keys, old_values, may_see = (
                leaf[:, -wanted:].reshape(batch * wanted, *leaf.shape[2:])
                for leaf in (qkv, *old, mask)
            )
            mixed = mix(
                qkv, Past(old_keys, old_values, turn), may_see, None,
                heads=block.heads, rate=block.dropout,
            )  # fmt: skip
            x = stream.x[:, -wanted:]
            stream = block.finish(stream._replace(x=x), mixed.reshape(x.shape), DropoutKeys())
        episode = episode.reshape(episode.shape[0], -1)
        history = History(tuple(keys), tuple(values), episode[:, episode.shape[1] - last :])
        return self.norm(*stream) if outputs else None, history

    def fork(self, history: History, roots: int, steps: int) -> tuple[Trunk, Branches]:
        """The trunk, and room for `steps` imagined records after each of `roots` records.

        What lies there before a record does is anything.
        """
        batch, agents, length, heads, size = history.keys[0].shape
        turn = turns(jnp.arange(length), size)
        shape = (batch, agents, heads, roots, steps, size)

        def laid_out(leaf: Float[Array, "B N S H K"]) -> Float[Array, "B N H P K"]:
            return _even(leaf.swapaxes(2, 3), 3, 0)

        limbs = tuple(
            Limb(laid_out(rotate(keys, turn)), laid_out(values))
            for keys, values in zip(history.keys, history.values, strict=True)
        )
        branches = tuple(Twigs(*(make_room(shape, leaf) for leaf in limb)) for limb in limbs)
        return Trunk(limbs, _even(history.episode, 1, -1)), branches

    def branch(
        self,
        x: Float[Array, "B N R D"],
        trunk: Trunk,
        last: Int[Array, " R"],
        episode: Int[Array, "B R"],
        branches: Branches,
        step: Int[Array, ""],
    ) -> tuple[Float[Array, "B N R D"], Branches]:
        """One more record for each root: number `step` after place `last` of the trunk.

        Roots follow each other: that of root r is r + `window` - 1, or one less.
        """
        place = jnp.arange(trunk.episode.shape[1])
        own_place = jnp.arange(branches[0].keys.shape[4])
        now = last + 1 + step
        shared = _may_see(now, place, self.window) & (place[None, :] <= last[:, None])
        shared = shared[None] & (episode[:, :, None] == trunk.episode[:, None, :])
        own = _may_see(step[None], own_place, self.window)[0] & (own_place < step)
        turn = turns(now, branches[0].keys.shape[-1])

        def layer(x: Biased, block: Block, given: tuple) -> tuple[Biased, Twigs]:
            limb, twigs = given
            x, qkv = block.projected(x)
            mixed, twigs = mix_branches(
                qkv, limb, twigs, shared, own, turn, step, window=self.window
            )
            return block.finish(x, mixed, DropoutKeys()), twigs

        given = list(zip(trunk.layers, branches, strict=True))
        end, grown = _through(self.layers, layer, Biased(x), given)
        return self.norm(*end), tuple(grown)


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
        return self.with_bias_apart(x, present, key=key).whole()

    def with_bias_apart(
        self,
        x: Float[Array, "*b N D"],
        present: Bool[Array, "*b N"],
        *,
        key: Key[Array, ""] | None = None,
    ) -> Biased:
        """The same for a norm, which adds the last bias as it goes."""
        shape, agents = x.shape, x.shape[-2]
        rows = agents * teams_together(x.size // (agents * x.shape[-1]), agents)
        x, present = x.reshape(-1, rows, x.shape[-1]), present.reshape(-1, 1, rows)
        team, count = jnp.arange(rows) // agents, numbers_of(self.layers)[0]
        mask = present & (team[:, None] == team[None, :])[None] | jnp.eye(rows, dtype=bool)[None]

        def layer(x: Biased, block: Block, dropout: DropoutKeys) -> tuple[Biased, None]:
            keep = kept(dropout.weights, block.dropout, (x.x.shape[0], block.heads, rows, rows))
            x, qkv = block.projected(x)
            mixed = mix(
                qkv[:, None], None, mask,
                None if keep is None else keep[:, None],
                heads=block.heads, rate=block.dropout,
            )  # fmt: skip
            return block.finish(x, mixed[:, 0], dropout), None

        end, _ = _through(self.layers, layer, Biased(x), _dropout_keys(key, count))
        return end._replace(x=end.x.reshape(shape))


def teams_together(teams: int, agents: int) -> int:
    """How many teams of so many agents share a sequence: a number that divides them."""
    most = max(LONGEST_ROW // agents, 1)
    return max(number for number in range(1, most + 1) if teams % number == 0)


def _dropout_keys(key: Key[Array, ""] | None, layers: int) -> list[DropoutKeys]:
    """Those of every layer; none at all without a key."""
    if key is None:
        return [DropoutKeys()] * layers
    keys = jax.random.split(key, (3, layers))
    return [DropoutKeys(*keys[:, number]) for number in range(layers)]


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
    layer: Callable[[Biased, Block, Any], tuple[Biased, Any]],
    x: Biased,
    given: Sequence[Any],
) -> tuple[Biased, list[Any]]:
    """All layers in turn, each with what it is given; and what each of them leaves.

    A loop would copy what each layer is given and leaves.
    """
    left = []
    for block, own in zip(blocks_of(layers), given, strict=True):
        x, leaves = layer(x, block, own)
        left.append(leaves)
    return x, left


def _even(x: Array, axis: int, value: int) -> Array:
    """With more of `value` at the end of an axis."""
    more = [(0, -x.shape[axis] % ALIGNED if number == axis else 0) for number in range(x.ndim)]
    return jnp.pad(x, more, constant_values=value)


def _ends_before(
    leaf: Shaped[Array, "B C N T *s"], size: int, nothing: int
) -> Shaped[Array, "B C N S *s"]:
    """The end of the chunk before each chunk; there is nothing before the first."""
    batch, chunks, agents, length = leaf.shape[:4]
    first = jnp.full((batch, 1, agents, size, *leaf.shape[4:]), nothing, leaf.dtype)
    if chunks == 1:
        return first
    return jnp.concatenate([first, leaf[:, :-1, :, length - size :]], axis=1)


def _end_of(leaf: Shaped[Array, "B C N T *s"], last: int) -> Shaped[Array, "B N S *s"]:
    """The last records of all chunks."""
    chunks, records = math.ceil(last / leaf.shape[3]), leaf.shape[3]
    leaf = leaf[:, leaf.shape[1] - chunks :].swapaxes(1, 2)
    leaf = leaf.reshape(*leaf.shape[:2], chunks * records, *leaf.shape[4:])
    return leaf[:, :, chunks * records - last :]


def _may_see(query: Int[Array, " Q"], place: Int[Array, " S"], window: int) -> Bool[Array, "Q S"]:
    distance = query[:, None] - place[None, :]
    return (distance >= 0) & (distance < window)
