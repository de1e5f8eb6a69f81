"""Pictures of battles: what a scene copies from a state, and that both canvases draw it right."""

from __future__ import annotations

import dataclasses
from xml.etree import ElementTree

import jax
import numpy as np
import pytest

from majepa.envs import EnvError
from majepa.envs.sim import SCENARIOS, UNITS, BattleEnv, Terrain
from majepa.envs.sim.render import HEALTH, RIMS, SHIELD, to_rgb, to_svg
from majepa.envs.sim.scene import GLYPHS, REACH_SLACK, Scene, SceneUnit, blend, scene_of

FIELD = Terrain.box(0, 0, 20, 10)
SCALE = 20
SIZE = 22 * SCALE
"""The field and a margin of one cell on each side, at 20 pixels a cell."""


def unit(name: str, side: str = "ally", x: float = 5.0, y: float = 5.0, **changes) -> SceneUnit:
    kind = UNITS[name]
    fresh = SceneUnit(
        kind=name, side=side, plane=kind.plane, weapon=kind.weapon, x=x, y=y,
        radius=float(kind.radius), weapon_range=float(kind.weapon_range), sweep=0.0,
        hp=float(kind.hp), hp_max=float(kind.hp), shield=float(kind.shield),
        shield_max=float(kind.shield), energy=float(kind.energy),
        energy_max=float(kind.energy_max), cooldown=0.0, alive=True, target=None,
    )  # fmt: skip
    return dataclasses.replace(fresh, **changes)


def scene(*units: SceneUnit, **changes) -> Scene:
    plain = Scene("field", 3, 60, FIELD, units, tuple(None for u in units if u.side == "ally"))
    return dataclasses.replace(plain, **changes)


def shapes(picture: Scene, kind: str) -> list[dict[str, str]]:
    """Attributes of all shapes of a kind in the SVG, whose labels may say more than the kind."""
    root = ElementTree.fromstring(to_svg(picture, scale=float(SCALE)))
    return [part.attrib for part in root if kind in part.attrib.get("class", "").split()]


def pixels_of(image: np.ndarray, colour: str) -> np.ndarray:
    """Rows and columns of the ground's pixels that have exactly this colour."""
    wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return np.argwhere((image[: 12 * SCALE] == wanted).all(-1))


@pytest.fixture(scope="module")
def battle():
    env = BattleEnv(SCENARIOS["MMM"])
    state, _ = jax.jit(env.reset)(jax.random.split(jax.random.key(0), 2))
    return env, state


def set_column(state, table: str, name: str, row: int, value, *, env: int = 0):
    group = getattr(state, table)
    changed = getattr(group, name).at[row, env].set(value)
    return state._replace(**{table: group._replace(**{name: changed})})


def test_scene_copies_the_chosen_environment(battle):
    env, state = battle
    state = set_column(state, "units", "hp", 4, 17.0, env=1)
    state = set_column(state, "units", "x", 4, 3.25, env=1)
    first, second = scene_of(env, state, 0), scene_of(env, state, 1)
    assert (first.units[4].hp, second.units[4].hp) == (45.0, 17.0)
    assert second.units[4].x == 3.25
    assert (second.map_name, second.step, second.limit) == ("MMM", 0, 150)
    assert [len(second.of("ally")), len(second.of("enemy"))] == [10, 10]
    assert [u.kind for u in second.units[:3]] == ["marauder", "marauder", "marine"]
    assert second.units[9].energy == 50 and second.units[9].energy_max == 200
    assert second.last_actions == (None,) * 10 and second.outcome is None


def test_scene_names_actions(battle):
    env, state = battle
    acted = state._replace(last_action=state.last_action.at[:, 0].set(np.arange(10)))
    assert scene_of(env, acted).last_actions[:7] == (
        "no_op", "stop", "north", "south", "east", "west", "target_0",
    )  # fmt: skip


def test_scene_refuses_an_environment_that_is_not_there(battle):
    env, state = battle
    with pytest.raises(EnvError, match="batch of 2"):
        scene_of(env, state, 2)
    with pytest.raises(EnvError):
        scene_of(env, state, -1)


@pytest.mark.parametrize(
    "row, target, expected",
    [(3, 4, 14), (9, 1, 1), (12, 2, 2), (19, 5, 15), (3, -1, None)],
    ids=["ally", "ally healer", "enemy", "enemy healer", "nobody"],
)
def test_targets_are_numbered_over_both_sides(battle, row, target, expected):
    env, state = battle
    state = set_column(state, "minds", "target", row, target)
    assert scene_of(env, state).units[row].target == expected


