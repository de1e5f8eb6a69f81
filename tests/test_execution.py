"""Execution: every agent on its own, with nothing but what a deployed agent has."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn, jit
from world_model.plain import run_history

from majepa.agent import Executor, Majepa, Memory, act
from majepa.algorithm import agent_keys
from majepa.config import DEBUG
from majepa.envs import make_env
from majepa.envs.base import TimeStep
from majepa.nn.layers import cast
from majepa.world_model.tokens import Tokens

ENV = make_env("sim:3m")
SPEC = ENV.spec
ENVS, STEPS = 2, SPEC.episode_limit + 8
ALGORITHM = Majepa(DEBUG, SPEC, steps=100)
WINDOW = DEBUG.local.window


@functools.cache
def learner():
    """Drawn parameters; of the rest, which agents do not need, only the shapes."""
    params = drawn(lambda: ALGORITHM.make_params(jax.random.key(0)))
    shapes = jax.eval_shape(ALGORITHM.init, jax.random.key(0))
    # The policy begins near uniform: sharpen it, so that actions depend on what agents know.
    last = params.actor.mlp.linears[-1]
    params = jax.tree.map(lambda leaf: 5 * leaf if leaf is last.weight else leaf, params)
    return shapes._replace(params=params)


def executor() -> Executor:
    return ALGORITHM.executor(learner())


class Trace(NamedTuple):
    """What agents did and knew at each step, time first."""

    action: Any
    z: Any
    keys: Any
    """`[T, L, B, N, H, K]`: those of the newest record; the layers above the first know h."""
    values: Any


def remember(action, memory: Memory) -> Trace:
    keys, values = (
        jnp.stack([leaf[:, :, -1] for leaf in layers]) for layers in memory.history[:2]
    )  # fmt: skip
    return Trace(action, memory.z, keys, values)


@functools.partial(jit, static_argnames="greedy")
def live(params, steps: TimeStep, key, *, greedy=False) -> Trace:
    """A team through given rows `[T, B, ...]`."""
    state = learner()._replace(params=params)

    def step(memory, row):
        now, key = row
        choice = ALGORITHM.act(state, memory, now, key, greedy=greedy)
        return choice.carry, remember(choice.action, choice.carry)

    keys = jax.random.split(key, steps.reward.shape[0])
    return jax.lax.scan(step, ALGORITHM.begin(steps.reward.shape[1]), (steps, keys))[1]


@jit
def live_alone(agent, observation, legal, is_first, keys) -> Trace:
    """One agent that was never in a team: `[T, O]`, `[T, A]`, and its own keys `[T]`."""
    memory = Memory(
        history=agent.dynamics.transformer.empty(1, 1),
        z=jnp.zeros((1, 1, DEBUG.local.latents), jnp.int32),
        a=jnp.zeros((1, 1), jnp.int32),
        episode=jnp.zeros(1, jnp.int32),
    )

    def step(memory, row):
        observation, legal, is_first, key = (leaf[None] for leaf in row)
        action, _, memory = act(
            agent, memory, observation[None], legal[None], is_first, key[None], greedy=False
        )
        return memory, remember(action, memory)

    trace = jax.lax.scan(step, memory, (observation, legal, is_first, keys))[1]
    return trace


def make_rows(seed: int = 0) -> TimeStep:
    """Random rows, with an episode that begins in the middle."""
    rng = np.random.default_rng(seed)
    lead = (STEPS, ENVS, SPEC.num_agents)
    legal = rng.random((*lead, SPEC.num_actions)) < 0.6
    legal[..., 0] |= ~legal.any(-1)
    is_first = np.zeros(lead[:2], bool)
    is_first[0] = True
    is_first[5, 1] = is_first[40, 0] = True
    return TimeStep(
        observation=rng.normal(size=(*lead, SPEC.observation_size)).astype(np.float32),
        legal=legal,
        alive=rng.random(lead) < 0.7,
        agent_state=rng.normal(size=(*lead, SPEC.agent_state_size)).astype(np.float32),
        state=rng.normal(size=(*lead[:2], SPEC.state_size)).astype(np.float32),
        reward=rng.normal(size=lead[:2]).astype(np.float32),
        is_first=is_first,
        is_last=np.zeros(lead[:2], bool),
        is_terminal=np.zeros(lead[:2], bool),
        won=np.zeros(lead[:2], bool),
        info={},
    )


@jit
def replay(agent, z, a, is_first, observation):
    """What the agents knew, from what a replay holds and all at once; batch first."""
    tokens = Tokens(
        z_before=jnp.concatenate([jnp.zeros_like(z[:, :1]), z[:, :-1]], axis=1),
        a_before=jnp.concatenate([jnp.zeros_like(a[:, :1]), a[:, :-1]], axis=1),
        is_first=is_first,
        episode=jnp.cumsum(is_first, axis=1, dtype=jnp.int32),
    )
    past = agent.dynamics.transformer.empty(ENVS, SPEC.num_agents)
    h, history = run_history(
        agent.dynamics, tokens, past, classes=DEBUG.local.classes, num_actions=SPEC.num_actions
    )
    q = agent.posterior(h, agent.encoder(observation))
    one_hot = jax.nn.one_hot(z, DEBUG.local.classes).reshape(*z.shape[:-1], -1)
    return history, q, agent.actor.mlp(jnp.concatenate([h, one_hot], axis=-1))


def replay_of(rows: TimeStep, trace: Trace):
    """The history, and time first again: posteriors and logits of all actions."""
    given = (trace.z, trace.action, rows.is_first, rows.observation)
    given = [leaf.swapaxes(0, 1) for leaf in given]
    history, *found = jax.device_get(replay(executor(), *given))
    return history, *(leaf.swapaxes(0, 1) for leaf in found)


def of_agent(trace: Trace, agent: int) -> Trace:
    return Trace(
        trace.action[:, :, agent],
        trace.z[:, :, agent],
        trace.keys[:, :, :, agent],
        trace.values[:, :, :, agent],
    )


def assert_same(one: Trace, other: Trace) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


class TestDecentralisation:
    @pytest.mark.parametrize("field", ["observation", "legal", "alive"])
    def test_others_have_no_influence(self, field, key):
        rows, others = make_rows(), make_rows(1)
        params = learner().params
        trace = jax.device_get(live(params, rows, key))
        for agent in range(SPEC.num_agents):
            changed = getattr(others, field).copy()
            changed[:, :, agent] = getattr(rows, field)[:, :, agent]
            again = jax.device_get(live(params, rows._replace(**{field: changed}), key))
            assert_same(of_agent(again, agent), of_agent(trace, agent))
            rest = [i for i in range(SPEC.num_agents) if i != agent]
            # The change is one that the others do notice, unless it is not theirs to see.
            moved = [np.any(again.action[:, :, i] != trace.action[:, :, i]) for i in rest]
            assert all(moved) == any(moved) == (field != "alive")

    def test_training_views_have_no_influence(self, key):
        rows, others = make_rows(), make_rows(1)
        params = learner().params
        hidden = {
            name: getattr(others, name) for name in ("alive", "agent_state", "state", "reward")
        }
        ended = {name: ~getattr(rows, name) for name in ("is_last", "is_terminal", "won")}
        again = live(params, rows._replace(**hidden, **ended), key)
        assert_same(again, live(params, rows, key))

    def test_other_environments_have_no_influence(self, key):
        rows, others = make_rows(), make_rows(1)
        mixed = jax.tree.map(lambda a, b: np.stack([a[:, 0], b[:, 1]], axis=1), rows, others)
        traces = [live(learner().params, one, key) for one in (rows, mixed)]
        one, other = (Trace(t.action[:, 0], t.z[:, 0], t.keys[:, :, 0], t.values[:, :, 0])
                      for t in map(jax.device_get, traces))  # fmt: skip
        assert_same(one, other)

    def test_a_new_episode_begins_with_nothing(self, key):
        """What another episode left behind in memory has no influence."""
        begin = 5
        rows, others = make_rows(), make_rows(1)
        other = jax.tree.map(lambda a, b: np.concatenate([b[:begin], a[begin:]]), rows, others)
        traces = jax.device_get([live(learner().params, one, key) for one in (rows, other)])
        kept, left = ([trace.action[:, 1], trace.z[:, 1], trace.keys[:, :, 1]] for trace in traces)
        for one, two in zip(kept, left, strict=True):
            np.testing.assert_array_equal(one[begin:], two[begin:])
            assert np.any(one[:begin] != two[:begin])
        # The other environment was in the middle of its episode.
        assert np.any(traces[0].keys[begin, :, 0] != traces[1].keys[begin, :, 0])

    def test_a_deployed_agent_does_what_it_did_in_the_team(self, key):
        rows = make_rows()
        team = jax.device_get(live(learner().params, rows, key))
        of_step = jax.vmap(lambda key: agent_keys(key, ENVS, SPEC.num_agents))
        keys = jit(lambda key: of_step(jax.random.split(key, STEPS)))(key)
        for env in range(ENVS):
            for agent in range(SPEC.num_agents):
                alone = live_alone(
                    executor(), rows.observation[:, env, agent], rows.legal[:, env, agent],
                    rows.is_first[:, env], keys[:, env, agent],
                )  # fmt: skip
                np.testing.assert_array_equal(alone.action[:, 0, 0], team.action[:, env, agent])
                np.testing.assert_array_equal(alone.z[:, 0, 0], team.z[:, env, agent])
                for one, many in ((alone.keys, team.keys), (alone.values, team.values)):
                    np.testing.assert_allclose(
                        one[:, :, 0, 0], many[:, :, env, agent], rtol=1e-5, atol=1e-5
                    )


class TestExecutor:
    def test_it_holds_four_networks_and_no_more(self):
        params = learner().params
        local = params.local
        needed = (local.encoder, local.dynamics, local.posterior, params.actor)
        rest = (local.prior, local.predict_post, local.predict_dyn, local.legal)
        held = [id(leaf) for leaf in jax.tree.leaves(executor())]
        assert held == [id(leaf) for leaf in jax.tree.leaves(needed)]
        others = {id(leaf) for leaf in jax.tree.leaves((rest, params.joint, params.critic))}
        assert not others & set(held)
        assert len(others) + len(held) == len(jax.tree.leaves(params))

    def test_acting_reads_nothing_else(self, key):
        params, rows = learner().params, make_rows()
        held = {id(leaf) for leaf in jax.tree.leaves(executor())}
        broken = jax.tree.map(
            lambda leaf: leaf if id(leaf) in held else jnp.full(leaf.shape, jnp.nan), params
        )
        assert_same(live(broken, rows, key), live(params, rows, key))


class TestChoice:
    def test_greedy_takes_the_best_legal_action(self, key):
        rows = make_rows()
        trace = jax.device_get(live(learner().params, rows, key, greedy=True))
        _, _, logits = replay_of(rows, trace)
        np.testing.assert_array_equal(
            trace.action, np.argmax(np.where(rows.legal, logits, -np.inf), axis=-1)
        )
        # Legality and experience decided, not habit.
        assert np.any(trace.action != np.argmax(logits, axis=-1))
        assert len(np.unique(np.argmax(logits, axis=-1))) > 2

    def test_the_only_legal_action_is_taken(self, key):
        rows = make_rows()
        only = np.random.default_rng(3).integers(SPEC.num_actions, size=rows.alive.shape)
        rows = rows._replace(legal=np.eye(SPEC.num_actions, dtype=bool)[only])
        np.testing.assert_array_equal(live(learner().params, rows, key).action, only)

    def test_sampled_actions_are_legal_and_vary(self):
        rows = make_rows()
        actions = []
        for seed in range(5):
            action = np.asarray(live(learner().params, rows, jax.random.key(seed)).action)
            assert np.take_along_axis(rows.legal, action[..., None], axis=-1).all()
            actions.append(action)
        assert np.any(np.std(actions, axis=0) > 0)


class TestKeys:
    @staticmethod
    def words(key, *size: int) -> np.ndarray:
        make = jit(lambda key: jax.random.key_data(agent_keys(key, *size)))
        return np.asarray(make(key))

    def test_every_agent_has_its_own_whatever_their_number(self, key):
        few, many = self.words(key, 2, 3), self.words(key, 5, 7)
        assert len(np.unique(many.reshape(35, -1), axis=0)) == 35
        np.testing.assert_array_equal(few, many[:2, :3])

    def test_they_change_with_the_step(self, key):
        one, other = (self.words(step, 2, 3) for step in jax.random.split(key))
        assert np.any(one != other, axis=-1).all()


@jit
def fight(params, keys, key):
    """Rows, kept latents and traces of real battles."""
    state = learner()._replace(params=params)

    def advance(carry, key):
        env_state, step, memory = carry
        choice = ALGORITHM.act(state, memory, step, key, greedy=False)
        env_state, arrival = ENV.step(env_state, choice.action)
        row = (step, choice.kept, remember(choice.action, choice.carry))
        return (env_state, arrival, choice.carry), row

    begin = (*ENV.reset(keys), ALGORITHM.begin(ENVS))
    return jax.lax.scan(advance, begin, jax.random.split(key, STEPS))[1]


def test_online_histories_are_those_of_the_replay(key):
    starts = jax.random.split(jax.random.key(5), ENVS)
    rows, kept, trace = jax.device_get(fight(learner().params, starts, key))
    assert rows.is_first[0].all() and rows.is_first[1:].any(axis=0).all()
    np.testing.assert_array_equal(kept, trace.z)
    history, q, logits = replay_of(rows, trace)
    for online, replayed in ((trace.keys, history.keys), (trace.values, history.values)):
        expected = np.moveaxis(np.stack(replayed)[:, :, :, WINDOW - 1 :], 3, 0)
        np.testing.assert_allclose(online, expected, rtol=1e-5, atol=1e-5)

    # h itself shows in the choices: with the same luck they come out the same.
    z, action = draw(q, np.where(rows.legal, logits, -np.inf), jax.random.split(key, STEPS))
    np.testing.assert_array_equal(z, trace.z)
    np.testing.assert_array_equal(action, trace.action)


@jit
def draw(q, logits, keys):
    """Latents and actions of each row, with the luck that its agents had."""

    def of_row(q, logits, key):
        keys = jax.vmap(jax.vmap(jax.random.split))(agent_keys(key, ENVS, SPEC.num_agents))
        each = jax.vmap(jax.vmap(jax.random.categorical))
        return each(keys[..., 0], q), each(keys[..., 1], logits)

    return jax.vmap(of_row)(q, logits, keys)


def test_half_precision_runs_through(key):
    """Without computing: the memory keeps its types from step to step."""
    agent = cast(executor(), jnp.bfloat16)
    history = agent.dynamics.transformer.empty(ENVS, SPEC.num_agents, jnp.bfloat16)
    memory = ALGORITHM.begin(ENVS)._replace(history=history)
    step = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), make_rows())
    keys = agent_keys(key, ENVS, SPEC.num_agents)
    action, _, after = jax.eval_shape(
        functools.partial(act, greedy=False),
        agent, memory, step.observation, step.legal, step.is_first, keys,
    )  # fmt: skip
    assert action.dtype == jnp.int32
    shapes = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(m)] for m in (memory, after)]
    assert shapes[0] == shapes[1]
