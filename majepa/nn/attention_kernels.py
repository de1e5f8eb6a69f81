"""Kernels for GPUs: attention over short sequences.

XLA makes some ten kernels of it, most of which copy: parts of a projection, keys next to those of
the past, scores into a layout that a product wants. Here one program takes all records of a
sequence for one head, from the projection as it lies in memory.

`kernels` has those for single records, and says what sizes can be loaded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int, Int8

from .attention import FAR_BELOW, Limb, Past, Turn, Twigs, exact
from .kernels import Ref, Slice, divide, dot, held, launch, like, suit, total

FEW = 32
"""Records or agents that half of the threads are enough for, if they see no past."""
LEAST = 16
"""Records, new or past, that one product of a matrix unit takes: a few threads need not wait for
others."""
LONGEST, LARGEST = 128, 128
"""Records or agents whose scores a program can hold, and entries of a head."""
FEW_ROOTS, MANY_ROOTS = 16, 64
"""That a program takes at once: few of those that see few places."""


class Sight(NamedTuple):
    """Who sees whom: of the past, then of the new records."""

    mask: Int8[Array, "M T S"]
    """Each for as many sequences in a row as there are for one mask."""
    keep: Int8[Array, "G H T S"] | None = None
    """What dropout leaves of the weights."""


def suits(length: int, before: int, size: int) -> bool:
    """Whether so many records after so many others, with heads of a size, can be held."""
    return max(length, before) <= LONGEST and size <= LARGEST and suit(size // 2)


def suits_branches(limb: Limb, window: int) -> bool:
    """Whether what neighbouring roots see can be held."""
    return suits(1, roots_at_once(window) + window - 1, limb.keys.shape[4])


def roots_at_once(window: int) -> int:
    return FEW_ROOTS if window <= FEW_ROOTS else MANY_ROOTS


def attend(
    qkv: Float[Array, "G T Q"],
    past: Past | None,
    sight: Sight,
    *,
    heads: int,
    rate: float = 0.0,
    interpret: bool = False,
) -> Float[Array, "G T D"]:
    """What attention mixes from a projection; `rate` is that of dropout."""

    def attend_kernel(qkv: Ref, past: Past | None, sight: Sight, out: Ref) -> None:
        head = _Head(qkv, past, sight, heads)
        query, groups = head.query(), head.groups()
        parts = zip(groups, _weights(query, groups, head.scale), strict=True)
        mixed = [(group.kept(weight, rate), group.values) for group, weight in parts]
        left = _add(dot(weight, values.left) for weight, values in mixed)
        right = _add(dot(weight, values.right) for weight, values in mixed)
        head.put(out, 0, Pair(left, right))

    width = qkv.shape[2] // 3
    return launch(
        attend_kernel, like(qkv, *qkv.shape[:2], width), (qkv.shape[0], heads),
        qkv, past, sight, tile="attend" + _how_many(qkv, past), interpret=interpret,
    )  # fmt: skip


def pull_attend(
    qkv: Float[Array, "G T Q"],
    past: Past | None,
    sight: Sight,
    gradient: Float[Array, "G T D"],
    *,
    heads: int,
    rate: float = 0.0,
    interpret: bool = False,
) -> tuple[Float[Array, "G T Q"], tuple[Float[Array, "G W D"], ...]]:
    """Gradients of the projection, and of the keys and values of the past."""

    def pull_attend_kernel(
        qkv: Ref, past: Past | None, sight: Sight, gradient: Ref, out: Ref, *out_past: Ref
    ) -> None:
        head = _Head(qkv, past, sight, heads)
        query, groups, angles = head.query(), head.groups(), head.angles()
        given = Pair(*(load(gradient, head.number, cut, head.length) for cut in head.columns(0)))
        weights = _weights(query, groups, head.scale)
        of_weights = [group.kept(dots(given, group.values), rate, jnp.float32) for group in groups]
        mean = _add(total(w * g) for w, g in zip(weights, of_weights, strict=True))
        of_scores = [
            (weight * (of_weight - mean) * head.scale).astype(qkv.dtype)
            for weight, of_weight in zip(weights, of_weights, strict=True)
        ]
        of_query = Pair(
            _add(dot(s, group.keys.left) for s, group in zip(of_scores, groups, strict=True)),
            _add(dot(s, group.keys.right) for s, group in zip(of_scores, groups, strict=True)),
        )
        head.put(out, 0, of_query.turned_back(angles))
        for group, scores, weight in zip(groups, of_scores, weights, strict=True):
            of_keys = Pair(*(dot(scores.T, half) for half in query))
            kept = group.kept(weight, rate)
            of_values = Pair(*(dot(kept.T, half) for half in given))
            if group.is_past:
                head.put(out_past[0], 0, of_keys.turned_back(group.angles), rows=head.before)
                head.put(out_past[1], 0, of_values, rows=head.before)
            else:
                head.put(out, 1, of_keys.turned_back(group.angles))
                head.put(out, 2, of_values)

    outs = (like(qkv),) if past is None else (like(qkv), like(past.keys), like(past.values))
    of_qkv, *of_past = launch(
        pull_attend_kernel, outs, (qkv.shape[0], heads),
        qkv, past, sight, gradient, tile="pull_attend" + _how_many(qkv, past), interpret=interpret,
    )  # fmt: skip
    return of_qkv, tuple(of_past)


def _how_many(qkv: Float[Array, "G T Q"], past: Past | None) -> str:
    """What the name of a tile ends with."""
    if past is None:
        return "_few" if qkv.shape[1] <= FEW else "_all"
    return "_least" if max(qkv.shape[1], past.keys.shape[1]) <= LEAST else "_all"


class Pair(NamedTuple):
    """The halves of a head's entries, which turn together."""

    left: Float[Array, "T P"]
    right: Float[Array, "T P"]

    def turned(self, angles: tuple[Array, Array] | None) -> Pair:
        """By the cosines and sines of their places, if they have places."""
        if angles is None:
            return self
        (left, right), (cos, sin) = (half.astype(jnp.float32) for half in self), angles
        dtype = self.left.dtype
        return Pair(
            (left * cos - right * sin).astype(dtype), (left * sin + right * cos).astype(dtype)
        )

    def turned_back(self, angles: tuple[Array, Array] | None) -> Pair:
        return self if angles is None else self.turned((angles[0], -angles[1]))


