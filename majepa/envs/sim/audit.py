"""Play many battles and watch every game loop for what must never happen.

Meant for anyone who adds a map, a unit or a rule: `audit(BattleEnv(scenario), policy, ...)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int8, PRNGKeyArray
from scipy import ndimage

from ..base import TimeStep
from . import battle
from .arena import Arena
from .env import BattleEnv
from .observe import legalise
from .state import State, Units

Policy = Callable[[Float[Array, "B N O"], Bool[Array, "B N A"], PRNGKeyArray], Int[Array, "B N"]]

FINE = 16
"""Entries per cell and axis of the table of wall depths."""


class Tally(NamedTuple):
    """What happened in the first episode of each environment."""

    is_over: Bool[Array, " B"]
    won: Bool[Array, " B"]
    length: Int[Array, " B"]
    total: Float[Array, " B"]
    """The return."""
    recovered: Float[Array, " B"]
    """Health and shield that the enemy regained, in units of reward."""
    contact: Int[Array, " B"]
    """The step in which anyone was first hurt; 0 if nobody ever was."""
    lost_allies: Int[Array, " B"]
    lost_enemies: Int[Array, " B"]
    is_finite: Bool[Array, " B"]
    off_map: Float[Array, " B"]
    """How far any living unit's centre was off the map."""
    wall_depth: Float[Array, " B"]
    """How deep any living unit's centre was inside a wall that stops it."""
    longest_crush: Int8[Array, " B"]
    """Loops in a row that any pair spent below half the sum of its separation radii."""


class _Watch(NamedTuple):
    state: State
    row: TimeStep
    key: PRNGKeyArray
    tally: Tally
    crush: Int8[Array, "U U B"]


def audit(env: BattleEnv, policy: Policy, *, episodes: int, seed: int = 0) -> Tally:
    """One episode in each of `episodes` environments."""
    depths = _wall_depths(env)

    def unfinished(watch: _Watch) -> Bool[Array, ""]:
        steps = jnp.max(watch.tally.length)
        return ~jnp.all(watch.tally.is_over) & (steps <= env.spec.episode_limit)

    def run(key: PRNGKeyArray) -> Tally:
        key_reset, key = jax.random.split(key)
        state, row = env.reset(jax.random.split(key_reset, episodes))
        units = env.arena.num_units
        crush = jnp.zeros((units, units, episodes), jnp.int8)
        watch = _Watch(state, row, key, _blank(episodes), crush)
        return jax.lax.while_loop(unfinished, lambda w: _step(env, policy, depths, w), watch).tally

    return jax.device_get(jax.jit(run)(jax.random.key(seed)))


def excess_return(tally: Tally) -> Float[np.ndarray, " B"]:
    """Return beyond 20 and what recovery can add to it: once when it happens, for SMAC rewards the
    absolute change, and once more when the same health is shot away again."""
    return np.asarray(tally.total) - 20.0 - 2.0 * np.asarray(tally.recovered)


def _blank(episodes: int) -> Tally:
    no, zero = jnp.zeros(episodes, bool), jnp.zeros(episodes)
    count = jnp.zeros(episodes, jnp.int32)
    return Tally(
        is_over=no, won=no, length=count, total=zero, recovered=zero, contact=count,
        lost_allies=count, lost_enemies=count, is_finite=~no, off_map=zero, wall_depth=zero,
        longest_crush=jnp.zeros(episodes, jnp.int8),
    )  # fmt: skip


def _step(env: BattleEnv, policy: Policy, depths: tuple[Array, Array], watch: _Watch) -> _Watch:
    key, key_act = jax.random.split(watch.key)
    action = policy(watch.row.observation, watch.row.legal, key_act)
    order, _ = legalise(action.T, env.legal(watch.state))
    orders = battle.decode(env.arena, watch.state.units, order)
    moment, one_loop = battle.engage(env.arena, watch.state, orders)

    def loop(index: Int[Array, ""], now):
        before, tally, crush = now
        after = one_loop(index, before)
        tally, crush = _watch_loop(env, depths, before[0], after[0], tally, crush)
        return after, tally, crush

    start = (moment, watch.tally, watch.crush)
    _, tally, crush = jax.lax.fori_loop(0, env.arena.rules.loops_per_step, loop, start)
    state, row = env.step(watch.state, action)
    return _Watch(state, row, key, _count(watch.state.units, state.units, row, tally), crush)


