"""MA-JEPA as an algorithm: its groups, how it acts, when it learns and in which order.

The order of a learner call is tested with a learner whose two halves leave marks instead of
learning; what the halves do is tested with the whole learner and with their own parts.
"""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn, jit
from runs.counting import ACTIONS, AGENTS, FEATURES, CountingEnv

from majepa.agent import Executor, Learner, Majepa, Memory, Optimizers, act
from majepa.algorithm import Algorithm, Cadence, Experience, Row, agent_keys
from majepa.collect import begin, collect
from majepa.config import DEBUG, PRESETS, MajepaConfig
from majepa.envs import make_env
from majepa.nn.layers import count_parameters
from majepa.world_model.unroll import Past, Roots

ENV = CountingEnv(lengths=(3, 5, 4, 2), limit=5)


def algorithm_of(config: MajepaConfig = DEBUG, kind: type[Majepa] = Majepa) -> Majepa:
    return kind(config, ENV.spec, steps=400)


def shapes_of(algorithm: Majepa) -> Learner:
    return jax.eval_shape(algorithm.init, jax.random.key(0))


# Groups.


def test_four_groups_hold_every_parameter_once():
    learner = shapes_of(algorithm_of())
    assert learner.params._fields == ("local", "joint", "actor", "critic")
    assert learner.optimizers._fields == learner.params._fields
    for group, moments in zip(learner.params, learner.optimizers, strict=True):
        assert count_parameters(moments.nu) == count_parameters(group)
        assert count_parameters(moments.mu) == count_parameters(group)
    held = {
        "local": {
            "encoder", "dynamics", "posterior", "prior", "predict_post", "predict_dyn", "legal",
        },
        "joint": {
            "enter", "enter_norm", "agents", "temporal", "embed", "reward", "cont", "alive",
            "legal", "ahead",
        },
        "actor": {"mlp"},
        "critic": {"enter", "enter_norm", "agents", "out_norm", "out"},
    }  # fmt: skip
    for name, group in learner.params._asdict().items():
        assert {field.name for field in dataclasses.fields(group)} == held[name]
    # Modules hold nothing but parameters, and the target encoder is in no group.
    for leaf in jax.tree.leaves(learner.params):
        assert leaf.dtype == jnp.float32
    assert jax.tree.structure(learner.target_encoder) == jax.tree.structure(
        learner.params.local.encoder
    )


def test_it_is_an_algorithm():
    algorithm = algorithm_of()
    assert isinstance(algorithm, Algorithm)
    assert algorithm.cadence == Cadence(DEBUG.collect.num_envs, 1)
    assert algorithm.timeout_is_terminal
    truthful = dataclasses.replace(DEBUG.collect, timeout_is_terminal=False)
    assert not algorithm_of(dataclasses.replace(DEBUG, collect=truthful)).timeout_is_terminal


def test_the_replay_is_no_larger_than_the_run():
    small, large = (
        Majepa(DEBUG, ENV.spec, steps=steps).make_replay().rows for steps in (200, 10**6)
    )
    assert 200 / DEBUG.collect.num_envs < small < 200
    assert large == DEBUG.replay.capacity // DEBUG.collect.num_envs


@pytest.mark.slow
def test_preset_paper_fits_together():
    """Types and shapes of everything, in its own precision, without running it."""
    env = make_env("sim:2s3z")
    algorithm = Majepa(PRESETS["majepa"]["paper"], env.spec, steps=20_000)

    def start(key):
        stream = begin(algorithm, env, jax.random.split(key, algorithm.cadence.num_envs))
        return algorithm.init(key), stream

    key = jax.random.key(0)
    learner, stream = jax.eval_shape(start, key)
    gathered = jax.eval_shape(
        functools.partial(collect, algorithm, env, rows=1), learner, stream, key
    )
    after, metrics = jax.eval_shape(algorithm.update, learner, gathered.data, key)
    for before, now in ((learner, after), (stream, gathered.stream)):
        jax.tree.map(_same_type, before, now)
    assert {leaf.dtype for leaf in stream.carry.history.keys} == {jnp.dtype(jnp.bfloat16)}
    assert all(value.shape == () and value.dtype == jnp.float32 for value in metrics.values())
    millions = [count_parameters(group) / 1e6 for group in learner.params]
    np.testing.assert_allclose(millions, [46.3, 16.6, 3.68, 3.22], rtol=0.01)


