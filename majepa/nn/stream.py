"""A temporal Transformer record by record, and its gradient back through time.

`TemporalTransformer` runs records whose inputs are known all at once. Where the input of a record
depends on the output of the one before it, a `Stream` takes one record at a time. It has room for
all of them, so that nothing is moved, and keys are turned to their places as they enter.

The way back, `Return`, takes the gradient of one record's output to its input, last record first,
from the activations that a run of all records at once left behind. It reaches inputs alone: weights
get their gradients from that run, when the gradients of all outputs are known.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .attention import FAR_BELOW, Turn, exact, heads_of, rotate, turns
from .layers import Biased, Linear, RMSNorm, product
from .transformer import Block, DropoutKeys, History, TemporalTransformer, Trace, blocks_of


class Layers(NamedTuple):
    """A temporal Transformer, layer by layer."""

    blocks: tuple[Block, ...]
    norm: RMSNorm
    window: int


class Stream(NamedTuple):
    """Keys and values of each layer: of `window - 1` records of the past, then of the new ones."""

    keys: tuple[Float[Array, "B N S H K"], ...]
    """Turned to their places."""
    values: tuple[Float[Array, "B N S H K"], ...]
    episode: Int[Array, "B S"]


def layers_of(transformer: TemporalTransformer) -> Layers:
    return Layers(blocks_of(transformer.layers), transformer.norm, transformer.window)


def open_stream(past: History, episode: Int[Array, "B T"]) -> Stream:
    """A stream that goes on after `past`, with room for the records of `episode`."""
    batch, agents, before, heads, size = past.keys[0].shape
    room = jnp.zeros((batch, agents, episode.shape[1], heads, size), past.keys[0].dtype)
    turn = turns(jnp.arange(before), size)
    return Stream(
        tuple(jnp.concatenate([rotate(keys, turn), room], axis=2) for keys in past.keys),
        tuple(jnp.concatenate([values, room], axis=2) for values in past.values),
        jnp.concatenate([past.episode, episode], axis=1),
    )


def advance(
    layers: Layers, x: Float[Array, "B N D"], stream: Stream, t: Int[Array, ""]
) -> tuple[Float[Array, "B N D"], Stream]:
    """The output for new record number `t`, and the stream with that record in it."""
    window = layers.window
    place = window - 1 + t
    episode = _part(stream.episode, t, window, axis=1)
    mask = (episode == episode[:, -1:])[:, None, :, None]
    all_keys, all_values, now = [], [], Biased(x)
    for block, old_keys, old_values in zip(layers.blocks, stream.keys, stream.values, strict=True):
        now, qkv = block.projected(now)
        query, key, value = heads_of(qkv, block.heads)
        turn = turns(place[None], query.shape[-1])
        keys = _put(old_keys, rotate(key, turn), place)
        values = _put(old_values, value, place)
        scores = _dots(rotate(query, turn), _part(keys, t, window))
        seen = jnp.where(mask, scores * query.shape[-1] ** -0.5, FAR_BELOW)
        weight = jax.nn.softmax(seen, axis=2)
        mixed = _mean(weight, _part(values, t, window))
        now = block.finish(now, mixed.reshape(x.shape).astype(x.dtype), DropoutKeys())
        all_keys.append(keys)
        all_values.append(values)
    return layers.norm(*now), Stream(tuple(all_keys), tuple(all_values), stream.episode)


class Return(NamedTuple):
    """What later records have told about earlier ones: gradients of attention, by layer."""

    scores: tuple[Float[Array, "T B N S H"], ...]
    """Of each later record's scores, zero for records that are still to come."""
    mixed: tuple[Float[Array, "T B N H K"], ...]
    """Of what its attention mixed."""


class Steps(NamedTuple):
    """A trace of `T` records, time first, by layer."""

    x: tuple[Float[Array, "T B N D"], ...]
    query: tuple[Float[Array, "T B N H K"], ...]
    weight: tuple[Float[Array, "T B N S H"], ...]
    middle: tuple[Float[Array, "T B N D"], ...]
    wide: tuple[Float[Array, "T B N W"], ...]
    end: Float[Array, "T B N D"]

    def at(self, t: Int[Array, ""]) -> Steps:
        """One record."""
        return jax.tree.map(lambda leaf: leaf[t], self)


