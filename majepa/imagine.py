"""Joint imagination: what the agents would live through if they followed their policies.

From every learning record of the behaviour view, for `H` transitions: each agent acts from its own
state, its history advances, the joint model predicts everybody's next embedding, and the posterior
that serves real observations turns it into the next state (Eq. imagined-transition and
shared-posterior). Nothing here has a gradient.

Axes: `H` steps first, then `B` sequences, `R` roots in each, `N` agents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from .config import MajepaConfig
from .nn.dists import TwoHot, sample_index
from .nn.layers import make_room
from .nn.transformer import Branches, Trunk
from .replay import Record
from .world_model.joint import JointModel
from .world_model.local import LocalModel, feature
from .world_model.tokens import one_hot_vec
from .world_model.unroll import Roots


class Imagined(NamedTuple):
    """The frozen batch that actor and critic learn from; index k is a state, k to k+1 a step."""

    s: Float[Array, "H+1 B R N F"]
    legal: Bool[Array, "H B R N A"]
    """The masks that actions were drawn under; never drawn again."""
    action: Int[Array, "H B R N"]
    alive: Bool[Array, "H+1 B R N"]
    value_valid: Bool[Array, "H+1 B R N"]
    """b: the slot is there, the root was valid and the team has not died out."""
    reward: Float[Array, "H B R N"]
    """Entry k arrives with state k+1; so does `cont`, which holds the discount already."""
    cont: Float[Array, "H B R N"]
    present: Bool[Array, "B R N"]


class _Now(NamedTuple):
    """The imagined present of every root."""

    s: Float[Array, "B R N F"]
    z: Int[Array, "B R N S"]
    legal: Bool[Array, "B R N A"]
    alive: Bool[Array, "B R N"]
    value_valid: Bool[Array, "B R N"]


@jax.named_scope("imagination")
def imagine(
    local: LocalModel,
    joint: JointModel,
    actor: Callable[[Array, Array], Array],
    roots: Roots,
    record: Record,
    config: MajepaConfig,
    noop: int,
    key: Key[Array, ""],
) -> Imagined:
    """`H` transitions from every record of `roots`; `record` holds their masks and flags.

    `actor` gives the log-probabilities of actions from a state and a mask.
    """
    steps = config.imagination.horizon
    now = _begin(roots, record, noop)
    num_roots = record.reward.shape[1]
    local_trunk, local_room = local.dynamics.transformer.fork(roots.local, num_roots, steps)
    joint_trunk, joint_room = joint.temporal.fork(roots.joint, num_roots, steps)

    def step(carry: tuple, given: tuple[Array, Array]) -> tuple:
        (now, states, local_room, joint_room), (k, noise) = carry, given
        key_act, key_latent, key_legal = jax.random.split(noise, 3)
        action = sample_index(actor(now.s, now.legal), key_act)
        a = jax.nn.one_hot(action, now.legal.shape[-1])

        h, local_room = _advance(local, now.z, a, roots.episode, local_trunk, local_room, k)
        token = joint.mix(now.s, a, record.present, now.alive)
        last = joint.temporal.window - 2 + jnp.arange(num_roots)
        u, joint_room = joint.branch(token, joint_trunk, last, roots.episode, joint_room, k)
        outcome = joint.read(u)

        alive = now.alive & (outcome.alive >= 0)
        e_hat = _embedding_of_dead(local, outcome.e_hat, alive, record, config)
        z = local.posterior.draw(h, e_hat, jax.random.uniform(key_latent, now.z.shape))
        s = feature(h, jax.nn.one_hot(z, local.posterior.classes))
        legal = _draw_legal(local, s, alive, noop, key_legal)
        reward = _team_mean(TwoHot(config.bins).mean(outcome.reward), record.present)
        cont = _team_mean(jax.nn.sigmoid(outcome.cont), record.present)
        reward, cont = end_dead_teams(reward, cont, record.present, now.alive, alive)
        valid = now.value_valid & _anyone(record.present & alive)
        after = _Now(s, z, legal, alive, valid)
        states = jax.lax.dynamic_update_index_in_dim(states, s, k + 1, axis=0)
        seen = (now.legal, now.alive, now.value_valid)
        return (after, states, local_room, joint_room), (*seen, action, reward, cont)

    given = (jnp.arange(steps), jax.random.split(key, steps))
    # States are wide: they are put where they stay, so that none is copied next to the others.
    states = make_room((steps + 1, *now.s.shape), now.s)
    states = jax.lax.dynamic_update_index_in_dim(states, now.s, 0, axis=0)
    (end, states, _, _), (legal, alive, value_valid, action, reward, cont) = jax.lax.scan(
        step, (now, states, local_room, joint_room), given
    )

    def with_end(path: Array, last: Array) -> Array:
        return jnp.concatenate([path, last[None]])

    return Imagined(
        s=states,
        legal=legal,
        action=action,
        alive=with_end(alive, end.alive),
        value_valid=with_end(value_valid, end.value_valid),
        reward=reward,
        cont=cont,
        present=record.present,
    )


def end_dead_teams(
    reward: Float[Array, "*b N"],
    cont: Float[Array, "*b N"],
    present: Bool[Array, "*b N"],
    alive_before: Bool[Array, "*b N"],
    alive_after: Bool[Array, "*b N"],
) -> tuple[Float[Array, "*b N"], Float[Array, "*b N"]]:
    """The death of the last agent keeps its reward and ends the world; then nothing comes."""
    was_dead = ~_anyone(present & alive_before)
    is_dead = ~_anyone(present & alive_after)
    return jnp.where(was_dead, 0.0, reward), jnp.where(is_dead, 0.0, cont)


def _begin(roots: Roots, record: Record, noop: int) -> _Now:
    """Roots with their recorded masks; an episode's last record is none."""
    can_start = ~record.is_last[..., None] & _anyone(record.present & record.alive)
    return _Now(
        s=roots.s,
        z=roots.z,
        legal=_only_noop_unless(record.alive, record.legal, noop),
        alive=record.alive,
        value_valid=record.present & can_start,
    )


