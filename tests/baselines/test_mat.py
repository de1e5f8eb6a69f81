"""MAT: one pass and one agent after another agree, nothing leaks, and a game it must learn."""

import dataclasses
import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawn import drawn, jit
from matching import NUM_ACTIONS, NUM_AGENTS, Matching

from majepa.algorithm import Algorithm, Cadence, Decentralised, Experience, Metrics
from majepa.baselines.mat import JointSteps, Learner, Mat, Network
from majepa.collect import begin, collect
from majepa.config import MatConfig, preset
from majepa.envs import make_env
from majepa.nn.dists import log_prob_of, masked_log_probs
from majepa.policy.returns import ValueNorm
from majepa.policy.view import NO_ACTION, view_size

CONFIG = MatConfig(
    width=8, blocks=2, heads=2, num_envs=3, rollout=16, epochs=2, timeout_is_terminal=False
)
ALGORITHM = Mat(CONFIG, Matching().spec)


class Played(NamedTuple):
    """Two successive rollouts of a policy with opinions, for which attention matters."""

    learner: Learner
    data: list[Experience]
    batches: list[JointSteps]
    metrics: list[Metrics]


@functools.cache
def fresh() -> Learner:
    return jit(ALGORITHM.init)(jax.random.key(1))


@functools.cache
def opinionated() -> Learner:
    network = drawn(lambda: ALGORITHM.init(jax.random.key(0)).network)
    norm = ValueNorm(jnp.float32(0.3), jnp.float32(0.9), jnp.float32(0.5))
    return fresh()._replace(network=network, returns=norm)


@functools.cache
def played(forbids: bool = False) -> Played:
    env = Matching(deaths=True, forbids=forbids)
    learner = opinionated()

    @jit
    def play(stream, key):
        gathered = collect(ALGORITHM, env, learner, stream, key, rows=CONFIG.rollout)
        return gathered.stream, gathered.data, *ALGORITHM.joint_steps(learner, gathered.data)

    stream = jit(functools.partial(begin, ALGORITHM, env))(jax.random.split(jax.random.key(2), 3))
    rollouts = []
    for index in range(2):
        stream, *rollout = play(stream, jax.random.key(index))
        rollouts.append(rollout)
    return Played(learner, *map(list, zip(*rollouts, strict=True)))


@jit
def one_pass(network: Network, views, action):
    encoded, value = network.encode(views)
    return network.decode(encoded, action), value, encoded


def log_probs_of(batch: JointSteps):
    logits, _, _ = one_pass(opinionated().network, batch.view, batch.decided.action)
    return masked_log_probs(logits, batch.legal)


@jit
def losses(batch: JointSteps, target):
    """The loss with its metrics, and its gradient."""
    network = opinionated().network
    return jax.value_and_grad(ALGORITHM.loss, has_aux=True)(network, batch, target)


def gradient(batch: JointSteps):
    return losses(batch, opinionated().returns.normalise(batch.returns))[1]


def differ(a, b) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return any(np.any(x != y) for x, y in pairs)


# One pass over a joint step, and one agent after another.


@pytest.mark.slow
@pytest.mark.parametrize("forbids", [False, True])
def test_one_pass_gives_the_probabilities_that_acting_had(forbids):
    """With forbidden actions too: they are masked in both, or the ratios were not one."""
    _, _, batches, _ = played(forbids)
    for batch in batches:
        log_prob = log_prob_of(log_probs_of(batch), batch.decided.action)
        np.testing.assert_allclose(jnp.exp(log_prob - batch.decided.log_prob), 1.0, atol=1e-5)
        assert np.std(batch.decided.log_prob) > 0.1
        _, value, _ = one_pass(opinionated().network, batch.view, batch.decided.action)
        np.testing.assert_allclose(value, batch.value, atol=1e-5)
        (_, metrics), _ = losses(batch, batch.returns)
        assert metrics["actor/clipped"] == 0
        np.testing.assert_allclose(metrics["actor/kl"], 0, atol=1e-6)


class Team(NamedTuple):
    network: Network
    views: jax.Array
    action: jax.Array


@functools.cache
def team_of_four() -> Team:
    network = drawn(lambda: Network(6, 5, CONFIG, key=jax.random.key(0)))
    keys = jax.random.split(jax.random.key(3))
    views = jax.random.normal(keys[0], (7, 4, 6))
    return Team(network, views, jax.random.randint(keys[1], (7, 4), 0, 5))


