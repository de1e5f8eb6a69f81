"""MAT, the Multi-Agent Transformer: PPO on a team that decides one agent after another.

(Wen et al., 2022.) An encoder attends to the views of all agents and predicts each one's value. A
decoder then gives the action of each agent from that encoding and the actions of the agents before
it. Acting decodes agent by agent; learning takes all agents of a joint step in one pass, in which
each is told the actions that were taken before its own. Both are the same function. Agents depend
on each other's views and actions at every step, so that they cannot be executed apart.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key

from ..algorithm import Cadence, Decision, Experience, Metrics, agent_keys
from ..config import MatConfig
from ..envs.base import EnvSpec, TimeStep
from ..nn.attention import attention_weights
from ..nn.dists import log_prob_of, masked_log_probs, sample_index
from ..nn.layers import Linear, product
from ..nn.means import masked_mean
from ..nn.optim import apply_update
from ..nn.recurrent import LayerNorm, orthogonal_linear
from ..policy.returns import ValueNorm
from ..policy.rollout import (
    Decided,
    actor_loss,
    clipped_adam,
    learn_in_epochs,
    moved_statistics,
    outcomes,
    rollout_metrics,
    standardised_advantage,
    value_loss,
)
from ..policy.view import NO_ACTION, team_views, unless_first, view_size

GAIN = 0.01
"""Of the weights at the start, where no GELU follows."""
GELU_GAIN = math.sqrt(2.0)


class Attention(eqx.Module):
    query: Linear
    key: Linear
    value: Linear
    out: Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, *, key: Key[Array, ""]) -> None:
        keys = jax.random.split(key, 4)
        parts = (orthogonal_linear(width, width, GAIN, key=key) for key in keys)
        self.query, self.key, self.value, self.out = parts
        self.heads = heads

    def __call__(
        self,
        asking: Float[Array, "B N W"],
        told: Float[Array, "B N W"],
        mask: Bool[Array, "1 N N"],
    ) -> Float[Array, "B N W"]:
        projected = self.query(asking), self.key(told), self.value(told)
        query, key, value = (x.reshape(*x.shape[:2], self.heads, -1) for x in projected)
        weight = attention_weights(query, key, mask)
        mixed = jnp.einsum("bhnm,bmhk->bnhk", weight, value)
        return self.out(mixed.reshape(asking.shape))


class FeedForward(eqx.Module):
    """A hidden layer as wide as its input, on a residual branch; the norm comes last."""

    hidden: Linear
    out: Linear
    norm: LayerNorm

    def __init__(self, width: int, *, key: Key[Array, ""]) -> None:
        key_hidden, key_out = jax.random.split(key)
        self.hidden = orthogonal_linear(width, width, GELU_GAIN, key=key_hidden)
        self.out = orthogonal_linear(width, width, GAIN, key=key_out)
        self.norm = LayerNorm(width)

    def __call__(self, x: Float[Array, "B N W"]) -> Float[Array, "B N W"]:
        return self.norm(x + self.out(gelu(self.hidden(x))))


class Head(eqx.Module):
    hidden: Linear
    norm: LayerNorm
    out: Linear

    def __init__(self, width: int, size: int, *, key: Key[Array, ""]) -> None:
        key_hidden, key_out = jax.random.split(key)
        self.hidden = orthogonal_linear(width, width, GELU_GAIN, key=key_hidden)
        self.norm = LayerNorm(width)
        self.out = orthogonal_linear(width, size, GAIN, key=key_out)

    def __call__(self, x: Float[Array, "B N W"]) -> Float[Array, "B N O"]:
        return self.out(self.norm(gelu(self.hidden(x))))


class EncoderBlock(eqx.Module):
    """Every agent attends to all agents."""

    attention: Attention
    norm: LayerNorm
    feed: FeedForward

    def __init__(self, width: int, heads: int, *, key: Key[Array, ""]) -> None:
        key_attention, key_feed = jax.random.split(key)
        self.attention = Attention(width, heads, key=key_attention)
        self.norm = LayerNorm(width)
        self.feed = FeedForward(width, key=key_feed)

    def __call__(self, x: Float[Array, "B N W"]) -> Float[Array, "B N W"]:
        everyone = jnp.ones((1, x.shape[1], x.shape[1]), bool)
        return self.feed(self.norm(x + self.attention(x, x, everyone)))


class DecoderBlock(eqx.Module):
    """Actions attend to actions, then agents to actions; never to their own or a later one."""

    actions: Attention
    actions_norm: LayerNorm
    agents: Attention
    agents_norm: LayerNorm
    feed: FeedForward

    def __init__(self, width: int, heads: int, *, key: Key[Array, ""]) -> None:
        key_actions, key_agents, key_feed = jax.random.split(key, 3)
        self.actions = Attention(width, heads, key=key_actions)
        self.actions_norm = LayerNorm(width)
        self.agents = Attention(width, heads, key=key_agents)
        self.agents_norm = LayerNorm(width)
        self.feed = FeedForward(width, key=key_feed)

    def __call__(
        self, x: Float[Array, "B N W"], encoded: Float[Array, "B N W"]
    ) -> Float[Array, "B N W"]:
        up_to_own = jnp.tril(jnp.ones((1, x.shape[1], x.shape[1]), bool))
        x = self.actions_norm(x + self.actions(x, x, up_to_own))
        x = self.agents_norm(encoded + self.agents(encoded, x, up_to_own))
        return self.feed(x)


class Network(eqx.Module):
    """Encoder and decoder. Nothing but the ids in their views tells agents apart."""

    view_norm: LayerNorm
    view: Linear
    encoder_norm: LayerNorm
    encoder: tuple[EncoderBlock, ...]
    value: Head
    token: Float[Array, "A+1 W"]
    """Codes of the action before: first that of none, then those of all actions; no bias."""
    decoder_norm: LayerNorm
    decoder: tuple[DecoderBlock, ...]
    policy: Head

    def __init__(
        self, views: int, num_actions: int, config: MatConfig, *, key: Key[Array, ""]
    ) -> None:
        keys, width, heads = jax.random.split(key, 6), config.width, config.heads
        key_encoder, key_decoder = (jax.random.split(key, config.blocks) for key in keys[:2])
        self.view_norm = LayerNorm(views)
        self.view = orthogonal_linear(views, width, GELU_GAIN, key=keys[2])
        self.encoder_norm = LayerNorm(width)
        self.encoder = tuple(EncoderBlock(width, heads, key=key) for key in key_encoder)
        self.value = Head(width, 1, key=keys[3])
        self.token = orthogonal_linear(num_actions + 1, width, GELU_GAIN, key=keys[4]).weight
        self.decoder_norm = LayerNorm(width)
        self.decoder = tuple(DecoderBlock(width, heads, key=key) for key in key_decoder)
        self.policy = Head(width, num_actions, key=keys[5])

    def encode(
        self, views: Float[Array, "B N V"]
    ) -> tuple[Float[Array, "B N W"], Float[Array, "B N"]]:
        """The team as each agent is shown it, and the values of all agents."""
        x = self.encoder_norm(gelu(self.view(self.view_norm(views))))
        for block in self.encoder:
            x = block(x)
        return x, self.value(x)[..., 0]

    def decode(
        self, encoded: Float[Array, "B N W"], action: Int[Array, "B N"]
    ) -> Float[Array, "B N A"]:
        """Logits of every agent, given the actions of those before it; others change nothing."""
        before = jnp.concatenate([jnp.zeros_like(action[:, :1]), action[:, :-1] + 1], axis=1)
        tokens = jax.nn.one_hot(before, self.token.shape[0])
        x = self.decoder_norm(gelu(product(tokens, self.token)))
        for block in self.decoder:
            x = block(x, encoded)
        return self.policy(x)


class Memory(NamedTuple):
    """The carry."""

    last_action: Int[Array, "B N"]


class Kept(NamedTuple):
    """What a row stores beside observation and action."""

    log_prob: Float[Array, "B N"]
    """Of each agent's action, given those before it."""
    value: Float[Array, "B N"]
    """The predicted values, in normalised units."""


