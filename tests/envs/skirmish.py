"""Tiny battles for tests: put a few units on open ground, give orders, look at what happens.

`SPEC` is the unit table of StarCraft II 4.10 as SMAC's maps use it, written out by hand: what is
expected of the simulator is computed from it and never from the simulator's own tables.

A `Lane` is one battle. `film` plays many at once: all lanes share one scenario, the zoo, which has
a few units of every kind on both sides, and a lane leaves all units dead that it does not name. So
one compilation serves hundreds of battles. The stage `LOOPS` advances one game loop at a time and
its enemies hold their ground; on `STEPS` a step is the usual eight loops and enemies attack-move.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from majepa.envs.sim import (
    SCENARIOS,
    UNITS,
    AttackMove,
    BattleEnv,
    Hold,
    Rules,
    Scenario,
    Spawn,
    Terrain,
    UnitType,
)


class Sheet(NamedTuple):
    """One row of the unit table. Times in game loops, speed in cells per normal second."""

    hp: float
    shield: float
    armour: float
    damage: float
    attacks: int
    bonus: tuple[tuple[str, float], ...]
    period: float
    damage_point: int
    range: float
    speed: float
    radius: float
    separation: float
    attributes: tuple[str, ...]
    plane: str
    hits: tuple[str, ...]
    race: str


# fmt: off
SPEC = {
    "marine": Sheet(45, 0, 0, 6, 1, (), 13.77, 1, 5, 2.25, 0.375, 0.375,
                    ("light", "biological"), "ground", ("ground", "air"), "terran"),
    "marauder": Sheet(125, 0, 1, 10, 1, (("armored", 10),), 24.0, 0, 6, 2.25, 0.5625, 0.5625,
                      ("armored", "biological"), "ground", ("ground",), "terran"),
    "medivac": Sheet(150, 0, 1, 0, 1, (), math.inf, 0, 4, 2.75, 0.75, 0.75,
                     ("armored", "mechanical"), "air", (), "terran"),
    "stalker": Sheet(80, 80, 1, 13, 1, (("armored", 5),), 29.92, 2, 6, 2.953, 0.625, 0.625,
                     ("armored", "mechanical"), "ground", ("ground", "air"), "protoss"),
    "zealot": Sheet(100, 50, 1, 8, 2, (), 19.2, 0, 0.1, 2.25, 0.5, 0.375,
                    ("light", "biological"), "ground", ("ground",), "protoss"),
    "colossus": Sheet(200, 150, 1, 10, 2, (("light", 5),), 24.0, 1, 7, 2.25, 1.0, 0.75,
                      ("armored", "mechanical", "massive"), "cliff", ("ground",), "protoss"),
    "zergling": Sheet(35, 0, 0, 5, 1, (), 11.14, 2, 0.1, 2.953, 0.375, 0.375,
                      ("light", "biological"), "ground", ("ground",), "zerg"),
    "baneling": Sheet(30, 0, 0, 20, 1, (("light", 15),), math.inf, 0, 0.25, 2.5, 0.375, 0.375,
                      ("biological",), "ground", ("ground",), "zerg"),
    "spine_crawler": Sheet(300, 0, 2, 25, 1, (("armored", 5),), 29.6, 3, 7, 0, 1.125, 1.125,
                           ("armored", "biological", "structure"), "ground", ("ground",), "zerg"),
    "hydralisk": Sheet(80, 0, 0, 12, 1, (), 13.2, 2, 5, 2.25, 0.625, 0.625,
                       ("light", "biological"), "ground", ("ground", "air"), "zerg"),
}
# fmt: on
ENEMY_MEDIVAC_SPEED = 2.5
SHOOTERS = tuple(name for name, sheet in SPEC.items() if sheet.period < math.inf)
"""Kinds that shoot again and again."""
FIGHTERS = (*SHOOTERS, "baneling")


def hit_on(attacker: Sheet, target: Sheet) -> float:
    """Damage of one hit before shields and armour."""
    return attacker.damage + sum(more for kind, more in attacker.bonus if kind in target.attributes)


def can_hit(attacker: Sheet, target: Sheet) -> bool:
    """Everything shoots at colossi: they stand on the ground and tower into the air."""
    planes = ("ground", "air") if target.plane == "cliff" else (target.plane,)
    return bool(set(planes) & set(attacker.hits))


def strike(
    health: tuple[float, float], armour: float, hit: float, times: int = 1
) -> tuple[float, float]:
    """Hit points and shield after so many hits, one after another.

    A shield takes what it can without armour; armour comes off what is left, and a hit that meets
    no shield does at least 0.5.
    """
    hp, shield = health
    for _ in range(times):
        absorbed = min(hit, shield)
        rest = hit - absorbed
        least = 0.5 if absorbed == 0 else 0.0
        if rest > 0:
            hp = max(hp - max(rest - armour, least), 0.0)
        shield -= absorbed
    return hp, shield


def shot_loops(sheet: Sheet, loops: int) -> list[int]:
    """The loops, counted from 1, in which shots land on a target that is in range all along.

    Timers count whole loops: the first shot lands after the wind-up, later ones follow after the
    period rounded up.
    """
    return list(range(sheet.damage_point + 1, loops + 1, math.ceil(sheet.period)))


# Figures of no army, to measure with. None of them has attributes that earn a bonus.
_BLANK = dataclasses.replace(
    UNITS["marine"], attributes=(), radius=0.5, separation=0.5, speed=0.0, armour=0.0, hp=2000.0
)
DUMMY = dataclasses.replace(_BLANK, name="dummy", weapon="none")
"""Stands, takes punishment, does nothing."""
BUNKER = dataclasses.replace(DUMMY, name="bunker", armour=100.0, shield=20.0, race="protoss")
SNIPER = dataclasses.replace(
    _BLANK, name="sniper", damage=10.0, period=5000.0, damage_point=0, weapon_range=5.0
)
"""Shoots once: 10 damage, in its first loop or when its cooldown has run down."""
FLAK = dataclasses.replace(SNIPER, name="flak", hits=("air",))
"""A sniper that can aim at nothing but the air."""

SHEETS = {
    **SPEC,
    "dummy": Sheet(2000, 0, 0, 0, 1, (), math.inf, 0, 0, 0, 0.5, 0.5, (), "ground", (), "terran"),
    "bunker": Sheet(
        2000, 20, 100, 0, 1, (), math.inf, 0, 0, 0, 0.5, 0.5, (), "ground", (), "protoss"
    ),
    "sniper": Sheet(
        2000, 0, 0, 10, 1, (), math.inf, 0, 5, 0, 0.5, 0.5, (), "ground", ("ground", "air"), ""
    ),
    "flak": Sheet(2000, 0, 0, 10, 1, (), math.inf, 0, 5, 0, 0.5, 0.5, (), "ground", ("air",), ""),
}

COPIES = {
    "marine": 3, "marauder": 1, "medivac": 2, "stalker": 3, "zealot": 3, "colossus": 2,
    "zergling": 3, "baneling": 2, "spine_crawler": 1, "hydralisk": 2, "dummy": 3, "bunker": 1,
    "sniper": 2, "flak": 1,
}  # fmt: skip
"""How many of each kind a lane may use on either side."""
_KINDS = {**UNITS, "dummy": DUMMY, "bunker": BUNKER, "sniper": SNIPER, "flak": FLAK}
_FIRST = {kind: sum(list(COPIES.values())[:i]) for i, kind in enumerate(COPIES)}
ARMY = sum(COPIES.values())

Stage = Literal["loops", "steps"]
LOOPS: Stage = "loops"
STEPS: Stage = "steps"
OPEN = Terrain.box(0, 0, 32, 32)
SLOW = {"medivac": dataclasses.replace(UNITS["medivac"], speed=ENEMY_MEDIVAC_SPEED)}
STEADY = (0.0, 0.0)
"""No jitter of weapon periods."""
NEVER = 1e6
"""Cooldown of a weapon that is to stay silent."""
BATCH = 128
MAP_BATCH = 6
"""Battles of SMAC's own maps: all tests take as many, so that each map is compiled once."""


