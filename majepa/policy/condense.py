"""Actor and critic for condensed states; see `world_model/condense.py`."""

from __future__ import annotations

import equinox as eqx

from ..world_model.condense import Basis
from .actor import Actor
from .critic import Critic


def condense_actor(actor: Actor, basis: Basis) -> Actor:
    return eqx.tree_at(lambda actor: actor.mlp, actor, basis.mlp(actor.mlp))


def condense_critic(critic: Critic, basis: Basis) -> Critic:
    return eqx.tree_at(lambda critic: critic.enter, critic, basis.linear(critic.enter))
