"""Collection: the index convention, contiguous batches, time limits, counts and bad rows, for a
number of rows and for whole episodes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import AGENTS, CountingEnv, FakeAlgorithm, Lottery
from drawn import jit

from majepa.collect import begin, check_health, collect
from majepa.envs.base import EnvError


@functools.cache
def compiled(algorithm, env):
    return jit(functools.partial(collect, algorithm, env, rows=algorithm.rows))


@functools.cache
def start(algorithm, env):
    def init():
        keys = jax.random.split(jax.random.key(0), algorithm.num_envs)
        return algorithm.init(jax.random.key(1)), begin(algorithm, env, keys)

    return jit(init)()


def gather(algorithm, env, batches: int):
    """Consecutive batches, on the host."""
    learner, stream = start(algorithm, env)
    found = []
    for index in range(batches):
        gathered = compiled(algorithm, env)(learner, stream, jax.random.key(index))
        stream = gathered.stream
        found.append(jax.device_get(gathered._replace(stream=stream._replace(env_state=None))))
    return found


def joined(found, pick):
    return np.concatenate([pick(one) for one in found])


def test_rows_follow_the_index_convention():
    found = gather(FakeAlgorithm(num_envs=2, rows=5), CountingEnv(lengths=(3, 4)), 4)
    step = lambda name: joined(found, lambda one: getattr(one.data.rows.step, name))  # noqa: E731
    observation, reward, state = step("observation"), step("reward"), step("state")
    action = joined(found, lambda one: one.data.rows.action)
    time = np.stack([np.arange(20) % 4, np.arange(20) % 5], axis=1)
    np.testing.assert_array_equal(observation[..., 0, 0], time)
    np.testing.assert_array_equal(reward, 10 * time)
    np.testing.assert_array_equal(step("is_first"), time == 0)
    np.testing.assert_array_equal(step("is_last"), time == [[3, 4]])
    # What a row's action led to stands in the next row, unless that one begins an episode.
    led_to = np.where(time[1:] == 0, 0, action[:-1, :, 0])
    np.testing.assert_array_equal(state[1:, :, 1], led_to)
    assert set(np.unique(action)) == {0, 1}
    np.testing.assert_array_equal(
        joined(found, lambda one: one.data.rows.kept), np.tile(time[..., None], (1, 1, AGENTS))
    )


def test_batches_are_contiguous():
    found = gather(FakeAlgorithm(rows=4), CountingEnv(lengths=(2, 3)), 3)
    for before, after in itertools.pairwise(found):
        first = jax.tree.map(lambda leaf: leaf[0], after.data.rows.step)
        jax.tree.map(np.testing.assert_array_equal, before.data.final, first)
        jax.tree.map(np.testing.assert_array_equal, before.data.final_carry, after.data.carry)
    assert (found[0].data.carry["seen"] == 0).all()
    assert (found[2].data.final_carry["seen"] == 12).all()


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_transitions_and_episodes_are_counted_once(rows):
    lengths, total = (3, 5), 42
    algorithm = FakeAlgorithm(num_envs=2, rows=rows)
    found = gather(algorithm, CountingEnv(lengths=lengths), total // rows)
    counts = [
        sum(float(part) for part in parts)
        for parts in zip(*(one.counts for one in found), strict=True)
    ]
    # Each environment arrives at rows 1..total; every (length + 1)-th is the first of an episode.
    firsts = [total // (length + 1) for length in lengths]
    ended = [(total + 1) // (length + 1) for length in lengths]
    returns = sum(n * 10 * length * (length + 1) / 2 for n, length in zip(ended, lengths))  # noqa: B905
    assert counts == [2 * total - sum(firsts), sum(ended), sum(ended), returns]


@pytest.mark.parametrize("applies", [True, False])
def test_time_limits_end_the_world_once_and_only_for_the_learner(applies):
    algorithm = FakeAlgorithm(num_envs=2, rows=4, timeout_is_terminal=applies)
    found = gather(algorithm, CountingEnv(lengths=(4, 3), limit=4), 1)
    (one,) = found
    assert one.data.final.is_last.tolist() == [True, False]
    assert one.data.final.is_terminal.tolist() == [applies, False]
    assert one.stream.step.is_terminal.tolist() == [False, False]
    assert one.data.rows.step.is_terminal[3].tolist() == [False, True]
    following = gather(algorithm, CountingEnv(lengths=(4, 3), limit=4), 2)[1]
    assert following.data.rows.step.is_terminal[0].tolist() == [applies, False]


def test_every_row_has_its_own_chance():
    algorithm = FakeAlgorithm(num_envs=8, rows=16)
    (one,) = gather(algorithm, CountingEnv(), 1)
    rows = {row.tobytes() for row in one.data.rows.action}
    assert len(rows) == 16


@pytest.mark.parametrize("rows", [4, 6])
def test_a_value_that_is_no_number_is_found(rows):
    """At row 4: the final row of the first batch, or a row inside it."""
    algorithm = FakeAlgorithm(num_envs=3, rows=rows)
    (one,) = gather(algorithm, CountingEnv(nan_at=(2, 1, 3)), 1)
    spec = CountingEnv().spec
    with pytest.raises(EnvError) as caught:
        check_health(one.health, spec, 3)
    message = str(caught.value)
    for part in ("environment 2", "agent 1 (medic)", "feature 3 (enemy_0/distance)"):
        assert part in message
    assert "test:counting: the observation" in message


def test_an_agent_without_a_legal_action_is_found():
    algorithm = FakeAlgorithm(num_envs=3, rows=6)
    (one,) = gather(algorithm, CountingEnv(stuck_at=(1, 0)), 1)
    with pytest.raises(EnvError, match=r"no legal action for environment 1, agent 0 \(scout\)"):
        check_health(one.health, CountingEnv().spec, 3)


@pytest.mark.parametrize(
    ("field", "index", "words"),
    [
        ("state", (1, 1), "the state of environment 1, feature 1"),
        ("reward", (2,), "the reward of environment 2"),
        ("agent_state", (0, 1, 0), "agent state of environment 0, agent 1 (medic), feature 0"),
    ],
)
def test_other_fields_are_checked_too(field, index, words):
    class Broken(CountingEnv):
        def row(self, where):
            row = super().row(where)
            bad = getattr(row, field).at[index].set(jnp.inf)
            return row._replace(**{field: bad})

    env = Broken()
    (one,) = gather(FakeAlgorithm(), env, 1)
    with pytest.raises(EnvError) as caught:
        check_health(one.health, env.spec, 3)
    assert words in str(caught.value)


def test_healthy_rows_pass():
    (one,) = gather(FakeAlgorithm(), CountingEnv(), 1)
    check_health(one.health, CountingEnv().spec, 3)


# Whole episodes.

WHOLE = FakeAlgorithm(rows=5, whole_episodes=True)
UNEVEN = CountingEnv(lengths=(3, 5, 2))


def test_whole_episodes_begin_and_end_and_nothing_follows():
    for one in gather(WHOLE, UNEVEN, 2):
        rows, length = one.data.rows, np.asarray(UNEVEN.lengths)
        time = np.tile(np.arange(6)[:, None], 3)
        exists = time <= length
        np.testing.assert_array_equal(rows.step.is_first, time == 0)
        np.testing.assert_array_equal(rows.step.is_last, time == length)
        np.testing.assert_array_equal(rows.step.observation[..., 0, 0], np.where(exists, time, 0))
        np.testing.assert_array_equal(rows.step.legal[..., 0, 0], exists)
        np.testing.assert_array_equal(rows.step.info["total"], np.where(exists, time, 0))
        np.testing.assert_array_equal(rows.kept[..., 0], np.where(exists, time, 0))
        for leaf in jax.tree.leaves(rows):
            assert leaf.shape[:2] == (6, 3) and not leaf[~exists].any()
        led_to = np.where(exists[1:], rows.action[:-1, :, 0], 0)
        np.testing.assert_array_equal(rows.step.state[1:, :, 1], led_to)
        assert rows.action.any()


def test_environments_that_play_on_are_counted_once():
    """The shortest episode could be played twice while the longest goes on."""
    for one in gather(WHOLE, CountingEnv(lengths=(1, 5, 2)), 2):
        assert [float(count) for count in one.counts] == [8, 3, 2, 10 + 150 + 30]


def test_whole_episodes_leave_a_stream_at_first_rows():
    for one in gather(WHOLE, UNEVEN, 2):
        jax.tree.map(np.testing.assert_array_equal, one.data.final, one.stream.step)
        jax.tree.map(np.testing.assert_array_equal, one.data.final_carry, one.stream.carry)
        assert one.data.final.is_first.all() and not one.data.final.info["total"].any()
        assert not one.data.carry["seen"].any() and not one.data.final_carry["seen"].any()
        assert not one.stream.running_return.any()


def test_every_batch_has_fresh_episodes_and_every_row_its_own_chance():
    algorithm = FakeAlgorithm(num_envs=8, rows=16, whole_episodes=True)
    one, other = gather(algorithm, Lottery(limit=16), 2)
    lengths = [batch.data.rows.step.is_last.argmax(axis=0) for batch in (one, other)]
    assert (lengths[0] != lengths[1]).any() and len({*lengths[0]}) > 1
    assert int(one.counts.transitions) == lengths[0].sum()
    (full,) = gather(algorithm, CountingEnv(lengths=(16,), limit=16), 1)
    rows = {row.tobytes() for row in full.data.rows.action}
    assert len(rows) == 17


@pytest.mark.parametrize("applies", [True, False])
def test_time_limits_of_whole_episodes_end_the_world_for_the_learner(applies):
    algorithm = FakeAlgorithm(num_envs=2, rows=5, timeout_is_terminal=applies, whole_episodes=True)
    (one,) = gather(algorithm, CountingEnv(lengths=(5, 3)), 1)
    expected = np.zeros((6, 2), bool)
    expected[5, 0], expected[3, 1] = applies, True
    np.testing.assert_array_equal(one.data.rows.step.is_terminal, expected)
    assert not one.data.final.is_terminal.any()


def test_an_episode_without_an_end_is_found():
    env = CountingEnv(lengths=(3, 6, 7))
    (one,) = gather(WHOLE, env, 1)
    with pytest.raises(EnvError, match="2 of 3 episodes went on past the limit of 5 transitions"):
        check_health(one.health, env.spec, 3)


def test_bad_rows_of_whole_episodes_are_found():
    spec = UNEVEN.spec
    (one,) = gather(WHOLE, CountingEnv(lengths=(3, 5, 4), nan_at=(2, 1, 3)), 1)
    with pytest.raises(
        EnvError, match=r"observation of environment 2, agent 1 \(medic\), feature 3"
    ):
        check_health(one.health, spec, 3)
    (one,) = gather(WHOLE, CountingEnv(lengths=(3, 5, 4), stuck_at=(1, 0)), 1)
    with pytest.raises(EnvError, match=r"no legal action for environment 1, agent 0 \(scout\)"):
        check_health(one.health, spec, 3)
    (one,) = gather(WHOLE, UNEVEN, 1)
    check_health(one.health, spec, 3)
