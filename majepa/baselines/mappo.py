"""MAPPO: PPO with a decentralised recurrent actor and a centralised critic (Yu et al., 2022).

Actor and critic are separate networks, each shared by all agents. The actor sees an agent's own
observation, last action and id; the critic sees the agent-specific state. One `update` is some
epochs over one rollout, whose recurrent streams are cut into chunks that start from the hidden
states met in the rollout. A row that ends an episode is no decision: its action leads nowhere.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from ..algorithm import Alone, Cadence, Decision, Experience, Metrics, Row, agent_keys
from ..config import ConfigError, MappoConfig
from ..envs.base import EnvSpec, TimeStep
from ..nn.dists import log_prob_of, masked_log_probs, sample_each, sample_index
from ..nn.layers import Linear
from ..nn.means import masked_mean
from ..nn.optim import apply_update
from ..nn.recurrent import GRU, LayerNorm, orthogonal_linear
from ..policy.returns import ValueNorm
from ..policy.rollout import (
    Decided,
    Outcomes,
    actor_loss,
    clipped_adam,
    learn_in_epochs,
    moved_statistics,
    outcomes,
    rollout_metrics,
    standardised_advantage,
    to_agents,
    value_loss,
)
from ..policy.view import NO_ACTION, agent_view, team_views, unless_first, view_size


class Network(eqx.Module):
    """The trunk that actor and critic have in common, and a linear head."""

    input_norm: LayerNorm
    layers: tuple[tuple[Linear, LayerNorm], ...]
    recurrent: tuple[GRU, LayerNorm] | None
    head: Linear

    def __init__(
        self, inputs: int, outputs: int, config: MappoConfig, *, gain: float, key: Key[Array, ""]
    ) -> None:
        key_gru, key_head, *keys = jax.random.split(key, 2 + config.layers)
        width = config.width
        sizes = [inputs, *[width] * config.layers]
        self.input_norm = LayerNorm(inputs)
        self.layers = tuple(
            (orthogonal_linear(size, width, math.sqrt(2.0), key=layer_key), LayerNorm(width))
            for size, layer_key in zip(sizes[:-1], keys, strict=True)
        )
        gru = (GRU(width, width, key=key_gru), LayerNorm(width))
        self.recurrent = gru if config.recurrent else None
        self.head = orthogonal_linear(width, outputs, gain, key=key_head)

    def __call__(
        self, x: Float[Array, "T *b I"], is_first: Bool[Array, "T *b"], hidden: Float[Array, "*b W"]
    ) -> tuple[Float[Array, "T *b O"], Float[Array, "*b W"]]:
        """Outputs along sequences, and the hidden states after them."""
        x = self.input_norm(x)
        for linear, norm in self.layers:
            x = norm(jax.nn.relu(linear(x)))
        if self.recurrent is not None:
            gru, norm = self.recurrent
            x = gru(x, is_first, hidden)
            x, hidden = norm(x), x[-1]
        return self.head(x), hidden


class Sight(NamedTuple):
    """What the networks are shown: the newest frames, and the action before them."""

    last_action: Int[Array, "B N"]
    views: Float[Array, "B N F V"]
    """Frames of the actor, newest last; zero from before the episode."""
    states: Float[Array, "B N F C"]
    """Frames of the critic."""


class Memory(NamedTuple):
    """The carry."""

    sight: Sight
    actor: Float[Array, "B N W"]
    critic: Float[Array, "B N W"]


class Own(NamedTuple):
    """The memory of one agent that is executed alone."""

    agent: Int[Array, ""]
    last_action: Int[Array, "1 1"]
    views: Float[Array, "1 1 F V"]
    hidden: Float[Array, "1 1 W"]


class Kept(NamedTuple):
    """What a row stores beside observation and action."""

    log_prob: Float[Array, "B N"]
    value: Float[Array, "B N"]
    """The critic's prediction, in normalised units."""
    actor: Float[Array, "B N W"]
    """Hidden state of the actor before the row."""
    critic: Float[Array, "B N W"]


