"""What the loop, the evaluation and the checkpoints know of a learning algorithm, and no more.

An algorithm is built from its config and the environment's `EnvSpec`. Its learner state is one
pytree (parameters, optimizers, replay, counters), the memory of its acting agents another (the
carry, one entry per environment). Both are made, passed and returned; nothing is hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from jaxtyping import Array, Float, Int, Key

from .envs.base import TimeStep

State = TypeVar("State")
Carry = TypeVar("Carry")
Metrics = Mapping[str, Float[Array, ""]]
"""Scalars by name; a value that was not measured in this update is NaN and is not logged."""


class Cadence(NamedTuple):
    """How experience is gathered between two updates."""

    num_envs: int
    rows: int
    """Rows from each environment between two updates, the first rows of episodes included."""


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
    """The rows between two updates, time first: `[T, B, ...]`."""

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


__all__ = ["Algorithm", "Cadence", "Decision", "Experience", "Metrics", "Row"]
