"""The local world model of one agent: E, T, q, p and what is predicted from its state alone.

    e_t = E(o_t)         h_t = T(z_<t, a_<t)         z_t ~ q(. | h_t, e_t)         s_t = [h_t; z_t]

Parameters are shared by all agents; nothing here sees a second one. An executed agent needs the
encoder, the dynamics and the posterior. The prior, both predictors and the availability head exist
for training and imagination.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from ..config import LocalConfig
from ..nn.dists import symlog, unimix
from ..nn.draws import sample_mixed
from ..nn.layers import MLP, Linear, RMSNorm, add_bias, product, spread
from ..nn.transformer import Branches, History, TemporalTransformer, Trunk


class Encoder(eqx.Module):
    """E: an observation to its embedding. The output is linear, so that N(0, I) is in reach."""

    mlp: MLP

    def __init__(self, observation_size: int, config: LocalConfig, *, key: Key[Array, ""]) -> None:
        hidden = [config.encoder_width] * config.encoder_layers
        # The dead observe zeros.
        self.mlp = MLP(observation_size, hidden, config.embedding, key=key, first_bias=0.1)

    def __call__(self, o: Float[Array, "*b O"]) -> Float[Array, "*b E"]:
        return self.mlp(symlog(o))


class Dynamics(eqx.Module):
    """T: the latents and actions before a record to its history state h."""

    token: Linear
    token_norm: RMSNorm
    transformer: TemporalTransformer
    state: Linear
    state_norm: RMSNorm

    def __init__(self, num_actions: int, config: LocalConfig, *, key: Key[Array, ""]) -> None:
        key_token, key_transformer, key_state = jax.random.split(key, 3)
        latent = config.latents * config.classes
        # At an episode's start nothing has been inferred or done.
        self.token = Linear(latent + num_actions, config.width, key=key_token, bias_scale=0.1)
        self.token_norm = RMSNorm(config.width)
        self.transformer = TemporalTransformer(
            config.layers, config.width, config.heads, config.window, key=key_transformer
        )
        self.state = Linear(config.width, config.deterministic, key=key_state)
        self.state_norm = RMSNorm(config.deterministic)

    def embed(
        self,
        z_before: Float[Array, "*b Z"],
        a_before: Float[Array, "*b A"],
        is_first: Bool[Array, "*b"],
    ) -> Float[Array, "*b D"]:
        """Token of a record: what was inferred and done before it; zeros at an episode's start."""
        return self.token_norm(self.enter(z_before, a_before, is_first))

    def enter(
        self,
        z_before: Float[Array, "*b Z"],
        a_before: Float[Array, "*b A"],
        is_first: Bool[Array, "*b"],
    ) -> Float[Array, "*b D"]:
        """The token before its norm."""
        dtype = self.token.weight.dtype
        both = jnp.concatenate([z_before.astype(dtype), a_before.astype(dtype)], axis=-1)
        return self.token(jnp.where(is_first[..., None], 0, both))

    def look_up(
        self,
        z_before: Int[Array, "*b S"],
        a_before: Int[Array, "*b"],
        is_first: Bool[Array, "*b"],
        *,
        classes: int,
    ) -> Float[Array, "*b D"]:
        """The same token, from classes and actions: a sum of rows instead of a product."""
        latents = z_before.shape[-1]
        of_latents = z_before + spread(jnp.arange(0, latents * classes, classes), z_before.ndim)
        rows = jnp.concatenate([of_latents, latents * classes + a_before[..., None]], axis=-1)
        total = jnp.sum(self.token.weight[rows], axis=-2, dtype=jnp.float32)
        total = jnp.where(is_first[..., None], 0, total).astype(self.token.weight.dtype)
        return self.token_norm(add_bias(self.token.bias, total))

    def history(
        self, token: Float[Array, "B N T D"], episode: Int[Array, "B T"], past: History
    ) -> tuple[Float[Array, "B N T H"], History]:
        """States h of `T` records that follow `past`."""
        x, history = self.transformer(token, episode, past)
        return self.state_of(x), history

    def branch(
        self,
        token: Float[Array, "B N R D"],
        trunk: Trunk,
        last: Int[Array, " R"],
        episode: Int[Array, "B R"],
        branches: Branches,
        step: Int[Array, ""],
    ) -> tuple[Float[Array, "B N R H"], Branches]:
        """State h of the next imagined record of every root."""
        x, branches = self.transformer.branch(token, trunk, last, episode, branches, step)
        return self.state_of(x), branches

    def state_of(self, y: Float[Array, "*b D"]) -> Float[Array, "*b H"]:
        """h from what the Transformer put out."""
        return self.state_norm(self.state(y))


