"""Every saving of the learner is exact: it computes what the plain version computes."""

import contextlib
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn, jit
from world_model import plain
from world_model.episodes import make_models, random_sequence

from majepa.agent import Learner, Majepa, Params
from majepa.config import DEBUG, preset
from majepa.envs.base import EnvSpec
from majepa.nn.layers import cast
from majepa.nn.optim import Moments
from majepa.policy.actor import Actor
from majepa.policy.condense import condense_actor, condense_critic
from majepa.policy.critic import Critic
from majepa.world_model import losses, unroll
from majepa.world_model.condense import Basis, condense_joint, condense_local, pays
from majepa.world_model.local import Dynamics, feature
from majepa.world_model.losses import model_loss
from majepa.world_model.tokens import tokens_of

CONTEXT, LOCAL = DEBUG.context, DEBUG.local
ACTIONS, AGENTS, OBSERVATION = 5, 3, 6
YES = jnp.asarray(True)


def assert_close(one: Any, other: Any, share: float = 1e-5) -> None:
    """Up to a share of the largest entry of each tensor."""
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True
    ):
        scale = max(np.abs(a).max(initial=0), 1e-3)
        error = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max(initial=0)
        assert error <= share * scale, jax.tree_util.keystr(path)


@functools.cache
def models():
    return make_models(0)


@functools.cache
def sequence():
    return random_sequence(0)


def sum_of(tree: Any, seed: int = 0) -> jax.Array:
    """A number that depends on every entry."""
    rng = np.random.default_rng(seed)
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return sum(
        (jnp.sum(jnp.asarray(rng.normal(size=leaf.shape), jnp.float32) * leaf) for leaf in leaves),
        jnp.zeros(()),
    )


# The recurrence.


class Inferred(NamedTuple):
    states: unroll.States
    gradient: Any


def inferring(kind, dtype=jnp.float32):
    joint = models()[1]
    tokens = tokens_of(sequence(), sequence().record.latent)
    record = jax.tree.map(lambda leaf: leaf[:, CONTEXT:], sequence().record)

    @jit
    def run(local, key) -> Inferred:
        past = plain.rebuild_context(*cast((local, joint), dtype), sequence(), tokens, CONTEXT)

        def objective(local):
            suffix = tokens.between(CONTEXT, None)
            states = kind.infer(cast(local, dtype), record, suffix, past, key)
            return sum_of(states[:4]), states

        gradient, states = jax.grad(objective, has_aux=True)(local)
        return Inferred(states, gradient)

    return run


@functools.cache
def inferred(kind) -> Inferred:
    return inferring(kind)(models()[0], jax.random.key(3))


@pytest.mark.slow
def test_states_are_those_of_the_recurrence():
    got, expected = inferred(unroll).states, inferred(plain).states
    np.testing.assert_array_equal(got.latent, expected.latent)
    assert len(np.unique(got.latent)) == LOCAL.classes, "samples differ"
    assert_close(expected, got)


@pytest.mark.slow
def test_gradients_are_those_of_the_recurrence():
    got, expected = inferred(unroll).gradient, inferred(plain).gradient
    assert_close(expected, got)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(expected.dynamics))


@pytest.mark.slow
@pytest.mark.parametrize("reset", range(CONTEXT + 1))
def test_what_cannot_be_remembered_is_not_looked_at(reset):
    """Wherever the last episode of the context begins, histories and roots are the same."""
    local, joint = models()
    is_first = np.zeros(sequence().record.is_first.shape, bool)
    is_first[:, reset] = True
    record = sequence().record._replace(is_first=jnp.asarray(is_first))
    got, expected = (
        rebuilt(kind)(local, joint, sequence()._replace(record=record)) for kind in (unroll, plain)
    )
    np.testing.assert_array_equal(expected.z, got.z)
    assert_close(expected.s, got.s)
    for name in ("local", "joint"):
        one, other = getattr(expected, name), getattr(got, name)
        seen = np.asarray(one.episode == 1)
        np.testing.assert_array_equal(seen, np.asarray(other.episode) == 1)
        for a, b in ((one.keys, other.keys), (one.values, other.values)):
            mask = seen[None, :, None, :, None, None]
            assert_close(np.where(mask, a, 0), np.where(mask, b, 0))


@functools.cache
def rebuilt(kind):
    return jit(
        lambda local, joint, sequence: kind.reinfer(
            local, joint, sequence, CONTEXT, jax.random.key(5)
        )
    )


