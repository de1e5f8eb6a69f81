"""What the local history of each record is made of: what was inferred and done before it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..replay import Sequence
from .local import Dynamics


class Tokens(NamedTuple):
    """The inputs of `T` records' histories."""

    z_before: Int[Array, "B T N S"]
    a_before: Int[Array, "B T N"]
    is_first: Bool[Array, "B T"]
    episode: Int[Array, "B T"]
    """Number of the episode within the sequence."""

    def between(self, begin: int, end: int | None) -> Tokens:
        return jax.tree.map(lambda leaf: leaf[:, begin:end], self)

    def inferred(self, latent: Int[Array, "B T N S"]) -> Tokens:
        """With the latents of these very records; what preceded the first one stays."""
        return self._replace(z_before=_shift(self.z_before[:, 0], latent))


def tokens_of(sequence: Sequence, latent: Int[Array, "B T N S"]) -> Tokens:
    """Latents and actions moved one record on; the sequence brings what preceded it."""
    record = sequence.record
    return Tokens(
        z_before=_shift(sequence.previous_latent, latent),
        a_before=_shift(sequence.previous_action, record.action),
        is_first=record.is_first,
        episode=jnp.cumsum(record.is_first, axis=1, dtype=jnp.int32),
    )


def enter(
    dynamics: Dynamics, tokens: Tokens, *, classes: int, num_actions: int
) -> Float[Array, "B T N D"]:
    """Tokens before their norm."""
    first = jnp.broadcast_to(tokens.is_first[..., None], tokens.a_before.shape)
    return dynamics.enter(
        one_hot_vec(tokens.z_before, classes), jax.nn.one_hot(tokens.a_before, num_actions), first
    )


def one_hot_vec(index: Int[Array, "*b S"], classes: int) -> Float[Array, "*b Z"]:
    return jax.nn.one_hot(index, classes).reshape(*index.shape[:-1], -1)


def _shift(before: Array, x: Array) -> Array:
    return jnp.concatenate([before[:, None], x[:, :-1]], axis=1)
