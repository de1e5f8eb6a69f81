"""The 23 maps of SMAC v1 as data: who fights, where they start, what the enemy is told to do.

A new map is one more `Scenario`; `docs/new-maps.md` makes one step by step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from .terrain import Terrain
from .units import (
    BANELING,
    COLOSSUS,
    HYDRALISK,
    MARAUDER,
    MARINE,
    MEDIVAC,
    SPINE_CRAWLER,
    STALKER,
    ZEALOT,
    ZERGLING,
    UnitType,
)

Point = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Spawn:
    """Units that start packed around one point, in this order."""

    point: Point
    units: tuple[tuple[UnitType, int], ...]


@dataclasses.dataclass(frozen=True)
class AttackMove:
    """Walk to a point, fighting whatever is met; the point is drawn from a segment each episode."""

    start: Point
    end: Point | None = None


@dataclasses.dataclass(frozen=True)
class Hunt:
    """Attack the nearest opponent wherever it is."""


@dataclasses.dataclass(frozen=True)
class Hold:
    """Stand, and fight what comes into range."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One map. Agents are numbered by type in roster order, then by x, then by y."""

    name: str
    terrain: Terrain
    allies: tuple[Spawn, ...]
    enemies: tuple[Spawn, ...]
    order: AttackMove | Hunt | Hold
    limit: int
    enemy_type_order: tuple[str, ...] = ()
    """Order of the types in the enemies' one-hot, where it differs from the allies'."""

    def __post_init__(self) -> None:
        for side, spawns in (("allies", self.allies), ("enemies", self.enemies)):
            if sum(count for spawn in spawns for _, count in spawn.units) < 1:
                raise ValueError(f"scenario {self.name!r} has no {side}")
        if self.limit < 1:
            raise ValueError(f"scenario {self.name!r}: limit must be at least 1, not {self.limit}")
        healers = any(unit.is_healer for unit in self.ally_types)
        if healers and len(self.ally_roster) > len(self.enemy_roster):
            raise ValueError(
                f"scenario {self.name!r} gives healers {len(self.ally_roster)} allies to choose "
                f"from but only {len(self.enemy_roster)} target actions (one per enemy); "
                "add enemies or remove the healer"
            )
        wrong = set(self.enemy_type_order) ^ {unit.name for unit in self.feature_types}
        if self.enemy_type_order and wrong:
            raise ValueError(
                f"scenario {self.name!r}: enemy_type_order must name each unit type "
                f"once; it is off by {sorted(wrong)}"
            )

    @property
    def ally_types(self) -> tuple[UnitType, ...]:
        """Distinct types in roster order, which is the order of SMAC's custom type ids."""
        return _distinct(self.allies)

    @property
    def enemy_types(self) -> tuple[UnitType, ...]:
        return _distinct(self.enemies)

    @property
    def ally_roster(self) -> tuple[UnitType, ...]:
        """Types of the agents in id order."""
        return tuple(unit for unit, _ in self.ally_places)

    @property
    def enemy_roster(self) -> tuple[UnitType, ...]:
        return tuple(unit for unit, _ in self.enemy_places)

    @property
    def ally_places(self) -> tuple[tuple[UnitType, Point], ...]:
        types = self.ally_types
        places = [place for spawn in self.allies for place in _formation(spawn, grow=1)]
        return tuple(sorted(places, key=lambda place: (types.index(place[0]), place[1])))

    @property
    def enemy_places(self) -> tuple[tuple[UnitType, Point], ...]:
        return tuple(place for spawn in self.enemies for place in _formation(spawn, grow=-1))

    @property
    def feature_types(self) -> tuple[UnitType, ...]:
        """Types told apart by a one-hot: none where each side has a single type."""
        if len(self.ally_types) == 1 and len(self.enemy_types) == 1:
            return ()
        names = {unit.name: unit for unit in self.ally_types + self.enemy_types}
        return tuple(names.values())


def _distinct(spawns: Sequence[Spawn]) -> tuple[UnitType, ...]:
    return tuple(dict.fromkeys(unit for spawn in spawns for unit, _ in spawn.units))