def _advance(
    local: LocalModel,
    z: Int[Array, "B R N S"],
    a: Float[Array, "B R N A"],
    episode: Int[Array, "B R"],
    trunk: Trunk,
    room: Branches,
    k: Int[Array, ""],
) -> tuple[Float[Array, "B R N H"], Branches]:
    """The next history state of every root, from its latent and its action."""
    dynamics = local.dynamics
    token = dynamics.embed(
        one_hot_vec(z, local.posterior.classes), a, jnp.zeros(z.shape[:-1], bool)
    )
    last = dynamics.transformer.window - 1 + jnp.arange(z.shape[1])
    h, room = dynamics.branch(token.swapaxes(1, 2), trunk, last, episode, room, k)
    return h.swapaxes(1, 2), room


def _embedding_of_dead(
    local: LocalModel,
    e_hat: Float[Array, "B R N E"],
    alive: Bool[Array, "B R N"],
    record: Record,
    config: MajepaConfig,
) -> Float[Array, "B R N E"]:
    if config.imagination.dead_embedding == "predicted":
        return e_hat
    # The dead observe zeros, in SMAC as here.
    dead = local.encoder(jnp.zeros((1, 1, 1, record.observation.shape[-1])))
    return jnp.where(alive[..., None], e_hat, dead.astype(e_hat.dtype))


def _draw_legal(
    local: LocalModel,
    s: Float[Array, "B R N F"],
    alive: Bool[Array, "B R N"],
    noop: int,
    key: Key[Array, ""],
) -> Bool[Array, "B R N A"]:
    """Each action is legal with its predicted probability; no-op if none is, or for the dead."""
    probability = jax.nn.sigmoid(local.legal(s).astype(jnp.float32))
    drawn = jax.random.bernoulli(key, probability)
    return _only_noop_unless(alive & drawn.any(-1), drawn, noop)


def _only_noop_unless(
    free: Bool[Array, "*b"], legal: Bool[Array, "*b A"], noop: int
) -> Bool[Array, "*b A"]:
    only = jnp.arange(legal.shape[-1]) == noop
    return jnp.where(free[..., None], legal, jnp.expand_dims(only, tuple(range(free.ndim))))


def _team_mean(x: Float[Array, "*b N"], present: Bool[Array, "*b N"]) -> Float[Array, "*b N"]:
    """The mean over present slots, for each of them."""
    total = jnp.sum(jnp.where(present, x, 0.0), axis=-1, keepdims=True)
    count = jnp.maximum(jnp.sum(present, axis=-1, keepdims=True), 1)
    return jnp.where(present, total / count, 0.0)


def _anyone(x: Bool[Array, "*b N"]) -> Bool[Array, "*b 1"]:
    return x.any(axis=-1, keepdims=True)
