"""Walls, ways around them, collisions, surrounds and start positions."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from skirmish import (
    DUMMY,
    LOOPS,
    MAP_BATCH,
    SPEC,
    STEPS,
    At,
    Lane,
    begin,
    duel,
    env_of,
    film,
    reach,
    stepper,
)

from majepa.envs.sim import SCENARIOS, UNITS, BattleEnv, Hunt, Rules

pytestmark = pytest.mark.slow

STOP, NORTH, SOUTH, EAST, WEST, TARGET = 1, 2, 3, 4, 5, 6


def put(state, changes: dict[tuple[str, int, int], float]):
    """The state with single entries (field, unit, lane) of the unit table replaced."""
    units = {name: np.array(value) for name, value in state.units._asdict().items()}
    for (field, unit, lane), value in changes.items():
        units[field][unit, lane] = value
    return state._replace(
        units=type(state.units)(**{name: jnp.asarray(value) for name, value in units.items()})
    )


# The ravine: a cliff one cell high at y = 12 from x = 4 to 28, with open ground at both ends.

COLOSSUS, ZEALOT, ZERGLING, STONE = range(4)
"""Units of the ravine; the last two are enemies."""


@functools.cache
def ravine() -> dict[str, np.ndarray]:
    """Positions [time, xy, unit, lane] and health; lane 0 climbs, 1 hunts, 2 attacks, 3 walks."""
    terrain = SCENARIOS["2c_vs_64zg"].terrain
    allies = [(UNITS["colossus"], (16.0, 16.0)), (UNITS["zealot"], (6.5, 14.5))]
    foes = [(UNITS["zergling"], (16.0, 9.0)), (dataclasses.replace(DUMMY, hp=9000), (6.5, 10.5))]
    scenario = dataclasses.replace(duel(allies, foes, terrain=terrain), order=Hunt())
    env = BattleEnv(scenario, rules=Rules(weapon_jitter=(0.0, 0.0), spawn_jitter=0))
    state = begin(env, 4)
    changes: dict[tuple[str, int, int], float] = {("y", COLOSSUS, 0): 14.0}
    for lane in (0, 2, 3):
        changes["hp", ZERGLING, lane] = 0
    changes["hp", ZEALOT, 1] = changes["hp", STONE, 1] = 0
    state = put(state, changes)
    action = jnp.full((4, 2), STOP)
    action = action.at[0, COLOSSUS].set(SOUTH).at[2, ZEALOT].set(TARGET + 1)
    action = action.at[3, ZEALOT].set(SOUTH)
    places, hp = [np.stack([state.units.x, state.units.y])], [np.asarray(state.units.hp)]
    for _ in range(24):
        state, _ = stepper(env, endless=True)(state, action)
        places.append(np.stack([state.units.x, state.units.y]))
        hp.append(np.asarray(state.units.hp))
    return {"at": np.stack(places), "hp": np.stack(hp), "illegal": np.asarray(state.illegal)}


def on_cliff(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (x > 4) & (x < 28) & (y > 12) & (y < 13)


def test_a_colossus_walks_over_the_cliff():
    x, y = ravine()["at"][:, :, COLOSSUS, 0].T
    # South by 1.125 a step: 14, 12.875 (on the cliff), 11.75, ... while that is legal.
    np.testing.assert_allclose(y[:4], [14, 12.875, 11.75, 10.625], atol=1e-3)
    np.testing.assert_allclose(x, 16, atol=1e-3)
    assert on_cliff(x, y)[1]


def test_a_colossus_stays_within_the_outer_border():
    y = ravine()["at"][:, 1, COLOSSUS, 0]
    # The ground ends at y = 6; look-ahead of 1 is illegal from below 7.
    assert y.min() >= 6 + SPEC["colossus"].separation - 1e-3
    assert y[-1] < 7


def test_a_zergling_runs_around_the_cliff():
    x, y = ravine()["at"][:, :, ZERGLING, 1].T
    gap = np.hypot(x - 16, y - 16)
    # Either end: from (16, 9) past the corner (4, 12.5) to (16, 16), less the reach of its bite.
    around = 2 * math.hypot(16 - 4, 3.5) - reach("zergling", "colossus")
    least = around / (2.953 / 2)
    arrival = int(np.flatnonzero(gap <= reach("zergling", "colossus") + 1e-3)[0])
    assert least <= arrival <= least + 4, (least, arrival)
    assert not on_cliff(x, y).any()
    assert gap[-1] <= reach("zergling", "colossus") + 1e-3


def test_an_attack_order_walks_around_the_cliff():
    x, y = ravine()["at"][:, :, ZEALOT, 2].T
    around = 2 * math.hypot(6.5 - 4, 2.0) - reach("zealot", "dummy")
    least = around / 1.125
    bitten = np.flatnonzero(ravine()["hp"][:, STONE, 2] < 9000)
    assert least <= bitten[0] <= least + 4
    assert not on_cliff(x, y).any()
    assert ravine()["illegal"][2] == 0


def test_a_move_order_is_a_straight_line_into_the_wall():
    x, y = ravine()["at"][:, :, ZEALOT, 3].T
    np.testing.assert_allclose(x, 6.5, atol=1e-3)
    # It stops at the cliff's edge, its separation radius away.
    assert y.min() == pytest.approx(13 + SPEC["zealot"].separation, abs=1e-2)


# Corridor.


@functools.cache
def all_stop(name: str) -> dict[str, np.ndarray]:
    """One whole episode of several seeds in which no agent does anything."""
    env = env_of(name)
    allies, enemies = env.arena.allies, env.arena.enemies
    state = begin(env, MAP_BATCH, seed=7)
    start = np.stack([state.units.x, state.units.y])
    action = jnp.full((MAP_BATCH, env.arena.num_allies), STOP)
    over = np.zeros(MAP_BATCH, bool)
    most = np.zeros(MAP_BATCH, int)
    drift = overlap = 0.0
    steps = 0
    is_melee = np.array([SPEC[unit.name].range < 1 for unit in env.arena.units[enemies]])
    far = np.array(
        [[reach(e.name, a.name) for e in env.arena.units[enemies]] for a in env.arena.units[allies]]
    )[..., None]
    sums = env.arena.contact
    while not over.all() and steps < env.arena.scenario.limit:
        state, outcome = stepper(env)(state, action)
        steps += 1
        over |= np.asarray(outcome.is_last)
        units = jax.tree.map(np.asarray, state.units)
        alive = units.hp > 0
        gap = np.hypot(units.x[:, None] - units.x[None], units.y[:, None] - units.y[None])
        target = np.asarray(state.minds.target)[enemies]
        attacks = target[None] == np.arange(env.arena.num_allies)[:, None, None]
        attacks &= (gap[allies, enemies] <= far + 1e-3) & is_melee[None, :, None]
        attacks &= alive[allies][:, None] & alive[enemies][None]
        most = np.where(over, most, np.maximum(most, attacks.sum(1).max(0)))
        moved = np.hypot(units.x - start[0], units.y - start[1])[allies]
        drift = max(drift, np.where(alive[allies] & ~over, moved, 0).max())
        touching = (sums > 0) & alive[:, None] & alive[None] & ~over
        overlap = max(overlap, np.where(touching, 1 - gap / np.where(sums > 0, sums, 1), 0).max())
    return {"most": most, "drift": drift, "overlap": overlap, "over": over, "steps": steps}


def ring(attacker: str, target: str) -> int:
    """How many attackers fit around a target, all of them within reach and none overlapping.

    They stand on a circle as wide as their reach, neighbours two separation radii apart.
    """
    angle = 2 * math.asin(SPEC[attacker].separation / reach(attacker, target))
    return int(2 * math.pi / angle)


def test_geometric_bounds_of_surrounds():
    assert ring("zergling", "zealot") == 7  # asin(0.375 / 0.975): 45.2 degrees each
    assert ring("zealot", "stalker") == 10  # asin(0.375 / 1.225): 35.7 degrees each
    assert ring("zealot", "zealot") == 9  # asin(0.375 / 1.1): 39.9 degrees each


@pytest.mark.parametrize(
    ("name", "most"),
    # 2s3z has three zealots to attack with.
    [("corridor", 6), ("3s_vs_5z", 3), ("2s3z", 4)],
)
def test_how_many_attack_one_agent_at_once(name: str, most: int):
    counts = all_stop(name)["most"]
    assert counts.max() <= most + 1, counts
    assert counts.max() >= most - 1, counts


@pytest.mark.parametrize("name", ["corridor", "3s_vs_5z", "2s3z"])
def test_agents_that_stand_are_not_shoved_about(name: str):
    assert all_stop(name)["over"].all()
    assert all_stop(name)["drift"] < 0.05


@pytest.mark.parametrize(
    ("name", "deepest"), [("corridor", 0.5), ("3s_vs_5z", 0.17), ("2s3z", 0.17)]
)
def test_units_hardly_overlap(name: str, deepest: float):
    """At the end of any step, as a part of the two separation radii.

    Half of them means that one's centre lies within another's disc. Where few units meet, they
    overlap no deeper than in the simulator that the maps' start positions were taken from.
    """
    assert all_stop(name)["overlap"] < deepest


def test_a_zergling_runs_through_the_corridor():
    """From its spawn to the attack point, alone; the only agent left is far from its way."""
    env = env_of("corridor")
    state = begin(env, MAP_BATCH)
    changes: dict[tuple[str, int, int], float] = {}
    for lane in range(MAP_BATCH):
        changes |= {("hp", unit, lane): 0.0 for unit in range(1, 30) if unit != 6 + 4 * lane}
        changes["x", 0, lane], changes["y", 0, lane] = 27.5, 16.5
    state = put(state, changes)
    rows = [(6 + 4 * lane, lane) for lane in range(MAP_BATCH)]
    action = jnp.full((MAP_BATCH, 6), STOP)
    gaps, inside = [], []
    walkable = SCENARIOS["corridor"].terrain.walkable
    for _ in range(32):
        state, _ = stepper(env)(state, action)
        x, y = (np.array([v[row] for row in rows]) for v in (state.units.x, state.units.y))
        gaps.append(np.hypot(x - 4.47, y - 4.33))
        inside.append(walkable[x.astype(int), y.astype(int)])
    assert np.all(inside)
    arrival = np.argmax(np.array(gaps) < 0.5, axis=0) + 1
    # It starts anywhere in a block of five by five around (27.91, 28.24).
    least = (math.hypot(27.91 - 4.47, 28.24 - 4.33) - 2.9) / (2.953 / 2)
    assert (np.array(gaps)[-1] < 0.5).all()
    assert (arrival >= least).all()
    assert (arrival <= least + 8).all(), (least, arrival)
    assert (np.asarray(state.units.hp)[0] == 100).all()


def test_five_zealots_block_the_choke():
    """It is four cells wide at y = 13; five discs of 0.75 leave gaps of 0.0625 to pass through."""
    env = env_of("corridor")
    state = begin(env, MAP_BATCH)
    changes: dict[tuple[str, int, int], float] = {}
    for lane in range(MAP_BATCH):
        changes["hp", 5, lane] = 0.0
        for i in range(5):
            changes["x", i, lane], changes["y", i, lane] = 11.375 + 0.8125 * i, 13.0
            changes["hp", i, lane] = 1e5
    state = put(state, changes)
    for _ in range(40):
        state, _ = stepper(env)(state, jnp.full((MAP_BATCH, 6), STOP))
        assert np.asarray(state.units.y)[6:].min() > 12.5
    bitten = 5e5 - np.asarray(state.units.hp)[:5].sum(0)
    assert (bitten > 500).all()  # they all came


# Collisions in the open, loop by loop.


@functools.cache
def bumps() -> dict:
    far = [At("dummy", 2, 2)]
    lanes: dict = {}
    for name in SPEC:
        if SPEC[name].speed and SPEC[name].plane == "ground":
            lanes["meet", name] = Lane(
                [At(name, 12, 16, "east"), At("zealot", 17, 16, "west")], far
            )
            lanes["stand", name] = Lane([At(name, 13, 16, "east"), At("zealot", 16, 16)], far)
            lanes["fight", name] = Lane(
                [At(name, 13, 16, "east"), At("dummy", 16, 17.05)], [At("zealot", 16, 16)]
            )
            lanes["wall", name] = Lane([At(name, 2, 16, "west")], far)
    lanes["corpse"] = Lane(
        [At("zealot", 13, 16, "east"), At("zealot", 15, 16, hp=0), At("stalker", 17, 16, hp=0)], far
    )
    lanes["air"] = Lane([At("medivac", 12, 16, "east"), At("medivac", 16, 16)], far)
    lanes["stack"] = Lane([At("zergling", 16, 16, "east"), At("zergling", 16, 16, "east")], far)
    return film(LOOPS, lanes, 60)


WALKERS = tuple(n for n, sheet in SPEC.items() if sheet.speed and sheet.plane == "ground")


@pytest.mark.parametrize("name", WALKERS)
def test_units_that_meet_do_not_pass_through_each_other(name: str):
    one, other = bumps()["meet", name].allies
    both = SPEC[name].separation + SPEC["zealot"].separation
    assert one.gap(other).min() >= 0.85 * both
    # Nobody is thrown about either.
    for track, kind in ((one, name), (other, "zealot")):
        stride = np.hypot(np.diff(track.x), np.diff(track.y))
        assert stride.max() <= 2.05 * SPEC[kind].speed / 16


@pytest.mark.parametrize("name", WALKERS)
def test_who_stands_is_not_shoved_by_who_walks(name: str):
    walker, still = bumps()["stand", name].allies
    assert math.hypot(np.ptp(still.x), np.ptp(still.y)) < 0.01
    both = SPEC[name].separation + SPEC["zealot"].separation
    assert walker.gap(still).min() >= 0.85 * both


@pytest.mark.parametrize("name", WALKERS)
def test_who_fights_is_not_shoved_by_who_walks(name: str):
    still = bumps()["fight", name].enemies[0]
    assert math.hypot(np.ptp(still.x), np.ptp(still.y)) < 0.01


@pytest.mark.parametrize("name", WALKERS)
def test_the_edge_of_the_map_is_a_wall(name: str):
    track = bumps()["wall", name].allies[0]
    assert track.x.min() >= SPEC[name].separation - 1e-3
    np.testing.assert_allclose(track.y, 16, atol=1e-3)


def test_the_dead_are_in_nobodys_way():
    walker = bumps()["corpse"].allies[0]
    np.testing.assert_allclose(walker.x, 13 + np.arange(61) * 2.25 / 16, atol=1e-3)
    np.testing.assert_allclose(walker.y, 16, atol=1e-3)


def test_flyers_bump_into_flyers():
    mover, still = bumps()["air"].allies
    assert mover.gap(still).min() >= 0.85 * 1.5
    assert math.hypot(np.ptp(still.x), np.ptp(still.y)) < 0.02


def test_units_in_one_place_come_apart():
    one, other = bumps()["stack"].allies
    assert one.gap(other)[-1] >= 0.7


# Start positions.


def start_of(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Places of both sides before the shift that differs from battle to battle."""
    env = BattleEnv(SCENARIOS[name], rules=Rules(spawn_jitter=0))
    state = begin(env, MAP_BATCH)
    at = np.stack([state.units.x[:, 0], state.units.y[:, 0]], axis=1)
    return at[env.arena.allies], at[env.arena.enemies]


