"""The recurrence of local states: each latent is drawn from a history that holds the ones before.

**Forward.** `sample_latents` draws them one after another, without gradients and with condensed
states. Once they are known, all states are computed at once (`follow_latents`).

**Backward.** The gradient of a latent comes from all later records, through the straight-through
samples between. `_gradients_of_latents` finds it for one record after another, last record first,
moving nothing but activations; with it, the pass over all records at once gives every parameter's
gradient. Sums and values are those of differentiating the recurrence itself.

Both go from record to record, which takes a GPU many small kernels. `fused` has few for the sizes
it suits, and is taken there.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from ..nn.dists import sample_by
from ..nn.gpu import may_take_kernels
from ..nn.layers import product
from ..nn.stream import (
    advance,
    begin_return,
    go_back,
    layers_of,
    open_stream,
    pull,
    pull_norm,
    steps_of,
)
from ..nn.transformer import History, Trace
from .condense import Condensed, basis_of
from .local import Dynamics, Posterior
from .strands import Tracks, as_they_lie
from .tokens import Tokens, enter

LONGEST_CHUNK = 16
"""Records whose noise is drawn at once; latents are drawn from the beginning of a chunk on."""


def chunk_size(records: int) -> int:
    """The largest that divides them."""
    return max(size for size in range(1, LONGEST_CHUNK + 1) if records % size == 0)


@jax.named_scope("latents")
def sample_latents(
    dynamics: Dynamics,
    posterior: Posterior,
    seen: Float[Array, "B T N D"],
    tokens: Tokens,
    past: History,
    key: Key[Array, ""],
    begin: Int[Array, ""] | int = 0,
    tracks: Tracks | None = None,
) -> Int[Array, "B T N S"]:
    """Latents of the records from `begin` on, which follow `past`; none is given for those before.

    The first one continues from the latent that its token names; the others from each other. For
    records that lie on `tracks`, noise is what it would be where they come from.
    """
    tracks = as_they_lie(*tokens.is_first.shape) if tracks is None else tracks
    given = (dynamics, posterior, seen, tokens, past, key, tracks)
    fused = _kernels(dynamics)
    if fused is None or not fused.suits(dynamics, posterior):
        return _sample_latents(*given, begin=begin)
    size = chunk_size(tokens.a_before.shape[1])
    return jax.lax.platform_dependent(
        *given,
        cuda=functools.partial(fused.sample_latents, begin=jnp.asarray(begin), size=size),
        default=functools.partial(_sample_latents, begin=begin),
    )


def _sample_latents(
    dynamics: Dynamics,
    posterior: Posterior,
    seen: Float[Array, "B T N D"],
    tokens: Tokens,
    past: History,
    key: Key[Array, ""],
    tracks: Tracks,
    begin: Int[Array, ""] | int,
) -> Int[Array, "B T N S"]:
    """On any machine, and for states that are condensed or not."""
    _, length, agents = tokens.a_before.shape
    classes, latents = posterior.classes, posterior.latents
    layers = layers_of(dynamics.transformer)
    size = chunk_size(length)

    def step(carry: tuple, given: tuple) -> tuple[tuple, Array]:
        stream, z_before = carry
        t, seen, a_before, is_first, noise = given
        first = jnp.broadcast_to(is_first[:, None], a_before.shape)
        token = dynamics.look_up(z_before, a_before, first, classes=classes)
        y, stream = advance(layers, token, stream, t)
        q = posterior.given(dynamics.state_of(y), seen)
        z = sample_by(q, noise)
        return (stream, z), z

    def chunk(number: Int[Array, ""], carry: tuple) -> tuple:
        stream, z_before, latent = carry
        times = number * size + jnp.arange(size)
        noise = noise_of(key, tracks, number * size, size, (agents, latents))

        def rows(leaf: Array) -> Array:
            part = jax.lax.dynamic_slice_in_dim(leaf, number * size, size, axis=1)
            return jnp.moveaxis(part, 1, 0)

        given = (rows(seen), rows(tokens.a_before), rows(tokens.is_first))
        (stream, z_before), z = jax.lax.scan(step, (stream, z_before), (times, *given, noise))
        latent = jax.lax.dynamic_update_slice_in_dim(
            latent, jnp.moveaxis(z, 0, 1), number * size, axis=1
        )
        return stream, z_before, latent

    first = begin // size
    z_before = jax.lax.dynamic_index_in_dim(tokens.z_before, first * size, axis=1, keepdims=False)
    carry = (open_stream(past, tokens.episode), z_before, jnp.zeros_like(tokens.z_before))
    return jax.lax.fori_loop(first, length // size, chunk, carry)[2]


def noise_of(
    key: Key[Array, ""],
    tracks: Tracks,
    first: Int[Array, ""],
    size: int,
    shape: tuple[int, int],
) -> Float[Array, "L C N S"]:
    """Of `size` places of every track, time first: each record has a key of its own."""

    def one(sequence: Int[Array, ""], time: Int[Array, ""]) -> Float[Array, "N S"]:
        own = jax.random.fold_in(jax.random.fold_in(key, time), sequence)
        return jax.random.uniform(own, shape)

    def places(leaf: Int[Array, "C T"]) -> Int[Array, "L C"]:
        return jax.lax.dynamic_slice_in_dim(leaf, first, size, axis=1).T

    return jax.vmap(jax.vmap(one))(*jax.tree.map(places, tracks))


def _kernels(dynamics: Dynamics) -> ModuleType | None:
    """Kernels that GPUs may take the recurrence with; see `fused`, which says for what sizes."""
    if not may_take_kernels(dynamics.token.weight.dtype):
        return None
    from . import fused

    return fused


class Followed(NamedTuple):
    """States of records whose latents are known."""

    h: Float[Array, "B T N H"]
    q: Float[Array, "B T N S K"]
    history: History
    """Constant."""


@jax.custom_vjp
def follow_latents(
    dynamics: Dynamics,
    posterior: Posterior,
    seen: Float[Array, "B T N D"],
    tokens: Tokens,
    past: History,
) -> Followed:
    """History states and posteriors of all records at once.

    `tokens` name the latents that were drawn from these very posteriors; gradients take them for
    straight-through samples. `past` is constant.
    """
    return _all_at_once(dynamics, posterior, seen, tokens, past)[0]


class Passed(NamedTuple):
    """Activations of the pass over all records, agents before time."""

    token: Float[Array, "B N T D"]
    """Before its norm."""
    y: Float[Array, "B N T D"]
    hidden: Float[Array, "B N T J"]
    """Of the posterior, before its norm."""
    logits: Float[Array, "B N T Z"]
    trace: Trace


def _all_at_once(
    dynamics: Dynamics, posterior: Posterior, seen: Array, tokens: Tokens, past: History
) -> tuple[Followed, Passed]:
    classes = posterior.classes
    num_actions = dynamics.token.weight.shape[0] - posterior.latents * classes
    token = enter(dynamics, tokens, classes=classes, num_actions=num_actions).swapaxes(1, 2)
    y, history, trace = dynamics.transformer.traced(
        dynamics.token_norm(token), tokens.episode, past
    )
    h = dynamics.state_of(y)
    hidden = posterior.hidden(h, seen.swapaxes(1, 2))
    logits = posterior.mlp.after_first(hidden)
    q = posterior.mixed(logits)
    followed = Followed(h.swapaxes(1, 2), q.swapaxes(1, 2), history)
    return followed, Passed(token, y, hidden, logits, trace)


def _follow_forward(
    dynamics: Dynamics, posterior: Posterior, seen: Array, tokens: Tokens, past: History
) -> tuple[Followed, tuple]:
    def run(dynamics: Dynamics, posterior: Posterior, seen: Array) -> tuple[tuple, tuple]:
        followed, passed = _all_at_once(dynamics, posterior, seen, tokens, past)
        return (followed.h, followed.q), (followed.history, passed)

    (h, q), pull_back, (history, passed) = jax.vjp(run, dynamics, posterior, seen, has_aux=True)
    kept = (pull_back, passed, dynamics, posterior, seen, tokens.is_first)
    return Followed(h, q, history), kept


def _follow_backward(kept: tuple, gradient: Followed) -> tuple[Any, ...]:
    pull_back, passed, dynamics, posterior, seen, is_first = kept
    of_z = _gradients_of_latents(dynamics, posterior, seen, passed, is_first, gradient)
    p = jnp.exp(posterior.mixed(passed.logits)).swapaxes(1, 2)
    return (*pull_back((gradient.h, gradient.q + p * of_z)), None, None)


follow_latents.defvjp(_follow_forward, _follow_backward)


class Known(NamedTuple):
    """What a gradient's way back from the latent of a record needs of its posterior and state."""

    direct: Float[Array, "B N T D"]
    """What losses on a record itself send into y; that needs no later record."""
    thin: Float[Array, "P J"]
    """The posterior's first layer, for condensed states."""
    wide: Float[Array, "B N T P"]
    """[y; 1], as in `condense`."""
    r: Float[Array, "B N T 1"]
    turned: Float[Array, "B N T P"]


