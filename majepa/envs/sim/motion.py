"""How units move: the way to a goal, around others, along walls.

Units deflect from those they would walk into, flow around those that stand, and what overlap is
left is pushed apart. Whoever stands (fighting, stopped, rooted) is not shoved by whoever moves:
melee rings stay limited and a line of zealots blocks a choke.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from .arena import Arena
from .terrain import FINE, Walls

CONTACT_MARGIN = 0.05
"""Units this close to touching already deflect."""
PUSH_PASSES = 2
PUSH_STRENGTH = 0.6
STANDING_WEIGHT = 1e-3
"""Share of a push that a standing unit takes: next to nothing, unless both stand."""

XY = tuple[Float[Array, "U B"], Float[Array, "U B"]]


def heading(
    arena: Arena, x: Float[Array, "U B"], y: Float[Array, "U B"], goal: XY,
    takes_path: Bool[Array, "U B"],
) -> XY:  # fmt: skip
    """Offset from each unit to where it should walk next on its way to the goal."""
    goal_x, goal_y = goal
    if arena.paths is not None:
        height = arena.scenario.terrain.height
        here, there = _cell(arena, x, y), _cell(arena, goal_x, goal_y)
        cells = arena.paths.shape[0]
        table = jnp.asarray(arena.paths.reshape(-1))
        hop = table.at[here * cells + there].get(mode="promise_in_bounds").astype(jnp.int32)
        around = takes_path & ~arena.is_climber & ~arena.is_flyer & (hop != there)
        goal_x = jnp.where(around, (hop // height).astype(jnp.float32) + 0.5, goal_x)
        goal_y = jnp.where(around, (hop % height).astype(jnp.float32) + 0.5, goal_y)
    return goal_x - x, goal_y - y


def move(
    arena: Arena, x: Float[Array, "U B"], y: Float[Array, "U B"], want: XY,
    alive: Bool[Array, "U B"],
) -> XY:  # fmt: skip
    """New positions of units that want to move by `want` in this loop."""
    is_moving = (want[0] != 0) | (want[1] != 0)
    step_x, step_y = _deflect(arena, x, y, want, is_moving, alive)
    weight = jnp.where(is_moving, 1.0, STANDING_WEIGHT) * arena.is_mobile
    new_x, new_y = push_apart(arena, x + step_x, y + step_y, weight, alive, PUSH_PASSES)
    return keep_inside(arena, new_x, new_y)


def _deflect(
    arena: Arena, x: Float[Array, "U B"], y: Float[Array, "U B"], want: XY,
    is_moving: Bool[Array, "U B"], alive: Bool[Array, "U B"],
) -> XY:  # fmt: skip
    """Turn wanted steps aside from the units they would run into."""
    want_x, want_y = want
    dx, dy, distance2 = _offsets(x, y)
    near = jnp.where(arena.contact > 0, arena.contact + CONTACT_MARGIN, 0.0)
    is_near = (distance2 < near * near) & alive[None]
    inverse = jax.lax.rsqrt(distance2)
    nx, ny = dx * inverse, dy * inverse
    closing = (want_x[:, None] - want_x[None]) * nx + (want_y[:, None] - want_y[None]) * ny
    share = jnp.where(is_moving, 0.5, 1.0)[None]
    blocked = jnp.where(is_near, jnp.maximum(closing, 0.0) * share, 0.0)
    block_x, block_y = jnp.sum(blocked * nx, 1), jnp.sum(blocked * ny, 1)

    along = want_x * block_x + want_y * block_y
    square = block_x * block_x + block_y * block_y
    removed = jnp.clip(along / jnp.maximum(square, 1e-12), 0.0, 1.0)
    step_x, step_y = want_x - removed * block_x, want_y - removed * block_y

    # Hardly any way left: go around the blockers, on the side of the goal.
    length2 = want_x * want_x + want_y * want_y
    is_stuck = (step_x * step_x + step_y * step_y < 0.09 * length2) & (square > 0)
    cross = want_x * block_y - want_y * block_x
    parity = np.where(np.arange(arena.num_units) % 2, 1.0, -1.0).astype(np.float32)[:, None]
    side = jnp.where(jnp.abs(cross) > 1e-4 * jnp.sqrt(square * length2), jnp.sign(-cross), parity)
    slide = side * jnp.sqrt(length2) * jax.lax.rsqrt(jnp.maximum(square, 1e-12))
    step_x = jnp.where(is_stuck, -block_y * slide, step_x)
    step_y = jnp.where(is_stuck, block_x * slide, step_y)
    return jnp.where(is_moving, step_x, 0.0), jnp.where(is_moving, step_y, 0.0)


def push_apart(
    arena: Arena, x: Float[Array, "U B"], y: Float[Array, "U B"], weight: Float[Array, "U B"],
    alive: Bool[Array, "U B"], passes: int,
) -> XY:  # fmt: skip
    """Undo overlaps, shared by weight, by at most one stride in all."""
    share = weight[:, None] / jnp.maximum(weight[:, None] + weight[None], 1e-9)
    share = jnp.where(alive[:, None] & alive[None], share * PUSH_STRENGTH, 0.0)
    start_x, start_y = x, y
    for _ in range(passes):
        dx, dy, distance2 = _offsets(x, y)
        inverse = jax.lax.rsqrt(distance2)
        # Of contact - distance, as a multiple of the offset.
        overlap = jnp.maximum(arena.contact * inverse - 1.0, 0.0) * share
        x, y = x - jnp.sum(overlap * dx, 1), y - jnp.sum(overlap * dy, 1)
    shift_x, shift_y = x - start_x, y - start_y
    shift2 = shift_x * shift_x + shift_y * shift_y
    limit = jnp.minimum(1.0, arena.stride * jax.lax.rsqrt(jnp.maximum(shift2, 1e-12)))
    return start_x + limit * shift_x, start_y + limit * shift_y


def _offsets(
    x: Float[Array, "U B"], y: Float[Array, "U B"]
) -> tuple[Float[Array, "U U B"], Float[Array, "U U B"], Float[Array, "U U B"]]:
    """Offsets from unit i to unit j and their squares; never exactly zero."""
    order = np.sign(np.arange(len(x))[None] - np.arange(len(x))[:, None])
    nudge = (1e-5 * order).astype(np.float32)[..., None]
    dx, dy = x[None] - x[:, None] + nudge, y[None] - y[:, None] - nudge
    return dx, dy, jnp.maximum(dx * dx + dy * dy, 1e-10)


def keep_inside(arena: Arena, x: Float[Array, "U B"], y: Float[Array, "U B"]) -> XY:
    """Out of the walls and onto the map."""
    planes = {unit.plane for unit in arena.units}
    new_x, new_y = x, y
    if "ground" in planes:
        new_x, new_y = _out_of_walls(arena.ground_walls, arena.separation, x, y)
    if "cliff" in planes:
        if arena.scenario.terrain.cliffs:
            cliff_x, cliff_y = _out_of_walls(arena.climber_walls, arena.separation, x, y)
            new_x = jnp.where(arena.is_climber, cliff_x, new_x)
            new_y = jnp.where(arena.is_climber, cliff_y, new_y)
        elif "ground" not in planes:
            new_x, new_y = _out_of_walls(arena.climber_walls, arena.separation, x, y)
    if "air" in planes:
        new_x, new_y = jnp.where(arena.is_flyer, x, new_x), jnp.where(arena.is_flyer, y, new_y)
    terrain = arena.scenario.terrain
    return jnp.clip(new_x, 0.0, terrain.width), jnp.clip(new_y, 0.0, terrain.height)


def _out_of_walls(
    walls: Walls, radius: Float[np.ndarray, "U 1"], x: Float[Array, "U B"], y: Float[Array, "U B"]
) -> XY:
    if walls.box is not None:
        x0, y0, x1, y1 = walls.box
        return jnp.clip(x, x0 + radius, x1 - radius), jnp.clip(y, y0 + radius, y1 - radius)
    # Two passes, for corners between two walls.
    return _out_of_nearest(walls, radius, *_out_of_nearest(walls, radius, x, y))


def _out_of_nearest(
    walls: Walls, radius: Float[np.ndarray, "U 1"], x: Float[Array, "U B"], y: Float[Array, "U B"]
) -> XY:
    """Push each disc out of its nearest wall cell; a centre inside a wall goes to open ground."""
    fine_height = walls.height * FINE
    fine_width = len(walls.nearest) // fine_height
    fine_x = jnp.clip((x * FINE).astype(jnp.int32), 0, fine_width - 1)
    fine_y = jnp.clip((y * FINE).astype(jnp.int32), 0, fine_height - 1)
    table = jnp.asarray(walls.nearest.astype(np.int32))
    entry = table.at[fine_x * fine_height + fine_y].get(mode="promise_in_bounds")
    is_inside = entry < 0
    cell = jnp.where(is_inside, -1 - entry, entry)
    cell_x = (cell // (walls.height + 2) - 1).astype(jnp.float32)
    cell_y = (cell % (walls.height + 2) - 1).astype(jnp.float32)
    near_x, near_y = jnp.clip(x, cell_x, cell_x + 1.0), jnp.clip(y, cell_y, cell_y + 1.0)
    dx, dy = x - near_x, y - near_y
    distance2 = jnp.maximum(dx * dx + dy * dy, 1e-10)
    push = jnp.maximum(radius * jax.lax.rsqrt(distance2) - 1.0, 0.0)
    return (
        jnp.where(is_inside, near_x, x + push * dx),
        jnp.where(is_inside, near_y, y + push * dy),
    )


def _cell(arena: Arena, x: Float[Array, "U B"], y: Float[Array, "U B"]):
    terrain = arena.scenario.terrain
    cell_x = jnp.clip(x.astype(jnp.int32), 0, terrain.width - 1)
    cell_y = jnp.clip(y.astype(jnp.int32), 0, terrain.height - 1)
    return cell_x * terrain.height + cell_y
