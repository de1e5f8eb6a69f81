"""Kernels for GPUs: a norm with the bias before it and the SiLU after it, once through memory.

XLA takes two or three kernels for it, and five on the way back, where gains and biases want sums
over all rows. Here a program has whole rows. On the way back it goes from some rows to others and
adds up as it goes, so that few sums are left for the end.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float

from .attention_kernels import held
from .kernels import Ref, Slice, launch, like, silu_slope, suit, total

LEAST_ROWS = 1024
"""With fewer, what XLA fuses around a norm is worth more than what is saved here."""
AT_ONCE = 2048
"""Entries that a program holds."""
PROGRAMS = 528
"""On the way back: four for each processor of a card for data centres."""


def suits(rows: int, size: int) -> bool:
    return rows >= LEAST_ROWS and size <= AT_ONCE and suit(size, least=128)


def activated(
    x: Float[Array, "M D"],
    bias: Float[Array, " D"] | None,
    gain: Float[Array, " D"],
    *,
    eps: float,
    interpret: bool = False,
) -> Float[Array, "M D"]:
    rows, size = x.shape
    some = AT_ONCE // size

    def activated_kernel(x: Ref, bias: Ref | None, gain: Ref, out: Ref) -> None:
        here, there = _rows(pl.program_id(0), some, x)
        unit, _ = _unit(x, bias, here, there, eps)
        y = jax.nn.silu(unit * gain[:].astype(jnp.float32)[None])
        triton.store(out.at[here, :], y.astype(out.dtype), mask=there)

    grid = (math.ceil(rows / some),)
    return launch(
        activated_kernel, like(x), grid, x, bias, gain, tile="activated", interpret=interpret
    )


def pull_activated(
    x: Float[Array, "M D"],
    bias: Float[Array, " D"] | None,
    gain: Float[Array, " D"],
    gradient: Float[Array, "M D"],
    *,
    eps: float,
    interpret: bool = False,
) -> tuple[Float[Array, "M D"], Float[Array, " D"] | None, Float[Array, " D"]]:
    """Gradients of all three."""
    rows, size = x.shape
    some = AT_ONCE // size
    blocks = math.ceil(rows / some)
    programs = min(blocks, PROGRAMS)

    def pull_activated_kernel(
        x: Ref, bias: Ref | None, gain: Ref, gradient: Ref, out: Ref, *sums: Ref
    ) -> None:
        program, gained = pl.program_id(0), gain[:].astype(jnp.float32)[None]

        def add(number: Array, so_far: tuple[Array, ...]) -> tuple[Array, ...]:
            here, there = _rows(number * programs + program, some, x)
            unit, scale = _unit(x, bias, here, there, eps)
            back = held(gradient.at[here, :], there).astype(jnp.float32)
            back = back * silu_slope(unit * gained)
            through = back * gained
            pulled = scale * (through - unit * (total(through * unit) / size))
            triton.store(out.at[here, :], pulled.astype(out.dtype), mask=there)
            found = (back * unit, pulled)
            return tuple(old + new for old, new in zip(so_far, found, strict=False))

        start = tuple(jnp.zeros((some, size), jnp.float32) for _ in sums)
        found = jax.lax.fori_loop(0, math.ceil(blocks / programs), add, start)
        for ref, each in zip(sums, found, strict=True):
            ref[program, :] = jnp.sum(each, axis=0)

    part = jax.ShapeDtypeStruct((programs, size), jnp.float32)
    outs = (like(x), part) if bias is None else (like(x), part, part)
    pulled, *sums = launch(
        pull_activated_kernel, outs, (programs,), x, bias, gain, gradient,
        tile="pull_activated", interpret=interpret,
    )  # fmt: skip
    of_gain, *of_bias = (jnp.sum(each, axis=0).astype(gain.dtype) for each in sums)
    return pulled, of_bias[0] if of_bias else None, of_gain


def _rows(number: Array, some: int, x: Ref) -> tuple[Slice, Bool[Array, "S D"]]:
    """Rows of a block, and whether they are there."""
    first = number * some
    there = first + jnp.arange(some) < x.shape[0]
    return pl.ds(first, some), jnp.broadcast_to(there[:, None], (some, x.shape[1]))


def _unit(
    x: Ref, bias: Ref | None, here: Slice, there: Array, eps: float
) -> tuple[Float[Array, "S D"], Float[Array, "S 1"]]:
    """Rows divided by their root mean squares, and what they are multiplied by for that."""
    found = held(x.at[here, :], there)
    if bias is not None:
        found = found + bias[:][None]
    exact = found.astype(jnp.float32)
    scale = jax.lax.rsqrt(total(exact * exact) / exact.shape[1] + eps)
    return exact * scale, scale
