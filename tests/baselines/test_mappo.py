"""MAPPO against slow definitions, the mistakes that are usual in it, and a game it must learn."""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from matching import NUM_ACTIONS, NUM_AGENTS, Matching

from majepa.algorithm import Cadence, Experience, Metrics
from majepa.baselines.mappo import Learner, Mappo, Network, Sequences
from majepa.collect import begin, collect
from majepa.config import ConfigError, MappoConfig, preset
from majepa.envs import make_env
from majepa.nn.dists import log_prob_of, masked_log_probs
from majepa.policy.returns import ValueNorm, clipped_surrogate, gae
from majepa.policy.view import NO_ACTION

CONFIG = MappoConfig(
    width=8, num_envs=3, rollout=16, chunk=4, epochs=2, timeout_is_terminal=False
)  # fmt: skip
VARIANTS = {
    "recurrent": CONFIG,
    "feed-forward": dataclasses.replace(CONFIG, recurrent=False, frames=3),
}


class Played(NamedTuple):
    """Two successive rollouts of a policy with opinions."""

    algorithm: Mappo
    fresh: Learner
    learner: Learner
    """The fresh one, which treats all actions alike, with a louder head and other returns."""
    data: list[Experience]
    batches: list[Sequences]
    metrics: list[Metrics]


@functools.cache
def played(variant: str) -> Played:
    env = Matching(deaths=True)
    algorithm = Mappo(VARIANTS[variant], env.spec)

    @jax.jit
    def start():
        fresh = algorithm.init(jax.random.key(1))
        actor = eqx.tree_at(lambda actor: actor.head.weight, fresh.actor, replace_fn=louder)
        norm = ValueNorm(jnp.float32(0.3), jnp.float32(0.9), jnp.float32(0.5))
        keys = jax.random.split(jax.random.key(2), CONFIG.num_envs)
        return fresh, fresh._replace(actor=actor, returns=norm), begin(algorithm, env, keys)

    def louder(weight):
        return weight * 200

    @jax.jit
    def play(learner, stream, key):
        gathered = collect(algorithm, env, learner, stream, key, rows=CONFIG.rollout)
        return gathered.stream, gathered.data, *algorithm.sequences(learner, gathered.data)

    fresh, learner, stream = start()
    rollouts = []
    for index in range(2):
        stream, *rollout = play(learner, stream, jax.random.key(index))
        rollouts.append(rollout)
    return Played(algorithm, fresh, learner, *map(list, zip(*rollouts, strict=True)))


@jax.jit
def replayed(network: Network, x, is_first, hidden):
    return network(x, is_first, hidden[0])[0]


# Returns.


def slow_gae(reward, cont, value, trace):
    advantages = np.zeros_like(reward)
    for k in range(len(reward)):
        weight = np.ones_like(reward[0])
        for j in range(k, len(reward)):
            advantages[k] += weight * (reward[j] + cont[j] * value[j + 1] - value[j])
            weight = weight * trace * cont[j]
    return advantages


@pytest.mark.parametrize("shape", [(), (3,), (3, 2)])
def test_gae_equals_the_sum_it_stands_for(shape):
    random = np.random.default_rng(0)
    reward, value = random.normal(size=(9, *shape)), random.normal(size=(10, *shape))
    cont = np.where(random.random((9, *shape)) < 0.3, 0.0, 0.9)
    assert 0 < (cont == 0).mean() < 1
    reward, value, cont = (x.astype(np.float32) for x in (reward, value, cont))
    got = gae(jnp.asarray(reward), jnp.asarray(cont), jnp.asarray(value), 0.8)
    np.testing.assert_allclose(got, slow_gae(reward, cont, value, 0.8), atol=1e-5)


