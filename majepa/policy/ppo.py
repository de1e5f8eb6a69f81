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
from ..nn.means import masked_mean, standardise, weighted_mean
from ..replay import Record
from .actor import Actor
from .critic import Critic
from .returns import accumulate, clipped_surrogate, gae, log_ratio

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
    """Value targets on recorded states, from real rewards. Imagination starts at those very states:
    they are its first ones, less the last record of each sequence."""

    returns: Float[Array, "B T N"]
    valid: Bool[Array, "B T N"]

    @staticmethod
    def among(imagined: Shaped[Array, "H B R N *k"]) -> Shaped[Array, "B T N *k"]:
        """What belongs to recorded states of what was computed for imagined ones."""
        return imagined[0, :, :-1]


@jax.named_scope("advantages")
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


@jax.named_scope("advantages")
def replay_targets(
    record: Record, boot: Float[Array, "B T N"], config: MajepaConfig
) -> ReplayTargets:
    """λ-returns of real rewards that bootstrap from the imagined returns of their roots.

    Where no root is valid the imagined return is the target critic's value: an episode that a time
    limit cut off goes on in value from its final record.
    """
    policy = config.policy
    rows = (record.reward, record.is_terminal, record.is_last)
    reward, terminal, last = (x[:, 1:].T.astype(jnp.float32)[..., None] for x in rows)
    after = boot[:, 1:].swapaxes(0, 1)
    discount, trace = policy.discount * (1.0 - terminal), policy.replay_trace * (1.0 - last)
    at_once = reward + discount * (1 - trace) * after
    returns = accumulate(at_once, discount * trace, after[-1])
    return ReplayTargets(
        returns=returns.swapaxes(0, 1),
        valid=(record.present & ~record.is_last[..., None])[:, :-1],
    )


class PolicyReport(NamedTuple):
    entropy: Float[Array, ""]
    clipped: Float[Array, ""]
    """Share of decisions whose ratio left the clipping range."""
    divergence: Float[Array, ""]
    """KL between old and new policy, estimated on the decisions."""


@jax.named_scope("actor")
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


@jax.named_scope("critic")
def critic_loss(
    critic: Critic, frozen: Frozen, replayed: ReplayTargets, config: MajepaConfig
) -> tuple[Float[Array, ""], tuple[Float[Array, ""], Float[Array, ""]]]:
    """Two-hot losses on imagined returns and, with a coefficient, on replayed ones."""
    critic, bins = cast(critic, jnp.dtype(config.precision)), TwoHot(config.bins)
    logits = critic(frozen.s, frozen.present, frozen.alive)
    imagined = weighted_mean(bins.loss(logits, frozen.returns), frozen.value_weight)
    real = masked_mean(bins.loss(replayed.among(logits), replayed.returns), replayed.valid)
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
