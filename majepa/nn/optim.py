"""The optimizer of every parameter group: clip each tensor's gradient, normalise it, smooth it.

Adaptive gradient clipping, RMS and momentum in the order of LaProp, behind a guard that leaves
parameters and optimizer state alone when anything is not finite. What is small is taken together:
on a GPU an operation on a bias takes as long as one on all biases.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import SequenceKey
from jaxtyping import Array, Bool, Float, Float32, Int, PyTree

from ..config import OptimizerConfig

Tree = TypeVar("Tree")
State = TypeVar("State")

SMALL = 2**14
"""Entries of the largest matrix that is joined with others. Checkpoints depend on it."""
BLOCK = 256
"""Entries that are summed at first; tensors are padded to whole blocks for it."""


class Report(NamedTuple):
    """What a step was like."""

    gradient_norm: Float[Array, ""]
    """Of the whole group, before clipping."""
    update_ratio: Float[Array, ""]
    """Norm of the applied update over the norm of the parameters; zero if none was applied."""
    finite: Bool[Array, ""]
    """Whether everything was finite and the step was taken."""


class Joined(NamedTuple):
    """A tree whose small leaves are one vector."""

    large: Any
    """The tree, with nothing in the place of small leaves."""
    small: Float32[Array, " S"]
    """All entries of these, in the order of the tree."""


class Moments(NamedTuple):
    """The optimizer's state."""

    steps: Int[Array, ""]
    nu: Joined
    """Mean squares of clipped gradients."""
    mu: Joined
    """Means of normalised gradients."""


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """One chain for one group of parameters, at a constant rate."""

    config: OptimizerConfig
    rate: float

    def init(self, params: PyTree[Array]) -> Moments:
        zeros = join(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params))
        return Moments(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(self, gradient: Tree, state: Moments, params: Tree) -> tuple[Tree, Moments]:
        """The step to add to the parameters, and the next state."""
        config, steps = self.config, state.steps + 1
        clipped = join(self._clip(gradient, params))
        nu = jax.tree.map(
            lambda nu, g: config.rms * nu + (1 - config.rms) * jnp.square(g), state.nu, clipped
        )
        mu = jax.tree.map(
            lambda mu, nu, g: (
                config.momentum * mu
                + (1 - config.momentum) * _over_root(g, nu / (1 - config.rms**steps), config.eps)
            ),
            state.mu,
            nu,
            clipped,
        )
        scale = -self.rate / (1 - config.momentum**steps)
        step = jax.tree.map(lambda leaf: scale * leaf, mu)
        return separate(step, params), Moments(steps, nu, mu)

    def _clip(self, gradient: Tree, params: Tree) -> Tree:
        """Each tensor's gradient, its norm bounded by a multiple of the tensor's own."""

        def clip(
            gradient: Array, square: Float32[Array, " K"], param_square: Float32[Array, " K"]
        ) -> Float32[Array, "..."]:
            floor, most = self.config.clip_floor, self.config.clip
            bound = most * jnp.maximum(floor, jnp.sqrt(param_square))
            excess = jnp.maximum(1.0, jnp.sqrt(square) / bound)
            each = excess.reshape(-1, *[1] * (gradient.ndim - 1)) if gradient.ndim else excess[0]
            return gradient.astype(jnp.float32) / each

        leaves, structure = jax.tree.flatten(gradient)
        clipped = map(clip, leaves, _squares(gradient), _squares(params))
        return jax.tree.unflatten(structure, clipped)


def join(tree: PyTree[Array]) -> Joined:
    """A tree with its small leaves as one vector."""
    large = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if _is_large(path, leaf) else None, tree
    )
    small = [
        leaf.ravel()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if not _is_large(path, leaf)
    ]
    return Joined(large, jnp.concatenate([jnp.zeros(0), *small]))


def separate(joined: Joined, like: Tree) -> Tree:
    """The tree that was joined; `like` has its shapes."""
    places, structure = jax.tree_util.tree_flatten_with_path(like)
    large, begin, leaves = iter(jax.tree.leaves(joined.large)), 0, []
    for path, leaf in places:
        if _is_large(path, leaf):
            leaves.append(next(large))
        else:
            end = begin + leaf.size
            leaves.append(joined.small[begin:end].reshape(leaf.shape))
            begin = end
    return jax.tree.unflatten(structure, leaves)


