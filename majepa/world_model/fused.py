"""The recurrence of local states in few kernels a record; see `recurrence` for what it computes.

Rows are the agents of all sequences. All that is known beforehand of a record, of all records at
once, is computed before the loop that goes from record to record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Float32, Int, Key, Shaped

from ..nn.attention import Turn, exact, rotate, turns
from ..nn.draw_kernels import class_of
from ..nn.few_rows import fold_block
from ..nn.kernels import (
    ROWS,
    TILES,
    WIDEST,
    Attended,
    Back,
    Ref,
    Rows,
    Time,
    advance_block,
    divide,
    dot,
    launch,
    like,
    look_back,
    multiply,
    norm_gradient,
    part,
    products,
    pull_attention,
    pull_mixed,
    pull_widened,
    scale_of,
    silu_slope,
    suit,
    total,
    whole_rows,
    zeros,
)
from ..nn.layers import Linear, RMSNorm, Tree, product, spread
from ..nn.stream import layers_of
from ..nn.transformer import Block, History, numbers_of
from .condense import Basis, Condensed
from .local import Dynamics, Posterior
from .recurrence import Known, Passed, noise_of
from .strands import Tracks
from .tokens import Tokens

LARGEST = 128
"""Records of a window, with those that are followed back, that programs can hold."""
TOGETHER = 8
"""Records in one turn of a loop: what is launched as one starts sooner."""


class _Reader(NamedTuple):
    """What is read from the output x of the last layer, with y = norm(x): one matrix for all.

    Its columns are those of the posterior's first layer, then those of the Gram matrix twice: as
    the type of the weights holds it, and what that leaves. The gain of the norm is in it.
    """

    norm: RMSNorm
    weight: Float[Array, "D O"]
    bias: Float[Array, " O"]
    """The row for the constant in [y; 1]; twice for the Gram matrix, which has a column too."""
    corner: Float[Array, "1"]


def _reader(basis: Basis, norm: RMSNorm, first: Linear) -> _Reader:
    size = norm.gain.shape[0]
    gain, dtype = norm.gain.astype(jnp.float32)[:, None], first.weight.dtype
    gram = gain * basis.gram[:size, :size]
    held = gram.astype(dtype)
    left = (gram - held.astype(gram.dtype)).astype(dtype)
    bias = [first.weight[size].astype(gram.dtype), 2 * basis.gram[size, :size], zeros(size)]
    return _Reader(
        norm,
        jnp.concatenate([(gain * first.weight[:size]).astype(dtype), held, left], axis=1),
        jnp.concatenate(bias),
        basis.gram[size, size][None],
    )


def sample_latents(
    dynamics: Dynamics,
    posterior: Posterior,
    seen: Float[Array, "B T N D"],
    tokens: Tokens,
    past: History,
    key: Key[Array, ""],
    tracks: Tracks,
    begin: Int[Array, ""],
    *,
    size: int,
    interpret: bool = False,
) -> Int[Array, "B T N S"]:
    """As in `recurrence`, for condensed states, in chunks of `size` records."""
    dynamics, posterior, seen, past = jax.lax.stop_gradient((dynamics, posterior, seen, past))
    batch, length, agents = tokens.a_before.shape
    latents, classes = posterior.latents, posterior.classes
    layers = layers_of(dynamics.transformer)
    blocks = [fold_block(block) for block in layers.blocks]
    entrance = _entrance(dynamics, blocks[0])
    reader = _reader(dynamics.state.basis, layers.norm, posterior.mlp.linears[0])  # pyright: ignore

    def by_row(leaf: Shaped[Array, "B T N *s"]) -> Shaped[Array, "R T *s"]:
        leaf = leaf.swapaxes(1, 2)
        return whole_rows(leaf.reshape(batch * agents, *leaf.shape[2:]))

    def of_agents(leaf: Shaped[Array, "B T"]) -> Shaped[Array, "R T"]:
        return by_row(jnp.broadcast_to(leaf[:, :, None], (*leaf.shape, agents)))

    seen, a_before, z_before = (by_row(leaf) for leaf in (seen, tokens.a_before, tokens.z_before))
    is_first = of_agents(tokens.is_first.astype(jnp.int32))
    episode = of_agents(jnp.concatenate([past.episode, tokens.episode], axis=1))
    turn = turns(jnp.arange(episode.shape[1]), past.keys[0].shape[-1])
    turn = jax.tree.map(lambda leaf: leaf[:, 0], turn)
    streams = _open(past, length)

    def chunk(number: Int[Array, ""], carry: tuple) -> tuple:
        noise = noise_of(key, tracks, number * size, size, (agents, latents))
        noise = jax.vmap(whole_rows)(noise.reshape(size, batch * agents, latents))

        def step(_: Int[Array, ""], carry: tuple) -> tuple:
            streams, latent, t = list(carry[0]), *carry[1:]
            streams[0], x = _enter_first(
                streams[0], entrance, latent, a_before, is_first, turn, t, classes=classes,
                eps=blocks[0].norm_attention.eps, window=layers.window, interpret=interpret,
            )  # fmt: skip
            x = look_back(
                blocks[0], x, streams[0], episode, t, window=layers.window, interpret=interpret
            )
            for layer, block in enumerate(blocks[1:], 1):
                x, streams[layer] = advance_block(
                    block, x, streams[layer], episode, turn, t,
                    window=layers.window, interpret=interpret,
                )  # fmt: skip
            read, squares = _read(x, reader, interpret=interpret)
            hidden = _hidden(
                posterior, dynamics, read, squares, reader.corner, seen, t, interpret=interpret
            )
            latent, t = _draw(latent, posterior, hidden, noise, t, interpret=interpret)
            return tuple(streams), latent, t

        return jax.lax.fori_loop(0, size, step, carry, unroll=TOGETHER)

    # Place t + 1 is for the latents of record t; place 0 for what the first token names.
    chunk_of_first = begin // size
    latent = jnp.zeros((z_before.shape[0], length + 1, latents), z_before.dtype)
    latent = jax.lax.dynamic_update_slice_in_dim(
        latent,
        jax.lax.dynamic_slice_in_dim(z_before, chunk_of_first * size, 1, axis=1),
        chunk_of_first * size,
        axis=1,
    )
    carry = (streams, latent, (chunk_of_first * size)[None])
    latent = jax.lax.fori_loop(chunk_of_first, length // size, chunk, carry)[1]
    latent = latent[: batch * agents, 1:].reshape(batch, agents, length, latents).swapaxes(1, 2)
    known = jnp.arange(length) >= chunk_of_first * size
    return jnp.where(known[None, :, None, None], latent, 0)


def _open(past: History, length: int) -> tuple[Float[Array, "3 R S D"], ...]:
    """Queries, keys and values of each layer, as in `Stream`; no query of the past is known."""
    batch, agents, before, heads, size = past.keys[0].shape
    turn, more = turns(jnp.arange(before), size), (0, -batch * agents % ROWS)

    def opened(keys: Float[Array, "B N S H K"], values: Float[Array, "B N S H K"]) -> Array:
        known = jnp.stack([jnp.zeros_like(keys), rotate(keys, turn), values])
        known = known.reshape(3, batch * agents, before, heads * size)
        return jnp.pad(known, [(0, 0), more, (0, length), (0, 0)])

    return tuple(map(opened, past.keys, past.values))


class _Entrance(NamedTuple):
    """From latents and an action to a token, and to its query, key and value in the first layer.

    These are the token's norm through a matrix, and a token is a sum of rows: so they are sums of
    rows of their own, which need not wait for the token.
    """

    linear: Linear
    norm: RMSNorm
    table: Float[Array, "V 3 2 Q"]
    """The token's rows under the gain and that matrix: of queries, keys and values the left halves
    of all heads, then the right ones."""
    start: Float[Array, "3 2 Q"]
    """The same of the token's bias,"""
    bias: Float[Array, "3 2 Q"]
    """and what is added after both norms, that of the token and the layer's own."""


