"""The optimizer of every parameter group: clip each tensor's gradient, normalise it, smooth it.

Adaptive gradient clipping, RMS and momentum in the order of LaProp, behind a guard that leaves
parameters and optimizer state alone when anything is not finite.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
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
    """The optimizer's state: all parameters of the group as one vector."""

    steps: Int[Array, ""]
    nu: Float32[Array, " P"]
    """Mean squares of clipped gradients."""
    mu: Float32[Array, " P"]
    """Means of normalised gradients."""


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """One chain for one group of parameters, at a constant rate."""

    config: OptimizerConfig
    rate: float

    def init(self, params: PyTree[Array]) -> Moments:
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        return Moments(jnp.zeros((), jnp.int32), jnp.zeros(size), jnp.zeros(size))

    def update(
        self, gradient: PyTree[Array], state: Moments, params: PyTree[Array]
    ) -> tuple[Float32[Array, " P"], Moments]:
        """The step to add to the parameters, laid out as one vector, and the next state."""
        config, steps = self.config, state.steps + 1
        clipped = self._clip(gradient, params)
        nu = config.rms * state.nu + (1 - config.rms) * jnp.square(clipped)
        root = jnp.sqrt(nu / (1 - config.rms**steps))
        # The square of a tiny gradient underflows; dividing by `eps` alone would blow it up.
        normal = jnp.where(root > 0, clipped / (root + config.eps), 0.0)
        mu = config.momentum * state.mu + (1 - config.momentum) * normal
        step = -self.rate * mu / (1 - config.momentum**steps)
        return step, Moments(steps, nu, mu)

    def _clip(self, gradient: PyTree[Array], params: PyTree[Array]) -> Float32[Array, " P"]:
        """Each tensor's gradient, its norm bounded by a multiple of the tensor's own."""
        parts = []
        for own, new in zip(_tensors(params), _tensors(gradient), strict=True):
            bound = self.config.clip * jnp.maximum(self.config.clip_floor, _norms(own))
            factor = 1 / jnp.maximum(1.0, _norms(new) / bound)
            parts.append((new * factor).reshape(-1))
        return jnp.concatenate(parts)


@dataclasses.dataclass(frozen=True)
class Plain:
    """An optax chain with the interface of `Optimizer`, on the parameters as one vector."""

    chain: optax.GradientTransformation

    def init(self, params: PyTree[Array]) -> Any:
        return self.chain.init(_flat(params))

    def update(
        self, gradient: PyTree[Array], state: Any, params: PyTree[Array]
    ) -> tuple[Float32[Array, " P"], Any]:
        step, state = self.chain.update(_flat(gradient), state, _flat(params))
        return cast(Array, step), state


def apply_update(
    optimizer: Optimizer | Plain,
    gradient: Tree,
    state: State,
    params: Tree,
    is_good: Bool[Array, ""] | bool = True,
) -> tuple[Tree, State, Report]:
    """One step, if the caller finds it good and all of it is finite; otherwise nothing changes."""
    step, stepped = optimizer.update(gradient, cast(Any, state), params)
    gradient_norm = jnp.linalg.norm(_flat(gradient))
    step_norm = jnp.linalg.norm(step)
    taken = jnp.asarray(is_good) & jnp.isfinite(gradient_norm) & jnp.isfinite(step_norm)
    flat, unravel = ravel_pytree(params)
    report = Report(
        gradient_norm=gradient_norm,
        update_ratio=jnp.where(taken, step_norm / jnp.maximum(jnp.linalg.norm(flat), 1e-8), 0.0),
        finite=taken,
    )
    kept = jax.tree.map(lambda new, old: jnp.where(taken, new, old), stepped, state)
    return unravel(jnp.where(taken, flat + step, flat)), kept, report


def follow(slow: Tree, fast: Tree, rate: float) -> Tree:
    """The slow copy after a step of exponential averaging towards the fast one."""

    def step(old: Array, new: Array) -> Array:
        mixed = (1 - rate) * old.astype(jnp.float32) + rate * new.astype(jnp.float32)
        return mixed.astype(old.dtype)

    return jax.tree.map(step, slow, fast)


def is_finite(tree: PyTree[Array]) -> Bool[Array, ""]:
    """Whether no entry is infinite or NaN, or so large that its square is."""
    return jnp.isfinite(jnp.linalg.norm(_flat(tree)))


def _flat(tree: PyTree[Array]) -> Float32[Array, " P"]:
    return ravel_pytree(tree)[0].astype(jnp.float32)


def _tensors(tree: PyTree[Array]) -> list[Float32[Array, "M S"]]:
    """Every leaf with one row for each tensor it holds.

    Leaves under a field named `layers` hold the tensors of all layers on their first axis.
    """
    rows = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        stacked = any(getattr(step, "name", None) == "layers" for step in path)
        rows.append(leaf.astype(jnp.float32).reshape(leaf.shape[0] if stacked else 1, -1))
    return rows


def _norms(rows: Float32[Array, "M S"]) -> Float32[Array, "M 1"]:
    return jnp.linalg.norm(rows, axis=-1, keepdims=True)
