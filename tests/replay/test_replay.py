"""Replay: who is sampled how often, what a sequence holds, what write-back touches.

Every stored value is a function of its absolute row, environment and agent, so that a sampled
sequence can be recomputed from its start alone.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from majepa.algorithm import Row
from majepa.config import ConfigError, ReplayConfig
from majepa.envs.base import EnvSpec, TimeStep
from majepa.replay import Replay, insert, make_replay, num_starts, sample, write_back
from majepa.run import memory

AGENTS, ACTIONS, LATENTS, CLASSES = 2, 71, 3, 256
CONTEXT, LEARNING = 5, 4
LENGTH = CONTEXT + LEARNING

insert_rows = jax.jit(insert)
draw = jax.jit(sample, static_argnums=(1, 2))
update_latents = jax.jit(write_back, static_argnums=3)


def spec_of(agents: int = AGENTS, actions: int = ACTIONS, size: int = 2) -> EnvSpec:
    return EnvSpec("test:rows", agents, actions, size, 1, 1, episode_limit=10)


def contents(row, env, agents: int = AGENTS, actions: int = ACTIONS, classes: int = CLASSES):
    """All that row `row` of environment `env` holds, for arrays of both of the same shape."""
    row, env = np.asarray(row), np.asarray(env)
    mixed = 7 * row[..., None] + 3 * env[..., None] + 11 * np.arange(agents)
    pair = np.stack([row, env], axis=-1).astype(np.float32)
    return {
        "observation": np.repeat(pair[..., None, :], agents, axis=-2),
        "legal": (mixed[..., None] + np.arange(actions)) % 3 == 0,
        "alive": mixed % 5 != 0,
        "reward": (row + env / 8 + 0.5).astype(np.float32),
        "is_first": row % 10 == 0,
        "is_last": row % 10 == 9,
        "is_terminal": row % 20 == 19,
        "action": (mixed % actions).astype(np.int32),
        "latent": ((mixed[..., None] + 5 * np.arange(LATENTS)) % classes).astype(np.int32),
    }


def rows_of(first: int, count: int, envs: int, **sizes):
    """Rows `first` to `first + count` of every environment, as they come from collection."""
    row, env = np.meshgrid(np.arange(first, first + count), np.arange(envs), indexing="ij")
    held = {name: jnp.asarray(value) for name, value in contents(row, env, **sizes).items()}
    latent, action = held.pop("latent"), held.pop("action")
    blank = jnp.zeros((count, envs, 1), jnp.float32)
    step = TimeStep(
        **held, agent_state=blank[..., None], state=blank, won=jnp.zeros((count, envs), bool),
        info={},
    )  # fmt: skip
    return Row(step, action, ()), latent


def config_of(batch: int, **changes) -> ReplayConfig:
    return ReplayConfig(**{"capacity": 120, "batch": batch, "learning": LEARNING, **changes})


FEW, ALL = config_of(12), config_of(1500, uniform=1.0)
"""A small view, and one that takes in every start of a buffer of 120 rows."""


@functools.cache
def filled(total: int, envs: int = 3, rows: int = 40, chunk: int = 7) -> Replay:
    """A buffer after `total` rows, inserted in pieces that do not divide its ring."""
    config = config_of(1, capacity=rows * envs)
    replay = make_replay(
        spec_of(), config, num_envs=envs, context=CONTEXT, latents=LATENTS, classes=CLASSES
    )
    whole = total - total % chunk
    pieces = [(first, chunk) for first in range(0, whole, chunk)]
    for first, count in [*pieces, *((first, 1) for first in range(whole, total))]:
        replay = insert_rows(replay, *rows_of(first, count, envs))
    return replay


@functools.cache
def tiny(total: int, envs: int, rows: int) -> Replay:
    """A buffer of the smallest records, where only the number of rows matters."""
    config = config_of(1, capacity=rows * envs)
    replay = make_replay(
        spec_of(1, 2, 2), config, num_envs=envs, context=CONTEXT, latents=LATENTS, classes=CLASSES
    )
    chunk = 1_000 if total >= 1_000 else 10
    for first in range(0, total, chunk):
        replay = insert_rows(replay, *rows_of(first, chunk, envs, agents=1, actions=2))
    assert replay.inserted == total
    return replay


def eligible(total: int, envs: int, rows: int) -> list[tuple[int, int]]:
    """All starts and their environments in the order of insertion, straight from the definition."""
    stored = range(max(0, total - rows), total)
    return [
        (start, env)
        for start in range(-CONTEXT, total)
        if all(row in stored for row in range(start + CONTEXT, start + LENGTH))
        and all(row < 0 or row in stored for row in range(start - 1, start + CONTEXT))
        for env in range(envs)
    ]


def mixture(count: int, uniform: float, decay: float) -> np.ndarray:
    """Probabilities of starts in the order of insertion, by a loop over them."""
    recency = []
    for index in range(count):
        recency.append(decay ** (count - 1 - index))
    total = sum(recency)
    return np.array([uniform / count + (1 - uniform) * weight / total for weight in recency])


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Chi-square test, neighbours merged until each cell expects 20 draws."""
    expected = probabilities * counts.sum()
    cell = np.floor(np.cumsum(expected) / 20).astype(int)
    cell = np.unique(np.minimum(cell, cell.max() - 1), return_inverse=True)[1]
    observed, wanted = np.bincount(cell, counts), np.bincount(cell, expected)
    return float(stats.chisquare(observed, wanted * (observed.sum() / wanted.sum())).pvalue)


