"""The optimizer against the same steps written by hand, and its guard against bad gradients."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array, Float

from majepa.config import OptimizerConfig
from majepa.nn import optim
from majepa.nn.optim import (
    Moments,
    Optimizer,
    Report,
    apply_update,
    follow,
    is_finite,
    join,
    separate,
)
from majepa.policy.rollout import clipped_adam

CONFIG = OptimizerConfig()
RATE = 1e-2


class Layer(eqx.Module):
    weight: Float[Array, "*L I O"]
    gain: Float[Array, "*L"]


class Net(eqx.Module):
    weight: Float[Array, "I O"]
    bias: Float[Array, " O"]
    gain: Float[Array, ""]
    layers: Layer
    """Two of them, on the first axis."""


SHAPES = Net((4, 3), (3,), (), Layer((2, 3, 2), (2,)))
"""As shapes, not arrays."""


def over_shapes(make) -> Net:
    return jax.tree.map(make, SHAPES, is_leaf=lambda node: isinstance(node, tuple))


def net(scale: float, seed: int = 0) -> Net:
    rng = np.random.default_rng(seed)
    made = over_shapes(lambda shape: jnp.asarray(scale * rng.normal(size=shape), jnp.float32))
    # Layers of unlike size tell a clip of each from a clip of all.
    uneven = jnp.array([1.0, 0.01]) if seed == 0 else jnp.array([0.1, 1.0])
    layers = Layer(made.layers.weight * uneven[:, None, None], made.layers.gain * uneven)
    return eqx.tree_at(lambda n: n.layers, made, layers)


def filled(value: float) -> Net:
    return over_shapes(lambda shape: jnp.full(shape, value))


def tensors(tree: Net) -> dict[str, np.ndarray]:
    """What is clipped on its own, in double precision."""
    alone = {name: getattr(tree, name) for name in ("weight", "bias", "gain")}
    stacked = {
        f"layers[{index}].{name}": getattr(tree.layers, name)[index]
        for index in range(2)
        for name in ("weight", "gain")
    }
    return {name: np.asarray(leaf, np.float64) for name, leaf in (alone | stacked).items()}


OPTIMIZER = Optimizer(CONFIG, RATE)


@jax.jit
def step(gradient: Net, state, params: Net, is_good=True):
    return apply_update(OPTIMIZER, gradient, state, params, is_good)


def run(params: Net, gradients: list[Net]) -> tuple[Net, Moments, Report]:
    state, report = OPTIMIZER.init(params), None
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
    history = [tensors(gradient) for gradient in gradients]
    for name, moved in tensors(result).items():
        expected = by_hand(tensors(params)[name], [gradient[name] for gradient in history])
        np.testing.assert_allclose(moved, expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_state_begins_at_zero_and_in_float32():
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), net(1.0))
    state = OPTIMIZER.init(half)
    assert state.steps == 0 and state.steps.dtype == jnp.int32
    for joined in (state.nu, state.mu):
        moments = jax.tree.leaves(separate(joined, half))
        for moment, leaf in zip(moments, jax.tree.leaves(half), strict=True):
            assert moment.shape == leaf.shape and moment.dtype == jnp.float32
            assert not moment.any()


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


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3, 1e15])
def test_clipping_bounds_each_tensor_by_its_own_norm(scale):
    params = eqx.tree_at(lambda n: n.bias, net(1.0), jnp.zeros(3))
    gradient = net(scale, 1)
    _, state, _ = run(params, [gradient])
    squares = jax.tree.map(lambda nu: nu / (1 - CONFIG.rms), separate(state.nu, params))
    for name, square in tensors(squares).items():
        bound = CONFIG.clip * max(CONFIG.clip_floor, np.linalg.norm(tensors(params)[name]))
        norm = np.linalg.norm(tensors(gradient)[name])
        np.testing.assert_allclose(np.sqrt(square.sum()), min(norm, bound), rtol=1e-4)


def test_layers_are_clipped_apart():
    # One layer's gradient breaks its bound a thousandfold, the other's keeps it.
    weight = jnp.full((2, 3, 2), 1e-3).at[0].set(1e3)
    gradient = eqx.tree_at(lambda n: n.layers.weight, filled(0.0), weight)
    params = filled(1.0)
    _, state, _ = run(params, [gradient])
    clipped = np.sqrt(separate(state.nu, params).layers.weight / (1 - CONFIG.rms))
    np.testing.assert_allclose(clipped[0], CONFIG.clip, rtol=1e-4)
    np.testing.assert_allclose(clipped[1], 1e-3, rtol=1e-4)


def test_several_layers_are_tensors_each():
    """Only a block that holds all layers is cut along its first axis."""

    class Several(eqx.Module):
        layers: tuple[jax.Array, ...]

    layers = (jnp.zeros((2, 3)).at[0].set(1e3), jnp.full(4, 1e3), jnp.asarray(1e3))
    params = Several(tuple(jnp.ones_like(leaf) for leaf in layers))
    _, state, _ = run(params, [Several(layers)])
    clipped = jax.tree.map(lambda nu: np.sqrt(nu / (1 - CONFIG.rms)), separate(state.nu, params))
    for leaf in clipped.layers:
        np.testing.assert_allclose(np.linalg.norm(leaf), CONFIG.clip * leaf.size**0.5, rtol=1e-4)


ALL_SMALL, SOME_LARGE, ALL_LARGE = 2**14, 6, 0
"""Sizes up to which leaves of the net are joined."""


@pytest.mark.parametrize("small", [ALL_SMALL, SOME_LARGE, ALL_LARGE])
def test_what_is_joined_comes_apart_again(monkeypatch, small):
    monkeypatch.setattr(optim, "SMALL", small)
    tree = eqx.tree_at(lambda n: n.layers.weight, net(1.0), jnp.ones((2, 3, 3)))
    joined = join(tree)
    large = {ALL_SMALL: [], SOME_LARGE: [(4, 3), (2, 3, 3)], ALL_LARGE: [(4, 3), (2, 3, 3)]}[small]
    assert [leaf.shape for leaf in jax.tree.leaves(joined.large)] == large
    assert sum(leaf.size for leaf in jax.tree.leaves(joined)) == 4 * 3 + 3 + 1 + 2 * 3 * 3 + 2
    assert_same_bits(separate(joined, tree), tree)


def test_nothing_to_join():
    assert jax.tree.leaves(separate(join({"no": ()}), {"no": ()})) == []


WIDE = Net((300, 70), (700,), (), Layer((2, 70, 130), (2, 257)))
"""Leaves of several blocks, whole ones and broken ones; the matrices are not joined."""


def wide(scale: float, seed: int) -> Net:
    rng = np.random.default_rng(seed)

    def leaf(shape):
        return jnp.asarray(scale * rng.lognormal(size=shape) * rng.normal(size=shape), jnp.float32)

    made = jax.tree.map(leaf, WIDE, is_leaf=lambda node: isinstance(node, tuple))
    uneven = jnp.array([[1.0], [0.01]]) if seed % 2 else jnp.array([[0.1], [1.0]])
    layers = Layer(made.layers.weight * uneven[..., None], made.layers.gain * uneven)
    return eqx.tree_at(lambda n: n.layers, made, layers)


@pytest.mark.parametrize("scale", [1e-3, 10.0])
def test_wide_tensors_by_hand(scale):
    params, gradients = wide(1.0, 0), [wide(scale, seed) for seed in (1, 2, 3)]
    result, state, report = run(params, gradients)
    assert [leaf.shape for leaf in jax.tree.leaves(state.nu.large)] == [(300, 70), (2, 70, 130)]
    history = [tensors(gradient) for gradient in gradients]
    for name, moved in tensors(result).items():
        start = tensors(params)[name]
        expected = by_hand(start, [gradient[name] for gradient in history])
        np.testing.assert_allclose(moved, expected, rtol=1e-6, atol=1e-6, err_msg=name)
    norm = np.sqrt(sum(np.sum(tensor**2) for tensor in history[-1].values()))
    np.testing.assert_allclose(report.gradient_norm, norm, rtol=1e-6)


@pytest.mark.parametrize("place", ["weight", "bias", "layers"])
def test_a_bad_entry_anywhere_in_wide_tensors_is_found(place):
    params, state, _ = run(wide(1.0, 0), [wide(0.1, 1)])
    for at in (0, -1):

        def spoil(leaf, at=at):
            return leaf.ravel().at[at].set(np.nan).reshape(leaf.shape)

        good = wide(0.1, 2)
        bad = eqx.tree_at(
            lambda n: getattr(n, place), good, jax.tree.map(spoil, getattr(good, place))
        )
        after = step(bad, state, params)
        assert_same_bits(after[:2], (params, state))
        assert not after[2].finite


def test_a_bad_mean_is_refused_as_well():
    params, state, _ = run(wide(1.0, 0), [wide(0.1, 1)])
    for part in (
        lambda s: s.mu.small,
        lambda s: s.mu.large.weight,
        lambda s: s.nu.small,
        lambda s: s.nu.large.weight,
    ):
        bad = eqx.tree_at(
            part, state, replace_fn=lambda x: x.ravel().at[-1].set(np.nan).reshape(x.shape)
        )
        after = step(wide(0.1, 2), bad, params)
        assert_same_bits(after[:2], (params, bad))
        assert not after[2].finite


@pytest.mark.parametrize("optimizer", ["ours", "adam"])
@pytest.mark.parametrize("size", [1e-30, 1e-19, 1e-12, 1.0, 1e12, 1e15])
def test_a_finite_gradient_makes_a_finite_step(size, optimizer):
    """Of any size that has a square, after any other: none is refused."""
    adam = clipped_adam(5e-4, eps=1e-8, max_gradient=10.0)
    chosen = OPTIMIZER if optimizer == "ours" else adam
    params = wide(1.0, 9)
    state, update = chosen.init(params), jax.jit(functools.partial(apply_update, chosen))
    for seed, one in enumerate([size, 1e15, 0.0, size, 1e-30, size]):
        params, state, report = update(wide(one, seed), state, params)
        assert report.finite
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((params, state)))


def test_runs_side_by_side_are_as_each_alone():
    starts, gradients = [wide(1.0, 0), wide(2.0, 5)], [wide(0.1, 1), wide(np.nan, 2)]
    states = [run(start, [wide(0.5, 7)])[1] for start in starts]
    stacked = [
        jax.tree.map(lambda *x: jnp.stack(x), *trees) for trees in (gradients, states, starts)
    ]
    packed = jax.vmap(step)(*stacked)
    for lane, given in enumerate(zip(gradients, states, starts, strict=True)):
        alone = step(*given)
        assert alone[2].finite == (lane == 0)
        for a, b in zip(jax.tree.leaves(packed), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(a[lane], b, rtol=1e-6, atol=1e-7)


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

    def test_a_large_gradient_is_clipped_not_refused(self):
        result, _, report = run(net(1.0), [filled(1e18)])
        assert report.finite and is_finite(result)
        count = sum(leaf.size for leaf in jax.tree.leaves(result))
        np.testing.assert_allclose(report.gradient_norm, count**0.5 * 1e18, rtol=1e-5)

    @pytest.mark.parametrize("name", ["weight", "layers"])
    def test_a_gradient_whose_square_overflows_is_refused(self, name):
        params, state, _ = run(net(1.0), [net(0.1, 1)])
        huge = eqx.tree_at(lambda n: getattr(n, name), net(0.1, 2), getattr(filled(1e20), name))
        after = step(huge, state, params)
        assert_same_bits(after[:2], (params, state))
        assert not after[2].finite and np.isinf(after[2].gradient_norm)

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
    assert is_finite(filled(1e18))
    for name in ("weight", "bias", "gain"):
        # Too large is what `apply_update` will refuse.
        for junk in (np.nan, np.inf, 1e20):
            bad = eqx.tree_at(lambda n, name=name: getattr(n, name), net(1.0), jnp.full((), junk))
            assert not is_finite(bad)


def test_a_chain_of_optax_is_guarded_as_well():
    chain = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(RATE))
    guarded = jax.jit(lambda *given: apply_update(chain, *given))
    on_tree = jax.jit(chain.update)
    params = expected = net(1.0)
    state, expected_state = chain.init(params), chain.init(params)
    for gradient, good in ((net(1.0, 1), True), (filled(np.nan), False), (net(0.01, 2), True)):
        params, state, report = guarded(gradient, state, params)
        assert report.finite == good
        if good:
            update, expected_state = on_tree(gradient, expected_state)
            expected = jax.tree.map(np.add, expected, update)
    np.testing.assert_allclose(change(params, expected), 0, atol=1e-6)


def test_large_gradients_of_stacked_layers_are_put_together_first():
    """These alone: what is small is joined anyway, and one layer is in one piece."""

    class Stacked(eqx.Module):
        layers: Layer
        weight: jax.Array

    def barriers(side):
        size = (2, side, side)
        tree = Stacked(Layer(jnp.ones(size), jnp.ones(size[:2])), jnp.ones(size[1:]))
        state = OPTIMIZER.init(tree)
        text = str(jax.make_jaxpr(functools.partial(apply_update, OPTIMIZER))(tree, state, tree))
        return text.count("optimization_barrier")

    assert barriers(4) == 0
    assert barriers(128) == 1