def _same_type(old, new):
    assert (old.shape, old.dtype) == (new.shape, new.dtype)


# Acting.


class Acting(NamedTuple):
    learner: Learner
    memory: Memory
    observation: jax.Array
    legal: jax.Array
    is_first: jax.Array
    keys: jax.Array


@functools.cache
def acting() -> Acting:
    """Agents in the middle of episodes; one environment begins a new one."""
    algorithm = algorithm_of()
    params = drawn(lambda: algorithm.make_params(jax.random.key(0)))
    zero = jnp.zeros((), jnp.int32)
    moments = Optimizers(*(algorithm.model_optimizer.init(group) for group in params))
    learner = Learner(
        params, params.local.encoder, moments, algorithm.make_replay(),
        zero, jnp.zeros(()), zero, zero,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    legal = jnp.asarray(rng.random((4, AGENTS, ACTIONS)) < 0.5).at[..., 1].set(True)
    memory = algorithm.begin(4)
    is_first = jnp.ones(4, bool)
    for row in range(6):
        observation = jnp.asarray(rng.normal(size=(4, AGENTS, FEATURES)), jnp.float32)
        keys = _keys(jax.random.key(row))
        _, _, memory = _act(algorithm.executor(learner), memory, observation, legal, is_first, keys)
        is_first = jnp.zeros(4, bool)
    is_first = is_first.at[2].set(True)
    return Acting(learner, memory, observation, legal, is_first, keys)


_act = jit(functools.partial(act, greedy=False))
_act_greedily = jit(functools.partial(act, greedy=True))
_keys = jit(lambda key: agent_keys(key, 4, AGENTS))


def decide(step: Acting, *, greedy: bool = False):
    executor = algorithm_of().executor(step.learner)
    action, _, memory = (_act_greedily if greedy else _act)(executor, *step[1:])
    return action, memory


def of_agent(memory: Memory, agent: int):
    """All that an agent remembers for itself."""
    history = memory.history
    held = (leaf[:, agent] for leaf in (*history.keys, *history.values))
    return *held, memory.z[:, agent]


def test_agents_act_from_what_they_see_themselves():
    step = acting()
    action, memory = decide(step)
    others = step._replace(
        observation=step.observation.at[:, 1].set(5.0),
        legal=step.legal.at[:, 1].set(True),
        keys=step.keys.at[:, 1].set(jax.random.key(9)),
        memory=step.memory._replace(
            z=step.memory.z.at[:, 1].set(3), a=step.memory.a.at[:, 1].set(0)
        ),
    )
    other_action, other_memory = decide(others)
    np.testing.assert_array_equal(action[:, 0], other_action[:, 0])
    jax.tree.map(np.testing.assert_array_equal, of_agent(memory, 0), of_agent(other_memory, 0))
    assert np.any(memory.z[:, 1] != other_memory.z[:, 1])


def test_acting_needs_nothing_that_exists_for_training():
    learner = acting().learner
    executor = algorithm_of().executor(learner)
    names = [field.name for field in dataclasses.fields(Executor)]
    assert names == ["encoder", "dynamics", "posterior", "actor"]
    used = count_parameters(executor)
    local, actor = learner.params.local, learner.params.actor
    assert used == sum(
        map(count_parameters, (local.encoder, local.dynamics, local.posterior, actor))
    )


def test_an_episode_begins_with_an_empty_memory():
    step = acting()
    _, memory = decide(step)
    noise = jnp.where(jnp.arange(4)[:, None] == 2, 1, 0)
    confused = step.memory._replace(
        z=(step.memory.z + noise[..., None]) % DEBUG.local.classes,
        a=(step.memory.a + noise) % ACTIONS,
        history=jax.tree.map(lambda leaf: leaf.at[2].add(1), step.memory.history)._replace(
            episode=step.memory.history.episode
        ),
    )
    _, other = decide(step._replace(memory=confused))
    np.testing.assert_array_equal(memory.z, other.z)
    for one, same in zip(memory.history.keys, other.history.keys, strict=True):
        np.testing.assert_array_equal(one[2, :, -1], same[2, :, -1])
    # Elsewhere the past counts.
    _, changed = decide(step._replace(memory=confused, is_first=jnp.zeros(4, bool)))
    assert np.any(memory.history.keys[-1][2, :, -1] != changed.history.keys[-1][2, :, -1])


@pytest.mark.parametrize("greedy", [True, False])
def test_actions_are_legal(greedy):
    step = acting()
    for seed in range(20):
        action, memory = decide(step._replace(keys=_keys(jax.random.key(seed))), greedy=greedy)
        assert np.take_along_axis(np.asarray(step.legal), np.asarray(action)[..., None], -1).all()
        np.testing.assert_array_equal(memory.a, action)


def test_greedy_actions_are_the_likeliest_ones():
    step = acting()
    bias = jnp.asarray([0.0, 1e3, 2e3])
    actor = eqx.tree_at(lambda a: a.mlp.linears[-1].bias, step.learner.params.actor, bias)
    learner = step.learner._replace(params=step.learner.params._replace(actor=actor))
    action, _ = decide(step._replace(learner=learner), greedy=True)
    np.testing.assert_array_equal(action, np.where(step.legal[..., 2], 2, 1))


def test_agents_draw_with_keys_of_their_own():
    keys = np.asarray(jax.random.key_data(_keys(jax.random.key(0)))).reshape(-1, 2)
    assert len({key.tobytes() for key in keys}) == 4 * AGENTS
    more = np.asarray(jax.random.key_data(agent_keys(jax.random.key(0), 2, AGENTS + 1)))
    np.testing.assert_array_equal(more[:, :AGENTS].reshape(-1, 2), keys[: 2 * AGENTS])


def test_the_kept_latents_are_those_the_agents_acted_on():
    algorithm, step = algorithm_of(), acting()
    row = jit(lambda keys: ENV.reset(keys)[1])(jax.random.split(jax.random.key(0), 4))
    decision = jit(functools.partial(algorithm.act, greedy=False))(
        step.learner, step.memory, row, jax.random.key(1)
    )
    np.testing.assert_array_equal(decision.kept, decision.carry.z)
    np.testing.assert_array_equal(decision.action, decision.carry.a)


# The order of a learner call, and how many there are.


class Marking(Majepa):
    """Both halves of a learner call leave marks wherever they would learn: one more in the local
    model and in the actor, what their key says in all else. Some calls are not finite."""

    def recall(self, local, joint, view, begin):
        mark = _place(view) + local.legal.linears[-1].bias[0]
        return Past(mark, mark)

    def train_model(self, learner, view, key, past=None, wanted=True):
        before = learner
        if past is None:
            past = self.recall(learner.params.local, learner.params.joint, view, 0)
        params, optimizers, number = learner.params, learner.optimizers, _number(key)
        local, joint = _marked(params.local, 1), _marked(params.joint, number)
        learner = learner._replace(
            params=params._replace(local=local, joint=joint),
            target_encoder=_marked(learner.target_encoder, number),
            optimizers=optimizers._replace(
                local=_marked(optimizers.local, number), joint=_marked(optimizers.joint, number)
            ),
            nonfinite=jnp.where(number < 2, learner.nonfinite + 1, 0),
        )
        learner = jax.tree.map(lambda new, old: jnp.where(wanted, new, old), learner, before)
        fresh = jnp.full_like(view.record.latent[:, self.config.context :], 1)
        metrics = {"place": _place(view), "past": past.local, "call": 1.0 * learner.calls}
        return learner, fresh, {f"model/{name}": value for name, value in metrics.items()}

    def draw_latents(self, local, view, key, tracks):
        return view.record.latent + _number(key).astype(view.record.latent.dtype)

    def find_roots(self, local, joint, view, latent, begin):
        return Roots(*[jnp.sum(latent, dtype=jnp.int32) + local.legal.linears[-1].bias[0]] * 5)

    def train_behaviour(self, params, optimizers, view, key, roots=None):
        number = _number(key)
        if roots is None:
            latent = self.draw_latents(params.local, view, key, None)
            roots = self.find_roots(params.local, params.joint, view, latent, 0)
        seen = params.local.legal.linears[-1].bias[0]
        params = params._replace(
            actor=_marked(params.actor, 1), critic=_marked(params.critic, number)
        )
        optimizers = optimizers._replace(
            actor=_marked(optimizers.actor, number), critic=_marked(optimizers.critic, number)
        )
        refreshed = jnp.full_like(view.record.latent[:, self.config.context :], 2)
        metrics = {
            "behaviour/place": _place(view),
            "behaviour/local": seen,
            "behaviour/roots": roots.s,
            "finite/actor": jnp.where(number > 2, 0.8, 1.0),
            "finite/critic": jnp.ones(()),
        }
        return params, optimizers, refreshed, metrics


def _number(key):
    """A small number, which depends on the key alone."""
    return (jax.random.bits(key) % 5).astype(jnp.int32)


def _marked(tree, number):
    return jax.tree.map(lambda leaf: leaf + jnp.asarray(number, leaf.dtype), tree)


def _place(view):
    """Where a view of one sequence lies."""
    return (view.start[0] * 100 + view.env[0]).astype(jnp.float32)


CALLS_PER_TRANSITION = 0.375
MARKING = dataclasses.replace(
    DEBUG,
    replay=dataclasses.replace(DEBUG.replay, batch=1),
    collect=dataclasses.replace(
        DEBUG.collect,
        prefill=47,
        train_ratio=CALLS_PER_TRANSITION * DEBUG.replay.learning,
        model_only_calls=2,
    ),
)


@functools.cache
def marking(write_back: str = "model", prefill: int = MARKING.collect.prefill) -> Marking:
    config = dataclasses.replace(
        MARKING,
        replay=dataclasses.replace(MARKING.replay, write_back=write_back),
        collect=dataclasses.replace(MARKING.collect, prefill=prefill),
    )
    return algorithm_of(config, Marking)


@functools.cache
def compiled(algorithm: Marking):
    return jit(algorithm.update)


@functools.cache
def world_rows() -> Row:
    """Rows of the counting world, time first, with latents of class 0."""

    @jit
    def walk(key):
        def advance(state, _):
            return ENV.step(state, jnp.zeros((4, AGENTS), jnp.int32))

        state, first = ENV.reset(jax.random.split(key, 4))
        _, rest = jax.lax.scan(advance, state, length=39)
        return jax.tree.map(lambda one, more: jnp.concatenate([one[None], more]), first, rest)

    step = walk(jax.random.key(0))
    latent = jnp.zeros((40, 4, AGENTS, DEBUG.local.latents), jnp.int32)
    return Row(step, jnp.zeros((40, 4, AGENTS), jnp.int32), latent)


def batch_of(row: int) -> Experience:
    rows: Row = jax.tree.map(lambda leaf: leaf[row : row + 1], world_rows())
    return Experience(rows, jax.tree.map(lambda leaf: leaf[0], rows.step), None, None)


def blank(algorithm: Majepa) -> Learner:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes_of(algorithm))


