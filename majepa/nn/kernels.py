"""Kernels for GPUs: what one record of a `Stream` takes, in a handful of launches.

A record is a row for each agent of each sequence, too few to keep a GPU busy for longer than its
kernels take to start. XLA needs some fifty for it; here, each matrix product takes along what
comes before it (a norm) and after it (a bias, an activation, a residual, a turn to a place).

Arrays lie in device memory and are never cut outside of a kernel: those that hold many records are
handed over whole, with the number of the record. Programs take `ROWS` rows; sums are of float32 and
in a fixed order.

A kernel asks for all it needs before it computes anything: what a program waits for is memory, and
the compiler moves no load across a sum.

Only sizes that are powers of two can be loaded, and a matrix unit takes 16 rows and columns at
least: `suit` says which. `interpret` runs the same programs on any machine, slowly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int, Shaped

from .attention import FAR_BELOW, Turn, exact
from .layers import Linear, RMSNorm
from .transformer import Block

ROWS = 16
"""Rows that a program takes of a matrix product."""
WIDEST = 512
"""Entries of a row of a Transformer that programs can hold."""


class Tile(NamedTuple):
    """How a kernel's work is cut."""

    columns: int = 64
    """Columns that a program puts out at most."""
    depth: int = 128
    """Terms of a sum that are loaded at once,"""
    stages: int = 4
    """and how often that happens before they are needed."""
    warps: int = 4


TILES = {
    "enter_first": Tile(warps=2),
    "enter": Tile(),
    "attend": Tile(),
    "out": Tile(columns=32, depth=256),
    "project": Tile(),
    "widen": Tile(),
    "narrow": Tile(columns=32, stages=6),
    "read": Tile(),
    "hidden": Tile(),
    "draw": Tile(stages=3),
    "product": Tile(columns=32, stages=6),
    "pull_head": Tile(columns=32, warps=8),
    "pull_widened": Tile(columns=128, warps=8),
    "pull_mixed": Tile(columns=32, warps=8),
    "pull_attention": Tile(),
    "pull_token": Tile(warps=8),
    # Of `attention_kernels`: a program has a whole sequence, nothing to go along.
    "attend_all": Tile(stages=1),
    "pull_attend_all": Tile(stages=1),
    "attend_few": Tile(stages=1, warps=2),
    "pull_attend_few": Tile(stages=1, warps=2),
    "attend_least": Tile(stages=1, warps=1),
    "pull_attend_least": Tile(stages=1, warps=1),
    "mix_branches": Tile(stages=1),
    # Of `draw_kernels`.
    "drawn": Tile(stages=1),
    # Of `norm_kernels`.
    "end": Tile(stages=1),
    "end_narrow": Tile(stages=1, warps=8),
    "pull_end": Tile(stages=1),
    "pull_end_narrow": Tile(stages=1, warps=8),
}
"""Those of single records as they were fastest on an H200, for 80 rows of width 512."""

Ref = Any
Slice = Any
Time = Int[Array, "1"]


def suit(*sizes: int, least: int = 16) -> bool:
    """Whether these many entries can be loaded at once."""
    return all(size >= least and size & (size - 1) == 0 for size in sizes)


def whole_rows(x: Shaped[Array, "R *s"]) -> Shaped[Array, "P *s"]:
    """With rows of zeros up to a multiple of what a program takes."""
    return jnp.pad(x, [(0, -x.shape[0] % ROWS)] + [(0, 0)] * (x.ndim - 1))


def launch(
    kernel: Callable[..., None],
    out: Any,
    grid: tuple[int, ...],
    *given: Any,
    tile: str,
    in_place: int = 0,
    interpret: bool = False,
) -> Any:
    """Run `kernel(*given, *out)` for each place of a grid; `tile` is its name.

    The first `in_place` of `given`, arrays, are the first ones of `out` as well: what is not
    written stays.
    """
    cut = TILES[tile]
    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid=grid,
        input_output_aliases={number: number for number in range(in_place)},
        compiler_params=triton.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        interpret=interpret,
        name=tile,
    )(*given)