SPAWNS = {
    # Agents are numbered by type, x, y: of 2s3z the zealot that ends the first row comes last.
    "2s3z": (
        [(7.875, 15.45), (9.175, 15.45), (7.75, 16.625), (8.8, 16.625), (10.35, 15.45)],
        [(24.125, 16.55), (22.825, 16.55), (21.65, 16.55), (24.25, 15.375), (23.2, 15.375)],
    ),
    "3s_vs_5z": ([(8.375, 15.35), (8.375, 16.65), (9.675, 15.35)], []),
    "corridor": ([(18.04, 18.57)], [(29.41, 29.84)]),
    "2c_vs_64zg": ([(15, 15.975), (17.05, 15.975)], [(18.625, 11.8)]),
    "2m_vs_1z": ([(13, 12), (19, 12)], [(16, 19)]),
    "2s_vs_1sc": ([(11.12, 10.34), (16.98, 10.37)], [(13.92, 20.04)]),
}


@pytest.mark.parametrize("name", SPAWNS)
def test_formations(name: str):
    sides = SCENARIOS[name].ally_places, SCENARIOS[name].enemy_places
    for places, expected in zip(sides, SPAWNS[name], strict=True):
        if expected:
            got = [at for _, at in places[: len(expected)]]
            np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in SPAWNS if name != "2c_vs_64zg"])
