"""The scripted opponent: whom each enemy goes for.

Enemies attack-move. A target is kept until it dies, while it fights back, and while it is within
reach and nobody in sight attacks this enemy. Otherwise one within acquisition range is taken:
healers before all others, then those who attack this enemy, then the nearest. Failing that, whoever
attacks it from further away.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .arena import Arena

# Ranks of candidates; squared distances, far below the steps between them, order each rank.
KEPT, HEALER, THREAT, NEAR, RETALIATION, NOBODY = -3e4, -2e4, -1e4, 0.0, 1e4, 1e9
TIE = 1e-3


def choose_targets(
    arena: Arena,
    distance2: Float[Array, "A E B"],
    ally_alive: Bool[Array, "A B"],
    ally_aim: Bool[Array, "A E B"],
    target: Int[Array, "E B"],
) -> Int[Array, "E B"]:
    """The ally each enemy fights in this loop, -1 for none."""
    allies = np.arange(arena.num_allies)[:, None, None]
    is_target = target[None] == allies
    in_scan = distance2 <= arena.enemy_scan2
    # Formations are full of equal distances; the lower number wins, not the rounding error.
    nearness = distance2 + (TIE * allies).astype(np.float32)
    threatens = ally_aim & ally_alive[:, None] & arena.enemy_can_hit
    # Who holds its fire is dropped for one who does not.
    is_threatened = jnp.any(threatens & in_scan, axis=0)
    stays = ally_aim | ((distance2 <= arena.enemy_reach2) & ~is_threatened[None])
    is_kept = is_target & stays
    rank = jnp.where(threatens, nearness + RETALIATION, NOBODY)
    rank = jnp.where(in_scan, nearness + jnp.where(threatens, THREAT, NEAR), rank)
    is_healer = arena.is_healer[arena.allies]
    if is_healer.any():
        healer_lives = jnp.any(ally_alive & is_healer, axis=0)
        # With a healer about, a target that is none is chosen anew in every loop.
        is_kept &= is_healer[:, None] | ~healer_lives[None, None]
        rank = jnp.where(in_scan & is_healer[:, None], nearness + HEALER, rank)
    rank = jnp.where(is_kept & arena.enemy_can_hit, KEPT, rank)
    rank = jnp.where(ally_alive[:, None], rank, NOBODY)
    return first_smallest(rank, NOBODY)


def choose_patients(
    arena: Arena,
    x: Float[Array, "E B"],
    y: Float[Array, "E B"],
    hp: Float[Array, "E B"],
    is_fighting: Bool[Array, "E B"],
    target: Int[Array, "E B"],
) -> tuple[Int[Array, "E B"], Float[Array, "E B"]]:
    """Whom each enemy healer mends, the weakest first, and how fast it may fly to stay near."""
    new_target, cap = target, jnp.broadcast_to(arena.stride[arena.enemies], x.shape)
    hp_max = arena.hp_max[arena.enemies]
    members = np.arange(arena.num_enemies)[:, None]
    is_hurt, alive = hp < hp_max, hp > 0
    for healer in arena.enemy_healers:
        row = healer.row
        distance2 = (x - x[row][None]) ** 2 + (y - y[row][None]) ** 2
        is_candidate = (distance2 <= healer.scan2) & healer.mends & alive & (is_hurt | is_fighting)
        is_kept = (distance2 <= healer.reach2) & (target[row][None] == members) & alive & is_hurt
        # The unhurt are only followed, into the fight where they will be.
        rank = jnp.where(is_candidate, jnp.where(is_hurt, hp, hp + RETALIATION), NOBODY)
        choice = first_smallest(jnp.where(is_kept, KEPT, rank), NOBODY)
        slowest = jnp.min(jnp.where(is_candidate, arena.stride[arena.enemies], jnp.inf), axis=0)
        new_target = new_target.at[row].set(choice)
        cap = cap.at[row].min(slowest)
    return new_target, cap


def first_smallest(rank: Float[Array, "K ..."], limit: float) -> Int[Array, "..."]:
    """Index of the smallest rank along the first axis, -1 if none is below the limit."""
    return jnp.where(jnp.min(rank, axis=0) < limit, jnp.argmin(rank, axis=0), -1).astype(jnp.int32)