@jax.named_scope("gradients_of_latents")
def _gradients_of_latents(
    dynamics: Dynamics,
    posterior: Posterior,
    seen: Float[Array, "B T N D"],
    passed: Passed,
    is_first: Bool[Array, "B T"],
    gradient: Followed,
) -> Float[Array, "B T N S K"]:
    """What later records make of each latent."""

    def head(y: Float[Array, "B N T D"]) -> tuple[Array, Array]:
        h = dynamics.state_of(y)
        return h, posterior.given(h, seen.swapaxes(1, 2))

    basis = basis_of(dynamics)
    given = (gradient.h.swapaxes(1, 2), gradient.q.swapaxes(1, 2))
    first = posterior.mlp.linears[0].weight
    thin = first if isinstance(dynamics.state, Condensed) else basis.thin(first)
    thin = thin[: basis.gram.shape[0]]
    wide = basis.widen(passed.y)
    known = Known(jax.vjp(head, passed.y)[1](given)[0], thin, wide, *basis.scale(wide))
    given = (dynamics, posterior, passed, is_first, known)
    fused = _kernels(dynamics)
    if fused is None or not fused.suits_back(dynamics, posterior, passed):
        return _back_through(*given)
    return jax.lax.platform_dependent(*given, cuda=fused.back_through, default=_back_through)


