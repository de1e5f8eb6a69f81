"""Rewards of hand-made battles, and battles with units and maps of one's own."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from skirmish import (
    COPIES,
    MAP_BATCH,
    NEVER,
    SHEETS,
    SPEC,
    STEPS,
    At,
    Lane,
    begin,
    duel,
    env_of,
    film,
    reach,
    starter,
    stepper,
)

from majepa.envs.sim import (
    UNITS,
    AttackMove,
    BattleEnv,
    Rules,
    Scenario,
    Spawn,
    Terrain,
)

pytestmark = pytest.mark.slow

# The zoo: 10 for each enemy, 200 for the victory, and all there is of hit points and shields.
ZOO_MAX = 200 + sum(
    count * (10 + SHEETS[kind].hp + SHEETS[kind].shield) for kind, count in COPIES.items()
)
SCALE = 20 / ZOO_MAX
RATE = 0.0171


@functools.cache
def battles() -> dict:
    ally = At("dummy", 2, 2)
    lone = At("dummy", 30, 30)
    """Another enemy, so that the battle is not over."""
    shooter = At("sniper", 12, 16, ("attack", 0))

    def lane(*enemies: At, allies: tuple[At, ...] = (shooter,)) -> Lane:
        return Lane(allies, enemies, may_be_illegal=True)

    silent = {"cooldown": NEVER}
    lanes = {
        "nothing": lane(lone, allies=(ally,)),
        "hit": lane(At("stalker", 16, 16, **silent), lone),
        "hit through armour": lane(At("spine_crawler", 16, 16, **silent), lone),
        "kill": lane(At("marine", 16, 16, hp=4, **silent), lone),
        "kill through a shield": lane(At("zealot", 16, 16, hp=2, shield=3, **silent), lone),
        "win": lane(At("marine", 16, 16, hp=4, **silent)),
        "regeneration": lane(
            At("zergling", 16, 16, hp=20), At("hydralisk", 28, 4, hp=20), lone, allies=(ally,)
        ),
        "full": lane(At("zergling", 16, 16), lone, allies=(ally,)),
        "shield": lane(At("zealot", 16, 16, shield=30), lone, allies=(ally,)),
        "healing": lane(At("medivac", 16, 16), At("marine", 18, 16, hp=20), lone, allies=(ally,)),
        "hit and shield": lane(
            At("stalker", 16, 16, **silent), At("zealot", 28, 4, shield=30), lone
        ),
        "more recovery than damage": lane(
            At("dummy", 16, 16),
            At("zealot", 28, 4, shield=30),
            At("colossus", 4, 28, shield=30),
            At("medivac", 28, 28),
            At("marine", 26, 28, hp=20),
            allies=(At("zergling", 15.1, 16, ("attack", 0)),),
        ),
        "own loss": lane(At("zealot", 16, 16), lone, allies=(At("marine", 16.9, 16, hp=5), ally)),
        "baneling": lane(At("baneling", 16, 16), lone, allies=(At("zealot", 16.9, 16), ally)),
        "dead before": lane(At("marine", 16, 16, hp=0), lone, allies=(ally,)),
    }
    return film(STEPS, lanes, 2)


@pytest.mark.parametrize(
    ("case", "points"),
    [
        ("nothing", 0),
        ("hit", 10),
        ("hit through armour", 10 - 2 - 7 * RATE),  # the crawler recovers in the other loops
        ("kill", 4 + 10),
        ("kill through a shield", 2 + 3 + 10),
        ("win", 4 + 10 + 200),
        ("regeneration", 2 * 8 * RATE),
        ("full", 0),
        ("shield", 8 * 0.125),
        ("healing", 8 * 9 / 16),
        ("hit and shield", 10 - 8 * 0.125),
        # One bite of 5; two shields regain 8 x 0.125 each, the medivac gives back 8 x 9 / 16.
        ("more recovery than damage", 2 * 8 * 0.125 + 8 * 9 / 16 - 5),
        ("own loss", 0),
        ("baneling", 30 + 10),
        ("dead before", 0),
    ],
)
def test_reward_of_a_step(case: str, points: float):
    reel = battles()[case]
    assert reel.reward[0] == pytest.approx(points * SCALE, rel=2e-3, abs=1e-6)
    assert reel.won[0] == (case == "win")


def test_the_dead_are_counted_once():
    assert battles()["kill"].reward[1] == 0
    assert battles()["baneling"].reward[1] == 0
    assert battles()["kill"].dead_enemies[0] == battles()["nothing"].dead_enemies[0]


def test_a_win_is_worth_twenty_in_all():
    """Where nothing recovers, whatever the way there. Sturdy marines win for certain."""
    env = env_of("3m")
    state = begin(env, MAP_BATCH)
    hp = np.array(state.units.hp)
    hp[:3] = 500.0
    state = state._replace(units=state.units._replace(hp=jnp.asarray(hp)))
    action = jnp.ones((MAP_BATCH, 3), jnp.int32)
    total, over, steps = np.zeros(MAP_BATCH), np.zeros(MAP_BATCH, bool), 0
    while not over.all():
        state, outcome = stepper(env)(state, action)
        total += np.where(over, 0, outcome.reward)
        over |= np.asarray(outcome.is_last)
        can_shoot = np.asarray(outcome.legal)[:, :, 6:]
        action = jnp.asarray(np.where(can_shoot.any(-1), 6 + can_shoot.argmax(-1), 1))
        steps += 1
    assert steps < 60
    np.testing.assert_allclose(total, 20, rtol=1e-5)


def test_reward_of_the_winning_step():
    """Three stalkers on the last of five zealots."""
    env = env_of("3s_vs_5z")
    assert env.outcome.max_reward == 5 * 10 + 200 + 5 * (100 + 50)
    state = begin(env, MAP_BATCH)
    # Out of everyone's way; all enemies but one have died already, unseen by the reward.
    x, hp = np.array(state.units.x), np.array(state.units.hp)
    hp[4:] = 0
    hp[3], x[:3], x[3] = 12, 10, 14
    y = np.array(state.units.y)
    y[:, :] = np.array([14, 16, 18, 16, 1, 2, 3, 4])[:, None]
    shield = np.array(state.units.shield)
    shield[3:] = 0
    units = state.units._replace(
        x=jnp.asarray(x), y=jnp.asarray(y), hp=jnp.asarray(hp), shield=jnp.asarray(shield)
    )
    state, outcome = stepper(env)(state._replace(units=units), jnp.full((MAP_BATCH, 3), 6))
    # 12 hit points, 10 for the kill, 200 for the victory; the divisor is 1000 / 20.
    np.testing.assert_allclose(outcome.reward, 222 * 20 / 1000, rtol=1e-5)
    assert np.asarray(outcome.won).all()
    assert np.asarray(outcome.is_last).all()


# A unit and a map of one's own.

ARCHER = dataclasses.replace(
    UNITS["marine"], name="archer", hp=60.0, damage=9.0, weapon_range=4.0, period=20.0
)
GOLEM = dataclasses.replace(
    UNITS["zealot"], name="golem", hp=300.0, shield=40.0, armour=3.0, speed=1.5, attacks=1
)
BRIDGE = Scenario(
    "bridge",
    Terrain.draw(
        """
        ....................
        ....................
        ....................
        ########....########
        ########....########
        ....................
        ....................
        ....................
        """
    ),
    allies=(Spawn((10, 6.5), ((ARCHER, 3), (UNITS["zealot"], 1))),),
    enemies=(Spawn((10, 1.5), ((GOLEM, 2),)),),
    order=AttackMove((10, 6.5)),
    limit=90,
)


@functools.cache
def bridge() -> tuple[BattleEnv, list]:
    """The environment and all rows of an episode played at random."""
    env = BattleEnv(BRIDGE, rules=Rules(spawn_jitter=0))
    state, row = jax.jit(env.reset)(jax.random.split(jax.random.key(3), 5))
    step, rows, key = jax.jit(env.step), [row], jax.random.key(4)
    over = np.zeros(5, bool)
    while not over.all():
        key, now = jax.random.split(key)
        scores = jax.random.uniform(now, row.legal.shape) + row.legal
        state, row = step(state, jnp.argmax(scores, -1))
        rows.append(jax.tree.map(np.asarray, row))
        over |= np.asarray(row.is_last)
        assert len(rows) <= BRIDGE.limit + 1
    assert not np.asarray(state.illegal).any()
    return env, rows


def test_a_new_map_with_new_units_has_the_right_sizes():
    env, rows = bridge()
    spec = env.spec
    # Three types told apart. An enemy: 4 numbers, health, shield (golems have one), type; an ally
    # the same; oneself: health, shield (the zealot has one), type.
    assert (spec.num_agents, spec.num_actions, spec.episode_limit) == (4, 6 + 2, 90)
    assert spec.observation_size == 4 + 2 * (4 + 2 + 3) + 3 * (4 + 2 + 3) + (2 + 3)
    # Agents: health, cooldown, x, y, shield, type; enemies have no cooldown; last actions.
    assert spec.state_size == 4 * (5 + 3) + 2 * (4 + 3) + 4 * 8
    assert spec.agent_names == ("archer", "archer", "archer", "zealot")
    assert spec.opponent_names == ("golem", "golem")
    for row in rows:
        assert row.observation.shape == (5, 4, spec.observation_size)
        assert row.state.shape == (5, spec.state_size)
        assert row.legal.shape == (5, 4, 8)
        assert np.isfinite(row.observation).all()
        assert np.isfinite(row.state).all()


def test_a_new_map_with_new_units_is_played_to_its_end():
    env, rows = bridge()
    assert env.outcome.max_reward == 2 * (10 + 340) + 200
    lengths = [next(t for t, row in enumerate(rows) if row.is_last[i]) for i in range(5)]
    assert all(0 < length <= BRIDGE.limit for length in lengths)
    # Golems are slow, not lazy: they came, and there was a fight.
    for i, length in enumerate(lengths):
        total = sum(float(row.reward[i]) for row in rows[1 : length + 1])
        dead = rows[length].info["dead_allies"][i]
        assert dead > 0 or total > 0
        assert total <= 20 * 1.5
    first = rows[0]
    assert first.is_first.all()
    # Allies are at (10, 6.5): health and shield are full, and positions are relative to 20 x 8.
    np.testing.assert_allclose(first.state[:, 0], 1)
    places = np.array([at for _, at in BRIDGE.ally_places])
    columns = first.state[0, : 4 * 8].reshape(4, 8)
    np.testing.assert_allclose(columns[:, 2], (places[:, 0] - 10) / 20, atol=1e-4)
    np.testing.assert_allclose(columns[:, 3], (places[:, 1] - 4) / 8, atol=1e-4)


FORT = Terrain.draw(
    """
    ################
    #..............#
    #..............#
    #......##......#
    #......##......#
    #......##......#
    #......##......#
    #......##......#
    #......##......#
    #..............#
    #..............#
    ################
    """
)


@functools.cache
def siege() -> dict[str, np.ndarray]:
    """A zealot and an archer attack those who do not fight back; the archer's stands beside it."""
    archer = dataclasses.replace(ARCHER, damage_point=0, period=16.0)
    statue = dataclasses.replace(GOLEM, weapon="none", speed=0.0)
    pacifist = dataclasses.replace(UNITS["zealot"], weapon="none", name="pacifist")
    scenario = duel(
        [(UNITS["zealot"], (5.5, 5.0)), (archer, (2.5, 9.5))],
        [(pacifist, (10.5, 5.0)), (statue, (5.5, 9.5))],
        terrain=FORT,
    )
    env = BattleEnv(scenario, rules=Rules(weapon_jitter=(0.0, 0.0)))
    state = starter(env)(jax.random.split(jax.random.key(0), 1))
    history = [state]
    for _ in range(16):
        state, _ = stepper(env, endless=True)(state, jnp.array([[6, 7]]))
        history.append(state)
    assert not np.asarray(state.illegal).any()
    return {
        name: np.array([np.asarray(getattr(s.units, name))[:, 0] for s in history])
        for name in ("x", "y", "hp", "shield")
    }


