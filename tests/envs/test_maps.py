"""The 23 maps: sizes as SMAC's own class reports them, rosters, names, new maps as data."""

import dataclasses

import jax
import numpy as np
import pytest

from majepa.envs import EnvError, make_env
from majepa.envs.sim import (
    SCENARIOS,
    SIM_VERSION,
    UNITS,
    AttackMove,
    BattleEnv,
    Scenario,
    Spawn,
    Terrain,
)

# agents, enemies, limit, actions, observation, state, max_reward; by SMAC's own code.
SIZES = {
    "2m_vs_1z": (2, 1, 150, 7, 16, 26, 360),
    "2s_vs_1sc": (2, 1, 300, 7, 17, 27, 510),
    "2s3z": (5, 5, 120, 11, 80, 120, 1020),
    "3m": (3, 3, 60, 9, 30, 48, 365),
    "3s_vs_3z": (3, 3, 150, 9, 36, 54, 680),
    "8m": (8, 8, 120, 14, 80, 168, 640),
    "MMM": (10, 10, 150, 16, 160, 290, 1015),
    "so_many_baneling": (7, 32, 100, 38, 202, 397, 1480),
    "3s_vs_4z": (3, 4, 200, 10, 42, 61, 840),
    "3s_vs_5z": (3, 5, 250, 11, 48, 68, 1000),
    "2c_vs_64zg": (2, 64, 400, 70, 332, 342, 3080),
    "corridor": (6, 24, 400, 30, 156, 282, 1280),
    "1c3s5z": (9, 9, 180, 15, 162, 270, 1870),
    "3s5z": (8, 8, 150, 14, 128, 216, 1510),
    "5m_vs_6m": (5, 6, 70, 12, 55, 98, 530),
    "8m_vs_9m": (8, 9, 120, 15, 85, 179, 695),
    "10m_vs_11m": (10, 11, 150, 17, 105, 243, 805),
    "25m": (25, 25, 150, 31, 250, 950, 1575),
    "27m_vs_30m": (27, 30, 180, 36, 285, 1170, 1850),
    "bane_vs_bane": (24, 24, 200, 30, 336, 984, 1260),
    "6h_vs_8z": (6, 8, 150, 14, 78, 140, 1480),
    "3s5z_vs_3s6z": (8, 9, 170, 15, 136, 230, 1670),
    "MMM2": (10, 12, 180, 18, 176, 322, 1205),
}


def test_all_23_maps_are_there():
    assert list(SCENARIOS) == list(SIZES)


@pytest.mark.parametrize("map_name", SIZES)
def test_sizes_are_smacs(map_name):
    env = make_env(map_name)
    spec = env.spec
    sizes = (
        spec.num_agents,
        len(spec.opponent_names),
        spec.episode_limit,
        spec.num_actions,
        spec.observation_size,
        spec.state_size,
        env.outcome.max_reward,
    )
    assert sizes == SIZES[map_name]
    assert len(spec.observation_names) == len(set(spec.observation_names)) == spec.observation_size
    assert len(spec.state_names) == len(set(spec.state_names)) == spec.state_size
    assert spec.version == SIM_VERSION


def test_names_with_and_without_family_are_the_same_map():
    assert make_env("2s3z").spec == make_env("sim:2s3z").spec


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("2s4z", "2s3z"),
        ("mmm", "MMM"),
        ("sim:corrider", "corridor"),
        ("sin:2s3z", "sim"),
        ("", "choose one of 2m_vs_1z"),
    ],
)
def test_a_wrong_name_gets_the_nearest_right_ones(wrong, hint):
    with pytest.raises(EnvError, match=hint):
        make_env(wrong)


QUICK = ("3m", "MMM", "so_many_baneling", "corridor")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SCENARIOS],
)
def test_every_spawn_is_on_open_ground_and_free(name):
    scenario = SCENARIOS[name]
    env = BattleEnv(scenario)
    state, _ = jax.jit(env.reset)(jax.random.split(jax.random.key(0), 1))
    x, y = np.asarray(state.units.x[:, 0]), np.asarray(state.units.y[:, 0])
    is_open = scenario.terrain.walkable[x.astype(int), y.astype(int)]
    assert (is_open | env.arena.is_flyer[:, 0]).all()
    distance = np.hypot(x[:, None] - x, y[:, None] - y)
    contact = env.arena.contact[..., 0]
    assert (distance >= 0.95 * contact)[contact > 0].all()


@pytest.mark.slow
def test_a_map_and_a_unit_of_ones_own_in_a_few_lines():
    firebat = dataclasses.replace(
        UNITS["marine"], name="firebat", hp=100, armour=1, damage=8, attacks=2, weapon_range=2
    )
    island = Terrain.draw("""
        ################
        #......##......#
        #......~~......#
        #......##......#
        #..............#
        ################
    """)
    scenario = Scenario(
        "2f_vs_3g",
        island,
        allies=(Spawn((3, 3), ((firebat, 2),)),),
        enemies=(Spawn((12, 3), ((UNITS["zergling"], 3),)),),
        order=AttackMove((3, 3)),
        limit=80,
    )
    env = BattleEnv(scenario)
    assert env.spec.num_actions == 6 + 3
    assert env.spec.observation_size == 4 + 3 * 5 + 1 * 5 + 1
    step = jax.jit(env.step)
    state, row = jax.jit(env.reset)(jax.random.split(jax.random.key(0), 2))
    assert not row.legal[:, :, 6:].any()
    for _ in range(80):
        attack = np.asarray(row.legal)[..., 6:]
        action = np.where(attack.any(-1), 6 + attack.argmax(-1), np.asarray(~row.legal[..., 0]))
        state, row = step(state, action.astype(np.int32))
        if row.is_last.all():
            break
    assert row.won.all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"limit": 0}, "limit must be at least 1"),
        ({"enemies": ()}, "has no enemies"),
        ({"enemy_type_order": ("zealot",)}, "enemy_type_order"),
        ({"allies": (Spawn((90, 16), ((UNITS["marine"], 1),)),)}, "outside the map"),
        (
            {"allies": (Spawn((9, 16), ((UNITS["marine"], 3), (UNITS["medivac"], 1))),)},
            "only 3 target actions",
        ),
    ],
)
def test_a_scenario_that_cannot_be_played_says_why(change, message):
    with pytest.raises(ValueError, match=message):
        BattleEnv(dataclasses.replace(SCENARIOS["3m"], **change))


def test_terrain_that_cannot_be_says_why():
    with pytest.raises(ValueError, match="does not fit"):
        Terrain.box(0, 0, 40, 10)
    with pytest.raises(ValueError, match="differ in length"):
        Terrain.draw("..\n...")
    with pytest.raises(ValueError, match="hp is 0"):
        dataclasses.replace(UNITS["marine"], hp=0)