def test_the_surrogate_by_hand():
    ratio = np.array([1.0, 1.5, 1.5, 0.5, 0.5, 1.1], np.float32)
    advantage = np.array([2.0, 1.0, -1.0, 1.0, -1.0, 3.0], np.float32)
    expected = [2.0, 1.2, -1.5, 0.5, -0.8, 3.3]
    got = clipped_surrogate(jnp.log(ratio), jnp.zeros(6), jnp.asarray(advantage), 0.2)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_the_surrogate_pushes_only_where_it_is_not_clipped():
    slope = jax.grad(lambda x, a: clipped_surrogate(x, jnp.zeros(()), a, 0.2))
    assert slope(jnp.log(1.5), jnp.asarray(1.0)) == 0
    np.testing.assert_allclose(slope(jnp.log(1.5), jnp.asarray(-1.0)), -1.5, rtol=1e-6)
    assert np.isfinite(slope(jnp.asarray(500.0), jnp.asarray(-1.0)))


def test_value_norm_inverts_and_starts_with_the_first_batch():
    returns = jnp.array([1.0, 3.0, 100.0])
    norm = ValueNorm.fresh().updated(returns, jnp.array([True, True, False]), 0.99999)
    np.testing.assert_allclose(norm.normalise(jnp.array([1.0, 2.0, 3.0])), [-1, 0, 1], atol=2e-2)
    np.testing.assert_allclose(norm.denormalise(norm.normalise(returns)), returns, rtol=1e-5)


def test_value_norm_finds_mean_and_variance_of_a_stream():
    draws = 4 + 3 * jax.random.normal(jax.random.key(0), (400, 64))
    valid = jnp.ones(64, bool)
    norm, _ = jax.lax.scan(
        lambda norm, x: (norm.updated(x, valid, 0.99999), None), ValueNorm.fresh(), draws
    )
    mean, up = norm.denormalise(jnp.array([0.0, 1.0]))
    np.testing.assert_allclose([mean, up - mean], [4.0, 3.0], rtol=0.02)
    constant = ValueNorm.fresh().updated(jnp.full(64, 7.0), valid, 0.9)
    np.testing.assert_allclose(constant.denormalise(jnp.array([0.0, 1.0])), [7.0, 7.1], rtol=1e-5)


# Replaying a rollout.


@pytest.mark.parametrize(
    "variant", ["recurrent", pytest.param("feed-forward", marks=pytest.mark.slow)]
)
def test_the_replayed_rollout_is_the_one_that_was_played(variant):
    algorithm, _, learner, _, batches, _ = played(variant)
    for batch in batches:
        inside = np.asarray(batch.is_first)[min(1, algorithm.sequence - 1) :]
        assert inside.any()
        assert not inside.all()
        logits = replayed(learner.actor, batch.view, batch.is_first, batch.actor_hidden)
        log_prob = log_prob_of(masked_log_probs(logits, batch.legal), batch.action)
        np.testing.assert_allclose(jnp.exp(log_prob - batch.log_prob), 1.0, atol=1e-5)
        assert np.std(batch.log_prob) > 0.1
        values = replayed(learner.critic, batch.state, batch.is_first, batch.critic_hidden)
        np.testing.assert_allclose(values[..., 0], batch.value, atol=1e-5)


def test_hidden_states_of_the_rollout_matter():
    _, _, learner, _, (_, batch), _ = played("recurrent")
    forgotten = jnp.zeros_like(batch.actor_hidden)
    logits = replayed(learner.actor, batch.view, batch.is_first, forgotten)
    log_prob = log_prob_of(masked_log_probs(logits, batch.legal), batch.action)
    assert np.max(np.abs(log_prob - batch.log_prob)) > 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sequence_is_a_stretch_of_one_agent(variant):
    algorithm, _, _, (_, data), (_, batch), _ = played(variant)
    length = algorithm.sequence
    rows = np.asarray(data.rows.step.observation).reshape(-1, length, 3, NUM_AGENTS, 2)
    streams = rows.transpose(1, 0, 2, 3, 4).reshape(length, -1, 2)
    newest = np.asarray(batch.view)[..., -7:-5]
    np.testing.assert_array_equal(newest, streams)
    ids = np.asarray(batch.view)[..., -2:].argmax(-1)
    assert (ids == ids[:1]).all()
    np.testing.assert_array_equal(ids[0, :4], [0, 1, 0, 1])