def steps_of(trace: Trace) -> Steps:
    def time_first(layers: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(jnp.moveaxis(leaf, 2, 0) for leaf in layers)

    return Steps(
        x=time_first(trace.x),
        query=time_first(trace.query),
        weight=time_first(tuple(jnp.moveaxis(leaf, 2, 4) for leaf in trace.weight)),
        middle=time_first(trace.middle),
        wide=time_first(trace.wide),
        end=jnp.moveaxis(trace.end, 2, 0),
    )


def begin_return(steps: Steps) -> Return:
    return Return(
        tuple(jnp.zeros(weight.shape, weight.dtype) for weight in steps.weight),
        tuple(jnp.zeros(query.shape, query.dtype) for query in steps.query),
    )


def go_back(
    layers: Layers,
    trace: Trace,
    steps: Steps,
    told: Return,
    gradient: Float[Array, "B N D"],
    t: Int[Array, ""],
) -> tuple[Float[Array, "B N D"], Return]:
    """From the gradient of the output for record `t` to that of its input.

    Everything after `t` must have been here before.
    """
    now, window = steps.at(t), layers.window
    place = window - 1 + t
    back = pull_norm(layers.norm, now.end, gradient)
    all_scores, all_mixed = list(told.scores), list(told.mixed)
    for number, block in reversed(list(enumerate(layers.blocks))):
        keys, values = (_part(leaf[number], t, window) for leaf in (trace.keys, trace.values))
        back = back + _pull_feed(block, now.middle[number], now.wide[number], back)

        mixed = pull(block.out, back).reshape(now.query[number].shape)
        weight = _part(now.weight[number], t, window)
        scores = _pull_softmax(weight, _dots(mixed, values)) * mixed.shape[-1] ** -0.5
        query = _mean(scores, keys)

        all_mixed[number] = jax.lax.dynamic_update_index_in_dim(all_mixed[number], mixed, t, axis=0)
        all_scores[number] = jax.lax.dynamic_update_slice(
            all_scores[number], scores.astype(all_scores[number].dtype)[None], (t, 0, 0, t, 0)
        )
        key = _total(all_scores[number][:, :, :, place], steps.query[number])
        value = _total(steps.weight[number][:, :, :, place], all_mixed[number])

        turn = _turned_back(turns(place[None], mixed.shape[-1]))
        parts = (rotate(query, turn), rotate(key, turn), value)
        flat = jnp.concatenate([part.reshape(back.shape) for part in parts], axis=-1)
        normed = pull(block.query_key_value, flat)
        back = back + pull_norm(block.norm_attention, now.x[number], normed)
    return back, Return(tuple(all_scores), tuple(all_mixed))


def pull(linear: Linear, gradient: Float[Array, "*b O"]) -> Float[Array, "*b I"]:
    """The gradient of a linear map's input."""
    return product(gradient, linear.weight.T)


def pull_norm(
    norm: RMSNorm, x: Float[Array, "*b D"], gradient: Float[Array, "*b D"]
) -> Float[Array, "*b D"]:
    return jax.vjp(norm, x)[1](gradient.astype(x.dtype))[0]


def pull_silu(x: Float[Array, "*b D"], gradient: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
    return jax.vjp(jax.nn.silu, x)[1](gradient.astype(x.dtype))[0]


def _pull_feed(
    block: Block,
    middle: Float[Array, "*b D"],
    wide: Float[Array, "*b W"],
    gradient: Float[Array, "*b D"],
) -> Float[Array, "*b D"]:
    normed = pull(block.widen, pull_silu(wide, pull(block.narrow, gradient)))
    return pull_norm(block.norm_feed, middle, normed)


def _pull_softmax(
    weight: Float[Array, "B N S H"], gradient: Float[Array, "B N S H"]
) -> Float[Array, "B N S H"]:
    mean = jnp.sum(exact(weight) * gradient, axis=2, keepdims=True)
    return exact(weight) * (gradient - mean)


# One record against a window of others. Products and sums, in float32: they fuse, and unlike
# matrix products need no other layout of the window.


def _dots(x: Float[Array, "B N H K"], y: Float[Array, "B N S H K"]) -> Float[Array, "B N S H"]:
    return jnp.sum(exact(x)[:, :, None] * exact(y), axis=-1)


def _mean(weight: Float[Array, "B N S H"], x: Float[Array, "B N S H K"]) -> Float[Array, "B N H K"]:
    return jnp.sum(exact(weight)[..., None] * exact(x), axis=2)


def _total(
    weight: Float[Array, "T B N H"], x: Float[Array, "T B N H K"]
) -> Float[Array, "B N H K"]:
    return jnp.sum(exact(weight)[..., None] * exact(x), axis=0)


def _part(x: Array, first: Int[Array, ""], length: int, axis: int = 2) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, first, length, axis)


def _put(x: Array, record: Array, place: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_update_index_in_dim(x, record.astype(x.dtype), place, axis=2)


def _turned_back(turn: Turn) -> Turn:
    return Turn(turn.cos, -turn.sin)
