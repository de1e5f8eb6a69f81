"""QMIX against slow definitions, the mistakes that are usual in it, and a game it must learn."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawn import jit
from matching import NUM_ACTIONS, NUM_AGENTS, Matching

from majepa.algorithm import Algorithm, Cadence, Decentralised, agent_keys
from majepa.baselines.qmix import Learner, Mixer, Networks, Qmix, Stored, exploring
from majepa.collect import Collected, begin, collect
from majepa.config import ConfigError, QmixConfig, preset
from majepa.envs.make import make_env
from majepa.policy.view import NO_ACTION

CONFIG = QmixConfig(
    width=8, mixer_width=4, hyper_width=6, num_envs=3, capacity=20, batch=6, target_every=9,
    epsilon_steps=100, timeout_is_terminal=False,
)  # fmt: skip
ENV = Matching()
ALGORITHM = Qmix(CONFIG, ENV.spec, steps=400)
ROWS = ENV.limit + 1


def louder(networks: Networks) -> Networks:
    """Networks with opinions, whose parts are far from zero."""
    return jax.tree.map(lambda leaf: 2.0 * leaf + 0.1, networks)


@functools.cache
def played(rounds: int = 3) -> tuple[Learner, list[Collected]]:
    """A learner that has seen some rounds of episodes, and these."""
    start = jit(lambda: (
        ALGORITHM.init(jax.random.key(1)),
        begin(ALGORITHM, ENV, jax.random.split(jax.random.key(2), CONFIG.num_envs)),
    ))  # fmt: skip
    learner, stream = start()
    learner = learner._replace(
        networks=louder(learner.networks), target=jax.tree.map(lambda x: 0.7 * x, learner.target)
    )
    play = jit(functools.partial(collect, ALGORITHM, ENV, rows=ENV.limit))
    found = []
    for index in range(rounds):
        found.append(play(learner, stream, jax.random.key(index)))
        stream = found[-1].stream
    return learner, found


def episodes(lengths=(6, 3, 4), *, seed: int = 0, ends=(True, True, False)) -> tuple:
    """Stored rows of given lengths, with rubbish behind their ends."""
    rng = np.random.default_rng(seed)
    shape = (ROWS, len(lengths))
    spec = ENV.spec
    time = np.arange(ROWS)[:, None]
    length = np.asarray(lengths)
    legal = rng.random((*shape, NUM_AGENTS, NUM_ACTIONS)) < 0.7
    legal[..., 0] |= ~legal.any(-1)
    is_terminal = (time == length - 1) & np.asarray(ends)
    is_terminal |= (time >= length) & (rng.random(shape) < 0.5)
    rows = Stored(
        observation=rng.normal(size=(*shape, NUM_AGENTS, spec.observation_size)),
        legal=legal,
        state=rng.normal(size=(*shape, spec.state_size)),
        action=rng.integers(0, NUM_ACTIONS, (*shape, NUM_AGENTS)),
        reward=rng.normal(size=shape),
        is_terminal=is_terminal,
    )
    as_stored = [jnp.float32, bool, jnp.float32, jnp.int32, jnp.float32, bool]
    rows = Stored(*(jnp.asarray(x, kind) for x, kind in zip(rows, as_stored, strict=True)))
    return rows, jnp.asarray(length, jnp.int32)


# Returns and the loss.


def slow_returns(value, rows, length, trace=0.6, discount=0.99):
    returns = np.zeros((ROWS - 1, len(length)))
    for b, rows_of_one in enumerate(length):
        following = 0.0
        for t in reversed(range(rows_of_one - 1)):
            is_end = t + 1 == rows_of_one - 1
            ahead = value[t + 1, b] if is_end else (
                (1 - trace) * value[t + 1, b] + trace * following
            )  # fmt: skip
            goes_on = 0.0 if rows.is_terminal[t + 1, b] else 1.0
            following = rows.reward[t + 1, b] + discount * goes_on * ahead
            returns[t, b] = following
    return returns


@pytest.mark.parametrize("lengths", [(6, 3, 4), (2, 2, 2), (6, 6, 6)])
def test_returns_equal_a_loop_over_episodes(lengths):
    rows, _ = episodes(lengths)
    value = np.random.default_rng(1).normal(size=(ROWS, 3)).astype(np.float32)
    decides = np.arange(ROWS - 1)[:, None] < np.asarray(lengths) - 1
    got = ALGORITHM.returns(jnp.asarray(value), rows, jnp.asarray(decides))
    expected = slow_returns(value, rows, lengths)
    np.testing.assert_allclose(np.where(decides, got, 0.0), expected, atol=1e-5)


def test_the_return_of_a_terminal_transition_is_its_reward():
    rows, length = episodes((6, 3, 4), ends=(True, True, True))
    decides = jnp.arange(ROWS - 1)[:, None] < length[None] - 1
    got = ALGORITHM.returns(100.0 * jnp.ones((ROWS, 3)), rows, decides)
    for b, rows_of_one in enumerate((6, 3, 4)):
        assert got[rows_of_one - 2, b] == pytest.approx(
            float(rows.reward[rows_of_one - 1, b]), abs=1e-4
        )


@functools.cache
def loss_of():
    return jit(ALGORITHM.loss)


def two_networks() -> tuple[Networks, Networks]:
    learner, _ = played()
    return learner.networks, learner.target


def test_the_loss_by_hand():
    """Slowly: agent by agent and row by row, with the networks as they are."""
    online, target = two_networks()
    rows, length = episodes()
    loss, _ = loss_of()(online, target, rows, length)

    @jit
    def step(agent, hidden, shown):
        drive = agent.gru.from_input(jax.nn.relu(agent.first(shown)))
        hidden = agent.gru.step(hidden, drive)
        return hidden, agent.head(hidden)

    def values(networks):
        every = np.zeros((ROWS, 3, NUM_AGENTS, NUM_ACTIONS))
        for b in range(3):
            for agent in range(NUM_AGENTS):
                hidden, last = np.zeros(CONFIG.width, np.float32), None
                for t in range(ROWS):
                    shown = [
                        rows.observation[t, b, agent],
                        np.zeros(NUM_ACTIONS) if last is None else np.eye(NUM_ACTIONS)[last],
                        np.eye(NUM_AGENTS)[agent],
                    ]
                    hidden, found = step(
                        networks.agent, hidden, np.concatenate(shown, dtype=np.float32)
                    )
                    every[t, b, agent] = found
                    last = int(rows.action[t, b, agent])
        return every

    mine, slow = values(online), values(target)
    best = np.where(rows.legal, mine, -np.inf).argmax(-1)
    pick = lambda table, index: np.take_along_axis(table, np.asarray(index)[..., None], -1)[..., 0]  # noqa: E731
    goal = np.asarray(target.mixer(jnp.asarray(pick(slow, best), jnp.float32), rows.state))
    team = np.asarray(online.mixer(jnp.asarray(pick(mine, rows.action), jnp.float32), rows.state))
    returns = slow_returns(goal, rows, np.asarray(length))
    errors = [
        0.5 * (team[t, b] - returns[t, b]) ** 2
        for b, rows_of_one in enumerate(np.asarray(length))
        for t in range(rows_of_one - 1)
    ]
    assert len(errors) == 5 + 2 + 3
    np.testing.assert_allclose(loss, np.mean(errors), rtol=1e-4)


def test_what_lies_behind_an_episode_changes_nothing():
    online, target = two_networks()
    rows, length = episodes()
    time = np.arange(ROWS)[:, None]
    gradient = jit(jax.grad(lambda *x: ALGORITHM.loss(*x)[0]))
    expected = gradient(online, target, rows, length)
    behind = time >= np.asarray(length)
    other = episodes(seed=9)[0]

    def mixed(one, two):
        return jnp.where(jnp.expand_dims(behind, tuple(range(2, one.ndim))), two, one)

    changed = jax.tree.map(mixed, rows, other)
    got = gradient(online, target, changed, length)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, expected)
    # And an episode more that is twice as long in rubbish does not dilute the mean.
    assert not np.allclose(rows.reward, changed.reward)


def test_only_legal_actions_are_best():
    """With one legal action, the goal is its value, however good the others look."""
    online, target = two_networks()
    rows, length = episodes()
    loss = loss_of()
    only = jnp.zeros_like(rows.legal).at[..., 2].set(True)
    forced, _ = loss(online, target, rows._replace(legal=only), length)
    other, _ = loss(online, target, rows._replace(legal=jnp.roll(only, 1, axis=-1)), length)
    assert forced != other
    # The mask of the row that is bootstrapped from counts, not the one of the row before.
    first = rows.legal.at[0].set(only[0])
    unchanged, _ = loss(online, target, rows._replace(legal=first), length)
    np.testing.assert_allclose(unchanged, loss(online, target, rows, length)[0], rtol=1e-6)


def test_targets_receive_no_gradient():
    online, target = two_networks()
    rows, length = episodes()
    gradient = jit(jax.grad(lambda target: ALGORITHM.loss(online, target, rows, length)[0]))(target)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradient))


def test_the_team_value_rises_with_that_of_every_agent():
    mixer = jit(lambda: Mixer(4, 5, CONFIG, key=jax.random.key(0)))()
    mixer = jax.tree.map(lambda leaf: 5 * leaf, mixer)
    values, state = (
        jax.random.normal(key, (50, size))
        for key, size in zip(jax.random.split(jax.random.key(1)), (4, 5), strict=True)
    )
    slopes = jit(jax.vmap(jax.grad(mixer)))(values, state)
    assert (slopes >= 0).all() and (slopes > 0).mean() > 0.9
    # And the state alone moves it both ways.
    by_state = jit(jax.vmap(jax.grad(mixer, argnums=1)))(values, state)
    assert (by_state > 0).any() and (by_state < 0).any()


# Acting.


def test_exploring_mixes_the_best_legal_action_with_all_legal_ones():
    values = jnp.array([[3.0, 5.0, 4.0], [3.0, 5.0, 4.0]])
    legal = jnp.array([[True, True, True], [True, False, True]])
    probs = np.exp(exploring(values, legal, jnp.float32(0.3)))
    np.testing.assert_allclose(probs, [[0.1, 0.8, 0.1], [0.15, 0.0, 0.85]], atol=1e-6)
    everything = exploring(values, legal, jnp.float32(1.0))
    np.testing.assert_array_equal(jnp.argmax(everything, -1), [1, 2])


def test_exploration_falls_linearly_with_transitions():
    falls = [float(ALGORITHM.epsilon(jnp.asarray(n))) for n in (0, 50, 100, 1000)]
    np.testing.assert_allclose(falls, [1.0, 0.525, 0.05, 0.05], atol=1e-6)


def test_an_episode_is_replayed_as_it_was_played():
    """The values in replay are those the agents acted on: same memory, same last actions."""
    learner, found = played()
    data = found[0].data
    values = jit(ALGORITHM.values)(learner.networks.agent, stored(data))
    legal = data.rows.step.legal
    greedy = learner._replace(transitions=jnp.asarray(10**6))
    carry = ALGORITHM.begin(CONFIG.num_envs)
    act = jit(functools.partial(ALGORITHM.act, greedy=True))
    for t in range(ROWS):
        step = jax.tree.map(lambda leaf: leaf[t], data.rows.step)  # noqa: B023
        decision = act(greedy, carry, step, jax.random.key(0))
        best = jnp.argmax(jnp.where(legal[t], values[t], -jnp.inf), axis=-1)
        np.testing.assert_array_equal(decision.action, best)
        carry = decision.carry._replace(last_action=data.rows.action[t])


def stored(data) -> Stored:
    step = data.rows.step
    return Stored(
        step.observation, step.legal, step.state, data.rows.action, step.reward, step.is_terminal
    )


def test_agents_are_executed_apart():
    assert isinstance(ALGORITHM, Algorithm) and isinstance(ALGORITHM, Decentralised)
    learner, found = played()
    executor = ALGORITHM.executor(learner)
    step = jax.tree.map(lambda leaf: leaf[0], found[0].data.rows.step)
    keys = agent_keys(jax.random.key(7), CONFIG.num_envs, NUM_AGENTS)
    act = jit(functools.partial(ALGORITHM.act, greedy=False))
    together = act(learner, ALGORITHM.begin(CONFIG.num_envs), step, jax.random.key(7))
    alone = jit(functools.partial(ALGORITHM.act_alone, greedy=False))
    for b in range(CONFIG.num_envs):
        for agent in range(NUM_AGENTS):
            one = alone(
                executor, ALGORITHM.wake(jnp.asarray(agent)), step.observation[b, agent],
                step.legal[b, agent], step.is_first[b], keys[b, agent],
            )  # fmt: skip
            assert one.action == together.action[b, agent]
            np.testing.assert_allclose(
                one.memory.memory.hidden[0, 0], together.carry.hidden[b, agent], atol=1e-6
            )


# The cadence and the update.


def test_rounds_are_whole_episodes():
    _, found = played()
    for one in found:
        step = one.data.rows.step
        assert step.is_first.shape == (ROWS, CONFIG.num_envs)
        assert step.is_first[0].all() and not step.is_first[1:].any()
        assert step.is_last[-1].all() and not step.is_last[:-1].any()
        assert int(one.counts.transitions) == ENV.limit * CONFIG.num_envs
    assert (found[0].data.final_carry.last_action == NO_ACTION).all()


@functools.cache
def update():
    return jit(ALGORITHM.update)


@functools.cache
def updates():
    """Learners and metrics after each of several rounds."""
    learner, found = played(7)
    after = []
    for index, one in enumerate(found):
        learner, metrics = update()(learner, one.data, jax.random.key(index))
        after.append((learner, {name: float(value) for name, value in metrics.items()}))
    return after


def test_nothing_is_learned_before_there_is_a_batch():
    fresh, _ = played(7)
    first, metrics = updates()[0]
    assert np.isnan(metrics["loss/critic"]) and first.replay.episodes == 3
    same = jax.tree.map(lambda a, b: bool((a == b).all()), first.networks, fresh.networks)
    assert all(jax.tree.leaves(same))
    second, metrics = updates()[1]
    assert metrics["loss/critic"] > 0 and metrics["critic/gradient_norm"] > 0
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), second.networks, first.networks)
    assert all(jax.tree.leaves(moved))


def test_targets_are_copied_after_so_many_episodes():
    """Nine episodes are three rounds; the first copy comes with the third."""

    def differ(learner):
        return any(
            bool((a != b).any())
            for a, b in zip(
                jax.tree.leaves(learner.networks), jax.tree.leaves(learner.target), strict=True
            )
        )

    assert [differ(learner) for learner, _ in updates()] == [
        True,
        True,
        False,
        True,
        True,
        False,
        True,
    ]


def test_transitions_are_counted_for_exploration():
    per_round = ENV.limit * CONFIG.num_envs
    assert [int(learner.transitions) for learner, _ in updates()] == [
        per_round * (n + 1) for n in range(7)
    ]
    assert updates()[1][1]["rollout/epsilon"] == pytest.approx(1 - 0.95 * 2 * per_round / 100)


def test_time_limits_end_the_world_where_the_config_says_so():
    learner, found = played()
    assert not found[0].data.rows.step.is_terminal[-1].any()
    config = dataclasses.replace(CONFIG, timeout_is_terminal=True)
    algorithm = Qmix(config, ENV.spec, steps=400)
    play = jit(functools.partial(collect, algorithm, ENV, rows=ENV.limit))
    again = play(learner, found[0].stream, jax.random.key(0))
    assert again.data.rows.step.is_terminal[-1].all()


def test_updates_that_are_not_finite_are_skipped_and_counted():
    learner, found = played(7)
    data = found[0].data
    step = data.rows.step._replace(reward=jnp.full_like(data.rows.step.reward, jnp.inf))
    bad = data._replace(rows=data.rows._replace(step=step))
    after = learner
    for count in range(3):
        after, metrics = update()(after, bad, jax.random.key(count))
    assert metrics["nonfinite_in_a_row"] == 2
    same = jax.tree.map(lambda a, b: bool((a == b).all()), after.networks, learner.networks)
    assert all(jax.tree.leaves(same))


def test_one_optimizer_bounds_the_gradient_of_both_networks_together():
    networks, _ = two_networks()
    optimizer = ALGORITHM.optimizer
    gradient = jax.tree.map(lambda leaf: jnp.full_like(leaf, 3.0), networks)
    state = jit(optimizer.init)(networks)
    plain = optax.adam(CONFIG.rate, eps=CONFIG.adam_eps)
    norm = optax.tree.norm(gradient)
    small = jax.tree.map(lambda leaf: leaf * CONFIG.max_gradient / norm, gradient)
    got, _ = jit(optimizer.update)(gradient, state, networks)
    expected, _ = jit(plain.update)(small, plain.init(networks), networks)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, expected)


def test_layers_start_as_in_the_reference():
    learner = jit(ALGORITHM.init)(jax.random.key(3))
    agent = learner.networks.agent
    for linear, inputs in ((agent.first, 7), (agent.head, 8)):
        bound = inputs**-0.5
        assert 0.7 * bound < float(jnp.abs(linear.weight).max()) <= bound
        assert float(jnp.abs(linear.bias).max()) <= bound
    for linear in (agent.gru.from_input, agent.gru.from_hidden):
        assert 0.8 * 8**-0.5 < float(jnp.abs(linear.weight).max()) <= 8**-0.5


def test_the_settings_of_the_paper():
    config = preset("qmix", env="sim:8m").algo
    assert config == QmixConfig(
        width=64, rate=1e-3, discount=0.99, trace=0.6, target_every=200, max_gradient=10,
        batch=128, capacity=5000, num_envs=8, epsilon_start=1.0, epsilon_end=0.05,
        epsilon_steps=100_000, mixer_width=32, hyper_width=64,
    )  # fmt: skip
    algorithm = Qmix(config, make_env("8m").spec, steps=100_000)
    assert algorithm.cadence == Cadence(8, 120, whole_episodes=True)


@pytest.mark.parametrize("settings", [{"capacity": 100}, {"capacity": 127, "num_envs": 130}])
def test_a_replay_smaller_than_a_batch_or_a_round_is_refused(settings):
    with pytest.raises(ConfigError, match=r"algo\.capacity is 1..; it must be at least 1[23]\d"):
        QmixConfig(**settings)


@pytest.mark.slow
def test_it_learns_to_agree():
    config = dataclasses.replace(
        CONFIG, width=32, mixer_width=16, hyper_width=16, num_envs=8, batch=32, capacity=400,
        rate=3e-3, updates=4, target_every=40, epsilon_steps=1_500, timeout_is_terminal=True,
    )  # fmt: skip
    algorithm = Qmix(config, ENV.spec, steps=4_000)

    @jax.jit
    def train(key):
        keys = jax.random.split(key, config.num_envs)
        start = (algorithm.init(key), begin(algorithm, ENV, keys))
        return jax.lax.scan(advance, start, jax.random.split(key, 60))[1]

    def advance(now, key):
        learner, stream = now
        key_act, key_learn = jax.random.split(key)
        gathered = collect(algorithm, ENV, learner, stream, key_act, rows=ENV.limit)
        learner, _ = algorithm.update(learner, gathered.data, key_learn)
        counts = gathered.counts
        return (learner, gathered.stream), counts.returns / counts.transitions

    reward = train(jax.random.key(0))
    assert reward[:5].mean() < 0.3  # Chance is 1 / 9.
    # One action in twenty is still random, for each of two agents.
    assert reward[-5:].mean() > 0.8
