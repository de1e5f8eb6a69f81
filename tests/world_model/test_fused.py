"""Kernels for GPUs, run without one, against the recurrence that any machine can run."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn, jit
from lowering import KERNEL, lower_for_gpus

from majepa.config import DEBUG, LocalConfig
from majepa.nn import gpu
from majepa.nn.layers import cast
from majepa.nn.transformer import History
from majepa.world_model import fused, recurrence
from majepa.world_model.condense import Basis, condense_local
from majepa.world_model.local import LocalModel
from majepa.world_model.strands import Tracks, as_they_lie
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
        *(tuple(jnp.asarray(rng.normal(size=shape), jnp.float32)) for _ in range(2)),
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
    """With noise of records that come from elsewhere."""
    thin = condense_local(local, Basis(local.dynamics))
    given = (thin.dynamics, thin.posterior, seen, tokens, past, key)
    sequence, time = as_they_lie(*tokens.is_first.shape)
    tracks = Tracks(sequence[::-1], time[:, ::-1])
    return draw(*given, tracks=tracks, begin=jnp.asarray(begin))


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

    @pytest.mark.slow
    @pytest.mark.parametrize("hidden", [64, 256])
    def test_of_other_proportions(self, key, hidden):
        """Hidden layers narrower and wider than what they read, and a head of several tiles."""
        config = dataclasses.replace(SMALL, width=128, heads=1, hidden=hidden)
        found, expected = both(given_to(config, 2, 2, 6, seed=4), key)
        np.testing.assert_array_equal(found, expected)

    @pytest.mark.slow
    def test_from_a_later_chunk_on(self, key):
        """33 records are three chunks of 11; nothing is drawn for the first one."""
        found, expected = both(given_to(SMALL, 1, 2, 33, seed=1), key, begin=13)
        np.testing.assert_array_equal(found, expected)
        assert not found[:, :11].any() and found[:, 11:].any()

    def test_other_machines_keep_to_the_plain_recurrence(self, key, monkeypatch):
        """Though there are kernels for what they are given; so do GPUs that are told to."""
        given = in_half(*given_to(SMALL, 2, 2, 4))
        draw = functools.partial(one_by_one, recurrence.sample_latents)
        expected = jit(functools.partial(one_by_one, recurrence._sample_latents))(*given, key)
        np.testing.assert_array_equal(jit(draw)(*given, key), expected)
        assert "triton" in lower_for_gpus(draw, *given, key)
        monkeypatch.setenv(gpu.SWITCH, "0")
        again = functools.partial(one_by_one, recurrence.sample_latents)
        assert "triton" not in lower_for_gpus(again, *given, key)

    @pytest.mark.slow
    def test_in_half_precision(self, key):
        given = in_half(*given_to(SMALL, 2, 2, 8))
        found, expected = both(given, key)
        assert np.mean(found == expected) > 0.95

    @pytest.mark.slow
    def test_of_packed_runs(self, key):
        runs = [given_to(SMALL, 2, 2, 4, seed=seed) for seed in (2, 3)]
        keys = jax.random.split(key, 2)
        found = jit(jax.vmap(functools.partial(one_by_one, kernels(4))))(*stacked(*runs), keys)
        for run, one, latent in zip(runs, keys, found, strict=True):
            np.testing.assert_array_equal(latent, both(run, one)[1])


def gradients(back_through, local, seen, tokens, past, sent):
    """Of latents, from gradients of what the records' states are read by."""
    dynamics, posterior = local.dynamics, local.posterior
    h, q = sent
    followed, passed = recurrence._all_at_once(dynamics, posterior, seen, tokens, past)
    sent = recurrence.Followed(h.astype(followed.h.dtype), q, followed.history)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrence, "_back_through", back_through)
        patch.setenv(gpu.SWITCH, "0")
        return recurrence._gradients_of_latents(
            dynamics, posterior, seen, passed, tokens.is_first, sent
        )


WAYS = {
    "plain": recurrence._back_through,
    "kernels": functools.partial(fused.back_through, interpret=True),
}


def sent_to(config: LocalConfig, batch: int, agents: int, length: int) -> tuple:
    rng = np.random.default_rng(5)
    lead = (batch, length, agents)
    shapes = (*lead, config.deterministic), (*lead, config.latents, config.classes)
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


def ways_back(given: tuple, sent: tuple) -> tuple[np.ndarray, np.ndarray]:
    return tuple(
        np.asarray(jit(functools.partial(gradients, WAYS[name]))(*given, sent), np.float64)
        for name in ("kernels", "plain")
    )  # type: ignore[return-value]


