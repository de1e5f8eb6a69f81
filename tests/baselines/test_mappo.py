"""MAPPO against slow definitions, the mistakes that are usual in it, and a game it must learn."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from majepa.baselines.mappo import NO_ACTION, Mappo, Network, Sequences
from majepa.collect import begin, collect
from majepa.config import ConfigError, MappoConfig, preset
from majepa.envs import make_env
from majepa.envs.base import EnvSpec, TimeStep
from majepa.evaluate import evaluate
from majepa.nn.dists import log_prob_of, masked_log_probs
from majepa.policy.returns import ValueNorm, clipped_surrogate, gae

NUM_AGENTS, NUM_ACTIONS = 2, 3


class MatchingState(NamedTuple):
    key: jax.Array
    steps: jax.Array
    """Rows since the reset; every row has its own bit."""
    place: jax.Array
    """Rows since the episode began."""


@dataclasses.dataclass(frozen=True)
class Matching:
    """Both agents must take the action that their observation shows: 0 or 1, never 2."""

    limit: int = 5
    ends: bool = False
    """Whether episodes end for a reason of their own, or are cut off."""
    deaths: bool = False
    """Whether agent 1 dies in its third row. It keeps its actions: only `alive` says so."""
    forbids: bool = False
    """Whether agent 0 may never take action 1."""

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec("toy:matching", NUM_AGENTS, NUM_ACTIONS, 2, 3, 4, self.limit)

    def reset(self, keys):
        zeros = jnp.zeros(keys.shape[0], jnp.int32)
        state = MatchingState(keys, zeros, zeros)
        return state, self._row(state, jnp.zeros(keys.shape[0]))

    def step(self, state, action):
        wins = jnp.all(action == self._bits(state)[:, None], axis=1)
        is_over = state.place == self.limit
        place = jnp.where(is_over, 0, state.place + 1)
        state = MatchingState(state.key, state.steps + 1, place)
        return state, self._row(state, jnp.where(is_over, 0.0, wins.astype(jnp.float32)))

    def _bits(self, state):
        rows = jax.vmap(jax.random.fold_in)(state.key, state.steps)
        return jax.vmap(lambda key: jax.random.randint(key, (), 0, 2))(rows)

    def _row(self, state, reward):
        batch = (state.place.shape[0], NUM_AGENTS)
        shown = jax.nn.one_hot(self._bits(state), 2)
        observation = jnp.broadcast_to(shown[:, None], (*batch, 2))
        clock = jnp.broadcast_to(state.place[:, None, None] / self.limit, (*batch, 1))
        agent = jnp.broadcast_to(jnp.arange(2.0)[None, :, None], (*batch, 1))
        dies = (state.place[:, None] >= 2) & (jnp.arange(2) == 1)[None]
        forbidden = (jnp.arange(2) == 0)[None, :, None] & (jnp.arange(3) == 1)[None, None]
        is_last = state.place == self.limit
        return TimeStep(
            observation=observation,
            legal=jnp.broadcast_to(~forbidden | (not self.forbids), (*batch, NUM_ACTIONS)),
            alive=~dies if self.deaths else jnp.ones(batch, bool),
            agent_state=jnp.concatenate([observation, clock, agent], axis=-1),
            state=jnp.concatenate([shown, clock[:, 0]], axis=-1),
            reward=reward,
            is_first=state.place == 0,
            is_last=is_last,
            is_terminal=is_last & self.ends,
            won=jnp.zeros(batch[0], bool),
            info={},
        )


CONFIG = MappoConfig(
    width=8, num_envs=3, rollout=16, chunk=4, epochs=2, timeout_is_terminal=False
)  # fmt: skip
VARIANTS = {
    "recurrent": CONFIG,
    "feed-forward": dataclasses.replace(CONFIG, recurrent=False, frames=3),
}


@functools.cache
def rollouts(variant="recurrent", env=None, count=2):
    """Successive rollouts of a policy with opinions: (algorithm, learner, experiences)."""
    env = env or Matching(deaths=True)
    algorithm = Mappo(VARIANTS[variant], env.spec)
    learner = algorithm.init(jax.random.key(1))
    loud = learner.actor.head.weight * 200  # The initial policy is uniform, whatever it is shown.
    head = dataclasses.replace(learner.actor.head, weight=loud)
    learner = learner._replace(
        actor=dataclasses.replace(learner.actor, head=head),
        returns=ValueNorm(jnp.asarray(0.3), jnp.asarray(0.9), jnp.asarray(0.5)),
    )
    stream = begin(algorithm, env, jax.random.split(jax.random.key(2), CONFIG.num_envs))
    gather = jax.jit(functools.partial(collect, algorithm, env, rows=CONFIG.rollout))
    experiences = []
    for index in range(count):
        gathered = gather(learner, stream, jax.random.key(index))
        stream = gathered.stream
        experiences.append(gathered.data)
    return algorithm, learner, experiences


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


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_replayed_rollout_is_the_one_that_was_played(variant):
    algorithm, learner, experiences = rollouts(variant)
    for data in experiences:
        batch, _ = algorithm.sequences(learner, data)
        inside = np.asarray(batch.is_first[1:] if variant == "recurrent" else batch.is_first)
        assert inside.any()
        logits, _ = learner.actor(batch.view, batch.is_first, batch.actor_hidden[0])
        log_prob = log_prob_of(masked_log_probs(logits, batch.legal), batch.action)
        np.testing.assert_allclose(jnp.exp(log_prob - batch.log_prob), 1.0, atol=1e-5)
        assert np.std(batch.log_prob) > 0.1
        values, _ = learner.critic(batch.state, batch.is_first, batch.critic_hidden[0])
        np.testing.assert_allclose(values[..., 0], batch.value, atol=1e-5)


def test_hidden_states_of_the_rollout_matter():
    algorithm, learner, experiences = rollouts()
    batch, _ = algorithm.sequences(learner, experiences[1])
    forgotten = jnp.zeros_like(batch.actor_hidden[0])
    logits, _ = learner.actor(batch.view, batch.is_first, forgotten)
    log_prob = log_prob_of(masked_log_probs(logits, batch.legal), batch.action)
    assert np.max(np.abs(log_prob - batch.log_prob)) > 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sequence_is_a_stretch_of_one_agent(variant):
    algorithm, learner, (_, data) = rollouts(variant)
    length = algorithm.sequence
    batch, _ = algorithm.sequences(learner, data)
    rows = np.asarray(data.rows.step.observation).reshape(-1, length, 3, NUM_AGENTS, 2)
    streams = rows.transpose(1, 0, 2, 3, 4).reshape(length, -1, 2)
    newest = np.asarray(batch.view)[..., -7:-5]
    np.testing.assert_array_equal(newest, streams)
    ids = np.asarray(batch.view)[..., -2:].argmax(-1)
    assert (ids == ids[:1]).all()
    np.testing.assert_array_equal(ids[0, :4], [0, 1, 0, 1])


def test_agents_see_their_last_action_and_id():
    algorithm, learner, (_, data) = rollouts()
    batch, _ = algorithm.sequences(learner, data)
    action, first = np.asarray(data.rows.action), np.asarray(data.rows.step.is_first)
    before = np.concatenate([np.asarray(data.carry.sight.last_action)[None], action[:-1]])
    before = np.where(first[..., None], NO_ACTION, before)
    cut = before.reshape(-1, 4, 3 * NUM_AGENTS).transpose(1, 0, 2).reshape(4, -1)
    seen = np.asarray(batch.view)[..., 2:5]
    np.testing.assert_array_equal(seen, cut[..., None] == np.arange(NUM_ACTIONS))
    assert (cut == NO_ACTION).any()
    assert (seen.sum(-1) == 1).any()


def test_frames_are_cleared_when_an_episode_begins():
    algorithm, _, (data, _) = rollouts("feed-forward")
    sight, views = algorithm.begin(3).sight, []
    for row in range(8):
        step = jax.tree.map(lambda x, row=row: x[row], data.rows.step)
        sight = algorithm.see(sight, step)
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
    algorithm, learner, experiences = rollouts(env=Matching(ends=ends))
    config = algorithm.config
    for data in experiences:
        returns, advantage, decides = algorithm.advantages(learner, data)
        step, final = data.rows.step, data.final
        memory = data.final_carry
        last = algorithm.act(learner, memory, final, jax.random.key(0), greedy=True).kept.value
        value = learner.returns.denormalise(jnp.concatenate([data.rows.kept.value, last[None]]))
        reward = np.concatenate([step.reward, final.reward[None]])
        is_last = np.concatenate([step.is_last, final.is_last[None]])
        value = np.asarray(value)
        expected = np.zeros_like(advantage)
        for k in reversed(range(config.rollout)):
            for env in range(config.num_envs):
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


def gradients(algorithm, learner, batch):
    target = learner.returns.normalise(batch.returns)
    actor, _ = jax.grad(algorithm.actor_loss, has_aux=True)(learner.actor, batch)
    return actor, jax.grad(algorithm.critic_loss)(learner.critic, batch, target)


def differ(a, b) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return any(np.any(x != y) for x, y in pairs)


def test_dead_agents_teach_the_critic_but_not_the_actor():
    algorithm, learner, (data, _) = rollouts()
    batch, _ = algorithm.sequences(learner, data)
    dead = batch.counts & ~batch.acts
    assert dead.any()
    actor, critic = gradients(algorithm, learner, batch)
    other_actor, other_critic = gradients(algorithm, learner, spoiled(batch, dead))
    assert not differ(actor, other_actor)
    assert differ(critic, other_critic)
    some_actor, _ = gradients(algorithm, learner, spoiled(batch, batch.acts & (batch.action == 1)))
    assert differ(actor, some_actor)


def test_last_rows_teach_nobody():
    algorithm, learner, (data, _) = rollouts(env=Matching())
    batch, _ = algorithm.sequences(learner, data)
    assert batch.acts.sum() == (~data.rows.step.is_last).sum() * NUM_AGENTS
    np.testing.assert_array_equal(batch.acts, batch.counts)
    strange = spoiled(batch, ~batch.counts)
    assert not differ(gradients(algorithm, learner, batch), gradients(algorithm, learner, strange))
    decay = algorithm.config.value_decay
    norm = learner.returns.updated(batch.returns, batch.counts, decay)
    assert not differ(norm, learner.returns.updated(strange.returns, strange.counts, decay))


def test_what_happens_in_a_last_row_changes_nothing():
    algorithm, learner, (data, _) = rollouts(env=Matching(ends=True))
    last = data.rows.step.is_last
    kept = data.rows.kept._replace(value=jnp.where(last[..., None], 50.0, data.rows.kept.value))
    strange = data._replace(rows=data.rows._replace(kept=kept))
    plain, _ = algorithm.sequences(learner, data)
    other, _ = algorithm.sequences(learner, strange)
    np.testing.assert_array_equal(plain.counts, other.counts)
    for name in ("advantage", "returns"):
        ours, theirs = (np.asarray(getattr(x, name))[plain.counts] for x in (plain, other))
        np.testing.assert_array_equal(ours, theirs)


def test_advantages_are_standardised_over_the_living():
    algorithm, learner, (data, _) = rollouts()
    batch, metrics = algorithm.sequences(learner, data)
    alive = np.asarray(batch.advantage)[np.asarray(batch.acts)]
    np.testing.assert_allclose([alive.mean(), alive.std()], [0, 1], atol=1e-4)
    everyone = np.asarray(batch.advantage)[np.asarray(batch.counts)]
    assert abs(everyone.mean()) > 1e-3
    np.testing.assert_allclose(metrics["rollout/valid"], np.mean(batch.acts), rtol=1e-6)
    transitions = ~np.concatenate([data.rows.step.is_first[1:], data.final.is_first[None]])
    rewards = np.concatenate([data.rows.step.reward[1:], data.final.reward[None]])
    np.testing.assert_allclose(metrics["rollout/reward"], rewards[transitions].mean(), rtol=1e-6)


def test_the_critic_loss_by_hand():
    algorithm, learner, (data, _) = rollouts()
    batch, _ = algorithm.sequences(learner, data)
    now = np.asarray(batch.value)
    old = jnp.asarray(now + np.linspace(-1, 1, now.size, dtype=np.float32).reshape(now.shape))
    target = jnp.asarray(np.linspace(3, 30, now.size, dtype=np.float32).reshape(now.shape))
    loss = algorithm.critic_loss(learner.critic, batch._replace(value=old), target)

    def huber(error):
        error = np.abs(error)
        return np.where(error <= 10, error**2 / 2, 10 * (error - 5))

    near = old + np.clip(now - old, -0.2, 0.2)
    expected = np.maximum(huber(target - now), huber(target - near))[np.asarray(batch.counts)]
    np.testing.assert_allclose(loss, expected.mean(), rtol=1e-5)


def test_the_actor_loss_by_hand():
    algorithm, learner, (data, _) = rollouts()
    batch, _ = algorithm.sequences(learner, data)
    batch = batch._replace(log_prob=batch.log_prob - jnp.log(1.1))
    loss, metrics = algorithm.actor_loss(learner.actor, batch)
    logits, _ = learner.actor(batch.view, batch.is_first, batch.actor_hidden[0])
    probs, acts = np.asarray(jax.nn.softmax(logits)), np.asarray(batch.acts)
    entropy = -(probs * np.log(probs)).sum(-1)[acts].mean()
    expected = -1.1 * np.asarray(batch.advantage)[acts].mean() - 0.01 * entropy
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    np.testing.assert_allclose(metrics["actor/entropy"], entropy, rtol=1e-5)
    np.testing.assert_allclose(metrics["actor/kl"], 0.1 - np.log(1.1), rtol=1e-3)
    assert metrics["actor/clipped"] == 0


# Acting.


@pytest.mark.parametrize("greedy", [True, False])
def test_illegal_actions_are_never_taken(greedy):
    env = Matching(forbids=True)
    algorithm = Mappo(CONFIG, env.spec)
    learner = algorithm.init(jax.random.key(0))
    # An actor that wants nothing but action 1.
    head = dataclasses.replace(learner.actor.head, bias=jnp.array([0.0, 50.0, -1.0]))
    learner = learner._replace(actor=dataclasses.replace(learner.actor, head=head))
    _, step = env.reset(jax.random.split(jax.random.key(1), 500))
    decision = algorithm.act(learner, algorithm.begin(500), step, jax.random.key(2), greedy=greedy)
    action = np.asarray(decision.action)
    assert (action[:, 1] == 1).all()
    assert (action[:, 0] != 1).all()
    assert (action[:, 0] == 0).all() if greedy else (action[:, 0] == 2).any()
    log_probs = masked_log_probs(jnp.array([3.0, 50.0, 1.0]), jnp.array([True, False, True]))
    assert jnp.exp(log_probs)[1] == 0


def test_agents_draw_their_own_actions_and_keys_decide():
    env = Matching()
    algorithm = Mappo(CONFIG, env.spec)
    learner = algorithm.init(jax.random.key(0))
    _, step = env.reset(jax.random.split(jax.random.key(1), 200))
    act = functools.partial(algorithm.act, learner, algorithm.begin(200), step, greedy=False)
    one, same, other = (np.asarray(act(jax.random.key(k)).action) for k in (3, 3, 4))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()
    assert (one[:, 0] != one[:, 1]).any()


def test_acting_of_an_agent_needs_its_own_observation_only():
    env = Matching()
    algorithm, learner, (data, _) = rollouts()
    step = jax.tree.map(lambda x: x[3], data.rows.step)
    carry = data.carry
    changed = step._replace(
        observation=step.observation.at[:, 1].set(9.0),
        agent_state=step.agent_state * 0 + 5.0,
        state=step.state + 1.0,
    )
    key = jax.random.key(0)
    plain, other = (algorithm.act(learner, carry, x, key, greedy=False) for x in (step, changed))
    assert env.spec.num_agents == 2
    np.testing.assert_array_equal(plain.action[:, 0], other.action[:, 0])
    np.testing.assert_array_equal(plain.carry.actor[:, 0], other.carry.actor[:, 0])
    assert np.any(plain.carry.actor[:, 1] != other.carry.actor[:, 1])


# Networks.


def test_networks_start_orthogonal_with_the_gains_of_the_paper(key):
    learner = Mappo(MappoConfig(), Matching().spec).init(key)
    for network, gain in ((learner.actor, 0.01), (learner.critic, 1.0)):
        assert len(network.layers) == 2
        matrices = [(linear.weight, 2**0.5) for linear, _ in network.layers]
        gru, _ = network.recurrent
        matrices += [(gru.from_input.weight, 1.0), (gru.from_hidden.weight, 1.0)]
        for weight, size in [*matrices, (network.head.weight, gain)]:
            stretch = np.linalg.svd(np.asarray(weight), compute_uv=False)
            np.testing.assert_allclose(stretch, size, rtol=1e-4)
        assert not np.any(network.head.bias)


def test_the_first_policy_is_uniform_and_the_feed_forward_one_has_no_memory(key):
    config = dataclasses.replace(CONFIG, recurrent=False)
    network = Network(4, 3, config, gain=0.01, key=key)
    assert network.recurrent is None
    x = jax.random.normal(key, (2, 5, 4))
    hidden = jnp.ones((5, 8))
    out, after = network(x, jnp.zeros((2, 5), bool), hidden)
    np.testing.assert_allclose(jax.nn.softmax(out), 1 / 3, atol=0.02)
    np.testing.assert_array_equal(after, hidden)


def test_critics_use_the_agent_state_or_make_one(key):
    sim = make_env("3m").spec
    states = Mappo(MappoConfig(), sim).begin(1).sight.states
    assert states.shape == (1, 3, 1, sim.agent_state_size)
    # A world without one repeats its state, and the agent's own view is joined to it.
    env = Matching()
    spec = dataclasses.replace(env.spec, agent_state_size=env.spec.state_size)
    algorithm = Mappo(CONFIG, spec)
    _, step = env.reset(jax.random.split(key, 1))
    repeated = jnp.broadcast_to(step.state[:, None], (1, NUM_AGENTS, 3))
    sight = algorithm.see(algorithm.begin(1).sight, step._replace(agent_state=repeated))
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
    assert algorithm.cadence == (8, 400)
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


@pytest.mark.parametrize("minibatches", [1, 5])
def test_an_update_moves_both_networks_and_reports(minibatches):
    algorithm, learner, (data, _) = rollouts()
    algorithm = dataclasses.replace(
        algorithm, config=dataclasses.replace(algorithm.config, minibatches=minibatches)
    )
    update = jax.jit(algorithm.update)
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
        "critic/gradient_norm",
        "critic/explained_variance",
        "rollout/reward",
        "rollout/valid",
        "nonfinite_in_a_row",
    }
    for name, value in metrics.items():
        assert (value.shape, value.dtype) == ((), jnp.float32), name
        assert jnp.isfinite(value), name
    steps = jax.tree.leaves(after.actor_optimizer, is_leaf=lambda x: hasattr(x, "count"))
    assert {int(x.count) for x in steps if hasattr(x, "count")} == {2 * minibatches}


def test_updates_that_are_not_finite_are_skipped_and_counted():
    algorithm, learner, (data, _) = rollouts()
    kept = data.rows.kept
    broken = kept._replace(log_prob=kept.log_prob.at[0, 0].set(jnp.nan))
    update = jax.jit(algorithm.update)
    after = learner
    for count in (1, 2):
        bad = data._replace(rows=data.rows._replace(kept=broken))
        after, metrics = update(after, bad, jax.random.key(0))
        assert metrics["nonfinite_in_a_row"] == count
    assert not differ(learner.actor, after.actor)
    _, metrics = update(after, data, jax.random.key(0))
    assert metrics["nonfinite_in_a_row"] == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_learns_to_agree(variant):
    env = Matching()
    config = dataclasses.replace(
        VARIANTS[variant], width=32, num_envs=8, rollout=32, epochs=10, actor_rate=3e-3,
        critic_rate=3e-3,
    )  # fmt: skip
    algorithm = Mappo(config, env.spec)
    learner = algorithm.init(jax.random.key(0))
    stream = begin(algorithm, env, jax.random.split(jax.random.key(1), config.num_envs))

    @jax.jit
    def advance(learner, stream, key):
        key_act, key_learn = jax.random.split(key)
        gathered = collect(algorithm, env, learner, stream, key_act, rows=config.rollout)
        learner, _ = algorithm.update(learner, gathered.data, key_learn)
        return learner, gathered.stream

    judge = functools.partial(evaluate, algorithm, env, episodes=50, key=jax.random.key(7))
    assert judge(learner, greedy=False).mean_return < 1.5  # Chance is 5 / 9.
    for index in range(15):
        learner, stream = advance(learner, stream, jax.random.key(index))
    assert judge(learner, greedy=True).mean_return == env.limit
    assert judge(learner, greedy=False).mean_return > 0.8 * env.limit
