"""PPO on a frozen batch: what is frozen, both losses by hand, and the steps of an update."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn, jit
from world_model.episodes import make_models, random_record

from majepa.agent import Majepa, Optimizers, Params
from majepa.config import DEBUG, MajepaConfig
from majepa.envs.base import EnvSpec
from majepa.imagine import Imagined
from majepa.nn.dists import TwoHot, log_prob_of
from majepa.nn.optim import Moments, apply_update
from majepa.policy.actor import Actor
from majepa.policy.critic import Critic
from majepa.policy.ppo import (
    Frozen,
    ReplayTargets,
    actor_loss,
    critic_loss,
    freeze,
    replay_targets,
    values,
)
from majepa.world_model.condense import Basis

STEPS, BATCH, ROOTS, AGENTS, ACTIONS = 4, 2, 14, 3, 5
LOCAL = DEBUG.local
FEATURE = LOCAL.deterministic + LOCAL.latents * LOCAL.classes
SPEC = EnvSpec("test:none", AGENTS, ACTIONS, 6, 1, 1, episode_limit=10)


def array(x):
    return jnp.asarray(x, None if np.asarray(x).dtype != np.float64 else jnp.float32)


def make_imagined(seed: int = 0) -> Imagined:
    """A batch with absent slots, invalid roots, deaths, and teams that die out."""
    rng = np.random.default_rng(seed)
    shape = (STEPS, BATCH, ROOTS, AGENTS)
    present = rng.random(shape[1:]) < 0.85
    alive = [rng.random(shape[1:]) < 0.8]
    valid = [present & (rng.random((BATCH, ROOTS, 1)) < 0.85)]
    for _ in range(STEPS):
        alive.append(alive[-1] & (rng.random(shape[1:]) < 0.8))
        valid.append(valid[-1] & (rng.random((BATCH, ROOTS, 1)) < 0.8))
    legal = rng.random((*shape, ACTIONS)) < 0.6
    legal[..., 1] |= ~legal.any(-1)
    return Imagined(
        s=array(rng.normal(size=(STEPS + 1, *shape[1:], FEATURE))),
        legal=array(legal),
        action=array(np.argmax(rng.random(legal.shape) * legal, axis=-1).astype(np.int32)),
        alive=array(np.stack(alive)),
        value_valid=array(np.stack(valid)),
        reward=array(rng.normal(size=shape)),
        cont=array(rng.uniform(0.5, 1.0, shape)),
        present=array(present),
    )


def make_networks(seed: int) -> tuple[Actor, Critic]:
    key = jax.random.key(0)

    def build():
        return (
            Actor(FEATURE, ACTIONS, DEBUG.policy, key=key),
            Critic(FEATURE, DEBUG.policy, DEBUG.bins, key=key),
        )

    return drawn(build, seed)


class Batch(NamedTuple):
    imagined: Imagined
    actor: Actor
    critic: Critic
    value: np.ndarray
    frozen: Frozen


@functools.cache
def batch() -> Batch:
    imagined, (actor, critic) = make_imagined(), make_networks(0)
    present = jnp.broadcast_to(imagined.present[None], imagined.alive.shape)
    value = jit(functools.partial(values, config=DEBUG))(
        critic, imagined.s, present, imagined.alive
    )
    frozen = jit(functools.partial(freeze, config=DEBUG))(imagined, critic)
    return Batch(imagined, actor, critic, np.asarray(value), frozen)


def by_hand() -> tuple[np.ndarray, np.ndarray]:
    """Advantages and cumulative weights of the batch, one entry at a time."""
    imagined, _, _, value, _ = batch()
    b = np.asarray(imagined.value_valid, np.float64)
    reward, cont = np.asarray(imagined.reward), np.asarray(imagined.cont)
    advantage, weight = np.zeros(value.shape), np.zeros(value.shape)
    for entry in np.ndindex(*value.shape[1:]):
        for k in reversed(range(STEPS)):
            now, after = (k, *entry), (k + 1, *entry)
            going_on = cont[now] * b[after]
            delta = reward[now] + going_on * value[after] - value[now]
            advantage[now] = b[now] * (delta + 0.95 * going_on * advantage[after])
        product = 1.0
        for k in range(STEPS):
            weight[(k, *entry)] = b[(k, *entry)] * product
            product *= cont[(k, *entry)] * b[(k + 1, *entry)]
    return advantage[:-1], weight[:-1]


# What is frozen.


def test_returns_are_advantages_on_top_of_the_target_critic():
    imagined, _, _, value, frozen = batch()
    advantage, _ = by_hand()
    np.testing.assert_allclose(frozen.value, value[:-1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(frozen.returns, advantage + value[:-1], rtol=1e-4, atol=1e-5)
    valid = np.asarray(imagined.value_valid)
    assert 0.1 < valid[:-1].mean() < 0.9
    np.testing.assert_array_equal(
        np.asarray(frozen.returns)[~valid[:-1]], np.asarray(frozen.value)[~valid[:-1]]
    )
    following = np.concatenate([frozen.returns[1:], value[-1:]])
    going_on = np.asarray(imagined.cont) * valid[1:]
    expected = np.asarray(imagined.reward) + going_on * (0.05 * value[1:] + 0.95 * following)
    np.testing.assert_allclose(
        np.asarray(frozen.returns)[valid[:-1]], expected[valid[:-1]], rtol=1e-4, atol=1e-4
    )


def test_weights_are_the_chances_of_getting_there():
    imagined, *_, frozen = batch()
    _, weight = by_hand()
    np.testing.assert_allclose(frozen.value_weight, weight, rtol=1e-5)
    np.testing.assert_allclose(frozen.actor_weight, weight * imagined.alive[:-1], rtol=1e-5)
    assert (frozen.value_weight[0] == imagined.value_valid[0]).all()
    # The dead have a value as long as their team goes on.
    assert np.any((np.asarray(frozen.value_weight) > 0) & ~np.asarray(frozen.alive))


def test_advantages_are_standardised_once_over_the_decisions():
    *_, frozen = batch()
    advantage, weight = by_hand()
    weight = weight * np.asarray(frozen.alive)
    mean = np.average(frozen.advantage, weights=weight)
    np.testing.assert_allclose(mean, 0, atol=1e-5)
    np.testing.assert_allclose(
        np.average((frozen.advantage - mean) ** 2, weights=weight), 1, rtol=1e-4
    )
    raw = np.average(advantage, weights=weight)
    deviation = np.sqrt(np.average((advantage - raw) ** 2, weights=weight))
    np.testing.assert_allclose(
        frozen.advantage, (advantage - raw) / deviation, rtol=1e-3, atol=1e-3
    )


def test_the_rest_of_the_batch_is_as_imagined():
    imagined, *_, frozen = batch()
    for name in ("legal", "action"):
        np.testing.assert_array_equal(getattr(frozen, name), getattr(imagined, name))
    for name in ("s", "alive"):
        np.testing.assert_array_equal(getattr(frozen, name), getattr(imagined, name)[:-1])
    for present in frozen.present:
        np.testing.assert_array_equal(present, imagined.present)


# The actor's loss.


@jit
def actor_gradients(actor, frozen, old, is_first_epoch):
    def objective(actor, s):
        return actor_loss(actor, frozen._replace(s=s), old, is_first_epoch, DEBUG)

    return jax.value_and_grad(objective, (0, 1), has_aux=True)(actor, frozen.s)


@jit
def policy_of(actor, s, legal):
    return jnp.exp(actor(s, legal))


def probabilities() -> np.ndarray:
    _, actor, _, _, frozen = batch()
    return np.asarray(policy_of(actor, frozen.s, frozen.legal), np.float64)


def taken(probs: np.ndarray) -> np.ndarray:
    action = np.asarray(batch().frozen.action)[..., None]
    return np.take_along_axis(probs, action, axis=-1)[..., 0]


def entropy_of(probs: np.ndarray) -> np.ndarray:
    return -np.sum(probs * np.log(np.where(probs > 0, probs, 1.0)), axis=-1)


def test_the_actor_loss_by_hand():
    _, actor, _, _, frozen = batch()
    probs = probabilities()
    ratio = np.exp(np.random.default_rng(3).normal(0, 0.3, frozen.action.shape))
    old = array(np.log(taken(probs) / ratio))
    (loss, (kept, report)), _ = actor_gradients(actor, frozen, old, jnp.asarray(False))
    advantage, weight = np.asarray(frozen.advantage), np.asarray(frozen.actor_weight)
    gain = np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
    spread = entropy_of(probs)
    expected = -np.average(gain + 0.003 * spread, weights=weight)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    np.testing.assert_array_equal(kept, old)
    np.testing.assert_allclose(report.entropy, np.average(spread, weights=weight), rtol=1e-4)
    outside = np.abs(ratio - 1) > 0.2
    np.testing.assert_allclose(report.clipped, np.average(outside, weights=weight), rtol=1e-4)
    divergence = np.average(ratio - 1 - np.log(ratio), weights=weight)
    np.testing.assert_allclose(report.divergence, divergence, rtol=1e-3)


def test_in_the_first_epoch_the_ratio_is_exactly_one():
    _, actor, _, _, frozen = batch()
    unknown = jnp.full(frozen.action.shape, jnp.nan)
    (loss, (old, report)), (gradient, _) = actor_gradients(
        actor, frozen, unknown, jnp.asarray(True)
    )
    assert report.divergence == 0
    assert report.clipped == 0
    np.testing.assert_allclose(old, np.log(taken(probabilities())), rtol=1e-4, atol=1e-5)
    expected = -0.003 * np.average(entropy_of(probabilities()), weights=frozen.actor_weight)
    # The advantages average to zero.
    np.testing.assert_allclose(loss, expected, atol=1e-5)
    slopes = [np.abs(leaf).max() for leaf in jax.tree.leaves(gradient)]
    assert np.isfinite(slopes).all()
    assert min(slopes) > 0


def test_the_first_step_follows_the_policy_gradient():
    _, actor, _, _, frozen = batch()
    bare = dataclasses.replace(DEBUG, policy=dataclasses.replace(DEBUG.policy, entropy=0.0))

    @jit
    def both(actor):
        def clipped(actor):
            unknown = jnp.zeros(frozen.action.shape)
            return actor_loss(actor, frozen, unknown, jnp.asarray(True), bare)[0]

        def plain(actor):
            log_probs = actor(frozen.s, frozen.legal)
            log_prob = jnp.take_along_axis(log_probs, frozen.action[..., None], axis=-1)[..., 0]
            weighted = frozen.actor_weight * frozen.advantage * log_prob
            return -jnp.sum(weighted) / jnp.sum(frozen.actor_weight)

        return jax.grad(clipped)(actor), jax.grad(plain)(actor)

    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-6),
        *both(actor),
    )


def test_entropy_counts_in_nats_of_the_legal_actions():
    _, actor, _, _, frozen = batch()
    uniform = jax.tree.map(jnp.zeros_like, actor)
    calm = frozen._replace(advantage=jnp.zeros_like(frozen.advantage))
    (loss, (_, report)), _ = actor_gradients(
        uniform, calm, jnp.zeros(frozen.action.shape), jnp.asarray(True)
    )
    count = np.asarray(frozen.legal).sum(-1)
    assert set(np.unique(count)) >= {1, 2, 3, 4}
    expected = np.average(np.log(count), weights=frozen.actor_weight)
    np.testing.assert_allclose(report.entropy, expected, rtol=1e-5)
    np.testing.assert_allclose(loss, -0.003 * expected, rtol=1e-5)


def test_slots_that_cannot_act_move_the_actor_by_exactly_nothing():
    _, actor, _, _, frozen = batch()
    old, later = array(np.log(taken(probabilities())) - 0.1), jnp.asarray(False)
    (loss, _), (gradient, slope) = actor_gradients(actor, frozen, old, later)
    counts = np.asarray(frozen.actor_weight) > 0
    assert not np.any(np.asarray(slope)[~counts])
    has_choice = counts & (np.asarray(frozen.legal).sum(-1) > 1)
    assert np.all(np.abs(np.asarray(slope)[has_choice]).max(-1) > 0)

    idle = array(~counts)
    changed = frozen._replace(
        s=jnp.where(idle[..., None], 7.0, frozen.s),
        advantage=jnp.where(idle, -50.0, frozen.advantage),
        legal=frozen.legal | idle[..., None],
        action=jnp.where(idle, 4, frozen.action),
    )
    (other_loss, _), (other, _) = actor_gradients(actor, changed, old, later)
    assert loss == other_loss
    jax.tree.map(np.testing.assert_array_equal, gradient, other)
    # A dead slot of a living team is among them.
    assert np.any(idle & (np.asarray(frozen.value_weight) > 0))


def test_a_policy_that_ran_away_stays_finite():
    _, actor, _, _, frozen = batch()
    for distance in (1e6, -1e6):
        old = jnp.full(frozen.action.shape, distance)
        (loss, (_, report)), (gradient, _) = actor_gradients(actor, frozen, old, jnp.asarray(False))
        numbers = [loss, report.divergence, *map(jnp.sum, jax.tree.leaves(gradient))]
        assert np.isfinite(numbers).all()


# The critic's loss.


def make_replayed(seed: int = 0) -> ReplayTargets:
    rng = np.random.default_rng(seed)
    shape = (BATCH, ROOTS - 1, AGENTS)
    return ReplayTargets(
        returns=array(3 * rng.normal(size=shape)),
        valid=array(rng.random(shape) < 0.7),
    )


def test_the_critic_loss_by_hand():
    _, _, critic, _, frozen = batch()
    replayed = make_replayed()
    loss, (imagined, real) = jit(functools.partial(critic_loss, config=DEBUG))(
        critic, frozen, replayed
    )
    # Recorded states are the first imagined ones; after the last of them nothing is recorded.
    recorded = jax.tree.map(lambda leaf: leaf[0, :, :-1], frozen)._replace(returns=replayed.returns)

    @jit
    def log_probs(view):
        return jax.nn.log_softmax(critic(view.s, view.present, view.alive))

    def crossed(view):
        encoded = TwoHot(DEBUG.bins).encode(view.returns)
        return -np.sum(np.asarray(encoded) * np.asarray(log_probs(view)), axis=-1)

    by_imagination = np.average(crossed(frozen), weights=frozen.value_weight)
    by_replay = crossed(recorded)[np.asarray(replayed.valid)].mean()
    np.testing.assert_allclose(imagined, by_imagination, rtol=1e-5)
    np.testing.assert_allclose(real, by_replay, rtol=1e-5)
    np.testing.assert_allclose(loss, by_imagination + 0.3 * by_replay, rtol=1e-5)


def test_the_critic_sees_who_is_there_and_who_lives():
    imagined, _, critic, _, _ = batch()
    s = imagined.s[0, :, :2]
    both = jnp.ones(s.shape[:-1], bool)
    look = functools.partial(jit(type(critic).__call__), critic)
    plain = look(s, both, both)
    dead = look(s, both, both.at[..., 2].set(False))
    assert np.all(np.abs(np.asarray(plain - dead)[..., :2, :]).max(-1) > 0)
    absent = both.at[..., 2].set(False)
    without, changed = look(s, absent, both), look(s.at[..., 2, :].set(9.0), absent, both)
    np.testing.assert_array_equal(without[..., :2, :], changed[..., :2, :])
    swapped = look(s[..., ::-1, :], both, both)
    np.testing.assert_allclose(swapped[..., ::-1, :], plain, rtol=1e-4, atol=1e-5)


# Value targets on real rewards.


def record_of(seed: int = 5):
    return random_record(seed, batch=BATCH, length=ROOTS, episode=6)


def boot_of(seed: int = 6) -> jax.Array:
    return array(np.random.default_rng(seed).normal(size=(BATCH, ROOTS, AGENTS)))


@functools.cache
def targets_under(config: MajepaConfig):
    return jit(lambda record, boot: replay_targets(record, boot, config))


def targets_of(record, boot, config: MajepaConfig = DEBUG) -> ReplayTargets:
    return jax.tree.map(np.asarray, targets_under(config)(record, boot))


def test_replayed_returns_against_a_loop():
    record, boot = record_of(), boot_of()
    got = targets_of(record, boot)
    reward, last = np.asarray(record.reward), np.asarray(record.is_last)
    terminal, start = np.asarray(record.is_terminal), np.asarray(boot)
    discount = 1 - 1 / 333
    for row, agent in np.ndindex(BATCH, AGENTS):
        following = start[row, -1, agent]
        for t in reversed(range(ROOTS - 1)):
            if terminal[row, t + 1]:
                following = reward[row, t + 1]
            elif last[row, t + 1]:
                following = reward[row, t + 1] + discount * start[row, t + 1, agent]
            else:
                mixed = 0.05 * start[row, t + 1, agent] + 0.95 * following
                following = reward[row, t + 1] + discount * mixed
            np.testing.assert_allclose(got.returns[row, t, agent], following, rtol=1e-4, atol=1e-5)
    assert terminal.any()
    assert (last & ~terminal).any()


def test_replayed_values_are_learned_where_something_follows():
    record = record_of()
    got = targets_of(record, boot_of())
    present, last = np.asarray(record.present), np.asarray(record.is_last)
    np.testing.assert_array_equal(got.valid, (present & ~last[..., None])[:, :-1])
    assert not present.all()


def test_an_end_keeps_its_reward_and_a_cut_goes_on_in_value():
    record, boot = record_of(), boot_of()
    row, t = map(int, np.argwhere(np.asarray(record.is_last)[:, 1:-1])[0] + [0, 1])
    for is_terminal in (True, False):
        told = record._replace(is_terminal=record.is_terminal.at[row, t].set(is_terminal))
        got = targets_of(told, boot).returns[row, t - 1]
        following = 0.0 if is_terminal else (1 - 1 / 333) * np.asarray(boot)[row, t]
        np.testing.assert_allclose(got, record.reward[row, t] + following, rtol=1e-5)


def test_where_no_root_is_valid_the_target_critic_bootstraps():
    """So an episode that was cut off goes on from the value of its final record."""
    imagined, _, _, value, frozen = batch()
    valid = np.asarray(imagined.value_valid[0])
    boot = frozen.returns[0]
    np.testing.assert_allclose(np.asarray(boot)[~valid], value[0][~valid], rtol=1e-5, atol=1e-6)
    assert np.abs(np.asarray(boot) - value[0])[valid].min() > 1e-5
    row, root, agent = map(int, np.argwhere(~valid[:, 1:])[0] + [0, 1, 0])
    blank = jnp.zeros((BATCH, ROOTS), bool)
    cut = record_of()._replace(is_last=blank.at[row, root].set(True), is_terminal=blank)
    got = targets_of(cut, boot).returns[row, root - 1, agent]
    expected = cut.reward[row, root] + (1 - 1 / 333) * value[0, row, root, agent]
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_returns_know_nothing_of_the_next_episode():
    record, boot = record_of(), boot_of()
    row, last = map(int, np.argwhere(np.asarray(record.is_last)[:, 1:-1])[0] + [0, 1])
    # The final record's own bootstrap counts if the episode was cut off; nothing after it does.
    later = (jnp.arange(BATCH) == row)[:, None] & (jnp.arange(ROOTS) > last)[None]
    changed = record._replace(reward=jnp.where(later, 1e3, record.reward))
    one = targets_of(record, boot)
    other = targets_of(changed, jnp.where(later[..., None], -1e3, boot))
    np.testing.assert_array_equal(one.returns[row, :last], other.returns[row, :last])
    assert np.any(one.returns[row, last:] != other.returns[row, last:])


def test_full_traces_without_bootstrap_are_monte_carlo_returns():
    config = dataclasses.replace(
        DEBUG, policy=dataclasses.replace(DEBUG.policy, replay_trace=1.0, discount=0.9)
    )
    record = record_of()
    got = targets_of(record, jnp.zeros((BATCH, ROOTS, AGENTS)), config).returns
    reward, last = np.asarray(record.reward), np.asarray(record.is_last)
    for row, t in np.ndindex(BATCH, ROOTS - 1):
        total, factor = 0.0, 1.0
        for later in range(t + 1, ROOTS):
            total += factor * reward[row, later]
            factor *= 0.9
            if last[row, later]:
                break
        np.testing.assert_allclose(got[row, t], total, rtol=1e-4, atol=1e-5)


# The steps.


class Update(NamedTuple):
    params: Params
    optimizers: Optimizers
    frozen: Frozen
    replayed: ReplayTargets
    basis: Basis


@functools.cache
def algorithm() -> Majepa:
    # A rate at which the policy leaves the clipping range within five steps.
    rates = dataclasses.replace(DEBUG.optimizer, actor_rate=0.02, critic_rate=0.01)
    return Majepa(dataclasses.replace(DEBUG, optimizer=rates), SPEC, steps=100)


@functools.cache
def begun() -> Update:
    _, actor, critic, _, frozen = batch()
    params = Params(*make_models(0), actor, critic)
    moments = (algorithm().model_optimizer.init(group) for group in params)
    basis = Basis(params.local.dynamics)
    return Update(params, Optimizers(*moments), condensed(frozen), make_replayed(), basis)


def condensed(batch):
    """With random states of the size that an update takes."""
    size = Basis(make_models(0)[0].dynamics).gram.shape[0] + LOCAL.latents * LOCAL.classes
    s = np.random.default_rng(0).normal(size=(*batch.s.shape[:-1], size))
    return batch._replace(s=array(s))


def dense(batch):
    """The same batch with whole states."""
    c, z = np.split(np.asarray(batch.s), [begun().basis.gram.shape[0]], axis=-1)
    return batch._replace(s=array(np.concatenate([c @ begun().basis.weight, z], axis=-1)))


@functools.cache
def improve():
    return jit(algorithm().improve)


@functools.cache
def improved():
    return improve()(*begun())


def same(one, other) -> bool:
    return all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


def test_five_steps_of_actor_and_critic_and_none_of_the_model():
    before = begun()
    params, optimizers, epochs = improved()
    steps = [int(moments.steps) for moments in optimizers]
    assert steps == [0, 0, 5, 5]
    for group in ("local", "joint"):
        assert same(getattr(params, group), getattr(before.params, group))
        assert same(getattr(optimizers, group), getattr(before.optimizers, group))
    for group in ("actor", "critic"):
        assert not same(getattr(params, group), getattr(before.params, group))
    assert epochs.actor_loss.shape == (5,)


def test_the_policy_leaves_the_old_one_after_the_first_epoch_only():
    _, _, epochs = improved()
    assert epochs.policy.divergence[0] == 0
    assert epochs.policy.clipped[0] == 0
    assert np.all(epochs.policy.divergence[1:] > 0)
    assert epochs.policy.clipped[-1] > 0
    assert epochs.critic_imagined[-1] < epochs.critic_imagined[0]


def test_every_epoch_uses_the_frozen_batch_and_the_first_policy():
    params, optimizers, thin, replayed, _ = begun()
    frozen = dense(thin)
    config, optimizer = algorithm().config, algorithm()

    @jit
    def actor_step(actor, moments, old, first):
        objective = jax.value_and_grad(actor_loss, has_aux=True)
        (_, (old, _)), gradient = objective(actor, frozen, old, first, config)
        return *apply_update(optimizer.actor_optimizer, gradient, moments, actor)[:2], old

    @jit
    def critic_step(critic, moments):
        gradient = jax.grad(critic_loss, has_aux=True)(critic, frozen, replayed, config)[0]
        return apply_update(optimizer.critic_optimizer, gradient, moments, critic)[:2]

    actor, actor_moments, old = params.actor, optimizers.actor, jnp.zeros(frozen.action.shape)
    critic, critic_moments = params.critic, optimizers.critic
    for epoch in range(5):
        actor, actor_moments, old = actor_step(actor, actor_moments, old, jnp.asarray(epoch == 0))
        critic, critic_moments = critic_step(critic, critic_moments)

    # Parameters are not compared: the bias of attention's keys has no effect and follows noise.
    @jit
    def opinions(actor, critic):
        logits = critic(frozen.s, frozen.present, frozen.alive)
        return jnp.exp(actor(frozen.s, frozen.legal)), jax.nn.softmax(logits)

    after, _, _ = improved()
    got, expected = opinions(after.actor, after.critic), opinions(actor, critic)
    started = opinions(params.actor, params.critic)
    for one, other, start in zip(got, expected, started, strict=True):
        assert np.abs(one - start).max() > 0.1
        np.testing.assert_allclose(one, other, atol=2e-3)
    first = log_prob_of(params.actor(frozen.s, frozen.legal), frozen.action)
    np.testing.assert_allclose(old, first, rtol=1e-4, atol=1e-5)


def altered(**changes) -> tuple[Params, Optimizers]:
    """The update on a batch that is changed in some fields."""
    before = begun()
    frozen = before.frozen._replace(
        **{name: new for name, new in changes.items() if name in Frozen._fields}
    )
    replayed = before.replayed._replace(
        **{name: new for name, new in changes.items() if name == "valid"}
    )
    return improve()(before.params, before.optimizers, frozen, replayed, before.basis)[:2]


def test_the_critics_losses_do_not_touch_the_actor():
    before, frozen = begun(), begun().frozen
    params, _ = altered(actor_weight=jnp.zeros_like(frozen.actor_weight))
    assert same(params.actor, before.params.actor)
    assert same(params.critic, improved()[0].critic)


def test_the_actors_loss_does_not_touch_the_critic():
    before, frozen = begun(), begun().frozen
    params, _ = altered(
        value_weight=jnp.zeros_like(frozen.value_weight),
        valid=jnp.zeros_like(before.replayed.valid),
    )
    assert same(params.critic, before.params.critic)
    assert same(params.actor, improved()[0].actor)


@pytest.mark.parametrize(("group", "other"), [("actor", "critic"), ("critic", "actor")])
def test_a_group_whose_loss_is_no_number_stays_as_it_is(group, other):
    before = begun()
    field = {"actor": "advantage", "critic": "returns"}[group]
    broken = jnp.full_like(getattr(before.frozen, field), jnp.nan)
    params, optimizers = altered(**{field: broken})
    assert same(getattr(params, group), getattr(before.params, group))
    assert same(getattr(optimizers, group), getattr(before.optimizers, group))
    assert same(getattr(params, other), getattr(improved()[0], other))
    assert isinstance(getattr(optimizers, other), Moments)
    assert getattr(optimizers, other).steps == 5
