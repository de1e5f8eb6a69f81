"""Linear maps, norms and perceptrons against NumPy, and what precision they compute in."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn, jit

from majepa.nn.layers import MLP, Linear, RMSNorm, add_bias, cast, count_parameters, product, spread


def normals(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


@jit
def call(module, x):
    return module(x)


@functools.cache
def make_mlp(*hidden: int) -> MLP:
    return drawn(lambda: MLP(4, list(hidden), 3, key=jax.random.key(0)))


def norm_by_hand(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return gain * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-4)


def mlp_by_hand(mlp: MLP, x: np.ndarray) -> np.ndarray:
    mlp = jax.tree.map(np.asarray, mlp)
    x = x.astype(np.float64) @ mlp.linears[0].weight + mlp.linears[0].bias
    for norm, linear in zip(mlp.norms, mlp.linears[1:], strict=True):
        x = norm_by_hand(x, norm.gain)
        x = (x / (1 + np.exp(-x))) @ linear.weight + linear.bias
    return x


class TestLinear:
    @pytest.mark.parametrize("lead", [(), (5,), (2, 3)])
    def test_it_is_affine_in_the_last_axis(self, lead):
        linear = drawn(lambda: Linear(4, 3, key=jax.random.key(0)))
        x = normals(*lead, 4)
        expected = x @ np.asarray(linear.weight, np.float64) + np.asarray(linear.bias)
        np.testing.assert_allclose(call(linear, x), expected, rtol=1e-5, atol=1e-6)

    def test_two_inputs_side_by_side_need_not_be_joined(self, key):
        linear = Linear(7, 3, key=key, bias_scale=1.0)
        x = jax.random.normal(key, (2, 4, 7))
        np.testing.assert_allclose(linear.of_both(x[..., :5], x[..., 5:]), linear(x), rtol=1e-5)

    def test_weights_begin_with_the_variance_of_their_fan_in(self, key):
        sizes = ((512, 1.0), (128, 1.0), (512, 0.01))

        @jit
        def build(key):
            return [Linear(size, 256, key=key, scale=scale) for size, scale in sizes]

        for (size, scale), linear in zip(sizes, build(key), strict=True):
            deviation = scale * size**-0.5
            weight = np.asarray(linear.weight, np.float64)
            # The deviation of 32,768 draws or more is within 1.5 % of the truth.
            np.testing.assert_allclose(weight.std(), deviation, rtol=0.015)
            assert abs(weight.mean()) < 0.02 * deviation
            # Cut at two deviations of the normal that is cut.
            assert np.abs(weight).max() <= 2 * 1.1368 * deviation * (1 + 1e-6)
            assert np.abs(weight).max() > 1.9 * 1.1368 * deviation
            assert not np.any(linear.bias)

    def test_a_scale_of_zero_begins_at_zero(self, key):
        assert not np.any(jit(lambda key: Linear(4, 3, key=key, scale=0.0))(key).weight)

    def test_a_bias_that_is_zero_is_not_drawn(self, key):
        def draws(**options):
            program = jax.make_jaxpr(lambda key: Linear(4, 3, key=key, **options))(key)
            return str(program).count("erf_inv ")

        assert draws() == 1 and draws(bias_scale=0.1) == 2

    def test_weights_are_the_same_with_and_without_a_bias(self, key):
        plain, biased = (Linear(4, 3, key=key, bias_scale=scale) for scale in (0.0, 0.1))
        np.testing.assert_array_equal(plain.weight, biased.weight)

    def test_a_bias_may_be_asked_for(self, key):
        linear = jit(lambda key: Linear(2, 4096, key=key, bias_scale=0.1))(key)
        np.testing.assert_allclose(np.std(linear.bias), 0.1, rtol=0.05)
        assert abs(np.mean(linear.bias)) < 0.01
        assert abs(np.corrcoef(linear.bias, linear.weight[0])[0, 1]) < 0.1


class TestRMSNorm:
    @pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
    def test_against_numpy(self, scale):
        gain = normals(8, seed=1)
        norm = jax.tree.map(lambda _: jnp.asarray(gain), RMSNorm(8))
        x = normals(2, 3, 8, scale=scale)
        np.testing.assert_allclose(call(norm, x), norm_by_hand(x, gain), rtol=1e-5, atol=1e-7)

    def test_it_begins_with_a_gain_of_one(self):
        np.testing.assert_array_equal(RMSNorm(5).gain, np.ones(5))
        assert count_parameters(RMSNorm(5)) == 5

    def test_zeros_stay_zero_and_have_finite_gradients(self):
        value, gradient = jit(
            jax.value_and_grad(lambda x: jnp.sum(RMSNorm(4)(x) * jnp.arange(1.0, 5.0)))
        )(jnp.zeros(4))
        assert value == 0
        np.testing.assert_allclose(gradient, np.arange(1, 5) * 100, rtol=1e-5)

    def test_half_precision_is_normalised_in_float32(self):
        # 4,096 squares summed one by one in bfloat16 would stop growing at 256.
        x = jnp.asarray(normals(3, 4096), jnp.bfloat16)
        norm = cast(RMSNorm(4096), jnp.bfloat16)
        out = call(norm, x)
        assert out.dtype == jnp.bfloat16
        expected = norm_by_hand(np.asarray(x, np.float32), np.ones(4096))
        np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=2**-8)


class TestMLP:
    @pytest.mark.parametrize("hidden", [(), (6,), (6, 5)])
    def test_against_numpy(self, hidden):
        mlp = make_mlp(*hidden)
        assert len(mlp.linears) == len(hidden) + 1 and len(mlp.norms) == len(hidden)
        x = normals(2, 4)
        np.testing.assert_allclose(call(mlp, x), mlp_by_hand(mlp, x), rtol=1e-5, atol=1e-5)

    def test_the_first_layer_may_be_computed_apart(self):
        mlp, x = make_mlp(6, 5), normals(2, 4)

        @jit
        def apart(mlp, x):
            first = mlp.linears[0]
            parts = product(x[:, :1], first.weight[:1]) + product(x[:, 1:], first.weight[1:])
            return mlp.after_first(add_bias(first.bias, parts))

        np.testing.assert_allclose(apart(mlp, x), call(mlp, x), rtol=1e-5, atol=1e-5)

    def test_layers_begin_apart_with_the_scale_on_the_last_and_the_bias_on_the_first(self, key):
        mlp = jit(lambda key: MLP(64, [64, 64], 64, key=key, out_scale=0.1, first_bias=0.2))(key)
        weights = [np.asarray(linear.weight).ravel() for linear in mlp.linears]
        deviations = [weight.std() for weight in weights]
        np.testing.assert_allclose(deviations, [1 / 8, 1 / 8, 0.1 / 8], rtol=0.05)
        assert np.abs(np.corrcoef(weights) - np.eye(3)).max() < 0.1
        biases = [np.std(linear.bias) for linear in mlp.linears]
        np.testing.assert_allclose(biases, [0.2, 0, 0], rtol=0.3)

    def test_parameters_are_counted(self):
        assert count_parameters(make_mlp(6, 5)) == (4 * 6 + 6 + 6) + (6 * 5 + 5 + 5) + 18


class TestPrecision:
    def test_products_take_the_dtype_of_the_parameters_and_norms_float32(self):
        mlp = cast(make_mlp(6, 5), jnp.bfloat16)
        x = jnp.asarray(normals(2, 4))
        dots, roots = [], []
        for equation in all_equations(jax.make_jaxpr(lambda m, x: m(x))(mlp, x).jaxpr):
            dtypes = {operand.aval.dtype for operand in equation.invars}
            if equation.primitive.name == "dot_general":
                dots.append(dtypes)
            if equation.primitive.name in ("rsqrt", "reduce_sum"):
                roots.append(dtypes)
        assert dots == [{jnp.dtype(jnp.bfloat16)}] * 3
        assert len(roots) == 4 and all(dtypes == {jnp.dtype(jnp.float32)} for dtypes in roots)
        out = call(mlp, x)
        assert out.dtype == jnp.bfloat16
        expected = mlp_by_hand(make_mlp(6, 5), np.asarray(x))
        np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=0.05, atol=0.05)

    def test_gradients_through_a_cast_reach_float32_parameters(self):
        mlp, x = make_mlp(6, 5), jnp.asarray(normals(2, 4))

        def loss(mlp, dtype):
            return jnp.sum(cast(mlp, dtype)(x).astype(jnp.float32) ** 2)

        gradient = jit(jax.grad(loss), static_argnums=1)
        half, exact = gradient(mlp, jnp.bfloat16), gradient(mlp, jnp.float32)
        for rough, fine in zip(jax.tree.leaves(half), jax.tree.leaves(exact), strict=True):
            assert rough.dtype == fine.dtype == jnp.float32
            assert np.any(rough)
            difference = np.linalg.norm(np.asarray(rough) - np.asarray(fine))
            assert 0 < difference < 0.05 * np.linalg.norm(fine)

    def test_a_cast_changes_every_leaf_and_nothing_else(self):
        mlp = make_mlp(6)
        half = cast(mlp, jnp.bfloat16)
        assert jax.tree.structure(half) == jax.tree.structure(mlp)
        assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(half))
        assert cast(mlp, jnp.float32).linears[0].weight.dtype == jnp.float32


def all_equations(jaxpr):
    """Of a program and of all programs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner, "jaxpr"):
                yield from all_equations(inner.jaxpr)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_a_bias_meets_the_last_axis(lead):
    bias, x = normals(4, seed=1), normals(*lead, 4)
    np.testing.assert_allclose(add_bias(jnp.asarray(bias), jnp.asarray(x)), x + bias, rtol=1e-6)
    assert spread(jnp.asarray(bias), x.ndim).shape == (*(1 for _ in lead), 4)
