"""The optimizer against the same steps written by hand, and its guard against bad gradients."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from majepa.config import OptimizerConfig
from majepa.nn.optim import Report, apply_update, follow, is_finite, make_optimizer

CONFIG = OptimizerConfig()
RATE = 1e-2


class Net(eqx.Module):
    weight: Float[Array, "I O"]
    bias: Float[Array, " O"]
    gain: Float[Array, ""]


def net(scale: float, seed: int = 0) -> Net:
    rng = np.random.default_rng(seed)
    weight, bias, gain = rng.normal(size=(4, 3)), rng.normal(size=3), rng.normal()
    return Net(*(jnp.asarray(scale * x, jnp.float32) for x in (weight, bias, gain)))


def filled(value: float) -> Net:
    return Net(jnp.full((4, 3), value), jnp.full(3, value), jnp.full((), value))


@functools.cache
def optimizer():
    return make_optimizer(CONFIG, RATE)


@jax.jit
def step(gradient: Net, state, params: Net, is_good=True):
    return apply_update(optimizer(), gradient, state, params, is_good)


def run(params: Net, gradients: list[Net]) -> tuple[Net, tuple, Report]:
    state, report = optimizer().init(params), None
    for gradient in gradients:
        params, state, report = step(gradient, state, params)
    return params, state, report


def change(new: Net, old: Net) -> np.ndarray:
    difference = jax.tree.map(lambda a, b: np.ravel(np.asarray(a) - np.asarray(b)), new, old)
    return np.concatenate(jax.tree.leaves(difference))


def by_hand(param: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
    """One tensor after AGC, RMS and momentum with every gradient in turn, in double precision."""
    param, nu, mu = param.astype(np.float64), 0.0, 0.0
    for count, gradient in enumerate(gradients, start=1):
        bound = CONFIG.clip * max(CONFIG.clip_floor, np.linalg.norm(param))
        clipped = gradient / max(1, np.linalg.norm(gradient) / bound)
        nu = CONFIG.rms * nu + (1 - CONFIG.rms) * clipped**2
        normalised = clipped / (np.sqrt(nu / (1 - CONFIG.rms**count)) + CONFIG.eps)
        mu = CONFIG.momentum * mu + (1 - CONFIG.momentum) * normalised
        param = param - RATE * mu / (1 - CONFIG.momentum**count)
    return param


@pytest.mark.parametrize("scales", [(0.01, 0.02, 0.005), (100, 0.01, 3)])
def test_three_steps_by_hand(scales):
    params = net(1.0)
    gradients = [net(scale, seed) for seed, scale in enumerate(scales, start=1)]
    result, _, _ = run(params, gradients)
    for name in ("weight", "bias", "gain"):
        history = [np.asarray(getattr(gradient, name), np.float64) for gradient in gradients]
        expected = by_hand(np.asarray(getattr(params, name)), history)
        np.testing.assert_allclose(getattr(result, name), expected, rtol=1e-5, atol=1e-6)


def test_first_step_is_the_rate_in_each_entry():
    moved = change(run(net(1.0), [net(1e-3, 1)])[0], net(1.0))
    np.testing.assert_allclose(np.abs(moved), RATE, rtol=1e-3)


def test_zero_gradient_moves_nothing():
    params = net(1.0)
    result, state, report = run(params, [filled(0.0)] * 3)
    assert not change(result, params).any()
    assert is_finite(state)
    assert report.finite and report.gradient_norm == 0 and report.update_ratio == 0


def test_a_tiny_gradient_moves_nothing():
    result, state, report = run(net(1.0), [filled(1e-25)])
    assert not change(result, net(1.0)).any()
    assert is_finite(state) and report.finite


def test_no_gradient_is_blown_up_at_the_edge_of_float32():
    # Parameters of zero show the update undisturbed by rounding.
    for magnitude in 10.0 ** np.arange(-30, -15, 0.25):
        moved = change(run(filled(0.0), [filled(float(magnitude))])[0], filled(0.0))
        assert np.all(np.abs(moved) < 1.3 * RATE), magnitude
        assert magnitude < 1e-17 or np.all(np.abs(moved) > 0.9 * RATE), magnitude


def test_a_tensor_without_gradient_stays_while_others_move():
    gradient = eqx.tree_at(lambda n: n.bias, net(1.0, 1), jnp.zeros(3))
    result, _, _ = run(net(1.0), [gradient] * 3)
    np.testing.assert_array_equal(result.bias, net(1.0).bias)
    assert np.all(result.weight != net(1.0).weight)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3, 1e25])
def test_clipping_bounds_each_tensor_by_its_own_norm(scale):
    params = eqx.tree_at(lambda n: n.bias, net(1.0), jnp.zeros(3))
    gradient = net(scale, 1)
    _, state, _ = run(params, [gradient])
    for name in ("weight", "bias", "gain"):
        bound = CONFIG.clip * max(CONFIG.clip_floor, np.linalg.norm(getattr(params, name)))
        norm = np.linalg.norm(np.asarray(getattr(gradient, name), np.float64))
        squares = np.asarray(getattr(state[1].nu, name), np.float64) / (1 - CONFIG.rms)
        np.testing.assert_allclose(np.sqrt(squares.sum()), min(norm, bound), rtol=1e-4)


def test_moments_are_float32_whatever_the_gradient():
    params = net(1.0)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), net(0.1, 1))
    result, state, _ = run(params, [half])
    floats = [
        leaf for leaf in jax.tree.leaves((result, state)) if leaf.ndim or leaf.dtype.kind == "f"
    ]
    assert all(leaf.dtype == jnp.float32 for leaf in floats)


class TestGuard:
    @pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("name", ["weight", "gain"])
    def test_a_bad_gradient_changes_no_bit(self, name, junk):
        params, state, _ = run(net(1.0), [net(0.1, 1)])
        good = net(0.1, 2)
        bad = eqx.tree_at(
            lambda n: getattr(n, name),
            good,
            replace_fn=lambda x: x.ravel().at[0].set(junk).reshape(x.shape),
        )
        after = step(bad, state, params)
        assert_same_bits(after[:2], (params, state))
        assert not after[2].finite and after[2].update_ratio == 0

    def test_the_caller_can_refuse(self):
        params, state, _ = run(net(1.0), [net(0.1, 1)])
        for refused in (False, jnp.asarray(False)):
            *after, report = step(net(0.1, 2), state, params, refused)
            assert_same_bits(tuple(after), (params, state))
            assert not report.finite and report.gradient_norm > 0

    def test_training_goes_on_after_a_bad_gradient(self):
        good = [net(0.1, 1), net(0.1, 2)]
        assert_same_bits(
            run(net(1.0), [good[0], filled(np.nan), good[1]])[:2], run(net(1.0), good)[:2]
        )

    def test_a_huge_gradient_is_clipped_not_refused(self):
        result, _, report = run(net(1.0), [filled(1e30)])
        assert report.finite and is_finite(result)
        np.testing.assert_allclose(report.gradient_norm, 4e30, rtol=1e-5)

    def test_report_measures_the_step(self):
        params, gradient = net(1.0), net(0.1, 1)
        result, _, report = run(params, [gradient])
        norms = [np.linalg.norm(change(tree, filled(0.0))) for tree in (gradient, params)]
        np.testing.assert_allclose(report.gradient_norm, norms[0], rtol=1e-5)
        moved = np.linalg.norm(change(result, params))
        np.testing.assert_allclose(report.update_ratio, moved / norms[1], rtol=1e-4)


def assert_same_bits(one, other) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_follow_is_an_exact_average():
    slow, fast = net(1.0), net(1.0, 1)
    result = jax.jit(lambda a, b: follow(a, b, 0.01))(slow, fast)
    for name in ("weight", "bias", "gain"):
        expected = 0.99 * np.asarray(getattr(slow, name)) + 0.01 * np.asarray(getattr(fast, name))
        np.testing.assert_allclose(getattr(result, name), expected, rtol=1e-6, atol=1e-7)
    assert_same_bits(follow(slow, fast, 0.0), slow)
    assert_same_bits(follow(slow, fast, 1.0), fast)


def test_is_finite_looks_at_every_leaf():
    assert is_finite(net(1.0)) and is_finite(())
    assert is_finite((net(1.0), jnp.arange(3)))
    for name in ("weight", "bias", "gain"):
        for junk in (np.nan, np.inf):
            bad = eqx.tree_at(lambda n, name=name: getattr(n, name), net(1.0), jnp.full((), junk))
            assert not is_finite(bad)
