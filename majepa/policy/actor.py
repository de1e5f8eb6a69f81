"""The decentralised policy: one agent's own state and legal actions to its next action."""

from __future__ import annotations

import equinox as eqx
from jaxtyping import Array, Bool, Float, Key

from ..config import PolicyConfig
from ..nn.dists import masked_log_probs
from ..nn.layers import MLP


class Actor(eqx.Module):
    """π: shared by all agents, given the state of one."""

    mlp: MLP

    def __init__(
        self, feature: int, num_actions: int, config: PolicyConfig, *, key: Key[Array, ""]
    ) -> None:
        hidden = [config.actor_width] * config.actor_layers
        self.mlp = MLP(feature, hidden, num_actions, key=key, out_scale=0.01)

    def __call__(self, s: Float[Array, "*b F"], legal: Bool[Array, "*b A"]) -> Float[Array, "*b A"]:
        """Log-probabilities of the legal actions."""
        return masked_log_probs(self.mlp(s), legal)