def test_agents_see_their_last_action_and_id():
    _, _, _, (_, data), (_, batch), _ = played("recurrent")
    action, first = np.asarray(data.rows.action), np.asarray(data.rows.step.is_first)
    before = np.concatenate([np.asarray(data.carry.sight.last_action)[None], action[:-1]])
    before = np.where(first[..., None], NO_ACTION, before)
    cut = before.reshape(-1, 4, 3 * NUM_AGENTS).transpose(1, 0, 2).reshape(4, -1)
    seen = np.asarray(batch.view)[..., 2:5]
    np.testing.assert_array_equal(seen, cut[..., None] == np.arange(NUM_ACTIONS))
    assert (cut == NO_ACTION).any()
    assert (seen.sum(-1) == 1).any()


def test_frames_are_cleared_when_an_episode_begins():
    algorithm, _, _, (data, _), _, _ = played("feed-forward")
    sight, views = algorithm.begin(3).sight, []
    see = jax.jit(algorithm.see)
    for row in range(8):
        sight = see(sight, jax.tree.map(lambda x, row=row: x[row], data.rows.step))
        views.append(np.asarray(sight.views))
    np.testing.assert_array_equal(views[4][:, :, 1], views[3][:, :, 2])
    np.testing.assert_array_equal(views[4][:, :, 0], views[2][:, :, 2])
    # Row 6 is the first of the second episode.
    assert views[6][:, :, 2].any()
    assert not views[6][:, :, :2].any()
    assert not views[7][:, :, 0].any()
    np.testing.assert_array_equal(views[7][:, :, 1], views[6][:, :, 2])


# What counts.


@pytest.mark.parametrize("ends", [True, False])
def test_advantages_equal_a_loop_over_episodes(ends):
    """Where episodes are cut off the value of the last row is the rest; where they end, nothing."""
    algorithm, _, learner, experiences, _, _ = played("recurrent")
    config = algorithm.config
    for played_data in experiences:
        step, final = played_data.rows.step, played_data.final
        if ends:
            step, final = (x._replace(is_terminal=x.is_last) for x in (step, final))
        data = played_data._replace(rows=played_data.rows._replace(step=step), final=final)
        returns, advantage, decides = jax.jit(algorithm.outcomes)(learner, data)
        act = jax.jit(functools.partial(algorithm.act, greedy=True))
        last = act(learner, data.final_carry, final, jax.random.key(0)).kept.value
        value = jnp.concatenate([data.rows.kept.value, last[None]])
        value = np.asarray(learner.returns.denormalise(value))
        reward = np.concatenate([step.reward, final.reward[None]])
        is_last = np.concatenate([step.is_last, final.is_last[None]])
        assert is_last[:-1].any()
        expected = np.zeros_like(advantage)
        for k, env in itertools.product(reversed(range(config.rollout)), range(config.num_envs)):
            if is_last[k, env]:
                continue
            arrives_last = is_last[k + 1, env]
            future = 0.0 if arrives_last and ends else config.discount * value[k + 1, env]
            goes_on = k + 1 < config.rollout and not arrives_last
            later = config.discount * config.trace * expected[k + 1, env] if goes_on else 0.0
            expected[k, env] = reward[k + 1, env] + future - value[k, env] + later
        np.testing.assert_allclose(advantage, expected, atol=1e-5)
        np.testing.assert_allclose(returns, expected + value[:-1], atol=1e-5)
        np.testing.assert_array_equal(decides[..., 0], ~is_last[:-1])


def test_time_limits_count_as_ends_where_the_config_says_so():
    ended = Mappo(dataclasses.replace(CONFIG, timeout_is_terminal=True), Matching().spec)
    assert ended.timeout_is_terminal
    assert not Mappo(CONFIG, Matching().spec).timeout_is_terminal
    assert preset("mappo").algo.timeout_is_terminal  # type: ignore[union-attr]


