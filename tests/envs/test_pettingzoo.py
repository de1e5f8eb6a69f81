"""The PettingZoo door: its own tests, masks, deaths and endings."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
import sys

import numpy as np
import pytest
from pettingzoo.test import parallel_api_test, parallel_seed_test

from majepa.envs import EnvError
from majepa.envs.pettingzoo import parallel_env
from majepa.envs.sim import SCENARIOS, UNITS, Spawn
from majepa.envs.smac_api import REFUSED, StarCraft2Env

ENEMY = Spawn((23.0, 16.0), ((UNITS["marine"], 1),))
DUEL = dataclasses.replace(SCENARIOS["3m"], name="3m_vs_1m", enemies=(ENEMY,), limit=250)
SHORT = dataclasses.replace(DUEL, limit=4)


def stand(env) -> dict[str, int]:
    return dict.fromkeys(env.agents, 1)


def shoot(observations, env) -> dict[str, int]:
    """A target if there is one in range, else a walk east."""
    return {
        agent: max(k for k in np.flatnonzero(observations[agent]["action_mask"]) if k != 5)
        for agent in env.agents
    }


def test_pettingzoo_finds_no_fault():
    parallel_api_test(parallel_env("2s3z"), num_cycles=1000)
    parallel_seed_test(lambda: parallel_env("2s3z"), num_cycles=300)


def test_agents_are_named_by_type_and_id():
    env = parallel_env("2s3z", seed=0)
    names = ["stalker_0", "stalker_1", "zealot_2", "zealot_3", "zealot_4"]
    assert env.possible_agents == names and env.agents == []
    assert env.metadata["name"] == str(env) == "majepa_smac_v1"
    assert env.metadata["render_modes"] == ["rgb_array"]
    env.reset()
    assert env.agents == names and env.num_agents == env.max_num_agents == 5


def test_everything_lies_in_its_space_and_masks_agree():
    env = parallel_env("2s3z", seed=0)
    observations, infos = env.reset(seed=3)
    rng = np.random.default_rng(0)
    while env.agents:
        assert env.state_space.contains(env.state())
        for agent in env.agents:
            assert env.observation_space(agent).contains(observations[agent])
            mask = infos[agent]["action_mask"]
            assert mask.dtype == np.int8
            np.testing.assert_array_equal(mask, observations[agent]["action_mask"])
        actions = {
            agent: rng.choice(np.flatnonzero(infos[agent]["action_mask"])) for agent in env.agents
        }
        observations, _, _, _, infos = env.step(actions)
    assert all(info["illegal_actions"] == 0 for info in infos.values())


@pytest.mark.slow
def test_it_plays_what_the_smac_interface_plays():
    env, smac = parallel_env(DUEL), StarCraft2Env(DUEL, seed=11)
    observations, _ = env.reset(seed=11)
    views, state = smac.reset()
    done = False
    while not done:
        for agent, view in zip(env.possible_agents, views, strict=True):
            if agent in env.agents:
                np.testing.assert_array_equal(observations[agent]["observation"], view)
        np.testing.assert_array_equal(env.state(), state)
        expected, done, told = smac.step([row.index(1) for row in smac.get_avail_actions()])
        observations, rewards, _, _, infos = env.step(stand(env))
        assert set(rewards.values()) == {expected}
        for info in infos.values():
            assert {key: info[key] for key in told} == told
        views, state = smac.get_obs(), smac.get_state()
    assert env.agents == []


def test_the_dead_leave_and_the_living_go_on():
    env = parallel_env(DUEL)
    env.reset(seed=1)
    sizes = []
    while env.agents:
        acted = env.agents
        observations, rewards, terminations, truncations, infos = env.step(stand(env))
        for answer in (observations, rewards, terminations, truncations, infos):
            assert list(answer) == acted
        assert not any(truncations.values())
        assert env.agents == [agent for agent in acted if not terminations[agent]]
        for agent in acted:
            is_dead = observations[agent]["action_mask"][0] == 1
            assert terminations[agent] == is_dead
            assert infos[agent]["battle_won"] is False
        sizes.append(len(env.agents))
    assert sorted(sizes, reverse=True) == sizes and {2, 1, 0} <= set(sizes)
    with pytest.raises(EnvError, match="reset"):
        env.step({})


def test_victory_terminates_everyone():
    env = parallel_env(DUEL, seed=0)
    observations, _ = env.reset()
    rewards, terminations, infos = {}, {}, {}
    while env.agents:
        observations, rewards, terminations, _, infos = env.step(shoot(observations, env))
    assert all(terminations.values())
    assert all(info["battle_won"] and info["dead_enemies"] == 1 for info in infos.values())
    assert all(reward > 10 for reward in rewards.values())


def test_the_time_limit_truncates():
    env = parallel_env(SHORT, seed=0)
    env.reset()
    for _ in range(3):
        _, _, terminations, truncations, _ = env.step(stand(env))
        assert not any(terminations.values()) and not any(truncations.values())
    _, _, terminations, truncations, infos = env.step(stand(env))
    assert not any(terminations.values()) and all(truncations.values())
    assert env.agents == [] and not infos["marine_0"]["battle_won"]


def test_illegal_actions_become_stop_and_are_counted():
    env, twin = parallel_env(DUEL), parallel_env(DUEL)
    for one in (env, twin):
        one.reset(seed=2)
    agents = env.possible_agents
    env.step(dict(zip(agents, (6, 4, 0), strict=True)))
    twin.step(dict(zip(agents, (1, 4, 1), strict=True)))
    np.testing.assert_array_equal(env.state(), twin.state())
    infos = env.step(dict(zip(agents, (6, 1, 1), strict=True)))[4]
    assert [infos[agent]["illegal_actions"] for agent in agents] == [2, 0, 1]
    _, infos = env.reset()
    assert not any(info["illegal_actions"] for info in infos.values())


@pytest.mark.parametrize(
    ("actions", "told"),
    [
        ({"marine_0": 1, "marine_1": 1}, "missing: .'marine_2'"),
        ({"marine_0": 1, "marine_1": 1, "marine_2": 1, "marine_3": 1}, "unknown: .'marine_3'"),
        ({"marine_0": 1, "marine_1": 1, "marine_2": 7}, "0 to 6, not .7"),
        ({"marine_0": 1, "marine_1": "up", "marine_2": 1}, "marine_1 .*'up'"),
    ],
)
def test_wrong_actions_are_told_and_change_nothing(actions, told):
    env = parallel_env(DUEL)
    env.reset(seed=0)
    before = env.state()
    with pytest.raises(EnvError, match=told):
        env.step(actions)
    np.testing.assert_array_equal(env.state(), before)
    env.step(stand(env))


def test_seeds_begin_anew_and_resets_go_on():
    env = parallel_env(DUEL)

    def trail(**seed) -> list[float]:
        env.reset(**seed)
        total = []
        while env.agents:
            env.step(stand(env))
            total.append(env.state())
        return total

    first, next_one, again = trail(seed=4), trail(), trail(seed=4)
    np.testing.assert_array_equal(first, again)
    assert len(first) != len(next_one) or not np.array_equal(first, next_one)


GIVEN = {
    "difficulty": "3", "game_version": "4.6.2", "obs_pathing_grid": True,
    "obs_terrain_height": True, "replay_dir": "here", "replay_prefix": "run",
    "window_size_x": 640, "window_size_y": 480, "heuristic_ai": True, "heuristic_rest": True,
}  # fmt: skip


@pytest.mark.parametrize("door", [StarCraft2Env, parallel_env])
def test_what_cannot_be_honoured_is_refused_by_name(door):
    assert set(GIVEN) == set(REFUSED)
    with pytest.raises(EnvError) as caught:
        door("3m", **GIVEN)
    assert "Leave them out" in str(caught.value)
    for name, value in GIVEN.items():
        assert f"{name}={value!r}" in str(caught.value)
        with pytest.raises(EnvError) as alone:
            door("3m", **{name: value})
        assert [other for other in GIVEN if f"{other}=" in str(alone.value)] == [name]


@pytest.mark.parametrize("door", [StarCraft2Env, parallel_env])
def test_wrong_maps_and_steps_are_told(door):
    with pytest.raises(EnvError, match="'2s3Z'; did you mean 2s3z"):
        door("2s3Z")
    for wrong in ({"step_mul": 0}, {"move_amount": 0}):
        with pytest.raises(EnvError, match="must be positive"):
            door(DUEL, **wrong)


def test_there_is_no_window():
    with pytest.raises(EnvError, match="render_mode"):
        parallel_env("3m", render_mode="human")


def test_a_pickle_builds_an_equal_environment():
    env = pickle.loads(pickle.dumps(parallel_env(DUEL, seed=8)))
    env.reset()
    assert env.smac.seed() == 8 and env.smac.map_name == DUEL.name


def test_pictures():
    env = parallel_env(DUEL, render_mode="rgb_array", seed=0)
    env.reset()
    frame = env.render()
    assert frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3
    env.close()
    blind = parallel_env(DUEL, seed=0)
    with pytest.warns(UserWarning, match="render_mode"):
        assert blind.render() is None


@pytest.mark.parametrize("package", ["pettingzoo", "gymnasium"])
def test_without_pettingzoo_the_module_says_what_to_install(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "majepa.envs.pettingzoo")
    bare = importlib.import_module("majepa.envs.pettingzoo")
    with pytest.raises(EnvError, match=r"pip install 'majepa\[pettingzoo\]'"):
        bare.parallel_env("3m")