class TestGradients:
    @pytest.mark.slow
    def test_they_are_the_same(self):
        """More records than a window holds, and rows that fill no tile."""
        config = dataclasses.replace(SMALL, window=8)
        found, expected = ways_back(given_to(config, 2, 3, 16), sent_to(config, 2, 3, 16))
        assert not expected[:, -1].any() and np.all(np.any(expected[:, :-1], axis=(0, 2, 3, 4)))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())

    @pytest.mark.slow
    def test_in_half_precision(self):
        given, sent = in_half(*given_to(SMALL, 1, 2, 16)), sent_to(SMALL, 1, 2, 16)
        found, expected = ways_back(given, sent)
        exact = ways_back(given_to(SMALL, 1, 2, 16), sent)[1]
        off, plain_off = (np.linalg.norm(some - exact) for some in (found, expected))
        assert off < 1.5 * plain_off < 0.1 * np.linalg.norm(exact)

    @pytest.mark.slow
    def test_of_packed_runs(self):
        runs = [given_to(SMALL, 1, 2, 16, seed=seed) for seed in (2, 3)]
        sent = sent_to(SMALL, 1, 2, 16)
        found, expected = (
            np.asarray(jit(jax.vmap(functools.partial(gradients, WAYS[name])))(
                *stacked(*runs), stacked(sent, sent)
            ))
            for name in ("kernels", "plain")
        )  # fmt: skip
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
class TestLowering:
    """One kernel more or less per record is something to know of."""

    FULL = LocalConfig()
    KERNELS = 3 + 5 * FULL.layers

    def given(self, runs: int) -> tuple:
        given = jax.eval_shape(
            lambda: (*in_half(*given_to(self.FULL, 2, 3, 64)), jax.random.key(0))
        )
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((runs, *leaf.shape), leaf.dtype), given
        )

    @pytest.mark.parametrize("runs", [1, 2])
    def test_latents_at_full_size(self, runs):
        draw = jax.vmap(functools.partial(one_by_one, recurrence.sample_latents))
        lowered = lower_for_gpus(draw, *self.given(runs))
        # A record's token and its entry into the first layer are one kernel.
        assert lowered.count(KERNEL) == self.KERNELS

    @pytest.mark.parametrize("runs", [1, 2])
    def test_gradients_at_full_size(self, runs):
        def loss(local, seen, tokens, past):
            found = recurrence.follow_latents(local.dynamics, local.posterior, seen, tokens, past)
            return jnp.sum(found.h.astype(jnp.float32) ** 2) + jnp.sum(found.q**2)

        lowered = lower_for_gpus(jax.vmap(jax.grad(loss)), *self.given(runs)[:-1])
        assert lowered.count(KERNEL) == self.KERNELS


def test_they_are_for_half_precision_and_fitting_sizes():
    def has(config, convert=in_half):
        local = jax.eval_shape(lambda: convert(*given_to(config, 1, 1, 2)))[0]
        thin = jax.eval_shape(lambda local: condense_local(local, Basis(local.dynamics)), local)
        assert not fused.suits(local.dynamics, local.posterior), "not condensed"
        return fused.suits(thin.dynamics, thin.posterior)

    assert has(SMALL) and has(LocalConfig())
    assert not has(SMALL, lambda *given: given)
    assert not has(DEBUG.local)
    assert not has(dataclasses.replace(SMALL, hidden=96))
    assert not has(dataclasses.replace(SMALL, classes=10))
    assert not has(dataclasses.replace(LocalConfig(), width=1024, hidden=2048))


@pytest.mark.parametrize(("length", "expected"), [(16, True), (14, False)])
def test_the_way_back_is_for_fitting_lengths(length, expected):
    given = jax.eval_shape(lambda: in_half(*given_to(SMALL, 1, 1, length)))
    local = given[0]
    passed = jax.eval_shape(
        lambda local, *rest: recurrence._all_at_once(local.dynamics, local.posterior, *rest)[1],
        *given,
    )
    assert fused.suits_back(local.dynamics, local.posterior, passed) == expected


@pytest.mark.parametrize(
    ("capability", "expected"),
    [("9.0", True), ("10.0", True), ("7.5", False), ("8.0", False), ("12.0", False), ("", False)],
)
def test_cards_that_kernels_fit_on(capability, expected):
    assert gpu.has_room(capability) == expected