def spoiled(batch: Sequences, where) -> Sequences:
    """The batch with nonsense in some entries."""
    return batch._replace(
        advantage=jnp.where(where, 1e3, batch.advantage),
        log_prob=jnp.where(where, -9.0, batch.log_prob),
        returns=jnp.where(where, -1e3, batch.returns),
        value=jnp.where(where, 1e3, batch.value),
        action=jnp.where(where, 2, batch.action),
    )


@functools.partial(jax.jit, static_argnums=0)
def gradients(algorithm, learner, batch):
    target = learner.returns.normalise(batch.returns)
    actor, _ = jax.grad(algorithm.actor_loss, has_aux=True)(learner.actor, batch)
    return actor, jax.grad(algorithm.critic_loss)(learner.critic, batch, target)


def differ(a, b) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return any(np.any(x != y) for x, y in pairs)


def test_dead_agents_teach_the_critic_but_not_the_actor():
    algorithm, _, learner, _, (batch, _), _ = played("recurrent")
    dead = batch.counts & ~batch.acts
    assert dead.any()
    actor, critic = gradients(algorithm, learner, batch)
    other_actor, other_critic = gradients(algorithm, learner, spoiled(batch, dead))
    assert not differ(actor, other_actor)
    assert differ(critic, other_critic)
    some_actor, _ = gradients(algorithm, learner, spoiled(batch, batch.acts & (batch.action == 1)))
    assert differ(actor, some_actor)


def test_last_rows_teach_nobody():
    algorithm, _, learner, (data, _), (batch, _), _ = played("recurrent")
    assert batch.counts.sum() == (~data.rows.step.is_last).sum() * NUM_AGENTS
    assert not np.any(batch.acts & ~batch.counts)
    strange = spoiled(batch, ~batch.counts)
    assert not differ(gradients(algorithm, learner, batch), gradients(algorithm, learner, strange))
    decay = algorithm.config.value_decay
    norm = learner.returns.updated(batch.returns, batch.counts, decay)
    assert not differ(norm, learner.returns.updated(strange.returns, strange.counts, decay))


def test_what_the_critic_says_in_a_terminal_row_changes_nothing():
    algorithm, _, learner, (data, _), _, _ = played("recurrent")
    step, kept = data.rows.step, data.rows.kept
    step = step._replace(is_terminal=step.is_last)
    value = jnp.where(step.is_last[..., None], 50.0, kept.value)
    ended = data._replace(rows=data.rows._replace(step=step))
    strange = data._replace(rows=data.rows._replace(step=step, kept=kept._replace(value=value)))
    sequences = jax.jit(algorithm.sequences)
    (plain, _), (other, _) = sequences(learner, ended), sequences(learner, strange)
    for name in ("advantage", "returns"):
        ours, theirs = (np.asarray(getattr(x, name))[plain.counts] for x in (plain, other))
        np.testing.assert_array_equal(ours, theirs)


def test_advantages_are_standardised_over_the_living():
    _, _, _, (data, _), (batch, _), (metrics, _) = played("recurrent")
    alive = np.asarray(batch.advantage)[np.asarray(batch.acts)]
    np.testing.assert_allclose([alive.mean(), alive.std()], [0, 1], atol=1e-4)
    everyone = np.asarray(batch.advantage)[np.asarray(batch.counts)]
    assert abs(everyone.mean()) > 1e-3
    np.testing.assert_allclose(metrics["rollout/valid"], np.mean(batch.acts), rtol=1e-6)
    transitions = ~np.concatenate([data.rows.step.is_first[1:], data.final.is_first[None]])
    rewards = np.concatenate([data.rows.step.reward[1:], data.final.reward[None]])
    np.testing.assert_allclose(metrics["rollout/reward"], rewards[transitions].mean(), rtol=1e-6)


