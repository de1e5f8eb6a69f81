"""SMAC's reward and endings, from the unit tables before and after a step."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .arena import Arena
from .options import Options
from .state import Units


class Ending(NamedTuple):
    """How a step ended."""

    reward: Float[Array, " B"]
    won: Bool[Array, " B"]
    is_terminal: Bool[Array, " B"]
    """Won, lost or drawn."""
    is_last: Bool[Array, " B"]
    """Terminal, or at the time limit."""
    dead_allies: Int[Array, " B"]
    dead_enemies: Int[Array, " B"]


class Outcome:
    """Rewards and endings of one arena under one set of options."""

    def __init__(self, arena: Arena, options: Options):
        self.arena = arena
        self.options = options

    @functools.cached_property
    def max_reward(self) -> float:
        foes = self.arena.units[self.arena.enemies]
        pools = sum(unit.hp + unit.shield for unit in foes)
        return len(foes) * self.options.reward_death_value + self.options.reward_win + pools

    def ending(self, before: Units, after: Units, steps: Int[Array, " B"]) -> Ending:
        """Of a step that led from one unit table to another and was the `steps`-th."""
        arena = self.arena
        won, lost, drawn = self._outcome(after)
        is_terminal = won | lost | drawn
        dead_allies, dead_enemies = (
            jnp.sum(~after.alive[side], axis=0, dtype=jnp.int32)
            for side in (arena.allies, arena.enemies)
        )
        is_last = is_terminal | (steps >= arena.scenario.limit)
        reward = self._reward(before, after, won, lost)
        return Ending(reward, won, is_terminal, is_last, dead_allies, dead_enemies)

    def _outcome(self, after: Units) -> tuple[Bool[Array, " B"], ...]:
        """Won, lost, drawn. Where healers fight, a side with nobody else left is beaten."""
        arena = self.arena
        ally_alive, enemy_alive = after.alive[arena.allies], after.alive[arena.enemies]
        any_ally, any_enemy = jnp.any(ally_alive, axis=0), jnp.any(enemy_alive, axis=0)
        lost = ~any_ally & any_enemy
        won = any_ally & ~any_enemy
        drawn = ~any_ally & ~any_enemy
        if arena.is_healer.any():
            is_healer = arena.is_healer[arena.enemies]
            lost |= ~jnp.any(ally_alive & ~arena.is_healer[arena.allies], axis=0)
            healers_alive = jnp.sum(enemy_alive & is_healer, axis=0)
            won |= (jnp.sum(enemy_alive, axis=0) == 1) & (healers_alive == 1)
            won &= ~lost
            drawn &= ~lost
        return won, lost, drawn

    def _reward(
        self, before: Units, after: Units, won: Bool[Array, " B"], lost: Bool[Array, " B"]
    ) -> Float[Array, " B"]:
        options = self.options
        if options.reward_sparse:
            reward = won.astype(jnp.float32) - lost.astype(jnp.float32)
        else:
            reward = self._damage_reward(before, after)
            reward += jnp.where(won, float(options.reward_win), 0.0)
            reward += jnp.where(lost, float(options.reward_defeat), 0.0)
        if options.reward_scale:
            reward /= self.max_reward / options.reward_scale_rate
        return reward

    def _damage_reward(self, before: Units, after: Units) -> Float[Array, " B"]:
        """SMAC's absolute value makes what the enemy regenerates count as well."""
        options = self.options

        def losses(side: slice) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
            delta = before.vitality[side] - after.vitality[side]
            was_alive = before.alive[side]
            deaths = jnp.sum(was_alive & ~after.alive[side], axis=0, dtype=jnp.float32)
            return jnp.sum(jnp.where(was_alive, delta, 0.0), axis=0), deaths

        damage, kills = losses(self.arena.enemies)
        gained = damage + options.reward_death_value * kills
        if options.reward_only_positive:
            return jnp.abs(gained)
        hurt, deaths = losses(self.arena.allies)
        return gained - options.reward_negative_scale * (hurt + options.reward_death_value * deaths)