@pytest.mark.parametrize("agent", range(4))
def test_an_action_is_known_to_later_agents_alone(agent):
    network, views, action = team_of_four()
    logits, value, _ = one_pass(network, views, action)
    other = action.at[:, agent].set((action[:, agent] + 1) % 5)
    changed, other_value, _ = one_pass(network, views, other)
    np.testing.assert_array_equal(changed[:, : agent + 1], logits[:, : agent + 1])
    np.testing.assert_array_equal(other_value, value)
    moved = np.abs(changed - logits).max(axis=(0, 2))[agent + 1 :]
    assert (moved > 1e-3).all()


@pytest.mark.parametrize("agent", range(4))
def test_every_agent_is_shown_what_all_see(agent):
    network, views, action = team_of_four()
    plain = one_pass(network, views, action)
    changed = one_pass(network, views.at[:, agent].add(jnp.arange(6.0)), action)
    for before, after in zip(plain, changed, strict=True):
        moved = np.abs(after - before).reshape(7, 4, -1).max(axis=(0, 2))
        assert (moved > 1e-4).all()


def test_the_encoder_knows_no_order():
    network, views, action = team_of_four()
    order = np.array([2, 0, 3, 1])
    _, value, encoded = one_pass(network, views, action)
    _, other_value, other = one_pass(network, views[:, order], action)
    np.testing.assert_allclose(other, encoded[:, order], atol=1e-5)
    np.testing.assert_allclose(other_value, value[:, order], atol=1e-5)


def test_the_first_agent_is_told_the_start_symbol_and_the_others_actions():
    network, views, action = team_of_four()

    def slope(token):
        changed = eqx.tree_at(lambda network: network.token, network, token)
        encoded, _ = changed.encode(views[:1])
        return jnp.sum(changed.decode(encoded, action[:1])[0, 1] ** 2)

    touched = np.abs(jit(jax.grad(slope))(network.token)).max(axis=1) > 0
    np.testing.assert_array_equal(np.flatnonzero(touched), [0, 1 + int(action[0, 0])])


# Acting.


@functools.cache
def decide(greedy: bool):
    """Decisions for 200 environments in which agent 0 may not take action 1, liked best by all."""
    env = Matching(forbids=True)
    network = eqx.tree_at(lambda n: n.policy.out.bias, opinionated().network, replace_fn=liking)
    learner = opinionated()._replace(network=network)
    _, step = env.reset(jax.random.split(jax.random.key(1), 200))

    @jit
    def run(key):
        return ALGORITHM.act(learner, ALGORITHM.begin(200), step, key, greedy=greedy)

    return run


def liking(bias):
    return bias + jnp.array([0.1, 1.0, 0.0])


@pytest.mark.slow
def test_greedy_agents_take_the_best_action_given_those_before():
    _, step = Matching().reset(jax.random.split(jax.random.key(1), 200))
    step = step._replace(observation=3 * jax.random.normal(jax.random.key(2), (200, 2, 2)))
    act = jit(functools.partial(ALGORITHM.act, greedy=True))
    action = act(opinionated(), ALGORITHM.begin(200), step, jax.random.key(0)).action
    views = ALGORITHM.views(ALGORITHM.begin(200).last_action, step)

    def best(told):
        return np.argmax(one_pass(opinionated().network, views, told)[0], axis=-1)

    np.testing.assert_array_equal(action, best(action))
    # To other actions of the first agent, the second has other answers.
    assert (best((action + 1) % NUM_ACTIONS)[:, 0] == action[:, 0]).all()
    assert (best((action + 1) % NUM_ACTIONS)[:, 1] != action[:, 1]).any()


def test_illegal_actions_are_never_taken():
    for greedy in (True, False):
        action = np.asarray(decide(greedy)(jax.random.key(2)).action)
        assert 1 not in action[:, 0]
        assert 1 in action[:, 1]
    assert set(action[:, 0]) == {0, 2}


def test_illegal_actions_have_no_probability_and_no_gradient_in_learning():
    batch = played().batches[0]
    action = jnp.where(batch.decided.action == 1, 0, batch.decided.action)
    batch = batch._replace(
        legal=batch.legal.at[..., 1].set(False), decided=batch.decided._replace(action=action)
    )
    assert not np.exp(log_probs_of(batch)[..., 1]).any()
    slope = np.asarray(gradient(batch).policy.out.bias)
    assert slope[1] == 0
    assert slope[0] != 0


