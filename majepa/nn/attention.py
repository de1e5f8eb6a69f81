"""Softmax attention: places that features turn to, weights, and what they mix.

`mix` and `mix_branches` are what Transformers are made of. GPUs may take kernels for them
(`attention_kernels`) that compute the same.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Key

from .gpu import may_take_kernels

FAR_BELOW = -1e9
"""Score of what may not be seen; finite, so that no gradient is NaN."""


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
    """Turned to its places."""
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    missing = tuple(range(x.ndim - turn.cos.ndim))
    cos, sin = jnp.expand_dims(turn.cos, missing), jnp.expand_dims(turn.sin, missing)
    turned = jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)
    return turned.astype(x.dtype)


def heads_of(qkv: Float[Array, "*b Q"], heads: int) -> tuple[Array, Array, Array]:
    """Queries, keys and values of a projection, `[*b, heads, size]` each."""
    parts = jnp.split(qkv, 3, axis=-1)
    query, key, value = (part.reshape(*qkv.shape[:-1], heads, -1) for part in parts)
    return query, key, value


def exact(x: Float[Array, "..."]) -> Float32[Array, "..."]:
    return x.astype(jnp.float32)


def attention_weights(
    query: Float[Array, "*b T H K"], key: Float[Array, "*b S H K"], mask: Bool[Array, "*m T S"]
) -> Float[Array, "*b H T S"]:
    """In float32 until the end."""
    return _weigh(_scores(query, key), mask, query)


@jax.custom_vjp
def _scores(
    query: Float[Array, "*b T H K"], key: Float[Array, "*b S H K"]
) -> Float32[Array, "*b H T S"]:
    """In float32. Gradients are multiplied in the precision of query and key, as these are."""
    return jnp.einsum("...thk,...shk->...hts", query, key, preferred_element_type=jnp.float32)


def _scores_forward(query: Array, key: Array) -> tuple[Array, tuple[Array, Array]]:
    return _scores(query, key), (query, key)


def _scores_backward(given: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    query, key = given
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


def kept(key: Key[Array, ""] | None, rate: float, shape: tuple[int, ...]) -> Array | None:
    """What dropout leaves; none without a key, if nothing is dropped."""
    if key is None or rate == 0.0:
        return None
    return jax.random.bernoulli(key, 1.0 - rate, shape)


def drop(x: Array, rate: float, keep: Bool[Array, "..."] | None) -> Array:
    """What is kept, larger by what is dropped."""
    if keep is None:
        return x
    return jnp.where(keep, exact(x) / (1.0 - rate), 0.0).astype(x.dtype)


class Past(NamedTuple):
    """What records see besides each other."""

    keys: Float[Array, "*b W H K"]
    """Not turned to their places yet; neither are those of the new records."""
    values: Float[Array, "*b W H K"]
    turn: Turn
    """Of the places of the past, then of the new records."""


def mix(
    qkv: Float[Array, "M N T Q"],
    past: Past | None,
    mask: Bool[Array, "M T S"],
    keep: Bool[Array, "M N H T S"] | None,
    *,
    heads: int,
    rate: float,
) -> Float[Array, "M N T D"]:
    """What each of `T` records mixes from what it sees, by its projection to query, key and value.

    `N` sequences share a mask. `keep` is what dropout of this rate leaves of the weights.
    """
    size, before = qkv.shape[-1] // (3 * heads), 0 if past is None else past.keys.shape[-3]
    if may_take_kernels(qkv.dtype) and (past is None or before > 0):
        from .attention_kernels import suits

        if suits(qkv.shape[2], before, size):
            # Once for both ways: what is kept until the way back is what the kernel reads.
            keep = None if keep is None else keep.astype(jnp.int8)
            return _mix(heads, rate, qkv, past, mask, keep)
    return _plain_mix(heads, rate, qkv, past, mask, keep)


def _plain_mix(
    heads: int, rate: float, qkv: Array, past: Past | None, mask: Array, keep: Array | None
) -> Array:
    query, keys, values = heads_of(qkv, heads)
    if past is not None:
        length = qkv.shape[2]
        keys = jnp.concatenate([past.keys.astype(keys.dtype), keys], axis=2)
        values = jnp.concatenate([past.values.astype(values.dtype), values], axis=2)
        now = jax.tree.map(lambda leaf: leaf[-length:], past.turn)
        query, keys = rotate(query, now), rotate(keys, past.turn)
    weight = attention_weights(query, keys, mask[:, None])
    weight = weight if keep is None else drop(weight, rate, keep != 0)
    mixed = jnp.einsum("bnhts,bnshk->bnthk", weight, values)
    return mixed.reshape(*qkv.shape[:3], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mix(heads: int, rate: float, *given: Any) -> Array:
    """By the platform. Where it has gradients, it is computed again on the way back."""
    kernel = functools.partial(_kernel_mix, heads, rate)
    plain = functools.partial(_traced_mix, heads, rate)
    return jax.lax.platform_dependent(*given, cuda=kernel, default=plain)


def _mix_forward(heads: int, rate: float, *given: Any) -> tuple[Array, tuple]:
    return _mix(heads, rate, *given), given


def _mix_backward(heads: int, rate: float, given: tuple, gradient: Array) -> tuple:
    kernel = functools.partial(_pull_kernel_mix, heads, rate)
    plain = functools.partial(_pull_plain_mix, heads, rate)
    of_qkv, of_past = jax.lax.platform_dependent(gradient, *given, cuda=kernel, default=plain)
    constant: Any = None
    if of_past is not None:
        of_past = Past(of_past[0], of_past[1], constant)
    return of_qkv, of_past, constant, constant


_mix.defvjp(_mix_forward, _mix_backward)

# Traced once for all layers of a size.
_once = functools.partial(jax.jit, static_argnums=(0, 1))
_traced_mix = _once(_plain_mix)


@_once
def _kernel_mix(
    heads: int, rate: float, qkv: Array, past: Past | None, mask: Array, keep: Array | None
) -> Array:
    from .attention_kernels import attend

    mixed = attend(*_flat(qkv, past, mask, keep), heads=heads, rate=rate)
    return mixed.reshape(*qkv.shape[:3], -1)


@_once
def _pull_kernel_mix(
    heads: int, rate: float, gradient: Array, qkv: Array, past: Past | None, *seen: Any
) -> tuple[Array, tuple[Array, Array] | None]:
    """Gradients of the projection, and of the keys and values of the past."""
    from .attention_kernels import pull_attend

    flat = _flat(qkv, past, *seen)
    gradient = gradient.reshape(*flat[0].shape[:2], -1)
    of_qkv, of_past = pull_attend(*flat, gradient, heads=heads, rate=rate)
    of_qkv = of_qkv.reshape(qkv.shape)
    if past is None:
        return of_qkv, None
    of_keys, of_values = (leaf.reshape(past.keys.shape).astype(past.keys.dtype) for leaf in of_past)
    return of_qkv, (of_keys, of_values)


@_once
def _pull_plain_mix(
    heads: int, rate: float, gradient: Array, qkv: Array, past: Past | None, *seen: Any
) -> tuple[Array, tuple[Array, Array] | None]:
    def run(qkv: Array, held: tuple[Array, Array] | None) -> Array:
        after = None if held is None or past is None else Past(*held, past.turn)
        return _plain_mix(heads, rate, qkv, after, *seen)

    held = None if past is None else (past.keys, past.values)
    return jax.vjp(run, qkv, held)[1](gradient)


def _flat(
    qkv: Array, past: Past | None, mask: Array, keep: Array | None
) -> tuple[Array, Past | None, Any]:
    """As kernels take them: sequences on one axis, features on another."""
    from . import attention_kernels as kernels

    sequences = qkv.shape[0] * qkv.shape[1]
    if past is not None:
        turn = Turn(*(leaf[:, 0] for leaf in past.turn))
        keys, values = (
            leaf.reshape(sequences, leaf.shape[2], -1).astype(qkv.dtype)
            for leaf in (past.keys, past.values)
        )
        past = Past(keys, values, turn)
    if keep is not None:
        keep = keep.astype(jnp.int8).reshape(sequences, *keep.shape[2:])
    sight = kernels.Sight(mask.astype(jnp.int8), keep)
    return qkv.reshape(sequences, *qkv.shape[2:]), past, sight


class Limb(NamedTuple):
    """What the future of many roots goes on from, in one layer: laid out once for all steps."""

    keys: Float[Array, "B N H S K"]
    """Turned to their places."""
    values: Float[Array, "B N H S K"]


class Twigs(NamedTuple):
    """Keys, turned, and values of imagined records in one layer: `P` for each of `R` roots."""

    keys: Float[Array, "B N H R P K"]
    values: Float[Array, "B N H R P K"]


def mix_branches(
    qkv: Float[Array, "B N R Q"],
    limb: Limb,
    twigs: Twigs,
    shared: Bool[Array, "B R S"],
    own: Bool[Array, " P"],
    turn: Turn,
    step: Int[Array, ""],
    *,
    window: int,
) -> tuple[Float[Array, "B N R D"], Twigs]:
    """What the next record of each root mixes; and the twigs with that record as number `step`.

    `turn` is that of the record's place. It sees the places of the limb that are `shared`, those of
    its `own` twig, and itself. Root r shares no places but r to r + `window` - 1. No gradients.
    """
    given = jax.lax.stop_gradient((qkv, limb, twigs, shared, own, turn, step))
    if may_take_kernels(qkv.dtype):
        from .attention_kernels import suits_branches

        if suits_branches(limb, window):
            kernel = functools.partial(_kernel_mix_branches, window)
            return jax.lax.platform_dependent(
                *given, cuda=kernel, default=jax.jit(_plain_mix_branches)
            )
    return _plain_mix_branches(*given)


@functools.partial(jax.jit, static_argnums=0)
def _kernel_mix_branches(window: int, *given: Any) -> tuple[Array, Twigs]:
    from .attention_kernels import mix_branches

    return mix_branches(*given, window=window)


def _plain_mix_branches(
    qkv: Array, limb: Limb, twigs: Twigs, shared: Array, own: Array, turn: Turn, step: Array
) -> tuple[Array, Twigs]:
    heads, size = limb.keys.shape[2], limb.keys.shape[-1]
    query, key, value = heads_of(qkv, heads)
    query, key = rotate(query, turn), rotate(key, turn)
    query, key, value = (leaf.swapaxes(2, 3) for leaf in (query, key, value))
    scale = size**-0.5
    to_shared = jnp.einsum(
        "bnhrk,bnhsk->bnhrs", query, limb.keys, preferred_element_type=jnp.float32
    )
    to_shared = jnp.where(shared[:, None, None], scale * to_shared, FAR_BELOW)
    # A handful of places for each root: products and sums beat tiny matrices.
    to_own = jnp.sum(exact(query)[..., None, :] * exact(twigs.keys), axis=-1)
    to_own = jnp.where(own[None, None, None, None], scale * to_own, FAR_BELOW)
    to_self = scale * jnp.sum(exact(query) * exact(key), axis=-1, keepdims=True)
    # One softmax over all three.
    parts = (to_shared, to_own, to_self)
    peak = functools.reduce(jnp.maximum, (part.max(-1, keepdims=True) for part in parts))
    parts = [jnp.exp(part - peak) for part in parts]
    total = sum(part.sum(-1, keepdims=True) for part in parts)
    on_shared, on_own, on_self = (part / total for part in parts)
    mixed = jnp.einsum("bnhrs,bnhsk->bnhrk", on_shared.astype(limb.values.dtype), limb.values)
    # Nothing of what was never written: it may be no number.
    written = jnp.where(own[None, None, None, None, :, None], exact(twigs.values), 0.0)
    mixed = exact(mixed) + jnp.sum(on_own[..., None] * written, axis=-2)
    mixed = (mixed + on_self * exact(value)).swapaxes(2, 3).astype(qkv.dtype)
    grown = Twigs(
        *(
            jax.lax.dynamic_update_index_in_dim(old, leaf.astype(old.dtype), step, axis=4)
            for old, leaf in zip(twigs, (key, value), strict=True)
        )
    )
    return mixed.reshape(*qkv.shape[:3], -1), grown
