"""What programs take and return in one piece is what it was made of."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from majepa.flat import Flat, Scalars, flattened, restored
from majepa.nn.layers import Linear


def test_a_flat_tree_goes_through_a_program_and_comes_back_whole():
    tree = {"map": Linear(3, 2, key=jax.random.key(0)), "nothing": None, "count": jnp.arange(4)}

    @jax.jit
    def doubled(flat: Flat) -> Flat:
        return Flat.of(jax.tree.map(lambda leaf: 2 * leaf, flat.tree))

    flat = doubled(Flat.of(tree))
    assert len(jax.tree.leaves(flat)) == 3
    found = flat.tree
    assert isinstance(found["map"], Linear) and found["nothing"] is None
    np.testing.assert_array_equal(found["map"].weight, 2 * tree["map"].weight)
    np.testing.assert_array_equal(found["count"], [0, 2, 4, 6])
    # What came out of a program does not have it compiled again.
    doubled(flat)
    assert doubled._cache_size() == 1


class Group(NamedTuple):
    module: Any
    inner: Any
    count: jax.Array


def test_named_tuples_stay_apart_in_what_is_flattened():
    module = Linear(3, 2, key=jax.random.key(0))
    group = Group(module, Group(module, None, jnp.arange(2)), jnp.arange(3))
    flat = flattened(group)
    assert isinstance(flat, Group) and isinstance(flat.module, Flat)
    assert isinstance(flat.inner.module, Flat) and flat.inner.inner is None
    assert flat.count is group.count
    part = jax.jit(lambda flat: flat._replace(inner=None))(flat)
    found = restored(part._replace(inner=flat.inner))
    assert jax.tree.structure(found) == jax.tree.structure(group)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(group), strict=True):
        np.testing.assert_array_equal(one, other)


def test_scalars_of_several_runs_keep_their_names_and_places():
    def report(x):
        return Scalars.of({"loss": x, "count": jnp.asarray(3), "nothing": x * jnp.nan})

    alone = jax.jit(report)(jnp.asarray(0.5))
    assert len(jax.tree.leaves(alone)) == 1
    assert alone.by_name()["loss"] == 0.5 and alone.by_name()["count"] == 3
    assert np.isnan(alone.by_name()["nothing"])
    both = jax.jit(jax.vmap(report))(jnp.asarray([0.5, 0.25]))
    each = [jax.tree.map(lambda leaf, lane=lane: leaf[lane], both) for lane in (0, 1)]
    assert [one.by_name()["loss"] for one in each] == [0.5, 0.25]
    assert Scalars.of({}).by_name() == {}
    with pytest.raises(ValueError):
        Scalars(("one",), jnp.zeros(2)).by_name()