def draw_counts(replay: Replay, config: ReplayConfig, starts: list[tuple[int, int]], seed: int):
    """How often each start was drawn; a start that is not eligible is an error."""
    view = draw(replay, config, CONTEXT, jax.random.key(seed))
    place = {start: index for index, start in enumerate(starts)}
    drawn = zip(np.asarray(view.start).tolist(), np.asarray(view.env).tolist(), strict=True)
    return np.bincount([place[start] for start in drawn], minlength=len(starts)).astype(float)


@pytest.mark.parametrize(
    "total, envs, rows, decay, uniform",
    [
        (60, 3, 100, 0.9, 0.0),  # few starts, told apart one by one
        (60, 3, 100, 0.9, 0.5),
        (60, 3, 100, 0.9, 1.0),
        (250, 3, 100, 0.9, 0.0),  # after eviction
        (250, 3, 100, 0.9, 0.5),
        (250, 3, 100, 0.9, 1.0),
        (60, 3, 100, 0.9999999, 0.0),  # differences of ages near the precision of their powers
        (100, 3, 100, 1.0, 0.0),  # a full ring, nothing evicted; recency means nothing
        (6_000, 4, 7_000, 0.9998, 0.0),  # 24k starts, the paper's decay
        (6_000, 4, 7_000, 0.9998, 0.5),
        (9_000, 4, 7_000, 0.9998, 0.5),
    ],
)
def test_starts_follow_the_mixture(total, envs, rows, decay, uniform):
    starts = eligible(total, envs, rows)
    config = config_of(100_000, uniform=uniform, decay=decay)
    replay = tiny(total, envs, rows)
    assert num_starts(replay, CONTEXT, LEARNING) == len(starts)
    counts = draw_counts(replay, config, starts, seed=total + int(10 * uniform))
    assert p_value(counts, mixture(len(starts), uniform, decay)) > 1e-3


def test_the_mixture_test_has_power():
    starts, right = eligible(250, 3, 100), functools.partial(mixture, 91 * 3)
    config = config_of(100_000, uniform=0.5, decay=0.9)
    counts = draw_counts(tiny(250, 3, 100), config, starts, seed=1)
    wrong = {
        "more uniform": right(0.55, 0.9),
        "slower": right(0.5, 0.91),
        "one age for each row": np.repeat(mixture(91, 0.5, 0.9**3) / 3, 3),
        "environments reversed": right(0.5, 0.9).reshape(-1, 3)[:, ::-1].reshape(-1),
    }
    assert p_value(counts, right(0.5, 0.9)) > 1e-3
    assert [name for name, other in wrong.items() if p_value(counts, other) > 1e-6] == []


