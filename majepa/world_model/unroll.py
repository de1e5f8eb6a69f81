"""Local states along replayed sequences, and the histories that rollouts start from.

The world-model view rebuilds its context from stored latents in one parallel pass and infers the
learning records one by one, with gradients through the sampled latents. The behaviour view is
inferred anew as a whole, without gradients. Nothing before an episode's start is ever seen.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from ..nn.dists import sample_index, straight_through
from ..nn.transformer import History
from ..packing import least
from ..replay import Record, Sequence
from .joint import JointModel
from .local import Dynamics, Encoder, LocalModel, Posterior, feature

sg = jax.lax.stop_gradient


class States(NamedTuple):
    """Inferred local states of `T` records."""

    e: Float[Array, "B T N E"]
    h: Float[Array, "B T N H"]
    q: Float[Array, "B T N S K"]
    """Log-probabilities of the posterior."""
    z: Float[Array, "B T N S K"]
    """One-hot samples, with the gradient of their probabilities."""
    latent: Int[Array, "B T N S"]
    """Classes of z."""

    @property
    def s(self) -> Float[Array, "B T N F"]:
        return feature(self.h, self.z)


class Tokens(NamedTuple):
    """What the local history of each record is made of."""

    z_before: Int[Array, "B T N S"]
    a_before: Int[Array, "B T N"]
    is_first: Bool[Array, "B T"]
    episode: Int[Array, "B T"]
    """Number of the episode within the sequence."""

    def between(self, begin: int, end: int | None) -> Tokens:
        return jax.tree.map(lambda leaf: leaf[:, begin:end], self)


class Past(NamedTuple):
    """The end of a context: what the learning records continue, all of it constant."""

    local: History
    joint: History
    z: Int[Array, "B N S"]
    """Latent of the last context record."""


class Roots(NamedTuple):
    """Learning records that imagination starts from, all of it constant."""

    s: Float[Array, "B T N F"]
    z: Int[Array, "B T N S"]
    local: History
    """The last `window - 1` context records, then the learning records."""
    joint: History
    episode: Int[Array, "B T"]


def tokens_of(sequence: Sequence, latent: Int[Array, "B T N S"]) -> Tokens:
    """Latents and actions moved one record on; the sequence brings what preceded it."""
    record = sequence.record
    return Tokens(
        z_before=_shift(sequence.previous_latent, latent),
        a_before=_shift(sequence.previous_action, record.action),
        is_first=record.is_first,
        episode=jnp.cumsum(record.is_first, axis=1, dtype=jnp.int32),
    )


def run_history(
    dynamics: Dynamics, tokens: Tokens, past: History, *, classes: int, num_actions: int
) -> tuple[Float[Array, "B T N H"], History]:
    """All states h at once, for known latents."""
    agents = tokens.a_before.shape[-1]
    first = jnp.broadcast_to(tokens.is_first[..., None], (*tokens.is_first.shape, agents))
    token = dynamics.embed(
        one_hot_vec(tokens.z_before, classes), jax.nn.one_hot(tokens.a_before, num_actions), first
    )
    h, history = dynamics.history(token.swapaxes(1, 2), tokens.episode, past)
    return h.swapaxes(1, 2), history


def rebuild_context(
    local: LocalModel, joint: JointModel, sequence: Sequence, tokens: Tokens, context: int
) -> Past:
    """The past of the learning records, from stored latents and the current parameters."""
    record: Record = jax.tree.map(lambda leaf: leaf[:, :context], sequence.record)
    classes, num_actions = local.posterior.classes, record.legal.shape[-1]
    batch, agents = record.alive.shape[0], record.alive.shape[2]
    dtype = local.dynamics.token.weight.dtype
    nothing = local.dynamics.transformer.empty(batch, agents, dtype)
    h, history = run_history(
        local.dynamics, tokens.between(0, context), nothing,
        classes=classes, num_actions=num_actions,
    )  # fmt: skip
    s = feature(h, jax.nn.one_hot(record.latent, classes))
    _, joint_history = run_joint(
        joint, s, record, tokens.episode[:, :context], joint.temporal.empty(batch, agents, dtype)
    )
    past = Past(
        local=history.last(local.dynamics.transformer.window - 1),
        joint=joint_history.last(joint.temporal.window - 1),
        z=record.latent[:, -1],
    )
    return sg(past)


def infer(
    local: LocalModel, record: Record, tokens: Tokens, past: Past, key: Key[Array, ""]
) -> States:
    """States of the learning records, each from the sample before it."""
    classes, num_actions = local.posterior.classes, record.legal.shape[-1]
    e = local.encoder(record.observation)
    dynamics, window = local.dynamics, local.dynamics.transformer.window

    def step(carry: tuple[History, Array], row: tuple[Array, ...]) -> tuple[tuple, tuple]:
        history, z_before = carry
        seen, a_before, is_first, episode, noise = row
        first = jnp.broadcast_to(is_first[:, None], a_before.shape)
        token = dynamics.embed(z_before, jax.nn.one_hot(a_before, num_actions), first)
        h, history = dynamics.history(token[:, :, None], episode[:, None], history)
        h = h[:, :, 0]
        q = local.posterior.given(h, seen)
        index = sample_index(q, noise)
        z = straight_through(q, index)
        z_next = z.reshape(*z.shape[:-2], -1).astype(h.dtype)
        return (history.last(window - 1), z_next), (h, q, z, index)

    rows = (
        local.posterior.seen(e).swapaxes(0, 1),
        tokens.a_before.swapaxes(0, 1),
        tokens.is_first.T,
        tokens.episode.T,
        jax.random.split(key, record.reward.shape[1]),
    )
    z_before = one_hot_vec(past.z, classes).astype(e.dtype)
    _, outputs = jax.lax.scan(step, (past.local, z_before), rows)
    h, q, z, index = (output.swapaxes(0, 1) for output in outputs)
    return States(e=e, h=h, q=q, z=z, latent=index)


def reinfer(
    local: LocalModel, joint: JointModel, sequence: Sequence, context: int, key: Key[Array, ""]
) -> Roots:
    """A whole sequence inferred with the current parameters, ready for imagination."""
    record = sequence.record
    index = _reinfer_latents(local.encoder, local.dynamics, local.posterior, sequence, context, key)
    classes, num_actions = local.posterior.classes, record.legal.shape[-1]
    batch, length, agents = record.alive.shape
    dtype = local.dynamics.token.weight.dtype
    tokens = tokens_of(sequence, index)
    h, history = run_history(
        local.dynamics, tokens, local.dynamics.transformer.empty(batch, agents, dtype),
        classes=classes, num_actions=num_actions,
    )  # fmt: skip
    s = feature(h, jax.nn.one_hot(index, classes))
    _, joint_history = run_joint(
        joint, s, record, tokens.episode, joint.temporal.empty(batch, agents, dtype)
    )
    learning = length - context
    return Roots(
        s=s[:, context:],
        z=index[:, context:],
        local=history.last(local.dynamics.transformer.window - 1 + learning),
        joint=joint_history.last(joint.temporal.window - 1 + learning),
        episode=tokens.episode[:, context:],
    )


def run_joint(
    joint: JointModel,
    s: Float[Array, "B T N F"],
    record: Record,
    episode: Int[Array, "B T"],
    past: History,
    *,
    key: Key[Array, ""] | None = None,
) -> tuple[Float[Array, "B T N U"], History]:
    """u of recorded transitions."""
    a = jax.nn.one_hot(record.action, record.legal.shape[-1])
    return joint(s, a, record.present, record.alive, episode, past, key=key)


def one_hot_vec(index: Int[Array, "*b S"], classes: int) -> Float[Array, "*b Z"]:
    return jax.nn.one_hot(index, classes).reshape(*index.shape[:-1], -1)


def _reinfer_latents(
    encoder: Encoder,
    dynamics: Dynamics,
    posterior: Posterior,
    sequence: Sequence,
    context: int,
    key: Key[Array, ""],
) -> Int[Array, "B T N S"]:
    """Fresh latents, from the earliest record on that any learning record can remember."""
    record = sequence.record
    classes, num_actions = posterior.classes, record.legal.shape[-1]
    length, window = record.reward.shape[1], dynamics.transformer.window
    seen = posterior.seen(encoder(record.observation))
    stored = tokens_of(sequence, record.latent)

    def step(t: Int[Array, ""], carry: tuple[History, Array, Array]) -> tuple:
        history, z_before, latent = carry
        now: Tokens = jax.tree.map(lambda leaf: leaf[:, t][:, None], stored)
        now = now._replace(z_before=z_before[:, None])
        h, history = run_history(dynamics, now, history, classes=classes, num_actions=num_actions)
        index = sample_index(posterior.given(h[:, 0], seen[:, t]), jax.random.fold_in(key, t))
        return history.last(window - 1), index, latent.at[:, t].set(index)

    reset = jnp.where(record.is_first[:, : context + 1], jnp.arange(context + 1)[None], 0)
    begin = least(jnp.min(jnp.max(reset, axis=1)))
    batch, agents = record.alive.shape[0], record.alive.shape[2]
    nothing = dynamics.transformer.empty(batch, agents, dynamics.token.weight.dtype)
    z_before = jnp.take(stored.z_before, begin, axis=1)
    return jax.lax.fori_loop(begin, length, step, (nothing, z_before, record.latent))[2]


def _shift(before: Array, x: Array) -> Array:
    return jnp.concatenate([before[:, None], x[:, :-1]], axis=1)
