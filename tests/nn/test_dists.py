"""Distributions against slow re-implementations in double precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from majepa.config import BinsConfig
from majepa.nn import dists
from majepa.nn.dists import TwoHot

PAPER = TwoHot(BinsConfig())
BINS = np.sign(np.linspace(-5, 5, 255)) * np.expm1(np.abs(np.linspace(-5, 5, 255)))


def normals(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def gradient_of(function, x: jax.Array) -> np.ndarray:
    """Of the sum of a function's results."""
    return np.asarray(jax.jit(jax.grad(lambda x: jnp.sum(function(x))))(x))


@functools.cache
def jitted(name: str):
    return jax.jit(getattr(dists, name))


def unimix(logits: np.ndarray, share: float) -> jax.Array:
    return jax.jit(dists.unimix, static_argnames="share")(jnp.asarray(logits), share=share)


class TestSymlog:
    def test_values(self):
        x = jnp.array([-np.e + 1, -1e-6, 0, 1e-6, np.e - 1, 1e6])
        expected = np.sign(x) * np.log1p(np.abs(np.asarray(x, np.float64)))
        np.testing.assert_allclose(jitted("symlog")(x), expected, rtol=1e-6)

    def test_symexp_inverts_it(self):
        x = jnp.asarray(normals(50, scale=30))
        np.testing.assert_allclose(jitted("symexp")(jitted("symlog")(x)), x, rtol=1e-5)