def test_the_dead_neither_aim_nor_are_aimed_at(battle):
    env, state = battle
    state = set_column(state, "minds", "target", 3, 4)
    target_dead = set_column(state, "units", "hp", 14, 0.0)
    shooter_dead = set_column(state, "units", "hp", 3, 0.0)
    assert not scene_of(env, target_dead).units[14].alive
    assert scene_of(env, target_dead).units[3].target is None
    assert scene_of(env, shooter_dead).units[3].target is None


@pytest.mark.parametrize(
    "dead, steps, outcome",
    [
        (slice(10, 20), 9, "won"),
        (slice(0, 10), 9, "lost"),
        (slice(0, 9), 9, "lost"),
        (slice(0, 20), 9, "drawn"),
        (slice(0, 2), 150, "timeout"),
    ],
)
def test_scene_knows_how_the_episode_ended(battle, dead, steps, outcome):
    env, state = battle
    units = state.units._replace(hp=state.units.hp.at[dead].set(0.0))
    over = state._replace(units=units, steps=state.steps + steps, is_over=~state.is_over)
    assert scene_of(env, over).outcome == outcome


def test_scene_survives_json(battle):
    env, state = battle
    state = set_column(state, "minds", "target", 3, 4)
    original = dataclasses.replace(scene_of(env, state), outcome="won", total_reward=12.5)
    assert Scene.from_json(original.to_json()) == original


def test_units_stand_at_their_pixels_and_north_is_up():
    low, high = unit("stalker", "ally", 5.0, 2.0), unit("zealot", "enemy", 14.5, 8.0)
    image = to_rgb(scene(low, high), size=SIZE)
    for mark in (low, high):
        rim = pixels_of(image, RIMS[mark.side])
        row, column = (rim.min(0) + rim.max(0) + 1) / 2
        assert column == pytest.approx((mark.x + 1) * SCALE, abs=1)
        assert row == pytest.approx((11 - mark.y) * SCALE, abs=1)
        assert np.ptp(rim, axis=0).max() + 1 == pytest.approx(2 * mark.radius * SCALE, abs=2)
    circles = shapes(scene(low, high), "unit")
    assert [(float(c["cx"]), float(c["cy"])) for c in circles] == [(120, 180), (310, 60)]


@pytest.mark.parametrize("part, colour", [(1.0, HEALTH[0]), (0.5, HEALTH[1]), (0.2, HEALTH[2])])
def test_bars_are_as_long_as_what_is_left(part, colour):
    hurt = unit("stalker", hp=80 * part, shield=20.0)
    foe = unit("marine", "enemy", 15.0)
    full = 2 * hurt.radius * SCALE
    (health,) = shapes(scene(hurt, foe), "health")
    (shield,) = shapes(scene(hurt, foe), "shield")
    assert float(health["width"]) == pytest.approx(part * full, abs=0.01)
    assert float(shield["width"]) == pytest.approx(full / 4, abs=0.01)
    assert float(shield["y"]) < float(health["y"])
    image = to_rgb(scene(hurt, foe), size=SIZE)
    assert _length(pixels_of(image, colour)) == pytest.approx(part * full, abs=1.5)
    assert _length(pixels_of(image, SHIELD)) == pytest.approx(full / 4, abs=1.5)


def _length(found: np.ndarray) -> int:
    return int(np.ptp(found[:, 1])) + 1


def test_units_without_a_scratch_have_no_bars():
    assert not shapes(scene(unit("stalker"), unit("marine", "enemy", 15.0)), "health")
    assert len(shapes(scene(unit("medivac"), unit("marine", "enemy", 15.0)), "energy")) == 1


def test_svg_has_one_mark_per_living_unit():
    marks = [unit("zergling", "enemy", 1.0 + k, 2.0, alive=k % 3 > 0) for k in range(12)]
    picture = scene(unit("colossus"), unit("colossus", y=8.0), *marks)
    assert len(shapes(picture, "unit")) == 2 + 8
    assert sum(mark["class"] == "unit ally" for mark in shapes(picture, "unit")) == 2
    assert len(shapes(picture, "fallen")) == 2 * 4


