"""Scripted policies: legal always, and each does what its name says."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from majepa.envs import EnvError, make_env
from majepa.envs.scripted import POLICIES, scripted_policy

pytestmark = pytest.mark.slow

SPEC = make_env("2s3z").spec
SIGHT = 9.0


def view(**enemies: dict[str, float]):
    """What a lone living agent sees: enemies by number, distances in cells."""
    names = list(SPEC.observation_names)
    observation = np.zeros((1, SPEC.num_agents, len(names)), np.float32)
    legal = np.zeros((1, SPEC.num_agents, SPEC.num_actions), bool)
    legal[..., 0] = True
    legal[0, 0] = False
    legal[0, 0, 1:6] = True
    for name, features in enemies.items():
        values = {"health": 1.0, "shield": 1.0, **features}
        values["distance"] = float(np.hypot(values["dx"], values["dy"]))
        in_range = values["distance"] <= 6
        legal[0, 0, 6 + int(name[1:])] = in_range
        for feature in ("distance", "dx", "dy"):
            values[feature] /= SIGHT
        for feature, value in values.items():
            observation[0, 0, names.index(f"enemy_{name[1:]}/{feature}")] = value
    return jnp.asarray(observation), jnp.asarray(legal)


def act(policy: str, **enemies) -> str:
    action = scripted_policy(policy, SPEC)(*view(**enemies), jax.random.key(0))
    return SPEC.action_names[int(action[0, 0])]


def test_nearest_weakest_and_kite_choose_as_they_say():
    near_strong, far_weak = {"dx": 0.0, "dy": 4.0}, {"dx": 5.0, "dy": 0.0, "health": 0.1}
    assert act("nearest", e1=near_strong, e3=far_weak) == "target_1"
    assert act("weakest", e1=near_strong, e3=far_weak) == "target_3"
    assert act("kite", e1=near_strong, e3=far_weak) == "target_1"
    assert act("kite", e1={"dx": 0.0, "dy": 2.0}) == "south"
    assert act("kite", e1={"dx": -2.0, "dy": 0.5}) == "east"


def test_out_of_range_enemies_are_approached():
    assert act("nearest", e0={"dx": 7.0, "dy": 1.0}) == "east"
    assert act("weakest", e0={"dx": 0.0, "dy": -7.0}) == "south"


def test_stop_stops_and_the_dead_do_nothing():
    assert act("stop", e0={"dx": 1.0, "dy": 0.0}) == "stop"
    action = scripted_policy("stop", SPEC)(*view(), jax.random.key(0))
    assert action[0, 1] == 0


def test_a_healer_mends_the_weakest_in_range():
    spec = make_env("MMM").spec
    medivac = spec.agent_names.index("medivac")
    names = list(spec.observation_names)
    observation = np.zeros((1, spec.num_agents, len(names)), np.float32)
    for other, health in ((0, 0.9), (4, 0.2), (7, 0.5)):
        observation[0, medivac, names.index(f"ally_{other}/health")] = health
    legal = np.zeros((1, spec.num_agents, spec.num_actions), bool)
    legal[..., 0] = True
    legal[0, medivac] = False
    legal[0, medivac, [1, 2, 3, 4, 5, 6 + 0, 6 + 4, 6 + 7]] = True
    policy = scripted_policy("nearest", spec)
    action = policy(jnp.asarray(observation), jnp.asarray(legal), jax.random.key(0))
    assert action[0, medivac] == 6 + 4


@pytest.mark.parametrize("policy", POLICIES)
def test_every_action_is_legal(policy):
    env = make_env("MMM")
    act = jax.jit(scripted_policy(policy, env.spec))
    state, row = _reset()(jax.random.split(jax.random.key(0), 16))
    for index in range(25):
        action = act(row.observation, row.legal, jax.random.key(index))
        assert np.take_along_axis(np.asarray(row.legal), np.asarray(action)[..., None], -1).all()
        state, row = _step()(state, action)


@functools.cache
def _reset():
    return jax.jit(make_env("MMM").reset)


@functools.cache
def _step():
    return jax.jit(make_env("MMM").step)


def test_random_is_uniform_over_legal_actions():
    legal = jnp.asarray(np.array([0, 1, 0, 1, 1, 0], bool))
    legal = jnp.broadcast_to(legal, (3000, 1, 6))
    spec = dataclasses.replace(SPEC, num_actions=6)
    policy = scripted_policy("random", spec)
    action = np.asarray(policy(jnp.zeros((3000, 1, 1)), legal, jax.random.key(0)))
    counts = np.bincount(action.ravel(), minlength=6)
    assert (counts[[0, 2, 5]] == 0).all()
    assert (abs(counts[[1, 3, 4]] - 1000) < 120).all()


def test_what_cannot_be_played_says_so():
    with pytest.raises(EnvError, match="did you mean weakest"):
        scripted_policy("weak", SPEC)
    nameless = dataclasses.replace(SPEC, observation_names=())
    with pytest.raises(EnvError, match="only 'random' and 'stop'"):
        scripted_policy("nearest", nameless)
    with pytest.raises(EnvError, match="no stop action"):
        scripted_policy("stop", dataclasses.replace(SPEC, stop_index=None))
