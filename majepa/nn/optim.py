"""The optimizer of every parameter group: clip each tensor's gradient, normalise it, smooth it.

Adaptive gradient clipping, RMS and momentum in the order of LaProp, behind a guard that leaves
parameters and optimizer state alone when anything is not finite.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Float32, Int, PyTree

from ..config import OptimizerConfig

Tree = TypeVar("Tree")


class Report(NamedTuple):
    """What a step was like."""

    gradient_norm: Float[Array, ""]
    """Of the whole group, before clipping."""
    update_ratio: Float[Array, ""]
    """Norm of the applied update over the norm of the parameters; zero if none was applied."""
    finite: Bool[Array, ""]
    """Whether everything was finite and the step was taken."""


def make_optimizer(config: OptimizerConfig, rate: float) -> optax.GradientTransformation:
    """The chain for one group of parameters; updates are to be added."""
    on_one_vector = optax.chain(
        _normalise(config.rms, config.eps),
        optax.ema(config.momentum, debias=True, accumulator_dtype=jnp.float32),
        optax.scale(-rate),
    )
    # After clipping all entries are treated alike, so one long vector serves and compiles fast.
    return optax.chain(
        _clip_adaptively(config.clip, config.clip_floor), optax.flatten(on_one_vector)
    )


def begin_optimizer(optimizer: optax.GradientTransformation, params: PyTree[Array]) -> Any:
    """The optimizer's state before its first step."""
    begin: Any = optimizer.init
    return begin(params)


def apply_update(
    optimizer: optax.GradientTransformation,
    gradient: Tree,
    state: Any,
    params: Tree,
    is_good: Bool[Array, ""] | bool = True,
) -> tuple[Tree, Any, Report]:
    """One step, if the caller finds it good and all of it is finite; otherwise nothing changes."""
    # optax's types know arrays, not modules of them.
    step: Any = optimizer.update
    update, stepped_state = step(gradient, state, params)
    gradient_norm, update_norm = _norm(gradient), _norm(update)
    taken = jnp.asarray(is_good) & jnp.isfinite(gradient_norm) & jnp.isfinite(update_norm)
    update = jax.tree.map(lambda leaf: jnp.where(taken, leaf, 0.0), update)
    ratio = update_norm / jnp.maximum(_norm(params), 1e-8)
    report = Report(
        gradient_norm=gradient_norm, update_ratio=jnp.where(taken, ratio, 0.0), finite=taken
    )
    stepped = jax.tree.map(lambda param, step: param + step, params, update)
    kept = jax.tree.map(lambda new, old: jnp.where(taken, new, old), stepped_state, state)
    return stepped, kept, report


def follow(slow: Tree, fast: Tree, rate: float) -> Tree:
    """The slow copy after a step of exponential averaging towards the fast one."""

    def step(old: Array, new: Array) -> Array:
        mixed = (1 - rate) * old.astype(jnp.float32) + rate * new.astype(jnp.float32)
        return mixed.astype(old.dtype)

    return jax.tree.map(step, slow, fast)


def is_finite(tree: PyTree[Array]) -> Bool[Array, ""]:
    """Whether no entry of any leaf is infinite or NaN."""
    leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return functools.reduce(operator.and_, leaves, jnp.asarray(True))


class _SecondMoment(NamedTuple):
    steps: Int[Array, ""]
    nu: PyTree[Float32[Array, "..."]]


def _clip_adaptively(limit: float, floor: float) -> optax.GradientTransformation:
    """Bound each tensor's gradient norm by a multiple of the tensor's own norm.

    Leaves under a field named `layers` hold the tensors of all layers on their first axis; each
    layer counts as a tensor of its own.
    """

    def clip(path: tuple, gradient: Array, param: Array) -> Array:
        stacked = any(getattr(step, "name", None) == "layers" for step in path)
        axes = tuple(range(1 if stacked else 0, gradient.ndim))
        bound = limit * jnp.maximum(floor, _length(param, axes))
        return gradient.astype(jnp.float32) / jnp.maximum(1.0, _length(gradient, axes) / bound)

    def update(
        gradient: PyTree[Array], state: optax.EmptyState, params: PyTree[Array] | None = None
    ) -> tuple[PyTree[Array], optax.EmptyState]:
        assert params is not None
        return jax.tree_util.tree_map_with_path(clip, gradient, params), state

    def init(params: PyTree[Array]) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    return optax.GradientTransformation(cast(Any, init), cast(Any, update))


def _normalise(decay: float, eps: float) -> optax.GradientTransformation:
    """Divide by the root of the bias-corrected mean square."""

    def init(params: Any) -> _SecondMoment:
        nu = optax.tree.zeros_like(params, dtype=jnp.float32)
        return _SecondMoment(jnp.zeros((), jnp.int32), nu)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, _SecondMoment]:
        del params
        steps = jnp.asarray(optax.safe_increment(state.steps))
        nu = optax.tree.update_moment(updates, state.nu, decay, order=2)
        corrected = optax.tree.bias_correction(nu, decay, steps)
        scaled = jax.tree.map(functools.partial(_over_root, eps=eps), updates, corrected)
        return scaled, _SecondMoment(steps, nu)

    return optax.GradientTransformation(init, update)


def _over_root(
    gradient: Float32[Array, "*b"], square: Float32[Array, "*b"], eps: float
) -> Float32[Array, "*b"]:
    # The square of a tiny gradient underflows; dividing by `eps` alone would blow it up.
    root = jnp.sqrt(square)
    return jnp.where(root > 0, gradient / (root + eps), 0.0)


def _norm(tree: PyTree[Array]) -> Float32[Array, ""]:
    """Euclidean norm over all leaves."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, start=jnp.zeros(())))


def _length(x: Array, axes: tuple[int, ...]) -> Float32[Array, "..."]:
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=axes, keepdims=True))