@jax.named_scope("optimizer")
def apply_update(
    optimizer: Optimizer | optax.GradientTransformation,
    gradient: Tree,
    state: State,
    params: Tree,
    is_good: Bool[Array, ""] | bool = True,
) -> tuple[Tree, State, Report]:
    """One step, if the caller finds it good and all of it is finite; otherwise nothing changes."""
    gradient = _put_together(gradient)
    # optax's types know arrays, not modules of them.
    update: Any = optimizer.update
    step, stepped_state = update(gradient, state, params)
    gradient_norm, step_norm = _norm(gradient), _norm(step)
    taken = jnp.asarray(is_good) & jnp.isfinite(gradient_norm) & jnp.isfinite(step_norm)
    ratio = step_norm / jnp.maximum(_norm(params), 1e-8)
    report = Report(gradient_norm, jnp.where(taken, ratio, 0.0), taken)
    stepped = jax.tree.map(lambda param, by: jnp.where(taken, param + by, param), params, step)
    kept = jax.tree.map(lambda new, old: jnp.where(taken, new, old), stepped_state, state)
    return stepped, kept, report


@jax.named_scope("optimizer")
def follow(slow: Tree, fast: Tree, rate: float) -> Tree:
    """The slow copy after a step of exponential averaging towards the fast one."""

    def step(old: Array, new: Array) -> Array:
        mixed = (1 - rate) * old.astype(jnp.float32) + rate * new.astype(jnp.float32)
        return mixed.astype(old.dtype)

    return jax.tree.map(step, slow, fast)


@jax.named_scope("optimizer")
def is_finite(tree: PyTree[Array]) -> Bool[Array, ""]:
    """Whether no entry is infinite or NaN, or so large that its square is."""
    return jnp.isfinite(_norm(tree))


def _put_together(gradient: Tree) -> Tree:
    """Large gradients of layers that were apart are put together once, before anybody asks for
    them: else each who does looks for the layer of every entry."""

    def together(path: tuple, leaf: Array) -> Array:
        is_wanted = _is_stacked(path) and _is_large(path, leaf)
        return jax.lax.optimization_barrier(leaf) if is_wanted else leaf

    return jax.tree_util.tree_map_with_path(together, gradient)


def _over_root(
    gradient: Float32[Array, "*b"], square: Float32[Array, "*b"], eps: float
) -> Float32[Array, "*b"]:
    # The square of a tiny gradient underflows; dividing by `eps` alone would blow it up.
    root = jnp.sqrt(square)
    return jnp.where(root == 0, 0.0, gradient / (root + eps))


def _norm(tree: PyTree[Array]) -> Float32[Array, ""]:
    """Euclidean norm over all leaves."""
    return jnp.sqrt(jnp.sum(jnp.concatenate([jnp.zeros(1), *_squares(tree)])))


def _squares(tree: PyTree[Array]) -> list[Float32[Array, " K"]]:
    """The squared length of every tensor of every leaf, all finished in one sum of blocks."""
    blocks, counts, lengths = [jnp.zeros((0, BLOCK))], [], []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        count = leaf.shape[0] if _is_stacked(path) else 1
        squares = jnp.square(leaf.astype(jnp.float32))
        if _is_large(path, leaf):
            squares = jnp.sum(squares, axis=-1)
        rows = squares.reshape(count, -1)
        padded = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % BLOCK)))
        blocks.append(padded.reshape(-1, BLOCK))
        counts.append(count)
        lengths += [padded.shape[1] // BLOCK] * count
    owner = np.repeat(np.arange(len(lengths)), lengths)
    is_own = np.arange(len(lengths))[:, None] == owner
    sums = jnp.sum(jnp.concatenate(blocks), axis=-1)
    squares = jnp.sum(jnp.where(is_own, sums, 0.0), axis=-1)
    return jnp.split(squares, np.cumsum(counts)[:-1]) if counts else []


def _is_stacked(path: tuple) -> bool:
    """Whether a leaf holds the tensors of all layers on its first axis: it is somewhere under
    `layers`, and these are not several."""
    return any(
        getattr(step, "name", None) == "layers" and not isinstance(below, SequenceKey)
        for step, below in itertools.pairwise((*path, None))
    )


def _is_large(path: tuple, leaf: Array) -> bool:
    """Whether a leaf holds matrices and is worth operations of its own."""
    return leaf.size > SMALL and leaf.ndim > 1 + _is_stacked(path)
