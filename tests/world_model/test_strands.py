"""Strands of sequences on tracks: each needed record once, and the same latents as where it lay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import jit
from episodes import AGENTS, make_models, random_sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from majepa.config import DEBUG
from majepa.world_model.strands import Tracks, as_they_lie, lay_out, lay_out_runs, lengthened
from majepa.world_model.unroll import draw_latents, draw_on_tracks

CONTEXT = DEBUG.context
LATENTS, CLASSES = DEBUG.local.latents, DEBUG.local.classes


def first_of_each(is_first: np.ndarray, context: int) -> list[int]:
    """The earliest record that learning records of each sequence remember, by hand."""
    found = []
    for row in is_first:
        begin = context
        while begin > 0 and not row[begin]:
            begin -= 1
        found.append(begin)
    return found


def up(number: int, multiple: int) -> int:
    return next(n for n in range(number, number + multiple) if n % multiple == 0)


def check(is_first: np.ndarray, context: int, multiple: int, tracks: Tracks) -> None:
    records, length = is_first.shape[1], tracks.length
    begins = first_of_each(is_first, context)
    needed = {(row, t) for row, begin in enumerate(begins) for t in range(begin, records)}
    seen: list[tuple[int, int]] = []
    for rows, times in zip(tracks.sequence.tolist(), tracks.time.tolist(), strict=True):
        ends = times.index(records) if records in times else length
        assert set(times[ends:]) <= {records}
        before = None
        for place, record in enumerate(zip(rows[:ends], times[:ends], strict=True)):
            row, t = record
            follows = before == (row, t - 1) and not is_first[record]
            # Nothing but the beginning of a track may follow what lies on no track.
            assert follows or is_first[record] or (place == 0 and t == begins[row] == 0)
            before = record
            seen.append(record)
    assert len(seen) == len(set(seen)) and set(seen) == needed
    longest = records - min(begins)
    assert length % multiple == 0
    assert up(records - context, multiple) <= length <= up(longest, multiple)
    if records % multiple == 0:
        assert length <= records - min(begins) // multiple * multiple


@st.composite
def starts(draw) -> tuple[np.ndarray, int, int]:
    """Where episodes begin, which may all be short or none begin at all; a context; a multiple."""
    batch, context = draw(st.integers(1, 5)), draw(st.integers(1, 30))
    records = context + draw(st.integers(1, 20))
    often = draw(st.sampled_from([0.0, 0.03, 0.1, 0.3, 1.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    is_first = rng.random((batch, records)) < often
    for row in range(batch):
        is_first[row, : draw(st.sampled_from([0, 0, context // 2, context]))] = True
    return is_first, context, draw(st.sampled_from([1, 4, 7]))


@settings(max_examples=300, deadline=None)
@given(starts())
def test_every_needed_record_lies_on_a_track_once(drawn):
    check(*drawn, lay_out(*drawn))


@settings(max_examples=50, deadline=None)
@given(starts())
def test_runs_have_tracks_of_one_length(drawn):
    is_first, context, multiple = drawn
    runs = np.stack([is_first, np.roll(is_first, 3, axis=1), np.zeros_like(is_first)])
    together = lay_out_runs(runs, context, multiple)
    alone = [lay_out(one, context, multiple) for one in runs]
    assert together.length == max(tracks.length for tracks in alone)
    for number, one in enumerate(alone):
        found = Tracks(*(leaf[number] for leaf in together))
        assert np.all(found.time[:, one.length :] == is_first.shape[1])
        for leaf, expected in zip(found, one, strict=True):
            np.testing.assert_array_equal(leaf[:, : one.length], expected)


def of_episodes(shortest: int, longest: int, seed: int) -> np.ndarray:
    """Sixteen sequences of 256 records, in episodes of random lengths."""
    rng = np.random.default_rng(seed)
    is_first = np.zeros((16, 256), bool)
    for row in is_first:
        t = -rng.integers(longest)
        while t < len(row):
            row[t] |= t >= 0
            t += rng.integers(shortest, longest + 1)
    return is_first


def test_tracks_are_shorter_than_sequences():
    """Sizes of the paper, and episodes as long as early battles."""
    lengths, old = [], []
    for seed in range(30):
        is_first = of_episodes(60, 120, seed)
        tracks = lay_out(is_first, 192, 32)
        check(is_first, 192, 32, tracks)
        lengths.append(tracks.length)
        old.append(256 - min(first_of_each(is_first, 192)) // 32 * 32)
    assert np.mean(lengths) < 0.85 * np.mean(old)


def test_greed_never_costs():
    """Strands of 3, 3 and 2, 2, 2 fit on two tracks of 6 as they lie, but not longest first."""
    is_first = np.zeros((2, 8), bool)
    is_first[0, [2, 5]] = is_first[1, [2, 4, 6]] = True
    assert lay_out(is_first, 2, 1).length == 6


def test_what_is_taken_is_put_back():
    is_first = of_episodes(20, 50, 0)[:4, :60]
    tracks = lay_out(is_first, 40, 8)
    tracks = lengthened(tracks, tracks.length + 8, 60)
    values = np.arange(4 * 60 * 2).reshape(4, 60, 2) + 1
    begins = np.array(first_of_each(is_first, 40))
    needed = np.arange(60)[None] >= begins[:, None]

    def there_and_back(tracks, values):
        return tracks.put_back(tracks.take(values), 60)

    found = jit(there_and_back)(tracks, values)
    np.testing.assert_array_equal(found, np.where(needed[..., None], values, 0))
    np.testing.assert_array_equal(jit(there_and_back)(as_they_lie(4, 60), values), values)


@jit
def as_before(local, sequence, key):
    return draw_latents(local, sequence, key, 0)


on_tracks = jit(draw_on_tracks)


def needed_of(sequence) -> np.ndarray:
    is_first = np.asarray(sequence.record.is_first)
    begins = np.array(first_of_each(is_first, CONTEXT))[:, None]
    return np.arange(is_first.shape[1])[None] >= begins


def plan(sequence, multiple: int = 7) -> Tracks:
    return lay_out(np.asarray(sequence.record.is_first), CONTEXT, multiple)


def without_start(sequence, row: int):
    """One sequence goes on with what came before it."""
    is_first = np.asarray(sequence.record.is_first).copy()
    is_first[row, : CONTEXT + 1] = False
    return sequence._replace(record=sequence.record._replace(is_first=jnp.asarray(is_first)))


@pytest.mark.parametrize("episode", [5, 10, 30])
def test_latents_are_those_of_the_sequences(episode, key):
    """With padding, episodes of any length, and sequences whose context holds no start."""
    local, _ = make_models(0)
    moved = 0
    for seed in range(8):
        sequence = random_sequence(seed, episode=episode)
        sequence = sequence if seed % 2 else without_start(sequence, seed // 2 % 2)
        tracks = plan(sequence)
        found = np.asarray(on_tracks(local, sequence, key, tracks))
        expected = np.asarray(as_before(local, sequence, key))
        needed = needed_of(sequence)
        np.testing.assert_array_equal(found[needed], expected[needed])
        assert not found[~needed].any() and len(np.unique(found[needed])) == CLASSES
        own = np.arange(len(needed))[:, None]
        moved += np.sum((tracks.sequence != own) & (tracks.time < needed.shape[1]))
    assert moved > 0 or episode == 30


def test_where_a_track_lies_does_not_matter(key):
    """Nor do places after its end."""
    local, _ = make_models(0)
    sequence = random_sequence(3, episode=6)
    tracks = plan(sequence)
    longer = lengthened(tracks, tracks.length + 7, sequence.record.is_first.shape[1])
    turned = Tracks(*(leaf[::-1] for leaf in longer))
    expected = on_tracks(local, sequence, key, tracks)
    for other in (longer, turned):
        np.testing.assert_array_equal(on_tracks(local, sequence, key, other), expected)


def test_strands_of_a_track_know_nothing_of_each_other(key):
    local, _ = make_models(0)
    sequence = without_start(random_sequence(5, episode=5), 0)
    tracks = plan(sequence)
    record = sequence.record
    is_first = np.asarray(record.is_first)
    number = np.cumsum(is_first, axis=1)
    before = np.asarray(on_tracks(local, sequence, key, tracks))
    needed = needed_of(sequence)
    strands = {(row, number[row, t]) for row, t in zip(*np.nonzero(needed), strict=True)}
    assert len(strands) > 2 * len(is_first)
    changed_at_all = 0
    for row, one in sorted(strands):
        own = np.zeros_like(is_first)
        own[row] = needed[row] & (number[row] == one)
        observation = jnp.where(own[..., None, None], 3 - record.observation, record.observation)
        other = sequence._replace(record=record._replace(observation=observation))
        changed = np.any(np.asarray(on_tracks(local, other, key, tracks)) != before, axis=(2, 3))
        assert not changed[~own].any()
        changed_at_all += changed.any()
    assert changed_at_all > len(strands) // 2


def test_every_record_has_noise_of_its_own(key):
    """The same observation everywhere, and every record a start: chance alone decides."""
    local, _ = make_models(0)
    sequence = random_sequence(0)
    record = sequence.record
    record = record._replace(
        observation=jnp.zeros_like(record.observation), is_first=jnp.ones_like(record.is_first)
    )
    sequence = sequence._replace(record=record)
    latent = np.asarray(on_tracks(local, sequence, key, plan(sequence)))[needed_of(sequence)]
    assert latent.shape[1:] == (AGENTS, LATENTS)
    # Among 4^12 outcomes, hardly any comes twice.
    assert len(np.unique(latent.reshape(len(latent), -1), axis=0)) > 0.9 * len(latent)


def test_of_packed_runs(key):
    local, _ = make_models(0)
    sequences = [random_sequence(seed, episode=6) for seed in (1, 2)]
    keys = jax.random.split(key)
    is_first = np.stack([np.asarray(one.record.is_first) for one in sequences])
    tracks = lay_out_runs(is_first, CONTEXT, 7)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *sequences)
    together = jit(jax.vmap(draw_on_tracks, (None, 0, 0, 0)))(local, stacked, keys, tracks)
    for one, own, latent in zip(sequences, keys, together, strict=True):
        expected = on_tracks(local, one, own, plan(one))
        np.testing.assert_array_equal(latent, expected)