@pytest.mark.slow
def test_gradients_in_half_precision_are_as_good_as_those_of_the_recurrence(monkeypatch):
    """Beside the exact ones, for the same latents: chance alone decides them here.

    Root mean squares over several draws; one alone says little of a tensor with few entries.
    """
    plain.by_chance_alone(monkeypatch)
    ways = [inferring(plain), *(inferring(kind, jnp.bfloat16) for kind in (unroll, plain))]
    off = []
    for key in jax.random.split(jax.random.key(3), 16):
        found = [jax.tree.leaves(way(models()[0], key).gradient) for way in ways]
        off.append([
            [np.linalg.norm(x - right) / np.linalg.norm(right) for x in half]
            for right, *half in zip(*found, strict=True)
            if np.any(right)
        ])  # fmt: skip
    off = np.sqrt(np.mean(np.square(off), axis=0))
    assert len(off) > 20
    for ours, plain_one in off:
        assert ours < max(2 * plain_one, 0.02)


# Condensed states.


def test_condensed_modules_compute_the_same():
    local, joint = models()
    feature_size = LOCAL.feature
    actor, critic = drawn(
        lambda: (
            Actor(feature_size, ACTIONS, DEBUG.policy, key=jax.random.key(0)),
            Critic(feature_size, DEBUG.policy, DEBUG.bins, key=jax.random.key(0)),
        )
    )
    rng = np.random.default_rng(0)
    y = jnp.asarray(rng.normal(size=(2, AGENTS, LOCAL.width)), jnp.float32)
    z = jax.nn.one_hot(rng.integers(LOCAL.classes, size=(2, AGENTS, LOCAL.latents)), LOCAL.classes)
    e = jnp.asarray(rng.normal(size=(2, AGENTS, LOCAL.embedding)), jnp.float32)
    a = jax.nn.one_hot(rng.integers(ACTIONS, size=(2, AGENTS)), ACTIONS)
    yes = jnp.ones((2, AGENTS), bool)
    legal = jnp.ones((2, AGENTS, ACTIONS), bool)

    @jit
    def read(local, joint, actor, critic):
        h = local.dynamics.state_of(y)
        s = feature(h, z)
        return (
            local.posterior(h, e), local.prior(h), local.predict_post(s), local.predict_dyn(h),
            local.legal(s), joint.mix(s, a, yes, yes), actor(s, legal), critic(s, yes, yes),
        )  # fmt: skip

    basis = Basis(local.dynamics)
    thin = (
        condense_local(local, basis), condense_joint(joint, basis),
        condense_actor(actor, basis), condense_critic(critic, basis),
    )  # fmt: skip
    assert thin[2].mlp.linears[0].weight.shape[0] < actor.mlp.linears[0].weight.shape[0] + 8
    assert_close(read(local, joint, actor, critic), read(*thin))


@pytest.mark.parametrize(("name", "expected"), [("paper", True), ("small", False)])
def test_states_that_have_gradients_are_condensed_where_they_are_wide(name, expected):
    config = preset("majepa", name, "3m").algo
    dynamics = jax.eval_shape(lambda: Dynamics(ACTIONS, config.local, key=jax.random.key(0)))
    assert pays(dynamics) == expected


# The whole objective and the whole call.


@functools.cache
def objective(kind: str):
    local, joint = models()

    def compute(groups):
        return model_loss(groups, local.encoder, sequence(), DEBUG, jax.random.key(9))

    run = jit(jax.value_and_grad(compute, has_aux=True))
    with plain.plainly() if kind == "plain" else condensing(kind == "condensed"):
        return run((local, joint))


