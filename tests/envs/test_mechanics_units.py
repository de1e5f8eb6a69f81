"""Every unit type by hand arithmetic: its numbers, its walk, its shots, its damage."""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from skirmish import (
    ENEMY_MEDIVAC_SPEED,
    FIGHTERS,
    LOOPS,
    NEVER,
    SHEETS,
    SHOOTERS,
    SPEC,
    STEPS,
    At,
    Lane,
    Reel,
    Sheet,
    can_hit,
    comfortable,
    contact,
    duel,
    film,
    hit_on,
    reach,
    shot_loops,
    starter,
    stepper,
    strike,
)

from majepa.envs.sim import SCENARIOS, UNITS, BattleEnv, Rules

pytestmark = pytest.mark.optimized

EVERY = tuple(SPEC)


# The table.


def test_the_table_has_exactly_the_units_of_the_maps():
    assert set(UNITS) == set(SPEC)


@pytest.mark.parametrize("name", EVERY)
def test_unit_table(name: str):
    unit, sheet = UNITS[name], SPEC[name]
    assert unit.name == name
    assert unit.race == sheet.race
    assert (unit.hp, unit.shield, unit.armour) == (sheet.hp, sheet.shield, sheet.armour)
    assert (unit.radius, unit.separation) == (sheet.radius, sheet.separation)
    assert unit.speed == sheet.speed
    assert unit.weapon_range == sheet.range
    assert set(unit.attributes) == set(sheet.attributes)
    assert len(unit.attributes) == len(sheet.attributes)
    assert unit.plane == sheet.plane
    assert (unit.damage, unit.attacks) == (sheet.damage, sheet.attacks)
    assert dict(unit.bonus) == dict(sheet.bonus)
    if name in SHOOTERS:
        assert (unit.period, unit.damage_point) == (sheet.period, sheet.damage_point)
    if name in FIGHTERS:
        assert set(unit.hits) == set(sheet.hits)


@pytest.mark.parametrize(
    ("name", "divisor"),
    [("marine", 15), ("marauder", 25), ("stalker", 35), ("zealot", 22), ("colossus", 24),
     ("hydralisk", 10), ("zergling", 11), ("baneling", 1), ("medivac", 200),
     ("spine_crawler", 15)],
)  # fmt: skip
def test_cooldown_divisors(name: str, divisor: float):
    assert UNITS[name].smac_cooldown == divisor


def test_kinds_of_weapons():
    kinds = {name: unit.weapon for name, unit in UNITS.items()}
    special = {"medivac": "heal", "colossus": "beam", "baneling": "blast"}
    assert kinds == {name: special.get(name, "shot") for name in SPEC}


@pytest.mark.parametrize("attacker", EVERY)
def test_whom_a_weapon_can_hit(attacker: str):
    for target in EVERY:
        expected = attacker in FIGHTERS and can_hit(SPEC[attacker], SPEC[target])
        assert UNITS[attacker].can_hit(UNITS[target]) == expected, target
    if attacker in ("marine", "stalker", "hydralisk"):
        assert UNITS[attacker].can_hit(UNITS["medivac"])


def test_whom_a_medivac_can_heal():
    healable = {name for name in SPEC if UNITS["medivac"].can_heal(UNITS[name])}
    bodies = {name for name, sheet in SPEC.items() if "biological" in sheet.attributes}
    assert healable == bodies


def test_only_the_spine_crawler_looks_further_than_the_rest():
    assert {name: unit.acquire for name, unit in UNITS.items() if unit.acquire is not None} == {
        "spine_crawler": 10
    }


@pytest.mark.parametrize("name", ["MMM", "MMM2"])
def test_medivacs_of_the_two_sides(name: str):
    ally = next(u for u in SCENARIOS[name].ally_types if u.name == "medivac")
    enemy = next(u for u in SCENARIOS[name].enemy_types if u.name == "medivac")
    assert (ally.speed, enemy.speed) == (2.75, 2.5)
    for unit in (ally, enemy):
        assert (unit.hp, unit.armour, unit.radius, unit.weapon_range) == (150, 1, 0.75, 4)
        assert (unit.energy, unit.energy_max) == (50, 200)


