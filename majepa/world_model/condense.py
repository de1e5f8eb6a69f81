"""Local states without the widening of their history state.

h = norm(W y + b) is the widest vector of the model, yet no freer than the output y of the history
Transformer: with r = 1 / rms(W y + b) and c = [r y; r] it is h = c B, and B is a constant of the
model. What reads h through a matrix A can read c through B A instead, which is computed once for
all states, and r comes from y and the Gram matrix of [W; b]. A condensed module computes of [c; z]
what the given one computes of [h; z]. Gradients take the same ways: through B A to both of them,
through r to W and b.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..nn.layers import ALIGNED, MLP, Linear, product
from .joint import JointModel
from .local import Dynamics, LocalModel


class Basis(eqx.Module):
    """B and the Gram matrix, of the dynamics' last linear map and norm."""

    weight: Float[Array, "P H"]
    gram: Float[Array, "P P"]
    """Gives the mean square of W y + b."""
    eps: float = eqx.field(static=True)

    def __init__(self, dynamics: Dynamics) -> None:
        linear, norm = dynamics.state, dynamics.state_norm
        size_in, size_h = linear.weight.shape
        size = _size(size_in)
        raw = jnp.zeros((size, size_h), linear.weight.dtype)
        raw = raw.at[:size_in].set(linear.weight).at[size_in].set(linear.bias)
        self.weight = raw * norm.gain[None]
        exact = raw.astype(jnp.float32)
        self.gram = product(exact, exact.T) / size_h
        self.eps = norm.eps

    def widen(self, y: Float[Array, "*b D"]) -> Float[Array, "*b P"]:
        """[y; 1], with zeros up to the size of c."""
        one = jnp.ones((*y.shape[:-1], 1), y.dtype)
        zeros = jnp.zeros((*y.shape[:-1], self.gram.shape[0] - y.shape[-1] - 1), y.dtype)
        return jnp.concatenate([y, one, zeros], axis=-1)

    def scale(self, y: Float[Array, "*b P"]) -> tuple[Float[Array, "*b 1"], Float[Array, "*b P"]]:
        """r of a widened y, and its product with the Gram matrix."""
        exact = y.astype(jnp.float32)
        turned = product(exact, self.gram)
        # Rounding may take a mean square of almost nothing below zero.
        square = jnp.maximum(jnp.sum(exact * turned, axis=-1, keepdims=True), 0)
        return jax.lax.rsqrt(square + self.eps), turned

    def linear(self, linear: Linear) -> Linear:
        return eqx.tree_at(lambda linear: linear.weight, linear, self.thin(linear.weight))

    def mlp(self, mlp: MLP) -> MLP:
        return eqx.tree_at(lambda mlp: mlp.linears[0], mlp, self.linear(mlp.linears[0]))

    def thin(self, weight: Float[Array, "I O"]) -> Float[Array, "J O"]:
        """The matrix that reads [c; rest] as `weight` reads [h; rest]."""
        size_h = self.weight.shape[1]
        head = product(self.weight.astype(weight.dtype), weight[:size_h])
        return jnp.concatenate([head, weight[size_h:]])


class Condensed(eqx.Module):
    """In place of the dynamics' last linear map: y to c."""

    basis: Basis

    def __call__(self, y: Float[Array, "*b D"]) -> Float[Array, "*b P"]:
        wide = self.basis.widen(y)
        r, _ = self.basis.scale(wide)
        return (wide * r).astype(y.dtype)


class Unchanged(eqx.Module):
    """In place of a norm that has been taken already."""

    def __call__(self, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        return x


def condense_local(local: LocalModel, basis: Basis | None) -> LocalModel:
    """A local model whose states are c, and whose heads read them; itself without a basis, or if it
    is one already, of this very basis."""
    if basis is None:
        return local
    if isinstance(local.dynamics.state, Condensed):
        assert local.dynamics.state.basis is basis
        return local

    def heads(local: LocalModel) -> list[MLP]:
        return [
            local.posterior.mlp, local.prior.mlp, local.predict_post, local.predict_dyn, local.legal
        ]  # fmt: skip

    local = eqx.tree_at(heads, local, [basis.mlp(mlp) for mlp in heads(local)])
    return eqx.tree_at(
        lambda local: (local.dynamics.state, local.dynamics.state_norm),
        local,
        (Condensed(basis), Unchanged()),
    )


def condense_joint(joint: JointModel, basis: Basis | None) -> JointModel:
    """A joint model that reads such states; without a basis, itself."""
    if basis is None:
        return joint
    return eqx.tree_at(lambda joint: joint.enter, joint, basis.linear(joint.enter))


def basis_of(dynamics: Dynamics) -> Basis:
    """Of dynamics whose states are condensed already, too."""
    state = dynamics.state
    return state.basis if isinstance(state, Condensed) else Basis(dynamics)


def pays(dynamics: Dynamics) -> bool:
    """Whether states that gradients are taken of should be condensed: c is much narrower than h.

    Each reader has a product of its own with B then, forth and back.
    """
    size_in, size_h = dynamics.state.weight.shape
    return 2 * _size(size_in) <= size_h


def _size(size_in: int) -> int:
    """Of c: [y; 1], and zeros up to a size that suits matrix units."""
    return ALIGNED * (size_in // ALIGNED + 1)
