"""Action discrimination: legal alternatives to what an agent did should not lead to what came.

Only pairs of a valid root and a legal alternative cost anything, often a third of all pairs or
less. They are laid out one after another, and a program has a branch for each of a few numbers of
places; the smallest that holds the pairs of all horizons runs. The last one holds every pair that
there could be, so none is ever dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..nn.layers import ALIGNED
from ..packing import most
from .joint import AheadHead, Comparison
from .pairs import Pairs, pairs_of

SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4)
"""Of all pairs that there could be: what there is a branch for, beside the one for all. In random
battles 4 to 65 % count, depending on the map; each branch takes a second or two to compile."""
LEAST_PLACES = 1024
"""Fewer are not worth a branch."""


class Asked(NamedTuple):
    """About one horizon, for all roots."""

    head: AheadHead
    u: Float[Array, "M U"]
    tail: Int[Array, "M H"]
    target: Float[Array, "M E"]
    similar: Float[Array, " M"]
    """Cosine of the target and what is predicted for the actions that were taken."""
    counted: Bool[Array, "M A"]
    """Alternatives to the last of those, at valid roots."""


def discriminate(asked: Sequence[Asked], margin: Float[Array, ""]) -> list[Float[Array, ""]]:
    """For each horizon, the mean hinge of a root's alternatives, averaged over roots with any."""
    counted = jnp.stack([each.counted for each in asked])
    pairs, weights, numbers = jax.vmap(_weighed_pairs)(counted)
    sizes = places(asked[0].counted.size)
    which = jnp.sum(most(numbers.max()) > jnp.asarray(sizes[:-1], jnp.int32), dtype=jnp.int32)
    given = [
        _Given(each.head.comparison(each.u, each.tail, each.target), each.similar - margin)
        for each in asked
    ]
    return _means(sizes, which, (pairs, weights, numbers), given)


def places(pairs: int) -> tuple[int, ...]:
    """Numbers of places that there is a branch for, in rising order."""
    some = {ALIGNED * round(share * pairs / ALIGNED) for share in SHARES}
    return *sorted(size for size in some if LEAST_PLACES <= size < pairs), pairs


def _weighed_pairs(
    counted: Bool[Array, "M A"],
) -> tuple[Pairs, Float[Array, " M"], Int[Array, ""]]:
    """Pairs, what each pair of a root weighs in the mean, and how many pairs there are."""
    alternatives = jnp.sum(counted, axis=1)
    roots = jnp.maximum(jnp.sum(alternatives > 0), 1)
    return pairs_of(counted), 1 / (jnp.maximum(alternatives, 1) * roots), jnp.sum(alternatives)


class _Given(NamedTuple):
    """What the hinges of a horizon are computed from, besides its pairs."""

    comparison: Comparison
    bound: Float[Array, " M"]
    """As similar as this an alternative may be."""


def _mean_hinge(
    given: _Given, pairs: Pairs, weight: Float[Array, " M"], number: Int[Array, ""]
) -> Float[Array, ""]:
    hinge = jax.nn.relu(given.comparison.similarities(pairs) - pairs.rows_of_roots(given.bound))
    there = jnp.arange(hinge.size) < number
    return jnp.sum(jnp.where(there, pairs.rows_of_roots(weight) * hinge, 0.0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _means(sizes: tuple[int, ...], which: Array, pairs: Any, given: list[_Given]) -> list[Array]:
    """Branches find gradients along with values: what is kept for the way back would be as large
    as that of the largest branch."""
    return _switch(_mean_hinge, sizes, which, pairs, given)


def _means_forward(
    sizes: tuple[int, ...], which: Array, pairs: Any, given: list[_Given]
) -> tuple[list[Array], list[_Given]]:
    found = _switch(jax.value_and_grad(_mean_hinge), sizes, which, pairs, given)
    return [mean for mean, _ in found], [gradient for _, gradient in found]


def _means_backward(
    sizes: tuple[int, ...], gradients: list[_Given], outer: list[Array]
) -> tuple[None, None, list[_Given]]:
    def scale(gradient: Array, by: Array) -> Array:
        return (gradient.astype(jnp.float32) * by).astype(gradient.dtype)

    both = zip(gradients, outer, strict=True)
    return None, None, [jax.tree.map(functools.partial(scale, by=by), each) for each, by in both]


_means.defvjp(_means_forward, _means_backward)


def _switch(
    compute: Callable[..., Any], sizes: tuple[int, ...], which: Array, pairs: Any, given: Any
) -> list[Any]:
    """What is to be computed of each horizon, with as many places as chosen."""

    def branch(size: int, pairs: Any, given: list[_Given]) -> list[Any]:
        def of_horizon(rank: int) -> Any:
            own, weight, number = jax.tree.map(lambda leaf: leaf[rank], pairs)
            return compute(given[rank], own.first(size), weight, number)

        return [of_horizon(rank) for rank in range(len(given))]

    return jax.lax.switch(which, [functools.partial(branch, size) for size in sizes], pairs, given)