def test_the_critic_loss_by_hand():
    algorithm, _, learner, _, (batch, _), _ = played("recurrent")
    now = np.asarray(batch.value)
    old = jnp.asarray(now + np.linspace(-1, 1, now.size, dtype=np.float32).reshape(now.shape))
    target = jnp.asarray(np.linspace(3, 30, now.size, dtype=np.float32).reshape(now.shape))
    batch = batch._replace(value=old)
    loss = jax.jit(algorithm.critic_loss)(learner.critic, batch, target)

    def huber(error):
        error = np.abs(error)
        return np.where(error <= 10, error**2 / 2, 10 * (error - 5))

    near = old + np.clip(now - old, -0.2, 0.2)
    expected = np.maximum(huber(target - now), huber(target - near))[np.asarray(batch.counts)]
    np.testing.assert_allclose(loss, expected.mean(), rtol=1e-5)


def test_the_actor_loss_by_hand():
    algorithm, _, learner, _, (batch, _), _ = played("recurrent")
    slope = jnp.linspace(-1.0, 2.0, batch.action.size).reshape(batch.action.shape)
    batch = batch._replace(log_prob=batch.log_prob - jnp.log(1.1), advantage=slope)
    loss, metrics = jax.jit(algorithm.actor_loss)(learner.actor, batch)
    logits = replayed(learner.actor, batch.view, batch.is_first, batch.actor_hidden)
    probs, acts = np.asarray(jax.nn.softmax(logits)), np.asarray(batch.acts)
    entropy = -(probs * np.log(probs)).sum(-1)[acts].mean()
    expected = -1.1 * np.asarray(batch.advantage)[acts].mean() - 0.01 * entropy
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    np.testing.assert_allclose(metrics["actor/entropy"], entropy, rtol=1e-5)
    np.testing.assert_allclose(metrics["actor/kl"], 0.1 - np.log(1.1), rtol=1e-3)
    assert metrics["actor/clipped"] == 0


# Acting.


@functools.cache
def decide(greedy):
    """Decisions for 200 environments by an actor that likes action 1 best, then 0."""
    env = Matching(forbids=True)
    algorithm, fresh, *_ = played("recurrent")

    @jax.jit
    def run(key):
        liking = jnp.array([0.1, 3.0, 0.0])
        actor = eqx.tree_at(lambda actor: actor.head.bias, fresh.actor, liking)
        learner = fresh._replace(actor=actor)
        _, step = env.reset(jax.random.split(jax.random.key(1), 200))
        return algorithm.act(learner, algorithm.begin(200), step, key, greedy=greedy).action

    return run


def test_illegal_actions_are_never_taken():
    best, drawn = (np.asarray(decide(greedy)(jax.random.key(2))) for greedy in (True, False))
    assert (best == [[0, 1]]).all()
    assert set(drawn[:, 0]) == {0, 2}
    assert set(drawn[:, 1]) == {0, 1, 2}
    log_probs = masked_log_probs(jnp.array([3.0, 50.0, 1.0]), jnp.array([True, False, True]))
    assert jnp.exp(log_probs)[1] == 0


def test_agents_draw_their_own_actions_and_keys_decide():
    one, same, other = (np.asarray(decide(False)(jax.random.key(k))) for k in (3, 3, 4))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()
    assert len({(a, b) for a, b in one.tolist()}) == 6


def test_acting_of_an_agent_needs_its_own_observation_only():
    algorithm, _, learner, (data, _), _, _ = played("recurrent")
    step = jax.tree.map(lambda x: x[3], data.rows.step)
    changed = step._replace(
        observation=step.observation.at[:, 1].set(9.0),
        agent_state=step.agent_state * 0 + 5.0,
        state=step.state + 1.0,
    )
    act = jax.jit(functools.partial(algorithm.act, greedy=False))
    plain, other = (act(learner, data.carry, x, jax.random.key(0)) for x in (step, changed))
    np.testing.assert_array_equal(plain.action[:, 0], other.action[:, 0])
    np.testing.assert_array_equal(plain.carry.actor[:, 0], other.carry.actor[:, 0])
    assert np.any(plain.carry.actor[:, 1] != other.carry.actor[:, 1])


