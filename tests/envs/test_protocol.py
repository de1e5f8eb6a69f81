"""The environment protocol: determinism, batches, episode ends, bad input."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from majepa.envs import Env, EnvError, make_env
from majepa.envs.scripted import scripted_policy
from majepa.envs.sim import SCENARIOS, BattleEnv, Rules, motion


@functools.cache
def built(map_name: str) -> BattleEnv:
    return make_env(map_name)


@functools.cache
def compiled(map_name: str):
    env = built(map_name)
    return jax.jit(env.reset), jax.jit(env.step), jax.jit(scripted_policy("random", env.spec))


def play(map_name: str, keys, steps: int):
    """Rows and actions of random play."""
    reset, step, policy = compiled(map_name)
    state, row = reset(keys)
    rows, actions = [jax.device_get(row)], []
    for index in range(steps):
        action = policy(row.observation, row.legal, jax.random.key(index))
        state, row = step(state, action)
        rows.append(jax.device_get(row))
        actions.append(np.asarray(action))
    return rows, actions


def one_of(state, index: int):
    """One battle of a batch; the batch is the last axis of every leaf."""
    return jax.tree.map(lambda leaf: leaf[..., index : index + 1], state)


def batch_slice(row, index: int):
    return jax.tree.map(lambda leaf: leaf[index : index + 1], row)


def assert_close(one, other) -> None:
    def check(a, b):
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), atol=1e-5, rtol=0
        )

    jax.tree.map(check, one, other)


def test_the_simulator_is_an_env():
    assert isinstance(built("3m"), Env)


@pytest.mark.parametrize(
    "map_name",
    [
        "2s3z",
        pytest.param("MMM", marks=pytest.mark.slow),
        pytest.param("1c3s5z", marks=pytest.mark.slow),
    ],
)
def test_same_key_same_trajectory_other_key_another(map_name, key):
    keys = jax.random.split(key, 4)
    first, _ = play(map_name, keys, 30)
    second, _ = play(map_name, keys, 30)
    for one, other in zip(first, second, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)
    other, _ = play(map_name, jax.random.split(jax.random.key(1), 4), 30)
    assert any(
        not np.array_equal(one.state, another.state)
        for one, another in zip(first, other, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("map_name", ["2s3z", "corridor", "MMM"])
def test_a_batch_equals_its_single_environments(map_name, key):
    keys = jax.random.split(key, 3)
    reset, step, policy = compiled(map_name)
    state, row = reset(keys)
    singles = [reset(keys[index : index + 1]) for index in range(3)]
    for index, (_, single_row) in enumerate(singles):
        assert_close(single_row, batch_slice(row, index))
    for t in range(40):
        # Rounding may differ with the batch size, and battles are chaotic: compare one step at a
        # time, each from the state that the batch is in.
        ones = [one_of(state, index) for index in range(3)]
        action = policy(row.observation, row.legal, jax.random.key(t))
        state, row = step(state, action)
        for index, one in enumerate(ones):
            _, single_row = step(one, action[index : index + 1])
            assert_close(single_row, batch_slice(row, index))


@pytest.mark.slow
@pytest.mark.parametrize("map_name", ["corridor", "bane_vs_bane"])
def test_a_crowded_battle_runs_alone_as_in_a_batch(map_name, key):
    """Free-running through a clash of crowds, where rounding errors grow a thousandfold."""
    keys = jax.random.split(key, 24)
    reset, step, _ = compiled(map_name)
    rows, actions = play(map_name, keys, 30)
    for index in (0, 23):
        state, row = reset(keys[index : index + 1])
        for batch_row, action in zip(rows[1:], actions, strict=True):
            state, row = step(state, action[index : index + 1])
            assert_close(row, batch_slice(batch_row, index))


@pytest.mark.slow
@pytest.mark.parametrize("map_name", ["2s3z", "2c_vs_64zg"])
def test_compiled_equals_not_compiled(map_name, key):
    reset, step, policy = compiled(map_name)
    state, row = reset(jax.random.split(key, 2))
    for index in range(26):
        action = policy(row.observation, row.legal, jax.random.key(index))
        before, (state, row) = state, step(state, action)
        if index in (0, 25):
            with jax.disable_jit():
                _, plain = built(map_name).step(before, action)
            assert_close(row, plain)


class TestEpisodeEnds:
    def short(self, limit: int):
        env = BattleEnv(dataclasses.replace(SCENARIOS["3m"], limit=limit))
        return jax.jit(env.reset), jax.jit(env.step)

    def test_a_time_limit_is_last_but_not_terminal(self, key):
        reset, step = self.short(2)
        state, row = reset(jax.random.split(key, 2))
        assert row.is_first.all() and not row.is_last.any() and (row.reward == 0).all()
        stop = jnp.ones((2, 3), jnp.int32)
        state, row = step(state, stop)
        assert not (row.is_first | row.is_last).any()
        state, row = step(state, stop)
        assert row.is_last.all() and not row.is_terminal.any() and not row.won.any()
        assert row.alive.all() and (row.observation != 0).any()

        # The next step starts an episode whatever the action, and is no transition.
        illegal = jnp.full((2, 3), 8, jnp.int32)
        state, row = step(state, illegal)
        assert row.is_first.all() and not row.is_last.any()
        assert (row.reward == 0).all() and (row.info["illegal_actions"] == 0).all()
        assert (state.steps == 0).all() and (state.last_action == -1).all()
        state, row = step(state, stop)
        assert not row.is_first.any() and (state.steps == 1).all()

    def test_a_defeat_is_terminal_and_shows_the_last_observation(self, key):
        reset, step, _ = compiled("3m")
        state, row = reset(jax.random.split(key, 8))
        total = np.zeros(8)
        for _ in range(60):
            before = np.asarray(row.is_last)
            state, row = step(state, jnp.where(row.legal[..., 1], 1, 0).astype(jnp.int32))
            assert (np.asarray(row.is_first) == before).all()
            total += np.asarray(row.reward)
            lost = np.asarray(row.is_last)
            if lost.any():
                break
        assert np.asarray(row.is_terminal)[lost].all() and not np.asarray(row.won)[lost].any()
        assert not np.asarray(row.alive)[lost].any()
        assert (np.asarray(row.observation)[lost] == 0).all()
        assert (np.asarray(row.info["dead_allies"])[lost] == 3).all()
        legal = np.asarray(row.legal)[lost]
        assert legal[..., 0].all() and not legal[..., 1:].any()

    def test_episodes_of_one_environment_differ(self, key):
        reset, step, policy = compiled("3m")
        state, row = reset(jax.random.split(key, 1))
        episodes = [b""]
        for _ in range(200):
            action = policy(row.observation, row.legal, jax.random.key(0))
            state, row = step(state, action)
            episodes[-1] += np.asarray(state.units.cooldown).tobytes()
            if row.is_last[0]:
                episodes.append(b"")
        assert len(episodes) > 3 and len(set(episodes)) == len(episodes)


class TestBadInput:
    def test_illegal_actions_become_stop_or_noop_and_are_counted(self, key):
        reset, step, _ = compiled("3m")
        state, _ = reset(jax.random.split(key, 2))
        # Nobody is in range at the start: targets are illegal, and so is no-op for the living.
        wrong = jnp.array([[6, 0, 1], [99, -5, 1]], jnp.int32)
        state_wrong, row_wrong = step(state, wrong)
        state_stop, row_stop = step(state, jnp.ones((2, 3), jnp.int32))
        assert (row_wrong.info["illegal_actions"] == 2).all()
        assert (row_stop.info["illegal_actions"] == 0).all()
        np.testing.assert_array_equal(row_wrong.observation, row_stop.observation)
        np.testing.assert_array_equal(state_wrong.last_action, state_stop.last_action)

    def test_wrong_shapes_and_types_are_named(self, key):
        env = built("3m")
        state, _ = compiled("3m")[0](jax.random.split(key, 2))
        with pytest.raises(EnvError, match=r"shape \(2, 3\), got \(2, 4\)"):
            env.step(state, jnp.zeros((2, 4), jnp.int32))
        with pytest.raises(EnvError, match="must be integers, got float32"):
            env.step(state, jnp.zeros((2, 3)))
        with pytest.raises(EnvError, match="one random key per environment"):
            env.reset(jax.random.key(0))
        with pytest.raises(EnvError, match="one random key per environment"):
            env.reset(jnp.zeros((2, 2), jnp.uint32))

    def test_rules_that_cannot_be_are_refused(self):
        with pytest.raises(ValueError, match="loops_per_step"):
            Rules(loops_per_step=0)
        with pytest.raises(ValueError, match="weapon_jitter"):
            Rules(weapon_jitter=(2, -1))
        with pytest.raises(ValueError, match="move_amount"):
            Rules(move_amount=0)


@pytest.mark.slow
def test_each_side_starts_a_little_off_its_place_as_a_whole(key):
    plain, _ = jax.jit(BattleEnv(SCENARIOS["2s3z"], rules=Rules(spawn_jitter=0)).reset)(
        jax.random.split(key, 1)
    )
    env = BattleEnv(SCENARIOS["2s3z"])
    state, _ = jax.jit(env.reset)(jax.random.split(key, 64))
    moves = []
    for side in (slice(0, 5), slice(5, 10)):
        for axis in ("x", "y"):
            off = np.asarray(getattr(state.units, axis) - getattr(plain.units, axis))[side]
            assert np.ptp(off, axis=0).max() < 1e-5  # as a whole
            moves.append(off[0])
    moves = np.stack(moves)
    assert np.abs(moves).max() <= 0.5 and np.abs(moves).max(axis=1).min() > 0.4
    correlation = np.corrcoef(moves) - np.eye(4)
    assert np.abs(correlation).max() < 0.4
    assert len(np.unique(moves[0])) == 64
    step = jax.jit(env.step)
    ends = np.arange(64) < 8
    after, row = step(state._replace(is_over=jnp.asarray(ends)), jnp.ones((64, 5), jnp.int32))
    assert (np.asarray(row.is_first) == ends).all()
    assert (np.asarray(after.steps) == ~ends).all()
    # The next episode starts elsewhere.
    assert (np.abs(after.units.x[0] - state.units.x[0]) > 1e-3)[ends].all()


@pytest.mark.slow
def test_sides_are_not_shifted_into_walls_and_buildings_not_at_all(key):
    for name in ("2s_vs_1sc", "so_many_baneling"):
        env = BattleEnv(SCENARIOS[name])
        state, _ = jax.jit(env.reset)(jax.random.split(key, 64))
        x, y = np.asarray(state.units.x), np.asarray(state.units.y)
        free_x, free_y = motion.keep_inside(env.arena, state.units.x, state.units.y)
        assert np.hypot(free_x - x, free_y - y).max() < 0.02
        agents = np.ptp(x[: env.spec.num_agents], axis=1)
        assert (agents > 0.2).all()
        if name == "2s_vs_1sc":
            assert np.ptp(x[-1]) == 0
