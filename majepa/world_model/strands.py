"""Records laid out anew, so that fewer have to be taken one after another.

A start cuts a sequence: no record after it depends on one before. From start to start, a sequence
falls into strands that could be taken side by side. Of each sequence only what its learning records
can remember is needed. `lay_out` puts the strands of all sequences on as many tracks, one after
another, so that the longest track is short. What separates episodes of a sequence separates strands
of a track, and places count relative to each other, so that a strand may lie anywhere.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from .tokens import Tokens


class Tracks(NamedTuple):
    """Which record lies at each of `L` places of each track; planned on the host.

    The places after its last record have a time that no record has.
    """

    sequence: Int[Array | np.ndarray, "*runs B L"]
    time: Int[Array | np.ndarray, "*runs B L"]

    @property
    def length(self) -> int:
        return self.time.shape[-1]

    def take(self, leaf: Shaped[Array, "B T *s"]) -> Shaped[Array, "B L *s"]:
        """What belongs to the records; anything where there is none."""
        return leaf.at[self.sequence, self.time].get(mode="clip")

    def take_tokens(self, tokens: Tokens) -> Tokens:
        """Of the records; where there is none, every place is a start."""
        taken = Tokens(*map(self.take, tokens))
        is_first = taken.is_first | (self.time >= tokens.is_first.shape[1])
        return taken._replace(
            is_first=is_first, episode=jnp.cumsum(is_first, axis=1, dtype=jnp.int32)
        )

    def put_back(self, leaf: Shaped[Array, "B L *s"], length: int) -> Shaped[Array, "B T *s"]:
        """What was found for the records, where they come from; zero for records on no track."""
        place = jnp.arange(self.length)[None]
        time = jnp.where(self.time < length, self.time, length + place)
        whole = jnp.zeros((leaf.shape[0], length, *leaf.shape[2:]), leaf.dtype)
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


def lay_out(is_first: Bool[np.ndarray, "B T"], context: int, multiple: int) -> Tracks:
    """Tracks for all records that those after the context can remember, and for these themselves.

    Their length is a multiple of the given number, and no greater than for sequences themselves.
    """
    batch, records = is_first.shape
    strands = _strands(is_first, context)
    whole = [[one for one in strands if one.sequence == number] for number in range(batch)]
    needed = [sum(one.length for one in track) for track in whole]
    shortest = max(math.ceil(sum(needed) / batch), *(one.length for one in strands))
    tracks, length = None, _up(shortest, multiple)
    # From there on sequences themselves have room; what is filled in greedily may have none.
    while tracks is None and length < max(needed):
        tracks = _fill(strands, batch, length)
        length = length if tracks else length + multiple
    found = _nothing(batch, length, records)
    for number, track in enumerate(tracks or whole):
        place = 0
        for one in track:
            here = slice(place, place + one.length)
            found.sequence[number, here] = one.sequence
            found.time[number, here] = np.arange(one.begin, one.end)
            place += one.length
    return found


def lay_out_runs(is_first: Bool[np.ndarray, "R B T"], context: int, multiple: int) -> Tracks:
    """Of several runs, with tracks of one length for all."""
    runs = [lay_out(one, context, multiple) for one in is_first]
    longest = max(tracks.length for tracks in runs)
    runs = [lengthened(tracks, longest, is_first.shape[-1]) for tracks in runs]
    return Tracks(*map(np.stack, zip(*runs, strict=True)))


def lengthened(tracks: Tracks, length: int, records: int) -> Tracks:
    """With more places at the end, which no record of so many has."""
    found = _nothing(tracks.time.shape[0], length, records)
    for old, new in zip(tracks, found, strict=True):
        new[:, : tracks.length] = old
    return found


def _nothing(batch: int, length: int, records: int) -> Tracks:
    shape = (batch, length)
    own = np.broadcast_to(np.arange(batch, dtype=np.int32)[:, None], shape)
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


def _fill(strands: list[_Strand], count: int, length: int) -> list[list[_Strand]] | None:
    """Strands on tracks of a length: each on the first that has room, the longest ones first.

    One that continues what came before its sequence must lie at the beginning of a track. None:
    they do not all find room.
    """
    tracks = [[one] for one in strands if one.continues]
    tracks += [[] for _ in range(count - len(tracks))]
    room = [length - sum(one.length for one in track) for track in tracks]
    others = sorted((one for one in strands if not one.continues), key=lambda one: -one.length)
    for one in others:
        size = one.length
        track = next((number for number, left in enumerate(room) if left >= size), None)
        if track is None:
            return None
        tracks[track].append(one)
        room[track] -= size
    return tracks


def _up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
