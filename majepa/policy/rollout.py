"""What the methods that learn from their latest rollout alone have in common.

Row `t` holds what arrived with it, so the reward of `action[t]` stands in row `t + 1`. A row that
ends an episode is no decision: its action leads nowhere. All losses are PPO's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from ..algorithm import Experience, Metrics
from ..nn.dists import entropy, log_prob_of
from ..nn.means import masked_mean, standardise
from ..nn.optim import is_finite
from .returns import ValueNorm, clipped_surrogate, gae, log_ratio

State = TypeVar("State")
Batch = TypeVar("Batch")


class Outcomes(NamedTuple):
    """What came of the decisions of a rollout, in the units of the reward."""

    returns: Float[Array, "T B N"]
    advantage: Float[Array, "T B N"]
    counts: Bool[Array, "T B N"]
    """The team decides here: what a critic learns from, for dead agents too."""


def outcomes(
    data: Experience,
    value: Float[Array, "T B N"],
    final_value: Float[Array, "B N"],
    *,
    discount: float,
    trace: float,
) -> Outcomes:
    """Returns and advantages, given the values of all rows and of the final one."""
    step, final, agents = data.rows.step, data.final, value.shape[-1]
    decides = ~(step.is_last | after(step.is_first, final.is_first))
    reward = after(step.reward, final.reward)
    cont = jnp.where(after(step.is_terminal, final.is_terminal), 0.0, discount)
    decides, reward, cont = (to_agents(x, agents) for x in (decides, reward, cont))
    # A last row is worth what the critic says: its advantage is zero, whatever comes next.
    reward, cont = jnp.where(decides, reward, value), jnp.where(decides, cont, 0.0)
    advantage = gae(reward, cont, jnp.concatenate([value, final_value[None]]), trace)
    return Outcomes(advantage + value, advantage, decides)


def standardised_advantage(found: Outcomes, acts: Bool[Array, "T B N"]) -> Float[Array, "T B N"]:
    """Once per rollout and over the living: minibatches do not change it."""
    return standardise(found.advantage, acts.astype(jnp.float32), floor=1e-10)


def rollout_metrics(data: Experience, found: Outcomes, acts: Bool[Array, "T B N"]) -> Metrics:
    returns, advantage, counts = found
    reward = after(data.rows.step.reward, data.final.reward)
    return {
        "critic/explained_variance": 1 - variance(advantage, counts) / variance(returns, counts),
        "rollout/reward": masked_mean(reward, counts[..., 0]),
        "rollout/valid": jnp.mean(acts.astype(jnp.float32)),
    }


class Decided(NamedTuple):
    """Decisions of a rollout, as the losses need them."""

    action: Int[Array, "*b"]
    acts: Bool[Array, "*b"]
    """A living agent decides here: what the actor learns from."""
    log_prob: Float[Array, "*b"]
    """Of the action, under the policy that took it."""
    advantage: Float[Array, "*b"]


def actor_loss(
    log_probs: Float[Array, "*b A"], decided: Decided, *, clip: float, entropy_scale: float
) -> tuple[Float[Array, ""], Metrics]:
    """The clipped objective with its entropy bonus, over the living."""
    action, acts, old_log_prob, advantage = decided
    log_prob = log_prob_of(log_probs, action)
    gain = clipped_surrogate(log_prob, old_log_prob, advantage, clip)
    spread = masked_mean(entropy(log_probs), acts)
    loss = -masked_mean(gain, acts) - entropy_scale * spread
    drift = log_ratio(log_prob, old_log_prob)
    ratio = jnp.exp(drift)
    is_clipped = (jnp.abs(ratio - 1) > clip).astype(jnp.float32)
    return loss, {
        "loss/actor": loss,
        "actor/entropy": spread,
        "actor/clipped": masked_mean(is_clipped, acts),
        "actor/kl": masked_mean(ratio - 1 - drift, acts),
    }


def value_loss(
    value: Float[Array, "*b"],
    old_value: Float[Array, "*b"],
    target: Float[Array, "*b"],
    *,
    clip: float,
    huber: float,
) -> Float[Array, "*b"]:
    """Huber loss of each entry, or that of the clipped value where it is larger."""
    near = old_value + jnp.clip(value - old_value, -clip, clip)
    free, bound = (optax.huber_loss(guess, target, delta=huber) for guess in (value, near))
    return jnp.maximum(free, bound)


def moved_statistics(
    norm: ValueNorm, returns: Float[Array, "*b"], counts: Bool[Array, "*b"], decay: float
) -> ValueNorm:
    """The statistics of returns with a batch in them, unless it is not finite."""
    moved = norm.updated(returns, counts, decay)
    good = is_finite(moved)
    return jax.tree.map(lambda new, old: jnp.where(good, new, old), moved, norm)


def learn_in_epochs(
    learn: Callable[[State, Batch], tuple[State, Metrics]],
    state: State,
    batch: Batch,
    key: Key[Array, ""],
    *,
    epochs: int,
    minibatches: int,
    axis: int,
) -> tuple[State, Metrics]:
    """Steps on minibatches along an axis, in a new order each epoch; metrics are means over them.

    What does not fill a minibatch waits for another epoch's order.
    """
    count = jax.tree.leaves(batch)[0].shape[axis]

    def epoch(state: State, key: Key[Array, ""]) -> tuple[State, Metrics]:
        if minibatches == 1:
            return learn(state, batch)
        order = jax.random.permutation(key, count)[: count // minibatches * minibatches]
        state, metrics = jax.lax.scan(learn_part, state, order.reshape(minibatches, -1))
        return state, jax.tree.map(jnp.mean, metrics)

    def learn_part(state: State, part: Int[Array, " P"]) -> tuple[State, Metrics]:
        picked = (*[slice(None)] * axis, part)
        return learn(state, jax.tree.map(lambda x: x[picked], batch))

    state, metrics = jax.lax.scan(epoch, state, jax.random.split(key, epochs))
    return state, jax.tree.map(jnp.mean, metrics)


def clipped_adam(rate: float, *, eps: float, max_gradient: float) -> optax.GradientTransformation:
    """Adam on gradients of bounded global norm."""
    clip = optax.clip_by_global_norm(max_gradient)
    # As one vector: the same numbers, and far fewer programs to compile and to start.
    return optax.flatten(optax.chain(clip, optax.adam(rate, eps=eps)))


def after(rows: Shaped[Array, "T *b"], final: Shaped[Array, "*b"]) -> Shaped[Array, "T *b"]:
    """What arrives with the row after each row."""
    return jnp.concatenate([rows[1:], final[None]])


def to_agents(x: Shaped[Array, "*b"], num_agents: int) -> Shaped[Array, "*b N"]:
    """What holds for the team, for each of its agents."""
    return jnp.broadcast_to(x[..., None], (*x.shape, num_agents))


def variance(x: Float[Array, "*b"], valid: Bool[Array, "*b"]) -> Float[Array, ""]:
    return masked_mean((x - masked_mean(x, valid)) ** 2, valid)