def run(algorithm: Marking, batches: int):
    """States and metrics after each of the first batches."""
    learner = blank(algorithm)
    for row in range(batches):
        learner, metrics = compiled(algorithm)(learner, batch_of(row), jax.random.key(row))
        yield learner, {name: float(value) for name, value in metrics.items()}


def transitions() -> np.ndarray:
    """Real ones in the rows so far: the first row of an episode is none."""
    return np.cumsum(np.sum(~np.asarray(world_rows().step.is_first), axis=1))


def test_calls_are_owed_for_transitions_after_the_prefill():
    count = transitions()
    assert count[0] == 0
    # The prefill ends with a batch, and a sequence can be sampled by then.
    (full,) = np.flatnonzero(count == MARKING.collect.prefill)
    assert full + 1 >= DEBUG.replay.learning
    made = []
    for row, (learner, metrics) in enumerate(run(marking(), 30)):
        assert learner.transitions == count[row]
        owed = max(count[row] - MARKING.collect.prefill, 0) * CALLS_PER_TRANSITION
        assert learner.calls == np.floor(owed)
        assert metrics["learner/calls"] == learner.calls
        assert metrics["learner/replay_rows"] == row + 1
        made.append(int(learner.calls))
    assert made[-1] > 10


def test_nothing_is_owed_before_a_sequence_can_be_sampled():
    first = DEBUG.replay.learning - 1
    count = transitions()
    for row, (learner, _) in enumerate(run(marking(prefill=0), first + 3)):
        before = count[first - 1]
        owed = max(count[row] - before, 0) * CALLS_PER_TRANSITION if row >= first else 0
        assert learner.calls == np.floor(owed), row


