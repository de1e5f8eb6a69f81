"""The index convention, from a world that counts to everything that learns from it.

`observation[t] = t` and `reward[t] = 10 t`, so that every array says which row it came from. Where
imagination starts, and that it goes on as the rows did, is in `test_imagine.py`.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn, jit
from runs.counting import AGENTS, CountingEnv

from majepa.agent import Learner, Majepa, Optimizers
from majepa.algorithm import Row
from majepa.collect import begin, collect
from majepa.config import DEBUG
from majepa.nn.transformer import History
from majepa.policy.ppo import replay_targets
from majepa.replay import Record, Sequence, insert, sample
from majepa.world_model.masks import sources, team
from majepa.world_model.targets import arrivals
from majepa.world_model.tokens import tokens_of
from majepa.world_model.unroll import States

ENV = CountingEnv(lengths=(3, 5, 4, 2), limit=5)
"""The second environment's episodes are cut off by the clock."""
CONFIG = dataclasses.replace(
    DEBUG,
    replay=dataclasses.replace(DEBUG.replay, batch=8),
    collect=dataclasses.replace(DEBUG.collect, timeout_is_terminal=False),
)
ROWS, CONTEXT = 40, CONFIG.context


class Found(NamedTuple):
    rows: Row
    """As they were collected, time first."""
    replay_after: int
    sequence: Sequence
    row: np.ndarray
    """Absolute number of each sampled record; negative on padding."""
    time: np.ndarray
    """Place of each record in its episode."""
    length: np.ndarray
    """Transitions of the episodes of each sequence's environment."""


@functools.cache
def found() -> Found:
    algorithm = Majepa(CONFIG, ENV.spec, steps=400)
    params = drawn(lambda: algorithm.make_params(jax.random.key(0)))
    zero = jnp.zeros((), jnp.int32)
    moments = Optimizers(*(algorithm.model_optimizer.init(group) for group in params))
    learner = Learner(
        params, params.local.encoder, moments, algorithm.make_replay(),
        zero, jnp.zeros(()), zero, zero,
    )  # fmt: skip

    @jit
    def play(learner, key):
        stream = begin(algorithm, ENV, jax.random.split(key, CONFIG.collect.num_envs))
        rows = collect(algorithm, ENV, learner, stream, key, rows=ROWS).data.rows
        replay = insert(learner.replay, rows, rows.kept)
        return rows, replay.inserted, sample(replay, CONFIG.replay, CONTEXT, key)

    rows, inserted, sequence = jax.tree.map(np.asarray, play(learner, jax.random.key(4)))
    row = sequence.start[:, None] + np.arange(CONTEXT + CONFIG.replay.learning)[None]
    length = np.asarray(ENV.lengths)[sequence.env]
    # The seed shows padding and both kinds of endings.
    assert (row < 0).any()
    assert {3, 5} <= set(length)
    return Found(rows, int(inserted), sequence, row, row % (length[:, None] + 1), length)


def learning() -> Record:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[:, CONTEXT:]), found().sequence.record)