def _entrance(dynamics: Dynamics, block: Block) -> _Entrance:
    """For a folded block."""
    matrix, exact_gain = block.query_key_value.weight, exact(dynamics.token_norm.gain)
    shape = (3, block.heads, 2, matrix.shape[1] // (6 * block.heads))

    def by_halves(leaf: Float[Array, "*b O"]) -> Float[Array, "*b 3 2 Q"]:
        leaf = jnp.moveaxis(leaf.reshape(*leaf.shape[:-1], *shape), -2, -3)
        return leaf.reshape(*leaf.shape[:-2], -1)

    def through(leaf: Float[Array, "*b D"]) -> Float[Array, "*b 3 2 Q"]:
        return by_halves(product(exact(leaf) * spread(exact_gain, leaf.ndim), exact(matrix)))

    token = dynamics.token
    return _Entrance(
        token,
        dynamics.token_norm,
        through(token.weight).astype(token.weight.dtype),
        through(token.bias),
        by_halves(exact(block.query_key_value.bias)),
    )


def _enter_first(
    stream: Float[Array, "3 R W D"],
    entrance: _Entrance,
    latent: Int[Array, "R P S"],
    a_before: Int[Array, "R T"],
    is_first: Int[Array, "R T"],
    turn: Turn,
    t: Time,
    *,
    classes: int,
    eps: float,
    window: int,
    interpret: bool,
) -> tuple[Float[Array, "3 R W D"], Float[Array, "R D"]]:
    """`Dynamics.look_up` for record `t`, and the first layer's stream with it, as `enter_stream`
    makes it; `eps` is that of the layer's norm."""
    rows, _, latents = latent.shape
    width, half = stream.shape[3], turn.cos.shape[1]

    def enter_first_kernel(
        old: Ref, entrance: _Entrance, latent: Ref, a_before: Ref, is_first: Ref, turn: Turn,
        t: Ref, stream: Ref, out: Ref,
    ) -> None:  # fmt: skip
        row, kind, now = pl.program_id(0), pl.program_id(1), t[0]
        (linear, norm, table, start, bias), place = entrance, window - 1 + now
        names = [latent[row, now, number] + number * classes for number in range(latents)]
        names.append(latents * classes + a_before[row, now])
        # Row by row: for a sum over an axis of one block, threads would wait for each other.
        of_token = [linear.weight[name, :] for name in names]
        of_sides = [[table[name, kind, side, :] for name in names] for side in (0, 1)]
        is_start, token_bias, gain = is_first[row, now] != 0, linear.bias[...], norm.gain[...]
        head, inside = divide(jnp.arange(width // 2), half)
        cos, sin = turn.cos[place, inside], turn.sin[place, inside]
        sides = [(start[kind, side, :], bias[kind, side, :]) for side in (0, 1)]

        def sum_of(rows: list[Array]) -> Float32[Array, " C"]:
            """None at an episode's start."""
            return jnp.where(is_start, 0.0, sum(map(exact, rows), zeros(*rows[0].shape)))

        halves = [sum_of(rows) for rows in of_sides]
        found = sum_of(of_token).astype(out.dtype)
        x = exact((found + token_bias).astype(out.dtype))
        scale = jax.lax.rsqrt(jnp.sum(x * x) / width + norm.eps)
        x = exact((x * scale * exact(gain)).astype(out.dtype))
        scale = scale * jax.lax.rsqrt(jnp.sum(x * x) / width + eps)

        @pl.when(kind == 0)
        def _() -> None:
            out[row, :] = x.astype(out.dtype)

        left, right = (
            exact((scale * (each + own_start) + own_bias).astype(stream.dtype))
            for each, (own_start, own_bias) in zip(halves, sides, strict=True)
        )
        cos, sin = jnp.where(kind == 2, 1.0, cos), jnp.where(kind == 2, 0.0, sin)
        columns = 2 * half * head + inside
        stream[kind, row, place, columns] = (left * cos - right * sin).astype(stream.dtype)
        stream[kind, row, place, columns + half] = (left * sin + right * cos).astype(stream.dtype)

    given = (stream, entrance, latent, a_before, is_first, turn, t)
    outs = (like(stream), like(stream, rows, width))
    return launch(
        enter_first_kernel, outs, (rows, 3), *given,
        tile="enter_first", in_place=1, interpret=interpret,
    )  # fmt: skip


def _read(
    x: Float[Array, "R D"], reader: _Reader, *, interpret: bool
) -> tuple[Float[Array, "R O"], Float[Array, "C R"]]:
    """`y @ weight + bias` for y = norm(x), and sums of its columns times y, tile by tile."""
    (rows, width), size, tile = x.shape, reader.bias.shape[0], TILES["read"]
    some = min(tile.columns, width)

    def read_kernel(x: Ref, reader: _Reader, out: Ref, squares: Ref) -> None:
        own_rows, number = Rows.of(x), pl.program_id(1)
        here, columns = own_rows.here, part(number, some)
        # Columns of the Gram matrix follow those of the first layer, which need no square.
        own = jnp.maximum(number - (size - 2 * width) // some, 0)
        own = part(divide(own, width // some)[1], some)
        whole, x_own = x[here, :], x[here, own]
        bias, gain = reader.bias[columns], reader.norm.gain[own]
        (found,) = products(x, reader.weight, own_rows, [columns], tile.depth)
        scale = scale_of(reader.norm.eps, exact(whole))
        found = scale * found + bias[None]
        out[here, columns] = found.astype(out.dtype)
        y = scale * exact(x_own) * exact(gain)[None]
        squares[number, here] = jnp.sum(found * y, axis=1)

    tiles = size // some
    out = (like(x, rows, size), like(reader.bias, tiles, rows))
    grid = (rows // ROWS, tiles)
    return launch(read_kernel, out, grid, x, reader, tile="read", interpret=interpret)


def _hidden(
    posterior: Posterior,
    dynamics: Dynamics,
    read: Float[Array, "R O"],
    squares: Float[Array, "C R"],
    corner: Float[Array, "1"],
    seen: Float[Array, "R T J"],
    t: Time,
    *,
    interpret: bool,
) -> Float[Array, "R J"]:
    """The posterior's hidden layer for record `t`: r (thin [y; 1]) + seen, its norm and SiLU."""
    rows, size = seen.shape[0], seen.shape[-1]
    first_square = squares.shape[0] * size // read.shape[1]
    count = squares.shape[0] - first_square
    eps = dynamics.state.basis.eps  # pyright: ignore

    def hidden_kernel(
        norm: RMSNorm, read: Ref, squares: Ref, corner: Ref, seen: Ref, t: Ref, out: Ref
    ) -> None:
        row, now = pl.program_id(0), t[0]
        parts, last = squares[pl.ds(first_square, count), row], corner[0]
        of_y, gain, of_e = read[row, pl.ds(0, size)], norm.gain[...], seen[row, now, :]
        r = jax.lax.rsqrt(jnp.maximum(jnp.sum(parts) + last, 0) + eps)
        x = r * exact(of_y) + exact(of_e)
        scale = jax.lax.rsqrt(jnp.sum(x * x) / size + norm.eps)
        out[row, :] = jax.nn.silu(x * scale * exact(gain)).astype(out.dtype)

    given = (posterior.mlp.norms[0], read, squares, corner, seen, t)
    out = like(seen, rows, size)
    return launch(hidden_kernel, out, (rows,), *given, tile="hidden", interpret=interpret)


def _draw(
    latent: Int[Array, "R P S"],
    posterior: Posterior,
    hidden: Float[Array, "R J"],
    noise: Float[Array, "N R S"],
    t: Time,
    *,
    interpret: bool,
) -> tuple[Int[Array, "R P S"], Time]:
    """With the latents of record `t`, each from the program of its columns; and the next `t`.

    To count in a kernel of its own would take as long as some of the others.
    """
    rows, _, latents = latent.shape
    classes, share, chunk = posterior.classes, posterior.unimix, noise.shape[0]
    depth = TILES["draw"].depth

    def draw_kernel(
        old: Ref, linear: Linear, hidden: Ref, noise: Ref, t: Ref, latent: Ref, following: Ref
    ) -> None:
        own_rows, number, now = Rows.of(hidden), pl.program_id(1), t[0]
        here, columns = own_rows.here, part(number, classes)
        bias, own_noise = linear.bias[columns], noise[divide(now, chunk)[1], here, number]
        (logits,) = products(hidden, linear.weight, own_rows, [columns], depth)
        logits = logits + exact(bias)[None]
        # As the posteriors that gradients are taken of have them.
        logits = logits.astype(linear.bias.dtype).astype(jnp.float32)
        own = class_of(logits, own_noise, share)
        latent[here, now + 1, number] = own.astype(latent.dtype)
        following[0] = now + 1

    return launch(
        draw_kernel, (like(latent), like(t)), (rows // ROWS, latents),
        latent, posterior.mlp.linears[1], hidden, noise, t,
        tile="draw", in_place=1, interpret=interpret,
    )  # fmt: skip


class _Head(NamedTuple):
    """All that is known of how y became a hidden layer, for each record: c = r [y; 1] went through
    `thin`, and a norm and a SiLU followed."""

    thin: Float[Array, "J D"]
    """Transposed."""
    slope: Float[Array, "R T J"]
    """Of the SiLU, times the gain of the norm."""
    unit: Float[Array, "R T J"]
    """The hidden layer with a mean square of one."""
    scale: Float[Array, "R T"]
    """Which made it so."""
    read: Float[Array, "R T J"]
    """[y; 1] through `thin`."""
    r: Float[Array, "R T"]
    direct: Float[Array, "R T D"]
    turned: Float[Array, "R T D"]


def back_through(
    dynamics: Dynamics,
    posterior: Posterior,
    passed: Passed,
    is_first: Bool[Array, "B T"],
    known: Known,
    *,
    interpret: bool = False,
) -> Float[Array, "B T N S K"]:
    """As in `recurrence`."""
    batch, agents, length, size = passed.logits.shape
    layers, trace = layers_of(dynamics.transformer), passed.trace
    width, dtype = layers.norm.gain.shape[0], dynamics.token.weight.dtype

    def by_row(leaf: Shaped[Array, "B N *s"]) -> Shaped[Array, "R *s"]:
        return whole_rows(leaf.reshape(batch * agents, *leaf.shape[2:]))

    def flat(leaf: Shaped[Array, "B N T H K"]) -> Shaped[Array, "R T D"]:
        return by_row(leaf.reshape(*leaf.shape[:3], width))

    head = _known_head(posterior, passed, known, by_row)
    token, logits, end = (by_row(leaf) for leaf in (passed.token, passed.logits, trace.end))
    first = by_row(jnp.broadcast_to(is_first[:, None].astype(jnp.int32), (batch, agents, length)))
    turn = turns(jnp.arange(trace.keys[0].shape[2]), width // trace.keys[0].shape[3])
    turn = jax.tree.map(lambda leaf: leaf[:, 0], turn)
    attended = [
        Attended(flat(query), flat(keys), flat(values), by_row(weight))
        for query, keys, values, weight in zip(
            trace.query, trace.keys, trace.values, trace.weight, strict=True
        )
    ]
    x, middle, wide = (
        [by_row(leaf) for leaf in leaves] for leaves in (trace.x, trace.middle, trace.wide)
    )
    across = _transposed((posterior.mlp.linears[1], layers.blocks))
    of_latents = dynamics.token.weight[:size].T

    def step(_: Int[Array, ""], carry: tuple) -> tuple:
        of_z, of_logits, scores, mixed, t = (*carry[:2], list(carry[2]), list(carry[3]), carry[4])
        out, blocks = across
        of_silu = multiply(of_logits, out.weight, interpret=interpret)
        back = Back(layers.norm, end, _pull_head(head, of_silu, t, interpret=interpret))
        for layer, block in reversed(list(enumerate(blocks))):
            into, of_wide = pull_widened(
                back, block.narrow.weight, wide[layer], t, interpret=interpret
            )
            gradient = multiply(of_wide, block.widen.weight, interpret=interpret)
            back = Back(block.norm_feed, middle[layer], gradient, into)
            mixed[layer], into = pull_mixed(
                mixed[layer], back, block.out.weight, t, interpret=interpret
            )
            scores[layer], of_parts = pull_attention(
                scores[layer], mixed[layer], attended[layer], turn, t,
                window=layers.window, interpret=interpret,
            )  # fmt: skip
            gradient = multiply(of_parts, block.query_key_value.weight, interpret=interpret)
            back = Back(block.norm_attention, x[layer], gradient, into)
        of_z, of_logits, t = _pull_token(
            of_z, back, dynamics.token_norm, token, of_latents, logits, first, t,
            posterior=posterior, interpret=interpret,
        )  # fmt: skip
        return of_z, of_logits, tuple(scores), tuple(mixed), t

    # Place t + 1 is for the latents of record t, as in `sample_latents`.
    rows = logits.shape[0]
    nothing = (
        zeros(rows, length + 1, size),
        jnp.zeros((rows, size), dtype),
        tuple(jnp.zeros_like(layer.weight) for layer in attended),
        tuple(jnp.zeros_like(layer.query) for layer in attended),
        jnp.full(1, length - 1),
    )
    of_z = jax.lax.fori_loop(0, length, step, nothing, unroll=TOGETHER)[0]
    of_z = of_z[: batch * agents, 1:].reshape(batch, agents, length, posterior.latents, -1)
    return of_z.swapaxes(1, 2)


def _known_head(
    posterior: Posterior, passed: Passed, known: Known, by_row: Callable[[Array], Array]
) -> _Head:
    norm, dtype, width = posterior.mlp.norms[0], passed.hidden.dtype, passed.y.shape[-1]
    hidden, gain = passed.hidden.astype(jnp.float32), spread(norm.gain, 4).astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(hidden**2, axis=-1, keepdims=True) + norm.eps)
    unit = hidden * scale
    return _Head(
        thin=known.thin[:width].T,
        slope=by_row((silu_slope(unit * gain) * gain).astype(dtype)),
        unit=by_row(unit.astype(dtype)),
        scale=by_row(scale[..., 0]),
        read=by_row(product(known.wide, known.thin)),
        r=by_row(known.r[..., 0]),
        direct=by_row(known.direct),
        turned=by_row(known.turned[..., :width]),
    )


def _transposed(tree: Tree) -> Tree:
    """With all matrices the other way round."""
    return jax.tree.map(lambda leaf: leaf.T if leaf.ndim == 2 else leaf, tree)


def _pull_head(
    head: _Head, gradient: Float[Array, "R J"], t: Time, *, interpret: bool
) -> Float[Array, "R D"]:
    """From the gradient of what the posterior's SiLU puts out to that of y."""
    (rows, size), width, tile = gradient.shape, head.direct.shape[-1], TILES["pull_head"]
    some = min(tile.columns, width)

    def pull_head_kernel(head: _Head, gradient: Ref, t: Ref, out: Ref) -> None:
        here, columns, now = part(pl.program_id(0), ROWS), part(pl.program_id(1), some), t[0]
        given, slope, unit = gradient[here, :], head.slope[here, now, :], head.unit[here, now, :]
        read, thin = head.read[here, now, :], head.thin[:, columns]
        scale, r = head.scale[here, now][:, None], head.r[here, now][:, None]
        direct, turned = head.direct[here, now, columns], head.turned[here, now, columns]
        found, unit = exact(given) * exact(slope), exact(unit)
        left = found - unit * (total(found * unit) / size)
        # Along [y; 1], whose product with the gradient of c changes r.
        along = scale * total(left * exact(read))
        of_y = exact(direct) + r * dot(scale * left, thin) - r * r * r * along * exact(turned)
        out[here, columns] = of_y.astype(out.dtype)

    grid = (rows // ROWS, width // some)
    out = like(gradient, rows, width)
    return launch(
        pull_head_kernel, out, grid, head, gradient, t, tile="pull_head", interpret=interpret
    )


def _pull_token(
    of_z: Float[Array, "R P Z"],
    back: Back,
    norm: RMSNorm,
    token: Float[Array, "R T D"],
    of_latents: Float[Array, "D Z"],
    logits: Float[Array, "R T Z"],
    is_first: Int[Array, "R T"],
    t: Time,
    *,
    posterior: Posterior,
    interpret: bool,
) -> tuple[Float[Array, "R P Z"], Float[Array, "R Z"], Time]:
    """Gradients of latents, with that of the one in the token of record `t` among them, and the
    gradient of the logits which it was drawn from, one record earlier; and that record's `t`."""
    classes, share = posterior.classes, posterior.unimix

    def pull_token_kernel(
        old: Ref, back: Back, norm: RMSNorm, token: Ref, of_latents: Ref, logits: Ref,
        is_first: Ref, t: Ref, of_z: Ref, of_logits: Ref, earlier: Ref,
    ) -> None:  # fmt: skip
        here, columns, now = part(pl.program_id(0), ROWS), part(pl.program_id(1), classes), t[0]
        # Before the first record of all there is none: what is computed then goes nowhere.
        before = logits[here, jnp.maximum(now - 1, 0), columns]
        x, gain, matrix = token[here, now, :], norm.gain[...], of_latents[:, columns]
        begins = is_first[here, now] != 0
        found = dot(norm_gradient(norm.eps, gain, exact(x), back.at(here, now)), matrix)
        found = jnp.where(begins[:, None], 0.0, found)
        of_z[here, now, columns] = found
        before = exact(before)
        chance = jnp.exp(before - jnp.max(before, axis=1, keepdims=True))
        chance = chance / total(chance)
        found = (1 - share) * chance * (found - total(chance * found))
        of_logits[here, columns] = found.astype(of_logits.dtype)
        earlier[0] = now - 1

    rows, _, size = of_z.shape
    out = (like(of_z), like(of_latents, rows, size), like(t))
    grid = (rows // ROWS, size // classes)
    given = (of_z, back, norm, token, of_latents, logits, is_first, t)
    return launch(
        pull_token_kernel, out, grid, *given,
        tile="pull_token", in_place=1, interpret=interpret,
    )  # fmt: skip


def suits(dynamics: Dynamics, posterior: Posterior) -> bool:
    """Whether there are kernels that draw latents, of condensed states of these sizes."""
    return isinstance(dynamics.state, Condensed) and _suit_all(dynamics, posterior)


def _suit_all(dynamics: Dynamics, posterior: Posterior) -> bool:
    width, window = dynamics.transformer.norm.gain.shape[0], dynamics.transformer.window
    head = width // numbers_of(dynamics.transformer.layers)[1]
    hidden = posterior.mlp.norms[0].gain.shape[0]
    leaves = jax.tree.leaves((dynamics.token, dynamics.transformer, posterior))
    return (
        all(leaf.dtype == jnp.bfloat16 for leaf in leaves)
        and len(posterior.mlp.linears) == 2
        and suit(width, hidden, least=64)
        and suit(head, least=32)
        and suit(window, posterior.classes, posterior.latents)
        # What a program holds of a matrix must fit into its processor.
        and width <= WIDEST
        and hidden <= 2 * WIDEST
        and max(window, posterior.classes, head) <= LARGEST
    )


def suits_back(dynamics: Dynamics, posterior: Posterior, passed: Passed) -> bool:
    """Whether there are kernels for the way back, for these many records, too."""
    length = passed.y.shape[2]
    return _suit_all(dynamics, posterior) and suit(length) and length <= LARGEST
