"""Which shapes the tracks of a view may have, each with a program of its own.

Latents are drawn place after place, for all tracks at once. A place takes longer the more tracks
there are, but not in proportion: where strands are short, more tracks of fewer places save time.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float, Int

from .recurrence import chunk_size
from .strands import TrackShape

MOST_SHAPES = 16
"""Programs take time to compile. On tracks of another shape than the best it takes longer, and
gives the same."""
TRACKS_PER_SEQUENCE = (1.0, 1.5, 2.0)
COST_OF_PLACE, COST_OF_ROW = 43.0, 0.36
"""Microseconds for a place of all tracks, and for each row of it more: an agent of a track. On an
H200 80 rows took 71, 160 took 102, and 240 took 128."""
USUAL_SHARES = np.linspace(0.25, 0.75, 65)
"""How far back learning records look, on average over the sequences of a view, as a share of its
longest strand. A place in episodes of one length has a half on average; the mean over 16 sequences
hardly ever leaves these bounds."""


def cost_of(shape: TrackShape, rows: int) -> float:
    """Microseconds, with so many rows a track: one for each agent of each run."""
    return shape.length * (COST_OF_PLACE + COST_OF_ROW * rows * shape.tracks)


def shapes_of_tracks(batch: int, context: int, learning: int, rows: int) -> list[TrackShape]:
    """Cheapest first; the one that has room for sequences themselves is always among them.

    Of all counts and lengths those are left out, one after another, without which usual views cost
    the least more: first those that are never the cheapest, then others until there are few.
    """
    apart = lengths_apart(context, learning)
    counts = sorted({math.ceil(batch * each) for each in TRACKS_PER_SEQUENCE})
    shapes = [
        TrackShape(count, length)
        for count in counts
        for length in _lengths(math.ceil(batch * learning / count), context + learning, apart)
    ]
    whole = TrackShape(batch, _up(context + learning, apart))
    longest = np.arange(apart, whole.length + 1, apart)
    needed = _needed_by_views(longest, batch, context, learning)
    costs = np.stack([_costs_of_views(longest, needed, shape, rows) for shape in shapes])
    best = np.min(costs, axis=0)
    while len(shapes) > 1:
        losses = _losses_without(costs / best)
        losses[shapes.index(whole)] = np.inf
        worst = int(np.argmin(losses))
        if len(shapes) <= MOST_SHAPES and losses[worst] > 0:
            break
        del shapes[worst]
        costs = np.delete(costs, worst, axis=0)
    return sorted(shapes, key=lambda shape: (cost_of(shape, rows), shape))


def _needed_by_views(
    longest: Int[np.ndarray, " L"], batch: int, context: int, learning: int
) -> Float[np.ndarray, "L S"]:
    """Records that usual views need whose longest strand has so many."""
    back = USUAL_SHARES * np.minimum(longest - 1, context)[:, None]
    return batch * (learning + back)


def _costs_of_views(
    longest: Int[np.ndarray, " L"], needed: Float[np.ndarray, "L S"], shape: TrackShape, rows: int
) -> Float[np.ndarray, " L*S"]:
    """Infinite where strands find no room, though they were put together as well as can be."""
    has_room = (longest <= shape.length)[:, None] & (needed <= shape.tracks * shape.length)
    return np.where(has_room, cost_of(shape, rows), np.inf).ravel()


def _losses_without(costs: Float[np.ndarray, "shapes views"]) -> Float[np.ndarray, " shapes"]:
    """What views would cost more on average without each of the shapes."""
    cheapest = np.argmin(costs, axis=0)
    first, second = np.partition(costs, 1, axis=0)[:2]
    return np.bincount(cheapest, second - first, minlength=len(costs)) / costs.shape[1]


def lengths_apart(context: int, learning: int) -> int:
    """What lengths of tracks are multiples of: whole chunks, so large that there are few."""
    apart = chunk = chunk_size(context + learning)
    while len(_lengths(learning, context + learning, apart)) > MOST_SHAPES:
        apart += chunk
    return apart


def _lengths(shortest: int, longest: int, apart: int) -> range:
    return range(_up(shortest, apart), _up(longest, apart) + 1, apart)


def _up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
