"""What a learner call says about itself, by name; the loop averages and logs it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .imagine import Imagined
from .nn.means import masked_mean, weighted_mean
from .nn.optim import Report
from .policy.ppo import Frozen, PolicyReport, ReplayTargets
from .world_model.losses import ModelLoss
from .world_model.self_fed import SelfFed


class Epoch(NamedTuple):
    """Losses and steps of one epoch of actor and critic."""

    actor_loss: Float[Array, "*e"]
    policy: PolicyReport
    critic_imagined: Float[Array, "*e"]
    critic_replayed: Float[Array, "*e"]
    actor: Report
    critic: Report


class Totals(NamedTuple):
    """Sums over learner calls; behaviour does not run in all of them."""

    model: dict[str, Float[Array, ""]]
    behaviour: dict[str, Float[Array, ""]]
    active: Float[Array, ""]


def mean(totals: Totals, calls: Int[Array, ""]) -> dict[str, Float[Array, ""]]:
    """Means over the calls; NaN where one of them, or all, had nothing to measure."""
    model = {name: total / calls for name, total in totals.model.items()}
    behaviour = {name: total / totals.active for name, total in totals.behaviour.items()}
    return model | behaviour


def of_model(
    total: Float[Array, ""], loss: ModelLoss, local: Report, joint: Report
) -> dict[str, Float[Array, ""]]:
    return {
        "loss/model": total,
        **{f"loss/{name}": term for name, term in loss.terms.items()},
        **{f"valid/{name}": share for name, share in loss.entries.items()},
        **_of_step("local", local),
        **_of_step("joint", joint),
        "kl": loss.kl,
        **_of_embeddings(loss.e, loss.gaussian),
        **{f"self_fed/{name}": term for name, term in loss.self_fed.terms.items()},
        **_of_rollouts(loss.self_fed),
    }


def of_behaviour(
    imagined: Imagined, frozen: Frozen, replayed: ReplayTargets, epochs: Epoch
) -> dict[str, Float[Array, ""]]:
    replay_value = replayed.among(frozen.value)
    first, last = (jax.tree.map(lambda leaf, k=k: leaf[k], epochs) for k in (0, -1))
    decisions, states = frozen.actor_weight, frozen.value_weight
    return {
        "loss/actor": last.actor_loss,
        "loss/critic_imagined": first.critic_imagined,
        "loss/critic_replayed": first.critic_replayed,
        "policy/entropy": first.policy.entropy,
        "policy/clipped": last.policy.clipped,
        "policy/divergence": last.policy.divergence,
        **_of_steps("actor", epochs.actor),
        **_of_steps("critic", epochs.critic),
        "valid/decisions": jnp.mean(decisions > 0, dtype=jnp.float32),
        "imagined/reward": weighted_mean(imagined.reward, states),
        "imagined/cont": weighted_mean(imagined.cont, states),
        "imagined/return": weighted_mean(frozen.returns, states),
        "imagined/alive": weighted_mean(imagined.alive[1:].astype(jnp.float32), states),
        "imagined/legal_actions": weighted_mean(
            jnp.sum(imagined.legal, axis=-1, dtype=jnp.float32), decisions
        ),
        "value/imagined": weighted_mean(frozen.value, states),
        "value/imagined_error": weighted_mean(jnp.abs(frozen.returns - frozen.value), states),
        "value/replayed": masked_mean(replay_value, replayed.valid),
        "value/replayed_return": masked_mean(replayed.returns, replayed.valid),
        "value/replayed_error": masked_mean(
            jnp.abs(replayed.returns - replay_value), replayed.valid
        ),
    }


def _of_step(group: str, report: Report) -> dict[str, Float[Array, ""]]:
    return {
        f"gradient/{group}": report.gradient_norm,
        f"update_ratio/{group}": report.update_ratio,
        f"finite/{group}": report.finite.astype(jnp.float32),
    }


def _of_steps(group: str, reports: Report) -> dict[str, Float[Array, ""]]:
    """Of several steps: the mean norms, and the share that was taken."""
    return _of_step(group, jax.tree.map(lambda leaf: jnp.mean(leaf, dtype=jnp.float32), reports))


def _of_embeddings(
    e: Float[Array, "B T N E"], valid: Bool[Array, "B T N"]
) -> dict[str, Float[Array, ""]]:
    """Collapse shows as a small spread or a small rank; the long dead all look the same.

    The rank is the participation ratio of the covariance's eigenvalues, (Σλ)² / Σλ².
    """
    flat = jax.lax.stop_gradient(e.reshape(-1, e.shape[-1])).astype(jnp.float32)
    weight = valid.reshape(-1, 1) / jnp.maximum(jnp.sum(valid), 1)
    centred = flat - jnp.sum(weight * flat, axis=0, keepdims=True)
    covariance = centred.T @ (weight * centred)
    trace = jnp.trace(covariance)
    return {
        "embedding/spread": jnp.sqrt(trace / e.shape[-1]),
        "embedding/rank": trace**2 / jnp.maximum(jnp.sum(covariance**2), 1e-20),
    }


def _of_rollouts(fed: SelfFed) -> dict[str, Float[Array, ""]]:
    """Self-fed against real, after each number of steps."""
    curves = {
        "reward_error": fed.reward_error,
        "cont_error": fed.cont_error,
        "alive_error": fed.alive_error,
        "illegal": fed.illegal,
        "similarity": fed.embedding,
    }
    return {
        f"rollout/{name}_{step + 1}": curve[step]
        for name, curve in curves.items()
        for step in range(curve.shape[0])
    }
