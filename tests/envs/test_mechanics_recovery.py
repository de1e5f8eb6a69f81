"""Shields, zerg regeneration and medivacs, by hand arithmetic."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from skirmish import LOOPS, NEVER, SPEC, STEPS, At, Lane, Track, film

from majepa.envs.sim import SCENARIOS, BattleEnv
from majepa.envs.sim.enemy import choose_patients

pytestmark = pytest.mark.slow

PROTOSS = tuple(name for name, sheet in SPEC.items() if sheet.shield)
ZERG = tuple(name for name, sheet in SPEC.items() if sheet.race == "zerg")
FAR = [At("dummy", 2, 2)]

# Shields and regeneration, in steps of eight loops.

QUIET_STEPS = 45


@functools.cache
def quiet() -> dict:
    lanes: dict = {}
    for name in PROTOSS:
        # One shot of 10 damage in the first loop, and nothing after it.
        lanes["ally", name] = Lane([At(name, 16, 16)], [At("sniper", 19, 16)])
        lanes["enemy", name] = Lane(
            [At("sniper", 19, 16, ("attack", 0))],
            [At(name, 16, 16, cooldown=NEVER)],
            may_be_illegal=True,
        )
        # A second one in loop 80.
        lanes["twice", name] = Lane(
            [At(name, 16, 16)], [At("sniper", 19, 16), At("sniper", 13, 16, cooldown=80)]
        )
        # Through the shield to the hit points: 4 + (6 - 1).
        lanes["through", name] = Lane([At(name, 16, 16, shield=3.875)], [At("sniper", 19, 16)])
        lanes["hurt", name] = Lane([At(name, 16, 16, hp=50, shield=0)], FAR)
        lanes["dead", name] = Lane([At(name, 16, 16, hp=0, shield=0), At("dummy", 30, 30)], FAR)
    for name in SPEC:
        lanes["wounded", name] = Lane([At(name, 16, 16, hp=20)], FAR)
        lanes["wounded enemy", name] = Lane([At("dummy", 2, 2)], [At(name, 16, 16, hp=20)])
        lanes["scratched", name] = Lane([At(name, 16, 16, hp=SPEC[name].hp - 0.5)], FAR)
        lanes["fallen", name] = Lane(
            [At("dummy", 2, 2)], [At("dummy", 30, 30), At(name, 9, 9, hp=0)]
        )
    return film(STEPS, lanes, QUIET_STEPS)


def quiet_shield(name: str, start: float, hits: list[int]) -> list[float]:
    """Shield at the end of each step: hit for 10 in some loops, back at 0.125 per loop from the
    160th loop after the last hit on."""
    shield, waiting, rows = start, 0, [start]
    for loop in range(1, QUIET_STEPS * 8 + 1):
        waiting = max(waiting - 1, 0)
        if waiting == 0:
            shield = min(shield + 0.125, SPEC[name].shield)
        if loop in hits:
            shield, waiting = max(shield - 10, 0), 160
        if loop % 8 == 0:
            rows.append(shield)
    return rows


@pytest.mark.parametrize("name", PROTOSS)
@pytest.mark.parametrize("side", ["ally", "enemy"])
def test_shields_recover_after_ten_seconds(name: str, side: str):
    reel = quiet()[side, name]
    track = (reel.allies if side == "ally" else reel.enemies)[0]
    full = SPEC[name].shield
    # Hit in loop 1: nothing until loop 160, then 0.125 in each of loops 161 to 168.
    np.testing.assert_allclose(track.shield[1:21], full - 10, atol=1e-4)
    assert track.shield[21] == pytest.approx(full - 9, abs=1e-4)
    assert track.shield[22] == pytest.approx(full - 8, abs=1e-4)
    np.testing.assert_allclose(track.shield, quiet_shield(name, full, [1]), atol=1e-4)
    # 80 loops later it is full and stays so.
    assert (track.shield[31:] == full).all()
    assert (track.hp == SPEC[name].hp).all()


@pytest.mark.parametrize("name", PROTOSS)
def test_damage_starts_the_delay_of_shields_anew(name: str):
    track = quiet()["twice", name].allies[0]
    full = SPEC[name].shield
    np.testing.assert_allclose(track.shield, quiet_shield(name, full, [1, 80]), atol=1e-4)
    # 160 loops after loop 80 is loop 240, the last one of step 30.
    assert track.shield[29] == pytest.approx(full - 20, abs=1e-4)
    assert track.shield[30] == pytest.approx(full - 20 + 0.125, abs=1e-4)


@pytest.mark.parametrize("name", PROTOSS)
def test_damage_to_hit_points_starts_the_delay_too(name: str):
    track = quiet()["through", name].allies[0]
    assert track.hp[1] == pytest.approx(SPEC[name].hp - 5, abs=1e-4)
    assert (track.hp[1:] == track.hp[1]).all()
    np.testing.assert_allclose(track.shield, quiet_shield(name, 3.875, [1]), atol=1e-4)


@pytest.mark.parametrize("name", PROTOSS)
def test_shields_that_nobody_touched_recover_at_once(name: str):
    track = quiet()["hurt", name].allies[0]
    full = SPEC[name].shield
    expected = np.minimum(np.arange(QUIET_STEPS + 1.0), full)
    np.testing.assert_allclose(track.shield, expected, atol=1e-4)
    assert (track.hp == 50).all()


@pytest.mark.parametrize("name", SPEC)
@pytest.mark.parametrize("case", ["wounded", "wounded enemy"])
def test_only_zerg_regain_hit_points(name: str, case: str):
    reel = quiet()[case, name]
    track = reel.allies[0] if case == "wounded" else reel.enemies[0]
    rate = 0.0171 * 8 if name in ZERG else 0.0
    expected = np.minimum(20 + rate * np.arange(QUIET_STEPS + 1), SPEC[name].hp)
    np.testing.assert_allclose(track.hp, expected, atol=2e-3)


@pytest.mark.parametrize("name", SPEC)
def test_nothing_regenerates_beyond_its_maximum(name: str):
    track = quiet()["scratched", name].allies[0]
    if name in ZERG:  # 0.5 / 0.0171 = 29.2 loops
        assert track.hp[3] < SPEC[name].hp
        assert (track.hp[4:] == SPEC[name].hp).all()
    else:
        assert (track.hp == np.float32(SPEC[name].hp - 0.5)).all()
    assert (track.shield == SPEC[name].shield).all()


@pytest.mark.parametrize("name", SPEC)
def test_the_dead_stay_dead(name: str):
    track = quiet()["fallen", name].enemies[1]
    assert (track.hp == 0).all()
    assert (np.ptp(track.x), np.ptp(track.y)) == (0, 0)
    if name in PROTOSS:
        track = quiet()["dead", name].allies[0]
        assert (track.hp == 0).all()
        assert (track.shield == 0).all()


# Medivacs, loop by loop.

HEAL = 9 / 16
"""Hit points per loop."""
GAIN = 0.5625 / 16
"""Energy per loop."""
SPEND = HEAL / 3
EDGE = 4 + 0.75 + 0.375
"""Centre distance up to which a marine is healed."""
CARE_LOOPS = 90


@functools.cache
def care() -> dict:
    def lane(medivac: At, *patients: At) -> Lane:
        return Lane([medivac, *patients], FAR, may_be_illegal=False)

    heal = ("heal", 1)
    at = functools.partial(At, "medivac", 10, 16)
    lanes = {
        "steady": lane(at(heal), At("marauder", 13, 16, hp=10)),
        "to full": lane(at(heal), At("marine", 13, 16, hp=40)),
        "full": lane(at(heal), At("marine", 13, 16)),
        "rich": lane(at("stop", energy=199.9), At("marine", 13, 16)),
        "idle": lane(at("stop"), At("marine", 13, 16, hp=10)),
        "in range": lane(at(heal), At("marine", 10 + EDGE - 0.005, 16, hp=10)),
        "out of range": lane(at(heal), At("marine", 10 + EDGE + 0.02, 16, hp=10)),
        "far": lane(at(heal), At("marine", 15.99, 16, hp=10)),
        "poor": lane(at(heal, energy=4), At("marauder", 13, 16, hp=10)),
        "just enough": lane(at(heal, energy=5), At("marauder", 13, 16, hp=10)),
        "too poor to switch": lane(
            at([("heal", 1)] * 10 + [("heal", 2)], energy=5),
            At("marauder", 13, 16, hp=10),
            At("marine", 13, 18, hp=10),
        ),
        "switch": lane(
            at([("heal", 1)] * 10 + [("heal", 2)]),
            At("marauder", 13, 16, hp=10),
            At("marine", 13, 18, hp=10),
        ),
        "stop": lane(at([("heal", 1)] * 10 + ["stop"]), At("marauder", 13, 16, hp=10)),
        "two": Lane(
            [
                At("medivac", 10, 16, ("heal", 2)),
                At("medivac", 16, 16, ("heal", 2)),
                At("marauder", 13, 16, hp=10),
            ],
            FAR,
        ),
        "dying": Lane(
            [At("medivac", 10, 16, ("heal", 1), hp=5), At("marauder", 13, 16, hp=10)],
            [At("sniper", 10, 20)],
        ),
        "patient dies": Lane(
            [At("medivac", 10, 16, ("heal", 1)), At("marine", 13, 16, hp=5)],
            [At("sniper", 17, 16), At("bunker", 2, 2)],
            may_be_illegal=True,
        ),
    }
    for name in SPEC:
        if name != "medivac":
            lanes["kind", name] = lane(at(heal), At(name, 13, 16, hp=10))
    return film(LOOPS, lanes, CARE_LOOPS)


def pair(name: object) -> tuple[Track, Track]:
    reel = care()[name]
    return reel.allies[0], reel.allies[1]


def test_a_medivac_heals_and_pays_with_energy_that_it_regains_meanwhile():
    medivac, patient = pair("steady")
    loops = np.arange(CARE_LOOPS + 1)
    np.testing.assert_allclose(patient.hp, 10 + HEAL * loops, atol=1e-3)
    np.testing.assert_allclose(medivac.energy, 50 + (GAIN - SPEND) * loops, atol=1e-3)
    assert np.ptp(medivac.x) == 0


def test_healing_ends_at_full_health():
    medivac, patient = pair("to full")
    assert patient.hp.max() == 45
    assert (patient.hp[9:] == 45).all()  # 5 / (9/16) = 8.9 loops
    spent = 50 + GAIN * np.arange(CARE_LOOPS + 1) - medivac.energy
    assert spent[-1] == pytest.approx(5 / 3, abs=1e-3)


def test_a_full_patient_costs_nothing():
    medivac, patient = pair("full")
    assert (patient.hp == 45).all()
    np.testing.assert_allclose(medivac.energy, 50 + GAIN * np.arange(CARE_LOOPS + 1), atol=1e-3)


def test_energy_has_a_maximum():
    medivac, _ = pair("rich")
    assert medivac.energy[2] == pytest.approx(199.9 + 2 * GAIN, abs=1e-3)
    assert (medivac.energy[3:] == 200).all()


def test_a_stopped_medivac_does_not_heal():
    medivac, patient = pair("idle")
    assert (patient.hp == 10).all()
    assert np.ptp(medivac.x) == 0
    np.testing.assert_allclose(medivac.energy, 50 + GAIN * np.arange(CARE_LOOPS + 1), atol=1e-3)


def test_healing_range_is_from_edge_to_edge():
    medivac, patient = pair("in range")
    assert patient.hp[1] == pytest.approx(10 + HEAL)
    assert np.ptp(medivac.x) == 0
    medivac, patient = pair("out of range")
    assert patient.hp[1] == 10
    assert medivac.x[1] > 10


def test_a_medivac_flies_to_a_patient_out_of_range():
    medivac, patient = pair("far")
    # From rest, 2.25 / 256 more per loop: 0.00879 k (k + 1) / 2 >= 0.865 after 14 loops.
    ramp = 2.25 / 256 * np.cumsum(np.arange(14))
    np.testing.assert_allclose(medivac.x[:14], 10 + ramp, atol=1e-4)
    first = np.flatnonzero(np.diff(patient.hp))[0] + 1
    assert first in (14, 15)
    assert np.ptp(medivac.x[first:]) <= 0.15  # then it stands
    assert patient.hp[60] == pytest.approx(10 + HEAL * (60 - first + 1), abs=1e-2)


def test_healing_does_not_begin_below_five_energy():
    medivac, patient = pair("poor")
    # 4 + k GAIN reaches 5 in loop 29.
    assert (patient.hp[:29] == 10).all()
    np.testing.assert_allclose(medivac.energy[:29], 4 + GAIN * np.arange(29), atol=1e-3)
    assert patient.hp[29] == pytest.approx(10 + HEAL, abs=1e-3)
    # Once begun it goes on below five.
    loops = np.arange(20)
    np.testing.assert_allclose(patient.hp[29:49], 10 + HEAL * (loops + 1), atol=1e-3)
    assert medivac.energy[40] < 5


def test_healing_goes_on_while_there_is_energy():
    medivac, patient = pair("just enough")
    # 5 / (SPEND - GAIN) = 32.8 loops at full rate.
    loops = np.arange(32)
    np.testing.assert_allclose(patient.hp[:32], 10 + HEAL * loops, atol=1e-3)
    assert (medivac.energy > -1e-6).all()
    # Three hit points for each energy, to the last drop.
    spent = 5 + GAIN * np.arange(CARE_LOOPS + 1) - medivac.energy
    np.testing.assert_allclose((patient.hp - 10) / 3, spent, atol=2e-3)


def test_a_new_patient_needs_five_energy():
    reel = care()["too poor to switch"]
    # 5 - 10 (SPEND - GAIN) = 3.48; five again 44 loops later, in loop 54.
    assert reel.allies[1].hp[10] == pytest.approx(10 + 10 * HEAL, abs=1e-3)
    assert (reel.allies[1].hp[10:] == reel.allies[1].hp[10]).all()
    assert (reel.allies[2].hp[:53] == 10).all()
    assert reel.allies[2].hp[56] > 10


def test_a_medivac_switches_patients_and_stops_as_told():
    reel = care()["switch"]
    assert reel.allies[2].hp[11] == pytest.approx(10 + HEAL, abs=1e-3)
    assert (reel.allies[1].hp[10:] == reel.allies[1].hp[10]).all()
    _, patient = pair("stop")
    assert (patient.hp[10:] == patient.hp[10]).all()


def test_two_medivacs_heal_twice_as_fast():
    patient = care()["two"].allies[2]
    np.testing.assert_allclose(patient.hp, 10 + 2 * HEAL * np.arange(CARE_LOOPS + 1), atol=1e-3)


def test_the_dead_neither_heal_nor_are_healed():
    medivac, patient = pair("dying")
    assert medivac.hp[1] == 0
    assert patient.hp[1] <= 10 + HEAL
    assert (patient.hp[1:] == patient.hp[1]).all()
    medivac, patient = pair("patient dies")
    assert (patient.hp[1:] == 0).all()


@pytest.mark.parametrize("name", [name for name in SPEC if name != "medivac"])
def test_only_living_tissue_is_healed(name: str):
    medivac, patient = pair(("kind", name))
    regained = 0.0171 * CARE_LOOPS if name in ZERG else 0.0
    healed = HEAL * CARE_LOOPS if "biological" in SPEC[name].attributes else 0.0
    expected = min(10 + regained + healed, SPEC[name].hp)
    assert patient.hp[-1] == pytest.approx(expected, abs=1e-2)
    if not healed:
        assert medivac.energy[-1] == pytest.approx(50 + GAIN * CARE_LOOPS, abs=1e-2)


# The enemy's medivac.


@functools.cache
def enemy_care() -> dict:
    ally = [At("dummy", 2, 30)]
    medivac = At("medivac", 16, 16)
    ward = [At("marine", 19, 16, hp=30), At("marine", 16, 19, hp=20), At("marine", 13, 16, hp=40)]
    return film(
        LOOPS,
        {
            "weakest": Lane(ally, [medivac, *ward]),
            "unhurt": Lane(ally, [medivac, At("marine", 19, 16)]),
            "mechanical": Lane(ally, [medivac, At("stalker", 19, 16, hp=10)]),
            "out of sight": Lane(
                ally, [medivac, At("marine", 16 + 5 + 0.75 + 0.375 + 0.1, 16, hp=9)]
            ),
            "in sight": Lane(ally, [medivac, At("marine", 16 + 5 + 0.75 + 0.375 - 0.1, 16, hp=9)]),
            # A marine that fights is a candidate though unhurt.
            "fighting": Lane(
                [At("dummy", 24, 16)], [medivac, At("marine", 20, 16)], may_be_illegal=True
            ),
            "poor": Lane(ally, [At("medivac", 16, 16, energy=4.0), At("marine", 19, 16, hp=10)]),
        },
        70,
    )


def test_an_enemy_medivac_heals_the_weakest_first():
    medivac, *ward = enemy_care()["weakest"].enemies
    assert medivac.target[1] == 2
    # 25 missing at 9/16 per loop are 44.4 loops; then comes the next weakest.
    loops = np.arange(44)
    np.testing.assert_allclose(ward[1].hp[:44], 20 + HEAL * loops, atol=1e-3)
    assert (ward[0].hp[:44] == 30).all()
    assert ward[1].hp[46] == 45
    assert medivac.target[48] == 1
    assert ward[0].hp[70] > 30
    assert (ward[2].hp == 40).all()
    assert medivac.energy[40] == pytest.approx(50 + 40 * (GAIN - SPEND), abs=1e-3)


def test_an_enemy_medivac_minds_only_the_hurt_and_the_fighting():
    assert (enemy_care()["unhurt"].enemies[0].target == -1).all()
    assert (enemy_care()["mechanical"].enemies[0].target == -1).all()
    assert (enemy_care()["mechanical"].enemies[1].hp == 10).all()
    assert enemy_care()["fighting"].enemies[0].target[-1] == 1


def test_an_enemy_medivac_sees_five_cells_far():
    assert (enemy_care()["out of sight"].enemies[0].target == -1).all()
    assert enemy_care()["in sight"].enemies[0].target[1] == 1
    assert enemy_care()["in sight"].enemies[1].hp[-1] > 9


def test_an_enemy_medivac_needs_five_energy_too():
    patient = enemy_care()["poor"].enemies[1]
    assert (patient.hp[:29] == 10).all()
    assert patient.hp[29] == pytest.approx(10 + HEAL, abs=1e-3)
    assert patient.hp[49] == pytest.approx(10 + 21 * HEAL, abs=1e-3)


def test_an_enemy_medivac_flies_no_faster_than_those_it_cares_for():
    """It falls back while it gathers speed, catches up, and then keeps to a zealot's 2.25."""
    enemies = [At("zealot", 26, 28, hp=20), At("medivac", 26 + 5.3, 28)]
    reel = film(STEPS, {0: Lane([At("dummy", 2, 2)], enemies, march=(0.5, 28))}, 12)[0]
    zealot, medivac = reel.enemies
    np.testing.assert_allclose(np.diff(zealot.x), -1.125, atol=1e-3)
    np.testing.assert_allclose(np.diff(medivac.x)[-4:], -1.125, atol=5e-3)
    assert (medivac.target[-4:] == 0).all()


