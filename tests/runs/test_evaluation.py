"""Evaluation: each episode counted once, fixed episodes, argmax and sampled actions, intervals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import CountingEnv, FakeAlgorithm

from majepa.envs.base import EnvError
from majepa.evaluation import _play, evaluate
from majepa.stats import wilson


def judged(env, episodes=7, greedy=True, algorithm=None, seed=0):
    algorithm = algorithm or FakeAlgorithm()
    learner = algorithm.init(jax.random.key(3))
    key = jax.random.key(seed)
    return evaluate(algorithm, env, learner, episodes=episodes, key=key, greedy=greedy)


def test_episodes_of_uneven_length_count_once():
    result = judged(CountingEnv(lengths=(1, 5, 2)))
    length = np.asarray([1, 5, 2, 1, 5, 2, 1])
    np.testing.assert_array_equal(result.length, length)
    np.testing.assert_array_equal(result.episode_return, 10 * length * (length + 1) / 2)
    np.testing.assert_array_equal(result.won, length % 2 == 1)
    assert result.episodes == 7 and result.win_rate == pytest.approx(5 / 7)
    assert result.interval == wilson(5, 7)


class Rewarding(CountingEnv):
    """Reward is the action that agent 0 took."""

    def row(self, where):
        row = super().row(where)
        return row._replace(reward=where.last_action.astype(jnp.float32))


def test_greedy_reaches_the_policy():
    env = Rewarding(lengths=(4,))
    np.testing.assert_array_equal(judged(env).episode_return, 8.0)
    sampled = judged(env, greedy=False)
    assert sampled.episode_return.max() <= 4 and not sampled.greedy
    again = judged(env, greedy=False)
    np.testing.assert_array_equal(sampled.episode_return, again.episode_return)
    other = judged(env, greedy=False, seed=1)
    assert (sampled.episode_return != other.episode_return).any()


class Marked(CountingEnv):
    """The return of an episode is the number that its key begins with."""

    def reset(self, keys):
        where, row = super().reset(keys)
        mark = jax.random.key_data(keys)[:, 0].astype(jnp.int32) % 1000
        return where._replace(last_action=mark), row

    def step(self, where, action):
        after = super().step(where, action)[0]._replace(last_action=where.last_action)
        return after, self.row(after)

    def row(self, where):
        mark = where.last_action.astype(jnp.float32)
        return super().row(where)._replace(reward=jnp.where(where.is_over, mark, 0.0))


def test_an_episode_depends_on_its_number_and_not_on_how_many_there_are():
    few, many = judged(Marked(), episodes=3), judged(Marked(), episodes=6)
    assert len(set(many.episode_return.tolist())) == 6
    np.testing.assert_array_equal(few.episode_return, many.episode_return[:3])


def test_repeated_evaluations_compile_once():
    env = CountingEnv(lengths=(2, 4))
    judged(env)
    size = _play._cache_size()
    judged(env)
    judged(env, greedy=False)
    judged(CountingEnv(lengths=(2, 4)), seed=5)
    assert _play._cache_size() == size


def test_an_environment_that_never_ends_is_an_error():
    with pytest.raises(EnvError, match="7 of 7 episodes went on past the limit of 5"):
        judged(CountingEnv(lengths=(9,)))


@pytest.mark.parametrize(
    ("wins", "count", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        (81, 263, 0.2553, 0.3662),  # Newcombe (1998), table I
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_against_known_values(wins, count, low, high):
    assert wilson(wins, count) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_wilson_at_its_edges():
    assert wilson(0, 0) == (0.0, 1.0)
    for count in (1, 3, 100):
        assert wilson(0, count)[0] == 0.0 and wilson(count, count)[1] == 1.0
    with pytest.raises(ValueError, match="3 wins in 2"):
        wilson(3, 2)
