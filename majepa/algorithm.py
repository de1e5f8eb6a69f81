"""What the loop, the evaluation and the checkpoints know of a learning algorithm, and no more.

An algorithm is built from its config and the environment's `EnvSpec`. Its learner state is one
pytree (parameters, optimizers, replay, counters), the memory of its acting agents another (the
carry, one entry per environment). Both are made, passed and returned; nothing is hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from .envs.base import TimeStep

Device = Any
"""One of `jax.devices()`."""
State = TypeVar("State")
Carry = TypeVar("Carry")
Metrics = Mapping[str, Float[Array, ""]]
"""Scalars by name; a value that was not measured in this update is NaN and is not logged."""


class Cadence(NamedTuple):
    """How experience is gathered between two updates."""

    num_envs: int
    rows: int
    """Rows from each environment between two updates, the first rows of episodes included."""
    whole_episodes: bool = False
    """One fresh episode from each environment instead; `rows` is the most transitions it has."""


class Decision(NamedTuple):
    """What `act` returns for a batch of environments."""

    action: Int[Array, "B N"]
    carry: Any
    """The agents' memory after this row."""
    kept: Any
    """What the learner wants stored with the row: latents, log-probabilities, values."""


class Row(NamedTuple):
    """A row of the index convention, completed by what was done there."""

    step: TimeStep
    action: Int[Array, "*b N"]
    kept: Any


class Experience(NamedTuple):
    """The rows between two updates, time first: `[T, B, ...]`.

    Whole episodes begin with the first row and end with their last one; the rows after it, up to
    the longest that an episode can be, are zero.
    """

    rows: Row
    final: TimeStep
    """The row after the last one, not acted on yet; it will be the first of the next batch."""
    carry: Any
    """The agents' memory before the first row."""
    final_carry: Any
    """The agents' memory after the last row."""


@runtime_checkable
class Algorithm(Protocol[State, Carry]):
    """Every function is pure and is jitted by its caller."""

    @property
    def cadence(self) -> Cadence: ...

    @property
    def timeout_is_terminal(self) -> bool:
        """Whether a time limit counts as the end of the world, where rows enter a rollout."""
        ...

    def init(self, key: Key[Array, ""]) -> State:
        """The learner before its first update."""
        ...

    def begin(self, num_envs: int) -> Carry:
        """The agents' memory before their first observation."""
        ...

    def act(
        self, state: State, carry: Carry, step: TimeStep, key: Key[Array, ""], *, greedy: bool
    ) -> Decision:
        """Actions for one row of a batch; `greedy` takes the most probable legal action."""
        ...

    def update(self, state: State, data: Experience, key: Key[Array, ""]) -> tuple[State, Metrics]:
        """Learn from the rows that came since the last update."""
        ...


class Alone(NamedTuple):
    """What one agent decided by itself."""

    action: Int[Array, ""]
    log_probs: Float[Array, " A"]
    memory: Any


@runtime_checkable
class Decentralised(Protocol):
    """An algorithm whose agents can be executed apart, each from what it sees itself."""

    def executor(self, state: Any) -> Any:
        """All that acting needs of a learner."""
        ...

    def wake(self, agent: Int[Array, ""]) -> Any:
        """The memory of one agent before its first observation."""
        ...

    def act_alone(
        self,
        executor: Any,
        memory: Any,
        observation: Float[Array, " O"],
        legal: Bool[Array, " A"],
        is_first: Bool[Array, ""],
        key: Key[Array, ""],
        *,
        greedy: bool,
    ) -> Alone:
        """One step of one agent: what `act` does for it in a team, given its key there."""
        ...


class Program(NamedTuple):
    """What an `Updater` runs, traced."""

    lowered: jax.stages.Lowered
    held: Any
    """Which of its arguments belong to a learner."""
    beside: Any = ()
    """What else is on the device while it runs, for the update alone."""


@runtime_checkable
class Updater(Protocol):
    """`update` in several programs, which the host calls one after another.

    Learners are `flattened`.
    """

    @property
    def host(self) -> Device | None:
        """Where the replay lies, if not with everything else,"""
        ...

    @property
    def device(self) -> Device | None:
        """which then lies here."""
        ...

    def place(self, learner: Any) -> Any:
        """A learner with every part where it belongs."""
        ...

    def programs(self, learner: Any, data: Any, key: Any) -> Iterator[Program]:
        """What learns, longest first, traced for arrays or their shapes."""
        ...

    def __call__(
        self, learner: Any, data: Experience, key: Key[Array, "..."]
    ) -> tuple[Any, Callable[[], Any]]:
        """The learner after an update, and what waits for its end and returns its metrics in one
        piece: to be asked before the next update, and after whatever else the device can do."""
        ...


@runtime_checkable
class InPrograms(Protocol):
    """An algorithm whose update is better run in several programs than in one."""

    def updater(self, *, together: bool = False, host: Device | None = None) -> Updater:
        """For runs that learn `together`, or one whose learner has its `replay` on `host`."""
        ...


def without_replay(learner: Any) -> Any:
    """What agents act on: a learner less its replay, if it is a tuple that names one."""
    return learner._replace(replay=None) if "replay" in getattr(learner, "_fields", ()) else learner


def shapes_on(device: Device, shapes: Any) -> Any:
    """Shapes of arrays that are bound to a device, for which JAX has programs of their own."""
    place = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes
    )


def agent_keys(key: Key[Array, ""], num_envs: int, num_agents: int) -> Key[Array, "B N"]:
    """A key for each agent of each environment, whatever the number of the others."""
    agents = jax.vmap(agent_key, (None, None, 0))
    each = jax.vmap(agents, (None, 0, None))
    return each(key, jnp.arange(num_envs), jnp.arange(num_agents))


def agent_key(
    key: Key[Array, ""], env: Int[Array, ""] | int, agent: Int[Array, ""] | int
) -> Key[Array, ""]:
    return jax.random.fold_in(jax.random.fold_in(key, env), agent)


__all__ = [
    "Algorithm",
    "Alone",
    "Cadence",
    "Decentralised",
    "Decision",
    "Device",
    "Experience",
    "InPrograms",
    "Metrics",
    "Program",
    "Row",
    "Updater",
    "agent_key",
    "agent_keys",
    "shapes_on",
    "without_replay",
]
