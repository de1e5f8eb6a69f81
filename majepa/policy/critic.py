"""The centralised critic, for training only: the states of all agents to a value for each."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from ..config import BinsConfig, PolicyConfig
from ..nn.layers import Linear, RMSNorm
from ..nn.transformer import AgentAttention


class Critic(eqx.Module):
    """V: attention over the roster. Who is alive is a feature, so dead agents have a value too."""

    enter: Linear
    enter_norm: RMSNorm
    agents: AgentAttention
    out_norm: RMSNorm
    out: Linear

    def __init__(
        self, feature: int, config: PolicyConfig, bins: BinsConfig, *, key: Key[Array, ""]
    ) -> None:
        key_enter, key_agents, key_out = jax.random.split(key, 3)
        width = config.critic_width
        self.enter = Linear(feature + 2, width, key=key_enter)
        self.enter_norm = RMSNorm(width)
        self.agents = AgentAttention(
            config.critic_layers, width, config.critic_heads, key=key_agents
        )
        self.out_norm = RMSNorm(width)
        self.out = Linear(width, bins.count, key=key_out, scale=0.0)

    def __call__(
        self,
        s: Float[Array, "*b N F"],
        present: Bool[Array, "*b N"],
        alive: Bool[Array, "*b N"],
    ) -> Float[Array, "*b N K"]:
        """Two-hot logits of each slot's value."""
        dtype = self.enter.weight.dtype
        flags = jnp.stack([present, alive], axis=-1).astype(dtype)
        x = self.enter_norm(self.enter.of_both(s, flags))
        x = self.out_norm(*self.agents.with_bias_apart(x, present))
        return self.out(x).astype(jnp.float32)
