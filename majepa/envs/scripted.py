"""Scripted policies: yardsticks that see exactly what a learner sees.

Each is a function of observations, legal actions and a key. Features are found by name in the
`EnvSpec`, so a policy plays on any world that uses SMAC's names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from .base import EnvError, EnvSpec
from .make import nearest_names

Observation = Float[Array, "B N O"]
Legal = Bool[Array, "B N A"]
Policy = Callable[[Observation, Legal, PRNGKeyArray], Int[Array, "B N"]]

RESTLESS = 0.2
"""How often an agent that sees no enemy takes a step."""
KEEP_AWAY = 0.33
"""The kiting policy retreats from enemies nearer than this part of the sight range."""


def scripted_policy(name: str, spec: EnvSpec) -> Policy:
    if name not in POLICIES:
        raise EnvError(f"unknown policy {name!r}; {nearest_names(name, POLICIES)}")
    return POLICIES[name](spec)


def _random(spec: EnvSpec) -> Policy:
    return lambda observation, legal, key: _any_legal(legal, key)


def _stop(spec: EnvSpec) -> Policy:
    if spec.stop_index is None:
        raise EnvError(f"{spec.name} has no stop action; use the policy 'random'")
    stop = spec.stop_index

    def act(observation: Observation, legal: Legal, key: PRNGKeyArray) -> Int[Array, "B N"]:
        return jnp.where(legal[..., stop], stop, spec.noop_index).astype(jnp.int32)

    return act


def _nearest(spec: EnvSpec) -> Policy:
    """Attack the nearest enemy in range, walk to the nearest in sight, else look out for one."""
    return _fighter(spec, prefer="distance", keeps_away=False)


def _weakest(spec: EnvSpec) -> Policy:
    """Attack the weakest enemy in range, else as `nearest`."""
    return _fighter(spec, prefer="strength", keeps_away=False)


def _kite(spec: EnvSpec) -> Policy:
    """Step back from enemies that come close, else as `nearest`."""
    return _fighter(spec, prefer="distance", keeps_away=True)


POLICIES: Mapping[str, Callable[[EnvSpec], Policy]] = {
    "random": _random,
    "nearest": _nearest,
    "weakest": _weakest,
    "kite": _kite,
    "stop": _stop,
}


def _fighter(spec: EnvSpec, *, prefer: str, keeps_away: bool) -> Policy:
    view = _View(spec)

    def act(observation: Observation, legal: Legal, key: PRNGKeyArray) -> Int[Array, "B N"]:
        distance = view.enemies(observation, "distance")
        dx, dy = view.enemies(observation, "dx"), view.enemies(observation, "dy")
        is_seen = distance > 0
        distance = jnp.where(is_seen, distance, jnp.inf)
        closest = jnp.argmin(distance, axis=-1, keepdims=True)
        toward_x = jnp.take_along_axis(dx, closest, -1)[..., 0]
        toward_y = jnp.take_along_axis(dy, closest, -1)[..., 0]
        sees_any = jnp.any(is_seen, axis=-1)

        approach = _walk(toward_x, toward_y, legal, view.moves)
        action = jnp.where(sees_any & (approach >= 0), approach, _look_out(view, legal, key))
        can_target = legal[..., view.first_target :]
        score = distance if prefer == "distance" else view.enemy_strength(observation)
        target = jnp.argmin(jnp.where(can_target, score, jnp.inf), axis=-1)
        patient = view.weakest_patient(observation, can_target)
        target = jnp.where(view.is_healer[None], patient, target) + view.first_target
        action = jnp.where(jnp.any(can_target, axis=-1), target, action)
        if keeps_away:
            retreat = _walk(-toward_x, -toward_y, legal, view.moves)
            is_close = jnp.min(distance, axis=-1) < KEEP_AWAY
            action = jnp.where(is_close & (retreat >= 0), retreat, action)
        is_legal = jnp.take_along_axis(legal, action[..., None], -1)[..., 0]
        return jnp.where(is_legal, action, _any_legal(legal, key)).astype(jnp.int32)

    return act


class _View:
    """Where the features of SMAC's observation are."""

    def __init__(self, spec: EnvSpec):
        self.spec = spec
        self.index = {name: i for i, name in enumerate(spec.observation_names)}
        if "enemy_0/distance" not in self.index:
            raise EnvError(
                f"{spec.name} does not name SMAC's observation features; of the scripted "
                "policies only 'random' and 'stop' can play it"
            )
        self.moves = [spec.action_names.index(name) for name in ("north", "south", "east", "west")]
        self.stop = spec.action_names.index("stop")
        self.first_target = spec.action_names.index("target_0")
        self.is_healer = np.array([name == "medivac" for name in spec.agent_names])

    def enemies(self, observation: Observation, feature: str) -> Float[Array, "B N E"]:
        return observation[..., self._columns("enemy", feature)]

    def enemy_strength(self, observation: Observation) -> Float[Array, "B N E"]:
        """Health and shield as parts of their ceilings, added."""
        strength = self.enemies(observation, "health")
        if "enemy_0/shield" in self.index:
            strength = strength + self.enemies(observation, "shield")
        return strength

    def weakest_patient(self, observation: Observation, can_target: Legal) -> Int[Array, "B N"]:
        """For healers, whose targets are agents: the hurt one with the least health."""
        agents = self.spec.num_agents
        if not self.is_healer.any():
            return jnp.zeros(observation.shape[:2], jnp.int32)
        health = observation[..., self._columns("ally", "health")]
        own = np.eye(agents, dtype=bool)
        is_before = np.arange(agents)[None] < np.arange(agents)[:, None]
        spread = jnp.where(
            is_before[None], jnp.pad(health, ((0, 0), (0, 0), (0, 1))),
            jnp.pad(health, ((0, 0), (0, 0), (1, 0))),
        )  # fmt: skip
        ok = can_target[..., :agents] & ~own[None]
        return jnp.argmin(jnp.where(ok, spread, jnp.inf), axis=-1)

    def _columns(self, prefix: str, feature: str) -> Int[np.ndarray, " K"]:
        pattern = re.compile(rf"{prefix}_\d+/{feature}")
        return np.array([i for name, i in self.index.items() if pattern.fullmatch(name)], np.int32)


