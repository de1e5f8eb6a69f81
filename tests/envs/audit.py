"""Play many random battles and watch every game loop for what must never happen."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from majepa.envs.scripted import scripted_policy
from majepa.envs.sim import SCENARIOS, BattleEnv, battle
from majepa.envs.sim.observe import legalise


class Tally(NamedTuple):
    """Per environment, over its first episode."""

    is_over: jax.Array
    won: jax.Array
    length: jax.Array
    total: jax.Array
    recovered: jax.Array
    """Health and shield that the enemy regained, in units of reward."""
    is_finite: jax.Array
    off_map: jax.Array
    """How far any living unit's centre was off the map."""
    wall_depth: jax.Array
    """How deep any living ground unit's centre was inside a wall."""
    crush: jax.Array
    """Loops in a row that a pair has been below half its separation, per pair."""
    longest_crush: jax.Array


def audit(map_name: str, episodes: int, seed: int = 0, policy_name: str = "random") -> Tally:
    env = BattleEnv(SCENARIOS[map_name])
    return jax.device_get(_run(env, episodes, policy_name)(jax.random.key(seed)))


def _run(env: BattleEnv, episodes: int, policy_name: str):
    policy = scripted_policy(policy_name, env.spec)
    watch = functools.partial(_watch_loop, env, _wall_depths(env))
    reward_scale = 20 / env.outcome.max_reward
    enemies = env.arena.enemies

    def step(carry):
        state, row, key, tally = carry
        key, key_act = jax.random.split(key)
        action = policy(row.observation, row.legal, key_act)
        order, _ = legalise(action.T, env.legal(state))
        start, one_loop = battle.engage(
            env.arena, state, battle.decode(env.arena, state.units, order)
        )

        def loop(index, now):
            moment, tally = now
            after = one_loop(index, moment)
            gain = after[0].vitality[enemies] - moment[0].vitality[enemies]
            gain = jnp.where(after[0].alive[enemies], jnp.maximum(gain, 0.0), 0.0).sum(0)
            tally = tally._replace(
                recovered=tally.recovered + jnp.where(tally.is_over, 0.0, gain * reward_scale)
            )
            return after, watch(after[0], tally)

        _, tally = jax.lax.fori_loop(0, env.arena.rules.loops_per_step, loop, (start, tally))
        state, row = env.step(state, action)
        running = ~tally.is_over
        finite = jnp.isfinite(row.observation).all((1, 2)) & jnp.isfinite(row.state).all(1)
        finite &= jnp.isfinite(row.agent_state).all((1, 2)) & jnp.isfinite(row.reward)
        tally = tally._replace(
            is_over=tally.is_over | row.is_last,
            won=tally.won | (running & row.won),
            length=tally.length + running,
            total=tally.total + jnp.where(running, row.reward, 0.0),
            is_finite=tally.is_finite & finite,
        )
        return state, row, key, tally

    def run(key):
        key_reset, key = jax.random.split(key)
        state, row = env.reset(jax.random.split(key_reset, episodes))
        units, zero, false = env.arena.num_units, jnp.zeros(episodes), jnp.zeros(episodes, bool)
        count = jnp.zeros(episodes, jnp.int32)
        tally = Tally(
            false, false, count, zero, zero, ~false, zero, zero,
            jnp.zeros((units, units, episodes), jnp.int8), jnp.zeros(episodes, jnp.int8),
        )  # fmt: skip

        def unfinished(carry):
            return ~carry[3].is_over.all() & (carry[3].length.max() <= env.spec.episode_limit)

        final = jax.lax.while_loop(unfinished, step, (state, row, key, tally))[3]
        return final._replace(crush=jnp.zeros(()))

    return jax.jit(run)


def _watch_loop(env, wall_depths, units, tally):
    arena, alive = env.arena, units.alive & ~tally.is_over
    terrain = arena.scenario.terrain
    off = jnp.maximum(
        jnp.maximum(-units.x, units.x - terrain.width),
        jnp.maximum(-units.y, units.y - terrain.height),
    )
    fine_x = jnp.clip((units.x * 16).astype(jnp.int32), 0, terrain.width * 16 - 1)
    fine_y = jnp.clip((units.y * 16).astype(jnp.int32), 0, terrain.height * 16 - 1)
    ground, climber = wall_depths
    depth = jnp.where(arena.is_climber, climber[fine_x, fine_y], ground[fine_x, fine_y])
    depth = jnp.where(alive & ~arena.is_flyer, depth, 0.0)
    distance2 = (units.x[None] - units.x[:, None]) ** 2 + (units.y[None] - units.y[:, None]) ** 2
    is_crushed = (arena.contact > 0) & (distance2 < (arena.contact / 2) ** 2)
    is_crushed &= alive[None] & alive[:, None]
    crush = jnp.where(is_crushed, jnp.minimum(tally.crush, 100) + 1, 0).astype(jnp.int8)
    return tally._replace(
        off_map=jnp.maximum(tally.off_map, jnp.where(alive, off, 0.0).max(0)),
        wall_depth=jnp.maximum(tally.wall_depth, depth.max(0)),
        crush=crush,
        longest_crush=jnp.maximum(tally.longest_crush, crush.max((0, 1))),
    )


def _wall_depths(env: BattleEnv):
    """Distance to open ground on a grid of 16 points per cell, for walkers and climbers."""
    from scipy import ndimage

    def depth(is_open):
        fine = np.repeat(np.repeat(is_open, 16, 0), 16, 1)
        return jnp.asarray(ndimage.distance_transform_edt(~fine) / 16, jnp.float32)

    terrain = env.arena.scenario.terrain
    return depth(terrain.walkable), depth(terrain.climbable)
