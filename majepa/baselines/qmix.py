"""QMIX: one value per agent, mixed monotonically into one of the team (Rashid et al., 2018), with
the settings of PyMARL2 (Hu et al., 2021).

An agent sees its own observation, last action and id, and remembers with a GRU. The mixer sees the
state, in training only; its weights are not negative, so what is best for an agent's own value is
best for the team's. One `update` stores the episodes that were just played and takes a step on a
batch of episodes from the replay, towards λ-returns of double Q-learning.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key

from ..algorithm import Alone, Cadence, Decision, Experience, Metrics, agent_keys
from ..config import QmixConfig
from ..envs.base import EnvSpec, TimeStep
from ..episode_replay import EpisodeReplay, add, empty, sample
from ..nn.dists import ILLEGAL_LOGIT, sample_each, sample_index
from ..nn.layers import Linear
from ..nn.means import masked_mean
from ..nn.optim import apply_update
from ..nn.recurrent import GRU, uniform_linear
from ..policy.returns import gae
from ..policy.rollout import clipped_adam
from ..policy.view import NO_ACTION, agent_view, team_views, unless_first, view_size


def _linear(size_in: int, size_out: int, *, key: Key[Array, ""]) -> Linear:
    return uniform_linear(size_in, size_out, size_in**-0.5, key=key)


class Agent(eqx.Module):
    """The values of one agent's actions; all agents share it."""

    first: Linear
    gru: GRU
    head: Linear

    def __init__(self, inputs: int, actions: int, width: int, *, key: Key[Array, ""]) -> None:
        key_first, key_gru, key_head = jax.random.split(key, 3)
        self.first = _linear(inputs, width, key=key_first)
        self.gru = GRU(width, width, key=key_gru, bound=width**-0.5)
        self.head = _linear(width, actions, key=key_head)

    def __call__(
        self,
        view: Float[Array, "T *b V"],
        is_first: Bool[Array, "T *b"],
        hidden: Float[Array, "*b W"],
    ) -> tuple[Float[Array, "T *b A"], Float[Array, "*b W"]]:
        """Values along sequences, and the hidden states after them."""
        states = self.gru(jax.nn.relu(self.first(view)), is_first, hidden)
        return self.head(states), states[-1]


class Mixer(eqx.Module):
    """The team's value from those of its agents, rising in each of them."""

    weight_in: tuple[Linear, Linear]
    bias_in: Linear
    weight_out: tuple[Linear, Linear]
    bias_out: tuple[Linear, Linear]

    def __init__(self, agents: int, state: int, config: QmixConfig, *, key: Key[Array, ""]) -> None:
        keys = jax.random.split(key, 7)
        hyper, mixer = config.hyper_width, config.mixer_width
        self.weight_in = (
            _linear(state, hyper, key=keys[0]),
            _linear(hyper, agents * mixer, key=keys[1]),
        )
        self.bias_in = _linear(state, mixer, key=keys[2])
        self.weight_out = (
            _linear(state, hyper, key=keys[3]),
            _linear(hyper, mixer, key=keys[4]),
        )
        self.bias_out = (_linear(state, mixer, key=keys[5]), _linear(mixer, 1, key=keys[6]))

    def __call__(
        self, values: Float[Array, "*b N"], state: Float[Array, "*b S"]
    ) -> Float[Array, "*b"]:
        inner = jnp.abs(_perceptron(self.weight_in, state))
        inner = inner.reshape(*values.shape, -1)
        hidden = jnp.einsum("...n,...nh->...h", values, inner) + self.bias_in(state)
        outer = jnp.abs(_perceptron(self.weight_out, state))
        total = jnp.sum(jax.nn.elu(hidden) * outer, axis=-1)
        return total + _perceptron(self.bias_out, state)[..., 0]


def _perceptron(layers: tuple[Linear, Linear], x: Float[Array, "*b I"]) -> Float[Array, "*b O"]:
    first, second = layers
    return second(jax.nn.relu(first(x)))


class Networks(NamedTuple):
    agent: Agent
    mixer: Mixer


