"""Banelings and colossi: whom a blast and a beam touch, and how colossi walk."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from skirmish import LOOPS, NEVER, SHEETS, SPEC, STEPS, At, Lane, film, hit_on, reach, strike

pytestmark = pytest.mark.slow

GROUND = tuple(name for name, sheet in SPEC.items() if sheet.plane != "air")

# Banelings.


def blasted(name: str) -> tuple[float, float]:
    """Hit points and shield of a fresh unit after one blast."""
    sheet = SHEETS[name]
    return strike((sheet.hp, sheet.shield), sheet.armour, hit_on(SPEC["baneling"], sheet))


@functools.cache
def blasts() -> dict:
    lanes: dict = {}
    for name in SPEC:
        far = reach("baneling", name) - 0.01
        lanes["on", name] = Lane([At(name, 16 + far, 16)], [At("baneling", 16, 16)])
        lanes["by ally", name] = Lane(
            [At("baneling", 16, 16, ("attack", 0))],
            [At(name, 16 + far, 16, cooldown=NEVER)],
            may_be_illegal=True,
        )
        # The blast meets a dummy in the east and reaches into the west.
        edge = 2.2 + SPEC[name].radius
        for key, distance in (("in", edge - 0.01), ("out", edge + 0.01)):
            lanes[key, name] = Lane(
                [At("dummy", 17.1, 16), At(name, 16 - distance, 16)], [At("baneling", 16, 16)]
            )
            lanes[key, "enemy", name] = Lane(
                [At("baneling", 16, 16, ("attack", 0))],
                [At("dummy", 17.1, 16), At(name, 16 - distance, 16, cooldown=NEVER)],
                may_be_illegal=True,
            )
    lanes["friends"] = Lane(
        [At("dummy", 17.1, 16)],
        [
            At("baneling", 16, 16),
            At("zergling", 16, 16.8, cooldown=NEVER),
            At("zealot", 16, 15.1, cooldown=NEVER),
            At("baneling", 15.2, 16, cooldown=NEVER),
        ],
    )
    # Edge to edge 0.25: at the edge, and the least bit outside.
    edge = reach("baneling", "dummy")
    lanes["contact"] = Lane([At("dummy", 16 + edge, 16)], [At("baneling", 16, 16)])
    lanes["no contact"] = Lane([At("dummy", 16 + edge + 1 / 64, 16)], [At("baneling", 16, 16)])
    # A marine shoots one that stands next to a zealot; loop 2 is when the shot lands.
    lanes["killed"] = Lane(
        [At("marine", 12, 16, ("attack", 0)), At("zealot", 16, 18), At("zealot", 16, 18.9)],
        [At("baneling", 16, 16, hp=5, cooldown=NEVER), At("zergling", 16.8, 16, cooldown=NEVER)],
        may_be_illegal=True,
    )
    lanes["ally killed"] = Lane(
        [At("baneling", 16, 16, hp=5), At("zealot", 15.2, 16)],
        [At("sniper", 20, 16), At("stalker", 16, 18, cooldown=NEVER)],
        may_be_illegal=True,
    )
    # One after another: an enemy's blast kills an ally's baneling, whose blast kills an enemy's
    # next to it, whose blast reaches a marine far from the first.
    lanes["chain"] = Lane(
        [At("dummy", 10, 16), At("baneling", 13, 16, hp=18), At("marine", 17.3, 16)],
        [At("baneling", 11, 16), At("baneling", 15, 16, hp=15, cooldown=NEVER)],
    )
    lanes["two at once"] = Lane(
        [At("zealot", 16, 16)], [At("baneling", 15, 16), At("baneling", 17, 16)]
    )
    return film(LOOPS, lanes, 5)


@pytest.mark.parametrize("name", SPEC)
@pytest.mark.parametrize("side", ["on", "by ally"])
def test_damage_of_a_blast(name: str, side: str):
    reel = blasts()[side, name]
    bomb, target = reel.enemies[0], reel.allies[0]
    if side == "by ally":
        bomb, target = target, bomb
    if name == "medivac":
        assert (target.hp == 150).all()
        assert (bomb.hp == 30).all()
        return
    assert (bomb.hp[1:] == 0).all()
    hp, shield = blasted(name)
    assert target.hp[1] == pytest.approx(hp, abs=1e-3)
    # A blast delays the recovery of shields as any damage does.
    np.testing.assert_allclose(target.shield[1:], shield, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "loss"),
    [("zealot", 35), ("zergling", 35), ("marine", 35), ("hydralisk", 35), ("baneling", 20),
     ("stalker", 20), ("colossus", 20), ("marauder", 19), ("spine_crawler", 18)],
)  # fmt: skip
def test_blast_against_every_kind(name: str, loss: float):
    assert blasts()["on", name].allies[0].losses[0] == pytest.approx(loss, abs=1e-3)


@pytest.mark.parametrize("name", GROUND)
@pytest.mark.parametrize("side", [(), ("enemy",)])
def test_radius_of_a_blast(name: str, side: tuple[str, ...]):
    """2.2 cells and the target's own radius."""
    for key in ("in", "out"):
        reel = blasts()[(key, *side, name)]
        caught = (reel.enemies if side else reel.allies)[1]
        expected = blasted(name) if key == "in" else (SPEC[name].hp, SPEC[name].shield)
        assert (caught.hp[1], caught.shield[1]) == pytest.approx(expected, abs=1e-3), key