# Networks.


def test_networks_start_orthogonal_with_the_gains_of_the_paper():
    _, fresh, *_ = played("recurrent")
    for network, gain in ((fresh.actor, 0.01), (fresh.critic, 1.0)):
        assert len(network.layers) == 2
        matrices = [(linear.weight, 2**0.5) for linear, _ in network.layers]
        gru, _ = network.recurrent
        matrices += [(gru.from_input.weight, 1.0), (gru.from_hidden.weight, 1.0)]
        for weight, size in [*matrices, (network.head.weight, gain)]:
            stretch = np.linalg.svd(np.asarray(weight), compute_uv=False)
            np.testing.assert_allclose(stretch, size, rtol=1e-4)
        assert not np.any(network.head.bias)


def test_the_first_policy_takes_all_actions_alike():
    _, fresh, _, _, (batch, _), _ = played("recurrent")
    logits = replayed(fresh.actor, batch.view, batch.is_first, batch.actor_hidden)
    np.testing.assert_allclose(jax.nn.softmax(logits), 1 / 3, atol=0.02)


def test_feed_forward_networks_remember_nothing():
    _, fresh, _, (_, data), (_, batch), _ = played("feed-forward")
    assert fresh.actor.recurrent is None
    assert fresh.critic.recurrent is None
    assert not np.any(data.final_carry.actor)
    for hidden in (batch.actor_hidden, batch.actor_hidden + 1):
        out = replayed(fresh.actor, batch.view, batch.is_first, hidden)
        np.testing.assert_array_equal(
            out, replayed(fresh.actor, batch.view, batch.is_first, batch.actor_hidden)
        )


def test_critics_use_the_agent_state_or_make_one(key):
    sim = make_env("3m").spec
    states = Mappo(MappoConfig(), sim).begin(1).sight.states
    assert states.shape == (1, 3, 1, sim.agent_state_size)
    # A world without one repeats its state, and the agent's own view is joined to it.
    env = Matching()
    spec = dataclasses.replace(env.spec, agent_state_size=env.spec.state_size)
    algorithm = Mappo(CONFIG, spec)
    _, step = jax.jit(env.reset)(jax.random.split(key, 1))
    repeated = jnp.broadcast_to(step.state[:, None], (1, NUM_AGENTS, 3))
    step = step._replace(agent_state=repeated)
    sight = jax.jit(algorithm.see)(algorithm.begin(1).sight, step)
    expected = np.concatenate([repeated, sight.views[:, :, 0]], axis=-1)
    np.testing.assert_array_equal(sight.states[:, :, 0], expected)


# Settings.


@pytest.mark.parametrize(
    ("map_name", "recurrent", "frames", "epochs", "clip"),
    [
        *((name, True, 1, 15, 0.2) for name in ("3m", "8m", "2s3z", "2s_vs_1sc", "MMM")),
        ("so_many_baneling", True, 1, 15, 0.2),
        ("3s_vs_3z", True, 1, 15, 0.2),
        ("3s_vs_4z", False, 4, 15, 0.2),
        ("3s_vs_5z", False, 4, 15, 0.05),
        ("2c_vs_64zg", True, 1, 5, 0.2),
        ("corridor", False, 1, 5, 0.2),
    ],
)
def test_settings_of_single_maps(map_name, recurrent, frames, epochs, clip):
    config = preset("mappo", env=f"sim:{map_name}").algo
    assert isinstance(config, MappoConfig)
    got = (config.recurrent, config.frames, config.epochs, config.clip)
    assert got == (recurrent, frames, epochs, clip)
    algorithm = Mappo(config, make_env(map_name).spec)
    assert algorithm.cadence == Cadence(8, 400)
    assert algorithm.sequence == (10 if recurrent else 1)