class Memory(NamedTuple):
    """The carry."""

    last_action: Int[Array, "B N"]
    hidden: Float[Array, "B N W"]


class Own(NamedTuple):
    """The memory of one agent that is executed alone."""

    agent: Int[Array, ""]
    memory: Memory


class Executor(NamedTuple):
    agent: Agent
    epsilon: Float[Array, ""]


class Stored(NamedTuple):
    """A row in the replay."""

    observation: Float[Array, "*b N O"]
    legal: Bool[Array, "*b N A"]
    state: Float[Array, "*b S"]
    action: Int[Array, "*b N"]
    reward: Float[Array, "*b"]
    is_terminal: Bool[Array, "*b"]


class Learner(NamedTuple):
    networks: Networks
    target: Networks
    optimizer: Any
    replay: EpisodeReplay
    transitions: Int[Array, ""]
    """Seen so far; exploration falls with them."""
    copied: Int[Array, ""]
    """Episodes seen when the target was last copied."""
    nonfinite_in_a_row: Int[Array, ""]
    """Latest updates in which a step was skipped because its gradient was not finite."""


class Trained(NamedTuple):
    """The part of a learner that a step changes."""

    networks: Networks
    optimizer: Any
    nonfinite_in_a_row: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class Qmix:
    config: QmixConfig
    spec: EnvSpec
    steps: int
    """Budget of the run; the replay has room for no more rows than it can bring."""

    @property
    def cadence(self) -> Cadence:
        return Cadence(self.config.num_envs, self.spec.episode_limit, whole_episodes=True)

    @property
    def timeout_is_terminal(self) -> bool:
        return self.config.timeout_is_terminal

    @property
    def rows(self) -> int:
        """Of the longest episode, its last one included."""
        return self.spec.episode_limit + 1

    def init(self, key: Key[Array, ""]) -> Learner:
        key_agent, key_mixer = jax.random.split(key)
        spec, config = self.spec, self.config
        networks = Networks(
            Agent(view_size(spec), spec.num_actions, config.width, key=key_agent),
            Mixer(spec.num_agents, spec.state_size, config, key=key_mixer),
        )
        zero = jnp.zeros((), jnp.int32)
        return Learner(
            networks=networks,
            target=networks,
            optimizer=self.optimizer.init(cast(Any, networks)),
            replay=self._empty_replay(),
            transitions=zero,
            copied=zero,
            nonfinite_in_a_row=zero,
        )

    def _empty_replay(self) -> EpisodeReplay:
        spec, agents = self.spec, self.spec.num_agents
        row = Stored(
            observation=jnp.zeros((agents, spec.observation_size)),
            legal=jnp.zeros((agents, spec.num_actions), bool),
            state=jnp.zeros(spec.state_size),
            action=jnp.zeros(agents, jnp.int32),
            reward=jnp.zeros(()),
            is_terminal=jnp.zeros((), bool),
        )
        # An episode has one row more than transitions; only very short ones would need more room.
        of_budget = self.steps + self.steps // 4 + self.config.num_envs * self.rows
        rows = min(self.config.capacity * self.rows, of_budget)
        return empty(row, episodes=self.config.capacity, rows=rows)

    def begin(self, num_envs: int) -> Memory:
        batch = (num_envs, self.spec.num_agents)
        return Memory(jnp.full(batch, NO_ACTION, jnp.int32), jnp.zeros((*batch, self.config.width)))

    def epsilon(self, transitions: Int[Array, ""]) -> Float[Array, ""]:
        """The share of random actions."""
        config = self.config
        done = jnp.minimum(transitions / config.epsilon_steps, 1.0)
        return config.epsilon_start + done * (config.epsilon_end - config.epsilon_start)

    def act(
        self, state: Learner, carry: Memory, step: TimeStep, key: Key[Array, ""], *, greedy: bool
    ) -> Decision:
        """The action of highest value; unless `greedy`, each agent now and then a random one."""
        executor = self.executor(state)
        agents = jnp.broadcast_to(jnp.arange(self.spec.num_agents), step.alive.shape)
        log_probs, hidden = self._decide(
            executor, carry, step.observation, step.legal, step.is_first, agents
        )
        keys = agent_keys(key, *step.alive.shape)
        action = jnp.argmax(log_probs, axis=-1) if greedy else sample_each(log_probs, keys)
        return Decision(action, Memory(action, hidden), ())

    def executor(self, state: Learner) -> Executor:
        return Executor(state.networks.agent, self.epsilon(state.transitions))

    def wake(self, agent: Int[Array, ""]) -> Own:
        return Own(agent, jax.tree.map(lambda leaf: leaf[:, :1], self.begin(1)))

    def act_alone(
        self,
        executor: Executor,
        memory: Own,
        observation: Float[Array, " O"],
        legal: Bool[Array, " A"],
        is_first: Bool[Array, ""],
        key: Key[Array, ""],
        *,
        greedy: bool,
    ) -> Alone:
        agent = memory.agent[None, None]
        log_probs, hidden = self._decide(
            executor,
            memory.memory,
            observation[None, None],
            legal[None, None],
            is_first[None],
            agent,
        )
        alone = log_probs[0, 0]
        action = jnp.argmax(alone) if greedy else sample_index(alone, key)
        return Alone(action, alone, Own(memory.agent, Memory(action[None, None], hidden)))

    def _decide(
        self,
        executor: Executor,
        memory: Memory,
        observation: Float[Array, "B N O"],
        legal: Bool[Array, "B N A"],
        is_first: Bool[Array, " B"],
        agent: Int[Array, "B N"],
    ) -> tuple[Float[Array, "B N A"], Float[Array, "B N W"]]:
        """Log-probabilities of all actions, and the hidden states after the row."""
        last_action = unless_first(memory.last_action, is_first)
        view = agent_view(self.spec, observation, last_action, agent)
        starts = jnp.broadcast_to(is_first[:, None], agent.shape)
        values, hidden = executor.agent(view[None], starts[None], memory.hidden)
        return exploring(values[0], legal, executor.epsilon), hidden

    def update(
        self, state: Learner, data: Experience, key: Key[Array, ""]
    ) -> tuple[Learner, Metrics]:
        """Store the episodes; learn once the replay holds a batch; now and then copy the target."""
        config, step = self.config, data.rows.step
        length = 1 + jnp.argmax(step.is_last, axis=0).astype(jnp.int32)
        row = Stored(
            step.observation, step.legal, step.state, data.rows.action, step.reward,
            step.is_terminal,
        )  # fmt: skip
        state = state._replace(
            replay=add(state.replay, row, length),
            transitions=state.transitions + jnp.sum(length - 1),
        )
        has_batch = state.replay.size >= config.batch
        now = Trained(state.networks, state.optimizer, state.nonfinite_in_a_row)

        def learn() -> tuple[Trained, dict[str, Array]]:
            keys = jax.random.split(key, config.updates)
            return jax.lax.scan(lambda now, key: self._step(now, state, key), now, keys)

        # The replay stays outside: it does not change here and is too large to be passed along.
        shapes = jax.eval_shape(learn)[1]
        unmeasured = jax.tree.map(lambda leaf: jnp.full(leaf.shape, jnp.nan), shapes)
        after, metrics = jax.lax.cond(has_batch, learn, lambda: (now, unmeasured))
        seen = state.replay.episodes
        is_due = has_batch & (seen - state.copied >= config.target_every)
        target = jax.tree.map(
            lambda new, old: jnp.where(is_due, new, old), after.networks, state.target
        )
        metrics = {
            **jax.tree.map(jnp.mean, metrics),
            "rollout/epsilon": self.epsilon(state.transitions),
            "rollout/length": jnp.mean(length - 1.0),
            "nonfinite_in_a_row": after.nonfinite_in_a_row.astype(jnp.float32),
        }
        copied = jnp.where(is_due, seen, state.copied)
        return state._replace(**after._asdict(), target=target, copied=copied), metrics

    def _step(
        self, now: Trained, state: Learner, key: Key[Array, ""]
    ) -> tuple[Trained, dict[str, Array]]:
        """One step on a batch of episodes."""
        batch = sample(state.replay, key, episodes=self.config.batch, rows=self.rows)
        gradient, metrics = jax.grad(self.loss, has_aux=True)(now.networks, state.target, *batch)
        networks, optimizer, report = apply_update(
            self.optimizer, gradient, now.optimizer, now.networks
        )
        bad = jnp.where(report.finite, 0, now.nonfinite_in_a_row + 1)
        metrics |= {
            "critic/gradient_norm": report.gradient_norm,
            "critic/update_ratio": report.update_ratio,
        }
        return Trained(networks, optimizer, bad), metrics

    def loss(
        self, networks: Networks, target: Networks, rows: Stored, length: Int[Array, " B"]
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        """Half the squared distance of the team's values to their returns, over transitions."""
        time = jnp.arange(rows.reward.shape[0])[:, None]
        # The rows after an episode's end belong to other episodes.
        decides = time[:-1] < length[None] - 1
        values, slow_values = self.values(networks.agent, rows), self.values(target.agent, rows)
        best = jnp.argmax(jnp.where(rows.legal, values, ILLEGAL_LOGIT), axis=-1)
        goal = target.mixer(_at(slow_values, best), rows.state)
        returns = jax.lax.stop_gradient(self.returns(goal, rows, decides))
        team = networks.mixer(_at(values, rows.action)[:-1], rows.state[:-1])
        error = team - returns
        loss = masked_mean(0.5 * error**2, decides)
        return loss, {
            "loss/critic": loss,
            "critic/error": masked_mean(jnp.abs(error), decides),
            "critic/value": masked_mean(team, decides),
            "critic/target": masked_mean(returns, decides),
        }

    def values(self, agent: Agent, rows: Stored) -> Float[Array, "T B N A"]:
        """Of all actions, along episodes from their first rows."""
        shape = rows.action.shape
        before = jnp.full((1, *shape[1:]), NO_ACTION, rows.action.dtype)
        last_action = jnp.concatenate([before, rows.action[:-1]])
        starts = jnp.broadcast_to(jnp.arange(shape[0])[:, None, None] == 0, shape)
        view = team_views(self.spec, rows.observation, last_action)
        return agent(view, starts, jnp.zeros((*shape[1:], self.config.width)))[0]

    def returns(
        self, value: Float[Array, "T B"], rows: Stored, decides: Bool[Array, "T-1 B"]
    ) -> Float[Array, "T-1 B"]:
        """λ-returns under the values of greedy joint actions; not corrected for exploration."""
        cont = jnp.where(rows.is_terminal[1:], 0.0, self.config.discount)
        # Past the end nothing is gained: what is there must not flow back.
        reward = jnp.where(decides, rows.reward[1:], value[:-1])
        cont = jnp.where(decides, cont, 0.0)
        return gae(reward, cont, value, self.config.trace) + value[:-1]

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """Of agent and mixer together."""
        config = self.config
        return clipped_adam(config.rate, eps=config.adam_eps, max_gradient=config.max_gradient)


def exploring(
    values: Float[Array, "*b A"], legal: Bool[Array, "*b A"], epsilon: Float[Array, ""]
) -> Float[Array, "*b A"]:
    """Log-probabilities of taking the best legal action, but with `epsilon` any legal one."""
    best = jnp.argmax(jnp.where(legal, values, ILLEGAL_LOGIT), axis=-1)
    chosen = jax.nn.one_hot(best, values.shape[-1])
    # A hair more on the best one, so that it is the most probable even where all are random.
    share = jnp.minimum(epsilon, 1 - 1e-6)
    uniform = legal / jnp.maximum(jnp.sum(legal, axis=-1, keepdims=True), 1)
    probs = (1 - share) * chosen + share * uniform
    return jnp.where(legal, jnp.log(jnp.maximum(probs, 1e-30)), ILLEGAL_LOGIT)


def _at(values: Float[Array, "*b A"], action: Int[Array, "*b"]) -> Float[Array, "*b"]:
    return jnp.take_along_axis(values, action[..., None], axis=-1)[..., 0]
