"""Blocks for few rows against the blocks they are made of, on any machine."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn
from lowering import lower_for_gpus

from majepa.nn import few_rows, gpu, kernels
from majepa.nn.few_rows import FoldedBlock, fold_block, for_few_rows
from majepa.nn.layers import Biased, cast
from majepa.nn.transformer import AgentAttention, Block, DropoutKeys, TemporalTransformer, apart

WIDTH, HEADS = 64, 2
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 0.03}
"""Of the largest number; two of the shorter type are 1/256 apart."""


@functools.cache
def block() -> Block:
    return drawn(lambda: Block(WIDTH, HEADS, 0.1, key=jax.random.key(0)))


def normals(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def assert_close(one, other, dtype) -> None:
    one, other = (np.asarray(leaf, np.float32) for leaf in (one, other))
    assert one.shape == other.shape
    np.testing.assert_allclose(one, other, atol=TOLERANCE[dtype] * np.abs(other).max(), rtol=0)


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels that any machine takes."""
    for name in ("project", "finish"):
        kernel = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *given, kernel=kernel, interpret: kernel(*given, interpret=True)
        )

    def take_kernels(*given, cuda, default):
        return cuda(*given)

    monkeypatch.setattr(jax.lax, "platform_dependent", take_kernels)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_kernels_compute_what_the_block_does(interpreted, dtype, rows):
    """Whether the last program has as many rows as others or not."""
    x, mixed = normals(rows, WIDTH).astype(dtype), normals(rows, WIDTH, seed=1).astype(dtype)
    whole = cast(block(), dtype)
    few = FoldedBlock(whole)
    with jax.disable_jit():
        same, qkv = few.projected(Biased(x))
        after = few.finish(Biased(x), mixed, DropoutKeys())
    np.testing.assert_array_equal(same.x, x)
    assert same.bias is None and after.bias is None
    assert_close(qkv, whole.projected(Biased(x))[1], dtype)
    assert_close(after.x, whole.finish(Biased(x), mixed, DropoutKeys()).whole(), dtype)


def test_a_bias_that_many_rows_left_is_added():
    x, mixed, bias = normals(5, WIDTH), normals(5, WIDTH, seed=1), normals(WIDTH, seed=2)
    few, given, nothing = FoldedBlock(block()), Biased(x, bias), DropoutKeys()
    whole = Biased(given.whole())
    same, qkv = few.projected(given)
    after = few.finish(given, mixed, nothing)
    assert same.bias is None and after.bias is None
    assert_close(same.x, whole.x, jnp.float32)
    assert_close(qkv, block().projected(whole)[1], jnp.float32)
    assert_close(after.x, block().finish(whole, mixed, nothing).whole(), jnp.float32)


def test_rows_have_nothing_to_do_with_each_other():
    """Where the last program has few, others that are no numbers change nothing."""
    x = jnp.full((3 * kernels.ROWS, WIDTH), jnp.nan).at[:37].set(normals(37, WIDTH))
    folded = fold_block(block())
    for run in (
        lambda x: kernels.project(folded, x, interpret=True),
        lambda x: kernels.finish(folded, x, x, interpret=True),
    ):
        few, padded = run(x[:37]), run(x)
        np.testing.assert_array_equal(few, padded[:37])
        assert np.isfinite(few).all()


def test_a_folded_block_is_the_same_block():
    whole, folded = block(), fold_block(block())
    assert not np.allclose(whole.norm_attention.gain, 1)
    np.testing.assert_array_equal(folded.norm_attention.gain, 1)
    np.testing.assert_array_equal(folded.norm_feed.gain, 1)
    x, mixed = normals(5, WIDTH), normals(5, WIDTH, seed=1)
    one, other = (each.projected(Biased(x))[1] for each in (folded, whole))
    assert_close(one, other, jnp.float32)
    nothing = DropoutKeys()
    one, other = (each.finish(Biased(x), mixed, nothing).whole() for each in (folded, whole))
    assert_close(one, other, jnp.float32)


def run_both(models, rows: int):
    """A step of a temporal Transformer after agents have seen each other."""
    agents, temporal = models
    x = normals(rows, 2, WIDTH).astype(agents.layers[0].out.bias.dtype)
    x = agents(x, jnp.ones((rows, 2), bool))[:, :, None]
    past = temporal.empty(rows, 2, x.dtype)
    return temporal(x, jnp.zeros((rows, 1), jnp.int32), past)[0]


def models(dtype):
    key = jax.random.key(0)
    return apart(cast(
        (
            drawn(lambda: AgentAttention(1, WIDTH, HEADS, dropout=0.1, key=key)),
            drawn(lambda: TemporalTransformer(2, WIDTH, HEADS, 4, dropout=0.1, key=key)),
        ),
        dtype,
    ))  # fmt: skip


def test_models_compute_the_same_of_few_rows():
    given = models(jnp.bfloat16)
    few = for_few_rows(given)
    assert isinstance(few[1].layers[0], FoldedBlock)
    assert_close(run_both(few, 6), run_both(given, 6), jnp.bfloat16)


@pytest.mark.parametrize(
    ("wish", "dtype", "taken"),
    [
        ("", jnp.bfloat16, True),
        ("", jnp.float32, False),
        ("0", jnp.bfloat16, False),
    ],
)
def test_blocks_are_left_as_they_are_without_kernels(monkeypatch, wish, dtype, taken):
    """Of such numbers, or where they are off."""
    monkeypatch.setenv(gpu.SWITCH, wish)
    given = models(dtype)
    same = jax.tree.structure(for_few_rows(given)) == jax.tree.structure(given)
    assert same == (not taken)


@pytest.mark.parametrize(("rows", "launches"), [(6, True), (few_rows.MOST_ROWS, False)])
def test_gpus_take_four_kernels_a_block_for_few_rows(rows, launches):
    given = for_few_rows(models(jnp.bfloat16))
    lowered = lower_for_gpus(functools.partial(run_both, rows=rows), given)
    for name in ("project", "out", "widen", "narrow"):
        assert (f'name = "{name}"' in lowered) == launches


def test_dropout_is_not_forgotten():
    """A folded block that is given keys drops what the block does."""
    keys = DropoutKeys(fed=jax.random.key(3))
    x = normals(8, WIDTH)
    found = FoldedBlock(block()).finish(Biased(x), x, keys)
    assert found.bias is None
    assert_close(found.x, block().finish(Biased(x), x, keys).x, jnp.float32)
    assert not np.allclose(found.x, block().finish(Biased(x), x, DropoutKeys()).whole())


def test_no_gradient_goes_through():
    few = for_few_rows(models(jnp.bfloat16))

    def total(models):
        return jnp.sum(run_both(for_few_rows(models), 6).astype(jnp.float32))

    gradient = jax.grad(total, allow_int=True)(models(jnp.bfloat16))
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient))
    assert np.isfinite(np.asarray(run_both(few, 6), np.float32)).all()