def test_behaviour_learns_from_the_new_model_after_the_first_calls():
    states = list(run(marking(), 30))
    for (before, _), (after, metrics) in itertools.pairwise(states):
        calls = int(after.calls - before.calls)
        active = int(after.calls) - max(int(before.calls), MARKING.collect.model_only_calls)
        active = max(active, 0)
        moved = after.params.actor.mlp.linears[0].bias - before.params.actor.mlp.linears[0].bias
        np.testing.assert_array_equal(moved, active)
        # The marks of calls count from one: behaviour sees that of its own call.
        expected = np.arange(int(before.calls), int(after.calls)) + 1.0
        if calls:
            assert metrics["model/call"] == np.mean(expected - 1)
            assert after.params.local.legal.linears[-1].bias[0] == expected[-1]
        else:
            assert np.isnan(metrics["model/call"])
        if active:
            np.testing.assert_allclose(metrics["behaviour/local"], np.mean(expected[-active:]))
        else:
            assert np.isnan(metrics["behaviour/local"])


def test_the_two_views_are_drawn_apart():
    places = [
        (metrics["model/place"], metrics["behaviour/place"])
        for _, metrics in run(marking(), 40)
        if metrics["behaviour/place"] == metrics["behaviour/place"]
    ]
    model, behaviour = np.array(places).T
    assert len(places) > 10
    assert np.mean(model == behaviour) < 0.5
    assert len(set(model)) > 5