def _formation(spawn: Spawn, grow: int) -> list[tuple[UnitType, Point]]:
    """Rows of a square block around the point; enemies fill theirs from the opposite corner."""
    gap = 0.05
    roster = [unit for unit, count in spawn.units for _ in range(count)]
    side = math.ceil(math.sqrt(len(roster)))
    rows = [roster[i : i + side] for i in range(0, len(roster), side)]
    tallest = [max(unit.radius for unit in row) for row in rows]
    width = max(sum(2 * unit.radius for unit in row) for row in rows)
    height = sum(2 * radius for radius in tallest) + (side - 1) * gap
    places: list[tuple[UnitType, Point]] = []
    y = -height / 2
    for row, radius in zip(rows, tallest, strict=True):
        x = -width / 2
        for unit in row:
            at = (spawn.point[0] + grow * (x + unit.radius), spawn.point[1] + grow * (y + radius))
            places.append((unit, at))
            x += 2 * unit.radius + gap
        y += 2 * radius + gap
    return places


SIMPLE = Terrain.box(0, 8, 32, 24)
OPEN = Terrain.box(0, 0, 32, 32)
OCTAGON = Terrain.rows(
    (5, 5, 10, 22), (6, 6, 9, 23), (7, 7, 8, 24), (8, 8, 7, 25), (9, 9, 6, 26),
    (10, 21, 5, 27),
    (22, 22, 6, 26), (23, 23, 7, 25), (24, 24, 8, 24), (25, 25, 9, 23), (26, 26, 10, 22),
)  # fmt: skip
PENTAGON = Terrain.rows(
    (7, 7, 8, 20), (8, 19, 7, 21), (20, 20, 8, 20), (21, 21, 9, 19), (22, 22, 10, 18),
    (23, 23, 11, 17), (24, 24, 12, 16),
)  # fmt: skip
RAVINE = Terrain.rows(
    (6, 6, 3, 29), (7, 7, 2, 30), (8, 8, 1, 31), (9, 11, 0, 32), (12, 12, 0, 4), (12, 12, 28, 32),
    (13, 16, 0, 32), (17, 17, 1, 31), (18, 18, 2, 30), (19, 19, 3, 29),
    cliffs=((12, 4, 28),),
)  # fmt: skip
CORRIDOR = Terrain.rows(
    (1, 1, 2, 14), (2, 2, 1, 14), (3, 10, 1, 13), (11, 11, 1, 14), (12, 12, 2, 15),
    (13, 13, 11, 26), (14, 14, 12, 27), (15, 15, 13, 28), (16, 16, 13, 29), (17, 17, 12, 30),
    (18, 21, 11, 31), (22, 22, 12, 31), (23, 23, 13, 31), (24, 24, 14, 31), (25, 25, 15, 31),
    (26, 26, 16, 31), (27, 27, 17, 31), (28, 28, 18, 31), (29, 29, 19, 31), (30, 30, 20, 30),
)  # fmt: skip
STAIRCASE = Terrain.rows(
    (1, 1, 2, 8), (2, 2, 1, 9), (3, 3, 1, 12), (4, 6, 1, 13), (7, 7, 1, 16), (8, 8, 2, 17),
    (9, 10, 3, 17), (11, 11, 3, 20), (12, 12, 4, 21), (13, 15, 7, 21), (16, 16, 8, 21),
    (17, 17, 9, 26), (18, 18, 10, 27), (19, 20, 13, 27), (21, 21, 13, 30), (22, 22, 14, 31),
    (23, 23, 15, 31), (24, 24, 16, 31), (25, 27, 19, 31), (28, 28, 20, 31), (29, 29, 21, 31),
    (30, 30, 22, 30),
)  # fmt: skip
PLATEAU = Terrain.rows(
    (7, 7, 10, 20), (8, 8, 9, 21), (9, 9, 8, 22), (10, 17, 7, 23), (18, 18, 8, 22),
    (19, 19, 9, 21), (20, 20, 10, 20),
)  # fmt: skip

WEST, EAST = (9.0, 16.0), (23.0, 16.0)
SLOW_MEDIVAC = dataclasses.replace(MEDIVAC, speed=2.5)
"""The enemy's medivac flies slower than the agents'."""


def _facing(
    name: str,
    allies: tuple[tuple[UnitType, int], ...],
    enemies: tuple[tuple[UnitType, int], ...],
    limit: int,
    terrain: Terrain = SIMPLE,
    enemy_type_order: tuple[str, ...] = (),
) -> Scenario:
    """Two armies on open ground, the eastern one attack-moving to where the western one starts."""
    return Scenario(
        name, terrain, (Spawn(WEST, allies),), (Spawn(EAST, enemies),), AttackMove(WEST), limit,
        enemy_type_order,
    )  # fmt: skip


# SMAC numbers the two types of these maps differently on the two sides.
_ZEALOT_FIRST = ("zealot", "stalker")