def duel(
    allies: Sequence[tuple[UnitType, tuple[float, float]]],
    enemies: Sequence[tuple[UnitType, tuple[float, float]]],
    order: AttackMove | Hold | None = None,
    terrain: Terrain = OPEN,
    limit: int = 1000,
) -> Scenario:
    """A scenario of single units at given points."""

    def spawns(side: Sequence[tuple[UnitType, tuple[float, float]]]) -> tuple[Spawn, ...]:
        return tuple(Spawn(point, ((unit, 1),)) for unit, point in side)

    return Scenario("duel", terrain, spawns(allies), spawns(enemies), order or Hold(), limit)


@functools.cache
def zoo(stage: Stage) -> BattleEnv:
    def army(stand_in: Mapping[str, UnitType]) -> tuple[tuple[UnitType, int], ...]:
        return tuple((stand_in.get(k, _KINDS[k]), count) for k, count in COPIES.items())

    order = Hold() if stage == LOOPS else AttackMove((16, 16))
    scenario = Scenario(
        "zoo", OPEN, (Spawn((8, 16), army({})),), (Spawn((24, 16), army(SLOW)),), order, 10_000
    )
    loops = 1 if stage == LOOPS else 8
    return BattleEnv(scenario, rules=Rules(weapon_jitter=STEADY, loops_per_step=loops))


