"""Random sequences with everything that can happen in a replay, their masks entry by entry, and
models to run on them."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from drawn import drawn

from majepa.config import DEBUG, MajepaConfig
from majepa.replay import Record, Sequence
from majepa.world_model.joint import JointModel
from majepa.world_model.local import LocalModel

AGENTS, ACTIONS, SIZE = 3, 5, 6


def random_record(
    seed: int,
    config: MajepaConfig = DEBUG,
    *,
    batch: int = DEBUG.replay.batch,
    length: int = DEBUG.replay.learning,
    episode: int = 10,
    vanish: float = 0.0,
) -> Record:
    """Rows that begin anywhere in an episode, or with padding; deaths, resets, illegal actions.

    Episodes have fewer than `episode` records; a slot is absent with probability `vanish`.
    """
    rng = np.random.default_rng(seed)
    lead, shape = (batch, length), (batch, length, AGENTS)
    is_first, is_last, is_terminal, real = (np.zeros(lead, bool) for _ in range(4))
    alive = np.zeros(shape, bool)
    for row in range(batch):
        padding = rng.choice([0, rng.integers(0, length // 3)])
        is_first[row, :padding] = True
        real[row, padding:] = True
        begins = padding > 0 or rng.random() < 0.3
        left, living = 0, rng.random(AGENTS) < 0.8
        for t in range(padding, length):
            if left == 0:
                left = rng.integers(1, episode)
                is_first[row, t] = begins
                living = np.ones(AGENTS, bool) if begins else living
                begins = True
            elif t > padding:
                living = living & (rng.random(AGENTS) < 0.9)
            left -= 1
            alive[row, t] = living
            is_last[row, t] = left == 0
            is_terminal[row, t] = left == 0 and rng.random() < 0.7
    legal = alive[..., None] & (rng.random((*shape, ACTIONS)) < 0.5)
    legal[..., 0] = ~alive
    drawn = np.argmax(rng.random(legal.shape) * legal, axis=-1)
    action = np.where(rng.random(shape) < 0.05, rng.integers(0, ACTIONS, shape), drawn)
    latent = rng.integers(0, config.local.classes, (*shape, config.local.latents))
    slot = real[..., None]
    return Record(
        observation=jnp.asarray(rng.normal(size=(*shape, SIZE)) * alive[..., None], jnp.float32),
        legal=jnp.asarray(legal & slot[..., None]),
        alive=jnp.asarray(alive),
        present=jnp.asarray(slot & (rng.random(shape) >= vanish)),
        reward=jnp.asarray(rng.normal(size=lead) * ~is_first, jnp.float32),
        is_first=jnp.asarray(is_first),
        is_last=jnp.asarray(is_last),
        is_terminal=jnp.asarray(is_terminal),
        action=jnp.asarray(action * slot, jnp.int32),
        latent=jnp.asarray(latent * slot[..., None], jnp.int32),
    )


def random_sequence(seed: int, config: MajepaConfig = DEBUG, **kinds) -> Sequence:
    """A view of the replay, made of `random_record`."""
    rng = np.random.default_rng(seed + 1000)
    batch, length = config.replay.batch, config.context + config.replay.learning
    latent = rng.integers(0, config.local.classes, (batch, AGENTS, config.local.latents))
    return Sequence(
        record=random_record(seed, config, batch=batch, length=length, **kinds),
        previous_latent=jnp.asarray(latent, jnp.int32),
        previous_action=jnp.asarray(rng.integers(0, ACTIONS, (batch, AGENTS)), jnp.int32),
        start=jnp.zeros(batch, jnp.int32),
        env=jnp.zeros(batch, jnp.int32),
    )


def make_models(seed: int, config: MajepaConfig = DEBUG) -> tuple[LocalModel, JointModel]:
    """Both models with noise in all parameters, so that no output layer is zero."""
    return drawn(lambda: build_models(config), seed)


def build_models(config: MajepaConfig) -> tuple[LocalModel, JointModel]:
    key, local, embedding = jax.random.key(0), config.local, config.local.embedding
    feature = local.deterministic + local.latents * local.classes
    return (
        LocalModel(SIZE, ACTIONS, local, key=key),
        JointModel(feature, ACTIONS, embedding, config.joint, config.bins, key=key),
    )


def altered(config, **numbers):
    """A copy whose numbers may be arrays; the checks of a config want floats."""
    new = copy.copy(config)
    vars(new).update(numbers)
    return new


def loop(shape: tuple[int, ...], holds) -> np.ndarray:
    """A mask from a function of the indices of an entry."""
    return np.array([holds(*index) for index in np.ndindex(*shape)], bool).reshape(shape)


class Slow:
    """The table of masks, one entry at a time."""

    def __init__(self, record: Record) -> None:
        self.record: Any = jax.tree.map(np.asarray, record)

    def stays(self, b: int, t: int) -> bool:
        return not self.record.is_first[b, t + 1]

    def can_act(self, b: int, t: int, i: int) -> bool:
        return bool(self.record.present[b, t, i] and self.record.alive[b, t, i])

    def source(self, b: int, t: int, i: int) -> bool:
        return self.can_act(b, t, i) and self.stays(b, t) and bool(self.record.present[b, t + 1, i])

    def team(self, b: int, t: int, i: int) -> bool:
        return bool(self.record.present[b, t, i]) and self.stays(b, t)

    def was_legal(self, b: int, t: int, i: int) -> bool:
        return bool(self.record.legal[b, t, i, self.record.action[b, t, i]])

    def ahead(self, horizon: int, b: int, t: int, i: int) -> bool:
        for k in range(t, t + horizon):
            if not (self.can_act(b, k, i) and self.was_legal(b, k, i) and self.stays(b, k)):
                return False
        return bool(self.record.present[b, t + horizon, i])

    def active(self, alive_before: np.ndarray, b: int, t: int, i: int) -> bool:
        record = self.record
        if not record.present[b, t, i]:
            return False
        if record.alive[b, t, i]:
            return True
        was_alive = record.alive[b, t - 1, i] if t > 0 else alive_before[b, i]
        return bool(was_alive and not record.is_first[b, t])

    def root(self, b: int, t: int) -> bool:
        record = self.record
        if t + 2 >= record.reward.shape[1] or record.is_last[b, t]:
            return False
        somebody = any(self.can_act(b, t, i) for i in range(AGENTS))
        return somebody and self.stays(b, t) and self.stays(b, t + 1)

    def endpoint(self, b: int, t: int, i: int, horizon: int) -> bool:
        if t + horizon >= self.record.reward.shape[1]:
            return False
        whole = all(self.stays(b, t + k) for k in range(horizon))
        return whole and bool(self.record.present[b, t + horizon, i])