def like(x: Array, *shape: int) -> jax.ShapeDtypeStruct:
    """An output of the same type, and shape unless one is given."""
    return jax.ShapeDtypeStruct(shape or x.shape, x.dtype)


def part(number: Int[Array, ""] | int, size: int) -> Slice:
    """Part `number` of an axis that is cut into parts of a size."""
    return pl.ds(number * size, size)


def divide(number: Int[Array, "*n"], size: int) -> tuple[Int[Array, "*n"], Int[Array, "*n"]]:
    """How often it holds `size`, and what is left; of a number that is not negative."""
    by = jnp.full_like(number, size)
    return jax.lax.div(number, by), jax.lax.rem(number, by)


def add_up(size: int, depth: int, add: Callable[[Slice, tuple], tuple], start: tuple) -> tuple:
    """Go along an axis of `size` entries, in parts of `depth`."""
    depth = math.gcd(size, depth)
    if depth == size:
        return add(part(0, depth), start)
    return jax.lax.fori_loop(
        0, size // depth, lambda number, total: add(part(number, depth), total), start
    )


def dot(x: Float[Array, "M K"], weight: Float[Array, "K N"]) -> Float[Array, "M N"]:
    return jnp.dot(x.astype(weight.dtype), weight, preferred_element_type=jnp.float32)


def total(x: Float[Array, "M K"]) -> Float[Array, "M 1"]:
    return jnp.sum(x, axis=1, keepdims=True)


def zeros(*shape: int) -> Float[Array, "..."]:
    return jnp.zeros(shape, jnp.float32)


def scale_of(eps: float, x: Float[Array, "M D"]) -> Float[Array, "M 1"]:
    """What a norm multiplies rows by, before its gain."""
    return jax.lax.rsqrt(total(x * x) / x.shape[1] + eps)


def held(place: Any, there: Bool[Array, "..."]) -> Array:
    """What lies at a place, zero where nothing is."""
    return triton.load(place, mask=there, other=0)


class Rows(NamedTuple):
    """Those that a program takes, within a kernel. The last program may have fewer than others."""

    here: Slice
    there: Bool[Array, " M"] | None
    """Which of them there are; nothing where all are."""

    @staticmethod
    def of(x: Ref) -> Rows:
        number, count = pl.program_id(0), x.shape[0]
        there = None if count % ROWS == 0 else number * ROWS + jnp.arange(ROWS) < count
        return Rows(part(number, ROWS), there)

    def load(self, x: Ref, columns: Slice | None = None) -> Float[Array, "M K"]:
        cut = pl.ds(0, x.shape[1]) if columns is None else columns
        if self.there is None:
            return x[self.here, cut]
        return held(x.at[self.here, cut], self._inside(cut))

    def store(self, out: Ref, columns: Slice, found: Float[Array, "M K"]) -> None:
        """In the type of `out`."""
        if self.there is None:
            out[self.here, columns] = found.astype(out.dtype)
        else:
            place = out.at[self.here, columns]
            triton.store(place, found.astype(out.dtype), mask=self._inside(columns))

    def _inside(self, cut: Slice) -> Bool[Array, "M K"]:
        return jnp.broadcast_to(self.there[:, None], (ROWS, cut.size))  # pyright: ignore


def programs_for(x: Array) -> int:
    """That take all rows."""
    return math.ceil(x.shape[0] / ROWS)


def products(
    x: Ref, weight: Ref, rows: Rows, columns: Sequence[Slice], depth: int
) -> list[Float[Array, "M N"]]:
    """Rows times some columns of a matrix.

    What is multiplied goes from memory to the matrix units as it is, so that it can be on its way
    long before it is needed: norms are left to `fold_block` and to a scale of the result.
    """

    def add(cut: Slice, carry: tuple) -> tuple:
        return tuple(
            so_far + dot(rows.load(x, cut), weight[cut, some])
            for so_far, some in zip(carry, columns, strict=True)
        )

    return list(add_up(x.shape[-1], depth, add, tuple(zeros(ROWS, some.size) for some in columns)))