@contextlib.contextmanager
def condensing(condensed: bool):
    """Whether gradients are taken of condensed states, small as they are here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "pays", lambda dynamics: condensed)
        yield


kinds = pytest.mark.parametrize("kind", ["wide", "condensed"])


@pytest.mark.slow
@kinds
def test_the_objective_and_its_gradients_are_the_plain_ones(kind):
    assert losses.infer is unroll.infer
    (total, loss), gradient = objective(kind)
    (plain_total, plain_loss), plain_gradient = objective("plain")
    np.testing.assert_array_equal(loss.latent, plain_loss.latent)
    assert_close((plain_total, plain_loss.terms), (total, loss.terms))
    assert_close(plain_gradient, gradient, 3e-5)


@pytest.mark.slow
def test_the_kinds_are_two():
    """Equal up to rounding, but not the same program."""
    one, other = (jax.tree.leaves(objective(kind)[1]) for kind in ("wide", "condensed"))
    assert any(np.any(a != b) for a, b in zip(one, other, strict=True))


LOCAL_WIDE = dataclasses.replace(
    LOCAL, width=64, deterministic=512, hidden=64, latents=8, classes=8
)
"""States as much wider than what makes them as those of preset `paper` are."""


@pytest.mark.slow
def test_half_precision_does_condensed_states_no_harm(monkeypatch):
    """Beside the exact gradients, for latents that chance alone decides: root mean squares of
    relative errors over several draws."""
    plain.by_chance_alone(monkeypatch)
    config = dataclasses.replace(DEBUG, local=LOCAL_WIDE)
    groups, view = make_models(0, config), random_sequence(0, config)

    def gradients(precision: str, *, condensed: bool) -> list[list[np.ndarray]]:
        def compute(groups, key):
            given = dataclasses.replace(config, precision=precision)
            return model_loss(groups, groups[0].encoder, view, given, key)

        run = jit(jax.grad(compute, has_aux=True))
        with condensing(condensed):
            found = [run(groups, jax.random.key(number))[0] for number in range(4)]
        return [[np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(one)] for one in found]

    exact = gradients("float32", condensed=False)

    def off(found: list[list[np.ndarray]]) -> np.ndarray:
        errors = [
            [np.linalg.norm(x - right) / max(np.linalg.norm(right), 1e-12)
             for x, right in zip(*pair, strict=True)]
            for pair in zip(found, exact, strict=True)
        ]  # fmt: skip
        return np.sqrt(np.mean(np.square(errors), axis=0))

    ours, wide = (off(gradients("bfloat16", condensed=kind)) for kind in (True, False))
    counts = np.array([np.any(leaf) for leaf in exact[0]])
    assert np.sum(counts) > 60
    assert np.all(ours[counts] > 0)
    assert np.all(ours[counts] < np.maximum(2 * wide[counts], 0.02))


@pytest.mark.slow
@kinds
def test_a_learner_call_is_the_plain_one(kind):
    spec = EnvSpec("test:none", AGENTS, ACTIONS, OBSERVATION, 1, 1, episode_limit=10)
    rates = dataclasses.replace(DEBUG.optimizer, model_rate=1e-2, actor_rate=3e-3, critic_rate=3e-3)
    collect = dataclasses.replace(DEBUG.collect, model_only_calls=0)
    config = dataclasses.replace(DEBUG, collect=collect, optimizer=rates)
    algorithm = Majepa(config, spec, steps=400)
    learner = warm(algorithm)
    with condensing(kind == "condensed"):
        got, metrics = jit(Majepa(config, spec, steps=400).call)(learner, jax.random.key(2), YES)
    with plain.plainly():
        expected, plain_metrics = jit(algorithm.call)(learner, jax.random.key(2), YES)
    np.testing.assert_array_equal(got.replay.stored.latent, expected.replay.stored.latent)
    assert_close(expected.params, got.params)
    assert_close(plain_metrics, metrics, 1e-4)
    moved = jax.tree.map(lambda new, old: np.abs(new - old).max(), got.params, learner.params)
    assert min(jax.tree.leaves((moved.actor, moved.local.dynamics))) > 3e-4, "steps are large"


def warm(algorithm: Majepa) -> Learner:
    """A learner in the middle of a run: a filled replay, and moments that know the gradients."""
    learner = jax.eval_shape(algorithm.init, jax.random.key(0))
    rng = np.random.default_rng(0)

    def zeros(leaf):
        return jnp.zeros(leaf.shape, leaf.dtype)

    params: Params = drawn(lambda: algorithm.make_params(jax.random.key(0)))
    stored = jax.tree.map(zeros, learner.replay.stored)
    rows, envs = stored.reward.shape
    ends = rng.random((rows, envs)) < 0.1
    shape = stored.alive.shape
    stored = stored._replace(
        observation=jnp.asarray(rng.normal(size=stored.observation.shape), jnp.float32),
        legal=jnp.asarray(rng.random(stored.legal.shape) < 0.7).at[..., 0].set(True),
        alive=jnp.asarray(rng.random(shape) < 0.9),
        reward=jnp.asarray(rng.normal(size=(rows, envs)), jnp.float32),
        is_first=jnp.asarray(np.roll(ends, 1, axis=0)),
        is_last=jnp.asarray(ends),
        is_terminal=jnp.asarray(ends),
        latent=jnp.asarray(rng.integers(LOCAL.classes, size=stored.latent.shape), jnp.uint8),
    )
    optimizers = jax.tree.map(zeros, learner.optimizers)

    def known(moments: Moments) -> Moments:
        nu = jax.tree.map(lambda leaf: jnp.full_like(leaf, 1e-2), moments.nu)
        return Moments(jnp.asarray(10_000, jnp.int32), nu, moments.mu)

    return Learner(
        params=params,
        target_encoder=params.local.encoder,
        optimizers=type(optimizers)(*map(known, optimizers)),
        replay=learner.replay._replace(stored=stored, inserted=jnp.asarray(rows, jnp.int32)),
        transitions=jnp.asarray(400, jnp.int32),
        due=jnp.zeros(()),
        calls=jnp.asarray(100, jnp.int32),
        nonfinite=jnp.zeros((), jnp.int32),
    )