def test_agents_draw_their_own_actions_and_keys_decide():
    run = decide(greedy=False)
    one, same, other = (np.asarray(run(jax.random.key(k)).action) for k in (3, 3, 4))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()
    assert len({(a, b) for a, b in one.tolist()}) == 6


def test_agents_see_their_last_action_and_id():
    _, (_, data), (_, batch), _ = played()
    first = np.asarray(data.rows.step.is_first)
    before = np.concatenate([data.carry.last_action[None], data.rows.action[:-1]])
    before = np.where(first[..., None], NO_ACTION, before).reshape(-1, NUM_AGENTS)
    view = np.asarray(batch.view)
    np.testing.assert_array_equal(view[..., :2], np.reshape(data.rows.step.observation, (48, 2, 2)))
    np.testing.assert_array_equal(view[..., 2:5], before[..., None] == np.arange(NUM_ACTIONS))
    np.testing.assert_array_equal(view[..., 5:], np.broadcast_to(np.eye(2), (48, 2, 2)))
    assert (before == NO_ACTION).any()
    assert (data.carry.last_action != NO_ACTION).any()


def test_teams_act_together_only():
    assert isinstance(ALGORITHM, Algorithm)
    assert not isinstance(ALGORITHM, Decentralised)


# What counts.


def test_returns_go_on_with_the_value_after_the_rollout():
    learner, (data, _), (batch, _), _ = played()
    act = jit(functools.partial(ALGORITHM.act, greedy=True))
    value = act(learner, data.final_carry, data.final, jax.random.key(0)).kept.value
    value = np.asarray(learner.returns.denormalise(value))
    goes_on = ~np.asarray(data.rows.step.is_last[-1])
    assert goes_on.any()
    expected = np.asarray(data.final.reward)[:, None] + CONFIG.discount * value
    got = np.reshape(batch.returns, (CONFIG.rollout, CONFIG.num_envs, NUM_AGENTS))[-1]
    np.testing.assert_allclose(got[goes_on], expected[goes_on], atol=1e-5)


def test_advantages_are_standardised_over_the_living():
    _, _, (batch, _), (metrics, _) = played()
    acts, advantage = np.asarray(batch.decided.acts), np.asarray(batch.decided.advantage)
    np.testing.assert_allclose([advantage[acts].mean(), advantage[acts].std()], [0, 1], atol=1e-4)
    assert abs(advantage[np.asarray(batch.counts)].mean()) > 1e-3
    np.testing.assert_allclose(metrics["rollout/valid"], acts.mean(), rtol=1e-6)


def test_dead_agents_teach_values_but_not_actions():
    _, _, (batch, _), _ = played()
    dead, decided = batch.counts & ~batch.decided.acts, batch.decided
    assert dead.any()
    plain = gradient(batch)
    # Their actions stay: those after them were told.
    strange = decided._replace(
        advantage=jnp.where(dead, 1e3, decided.advantage),
        log_prob=jnp.where(dead, -9.0, decided.log_prob),
    )
    only_own = jax.nn.one_hot(decided.action, NUM_ACTIONS) > 0
    legal = jnp.where(dead[..., None], only_own, batch.legal)
    assert not differ(plain, gradient(batch._replace(decided=strange, legal=legal)))
    other = gradient(batch._replace(returns=jnp.where(dead, -1e3, batch.returns)))
    assert differ(plain, other)
    assert not differ(plain.decoder, other.decoder)
    living = decided._replace(advantage=decided.advantage * 2)
    assert differ(plain.decoder, gradient(batch._replace(decided=living)).decoder)


def test_last_rows_teach_nobody():
    learner, (data, _), (batch, _), _ = played()
    assert batch.counts.sum() == (~data.rows.step.is_last).sum() * NUM_AGENTS
    assert not np.any(batch.decided.acts & ~batch.counts)
    over, decided = ~batch.counts, batch.decided
    strange = batch._replace(
        view=jnp.where(over[..., None], 7.0, batch.view),
        decided=decided._replace(
            action=jnp.where(over, 2, decided.action),
            log_prob=jnp.where(over, -9.0, decided.log_prob),
            advantage=jnp.where(over, 1e3, decided.advantage),
        ),
        value=jnp.where(over, 1e3, batch.value),
        returns=jnp.where(over, -1e3, batch.returns),
    )
    assert not differ(gradient(batch), gradient(strange))
    norms = (learner.returns.updated(x.returns, x.counts, 0.9) for x in (batch, strange))
    assert not differ(*norms)


