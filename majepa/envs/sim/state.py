"""What changes during a battle, and its randomness."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt32


class Units(NamedTuple):
    """The unit table, allies first: all that observations, masks and rewards are made of."""

    x: Float[Array, "U B"]
    y: Float[Array, "U B"]
    hp: Float[Array, "U B"]
    """0 for the dead."""
    shield: Float[Array, "U B"]
    energy: Float[Array, "U B"]
    cooldown: Float[Array, "U B"]
    """Loops until the weapon is ready."""

    @property
    def alive(self) -> Bool[Array, "U B"]:
        return self.hp > 0

    @property
    def vitality(self) -> Float[Array, "U B"]:
        """Health and shield together, as SMAC's reward counts them."""
        return jnp.where(self.alive, self.hp + self.shield, 0.0)


class Minds(NamedTuple):
    """What units remember from loop to loop and nobody observes."""

    target: Int[Array, "U B"]
    """Whom the unit is after, numbered within the side it targets; -1 for nobody."""
    windup: Float[Array, "U B"]
    """Loops spent on the shot in progress; of a healer: 1 while it heals its target."""
    stride: Float[Array, "U B"]
    """Present speed in cells per loop of units that accelerate."""
    drift_x: Float[Array, "U B"]
    """How far the unit came in the last loop."""
    drift_y: Float[Array, "U B"]
    calm: Float[Array, "U B"]
    """Loops until shields recover."""
    fuse: Bool[Array, "U B"]
    """A blast unit died in another's blast and goes off in the next loop."""


class State(NamedTuple):
    """A batch of battles."""

    units: Units
    minds: Minds
    goal: Float[Array, "2 B"]
    """Where the enemy marches."""
    steps: Int[Array, " B"]
    last_action: Int[Array, "A B"]
    """-1 before the first action of an episode."""
    is_over: Bool[Array, " B"]
    illegal: Int[Array, " B"]
    """Illegal actions replaced so far in this episode."""
    episode: UInt32[Array, " B"]
    seed: UInt32[Array, "2 B"]


def seeds_from(keys: Key[Array, " B"]) -> UInt32[Array, "2 B"]:
    return jax.vmap(lambda key: jax.random.bits(key, (2,), jnp.uint32), out_axes=1)(keys)


# Battles draw a few numbers per unit and loop. A hash of the environment's own seed and its
# counters costs a handful of integer operations inside whatever loop uses it, where a general
# generator would cost more than the geometry.


def mix(h: UInt32[Array, "*b"]) -> UInt32[Array, "*b"]:
    """Scramble 32 bits (the finaliser of MurmurHash3)."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def step_noise(seed: UInt32[Array, "2 B"], episode: UInt32[Array, " B"], step: Int[Array, " B"]):
    """The stream of one environment step; step 0 is the reset."""
    h = mix(seed[0] ^ (episode * jnp.uint32(0x9E3779B9)))
    return mix(h ^ seed[1] ^ (step.astype(jnp.uint32) * jnp.uint32(0x7FEB352D)))


def uniform(stream: UInt32[Array, " B"], lane: UInt32[np.ndarray, "K 1"]) -> Float[Array, "K B"]:
    """One number in [0, 1) for each lane of a stream."""
    bits = mix(stream[None] ^ (lane * jnp.uint32(0x846CA68B)))
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)