def test_rules():
    rules = Rules()
    assert (rules.loops_per_step, rules.move_amount) == (8, 2.0)
    assert (rules.shoot_range, rules.sight_range, rules.acquire_range) == (6.0, 9.0, 5.0)
    assert rules.weapon_jitter == (-1.0, 2.0)
    assert rules.minimum_damage == 0.5
    assert (rules.shield_delay, rules.shield_rate, rules.zerg_rate) == (160, 0.125, 0.0171)
    assert rules.energy_rate * 16 == pytest.approx(0.5625)
    assert rules.heal_rate * 16 == pytest.approx(9)
    assert (rules.heal_per_energy, rules.heal_start_energy) == (3, 5)
    assert (rules.blast_radius, rules.beam_length, rules.beam_width) == (2.2, 2.8, 0.3)
    assert rules.spawn_jitter == 0.5


# Walking.

ACCELERATION = 2.25
"""Of the medivac, in cells per normal second squared; all others start at full speed."""


def walked(name: str, speed: float, loops: int) -> float:
    """Distance after so many loops from rest."""
    if name != "medivac":
        return loops * speed / 16
    return sum(min(k * ACCELERATION / 256, speed / 16) for k in range(1, loops + 1))


@functools.cache
def walks() -> dict:
    far = [At("dummy", 16, 2)]
    lanes: dict = {("ally", n): Lane([At(n, 4, 16, "east")], [At("dummy", 16, 2)]) for n in EVERY}
    for name in EVERY:
        lanes["enemy", name] = Lane(far, [At(name, 28, 20)], march=(4, 20))
    for word in ("north", "south", "east", "west"):
        lanes[word] = Lane([At("zealot", 16, 16, word)], [At("dummy", 2, 2)])
    return film(STEPS, lanes, 6)


@pytest.mark.parametrize("name", EVERY)
def test_walk_of_an_agent(name: str):
    track = walks()["ally", name].allies[0]
    expected = [4 + walked(name, SPEC[name].speed, 8 * step) for step in range(7)]
    np.testing.assert_allclose(track.x, expected, atol=2e-4)
    np.testing.assert_allclose(track.y, 16, atol=1e-5)


@pytest.mark.parametrize("name", EVERY)
def test_walk_of_an_enemy(name: str):
    speed = ENEMY_MEDIVAC_SPEED if name == "medivac" else SPEC[name].speed
    track = walks()["enemy", name].enemies[0]
    expected = [28 - walked(name, speed, 8 * step) for step in range(7)]
    np.testing.assert_allclose(track.x, expected, atol=2e-4)
    np.testing.assert_allclose(track.y, 20, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "per_step"),
    [("marine", 1.125), ("marauder", 1.125), ("stalker", 1.477), ("zealot", 1.125),
     ("colossus", 1.125), ("zergling", 1.477), ("baneling", 1.25), ("spine_crawler", 0),
     ("hydralisk", 1.125)],
)  # fmt: skip
def test_cells_per_step(name: str, per_step: float):
    assert np.diff(walks()["ally", name].allies[0].x)[0] == pytest.approx(per_step, abs=6e-4)


@pytest.mark.parametrize(("side", "per_step"), [("ally", 1.375), ("enemy", 1.25)])
def test_cells_per_step_of_a_medivac_at_full_speed(side: str, per_step: float):
    reel = walks()[side, "medivac"]
    track = (reel.allies if side == "ally" else reel.enemies)[0]
    assert abs(np.diff(track.x)[-1]) == pytest.approx(per_step, abs=1e-4)


@pytest.mark.parametrize(
    ("word", "dx", "dy"), [("north", 0, 1), ("south", 0, -1), ("east", 1, 0), ("west", -1, 0)]
)
def test_directions(word: str, dx: int, dy: int):
    track = walks()[word].allies[0]
    assert track.x[1] - 16 == pytest.approx(dx * 1.125, abs=1e-5)
    assert track.y[1] - 16 == pytest.approx(dy * 1.125, abs=1e-5)


# Shots.

SHOT_LOOPS = 160


@functools.cache
def shots() -> dict:
    lanes: dict = {}
    for name in SHOOTERS:
        apart = comfortable(name, "dummy")
        attack = [At(name, 10, 16, ("attack", 0))]
        lanes["ally", name] = Lane(attack, [At("dummy", 10 + apart, 16)])
        lanes["enemy", name] = Lane([At("dummy", 10 + apart, 16)], [At(name, 10, 16)])
    return film(LOOPS, lanes, SHOT_LOOPS)


