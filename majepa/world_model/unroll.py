"""Local states along replayed sequences, and the histories that rollouts start from.

The world-model view rebuilds its context from stored latents, and infers the learning records each
from the sample before it, with gradients through the samples. The behaviour view is inferred anew
as a whole, without gradients. Nothing before an episode's start is ever seen.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, Shaped

from ..nn.dists import straight_through
from ..nn.transformer import History, TemporalTransformer
from ..packing import least
from ..replay import Record, Sequence
from .condense import Basis, basis_of, condense_joint, condense_local
from .joint import JointModel
from .local import LocalModel, feature
from .recurrence import follow_latents, sample_latents
from .strands import Tracks
from .tokens import Tokens, enter, tokens_of

sg = jax.lax.stop_gradient

SHORTEST_CHUNK = 64
"""The least number of records that attention takes at once, though many more are known: each looks
at few of them. A length that no such number divides is taken as a whole."""


class States(NamedTuple):
    """Inferred local states of `T` records."""

    e: Float[Array, "B T N E"]
    h: Float[Array, "B T N H"]
    """Or c, of a local model whose states are condensed."""
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


@jax.named_scope("context")
def rebuild_context(
    local: LocalModel,
    joint: JointModel,
    sequence: Sequence,
    tokens: Tokens,
    context: int,
    begin: int = 0,
) -> Past:
    """The past of the learning records, from known latents and the current parameters.

    Records before `begin`, one of `beginnings`, are left out: no learning record remembers them.
    """
    basis = Basis(local.dynamics)
    local, joint = sg((condense_local(local, basis), condense_joint(joint, basis)))
    before, tokens = jax.tree.map(lambda leaf: leaf[:, begin:context], (sequence.record, tokens))
    return remember(local, joint, before, tokens, 0)[1]


def remember(
    local: LocalModel, joint: JointModel, record: Record, tokens: Tokens, learning: int
) -> tuple[Float[Array, "B T N F"], Past]:
    """States of all records, from known latents, and what remains of them.

    That is the histories of the last `learning` ones, with as many before them as a window of each
    model looks back on. The first record follows nothing.
    """
    dynamics, temporal, classes = local.dynamics, joint.temporal, local.posterior.classes
    batch, length, agents = record.alive.shape
    shortest = _shortest_chunk(dynamics.transformer.window, temporal.window)
    size = min((n for n in range(shortest, length) if length % n == 0), default=length)

    def chunks(leaf: Shaped[Array, "B T *s"]) -> Shaped[Array, "B C L *s"]:
        return leaf.reshape(batch, -1, size, *leaf.shape[2:])

    def remembered(transformer: TemporalTransformer, token: Array, *, outputs: bool) -> tuple:
        last = transformer.window - 1 + learning
        token, episode = chunks(token).swapaxes(2, 3), chunks(tokens.episode)
        return transformer.recall(token, episode, last, outputs=outputs)

    token = enter(dynamics, tokens, classes=classes, num_actions=record.legal.shape[-1])
    y, history = remembered(dynamics.transformer, dynamics.token_norm(token), outputs=True)
    h = dynamics.state_of(y).swapaxes(2, 3).reshape(batch, length, agents, -1)
    s = feature(h, jax.nn.one_hot(record.latent, classes))
    a = jax.nn.one_hot(record.action, record.legal.shape[-1])
    token = joint.mix(s, a, record.present, record.alive)
    return s, Past(history, remembered(temporal, token, outputs=False)[1])


def _shortest_chunk(*windows: int) -> int:
    """That holds what a record of the next chunk looks back on."""
    return max(SHORTEST_CHUNK, *(window - 1 for window in windows))


def beginnings(context: int, *windows: int) -> list[int]:
    """Where the needed part of a context may begin, in whole chunks; last first. None is so early
    that hardly anything would be left out."""
    size = _shortest_chunk(*windows)
    return [*(begin for begin in range(context - size, 0, -size) if 2 * begin >= size), 0]


def first_needed(record: Record, context: int) -> Int[Array, ""]:
    """The earliest record that a learning record of any sequence, of any run, can remember."""
    place = jnp.arange(context + 1)[None]
    begin = jnp.max(jnp.where(record.is_first[:, : context + 1], place, 0), axis=1)
    return least(jnp.min(begin))


@jax.named_scope("states")
def infer(
    local: LocalModel, record: Record, tokens: Tokens, past: Past, key: Key[Array, ""]
) -> States:
    """States of the learning records, each from the sample before it."""
    e = local.encoder(record.observation)
    seen = local.posterior.seen(e)
    thin = sg(condense_local(local, basis_of(local.dynamics)))
    latent = sample_latents(thin.dynamics, thin.posterior, sg(seen), tokens, past.local, key)
    h, q, history = follow_latents(
        local.dynamics, local.posterior, seen, tokens.inferred(latent), past.local
    )
    return States(e, h, q, straight_through(q, latent), latent, history)


def reinfer(
    local: LocalModel, joint: JointModel, sequence: Sequence, context: int, key: Key[Array, ""]
) -> Roots:
    """A whole sequence inferred with the current parameters, ready for imagination."""
    begin = first_needed(sequence.record, context)
    return roots_of(local, joint, sequence, context, draw_latents(local, sequence, key, begin))


def draw_latents(
    local: LocalModel, sequence: Sequence, key: Key[Array, ""], begin: Int[Array, ""] | int
) -> Int[Array, "B T N S"]:
    """Latents of a whole sequence, inferred anew from record `begin` on; none before its chunk."""
    record, dynamics, posterior = sequence.record, local.dynamics, local.posterior
    batch, _, agents = record.alive.shape
    nothing = dynamics.transformer.empty(batch, agents, dynamics.token.weight.dtype)
    seen, stored = local.encoder(record.observation), tokens_of(sequence, record.latent)
    return sample_latents(dynamics, posterior, posterior.seen(seen), stored, nothing, key, begin)


@jax.named_scope("latents")
def draw_on_tracks(
    local: LocalModel, sequence: Sequence, key: Key[Array, ""], tracks: Tracks
) -> Int[Array, "B T N S"]:
    """What `draw_latents` draws for the records on the tracks; zero for all others."""
    record, dynamics, posterior = sequence.record, local.dynamics, local.posterior
    batch, length, agents = record.alive.shape
    nothing = dynamics.transformer.empty(tracks.shape.tracks, agents, dynamics.token.weight.dtype)
    seen = posterior.seen(local.encoder(tracks.take(record.observation)))
    stored = tracks.take_tokens(tokens_of(sequence, record.latent))
    latent = sample_latents(dynamics, posterior, seen, stored, nothing, key, tracks=tracks)
    return tracks.put_back(latent, batch, length)


@jax.named_scope("roots")
def roots_of(
    local: LocalModel,
    joint: JointModel,
    sequence: Sequence,
    context: int,
    latent: Int[Array, "B T N S"],
    begin: int = 0,
) -> Roots:
    """The learning records of a sequence, with latents that were inferred anew.

    Records before `begin`, one of `beginnings`, are left out: no learning record remembers them.
    """
    record, tokens = sequence.record._replace(latent=latent), tokens_of(sequence, latent)
    learning = record.reward.shape[1] - context
    record, tokens = jax.tree.map(lambda leaf: leaf[:, begin:], (record, tokens))
    s, past = remember(local, joint, record, tokens, learning)
    s, latent, episode = (leaf[:, -learning:] for leaf in (s, record.latent, tokens.episode))
    return Roots(s, latent, past.local, past.joint, episode)


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
