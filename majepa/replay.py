"""Replay on the device: a ring of rows for each environment, all written in lock-step.

Row `v`, counted from 0 in each environment, lies in slot `v mod R`. A sequence is `context +
learning` contiguous rows of one environment; `context` virtual rows before row 0 let the first real
ones be learned from too. Of `n` eligible starts, one is drawn with (Eq. replay-mixture)

    P(v) = uniform / n + (1 - uniform) decay^age(v) / sum_w decay^age(w),

ages counted from 0, the newest start, backwards in the order of insertion over all environments.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer, Key, Shaped, UInt

from .algorithm import Row
from .config import ConfigError, ReplayConfig
from .envs.base import EnvSpec


class Stored(NamedTuple):
    """The ring of each environment: `R` slots, `E` environments, `N` agents, `S` latents."""

    observation: Float[Array, "R E N O"]
    legal: Bool[Array, "R E N A"]
    alive: Bool[Array, "R E N"]
    reward: Float[Array, "R E"]
    is_first: Bool[Array, "R E"]
    is_last: Bool[Array, "R E"]
    is_terminal: Bool[Array, "R E"]
    action: UInt[Array, "R E N"]
    latent: UInt[Array, "R E N S"]
    """Class indices, never one-hot."""


class Replay(NamedTuple):
    """The buffer."""

    stored: Stored
    inserted: Int[Array, ""]
    """Rows that each environment was given so far, those overwritten since included."""

    @property
    def rows(self) -> int:
        """Slots of each environment's ring."""
        return self.stored.reward.shape[0]

    @property
    def num_rows(self) -> int:
        """Of all environments together."""
        return self.rows * self.num_envs

    @property
    def num_envs(self) -> int:
        return self.stored.reward.shape[1]


class Record(NamedTuple):
    """Rows of the index convention as they are sampled."""

    observation: Float[Array, "*b N O"]
    legal: Bool[Array, "*b N A"]
    alive: Bool[Array, "*b N"]
    present: Bool[Array, "*b N"]
    """False on padding, where `is_first` is true and all else is zero."""
    reward: Float[Array, "*b"]
    is_first: Bool[Array, "*b"]
    is_last: Bool[Array, "*b"]
    is_terminal: Bool[Array, "*b"]
    action: Int[Array, "*b N"]
    latent: Int[Array, "*b N S"]


class Sequence(NamedTuple):
    """One view: `B` sequences of `T` rows, the context first."""

    record: Record
    """`[B, T, ...]`."""
    previous_latent: Int[Array, "B N S"]
    """Of the row before the first one; zero where that row is virtual."""
    previous_action: Int[Array, "B N"]
    start: Int[Array, " B"]
    """Absolute number of the first row; negative where a sequence begins with padding."""
    env: Int[Array, " B"]


def make_replay(
    spec: EnvSpec,
    config: ReplayConfig,
    *,
    num_envs: int,
    context: int,
    latents: int,
    classes: int,
    rows: int | None = None,
) -> Replay:
    """An empty buffer; `rows` for each environment will do where a run is too short for more."""
    capacity = config.capacity // num_envs
    needed = context + config.learning + 1
    rows = capacity if rows is None else min(max(rows, needed), capacity)
    if capacity < needed:
        raise ConfigError(
            f"the replay has {capacity} rows for each of {num_envs} environments; a sequence and "
            f"the row before it need {needed}: use --algo.replay.capacity {needed * num_envs}"
        )
    agents, lead = spec.num_agents, (rows, num_envs)
    stored = Stored(
        observation=jnp.zeros((*lead, agents, spec.observation_size), jnp.float32),
        legal=jnp.zeros((*lead, agents, spec.num_actions), bool),
        alive=jnp.zeros((*lead, agents), bool),
        reward=jnp.zeros(lead, jnp.float32),
        is_first=jnp.zeros(lead, bool),
        is_last=jnp.zeros(lead, bool),
        is_terminal=jnp.zeros(lead, bool),
        action=jnp.zeros((*lead, agents), _smallest(spec.num_actions)),
        latent=jnp.zeros((*lead, agents, latents), _smallest(classes)),
    )
    return Replay(stored, jnp.zeros((), jnp.int32))


def insert(replay: Replay, rows: Row, latent: Integer[Array, "T E N S"]) -> Replay:
    """Write `T` rows of every environment, time first, over the oldest ones."""
    step, num_rows = rows.step, latent.shape[0]
    if num_rows > replay.rows:
        raise ValueError(f"cannot insert {num_rows} rows at once into a ring of {replay.rows}")
    slots = (replay.inserted + jnp.arange(num_rows)) % replay.rows
    new = Stored(
        observation=step.observation,
        legal=step.legal,
        alive=step.alive,
        reward=step.reward,
        is_first=step.is_first,
        is_last=step.is_last,
        is_terminal=step.is_terminal,
        action=rows.action,
        latent=latent,
    )

    def write(
        ring: Shaped[Array, "R E *f"], fresh: Shaped[Array, "T E *f"]
    ) -> Shaped[Array, "R E *f"]:
        return ring.at[slots].set(fresh.astype(ring.dtype), unique_indices=True)

    return Replay(jax.tree.map(write, replay.stored, new), replay.inserted + num_rows)


