"""Which entries of a learning sequence each loss is computed on.

All masks are read off the learning records `[B, T, ...]`. One of the `M = T - 1` transitions, `t`,
leads from record `t` to `t + 1`; the one from the last record of an episode to the first of the
next is none.
"""

from __future__ import annotations

import functools
import operator
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ..replay import Record


def inside_episode(record: Record) -> Bool[Array, "B M"]:
    """Transitions that stay in one episode."""
    return ~record.is_first[:, 1:]


def sigreg_entries(
    record: Record, alive_before: Bool[Array, "B N"], kind: Literal["active", "present"]
) -> Bool[Array, "B T N"]:
    """Embeddings that should look Gaussian: `active` ends one record after a slot's death."""
    if kind == "present":
        return record.present
    before = jnp.concatenate([alive_before[:, None], record.alive[:, :-1]], axis=1)
    return record.present & (record.alive | (before & ~record.is_first[..., None]))


def sources(record: Record) -> Bool[Array, "B M N"]:
    """Transitions of slots that can act; dying on arrival is kept."""
    acts = record.present[:, :-1] & record.alive[:, :-1]
    return acts & inside_episode(record)[..., None] & record.present[:, 1:]


def team(record: Record) -> Bool[Array, "B M N"]:
    """Transitions of all present slots, dead ones included."""
    return record.present[:, :-1] & inside_episode(record)[..., None]


def ahead(record: Record, horizon: int, farthest: int) -> Bool[Array, "B R N"]:
    """Roots whose next `horizon` steps an agent acted through, legally and in one episode.

    Every horizon uses the roots that leave room for the farthest one.
    """
    roots = record.alive.shape[1] - farthest
    was_legal = taken_is_legal(record)
    acted = (record.present & record.alive & was_legal)[:, :-1]
    acted = acted & inside_episode(record)[..., None]
    steps = [acted[:, k : k + roots] for k in range(horizon)]
    return functools.reduce(operator.and_, steps) & record.present[:, horizon : horizon + roots]


def taken_is_legal(record: Record) -> Bool[Array, "B T N"]:
    """Whether the recorded action was legal where it was taken."""
    return jnp.take_along_axis(record.legal, record.action[..., None], axis=-1)[..., 0]


def alternatives(legal: Bool[Array, "*b A"], action: Int[Array, "*b"]) -> Bool[Array, "*b A"]:
    """The other actions that were legal."""
    index = jnp.expand_dims(jnp.arange(legal.shape[-1]), tuple(range(legal.ndim - 1)))
    return legal & (index != action[..., None])


def self_fed_roots(record: Record) -> Bool[Array, "B T"]:
    """Records with two transitions ahead and somebody who can act."""
    inside = inside_episode(record)
    two = inside[:, :-1] & inside[:, 1:]
    acting = (record.present & record.alive).any(axis=-1)
    return jnp.pad(two, ((0, 0), (0, 2))) & acting & ~record.is_last
