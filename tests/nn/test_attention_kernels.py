"""Kernels of attention against the plain version, on any machine: their programs interpreted."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from majepa.nn import attention, gpu
from majepa.nn import attention_kernels as kernels
from majepa.nn.attention import Limb, Past, Twigs, turns
from majepa.nn.layers import cast
from majepa.nn.transformer import TemporalTransformer

EXACT = pytest.mark.parametrize(
    "dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)]
)
ERROR = {jnp.float32: 1e-5, jnp.bfloat16: 0.03}
"""Of numbers of size one; two of the shorter type are 1/256 apart."""


class Case(NamedTuple):
    """Sizes: masks, sequences for each, records, records before, heads, entries of a head."""

    masks: int
    sequences: int
    length: int
    before: int
    heads: int
    size: int
    rate: float = 0.0


CASES = [
    Case(2, 3, 10, 5, 2, 32, 0.1),
    Case(4, 1, 13, 0, 2, 64),
    Case(4, 1, 40, 0, 2, 32, 0.3),
    Case(2, 1, 64, 15, 1, 64, 0.1),
    Case(1, 2, 1, 7, 2, 32),
]
cases = pytest.mark.parametrize(
    "case",
    [*CASES[:2], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[2:])],
    ids=str,
)


def given(case, dtype, seed=0):
    """What `attention.mix` takes; nobody sees nothing."""
    masks, sequences, length, before, heads, size, rate = case
    rng = np.random.default_rng(seed)

    def normals(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    qkv = normals(masks, sequences, length, 3 * heads * size)
    mask = rng.random((masks, length, before + length)) < 0.5
    mask[:, np.arange(length), before + np.arange(length)] = True
    keep = rng.random((masks, sequences, heads, length, before + length)) >= rate
    past = None
    if before:
        keys, values = (normals(masks, sequences, before, heads, size) for _ in range(2))
        past = Past(keys, values, turns(jnp.arange(before + length), size))
    return qkv, past, jnp.asarray(mask), jnp.asarray(keep) if rate else None


def close(one, other, dtype):
    one, other = (np.asarray(x, np.float32) for x in (one, other))
    assert one.shape == other.shape
    np.testing.assert_allclose(one, other, atol=ERROR[dtype] * max(1, np.abs(other).max()), rtol=0)


@EXACT
@cases
def test_what_is_mixed(case, dtype):
    qkv, past, mask, keep = given(case, dtype)
    flat = attention._flat(qkv, past, mask, keep)
    mixed = kernels.attend(*flat, heads=case.heads, rate=case.rate, interpret=True)
    plain = attention._plain_mix(case.heads, case.rate, qkv, past, mask, keep)
    close(mixed.reshape(plain.shape), plain, dtype)


@EXACT
@cases
def test_gradients_of_projections_and_of_the_past(case, dtype):
    qkv, past, mask, keep = given(case, dtype)
    gradient = jnp.asarray(
        np.random.default_rng(1).normal(size=(*qkv.shape[:3], case.heads * case.size)), dtype
    )
    flat = attention._flat(qkv, past, mask, keep)
    of_qkv, of_past = kernels.pull_attend(
        *flat, gradient.reshape(*flat[0].shape[:2], -1),
        heads=case.heads, rate=case.rate, interpret=True,
    )  # fmt: skip

    def plain(qkv, *past_):
        after = None if past is None else Past(*past_, past.turn)
        return attention._plain_mix(case.heads, case.rate, qkv, after, mask, keep)

    inputs = (qkv,) if past is None else (qkv, past.keys, past.values)
    expected = jax.vjp(plain, *inputs)[1](gradient)
    for one, other in zip((of_qkv, *of_past), expected, strict=True):
        close(one.reshape(other.shape), other, dtype)


def branches_given(step, dtype, seed=0, *, window=4, roots=21):
    """What `attention.mix_branches` takes, for roots that follow each other."""
    rng = np.random.default_rng(seed)
    batch, agents, heads, size, steps = 2, 3, 2, 32, 4
    places = roots + window - 1
    ahead = np.arange(places)[None] - np.arange(roots)[:, None]
    near = (ahead >= 0) & (ahead < window)

    def normals(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    limb = Limb(*(normals(batch, agents, heads, places, size) for _ in range(2)))
    twigs = Twigs(*(normals(batch, agents, heads, roots, steps, size) for _ in range(2)))
    return (
        normals(batch, agents, roots, 3 * heads * size), limb, twigs,
        jnp.asarray(near & (rng.random((batch, roots, places)) < 0.6)), jnp.arange(steps) < step,
        turns(jnp.arange(roots) + 3, size), jnp.asarray(step),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("step", "window", "roots"),
    [(2, 4, 21), *(pytest.param(*each, marks=pytest.mark.slow)
                   for each in ((0, 4, 21), (3, 16, 64), (1, 17, 40), (2, 30, 33), (3, 4, 1)))],
)  # fmt: skip
@EXACT
def test_branches(step, window, roots, dtype):
    """Roots in one program and in several, which programs fill and do not; short and long
    windows."""
    given = branches_given(step, dtype, window=window, roots=roots)
    mixed, grown = kernels.mix_branches(*given, window=window, interpret=True)
    plain, expected = attention._plain_mix_branches(*given)
    close(mixed, plain, dtype)
    for one, other in zip(grown, expected, strict=True):
        close(one, other, dtype)


@EXACT
def test_branches_read_nothing_that_was_never_written(dtype):
    """It may be no number."""
    qkv, limb, twigs, *rest = branches_given(2, dtype)
    spoilt = Twigs(*(leaf.at[..., 2:, :].set(jnp.nan) for leaf in twigs))
    run = functools.partial(kernels.mix_branches, window=4, interpret=True)
    for mix in (run, attention._plain_mix_branches):
        mixed, grown = mix(qkv, limb, spoilt, *rest)
        expected, _ = mix(qkv, limb, twigs, *rest)
        assert np.isfinite(np.asarray(mixed, np.float32)).all()
        np.testing.assert_array_equal(mixed, expected)
        assert all(np.isfinite(np.asarray(leaf[..., 2, :], np.float32)).all() for leaf in grown)


@pytest.mark.slow
def test_one_record_sees_itself_alone():
    """A window of one: there is a past, of no records."""
    model = cast(TemporalTransformer(1, 64, 2, 1, key=jax.random.key(0)), jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (1, 2, 3, 64), jnp.bfloat16)
    episode, past = jnp.zeros((1, 3), jnp.int32), model.empty(1, 2, jnp.bfloat16)
    together, _ = model(x, episode, past)
    for t in range(3):
        alone, _ = model(x[:, :, t : t + 1], episode[:, :1], past)
        close(together[:, :, t], alone[:, :, 0], jnp.bfloat16)


@pytest.mark.slow
def test_a_past_of_another_type_has_gradients_of_that_type():
    qkv, past, mask, keep = given(CASES[0], jnp.bfloat16)
    past = Past(*(leaf.astype(jnp.float32) for leaf in past[:2]), past.turn)

    def run(keys):
        after = past._replace(keys=keys)
        mixed = attention.mix(qkv, after, mask, keep, heads=CASES[0].heads, rate=CASES[0].rate)
        return jnp.sum(mixed.astype(jnp.float32))

    gradient = jax.grad(run)(past.keys)
    assert gradient.dtype == jnp.float32 and np.any(gradient)


@pytest.mark.slow
def test_branches_of_several_runs_at_once():
    runs = [branches_given(2, jnp.float32, seed) for seed in range(2)]
    together = jax.tree.map(lambda *each: jnp.stack(each), *runs)
    mixed, grown = jax.vmap(functools.partial(kernels.mix_branches, window=4, interpret=True))(
        *together
    )
    for number, one in enumerate(runs):
        plain, expected = attention._plain_mix_branches(*one)
        close(mixed[number], plain, jnp.float32)
        for leaf, other in zip(grown, expected, strict=True):
            close(leaf[number], other, jnp.float32)


@pytest.mark.slow
def test_several_runs_at_once():
    case = CASES[0]
    given_each = [given(case, jnp.float32, seed)[0] for seed in range(3)]
    _, past, mask, keep = given(case, jnp.float32)

    def run(qkv):
        flat = attention._flat(qkv, past, mask, keep)
        return kernels.attend(*flat, heads=case.heads, rate=case.rate, interpret=True)

    together = jax.vmap(run)(jnp.stack(given_each))
    for one, other in zip(together, given_each, strict=True):
        close(one, run(other), jnp.float32)


@pytest.mark.slow
def test_gradients_are_those_of_the_plain_version_where_kernels_may_be_taken(monkeypatch):
    """On a platform without kernels, of numbers that kernels are for."""
    model = TemporalTransformer(2, 64, 2, 6, dropout=0.1, key=jax.random.key(0))
    model, past = cast(model, jnp.bfloat16), model.empty(2, 3, jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (2, 3, 8, 64), jnp.bfloat16)
    episode = jnp.asarray([[0, 0, 0, 1, 1, 1, 1, 1], [0] * 8])

    def loss(model, x, keys, key):
        y, _ = model(x, episode, past._replace(keys=keys), key=key)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    def gradients(key):
        keys = tuple(leaf + 0.5 for leaf in past.keys)
        return jax.jit(jax.grad(loss, (0, 1, 2)))(model, x, keys, key)

    for key in (None, jax.random.key(2)):
        chosen = gradients(key)
        with monkeypatch.context() as patch:
            patch.setenv(gpu.SWITCH, "0")
            plain = gradients(key)
        for one, other in zip(jax.tree.leaves(chosen), jax.tree.leaves(plain), strict=True):
            close(one, other, jnp.bfloat16)


@pytest.mark.parametrize(("length", "size"), [(8, "least"), (24, "all")])
def test_a_program_for_gpus_has_kernels(monkeypatch, length, size):
    """For attention, and with gradients for its way back too; few records have few threads."""
    model = cast(TemporalTransformer(1, 128, 2, 6, key=jax.random.key(0)), jnp.bfloat16)
    past = model.empty(2, 3, jnp.bfloat16)
    x = jnp.zeros((2, 3, length, 128), jnp.bfloat16)
    episode = jnp.zeros((2, length), jnp.int32)

    def run(model, x):
        return jnp.sum(model(x, episode, past)[0].astype(jnp.float32))

    def names(function):
        # A function that was traced before would not be traced again.
        text = str(jax.make_jaxpr(functools.partial(function))(model, x))
        return set(re.findall(r"\bname=((?:pull_)?attend_\w+)\b", text))

    assert names(run) == {f"attend_{size}"}
    assert names(jax.grad(run, 1)) == {f"attend_{size}", f"pull_attend_{size}"}
    monkeypatch.setenv(gpu.SWITCH, "0")
    assert not names(run)


@pytest.mark.parametrize(
    ("length", "before", "size", "expected"),
    [(64, 15, 64, True), (40, 0, 64, True), (129, 0, 64, False), (8, 200, 64, False),
     (8, 4, 24, False), (8, 4, 16, False), (8, 4, 256, False)],
)  # fmt: skip
def test_sizes_that_programs_hold(length, before, size, expected):
    assert kernels.suits(length, before, size) == expected