class Posterior(eqx.Module):
    """q: history state and embedding to the distribution of the latent, as log-probabilities."""

    mlp: MLP
    latents: int = eqx.field(static=True)
    unimix: float = eqx.field(static=True)

    def __init__(self, config: LocalConfig, *, key: Key[Array, ""]) -> None:
        self.mlp = MLP(
            config.deterministic + config.embedding,
            [config.hidden],
            config.latents * config.classes,
            key=key,
        )
        self.latents = config.latents
        self.unimix = config.unimix

    @property
    def classes(self) -> int:
        return self.mlp.linears[-1].bias.shape[0] // self.latents

    def __call__(self, h: Float[Array, "*b H"], e: Float[Array, "*b E"]) -> Float[Array, "*b S K"]:
        return self.given(h, self.seen(e))

    def seen(self, e: Float[Array, "*b E"]) -> Float[Array, "*b D"]:
        """What the embedding contributes to the first layer; needs no history."""
        first = self.mlp.linears[0]
        return add_bias(first.bias, product(e, first.weight[-e.shape[-1] :]))

    def given(self, h: Float[Array, "*b H"], seen: Float[Array, "*b D"]) -> Float[Array, "*b S K"]:
        return self.mixed(self._logits(h, seen))

    def hidden(self, h: Float[Array, "*b H"], seen: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        """What the first layer puts out."""
        return product(h, self.mlp.linears[0].weight[: h.shape[-1]]) + seen

    def mixed(self, logits: Float[Array, "*b Z"]) -> Float[Array, "*b S K"]:
        return unimix(self._by_latent(logits), self.unimix)

    def draw(
        self, h: Float[Array, "*b H"], e: Float[Array, "*b E"], noise: Float[Array, "*b S"]
    ) -> Int[Array, "*b S"]:
        """A sample of the latent, for noise between zero and one."""
        logits = self._logits(h, self.seen(e))
        return sample_mixed(self._by_latent(logits), self.unimix, noise)

    def _logits(self, h: Float[Array, "*b H"], seen: Float[Array, "*b D"]) -> Float[Array, "*b Z"]:
        return self.mlp.after_first(self.hidden(h, seen))

    def _by_latent(self, logits: Float[Array, "*b Z"]) -> Float[Array, "*b S K"]:
        return logits.reshape(*logits.shape[:-1], self.latents, -1)


class Prior(eqx.Module):
    """p: the history state alone to the distribution of the latent, as log-probabilities."""

    mlp: MLP
    latents: int = eqx.field(static=True)
    unimix: float = eqx.field(static=True)

    def __init__(self, config: LocalConfig, *, key: Key[Array, ""]) -> None:
        hidden = [config.hidden] * config.prior_layers
        self.mlp = MLP(config.deterministic, hidden, config.latents * config.classes, key=key)
        self.latents = config.latents
        self.unimix = config.unimix

    def __call__(self, h: Float[Array, "*b H"]) -> Float[Array, "*b S K"]:
        logits = self.mlp(h).reshape(*h.shape[:-1], self.latents, -1)
        return unimix(logits, self.unimix)


class LocalModel(eqx.Module):
    """The parameter group of the local world model."""

    encoder: Encoder
    dynamics: Dynamics
    posterior: Posterior
    prior: Prior
    predict_post: MLP
    """P_post: s to the embedding of the same record."""
    predict_dyn: MLP
    """P_dyn: h to the embedding of the same record."""
    legal: MLP
    """Logits of the legal actions, from s."""

    def __init__(
        self,
        observation_size: int,
        num_actions: int,
        config: LocalConfig,
        *,
        key: Key[Array, ""],
    ) -> None:
        keys = jax.random.split(key, 7)
        self.encoder = Encoder(observation_size, config, key=keys[0])
        self.dynamics = Dynamics(num_actions, config, key=keys[1])
        self.posterior = Posterior(config, key=keys[2])
        self.prior = Prior(config, key=keys[3])
        self.predict_post = MLP(config.feature, [config.hidden], config.embedding, key=keys[4])
        self.predict_dyn = MLP(config.deterministic, [config.hidden], config.embedding, key=keys[5])
        self.legal = MLP(config.feature, [config.hidden], num_actions, key=keys[6])


def feature(h: Float[Array, "*b H"], z: Float[Array, "*b S K"]) -> Float[Array, "*b F"]:
    """The local state s = [h; vec z]."""
    return jnp.concatenate([h, z.reshape(*z.shape[:-2], -1).astype(h.dtype)], axis=-1)