def test_medivacs_start_with_fifty_energy():
    for side in ("allies", "enemies"):
        medivac = At("medivac", 16, 16)
        lane = Lane([medivac, At("dummy", 2, 2)], [medivac, At("dummy", 30, 30)])
        track = getattr(film(LOOPS, {0: lane}, 1)[0], side)[0]
        assert track.energy[0] == 50
        assert track.energy[1] == pytest.approx(50 + GAIN)


def test_an_enemy_medivac_goes_to_the_hurt_before_those_who_only_fight():
    arena = BattleEnv(SCENARIOS["MMM"]).arena
    marine, marauder, medivac = 0, 7, 9
    assert [arena.units[arena.enemies][row].name for row in (marine, marauder, medivac)] == [
        "marine",
        "marauder",
        "medivac",
    ]
    place = np.full((10, 3), 3.0, np.float32)
    place[[marine, marauder, medivac]] = 20.0
    hp = np.array(arena.hp_max[arena.enemies] * np.ones((1, 3)), np.float32)
    # A fighting marine has 45 left, fewer than the marauder: hurt, nobody hurt, nobody fighting.
    hp[marauder, 0] = 100.0
    is_fighting = np.zeros((10, 3), bool)
    is_fighting[marine, :2] = True
    nobody = np.full((10, 3), -1, np.int32)
    arguments = (place, place, hp, is_fighting, nobody)
    patient, _ = choose_patients(arena, *(jnp.asarray(argument) for argument in arguments))
    assert list(np.asarray(patient[medivac])) == [marauder, marine, -1]