@functools.cache
def shots_in_steps() -> dict:
    lanes = {
        name: Lane(
            [At(name, 10, 16, ("attack", 0))], [At("dummy", 10 + comfortable(name, "dummy"), 16)]
        )
        for name in SHOOTERS
    }
    return film(STEPS, lanes, SHOT_LOOPS // 8)


@pytest.mark.parametrize("side", ["ally", "enemy"])
@pytest.mark.parametrize("name", SHOOTERS)
def test_loops_in_which_shots_land(name: str, side: str):
    reel = shots()[side, name]
    shooter, target = reel.allies[0], reel.enemies[0]
    if side == "enemy":
        shooter, target = target, shooter
    landed = np.flatnonzero(target.losses > 0) + 1
    assert landed.tolist() == shot_loops(SPEC[name], SHOT_LOOPS)
    per_shot = SPEC[name].damage * SPEC[name].attacks
    np.testing.assert_allclose(target.losses[landed - 1], per_shot, atol=1e-3)
    assert np.ptp(shooter.x) == 0
    assert np.ptp(target.x) == 0


@pytest.mark.parametrize(
    ("name", "count"),
    # (159 - damage point) // ceil(period) + 1
    [("marine", 12), ("marauder", 7), ("stalker", 6), ("zealot", 8), ("colossus", 7),
     ("zergling", 14), ("spine_crawler", 6), ("hydralisk", 12)],
)  # fmt: skip
def test_shots_in_twenty_steps(name: str, count: int):
    dealt = shots_in_steps()[name].enemies[0].losses.sum()
    assert dealt == pytest.approx(count * SPEC[name].damage * SPEC[name].attacks, abs=1e-2)


@pytest.mark.parametrize("name", SHOOTERS)
def test_cooldown_shown_after_a_shot(name: str):
    """What is left of the period once the wind-up of the next shot is taken off."""
    sheet = SPEC[name]
    shown = shots()["ally", name].allies[0].cooldown[sheet.damage_point + 1]
    assert sheet.period - sheet.damage_point - 1e-3 <= shown <= sheet.period


@functools.cache
def jittered() -> tuple[np.ndarray, list[list[np.ndarray]]]:
    """Damage of first shots, and loops between shots by shooter and seed, as the rules have it.

    All shooters at once, each with a target of its own far from the others, and none with a shield.
    """
    spots = [(4 + 8 * (i % 4), 6 + 12 * (i // 4)) for i in range(len(SHOOTERS))]
    target = UNITS["marauder"].__class__(
        "wall", "terran", hp=5000, radius=0.5, separation=0.5, speed=0, armour=1
    )
    scenario = duel(
        [(UNITS[name], spot) for name, spot in zip(SHOOTERS, spots, strict=True)],
        [
            (target, (x + comfortable(name, "dummy") * (1 if x < 16 else -1), y))
            for name, (x, y) in zip(SHOOTERS, spots, strict=True)
        ],
    )
    env = BattleEnv(scenario, rules=Rules(loops_per_step=1, spawn_jitter=0))
    state = starter(env)(jax.random.split(jax.random.key(5), 32))
    action = jnp.tile(6 + jnp.arange(len(SHOOTERS)), (32, 1))
    hp = [state.units.hp[env.arena.enemies]]
    for _ in range(128):
        state, _ = stepper(env)(state, action)
        hp.append(state.units.hp[env.arena.enemies])
    assert not np.asarray(state.illegal).any()
    losses = -np.diff(np.asarray(jnp.stack(hp)), axis=0)
    loops = [
        [np.flatnonzero(losses[:, i, seed] > 0) + 1 for seed in range(32)]
        for i in range(len(SHOOTERS))
    ]
    first = np.array([losses[loops[i][0][0] - 1, i, 0] for i in range(len(SHOOTERS))])
    return first, loops


@pytest.mark.parametrize("name", SHOOTERS)
def test_jitter_of_weapon_periods(name: str):
    sheet = SPEC[name]
    _, loops = jittered()
    mine = loops[SHOOTERS.index(name)]
    assert {int(landed[0]) for landed in mine} == {sheet.damage_point + 1}
    gaps = np.concatenate([np.diff(landed) for landed in mine])
    # A period lengthened by a draw from [-1, 2), rounded up to whole loops.
    assert gaps.min() >= math.ceil(sheet.period - 1)
    assert gaps.max() <= math.ceil(sheet.period + 2)
    # At least two thirds of the range turn up, and seeds differ.
    assert np.ptp(gaps) >= 2
    assert len({tuple(landed.tolist()) for landed in mine}) > 16
    # The draw lengthens a period by 0.5 on average, rounding by 0.5 more.
    assert gaps.mean() == pytest.approx(sheet.period + 1, abs=0.45)


@pytest.mark.parametrize("name", SHOOTERS)
def test_damage_where_nobody_has_shields(name: str):
    """Armour 1 against every hit, in a battle without any shield."""
    first, _ = jittered()
    sheet = SPEC[name]
    assert first[SHOOTERS.index(name)] == pytest.approx(sheet.attacks * (sheet.damage - 1))


# Damage.

DAMAGE_LOOPS = 100
TARGETS = (*EVERY, "bunker")


def health_over_time(attacker: Sheet, target: Sheet, loops: int) -> np.ndarray:
    """Hit points and shield of a target under fire after each loop."""
    health = (float(target.hp), float(target.shield))
    rows = [health]
    landing = set(shot_loops(attacker, loops))
    for loop in range(1, loops + 1):
        hp, shield = health
        if target.race == "zerg" and hp > 0:
            hp = min(hp + 0.0171, target.hp)
        health = (hp, shield)
        if loop in landing and hp > 0:
            health = strike(health, target.armour, hit_on(attacker, target), attacker.attacks)
        rows.append(health)
    return np.array(rows)


@functools.cache
def firing_lines() -> dict:
    lanes: dict = {}
    for attacker, target in itertools.product(SHOOTERS, TARGETS):
        apart = comfortable(attacker, target)
        lanes["ally", attacker, target] = Lane(
            [At(attacker, 10, 16, ("attack", 0))],
            [At(target, 10 + apart, 16, cooldown=NEVER)],
            may_be_illegal=True,  # once the target is dead
        )
        lanes["enemy", attacker, target] = Lane(
            [At(target, 10 + apart, 16)], [At(attacker, 10, 16)]
        )
    return film(LOOPS, lanes, DAMAGE_LOOPS)


@pytest.mark.parametrize("side", ["ally", "enemy"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("attacker", SHOOTERS)
def test_damage_over_time(attacker: str, target: str, side: str):
    """Shields, armour, bonuses, double hits, the hit that breaks a shield, the least damage."""
    reel = firing_lines()[side, attacker, target]
    victim = (reel.enemies if side == "ally" else reel.allies)[0]
    sheets = SHEETS[attacker], SHEETS[target]
    if not can_hit(*sheets):
        assert (victim.hp == SHEETS[target].hp).all()
        return
    expected = health_over_time(*sheets, DAMAGE_LOOPS)
    np.testing.assert_allclose(victim.hp, expected[:, 0], atol=3e-3)
    # What shield a dead unit had does not matter.
    np.testing.assert_allclose(np.where(victim.hp > 0, victim.shield, 0), expected[:, 1], atol=3e-3)


@pytest.mark.parametrize(
    ("attacker", "target", "first_loss"),
    [
        ("stalker", "stalker", 18),  # 13 + 5 against armored, all of it shield
        ("stalker", "zealot", 13),
        ("stalker", "zergling", 13),
        ("stalker", "spine_crawler", 13 + 5 - 2),
        ("colossus", "zergling", 30),  # 2 x (10 + 5)
        ("colossus", "baneling", 20),  # not light; 2 x 10
        ("colossus", "stalker", 20),
        ("colossus", "hydralisk", 30),
        ("marauder", "stalker", 20),
        ("marauder", "marine", 10),
        ("marauder", "marauder", 19),
        ("marine", "marauder", 5),
        ("marine", "medivac", 5),
        ("hydralisk", "medivac", 11),
        ("zealot", "marauder", 14),  # 2 x (8 - 1)
        ("zealot", "marine", 16),
        ("spine_crawler", "stalker", 30),
        ("spine_crawler", "zealot", 25),
        ("zergling", "spine_crawler", 3),
        ("marine", "spine_crawler", 4),
    ],
)
def test_first_shots(attacker: str, target: str, first_loss: float):
    reel = firing_lines()["ally", attacker, target]
    losses = reel.enemies[0].losses
    assert losses[losses > 0.1][0] == pytest.approx(first_loss, abs=1e-3)


def test_the_hit_that_breaks_a_shield():
    """Zealot on zealot, 8 x 2: the shield goes 50, 34, 18, 2; then 2 + (6 - 1) and 8 - 1."""
    victim = firing_lines()["ally", "zealot", "zealot"].enemies[0]
    after = [1, 21, 41, 61, 81]
    np.testing.assert_allclose(victim.shield[after], [34, 18, 2, 0, 0], atol=1e-4)
    np.testing.assert_allclose(victim.hp[after], [100, 100, 100, 88, 74], atol=1e-4)


@pytest.mark.parametrize("attacker", SHOOTERS)
def test_least_damage(attacker: str):
    """Armour of 100 lets 0.5 of every hit through once the shield is gone."""
    losses = firing_lines()["ally", attacker, "bunker"].enemies[0].losses
    assert losses[losses > 0][-1] == pytest.approx(0.5 * SPEC[attacker].attacks, abs=1e-3)


# Several attackers.


def outcomes(
    health: tuple[float, float], armour: float, blows: list[tuple[float, int]]
) -> list[tuple[float, float]]:
    """Health after all blows (damage, hits), in every order they can come."""
    results = []
    for order in itertools.permutations(blows):
        now = health
        for hit, times in order:
            now = strike(now, armour, hit, times)
        results.append(now)
    return results


VOLLEYS = {
    # Three times 13 on a shield of 20: 13; 7 + (6 - 1); 13 - 1.
    "three stalkers on a zealot": (["stalker"] * 3, "zealot", 100.0, 20.0),
    "three stalkers on a fresh zealot": (["stalker"] * 3, "zealot", 100.0, 50.0),
    "three zealots on a stalker": (["zealot"] * 3, "stalker", 80.0, 21.0),
    "three zerglings on a zealot": (["zergling"] * 3, "zealot", 100.0, 7.0),
    "zealots and marauder on a zealot": (["zealot", "zealot", "marauder"], "zealot", 100.0, 30.0),
    "stalkers and hydralisks": (["stalker"] * 2 + ["hydralisk"] * 2, "stalker", 80.0, 40.0),
    "marines and a colossus": (["marine"] * 3 + ["colossus"], "zealot", 100.0, 25.0),
    "more than enough": (["stalker"] * 3, "zealot", 10.0, 20.0),
    "on armour alone": (["marine"] * 3, "marauder", 125.0, 0.0),
}


@functools.cache
def volleys() -> dict:
    lanes: dict = {}
    for name, (kinds, target, hp, shield) in VOLLEYS.items():
        allies = []
        for i, kind in enumerate(kinds):
            far = comfortable(kind, target)
            angle = 2 * math.pi * i / len(kinds)
            at = (16 + far * math.cos(angle), 16 + far * math.sin(angle))
            allies.append(At(kind, *at, ("attack", 0)))
        victim = At(target, 16, 16, hp=hp, shield=shield, cooldown=NEVER)
        lanes[name] = Lane(allies, [victim], may_be_illegal=True)
    return film(LOOPS, lanes, 4)


@pytest.mark.parametrize("name", VOLLEYS)
def test_attackers_of_one_loop_hit_one_after_another(name: str):
    kinds, target, hp, shield = VOLLEYS[name]
    victim = volleys()[name].enemies[0]
    loop = SPEC[kinds[0]].damage_point + 1
    assert {SPEC[kind].damage_point for kind in kinds} == {loop - 1}
    shield += 0.125 * loop * (SPEC[target].shield > shield)  # it has been quiet so far
    blows = [(hit_on(SPEC[k], SPEC[target]), SPEC[k].attacks) for k in kinds]
    expected = outcomes((hp, shield), SPEC[target].armour, blows)
    got = (victim.hp[loop], victim.shield[loop])
    assert any(np.allclose(got, one, atol=1e-3) for one in expected), (got, expected)
    assert victim.hp[loop - 1] == hp


def test_of_two_that_would_kill_each_other_one_survives():
    """Damage is dealt in turn, in an order drawn by lot."""
    lanes = {
        seed: Lane(
            [At("marine", 14, 16, ("attack", 0), hp=6)], [At("marine", 17, 16, hp=6)], seed=seed
        )
        for seed in range(48)
    }
    reels = film(LOOPS, lanes, 2)
    ends = [(r.allies[0].hp[-1], r.enemies[0].hp[-1]) for r in reels.values()]
    assert set(ends) == {(6.0, 0.0), (0.0, 6.0)}
    assert 10 <= ends.count((6.0, 0.0)) <= 38


# Weapon range.


@functools.cache
def ranges() -> dict:
    lanes: dict = {}
    for name in FIGHTERS:
        edge = reach(name, "dummy")
        # Sums of binary fractions are exact; the melee range of 0.1 is not one.
        slack = 0.0 if SPEC[name].range != 0.1 else 0.001
        for where, far in (("at", edge - slack), ("beyond", edge + 1 / 64)):
            lanes[name, where] = Lane([At("dummy", 8 + far, 16)], [At(name, 8, 16)])
    return film(LOOPS, lanes, 4)


@pytest.mark.parametrize("name", FIGHTERS)
def test_weapon_range_is_from_edge_to_edge(name: str):
    loop = SPEC[name].damage_point + 1
    damage = SPEC[name].damage * SPEC[name].attacks
    at, beyond = ranges()[name, "at"], ranges()[name, "beyond"]
    assert at.allies[0].losses[:loop].sum() == pytest.approx(damage, abs=1e-3)
    assert at.enemies[0].x[loop] == 8
    assert beyond.allies[0].losses[:loop].sum() == 0


@functools.cache
def chases() -> dict:
    lanes: dict = {
        name: Lane([At(name, 10, 16, ("attack", 0))], [At("dummy", 15.9, 16)])
        for name in ("marine", "zealot", "zergling")
    }
    lanes["baneling"] = Lane([At("baneling", 10, 16, ("attack", 0))], [At("dummy", 15.9, 16)])
    for name in ("marauder", "zealot", "zergling", "colossus"):
        lanes["up", name] = Lane(
            [At(name, 10, 16, ("attack", 0))], [At("medivac", 13, 16)], may_be_illegal=True
        )
    return film(LOOPS, lanes, 60)


@pytest.mark.parametrize("name", ["marine", "zealot", "zergling"])
def test_an_attack_order_walks_into_range_and_no_further(name: str):
    track = chases()[name].allies[0]
    stride = SPEC[name].speed / 16
    edge = 15.9 - reach(name, "dummy")
    assert edge - 1e-4 <= track.x[-1] <= edge + stride
    loops = math.ceil((edge - 10) / stride)
    first = np.flatnonzero(chases()[name].enemies[0].losses)[0] + 1
    # It arrives in loop `loops` and takes aim from the next one on.
    assert first == loops + 1 + SPEC[name].damage_point
    np.testing.assert_allclose(track.x[:loops], 10 + stride * np.arange(loops), atol=1e-4)


@pytest.mark.parametrize("name", ["marauder", "zealot", "zergling", "colossus"])
def test_an_attack_order_on_a_unit_out_of_its_plane_follows_it(name: str):
    reel = chases()["up", name]
    assert (reel.enemies[0].hp == 150).all()
    assert reel.allies[0].x[8] - 10 == pytest.approx(SPEC[name].speed / 2, abs=1e-3)
    assert abs(reel.allies[0].x[-1] - 13) < 0.3


# Orders.

WINDERS = tuple(name for name in SHOOTERS if SPEC[name].damage_point)


@functools.cache
def interruptions() -> dict:
    lanes: dict = {}
    for name in WINDERS:
        wind = SPEC[name].damage_point
        far = comfortable(name, "dummy")
        aim: list = [("attack", 0)] * wind
        stop: list = [*aim, "stop", ("attack", 0)]
        turn: list = [*aim, ("attack", 1)]
        walk: list = [*aim, "west"]
        for key, orders in (("stop", stop), ("turn", turn), ("walk", walk)):
            enemies = [At("dummy", 16 + far, 16), At("dummy", 16, 16 + far)]
            lanes[name, key] = Lane([At(name, 16, 16, orders)], enemies)
    # The crawler takes aim at a marine that leaves its reach just then.
    edge = reach("spine_crawler", "marine")
    lanes["gone"] = Lane([At("marine", 4 + edge - 0.05, 16, "east")], [At("spine_crawler", 4, 16)])
    # It loses its shot at a marine that dies before it lands and begins anew on the next.
    lanes["dead"] = Lane(
        [At("marine", 10, 16, hp=8), At("marine", 10, 20)],
        [At("spine_crawler", 4, 16, target=0), At("sniper", 10, 12, cooldown=2)],
    )
    return film(LOOPS, lanes, 12)


@pytest.mark.parametrize("name", WINDERS)
def test_a_unit_told_to_stop_loses_its_shot(name: str):
    reel = interruptions()[name, "stop"]
    wind = SPEC[name].damage_point
    # Loops 1 to wind: aim; wind + 1, in which the shot would have landed: stop; then anew.
    assert reel.allies[0].cooldown[wind + 1] == 0
    landed = np.flatnonzero(reel.enemies[0].losses) + 1
    assert landed[0] == wind + 2 + wind


@pytest.mark.parametrize("name", WINDERS)
def test_a_unit_told_to_attack_another_begins_anew(name: str):
    reel = interruptions()[name, "turn"]
    wind = SPEC[name].damage_point
    assert reel.enemies[0].losses.sum() == 0
    assert reel.allies[0].cooldown[wind + 1] == 0
    assert (np.flatnonzero(reel.enemies[1].losses) + 1)[0] == wind + 1 + wind


@pytest.mark.parametrize("name", WINDERS)
def test_a_unit_told_to_walk_loses_its_shot(name: str):
    reel = interruptions()[name, "walk"]
    assert reel.enemies[0].losses.sum() == 0
    assert reel.allies[0].cooldown.max() == 0


def test_an_enemy_whose_target_leaves_its_reach_loses_its_shot():
    reel = interruptions()["gone"]
    assert reel.allies[0].losses.sum() == 0
    assert reel.enemies[0].cooldown.max() == 0
    assert reel.enemies[0].target[-1] == 0  # within 10 cells it stays the target


def test_an_enemy_whose_target_dies_loses_its_shot():
    reel = interruptions()["dead"]
    # The sniper fires in loop 2; in loop 3 the crawler turns and lands its shot three loops later.
    assert (np.flatnonzero(reel.allies[0].losses) + 1).tolist() == [2]
    assert (np.flatnonzero(reel.allies[1].losses) + 1)[0] == 3 + 3


@functools.cache
def idlers() -> dict:
    lanes: dict = {}
    for name in EVERY:
        far = comfortable(name, "dummy") if name in FIGHTERS else 2.0
        lanes["stop", name] = Lane([At(name, 16, 16)], [At("dummy", 16 + far, 16)])
        lanes["attacked", name] = Lane([At(name, 16, 16)], [At("sniper", 16 + max(far, 1.7), 16)])
        lanes["walk", name] = Lane([At(name, 16, 10, "north")], [At("dummy", 18.5, 16)])
    # A shot in loop 2 kills the first dummy; what the others were told to do ends with it.
    lanes["overkill"] = Lane(
        [
            At("marine", 10, 16, ("attack", 0)),
            At("marine", 10, 17, ("attack", 0), cooldown=4),
            At("zealot", 9, 14, ("attack", 0)),
        ],
        [At("dummy", 13, 16, hp=5), At("dummy", 13, 18)],
        may_be_illegal=True,
    )
    return film(STEPS, lanes, 6)


@pytest.mark.parametrize("name", EVERY)
def test_agents_never_attack_on_their_own(name: str):
    for case in ("stop", "attacked", "walk"):
        assert idlers()[case, name].enemies[0].losses.sum() == 0, case
        assert (idlers()[case, name].allies[0].hp > 0).all()
    track = idlers()["attacked", name].allies[0]
    assert (np.ptp(track.x), np.ptp(track.y)) == (0, 0)
    assert track.losses.sum() > 5  # it was really shot at


def test_an_agent_whose_target_dies_idles_for_the_rest_of_the_step():
    reel: Reel = idlers()["overkill"]
    assert reel.enemies[0].hp[1] == 0
    assert reel.enemies[1].losses.sum() == 0
    # Two loops of walking, at most one more.
    zealot = reel.allies[2]
    path = math.hypot(zealot.x[1] - 9, zealot.y[1] - 14)
    assert 2 * 2.25 / 16 - 1e-3 <= path <= 3 * 2.25 / 16 + 1e-3
    assert zealot.x[1] == zealot.x[2]
    # The second marine never fired.
    assert reel.allies[1].cooldown[1] == 0


def test_targets_of_the_firing_lines_keep_their_distance():
    """Guards the tests above: nothing starts in a collision that would move it."""
    for attacker, target in itertools.product(SHOOTERS, TARGETS):
        apart = comfortable(attacker, target)
        assert apart <= reach(attacker, target)
        if SHEETS[attacker].plane == SHEETS[target].plane:
            assert apart >= contact(attacker, target)
