"""How units hurt and mend each other: shots, beams, blasts, shields, armour, healing, recovery."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .arena import Arena, Healer, Squad

Health = tuple[Float[Array, "T B"], Float[Array, "T B"]]
"""Hit points and shields of one side."""


def take_hits(
    arena: Arena, side: slice, health: Health, volleys: Sequence[tuple[Squad, Float[Array, "T B"]]]
) -> Health:
    """Health of a side after each squad landed so many shots on each of its units.

    Exactly as if the hits came one after another: a shield takes whole hits while it can, the hit
    that breaks it loses armour once on what is left, every later one loses armour in full.
    """
    hp, shield = health
    armour = arena.armour[side]
    has_shields = bool((arena.shield_max[side] > 0).any())
    for squad, shots in volleys:
        hits = shots * squad.unit.attacks
        loss = np.minimum(armour, np.maximum(squad.hit - arena.rules.minimum_damage, 0.0))
        if not has_shields:
            hp = hp - hits * (squad.hit - loss)
            continue
        absorbed = jnp.minimum(hits, jnp.floor(shield / squad.hit))
        left = shield - absorbed * squad.hit
        breaks = hits > absorbed
        through = jnp.maximum(squad.hit - left - loss, 0.0)
        through = through + (hits - absorbed - 1.0) * (squad.hit - loss)
        hp = jnp.where(breaks, hp - through, hp)
        shield = jnp.where(breaks, 0.0, left)
    return jnp.maximum(hp, 0.0), shield


def count_shots(
    arena: Arena,
    squads: Sequence[Squad],
    fires: Bool[Array, "S B"],
    aim: Bool[Array, "S T B"],
    offsets: tuple[Float[Array, "S T B"], Float[Array, "S T B"]],
    radius: Float[np.ndarray, "T 1"],
) -> list[tuple[Squad, Float[Array, "T B"]]]:
    """How many shots of each squad land on each target. Blasts are counted apart."""
    volleys: list[tuple[Squad, Float[Array, "T B"]]] = []
    for squad in squads:
        if squad.unit.weapon not in ("shot", "beam"):
            continue
        struck = aim[squad.rows]
        if squad.unit.weapon == "beam":
            struck = _beam(arena, squad, struck, offsets, radius)
        landed = struck & fires[squad.rows][:, None]
        volleys.append((squad, jnp.sum(landed, axis=0, dtype=jnp.float32)))
    return volleys


def _beam(
    arena: Arena,
    squad: Squad,
    aim: Bool[Array, "K T B"],
    offsets: tuple[Float[Array, "S T B"], Float[Array, "S T B"]],
    radius: Float[np.ndarray, "T 1"],
) -> Bool[Array, "K T B"]:
    """Whom a beam touches: a thin rectangle across the target, square to the line of fire."""
    rules = arena.rules
    dx, dy = offsets[0][squad.rows], offsets[1][squad.rows]
    to_x = jnp.sum(jnp.where(aim, dx, 0.0), 1, keepdims=True)
    to_y = jnp.sum(jnp.where(aim, dy, 0.0), 1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.maximum(to_x * to_x + to_y * to_y, 1e-10))
    ux, uy = to_x * inverse, to_y * inverse
    rel_x, rel_y = dx - to_x, dy - to_y
    deep = jnp.maximum(jnp.abs(rel_x * ux + rel_y * uy) - rules.beam_width / 2, 0.0)
    wide = jnp.maximum(jnp.abs(rel_x * uy - rel_y * ux) - rules.beam_length / 2, 0.0)
    reach2 = (rules.beam_length**2 + rules.beam_width**2) / 4
    within = (rel_x * rel_x + rel_y * rel_y <= reach2) & (
        deep * deep + wide * wide <= radius[None] ** 2
    )
    return within & jnp.any(aim, axis=1, keepdims=True) & _hittable(arena, squad)[None]


def _hittable(arena: Arena, squad: Squad) -> Bool[np.ndarray, "T 1"]:
    is_ally = any(squad is mine for mine in arena.ally_squads)
    others = arena.units[arena.enemies if is_ally else arena.allies]
    return np.array([[squad.unit.can_hit(other)] for other in others])


def count_blasts(
    arena: Arena,
    squads: Sequence[Squad],
    bursts: Bool[Array, "S B"],
    distance2: Float[Array, "S T B"],
    radius: Float[np.ndarray, "T 1"],
) -> list[tuple[Squad, Float[Array, "T B"]]]:
    """How many bursting units have each opponent within their blast."""
    volleys: list[tuple[Squad, Float[Array, "T B"]]] = []
    for squad in squads:
        if squad.unit.weapon == "blast":
            within = distance2[squad.rows] <= (arena.rules.blast_radius + radius[None]) ** 2
            caught = within & bursts[squad.rows][:, None] & _hittable(arena, squad)[None]
            volleys.append((squad, jnp.sum(caught, axis=0, dtype=jnp.float32)))
    return volleys


def mend(
    arena: Arena,
    healers: Sequence[Healer],
    hp_max: Float[np.ndarray, "S 1"],
    x: Float[Array, "S B"],
    y: Float[Array, "S B"],
    hp: Float[Array, "S B"],
    energy: Float[Array, "S B"],
    target: Int[Array, "S B"],
    was_healing: Float[Array, "S B"],
) -> tuple[Float[Array, "S B"], Float[Array, "S B"], Float[Array, "S B"]]:
    """Healers of one side at work: new hit points, energy, and who is healing."""
    rules = arena.rules
    members = np.arange(len(hp_max))[:, None]
    healing = jnp.zeros_like(was_healing)
    for healer in healers:
        row = healer.row
        is_patient = (target[row][None] == members) & healer.mends & (hp > 0)
        is_patient &= (x - x[row][None]) ** 2 + (y - y[row][None]) ** 2 <= healer.reach2
        missing = jnp.where(is_patient, hp_max - hp, 0.0)
        can_start = (was_healing[row] > 0) | (energy[row] >= rules.heal_start_energy)
        power = jnp.minimum(rules.heal_rate, energy[row] * rules.heal_per_energy)
        power = jnp.where(can_start & (hp[row] > 0), power, 0.0)
        given = jnp.minimum(missing, power[None])
        total = jnp.sum(given, axis=0)
        hp = hp + given
        energy = energy.at[row].add(-total / rules.heal_per_energy)
        healing = healing.at[row].set((total > 0).astype(jnp.float32))
    return hp, energy, healing


def recover(
    arena: Arena,
    hp: Float[Array, "U B"],
    shield: Float[Array, "U B"],
    energy: Float[Array, "U B"],
    calm: Float[Array, "U B"],
) -> tuple[Float[Array, "U B"], Float[Array, "U B"], Float[Array, "U B"], Float[Array, "U B"]]:
    """One loop of regeneration of the living: hit points, shields, energy, shield delays."""
    rules, alive = arena.rules, hp > 0
    if arena.is_zerg.any():
        hp = jnp.minimum(hp + jnp.where(alive & arena.is_zerg, rules.zerg_rate, 0.0), arena.hp_max)
    if (arena.shield_max > 0).any():
        calm = jnp.maximum(calm - 1.0, 0.0)
        gain = jnp.where(alive & (calm <= 0), rules.shield_rate, 0.0)
        shield = jnp.minimum(shield + gain, arena.shield_max)
    if (arena.energy_max > 0).any():
        energy = jnp.minimum(energy + jnp.where(alive, rules.energy_rate, 0.0), arena.energy_max)
    return hp, shield, energy, calm