@pytest.mark.parametrize("mode", ["none", "model", "behaviour"])
def test_fresh_latents_are_written_back(mode):
    algorithm = marking(mode)
    states = list(run(algorithm, 24))
    mark = {"none": 0, "model": 1, "behaviour": 2}[mode]
    latent = np.asarray(states[-1][0].replay.stored.latent)
    assert set(np.unique(latent)) == {0, mark}
    assert states[-1][0].calls > MARKING.collect.model_only_calls
    # In the last batch with one active call, the sequence that was drawn, and no other row.
    for (before, _), (after, metrics) in itertools.pairwise(states):
        is_one = after.calls == before.calls + 1 > MARKING.collect.model_only_calls
        if not is_one:
            continue
        place = metrics["behaviour/place" if mode == "behaviour" else "model/place"]
        start, env = divmod(int(place), 100)
        rows = start + DEBUG.context + np.arange(DEBUG.replay.learning)
        expected = np.asarray(before.replay.stored.latent).copy()
        if mode != "none":
            expected[rows[rows >= 0], env] = mark
        np.testing.assert_array_equal(after.replay.stored.latent, expected)


def test_model_only_calls_write_nothing_of_behaviour():
    first = next(learner for learner, _ in run(marking("behaviour"), 24) if learner.calls == 1)
    assert not np.any(first.replay.stored.latent)