@pytest.mark.parametrize("side", [(), ("enemy",)])
def test_flyers_are_safe_from_blasts(side: tuple[str, ...]):
    reel = blasts()[("in", *side, "medivac")]
    assert ((reel.enemies if side else reel.allies)[1].hp == 150).all()


def test_no_friendly_fire():
    bomb, *friends = blasts()["friends"].enemies
    assert bomb.hp[1] == 0
    for friend in friends:
        assert (friend.hp == friend.hp[0]).all()
        assert (friend.shield == friend.shield[0]).all()


def test_banelings_explode_on_contact():
    assert blasts()["contact"].enemies[0].hp[1] == 0
    late = blasts()["no contact"].enemies[0]
    assert late.hp[1] == 30
    assert late.hp[2] == 0
    assert blasts()["contact"].allies[0].losses.sum() == 20


def test_a_killed_baneling_explodes():
    reel = blasts()["killed"]
    marine, near, far = reel.allies
    assert reel.enemies[0].hp[1] > 0
    assert reel.enemies[0].hp[2] == 0
    # Of shields 50: within 2.2 + 0.5 of it, and just outside.
    assert near.losses.sum() == pytest.approx(35, abs=1e-3)
    assert far.losses.sum() == 0
    assert marine.losses.sum() == 0
    assert (reel.enemies[1].hp == 35).all()
    reel = blasts()["ally killed"]
    assert reel.allies[0].hp[1] == 0
    assert reel.enemies[1].losses.sum() == pytest.approx(20, abs=1e-3)
    assert reel.allies[1].losses.sum() == 0


def test_blasts_set_off_blasts():
    reel = blasts()["chain"]
    dummy, mine, marine = reel.allies
    first, second = reel.enemies
    assert first.hp[1] == 0
    assert mine.hp[1] == 0
    assert second.hp[3] == 0
    assert dummy.losses.sum() == 20
    assert marine.hp[-1] == pytest.approx(10)
    # Everyone exploded once.
    assert marine.losses.sum() == pytest.approx(35)


def test_two_blasts_at_once():
    """35 and 35 on 50 + 100: 35; 15 + (20 - 1)."""
    zealot = blasts()["two at once"].allies[0]
    assert zealot.shield[1] == 0
    assert zealot.hp[1] == pytest.approx(81, abs=1e-3)


# Colossi. The line of fire runs from the colossus to a dummy five cells away.

DIRECTIONS = {"east": (1.0, 0.0), "slanted": (0.6, 0.8), "north": (0.0, 1.0), "back": (-0.8, 0.6)}
SPOTS = {
    # (along the line of fire, across it): is it hit? The beam is 0.3 deep and 2.8 wide; a dummy's
    # radius is 0.5; centres further than 1.408 from the target's are left out.
    (0.0, 1.39): True,
    (0.0, -1.39): True,
    (0.0, 1.43): False,
    (0.0, -1.43): False,
    (0.64, 1.0): True,
    (0.66, 1.0): False,
    (-0.64, -1.0): True,
    (-0.66, -1.0): False,
    (0.6, 1.25): True,
    (0.6, 1.3): False,  # touched, but 1.43 from the target's centre
    (1.2, 0.0): False,
    (-1.2, 0.0): False,
}


def spot(direction: str, along: float, across: float) -> tuple[float, float]:
    ux, uy = DIRECTIONS[direction]
    return 16 + along * ux - across * uy, 16 + along * uy + across * ux


@functools.cache
def beams() -> dict:
    lanes: dict = {}
    for direction in DIRECTIONS:
        gun = spot(direction, -5.0, 0.0)
        for place in SPOTS:
            beside = spot(direction, *place)
            lanes["ally", direction, place] = Lane(
                [At("colossus", *gun, ("attack", 0))], [At("dummy", 16, 16), At("dummy", *beside)]
            )
            lanes["enemy", direction, place] = Lane(
                [At("dummy", 16, 16), At("dummy", *beside)], [At("colossus", *gun, target=0)]
            )
    for place in ((0.0, 1.39), (0.0, 1.43), (0.52, 1.0), (0.53, 1.0)):
        lanes["zergling", place] = Lane(
            [At("dummy", 16, 16), At("zergling", *spot("east", *place))],
            [At("colossus", 11, 16, target=0)],
        )
    lanes["medivac"] = Lane(
        [At("dummy", 16, 16), At("medivac", 16, 16.5)], [At("colossus", 11, 16)]
    )
    lanes["medivac alone"] = Lane([At("medivac", 16, 16)], [At("colossus", 11, 16)])
    lanes["enemies only"] = Lane(
        [At("colossus", 11, 16, ("attack", 0)), At("dummy", 16, 14.9)],
        [At("dummy", 16, 16), At("dummy", 16, 17.1)],
    )
    lanes["flak"] = Lane([At("flak", 16, 16, ("attack", 0))], [At("colossus", 19, 16)])
    lanes["flak, marine"] = Lane([At("flak", 16, 16, ("attack", 0))], [At("dummy", 19, 16)])
    lanes["flak of the enemy"] = Lane(
        [At("dummy", 17.5, 16), At("colossus", 20, 16)], [At("flak", 16, 16)]
    )
    return film(LOOPS, lanes, 3)


