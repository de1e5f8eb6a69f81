"""The simulator as an `Env`: batches of battles with SMAC's interface."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from ..base import EnvError, EnvSpec, TimeStep
from . import battle
from .arena import Arena
from .battle import NOOP, STOP
from .maps import Scenario
from .observe import Interface, legalise
from .options import Options
from .outcome import Outcome
from .state import State, seeds_from
from .units import SIM_VERSION, Rules

LEAST_BATCH = 16
"""Smaller batches are computed in this size: compilers lay out tiny arrays differently, and so make
other rounding errors, from which two runs of one battle part."""


class BattleEnv:
    """Batches of one scenario. `reset` and `step` are pure; jit them, or what calls them."""

    def __init__(
        self, scenario: Scenario, *, rules: Rules | None = None, options: Options | None = None
    ):
        if not isinstance(scenario, Scenario):
            raise EnvError(
                f"BattleEnv takes a Scenario, not {scenario!r}; for a map by name use make_env"
            )
        self.arena = Arena(scenario, rules or Rules())
        self.options = options or Options()
        self.interface = Interface(self.arena, self.options)
        self.outcome = Outcome(self.arena, self.options)

    @property
    def spec(self) -> EnvSpec:
        return self._spec

    @functools.cached_property
    def _spec(self) -> EnvSpec:
        arena, interface = self.arena, self.interface
        return EnvSpec(
            name=f"sim:{arena.scenario.name}",
            num_agents=arena.num_allies,
            num_actions=interface.num_actions,
            observation_size=len(interface.observation_names),
            state_size=len(interface.state_names),
            agent_state_size=interface.agent_state_size,
            episode_limit=arena.scenario.limit,
            noop_index=NOOP,
            stop_index=STOP,
            action_names=interface.action_names,
            observation_names=interface.observation_names,
            state_names=interface.state_names,
            agent_names=tuple(unit.name for unit in arena.units[arena.allies]),
            opponent_names=tuple(unit.name for unit in arena.units[arena.enemies]),
            version=SIM_VERSION,
        )

    def reset(self, keys: Array) -> tuple[State, TimeStep]:
        if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) or keys.ndim != 1:
            raise EnvError(
                f"reset needs one random key per environment, got {keys.dtype}{keys.shape}; "
                "use jax.random.split(jax.random.key(seed), num_envs)"
            )
        seed = seeds_from(keys)
        state = battle.begin(self.arena, seed, jnp.zeros(seed.shape[1], jnp.uint32))
        return self.arrive(state, state, jnp.ones(seed.shape[1], bool), self._walkable)

    def step(self, state: State, action: Array) -> tuple[State, TimeStep]:
        batch = state.steps.shape[0]
        self._check_action(action, batch)
        if batch < LEAST_BATCH:
            return self._step_few(state, action)
        legal = self.legal(state)
        order, num_illegal = legalise(action.T.astype(jnp.int32), legal)
        units, minds = battle.fight(
            self.arena, state, battle.decode(self.arena, state.units, order)
        )
        fought = state._replace(
            units=units, minds=minds, steps=state.steps + 1, last_action=order,
            illegal=state.illegal + num_illegal,
        )  # fmt: skip
        fresh = battle.begin_again(self.arena, state)
        after = _choose(state.is_over, fresh, fought)
        return self.arrive(state, after, state.is_over, self._walkable)

    def _step_few(self, state: State, action: Array) -> tuple[State, TimeStep]:
        """A small batch, filled up with copies of its last battle."""
        batch = state.steps.shape[0]
        spare = LEAST_BATCH - batch

        def fill(leaf: Array) -> Array:
            return jnp.concatenate([leaf, jnp.repeat(leaf[..., -1:], spare, axis=-1)], axis=-1)

        state, row = self.step(jax.tree.map(fill, state), fill(action.T).T)
        return (
            jax.tree.map(lambda leaf: leaf[..., :batch], state),
            jax.tree.map(lambda leaf: leaf[:batch], row),
        )

    def legal(self, state: State) -> Bool[Array, "A K B"]:
        return self.interface.legal(state.units, self._walkable)

    def arrive(
        self, before: State, after: State, is_first: Bool[Array, " B"],
        walkable: Bool[Array, "X Y"],
    ) -> tuple[State, TimeStep]:  # fmt: skip
        """The row of a transition between two states: what SMAC's interface adds to a battle."""
        ending = self.outcome.ending(before.units, after.units, after.steps)
        legal = self.interface.legal(after.units, walkable)
        row = self.interface.row(after, legal, ending, is_first)
        return after._replace(is_over=row.is_last), row

    @property
    def _walkable(self) -> Bool[Array, "X Y"]:
        return jnp.asarray(self.arena.walkable)

    def _check_action(self, action: Array, batch: int) -> None:
        expected = (batch, self.arena.num_allies)
        if not hasattr(action, "dtype") or not jnp.issubdtype(action.dtype, jnp.integer):
            raise EnvError(
                f"actions must be integers, got {getattr(action, 'dtype', type(action))}"
            )
        if action.shape != expected:
            raise EnvError(
                f"actions of {batch} environments with {expected[1]} agents must have shape "
                f"{expected}, got {action.shape}"
            )


def _choose(condition: Bool[Array, " B"], yes: State, no: State) -> State:
    """Per environment; the batch is the last axis of every leaf."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