def test_the_loss_by_hand():
    _, _, (batch, _), _ = played()
    shape, size = batch.value.shape, batch.value.size
    ramp = np.linspace(-1, 2, size, dtype=np.float32).reshape(shape)
    decided = batch.decided._replace(
        log_prob=batch.decided.log_prob - jnp.log(1.04), advantage=jnp.asarray(ramp)
    )
    now, target = np.asarray(batch.value), np.asarray(20 * ramp)
    old = now + ramp
    batch = batch._replace(decided=decided, value=jnp.asarray(old))
    (total, metrics), _ = losses(batch, jnp.asarray(target))

    probs, acts = np.exp(np.asarray(log_probs_of(batch))), np.asarray(decided.acts)
    entropy = -(probs * np.log(probs)).sum(-1)[acts].mean()
    actor = -1.04 * ramp[acts].mean() - 0.01 * entropy

    def huber(error):
        error = np.abs(error)
        return np.where(error <= 10, error**2 / 2, 10 * (error - 5))

    near = old + np.clip(now - old, -0.05, 0.05)
    critic = np.maximum(huber(target - now), huber(target - near))[np.asarray(batch.counts)].mean()
    np.testing.assert_allclose(metrics["loss/actor"], actor, rtol=1e-4)
    np.testing.assert_allclose(metrics["loss/critic"], critic, rtol=1e-4)
    np.testing.assert_allclose(metrics["actor/entropy"], entropy, rtol=1e-5)
    np.testing.assert_allclose(metrics["actor/kl"], 0.04 - np.log(1.04), rtol=1e-2)
    np.testing.assert_allclose(total, actor + critic, rtol=1e-4)


# The network at the start.


def test_weights_start_orthogonal_with_the_gains_of_the_paper():
    flat, _ = jax.tree_util.tree_flatten_with_path(fresh().network)
    gains = []
    for path, leaf in flat:
        names = [part.name for part in path if hasattr(part, "name")]
        if names[-1] == "bias":
            assert not np.any(leaf)
        elif names[-1] in ("weight", "token"):
            before_gelu = names[-1] == "token" or names[-2] in ("hidden", "view")
            gains.append(2**0.5 if before_gelu else 0.01)
            stretch = np.linalg.svd(np.asarray(leaf), compute_uv=False)
            np.testing.assert_allclose(stretch, gains[-1], rtol=1e-4)
    # Views and tokens; two heads; attention and feed-forward of two blocks each.
    assert gains.count(0.01) == 2 + 2 * (4 + 1) + 2 * (8 + 1)
    assert len(gains) - gains.count(0.01) == 2 + 2 + 2 + 2


def test_the_first_policy_takes_all_actions_alike():
    batch = played().batches[0]
    logits, _, _ = one_pass(fresh().network, batch.view, batch.decided.action)
    np.testing.assert_allclose(jax.nn.softmax(logits), 1 / 3, atol=0.02)


# Settings.


def test_the_settings_of_the_paper():
    config = preset("mat", env="sim:corridor").algo
    assert dataclasses.asdict(config) == {
        "width": 64, "blocks": 1, "heads": 1, "num_envs": 32, "rollout": 100, "epochs": 15,
        "minibatches": 1, "clip": 0.05, "entropy": 0.01, "discount": 0.99, "trace": 0.95,
        "rate": 5e-4, "adam_eps": 1e-5, "max_gradient": 10.0, "huber": 10.0,
        "value_decay": 0.99999, "timeout_is_terminal": True,
    }  # fmt: skip
    assert isinstance(config, MatConfig)
    env = make_env("3m")
    algorithm = Mat(config, env.spec)
    assert algorithm.cadence == Cadence(32, 100)
    assert algorithm.timeout_is_terminal
    assert not ALGORITHM.timeout_is_terminal
    network = jax.eval_shape(algorithm.init, jax.random.key(0)).network
    views = env.spec.observation_size + env.spec.num_actions + env.spec.num_agents
    assert view_size(env.spec) == views
    assert network.view.weight.shape == (views, 64)
    assert network.token.shape == (env.spec.num_actions + 1, 64)


# Updates.


