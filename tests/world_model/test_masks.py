"""Every mask against loops over single entries, on random episodes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import jit
from episodes import ACTIONS, AGENTS, Slow, loop, random_record
from scipy import stats

from majepa.replay import Record
from majepa.world_model import masks
from majepa.world_model.self_fed import draw_roots, endpoint_masks
from majepa.world_model.targets import outcome_masks

BATCH, LENGTH, STEPS = 8, 14, 5
FARTHEST = 8
SEEDS = range(12)


def episodes_of(seed: int) -> Record:
    """Half of them with slots that come and go, which a fixed roster never has."""
    return random_record(seed, batch=BATCH, length=LENGTH, vanish=0.1 * (seed % 2))


@jit
def all_masks(record: Record, alive_before: jax.Array) -> dict[str, jax.Array]:
    found = {
        "inside": masks.inside_episode(record),
        "sources": masks.sources(record),
        "team": masks.team(record),
        "was_legal": masks.taken_is_legal(record),
        "alternatives": masks.alternatives(record.legal, record.action),
        "roots": masks.self_fed_roots(record),
        "active": masks.sigreg_entries(record, alive_before, "active"),
        "present": masks.sigreg_entries(record, alive_before, "present"),
    }
    for horizon in (1, 2, 4, FARTHEST):
        found[f"ahead_{horizon}"] = masks.ahead(record, horizon, FARTHEST)
    return found | {f"outcome_{name}": mask for name, mask in outcome_masks(record).items()}


draw = jit(draw_roots, static_argnums=1)
endpoints = jit(endpoint_masks, static_argnums=4)


@pytest.mark.parametrize("seed", SEEDS)
def test_masks_against_loops(seed):
    record = episodes_of(seed)
    alive_before = np.random.default_rng(seed).random((BATCH, AGENTS)) < 0.6
    found = jax.tree.map(np.asarray, all_masks(record, jnp.asarray(alive_before)))
    slow = Slow(record)
    entries, transitions = (BATCH, LENGTH, AGENTS), (BATCH, LENGTH - 1, AGENTS)
    expected = {
        "inside": loop(transitions[:2], slow.stays),
        "sources": loop(transitions, slow.source),
        "team": loop(transitions, slow.team),
        "was_legal": loop(entries, slow.was_legal),
        "roots": loop(entries[:2], slow.root),
        "active": loop(entries, lambda b, t, i: slow.active(alive_before, b, t, i)),
        "present": slow.record.present,
        "alternatives": loop(
            (*entries, ACTIONS),
            lambda b, t, i, a: slow.record.legal[b, t, i, a] and slow.record.action[b, t, i] != a,
        ),
    }
    for horizon in (1, 2, 4, FARTHEST):
        expected[f"ahead_{horizon}"] = loop(
            (BATCH, LENGTH - FARTHEST, AGENTS),
            lambda b, t, i, horizon=horizon: slow.ahead(horizon, b, t, i),
        )
    for name in ("emb", "interface", "alive", "joint_legal"):
        expected[f"outcome_{name}"] = expected["sources"]
    for name in ("reward", "cont"):
        expected[f"outcome_{name}"] = expected["team"]
    assert found.keys() == expected.keys()
    for name, mask in found.items():
        np.testing.assert_array_equal(mask, expected[name], err_msg=name)


def test_random_episodes_have_everything_in_them():
    """Otherwise the loops would agree on nothing."""
    record: Any = jax.tree.map(
        lambda *leaves: np.concatenate(leaves), *(episodes_of(seed) for seed in SEEDS)
    )
    slow = Slow(record)
    alive, real = record.alive, record.present
    arrivals = slow.record.is_first[:, 1:, None]
    assert (alive[:, :-1] & ~alive[:, 1:] & ~arrivals).any(), "a death"
    assert (~alive[:, :-1] & ~alive[:, 1:] & real[:, :-1] & ~arrivals).any(), "dead for long"
    assert (~real.any(axis=-1)).any(), "padding"
    assert (real.any(axis=-1) & ~real.all(axis=-1)).any(), "a missing slot"
    assert (record.is_first[:, 1:] & record.is_last[:, :-1]).any(), "a reset"
    assert (~record.is_first[:, 0]).any(), "a start in the middle"
    assert (record.is_last & ~record.is_terminal).any(), "a time limit"
    was_legal = loop(alive.shape, slow.was_legal)
    assert (alive & real & ~was_legal).any(), "an illegal action"
    roots = (alive.shape[0], LENGTH - FARTHEST, AGENTS)
    assert loop(roots, lambda *at: slow.ahead(FARTHEST, *at)).any(), "a full horizon"


def quiet(**changes) -> Record:
    """One row in which everybody lives and acts legally, but for the changes."""
    lead, shape = (1, LENGTH), (1, LENGTH, AGENTS)
    record = Record(
        observation=jnp.zeros((*shape, 1)),
        legal=jnp.ones((*shape, ACTIONS), bool),
        alive=jnp.ones(shape, bool),
        present=jnp.ones(shape, bool),
        reward=jnp.zeros(lead),
        is_first=jnp.zeros(lead, bool),
        is_last=jnp.zeros(lead, bool),
        is_terminal=jnp.zeros(lead, bool),
        action=jnp.zeros(shape, jnp.int32),
        latent=jnp.zeros((*shape, 1), jnp.int32),
    )
    return record._replace(**changes)


def masks_of(record: Record) -> dict[str, np.ndarray]:
    """Of slot 0, where there are slots."""
    found = all_masks(record, jnp.ones((1, AGENTS), bool))
    return {name: np.asarray(mask)[0, :, 0] for name, mask in found.items() if mask.ndim == 3}


def test_a_death_is_learned_from_when_it_happens_and_not_again():
    alive = jnp.ones((1, LENGTH, AGENTS), bool).at[0, 4:, 0].set(False)
    found = masks_of(quiet(alive=alive))
    np.testing.assert_array_equal(found["sources"], np.arange(LENGTH - 1) < 4)
    assert found["team"].all()
    np.testing.assert_array_equal(found["active"], np.arange(LENGTH) < 5)
    assert found["present"].all()
    # Roots 0 to 5: dying exactly at the end of a horizon is kept.
    np.testing.assert_array_equal(found["ahead_1"], [1, 1, 1, 1, 0, 0])
    np.testing.assert_array_equal(found["ahead_4"], [1, 0, 0, 0, 0, 0])


def test_nothing_crosses_a_reset():
    found = masks_of(quiet(is_first=jnp.zeros((1, LENGTH), bool).at[0, 4].set(True)))
    kept = np.arange(LENGTH - 1) != 3
    np.testing.assert_array_equal(found["sources"], kept)
    np.testing.assert_array_equal(found["team"], kept)
    np.testing.assert_array_equal(found["ahead_2"], [1, 1, 0, 0, 1, 1])
    np.testing.assert_array_equal(found["ahead_8"], [0, 0, 0, 0, 1, 1])


def test_an_illegal_action_spoils_the_horizons_that_contain_it():
    legal = jnp.ones((1, LENGTH, AGENTS, ACTIONS), bool).at[0, 3, 0, 0].set(False)
    found = masks_of(quiet(legal=legal))
    np.testing.assert_array_equal(found["ahead_1"], [1, 1, 1, 0, 1, 1])
    np.testing.assert_array_equal(found["ahead_2"], [1, 1, 0, 0, 1, 1])
    assert found["sources"].all()


def test_roots_leave_room_for_the_farthest_horizon():
    record = random_record(0, batch=2, length=64, episode=100)
    for horizon in (1, 2, 4, 8):
        assert jax.eval_shape(lambda h=horizon: masks.ahead(record, h, 8)).shape == (2, 56, AGENTS)


def test_gaussian_entries_need_the_record_before():
    """A slot that is dead in the first record counts if it died there, and not after a reset."""
    dead = quiet(alive=jnp.zeros((1, LENGTH, AGENTS), bool))
    before = jnp.array([[True, False, True]])
    np.testing.assert_array_equal(all_masks(dead, before)["active"][0, 0], before[0])
    reset = dead._replace(is_first=jnp.zeros((1, LENGTH), bool).at[0, 0].set(True))
    assert not all_masks(reset, before)["active"].any()


class TestSelfFed:
    @pytest.mark.parametrize("seed", SEEDS)
    def test_roots_are_eligible_and_drawn_once(self, seed):
        record = episodes_of(seed)
        root = draw(record, 8, jax.random.key(seed))
        pairs = [
            (int(b), int(t))
            for b, t, good in zip(root.row, root.time, root.valid, strict=True)
            if good
        ]
        slow = Slow(record)
        assert len(set(pairs)) == len(pairs)
        assert all(slow.root(b, t) for b, t in pairs)
        eligible = sum(slow.root(b, t) for b in range(BATCH) for t in range(LENGTH))
        assert len(pairs) == min(8, eligible)

    def test_fewer_eligible_than_wanted_are_all_drawn(self):
        is_first = jnp.ones((1, LENGTH), bool).at[0, 3:6].set(False).at[0, 9:11].set(False)
        root = draw(quiet(is_first=is_first), 8, jax.random.key(0))
        assert sorted(np.asarray(root.time)[np.asarray(root.valid)].tolist()) == [2, 3, 8]
        assert int(root.valid.sum()) == 3
        nothing = draw(quiet(is_first=jnp.ones((1, LENGTH), bool)), 8, jax.random.key(0))
        assert not nothing.valid.any()

    def test_all_eligible_roots_are_equally_likely(self):
        record = episodes_of(3)
        keys = jax.random.split(jax.random.key(1), 3000)
        root = jit(jax.vmap(lambda key: draw_roots(record, 8, key)))(keys)
        assert root.valid.all()
        flat = np.asarray(root.row * LENGTH + root.time)
        eligible = np.asarray(all_masks(record, record.alive[:, 0])["roots"]).reshape(-1)
        counts = np.bincount(flat.reshape(-1), minlength=eligible.size)[eligible]
        assert counts.sum() == flat.size
        # Draws without replacement vary less than independent ones, so that this test is mild.
        assert stats.chisquare(counts).pvalue > 1e-3

    @pytest.mark.parametrize("seed", SEEDS)
    def test_endpoints_against_loops(self, seed):
        record, slow = episodes_of(seed), Slow(episodes_of(seed))
        rng = np.random.default_rng(seed)
        row, time = rng.integers(0, BATCH, 20), rng.integers(0, LENGTH, 20)
        valid = rng.random(20) < 0.8
        team, agent = endpoints(
            record, jnp.asarray(row, jnp.int32), jnp.asarray(time, jnp.int32), jnp.asarray(valid),
            STEPS,
        )  # fmt: skip

        def counts(k, r, i):
            return valid[r] and slow.endpoint(row[r], time[r], i, k + 1)

        def own(k, r, i):
            return counts(k, r, i) and slow.can_act(row[r], time[r], i)

        shape = (STEPS, 20, AGENTS)
        np.testing.assert_array_equal(team, loop(shape, counts))
        np.testing.assert_array_equal(agent, loop(shape, own))

    def test_an_endpoint_may_be_a_death_but_not_beyond_the_sample_or_a_reset(self):
        alive = jnp.ones((1, LENGTH, AGENTS), bool).at[0, 3:, 0].set(False)
        is_first = jnp.zeros((1, LENGTH), bool).at[0, 6].set(True)
        record = quiet(alive=alive, is_first=is_first)
        time = jnp.array([2, 3, LENGTH - 3], jnp.int32)
        team, agent = endpoints(record, jnp.zeros(3, jnp.int32), time, jnp.ones(3, bool), STEPS)
        expected = [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 1, 0, 0, 0]]
        np.testing.assert_array_equal(team[..., 0].T, expected)
        # The slot is alive at the first root only; that it dies on the way does not matter.
        np.testing.assert_array_equal(agent[..., 0].T, [expected[0], [0] * 5, [0] * 5])
        np.testing.assert_array_equal(agent[..., 1].T, expected)
