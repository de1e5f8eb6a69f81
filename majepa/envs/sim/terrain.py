"""Ground to fight on: where units may walk, where the nearest wall is, the way around it.

A `Terrain` is data: spans of walkable cells, row by row. `Walls` and `Paths` are tables made from
it once per map with NumPy; the battle only looks things up in them.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import ndimage

FINE = 4
"""Entries of the wall table per cell and axis."""

Span = tuple[int, int, int]
"""`(y, x_from, x_to)`: the cells of row y from x_from up to, not including, x_to."""


@dataclasses.dataclass(frozen=True)
class Terrain:
    """Cell (x, y) covers [x, x+1) x [y, y+1). What is not walkable is wall."""

    spans: tuple[Span, ...]
    cliffs: tuple[Span, ...] = ()
    """Cells that only `cliff` units may enter."""
    width: int = 32
    height: int = 32

    def __post_init__(self) -> None:
        for y, x_from, x_to in self.spans + self.cliffs:
            if not (0 <= y < self.height and 0 <= x_from < x_to <= self.width):
                raise ValueError(
                    f"terrain span (y={y}, x={x_from}..{x_to}) does not fit into "
                    f"{self.width} x {self.height} cells"
                )
        if not self.spans:
            raise ValueError("a terrain needs at least one walkable span")

    @classmethod
    def box(cls, x_from: int, y_from: int, x_to: int, y_to: int) -> Terrain:
        return cls(tuple((y, x_from, x_to) for y in range(y_from, y_to)))

    @classmethod
    def rows(cls, *rows: tuple[int, int, int, int], cliffs: tuple[Span, ...] = ()) -> Terrain:
        """From `(y_first, y_last, x_from, x_to)`, both rows included."""
        spans = ((y, x0, x1) for first, last, x0, x1 in rows for y in range(first, last + 1))
        return cls(tuple(spans), cliffs)

    @classmethod
    def draw(cls, picture: str) -> Terrain:
        """From text, top row first: `.` is walkable, `~` a cliff, anything else wall."""
        lines = [line.strip() for line in picture.strip().splitlines()]
        if len({len(line) for line in lines}) != 1:
            raise ValueError(
                "the lines of a drawn terrain differ in length: "
                f"{sorted({len(line) for line in lines})}"
            )
        cells = np.array([list(line) for line in reversed(lines)])
        return cls(_spans(cells == "."), _spans(cells == "~"), len(lines[0]), len(lines))

    @property
    def walkable(self) -> Bool[np.ndarray, "X Y"]:
        """The grid of SMAC's move mask: cliffs are not walkable in it, for any unit."""
        return _fill(self.spans, self.width, self.height)

    @property
    def climbable(self) -> Bool[np.ndarray, "X Y"]:
        return self.walkable | _fill(self.cliffs, self.width, self.height)


@dataclasses.dataclass(frozen=True)
class Walls:
    """The nearest wall of every point, or the plain box that all open cells form."""

    box: tuple[float, float, float, float] | None
    """x_from, y_from, x_to, y_to of the open ground if it is a rectangle, which needs no table."""
    nearest: Int[np.ndarray, " F"]
    """For each fine cell (x * height * FINE + y): the nearest wall cell, in a frame with a border
    of one wall cell around the map; inside a wall, -1 minus the nearest open cell."""
    height: int

    @classmethod
    def around(cls, is_open: Bool[np.ndarray, "X Y"]) -> Walls:
        xs, ys = np.nonzero(is_open)
        x0, x1, y0, y1 = xs.min(), xs.max() + 1, ys.min(), ys.max() + 1
        box = (float(x0), float(y0), float(x1), float(y1))
        is_box = bool(is_open[x0:x1, y0:y1].all())
        bordered = np.pad(is_open, 1)
        fine = np.repeat(np.repeat(bordered, FINE, 0), FINE, 1)
        cell = np.arange(bordered.size, dtype=np.int32).reshape(bordered.shape)
        fine_cell = np.repeat(np.repeat(cell, FINE, 0), FINE, 1)
        nearest_open = fine_cell[_nearest_false(~fine)]
        nearest = np.where(fine, fine_cell[_nearest_false(fine)], -1 - nearest_open)
        inside = nearest[FINE:-FINE, FINE:-FINE]
        return cls(box if is_box else None, inside.reshape(-1), is_open.shape[1])


@functools.cache
def walls_of(terrain: Terrain, for_climbers: bool) -> Walls:
    return Walls.around(terrain.climbable if for_climbers else terrain.walkable)


CLEARANCE = 0.45
"""A straight walk between two cell centres keeps at least this far from every wall."""
GRAZE = 0.3
"""Walls that cut no deeper than this into any straight walk are slid along: no path is needed."""
MAX_PATH_CELLS = 2048
MAX_MAP_CELLS = 64 * 64