def num_starts(replay: Replay, context: int, learning: int) -> Int[Array, ""]:
    """Eligible starts over all environments; 0 means that there is nothing to sample yet."""
    # Once rows are overwritten, the row before a start must be there too: it is `previous_latent`.
    oldest = jnp.where(replay.inserted > replay.rows, replay.inserted - replay.rows + 1, -context)
    newest = replay.inserted - context - learning
    return jnp.maximum(newest - oldest + 1, 0) * replay.num_envs


def sample(replay: Replay, config: ReplayConfig, context: int, key: Key[Array, ""]) -> Sequence:
    """One view, drawn with replacement; there must be a start to draw, see `num_starts`."""
    age = _draw_ages(num_starts(replay, context, config.learning), config, key)
    start = replay.inserted - context - config.learning - age // replay.num_envs
    env = replay.num_envs - 1 - age % replay.num_envs
    found = _gather(replay, _span(start - 1, 1 + context + config.learning), env)
    record = jax.tree.map(lambda leaf: leaf[:, 1:], found)
    return Sequence(record, found.latent[:, 0], found.action[:, 0], start, env)


def write_back(
    replay: Replay,
    sequence: Sequence,
    latent: Integer[Array, "B L N S"],
    context: int,
    wanted: Bool[Array, ""] | bool = True,
) -> Replay:
    """Replace the stored latents of learning rows, if that is wanted; where sequences overlap, the
    last one wins."""
    batch, learning = latent.shape[:2]
    first = sequence.start + context
    row = _span(first, learning)
    held = (row >= jnp.maximum(replay.inserted - replay.rows, 0)) & (row < replay.inserted)
    # Order is undefined where a scatter writes twice, so that each row is left to one sequence.
    offset = row[:, None] - first[None, :, None]
    same_env = sequence.env[:, None] == sequence.env[None, :]
    later = jnp.triu(same_env, k=1)[..., None] & (offset >= 0) & (offset < learning)
    keep = held & ~later.any(axis=1) & wanted
    outside = replay.rows + jnp.arange(batch * learning).reshape(batch, learning)
    slots = jnp.where(keep, row % replay.rows, outside)
    ring = replay.stored.latent
    written = ring.at[slots, sequence.env[:, None]].set(
        latent.astype(ring.dtype), mode="drop", unique_indices=True
    )
    return replay._replace(stored=replay.stored._replace(latent=written))


def _smallest(count: int) -> jnp.dtype:
    """The smallest type that holds the indices of `count` things."""
    return jnp.dtype(jnp.uint8 if count <= 256 else jnp.uint16)


def _draw_ages(
    count: Int[Array, ""], config: ReplayConfig, key: Key[Array, ""]
) -> Int[Array, " B"]:
    """Ages below `count`, from the mixture of the uniform and the recency distribution."""
    key_coin, key_uniform, key_recent = jax.random.split(key, 3)
    shape = (config.batch,)
    anything = jax.random.randint(key_uniform, shape, 0, count)
    # At decay 1 the recency distribution is uniform as well, and its formula is 0 / 0.
    if config.decay == 1:
        return anything
    is_uniform = jax.random.bernoulli(key_coin, config.uniform, shape)
    return jnp.where(is_uniform, anything, _recent_ages(count, config, key_recent))


def _recent_ages(
    count: Int[Array, ""], config: ReplayConfig, key: Key[Array, ""]
) -> Int[Array, " B"]:
    """The inverse of the truncated geometric distribution: log(1 - u (1 - d^n)) / log d."""
    rate = math.log(config.decay)
    bits = jax.random.bits(key, (config.batch,), jnp.uint32)
    # 1 - u keeps 32 bits near 0, where old starts are; 23 would leave gaps between them.
    rest = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
    exponent = count.astype(jnp.float32) * rate
    tail = rest + (1 - rest) * jnp.exp(exponent)
    log_tail = jnp.where(tail < 0.5, jnp.log(tail), jnp.log1p((1 - rest) * jnp.expm1(exponent)))
    return jnp.clip((log_tail / rate).astype(jnp.int32), 0, jnp.maximum(count - 1, 0))


def _span(first: Int[Array, " B"], length: int) -> Int[Array, "B T"]:
    """Numbers of `length` rows from each first one."""
    return first[:, None] + jnp.arange(length)[None]


def _gather(replay: Replay, row: Int[Array, "B T"], env: Int[Array, " B"]) -> Record:
    """Rows by their absolute numbers; those never inserted are padding."""
    slots, columns = row % replay.rows, env[:, None]
    is_real = (row >= 0) & (row < replay.inserted)

    def read(ring: Shaped[Array, "R E *f"]) -> Shaped[Array, "B T *f"]:
        found = ring.at[slots, columns].get(mode="promise_in_bounds")
        real = is_real.reshape(*is_real.shape, *(1,) * (found.ndim - 2))
        return jnp.where(real, found, jnp.zeros((), found.dtype))

    found = Stored(*map(read, replay.stored))
    return Record(
        observation=found.observation,
        legal=found.legal,
        alive=found.alive,
        present=jnp.broadcast_to(is_real[..., None], found.alive.shape),
        reward=found.reward,
        is_first=found.is_first | ~is_real,
        is_last=found.is_last,
        is_terminal=found.is_terminal,
        action=found.action.astype(jnp.int32),
        latent=found.latent.astype(jnp.int32),
    )
