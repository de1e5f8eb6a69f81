"""The replay of whole episodes, against a list of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import jit

from majepa.episode_replay import EpisodeReplay, add, empty, sample

LONGEST, ENVS = 6, 3


def batches(count: int, seed: int = 0):
    """Rounds of episodes; every row says which episode it is of, and which row."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        length = rng.integers(2, LONGEST + 1, ENVS)
        episode = np.broadcast_to(number * ENVS + np.arange(ENVS), (LONGEST, ENVS))
        time = np.broadcast_to(np.arange(LONGEST)[:, None], (LONGEST, ENVS))
        is_there = time < length
        rows = {
            "episode": jnp.asarray(np.where(is_there, episode, -1)),
            "time": jnp.asarray(np.where(is_there, time, -1)),
        }
        yield rows, jnp.asarray(length, jnp.int32)


def filled(rounds: int, *, episodes: int, rows: int) -> tuple[EpisodeReplay, list[int]]:
    """A replay after some rounds, and the lengths of all episodes."""
    row = {"episode": jnp.zeros((), jnp.int32), "time": jnp.zeros((), jnp.int32)}
    replay, lengths = empty(row, episodes=episodes, rows=rows), []
    store = jit(add)
    for rows_of_round, length in batches(rounds):
        replay = store(replay, rows_of_round, length)
        lengths += length.tolist()
    return replay, lengths


def kept(lengths: list[int], *, episodes: int, rows: int) -> list[int]:
    """Which episodes a replay of that size still holds whole."""
    found: list[int] = []
    for number in reversed(range(len(lengths))):
        if len(found) == episodes or sum(lengths[number:]) > rows:
            break
        found.append(number)
    return found


@pytest.mark.parametrize(
    ("rounds", "episodes", "rows"),
    [(1, 30, 200), (7, 30, 200), (12, 30, 200), (12, 100, 40), (9, 7, 50)],
    ids=["first", "not full", "table full", "ring full", "both"],
)
def test_it_holds_the_latest_episodes_whole(rounds, episodes, rows):
    replay, lengths = filled(rounds, episodes=episodes, rows=rows)
    known = kept(lengths, episodes=episodes, rows=rows)
    assert int(replay.size) == len(known)
    drawn = jit(sample, static_argnames=("episodes", "rows"))(
        replay, jax.random.key(0), episodes=len(known), rows=LONGEST
    )
    stored, length = jax.device_get(drawn)
    # As many as there are, without repetition: each of them once.
    assert sorted(stored["episode"][0].tolist()) == sorted(known)
    for column, number in enumerate(stored["episode"][0]):
        assert length[column] == lengths[number]
        assert (stored["episode"][: length[column], column] == number).all()
        np.testing.assert_array_equal(
            stored["time"][: length[column], column], range(length[column])
        )


def test_all_episodes_are_drawn_alike():
    replay, _ = filled(4, episodes=12, rows=200)
    draw = jit(jax.vmap(lambda key: sample(replay, key, episodes=3, rows=1)[0]["episode"][0]))
    counts = np.bincount(np.ravel(draw(jax.random.split(jax.random.key(1), 2000))), minlength=12)
    # 500 expected of each, with a deviation of 19.
    assert counts.min() > 420 and counts.max() < 580