def test_old_starts_are_reached_by_recency():
    """Far back among 440k starts, draws stay as dense as the equation has them."""
    config = config_of(200_000, uniform=0.0)
    view = draw(tiny(70_000, 8, 55_000), config, CONTEXT, jax.random.key(3))
    age = (70_000 - LENGTH - np.asarray(view.start)) * 8 + 7 - np.asarray(view.env)
    beyond = age[age > 25_000] - 25_000
    wanted = config.batch * config.decay**25_000
    assert abs(len(beyond) - wanted) < 4 * np.sqrt(wanted)
    assert stats.kstest(beyond * -np.log(config.decay), "expon").pvalue > 1e-3


@pytest.mark.parametrize("total", [LEARNING, 6, 39, 40, 41, 47, 80, 200])
def test_sequences_hold_their_rows(total):
    replay, starts = filled(total), eligible(total, 3, 40)
    view = draw(replay, ALL, CONTEXT, jax.random.key(total))
    start, env = np.asarray(view.start), np.asarray(view.env)
    assert set(zip(start.tolist(), env.tolist(), strict=True)) == set(starts)

    row = start[:, None] + np.arange(LENGTH)
    expected = contents(row, np.broadcast_to(env[:, None], row.shape))
    for name, value in expected.items():
        real = (row >= 0).reshape(*row.shape, *(1,) * (value.ndim - 2))
        wanted = np.where(real, value, np.asarray(name == "is_first", value.dtype))
        seen = np.asarray(getattr(view.record, name))
        assert seen.dtype == value.dtype
        np.testing.assert_array_equal(seen, wanted, err_msg=name)
    present = np.broadcast_to((row >= 0)[..., None], (*row.shape, AGENTS))
    np.testing.assert_array_equal(view.record.present, present)
    assert present[:, CONTEXT:].all()

    before = contents(start - 1, env)
    real = start >= 1
    np.testing.assert_array_equal(
        view.previous_latent, np.where(real[:, None, None], before["latent"], 0)
    )
    np.testing.assert_array_equal(
        view.previous_action, np.where(real[:, None], before["action"], 0)
    )


def test_padding_comes_before_the_first_rows_only():
    view = draw(filled(LEARNING), FEW, CONTEXT, jax.random.key(0))
    assert (np.asarray(view.start) == -CONTEXT).all()
    padding = jax.tree.map(lambda leaf: np.asarray(leaf[:, :CONTEXT]), view.record)
    assert padding.is_first.all()
    assert not any(np.any(leaf) for leaf in padding._replace(is_first=np.zeros(())))
    assert not np.any(view.previous_latent)
    evicted = draw(filled(41), ALL, CONTEXT, jax.random.key(0))
    assert np.asarray(evicted.start).min() == 2 and np.asarray(evicted.record.present).all()


@pytest.mark.parametrize(
    "total, wanted",
    [(0, 0), (LEARNING - 1, 0), (LEARNING, 1), (LEARNING + 1, 2), (40, 37), (41, 31), (90, 31)],
)
def test_number_of_starts(total, wanted):
    assert num_starts(filled(total), CONTEXT, LEARNING) == 3 * wanted


def test_an_empty_buffer_gives_padding():
    view = draw(filled(0), FEW, CONTEXT, jax.random.key(0))
    assert not np.any(view.record.present) and np.all(view.record.is_first)
    assert not np.any(view.record.observation) and not np.any(view.previous_latent)


def test_views_differ_and_repeat(key):
    replay = filled(60)
    key_model, key_behaviour = jax.random.split(key)
    model, behaviour = (draw(replay, FEW, CONTEXT, each) for each in (key_model, key_behaviour))
    assert (np.asarray(model.start) != np.asarray(behaviour.start)).any()
    again = draw(replay, FEW, CONTEXT, key_model)
    jax.tree.map(np.testing.assert_array_equal, model, again)