@functools.cache
def updater(minibatches: int):
    config = dataclasses.replace(CONFIG, minibatches=minibatches)
    return jit(Mat(config, Matching().spec).update)


@pytest.mark.parametrize("minibatches", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_an_update_moves_everything_and_reports(minibatches):
    learner, (data, _), _, _ = played()
    update = updater(minibatches)
    after, metrics = update(learner, data, jax.random.key(0))
    update(after, data, jax.random.key(0))
    assert update._cache_size() == 1
    flat, _ = jax.tree_util.tree_flatten_with_path(learner.network)
    for (path, old), new in zip(flat, jax.tree.leaves(after.network), strict=True):
        assert np.any(old != new), path
    assert set(metrics) == {
        "loss/actor",
        "loss/critic",
        "actor/entropy",
        "actor/clipped",
        "actor/kl",
        "network/gradient_norm",
        "network/update_ratio",
        "critic/explained_variance",
        "rollout/reward",
        "rollout/valid",
        "nonfinite_in_a_row",
    }
    for name, value in metrics.items():
        assert (value.shape, value.dtype) == ((), jnp.float32), name
        assert jnp.isfinite(value), name
    assert optax.tree.get(after.optimizer, "count") == 2 * minibatches


def test_updates_that_are_not_finite_are_skipped_and_counted():
    learner, (data, _), _, _ = played()
    kept, update, after = data.rows.kept, updater(1), learner
    broken = kept._replace(log_prob=kept.log_prob.at[0, 0].set(jnp.nan))
    for count in (1, 2):
        bad = data._replace(rows=data.rows._replace(kept=broken))
        after, metrics = update(after, bad, jax.random.key(0))
        assert metrics["nonfinite_in_a_row"] == count
    assert not differ(learner.network, after.network)
    assert not differ(learner.optimizer, after.optimizer)
    _, metrics = update(after, data, jax.random.key(0))
    assert metrics["nonfinite_in_a_row"] == 0


@pytest.mark.slow
def test_several_learners_in_one_program():
    learner, (data, _), _, _ = played()
    broken = data.rows.kept._replace(log_prob=data.rows.kept.log_prob.at[0, 0].set(jnp.nan))
    bad = data._replace(rows=data.rows._replace(kept=broken))
    keys = jax.random.split(jax.random.key(7))
    learners, rollouts = (
        jax.tree.map(lambda *x: jnp.stack(x), *pair) for pair in ((learner, learner), (data, bad))
    )
    algorithm = Mat(dataclasses.replace(CONFIG, minibatches=5), Matching().spec)
    after, metrics = jit(jax.vmap(algorithm.update))(learners, rollouts, keys)
    np.testing.assert_array_equal(metrics["nonfinite_in_a_row"], [0, 1])
    alone, _ = updater(5)(learner, data, keys[0])
    pairs = zip(jax.tree.leaves(after.network), jax.tree.leaves(alone.network), strict=True)
    for both, one in pairs:
        np.testing.assert_allclose(both[0], one, atol=1e-5)

    row = jax.tree.map(lambda x: x[0], data.rows.step)
    act = functools.partial(algorithm.act, greedy=False)
    acted = jit(jax.vmap(act, in_axes=(0, None, None, None)))(after, data.carry, row, keys[1])
    alone = jit(act)(jax.tree.map(lambda x: x[0], after), data.carry, row, keys[1])
    np.testing.assert_array_equal(acted.action[0], alone.action)


@pytest.mark.slow
def test_it_learns_to_agree():
    env = Matching()
    config = dataclasses.replace(
        CONFIG, width=32, blocks=1, num_envs=8, rollout=32, epochs=10, rate=3e-3, clip=0.2
    )
    algorithm = Mat(config, env.spec)

    @jax.jit
    def train(key):
        keys = jax.random.split(key, config.num_envs)
        start = (algorithm.init(key), begin(algorithm, env, keys))
        return jax.lax.scan(advance, start, jax.random.split(key, 20))[1]

    def advance(now, key):
        learner, stream = now
        key_act, key_learn = jax.random.split(key)
        gathered = collect(algorithm, env, learner, stream, key_act, rows=config.rollout)
        learner, metrics = algorithm.update(learner, gathered.data, key_learn)
        return (learner, gathered.stream), metrics["rollout/reward"]

    reward = train(jax.random.key(0))
    assert reward[0] < 0.3  # Chance is 1 / 9.
    assert reward[-1] > 0.9
