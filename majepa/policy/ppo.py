"""PPO on an imagined batch: what is computed once and frozen, and the two losses of each epoch."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from ..config import MajepaConfig
from ..imagine import Imagined
from ..nn.dists import TwoHot, entropy, log_prob_of
from ..nn.layers import cast
from ..nn.means import standardise, weighted_mean
from ..replay import Record
from .actor import Actor
from .critic import Critic
from .returns import clipped_surrogate, gae, log_ratio

sg = jax.lax.stop_gradient


class Frozen(NamedTuple):
    """An imagined batch with its advantages and returns; the same in all epochs."""

    s: Float[Array, "H B R N F"]
    legal: Bool[Array, "H B R N A"]
    action: Int[Array, "H B R N"]
    alive: Bool[Array, "H B R N"]
    present: Bool[Array, "H B R N"]
    advantage: Float[Array, "H B R N"]
    """Standardised over the actor's decisions."""
    returns: Float[Array, "H B R N"]
    value: Float[Array, "H B R N"]
    """Of the target critic."""
    actor_weight: Float[Array, "H B R N"]
    value_weight: Float[Array, "H B R N"]


class ReplayTargets(NamedTuple):
    """Value targets on recorded states, from real rewards."""

    s: Float[Array, "B T N F"]
    present: Bool[Array, "B T N"]
    alive: Bool[Array, "B T N"]
    returns: Float[Array, "B T N"]
    valid: Bool[Array, "B T N"]


class Judged(NamedTuple):
    """Imagined states, then replayed ones: the critic learns from all of them at once."""

    s: Float[Array, "M N F"]
    present: Bool[Array, "M N"]
    alive: Bool[Array, "M N"]
    returns: Float[Array, "M N"]
    imagined: Float[Array, "M N"]
    """Weights in the mean over imagined states, zero for the others."""
    replayed: Float[Array, "M N"]
    """And the other way round."""


def freeze(imagined: Imagined, target: Critic, config: MajepaConfig) -> Frozen:
    """Advantages, returns and weights of an imagined batch (Eq. of appendix PPO)."""
    policy = config.policy
    present = jnp.broadcast_to(imagined.present[None], imagined.alive.shape)
    value = values(target, imagined.s, present, imagined.alive, config)
    b = imagined.value_valid.astype(jnp.float32)
    # The continuation holds the discount already.
    cont = imagined.cont * b[1:]
    advantage = b[:-1] * gae(imagined.reward, cont, value, policy.trace)
    weight = b[:-1] * jnp.cumprod(jnp.concatenate([jnp.ones_like(cont[:1]), cont[:-1]]), axis=0)
    actor_weight = weight * imagined.alive[:-1]
    return Frozen(
        s=imagined.s[:-1],
        legal=imagined.legal,
        action=imagined.action,
        alive=imagined.alive[:-1],
        present=present[:-1],
        advantage=standardise(advantage, actor_weight),
        returns=advantage + value[:-1],
        value=value[:-1],
        actor_weight=actor_weight,
        value_weight=weight,
    )


def replay_targets(
    s: Float[Array, "B T N F"],
    record: Record,
    boot: Float[Array, "B T N"],
    config: MajepaConfig,
) -> ReplayTargets:
    """λ-returns of real rewards that bootstrap from the imagined returns of their roots.

    Where no root is valid the imagined return is the target critic's value: an episode that a time
    limit cut off goes on in value from its final record.
    """
    policy = config.policy

    def back(after: Array, row: tuple[Array, ...]) -> tuple[Array, Array]:
        reward, terminal, last, boot = row
        trace = policy.replay_trace * (1.0 - last[:, None])
        bootstrap = (1 - trace) * boot + trace * after
        returns = reward[:, None] + policy.discount * (1.0 - terminal[:, None]) * bootstrap
        return returns, returns

    rows = (record.reward, record.is_terminal, record.is_last, boot)
    rows = jax.tree.map(lambda leaf: leaf[:, 1:].swapaxes(0, 1).astype(jnp.float32), rows)
    _, returns = jax.lax.scan(back, boot[:, -1], rows, reverse=True)
    return ReplayTargets(
        s=s[:, :-1],
        present=record.present[:, :-1],
        alive=record.alive[:, :-1],
        returns=returns.swapaxes(0, 1),
        valid=(record.present & ~record.is_last[..., None])[:, :-1],
    )