class Learner(NamedTuple):
    actor: Network
    critic: Network
    actor_optimizer: Any
    critic_optimizer: Any
    returns: ValueNorm
    nonfinite_in_a_row: Int[Array, ""]
    """Latest updates in which a step was skipped because its gradient was not finite."""


class Sequences(NamedTuple):
    """A rollout cut into `S` sequences of `L` rows, each of one agent; time first."""

    view: Float[Array, "L S V"]
    state: Float[Array, "L S C"]
    legal: Bool[Array, "L S A"]
    action: Int[Array, "L S"]
    is_first: Bool[Array, "L S"]
    acts: Bool[Array, "L S"]
    """A living agent decides here: what the actor learns from."""
    counts: Bool[Array, "L S"]
    """The team decides here: what the critic learns from, for dead agents too."""
    log_prob: Float[Array, "L S"]
    """Of the action, under the policy that took it."""
    value: Float[Array, "L S"]
    """What the critic predicted then, in normalised units."""
    advantage: Float[Array, "L S"]
    returns: Float[Array, "L S"]
    actor_hidden: Float[Array, "L S W"]
    """Before each row; a sequence starts from that of its first."""
    critic_hidden: Float[Array, "L S W"]


@dataclasses.dataclass(frozen=True)
class Mappo:
    config: MappoConfig
    spec: EnvSpec

    def __post_init__(self) -> None:
        config = self.config
        if config.rollout % self.sequence:
            raise ConfigError(
                f"algo.chunk is {config.chunk}; it must divide the rollout of {config.rollout} rows"
            )
        sequences = config.rollout // self.sequence * config.num_envs * self.spec.num_agents
        if not 1 <= config.minibatches <= sequences:
            raise ConfigError(
                f"algo.minibatches is {config.minibatches}; "
                f"it must be from 1 to {sequences}, the sequences of a rollout"
            )

    @property
    def cadence(self) -> Cadence:
        return Cadence(self.config.num_envs, self.config.rollout)

    @property
    def timeout_is_terminal(self) -> bool:
        return self.config.timeout_is_terminal

    @property
    def sequence(self) -> int:
        """Rows that gradients flow through together."""
        return self.config.chunk if self.config.recurrent else 1

    def init(self, key: Key[Array, ""]) -> Learner:
        key_actor, key_critic = jax.random.split(key)
        config, sight = self.config, self.begin(1).sight
        views, states = sight.views[0, 0].size, sight.states[0, 0].size
        actor = Network(views, self.spec.num_actions, config, gain=0.01, key=key_actor)
        critic = Network(states, 1, config, gain=1.0, key=key_critic)
        return Learner(
            actor=actor,
            critic=critic,
            actor_optimizer=self._optimizer(config.actor_rate).init(cast(Any, actor)),
            critic_optimizer=self._optimizer(config.critic_rate).init(cast(Any, critic)),
            returns=ValueNorm.fresh(),
            nonfinite_in_a_row=jnp.zeros((), jnp.int32),
        )

    def begin(self, num_envs: int) -> Memory:
        spec, batch = self.spec, (num_envs, self.spec.num_agents, self.config.frames)
        views = view_size(spec)
        states = spec.agent_state_size + (0 if self._has_agent_state else views)
        sight = Sight(
            last_action=jnp.full(batch[:2], NO_ACTION, jnp.int32),
            views=jnp.zeros((*batch, views)),
            states=jnp.zeros((*batch, states)),
        )
        hidden = jnp.zeros((*batch[:2], self.config.width))
        return Memory(sight, hidden, hidden)

    def act(
        self, state: Learner, carry: Memory, step: TimeStep, key: Key[Array, ""], *, greedy: bool
    ) -> Decision:
        sight = self.see(carry.sight, step)
        logits, actor_hidden = _decide(state.actor, sight.views, step.is_first, carry.actor)
        value, critic_hidden = _decide(state.critic, sight.states, step.is_first, carry.critic)
        log_probs = masked_log_probs(logits, step.legal)
        keys = agent_keys(key, *step.alive.shape)
        action = jnp.argmax(log_probs, axis=-1) if greedy else sample_each(log_probs, keys)
        kept = Kept(log_prob_of(log_probs, action), value[..., 0], carry.actor, carry.critic)
        sight = sight._replace(last_action=action)
        return Decision(action, Memory(sight, actor_hidden, critic_hidden), kept)

    def executor(self, state: Learner) -> Network:
        return state.actor

    def wake(self, agent: Int[Array, ""]) -> Own:
        memory = self.begin(1)
        first = jax.tree.map(lambda leaf: leaf[:, :1], memory)
        return Own(agent, first.sight.last_action, first.sight.views, first.actor)

    def act_alone(
        self,
        executor: Network,
        memory: Own,
        observation: Float[Array, " O"],
        legal: Bool[Array, " A"],
        is_first: Bool[Array, ""],
        key: Key[Array, ""],
        *,
        greedy: bool,
    ) -> Alone:
        starts = is_first[None]
        last_action, agent = unless_first(memory.last_action, starts), memory.agent[None, None]
        view = agent_view(self.spec, observation[None, None], last_action, agent)
        views = _push(memory.views, view, starts)
        logits, hidden = _decide(executor, views, starts, memory.hidden)
        log_probs = masked_log_probs(logits[0, 0], legal)
        action = jnp.argmax(log_probs) if greedy else sample_index(log_probs, key)
        return Alone(action, log_probs, Own(memory.agent, action[None, None], views, hidden))

    def update(
        self, state: Learner, data: Experience, key: Key[Array, ""]
    ) -> tuple[Learner, Metrics]:
        """Epochs over one rollout; metrics of the losses are means over their steps."""
        config, (sequences, of_rollout) = self.config, self.sequences(state, data)
        state, of_steps = learn_in_epochs(
            self.learn,
            state,
            sequences,
            key,
            epochs=config.epochs,
            minibatches=config.minibatches,
            axis=1,
        )
        metrics = {**of_steps, **of_rollout}
        is_good = jnp.isfinite(metrics["actor/gradient_norm"] + metrics["critic/gradient_norm"])
        bad = jnp.where(is_good, 0, state.nonfinite_in_a_row + 1)
        metrics["nonfinite_in_a_row"] = bad.astype(jnp.float32)
        return state._replace(nonfinite_in_a_row=bad), metrics

    @property
    def _has_agent_state(self) -> bool:
        """A world that has none repeats its state; then each agent's own view is added."""
        return self.spec.agent_state_size != self.spec.state_size

    def see(self, sight: Sight, step: TimeStep) -> Sight:
        """The sight of a row, from the one before and the action taken there."""
        is_first, state = step.is_first, step.agent_state
        last_action = unless_first(sight.last_action, is_first)
        view = team_views(self.spec, step.observation, last_action)
        if not self._has_agent_state:
            state = jnp.concatenate([state, view], axis=-1)
        views, states = _push(sight.views, view, is_first), _push(sight.states, state, is_first)
        return Sight(last_action, views, states)

    def sequences(self, state: Learner, data: Experience) -> tuple[Sequences, Metrics]:
        """The rollout as both networks learn from it."""

        def look(sight: Sight, row: Row) -> tuple[Sight, tuple[Array, Array]]:
            sight = self.see(sight, row.step)
            return sight._replace(last_action=row.action), (sight.views, sight.states)

        step, kept = data.rows.step, data.rows.kept
        _, (views, states) = jax.lax.scan(look, data.carry.sight, data.rows)
        found = self.outcomes(state, data)
        acts = step.alive & found.counts
        sequences = Sequences(
            view=_flat(views),
            state=_flat(states),
            legal=step.legal,
            action=data.rows.action,
            is_first=to_agents(step.is_first, self.spec.num_agents),
            acts=acts,
            counts=found.counts,
            log_prob=kept.log_prob,
            value=kept.value,
            advantage=standardised_advantage(found, acts),
            returns=found.returns,
            actor_hidden=kept.actor,
            critic_hidden=kept.critic,
        )
        return jax.tree.map(self._cut, sequences), rollout_metrics(data, found, acts)

    def outcomes(self, state: Learner, data: Experience) -> Outcomes:
        final, memory, config = data.final, data.final_carry, self.config
        sight = self.see(memory.sight, final)
        out, _ = _decide(state.critic, sight.states, final.is_first, memory.critic)
        value, final_value = map(state.returns.denormalise, (data.rows.kept.value, out[..., 0]))
        return outcomes(data, value, final_value, discount=config.discount, trace=config.trace)

    def _cut(self, x: Shaped[Array, "T B N ..."]) -> Shaped[Array, "L S ..."]:
        x = x.reshape(-1, self.sequence, *x.shape[1:])
        return jnp.moveaxis(x, 1, 0).reshape(self.sequence, -1, *x.shape[4:])

    def learn(self, state: Learner, batch: Sequences) -> tuple[Learner, Metrics]:
        """One step of each network; the statistics of returns move first."""
        config = self.config
        returns = moved_statistics(state.returns, batch.returns, batch.counts, config.value_decay)
        target = returns.normalise(batch.returns)
        actor_gradient, metrics = jax.grad(self.actor_loss, has_aux=True)(state.actor, batch)
        critic_loss, critic_gradient = jax.value_and_grad(self.critic_loss)(
            state.critic, batch, target
        )
        actor, actor_optimizer, actor_report = apply_update(
            self._optimizer(config.actor_rate), actor_gradient, state.actor_optimizer, state.actor
        )
        critic, critic_optimizer, critic_report = apply_update(
            self._optimizer(config.critic_rate), critic_gradient, state.critic_optimizer,
            state.critic,
        )  # fmt: skip
        metrics = {
            **metrics,
            "loss/critic": critic_loss,
            "actor/gradient_norm": actor_report.gradient_norm,
            "actor/update_ratio": actor_report.update_ratio,
            "critic/gradient_norm": critic_report.gradient_norm,
            "critic/update_ratio": critic_report.update_ratio,
        }
        bad = state.nonfinite_in_a_row
        return Learner(actor, critic, actor_optimizer, critic_optimizer, returns, bad), metrics

    def actor_loss(self, actor: Network, batch: Sequences) -> tuple[Float[Array, ""], Metrics]:
        logits, _ = actor(batch.view, batch.is_first, batch.actor_hidden[0])
        log_probs = masked_log_probs(logits, batch.legal)
        decided = Decided(batch.action, batch.acts, batch.log_prob, batch.advantage)
        config = self.config
        return actor_loss(log_probs, decided, clip=config.clip, entropy_scale=config.entropy)

    def critic_loss(
        self, critic: Network, batch: Sequences, target: Float[Array, "L S"]
    ) -> Float[Array, ""]:
        out, _ = critic(batch.state, batch.is_first, batch.critic_hidden[0])
        clip, huber = self.config.clip, self.config.huber
        losses = value_loss(out[..., 0], batch.value, target, clip=clip, huber=huber)
        return masked_mean(losses, batch.counts)

    def _optimizer(self, rate: float) -> optax.GradientTransformation:
        config = self.config
        return clipped_adam(rate, eps=config.adam_eps, max_gradient=config.max_gradient)


def _decide(
    network: Network,
    frames: Float[Array, "B N F D"],
    is_first: Bool[Array, " B"],
    hidden: Float[Array, "B N W"],
) -> tuple[Float[Array, "B N O"], Float[Array, "B N W"]]:
    """Outputs for one row of all agents, and the hidden states after it."""
    starts = to_agents(is_first, hidden.shape[1])
    out, hidden = network(_flat(frames)[None], starts[None], hidden)
    return out[0], hidden


def _push(
    frames: Float[Array, "B N F D"], newest: Float[Array, "B N D"], is_first: Bool[Array, " B"]
) -> Float[Array, "B N F D"]:
    past = jnp.where(is_first[:, None, None, None], 0.0, frames[:, :, 1:])
    return jnp.concatenate([past, newest[:, :, None]], axis=2)


def _flat(frames: Float[Array, "*b F D"]) -> Float[Array, "*b F*D"]:
    return frames.reshape(*frames.shape[:-2], -1)
