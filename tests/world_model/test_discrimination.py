"""Discrimination of the pairs that count is that of all pairs, predicted one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import plain
import pytest
from drawn import drawn, jit

from majepa.config import DEBUG
from majepa.nn.layers import cast
from majepa.packing import packed
from majepa.world_model import discrimination
from majepa.world_model.discrimination import Asked, discriminate, places
from majepa.world_model.joint import AheadHead
from majepa.world_model.pairs import pairs_of

HORIZONS, ROOTS, ACTIONS, EMBEDDING = (2, 4), 12, 10, 16
CONFIG = DEBUG.joint
EVERY = ROOTS * ACTIONS
MARGIN = jnp.asarray(0.4)
OUTER = (0.7, 0.3)


@pytest.fixture(autouse=True)
def small_branches(monkeypatch):
    """Places for 16, 32, 64, 88 and 120 pairs."""
    monkeypatch.setattr(discrimination, "LEAST_PLACES", 1)


@functools.cache
def asked(seed: int = 0) -> list[Asked]:
    rng = np.random.default_rng(seed)

    def normals(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return [
        Asked(
            drawn(functools.partial(
                AheadHead, horizon, ACTIONS, EMBEDDING, CONFIG, key=jax.random.key(0)
            ), seed + horizon),
            u=normals(ROOTS, CONFIG.width),
            tail=jnp.asarray(rng.integers(0, ACTIONS, (ROOTS, horizon - 1)), jnp.int32),
            target=normals(ROOTS, EMBEDDING),
            similar=normals(ROOTS) / 4,
            counted=jnp.zeros((ROOTS, ACTIONS), bool),
        )
        for horizon in HORIZONS
    ]  # fmt: skip


def counting(numbers: tuple[int, ...], seed: int = 0) -> list[Asked]:
    """So many pairs of each horizon count, any of them."""
    rng = np.random.default_rng(seed)
    masks = [rng.permutation(EVERY).reshape(ROOTS, ACTIONS) < number for number in numbers]
    both = zip(asked(seed), masks, strict=True)
    return [each._replace(counted=jnp.asarray(mask)) for each, mask in both]


def with_gradients(discriminate):
    """Means, their weighted sum, and its gradients for all that is not a mask or an action."""

    def total(moving, fixed, margin):
        both = zip(moving, fixed, strict=True)
        given = [
            each._replace(head=head, u=u, target=target, similar=similar)
            for (head, u, target, similar), each in both
        ]
        means = discriminate(given, margin)
        return sum(weight * mean for weight, mean in zip(OUTER, means, strict=True)), means

    def compute(given, margin=MARGIN):
        moving = [(each.head, each.u, each.target, each.similar) for each in given]
        return jax.value_and_grad(total, argnums=(0, 2), has_aux=True)(moving, given, margin)

    return compute


def fresh():
    """Compiled anew: numbers of places are read when a program is traced."""
    return jit(with_gradients(discriminate))


PLAIN = jit(with_gradients(plain.discriminate))


def assert_close(found, expected, share: float = 1e-5) -> None:
    """Up to a share of the largest entry of each tensor."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        error = np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64)).max()
        assert error <= share * max(np.abs(other).max(), 1e-3)


@pytest.fixture(scope="module")
def compute():
    return fresh()


NUMBERS = [
    (0, 0), (1, 0), (0, 40), (16, 9), (17, 16), (5, 32), (33, 1), (64, 64), (65, 2),
    (3, 88), (89, 50), (EVERY - 1, 3), (EVERY, EVERY),
]  # fmt: skip


class TestAgainstEveryPair:
    @pytest.mark.parametrize("numbers", NUMBERS, ids=str)
    def test_values_and_gradients(self, compute, numbers):
        assert places(EVERY) == (16, 32, 64, 88, EVERY)
        given = counting(numbers, sum(numbers))
        (_, means), gradients = found = compute(given)
        assert_close(found, PLAIN(given))
        for number, mean, (head, *_) in zip(numbers, means, gradients[0], strict=True):
            if number == 0 or number > 8:
                assert (mean > 0) == (number > 0)
                assert np.any(head.mlp.linears[0].weight) == (number > 0)

    @pytest.mark.parametrize("size", [16, 32, 64, 88, EVERY])
    def test_every_number_of_places(self, monkeypatch, size):
        """Sixteen pairs fit into all of them."""
        monkeypatch.setattr(discrimination, "SHARES", (size / EVERY,))
        monkeypatch.setattr(discrimination, "LEAST_PLACES", size)
        assert places(EVERY)[0] == size
        given = counting((16, 7))
        assert_close(fresh()(given), PLAIN(given))

    def test_a_root_without_alternatives_is_not_in_the_mean(self, compute):
        counted = jnp.zeros((ROOTS, ACTIONS), bool).at[3, :2].set(True).at[7, 4].set(True)
        given = [each._replace(counted=counted) for each in asked()]
        (_, means), _ = compute(given)
        for each, mean in zip(given, means, strict=True):
            similar = plain.similarities(each.head, each.u, each.tail, each.target)
            hinge = np.maximum(MARGIN - each.similar[:, None] + similar, 0)
            expected = (hinge[3, :2].mean() + hinge[7, 4]) / 2
            assert float(mean) == pytest.approx(float(expected), rel=1e-4, abs=1e-6)

    def test_values_without_gradients_are_the_same(self, compute):
        given = counting((20, 30))
        (_, means), _ = compute(given)
        np.testing.assert_allclose(jit(discriminate)(given, MARGIN), means, rtol=1e-6)

    def test_in_half_precision(self):
        """As near to the exact gradients as the plain version is."""
        given = counting((60, 30))

        def half(given):
            return [
                each._replace(head=cast(each.head, jnp.bfloat16), u=each.u.astype(jnp.bfloat16))
                for each in given
            ]

        exact = jax.tree.leaves(PLAIN(given)[1][0])

        def distance(compute):
            found = jax.tree.leaves(compute(half(given))[1][0])
            errors = (
                np.linalg.norm(np.asarray(one, np.float64) - other) / np.linalg.norm(other)
                for one, other in zip(found, exact, strict=True)
            )
            return max(errors)

        assert distance(fresh()) < 1.5 * distance(PLAIN)