def _back_through(
    dynamics: Dynamics,
    posterior: Posterior,
    passed: Passed,
    is_first: Bool[Array, "B T"],
    known: Known,
) -> Float[Array, "B T N S K"]:
    """On any machine."""
    layers = layers_of(dynamics.transformer)
    norm, size_y = posterior.mlp.norms[0], passed.y.shape[-1]
    of_latents = dynamics.token.weight[: passed.logits.shape[-1]]
    steps = steps_of(passed.trace)

    def back(carry: tuple, row: tuple) -> tuple[tuple, Array]:
        of_z, told = carry
        t, direct, token, hidden, logits, wide, r, turned, is_first = row
        of_logits = jax.vjp(lambda x: jnp.exp(posterior.mixed(x)), logits)[1](of_z)[0]
        of_silu = pull(posterior.mlp.linears[1], of_logits)
        of_hidden = jax.vjp(lambda x: jax.nn.silu(norm(x)), hidden)[1](of_silu)[0]
        of_c = product(of_hidden, known.thin.T).astype(jnp.float32)
        # c = r [y; 1], and r = (y' G y' + eps) ** -1/2 for y' = [y; 1].
        along = jnp.sum(of_c * wide, axis=-1, keepdims=True)
        of_y = direct + (r * of_c - r**3 * along * turned)[..., :size_y]
        of_x, told = go_back(layers, passed.trace, steps, told, of_y.astype(direct.dtype), t)
        of_token = pull_norm(dynamics.token_norm, token, of_x)
        before = product(of_token, of_latents.T).reshape(of_z.shape).astype(of_z.dtype)
        return (jnp.where(is_first[:, None, None, None], 0, before), told), of_z

    rows = (known.direct, passed.token, passed.hidden, passed.logits)
    rows = (*rows, known.wide, known.r, known.turned)
    rows = tuple(jnp.moveaxis(leaf, 2, 0) for leaf in rows)
    batch, agents, length = passed.y.shape[:3]
    nothing = jnp.zeros((batch, agents, posterior.latents, posterior.classes))
    _, of_z = jax.lax.scan(
        back,
        (nothing, begin_return(steps)),
        (jnp.arange(length), *rows, is_first.T),
        reverse=True,
    )
    return jnp.moveaxis(of_z, 0, 1)
