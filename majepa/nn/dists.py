"""Distributions as functions of logits: categorical latents, legal actions, two-hot scalars, bits.

Log-probabilities and losses are float32 whatever the precision of the logits. Losses are not
reduced beyond the axes of one variable.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Key

from ..config import BinsConfig

ILLEGAL_LOGIT = -1e9
"""Finite, so that the entropy and its gradient stay finite too."""


def symlog(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    return jnp.sign(x) * jnp.log1p(jnp.abs(x))


def symexp(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    return jnp.sign(x) * jnp.expm1(jnp.abs(x))


def unimix(logits: Float[Array, "*b S K"], share: float) -> Float32[Array, "*b S K"]:
    """Log-probabilities of the softmax mixed with a share of the uniform distribution."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return jnp.logaddexp(log_probs + jnp.log1p(-share), jnp.log(share / logits.shape[-1]))


def sample_index(log_probs: Float[Array, "*b K"], key: Key[Array, ""]) -> Int[Array, "*b"]:
    """Classes of log-probability minus infinity are never drawn."""
    score = log_probs + jax.random.gumbel(key, log_probs.shape, log_probs.dtype)
    # What `argmax` finds, which on GPUs takes longer than both of these.
    is_best = score == jnp.max(score, axis=-1, keepdims=True)
    classes = score.shape[-1]
    index = jax.lax.broadcasted_iota(jnp.int32, score.shape, score.ndim - 1)
    return jnp.min(jnp.where(is_best, index, classes - 1), axis=-1)


def sample_by(log_probs: Float[Array, "*b K"], noise: Float[Array, "*b"]) -> Int[Array, "*b"]:
    """A sample for a number between zero and one that was drawn before: the class up to which
    probabilities add up to more. One number is enough for it, where `sample_index` takes one for
    each class; but by rounding, once in ten million, it may be one that cannot be."""
    up_to = jnp.cumsum(jnp.exp(log_probs.astype(jnp.float32)), axis=-1)
    passed = jnp.sum(up_to <= noise[..., None], axis=-1, dtype=jnp.int32)
    return jnp.minimum(passed, log_probs.shape[-1] - 1)


def sample_each(
    log_probs: Float[Array, "B N *s K"], keys: Key[Array, "B N"]
) -> Int[Array, "B N *s"]:
    """Every agent of every environment with a key of its own."""
    return jax.vmap(jax.vmap(sample_index))(log_probs, keys)


def straight_through(
    log_probs: Float[Array, "*b S K"], index: Int[Array, "*b S"]
) -> Float[Array, "*b S K"]:
    """The one-hot vectors of sampled indices, with the gradient of the probabilities."""
    probs = jnp.exp(log_probs)
    # The difference is exactly zero, so the sum stays exactly one-hot.
    return jax.nn.one_hot(index, probs.shape[-1], dtype=probs.dtype) + (
        probs - jax.lax.stop_gradient(probs)
    )


def kl(log_p: Float[Array, "*b S K"], log_q: Float[Array, "*b S K"]) -> Float32[Array, "*b"]:
    """KL(p ‖ q), summed over the S independent variables."""
    log_p, log_q = log_p.astype(jnp.float32), log_q.astype(jnp.float32)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=(-2, -1))


def masked_log_probs(
    logits: Float[Array, "*b A"], legal: Bool[Array, "*b A"]
) -> Float32[Array, "*b A"]:
    """Log-probabilities over legal actions; uniform where none is legal."""
    return jax.nn.log_softmax(jnp.where(legal, logits.astype(jnp.float32), ILLEGAL_LOGIT))


def entropy(log_probs: Float[Array, "*b A"]) -> Float32[Array, "*b"]:
    """In nats; impossible outcomes add nothing, neither value nor gradient."""
    log_probs = log_probs.astype(jnp.float32)
    probs = jnp.exp(log_probs)
    return -jnp.sum(probs * jnp.where(probs > 0, log_probs, 0.0), axis=-1)


def log_prob_of(log_probs: Float[Array, "*b A"], action: Int[Array, "*b"]) -> Float[Array, "*b"]:
    return jnp.take_along_axis(log_probs, action[..., None], axis=-1)[..., 0]


@dataclasses.dataclass(frozen=True)
class TwoHot:
    """Distributions of a scalar over bins that are equally spaced in symlog and symmetric."""

    bins: BinsConfig

    def encode(self, x: Float[Array, "*b"]) -> Float32[Array, "*b K"]:
        """Weights of the two nearest bins, whose mean is `x`; clipped to the outermost bins."""
        values = self._values()
        lower = np.append(values[0] - 1, values[:-1])
        upper = np.append(values[1:], values[-1] + 1)
        x = jnp.clip(x.astype(jnp.float32), values[0], values[-1])[..., None]
        rising = (x - _along(lower, x)) / _along(values - lower, x)
        falling = (_along(upper, x) - x) / _along(upper - values, x)
        return jnp.clip(jnp.minimum(rising, falling), 0.0, 1.0)

    def mean(self, logits: Float[Array, "*b K"]) -> Float32[Array, "*b"]:
        """Expectation in raw space, in pairs of opposite bins: equal weights give exactly 0."""
        probs = jax.nn.softmax(logits.astype(jnp.float32))
        half = self.bins.count // 2
        surplus = probs[..., half + 1 :] - jnp.flip(probs[..., :half], axis=-1)
        return jnp.sum(surplus * _along(self._values()[half + 1 :], surplus), axis=-1)

    def loss(
        self, logits: Float[Array, "*b K"], target: Float[Array, "*b"]
    ) -> Float32[Array, "*b"]:
        """Cross entropy."""
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.sum(self.encode(target) * log_probs, axis=-1)

    def _values(self) -> np.ndarray:
        positive = np.expm1(np.linspace(0.0, self.bins.limit, self.bins.count // 2 + 1)[1:])
        return np.concatenate([-positive[::-1], [0.0], positive]).astype(np.float32)


def binary_cross_entropy(
    logits: Float[Array, "*b"], target: Float[Array, "*b"]
) -> Float32[Array, "*b"]:
    """Of probabilities as targets, soft ones included."""
    logits, target = logits.astype(jnp.float32), target.astype(jnp.float32)
    return target * jax.nn.softplus(-logits) + (1.0 - target) * jax.nn.softplus(logits)


def balanced_cross_entropy(
    logits: Float[Array, "*b A"], target: Bool[Array, "*b A"]
) -> Float32[Array, "*b"]:
    """Mean over true and mean over false entries, averaged over those classes that occur."""
    losses = binary_cross_entropy(logits, target.astype(jnp.float32))
    true_mean, has_true = _class_mean(losses, target)
    false_mean, has_false = _class_mean(losses, ~target)
    return (true_mean + false_mean) / jnp.maximum(has_true + has_false, 1.0)


def _class_mean(
    losses: Float[Array, "*b A"], member: Bool[Array, "*b A"]
) -> tuple[Float[Array, "*b"], Float[Array, "*b"]]:
    """Mean over the members of a class, zero without any, and whether there is one."""
    count = jnp.sum(member, axis=-1, dtype=jnp.float32)
    total = jnp.sum(jnp.where(member, losses, 0.0), axis=-1)
    return total / jnp.maximum(count, 1.0), jnp.minimum(count, 1.0)


def _along(values: np.ndarray, x: Float[Array, "*b"]) -> Float32[Array, "*ones K"]:
    """Values on the last axis, with as many axes as `x`."""
    return jnp.expand_dims(jnp.asarray(values, jnp.float32), tuple(range(x.ndim - 1)))