class Learner(NamedTuple):
    network: Network
    optimizer: Any
    returns: ValueNorm
    nonfinite_in_a_row: Int[Array, ""]
    """Latest updates in which a step was skipped because its gradient was not finite."""


class JointSteps(NamedTuple):
    """A rollout as `S` steps of the whole team, in any order."""

    view: Float[Array, "S N V"]
    legal: Bool[Array, "S N A"]
    decided: Decided
    counts: Bool[Array, "S N"]
    """The team decides here: what the values learn from, for dead agents too."""
    value: Float[Array, "S N"]
    """What was predicted then, in normalised units."""
    returns: Float[Array, "S N"]


@dataclasses.dataclass(frozen=True)
class Mat:
    config: MatConfig
    spec: EnvSpec

    @property
    def cadence(self) -> Cadence:
        return Cadence(self.config.num_envs, self.config.rollout)

    @property
    def timeout_is_terminal(self) -> bool:
        return self.config.timeout_is_terminal

    def init(self, key: Key[Array, ""]) -> Learner:
        network = Network(view_size(self.spec), self.spec.num_actions, self.config, key=key)
        return Learner(
            network=network,
            optimizer=self._optimizer().init(cast(Any, network)),
            returns=ValueNorm.fresh(),
            nonfinite_in_a_row=jnp.zeros((), jnp.int32),
        )

    def begin(self, num_envs: int) -> Memory:
        return Memory(jnp.full((num_envs, self.spec.num_agents), NO_ACTION, jnp.int32))

    def act(
        self, state: Learner, carry: Memory, step: TimeStep, key: Key[Array, ""], *, greedy: bool
    ) -> Decision:
        """One agent after another, each knowing what those before it will do."""
        network, (envs, agents) = state.network, step.alive.shape
        encoded, value = network.encode(self.views(carry.last_action, step))

        def decide(
            action: Int[Array, "B N"], turn: tuple[Int[Array, ""], Key[Array, " B"]]
        ) -> tuple[Int[Array, "B N"], Float[Array, " B"]]:
            agent, keys = turn
            log_probs = masked_log_probs(network.decode(encoded, action), step.legal)[:, agent]
            own = jnp.argmax(log_probs, -1) if greedy else jax.vmap(sample_index)(log_probs, keys)
            return action.at[:, agent].set(own), log_prob_of(log_probs, own)

        turns = (jnp.arange(agents), agent_keys(key, envs, agents).T)
        undecided = jnp.zeros((envs, agents), jnp.int32)
        action, log_prob = jax.lax.scan(decide, undecided, turns)
        return Decision(action, Memory(action), Kept(log_prob.T, value))

    def update(
        self, state: Learner, data: Experience, key: Key[Array, ""]
    ) -> tuple[Learner, Metrics]:
        """Epochs over one rollout; metrics of the losses are means over their steps."""
        config, (steps, of_rollout) = self.config, self.joint_steps(state, data)
        state, of_steps = learn_in_epochs(
            self.learn,
            state,
            steps,
            key,
            epochs=config.epochs,
            minibatches=config.minibatches,
            axis=0,
        )
        metrics = {**of_steps, **of_rollout}
        is_good = jnp.isfinite(metrics["network/gradient_norm"])
        bad = jnp.where(is_good, 0, state.nonfinite_in_a_row + 1)
        metrics["nonfinite_in_a_row"] = bad.astype(jnp.float32)
        return state._replace(nonfinite_in_a_row=bad), metrics

    def views(self, last_action: Int[Array, "*b N"], step: TimeStep) -> Float[Array, "*b N V"]:
        known = unless_first(last_action, step.is_first)
        return team_views(self.spec, step.observation, known)

    def joint_steps(self, state: Learner, data: Experience) -> tuple[JointSteps, Metrics]:
        """The rollout as the network learns from it."""
        config, rows, kept = self.config, data.rows, data.rows.kept
        _, final_value = state.network.encode(self.views(data.final_carry.last_action, data.final))
        value, final_value = map(state.returns.denormalise, (kept.value, final_value))
        found = outcomes(data, value, final_value, discount=config.discount, trace=config.trace)
        acts = rows.step.alive & found.counts
        before = jnp.concatenate([data.carry.last_action[None], rows.action[:-1]])
        advantage = standardised_advantage(found, acts)
        steps = JointSteps(
            view=self.views(before, rows.step),
            legal=rows.step.legal,
            decided=Decided(rows.action, acts, kept.log_prob, advantage),
            counts=found.counts,
            value=kept.value,
            returns=found.returns,
        )
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), steps)
        return flat, rollout_metrics(data, found, acts)

    def learn(self, state: Learner, batch: JointSteps) -> tuple[Learner, Metrics]:
        """One step of the network; the statistics of returns move first."""
        decay = self.config.value_decay
        returns = moved_statistics(state.returns, batch.returns, batch.counts, decay)
        target = returns.normalise(batch.returns)
        gradient, metrics = jax.grad(self.loss, has_aux=True)(state.network, batch, target)
        network, optimizer, report = apply_update(
            self._optimizer(), gradient, state.optimizer, state.network
        )
        metrics = {
            **metrics,
            "network/gradient_norm": report.gradient_norm,
            "network/update_ratio": report.update_ratio,
        }
        return Learner(network, optimizer, returns, state.nonfinite_in_a_row), metrics

    def loss(
        self, network: Network, batch: JointSteps, target: Float[Array, "S N"]
    ) -> tuple[Float[Array, ""], Metrics]:
        """Of actions and values together; ratios are each agent's own, not the team's product."""
        config = self.config
        encoded, value = network.encode(batch.view)
        log_probs = masked_log_probs(network.decode(encoded, batch.decided.action), batch.legal)
        actor, metrics = actor_loss(
            log_probs, batch.decided, clip=config.clip, entropy_scale=config.entropy
        )
        losses = value_loss(value, batch.value, target, clip=config.clip, huber=config.huber)
        critic = masked_mean(losses, batch.counts)
        return actor + critic, {**metrics, "loss/critic": critic}

    def _optimizer(self) -> optax.GradientTransformation:
        config = self.config
        return clipped_adam(config.rate, eps=config.adam_eps, max_gradient=config.max_gradient)


def gelu(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    return jax.nn.gelu(x, approximate=False)
