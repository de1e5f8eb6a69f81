"""Kernels for GPUs, run without one, against the recurrence that any machine can run."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn, jit

from majepa.config import DEBUG, LocalConfig
from majepa.nn.layers import cast
from majepa.nn.transformer import History
from majepa.world_model import fused, recurrence
from majepa.world_model.condense import Basis, condense_local
from majepa.world_model.local import LocalModel
from majepa.world_model.tokens import Tokens

ACTIONS = 5
SMALL = dataclasses.replace(
    DEBUG.local, width=64, heads=2, window=16, latents=16, classes=16, hidden=128, deterministic=96
)


def given_to(config: LocalConfig, batch: int, agents: int, length: int, seed: int = 0) -> tuple:
    """Everything that latents are drawn from; episodes begin anywhere, and the past too."""
    rng = np.random.default_rng(seed)
    local = drawn(lambda: LocalModel(4, ACTIONS, config, key=jax.random.key(0)), seed)
    is_first = rng.random((batch, length)) < 0.15
    heads, before = config.heads, config.window - 1
    shape = (config.layers, batch, agents, before, heads, config.width // heads)
    past = History(
        jnp.asarray(rng.normal(size=shape), jnp.float32),
        jnp.asarray(rng.normal(size=shape), jnp.float32),
        jnp.asarray(np.where(np.arange(before) < before // 3, -1, np.zeros((batch, 1))), jnp.int32),
    )
    latent = rng.integers(config.classes, size=(batch, length, agents, config.latents))
    tokens = Tokens(
        jnp.asarray(latent, jnp.int32),
        jnp.asarray(rng.integers(ACTIONS, size=(batch, length, agents)), jnp.int32),
        jnp.asarray(is_first),
        jnp.asarray(np.cumsum(is_first, axis=1), jnp.int32),
    )
    seen = jnp.asarray(rng.normal(size=(batch, length, agents, config.hidden)), jnp.float32)
    return local, seen, tokens, past


def in_half(local, seen, tokens, past) -> tuple:
    half = functools.partial(cast, dtype=jnp.bfloat16)
    return half(local), half(seen), tokens, History(*half(past[:2]), past.episode)


def one_by_one(draw, local, seen, tokens, past, key, begin=0):
    thin = condense_local(local, Basis(local.dynamics))
    return draw(thin.dynamics, thin.posterior, seen, tokens, past, key, jnp.asarray(begin))


def kernels(length: int):
    size = recurrence.chunk_size(length)
    return functools.partial(fused.sample_latents, size=size, interpret=True)


def both(given: tuple, key, begin: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Latents of kernels and of the plain recurrence."""
    length = given[2].is_first.shape[1]
    return tuple(
        np.asarray(jit(functools.partial(one_by_one, draw))(*given, key, begin))
        for draw in (kernels(length), recurrence._sample_latents)
    )  # type: ignore[return-value]


def stacked(*runs: tuple) -> tuple:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *runs)


class TestLatents:
    def test_they_are_the_same(self, key):
        """For rows that fill no tile, too."""
        found, expected = both(given_to(SMALL, 3, 3, 12), key)
        np.testing.assert_array_equal(found, expected)
        assert len(np.unique(found)) == SMALL.classes

    def test_from_a_later_chunk_on(self, key):
        """33 records are three chunks of 11; nothing is drawn for the first one."""
        found, expected = both(given_to(SMALL, 1, 2, 33, seed=1), key, begin=13)
        np.testing.assert_array_equal(found, expected)
        assert not found[:, :11].any() and found[:, 11:].any()

    def test_in_half_precision(self, key):
        given = in_half(*given_to(SMALL, 2, 2, 3))
        found, expected = both(given, key)
        assert np.mean(found == expected) > 0.95

    def test_of_packed_runs(self, key):
        runs = [given_to(SMALL, 2, 2, 4, seed=seed) for seed in (2, 3)]
        keys = jax.random.split(key, 2)
        found = jit(jax.vmap(functools.partial(one_by_one, kernels(4))))(*stacked(*runs), keys)
        for run, one, latent in zip(runs, keys, found, strict=True):
            np.testing.assert_array_equal(latent, both(run, one)[1])


def lower(function, *given):
    """As for a GPU: everything up to what its own compiler does."""
    check = jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
    return jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=[check])(
        *given
    ).mlir_module()


class TestLowering:
    @pytest.mark.parametrize("runs", [1, 2])
    def test_latents_at_full_size(self, runs):
        def draw(local, seen, tokens, past, key):
            return one_by_one(recurrence.sample_latents, local, seen, tokens, past, key)

        given = jax.eval_shape(
            lambda: (*in_half(*given_to(LocalConfig(), 2, 3, 64)), jax.random.key(0))
        )
        if runs > 1:
            draw = jax.vmap(draw)
            given = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((runs, *leaf.shape), leaf.dtype), given
            )
        kernels_of_layers = 5 * LocalConfig().layers
        assert lower(draw, *given).count("xla.gpu.triton") == 3 + kernels_of_layers


def test_they_are_for_half_precision_and_fitting_sizes():
    def has(config, convert=in_half):
        local = jax.eval_shape(lambda: convert(*given_to(config, 1, 1, 2)))[0]
        thin = jax.eval_shape(lambda local: condense_local(local, Basis(local.dynamics)), local)
        assert not recurrence._has_kernels(local.dynamics, local.posterior)
        return recurrence._has_kernels(thin.dynamics, thin.posterior)

    assert has(SMALL) and has(LocalConfig())
    assert not has(SMALL, lambda *given: given)
    assert not has(DEBUG.local)
    assert not has(dataclasses.replace(SMALL, hidden=96))
    assert not has(dataclasses.replace(SMALL, classes=10))