_SCENARIOS = (
    Scenario(
        "2m_vs_1z", OCTAGON,
        (Spawn((13, 12), ((MARINE, 1),)), Spawn((19, 12), ((MARINE, 1),))),
        (Spawn((16, 19), ((ZEALOT, 1),)),),
        AttackMove((13, 12), (19, 12)), 150,
    ),
    Scenario(
        "2s_vs_1sc", PENTAGON,
        (Spawn((11.12, 10.34), ((STALKER, 1),)), Spawn((16.98, 10.37), ((STALKER, 1),))),
        (Spawn((13.92, 20.04), ((SPINE_CRAWLER, 1),)),),
        Hold(), 300,
    ),
    _facing("2s3z", ((STALKER, 2), (ZEALOT, 3)), ((STALKER, 2), (ZEALOT, 3)), 120,
            enemy_type_order=_ZEALOT_FIRST),
    _facing("3m", ((MARINE, 3),), ((MARINE, 3),), 60),
    _facing("3s_vs_3z", ((STALKER, 3),), ((ZEALOT, 3),), 150, OPEN),
    _facing("8m", ((MARINE, 8),), ((MARINE, 8),), 120),
    _facing("MMM", ((MARAUDER, 2), (MARINE, 7), (MEDIVAC, 1)),
            ((MARINE, 7), (MARAUDER, 2), (SLOW_MEDIVAC, 1)), 150),
    Scenario(
        "so_many_baneling", STAIRCASE,
        (Spawn((11.469, 12.0234), ((ZEALOT, 7),)),),
        (Spawn((27.91, 28.24), ((BANELING, 32),)),),
        AttackMove((4.47, 4.33)), 100,
    ),
    _facing("3s_vs_4z", ((STALKER, 3),), ((ZEALOT, 4),), 200, OPEN),
    _facing("3s_vs_5z", ((STALKER, 3),), ((ZEALOT, 5),), 250, OPEN),
    Scenario(
        "2c_vs_64zg", RAVINE,
        (Spawn((16, 16), ((COLOSSUS, 2),)),),
        (Spawn((16, 9), ((ZERGLING, 64),)),),
        Hunt(), 400,
    ),
    Scenario(
        "corridor", CORRIDOR,
        (Spawn((19.04, 19.12), ((ZEALOT, 6),)),),
        (Spawn((27.91, 28.24), ((ZERGLING, 24),)),),
        AttackMove((4.47, 4.33)), 400,
    ),
    _facing("1c3s5z", ((COLOSSUS, 1), (STALKER, 3), (ZEALOT, 5)),
            ((COLOSSUS, 1), (STALKER, 3), (ZEALOT, 5)), 180),
    _facing("3s5z", ((STALKER, 3), (ZEALOT, 5)), ((STALKER, 3), (ZEALOT, 5)), 150,
            enemy_type_order=_ZEALOT_FIRST),
    _facing("5m_vs_6m", ((MARINE, 5),), ((MARINE, 6),), 70),
    _facing("8m_vs_9m", ((MARINE, 8),), ((MARINE, 9),), 120),
    _facing("10m_vs_11m", ((MARINE, 10),), ((MARINE, 11),), 150),
    _facing("25m", ((MARINE, 25),), ((MARINE, 25),), 150),
    _facing("27m_vs_30m", ((MARINE, 27),), ((MARINE, 30),), 180),
    Scenario(
        "bane_vs_bane", OCTAGON,
        (Spawn((16, 8), ((BANELING, 4),)), Spawn((16, 11), ((ZERGLING, 20),))),
        (Spawn((16, 21), ((ZERGLING, 20),)), Spawn((16, 24), ((BANELING, 4),))),
        AttackMove((16, 8)), 200,
    ),
    Scenario(
        "6h_vs_8z", PLATEAU,
        (Spawn((14.60, 9.49), ((HYDRALISK, 6),)),),
        (Spawn((14.41, 16.76), ((ZEALOT, 8),)),),
        AttackMove((14.60, 9.49)), 150,
    ),
    _facing("3s5z_vs_3s6z", ((STALKER, 3), (ZEALOT, 5)), ((STALKER, 3), (ZEALOT, 6)), 170,
            enemy_type_order=_ZEALOT_FIRST),
    _facing("MMM2", ((MARAUDER, 2), (MARINE, 7), (MEDIVAC, 1)),
            ((MARINE, 8), (MARAUDER, 3), (SLOW_MEDIVAC, 1)), 180),
)  # fmt: skip

SCENARIOS: Mapping[str, Scenario] = MappingProxyType({map_.name: map_ for map_ in _SCENARIOS})
"""All maps by name, in SMAC's order of the paper first."""