def written_by_loop(replay: Replay, start, env, latent) -> np.ndarray:
    """Stored latents after write-back, one sequence after another, row by row."""
    ring, inserted = np.array(replay.stored.latent), int(replay.inserted)
    for index in range(len(start)):
        for offset in range(LEARNING):
            row = start[index] + CONTEXT + offset
            if max(0, inserted - replay.rows) <= row < inserted:
                ring[row % replay.rows, env[index]] = latent[index, offset]
    return ring


def fresh_latents(batch: int, seed: int = 0) -> np.ndarray:
    shape = (batch, LEARNING, AGENTS, LATENTS)
    return np.random.default_rng(seed).integers(0, CLASSES, shape).astype(np.int32)


@pytest.mark.parametrize("total", [12, 40, 75])
def test_write_back_hits_the_learning_rows(total):
    replay = filled(total)
    view = draw(replay, FEW, CONTEXT, jax.random.key(total))
    fresh = fresh_latents(FEW.batch)
    after = update_latents(replay, view, jnp.asarray(fresh), CONTEXT)
    wanted = written_by_loop(replay, np.asarray(view.start), np.asarray(view.env), fresh)
    np.testing.assert_array_equal(after.stored.latent, wanted)
    assert (wanted != np.asarray(replay.stored.latent)).any()
    same = replay._replace(stored=replay.stored._replace(latent=after.stored.latent))
    jax.tree.map(np.testing.assert_array_equal, after, same)


def test_the_last_of_overlapping_sequences_wins():
    replay = filled(75)
    start = np.array([50, 52, 50, 49, 60, 50, 60, 50], np.int32)
    env = np.array([1, 1, 1, 1, 0, 2, 0, 2], np.int32)
    view = jax.tree.map(lambda leaf: leaf[:8], draw(replay, FEW, CONTEXT, jax.random.key(0)))
    view = view._replace(start=jnp.asarray(start), env=jnp.asarray(env))
    fresh = fresh_latents(8)
    after = np.asarray(update_latents(replay, view, jnp.asarray(fresh), CONTEXT).stored.latent)
    np.testing.assert_array_equal(after, written_by_loop(replay, start, env, fresh))
    first = (50 + CONTEXT) % 40
    np.testing.assert_array_equal(after[first : first + LEARNING, 2], fresh[7])
    # Row 55 of environment 1 is in four sequences; the last of them begins one row earlier.
    np.testing.assert_array_equal(after[first, 1], fresh[3, 1])


def test_write_back_spares_rows_that_came_meanwhile():
    replay = filled(75)
    view = draw(replay, ALL, CONTEXT, jax.random.key(0))
    newer = replay
    for first in (75, 82, 89):
        newer = insert_rows(newer, *rows_of(first, 7, 3))
    fresh = fresh_latents(ALL.batch)
    after = update_latents(newer, view, jnp.asarray(fresh), CONTEXT)
    start, env = np.asarray(view.start), np.asarray(view.env)
    assert (start + LENGTH <= 96 - 40).any() and (start + LENGTH > 96 - 40).any()
    np.testing.assert_array_equal(after.stored.latent, written_by_loop(newer, start, env, fresh))
    intact = contents(*np.meshgrid(np.arange(75, 96), np.arange(3), indexing="ij"))["latent"]
    np.testing.assert_array_equal(after.stored.latent[np.arange(75, 96) % 40], intact)


