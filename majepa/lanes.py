"""Runs on the device: their states, and the programs that advance them, alone or together."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from .algorithm import Algorithm, Experience, HostUpdate, without_replay
from .collect import Collected, Counts, Health, Stream, check_health, collect
from .compilation import COMPILER_OPTIONS
from .envs.base import Env, EnvError
from .log import Clock
from .memory import Need, bytes_of, need_of
from .packing import packed


class RunState(NamedTuple):
    """Everything that the rest of a run depends on."""

    learner: Any
    stream: Stream
    key: Key[Array, ""]
    transitions: int
    updates: int


class News(NamedTuple):
    """What a batch brought for one run."""

    counts: Counts
    metrics: Mapping[str, Any]
    fault: EnvError | None
    """Why the batch, and what was learned from it, is of no use."""


class Lanes:
    """Where runs stand on the device. Several lie in the same arrays, on a first axis of their own,
    and advance in one program; what one of them does after its end nobody looks at."""

    def __init__(
        self,
        algorithm: Algorithm,
        env: Env,
        states: list[RunState],
        clock: Clock,
        host_update: HostUpdate | None = None,
    ) -> None:
        """`states` is emptied; `host_update`: of an only run whose replay lies in host memory."""
        self.algorithm, self.env, self.clock = algorithm, env, clock
        self._host_update: HostUpdate | None = None
        self._is_one = len(states) == 1
        self.transitions = [state.transitions for state in states]
        self.updates = [state.updates for state in states]
        held = [(state.learner, state.stream, state.key) for state in states]
        states.clear()
        self._learner, self._stream, self._key = held[0] if self._is_one else _joined(held)
        if host_update is not None:
            self.leave_replay_to(host_update)

    @property
    def on_host(self) -> bool:
        """Whether the replay lies in host memory."""
        return self._host_update is not None

    def leave_replay_to(self, host_update: HostUpdate) -> None:
        """From here on the replay of the only run lies in host memory."""
        self._host_update = host_update
        self._learner = host_update.place(self._learner)
        # A program is compiled again for arrays that are not bound to a device.
        self._stream, self._key = jax.device_put((self._stream, self._key), host_update.device)

    def _of(self, lane: int, tree: Any) -> Any:
        """What belongs to one run of what holds for all."""
        return tree if self._is_one else jax.tree.map(lambda leaf: leaf[lane], tree)

    def __getitem__(self, lane: int) -> RunState:
        """One run by itself."""
        return self._state(lane, self._learner)

    def acting(self, lane: int) -> RunState:
        """One run by itself, less the replay, which can be too large to copy for its agents."""
        return self._state(lane, without_replay(self._learner))

    def _state(self, lane: int, learners: Any) -> RunState:
        learner, stream, key = self._of(lane, (learners, self._stream, self._key))
        return RunState(learner, stream, key, self.transitions[lane], self.updates[lane])

    def need(self) -> Need | None:
        """Compile the program that learns, once for the run, and say what it will take."""
        with self.clock.measure("compiling", "update"):
            program = _lowered_update(
                self.algorithm, self.env, self._learner, self._stream, self._key,
                together=not self._is_one, host_update=self._host_update,
            ).compile()  # fmt: skip
        held = without_replay(self._learner) if self.on_host else self._learner
        return need_of(program.memory_analysis(), held, self._stream)

    def advance(self, active: Sequence[int]) -> dict[int, News]:
        """Collect a batch for each run, look at it, and learn from it."""
        algorithm, env, is_one = self.algorithm, self.env, self._is_one
        updates = self.updates[0] if is_one else jnp.asarray(self.updates)
        keys = _batch_keys(self._key, updates, together=not is_one)
        with self.clock.measure("collecting", "collect"):
            gathered = _collect(
                algorithm, env, without_replay(self._learner), self._stream, keys[0],
                together=not is_one,
            )  # fmt: skip
            found = jax.device_get((gathered.counts, gathered.health))
        each = {lane: self._of(lane, found) for lane in active}
        faults = {lane: self._fault(health) for lane, (_, health) in each.items()}
        if is_one and (fault := faults[0]) is not None:
            raise fault
        with self.clock.measure("learning", "update"):
            if self._host_update is not None:
                self._learner, metrics = self._host_update(self._learner, gathered.data, keys[1])
            else:
                self._learner, metrics = _update(
                    algorithm, self._learner, gathered.data, keys[1], together=not is_one
                )
            metrics = jax.device_get(jax.block_until_ready((self._learner, metrics))[1])
        self._stream = gathered.stream
        for lane, (counts, _) in each.items():
            self.transitions[lane] += int(counts.transitions)
            self.updates[lane] += 1
        return {
            lane: News(counts, self._of(lane, metrics), faults[lane])
            for lane, (counts, _) in each.items()
        }

    def _fault(self, health: Health) -> EnvError | None:
        """What is wrong with the rows of one run."""
        try:
            check_health(health, self.env.spec, self.algorithm.cadence.num_envs)
        except EnvError as error:
            return error
        return None


def _joined(trees: list[Any]) -> Any:
    """Trees in the same arrays. `trees` is emptied: only one leaf of all is there twice at a time,
    unless somebody else holds them."""
    structure = jax.tree.structure(trees[0])
    columns = [list(leaves) for leaves in zip(*map(jax.tree.leaves, trees), strict=True)]
    trees.clear()
    columns.reverse()
    return structure.unflatten([jnp.stack(columns.pop()) for _ in range(structure.num_leaves)])


def joining(shapes: Any, runs: int) -> int:
    """Bytes that `_joined` takes for so many trees of these shapes beside what they hold."""
    return 0 if runs == 1 else runs * max(map(bytes_of, jax.tree.leaves(shapes)))


def lane_programs(
    algorithm: Algorithm, env: Env, shapes: RunState, runs: int, host_update: HostUpdate | None
) -> Iterator[tuple[str, jax.stages.Lowered]]:
    """What will advance so many runs, by name, traced for a state of which there are only shapes
    yet."""
    held = (shapes.learner, shapes.stream, shapes.key)
    if runs > 1:
        held = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((runs, *leaf.shape), leaf.dtype), held
        )
    learner, stream, key = held
    together = runs > 1
    yield (
        "update",
        _lowered_update(
            algorithm, env, learner, stream, key, together=together, host_update=host_update
        ),
    )
    acting = without_replay(learner)
    yield "collect", _collect.lower(algorithm, env, acting, stream, key, together=together)


def _lowered_update(
    algorithm: Algorithm, env: Env, learner: Any, stream: Any, key: Any, *,
    together: bool, host_update: HostUpdate | None,
) -> jax.stages.Lowered:  # fmt: skip
    """The program that learns, traced for arrays or their shapes."""
    if host_update is not None:
        return host_update.lowered(learner, key)
    gathered = jax.eval_shape(
        functools.partial(_collect, algorithm, env, together=together),
        without_replay(learner), stream, key,
    )  # fmt: skip
    return _update.lower(algorithm, learner, gathered.data, key, together=together)


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="together")
def _collect(
    algorithm: Algorithm, env: Env, learner: Any, stream: Stream, key: Key[Array, "..."], *,
    together: bool,
) -> Collected:  # fmt: skip
    one = functools.partial(collect, algorithm, env, rows=algorithm.cadence.rows)
    return (packed(one) if together else one)(learner, stream, key)


@functools.partial(
    jax.jit,
    static_argnums=0,
    donate_argnums=1,
    static_argnames="together",
    compiler_options=COMPILER_OPTIONS,
)
def _update(
    algorithm: Algorithm, learner: Any, data: Experience, key: Key[Array, "..."], *, together: bool
) -> tuple[Any, Mapping[str, Array]]:
    one = algorithm.update
    return (packed(one) if together else one)(learner, data, key)


@functools.partial(jax.jit, static_argnames="together")
def _batch_keys(
    key: Key[Array, "..."], update: Int[Array, "..."] | int, *, together: bool
) -> tuple[Array, Array]:
    def one(key: Key[Array, ""], update: Int[Array, ""] | int) -> tuple[Array, Array]:
        key_collect, key_update = jax.random.split(jax.random.fold_in(key, update))
        return key_collect, key_update

    return (packed(one) if together else one)(key, update)
