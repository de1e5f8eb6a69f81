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

STUCK = 0.3
"""A unit left with less than this part of its step goes around its blockers."""
HEAD_ON = 0.43
"""Sine of the angle between a unit's way and its blockers below which neither side is nearer."""
CROWD_MARGIN = 0.6
"""Neighbours within this gap make up the crowd that a blocked unit tries to leave."""
LOPSIDED = 0.37
"""Neighbours by which one side must outweigh the other to count as the crowd's side."""
SLACK = 0.12
"""Overlap that units in a throng tolerate, as they do in the game."""
GLANCING = 0.25
"""Cosine below which running past a neighbour no longer counts as running into it."""
PUSH_STRENGTH = 0.6
STANDING_WEIGHT = 1e-3
"""Share of a push that a standing unit takes: next to nothing, unless both stand."""

XY = tuple[Float[Array, "U B"], Float[Array, "U B"]]
Offsets = tuple[Float[Array, "U U B"], Float[Array, "U U B"], Float[Array, "U U B"]]


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
    arena: Arena, x: Float[Array, "U B"], y: Float[Array, "U B"], want: XY, drift: XY,
    alive: Bool[Array, "U B"],
) -> XY:  # fmt: skip
    """New positions of units that want to move by `want` and last moved by `drift`."""
    is_moving = (want[0] != 0) | (want[1] != 0)
    offsets = _offsets(x, y)
    step, block = _yield_way(arena, offsets, want, drift, alive)
    step = _go_around(arena, want, step, block, _crowding(arena, offsets, alive))
    wall_x, wall_y = keep_inside(arena, x + step[0], y + step[1])
    step = _stop_short(arena, offsets, (wall_x - x, wall_y - y), drift, alive)
    new_x = x + jnp.where(is_moving, step[0], 0.0)
    new_y = y + jnp.where(is_moving, step[1], 0.0)
    weight = jnp.where(is_moving, 1.0, STANDING_WEIGHT) * arena.is_mobile
    return keep_inside(arena, *push_apart(arena, new_x, new_y, weight, alive))


def _yield_way(
    arena: Arena, offsets: Offsets, step: XY, drift: XY, alive: Bool[Array, "U B"]
) -> tuple[XY, XY]:
    """Turn steps aside that would close more than the gap to a neighbour, if it goes on as it went.

    Also returns the sum of what the neighbours denied.
    """
    step_x, step_y = step
    nx, ny, distance, own, closing = _approach(offsets, step, drift)
    gap = jnp.maximum(distance - arena.contact, 0.0)
    # A neighbour that backs into a unit does not turn it.
    denied = jnp.maximum(jnp.minimum(closing, own) - gap, 0.0)
    denied = jnp.where((arena.contact > 0) & alive[None], denied, 0.0)
    block_x, block_y = jnp.sum(denied * nx, 1), jnp.sum(denied * ny, 1)
    along = step_x * block_x + step_y * block_y
    square = block_x * block_x + block_y * block_y
    part = jnp.clip(along / jnp.maximum(square, 1e-12), 0.0, 1.0)
    return (step_x - part * block_x, step_y - part * block_y), (block_x, block_y)


def _approach(offsets: Offsets, step: XY, drift: XY):
    """Direction and distance to each neighbour; how much a step, alone and with the neighbour's
    drift, brings the two together."""
    dx, dy, distance2 = offsets
    inverse = jax.lax.rsqrt(distance2)
    nx, ny = dx * inverse, dy * inverse
    own = step[0][:, None] * nx + step[1][:, None] * ny
    closing = own - (drift[0][None] * nx + drift[1][None] * ny)
    return nx, ny, distance2 * inverse, own, closing


def _crowding(arena: Arena, offsets: Offsets, alive: Bool[Array, "U B"]) -> XY:
    """Sum of the directions to all close neighbours."""
    dx, dy, distance2 = offsets
    near = jnp.where(arena.contact > 0, arena.contact + CROWD_MARGIN, 0.0)
    weight = jnp.where((distance2 < near * near) & alive[None], jax.lax.rsqrt(distance2), 0.0)
    return jnp.sum(weight * dx, 1), jnp.sum(weight * dy, 1)


def _go_around(arena: Arena, want: XY, step: XY, block: XY, crowd: XY) -> XY:
    """Units with hardly any way left walk along their blockers."""
    (want_x, want_y), (step_x, step_y), (block_x, block_y) = want, step, block
    length2 = want_x * want_x + want_y * want_y
    square = block_x * block_x + block_y * block_y
    is_stuck = (step_x * step_x + step_y * step_y < STUCK**2 * length2) & (square > 1e-6 * length2)
    # Out of the crowd if there is one, else on the side of the goal, else as habit has it.
    outward = block_y * crowd[0] - block_x * crowd[1]
    goalward = block_x * want_y - block_y * want_x
    habit = np.where(np.arange(arena.num_units) % 2, 1.0, -1.0).astype(np.float32)[:, None]
    side = jnp.where(jnp.abs(goalward) > HEAD_ON * jnp.sqrt(square * length2), goalward, habit)
    side = jnp.where(jnp.abs(outward) > LOPSIDED * jnp.sqrt(square), outward, side)
    slide = jnp.sign(side) * jnp.sqrt(length2) * jax.lax.rsqrt(jnp.maximum(square, 1e-10))
    return (
        jnp.where(is_stuck, -block_y * slide, step_x),
        jnp.where(is_stuck, block_x * slide, step_y),
    )


def _stop_short(
    arena: Arena, offsets: Offsets, step: XY, drift: XY, alive: Bool[Array, "U B"]
) -> XY:
    """Cut steps short before they run into a neighbour, if it goes on as it went."""
    _, _, distance, own, closing = _approach(offsets, step, drift)
    excess = closing - (distance - arena.contact + SLACK)
    length = jnp.sqrt(step[0] * step[0] + step[1] * step[1])
    glancing = jnp.maximum(GLANCING * length, 1e-6)[:, None]
    head_on = jnp.clip(own / glancing, 0.0, 1.0)
    cut = head_on * jnp.clip(excess / jnp.maximum(own, glancing), 0.0, 1.0)
    cut = jnp.where((arena.contact > 0) & alive[None], cut, 0.0)
    part = 1.0 - jnp.max(cut, axis=1)
    return step[0] * part, step[1] * part


def push_apart(
    arena: Arena, x: Float[Array, "U B"], y: Float[Array, "U B"], weight: Float[Array, "U B"],
    alive: Bool[Array, "U B"],
) -> XY:  # fmt: skip
    """Undo part of all overlaps, shared by weight; nobody moves more than a stride."""
    dx, dy, distance2 = _offsets(x, y)
    share = weight[:, None] / jnp.maximum(weight[:, None] + weight[None], 1e-9)
    share = jnp.where(alive[:, None] & alive[None], share * PUSH_STRENGTH, 0.0)
    # Of contact minus distance, as a multiple of the offset.
    overlap = jnp.maximum(arena.contact * jax.lax.rsqrt(distance2) - 1.0, 0.0) * share
    shift_x, shift_y = jnp.sum(overlap * dx, 1), jnp.sum(overlap * dy, 1)
    shift2 = shift_x * shift_x + shift_y * shift_y
    limit = jnp.minimum(1.0, arena.stride * jax.lax.rsqrt(jnp.maximum(shift2, 1e-12)))
    return x - limit * shift_x, y - limit * shift_y


def _offsets(x: Float[Array, "U B"], y: Float[Array, "U B"]) -> Offsets:
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
