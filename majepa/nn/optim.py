"""The optimizer of every parameter group: clip each tensor's gradient, normalise it, smooth it.

Adaptive gradient clipping, RMS and momentum in the order of LaProp, behind a guard that leaves
parameters and optimizer state alone when anything is not finite.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Float32, Int, PyTree

from ..config import OptimizerConfig

Tree = TypeVar("Tree")
State = TypeVar("State")


class Report(NamedTuple):
    """What a step was like."""

    gradient_norm: Float[Array, ""]
    """Of the whole group, before clipping."""
    update_ratio: Float[Array, ""]
    """Norm of the applied update over the norm of the parameters; zero if none was applied."""
    finite: Bool[Array, ""]
    """Whether everything was finite and the step was taken."""


class Moments(NamedTuple):
    """The optimizer's state, laid out as the parameters are."""

    steps: Int[Array, ""]
    nu: Any
    """Mean squares of clipped gradients."""
    mu: Any
    """Means of normalised gradients."""


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """One chain for one group of parameters, at a constant rate."""

    config: OptimizerConfig
    rate: float

    def init(self, params: PyTree[Array]) -> Moments:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
        return Moments(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(self, gradient: Tree, state: Moments, params: Tree) -> tuple[Tree, Moments]:
        """The step to add to the parameters, and the next state."""
        config, steps = self.config, state.steps + 1
        clipped = jax.tree_util.tree_map_with_path(self._clip, gradient, params)
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
        return jax.tree.map(lambda leaf: scale * leaf, mu), Moments(steps, nu, mu)

    def _clip(self, path: tuple, gradient: Array, param: Array) -> Float32[Array, "..."]:
        """A tensor's gradient, its norm bounded by a multiple of the tensor's own.

        Leaves under a field named `layers` hold the tensors of all layers on their first axis.
        """
        stacked = any(getattr(step, "name", None) == "layers" for step in path)
        axes = tuple(range(int(stacked), gradient.ndim))
        bound = self.config.clip * jnp.maximum(self.config.clip_floor, _length(param, axes))
        return gradient.astype(jnp.float32) / jnp.maximum(1.0, _length(gradient, axes) / bound)


def apply_update(
    optimizer: Optimizer | optax.GradientTransformation,
    gradient: Tree,
    state: State,
    params: Tree,
    is_good: Bool[Array, ""] | bool = True,
) -> tuple[Tree, State, Report]:
    """One step, if the caller finds it good and all of it is finite; otherwise nothing changes."""
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


def follow(slow: Tree, fast: Tree, rate: float) -> Tree:
    """The slow copy after a step of exponential averaging towards the fast one."""

    def step(old: Array, new: Array) -> Array:
        mixed = (1 - rate) * old.astype(jnp.float32) + rate * new.astype(jnp.float32)
        return mixed.astype(old.dtype)

    return jax.tree.map(step, slow, fast)


def is_finite(tree: PyTree[Array]) -> Bool[Array, ""]:
    """Whether no entry is infinite or NaN, or so large that its square is."""
    return jnp.isfinite(_norm(tree))


def _over_root(
    gradient: Float32[Array, "*b"], square: Float32[Array, "*b"], eps: float
) -> Float32[Array, "*b"]:
    # The square of a tiny gradient underflows; dividing by `eps` alone would blow it up.
    root = jnp.sqrt(square)
    return jnp.where(root > 0, gradient / (root + eps), 0.0)


def _norm(tree: PyTree[Array]) -> Float32[Array, ""]:
    """Euclidean norm over all leaves."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(jnp.sum(jnp.stack([*squares, jnp.zeros(())])))


def _length(x: Array, axes: tuple[int, ...]) -> Float32[Array, "..."]:
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=axes, keepdims=True))