def test_battles_start_in_formation(name: str):
    for got, expected in zip(start_of(name), SPAWNS[name], strict=True):
        if expected:
            np.testing.assert_allclose(got[: len(expected)], expected, atol=2e-3)


def test_sixty_four_zerglings_form_a_square():
    steps = np.arange(8) * 0.8
    expected = [(18.625 - x, 11.8 - y) for y in steps for x in steps]
    got = [at for _, at in SCENARIOS["2c_vs_64zg"].enemy_places]
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_sixty_four_zerglings_start_clear_of_the_walls():
    """Their square is 6.35 high and the ground between border and cliff is 6: it is squeezed in."""
    allies, foes = start_of("2c_vs_64zg")
    np.testing.assert_allclose(allies, SPAWNS["2c_vs_64zg"][0], atol=2e-3)
    places = np.array([at for _, at in SCENARIOS["2c_vs_64zg"].enemy_places])
    assert np.abs(foes[:, 0] - places[:, 0]).max() < 0.1
    assert np.abs(foes[:, 1] - places[:, 1]).max() < 0.18
    assert foes[:, 1].min() >= 6 + 0.375 - 1e-3
    assert foes[:, 1].max() <= 12 - 0.375 + 1e-3


# Roster orders as SMAC numbers them: types first, then x, then y.
ORDERS = {
    "MMM": (["marauder"] * 2 + ["marine"] * 7 + ["medivac"],
            ["marine"] * 7 + ["marauder"] * 2 + ["medivac"]),
    "MMM2": (["marauder"] * 2 + ["marine"] * 7 + ["medivac"],
             ["marine"] * 8 + ["marauder"] * 3 + ["medivac"]),
    "1c3s5z": (["colossus"] + ["stalker"] * 3 + ["zealot"] * 5,) * 2,
    "3s5z": (["stalker"] * 3 + ["zealot"] * 5,) * 2,
    "3s5z_vs_3s6z": (["stalker"] * 3 + ["zealot"] * 5, ["stalker"] * 3 + ["zealot"] * 6),
    "bane_vs_bane": (["baneling"] * 4 + ["zergling"] * 20, ["zergling"] * 20 + ["baneling"] * 4),
    "6h_vs_8z": (["hydralisk"] * 6, ["zealot"] * 8),
    "so_many_baneling": (["zealot"] * 7, ["baneling"] * 32),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_numbering_of_units(name: str):
    scenario = SCENARIOS[name]
    allies, enemies = ORDERS[name]
    assert [unit.name for unit in scenario.ally_roster] == allies
    assert [unit.name for unit in scenario.enemy_roster] == enemies
    keys = [(allies.index(unit.name), *at) for unit, at in scenario.ally_places]
    assert keys == sorted(keys)


CENTRES = {
    "bane_vs_bane": [("ally", "zergling", (16, 11)), ("ally", "baneling", (16, 8)),
                     ("enemy", "zergling", (16, 21)), ("enemy", "baneling", (16, 24))],
    "6h_vs_8z": [("ally", "hydralisk", (14.60, 9.49)), ("enemy", "zealot", (14.41, 16.76))],
    "so_many_baneling": [("ally", "zealot", (11.469, 12.0234)),
                         ("enemy", "baneling", (27.91, 28.24))],
    "MMM": [("ally", "marine", (9, 16)), ("enemy", "marine", (23, 16))],
    "25m": [("ally", "marine", (9, 16)), ("enemy", "marine", (23, 16))],
}  # fmt: skip


@pytest.mark.parametrize("name", CENTRES)
def test_units_start_around_their_points(name: str):
    scenario = SCENARIOS[name]
    for side, kind, (x, y) in CENTRES[name]:
        places = scenario.ally_places if side == "ally" else scenario.enemy_places
        at = np.array([place for unit, place in places if unit.name == kind])
        assert abs(at.mean(0) - (x, y)).max() < 1.0, (side, kind)


MARCHES = {
    "3m": (9, 16), "3s_vs_5z": (9, 16), "corridor": (4.47, 4.33), "so_many_baneling": (4.47, 4.33),
    "bane_vs_bane": (16, 8), "6h_vs_8z": (14.60, 9.49), "MMM2": (9, 16),
}  # fmt: skip


@pytest.mark.parametrize("name", MARCHES)
def test_where_the_enemy_marches(name: str):
    order = SCENARIOS[name].order
    assert (order.start, order.end) == (MARCHES[name], None)


def test_the_zealot_marches_between_the_marines():
    """To a point drawn anew for every episode, uniformly on the segment between them."""
    env = env_of("2m_vs_1z")
    state = begin(env, 256)
    x, y = np.asarray(state.goal)
    np.testing.assert_allclose(y, 12, atol=1e-5)
    assert 13 <= x.min() < 13.3
    assert 18.7 < x.max() <= 19
    assert x.mean() == pytest.approx(16, abs=0.4)
    assert x.std() == pytest.approx(6 / math.sqrt(12), abs=0.2)
    ended = state._replace(is_over=jnp.ones(256, bool))
    again, _ = stepper(env)(ended, jnp.full((256, 2), STOP))
    moved = np.abs(np.asarray(again.goal)[0] - x)
    assert np.median(moved) > 0.5
    np.testing.assert_array_equal(np.asarray(again.steps), 0)
    # It stays the same through an episode.
    later, _ = stepper(env)(state, jnp.full((256, 2), STOP))
    np.testing.assert_array_equal(np.asarray(later.goal)[0], x)


def test_a_battle_of_eight_loops_is_eight_battles_of_one_loop():
    """The two stages of these tests agree on a fight in the open."""

    def lane(order: list) -> Lane:
        stalker = At("stalker", 12, 16, order)
        return Lane(
            [stalker, At("zealot", 14, 17, order)], [At("zealot", 16.5, 16)], march=(16.5, 16)
        )

    fine = film(LOOPS, {0: lane([("attack", 0)])}, 64)[0]
    coarse = film(STEPS, {0: lane([("attack", 0)])}, 8)[0]
    for one, other in zip(fine.allies + fine.enemies, coarse.allies + coarse.enemies, strict=True):
        for field in ("x", "y", "hp", "shield"):
            got, expected = getattr(one, field)[::8], getattr(other, field)
            np.testing.assert_allclose(got, expected, atol=1e-3, err_msg=field)


def test_a_colossus_on_the_cliff_is_attacked_from_either_side():
    env = BattleEnv(SCENARIOS["2c_vs_64zg"])
    state, _ = jax.jit(env.reset)(jax.random.split(jax.random.key(0), 2))
    units = state.units
    # The first colossus stands on the ravine, eight zerglings north of it in one battle and south
    # of it in the other; everybody else is dead.
    x, y, hp = (np.array(column) for column in (units.x, units.y, units.hp))
    hp[1], hp[10:] = 0, 0
    x[0], y[0] = 16.0, 12.5
    x[2:10] = np.arange(8)[:, None] + 12.5
    y[2:10] = np.array([15.5, 9.5])
    state = state._replace(
        units=units._replace(x=jnp.asarray(x), y=jnp.asarray(y), hp=jnp.asarray(hp))
    )
    step = jax.jit(env.step)
    for _ in range(4):
        state, _ = step(state, jnp.array([[1, 0], [1, 0]], jnp.int32))
    assert (np.asarray(state.units.vitality[0]) < 350).all()
    assert (np.asarray(state.units.y[2:10, 0]) > 12).all()
    assert (np.asarray(state.units.y[2:10, 1]) < 13).all()
