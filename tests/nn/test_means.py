"""Means over what counts, and nothing from what does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from majepa.nn.means import masked_mean, standardise, weighted_mean

X = np.array([[1.0, -2.0, 5.0], [0.5, 7.0, -1.0]], np.float32)
VALID = np.array([[True, False, True], [False, True, False]])
WEIGHT = np.array([[0.2, 0.0, 1.5], [0.0, 0.7, 3.0]], np.float32)

masked = jax.jit(jax.value_and_grad(masked_mean))
weighted = jax.jit(jax.value_and_grad(weighted_mean))


def test_masked_mean_and_its_gradient():
    value, gradient = masked(jnp.asarray(X), jnp.asarray(VALID))
    np.testing.assert_allclose(value, X[VALID].mean(), rtol=1e-6)
    np.testing.assert_allclose(gradient, VALID / 3, rtol=1e-6)


def test_weighted_mean_and_its_gradient():
    value, gradient = weighted(jnp.asarray(X), jnp.asarray(WEIGHT))
    np.testing.assert_allclose(value, np.average(X, weights=WEIGHT), rtol=1e-6)
    np.testing.assert_allclose(gradient, WEIGHT / WEIGHT.sum(), rtol=1e-6)


def test_weights_may_be_small():
    small = jnp.asarray(WEIGHT * 1e-30)
    np.testing.assert_allclose(
        weighted(jnp.asarray(X), small)[0], np.average(X, weights=WEIGHT), rtol=1e-5
    )


@pytest.mark.parametrize("junk", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(("mean", "counts"), [(masked, VALID), (weighted, WEIGHT)])
def test_what_does_not_count_may_hold_anything(mean, counts, junk):
    clean, clean_gradient = mean(jnp.asarray(X), jnp.asarray(counts))
    value, gradient = mean(jnp.asarray(np.where(counts > 0, X, junk)), jnp.asarray(counts))
    assert value == clean
    np.testing.assert_array_equal(gradient, clean_gradient)


@pytest.mark.parametrize("mean", [masked, weighted])
def test_nothing_to_average_gives_zero_and_no_gradient(mean):
    kind = bool if mean is masked else np.float32
    value, gradient = mean(jnp.full((2, 3), jnp.nan), jnp.zeros((2, 3), kind))
    assert value == 0
    np.testing.assert_array_equal(gradient, np.zeros((2, 3)))


@pytest.mark.parametrize("mean", [masked_mean, weighted_mean])
def test_half_precision_is_averaged_in_float32(mean):
    ones = jnp.ones(4096, jnp.bfloat16).at[0].set(2)
    value = mean(ones, ones > 0 if mean is masked_mean else jnp.ones(4096, jnp.bfloat16))
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, 1 + 1 / 4096, rtol=1e-6)


def test_standardise_against_numpy():
    mean = np.average(X, weights=WEIGHT)
    variance = np.average((X - mean) ** 2, weights=WEIGHT)
    result = jax.jit(standardise)(jnp.asarray(X), jnp.asarray(WEIGHT))
    np.testing.assert_allclose(result, (X - mean) / np.sqrt(variance), rtol=1e-5)
    np.testing.assert_allclose(weighted_mean(result, jnp.asarray(WEIGHT)), 0, atol=1e-6)
    np.testing.assert_allclose(weighted_mean(result**2, jnp.asarray(WEIGHT)), 1, rtol=1e-5)


def test_noise_is_not_blown_up():
    noise = jnp.asarray(X * 1e-6)
    result = jax.jit(standardise)(noise, jnp.asarray(WEIGHT))
    assert np.abs(result).max() < 0.1
    constant = jax.jit(standardise)(jnp.full((2, 3), 4.0), jnp.asarray(WEIGHT))
    np.testing.assert_allclose(constant, 0, atol=1e-2)


def test_standardise_without_weight_is_finite():
    assert np.isfinite(jax.jit(standardise)(jnp.asarray(X), jnp.zeros((2, 3)))).all()
