"""One moment of one battle on the host: plain numbers that survive JSON and need no JAX."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Literal

import cattrs
import jax
from jaxtyping import Array, Int

from ..base import EnvError
from .arena import Arena
from .env import BattleEnv
from .state import State
from .terrain import Terrain

Side = Literal["ally", "enemy"]
Outcome = Literal["won", "lost", "drawn", "timeout"]

GLYPHS = {
    "marine": "M", "marauder": "R", "medivac": "V", "stalker": "S", "zealot": "Z", "colossus": "C",
    "zergling": "G", "baneling": "B", "spine_crawler": "P", "hydralisk": "H",
}  # fmt: skip

REACH_SLACK = 0.25
"""A target may take one stride after it was shot at and still shows its attacker's line."""


@dataclasses.dataclass(frozen=True)
class SceneUnit:
    """One unit at one moment, dead ones included."""

    kind: str
    side: Side
    plane: str
    weapon: str
    x: float
    y: float
    radius: float
    weapon_range: float
    sweep: float
    """How far a beam sweeps across its target; 0 for other weapons."""
    hp: float
    hp_max: float
    shield: float
    shield_max: float
    energy: float
    energy_max: float
    cooldown: float
    alive: bool
    target: int | None
    """Whom the unit is after, as an index into the scene's units."""

    @property
    def glyph(self) -> str:
        return GLYPHS.get(self.kind, self.kind[:1].upper())

    @property
    def vitality(self) -> float:
        return self.hp + self.shield if self.alive else 0.0

    def reaches(self, other: SceneUnit) -> bool:
        reach = self.weapon_range + self.radius + other.radius + REACH_SLACK
        return math.hypot(self.x - other.x, self.y - other.y) <= reach


@dataclasses.dataclass(frozen=True)
class Scene:
    """One moment of one battle: allies first, then enemies."""

    map_name: str
    step: int
    limit: int
    terrain: Terrain
    units: tuple[SceneUnit, ...]
    last_actions: tuple[str | None, ...]
    """By name, one per ally; None before the first step."""
    outcome: Outcome | None = None
    """Set on the last row of an episode."""
    total_reward: float | None = None
    """Return so far; a state does not hold it, whoever plays the battle may."""

    def of(self, side: Side) -> tuple[SceneUnit, ...]:
        return tuple(unit for unit in self.units if unit.side == side)

    def attacks(self) -> Iterator[tuple[SceneUnit, SceneUnit]]:
        """Units and those they fight or heal right now: living, and in reach."""
        for unit in self.units:
            target = None if unit.target is None else self.units[unit.target]
            if unit.alive and target is not None and target.alive and unit.reaches(target):
                yield unit, target

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Scene:
        return cattrs.structure(json.loads(text), cls)


def scene_of(env: BattleEnv, state: State, index: int = 0) -> Scene:
    """The present moment of one battle of a batch."""
    batch = state.steps.shape[0]
    if not 0 <= index < batch:
        raise EnvError(f"no environment {index} in a batch of {batch}; choose 0 to {batch - 1}")
    arena = env.arena
    one: State = jax.device_get(_pick(state, index))
    names = env.interface.action_names
    return Scene(
        map_name=arena.scenario.name,
        step=int(one.steps),
        limit=arena.scenario.limit,
        terrain=arena.scenario.terrain,
        units=tuple(_unit(arena, one, row) for row in range(arena.num_units)),
        last_actions=tuple(None if at < 0 else names[at] for at in one.last_action.tolist()),
        outcome=_outcome(env, state, index) if one.is_over else None,
    )


def blend(before: Scene, after: Scene, part: float) -> Scene:
    """A moment between two steps, for smooth motion: as before, with the living on their way."""
    units = (
        dataclasses.replace(a, x=a.x + part * (b.x - a.x), y=a.y + part * (b.y - a.y))
        if a.alive and b.alive
        else a
        for a, b in zip(before.units, after.units, strict=True)
    )
    return dataclasses.replace(before, units=tuple(units))


@jax.jit
def _pick(state: State, index: Int[Array, ""]) -> State:
    return jax.tree.map(lambda leaf: leaf[..., index], state)


def _unit(arena: Arena, one: State, row: int) -> SceneUnit:
    kind = arena.units[row]
    return SceneUnit(
        kind=kind.name,
        side="ally" if row < arena.num_allies else "enemy",
        plane=kind.plane,
        weapon=kind.weapon,
        radius=float(kind.radius),
        weapon_range=float(kind.weapon_range),
        sweep=arena.rules.beam_length if kind.weapon == "beam" else 0.0,
        hp_max=float(kind.hp),
        shield_max=float(kind.shield),
        energy_max=float(kind.energy_max),
        alive=bool(one.units.hp[row] > 0),
        target=_target(arena, one, row),
        **{name: float(column[row]) for name, column in one.units._asdict().items()},
    )


def _target(arena: Arena, one: State, row: int) -> int | None:
    target = int(one.minds.target[row])
    if target < 0 or one.units.hp[row] <= 0:
        return None
    # Targets are numbered within a side: a healer's own one, otherwise the opponents'.
    is_ally = row < arena.num_allies
    first = 0 if is_ally == arena.units[row].is_healer else arena.num_allies
    return first + target if one.units.hp[first + target] > 0 else None


def _outcome(env: BattleEnv, state: State, index: int) -> Outcome:
    ending = env.outcome.ending(state.units, state.units, state.steps)
    if ending.won[index]:
        return "won"
    if not ending.is_terminal[index]:
        return "timeout"
    return "lost" if bool((state.units.hp[:, index] > 0).any()) else "drawn"
