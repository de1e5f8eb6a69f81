"""MA-JEPA as an algorithm: how it acts, and one learner call in the paper's order.

A learner call trains the world model on one view of the replay, then reconstructs the other view
with the new parameters, imagines from it, and takes five steps of actor and critic in turn.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from . import diagnostics
from .algorithm import (
    Alone,
    Cadence,
    Decision,
    Device,
    Experience,
    Metrics,
    Row,
    Updater,
    agent_keys,
    without_replay,
)
from .config import MajepaConfig
from .diagnostics import Epoch, Totals
from .envs.base import EnvSpec, TimeStep
from .imagine import imagine
from .nn import gpu
from .nn.dists import sample_each
from .nn.layers import cast
from .nn.optim import Moments, Optimizer, apply_update, follow, is_finite
from .nn.transformer import History, apart
from .packing import if_wanted, most
from .policy.actor import Actor
from .policy.condense import condense_actor, condense_critic
from .policy.critic import Critic
from .policy.ppo import (
    Frozen,
    ReplayTargets,
    actor_loss,
    critic_loss,
    freeze,
    replay_targets,
)
from .replay import Record, Replay, Sequence, insert, make_replay, num_starts, sample, write_back
from .world_model.condense import Basis, condense_joint, condense_local
from .world_model.joint import JointModel
from .world_model.local import Dynamics, Encoder, LocalModel, Posterior, feature
from .world_model.losses import model_loss
from .world_model.strands import Tracks
from .world_model.tokens import one_hot_vec, tokens_of
from .world_model.unroll import (
    Past,
    Roots,
    draw_on_tracks,
    rebuild_context,
    reinfer,
    roots_of,
)


class Params(NamedTuple):
    """The four groups of parameters, each with an optimizer of its own."""

    local: LocalModel
    joint: JointModel
    actor: Actor
    critic: Critic


class Optimizers(NamedTuple):
    """The state of each group's optimizer."""

    local: Moments
    joint: Moments
    actor: Moments
    critic: Moments


class Learner(NamedTuple):
    """Everything that learning changes."""

    params: Params
    target_encoder: Encoder
    optimizers: Optimizers
    replay: Replay
    transitions: Int[Array, ""]
    """Real transitions that entered the replay."""
    due: Float[Array, ""]
    """Learner calls earned by new transitions and not made yet."""
    calls: Int[Array, ""]
    nonfinite: Int[Array, ""]
    """Calls in a row in which some step was not finite and was left out."""


class Views(NamedTuple):
    """What a call is given of the replay."""

    model: Sequence
    behaviour: Sequence


class Fresh(NamedTuple):
    """Latents that a call inferred for the learning records of one view."""

    latent: Int[Array, "B L N S"]
    wanted: Bool[Array, ""]
    """Whether they are to be stored."""


class Half(NamedTuple):
    """What a half of a call says beside what it learned."""

    latent: Int[Array, "B L N S"]
    """Inferred anew for the learning records of its view."""
    metrics: dict[str, Float[Array, ""]]
    """Zero for a run that did not want it."""


class Bad(NamedTuple):
    """Calls in a row in which some step was left out: before a call, and after its first half."""

    before: Int[Array, ""]
    now: Int[Array, ""]


class Executor(eqx.Module):
    """All that an agent needs to act: nothing of the joint model, nothing of the critic."""

    encoder: Encoder
    dynamics: Dynamics
    posterior: Posterior
    actor: Actor


class Memory(NamedTuple):
    """What acting agents remember of their own episode."""

    history: History
    z: Int[Array, "B N S"]
    a: Int[Array, "B N"]
    episode: Int[Array, " B"]


