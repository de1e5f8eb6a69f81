"""Strands of sequences on tracks: each needed record once, and the same latents as where it lay."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import jit
from episodes import AGENTS, make_models, random_sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from majepa.config import DEBUG
from majepa.world_model.strands import (
    Tracks,
    TrackShape,
    as_they_lie,
    begins_of,
    lay_out,
    lay_out_runs,
)
from majepa.world_model.track_shapes import cost_of, shapes_of_tracks
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


def check(is_first: np.ndarray, context: int, tracks: Tracks) -> None:
    """Each needed record lies there once, and where a track begins or after what it follows."""
    records, length = is_first.shape[1], tracks.shape.length
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


def shapes_by_cost(batch: int, records: int, multiple: int, rows: int = 5) -> list[TrackShape]:
    """As many tracks as sequences or more, of all lengths, cheapest first."""
    lengths = range(multiple, up(records, multiple) + 1, multiple)
    counts = (batch, batch + 1, (3 * batch + 1) // 2, 2 * batch)
    shapes = {TrackShape(count, length) for count in counts for length in lengths}
    return sorted(shapes, key=lambda shape: (cost_of(shape, rows), shape))


def has_room(is_first: np.ndarray, context: int, shape: TrackShape) -> bool:
    """For sequences from what they need on, or for strands: longest first, each on the first track
    that has room; those without a start begin one."""
    records = is_first.shape[1]
    strands, longest = [], 0
    for row, begin in zip(is_first, first_of_each(is_first, context), strict=True):
        longest = max(longest, records - begin)
        for t in range(begin, records):
            if row[t] or t == begin:
                strands.append([0, not row[t]])
            strands[-1][0] += 1
    if longest <= shape.length:
        return True
    left = [shape.length - size for size, continues in strands if continues]
    left += [shape.length] * (shape.tracks - len(left))
    for size in sorted((size for size, continues in strands if not continues), reverse=True):
        track = next((number for number, room in enumerate(left) if room >= size), None)
        if track is None:
            return False
        left[track] -= size
    return min(left) >= 0


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
@given(starts(), st.sampled_from([1, 5, 40]))
def test_every_needed_record_lies_once_on_tracks_of_the_cheapest_shape(drawn, rows):
    is_first, context, multiple = drawn
    shapes = shapes_by_cost(*is_first.shape, multiple, rows)
    tracks = lay_out(is_first, context, shapes)
    check(is_first, context, tracks)
    costs = [cost_of(one, rows) for one in shapes if has_room(is_first, context, one)]
    assert tracks.shape in shapes and cost_of(tracks.shape, rows) == min(costs)


@settings(max_examples=100, deadline=None)
@given(starts())
def test_as_many_tracks_are_no_longer_than_sequences(drawn):
    is_first, context, multiple = drawn
    (batch, records), longest = is_first.shape, is_first.shape[1] - min(begins_of(*drawn[:2]))
    lengths = range(multiple, up(records, multiple) + 1, multiple)
    found = lay_out(is_first, context, [TrackShape(batch, length) for length in lengths])
    assert up(records - context, multiple) <= found.shape.length <= up(longest, multiple)


@settings(max_examples=50, deadline=None)
@given(starts())
def test_runs_have_tracks_of_one_shape(drawn):
    """The cheapest one that has room for each of them."""
    is_first, context, multiple = drawn
    runs = np.stack([is_first, np.roll(is_first, 3, axis=1), is_first[:, ::-1]])
    shapes = shapes_by_cost(*is_first.shape, multiple)
    together = lay_out_runs(runs, context, shapes)
    room = [all(has_room(one, context, shape) for one in runs) for shape in shapes]
    assert together.shape == shapes[room.index(True)]
    for number, one in enumerate(runs):
        found = Tracks(*(leaf[number] for leaf in together))
        check(one, context, found)
        for leaf, expected in zip(found, lay_out(one, context, [found.shape]), strict=True):
            np.testing.assert_array_equal(leaf, expected)


def test_what_finds_no_room_is_refused():
    with pytest.raises(ValueError, match="no room"):
        lay_out(np.zeros((2, 8), bool), 2, [TrackShape(2, 4), TrackShape(4, 7)])


def of_episodes(shortest: int, longest: int, seed: int) -> np.ndarray:
    """Sixteen sequences of 256 records, in episodes of random lengths."""
    rng = np.random.default_rng(seed)
    is_first = np.zeros((16, 256), bool)
    for row in is_first:
        t = -rng.integers(longest)
        while t < len(row):
            if t >= 0:
                row[t] = True
            t += rng.integers(shortest, longest + 1)
    return is_first


def test_tracks_are_shorter_than_sequences():
    """Sizes of the paper, and episodes as long as early battles."""
    lengths, old = [], []
    shapes = [TrackShape(16, length) for length in range(32, 257, 32)]
    for seed in range(30):
        is_first = of_episodes(60, 120, seed)
        tracks = lay_out(is_first, 192, shapes)
        check(is_first, 192, tracks)
        lengths.append(tracks.shape.length)
        old.append(256 - min(first_of_each(is_first, 192)) // 32 * 32)
    assert np.mean(lengths) < 0.85 * np.mean(old)


@pytest.mark.parametrize("agents", [5, 8])
@pytest.mark.parametrize(
    ("shortest", "longest", "share", "counts"),
    [(25, 35, 0.9, {24, 32}), (50, 65, 0.92, {16, 24, 32}), (100, 120, 1.0, {16, 24})],
)
def test_more_tracks_cost_less_where_episodes_are_short(agents, shortest, longest, share, counts):
    shapes = shapes_of_tracks(16, 192, 64, agents)
    as_many = [TrackShape(16, length) for length in range(64, 257, 16)]
    cost, old, found = 0.0, 0.0, set()
    for seed in range(30):
        is_first = of_episodes(shortest, longest, seed)
        tracks = lay_out(is_first, 192, shapes)
        check(is_first, 192, tracks)
        cost += cost_of(tracks.shape, agents)
        old += cost_of(lay_out(is_first, 192, as_many).shape, agents)
        found.add(tracks.shape.tracks)
    assert cost <= share * old and found <= counts


def test_greed_never_costs():
    """Strands of 3, 3 and 2, 2, 2 fit on two tracks of 6 as they lie, but not longest first."""
    is_first = np.zeros((2, 8), bool)
    is_first[0, [2, 5]] = is_first[1, [2, 4, 6]] = True
    shapes = [TrackShape(2, length) for length in range(1, 9)]
    assert lay_out(is_first, 2, shapes).shape == (2, 6)


@pytest.mark.parametrize("shape", [(4, 56), (4, 64), (6, 48), (8, 40)])
def test_what_is_taken_is_put_back(shape):
    is_first = of_episodes(20, 30, 0)[:4, :60]
    tracks = lay_out(is_first, 40, [TrackShape(*shape)])
    values = np.arange(4 * 60 * 2).reshape(4, 60, 2) + 1
    begins = np.array(first_of_each(is_first, 40))
    needed = np.arange(60)[None] >= begins[:, None]

    def there_and_back(tracks, values):
        return tracks.put_back(tracks.take(values), 4, 60)

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


def of_tracks(sequence, count: int) -> list[TrackShape]:
    records = sequence.record.is_first.shape[1]
    return [TrackShape(count, length) for length in range(7, up(records, 7) + 1, 7)]


def plan(sequence, more: int = 0) -> Tracks:
    is_first = np.asarray(sequence.record.is_first)
    return lay_out(is_first, CONTEXT, of_tracks(sequence, len(is_first) + more))


def without_start(sequence, row: int):
    """One sequence goes on with what came before it."""
    is_first = np.asarray(sequence.record.is_first).copy()
    is_first[row, : CONTEXT + 1] = False
    return sequence._replace(record=sequence.record._replace(is_first=jnp.asarray(is_first)))


@pytest.mark.parametrize(("episode", "more"), [(5, 0), (10, 0), (30, 0), (5, 2), (10, 3)])
def test_latents_are_those_of_the_sequences(episode, more, key):
    """With padding, episodes of any length, and sequences whose context holds no start."""
    local, _ = make_models(0)
    moved = 0
    for seed in range(8):
        sequence = random_sequence(seed, episode=episode)
        sequence = sequence if seed % 2 else without_start(sequence, seed // 2 % 2)
        tracks = plan(sequence, more)
        found = np.asarray(on_tracks(local, sequence, key, tracks))
        expected = np.asarray(as_before(local, sequence, key))
        needed = needed_of(sequence)
        np.testing.assert_array_equal(found[needed], expected[needed])
        assert not found[~needed].any() and len(np.unique(found[needed])) == CLASSES
        own = np.arange(tracks.shape.tracks)[:, None]
        moved += np.sum((tracks.sequence != own) & (tracks.time < needed.shape[1]))
    assert moved > 0 or episode == 30


@pytest.mark.parametrize("count", [16, 24, 32])
def test_of_sixteen_sequences(count, key):
    """On as many tracks, and on more and shorter ones."""
    local, _ = make_models(0)
    config = dataclasses.replace(DEBUG, replay=dataclasses.replace(DEBUG.replay, batch=16))
    sequence = without_start(random_sequence(7, config, episode=6), 3)
    tracks = lay_out(np.asarray(sequence.record.is_first), CONTEXT, of_tracks(sequence, count))
    assert tracks.shape.tracks == count
    assert count == 16 or tracks.shape.length < plan(sequence).shape.length
    found = np.asarray(on_tracks(local, sequence, key, tracks))
    needed = needed_of(sequence)
    expected = np.asarray(as_before(local, sequence, key))
    np.testing.assert_array_equal(found, np.where(needed[..., None, None], expected, 0))


def with_more_places(tracks: Tracks, records: int) -> Tracks:
    def more(leaf, value):
        return np.pad(leaf, [(0, 0), (0, 7)], constant_values=value)

    longer = Tracks(more(tracks.sequence, 0), more(tracks.time, records))
    longer.sequence[:, -7:] = np.arange(len(longer.sequence))[:, None]
    return longer


def test_where_a_track_lies_does_not_matter(key):
    """Nor do places after its end, nor how many there are."""
    local, _ = make_models(0)
    sequence = random_sequence(3, episode=6)
    tracks = plan(sequence)
    longer = with_more_places(tracks, sequence.record.is_first.shape[1])
    turned = Tracks(*(leaf[::-1] for leaf in longer))
    expected = on_tracks(local, sequence, key, tracks)
    for other in (longer, turned, plan(sequence, 2), plan(sequence, 3)):
        np.testing.assert_array_equal(on_tracks(local, sequence, key, other), expected)


@pytest.mark.parametrize("more", [0, 1])
def test_strands_of_a_track_know_nothing_of_each_other(more, key):
    local, _ = make_models(0)
    sequence = without_start(random_sequence(5, episode=5), 0)
    tracks = plan(sequence, more)
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


@pytest.mark.parametrize("more", [0, 2])
def test_of_packed_runs(more, key):
    local, _ = make_models(0)
    sequences = [random_sequence(seed, episode=6) for seed in (1, 2)]
    keys = jax.random.split(key)
    is_first = np.stack([np.asarray(one.record.is_first) for one in sequences])
    shapes = of_tracks(sequences[0], is_first.shape[1] + more)
    tracks = lay_out_runs(is_first, CONTEXT, shapes)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *sequences)
    together = jit(jax.vmap(draw_on_tracks, (None, 0, 0, 0)))(local, stacked, keys, tracks)
    for one, own, latent in zip(sequences, keys, together, strict=True):
        expected = on_tracks(local, one, own, plan(one))
        np.testing.assert_array_equal(latent, expected)