def test_the_settings_all_maps_share():
    config = preset("mappo").algo
    assert isinstance(config, MappoConfig)
    rates = (config.actor_rate, config.critic_rate, config.adam_eps, config.max_gradient)
    assert rates == (5e-4, 5e-4, 1e-5, 10.0)
    objective = (config.discount, config.trace, config.entropy, config.huber, config.minibatches)
    assert objective == (0.99, 0.95, 0.01, 10.0, 1)
    assert (config.width, config.layers, config.value_decay) == (64, 2, 0.99999)


def test_impossible_settings_are_refused():
    spec = Matching().spec
    with pytest.raises(ConfigError, match="divide the rollout of 16"):
        Mappo(dataclasses.replace(CONFIG, chunk=5), spec)
    Mappo(dataclasses.replace(CONFIG, chunk=5, recurrent=False), spec)
    with pytest.raises(ConfigError, match="from 1 to 24"):
        Mappo(dataclasses.replace(CONFIG, minibatches=25), spec)


# Updates.


@functools.cache
def updater(minibatches):
    config = dataclasses.replace(CONFIG, minibatches=minibatches)
    return jax.jit(Mappo(config, Matching().spec).update)


@pytest.mark.parametrize("minibatches", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_an_update_moves_both_networks_and_reports(minibatches):
    _, _, learner, (data, _), _, _ = played("recurrent")
    update = updater(minibatches)
    after, metrics = update(learner, data, jax.random.key(0))
    update(after, data, jax.random.key(0))
    assert update._cache_size() == 1
    assert differ(learner.actor, after.actor)
    assert differ(learner.critic, after.critic)
    assert set(metrics) == {
        "loss/actor",
        "loss/critic",
        "actor/entropy",
        "actor/clipped",
        "actor/kl",
        "actor/gradient_norm",
        "actor/update_ratio",
        "critic/gradient_norm",
        "critic/update_ratio",
        "critic/explained_variance",
        "rollout/reward",
        "rollout/valid",
        "nonfinite_in_a_row",
    }
    for name, value in metrics.items():
        assert (value.shape, value.dtype) == ((), jnp.float32), name
        assert jnp.isfinite(value), name
    for optimizer in (after.actor_optimizer, after.critic_optimizer):
        assert optax.tree.get(optimizer, "count") == 2 * minibatches


def test_updates_that_are_not_finite_are_skipped_and_counted():
    _, _, learner, (data, _), _, _ = played("recurrent")
    kept = data.rows.kept
    broken = kept._replace(log_prob=kept.log_prob.at[0, 0].set(jnp.nan))
    update = updater(1)
    after = learner
    for count in (1, 2):
        bad = data._replace(rows=data.rows._replace(kept=broken))
        after, metrics = update(after, bad, jax.random.key(0))
        assert metrics["nonfinite_in_a_row"] == count
    assert not differ(learner.actor, after.actor)
    _, metrics = update(after, data, jax.random.key(0))
    assert metrics["nonfinite_in_a_row"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_learns_to_agree(variant):
    env = Matching()
    config = dataclasses.replace(
        VARIANTS[variant], width=32, num_envs=8, rollout=32, epochs=10, actor_rate=3e-3,
        critic_rate=3e-3,
    )  # fmt: skip
    algorithm = Mappo(config, env.spec)

    @jax.jit
    def train(key):
        keys = jax.random.split(key, config.num_envs)
        start = (algorithm.init(key), begin(algorithm, env, keys))
        return jax.lax.scan(advance, start, jax.random.split(key, 15))[1]

    def advance(now, key):
        learner, stream = now
        key_act, key_learn = jax.random.split(key)
        gathered = collect(algorithm, env, learner, stream, key_act, rows=config.rollout)
        learner, metrics = algorithm.update(learner, gathered.data, key_learn)
        return (learner, gathered.stream), metrics["rollout/reward"]

    reward = train(jax.random.key(0))
    assert reward[0] < 0.3  # Chance is 1 / 9.
    assert reward[-1] > 0.9
