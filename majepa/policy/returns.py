"""Advantages, PPO's clipped objective and the units of values, for real and imagined rollouts."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..nn.means import masked_mean

LARGEST_LOG_RATIO = 20.0
"""Beyond it a ratio of probabilities is as good as infinite, and its gradient would be."""


def gae(
    reward: Float[Array, "T *b"],
    cont: Float[Array, "T *b"],
    value: Float[Array, "T+1 *b"],
    trace: float,
) -> Float[Array, "T *b"]:
    """Generalised advantages, time first.

    `reward[k]` and `cont[k]` arrive with row `k + 1`. `cont` already holds the discount, and is
    zero where nothing follows.
    """
    deltas = reward + cont * value[1:] - value[:-1]
    return accumulate(deltas, trace * cont, jnp.zeros_like(deltas[0]))


def accumulate(
    x: Float[Array, "T *b"], weight: Float[Array, "T *#b"], final: Float[Array, "*b"]
) -> Float[Array, "T *b"]:
    """`y[k] = x[k] + weight[k] * y[k + 1]`, time first; `final` follows the last."""

    def back(after: tuple[Array, Array], before: tuple[Array, Array]) -> tuple[Array, Array]:
        return before[0] + before[1] * after[0], before[1] * after[1]

    x = x.at[-1].add(weight[-1] * final)
    return jax.lax.associative_scan(back, (x, weight), reverse=True)[0]


def log_ratio(log_prob: Float[Array, "*b"], old_log_prob: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Of the new policy's probabilities to the old one's, kept where its exponential is finite."""
    return jnp.clip(log_prob - old_log_prob, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def clipped_surrogate(
    log_prob: Float[Array, "*b"],
    old_log_prob: Float[Array, "*b"],
    advantage: Float[Array, "*b"],
    clip: float,
) -> Float[Array, "*b"]:
    """PPO's objective per entry, to be maximised in `log_prob`."""
    ratio = jnp.exp(log_ratio(log_prob, old_log_prob))
    clipped = jnp.clip(ratio, 1 - clip, 1 + clip)
    return jnp.minimum(ratio * advantage, clipped * advantage)


class ValueNorm(NamedTuple):
    """Debiased running mean and variance of returns; a critic may predict in their units."""

    first: Float[Array, ""]
    """Average of returns, biased towards its start at zero."""
    second: Float[Array, ""]
    """Average of their squares, likewise."""
    weight: Float[Array, ""]
    """Share of both averages that is data."""

    @staticmethod
    def fresh() -> ValueNorm:
        return ValueNorm(jnp.zeros(()), jnp.zeros(()), jnp.zeros(()))

    def updated(
        self, returns: Float[Array, "*b"], counts: Bool[Array, "*b"], decay: float
    ) -> ValueNorm:
        new = ValueNorm(masked_mean(returns, counts), masked_mean(returns**2, counts), jnp.ones(()))
        return jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, self, new)

    def normalise(self, x: Float[Array, "*b"]) -> Float[Array, "*b"]:
        mean, deviation = self._statistics()
        return (x - mean) / deviation

    def denormalise(self, x: Float[Array, "*b"]) -> Float[Array, "*b"]:
        mean, deviation = self._statistics()
        return x * deviation + mean

    def _statistics(self) -> tuple[Float[Array, ""], Float[Array, ""]]:
        weight = jnp.maximum(self.weight, 1e-5)
        mean = self.first / weight
        return mean, jnp.sqrt(jnp.maximum(self.second / weight - mean**2, 1e-2))
