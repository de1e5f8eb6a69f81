"""Transformer blocks for few rows and no gradients.

A step of a rollout has a row for each agent of each root: too few to keep a GPU busy for longer
than its kernels take to start, and the library's products of so few rows take longer than ours. So
each of the four products of a block is one kernel, which takes along the norm before it and the
bias, SiLU or residual branch after it.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .gpu import may_take_kernels
from .layers import Biased, Linear, RMSNorm, Tree, as_rows
from .transformer import Block, DropoutKeys

MOST_ROWS = 128
"""With many, the library's products are faster; from where on was not measured."""


def for_few_rows(tree: Tree) -> Tree:
    """A model that computes the same of few rows in fewer kernels, where GPUs have them.

    Its Transformers hold their layers apart. It has no gradients.
    """

    def is_block(node: Any) -> bool:
        return isinstance(node, Block)

    def replaced(node: Any) -> Any:
        return FoldedBlock(node) if is_block(node) and _suits(node) else node

    return jax.tree.map(replaced, jax.lax.stop_gradient(tree), is_leaf=is_block)


def _suits(block: Block) -> bool:
    if not may_take_kernels(block.out.weight.dtype):
        return False
    from .kernels import WIDEST, suit

    width = block.out.bias.shape[-1]
    return block.out.weight.ndim == 2 and suit(width, least=64) and width <= WIDEST


def fold_block(block: Block) -> Block:
    """The same block, with the gains of its norms in the matrices that follow them."""

    def fold(norm: RMSNorm, linear: Linear) -> Float[Array, "I O"]:
        gained = norm.gain.astype(jnp.float32)[:, None] * linear.weight.astype(jnp.float32)
        return gained.astype(linear.weight.dtype)

    def parts(block: Block) -> tuple:
        norms = (block.norm_attention, block.norm_feed)
        return (*norms, block.query_key_value.weight, block.widen.weight)

    norms = parts(block)[:2]
    matrices = map(fold, norms, (block.query_key_value, block.widen))
    without = (eqx.tree_at(lambda norm: norm.gain, one, jnp.ones_like(one.gain)) for one in norms)
    return eqx.tree_at(parts, block, (*without, *matrices))


class FoldedBlock(Block):
    """A block that takes each product together with what is around it."""

    def __init__(self, block: Block) -> None:
        folded = fold_block(block)
        for name in Block.__dataclass_fields__:
            setattr(self, name, getattr(folded, name))

    def projected(self, x: Biased) -> tuple[Biased, Float[Array, "*b Q"]]:
        if as_rows(x.x).shape[0] > MOST_ROWS:
            return super().projected(x)
        kernels, plain = _kernel_project, _plain_project
        whole = x.whole()
        return Biased(whole), jax.lax.platform_dependent(self, whole, cuda=kernels, default=plain)

    def finish(self, x: Biased, mixed: Float[Array, "*b D"], keys: DropoutKeys) -> Biased:
        if as_rows(x.x).shape[0] > MOST_ROWS or any(key is not None for key in keys):
            return super().finish(x, mixed, keys)
        kernels, plain = _kernel_finish, _plain_finish
        return Biased(
            jax.lax.platform_dependent(self, x.whole(), mixed, cuda=kernels, default=plain)
        )


# Traced once for all layers of a size.


@jax.jit
def _plain_project(block: Block, x: Array) -> Array:
    return Block.projected(block, Biased(x))[1]


@jax.jit
def _plain_finish(block: Block, x: Array, mixed: Array) -> Array:
    return Block.finish(block, Biased(x), mixed, DropoutKeys()).whole()


@jax.jit
def _kernel_project(block: Block, x: Array) -> Array:
    from .kernels import project

    found = project(block, as_rows(x), interpret=False)
    return found.reshape(*x.shape[:-1], -1)


@jax.jit
def _kernel_finish(block: Block, x: Array, mixed: Array) -> Array:
    from .kernels import finish

    return finish(block, as_rows(x), as_rows(mixed), interpret=False).reshape(x.shape)