class _Group(NamedTuple):
    """Places that records look at, within a kernel."""

    keys: Pair
    values: Pair
    seen: Bool[Array, "T S"]
    keep: Bool[Array, "T S"] | None
    angles: tuple[Array, Array] | None
    is_past: bool

    def kept(self, weight: Array, rate: float, dtype: Any = None) -> Array:
        """After dropout, in a type: that of the values unless it is said."""
        dtype = self.values.left.dtype if dtype is None else dtype
        weight = weight.astype(dtype)
        if self.keep is None:
            return weight
        left = weight.astype(jnp.float32) / (1.0 - rate)
        return jnp.where(self.keep, left, 0.0).astype(dtype)


class _Head:
    """One head of one sequence, within a kernel."""

    def __init__(self, qkv: Ref, past: Past | None, sight: Sight, heads: int) -> None:
        self.number, self.head = pl.program_id(0), pl.program_id(1)
        self.length, self.width = qkv.shape[1], qkv.shape[2] // 3
        self.before = 0 if past is None else past.keys.shape[1]
        self.size = self.width // heads
        self.scale = self.size**-0.5
        self.qkv, self.past, self.sight = qkv, past, sight
        self.sequences = qkv.shape[0] // sight.mask.shape[0]

    def columns(self, kind: int) -> tuple[Slice, Slice]:
        """Of the halves of queries, keys or values."""
        return halves_of(kind * self.width + self.head * self.size, self.size)

    def angles(self, first: int | None = None, rows: int = 0) -> tuple[Array, Array] | None:
        """Of the new records, unless others are named."""
        if self.past is None:
            return None
        first, rows = (self.before, self.length) if first is None else (first, rows)
        cos, sin = (
            held(leaf.at[span(first, rows), :], inside(rows, leaf.shape[1]))
            for leaf in self.past.turn
        )
        return cos, sin

    def query(self) -> Pair:
        return self._new(0).turned(self.angles())

    def groups(self) -> list[_Group]:
        groups = []
        if self.past is not None:
            angles = self.angles(0, self.before)
            keys, values = (
                Pair(*(load(ref, self.number, cut, self.before) for cut in self.columns(0)))
                for ref in (self.past.keys, self.past.values)
            )
            flags = self._flags(0, self.before)
            groups.append(_Group(keys.turned(angles), values, *flags, angles, True))
        keys, angles = self._new(1), self.angles()
        flags = self._flags(self.before, self.length)
        return [*groups, _Group(keys.turned(angles), self._new(2), *flags, angles, False)]

    def put(self, ref: Ref, kind: int, value: Pair, rows: int | None = None) -> None:
        length = self.length if rows is None else rows
        for half, cut in zip(value, self.columns(kind), strict=True):
            at: Any = ref.at[self.number, span(0, length), cut]
            triton.store(at, half.astype(ref.dtype), mask=inside(length, half.shape[1]))

    def _new(self, kind: int) -> Pair:
        cuts = self.columns(kind)
        return Pair(*(load(self.qkv, self.number, cut, self.length) for cut in cuts))

    def _flags(self, first: int, places: int) -> tuple[Array, Array | None]:
        """Who sees some of the places, and which weights dropout leaves."""
        block = (span(0, self.length), span(first, places))
        valid = inside_both(self.length, places)
        mask, keep = self.sight
        at = divide(self.number, self.sequences)[0]
        seen = held(mask.at[(at, *block)], valid) != 0
        if keep is None:
            return seen, None
        kept = held(keep.at[(self.number, self.head, *block)], valid)
        return seen, kept != 0


