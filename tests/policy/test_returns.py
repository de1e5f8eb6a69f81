"""Advantages and the clipped objective against their definitions, one entry at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import jit

from majepa.policy.returns import LARGEST_LOG_RATIO, accumulate, clipped_surrogate, gae

STEPS, BATCH = 5, 40


def rollout(seed: int = 0):
    rng = np.random.default_rng(seed)
    reward, cont = rng.normal(size=(STEPS, BATCH)), rng.uniform(size=(STEPS, BATCH))
    cont[rng.random(cont.shape) < 0.3] = 0.0
    return reward, cont, rng.normal(size=(STEPS + 1, BATCH))


@functools.cache
def compiled(trace: float):
    return jit(functools.partial(gae, trace=trace))


def advantages(reward, cont, value, trace):
    arrays = (jnp.asarray(x, jnp.float32) for x in (reward, cont, value))
    return np.asarray(compiled(trace)(*arrays))


@pytest.mark.parametrize("trace", [0.95, 0.0, 1.0])
def test_advantages_against_a_loop(trace):
    reward, cont, value = rollout()
    expected = np.zeros((STEPS + 1, BATCH))
    for entry in range(BATCH):
        for k in reversed(range(STEPS)):
            delta = reward[k, entry] + cont[k, entry] * value[k + 1, entry] - value[k, entry]
            following = expected[k + 1, entry]
            expected[k, entry] = delta + trace * cont[k, entry] * following
    got = advantages(reward, cont, value, trace)
    np.testing.assert_allclose(got, expected[:-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 63, 64])
def test_accumulated_rows_against_a_loop(length):
    rng = np.random.default_rng(length)
    x, final = rng.normal(size=(length, 4, 3)), rng.normal(size=(4, 3))
    weight = np.where(rng.random((length, 4, 1)) < 0.1, 0.0, rng.uniform(size=(length, 4, 1)))
    arrays = (jnp.asarray(given, jnp.float32) for given in (x, weight, final))
    got = jax.jit(accumulate)(*arrays)
    for k in reversed(range(length)):
        final = x[k] + weight[k] * final
        np.testing.assert_allclose(got[k], final, rtol=1e-5, atol=1e-6)


def test_returns_mix_the_next_value_and_the_next_return():
    reward, cont, value = rollout(1)
    returns = advantages(reward, cont, value, 0.95) + value[:-1]
    # After the last step there is nothing but the value.
    following = np.concatenate([returns[1:], value[-1:]])
    expected = reward + cont * (0.05 * value[1:] + 0.95 * following)
    np.testing.assert_allclose(returns, expected, rtol=1e-4, atol=1e-5)


def test_the_continuation_is_the_only_discount():
    reward, _, value = rollout(2)
    returns = advantages(reward, np.ones_like(reward), value, 1.0) + value[:-1]
    total = np.cumsum(reward[::-1], axis=0)[::-1] + value[-1:]
    np.testing.assert_allclose(returns, total, rtol=1e-4, atol=1e-5)


objective = jit(
    jax.vmap(jax.value_and_grad(clipped_surrogate), in_axes=(0, None, None, None)),
    static_argnums=3,
)


def surrogate(log_ratio: list[float], advantage: float):
    """Objective and slope for a new policy that is `log_ratio` away from the old one."""
    old = jnp.asarray(-3.0)
    return objective(jnp.asarray(log_ratio) + old, old, jnp.asarray(advantage), 0.2)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_the_clipped_objective_by_hand(advantage):
    ratio = np.array([0.5, 0.79, 0.9, 1.0, 1.1, 1.21, 3.0])
    value, slope = surrogate(np.log(ratio).tolist(), advantage)
    bound = np.minimum(ratio, 1.2) if advantage > 0 else np.maximum(ratio, 0.8)
    np.testing.assert_allclose(value, bound * advantage, rtol=1e-5)
    # What would gain from moving even further away has no slope.
    np.testing.assert_allclose(slope, np.where(bound == ratio, ratio * advantage, 0), rtol=1e-5)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_ratios_beyond_reason_stay_finite(advantage):
    value, slope = surrogate([1000.0, LARGEST_LOG_RATIO + 1, -1000.0], advantage)
    largest, smallest = np.exp(LARGEST_LOG_RATIO), np.exp(-LARGEST_LOG_RATIO)
    assert LARGEST_LOG_RATIO == 20
    if advantage > 0:
        expected = [2 * 1.2, 2 * 1.2, 2 * smallest]
    else:
        expected = [-2 * largest, -2 * largest, -2 * 0.8]
    np.testing.assert_allclose(value, expected, rtol=1e-4)
    assert not np.any(slope)
