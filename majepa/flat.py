"""Trees and scalars as the loop holds them between programs.

A learner has hundreds of arrays in as many modules. To walk through them before and after each
program, or to fetch its scalars one by one, takes the host longer than a GPU takes for a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Tree = TypeVar("Tree")
LEAF = jax.tree.structure(0)


@jax.tree_util.register_pytree_node_class
class Flat(Generic[Tree]):
    """A tree whose leaves lie side by side; programs take and return it as it is."""

    __slots__ = ("leaves", "structure")

    def __init__(self, leaves: Iterable[Any], structure: Any) -> None:
        self.leaves, self.structure = tuple(leaves), structure

    @classmethod
    def of(cls, tree: Tree) -> Flat[Tree]:
        return cls(*jax.tree.flatten(tree))

    @property
    def tree(self) -> Tree:
        return self.structure.unflatten(self.leaves)

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        return self.leaves, self.structure

    @classmethod
    def tree_unflatten(cls, structure: Any, leaves: Iterable[Any]) -> Flat[Tree]:
        return cls(leaves, structure)


def flattened(tree: Tree) -> Tree:
    """With each module in one piece. Named tuples stay, so that their parts can be told apart."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(flattened, tree))
    is_piece = tree is None or jax.tree.structure(tree) == LEAF
    return tree if is_piece else Flat.of(tree)  # pyright: ignore[reportReturnType]


def restored(tree: Tree) -> Tree:
    """What was flattened, or parts of it."""
    return jax.tree.map(
        lambda piece: piece.tree if isinstance(piece, Flat) else piece,
        tree,
        is_leaf=lambda piece: isinstance(piece, Flat),
    )


@jax.tree_util.register_pytree_node_class
class Scalars:
    """Scalars by name in one array, on its last axis; whole numbers are exact up to 2**24."""

    __slots__ = ("names", "values")

    def __init__(self, names: tuple[str, ...], values: Any) -> None:
        self.names, self.values = names, values

    @classmethod
    def of(cls, by_name: Mapping[str, Float[Array, ""]]) -> Scalars:
        values = [jnp.asarray(value, jnp.float32) for value in by_name.values()]
        return cls(tuple(by_name), jnp.stack(values) if values else jnp.zeros(0))

    def by_name(self) -> dict[str, Any]:
        """Those of one run, each by itself."""
        return dict(zip(self.names, self.values, strict=True))

    def tree_flatten(self) -> tuple[tuple[Any], tuple[str, ...]]:
        return (self.values,), self.names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: tuple[Any]) -> Scalars:
        return cls(names, values[0])
