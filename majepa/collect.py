"""Experience from a batch of environments: act, record, step.

`collect` continues a `Stream` for a number of rows and returns them as the `Experience` of one
update, with what the loop counts and with the health of the rows. The stream stays truthful about
time limits; `timeout_is_terminal` is applied here, to the rows that a learner gets, and nowhere
else.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from .algorithm import Algorithm, Experience, Row
from .envs.base import Env, EnvError, EnvSpec, TimeStep


class Stream(NamedTuple):
    """Where a batch of environments stands: what the next row of experience follows from."""

    env_state: Any
    step: TimeStep
    """The row to act on next."""
    carry: Any
    """The agents' memory before that row."""
    running_return: Float[Array, " B"]
    """Of the episode that is under way."""


class Counts(NamedTuple):
    """What the rows of one `collect` add to the statistics of a run."""

    transitions: Int[Array, ""] | int = 0
    episodes: Int[Array, ""] | int = 0
    """Episodes that ended."""
    wins: Int[Array, ""] | int = 0
    returns: Float[Array, ""] | float = 0.0
    """Sum of the returns of the episodes that ended."""

    def plus(self, other: Counts) -> Counts:
        return jax.tree.map(operator.add, self, other)


class Fault(NamedTuple):
    """Entries of one field that no learner can use."""

    amount: Int[Array, "*T"]
    """How many a row has."""
    first: Int[Array, "*T"]
    """Flat index of the first of them in the field of that row."""


Health = Mapping[str, Fault]
"""Faults of each row and of the final one, by field."""


class Collected(NamedTuple):
    data: Experience
    stream: Stream
    counts: Counts
    health: Health


def begin(algorithm: Algorithm, env: Env, keys: Key[Array, " B"]) -> Stream:
    """Fresh environments, and agents that have seen nothing yet."""
    env_state, step = env.reset(keys)
    num_envs = keys.shape[0]
    return Stream(env_state, step, algorithm.begin(num_envs), jnp.zeros(num_envs, jnp.float32))


def collect(
    algorithm: Algorithm, env: Env, state: Any, stream: Stream, key: Key[Array, ""], *, rows: int
) -> Collected:
    """`rows` rows from each environment, and the row that follows them."""

    def advance(stream: Stream, key: Key[Array, ""]) -> tuple[Stream, tuple]:
        choice = algorithm.act(state, stream.carry, stream.step, key, greedy=False)
        env_state, arrival = env.step(stream.env_state, choice.action)
        running = jnp.where(arrival.is_first, 0.0, stream.running_return + arrival.reward)
        row = Row(stream.step, choice.action, choice.kept)
        after = Stream(env_state, arrival, choice.carry, running)
        return after, (row, _count(arrival, running), _faults(stream.step))

    after, (row, counts, faults) = jax.lax.scan(advance, stream, jax.random.split(key, rows))
    final_faults = _faults(after.step)
    data = Experience(row, after.step, stream.carry, after.carry)
    if algorithm.timeout_is_terminal:
        data = data._replace(
            rows=row._replace(step=_end_at_timeouts(row.step)), final=_end_at_timeouts(after.step)
        )
    return Collected(
        data,
        after,
        jax.tree.map(lambda count: jnp.sum(count, axis=0), counts),
        jax.tree.map(jnp.append, faults, final_faults),
    )


def check_health(health: Health, spec: EnvSpec, num_envs: int) -> None:
    """Raise an error that leads to the first unusable entry, if there is one."""
    for field, fault in health.items():
        bad_rows = fault.amount.nonzero()[0]
        if bad_rows.size == 0:
            continue
        row = int(bad_rows[0])
        where = _place(field, int(fault.first[row]), spec, num_envs)
        if field == "legal":
            raise EnvError(
                f"{spec.name}: no legal action for {where}; every agent needs at least one on "
                f"every row, a dead one its no-op ({_action_name(spec)})"
            )
        raise EnvError(
            f"{spec.name}: the {field.replace('_', ' ')} of {where} is not a finite number "
            f"({int(fault.amount.sum())} such values in {len(bad_rows)} rows of this batch); "
            "nothing was learned from them. Look at the environment's features and rewards"
        )


def _count(arrival: TimeStep, running_return: Float[Array, " B"]) -> Counts:
    """An arrival is one transition, unless it begins an episode."""
    return Counts(
        jnp.sum(~arrival.is_first),
        jnp.sum(arrival.is_last),
        jnp.sum(arrival.is_last & arrival.won),
        jnp.sum(jnp.where(arrival.is_last, running_return, 0.0)),
    )


def _end_at_timeouts(step: TimeStep) -> TimeStep:
    return step._replace(is_terminal=step.is_terminal | step.is_last)


def _faults(step: TimeStep) -> Health:
    return {
        "observation": _fault(~jnp.isfinite(step.observation)),
        "agent_state": _fault(~jnp.isfinite(step.agent_state)),
        "state": _fault(~jnp.isfinite(step.state)),
        "reward": _fault(~jnp.isfinite(step.reward)),
        "legal": _fault(~jnp.any(step.legal, axis=-1)),
    }


def _fault(bad: Bool[Array, "..."]) -> Fault:
    return Fault(jnp.sum(bad), jnp.argmax(bad.reshape(-1)) if bad.size else jnp.zeros((), int))


def _place(field: str, index: int, spec: EnvSpec, num_envs: int) -> str:
    """Environment, agent and feature that a flat index of a field stands for."""
    shapes = {
        "observation": (num_envs, spec.num_agents, spec.observation_size),
        "agent_state": (num_envs, spec.num_agents, spec.agent_state_size),
        "state": (num_envs, 1, spec.state_size),
        "reward": (num_envs, 1, 1),
        "legal": (num_envs, spec.num_agents, 1),
    }
    names = {"observation": spec.observation_names, "state": spec.state_names}.get(field, ())
    shape = shapes[field]
    env, rest = divmod(index, math.prod(shape[1:]))
    agent, feature = divmod(rest, shape[2])
    words = [f"environment {env}"]
    if field in ("observation", "agent_state", "legal"):
        named = f" ({spec.agent_names[agent]})" if agent < len(spec.agent_names) else ""
        words.append(f"agent {agent}{named}")
    if field in ("observation", "agent_state", "state"):
        named = f" ({names[feature]})" if feature < len(names) else ""
        words.append(f"feature {feature}{named}")
    return ", ".join(words)


def _action_name(spec: EnvSpec) -> str:
    known = spec.noop_index < len(spec.action_names)
    return spec.action_names[spec.noop_index] if known else f"action {spec.noop_index}"
