"""Kernels for GPUs: bias, norm and SiLU, whatever there is of them, once through memory.

XLA takes two or three kernels for it, and five on the way back, where gains and biases want sums
over all rows. Here a program has whole rows. On the way back it goes from some rows to others and
adds up as it goes, so that few sums are left for the end.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Float32

from .attention import exact
from .kernels import Ref, Slice, held, launch, like, silu_slope, suit, total
from .layers import LEAST_ROWS, End

AT_ONCE = 2048
"""Entries that a program holds; twice as many of rows up to `NARROW`, with twice the threads."""
NARROW = 256
PROGRAMS = 528
"""On the way back: four for each processor of a card for data centres, eight for `MANY_ROWS`."""
MANY_ROWS = 16_384


def suits(rows: int, size: int) -> bool:
    return rows >= LEAST_ROWS and size <= AT_ONCE and suit(size, least=128)


def ended(
    end: End,
    x: Float[Array, "M D"],
    bias: Float[Array, " D"] | None,
    gain: Float[Array, " D"] | None,
    *,
    interpret: bool = False,
) -> Float[Array, "M D"]:
    """Without a gain there is no norm."""
    rows, size = x.shape
    some = _rows_at_once(size)

    def end_kernel(x: Ref, bias: Ref | None, gain: Ref | None, out: Ref) -> None:
        here, there = _rows(pl.program_id(0), some, x)
        factor = None if gain is None else gain[:]
        y = _exact(x, bias, here, there)
        if factor is not None:
            y = y * _scale(y, end.eps) * exact(factor)[None]
        y = jax.nn.silu(y) if end.silu else y
        triton.store(out.at[here, :], y.astype(out.dtype), mask=there)

    grid, tile = (math.ceil(rows / some),), "end" + _of_width(size)
    return launch(end_kernel, like(x), grid, x, bias, gain, tile=tile, interpret=interpret)


def pull_ended(
    end: End,
    x: Float[Array, "M D"],
    bias: Float[Array, " D"] | None,
    gain: Float[Array, " D"] | None,
    gradient: Float[Array, "M D"],
    beside: Float[Array, "M D"] | None = None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "M D"], Float[Array, " D"] | None, Float[Array, " D"] | None]:
    """Gradients of x, to which that of x `beside` is added, of bias and gain."""
    rows, size = x.shape
    some = _rows_at_once(size)
    blocks = math.ceil(rows / some)
    programs = min(blocks, PROGRAMS if rows < MANY_ROWS else 2 * PROGRAMS)

    def pull_end_kernel(
        x: Ref, bias: Ref | None, gain: Ref | None, gradient: Ref, beside: Ref | None, out: Ref,
        sums: Sums,
    ) -> None:  # fmt: skip
        program = pl.program_id(0)

        def add(number: Array, so_far: Sums) -> Sums:
            here, there = _rows(number * programs + program, some, x)
            back = held(gradient.at[here, :], there)
            of_branch = None if beside is None else held(beside.at[here, :], there)
            factor = None if gain is None else exact(gain[:])[None]
            y, back, of_gain = _exact(x, bias, here, there), exact(back), None
            if factor is None:
                pulled = back * silu_slope(y) if end.silu else back
            else:
                scale = _scale(y, end.eps)
                unit = y * scale
                back = back * silu_slope(unit * factor) if end.silu else back
                of_gain, through = back * unit, back * factor
                pulled = scale * (through - unit * (total(through * unit) / size))
            found = Sums(None if bias is None else pulled, of_gain)
            if of_branch is not None:
                pulled = pulled + exact(of_branch)
            triton.store(out.at[here, :], pulled.astype(out.dtype), mask=there)
            return jax.tree.map(jnp.add, so_far, found)

        start = jax.tree.map(lambda _: jnp.zeros((some, size), jnp.float32), outs[1])
        found = jax.lax.fori_loop(0, math.ceil(blocks / programs), add, start)
        for ref, each in zip(sums, found, strict=True):
            if ref is not None:
                ref[program, :] = jnp.sum(each, axis=0)

    part = jax.ShapeDtypeStruct((programs, size), jnp.float32)
    outs = like(x), Sums(*(None if leaf is None else part for leaf in (bias, gain)))
    pulled, sums = launch(
        pull_end_kernel, outs, (programs,), x, bias, gain, gradient, beside,
        tile="pull_end" + _of_width(size), interpret=interpret,
    )  # fmt: skip
    of_bias, of_gain = jax.tree.map(lambda each: jnp.sum(each, axis=0).astype(x.dtype), sums)
    return pulled, of_bias, of_gain


class Sums(NamedTuple):
    """Over rows, of the gradients of what all rows share; none of what is not there."""

    of_bias: Any
    of_gain: Any


def _rows_at_once(size: int) -> int:
    return (2 * AT_ONCE if size <= NARROW else AT_ONCE) // size


def _of_width(size: int) -> str:
    """What the name of a tile ends with."""
    return "_narrow" if size <= NARROW else ""


def _rows(number: Array, some: int, x: Ref) -> tuple[Slice, Bool[Array, "S D"]]:
    """Rows of a block, and whether they are there."""
    first = number * some
    there = first + jnp.arange(some) < x.shape[0]
    return pl.ds(first, some), jnp.broadcast_to(there[:, None], (some, x.shape[1]))


def _exact(x: Ref, bias: Ref | None, here: Slice, there: Array) -> Float32[Array, "S D"]:
    """Rows with their bias."""
    found = held(x.at[here, :], there)
    return (found if bias is None else found + bias[:][None]).astype(jnp.float32)


def _scale(y: Float32[Array, "S D"], eps: float) -> Float32[Array, "S 1"]:
    """One by the root mean squares of rows."""
    return jax.lax.rsqrt(total(y * y) / y.shape[1] + eps)
