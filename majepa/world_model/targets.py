"""What a transition really led to, and how far a predicted outcome is from it, entry by entry."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..config import MajepaConfig
from ..nn.dists import TwoHot, balanced_cross_entropy, binary_cross_entropy
from ..replay import Record
from . import masks
from .joint import Outcome
from .unroll import States

sg = jax.lax.stop_gradient


class Target(NamedTuple):
    """The record a transition arrives at; team quantities are repeated for each agent."""

    e_bar: Float[Array, "*b N E"]
    e: Float[Array, "*b N E"]
    reward: Float[Array, "*b N"]
    terminal: Bool[Array, "*b N"]
    alive: Bool[Array, "*b N"]
    legal: Bool[Array, "*b N A"]


def targets(states: States, e_bar: Float[Array, "B T N E"], record: Record) -> Target:
    """Every record, as the end of a transition."""
    shape = record.alive.shape
    return Target(
        e_bar=e_bar,
        e=sg(states.e),
        reward=jnp.broadcast_to(record.reward[..., None], shape),
        terminal=jnp.broadcast_to(record.is_terminal[..., None], shape),
        alive=record.alive,
        legal=record.legal,
    )


def arrivals(states: States, e_bar: Float[Array, "B T N E"], record: Record) -> Target:
    """Ends of the transitions within a sequence: all records but the first."""
    return jax.tree.map(lambda leaf: leaf[:, 1:], targets(states, e_bar, record))


def outcome_losses(
    outcome: Outcome, target: Target, config: MajepaConfig
) -> dict[str, Float[Array, "*b N"]]:
    """Losses of a predicted outcome, unreduced."""
    cont = config.policy.discount * (1.0 - target.terminal)
    return {
        "emb": 1 - cosine(outcome.e_hat, target.e_bar),
        "interface": smooth_l1(outcome.e_hat, target.e),
        "reward": TwoHot(config.bins).loss(outcome.reward, target.reward),
        "cont": binary_cross_entropy(outcome.cont, cont),
        "alive": binary_cross_entropy(outcome.alive, target.alive.astype(jnp.float32)),
        "joint_legal": balanced_cross_entropy(outcome.legal, target.legal),
    }


def outcome_masks(record: Record) -> dict[str, Bool[Array, "B M N"]]:
    """Entries of each of these losses: team outcomes also teach the slots of the dead."""
    source, team = masks.sources(record), masks.team(record)
    return {
        "emb": source,
        "interface": source,
        "reward": team,
        "cont": team,
        "alive": source,
        "joint_legal": source,
    }


def cosine(x: Float[Array, "*b D"], y: Float[Array, "*#b D"]) -> Float[Array, "*b"]:
    """Cosine similarity, in float32."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    lengths = jnp.sqrt(jnp.sum(x**2, axis=-1) * jnp.sum(y**2, axis=-1) + 1e-16)
    return jnp.sum(x * y, axis=-1) / lengths


def smooth_l1(x: Float[Array, "*b D"], y: Float[Array, "*b D"]) -> Float[Array, "*b"]:
    """Mean over coordinates; quadratic up to an error of one, then linear."""
    error = jnp.abs(x.astype(jnp.float32) - y.astype(jnp.float32))
    return jnp.mean(jnp.where(error < 1, 0.5 * error**2, error - 0.5), axis=-1)