class TestLatent:
    def test_unimix_against_numpy(self):
        logits = normals(3, 4, 8, scale=3)
        expected = np.log(0.9 * softmax(logits) + 0.1 / 8)
        np.testing.assert_allclose(unimix(logits, 0.1), expected, rtol=1e-5, atol=1e-6)

    def test_no_class_falls_below_its_share(self):
        log_probs = unimix(normals(100, 32, 64, scale=200), 0.01)
        probs = np.exp(np.asarray(log_probs, np.float64))
        assert probs.min() >= 0.01 / 64 * (1 - 1e-6)
        np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-5)

    def test_a_share_of_zero_is_the_softmax(self):
        logits = normals(2, 3, 5, scale=50)
        np.testing.assert_allclose(
            unimix(logits, 0.0), jax.nn.log_softmax(jnp.asarray(logits)), rtol=1e-6
        )

    @pytest.mark.parametrize("share", [0.0, 0.01])
    def test_unimix_has_finite_gradients_at_extreme_logits(self, share):
        logits = jnp.array([[1e4, 0, -1e4], [0, 0, 0]])
        gradient = gradient_of(lambda x: dists.unimix(x, share)[..., 0], logits)
        assert np.isfinite(gradient).all()

    def test_samples_follow_the_distribution(self, key):
        probs = np.array([[0.1, 0.2, 0.7], [0.5, 0.5, 0.0]])
        log_probs = jnp.broadcast_to(jnp.log(jnp.asarray(probs)), (20_000, 2, 3))
        index = np.asarray(jitted("sample_index")(log_probs, key))
        assert index.shape == (20_000, 2)
        frequencies = np.stack([np.mean(index == k, axis=0) for k in range(3)], axis=-1)
        np.testing.assert_allclose(frequencies, probs, atol=0.015)
        assert frequencies[1, 2] == 0

    def test_samples_by_one_number_follow_the_distribution(self):
        probs = np.array([[0.1, 0.2, 0.7], [0.5, 0.0, 0.5]])
        noise = (np.arange(1000)[:, None] + [0.25, 0.75]) / 1000
        log_probs = jnp.broadcast_to(jnp.log(jnp.asarray(probs)), (1000, 2, 3))
        index = np.asarray(jitted("sample_by")(log_probs, noise))
        frequencies = np.stack([np.mean(index == k, axis=0) for k in range(3)], axis=-1)
        np.testing.assert_allclose(frequencies, probs, atol=2e-3)
        assert frequencies[1, 1] == 0

    def test_samples_at_the_ends(self):
        """Zero and one, or less than one by rounding alone."""
        log_probs = jnp.log(jnp.array([[0.0, 0.3, 0.7], [0.4, 0.6, 0.0]]))
        index = dists.sample_by(log_probs, jnp.zeros(2))
        np.testing.assert_array_equal(index, [1, 0])
        for last in (1.0, np.nextafter(np.float32(1), np.float32(0))):
            found = dists.sample_by(log_probs[:1], jnp.full(1, last))
            np.testing.assert_array_equal(found, [2])

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_straight_through_is_exactly_one_hot(self, key, dtype):
        @jax.jit
        def sample(logits):
            log_probs = dists.unimix(logits, 0.01).astype(dtype)
            index = dists.sample_index(log_probs, key)
            return index, dists.straight_through(log_probs, index)

        index, one_hot = sample(jnp.asarray(normals(500, 8, 16, scale=4)))
        assert one_hot.dtype == dtype
        np.testing.assert_array_equal(one_hot, np.eye(16)[np.asarray(index)])

    def test_straight_through_has_the_gradient_of_the_probabilities(self, key):
        logits, cotangent = jnp.asarray(normals(5, 3, 4)), jnp.asarray(normals(5, 3, 4, seed=1))
        index = jax.random.randint(key, (5, 3), 0, 4)

        def sampled(x):
            return cotangent * dists.straight_through(dists.unimix(x, 0.01), index)

        def expected(x):
            return cotangent * (0.99 * jax.nn.softmax(x) + 0.01 / 4)

        np.testing.assert_allclose(
            gradient_of(sampled, logits), gradient_of(expected, logits), rtol=1e-4, atol=1e-6
        )

    def test_kl_sums_over_variables(self):
        log_p, log_q = unimix(normals(6, 4, 8), 0.01), unimix(normals(6, 4, 8, seed=1), 0.01)
        p, q = (np.exp(np.asarray(x, np.float64)) for x in (log_p, log_q))
        expected = np.zeros(6)
        for b in range(6):
            for s in range(4):
                expected[b] += sum(p[b, s, k] * np.log(p[b, s, k] / q[b, s, k]) for k in range(8))
        np.testing.assert_allclose(jitted("kl")(log_p, log_q), expected, rtol=1e-4)
        np.testing.assert_array_equal(jitted("kl")(log_p, log_p), np.zeros(6))

    def test_free_nats_cut_the_gradient(self):
        near = unimix(normals(1, 4, 8, scale=0.01), 0.01)
        far = unimix(normals(1, 4, 8, scale=5), 0.01)

        def clamped(log_q):
            return jnp.maximum(1.0, dists.kl(jnp.concatenate([near, far]), log_q))

        gradient = gradient_of(clamped, jnp.full((2, 4, 8), -np.log(8)))
        assert not np.any(gradient[0]) and np.all(gradient[1])


