"""What a world looks like to the rest of the package: two protocols, one spec, one row of data.

**Index convention.** Row `t` holds what is known before acting (`observation[t]`, `legal[t]`,
`alive[t]`, `is_first[t]`), what arrived with it (`reward[t]`, `is_last[t]`, `is_terminal[t]`), and
then the action taken there, `action[t]`. So `reward[t+1]` follows `action[t]`. No other alignment
exists anywhere in the package.

**Episode ends.** `step` on a live environment returns the row it arrives at, the final one
included, with its real observation. The next `step` ignores the action it is given and returns the
first row of a new episode (`reward` 0, `is_first`): that row is no transition and does not count in
any budget. The environment tells the truth about why it ended: a time limit is `is_last` without
`is_terminal`.

**Bringing your own world.** On an accelerator, write a class with the members of `Env`: pure,
jittable functions over a batch of environments. On the host (another simulator, a game, a robot),
write one with the members of `HostEnv`: one environment, NumPy arrays, ordinary Python. Neither
needs to inherit from anything. All randomness of an environment must derive from the key or seed it
was reset with, so that a batch behaves exactly as its single environments would.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

State = TypeVar("State")


@dataclasses.dataclass(frozen=True)
class EnvSpec:
    """The facts of an environment that never change: everything a learner sizes itself by."""

    name: str
    """`family:map`, as `make_env` takes it."""
    num_agents: int
    num_actions: int
    observation_size: int
    state_size: int
    agent_state_size: int
    """Size of the agent-specific state, a training-time view for centralised critics."""
    episode_limit: int
    """Transitions after which an episode is cut off."""
    noop_index: int = 0
    """The action of an agent that cannot act; always legal for a dead agent."""
    stop_index: int | None = None
    """An action that is legal for every living agent, where the world has one."""
    action_names: tuple[str, ...] = ()
    observation_names: tuple[str, ...] = ()
    """One name per feature of the observation, such as `enemy_3/distance`; empty if unknown."""
    state_names: tuple[str, ...] = ()
    agent_names: tuple[str, ...] = ()
    """What each agent is, in id order, such as `stalker`."""
    opponent_names: tuple[str, ...] = ()
    version: str = ""
    """Version of the rules; recorded with every result."""


class TimeStep(NamedTuple):
    """One row for each environment of a batch. `B` environments, `N` agents, `A` actions."""

    observation: Float[Array, "B N O"]
    legal: Bool[Array, "B N A"]
    alive: Bool[Array, "B N"]
    agent_state: Float[Array, "B N C"]
    """Training-only view of each agent; a world that has none repeats the state."""
    state: Float[Array, "B S"]
    reward: Float[Array, " B"]
    """Team reward for the transition that led here; 0 on a first row."""
    is_first: Bool[Array, " B"]
    is_last: Bool[Array, " B"]
    is_terminal: Bool[Array, " B"]
    """The episode ended for a reason of its own; false when a time limit cut it off."""
    won: Bool[Array, " B"]
    """The episode ended here in victory."""
    info: Mapping[str, Shaped[Array, " B ..."]]
    """Counters of the world's own, the same keys on every row."""


@runtime_checkable
class Env(Protocol[State]):
    """A batch of environments on the device. Both functions are pure and may be jitted."""

    @property
    def spec(self) -> EnvSpec:
        """The facts of each of the environments."""
        ...

    def reset(self, keys: Key[Array, " B"]) -> tuple[State, TimeStep]:
        """Start one environment for each key."""
        ...

    def step(self, state: State, action: Int[Array, "B N"]) -> tuple[State, TimeStep]:
        """Act in all environments; those whose last row was `is_last` start a new episode."""
        ...


class HostStep(NamedTuple):
    """`TimeStep` for one host environment: the same fields without the batch axis."""

    observation: Float[np.ndarray, "N O"]
    legal: Bool[np.ndarray, "N A"]
    alive: Bool[np.ndarray, " N"]
    agent_state: Float[np.ndarray, "N C"]
    state: Float[np.ndarray, " S"]
    reward: float
    is_first: bool
    is_last: bool
    is_terminal: bool
    won: bool
    info: Mapping[str, Any]


@runtime_checkable
class HostEnv(Protocol):
    """One environment on the host, with the conventions of `Env`."""

    @property
    def spec(self) -> EnvSpec: ...

    def reset(self, seed: int | None = None) -> HostStep: ...

    def step(self, action: Int[np.ndarray, " N"]) -> HostStep: ...

    def close(self) -> None: ...


class EnvError(ValueError):
    """A caller gave an environment something it cannot use; the message says what and the fix."""


__all__ = ["Env", "EnvError", "EnvSpec", "HostEnv", "HostStep", "TimeStep"]
