"""SIGReg against its integral, its known values and a slow sum."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import jit
from scipy import integrate, stats

from majepa.world_model import sigreg as sigreg_module
from majepa.world_model.sigreg import sigreg

GAUSSIAN = 1.0525
"""Expected value for standard normal samples, whatever their number."""


@functools.partial(jit, static_argnames=("projections", "points", "limit"))
def statistic(e, valid, key, **sizes):
    return sigreg(e, valid, key, **sizes)


with_gradient = jit(jax.value_and_grad(functools.partial(sigreg, projections=16), argnums=0))


def single(samples: np.ndarray) -> float:
    """The statistic of one slot with one-dimensional samples, where directions do not matter."""
    e = jnp.asarray(samples, jnp.float32).reshape(1, -1, 1, 1)
    valid = jnp.ones(e.shape[:3], bool)
    return float(statistic(e, valid, jax.random.key(0), projections=1))


def slow(samples: np.ndarray, points: int = 17, limit: float = 3.0) -> float:
    """The trapezoid rule for one projected sample, doubled for the negative half line."""
    total, step = 0.0, limit / (points - 1)
    for k in range(points):
        t = k * step
        empirical = np.mean([complex(math.cos(t * u), math.sin(t * u)) for u in samples])
        gap = abs(empirical - math.exp(-(t**2) / 2)) ** 2 * math.exp(-(t**2) / 2)
        total += 2 * step * gap * (0.5 if k in (0, points - 1) else 1.0)
    return len(samples) * total


def normals(count: int) -> np.ndarray:
    """Quantiles of the standard normal distribution: samples without noise."""
    return stats.norm.ppf((np.arange(count) + 0.5) / count)


@pytest.mark.parametrize(
    ("samples", "per_sample"),
    [
        (np.zeros(1024), 0.40205),
        (0.5 * normals(4096), 0.151),
        (2.0 * normals(4096), 0.236),
        (normals(4096) + 1, 0.444),
    ],
    ids=["collapsed", "narrow", "wide", "shifted"],
)
def test_known_values_per_sample(samples, per_sample):
    digits = 5e-6 if not samples.any() else 6e-4
    assert single(samples) / len(samples) == pytest.approx(per_sample, abs=digits)


@pytest.mark.parametrize(("spread", "shift"), [(0.5, 0.0), (2.0, 0.0), (1.0, 1.0), (0.0, 0.0)])
def test_known_values_are_those_of_the_integral(spread, shift):
    def gap(t):
        samples = np.exp(1j * t * shift - (spread * t) ** 2 / 2)
        return abs(samples - np.exp(-(t**2) / 2)) ** 2 * np.exp(-(t**2) / 2)

    expected = integrate.quad(gap, -3, 3)[0]
    assert single(spread * normals(4096) + shift) / 4096 == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize(("size", "deviation"), [(8, 0.26), (32, 0.12)])
def test_gaussian_samples(size, deviation):
    """The mean over data sets is known to within the deviation of one of them."""
    sets, count = 32, 256
    rng = np.random.default_rng(0)
    e = jnp.asarray(rng.normal(size=(sets, 4, count // 4, 1, size)), jnp.float32)
    valid = jnp.ones((4, count // 4, 1), bool)
    keys = jax.random.split(jax.random.key(0), sets)
    values = jit(jax.vmap(lambda e, key: sigreg(e, valid, key)))(e, keys)
    expected = integrate.quad(lambda t: (1 - np.exp(-(t**2))) * np.exp(-(t**2) / 2), -3, 3)[0]
    assert pytest.approx(expected, rel=2e-3) == GAUSSIAN
    assert np.mean(values) == pytest.approx(GAUSSIAN, abs=4 * deviation / sets**0.5)
    assert np.std(values) == pytest.approx(deviation, rel=0.4)


def test_twice_the_samples_count_twice_when_collapsed():
    assert single(np.full(200, 0.7)) == pytest.approx(2 * single(np.full(100, 0.7)), rel=1e-5)


def test_one_dimension_against_a_slow_sum():
    samples = np.random.default_rng(1).normal(size=50) * 1.3 + 0.4
    assert single(samples) == pytest.approx(slow(samples), rel=1e-4)


def test_slots_and_directions_against_a_slow_sum(key):
    """Two slots with samples and one without; other numbers of points and frequencies."""
    rng = np.random.default_rng(2)
    e = (rng.normal(size=(4, 6, 3, 5)) * 1.5 + 0.3).astype(np.float32)
    valid = rng.random((4, 6, 3)) < 0.6
    valid[..., 1] = False
    value = statistic(jnp.asarray(e), jnp.asarray(valid), key, projections=7, points=9, limit=2.0)
    directions = np.asarray(jax.random.normal(key, (5, 7)), np.float64)
    directions /= np.sqrt((directions**2).sum(axis=0))
    per_slot = [
        np.mean([slow(e[..., i, :][valid[..., i]] @ a, 9, 2.0) for a in directions.T])
        for i in (0, 2)
    ]
    assert float(value) == pytest.approx(np.mean(per_slot), rel=1e-4)


def test_directions_are_drawn_anew_and_have_length_one(key):
    """Collapsed embeddings of length r give the mean of a function of |r| cos(angle)."""
    e = jnp.zeros((2, 8, 1, 4)).at[..., 0].set(2.0)
    valid = jnp.ones((2, 8, 1), bool)
    one, two = (float(statistic(e, valid, key, projections=4)) for key in jax.random.split(key))
    assert one != two
    many = float(statistic(e, valid, key, projections=1024))
    angles = np.random.default_rng(0).normal(size=(4096, 4))
    cosines = angles[:, 0] / np.sqrt((angles**2).sum(axis=1))
    assert many == pytest.approx(np.mean([slow(np.full(16, 2 * c)) for c in cosines]), rel=0.05)


def test_rotated_samples_are_as_gaussian(key):
    rng = np.random.default_rng(3)
    e = rng.normal(size=(4, 64, 1, 6)) * np.array([2, 1, 1, 0.3, 1, 1])
    rotation = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    valid = jnp.ones((4, 64, 1), bool)
    plain, turned = (
        float(statistic(jnp.asarray(x, jnp.float32), valid, key, projections=1024))
        for x in (e, e @ rotation)
    )
    assert plain == pytest.approx(turned, rel=0.05)
    assert plain > 3 * GAUSSIAN


class TestMask:
    def setup_method(self):
        rng = np.random.default_rng(4)
        self.e = rng.normal(size=(3, 5, 2, 4)).astype(np.float32)
        self.valid = rng.random((3, 5, 2)) < 0.5
        self.key = jax.random.key(2)

    def test_masked_samples_change_nothing(self):
        clean, clean_gradient = with_gradient(
            jnp.asarray(self.e), jnp.asarray(self.valid), self.key
        )
        junk = np.where(self.valid[..., None], self.e, 1e6 * (1 + self.e))
        value, gradient = with_gradient(jnp.asarray(junk), jnp.asarray(self.valid), self.key)
        assert value == clean
        np.testing.assert_array_equal(gradient, clean_gradient)
        assert not np.any(np.asarray(gradient)[~self.valid])
        assert np.all(np.asarray(gradient)[self.valid])

    def test_slots_without_samples_are_left_out(self):
        self.valid[:] = True
        alone, _ = with_gradient(
            jnp.asarray(self.e[:, :, :1]), jnp.asarray(self.valid[:, :, :1]), self.key
        )
        self.valid[..., 1] = False
        value, gradient = with_gradient(jnp.asarray(self.e), jnp.asarray(self.valid), self.key)
        assert float(value) == pytest.approx(float(alone), rel=1e-6)
        assert not np.any(gradient[:, :, 1])

    def test_no_samples_at_all_give_zero_and_no_gradient(self):
        self.valid[:] = False
        value, gradient = with_gradient(jnp.asarray(self.e), jnp.asarray(self.valid), self.key)
        assert value == 0
        np.testing.assert_array_equal(gradient, np.zeros_like(self.e))

    def test_slots_count_equally_whatever_their_number_of_samples(self):
        """Each slot is multiplied by its own count, then slots are averaged."""
        e = jnp.zeros((1, 30, 2, 1))
        valid = jnp.ones((1, 30, 2), bool).at[0, 10:, 1].set(False)
        value = statistic(e, valid, self.key, projections=2)
        assert float(value) == pytest.approx(0.40205 * (30 + 10) / 2, rel=1e-4)


def test_what_is_computed_again_on_the_way_back_is_the_same(monkeypatch):
    e = jnp.asarray(np.random.default_rng(5).normal(size=(2, 7, 3, 8)), jnp.float32)
    valid = jnp.asarray(np.random.default_rng(6).random((2, 7, 3)) < 0.8)

    def found():
        def anew(e):
            """Traced again: what it depends on is no argument."""
            return sigreg(e, valid, jax.random.key(1), projections=16)

        return jax.value_and_grad(anew)(e), "remat" in str(jax.make_jaxpr(jax.grad(anew))(e))

    kept, is_again = found()
    assert not is_again
    asked = []
    monkeypatch.setattr(
        sigreg_module, "may_take_kernels", lambda dtype: asked.append(dtype) or True
    )
    again, is_again = found()
    assert is_again
    assert set(asked) == {e.dtype}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), again, kept)
