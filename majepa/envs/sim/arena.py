"""A scenario under a set of rules, laid out as constant tables for the compiled battle.

Arrays of the simulator put the batch last: `[U, B]` for units, `[A, E, B]` for ally-enemy pairs.
Unit types never change during a battle, so all that depends on them folds into constants of shape
`[U, 1]` or `[A, E, 1]`, and the inner axis of every operation is long and contiguous.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Bool, Float, Int

from .maps import AttackMove, Hunt, Scenario
from .terrain import Walls, path_table, walls_of
from .units import LOOPS_PER_SECOND, Rules, UnitType

Column = Float[np.ndarray, "U 1"]

TOLERANCE = 1e-4
"""Added to squared ranges. Units march on a lattice and meet at exact distances, where rounding
errors, which differ between compilers and batch sizes, must not decide who is in range."""


@dataclasses.dataclass(frozen=True)
class Squad:
    """All units of one type on one side: the unit of damage accounting."""

    unit: UnitType
    rows: slice | Int[np.ndarray, " K"]
    """Where they stand within their side."""
    hit: Float[np.ndarray, "T 1"]
    """Damage of one hit on each opponent, before shields and armour."""


@dataclasses.dataclass(frozen=True)
class Healer:
    """One healer and what it can do for each member of its side."""

    row: int
    """Where it stands within its side."""
    mends: Bool[np.ndarray, "S 1"]
    reach2: Float[np.ndarray, "S 1"]
    """Squared centre distance at which it heals."""
    scan2: Float[np.ndarray, "S 1"]
    """Squared centre distance within which it looks for the hurt."""


class Arena:
    """Everything constant about one battle. Hashed by identity: one instance, one compilation."""

    def __init__(self, scenario: Scenario, rules: Rules):
        self.scenario = scenario
        self.rules = rules
        places = scenario.ally_places + scenario.enemy_places
        self.units = tuple(unit for unit, _ in places)
        self.num_allies = len(scenario.ally_places)
        self.num_units = len(places)
        self.num_enemies = self.num_units - self.num_allies
        self.allies = slice(0, self.num_allies)
        self.enemies = slice(self.num_allies, self.num_units)
        self.x = np.array([[at[0]] for _, at in places], np.float32)
        self.y = np.array([[at[1]] for _, at in places], np.float32)
        for unit, (x, y) in places:
            if not (0 <= x <= scenario.terrain.width and 0 <= y <= scenario.terrain.height):
                raise ValueError(
                    f"scenario {scenario.name!r} places a {unit.name} at "
                    f"({x:.2f}, {y:.2f}), outside the map; move its spawn point"
                )

    # Per-unit columns.

    def column(self, value: Callable[[UnitType], float]) -> Column:
        return np.array([[value(unit)] for unit in self.units], np.float32)

    @functools.cached_property
    def hp_max(self) -> Column:
        return self.column(lambda unit: unit.hp)

    @functools.cached_property
    def shield_max(self) -> Column:
        return self.column(lambda unit: unit.shield)

    @functools.cached_property
    def armour(self) -> Column:
        return self.column(lambda unit: unit.armour)

    @functools.cached_property
    def energy_max(self) -> Column:
        return self.column(lambda unit: unit.energy_max)

    @functools.cached_property
    def energy_start(self) -> Column:
        return self.column(lambda unit: unit.energy)

    @functools.cached_property
    def stride(self) -> Column:
        """Cells per loop at full speed."""
        return self.column(lambda unit: unit.speed / LOOPS_PER_SECOND)

    @functools.cached_property
    def stride_gain(self) -> Column:
        """Cells per loop won with each loop of acceleration."""
        return self.column(
            lambda unit: np.inf if unit.acceleration is None
            else unit.acceleration / LOOPS_PER_SECOND**2
        )  # fmt: skip

    @functools.cached_property
    def separation(self) -> Column:
        return self.column(lambda unit: unit.separation)

    @functools.cached_property
    def radius(self) -> Column:
        return self.column(lambda unit: unit.radius)

    @functools.cached_property
    def rest(self) -> Column:
        """Loops from a landed shot to the wind-up of the next."""
        return self.column(lambda unit: unit.period - unit.damage_point)

    @functools.cached_property
    def damage_point(self) -> Column:
        return self.column(lambda unit: unit.damage_point)

    def has(self, quality: Callable[[UnitType], bool]) -> Bool[np.ndarray, "U 1"]:
        return np.array([[quality(unit)] for unit in self.units], bool)

    @functools.cached_property
    def is_healer(self) -> Bool[np.ndarray, "U 1"]:
        return self.has(lambda unit: unit.is_healer)

    @functools.cached_property
    def is_blast(self) -> Bool[np.ndarray, "U 1"]:
        return self.has(lambda unit: unit.weapon == "blast")

    @functools.cached_property
    def is_zerg(self) -> Bool[np.ndarray, "U 1"]:
        return self.has(lambda unit: unit.race == "zerg")

    @functools.cached_property
    def is_climber(self) -> Bool[np.ndarray, "U 1"]:
        return self.has(lambda unit: unit.plane == "cliff")

    @functools.cached_property
    def is_flyer(self) -> Bool[np.ndarray, "U 1"]:
        return self.has(lambda unit: unit.plane == "air")

    @functools.cached_property
    def is_mobile(self) -> Bool[np.ndarray, "U 1"]:
        return self.has(lambda unit: unit.speed > 0)

    # Ally-enemy pairs.

    def pairs(self, value: Callable[[UnitType, UnitType], float]) -> Float[np.ndarray, "A E 1"]:
        allies, enemies = self.units[self.allies], self.units[self.enemies]
        table = [[[value(ally, enemy)] for enemy in enemies] for ally in allies]
        return np.array(table, np.float32)

    @functools.cached_property
    def ally_reach2(self) -> Float[np.ndarray, "A E 1"]:
        """Squared centre distance at which the ally's weapon reaches; negative if it cannot hit."""
        return self.pairs(lambda a, e: _square(_reach(a, e)) if a.can_hit(e) else -1.0)

    @functools.cached_property
    def enemy_reach2(self) -> Float[np.ndarray, "A E 1"]:
        return self.pairs(lambda a, e: _square(_reach(e, a)) if e.can_hit(a) else -1.0)

    @functools.cached_property
    def enemy_scan2(self) -> Float[np.ndarray, "A E 1"]:
        """Squared centre distance within which the enemy takes the ally for a target."""
        everywhere = isinstance(self.scenario.order, Hunt)

        def scan(ally: UnitType, enemy: UnitType) -> float:
            if not enemy.can_hit(ally):
                return -1.0
            return (
                np.inf
                if everywhere
                else _square(self.acquire_range(enemy) + ally.radius + enemy.radius)
            )

        return self.pairs(scan)

    @functools.cached_property
    def enemy_can_hit(self) -> Bool[np.ndarray, "A E 1"]:
        return self.pairs(lambda a, e: e.can_hit(a)) > 0

    def acquire_range(self, unit: UnitType) -> float:
        if unit.acquire is not None:
            return unit.acquire
        return max(self.rules.acquire_range, unit.weapon_range)

    # Pairs of one plane.

    @functools.cached_property
    def contact(self) -> Float[np.ndarray, "U U 1"]:
        """Least distance of two centres; negative if the two never touch."""
        same_plane = [[a.plane == b.plane for b in self.units] for a in self.units]
        total = self.separation + self.separation.T
        touching = np.array(same_plane) & ~np.eye(self.num_units, dtype=bool)
        return np.where(touching, total, -1.0).astype(np.float32)[..., None]

    # Healers.

    @functools.cached_property
    def ally_healers(self) -> tuple[Healer, ...]:
        return tuple(self._healers(self.units[self.allies]))

    @functools.cached_property
    def enemy_healers(self) -> tuple[Healer, ...]:
        return tuple(self._healers(self.units[self.enemies]))

    def _healers(self, side: tuple[UnitType, ...]) -> Iterator[Healer]:
        for row, unit in enumerate(side):
            if unit.is_healer:
                look = self.acquire_range(unit) + unit.radius
                yield Healer(
                    row=row,
                    mends=np.array([[unit.can_heal(other)] for other in side]),
                    reach2=np.array([[_square(_reach(unit, b))] for b in side], np.float32),
                    scan2=np.array([[_square(look + b.radius)] for b in side], np.float32),
                )

    # Squads.

    @functools.cached_property
    def ally_squads(self) -> tuple[Squad, ...]:
        return tuple(self._squads(self.units[self.allies], self.units[self.enemies]))

    @functools.cached_property
    def enemy_squads(self) -> tuple[Squad, ...]:
        return tuple(self._squads(self.units[self.enemies], self.units[self.allies]))

    def _squads(self, side: tuple[UnitType, ...], others: tuple[UnitType, ...]) -> Iterator[Squad]:
        for unit in dict.fromkeys(side):
            rows = np.flatnonzero([member == unit for member in side])
            hit = np.array([[unit.hit_on(other)] for other in others], np.float32)
            yield Squad(unit, as_slice(rows), hit)

    # Ground.

    @functools.cached_property
    def ground_walls(self) -> Walls:
        return walls_of(self.scenario.terrain, False)

    @functools.cached_property
    def climber_walls(self) -> Walls:
        return walls_of(self.scenario.terrain, True)

    @functools.cached_property
    def paths(self) -> Int[np.ndarray, "C C"] | None:
        return path_table(self.scenario.terrain)

    @functools.cached_property
    def walkable(self) -> Bool[np.ndarray, "X Y"]:
        return self.scenario.terrain.walkable

    @property
    def enemy_marches(self) -> bool:
        """Whether enemies without a target walk on."""
        return isinstance(self.scenario.order, AttackMove)


def as_slice(rows: Int[np.ndarray, " K"]) -> slice | Int[np.ndarray, " K"]:
    """A slice where the rows are consecutive: much cheaper than a gather."""
    if len(rows) and len(rows) == rows[-1] - rows[0] + 1:
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def _reach(attacker: UnitType, target: UnitType) -> float:
    return attacker.weapon_range + attacker.radius + target.radius


def _square(length: float) -> float:
    return length * length + TOLERANCE
