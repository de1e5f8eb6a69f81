"""The joint world model, for training only: what all agents' states and actions lead to.

    u_t^{1:N} = J(s_t^{1:N}, a_t^{1:N})        e_hat_{t+1}^i = P_e(u_t^i)

Agents are mixed within a transition by attention, then each agent's stream runs through a causal
Transformer. Heads read the consequences of a transition from u: the next embedding, reward,
discounted continuation, who can still act, what will be legal, and embeddings further ahead.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Key

from ..config import BinsConfig, JointConfig
from ..nn.layers import MLP, Linear, RMSNorm, add_bias, product
from ..nn.transformer import AgentAttention, Branches, History, TemporalTransformer, Trunk
from .pairs import Pairs


class Outcome(NamedTuple):
    """What a transition leads to, per agent; all but the embedding are logits in float32."""

    e_hat: Float[Array, "*b E"]
    reward: Float[Array, "*b K"]
    cont: Float[Array, "*b"]
    alive: Float[Array, "*b"]
    legal: Float[Array, "*b A"]


class AheadHead(eqx.Module):
    """P_h: u and the agent's next `h - 1` actions to the embedding `h` steps ahead."""

    mlp: MLP
    num_actions: int = eqx.field(static=True)

    def __init__(
        self, horizon: int, num_actions: int, embedding: int, config: JointConfig,
        *, key: Key[Array, ""],
    ) -> None:  # fmt: skip
        size_in = config.width + (horizon - 1) * num_actions
        self.mlp = MLP(size_in, [config.hidden], embedding, key=key)
        self.num_actions = num_actions

    def __call__(self, u: Float[Array, "*b U"], tail: Int[Array, "*b H"]) -> Float[Array, "*b E"]:
        return self.mlp(self._input(u, tail))

    def comparison(
        self, u: Float[Array, "M U"], tail: Int[Array, "M H"], target: Float[Array, "M E"]
    ) -> Comparison:
        """Of targets and what is predicted for other actions in place of the tail's last one."""
        first, last, exact = *self.mlp.linears, jnp.float32
        weight, bias = last.weight, last.bias.astype(exact)
        size = u.shape[-1] + (tail.shape[-1] - 1) * self.num_actions
        dot = functools.partial(jnp.einsum, preferred_element_type=exact)
        return Comparison(
            shared=product(self._input(u, tail[..., :-1]), first.weight[:size]),
            each=add_bias(first.bias, first.weight[size:]),
            norm=self.mlp.norms[0],
            under=dot("me,ie->mi", target.astype(weight.dtype), weight),
            along=dot("me,e->m", target.astype(exact), bias),
            length=jnp.sum(target.astype(exact) ** 2, axis=-1),
            gram=weight @ weight.T,
            lean=dot("ie,e->i", weight.astype(exact), bias),
            bias_length=dot("e,e->", bias, bias),
        )

    def _input(self, u: Array, tail: Array) -> Array:
        actions = jax.nn.one_hot(tail, self.num_actions, dtype=u.dtype)
        return jnp.concatenate([u, actions.reshape(*u.shape[:-1], -1)], axis=-1)


class Comparison(NamedTuple):
    """What cosines of targets and predictions are computed from, for any last actions.

    The first layer is linear in that action, so that a root's part of it is computed once.
    Predictions are a map W of hidden activations x and a bias. Products with the target need the
    target under W alone, lengths need W's Gram matrix: no prediction is ever made.
    """

    shared: Float[Array, "M J"]
    """The first layer without the last action."""
    each: Float[Array, "A J"]
    """The part of each action in it."""
    norm: RMSNorm
    under: Float32[Array, "M J"]
    """Targets under W."""
    along: Float32[Array, " M"]
    """Products of targets and the bias."""
    length: Float32[Array, " M"]
    """Squares of targets."""
    gram: Float[Array, "J J"]
    lean: Float32[Array, " J"]
    """The bias under W."""
    bias_length: Float32[Array, ""]

    def similarities(self, pairs: Pairs) -> Float32[Array, " P"]:
        """Of a root's target and the prediction for the action beside it."""
        hidden = pairs.rows_of_roots(self.shared) + pairs.rows_of_actions(self.each)
        x = self.norm.activated(hidden)
        exact = x.astype(jnp.float32)
        product = jnp.sum(exact * pairs.rows_of_roots(self.under), axis=-1)
        product += pairs.rows_of_roots(self.along)
        leaning = jnp.sum(exact * self.lean[None], axis=-1)
        square = quadratic(x, self.gram) + 2 * leaning + self.bias_length
        # Rounding may take the square of a short prediction below zero.
        square = jnp.maximum(square, 0)
        return product / jnp.sqrt(square * pairs.rows_of_roots(self.length) + 1e-16)