def test_sampled_records_are_rows_of_the_world():
    rows, inserted, sequence, row, time, length = found()
    record, real = sequence.record, row >= 0
    assert inserted == ROWS
    last = time == length[:, None]
    expected = {
        "observation": np.broadcast_to(time[..., None, None], record.observation.shape),
        "reward": 10 * time,
        "is_first": time == 0,
        "is_last": last,
        "is_terminal": last & (length[:, None] != ENV.limit),
        "action": rows.action[row, sequence.env[:, None]],
        "latent": rows.kept[row, sequence.env[:, None]],
        "present": np.ones((*row.shape, AGENTS), bool),
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(getattr(record, name)[real], values[real], err_msg=name)
    assert record.is_first[~real].all()
    assert not record.present[~real].any()


def test_actions_led_to_the_row_after_them():
    """The world repeats the last action of its first agent in the next row's state."""
    _, _, sequence, row, time, _ = found()
    told = found().rows.step.state[..., 1]
    for b, t in np.argwhere((row[:, :-1] >= 0) & (time[:, 1:] > 0)):
        after = told[row[b, t + 1], sequence.env[b]]
        assert sequence.record.action[b, t, 0] == after


def test_tokens_hold_what_came_before_their_record():
    rows, _, sequence, row, time, _ = found()
    given: Sequence = jax.tree.map(jnp.asarray, sequence)
    tokens = tokens_of(given, given.record.latent)
    env = np.broadcast_to(sequence.env[:, None], row.shape)
    follows = row > 0
    # The first record of a sequence too: the row before it is sampled with it.
    assert follows[:, 0].any()
    before = (row[follows] - 1, env[follows])
    np.testing.assert_array_equal(np.asarray(tokens.z_before)[follows], rows.kept[before])
    np.testing.assert_array_equal(np.asarray(tokens.a_before)[follows], rows.action[before])
    np.testing.assert_array_equal(np.asarray(tokens.is_first), (time == 0) | (row < 0))
    begins = np.asarray(tokens.is_first)
    np.testing.assert_array_equal(np.diff(tokens.episode, axis=1), begins[:, 1:])


def test_transitions_arrive_at_the_next_record():
    record = learning()
    e = record.observation
    blank = jnp.zeros((*record.alive.shape, 1, 1))
    nothing = History((blank,), (blank,), record.is_first)
    states = States(e, blank[..., 0], blank, blank, record.latent, nothing)
    target = arrivals(states, 100 + e, record)
    time = found().time[:, CONTEXT:]
    real = found().row[:, CONTEXT:] >= 0
    inside = (real[:, :-1] & (time[:, 1:] > 0))[..., None] & np.ones(AGENTS, bool)
    np.testing.assert_array_equal(np.asarray(team(record)), inside)
    np.testing.assert_array_equal(np.asarray(sources(record)), inside)
    after = np.broadcast_to(time[:, :-1, None] + 1, inside.shape)[inside]
    np.testing.assert_array_equal(np.asarray(target.reward)[inside], 10 * after)
    np.testing.assert_array_equal(np.asarray(target.e)[inside][:, 0], after)
    np.testing.assert_array_equal(np.asarray(target.e_bar)[inside][:, 0], 100 + after)
    length = np.broadcast_to(found().length[:, None, None], inside.shape)[inside]
    np.testing.assert_array_equal(
        np.asarray(target.terminal)[inside], (after == length) & (length != ENV.limit)
    )


@pytest.mark.parametrize("boot", [0.0, 8.0])
def test_returns_by_hand(boot):
    """With half the weight a step later: 30; 20 + 15; 10 + 10 + 7.5 in episodes of three."""
    policy = dataclasses.replace(CONFIG.policy, replay_trace=1.0, discount=0.5)
    config = dataclasses.replace(CONFIG, policy=policy)
    record = learning()
    got = jit(lambda record, boot: replay_targets(record, boot, config))(
        record, jnp.full(record.alive.shape, boot)
    )
    by_hand = {
        3: [27.5, 35.0, 30.0],
        # The clock cuts this one off: its value goes on after the last reward.
        5: [10 + 10 + 7.5 + 5 + 3.125 + boot / 32, 20 + 15 + 10 + 6.25 + boot / 16,
            30 + 20 + 12.5 + boot / 8, 40 + 25 + boot / 4, 50 + boot / 2],
        4: [32.5, 45.0, 50.0, 40.0],
        2: [20.0, 20.0],
    }  # fmt: skip
    time, length = found().time[:, CONTEXT:], found().length
    checked = set()
    for b, t in np.ndindex(*got.returns.shape[:2]):
        ends = t + length[b] - time[b, t]
        is_real = found().row[b, CONTEXT + t] >= 0
        if time[b, t] == length[b] or not is_real:
            assert not got.valid[b, t].any()
        elif ends < time.shape[1]:
            np.testing.assert_allclose(got.returns[b, t], by_hand[length[b]][time[b, t]], rtol=1e-6)
            assert got.valid[b, t].all()
            checked.add((length[b], time[b, t]))
    assert len(checked) > 8
