"""Local states along replayed sequences, and the histories that rollouts start from.

The world-model view rebuilds its context from stored latents, and infers the learning records each
from the sample before it, with gradients through the samples. The behaviour view is inferred anew
as a whole, without gradients. Nothing before an episode's start is ever seen.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from ..nn.dists import straight_through
from ..nn.transformer import History
from ..packing import least
from ..replay import Record, Sequence
from .condense import Basis, condense_local
from .joint import JointModel
from .local import Dynamics, LocalModel, feature
from .recurrence import chunk_size, follow_latents, sample_latents
from .tokens import Tokens, enter, tokens_of

sg = jax.lax.stop_gradient

CONTEXT_CHUNK = 64
"""Records of a context that are rebuilt at once: a few too many cost less than more steps."""


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
    history: History
    """Of the local model, up to the last record; constant."""

    @property
    def s(self) -> Float[Array, "B T N F"]:
        return feature(self.h, self.z)


class Past(NamedTuple):
    """The end of a context: what the learning records continue, all of it constant."""

    local: History
    joint: History


class Roots(NamedTuple):
    """Learning records that imagination starts from, all of it constant."""

    s: Float[Array, "B T N F"]
    z: Int[Array, "B T N S"]
    local: History
    """The last `window - 1` context records, then the learning records."""
    joint: History
    episode: Int[Array, "B T"]


def run_history(
    dynamics: Dynamics, tokens: Tokens, past: History, *, classes: int, num_actions: int
) -> tuple[Float[Array, "B T N H"], History]:
    """All states h at once, for known latents."""
    token = enter(dynamics, tokens, classes=classes, num_actions=num_actions)
    token = dynamics.token_norm(token).swapaxes(1, 2)
    h, history = dynamics.history(token, tokens.episode, past)
    return h.swapaxes(1, 2), history


def rebuild_context(
    local: LocalModel, joint: JointModel, sequence: Sequence, tokens: Tokens, context: int
) -> Past:
    """The past of the learning records, from known latents and the current parameters.

    Only records that some learning record can remember are looked at, in chunks.
    """
    local, joint = sg((local, joint))
    record, num_actions = sequence.record, sequence.record.legal.shape[-1]
    batch, _, agents = record.alive.shape
    dtype, classes = local.dynamics.token.weight.dtype, local.posterior.classes
    size = chunk_size(context, CONTEXT_CHUNK)

    def chunk(number: Int[Array, ""], carry: tuple[History, History]) -> tuple[History, History]:
        history, joint_history = carry

        def part(leaf: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(leaf, number * size, size, axis=1)

        rows, given = jax.tree.map(part, (record, tokens))
        h, history = run_history(
            local.dynamics, given, history, classes=classes, num_actions=num_actions
        )
        s = feature(h, jax.nn.one_hot(rows.latent, classes))
        _, joint_history = run_joint(joint, s, rows, given.episode, joint_history)
        return (
            history.last(local.dynamics.transformer.window - 1),
            joint_history.last(joint.temporal.window - 1),
        )

    nothing = (
        local.dynamics.transformer.empty(batch, agents, dtype),
        joint.temporal.empty(batch, agents, dtype),
    )
    begin = first_needed(record, context) // size
    return Past(*jax.lax.fori_loop(begin, context // size, chunk, nothing))


def first_needed(record: Record, context: int) -> Int[Array, ""]:
    """The earliest record that a learning record of any sequence, of any run, can remember."""
    place = jnp.arange(context + 1)[None]
    begin = jnp.max(jnp.where(record.is_first[:, : context + 1], place, 0), axis=1)
    return least(jnp.min(begin))


def infer(
    local: LocalModel, record: Record, tokens: Tokens, past: Past, key: Key[Array, ""]
) -> States:
    """States of the learning records, each from the sample before it."""
    e = local.encoder(record.observation)
    seen = local.posterior.seen(e)
    basis = Basis(local.dynamics)
    thin = sg(condense_local(local, basis))
    latent = sample_latents(thin.dynamics, thin.posterior, sg(seen), tokens, past.local, key)
    h, q, history = follow_latents(
        local.dynamics, local.posterior, seen, tokens.inferred(latent), past.local
    )
    return States(e, h, q, straight_through(q, latent), latent, history)


def reinfer(
    local: LocalModel, joint: JointModel, sequence: Sequence, context: int, key: Key[Array, ""]
) -> Roots:
    """A whole sequence inferred with the current parameters, ready for imagination."""
    record = sequence.record
    stored = tokens_of(sequence, record.latent)
    batch, _, agents = record.alive.shape
    dynamics, posterior = local.dynamics, local.posterior
    nothing = dynamics.transformer.empty(batch, agents, dynamics.token.weight.dtype)
    latent = sample_latents(
        dynamics, posterior, posterior.seen(local.encoder(record.observation)),
        stored, nothing, key, first_needed(record, context),
    )  # fmt: skip
    sequence = sequence._replace(record=record._replace(latent=latent))
    tokens = tokens_of(sequence, latent)
    past = rebuild_context(local, joint, sequence, tokens, context)
    record, tokens = jax.tree.map(lambda leaf: leaf[:, context:], (sequence.record, tokens))
    h, history = run_history(
        dynamics, tokens, past.local,
        classes=posterior.classes, num_actions=record.legal.shape[-1],
    )  # fmt: skip
    s = feature(h, jax.nn.one_hot(record.latent, posterior.classes))
    _, joint_history = run_joint(joint, s, record, tokens.episode, past.joint)
    return Roots(s, record.latent, history, joint_history, tokens.episode)


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