@jax.custom_vjp
def quadratic(x: Float[Array, "M J"], gram: Float[Array, "J J"]) -> Float32[Array, " M"]:
    """`x G x` of every row x, with a symmetric G. What it multiplies on its way is its gradient."""
    return _quadratic_forward(x, gram)[0]


def _quadratic_forward(x: Array, gram: Array) -> tuple[Array, tuple[Array, Array]]:
    turned = x @ gram
    return jnp.sum(x.astype(jnp.float32) * turned.astype(jnp.float32), axis=-1), (x, turned)


def _quadratic_backward(given: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, turned = given
    scaled = (gradient[:, None] * x.astype(jnp.float32)).astype(x.dtype)
    of_x = 2 * gradient[:, None] * turned.astype(jnp.float32)
    return of_x.astype(x.dtype), x.T @ scaled


quadratic.defvjp(_quadratic_forward, _quadratic_backward)


class JointModel(eqx.Module):
    """The parameter group of the joint world model."""

    enter: Linear
    enter_norm: RMSNorm
    agents: AgentAttention
    temporal: TemporalTransformer
    embed: MLP
    """P_e."""
    reward: MLP
    cont: MLP
    alive: MLP
    legal: MLP
    ahead: tuple[AheadHead, ...]

    def __init__(
        self,
        feature: int,
        num_actions: int,
        embedding: int,
        config: JointConfig,
        bins: BinsConfig,
        *,
        key: Key[Array, ""],
    ) -> None:
        keys = jax.random.split(key, 9)
        width, hidden = config.width, [config.hidden]
        self.enter = Linear(feature + num_actions + 2, width, key=keys[0])
        self.enter_norm = RMSNorm(width)
        self.agents = AgentAttention(
            config.agent_layers, width, config.heads, dropout=config.dropout, key=keys[1]
        )
        self.temporal = TemporalTransformer(
            config.layers, width, config.heads, config.window,
            dropout=config.dropout, key=keys[2],
        )  # fmt: skip
        self.embed = MLP(width, hidden, embedding, key=keys[3])
        self.reward = MLP(width, hidden, bins.count, key=keys[4], out_scale=0.0)
        self.cont = MLP(width, hidden, 1, key=keys[5])
        self.alive = MLP(width, hidden, 1, key=keys[6])
        self.legal = MLP(width, hidden, num_actions, key=keys[7])
        self.ahead = tuple(
            AheadHead(horizon, num_actions, embedding, config, key=key)
            for horizon, key in zip(
                config.horizons, jax.random.split(keys[8], len(config.horizons)), strict=True
            )
        )

    def mix(
        self,
        s: Float[Array, "*b N F"],
        a: Float[Array, "*b N A"],
        present: Bool[Array, "*b N"],
        alive: Bool[Array, "*b N"],
        *,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "*b N U"]:
        """Tokens of a transition, after the agents have seen each other's states and actions."""
        dtype = self.enter.weight.dtype
        flags = jnp.stack([present, alive], axis=-1).astype(dtype)
        token = self.enter.of_both(s, jnp.concatenate([a.astype(dtype), flags], axis=-1))
        return self.agents(self.enter_norm(token), present, key=key)

    def __call__(
        self,
        s: Float[Array, "B T N F"],
        a: Float[Array, "B T N A"],
        present: Bool[Array, "B T N"],
        alive: Bool[Array, "B T N"],
        episode: Int[Array, "B T"],
        past: History,
        *,
        key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B T N U"], History]:
        """u of `T` transitions that follow `past`; a key switches dropout on."""
        key_mix, key_time = (None, None) if key is None else jax.random.split(key)
        token = self.mix(s, a, present, alive, key=key_mix).swapaxes(1, 2)
        u, history = self.temporal(token, episode, past, key=key_time)
        return u.swapaxes(1, 2), history

    def branch(
        self,
        token: Float[Array, "B R N U"],
        trunk: Trunk,
        last: Int[Array, " R"],
        episode: Int[Array, "B R"],
        branches: Branches,
        step: Int[Array, ""],
    ) -> tuple[Float[Array, "B R N U"], Branches]:
        """u of the next imagined transition of every root, from its mixed token."""
        u, branches = self.temporal.branch(
            token.swapaxes(1, 2), trunk, last, episode, branches, step
        )
        return u.swapaxes(1, 2), branches

    def read(self, u: Float[Array, "*b U"]) -> Outcome:
        exact = jnp.float32
        return Outcome(
            e_hat=self.embed(u),
            reward=self.reward(u).astype(exact),
            cont=self.cont(u)[..., 0].astype(exact),
            alive=self.alive(u)[..., 0].astype(exact),
            legal=self.legal(u).astype(exact),
        )