class Outcome(NamedTuple):
    """What a step returns that tests look at; leaving out the rest keeps compilation short."""

    reward: jax.Array
    won: jax.Array
    is_last: jax.Array
    dead_enemies: jax.Array
    legal: jax.Array


@functools.cache
def stepper(env: BattleEnv, *, endless: bool = False):
    """A compiled step. The dead are given no-ops; `endless` battles go on after a victory."""

    def step(state, action):
        alive = state.units.alive[env.arena.allies].T
        state, row = env.step(state, jnp.where(alive, action, 0))
        if endless:
            state = state._replace(is_over=jnp.zeros_like(state.is_over))
        return state, Outcome(row.reward, row.won, row.is_last, row.info["dead_enemies"], row.legal)

    return jax.jit(step)


@functools.cache
def starter(env: BattleEnv):
    """A compiled reset to the state alone."""
    return jax.jit(lambda keys: env.reset(keys)[0])


@functools.cache
def env_of(name: str) -> BattleEnv:
    """One of SMAC's maps under the usual rules."""
    return BattleEnv(SCENARIOS[name])


def begin(env: BattleEnv, batch: int, seed: int = 0):
    return starter(env)(jax.random.split(jax.random.key(seed), batch))


Order = str | tuple[str, int]
"""`stop`, a direction, `("attack", k)` the k-th enemy, `("heal", k)` the k-th ally of a lane."""
WORDS = {"stop": 1, "north": 2, "south": 3, "east": 4, "west": 5}


@dataclasses.dataclass(frozen=True)
class At:
    """A unit of a lane. What is None is as at the start of a battle."""

    kind: str
    x: float
    y: float
    order: Order | tuple[Order, ...] | list[Order] = "stop"
    """For allies; a list has one order per step and its last one repeats."""
    hp: float | None = None
    shield: float | None = None
    energy: float | None = None
    cooldown: float = 0.0
    target: int = -1
    """Whom it is after before the first step: the number of an opponent in the lane."""


@dataclasses.dataclass(frozen=True)
class Lane:
    allies: Sequence[At]
    enemies: Sequence[At]
    march: tuple[float, float] | None = None
    """Where enemies attack-move on the stage `STEPS`; None: to the place of the first one."""
    seed: int = 0
    may_be_illegal: bool = False


class Track(NamedTuple):
    """One unit over time; entry 0 is before the first step."""

    x: np.ndarray
    y: np.ndarray
    hp: np.ndarray
    shield: np.ndarray
    energy: np.ndarray
    cooldown: np.ndarray
    target: np.ndarray
    """Number of the target within its lane, -1 for none."""

    def gap(self, other: Track) -> np.ndarray:
        """Distance of centres."""
        return np.hypot(self.x - other.x, self.y - other.y)

    @property
    def losses(self) -> np.ndarray:
        """Hit points and shield lost in each step."""
        return -np.diff(self.hp.astype(np.float64) + self.shield)


class Reel(NamedTuple):
    """One lane over time."""

    allies: list[Track]
    enemies: list[Track]
    reward: np.ndarray
    won: np.ndarray
    dead_enemies: np.ndarray


def film(stage: Stage, lanes: Mapping[Hashable, Lane], steps: int) -> dict[Hashable, Reel]:
    """Play all lanes for so many steps of the stage."""
    names, reels = list(lanes), {}
    for start in range(0, len(names), BATCH):
        part = names[start : start + BATCH]
        reels.update(zip(part, _film_batch(stage, [lanes[n] for n in part], steps), strict=True))
    return reels


def _film_batch(stage: Stage, lanes: list[Lane], steps: int) -> list[Reel]:
    env = zoo(stage)
    step = stepper(env, endless=True)
    seeds = [lane.seed for lane in lanes] + [0] * (BATCH - len(lanes))
    state = starter(env)(jax.vmap(jax.random.key)(jnp.array(seeds, jnp.uint32)))
    rows = [_rows(lane) for lane in lanes]
    state = _place(state, lanes, rows)
    history, outcomes = [state], []
    for time in range(steps):
        state, outcome = step(state, _actions(lanes, rows, time))
        history.append(state)
        outcomes.append(outcome)
    for lane, illegal in zip(lanes, np.asarray(state.illegal), strict=False):
        assert lane.may_be_illegal or not illegal, f"illegal orders in {lane}"
    fields = {
        name: np.stack([np.asarray(getattr(s.units, name)) for s in history])
        for name in ("x", "y", "hp", "shield", "energy", "cooldown")
    }
    fields["target"] = np.stack([np.asarray(s.minds.target) for s in history])
    per_step = {
        name: np.stack([np.asarray(getattr(o, name)) for o in outcomes])
        for name in ("reward", "won", "dead_enemies")
    }
    return [
        _reel(lane, rows[i], i, fields, {name: v[:, i] for name, v in per_step.items()})
        for i, lane in enumerate(lanes)
    ]