class TestLegalActions:
    LEGAL = np.array([[1, 0, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]], bool)

    def test_only_legal_actions_have_probability(self):
        logits = normals(3, 4, scale=10)
        probs = np.exp(jitted("masked_log_probs")(logits, self.LEGAL))
        for row in range(2):
            legal = self.LEGAL[row]
            np.testing.assert_allclose(probs[row, legal], softmax(logits[row, legal]), rtol=1e-5)
            assert not probs[row, ~legal].any()
        np.testing.assert_allclose(probs[2], 0.25, rtol=1e-6)

    def test_entropy_of_legal_actions(self):
        log_probs = jitted("masked_log_probs")(normals(3, 4), self.LEGAL)
        p = softmax(normals(3, 4)[0, self.LEGAL[0]])
        expected = [-(p * np.log(p)).sum(), 0, np.log(4)]
        np.testing.assert_allclose(jitted("entropy")(log_probs), expected, rtol=1e-5, atol=1e-7)

    def test_entropy_gradient_is_that_of_the_legal_actions_alone(self):
        logits = jnp.asarray(normals(3, 4))

        def masked(x):
            return dists.entropy(dists.masked_log_probs(x, jnp.asarray(self.LEGAL)))

        def bare(x):
            return dists.entropy(jax.nn.log_softmax(x))

        gradient = gradient_of(masked, logits)
        expected = gradient_of(bare, logits[0, self.LEGAL[0]])
        np.testing.assert_allclose(gradient[0, self.LEGAL[0]], expected, rtol=1e-4, atol=1e-7)
        assert not gradient[~self.LEGAL].any()

    def test_entropy_survives_minus_infinity(self):
        log_probs = jnp.log(jnp.array([0.5, 0.5, 0.0]))
        value, gradient = jax.jit(jax.value_and_grad(dists.entropy))(log_probs)
        np.testing.assert_allclose(value, np.log(2), rtol=1e-6)
        assert np.isfinite(gradient).all()

    def test_log_prob_of_picks_the_action(self):
        log_probs, action = jnp.asarray(normals(2, 3, 4)), jnp.array([[0, 3, 1], [2, 2, 0]])
        picked = jitted("log_prob_of")(log_probs, action)
        for row, column in np.ndindex(2, 3):
            assert picked[row, column] == log_probs[row, column, action[row, column]]


encode = jax.jit(PAPER.encode)
mean = jax.jit(PAPER.mean)


class TestTwoHot:
    def test_weights_against_a_search(self):
        x = normals(300, scale=40)
        weights = np.asarray(encode(jnp.asarray(x)))
        for value, row in zip(x, weights, strict=True):
            below = np.searchsorted(BINS, value) - 1
            share = (value - BINS[below]) / (BINS[below + 1] - BINS[below])
            expected = np.zeros(255)
            expected[below : below + 2] = 1 - share, share
            np.testing.assert_allclose(row, expected, atol=2e-5)

    def test_weights_are_two_neighbours_and_sum_to_one(self):
        weights = np.asarray(encode(jnp.asarray(normals(2000, scale=60))))
        assert weights.min() >= 0
        np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
        for row in weights:
            used = np.flatnonzero(row)
            assert len(used) <= 2 and np.ptp(used) <= 1

    @pytest.mark.parametrize("count", [3, 15, 63, 255])
    def test_round_trip(self, count):
        two_hot = TwoHot(BinsConfig(count=count))
        small = np.concatenate([np.geomspace(1e-6, 100, 300), BINS[128:]])
        x = jnp.asarray(np.concatenate([-small, small, [0.0]]), jnp.float32)
        decoded = jax.jit(lambda x: two_hot.mean(jnp.log(two_hot.encode(x))))(x)
        np.testing.assert_allclose(decoded, x, rtol=1e-4)
        assert decoded[-1] == 0

    def test_a_bin_edge_is_that_bin(self):
        weights = np.asarray(encode(jnp.asarray(BINS, jnp.float32)))
        np.testing.assert_allclose(weights, np.eye(255), atol=1e-4)
        np.testing.assert_allclose(weights[[0, 127, 254], [0, 127, 254]], 1, rtol=1e-6)

    def test_values_outside_are_clipped(self):
        weights = np.asarray(encode(jnp.array([-1e6, 1e6, -jnp.inf, jnp.inf])))
        np.testing.assert_allclose(weights, np.eye(255)[[0, 254, 0, 254]], atol=1e-6)

    def test_zero_logits_mean_exactly_zero(self):
        for two_hot in (PAPER, TwoHot(BinsConfig(count=63)), TwoHot(BinsConfig(limit=20.0))):
            logits = jnp.zeros((3, 2, two_hot.bins.count))
            np.testing.assert_array_equal(jax.jit(two_hot.mean)(logits), np.zeros((3, 2)))

    def test_mean_against_numpy(self):
        logits = normals(20, 255)
        expected = (softmax(logits) * BINS).sum(-1)
        np.testing.assert_allclose(mean(jnp.asarray(logits)), expected, rtol=1e-4, atol=1e-4)

    def test_loss_is_the_cross_entropy(self):
        logits, target = normals(4, 5, 255), normals(4, 5, seed=1, scale=20)
        weights = np.asarray(encode(jnp.asarray(target)), np.float64)
        expected = -(weights * np.log(softmax(logits))).sum(-1)
        loss = jax.jit(PAPER.loss)(jnp.asarray(logits), jnp.asarray(target))
        np.testing.assert_allclose(loss, expected, rtol=1e-5)


