"""Experience from a batch of environments: act, record, step.

`collect` continues a `Stream` for a number of rows, or to the end of one episode of each
environment, and returns them as the `Experience` of one update, with what the loop counts and
with the health of the rows. The stream stays truthful about time limits; `timeout_is_terminal` is
applied here, to the rows that a learner gets, and nowhere else.
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
    """`rows` rows or whole episodes from each environment, and the row that follows them."""
    gather = _collect_episodes if algorithm.cadence.whole_episodes else _collect_rows
    gathered = gather(algorithm, env, state, stream, key, rows=rows)
    data = gathered.data
    if algorithm.timeout_is_terminal:
        ended = data.rows._replace(step=_end_at_timeouts(data.rows.step))
        data = data._replace(rows=ended, final=_end_at_timeouts(data.final))
    return gathered._replace(data=data)


def _collect_rows(
    algorithm: Algorithm, env: Env, state: Any, stream: Stream, key: Key[Array, ""], *, rows: int
) -> Collected:
    def advance(stream: Stream, key: Key[Array, ""]) -> tuple[Stream, tuple]:
        row, after = _advance(algorithm, env, state, stream, key)
        counts = _count(after.step, after.running_return)
        return after, (row, counts, _faults(stream.step))

    after, (row, counts, faults) = jax.lax.scan(advance, stream, jax.random.split(key, rows))
    return Collected(
        Experience(row, after.step, stream.carry, after.carry),
        after,
        jax.tree.map(lambda count: jnp.sum(count, axis=0), counts),
        jax.tree.map(jnp.append, faults, _faults(after.step)),
    )


class _Played(NamedTuple):
    """Episodes as far as they have been played."""

    row: Int[Array, ""]
    stream: Stream
    is_over: Bool[Array, " B"]
    """Before the next row; an environment that is over plays on, and nobody looks."""
    kept: tuple[Row, Health]
    """Of all rows, zero where there are none."""
    counts: Counts


def _collect_episodes(
    algorithm: Algorithm, env: Env, state: Any, stream: Stream, key: Key[Array, ""], *, rows: int
) -> Collected:
    """From a stream that stands at first rows, to one that does again."""
    key_act, key_begin = jax.random.split(key)

    def advance(played: _Played) -> _Played:
        index, before, is_over, kept, counts = played
        row, after = _advance(algorithm, env, state, before, jax.random.fold_in(key_act, index))
        found = (_blanked(row, is_over), _faults(before.step))
        kept = jax.tree.map(lambda all_rows, one: all_rows.at[index].set(one), kept, found)
        new = _count(after.step, after.running_return, ~is_over)
        is_over = is_over | before.step.is_last
        return _Played(index + 1, after, is_over, kept, counts.plus(new))

    def is_playing(played: _Played) -> Bool[Array, ""]:
        return (played.row <= rows) & ~jnp.all(played.is_over)

    def one(stream: Stream, key: Key[Array, ""]) -> tuple[Row, Health]:
        return _advance(algorithm, env, state, stream, key)[0], _faults(stream.step)

    shapes = jax.eval_shape(one, stream, key_act)
    blank = jax.tree.map(lambda leaf: jnp.zeros((rows + 1, *leaf.shape), leaf.dtype), shapes)
    num_envs = stream.running_return.shape[0]
    zeros = Counts(*(jnp.zeros((), dtype) for dtype in (int, int, int, jnp.float32)))
    start = _Played(jnp.zeros((), int), stream, jnp.zeros(num_envs, bool), blank, zeros)
    played = jax.lax.while_loop(is_playing, advance, start)
    after = begin(algorithm, env, jax.random.split(key_begin, num_envs))
    row, faults = played.kept
    endless = {"end": _fault(~played.is_over)}
    return Collected(
        Experience(row, after.step, stream.carry, after.carry),
        after,
        played.counts,
        {**faults, **jax.tree.map(lambda count: count[None], endless)},
    )


def _advance(
    algorithm: Algorithm, env: Env, state: Any, stream: Stream, key: Key[Array, ""]
) -> tuple[Row, Stream]:
    """The row a stream stands at, acted on, and the stream after it."""
    choice = algorithm.act(state, stream.carry, stream.step, key, greedy=False)
    env_state, arrival = env.step(stream.env_state, choice.action)
    running = jnp.where(arrival.is_first, 0.0, stream.running_return + arrival.reward)
    row = Row(stream.step, choice.action, choice.kept)
    return row, Stream(env_state, arrival, choice.carry, running)


def _blanked(row: Row, is_blank: Bool[Array, " B"]) -> Row:
    def blank(leaf: Array) -> Array:
        return jnp.where(jnp.expand_dims(is_blank, tuple(range(1, leaf.ndim))), 0, leaf)

    return jax.tree.map(lambda leaf: blank(leaf).astype(leaf.dtype), row)


def check_health(health: Health, spec: EnvSpec, num_envs: int) -> None:
    """Raise an error that leads to the first unusable entry, if there is one."""
    for field, fault in health.items():
        bad_rows = fault.amount.nonzero()[0]
        if bad_rows.size == 0:
            continue
        row = int(bad_rows[0])
        if field == "end":
            raise endless(spec, int(fault.amount[row]), num_envs)
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


def endless(spec: EnvSpec, amount: int, episodes: int) -> EnvError:
    """The error of a world that does not end when it should."""
    return EnvError(
        f"{spec.name}: {amount} of {episodes} episodes went on past the limit of "
        f"{spec.episode_limit} transitions; an environment must end an episode with is_last when "
        "it reaches its limit"
    )


def _count(
    arrival: TimeStep, running_return: Float[Array, " B"], counts: Bool[Array, " B"] | bool = True
) -> Counts:
    """An arrival is one transition, unless it begins an episode."""
    ends = arrival.is_last & counts
    return Counts(
        jnp.sum(~arrival.is_first & counts),
        jnp.sum(ends),
        jnp.sum(ends & arrival.won),
        jnp.sum(jnp.where(ends, running_return, 0.0)),
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