class TestWhatDoesNotCount:
    def test_other_roots_have_no_influence(self, compute):
        """Whatever roots without a pair hold, the first one among them."""
        given = counting((20, 30))
        given = [each._replace(counted=each.counted.at[0].set(False)) for each in given]
        free = [~np.asarray(each.counted).any(axis=1) for each in given]

        def junk(each: Asked, mask: np.ndarray, scale: float) -> Asked:
            def filled(leaf):
                here = mask.reshape(-1, *[1] * (leaf.ndim - 1))
                return jnp.where(here, scale * jnp.ones_like(leaf), leaf)

            return each._replace(
                u=filled(each.u), target=filled(each.target), similar=filled(each.similar),
                tail=jnp.where(mask[:, None], 0, each.tail),
            )  # fmt: skip

        (total, means), gradients = compute(given)
        for scale in (0.0, -1e4, 1e4):
            changed = [junk(*both, scale) for both in zip(given, free, strict=True)]
            found = compute(changed)
            jax.tree.map(np.testing.assert_array_equal, found, ((total, means), gradients))
        for (_, *of_roots), mask in zip(gradients[0], free, strict=True):
            assert not any(np.any(leaf[mask]) for leaf in of_roots)
            assert all(np.all(np.isfinite(leaf)) for leaf in of_roots)

    def test_an_action_that_never_counts_gets_no_gradient(self, compute):
        given = counting((70, 50))
        given = [each._replace(counted=each.counted.at[:, 2].set(False)) for each in given]
        for head, *_ in compute(given)[1][0]:
            rows = head.mlp.linears[0].weight[-ACTIONS:]
            np.testing.assert_array_equal(np.any(rows, axis=1), np.arange(ACTIONS) != 2)


class TestPackedRuns:
    NUMBERS = ((3, 5), (EVERY, 20), (0, 0), (40, 33))

    def given(self):
        runs = [counting(numbers, seed) for seed, numbers in enumerate(self.NUMBERS)]
        return runs, jax.tree.map(lambda *leaves: jnp.stack(leaves), *runs)

    def test_each_is_as_if_it_were_alone(self, compute):
        runs, together = self.given()
        found = jit(packed(with_gradients(discriminate)))(together)
        for place, given in enumerate(runs):
            own = jax.tree.map(lambda leaf: leaf[place], found)  # noqa: B023
            assert_close(own, compute(given))
            assert_close(own, PLAIN(given))

    def test_one_branch_runs_for_all(self):
        _, together = self.given()
        program = jax.make_jaxpr(packed(with_gradients(discriminate)))(together)
        branches = [step for step in program.eqns if step.primitive.name == "cond"]
        assert [len(step.params["branches"]) for step in branches] == [5]
        assert branches[0].invars[0].aval.shape == ()


def test_nothing_is_kept_for_the_way_back_but_gradients():
    """Not even room for all pairs leaves a branch."""
    given = counting((3, 5))
    program = jax.make_jaxpr(with_gradients(discriminate))(given)
    (branch,) = [step for step in program.eqns if step.primitive.name == "cond"]
    hidden = CONFIG.hidden
    assert max(out.aval.size for out in branch.outvars) <= max(ROOTS * hidden, hidden**2)


def test_few_pairs_have_one_branch(monkeypatch):
    monkeypatch.undo()
    assert places(EVERY) == (EVERY,)
    assert places(49_280) == (6160, 12_320, 24_640, 36_960, 49_280)


def test_pairs_lie_in_order():
    counted = np.random.default_rng(0).random((ROOTS, ACTIONS)) < 0.4
    pairs = jit(pairs_of)(jnp.asarray(counted))
    expected = np.argwhere(counted)
    number = len(expected)
    np.testing.assert_array_equal(np.stack([pairs.root, pairs.action], 1)[:number], expected)
    np.testing.assert_array_equal(np.asarray(pairs.place)[counted], np.arange(number))
    assert pairs.root.shape == (EVERY,)
    assert ((pairs.root >= 0) & (pairs.root < ROOTS)).all()
    assert ((pairs.action >= 0) & (pairs.action < ACTIONS)).all()
    assert ((pairs.place >= 0) & (pairs.place < max(number, 1))).all()