@functools.cache
def path_table(terrain: Terrain) -> Int[np.ndarray, "C C"] | None:
    """Where to head from one cell to reach another: the goal's own cell if the way is straight.

    Waypoints are cell centres on the shortest any-angle path. None if every way is straight.
    """
    walkable = terrain.walkable
    height = walkable.shape[1]
    nodes = np.argwhere(walkable)
    if walls_of(terrain, False).box or _straight_walks(walkable, nodes, -GRAZE).all():
        return None
    if len(nodes) > MAX_PATH_CELLS or walkable.size > MAX_MAP_CELLS:
        raise ValueError(
            f"path tables are made for up to {MAX_PATH_CELLS} walkable cells; this "
            f"terrain has walls in the way and {len(nodes)}. Use a smaller map, or "
            "one whose ground is convex, which needs no table"
        )
    visible = _straight_walks(walkable, nodes, CLEARANCE)
    length = np.linalg.norm(nodes[:, None] - nodes[None], axis=-1)
    distance = np.where(visible, length, np.inf)
    hop = np.where(visible, np.arange(len(nodes))[None, :], -1)
    for middle in range(len(nodes)):
        around = distance[:, middle, None] + distance[None, middle]
        shorter = around < distance - 1e-9
        distance = np.where(shorter, around, distance)
        hop = np.where(shorter, hop[:, middle, None], hop)
    # Where no way exists, head straight for the goal.
    hop = np.where(hop < 0, np.arange(len(nodes))[None, :], hop)
    node_cell = (nodes[:, 0] * height + nodes[:, 1]).astype(np.int32)
    snapped = _nearest_node(walkable, nodes)
    table = node_cell[hop][snapped[:, None], snapped[None, :]]
    here = np.arange(len(nodes))
    for x, y in np.argwhere(~walkable):
        # Somebody may stand where this walker cannot, a colossus on a cliff: come from this side.
        beside = np.flatnonzero(np.abs(nodes - (x, y)).max(axis=1) <= 1)
        if len(beside):
            best = beside[np.argmin(distance[:, beside], axis=1)]
            goal = x * height + y
            way = np.where(visible[here, best], goal, node_cell[hop[here, best]])
            table[:, goal] = way[snapped]
    return table.astype(np.int16)


def _fill(spans: tuple[Span, ...], width: int, height: int) -> Bool[np.ndarray, "X Y"]:
    grid = np.zeros((width, height), bool)
    for y, x_from, x_to in spans:
        grid[x_from:x_to, y] = True
    return grid


def _spans(cells: Bool[np.ndarray, "Y X"]) -> tuple[Span, ...]:
    spans: list[Span] = []
    for y, row in enumerate(cells):
        edges = np.flatnonzero(np.diff(np.pad(row.astype(np.int8), 1)))
        spans += [(y, int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return tuple(spans)


def _straight_walks(
    walkable: Bool[np.ndarray, "X Y"], nodes: Int[np.ndarray, "K 2"], margin: float
) -> Bool[np.ndarray, "K K"]:
    """Between which cell centres one can walk straight, `margin` away from every wall."""
    field = _wall_distance(walkable)
    centres = (nodes + 0.5).astype(np.float32)
    visible = np.ones((len(nodes), len(nodes)), bool)
    for part in np.linspace(0, 1, 4 * max(walkable.shape), dtype=np.float32):
        at = centres[:, None] * (1 - part) + centres[None] * part
        index = np.minimum((at * PER_CELL).astype(np.int32), np.array(field.shape) - 1)
        # The field is sampled at the middle of squares this wide.
        visible &= field[index[..., 0], index[..., 1]] >= margin - 1 / PER_CELL
    return visible


PER_CELL = 8


def _wall_distance(walkable: Bool[np.ndarray, "X Y"]) -> Float[np.ndarray, "X8 Y8"]:
    """Distance to the nearest wall or map edge, negative inside walls."""
    fine = np.repeat(np.repeat(np.pad(walkable, 1), PER_CELL, 0), PER_CELL, 1)
    to_wall = np.asarray(ndimage.distance_transform_edt(fine))
    depth = to_wall - np.asarray(ndimage.distance_transform_edt(~fine))
    return depth[PER_CELL:-PER_CELL, PER_CELL:-PER_CELL] / PER_CELL


def _nearest_node(
    walkable: Bool[np.ndarray, "X Y"], nodes: Int[np.ndarray, "K 2"]
) -> Int[np.ndarray, " C"]:
    """For every cell, the walkable cell nearest to it."""
    number = np.full(walkable.shape, -1)
    number[tuple(nodes.T)] = np.arange(len(nodes))
    return number[_nearest_false(~walkable)].reshape(-1)


def _nearest_false(grid: Bool[np.ndarray, "X Y"]) -> tuple[np.ndarray, ...]:
    """Coordinates of the nearest false entry, for every entry."""
    found = ndimage.distance_transform_edt(grid, return_distances=False, return_indices=True)
    return tuple(np.asarray(found))