def test_a_drawn_wall_is_walked_around():
    """The wall x 7 to 9, y 3 to 9 stands between a zealot and its target; it goes south."""
    x, y = siege()["x"][:, 0], siege()["y"][:, 0]
    vitality = siege()["hp"][:, 2] + siege()["shield"][:, 2]
    corners = math.hypot(1.5, 2.0) + 2 + math.hypot(1.5, 2.0) - reach("zealot", "zealot")
    first = np.flatnonzero(vitality < 150)[0]
    assert corners / 1.125 <= first <= corners / 1.125 + 4
    r = SPEC["zealot"].separation
    assert not ((x > 7 - r + 0.01) & (x < 9 + r - 0.01) & (y > 3)).any()


def test_a_new_unit_fights_by_its_own_numbers():
    """Arrows of 9 on a golem: its shield of 40 takes four and 4 of the fifth; then 9 - 3 each.

    One lands in the first loop and in every sixteenth after it, that is in every other step.
    """
    hp, shield = siege()["hp"][1::2, 3], siege()["shield"][1::2, 3]
    np.testing.assert_allclose(shield[:6], [31, 22, 13, 4, 0, 0], atol=1e-3)
    np.testing.assert_allclose(hp[:6], [300, 300, 300, 300, 298, 292], atol=1e-3)