@pytest.mark.parametrize("shooter, victim", [("marine", "zealot"), ("zealot", "colossus")])
def test_attacks_show_only_within_reach(shooter, victim):
    reach = UNITS[shooter].weapon_range + UNITS[shooter].radius + UNITS[victim].radius
    for distance, shown in ((reach - 0.01, 1), (reach + REACH_SLACK + 0.01, 0)):
        attacker = unit(shooter, x=2.0, target=1)
        target = unit(victim, "enemy", 2.0 + distance)
        lines = shapes(scene(attacker, target), "attack")
        assert len(lines) == shown
        assert len(shapes(scene(attacker, target), "spark")) == shown
    assert not shapes(scene(attacker, unit(victim, "enemy", 2.5, alive=False)), "attack")


def test_attack_lines_lead_from_shooter_to_target():
    healer, patient = unit("medivac", x=4.0, y=4.0, target=1), unit("marine", x=6.0, y=5.0, hp=9.0)
    (line,) = shapes(scene(healer, patient, unit("marine", "enemy", 15.0)), "attack")
    ends = [float(line[name]) for name in ("x1", "y1", "x2", "y2")]
    assert ends == [100, 140, 140, 120]


def test_a_beam_sweeps_across_its_target():
    colossus = unit("colossus", x=4.0, target=1, sweep=2.8)
    (sweep,) = shapes(scene(colossus, unit("marine", "enemy", 9.0)), "sweep")
    assert float(sweep["x1"]) == float(sweep["x2"]) == 200
    assert abs(float(sweep["y1"]) - float(sweep["y2"])) == pytest.approx(2.8 * SCALE)


def test_ground_and_cliffs_differ_and_empty_rows_are_cropped():
    ravine = scene(
        unit("marine"), unit("marine", "enemy", 9.0), terrain=SCENARIOS["2c_vs_64zg"].terrain
    )
    assert len(shapes(ravine, "cliff")) == 1 and len(shapes(ravine, "ground")) == 15
    root = ElementTree.fromstring(to_svg(ravine, scale=float(SCALE)))
    panel = float(shapes(ravine, "panel")[0]["y"])
    assert (float(root.attrib["width"]), panel) == ((32 + 2) * SCALE, (14 + 2) * SCALE)


@pytest.mark.parametrize("name", ["2m_vs_1z", "2s_vs_1sc", "corridor", "6h_vs_8z"])
@pytest.mark.parametrize("size", [101, 256])
def test_rasters_have_even_sides(name, size):
    picture = scene(unit("marine"), unit("marine", "enemy"), terrain=SCENARIOS[name].terrain)
    height, width, _ = to_rgb(picture, size=size).shape
    assert height % 2 == width % 2 == 0
    assert abs(width - size) <= 1 or abs(height - 0.118 * width - size) <= 2


def test_drawing_one_frame_does_not_show_in_the_next():
    here, there = (scene(unit("marine", x=x), unit("marine", "enemy", 15.0)) for x in (3.0, 8.0))
    first = to_rgb(here, size=200)
    to_rgb(there, size=200)
    assert np.array_equal(to_rgb(here, size=200), first)


def test_outcome_is_written_into_the_caption():
    picture = scene(unit("marine"), unit("marine", "enemy"), outcome="won", total_reward=20.0)
    assert ">WON<" in to_svg(picture) and "return 20.00" in to_svg(picture)
    assert not np.array_equal(to_rgb(picture), to_rgb(dataclasses.replace(picture, outcome=None)))


def test_between_two_steps_the_living_are_on_their_way():
    before = scene(unit("marine", x=2.0, y=4.0), unit("marine", "enemy", 9.0), step=7)
    moved = unit("marine", x=3.0, y=2.0, hp=5.0)
    after = scene(moved, unit("marine", "enemy", 11.0, hp=0.0, alive=False), step=8)
    middle = blend(before, after, 0.5)
    assert (middle.units[0].x, middle.units[0].y) == (2.5, 3.0)
    assert middle.units[1] == before.units[1] and middle.step == 7
    assert blend(before, after, 0.0) == before


def test_every_stock_unit_has_a_letter_of_its_own():
    assert set(GLYPHS) == set(UNITS) and len(set(GLYPHS.values())) == len(GLYPHS)
    assert dataclasses.replace(unit("marine"), kind="archon").glyph == "A"