class TestBits:
    def test_binary_cross_entropy_against_numpy(self):
        logits, target = normals(50, scale=5), np.random.default_rng(1).uniform(size=50)
        probs = 1 / (1 + np.exp(-logits.astype(np.float64)))
        expected = -target * np.log(probs) - (1 - target) * np.log1p(-probs)
        loss = jitted("binary_cross_entropy")(jnp.asarray(logits), jnp.asarray(target, jnp.float32))
        np.testing.assert_allclose(loss, expected, rtol=1e-5)

    def test_certain_logits_stay_finite_and_exact(self):
        logits, target = jnp.array([100.0, -100.0, 100.0, 1e6]), jnp.array([1.0, 0.0, 0.0, 0.0])
        loss = jitted("binary_cross_entropy")(logits, target)
        np.testing.assert_allclose(loss, [0, 0, 100, 1e6], rtol=1e-6, atol=1e-30)
        gradient = gradient_of(lambda x: dists.binary_cross_entropy(x, target), logits)
        np.testing.assert_allclose(gradient, [0, 0, 1, 1], atol=1e-6)

    def test_a_soft_target_is_the_optimum(self):
        target = jnp.array([1 - 1 / 333])
        logits = jnp.log(target / (1 - target))
        gradient = gradient_of(lambda x: dists.binary_cross_entropy(x, target), logits)
        np.testing.assert_allclose(gradient, 0, atol=1e-6)

    def test_balanced_cross_entropy_against_a_loop(self):
        logits, legal = normals(40, 6, scale=3), np.random.default_rng(2).random((40, 6)) < 0.3
        legal[0], legal[1] = False, True
        expected = []
        for row, mask in zip(logits.astype(np.float64), legal, strict=True):
            classes = []
            if mask.any():
                classes.append(np.mean([np.log1p(np.exp(-x)) for x in row[mask]]))
            if not mask.all():
                classes.append(np.mean([np.log1p(np.exp(x)) for x in row[~mask]]))
            expected.append(np.mean(classes))
        loss = jitted("balanced_cross_entropy")(jnp.asarray(logits), jnp.asarray(legal))
        np.testing.assert_allclose(loss, expected, rtol=1e-5)

    def test_one_class_alone_has_finite_gradients(self):
        legal = jnp.array([[False] * 5, [True] * 5])
        gradient = gradient_of(lambda x: dists.balanced_cross_entropy(x, legal), jnp.zeros((2, 5)))
        np.testing.assert_allclose(gradient, np.where(legal, -0.1, 0.1), rtol=1e-6)


def half_precision_results():
    half = functools.partial(jnp.zeros, dtype=jnp.bfloat16)
    legal = jnp.ones((3, 4), bool)
    return [
        dists.unimix(half((2, 3, 4)), 0.01),
        dists.kl(half((2, 3, 4)), half((2, 3, 4))),
        dists.masked_log_probs(half((3, 4)), legal),
        dists.entropy(half((3, 4))),
        dists.binary_cross_entropy(half(3), half(3)),
        dists.balanced_cross_entropy(half((3, 4)), legal),
        PAPER.encode(half(3)),
        PAPER.mean(half((3, 255))),
        PAPER.loss(half((3, 255)), half(3)),
    ]


def test_losses_of_half_precision_are_float32():
    assert {x.dtype for x in jax.eval_shape(half_precision_results)} == {np.dtype("float32")}