class PolicyReport(NamedTuple):
    entropy: Float[Array, ""]
    clipped: Float[Array, ""]
    """Share of decisions whose ratio left the clipping range."""
    divergence: Float[Array, ""]
    """KL between old and new policy, estimated on the decisions."""


def actor_loss(
    actor: Actor,
    frozen: Frozen,
    old_log_prob: Float[Array, "H B R N"],
    is_first_epoch: Bool[Array, ""],
    config: MajepaConfig,
) -> tuple[Float[Array, ""], tuple[Float[Array, "H B R N"], PolicyReport]]:
    """In the first epoch the policy is the old one: the ratio is exactly one.

    Also returns the old log-probabilities, for the epochs that follow.
    """
    policy = config.policy
    log_probs = cast(actor, jnp.dtype(config.precision))(frozen.s, frozen.legal)
    log_prob = log_prob_of(log_probs, frozen.action)
    old = jnp.where(is_first_epoch, sg(log_prob), old_log_prob)
    spread = entropy(log_probs)
    gain = clipped_surrogate(log_prob, old, frozen.advantage, policy.clip)
    loss = -weighted_mean(gain + policy.entropy * spread, frozen.actor_weight)
    drift = log_ratio(log_prob, old)
    ratio = jnp.exp(drift)
    outside = (jnp.abs(ratio - 1) > policy.clip).astype(jnp.float32)
    report = PolicyReport(
        entropy=weighted_mean(spread, frozen.actor_weight),
        clipped=weighted_mean(outside, frozen.actor_weight),
        divergence=weighted_mean(ratio - 1 - drift, frozen.actor_weight),
    )
    return loss, (old, report)


def judged(frozen: Frozen, replay: ReplayTargets) -> Judged:
    """Both batches as one."""

    def teams(x: Shaped[Array, "H B R *n"], y: Shaped[Array, "B T *n"]) -> Shaped[Array, "M *n"]:
        return jnp.concatenate([x.reshape(-1, *x.shape[3:]), y.reshape(-1, *y.shape[2:])])

    weight, valid = frozen.value_weight, replay.valid.astype(frozen.value_weight.dtype)
    return Judged(
        s=teams(frozen.s, replay.s),
        present=teams(frozen.present, replay.present),
        alive=teams(frozen.alive, replay.alive),
        returns=teams(frozen.returns, replay.returns),
        imagined=teams(weight, jnp.zeros_like(valid)),
        replayed=teams(jnp.zeros_like(weight), valid),
    )


def critic_loss(
    critic: Critic, states: Judged, config: MajepaConfig
) -> tuple[Float[Array, ""], tuple[Float[Array, ""], Float[Array, ""]]]:
    """Two-hot losses on imagined returns and, with a coefficient, on replayed ones."""
    critic = cast(critic, jnp.dtype(config.precision))
    logits = critic(states.s, states.present, states.alive)
    loss = TwoHot(config.bins).loss(logits, states.returns)
    imagined, real = (weighted_mean(loss, each) for each in (states.imagined, states.replayed))
    return imagined + config.policy.replay_value * real, (imagined, real)


def values(
    critic: Critic,
    s: Float[Array, "*b N F"],
    present: Bool[Array, "*b N"],
    alive: Bool[Array, "*b N"],
    config: MajepaConfig,
) -> Float[Array, "*b N"]:
    logits = cast(critic, jnp.dtype(config.precision))(s, present, alive)
    return TwoHot(config.bins).mean(logits)
