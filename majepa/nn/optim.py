"""The optimizer of every parameter group: clip each tensor's gradient, normalise it, smooth it.

Adaptive gradient clipping, RMS and momentum in the order of LaProp, behind a guard that leaves
parameters and optimizer state alone when anything is not finite.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple, TypeVar

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
    return optax.chain(
        _clip_adaptively(config.clip, config.clip_floor),
        _normalise(config.rms, config.eps),
        optax.ema(config.momentum, debias=True, accumulator_dtype=jnp.float32),
        optax.scale(-rate),
    )


def apply_update(
    optimizer: optax.GradientTransformation,
    gradient: Tree,
    state: optax.OptState,
    params: Tree,
    is_good: Bool[Array, ""] | bool = True,
) -> tuple[Tree, optax.OptState, Report]:
    """One step, if the caller finds it good and all of it is finite; otherwise nothing changes."""
    trees: Any = (gradient, state, params)  # optax's own types have no place for modules
    update, stepped_state = optimizer.update(*trees)
    stepped = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, update)
    taken = jnp.asarray(is_good) & is_finite(gradient) & is_finite(update)
    ratio = _norm(update) / jnp.maximum(_norm(params), 1e-8)
    report = Report(
        gradient_norm=_norm(gradient), update_ratio=jnp.where(taken, ratio, 0.0), finite=taken
    )
    return _select(taken, stepped, params), _select(taken, stepped_state, state), report


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
    """Bound each tensor's gradient norm by a multiple of the tensor's own norm."""

    def update(updates: Any, params: Any) -> Any:
        return jax.tree.map(clip, updates, params)

    def clip(gradient: Array, param: Array) -> Array:
        bound = limit * jnp.maximum(floor, _norm(param))
        return gradient.astype(jnp.float32) / jnp.maximum(1.0, _norm(gradient) / bound)

    return optax.stateless(update)


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
    """Euclidean norm over all leaves, scaled so that no square overflows."""
    leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
    largest = functools.reduce(
        jnp.maximum, [jnp.max(jnp.abs(leaf), initial=0.0) for leaf in leaves], jnp.zeros(())
    )
    scale = jnp.where(largest > 1e-30, largest, 1.0)
    squares = [jnp.sum(jnp.square(leaf / scale)) for leaf in leaves]
    return scale * jnp.sqrt(sum(squares, start=jnp.zeros(())))


def _select(taken: Bool[Array, ""], new: Tree, old: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.where(taken, a, b), new, old)