def _count(before: Units, after: Units, row: TimeStep, tally: Tally) -> Tally:
    running = ~tally.is_over
    is_hurt = jnp.any(after.vitality < before.vitality, axis=0)
    finite = [jnp.isfinite(row.reward)]
    for array in (row.observation, row.agent_state, row.state):
        finite.append(jnp.all(jnp.isfinite(array), axis=tuple(range(1, array.ndim))))
    length = tally.length + running
    return tally._replace(
        is_over=tally.is_over | row.is_last,
        won=tally.won | (running & row.won),
        length=length,
        total=tally.total + jnp.where(running, row.reward, 0.0),
        contact=jnp.where(running & is_hurt & (tally.contact == 0), length, tally.contact),
        lost_allies=jnp.where(running, row.info["dead_allies"], tally.lost_allies),
        lost_enemies=jnp.where(running, row.info["dead_enemies"], tally.lost_enemies),
        is_finite=tally.is_finite & jnp.all(jnp.stack(finite), axis=0),
    )


def _watch_loop(
    env: BattleEnv, depths: tuple[Array, Array], before: Units, after: Units, tally: Tally,
    crush: Int8[Array, "U U B"],
) -> tuple[Tally, Int8[Array, "U U B"]]:  # fmt: skip
    arena, running = env.arena, ~tally.is_over
    enemies = arena.enemies
    gain = after.vitality[enemies] - before.vitality[enemies]
    gain = jnp.where(after.alive[enemies], jnp.maximum(gain, 0.0), 0.0)
    gain = jnp.sum(gain, axis=0) * (20 / env.outcome.max_reward)
    alive = after.alive & running[None]
    is_crushed = _too_close(arena, after) & alive[None] & alive[:, None]
    crush = jnp.where(is_crushed, jnp.minimum(crush, 100) + 1, 0).astype(jnp.int8)
    off, depth = _out_of_bounds(arena, depths, after)
    tally = tally._replace(
        recovered=tally.recovered + jnp.where(running, gain, 0.0),
        off_map=jnp.maximum(tally.off_map, jnp.max(jnp.where(alive, off, 0.0), axis=0)),
        wall_depth=jnp.maximum(tally.wall_depth, jnp.max(jnp.where(alive, depth, 0.0), axis=0)),
        longest_crush=jnp.maximum(tally.longest_crush, jnp.max(crush, axis=(0, 1))),
    )
    return tally, crush


def _too_close(arena: Arena, units: Units) -> Bool[Array, "U U B"]:
    distance2 = (units.x[None] - units.x[:, None]) ** 2 + (units.y[None] - units.y[:, None]) ** 2
    return (distance2 < (arena.contact / 2) ** 2) & (arena.contact > 0)


def _out_of_bounds(
    arena: Arena, depths: tuple[Array, Array], units: Units
) -> tuple[Float[Array, "U B"], Float[Array, "U B"]]:
    """How far each centre is off the map, and inside a wall."""
    width, height = arena.scenario.terrain.width, arena.scenario.terrain.height
    off_x, off_y = jnp.maximum(-units.x, units.x - width), jnp.maximum(-units.y, units.y - height)
    fine_x = jnp.clip((units.x * FINE).astype(jnp.int32), 0, width * FINE - 1)
    fine_y = jnp.clip((units.y * FINE).astype(jnp.int32), 0, height * FINE - 1)
    ground, climber = depths
    depth = jnp.where(arena.is_climber, climber[fine_x, fine_y], ground[fine_x, fine_y])
    return jnp.maximum(off_x, off_y), jnp.where(arena.is_flyer, 0.0, depth)


def _wall_depths(env: BattleEnv) -> tuple[Array, Array]:
    """Distance to open ground, for walkers and for climbers."""

    def depth(is_open: Bool[np.ndarray, "X Y"]) -> Array:
        fine = np.repeat(np.repeat(is_open, FINE, 0), FINE, 1)
        return jnp.asarray(ndimage.distance_transform_edt(~fine), jnp.float32) / FINE

    terrain = env.arena.scenario.terrain
    return depth(terrain.walkable), depth(terrain.climbable)
