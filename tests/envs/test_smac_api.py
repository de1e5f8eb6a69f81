"""SMAC's host interface: its method set, its arithmetic, and nothing but the device's battles."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from majepa.envs import EnvError, make_env
from majepa.envs.sim import SCENARIOS, UNITS, AttackMove, Scenario, Spawn
from majepa.envs.sim.state import seeds_from
from majepa.envs.smac_api import IllegalActionError, MultiAgentEnv, StarCraft2Env

ENEMY = Spawn((23.0, 16.0), ((UNITS["marine"], 1),))
DUEL = dataclasses.replace(SCENARIOS["3m"], name="3m_vs_1m", enemies=(ENEMY,), limit=250)
"""Won by whoever shoots, lost by whoever stands still."""
SHORT = dataclasses.replace(DUEL, limit=4)
BOMB = dataclasses.replace(UNITS["baneling"], damage=50.0)
BURST = Scenario(
    "bombs", DUEL.terrain, (Spawn((14.0, 16.0), ((BOMB, 1),)),),
    (Spawn((18.0, 16.0), ((BOMB, 1),)),), AttackMove((14.0, 16.0)), 100,
)  # fmt: skip
"""One bomb takes both with it."""


@pytest.fixture
def env() -> StarCraft2Env:
    env = StarCraft2Env(DUEL, seed=0)
    env.reset()
    return env


def shoot(env: StarCraft2Env) -> list[int]:
    """A target if there is one in range, else a walk east."""
    return [max(set(np.flatnonzero(row)) - {5}) for row in env.get_avail_actions()]


def stand(env: StarCraft2Env) -> list[int]:
    return [row.index(1) for row in env.get_avail_actions()]


def any_legal(env: StarCraft2Env, rng: np.random.Generator) -> list[int]:
    return [int(rng.choice(np.flatnonzero(row))) for row in env.get_avail_actions()]


def play(env: StarCraft2Env, policy) -> tuple[list[float], dict]:
    env.reset()
    rewards, done, info = [], False, {}
    while not done:
        reward, done, info = env.step(policy(env))
        rewards.append(reward)
    return rewards, info


def sizes(env: StarCraft2Env) -> tuple:
    """Features of moves, enemies, allies, oneself; of the observation and of the state."""
    return (
        env.get_obs_move_feats_size(), env.get_obs_enemy_feats_size(),
        env.get_obs_ally_feats_size(), env.get_obs_own_feats_size(), env.get_obs_size(),
        env.get_state_size(),
    )  # fmt: skip


def test_a_pymarl_like_episode_runs():
    env = StarCraft2Env(map_name=DUEL, seed=3, difficulty="7", replay_dir="", game_version=None)
    facts = env.get_env_info()
    rng = np.random.default_rng(0)
    env.reset()
    terminated, steps, info = False, 0, {}
    while not terminated:
        state, avail, obs = env.get_state(), env.get_avail_actions(), env.get_obs()
        assert state.shape == (facts["state_shape"],) and state.dtype == np.float32
        assert len(obs) == facts["n_agents"]
        assert all(o.shape == (facts["obs_shape"],) and o.dtype == np.float32 for o in obs)
        assert [len(row) for row in avail] == [facts["n_actions"]] * facts["n_agents"]
        assert all(type(can) is int for row in avail for can in row)
        reward, terminated, info = env.step(any_legal(env, rng))
        steps += 1
        assert type(reward) is float and type(terminated) is bool
        for agent, is_dead in enumerate(env.death_tracker_ally):
            if is_dead:
                assert env.get_avail_agent_actions(agent) == [1, *[0] * 6]
                assert not env.get_obs_agent(agent).any()
    assert set(info) == {"battle_won", "dead_allies", "dead_enemies"}
    assert info["dead_allies"] == env.death_tracker_ally.sum()
    assert info["dead_enemies"] == env.death_tracker_enemy.sum()
    assert steps <= facts["episode_limit"] == 250
    env.close()


def test_the_facts_are_smacs():
    env = StarCraft2Env("2s3z", seed=0)
    rest = ["rel_x", "rel_y", "shield", "type_0", "type_1"]
    assert env.get_env_info() == {
        "state_shape": 120, "obs_shape": 80, "n_actions": 11, "n_agents": 5, "episode_limit": 120,
        "agent_features": ["health", "energy/cooldown", *rest], "enemy_features": ["health", *rest],
    }  # fmt: skip
    assert sizes(env) == (4, (5, 8), (4, 8), 4, 80, 120)
    assert (env.get_total_actions(), env.n_actions_move, env.n_actions_no_attack) == (11, 4, 6)
    assert (env.map_name, env.map_type, env.unit_type_bits) == ("2s3z", "stalkers_and_zealots", 2)
    assert (env.shield_bits_ally, env.shield_bits_enemy, env.max_reward) == (1, 1, 1020)
    assert (env.n_agents, env.n_enemies, env.n_actions) == (5, 5, 11)
    assert (env.map_x, env.map_y, env.max_distance_x, env.max_distance_y) == (32, 32, 32, 32)
    env.reset()
    kinds = [unit.unit_type for unit in env.agents.values()]
    assert kinds == ["stalker", "stalker", "zealot", "zealot", "zealot"]
    first = env.agents[0]
    assert (first.health, first.health_max, first.shield, first.shield_max) == (80, 80, 80, 80)
    assert first.pos.x < env.enemies[0].pos.x and (first.owner, env.enemies[0].owner) == (1, 2)
    assert first.weapon_cooldown == 0
    assert MultiAgentEnv is StarCraft2Env


def test_units_and_state_tell_the_same():
    env = StarCraft2Env(DUEL, seed=1)
    env.reset()
    while not env.step(stand(env))[1]:
        rows = env.get_state()[:12].reshape(3, 4)
        for unit, row in zip(env.agents.values(), rows, strict=True):
            if unit.health > 0:
                told = [unit.health / 45, unit.weapon_cooldown / 15, (unit.pos.x - 16) / 32]
                np.testing.assert_allclose(row[:3], told, atol=1e-6)
            else:
                assert not row.any()


@pytest.mark.slow
def test_battles_are_those_of_the_device():
    cpu, device = jax.devices("cpu")[0], make_env("sim:2s3z")
    step = jax.jit(device.step)
    state, row = jax.jit(device.reset)(jax.device_put(jax.random.key(7)[None], cpu))
    env = StarCraft2Env("2s3z", seed=7)
    env.reset()
    rng = np.random.default_rng(1)
    num_episodes = 0
    for _ in range(250):
        np.testing.assert_allclose(np.array(env.get_obs()), row.observation[0], atol=1e-5)
        np.testing.assert_allclose(env.get_state(), row.state[0], atol=1e-5)
        np.testing.assert_array_equal(np.array(env.get_avail_actions()), row.legal[0])
        action = any_legal(env, rng)
        state, row = step(state, np.array([action], np.int32))
        reward, terminated, info = env.step(action)
        assert reward == pytest.approx(float(row.reward[0]), abs=1e-5)
        assert (terminated, info["battle_won"]) == (bool(row.is_last[0]), bool(row.won[0]))
        for name in ("dead_allies", "dead_enemies"):
            assert info[name] == int(row.info[name][0])
        if terminated:
            num_episodes += 1
            env.reset()
            state, row = step(state, np.array([action], np.int32))
    assert num_episodes >= 2


def trail(env: StarCraft2Env, policy) -> np.ndarray:
    """All states of the next episode."""
    states, done = [env.reset()[1]], False
    while not done:
        done = env.step(policy(env))[1]
        states.append(env.get_state())
    return np.array(states)


def test_a_seed_fixes_everything():
    first, second = StarCraft2Env(DUEL, seed=5), StarCraft2Env(DUEL, seed=5)
    one, two = trail(first, stand), trail(first, stand)
    np.testing.assert_array_equal(trail(second, stand), one)
    np.testing.assert_array_equal(trail(second, stand), two)
    assert not np.array_equal(one, two)
    assert second.seed(5) == second.seed() == first.seed() == 5
    with pytest.raises(EnvError, match="reset"):
        second.get_state()
    np.testing.assert_array_equal(trail(second, stand), one)
    second.seed(6)
    assert not np.array_equal(trail(second, stand), one)


def test_no_seed_means_a_new_one():
    env = StarCraft2Env(DUEL)
    assert env.seed() != StarCraft2Env(DUEL).seed()
    assert play(env, stand) == play(StarCraft2Env(DUEL, seed=env.seed()), stand)


def test_seeds_have_32_bits():
    for wrong in (-1, 2**32, 1.5, "3"):
        with pytest.raises(EnvError, match="seed"):
            StarCraft2Env(DUEL, seed=wrong)
    env = StarCraft2Env(DUEL, seed=2**32 - 1)
    env.reset()
    expected = seeds_from(jax.random.key(2**32 - 1)[None])
    np.testing.assert_array_equal(env._state.seed, expected)


def test_stats_count_wins_losses_and_restarts():
    env = StarCraft2Env(DUEL, seed=0)
    assert env.get_stats()["win_rate"] == 0
    rewards, info = play(env, shoot)
    assert info["battle_won"] and info["dead_enemies"] == 1
    assert env.win_counted and not env.defeat_counted
    assert sum(rewards) == pytest.approx(20, abs=1e-4)
    _, info = play(env, stand)
    assert not info["battle_won"] and info["dead_allies"] == 3
    assert env.defeat_counted and not env.win_counted
    play(env, shoot)
    env.reset()
    env.step(stand(env))
    env.full_restart()
    assert env._episode_steps == 0 and not env.win_counted
    assert env._episode_count == 3
    assert env.get_stats() == {
        "battles_won": 2, "battles_game": 3, "battles_draw": 0, "win_rate": 2 / 3, "timeouts": 0,
        "restarts": 1,
    }  # fmt: skip


@pytest.mark.parametrize("continuing", [False, True])
def test_timeouts_are_counted_and_flagged_on_demand(continuing):
    env = StarCraft2Env(SHORT, seed=0, continuing_episode=continuing)
    for _ in range(2):
        rewards, info = play(env, stand)
        assert len(rewards) == 4
        assert info.get("episode_limit", False) is continuing
        assert not info["battle_won"]
    assert list(env.get_stats().values()) == [0, 2, 2, 0, 2, 0] and not env.defeat_counted


def test_a_draw_is_a_battle_nobody_won():
    env = StarCraft2Env(BURST, seed=0, continuing_episode=True)
    rewards, info = play(env, stand)
    assert info == {"battle_won": False, "dead_allies": 1, "dead_enemies": 1}
    assert not env.win_counted and not env.defeat_counted
    assert sum(rewards) == pytest.approx(20 * (30 + 10) / (30 + 10 + 200))
    assert list(env.get_stats().values()) == [0, 1, 0, 0, 0, 0]


def vitality(units) -> np.ndarray:
    return np.array([u.health + u.shield if u.health > 0 else 0.0 for u in units.values()])


def test_options_add_features_and_losses_cost():
    env = StarCraft2Env(
        DUEL, seed=2, obs_timestep_number=True, obs_last_action=True, state_timestep_number=True,
        reward_only_positive=False, reward_negative_scale=0.25, reward_death_value=8,
        reward_defeat=-50, reward_scale=False, step_mul=4,
    )  # fmt: skip
    assert sizes(env) == (4, (1, 5), (2, 5 + 7), 1 + 1, 4 + 5 + 24 + 2, 12 + 3 + 21 + 1)
    start = env.reset() and env.agents[0].pos.x
    env.step([4, 4, 4])
    assert 0.3 < env.agents[0].pos.x - start < 4 * 2.25 / 16 + 1e-3
    for policy in (shoot, stand):
        _, state = env.reset()
        assert not env.last_action.any() and state[-1] == 0
        done = False
        while not done:
            was = vitality(env.agents), vitality(env.enemies)
            action = policy(env)
            reward, done, info = env.step(action)
            hurt, harm = was[0] - vitality(env.agents), was[1] - vitality(env.enemies)
            deaths, kills = ((hurt > 0) & (hurt == was[0])).sum(), harm.sum() == was[1].sum() > 0
            expected = harm.sum() + 8 * kills - 0.25 * (hurt.sum() + 8 * deaths)
            expected += 200 * info["battle_won"] - 50 * (info["dead_allies"] == 3)
            assert reward == pytest.approx(expected, abs=1e-3)
            check_added_features(env, action)
        assert info["battle_won"] == (policy is shoot)


def check_added_features(env: StarCraft2Env, action: list[int]) -> None:
    clock = env._episode_steps / 250
    obs, state = env.get_obs(), env.get_state()
    assert all(view[-1] == pytest.approx(clock) for view in (*obs, state))
    np.testing.assert_array_equal(env.last_action, np.eye(7)[action])
    np.testing.assert_array_equal(state[15:36].reshape(3, 7), env.last_action)
    for row, agent in zip(obs[0][9:33].reshape(2, 12), (1, 2), strict=True):
        if row[0]:
            np.testing.assert_array_equal(row[-7:], env.last_action[agent])


def test_sparse_rewards_and_lean_views():
    env = StarCraft2Env(
        DUEL, seed=2, reward_sparse=True, obs_all_health=False, obs_own_health=False,
        obs_instead_of_state=True, state_last_action=False,
    )  # fmt: skip
    assert sizes(env) == (4, (1, 4), (2, 4), 0, 4 + 4 + 8, 3 * 16)
    obs, state = env.reset()
    np.testing.assert_array_equal(np.concatenate(obs), state)
    unit = 20 / (10 + 200 + 45)
    for policy, outcome in ((shoot, 1), (stand, -1)):
        rewards, _ = play(env, policy)
        assert not any(rewards[:-1])
        assert rewards[-1] == pytest.approx(outcome * unit)


@pytest.mark.parametrize(
    ("action", "told"), [(0, "no_op"), (6, "target_0"), (99, "99"), (-1, "-1")]
)
def test_an_illegal_action_raises_and_loses_nothing(action, told):
    env, twin = StarCraft2Env(DUEL, seed=4), StarCraft2Env(DUEL, seed=4)
    for one in (env, twin):
        one.reset()
        one.step([4, 4, 4])
    with pytest.raises(IllegalActionError, match=rf"agent 1 .*{told}.*stop \(1\)") as caught:
        env.step([1, action, 1])
    assert isinstance(caught.value, EnvError) and isinstance(caught.value, AssertionError)
    np.testing.assert_array_equal(env.get_state(), twin.get_state())
    assert env._episode_steps == 1
    assert env.step([4, 1, 1]) == twin.step([4, 1, 1])
    np.testing.assert_array_equal(env.get_state(), twin.get_state())


def tensor(value: int) -> SimpleNamespace:
    """As much of one as the environment may rely on."""
    return SimpleNamespace(item=lambda: value)


@pytest.mark.parametrize(
    "actions",
    [(4, 1, 2), np.array([4, 1, 2]), np.array([[4], [1], [2]], np.int32),
     [np.array(4), np.int64(1), 2], [tensor(4), tensor(1), tensor(2)], np.array([4.0, 1.0, 2.0])],
)  # fmt: skip
def test_actions_come_in_many_clothes(env, actions):
    env.step(actions)
    assert env.last_action.argmax(1).tolist() == [4, 1, 2]


@pytest.mark.parametrize(
    "actions",
    [[1, 1], [1, 1, 1, 1], [1, 1.5, 1], [1, "stop", 1], [1, None, 1], {0: 1, 1: 1, 2: 1}, 1, None,
     np.ones((3, 7)), [1, float("inf"), 1], []],
)  # fmt: skip
def test_wrong_actions_are_told(env, actions):
    with pytest.raises(EnvError, match="action"):
        env.step(actions)
    assert env._episode_steps == 0
    env.step([1, 1, 1])


def test_the_order_of_calls_is_told():
    with StarCraft2Env(SHORT, seed=0) as env:
        calls = [env.get_obs, env.get_state, env.get_avail_actions, lambda: env.step([1, 1, 1])]
        for call in (*calls, lambda: env.render("rgb_array")):
            with pytest.raises(EnvError, match="reset"):
                call()
        play(env, stand)
        last = env.get_state()
        with pytest.raises(EnvError, match=r"over.*reset"):
            env.step([1, 1, 1])
        np.testing.assert_array_equal(env.get_state(), last)
    with pytest.raises(EnvError, match="reset"):
        env.get_obs()


def test_a_reset_in_mid_episode_begins_anew(env):
    first = env.get_state()
    env.step([4, 4, 4])
    _, again = env.reset()
    # Health, cooldowns and last actions as at first; both sides may stand a little elsewhere.
    np.testing.assert_allclose(first, again, atol=1.01 / 16)
    assert not (first == again).all()
    assert env._episode_steps == 0 and not env.last_action.any()
    assert env.get_stats()["battles_game"] == 0


def test_what_is_handed_out_belongs_to_the_caller(env):
    obs, state = env.reset()
    kept = [view.copy() for view in obs], state.copy()
    for array in (*obs, *env.get_obs(), state, env.get_obs_agent(0), env.last_action):
        array[:] = 7
    np.testing.assert_array_equal(env.get_obs(), kept[0])
    np.testing.assert_array_equal(env.get_state(), kept[1])
    env.step([4, 4, 4])
    assert all((array == 7).all() for array in (*obs, state))


def test_equal_environments_compile_once(env):
    equal = StarCraft2Env(DUEL, seed=9, reward_win=200.0, move_amount=2.0, continuing_episode=True)
    assert equal._machine is env._machine


def test_wrong_calls_are_told(env):
    for agent in (-1, 3):
        with pytest.raises(EnvError, match="agents 0 to 2"):
            env.get_obs_agent(agent)
    with pytest.raises(EnvError, match="rgb_array"):
        env.render()
    with pytest.raises(EnvError, match="replay"):
        env.save_replay()


def test_pictures(env):
    frame = env.render("rgb_array")
    assert frame.dtype == np.uint8 and frame.ndim == 3


def test_debug_logs_steps(caplog):
    env = StarCraft2Env(DUEL, seed=0, debug=True)
    env.reset()
    with caplog.at_level(logging.DEBUG, logger="majepa.envs.smac_api"):
        env.step([4, 1, 1])
    assert "[4, 1, 1]" in caplog.text
