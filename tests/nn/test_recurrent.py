"""Layers of recurrent agents against their definitions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from majepa.nn.recurrent import GRU, LayerNorm, orthogonal_linear


@functools.partial(jax.jit, static_argnums=(0, 1))
def make_gru(inputs, size, key):
    return GRU(inputs, size, key=key)


@jax.jit
def run(gru, x, is_first, hidden):
    return gru(x, is_first, hidden)


@pytest.mark.parametrize(("inputs", "outputs"), [(5, 5), (4, 9), (9, 4)])
def test_linear_maps_start_orthogonal_and_without_bias(inputs, outputs, key):
    linear = orthogonal_linear(inputs, outputs, 0.3, key=key)
    weight = np.asarray(linear.weight)
    gram = weight.T @ weight if outputs <= inputs else weight @ weight.T
    np.testing.assert_allclose(gram, 0.3**2 * np.eye(min(inputs, outputs)), atol=1e-6)
    assert not np.any(linear.bias)


def test_linear_maps_are_affine(key):
    linear = orthogonal_linear(3, 2, 1.0, key=key)
    x = jnp.array([1.0, -2.0, 0.5])
    expected = np.asarray(x) @ np.asarray(linear.weight)
    np.testing.assert_allclose(linear(x), expected, atol=1e-6)


def test_layer_norm_standardises_each_example():
    x = jnp.array([1.0, 2.0, 3.0, 10.0])
    out = LayerNorm(4)(x)
    np.testing.assert_allclose(out, (x - 4.0) / np.sqrt(12.5 + 1e-5), rtol=1e-6)
    np.testing.assert_allclose(LayerNorm(3)(jnp.full(3, 7.0)), np.zeros(3), atol=1e-6)


def test_the_gru_follows_its_equations(key):
    gru = make_gru(3, 4, key)
    x, hidden = jax.random.normal(key, (3,)), jnp.linspace(-0.5, 0.5, 4)
    drive = np.asarray(x) @ np.asarray(gru.from_input.weight)
    back = np.asarray(hidden) @ np.asarray(gru.from_hidden.weight)
    reset, update = (1 / (1 + np.exp(-drive[a : a + 4] - back[a : a + 4])) for a in (0, 4))
    candidate = np.tanh(drive[8:] + reset * back[8:])
    expected = (1 - update) * candidate + update * np.asarray(hidden)
    out = run(gru, x[None], jnp.array([False]), hidden)
    np.testing.assert_allclose(out[0], expected, atol=1e-6)


def test_the_gru_forgets_before_a_first_step_and_only_then(key):
    gru = make_gru(2, 3, key)
    x = jax.random.normal(key, (7, 2))
    is_first = jnp.array([False, False, False, True, False, False, False])
    hidden = jnp.ones(3)
    out = run(gru, x, is_first, hidden)

    fresh = run(gru, x[3:], jnp.zeros(4, bool), jnp.zeros(3))
    np.testing.assert_allclose(out[3:], fresh, atol=1e-6)
    through = run(gru, x, jnp.zeros(7, bool), hidden)
    np.testing.assert_allclose(out[:3], through[:3], atol=1e-6)
    assert np.all(np.abs(out[3] - through[3]) > 1e-4)


def test_the_gru_in_chunks_equals_the_gru_at_once(key):
    gru = make_gru(2, 3, key)
    x, is_first = jax.random.normal(key, (6, 2)), jnp.zeros(6, bool).at[4].set(True)
    whole = run(gru, x, is_first, jnp.zeros(3))
    second = run(gru, x[3:], is_first[3:], whole[2])
    np.testing.assert_allclose(second, whole[3:], atol=1e-6)