class Majepa:
    """The algorithm for one environment; `steps` bounds how much replay a run can fill."""

    def __init__(self, config: MajepaConfig, spec: EnvSpec, *, steps: int) -> None:
        gpu.kernels_are_off()  # A switch that says neither is refused before anything is begun.
        self.config = config
        self.spec = spec
        self.steps = steps
        rates = config.optimizer
        self.model_optimizer = Optimizer(rates, rates.model_rate)
        self.actor_optimizer = Optimizer(rates, rates.actor_rate)
        self.critic_optimizer = Optimizer(rates, rates.critic_rate)
        # Traced once, though the shapes of their results are asked for apart.
        self._call = jax.jit(self.call)
        self._behaviour_half = jax.jit(self.behaviour_half)
        self._updaters: dict[tuple[bool, Device | None], Updater] = {}

    @property
    def cadence(self) -> Cadence:
        return Cadence(num_envs=self.config.collect.num_envs, rows=1)

    @property
    def timeout_is_terminal(self) -> bool:
        return self.config.collect.timeout_is_terminal

    def init(self, key: Key[Array, ""]) -> Learner:
        params = self.make_params(key)
        return Learner(
            params=params,
            target_encoder=params.local.encoder,
            optimizers=Optimizers(
                local=self.model_optimizer.init(params.local),
                joint=self.model_optimizer.init(params.joint),
                actor=self.actor_optimizer.init(params.actor),
                critic=self.critic_optimizer.init(params.critic),
            ),
            replay=self.make_replay(),
            transitions=jnp.zeros((), jnp.int32),
            due=jnp.zeros(()),
            calls=jnp.zeros((), jnp.int32),
            nonfinite=jnp.zeros((), jnp.int32),
        )

    def make_params(self, key: Key[Array, ""]) -> Params:
        config, spec = self.config, self.spec
        local, actions = config.local, spec.num_actions
        key_local, key_joint, key_actor, key_critic = jax.random.split(key, 4)
        return Params(
            local=LocalModel(spec.observation_size, actions, local, key=key_local),
            joint=JointModel(
                local.feature, actions, local.embedding, config.joint, config.bins, key=key_joint
            ),
            actor=Actor(local.feature, actions, config.policy, key=key_actor),
            critic=Critic(local.feature, config.policy, config.bins, key=key_critic),
        )

    def make_replay(self) -> Replay:
        config = self.config
        # A transition brings one row, and at most one more: the first of the next episode.
        rows = math.ceil(2 * self.steps / config.collect.num_envs) + 1
        return make_replay(
            self.spec,
            config.replay,
            num_envs=config.collect.num_envs,
            context=config.context,
            latents=config.local.latents,
            classes=config.local.classes,
            rows=max(rows, config.context + config.replay.learning + 1),
        )

    def begin(self, num_envs: int) -> Memory:
        return self._begin(num_envs, self.spec.num_agents)

    def _begin(self, num_envs: int, agents: int) -> Memory:
        local = self.config.local
        shapes = jax.eval_shape(self.make_params, jax.random.key(0))
        history = shapes.local.dynamics.transformer.empty(
            num_envs, agents, jnp.dtype(self.config.precision)
        )
        return Memory(
            history=history,
            z=jnp.zeros((num_envs, agents, local.latents), jnp.int32),
            a=jnp.zeros((num_envs, agents), jnp.int32),
            episode=jnp.zeros(num_envs, jnp.int32),
        )

    def executor(self, learner: Learner) -> Executor:
        local = learner.params.local
        return Executor(local.encoder, local.dynamics, local.posterior, learner.params.actor)

    def act(
        self,
        state: Learner,
        carry: Memory,
        step: TimeStep,
        key: Key[Array, ""],
        *,
        greedy: bool,
    ) -> Decision:
        """Each agent from its own observation, memory and legal actions; keys are its own too."""
        executor = cast(self.executor(state), jnp.dtype(self.config.precision))
        keys = agent_keys(key, *step.alive.shape)
        action, _, memory = act(
            executor, carry, step.observation, step.legal, step.is_first, keys, greedy=greedy
        )
        return Decision(action, memory, memory.z)

    def wake(self, agent: Int[Array, ""]) -> Memory:
        return self._begin(1, 1)

    def act_alone(
        self,
        executor: Executor,
        memory: Memory,
        observation: Float[Array, " O"],
        legal: Bool[Array, " A"],
        is_first: Bool[Array, ""],
        key: Key[Array, ""],
        *,
        greedy: bool,
    ) -> Alone:
        executor = cast(executor, jnp.dtype(self.config.precision))
        action, log_probs, memory = act(
            executor, memory, observation[None, None], legal[None, None], is_first[None],
            key[None, None], greedy=greedy,
        )  # fmt: skip
        return Alone(action[0, 0], log_probs[0, 0], memory)

    def update(
        self, state: Learner, data: Experience, key: Key[Array, ""]
    ) -> tuple[Learner, Metrics]:
        """Insert new rows, then make the learner calls they earned; metrics are their means."""
        replay, enough, rows = self.take_in(state.replay, data.rows)
        state, calls = self.owe(state._replace(replay=replay), data, enough)

        def call(number: Int[Array, ""], carry: tuple[Learner, Totals]) -> tuple[Learner, Totals]:
            learner, totals = carry
            learner, counted = self._call(learner, jax.random.fold_in(key, number), number < calls)
            return learner, jax.tree.map(jnp.add, totals, counted)

        shapes = jax.eval_shape(self._call, state, key, calls > 0)[1]
        totals = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        state, totals = jax.lax.fori_loop(0, most(calls), call, (state, totals))
        return state, self.report(state, totals, calls, rows)

    def take_in(self, replay: Replay, rows: Row) -> tuple[Replay, Bool[Array, ""], Int[Array, ""]]:
        """A replay with new rows, whether it has enough to sample, and how many rows it has."""
        config = self.config
        replay = insert(replay, rows, rows.kept)
        enough = num_starts(replay, config.context, config.replay.learning) > 0
        return replay, enough, jnp.minimum(replay.inserted, replay.rows)

    def owe(
        self, state: Learner, data: Experience, enough: Bool[Array, ""]
    ) -> tuple[Learner, Int[Array, ""]]:
        """Count new transitions, and the calls that they earn once there is enough to sample."""
        collect = self.config.collect
        new = jnp.sum(~data.rows.step.is_first, dtype=jnp.int32)
        transitions = state.transitions + new
        earning = (transitions > collect.prefill) & enough
        due = state.due + jnp.where(earning, new * self.config.calls_per_transition, 0.0)
        calls = jnp.floor(due).astype(jnp.int32)
        return state._replace(transitions=transitions, due=due - calls), calls

    def report(
        self, state: Learner, totals: Totals, calls: Int[Array, ""], rows: Int[Array, ""]
    ) -> Metrics:
        return diagnostics.mean(totals, calls) | {
            name: count.astype(jnp.float32) for name, count in self.counts(state, rows).items()
        }

    def counts(self, state: Learner, rows: Any) -> dict[str, Any]:
        """What a learner has counted, and so many rows of its replay, by the names of metrics."""
        return {
            "learner/calls": state.calls,
            "learner/replay_rows": rows,
            "nonfinite_in_a_row": state.nonfinite,
        }

    def call(
        self, learner: Learner, key: Key[Array, ""], wanted: Bool[Array, ""]
    ) -> tuple[Learner, Totals]:
        """One learner call, in the paper's order; one that is not wanted changes nothing."""
        replay = learner.replay
        views = self.draw(replay, key)
        learner, fresh, totals = self.learn(without_replay(learner), views, key, wanted)
        return learner._replace(replay=self.store(replay, views, fresh)), totals

    def draw(self, replay: Replay, key: Key[Array, ""]) -> Views:
        """What a call learns from."""
        config = self.config
        key_model, key_behaviour, _, _ = jax.random.split(key, 4)
        return Views(
            sample(replay, config.replay, config.context, key_model),
            sample(replay, config.replay, config.context, key_behaviour),
        )

    def store(self, replay: Replay, views: Views, fresh: Fresh) -> Replay:
        """Latents that a call inferred anew, in the place of those that it was given."""
        where = self.config.replay.write_back
        if where == "none":
            return replay
        view = views.model if where == "model" else views.behaviour
        return write_back(replay, view, fresh.latent, self.config.context, fresh.wanted)

    def learn(
        self, before: Learner, views: Views, key: Key[Array, ""], wanted: Bool[Array, ""]
    ) -> tuple[Learner, Fresh, Totals]:
        """A call of a learner without its replay."""
        key_model, key_behaviour = keys_of_halves(key)
        learner, model, active = self.model_half(before, views.model, key_model, wanted)
        params, optimizers, nonfinite, behaviour = jax.lax.cond(
            most(active), self._behaviour_half, self._leave_behaviour,
            learner.params, learner.optimizers, Bad(before.nonfinite, learner.nonfinite),
            views.behaviour, key_behaviour, active,
        )  # fmt: skip
        # The world model's come out of the branch as they went in, but as copies.
        learner = learner._replace(
            params=Params(*learner.params[:2], *params[2:]),
            optimizers=Optimizers(*learner.optimizers[:2], *optimizers[2:]),
            nonfinite=nonfinite,
        )
        is_model = self.config.replay.write_back == "model"
        fresh = Fresh(model.latent, wanted) if is_model else Fresh(behaviour.latent, active)
        return learner, fresh, Totals(model.metrics, behaviour.metrics, active.astype(jnp.float32))

    def updater(self, *, together: bool = False, host: Device | None = None) -> Updater:
        from .call_by_call import CallByCall

        if (together, host) not in self._updaters:
            self._updaters[together, host] = CallByCall(self, together=together, host=host)
        return self._updaters[together, host]

    def model_half(
        self,
        before: Learner,
        view: Sequence,
        key: Key[Array, ""],
        wanted: Bool[Array, ""],
        past: Past | None = None,
    ) -> tuple[Learner, Half, Bool[Array, ""]]:
        """A call up to where the world model has learned; and whether the behaviour is to follow.

        Nothing is asked of the learner that belongs to the behaviour, or to the replay. `past`:
        what `recall` found for the view. A half that is not wanted changes nothing.
        """
        learner, fresh, metrics = self.train_model(before, view, key, past, wanted)
        metrics = if_wanted(wanted, metrics, jax.tree.map(jnp.zeros_like, metrics))
        active = wanted & (learner.calls >= self.config.collect.model_only_calls)
        return learner._replace(calls=learner.calls + wanted), Half(fresh, metrics), active

    def behaviour_half(
        self,
        params: Params,
        optimizers: Optimizers,
        bad: Bad,
        view: Sequence,
        key: Key[Array, ""],
        active: Bool[Array, ""],
        roots: Roots | None = None,
    ) -> tuple[Params, Optimizers, Int[Array, ""], Half]:
        """The rest of a call; `roots`: what `find_roots` found for the view."""
        new, states, refreshed, metrics = self.train_behaviour(params, optimizers, view, key, roots)
        # Shares of epochs, up to rounding.
        taken = jnp.minimum(metrics["finite/actor"], metrics["finite/critic"])
        all_taken = taken > 1 - 0.5 / self.config.policy.epochs
        nothing = jax.tree.map(jnp.zeros_like, metrics)
        own, metrics = if_wanted(
            active, ((new[2:], states[2:]), metrics), ((params[2:], optimizers[2:]), nothing)
        )
        nonfinite = jnp.where(active & ~all_taken, bad.before + 1, bad.now)
        return (
            Params(*params[:2], *own[0]),
            Optimizers(*optimizers[:2], *own[1]),
            nonfinite,
            Half(refreshed, metrics),
        )

    def _leave_behaviour(
        self,
        params: Params,
        optimizers: Optimizers,
        bad: Bad,
        view: Sequence,
        key: Key[Array, ""],
        active: Bool[Array, ""],
    ) -> tuple[Params, Optimizers, Int[Array, ""], Half]:
        """What `behaviour_half` returns, where it does not run yet."""
        given = (params, optimizers, bad, view, key, active)
        shapes = jax.eval_shape(self._behaviour_half, *given)[3].metrics
        metrics = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        latent = view.record.latent[:, self.config.context :]
        return params, optimizers, bad.now, Half(latent, metrics)

    def train_model(
        self,
        learner: Learner,
        view: Sequence,
        key: Key[Array, ""],
        past: Past | None = None,
        wanted: Bool[Array, ""] | bool = True,
    ) -> tuple[Learner, Int[Array, "B L N S"], dict[str, Array]]:
        """One step of both model groups and of the target encoder, if it is finite and wanted; and
        the fresh latents."""
        params, optimizers = learner.params, learner.optimizers
        objective = jax.value_and_grad(model_loss, has_aux=True)
        (total, loss), (local_gradient, joint_gradient) = objective(
            (params.local, params.joint), learner.target_encoder, view, self.config, key, past
        )
        good = jnp.isfinite(total) & is_finite(local_gradient) & is_finite(joint_gradient)
        taken = good & wanted
        local, local_state, local_report = apply_update(
            self.model_optimizer, local_gradient, optimizers.local, params.local, taken
        )
        joint, joint_state, joint_report = apply_update(
            self.model_optimizer, joint_gradient, optimizers.joint, params.joint, taken
        )
        followed = follow(learner.target_encoder, local.encoder, self.config.local.ema)
        learner = learner._replace(
            params=params._replace(local=local, joint=joint),
            optimizers=optimizers._replace(local=local_state, joint=joint_state),
            target_encoder=jax.tree.map(
                lambda new, old: jnp.where(taken, new, old), followed, learner.target_encoder
            ),
            nonfinite=jnp.where(
                wanted, jnp.where(good, 0, learner.nonfinite + 1), learner.nonfinite
            ),
        )
        fresh = jnp.where(good, loss.latent, view.record.latent[:, self.config.context :])
        return learner, fresh, diagnostics.of_model(total, loss, local_report, joint_report)

    def recall(self, local: LocalModel, joint: JointModel, view: Sequence, begin: int) -> Past:
        """What `train_model` rebuilds of a view of which records from `begin` on are needed."""
        local, joint = apart(cast((local, joint), jnp.dtype(self.config.precision)))
        tokens = tokens_of(view, view.record.latent)
        return rebuild_context(local, joint, view, tokens, self.config.context, begin)

    def draw_latents(
        self, local: LocalModel, view: Sequence, key: Key[Array, ""], tracks: Tracks
    ) -> Int[Array, "B T N S"]:
        """What `train_behaviour` draws for a view whose needed records lie on tracks."""
        local = apart(cast(local, jnp.dtype(self.config.precision)))
        key_infer, _ = jax.random.split(key)
        return draw_on_tracks(condense_local(local, Basis(local.dynamics)), view, key_infer, tracks)

    def find_roots(
        self,
        local: LocalModel,
        joint: JointModel,
        view: Sequence,
        latent: Int[Array, "B T N S"],
        begin: int,
    ) -> Roots:
        """What `train_behaviour` imagines from: with latents that `draw_latents` found for a view
        of which records from `begin` on are needed."""
        local, joint = apart(cast((local, joint), jnp.dtype(self.config.precision)))
        basis = Basis(local.dynamics)
        local, joint = condense_local(local, basis), condense_joint(joint, basis)
        return roots_of(local, joint, view, self.config.context, latent, begin)

    def train_behaviour(
        self,
        params: Params,
        optimizers: Optimizers,
        view: Sequence,
        key: Key[Array, ""],
        roots: Roots | None = None,
    ) -> tuple[Params, Optimizers, Int[Array, "B L N S"], dict[str, Array]]:
        """Reconstruct, imagine, freeze, then actor and critic in turn on the frozen batch."""
        config = self.config
        dtype = jnp.dtype(config.precision)
        local, joint = apart(cast(params[:2], dtype))
        # Nothing here has a gradient in the world model, so that all states may be condensed.
        basis = Basis(local.dynamics)
        local, joint = condense_local(local, basis), condense_joint(joint, basis)
        actor = condense_actor(cast(params.actor, dtype), basis)
        target_critic = condense_critic(cast(params.critic, dtype), basis)
        key_infer, key_imagine = jax.random.split(key)
        if roots is None:
            roots = reinfer(local, joint, view, config.context, key_infer)
        record: Record = jax.tree.map(lambda leaf: leaf[:, config.context :], view.record)
        imagined = imagine(
            local, joint, actor, roots, record, config, self.spec.noop_index, key_imagine
        )
        frozen = freeze(imagined, target_critic, config)
        replayed = replay_targets(record, frozen.returns[0], config)
        # From here on the target critic would be copied from the new critic: it is read no more.
        params, optimizers, epochs = self.improve(params, optimizers, frozen, replayed, basis)
        metrics = diagnostics.of_behaviour(imagined, frozen, replayed, epochs)
        return params, optimizers, roots.z, metrics

    def improve(
        self,
        params: Params,
        optimizers: Optimizers,
        frozen: Frozen,
        replayed: ReplayTargets,
        basis: Basis,
    ) -> tuple[Params, Optimizers, Epoch]:
        """Interleaved steps of actor and critic on the whole frozen batch of condensed states."""
        config, dtype = self.config, jnp.dtype(self.config.precision)

        def loss_of_actor(actor: Actor, old: Array, is_first: Array) -> tuple:
            thin = condense_actor(cast(actor, dtype), basis)
            return actor_loss(thin, frozen, old, is_first, config)

        def loss_of_critic(critic: Critic) -> tuple:
            thin = condense_critic(cast(critic, dtype), basis)
            return critic_loss(thin, frozen, replayed, config)

        def epoch(carry: tuple, number: Int[Array, ""]) -> tuple[tuple, Epoch]:
            params, optimizers, old = carry
            (loss_pi, (old, pi)), gradient = jax.value_and_grad(loss_of_actor, has_aux=True)(
                params.actor, old, number == 0
            )
            actor, actor_state, actor_report = apply_update(
                self.actor_optimizer, gradient, optimizers.actor, params.actor,
                jnp.isfinite(loss_pi),
            )  # fmt: skip
            (loss_v, v), gradient = jax.value_and_grad(loss_of_critic, has_aux=True)(params.critic)
            critic, critic_state, critic_report = apply_update(
                self.critic_optimizer, gradient, optimizers.critic, params.critic,
                jnp.isfinite(loss_v),
            )  # fmt: skip
            params = params._replace(actor=actor, critic=critic)
            optimizers = optimizers._replace(actor=actor_state, critic=critic_state)
            report = Epoch(loss_pi, pi, v[0], v[1], actor_report, critic_report)
            return (params, optimizers, old), report

        old = jnp.zeros(frozen.action.shape)
        (params, optimizers, _), epochs = jax.lax.scan(
            epoch, (params, optimizers, old), jnp.arange(config.policy.epochs)
        )
        return params, optimizers, epochs