def mix_branches(
    qkv: Float[Array, "B N R Q"],
    limb: Limb,
    twigs: Twigs,
    shared: Bool[Array, "B R S"],
    own: Bool[Array, " P"],
    turn: Turn,
    step: Int[Array, ""],
    *,
    window: int,
    interpret: bool = False,
) -> tuple[Float[Array, "B N R D"], Twigs]:
    """As `attention.mix_branches`; the twigs grow in place.

    A program has a few neighbouring roots, which see about the same places of the limb, and goes
    along the steps of their twigs so far.
    """
    batch, agents, roots, _ = qkv.shape
    heads, places, size = limb.keys.shape[2:]
    width, half = heads * size, size // 2
    some = roots_at_once(window)
    reach = size_of(some + window - 1)

    def flat(leaf: Array) -> Array:
        return leaf.reshape(-1, *leaf.shape[2:])

    def mix_branches_kernel(
        old_keys: Ref, old_values: Ref, qkv: Ref, limb: Limb, shared: Ref, own: Ref, turn: Turn,
        step: Ref, keys: Ref, values: Ref, out: Ref,
    ) -> None:  # fmt: skip
        row, head, first = pl.program_id(0), pl.program_id(1), pl.program_id(2) * some
        halves, now = halves_of(0, size), step[0]
        mine, near = pl.ds(first, some), pl.ds(first, reach)
        is_root, is_place = first + jnp.arange(some) < roots, first + jnp.arange(reach) < places
        there, around = (jnp.broadcast_to(x[:, None], (x.size, half)) for x in (is_root, is_place))
        cos, sin = (held(leaf.at[mine, :], there) for leaf in turn)

        def new(kind: int) -> Pair:
            cuts = halves_of(kind * width + head * size, size)
            return Pair(*(held(qkv.at[row, mine, cut], there) for cut in cuts))

        def of_limb(ref: Ref) -> Pair:
            return Pair(*(held(ref.at[row, head, near, cut], around) for cut in halves))

        def of_twig(ref: Ref, number: Array) -> list[Ref]:
            return [ref.at[row, head, mine, number, cut] for cut in halves]

        query, key, value = new(0).turned((cos, sin)), new(1).turned((cos, sin)), new(2)
        team = divide(row, agents)[0]
        seen = held(shared.at[team, mine, near], is_root[:, None] & is_place[None]) != 0
        limb_keys, limb_values = of_limb(limb.keys), of_limb(limb.values)
        for ref, pair in ((keys, key), (values, value)):
            for at, part_of_it in zip(of_twig(ref, now), pair, strict=True):
                triton.store(at, part_of_it.astype(ref.dtype), mask=there)

        def on(pair: Pair) -> Float[Array, "R 1"]:
            products = zip(query, pair, strict=True)
            return size**-0.5 * _add(total(exact(x) * exact(y)) for x, y in products)

        to_shared = jnp.where(seen, size**-0.5 * dots(query, limb_keys), FAR_BELOW)
        to_self = on(key)
        peak = jnp.maximum(to_shared.max(1, keepdims=True), to_self)
        weight, itself = jnp.exp(to_shared - peak), jnp.exp(to_self - peak)
        mixed = [
            dot(weight.astype(qkv.dtype), each) + itself * exact(of_itself)
            for each, of_itself in zip(limb_values, value, strict=True)
        ]

        def go_along(number: Array, so_far: tuple) -> tuple:
            """Of a softmax whose peak may still rise."""
            peak, whole, left, right = so_far
            old_key, old_value = (
                Pair(*(held(at, there) for at in of_twig(ref, number)))
                for ref in (old_keys, old_values)
            )
            score = jnp.where(own[number] != 0, on(old_key), FAR_BELOW)
            higher = jnp.maximum(peak, score)
            sinks, weight = jnp.exp(peak - higher), jnp.exp(score - higher)
            parts = zip((left, right), map(exact, old_value), strict=True)
            mixed = (sinks * x + weight * y for x, y in parts)
            return higher, sinks * whole + weight, *mixed

        start = (peak, total(weight) + itself, *mixed)
        _, whole, *mixed = jax.lax.fori_loop(0, now, go_along, start)
        for cut, each in zip(halves_of(head * size, size), mixed, strict=True):
            triton.store(out.at[row, mine, cut], (each / whole).astype(out.dtype), mask=there)

    before = tuple(flat(leaf) for leaf in twigs)
    given = (
        *before, flat(qkv), Limb(*map(flat, limb)), shared.astype(jnp.int8), own.astype(jnp.int32),
        Turn(*(leaf[:, 0] for leaf in turn)), step[None],
    )  # fmt: skip
    outs = (*map(like, before), like(qkv, batch * agents, roots, width))
    *grown, mixed = launch(
        mix_branches_kernel, outs, (batch * agents, heads, math.ceil(roots / some)), *given,
        tile="mix_branches", interpret=interpret, in_place=2,
    )  # fmt: skip
    grown = Twigs(*(leaf.reshape(old.shape) for leaf, old in zip(grown, twigs, strict=True)))
    return mixed.reshape(batch, agents, roots, width), grown


