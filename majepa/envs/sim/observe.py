"""SMAC's interface to the letter: legal actions, observations, global and agent-specific states.

Every function maps unit tables `[U, B]` to arrays that keep the batch last; `row` turns them into a
`TimeStep` with the batch first. `Interface` also names every feature, so that sizes, names and
values come from one place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..base import TimeStep
from .arena import TOLERANCE, Arena
from .battle import FIRST_TARGET, MOVES, NOOP, NORTH, STOP
from .features import Block, block_of, flat, kinds, one_hot
from .options import Options
from .outcome import Ending
from .state import State, Units

NUDGE = 1e-5
"""Added to a look-ahead before it is truncated to a cell: `TOLERANCE`, for places."""


class Interface:
    """The interface of one arena under one set of options."""

    def __init__(self, arena: Arena, options: Options):
        self.arena = arena
        self.options = options
        scenario = arena.scenario
        self.num_actions = FIRST_TARGET + arena.num_enemies
        types = [unit.name for unit in scenario.feature_types]
        self.ally_kinds = one_hot(arena.units[arena.allies], types)
        self.enemy_kinds = one_hot(
            arena.units[arena.enemies], list(scenario.enemy_type_order) or types
        )
        self.types = tuple(types)
        self.enemy_types = scenario.enemy_type_order or tuple(types)
        self.shows_own_health = options.obs_own_health or options.obs_all_health

    # Actions.

    @functools.cached_property
    def action_names(self) -> tuple[str, ...]:
        targets = [f"target_{index}" for index in range(self.arena.num_enemies)]
        return ("no_op", "stop", "north", "south", "east", "west", *targets)

    def legal(self, units: Units, walkable: Bool[Array, "X Y"]) -> Bool[Array, "A K B"]:
        arena, rules = self.arena, self.arena.rules
        ally = _side(units, arena.allies)
        alive = ally.alive
        moves = [
            alive & self._can_enter(ally, float(dx), float(dy), walkable)
            for dx, dy in MOVES * (rules.move_amount / 2)
        ]
        targets = self._in_shooting_range(ally, _side(units, arena.enemies))
        is_healer = arena.is_healer[arena.allies]
        if is_healer.any():
            patients = self._in_shooting_range(ally, ally) & ~is_healer[None]
            extra = arena.num_enemies - arena.num_allies
            patients = jnp.pad(patients, ((0, 0), (0, extra), (0, 0)))
            targets = jnp.where(is_healer[:, None], patients, targets)
        return jnp.concatenate(
            [jnp.stack([~alive, alive, *moves], axis=1), targets & alive[:, None]], axis=1
        )

    def _can_enter(
        self, ally: Units, dx: float, dy: float, walkable: Bool[Array, "X Y"]
    ) -> Bool[Array, "A B"]:
        """SMAC's look-ahead: half the move, truncated toward zero, the same grid for every unit."""
        width, height = walkable.shape
        x = (ally.x + (dx + NUDGE)).astype(jnp.int32)
        y = (ally.y + (dy + NUDGE)).astype(jnp.int32)
        is_on_map = (x >= 0) & (x < width) & (y >= 0) & (y < height)
        cell = jnp.clip(x, 0, width - 1) * height + jnp.clip(y, 0, height - 1)
        return is_on_map & walkable.reshape(-1).at[cell].get(mode="promise_in_bounds")

    def _in_shooting_range(self, ally: Units, other: Units) -> Bool[Array, "A T B"]:
        dx, dy = other.x[None] - ally.x[:, None], other.y[None] - ally.y[:, None]
        return other.alive[None] & (
            dx * dx + dy * dy <= self.arena.rules.shoot_range**2 + TOLERANCE
        )

    # Observations.

    def observation(
        self, units: Units, legal: Bool[Array, "A K B"], last_action: Int[Array, "A B"],
        steps: Int[Array, " B"],
    ) -> Float[Array, "A O B"]:  # fmt: skip
        alive = units.alive[self.arena.allies][:, None]
        blocks = self._observation_blocks(units, legal, last_action)
        view = jnp.where(alive, flat(blocks), 0.0)
        if self.options.obs_timestep_number:
            view = jnp.concatenate([view, self._clock(steps, view[:, :1])], axis=1)
        return view

    @functools.cached_property
    def observation_names(self) -> tuple[str, ...]:
        names = self._names(self._observation_blocks)
        return (*names, *(["timestep"] if self.options.obs_timestep_number else []))

    def _observation_blocks(
        self, units: Units, legal: Bool[Array, "A K B"], last_action: Int[Array, "A B"]
    ) -> list[Block]:
        return [
            self._moves(legal),
            self._enemy_view(units, legal),
            self._ally_view(units, last_action),
            self._own_view(units),
        ]

    def _moves(self, legal: Bool[Array, "A K B"]) -> Block:
        names = tuple(f"move_{name}" for name in self.action_names[NORTH:FIRST_TARGET])
        return Block("", names, legal[:, NORTH:FIRST_TARGET].astype(jnp.float32))

    def _clock(self, steps: Int[Array, " B"], like: Float[Array, "... B"]) -> Float[Array, "... B"]:
        part = steps.astype(jnp.float32) / self.arena.scenario.limit
        return jnp.broadcast_to(part, like.shape)

    def _enemy_view(self, units: Units, legal: Bool[Array, "A K B"]) -> Block:
        arena, sight = self.arena, self.arena.rules.sight_range
        ally, foe = _side(units, arena.allies), _side(units, arena.enemies)
        dx, dy, distance2 = _offsets(ally, foe)
        features = {
            "attackable": legal[:, FIRST_TARGET:],
            **_bearing(dx, dy, distance2, sight),
            **(self._bars(foe, arena.enemies) if self.options.obs_all_health else {}),
            **kinds(self.enemy_types, self.enemy_kinds),
        }
        is_seen = foe.alive[None] & (distance2 < sight**2 - TOLERANCE)
        return block_of("enemy", features, dx.shape).where(is_seen)

    def _ally_view(self, units: Units, last_action: Int[Array, "A B"]) -> Block:
        arena, sight = self.arena, self.arena.rules.sight_range
        ally = _side(units, arena.allies)
        dx, dy, distance2 = _offsets(ally, ally)
        features = {
            "visible": jnp.ones_like(dx),
            **_bearing(dx, dy, distance2, sight),
            **(self._bars(ally, arena.allies) if self.options.obs_all_health else {}),
            **kinds(self.types, self.ally_kinds),
        }
        block = block_of("ally", features, dx.shape)
        if self.options.obs_last_action:
            block = block.join(self._last_actions(last_action))
        return block.where(ally.alive[None] & (distance2 < sight**2 - TOLERANCE)).of_others()

    def _own_view(self, units: Units) -> Block:
        ally = _side(units, self.arena.allies)
        features = {
            **(self._bars(ally, self.arena.allies) if self.shows_own_health else {}),
            **kinds(self.types, self.ally_kinds),
        }
        return block_of("own", features, ally.hp.shape)

    def _bars(self, side: Units, rows: slice) -> dict[str, Float[Array, "S B"]]:
        """Health, and shields where the side has any; of a unit without, the shield is 0."""
        bars = {"health": side.hp / self.arena.hp_max[rows]}
        shield_max = self.arena.shield_max[rows]
        if (shield_max > 0).any():
            bars["shield"] = side.shield / np.maximum(shield_max, 1.0)
        return bars

    def _last_actions(self, last_action: Int[Array, "A B"]) -> Block:
        actions = np.arange(self.num_actions)[None, :, None]
        values = (last_action[:, None] == actions).astype(jnp.float32)
        return Block("agent", tuple(f"did_{name}" for name in self.action_names), values)

    # Global state.

    def state(
        self, units: Units, observation: Float[Array, "A O B"], last_action: Int[Array, "A B"],
        steps: Int[Array, " B"],
    ) -> Float[Array, "S B"]:  # fmt: skip
        batch = units.x.shape[-1]
        if self.options.obs_instead_of_state:
            return observation.reshape(-1, batch)
        blocks = self._state_blocks(units, last_action)
        parts = [block.values.reshape(-1, batch) for block in blocks]
        if self.options.state_timestep_number:
            parts.append(self._clock(steps, parts[0][:1]))
        return jnp.concatenate(parts, axis=0)

    @functools.cached_property
    def state_names(self) -> tuple[str, ...]:
        if self.options.obs_instead_of_state:
            agents = range(self.arena.num_allies)
            return tuple(f"agent_{i}/{name}" for i in agents for name in self.observation_names)
        names = self._names(
            lambda units, _, last: [
                Block(block.prefix, block.names, block.values[None])
                for block in self._state_blocks(units, last)
            ]
        )
        return (*names, *(["timestep"] if self.options.state_timestep_number else []))

    def _state_blocks(self, units: Units, last_action: Int[Array, "A B"]) -> list[Block]:
        ally, foe = _side(units, self.arena.allies), _side(units, self.arena.enemies)
        blocks = [self._ally_rows(ally).where(ally.alive), self._enemy_rows(foe).where(foe.alive)]
        if self.options.state_last_action:
            blocks.append(self._last_actions(last_action))
        return blocks

    def _ally_rows(self, ally: Units) -> Block:
        bars = self._bars(ally, self.arena.allies)
        features = {
            "health": bars.pop("health"),
            "readiness": self._readiness(ally),
            **self._position(ally),
            **bars,
            **kinds(self.types, self.ally_kinds),
        }
        return block_of("ally", features, ally.hp.shape)

    def _enemy_rows(self, foe: Units) -> Block:
        bars = self._bars(foe, self.arena.enemies)
        features = {
            "health": bars.pop("health"),
            **self._position(foe),
            **bars,
            **kinds(self.enemy_types, self.enemy_kinds),
        }
        return block_of("enemy", features, foe.hp.shape)

    def _readiness(self, ally: Units) -> Float[Array, "A B"]:
        """Weapon cooldown, of healers the energy, in SMAC's units."""
        arena = self.arena
        value = jnp.where(arena.is_healer[arena.allies], ally.energy, ally.cooldown)
        return value / arena.column(lambda unit: unit.smac_cooldown)[arena.allies]

    def _position(self, side: Units) -> dict[str, Float[Array, "S B"]]:
        terrain = self.arena.scenario.terrain
        return {
            "x": (side.x - terrain.width / 2) / terrain.width,
            "y": (side.y - terrain.height / 2) / terrain.height,
        }

    # Agent-specific state.

    def agent_state(
        self, units: Units, legal: Bool[Array, "A K B"], last_action: Int[Array, "A B"]
    ) -> Float[Array, "A C B"]:
        """What MAPPO's critic uses: each agent's view with the fog lifted, its id at the end."""
        alive = units.alive[self.arena.allies][:, None]
        view = jnp.where(alive, flat(self._agent_state_blocks(units, legal, last_action)), 0.0)
        identity = np.eye(self.arena.num_allies, dtype=np.float32)[..., None]
        identity = jnp.broadcast_to(identity, (*identity.shape[:2], view.shape[-1]))
        return jnp.concatenate([view, identity], axis=1)

    @functools.cached_property
    def agent_state_size(self) -> int:
        return len(self._names(self._agent_state_blocks)) + self.arena.num_allies

    def _agent_state_blocks(
        self, units: Units, legal: Bool[Array, "A K B"], last_action: Int[Array, "A B"]
    ) -> list[Block]:
        return [
            self._ally_details(units, last_action),
            self._enemy_details(units, legal),
            self._moves(legal),
            self._own_details(units, last_action),
        ]

    def _ally_details(self, units: Units, last_action: Int[Array, "A B"]) -> Block:
        arena, sight = self.arena, self.arena.rules.sight_range
        ally = _side(units, arena.allies)
        dx, dy, distance2 = _offsets(ally, ally)
        features = {
            "visible": distance2 < sight**2 - TOLERANCE,
            **_bearing(dx, dy, distance2, sight),
            "readiness": self._readiness(ally),
            **self._bars(ally, arena.allies),
            **self._position(ally),
            **kinds(self.types, self.ally_kinds),
        }
        block = block_of("ally", features, dx.shape).join(self._last_actions(last_action))
        return block.where(jnp.broadcast_to(ally.alive[None], dx.shape)).of_others()

    def _enemy_details(self, units: Units, legal: Bool[Array, "A K B"]) -> Block:
        arena, sight = self.arena, self.arena.rules.sight_range
        ally, foe = _side(units, arena.allies), _side(units, arena.enemies)
        dx, dy, distance2 = _offsets(ally, foe)
        features = {
            "attackable": legal[:, FIRST_TARGET:],
            **_bearing(dx, dy, distance2, sight),
            "visible": distance2 < sight**2 - TOLERANCE,
            **self._bars(foe, arena.enemies),
            **kinds(self.enemy_types, self.enemy_kinds),
            **self._position(foe),
        }
        return block_of("enemy", features, dx.shape).where(
            jnp.broadcast_to(foe.alive[None], dx.shape)
        )

    def _own_details(self, units: Units, last_action: Int[Array, "A B"]) -> Block:
        ally = _side(units, self.arena.allies)
        zero = jnp.zeros_like(ally.hp)
        features = {
            "visible": zero + 1.0,
            "distance": zero,
            "dx": zero,
            "dy": zero,
            **self._bars(ally, self.arena.allies),
            **self._position(ally),
            **kinds(self.types, self.ally_kinds),
        }
        return block_of("own", features, ally.hp.shape).join(self._last_actions(last_action))

    # Rows.

    def row(
        self, state: State, legal: Bool[Array, "A K B"], ending: Ending, is_first: Bool[Array, " B"]
    ) -> TimeStep:
        """What arrives at the learner, batch first."""
        units, last_action = state.units, state.last_action
        observation = self.observation(units, legal, last_action, state.steps)
        return TimeStep(
            observation=_batch_first(observation),
            legal=_batch_first(legal),
            alive=_batch_first(units.alive[self.arena.allies]),
            agent_state=_batch_first(self.agent_state(units, legal, last_action)),
            state=_batch_first(self.state(units, observation, last_action, state.steps)),
            reward=jnp.where(is_first, 0.0, ending.reward),
            is_first=is_first,
            is_last=ending.is_last & ~is_first,
            is_terminal=ending.is_terminal & ~is_first,
            won=ending.won & ~is_first,
            info={
                "dead_allies": jnp.where(is_first, 0, ending.dead_allies),
                "dead_enemies": jnp.where(is_first, 0, ending.dead_enemies),
                "illegal_actions": state.illegal,
            },
        )

    def _names(self, blocks: Callable[..., list[Block]]) -> list[str]:
        """Names of all features in order, from a dry run of the functions that compute them."""
        arena, names = self.arena, []

        def dry_run(column, legal, last_action):
            for block in blocks(Units(*[column] * len(Units._fields)), legal, last_action):
                names.extend(block.feature_names())

        jax.eval_shape(
            dry_run,
            jax.ShapeDtypeStruct((arena.num_units, 1), jnp.float32),
            jax.ShapeDtypeStruct((arena.num_allies, self.num_actions, 1), jnp.bool_),
            jax.ShapeDtypeStruct((arena.num_allies, 1), jnp.int32),
        )
        return names


def legalise(
    action: Int[Array, "A B"], legal: Bool[Array, "A K B"]
) -> tuple[Int[Array, "A B"], Int[Array, " B"]]:
    """Illegal actions become stop, of the dead no-op; how many did."""
    chosen = action[:, None] == np.arange(legal.shape[1])[None, :, None]
    is_legal = jnp.any(chosen & legal, axis=1)
    fallback = jnp.where(legal[:, NOOP], NOOP, STOP)
    return jnp.where(is_legal, action, fallback), jnp.sum(~is_legal, axis=0, dtype=jnp.int32)


def _side(units: Units, rows: slice) -> Units:
    return Units(*(field[rows] for field in units))


def _bearing(dx: Array, dy: Array, distance2: Array, sight: float) -> dict[str, Array]:
    return {"distance": jnp.sqrt(distance2) / sight, "dx": dx / sight, "dy": dy / sight}


def _offsets(ally: Units, other: Units):
    dx, dy = other.x[None] - ally.x[:, None], other.y[None] - ally.y[:, None]
    return dx, dy, dx * dx + dy * dy


def _batch_first(array: Array) -> Array:
    return jnp.moveaxis(array, -1, 0)