def _walk(
    toward_x: Float[Array, "B N"], toward_y: Float[Array, "B N"], legal: Legal, moves: list[int]
) -> Int[Array, "B N"]:
    """The legal move that leads furthest in a direction, -1 if none does."""
    gain = jnp.stack([toward_y, -toward_y, toward_x, -toward_x], axis=-1)
    gain = jnp.where(legal[..., np.array(moves)], gain, -jnp.inf)
    best = jnp.argmax(gain, axis=-1)
    return jnp.where(jnp.max(gain, axis=-1) > 0, best + moves[0], -1)


def _look_out(view: _View, legal: Legal, key: PRNGKeyArray) -> Int[Array, "B N"]:
    """Nobody in sight: mostly wait, for enemies tend to come, and now and then take a step."""
    key_step, key_where = jax.random.split(key)
    is_move = np.isin(np.arange(legal.shape[-1]), view.moves)[None, None]
    steps = jax.random.uniform(key_step, legal.shape[:2]) < RESTLESS
    can_step = steps[..., None] & legal & is_move
    waits = jnp.where(legal[..., view.stop], view.stop, view.spec.noop_index)
    return jnp.where(jnp.any(can_step, -1), _any_legal(can_step, key_where), waits)


def _any_legal(legal: Legal, key: PRNGKeyArray) -> Int[Array, "B N"]:
    score = jax.random.uniform(key, legal.shape)
    return jnp.argmax(jnp.where(legal, score, -1.0), axis=-1).astype(jnp.int32)
