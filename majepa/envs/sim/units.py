"""The unit table and the rules of battle: StarCraft II 4.10's numbers, as data.

Times are in game loops, 16 to a second of the game's normal speed; distances in map cells. A new
unit is one more `UnitType`; other rules are another `Rules`. Any change here or in the mechanics
that can alter a battle raises `SIM_VERSION`, which is recorded with every result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

SIM_VERSION = "1.1"

LOOPS_PER_SECOND = 16

Plane = Literal["ground", "air", "cliff"]
Weapon = Literal["shot", "beam", "blast", "heal", "none"]
Race = Literal["terran", "protoss", "zerg"]
Attribute = Literal["light", "armored", "biological", "mechanical", "massive", "structure"]


@dataclasses.dataclass(frozen=True)
class UnitType:
    """One kind of unit. Speeds are per normal second, as game data lists them."""

    name: str
    race: Race
    hp: float
    radius: float
    """Reaches from and to this unit are measured from this edge."""
    separation: float
    """Collisions keep centres at least the two separation radii apart."""
    speed: float
    attributes: tuple[Attribute, ...] = ()
    shield: float = 0.0
    armour: float = 0.0
    plane: Plane = "ground"
    """Where the unit moves. A `cliff` unit steps over ground units and cliffs."""
    acceleration: float | None = None
    """Cells per second squared; None reaches full speed at once."""

    weapon: Weapon = "none"
    """`beam` sweeps a line across its target; `blast` is spent on whatever stands near;
    `heal` mends its own side; a `shot` lands on its target alone."""
    damage: float = 0.0
    attacks: int = 1
    """Hits per shot; armour reduces each."""
    bonus: tuple[tuple[Attribute, float], ...] = ()
    """Added to `damage` against targets with the attribute."""
    hits: tuple[Literal["ground", "air"], ...] = ("ground",)
    weapon_range: float = 0.0
    period: float = 1.0
    """Loops from one shot to the next."""
    damage_point: int = 0
    """Loops of wind-up before a shot lands; a unit that turns away first loses the shot."""
    acquire: float | None = None
    """How far it looks for targets; None: the rules' range, or the weapon's if that is longer."""

    energy: float = 0.0
    energy_max: float = 0.0
    smac_cooldown: float = 15.0
    """SMAC's divisor of the cooldown (of a healer: the energy) in the global state."""

    def __post_init__(self) -> None:
        problems = [
            f"{field} is {getattr(self, field)}"
            for field in ("hp", "radius", "separation")
            if not getattr(self, field) > 0
        ]
        problems += [
            f"{field} is {getattr(self, field)}"
            for field in ("speed", "shield", "armour", "damage", "weapon_range", "damage_point")
            if getattr(self, field) < 0
        ]
        if self.weapon in ("shot", "beam", "blast") and not self.damage > 0:
            problems.append(f"damage is {self.damage} with the weapon {self.weapon!r}")
        if self.weapon in ("shot", "beam") and self.period <= self.damage_point:
            problems.append(
                f"period {self.period} does not exceed damage_point {self.damage_point}"
            )
        if problems:
            raise ValueError(
                f"unit {self.name!r}: {'; '.join(problems)}; lengths and pools of hp "
                "must be positive, all other numbers at least 0"
            )

    @property
    def is_healer(self) -> bool:
        return self.weapon == "heal"

    @property
    def hit_from(self) -> tuple[str, ...]:
        """Weapons that reach any of these can hurt this unit."""
        return ("ground", "air") if self.plane == "cliff" else (self.plane,)

    def can_hit(self, other: UnitType) -> bool:
        armed = self.weapon in ("shot", "beam", "blast")
        return armed and any(plane in self.hits for plane in other.hit_from)

    def can_heal(self, other: UnitType) -> bool:
        return self.is_healer and other.plane == "ground" and "biological" in other.attributes

    def hit_on(self, other: UnitType) -> float:
        """Damage of one hit before shields and armour."""
        return self.damage + sum(extra for name, extra in self.bonus if name in other.attributes)


@dataclasses.dataclass(frozen=True)
class Rules:
    """How time, orders, recovery and the opponent work. The defaults are SMAC's and the game's."""

    loops_per_step: int = 8
    move_amount: float = 2.0
    """A move order is a straight walk to a point this far away."""
    shoot_range: float = 6.0
    """SMAC's reach of target actions, centre to centre, the same for every unit."""
    sight_range: float = 9.0
    acquire_range: float = 5.0
    weapon_jitter: tuple[float, float] = (-1.0, 2.0)
    """Each shot's period is lengthened by a uniform draw from this range, in loops."""
    minimum_damage: float = 0.5
    shield_delay: int = 160
    """Loops without damage before shields recover."""
    shield_rate: float = 0.125
    zerg_rate: float = 0.0171
    energy_rate: float = 0.5625 / LOOPS_PER_SECOND
    heal_rate: float = 9.0 / LOOPS_PER_SECOND
    heal_per_energy: float = 3.0
    heal_start_energy: float = 5.0
    """Energy a healer needs to begin on a new target."""
    blast_radius: float = 2.2
    beam_length: float = 2.8
    beam_width: float = 0.3
    spawn_jitter: float = 0.5
    """Each side starts up to this far from its place as a whole, along each axis."""

    def __post_init__(self) -> None:
        if self.loops_per_step < 1 or self.loops_per_step != int(self.loops_per_step):
            raise ValueError(
                f"loops_per_step must be a whole number of at least 1, not {self.loops_per_step}"
            )
        if self.spawn_jitter < 0:
            raise ValueError(f"spawn_jitter must be at least 0, not {self.spawn_jitter}")
        if not self.move_amount > 0:
            raise ValueError(f"move_amount must be positive, not {self.move_amount}")
        if self.weapon_jitter[0] > self.weapon_jitter[1]:
            raise ValueError(f"weapon_jitter must be (low, high), not {self.weapon_jitter}")


