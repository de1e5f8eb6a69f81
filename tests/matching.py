"""A game of two agents that a method must learn, in which everything that matters happens."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from majepa.envs.base import EnvSpec, TimeStep

NUM_AGENTS, NUM_ACTIONS = 2, 3


class MatchingState(NamedTuple):
    key: jax.Array
    steps: jax.Array
    """Rows since the reset; every row has its own bit."""
    place: jax.Array
    """Rows since the episode began."""


@dataclasses.dataclass(frozen=True)
class Matching:
    """Both agents must take the action that they are shown, 0 or 1; time limits end episodes."""

    limit: int = 5
    deaths: bool = False
    """Whether agent 1 dies in its third row. It keeps its actions: only `alive` says so."""
    forbids: bool = False
    """Whether agent 0 may never take action 1."""

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec("toy:matching", NUM_AGENTS, NUM_ACTIONS, 2, 3, 4, self.limit)

    def reset(self, keys):
        zeros = jnp.zeros(keys.shape[0], jnp.int32)
        state = MatchingState(keys, zeros, zeros)
        return state, self._row(state, jnp.zeros(keys.shape[0]))

    def step(self, state, action):
        wins = jnp.all(action == self._bits(state)[:, None], axis=1)
        is_over = state.place == self.limit
        place = jnp.where(is_over, 0, state.place + 1)
        state = MatchingState(state.key, state.steps + 1, place)
        return state, self._row(state, jnp.where(is_over, 0.0, wins.astype(jnp.float32)))

    def _bits(self, state):
        rows = jax.vmap(jax.random.fold_in)(state.key, state.steps)
        return jax.vmap(lambda key: jax.random.randint(key, (), 0, 2))(rows)

    def _row(self, state, reward):
        batch = (state.place.shape[0], NUM_AGENTS)
        shown = jax.nn.one_hot(self._bits(state), 2)
        observation = jnp.broadcast_to(shown[:, None], (*batch, 2))
        clock = jnp.broadcast_to(state.place[:, None, None] / self.limit, (*batch, 1))
        agent = jnp.broadcast_to(jnp.arange(2.0)[None, :, None], (*batch, 1))
        dies = (state.place[:, None] >= 2) & (jnp.arange(2) == 1)[None]
        forbidden = (jnp.arange(2) == 0)[None, :, None] & (jnp.arange(3) == 1)[None, None]
        is_last = state.place == self.limit
        return TimeStep(
            observation=observation,
            legal=jnp.broadcast_to(~forbidden | (not self.forbids), (*batch, NUM_ACTIONS)),
            alive=~dies if self.deaths else jnp.ones(batch, bool),
            agent_state=jnp.concatenate([observation, clock, agent], axis=-1),
            state=jnp.concatenate([shown, clock[:, 0]], axis=-1),
            reward=reward,
            is_first=state.place == 0,
            is_last=is_last,
            is_terminal=jnp.zeros_like(is_last),
            won=jnp.zeros(batch[0], bool),
            info={},
        )