def _rows(lane: Lane) -> tuple[list[int], list[int]]:
    """Where the units of a lane stand in the armies of the zoo."""

    def side(units: Sequence[At]) -> list[int]:
        used: dict[str, int] = {}
        rows = []
        for unit in units:
            used[unit.kind] = used.get(unit.kind, 0) + 1
            assert used[unit.kind] <= COPIES[unit.kind], f"too many of {unit.kind}"
            rows.append(_FIRST[unit.kind] + used[unit.kind] - 1)
        return rows

    return side(lane.allies), side(lane.enemies)


def _place(state, lanes: list[Lane], rows: list[tuple[list[int], list[int]]]):
    units = {name: np.array(value) for name, value in state.units._asdict().items()}
    target, goal = np.array(state.minds.target), np.array(state.goal)
    full = {name: units[name].copy() for name in ("hp", "shield", "energy")}
    units["hp"][:] = 0.0
    for i, lane in enumerate(lanes):
        for offset, side, others, members in (
            (0, rows[i][0], rows[i][1], lane.allies),
            (ARMY, rows[i][1], rows[i][0], lane.enemies),
        ):
            for row, unit in zip(side, members, strict=True):
                at = (offset + row, i)
                units["x"][at], units["y"][at] = unit.x, unit.y
                units["cooldown"][at] = unit.cooldown
                for name, pool in full.items():
                    given = getattr(unit, name)
                    units[name][at] = pool[at] if given is None else given
                if unit.target >= 0:
                    target[at] = others[unit.target]
        first = lane.enemies[0]
        goal[:, i] = lane.march or (first.x, first.y)
    return state._replace(
        units=type(state.units)(**{name: jnp.asarray(value) for name, value in units.items()}),
        minds=state.minds._replace(target=jnp.asarray(target)),
        goal=jnp.asarray(goal),
    )


def _actions(lanes: list[Lane], rows: list[tuple[list[int], list[int]]], time: int) -> jax.Array:
    action = np.ones((BATCH, ARMY), np.int32)
    for i, lane in enumerate(lanes):
        for row, unit in zip(rows[i][0], lane.allies, strict=True):
            order = unit.order
            if isinstance(order, list):
                order = order[min(time, len(order) - 1)]
            if isinstance(order, str):
                action[i, row] = WORDS[order]
            else:
                verb, number = order
                action[i, row] = 6 + rows[i][0 if verb == "heal" else 1][number]
    return jnp.asarray(action)


def _reel(
    lane: Lane, rows: tuple[list[int], list[int]], i: int, fields: dict[str, np.ndarray], row: dict
) -> Reel:
    def track(index: int, targets: list[int]) -> Track:
        numbers = np.full(ARMY + 1, -1)
        numbers[targets] = np.arange(len(targets))
        values = {name: value[:, index, i] for name, value in fields.items()}
        return Track(**{**values, "target": numbers[values["target"]]})

    heals = [unit.kind == "medivac" for unit in lane.allies]
    allies = [track(r, rows[0] if h else rows[1]) for r, h in zip(rows[0], heals, strict=True)]
    heals = [unit.kind == "medivac" for unit in lane.enemies]
    enemies = [
        track(ARMY + r, rows[1] if h else rows[0]) for r, h in zip(rows[1], heals, strict=True)
    ]
    return Reel(allies, enemies, **row)


def reach(attacker: str, target: str) -> float:
    """Centre distance up to which a weapon reaches."""
    return SHEETS[attacker].range + SHEETS[attacker].radius + SHEETS[target].radius


def contact(one: str, other: str) -> float:
    """Least centre distance of two units that bump into each other."""
    return SHEETS[one].separation + SHEETS[other].separation


def comfortable(attacker: str, target: str) -> float:
    """A centre distance in reach that neither overlaps nor is too far for a target action."""
    far = min(reach(attacker, target), 5.75)
    if SHEETS[attacker].plane != SHEETS[target].plane:
        return far * 0.75
    return (contact(attacker, target) + far) / 2
