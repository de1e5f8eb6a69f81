"""What the agents of the baselines are shown: their own observation, last action and id."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..envs.base import EnvSpec

NO_ACTION = -1
"""The last action of an agent that has not acted yet; its one-hot code is zero."""


def view_size(spec: EnvSpec) -> int:
    return spec.observation_size + spec.num_actions + spec.num_agents


def agent_view(
    spec: EnvSpec,
    observation: Float[Array, "*b O"],
    last_action: Int[Array, "*b"],
    agent: Int[Array, "*b"],
) -> Float[Array, "*b V"]:
    """What an agent knows: its own observation, its own last action and who it is."""
    actions = jax.nn.one_hot(last_action, spec.num_actions)
    ids = jax.nn.one_hot(agent, spec.num_agents)
    return jnp.concatenate([observation, actions, ids], axis=-1)


def team_views(
    spec: EnvSpec, observation: Float[Array, "*b N O"], last_action: Int[Array, "*b N"]
) -> Float[Array, "*b N V"]:
    """The views of all agents."""
    agents = jnp.expand_dims(jnp.arange(spec.num_agents), tuple(range(last_action.ndim - 1)))
    agents = jnp.broadcast_to(agents, last_action.shape)
    return agent_view(spec, observation, last_action, agents)


def unless_first(
    last_action: Int[Array, "*b N"], is_first: Bool[Array, "*b"]
) -> Int[Array, "*b N"]:
    """Last actions as agents know them: none where an episode begins."""
    return jnp.where(is_first[..., None], NO_ACTION, last_action)