@pytest.mark.parametrize("place", SPOTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("side", ["ally", "enemy"])
def test_whom_a_beam_touches(side: str, direction: str, place: tuple[float, float]):
    reel = beams()[side, direction, place]
    target, beside = reel.enemies if side == "ally" else reel.allies
    # The damage point of 1 makes it loop 2.
    assert target.losses.tolist() == pytest.approx([0, 20, 0], abs=1e-3)
    assert beside.losses.sum() == pytest.approx(20 if SPOTS[place] else 0, abs=1e-3)


def test_the_farthest_centre_is_half_a_diagonal_away():
    assert math.hypot(1.4, 0.15) == pytest.approx(1.408, abs=1e-3)
    for (along, across), is_hit in SPOTS.items():
        in_circle = math.hypot(along, across) <= 1.408
        deep, wide = max(abs(along) - 0.15, 0), max(abs(across) - 1.4, 0)
        assert is_hit == (in_circle and math.hypot(deep, wide) <= 0.5), (along, across)


@pytest.mark.parametrize(
    ("place", "loss"),
    [((0.0, 1.39), 30), ((0.0, 1.43), 0), ((0.52, 1.0), 30), ((0.53, 1.0), 0)],
)
def test_a_beam_on_a_zergling(place: tuple[float, float], loss: float):
    """Radius 0.375; twice 10 + 5 against light."""
    reel = beams()["zergling", place]
    assert reel.allies[1].losses[1] == pytest.approx(loss, abs=1e-3)
    assert reel.allies[0].losses.sum() == pytest.approx(20, abs=1e-3)


def test_beams_stay_on_the_ground():
    dummy, medivac = beams()["medivac"].allies
    assert dummy.losses.sum() == pytest.approx(20)
    assert (medivac.hp == 150).all()
    assert (beams()["medivac alone"].enemies[0].target == -1).all()


def test_beams_spare_their_own_side():
    reel = beams()["enemies only"]
    assert reel.allies[1].losses.sum() == 0
    assert reel.enemies[1].losses.sum() == pytest.approx(20)


def test_weapons_against_air_hit_colossi():
    assert beams()["flak"].enemies[0].losses.sum() == pytest.approx(10)
    assert beams()["flak, marine"].enemies[0].losses.sum() == 0
    reel = beams()["flak of the enemy"]
    assert reel.enemies[0].target[1] == 1
    assert reel.allies[1].losses.sum() == pytest.approx(10)
    assert reel.allies[0].losses.sum() == 0


# How colossi walk.


@functools.cache
def strolls() -> dict:
    crowd = [At("dummy", 13, 16), At("zealot", 14.2, 16), At("stalker", 15.6, 15.8)]
    return film(
        STEPS,
        {
            "over others": Lane([At("colossus", 10, 16, "east"), *crowd], [At("dummy", 2, 2)]),
            "under it": Lane(
                [At("colossus", 14, 16), At("zealot", 10, 16, "east")], [At("dummy", 2, 2)]
            ),
            "two": Lane(
                [At("colossus", 10, 16, "east"), At("colossus", 14, 16)], [At("dummy", 2, 2)]
            ),
            "flying over": Lane([At("medivac", 10, 16, "east"), *crowd], [At("dummy", 2, 2)]),
        },
        8,
    )


def test_colossi_walk_over_everyone_on_the_ground():
    colossus, *crowd = strolls()["over others"].allies
    np.testing.assert_allclose(colossus.x, 10 + 1.125 * np.arange(9), atol=1e-3)
    for unit in crowd:
        assert (np.ptp(unit.x), np.ptp(unit.y)) == (0, 0)
    still, zealot = strolls()["under it"].allies
    np.testing.assert_allclose(zealot.x, 10 + 1.125 * np.arange(9), atol=1e-3)
    assert np.ptp(still.x) == 0


def test_colossi_bump_into_colossi():
    walker, still = strolls()["two"].allies
    assert walker.gap(still).min() >= 0.95 * 1.5
    assert math.hypot(still.x[-1] - 14, still.y[-1] - 16) < 0.02


def test_medivacs_fly_over_everyone():
    medivac, *crowd = strolls()["flying over"].allies
    ramp = np.minimum(2.25 / 256 * np.arange(1, 65), 2.75 / 16)
    np.testing.assert_allclose(medivac.x[1:], 10 + np.cumsum(ramp)[7::8], atol=1e-3)
    for unit in crowd:
        assert (np.ptp(unit.x), np.ptp(unit.y)) == (0, 0)
