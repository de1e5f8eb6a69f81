"""Shapes that tracks may have: few, enough for every view, and none that is never worth it."""

import math

import numpy as np
import pytest
from world_model.test_strands import of_episodes

from majepa.world_model import track_shapes
from majepa.world_model.recurrence import chunk_size
from majepa.world_model.strands import TrackShape, lay_out, lay_out_runs
from majepa.world_model.track_shapes import cost_of, lengths_apart, shapes_of_tracks

SIZES = [(192, 64, 16), (192, 59, 13), (32, 24, 14), (12, 10, 11), (12, 14, 13)]


@pytest.mark.parametrize(("context", "learning", "apart"), SIZES)
@pytest.mark.parametrize("batch", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("rows", [1, 5, 24])
def test_there_are_few_shapes_and_one_for_every_view(context, learning, apart, batch, rows):
    records = context + learning
    assert lengths_apart(context, learning) == apart and apart % chunk_size(records) == 0
    shapes = shapes_of_tracks(batch, context, learning, rows)
    assert len(set(shapes)) == len(shapes) <= track_shapes.MOST_SHAPES
    assert TrackShape(batch, apart * math.ceil(records / apart)) in shapes
    assert all(shape.length % apart == 0 for shape in shapes)
    assert all(batch <= shape.tracks <= 2 * batch for shape in shapes)
    costs = [cost_of(shape, rows) for shape in shapes]
    assert costs == sorted(costs)
    rng = np.random.default_rng(0)
    for often in (0, 0.01, 0.03, 0.1, 1):
        is_first = rng.random((3, batch, records)) < often
        assert lay_out(is_first[0], context, shapes).shape in shapes
        assert lay_out_runs(is_first, context, shapes).shape in shapes


@pytest.mark.parametrize("rows", [2, 5, 8, 15, 81])
def test_no_shape_has_room_only_where_a_cheaper_one_has(rows):
    shapes = shapes_of_tracks(16, 192, 64, rows)
    for number, shape in enumerate(shapes):
        for cheaper in shapes[:number]:
            assert shape.length > cheaper.length or shape.tracks > cheaper.tracks


@pytest.mark.parametrize("rows", [5, 8])
def test_few_shapes_cost_hardly_more_than_all(rows):
    """On episodes of many lengths; without the whole choice, and without any but the lengths."""
    few = shapes_of_tracks(16, 192, 64, rows)
    all_shapes = sorted(
        (TrackShape(count, length) for count in (16, 24, 32) for length in range(32, 257, 16)),
        key=lambda shape: cost_of(shape, rows),
    )
    ratios = []
    for longest in range(10, 200, 10):
        for seed in range(3):
            is_first = of_episodes(max(longest // 2, 2), longest, seed)
            costs = [
                cost_of(lay_out(is_first, 192, shapes).shape, rows) for shapes in (few, all_shapes)
            ]
            ratios.append(costs[0] / costs[1])
    assert min(ratios) == 1 and np.mean(ratios) < 1.01 and max(ratios) < 1.2


def test_every_shape_is_taken_by_some_view():
    """Of those for the paper's sizes and five agents."""
    shapes, found = shapes_of_tracks(16, 192, 64, 5), set()
    for longest in [*range(8, 260, 4), 500, 1000]:
        for shortest in (longest // 8, longest // 2, longest - 2):
            for seed in range(4):
                is_first = of_episodes(max(shortest, 2), longest, seed)
                found.add(lay_out(is_first, 192, shapes).shape)
    assert found == set(shapes)


def test_the_more_rows_the_fewer_tracks():
    """What a place costs beside its rows is all that more tracks can save."""
    wide = [
        sum(shape.tracks > 16 for shape in shapes_of_tracks(16, 192, 64, rows))
        for rows in (2, 5, 8, 81)
    ]
    assert wide == sorted(wide, reverse=True) and wide[0] > wide[-1] > 0