MARINE = UnitType(
    "marine",
    "terran",
    hp=45,
    radius=0.375,
    separation=0.375,
    speed=2.25,
    attributes=("light", "biological"),
    weapon="shot",
    damage=6,
    hits=("ground", "air"),
    weapon_range=5,
    period=13.77,
    damage_point=1,
    smac_cooldown=15,
)
MARAUDER = UnitType(
    "marauder",
    "terran",
    hp=125,
    armour=1,
    radius=0.5625,
    separation=0.5625,
    speed=2.25,
    attributes=("armored", "biological"),
    weapon="shot",
    damage=10,
    bonus=(("armored", 10),),
    weapon_range=6,
    period=24.0,
    smac_cooldown=25,
)
MEDIVAC = UnitType(
    "medivac",
    "terran",
    hp=150,
    armour=1,
    radius=0.75,
    separation=0.75,
    speed=2.75,
    acceleration=2.25,
    attributes=("armored", "mechanical"),
    plane="air",
    weapon="heal",
    weapon_range=4,
    energy=50,
    energy_max=200,
    smac_cooldown=200,
)
STALKER = UnitType(
    "stalker",
    "protoss",
    hp=80,
    shield=80,
    armour=1,
    radius=0.625,
    separation=0.625,
    speed=2.953,
    attributes=("armored", "mechanical"),
    weapon="shot",
    damage=13,
    bonus=(("armored", 5),),
    hits=("ground", "air"),
    weapon_range=6,
    period=29.92,
    damage_point=2,
    smac_cooldown=35,
)
ZEALOT = UnitType(
    "zealot",
    "protoss",
    hp=100,
    shield=50,
    armour=1,
    radius=0.5,
    separation=0.375,
    speed=2.25,
    attributes=("light", "biological"),
    weapon="shot",
    damage=8,
    attacks=2,
    weapon_range=0.1,
    period=19.2,
    smac_cooldown=22,
)
COLOSSUS = UnitType(
    "colossus",
    "protoss",
    hp=200,
    shield=150,
    armour=1,
    radius=1.0,
    separation=0.75,
    speed=2.25,
    attributes=("armored", "mechanical", "massive"),
    plane="cliff",
    weapon="beam",
    damage=10,
    attacks=2,
    bonus=(("light", 5),),
    weapon_range=7,
    period=24.0,
    damage_point=1,
    smac_cooldown=24,
)
ZERGLING = UnitType(
    "zergling",
    "zerg",
    hp=35,
    radius=0.375,
    separation=0.375,
    speed=2.953,
    attributes=("light", "biological"),
    weapon="shot",
    damage=5,
    weapon_range=0.1,
    period=11.14,
    damage_point=2,
    smac_cooldown=11,
)
BANELING = UnitType(
    "baneling",
    "zerg",
    hp=30,
    radius=0.375,
    separation=0.375,
    speed=2.5,
    attributes=("biological",),
    weapon="blast",
    damage=20,
    bonus=(("light", 15),),
    weapon_range=0.25,
    smac_cooldown=1,
)
SPINE_CRAWLER = UnitType(
    "spine_crawler",
    "zerg",
    hp=300,
    armour=2,
    radius=1.125,
    separation=1.125,
    speed=0,
    attributes=("armored", "biological", "structure"),
    weapon="shot",
    damage=25,
    bonus=(("armored", 5),),
    weapon_range=7,
    period=29.6,
    damage_point=3,
    acquire=10,
)
HYDRALISK = UnitType(
    "hydralisk",
    "zerg",
    hp=80,
    radius=0.625,
    separation=0.625,
    speed=2.25,
    attributes=("light", "biological"),
    weapon="shot",
    damage=12,
    hits=("ground", "air"),
    weapon_range=5,
    period=13.2,
    damage_point=2,
    smac_cooldown=10,
)

UNITS: Mapping[str, UnitType] = MappingProxyType({
    unit.name: unit
    for unit in (MARINE, MARAUDER, MEDIVAC, STALKER, ZEALOT, COLOSSUS, ZERGLING, BANELING,
                 SPINE_CRAWLER, HYDRALISK)
})  # fmt: skip
"""The stock units by name."""
