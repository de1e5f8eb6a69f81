"""Whom the scripted enemy goes for."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from skirmish import FIGHTERS, LOOPS, SPEC, STEPS, At, Lane, film, reach

ACQUIRES = {name: max(5.0, SPEC[name].range) for name in FIGHTERS} | {"spine_crawler": 10.0}
"""How far each kind looks for targets, from edge to edge."""
ALLIES = ("marine", "stalker", "colossus")
"""Of different radii; each can be hit by everything."""


def sight(enemy: str, ally: str) -> float:
    return ACQUIRES[enemy] + SPEC[enemy].radius + SPEC[ally].radius


@functools.cache
def meetings() -> dict:
    lanes: dict = {}
    for enemy in FIGHTERS:
        for ally in ALLIES:
            edge = sight(enemy, ally)
            lanes[enemy, ally, "at"] = Lane([At(ally, 4 + edge, 16)], [At(enemy, 4, 16)])
            beyond = Lane([At(ally, 4 + edge + 1 / 64, 16)], [At(enemy, 4, 16)])
            lanes[enemy, ally, "beyond"] = beyond
    return film(LOOPS, lanes, 3)


@pytest.mark.parametrize("ally", ALLIES)
@pytest.mark.parametrize("enemy", FIGHTERS)
def test_range_of_acquisition(enemy: str, ally: str):
    """Radii and ranges are binary fractions: at the very edge means at the very edge."""
    assert (meetings()[enemy, ally, "at"].enemies[0].target[1:] == 0).all()
    reel = meetings()[enemy, ally, "beyond"]
    assert (reel.enemies[0].target == -1).all()
    assert np.ptp(reel.enemies[0].x) == 0
    assert reel.allies[0].losses.sum() == 0


@pytest.mark.parametrize("enemy", [n for n in FIGHTERS if ACQUIRES[n] > SPEC[n].range])
def test_who_sees_further_than_it_shoots_comes_closer(enemy: str):
    track = meetings()[enemy, "marine", "at"].enemies[0]
    np.testing.assert_allclose(track.x, 4 + np.arange(4) * SPEC[enemy].speed / 16, atol=1e-4)


# Retaliation: targeting an enemy is enough to draw it.


@functools.cache
def provocations() -> dict:
    lanes: dict = {}
    for enemy in ("marine", "zergling", "baneling"):
        # They see a marine 5 + 0.375 + 0.375 cells away; a target action reaches 6.
        assert sight(enemy, "marine") == 5.75
        for key, order in (("attack", ("attack", 0)), ("stop", "stop"), ("walk", "north")):
            lanes[enemy, key] = Lane(
                [At("marine", 16, 16, order)], [At(enemy, 21.95, 16)], may_be_illegal=True
            )
    lanes["healer"] = Lane(
        [At("marine", 16, 16, ("attack", 0)), At("medivac", 16, 17, ("heal", 0))],
        [At("zergling", 21.95, 16)],
    )
    # The one in sight comes before the one that attacks from further away.
    lanes["near first"] = Lane(
        [At("marine", 16, 16, ("attack", 0)), At("marine", 21.95, 21.5)],
        [At("zergling", 21.95, 16)],
        may_be_illegal=True,
    )
    # Of two that attack from outside, the nearer one.
    lanes["nearer provoker"] = Lane(
        [At("marine", 16.02, 16, ("attack", 0)), At("marine", 27.85, 16, ("attack", 0))],
        [At("zergling", 21.95, 16)],
        may_be_illegal=True,
    )
    lanes["another's fight"] = Lane(
        [At("marine", 16, 16, ("attack", 1))],
        [At("zergling", 21.95, 16), At("dummy", 20, 13)],
    )
    # Nothing that cannot be hit is gone after.
    lanes["flyer"] = Lane(
        [At("flak", 16, 16, ("attack", 0))], [At("medivac", 21.9, 16)], may_be_illegal=True
    )
    return film(LOOPS, lanes, 4)


@pytest.mark.parametrize("enemy", ["marine", "zergling", "baneling"])
def test_retaliation_against_an_attacker_out_of_sight(enemy: str):
    attacked = provocations()[enemy, "attack"].enemies[0]
    assert attacked.target[1] == 0
    assert attacked.x[1] < 21.95
    for key in ("stop", "walk"):
        unmoved = provocations()[enemy, key].enemies[0]
        assert (unmoved.target == -1).all()
        assert np.ptp(unmoved.x) == 0


def test_retaliation_ranks_behind_what_is_in_sight():
    assert provocations()["near first"].enemies[0].target[1] == 1


def test_retaliation_picks_the_nearer_attacker():
    assert provocations()["nearer provoker"].enemies[0].target[1] == 1


def test_an_attack_on_another_provokes_nobody():
    assert (provocations()["another's fight"].enemies[0].target == -1).all()


def test_a_healer_does_not_attack_whoever_attacks_it():
    assert (provocations()["flyer"].enemies[0].target == -1).all()


# Keeping and dropping targets.


@functools.cache
def loyalties() -> dict:
    a, b = "marine", "marine"
    ling = At("zergling", 16, 16, target=0)
    marine = At("marine", 16, 16, target=0)
    near = reach("zergling", "marine") - 0.02
    lanes = {
        "in reach": Lane([At(a, 16 + near, 16), At(b, 16, 16.8)], [ling]),
        "in reach, ranged": Lane([At(a, 21, 16), At(b, 16, 18)], [marine]),
        "out of reach": Lane([At(a, 19, 16), At(b, 16, 18)], [ling]),
        "out of reach, ranged": Lane([At(a, 16 + 5.76, 16), At(b, 16, 20)], [marine]),
        "fights back": Lane([At(a, 19, 16, ("attack", 0)), At(b, 16, 18)], [ling]),
        "fights another": Lane(
            [At(a, 19, 16, ("attack", 1)), At(b, 16, 18)], [ling, At("dummy", 20, 12)]
        ),
        "fights back from afar": Lane(
            [At(a, 21.9, 16, ("attack", 0)), At(b, 16, 18)], [ling], may_be_illegal=True
        ),
        "holds its fire": Lane([At(a, 16 + near, 16), At(b, 16, 18, ("attack", 0))], [ling]),
        "holds its fire, ranged": Lane([At(a, 17, 16), At(b, 16, 20, ("attack", 0))], [marine]),
        "both fight": Lane(
            [At(a, 16, 18, ("attack", 0)), At(b, 16 + near, 16, ("attack", 0))], [ling]
        ),
        "threat out of sight": Lane(
            [At(a, 16 + near, 16), At(b, 16, 22.5, ("attack", 0))], [ling], may_be_illegal=True
        ),
        "nearest holds its fire": Lane(
            [At(a, 16, 18), At(b, 19, 16, ("attack", 0))], [At("zergling", 16, 16)]
        ),
        "another's enemy": Lane(
            [At(a, 16 + near, 16), At(b, 16, 18, ("attack", 1))], [ling, At("dummy", 12, 18)]
        ),
        "alone in sight": Lane([At(a, 19, 16)], [ling]),
        "dead": Lane([At(a, 16 + near, 16, hp=0), At(b, 16, 18)], [ling]),
        "last one dead": Lane([At(a, 16 + near, 16, hp=0), At(b, 2, 2)], [ling]),
        "nearest": Lane(
            [At("marine", 19, 16), At("zealot", 16, 18.5), At("stalker", 13, 16)],
            [At("zergling", 16, 16)],
        ),
        # Distance of centres, whatever the radius.
        "nearest centre": Lane(
            [At("colossus", 16, 18.6), At("marine", 18.5, 16)], [At("zergling", 16, 16)]
        ),
    }
    return film(LOOPS, lanes, 3)


@pytest.mark.parametrize(
    ("case", "target"),
    [
        ("in reach", 0),
        ("in reach, ranged", 0),
        ("out of reach", 1),
        ("out of reach, ranged", 1),
        ("fights back", 0),
        ("fights another", 1),
        ("fights back from afar", 0),
        ("holds its fire", 1),
        ("holds its fire, ranged", 1),
        ("both fight", 0),
        ("threat out of sight", 0),
        ("nearest holds its fire", 1),
        ("another's enemy", 0),
        ("alone in sight", 0),
        ("dead", 1),
        ("last one dead", -1),
        ("nearest", 1),
        ("nearest centre", 1),
    ],
)
def test_which_target_is_kept_or_taken(case: str, target: int):
    assert (loyalties()[case].enemies[0].target[1:] == target).all()


def test_the_nearest_is_taken_however_many_are_at_it():
    """2.69 cells to the marine that two others bite and 2.97 to the free one; then the reverse."""
    marines = [At("marine", 16, 16), At("marine", 16, 12)]
    biters = [At("zergling", 16.9, 16, target=0), At("zergling", 15.1, 16, target=0)]
    lanes = {
        "bitten": Lane(marines, [*biters, At("zergling", 18, 14.2)]),
        "other": Lane(marines, [*biters, At("zergling", 18, 13.8)]),
    }
    reels = film(LOOPS, lanes, 1)
    assert reels["bitten"].enemies[2].target[1] == 0
    assert reels["other"].enemies[2].target[1] == 1


# Healers.


@functools.cache
def triage() -> dict:
    lanes: dict = {}
    for enemy in FIGHTERS:
        lanes[enemy] = Lane([At("marine", 16, 18), At("medivac", 20, 16)], [At(enemy, 16, 16)])
    near = reach("zealot", "marine") - 0.02
    keeper = At("zealot", 16, 16, target=0)
    both = [At("marine", 16 + near, 16), At("marine", 16, 16.9)]
    lanes["no healer"] = Lane(both, [keeper])
    lanes["healer far off"] = Lane([*both, At("medivac", 2, 2)], [keeper])
    lanes["healer dead"] = Lane([*both, At("medivac", 2, 2, hp=0)], [keeper])
    edge = sight("marine", "medivac")
    for key, far in (("healer in sight", edge), ("healer out of sight", edge + 1 / 64)):
        lanes[key] = Lane(
            [At("marine", 16, 18), At("medivac", 16 + far, 16)], [At("marine", 16, 16)]
        )
    lanes["two healers"] = Lane(
        [At("medivac", 20, 16), At("medivac", 16, 19)], [At("marine", 16, 16)]
    )
    lanes["turns to the healer"] = Lane(
        [At("marine", 16, 18, ("attack", 0)), At("medivac", 20, 16)],
        [At("hydralisk", 16, 16, target=0)],
    )
    return film(LOOPS, lanes, 2)


@pytest.mark.parametrize("enemy", FIGHTERS)
def test_healers_come_first_for_those_that_can_hit_them(enemy: str):
    target = triage()[enemy].enemies[0].target[1]
    assert target == (1 if enemy in ("marine", "stalker", "hydralisk") else 0)


def test_with_a_healer_on_the_field_targets_are_chosen_anew_in_every_loop():
    """The second marine is nearer, but a target in reach is kept unless a healer lives."""
    assert triage()["no healer"].enemies[0].target[1] == 0
    assert triage()["healer dead"].enemies[0].target[1] == 0
    assert triage()["healer far off"].enemies[0].target[1] == 1


def test_healers_must_be_in_sight():
    assert triage()["healer in sight"].enemies[0].target[1] == 1
    assert triage()["healer out of sight"].enemies[0].target[1] == 0


def test_of_two_healers_the_nearer():
    assert triage()["two healers"].enemies[0].target[1] == 1


def test_even_one_that_fights_back_is_left_for_a_healer():
    assert triage()["turns to the healer"].enemies[0].target[1] == 1


# On the march.


@functools.cache
def marches() -> dict:
    return film(
        STEPS,
        {
            # A marine that is passed at a distance of 8 is not seen; the goal is reached and held.
            "passes by": Lane([At("dummy", 16, 26)], [At("zealot", 20, 18)], march=(12, 18)),
            # Five cells are: it turns, and stays while the ally lives.
            "turns": Lane([At("dummy", 16, 22.5)], [At("zealot", 20, 18)], march=(8, 18)),
            # The ally dies of the first blow: back to the march.
            "goes on": Lane(
                [At("dummy", 16, 18, hp=1), At("dummy", 2, 2)],
                [At("zealot", 17.05, 18)],
                march=(17.05, 28),
            ),
        },
        14,
    )


def test_a_march_ends_at_its_goal():
    zealot = marches()["passes by"].enemies[0]
    np.testing.assert_allclose(zealot.x[:8], 20 - 1.125 * np.arange(8), atol=1e-3)
    np.testing.assert_allclose(zealot.x[8:], 12, atol=1e-3)
    np.testing.assert_allclose(zealot.y, 18, atol=1e-3)
    assert (zealot.target == -1).all()


def test_a_march_stops_for_a_fight():
    reel = marches()["turns"]
    assert reel.enemies[0].target[-1] == 0
    assert reel.allies[0].losses.sum() > 0
    assert reel.enemies[0].gap(reel.allies[0])[-1] <= reach("zealot", "dummy") + 1e-3


def test_a_march_goes_on_after_a_fight():
    reel = marches()["goes on"]
    zealot = reel.enemies[0]
    assert reel.allies[0].hp[1] == 0
    # Seven loops of the first step are left, or six.
    assert 18 + 6 * 2.25 / 16 - 1e-3 <= zealot.y[1] <= 18 + 7 * 2.25 / 16 + 1e-3
    np.testing.assert_allclose(zealot.y[1:6] - zealot.y[1], 1.125 * np.arange(5), atol=1e-3)