def size_of(rows: int) -> int:
    """The least number of places that can be loaded at once and holds so many."""
    return max(16, 2 ** math.ceil(math.log2(rows)))


def span(first: int, rows: int) -> Slice:
    """Places from the first on, as many as are loaded at once: some may be beyond the last."""
    # A number that is known beforehand would be refused for that.
    return pl.ds(first + 0 * pl.program_id(0), size_of(rows))


def inside(rows: int, columns: int) -> Bool[Array, "R C"]:
    """Which of the rows that are loaded at once are there."""
    there = jnp.arange(size_of(rows)) < rows
    return jnp.broadcast_to(there[:, None], (size_of(rows), columns))


def inside_both(rows: int, places: int) -> Bool[Array, "R P"]:
    """The same for rows that look at places."""
    return inside(rows, size_of(places)) & inside(places, size_of(rows)).T


def halves_of(first: int | Array, size: int) -> tuple[Slice, Slice]:
    """Columns of the halves of a head that begins at `first`."""
    half = size // 2
    return pl.ds(first, half), pl.ds(first + half, half)


def load(ref: Ref, number: Array, columns: Slice, rows: int) -> Array:
    """All rows of a sequence, then zeros."""
    at = ref.at[number, span(0, rows), columns]
    return held(at, inside(rows, columns.size))


def dots(x: Pair, y: Pair) -> Float[Array, "T S"]:
    return dot(x.left, y.left.T) + dot(x.right, y.right.T)


def _weights(query: Pair, groups: Sequence[_Group], scale: float) -> list[Float[Array, "T S"]]:
    """One softmax over all places."""
    scores = [jnp.where(group.seen, dots(query, group.keys) * scale, FAR_BELOW) for group in groups]
    peak = functools.reduce(jnp.maximum, [each.max(1, keepdims=True) for each in scores])
    raised = [jnp.exp(each - peak) for each in scores]
    whole = _add(total(each) for each in raised)
    return [each / whole for each in raised]


def _add(parts: Iterable[Array]) -> Array:
    return functools.reduce(jnp.add, parts)
