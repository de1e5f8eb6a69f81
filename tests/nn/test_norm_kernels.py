"""Kernels of norms against the plain version, on any machine: their programs interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import lower_for_gpus

from majepa.nn import layers, norm_kernels
from majepa.nn.layers import MLP, End, RMSNorm, add_bias, cast

ERROR = {jnp.float32: 1e-5, jnp.bfloat16: 0.02}
"""Of numbers of size one; two of the shorter type are 1/256 apart."""
EPS = 1e-4

BOTH = End(EPS, silu=True)
"""A norm and a SiLU."""

cases = pytest.mark.parametrize(
    ("end", "rows", "size", "biased", "gained"),
    [
        (BOTH, 37, 128, True, True),
        (BOTH, 64, 256, False, True),
        (End(silu=True), 9, 1024, True, False),
        (End(EPS), 37, 256, False, True),
        (End(EPS, beside=True), 21, 256, False, True),
        (End(EPS, silu=True, beside=True), 21, 128, True, True),
        (End(EPS), 21, 128, True, True),
        (End(EPS, beside=True), 37, 256, True, True),
    ],
)
types = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])


def given(rows, size, biased, gained, dtype):
    rng = np.random.default_rng(0)
    x, gradient, beside = (rng.normal(size=(rows, size)) for _ in range(3))
    bias = rng.normal(size=size) if biased else None
    gain = 1 + 0.3 * rng.normal(size=size) if gained else None
    return tuple(
        None if leaf is None else jnp.asarray(leaf, dtype)
        for leaf in (x, bias, gain, gradient, beside)
    )


def close(one, other, dtype):
    one, other = (np.asarray(leaf, np.float32) for leaf in (one, other))
    assert one.shape == other.shape
    np.testing.assert_allclose(one, other, atol=ERROR[dtype] * max(1, np.abs(other).max()), rtol=0)


@types
@cases
def test_values(end, rows, size, biased, gained, dtype):
    x, bias, gain, *_ = given(rows, size, biased, gained, dtype)
    found = norm_kernels.ended(end, x, bias, gain, interpret=True)
    close(found, layers._plain_end(end._replace(beside=False), x, bias, gain), dtype)


@types
@cases
@pytest.mark.parametrize(("programs", "many_rows"), [(3, 10_000), (1, 1), (528, 10_000)])
def test_gradients(monkeypatch, end, rows, size, biased, gained, dtype, programs, many_rows):
    """Whether a program has one block of rows or several, of which the last may be empty; and with
    the programs that many rows have."""
    monkeypatch.setattr(norm_kernels, "PROGRAMS", programs)
    monkeypatch.setattr(norm_kernels, "MANY_ROWS", many_rows)
    *inputs, gradient, beside = given(rows, size, biased, gained, dtype)
    beside = beside if end.beside else None
    found = norm_kernels.pull_ended(end, *inputs, gradient, beside, interpret=True)
    exact = [None if leaf is None else leaf.astype(jnp.float32) for leaf in inputs]
    gradients = gradient.astype(jnp.float32)
    gradients = (beside.astype(jnp.float32), gradients) if end.beside else gradients
    expected = jax.vjp(functools.partial(layers._plain_end, end), *exact)[1](gradients)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == dtype
            close(one, other, dtype)


def test_what_is_not_there_takes_no_part():
    """Rows beyond the last are neither read nor written, nor do they count in sums."""
    inputs = given(6, 128, True, True, jnp.float32)
    more = [jnp.pad(leaf, ((0, 58), (0, 0))) if leaf.ndim > 1 else leaf for leaf in inputs]
    pull = functools.partial(norm_kernels.pull_ended, BOTH, interpret=True)
    for one, other in zip(pull(*inputs), pull(*more), strict=True):
        np.testing.assert_allclose(one, other[:6] if one.ndim > 1 else other, rtol=1e-6, atol=1e-6)


def test_a_residual_branch_and_a_norm_give_back_the_sum_of_their_gradients():
    """By the rule that platforms choose kernels with, and without it."""
    norm = cast(RMSNorm(256), jnp.bfloat16)
    rng = np.random.default_rng(1)
    x, one, other = (jnp.asarray(rng.normal(size=(1024, 256)), jnp.bfloat16) for _ in range(3))
    (same, normed), pull_back = jax.vjp(norm.beside, x)
    np.testing.assert_array_equal(same, x)
    np.testing.assert_array_equal(normed, norm(x))
    (found,) = pull_back((one, other))
    alone = jax.vjp(norm, x)[1](other)[0]
    close(found, one.astype(jnp.float32) + alone.astype(jnp.float32), jnp.bfloat16)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_bias_goes_into_the_norm_beside_a_residual_branch_alone(dtype):
    """So its gradient comes through the norm alone."""
    norm = cast(RMSNorm(256), dtype)
    rng = np.random.default_rng(3)
    x, one, other = (jnp.asarray(rng.normal(size=(1024, 256)), dtype) for _ in range(3))
    bias = jnp.asarray(rng.normal(size=256), dtype)
    (same, normed), pull_back = jax.vjp(norm.beside, x, bias)
    np.testing.assert_array_equal(same, x)
    close(normed, norm(add_bias(bias, x)), dtype)
    of_x, of_bias = pull_back((one, other))
    alone = jax.vjp(norm, add_bias(bias, x))[1](other)[0].astype(jnp.float32)
    close(of_x, one.astype(jnp.float32) + alone, dtype)
    close(of_bias, alone.sum(0), dtype)
    for found, expected in zip(jax.vjp(norm, x, bias)[1](other), (alone, of_bias), strict=True):
        close(found, expected, dtype)


@cases
def test_platforms_choose_between_the_same(monkeypatch, end, rows, size, biased, gained):
    """What stands around the kernels, of arrays with more axes: results and gradients in order."""
    for name in ("ended", "pull_ended"):
        kernel = functools.partial(getattr(norm_kernels, name), interpret=True)
        monkeypatch.setattr(norm_kernels, name, kernel)
    # A shape and a precision of their own: what was traced for others is not taken.
    *inputs, gradient, beside = given(2 * rows, size, biased, gained, jnp.float32)
    x, gradient, beside = (leaf.reshape(2, rows, size) for leaf in (inputs[0], gradient, beside))
    inputs[0], gradients = x, (beside, gradient) if end.beside else gradient
    found = jax.tree.leaves(layers._kernel_end(end, *inputs))
    expected = jax.tree.leaves(layers._plain_end(end, *inputs))
    found += jax.tree.leaves(layers._pull_kernel_end(end, *inputs, gradients))
    expected += jax.tree.leaves(layers._pull_plain_end(end, *inputs, gradients))
    for one, other in zip(found, expected, strict=True):
        close(one, other, jnp.float32)


@pytest.mark.parametrize(
    ("rows", "size", "dtype", "kernels"),
    [
        (1024, 512, jnp.bfloat16, True),
        (1023, 512, jnp.bfloat16, False),
        (1024, 520, jnp.bfloat16, False),
        (1024, 4096, jnp.bfloat16, False),
        (1024, 512, jnp.float32, False),
    ],
)
def test_gpus_take_kernels_for_what_suits_them(rows, size, dtype, kernels):
    norm = cast(RMSNorm(size), dtype)
    shapes = norm, jax.ShapeDtypeStruct((rows, size), dtype), jax.ShapeDtypeStruct((size,), dtype)

    def loss(make, norm, x, bias):
        found = jax.tree.leaves((make(norm, x), make(norm, x, bias)))
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in found)

    for make in (RMSNorm.activated, RMSNorm.__call__, RMSNorm.beside):
        both_ways = jax.value_and_grad(functools.partial(loss, make))
        lowered = lower_for_gpus(both_ways, *shapes)
        assert lowered.count("xla.gpu.triton") == 4 * kernels


@pytest.mark.parametrize("runs", [0, 3])
def test_kernels_are_compiled_for_gpus_at_full_size(runs):
    """Once on each way for every hidden layer, and for several runs at once."""
    mlp = cast(MLP(512, [1024, 512, 256], 64, key=jax.random.key(0)), jnp.bfloat16)
    rows = jnp.zeros((25_600, 512), jnp.bfloat16)

    def loss(mlp, x):
        return jnp.sum(mlp(x).astype(jnp.float32))

    gradient, given = jax.grad(loss), (mlp, rows)
    if runs:
        gradient = jax.vmap(gradient)
        given = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (runs, *leaf.shape)), given)
    assert lower_for_gpus(gradient, *given).count("xla.gpu.triton") == 6


def test_a_bias_is_added_once():
    """Whatever norm takes it along."""
    mlp = MLP(8, [16, 32], 4, key=jax.random.key(1))
    mlp = jax.tree.map(lambda leaf: leaf + 0.1, mlp)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(5, 8)), jnp.float32)
    y = x
    for number, linear in enumerate(mlp.linears):
        y = linear(y)
        if number < 2:
            y = jax.nn.silu(mlp.norms[number](y))
    np.testing.assert_allclose(mlp(x), y, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(mlp.after_first(mlp.linears[0](x)), y, rtol=1e-6, atol=1e-6)