@pytest.mark.parametrize(
    "classes, actions, stored_type", [(64, 71, "uint8"), (256, 71, "uint8"), (300, 257, "uint16")]
)
def test_indices_survive_storage(classes, actions, stored_type):
    sizes = {"num_envs": 3, "context": CONTEXT, "latents": LATENTS, "classes": classes}
    replay = make_replay(spec_of(actions=actions), FEW, **sizes)
    assert replay.stored.latent.dtype == replay.stored.action.dtype == stored_type
    rows, latent = rows_of(0, 40, 3, actions=actions)
    latent = jnp.arange(latent.size).reshape(latent.shape) % classes
    action = jnp.arange(rows.action.size).reshape(rows.action.shape)[::-1] % actions
    replay = insert_rows(replay, rows._replace(action=action), latent)
    view = draw(replay, ALL, CONTEXT, jax.random.key(0))
    row = np.asarray(view.start)[:, None] + np.arange(CONTEXT, LENGTH)
    env = np.asarray(view.env)[:, None]
    np.testing.assert_array_equal(view.record.latent[:, CONTEXT:], np.asarray(latent)[row, env])
    np.testing.assert_array_equal(view.record.action[:, CONTEXT:], np.asarray(action)[row, env])
    assert view.record.latent.max() == classes - 1 and view.record.action.max() <= actions - 1
    swapped = classes - 1 - view.record.latent[:, CONTEXT:]
    after = update_latents(replay, view, swapped, CONTEXT)
    np.testing.assert_array_equal(after.stored.latent, classes - 1 - latent)


def test_more_than_400k_transitions():
    envs, rows, total = 8, 55_000, 70_000
    replay = tiny(total, envs, rows)
    assert num_starts(replay, CONTEXT, LEARNING) == (rows - LENGTH) * envs > 400_000
    view = draw(replay, config_of(200_000), CONTEXT, jax.random.key(1))
    start, env = np.asarray(view.start), np.asarray(view.env)
    assert start.max() == total - LENGTH and set(env[start == start.max()]) == set(range(envs))
    assert 0 <= start.min() - (total - rows + 1) < 10
    row = start[:, None] + np.arange(LENGTH)
    seen = np.asarray(view.record.observation)
    np.testing.assert_array_equal(seen[:, :, 0, 0], row)
    np.testing.assert_array_equal(seen[:, :, 0, 1], np.broadcast_to(env[:, None], row.shape))


def test_one_compilation_serves_all_inserts():
    traces = []

    def round_trip(replay: Replay, rows: Row, latent, key):
        traces.append(1)
        replay = insert(replay, rows, latent)
        view = sample(replay, config_of(4), CONTEXT, key)
        return write_back(replay, view, view.record.latent[:, CONTEXT:], CONTEXT)

    step, replay = jax.jit(round_trip, donate_argnums=0), jax.tree.map(jnp.copy, filled(0))
    for index in range(20):
        replay = step(replay, *rows_of(3 * index, 3, 3), jax.random.key(index))
    assert len(traces) == 1 and int(replay.inserted) == 60
    # What was sampled was written back unchanged, so that nothing tells this from plain inserts.
    jax.tree.map(np.testing.assert_array_equal, replay, filled(60, chunk=3))


def test_a_whole_ring_at_once():
    replay = insert_rows(filled(13), *rows_of(13, 40, 3))
    jax.tree.map(np.testing.assert_array_equal, replay, filled(53))
    with pytest.raises(ValueError, match="ring of 40"):
        insert(replay, *rows_of(0, 41, 3))


def test_rings_too_short_are_refused():
    sizes = {"num_envs": 3, "context": CONTEXT, "latents": 1, "classes": 4}
    with pytest.raises(ConfigError, match=r"--algo\.replay\.capacity 30"):
        make_replay(spec_of(), config_of(1, capacity=29), **sizes)
    shortest = make_replay(spec_of(), config_of(1, capacity=30), **sizes)
    assert shortest.rows == LENGTH + 1
    full = shortest._replace(inserted=jnp.asarray(1000))
    assert num_starts(full, CONTEXT, LEARNING) == 3
    for rows, wanted in ((2, LENGTH + 1), (12, 12), (1000, 40)):
        assert make_replay(spec_of(), config_of(1), rows=rows, **sizes).rows == wanted


def test_memory_is_that_of_the_arrays():
    per_row = AGENTS * (2 * 4 + ACTIONS + 1 + 1 + LATENTS) + 4 + 3
    assert sum(memory(filled(0)).values()) == 40 * 3 * per_row + 4
