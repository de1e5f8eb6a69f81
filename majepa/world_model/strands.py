"""Records laid out anew, so that fewer have to be taken one after another.

A start cuts a sequence: no record after it depends on one before. From start to start, a sequence
falls into strands that could be taken side by side. Of each sequence only what its learning records
can remember is needed. `lay_out` puts the strands of all sequences on tracks, one after another:
as many or more, and shorter. `track_shapes` says which shapes are worth it. What separates episodes
of a sequence separates strands of a track, and places count relative to each other, so that a
strand may lie anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from .tokens import Tokens


class TrackShape(NamedTuple):
    """How many tracks there are, and how many places each of them has."""

    tracks: int
    length: int


class Tracks(NamedTuple):
    """Which record lies at each of `L` places of each of `C` tracks; planned on the host.

    The places after its last record have a time that no record has.
    """

    sequence: Int[Array | np.ndarray, "*runs C L"]
    time: Int[Array | np.ndarray, "*runs C L"]

    @property
    def shape(self) -> TrackShape:
        return TrackShape(*self.time.shape[-2:])

    def take(self, leaf: Shaped[Array, "B T *s"]) -> Shaped[Array, "C L *s"]:
        """What belongs to the records; anything where there is none."""
        return leaf.at[self.sequence, self.time].get(mode="clip")

    def take_tokens(self, tokens: Tokens) -> Tokens:
        """Of the records; where there is none, every place is a start."""
        taken = Tokens(*map(self.take, tokens))
        is_first = taken.is_first | (self.time >= tokens.is_first.shape[1])
        return taken._replace(
            is_first=is_first, episode=jnp.cumsum(is_first, axis=1, dtype=jnp.int32)
        )

    def put_back(
        self, leaf: Shaped[Array, "C L *s"], batch: int, length: int
    ) -> Shaped[Array, "B T *s"]:
        """What was found for the records of so many sequences of a length, where they come from;
        zero for records on no track."""
        place = jnp.arange(self.shape.length)[None]
        time = jnp.where(self.time < length, self.time, length + place)
        whole = jnp.zeros((batch, length, *leaf.shape[2:]), leaf.dtype)
        return whole.at[self.sequence, time].set(leaf, mode="drop", unique_indices=True)


def as_they_lie(batch: int, length: int) -> Tracks:
    """Sequences themselves."""
    shape = (batch, length)
    sequence = jnp.broadcast_to(jnp.arange(batch)[:, None], shape)
    return Tracks(sequence, jnp.broadcast_to(jnp.arange(length)[None], shape))


class _Strand(NamedTuple):
    """Records `begin` to `end` of a sequence."""

    sequence: int
    begin: int
    end: int
    continues: bool
    """What came before the sequence: it begins with no start."""

    @property
    def length(self) -> int:
        return self.end - self.begin


class _Needed(NamedTuple):
    """All strands of a view that are needed."""

    continuing: list[_Strand]
    others: list[_Strand]
    """The longest ones first."""
    sequences: list[list[_Strand]]
    """All of them as they lie."""
    records: int
    longest: int
    """Records of the longest strand."""
    longest_sequence: int
    """Needed records of the sequence that needs most."""


def lay_out(
    is_first: Bool[np.ndarray, "B T"], context: int, shapes: Sequence[TrackShape]
) -> Tracks:
    """Tracks for all records that those after the context can remember, and for these themselves.

    They have the first one of the shapes, best first, that is found to have room for all. No shape
    has fewer tracks than there are sequences, and one has room for these as they lie.
    """
    return Tracks(*(leaf[0] for leaf in lay_out_runs(is_first[None], context, shapes)))


def lay_out_runs(
    is_first: Bool[np.ndarray, "R B T"], context: int, shapes: Sequence[TrackShape]
) -> Tracks:
    """Of several runs, with tracks of one shape for all."""
    records = is_first.shape[-1]
    runs = [_needed(_strands(one, context)) for one in is_first]
    for shape in shapes:
        filled = _fill_all(runs, shape)
        if filled is not None:
            found = [_places(tracks, shape, records) for tracks in filled]
            return Tracks(*map(np.stack, zip(*found, strict=True)))
    raise ValueError(f"sequences of {records} records find no room on tracks of {list(shapes)}")


def _needed(strands: list[_Strand]) -> _Needed:
    sequences: dict[int, list[_Strand]] = {}
    for one in strands:
        sequences.setdefault(one.sequence, []).append(one)
    lengths = [sum(one.length for one in own) for own in sequences.values()]
    others = [one for one in strands if not one.continues]
    return _Needed(
        [one for one in strands if one.continues],
        sorted(others, key=lambda one: -one.length),
        list(sequences.values()),
        sum(lengths),
        max(one.length for one in strands),
        max(lengths),
    )


def _fill_all(runs: list[_Needed], shape: TrackShape) -> list[list[list[_Strand]]] | None:
    found = []
    for needed in runs:
        tracks = _fill(needed, shape)
        if tracks is None:
            return None
        found.append(tracks)
    return found


def _fill(needed: _Needed, shape: TrackShape) -> list[list[_Strand]] | None:
    """Strands on tracks: each on the first that has room, the longest ones first.

    One that continues what came before its sequence must lie at the beginning of a track. Where
    sequences themselves have room they stay as they are: what is filled in greedily may have none.
    None: strands do not all find room.
    """
    if needed.longest > shape.length or needed.records > shape.tracks * shape.length:
        return None
    if needed.longest_sequence <= shape.length:
        return needed.sequences
    tracks = [[one] for one in needed.continuing]
    tracks += [[] for _ in range(shape.tracks - len(tracks))]
    room = [shape.length - sum(one.length for one in track) for track in tracks]
    for one in needed.others:
        size = one.length
        track = next((number for number, left in enumerate(room) if left >= size), None)
        if track is None:
            return None
        tracks[track].append(one)
        room[track] -= size
    return tracks


def _places(tracks: list[list[_Strand]], shape: TrackShape, records: int) -> Tracks:
    found = _nothing(shape, records)
    for number, track in enumerate(tracks):
        place = 0
        for one in track:
            here = slice(place, place + one.length)
            found.sequence[number, here] = one.sequence
            found.time[number, here] = np.arange(one.begin, one.end)
            place += one.length
    return found


def _nothing(shape: TrackShape, records: int) -> Tracks:
    own = np.broadcast_to(np.arange(shape.tracks, dtype=np.int32)[:, None], shape)
    return Tracks(own.copy(), np.full(shape, records, np.int32))


def begins_of(is_first: Bool[np.ndarray, "*runs B T"], context: int) -> Int[np.ndarray, "*runs B"]:
    """The earliest record of each sequence that its learning records can remember."""
    time = np.arange(is_first.shape[-1])
    return np.max(np.where(is_first, time, 0)[..., : context + 1], axis=-1)


def _strands(is_first: Bool[np.ndarray, "B T"], context: int) -> list[_Strand]:
    """All that are needed, in their order."""
    time = np.arange(is_first.shape[1])
    begin = begins_of(is_first, context)[:, None]
    rows, begins = np.nonzero((is_first & (time > begin)) | (time == begin))
    is_last = np.append(rows[1:] != rows[:-1], True)
    ends = np.where(is_last, len(time), np.append(begins[1:], 0))
    columns = (rows, begins, ends, ~is_first[rows, begins])
    return [_Strand(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