def normed_product(
    x: Float[Array, "R D"], norm: RMSNorm, linear: Linear, *, silu: bool, interpret: bool
) -> Float[Array, "R W"]:
    """`linear(norm(x))`, of a folded map, and its SiLU if that is asked for."""
    eps = norm.eps  # Its gain is in the map.
    name, size = "widen" if silu else "project", linear.bias.shape[0]
    tile = TILES[name]
    some = min(tile.columns, size)

    def normed_product_kernel(x: Ref, linear: Linear, out: Ref) -> None:
        rows, columns = Rows.of(x), part(pl.program_id(1), some)
        whole, bias = rows.load(x), linear.bias[columns]
        (found,) = products(x, linear.weight, rows, [columns], tile.depth)
        found = (scale_of(eps, exact(whole)) * found + exact(bias)[None]).astype(out.dtype)
        rows.store(out, columns, jax.nn.silu(exact(found)) if silu else found)

    out, grid = like(x, x.shape[0], size), (programs_for(x), size // some)
    return launch(normed_product_kernel, out, grid, x, linear, tile=name, interpret=interpret)


def add_product(
    before: Float[Array, "R D"], x: Float[Array, "R W"], linear: Linear, tile: str, *,
    interpret: bool,
) -> Float[Array, "R D"]:  # fmt: skip
    """`before + linear(x)`."""
    cut_by = TILES[tile]
    some = min(cut_by.columns, before.shape[1])

    def add_product_kernel(before: Ref, x: Ref, linear: Linear, out: Ref) -> None:
        rows, columns = Rows.of(x), part(pl.program_id(1), some)
        beside, bias = rows.load(before, columns), linear.bias[columns]
        (found,) = products(x, linear.weight, rows, [columns], cut_by.depth)
        rows.store(out, columns, exact(beside) + (found + exact(bias)[None]))

    grid = (programs_for(x), before.shape[1] // some)
    given = (before, x, linear)
    return launch(add_product_kernel, like(before), grid, *given, tile=tile, interpret=interpret)


def project(block: Block, x: Float[Array, "R D"], *, interpret: bool) -> Float[Array, "R Q"]:
    """Queries, keys and values of a folded block."""
    norm, linear = block.norm_attention, block.query_key_value
    return normed_product(x, norm, linear, silu=False, interpret=interpret)


def finish(
    block: Block,
    x: Float[Array, "R D"],
    mixed: Float[Array, "R D"],
    *,
    interpret: bool,
) -> Float[Array, "R D"]:
    """The rest of a folded block, given what attention mixed."""
    middle = add_product(x, mixed, block.out, "out", interpret=interpret)
    wide = normed_product(middle, block.norm_feed, block.widen, silu=True, interpret=interpret)
    return add_product(middle, wide, block.narrow, "narrow", interpret=interpret)


def enter_stream(
    stream: Float[Array, "3 R S D"],
    x: Float[Array, "R D"],
    block: Block,
    turn: Turn,
    t: Time,
    *,
    window: int,
    interpret: bool,
) -> Float[Array, "3 R S D"]:
    """The stream with queries and keys, turned to their place, and values of record `t`.

    Of a folded block.
    """
    heads, size, tile = block.heads, x.shape[1] // block.heads, TILES["enter"]
    half, eps = size // 2, block.norm_attention.eps
    some = min(tile.columns // 2, half)
    parts = half // some

    def enter_kernel(old: Ref, x: Ref, linear: Linear, turn: Turn, t: Ref, stream: Ref) -> None:
        rows, number = Rows.of(x), pl.program_id(1)
        here, (head, piece) = rows.here, divide(number, parts)
        (kind, place), inside = (divide(head, heads)[0], window - 1 + t[0]), part(piece, some)
        first = divide(head, heads)[1] * size + piece * some
        # The halves of a head are apart from the beginning: nothing cuts what is computed.
        begin = head * size + piece * some
        columns = [pl.ds(begin + offset, some) for offset in (0, half)]
        whole, biases = x[here, :], [linear.bias[cut] for cut in columns]
        cos, sin = turn.cos[place, inside], turn.sin[place, inside]
        found = products(x, linear.weight, rows, columns, tile.depth)
        scale, dtype = scale_of(eps, exact(whole)), stream.dtype
        left, right = (
            exact((scale * each + exact(bias)[None]).astype(dtype))
            for each, bias in zip(found, biases, strict=True)
        )
        is_value = kind == 2
        cos = jnp.where(is_value, 1.0, cos)[None]
        sin = jnp.where(is_value, 0.0, sin)[None]
        stream[kind, here, place, pl.ds(first, some)] = (left * cos - right * sin).astype(dtype)
        stream[kind, here, place, pl.ds(first + half, some)] = (left * sin + right * cos).astype(
            dtype
        )

    grid = (x.shape[0] // ROWS, 3 * heads * parts)
    given = (stream, x, block.query_key_value, turn, t)
    return launch(
        enter_kernel, like(stream), grid, *given, tile="enter", in_place=1, interpret=interpret
    )


def attend(
    stream: Float[Array, "3 R S D"],
    episode: Int[Array, "R S"],
    t: Time,
    *,
    heads: int,
    window: int,
    interpret: bool,
) -> Float[Array, "R D"]:
    """What attention mixes for record `t`, from the window that ends with it."""
    _, rows, _, width = stream.shape
    size = width // heads

    def attend_kernel(stream: Ref, episode: Ref, t: Ref, out: Ref) -> None:
        row, columns = pl.program_id(0), part(pl.program_id(1), size)
        first = t[0]
        seen, place = pl.ds(first, window), first + window - 1
        query = stream[0, row, place, columns]
        keys, values = (stream[kind, row, seen, columns] for kind in (1, 2))
        is_same = episode[row, seen] == episode[row, place]
        scores = jnp.sum(exact(keys) * exact(query)[None], axis=1) * size**-0.5
        scores = jnp.where(is_same, scores, FAR_BELOW)
        weight = jnp.exp(scores - jnp.max(scores))
        weight = weight / jnp.sum(weight)
        out[row, columns] = jnp.sum(weight[:, None] * exact(values), axis=0).astype(out.dtype)

    out = like(stream, rows, width)
    given = (stream, episode, t)
    return launch(attend_kernel, out, (rows, heads), *given, tile="attend", interpret=interpret)


def advance_block(
    block: Block,
    x: Float[Array, "R D"],
    stream: Float[Array, "3 R S D"],
    episode: Int[Array, "R S"],
    turn: Turn,
    t: Time,
    *,
    window: int,
    interpret: bool = False,
) -> tuple[Float[Array, "R D"], Float[Array, "3 R S D"]]:
    """What a layer, a folded block, makes of record `t`; and its stream with that record in it."""
    stream = enter_stream(stream, x, block, turn, t, window=window, interpret=interpret)
    return look_back(block, x, stream, episode, t, window=window, interpret=interpret), stream


def look_back(
    block: Block,
    x: Float[Array, "R D"],
    stream: Float[Array, "3 R S D"],
    episode: Int[Array, "R S"],
    t: Time,
    *,
    window: int,
    interpret: bool = False,
) -> Float[Array, "R D"]:
    """What a layer, a folded block, makes of record `t`, which is in its stream already."""
    mixed = attend(stream, episode, t, heads=block.heads, window=window, interpret=interpret)
    return finish(block, x, mixed, interpret=interpret)


# The way back: gradients of one record, from what a run of all records left behind. Matrices are
# given as gradients go through them, transposed.


class Back(NamedTuple):
    """The gradient `before + norm_gradient(norm, x, gradient)` of record `t`, not added up yet."""

    norm: RMSNorm
    x: Float[Array, "R T D"]
    gradient: Float[Array, "R D"]
    before: Float[Array, "R D"] | None = None

    def at(self, rows: Slice, t: Int[Array, ""]) -> Float[Array, "M D"]:
        """Within a kernel."""
        x, gradient = self.x[rows, t, :], self.gradient[rows, :]
        before = None if self.before is None else self.before[rows, :]
        pulled = norm_gradient(self.norm.eps, self.norm.gain[...], exact(x), exact(gradient))
        return pulled if before is None else exact(before) + pulled

    def through(
        self, weight: Ref, now: Int[Array, ""], here: Slice, columns: Slice, summed: Ref
    ) -> Float[Array, "M N"]:
        """Within a kernel: this program's part of the product.

        The first of those that share rows puts down their gradient, added up.
        """
        matrix = weight[:, columns]
        gradient = self.at(here, now).astype(summed.dtype)

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            summed[here, :] = gradient

        return dot(gradient, matrix)


def norm_gradient(
    eps: float, gain: Float[Array, " D"], x: Float[Array, "M D"], gradient: Float[Array, "M D"]
) -> Float[Array, "M D"]:
    size, scale = x.shape[1], scale_of(eps, x)
    gained, unit = gradient * exact(gain)[None], x * scale
    return scale * (gained - unit * (total(gained * unit) / size))


def silu_slope(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    share = jax.nn.sigmoid(x)
    return share * (1 + x * (1 - share))


def multiply(
    x: Float[Array, "R I"], weight: Float[Array, "I O"], *, interpret: bool
) -> Float[Array, "R O"]:
    rows, size, tile = x.shape[0], weight.shape[1], TILES["product"]
    some = min(tile.columns, size)

    def product_kernel(x: Ref, weight: Ref, out: Ref) -> None:
        here, columns = Rows.of(x), part(pl.program_id(1), some)
        (found,) = products(x, weight, here, [columns], tile.depth)
        here.store(out, columns, found)

    out, grid = like(x, rows, size), (programs_for(x), size // some)
    return launch(product_kernel, out, grid, x, weight, tile="product", interpret=interpret)


def pull_widened(
    back: Back,
    weight: Float[Array, "D W"],
    wide: Float[Array, "R T W"],
    t: Time,
    *,
    interpret: bool,
) -> tuple[Float[Array, "R D"], Float[Array, "R W"]]:
    """The gradient that went into a feed-forward layer, added up, and that of its `wide`."""
    rows, size, tile = back.gradient.shape[0], weight.shape[1], TILES["pull_widened"]
    some = min(tile.columns, size)

    def pull_widened_kernel(
        back: Back, weight: Ref, wide: Ref, t: Ref, summed: Ref, out: Ref
    ) -> None:
        now, here, columns = t[0], part(pl.program_id(0), ROWS), part(pl.program_id(1), some)
        active = wide[here, now, columns]
        found = back.through(weight, now, here, columns, summed)
        out[here, columns] = (found * silu_slope(exact(active))).astype(out.dtype)

    outs = (like(back.gradient), like(back.gradient, rows, size))
    grid = (rows // ROWS, size // some)
    given = (back, weight, wide, t)
    return launch(pull_widened_kernel, outs, grid, *given, tile="pull_widened", interpret=interpret)


def pull_mixed(
    mixed: Float[Array, "R T D"], back: Back, weight: Float[Array, "D D"], t: Time, *,
    interpret: bool,
) -> tuple[Float[Array, "R T D"], Float[Array, "R D"]]:  # fmt: skip
    """Gradients of what attention mixed, with that of record `t` among them, and the one that went
    into its output, added up."""
    (rows, width), tile = back.gradient.shape, TILES["pull_mixed"]
    some = min(tile.columns, width)

    def pull_mixed_kernel(
        old: Ref, back: Back, weight: Ref, t: Ref, mixed: Ref, summed: Ref
    ) -> None:
        now, here, columns = t[0], part(pl.program_id(0), ROWS), part(pl.program_id(1), some)
        found = back.through(weight, now, here, columns, summed)
        mixed[here, now, columns] = found.astype(mixed.dtype)

    out, grid = (like(mixed), like(back.gradient)), (rows // ROWS, width // some)
    given = (mixed, back, weight, t)
    return launch(
        pull_mixed_kernel, out, grid, *given, tile="pull_mixed", in_place=1, interpret=interpret
    )


class Attended(NamedTuple):
    """What attention in one layer did for `T` records, each of which saw some of `S`."""

    query: Float[Array, "R T D"]
    keys: Float[Array, "R S D"]
    values: Float[Array, "R S D"]
    weight: Float[Array, "R H T S"]


def pull_attention(
    scores: Float[Array, "R H T S"],
    mixed: Float[Array, "R T D"],
    attended: Attended,
    turn: Turn,
    t: Time,
    *,
    window: int,
    interpret: bool,
) -> tuple[Float[Array, "R H T S"], Float[Array, "R Q"]]:
    """Gradients of scores, with those of record `t` among them, and of its projection.

    `scores` are zero for records that are still to come; `mixed` has record `t` already.
    """
    rows, heads, length, _ = scores.shape
    width = mixed.shape[2]
    size, half = width // heads, width // heads // 2

    def pull_attention_kernel(
        old: Ref, mixed: Ref, attended: Attended, turn: Turn, t: Ref, scores: Ref, out: Ref
    ) -> None:
        row, head, now = pl.program_id(0), pl.program_id(1), t[0]
        columns, seen, place = part(head, size), pl.ds(now, window), now + window - 1
        query, keys, values, weight = attended
        halves = [pl.ds(head * size + offset, half) for offset in (0, half)]
        value, chosen = values[row, seen, columns], exact(weight[row, head, now, seen])
        # Of this record's key know the later records, and itself: the last one of its window.
        time = jnp.arange(length)
        knows = time >= now
        of_mixed, of_this = of_knowing(mixed, knows, row, columns), mixed[row, now, columns]
        told = held(old.at[row, head, :, place], time > now)
        by_later = held(weight.at[row, head, :, place], knows)
        sides = [(keys[row, seen, some], of_knowing(query, knows, row, some)) for some in halves]
        cos, sin = turn.cos[place, :], turn.sin[place, :]

        of_weight = jnp.sum(exact(value) * exact(of_this)[None], axis=1)
        of_scores = chosen * (of_weight - jnp.sum(chosen * of_weight)) * size**-0.5
        scores[row, head, now, seen] = of_scores.astype(scores.dtype)

        itself = jnp.sum(jnp.where(jnp.arange(window) == window - 1, of_scores, 0.0))
        told = jnp.where(time == now, itself, exact(told))

        of_queries = [jnp.sum(of_scores[:, None] * exact(key), axis=0) for key, _ in sides]
        of_keys = [jnp.sum(told[:, None] * exact(asked), axis=0) for _, asked in sides]
        for kind, (left, right) in enumerate((of_queries, of_keys)):
            first = kind * width + head * size
            out[row, pl.ds(first, half)] = (left * cos + right * sin).astype(out.dtype)
            out[row, pl.ds(first + half, half)] = (right * cos - left * sin).astype(out.dtype)
        of_value = jnp.sum(exact(by_later)[:, None] * exact(of_mixed), axis=0)
        out[row, pl.ds(2 * width + head * size, size)] = of_value.astype(out.dtype)

    def of_knowing(
        ref: Ref, knows: Bool[Array, " T"], row: Array, columns: Slice
    ) -> Float[Array, "T K"]:
        """What the records that know of this one have; of others nothing is asked."""
        there = jnp.broadcast_to(knows[:, None], (length, columns.size))
        return held(ref.at[row, :, columns], there)

    outs = (like(scores), like(mixed, rows, 3 * width))
    given = (scores, mixed, attended, turn, t)
    return launch(
        pull_attention_kernel, outs, (rows, heads), *given,
        tile="pull_attention", in_place=1, interpret=interpret,
    )  # fmt: skip