def keys_of_halves(key: Key[Array, ""]) -> tuple[Key[Array, ""], Key[Array, ""]]:
    """Of a call's world model and behaviour; `draw` has two more."""
    _, _, key_model, key_behaviour = jax.random.split(key, 4)
    return key_model, key_behaviour


def act(
    executor: Executor,
    memory: Memory,
    observation: Float[Array, "B N O"],
    legal: Bool[Array, "B N A"],
    is_first: Bool[Array, " B"],
    keys: Key[Array, "B N"],
    *,
    greedy: bool,
) -> tuple[Int[Array, "B N"], Float[Array, "B N A"], Memory]:
    """One decentralised step of every agent: infer the state, then choose a legal action.

    Also returns the log-probabilities of all actions, and what the agents remember.
    """
    episode = memory.episode + is_first
    token = executor.dynamics.embed(
        one_hot_vec(memory.z, executor.posterior.classes),
        jax.nn.one_hot(memory.a, legal.shape[-1]),
        jnp.broadcast_to(is_first[:, None], memory.a.shape),
    )
    h, history = executor.dynamics.history(token[:, :, None], episode[:, None], memory.history)
    h = h[:, :, 0]
    q = executor.posterior(h, executor.encoder(observation))
    noise = jax.vmap(jax.vmap(jax.random.split))(keys)
    z = sample_each(q, noise[..., 0])
    s = feature(h, jax.nn.one_hot(z, executor.posterior.classes))
    log_probs = executor.actor(s, legal)
    action = jnp.argmax(log_probs, axis=-1) if greedy else sample_each(log_probs, noise[..., 1])
    history = history.last(executor.dynamics.transformer.window - 1)
    return action, log_probs, Memory(history, z, action, episode)
