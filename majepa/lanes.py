"""Runs on the device: their states, and the programs that advance them, alone or together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key

from .algorithm import Algorithm, Experience, Program, Updater, without_replay
from .collect import Collected, Counts, Health, Stream, check_health, collect
from .compilation import COMPILER_OPTIONS
from .envs.base import Env, EnvError
from .flat import Flat, Scalars, flattened, restored
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


class Gathered(NamedTuple):
    """`Collected`, as the loop takes it."""

    data: Experience
    stream: Flat[Stream]
    counts: Counts
    sound: Bool[Array, "..."]
    """Whether there is nothing in `health` to look at."""
    health: Health


class Begun(NamedTuple):
    """A batch that the device collects, or has collected."""

    gathered: Gathered
    key: Key[Array, "..."]
    """Of the update that learns from it."""


class News(NamedTuple):
    """What a batch brought for one run."""

    counts: Counts
    metrics: Callable[[], Mapping[str, Any]]
    """Waits until the batch is learned from."""
    is_under_way: bool
    """Whether the device may still be learning from it, with more to do after that."""
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
        updater: Updater | None = None,
    ) -> None:
        """`states` is emptied; `updater`: what learns, of an algorithm that has one."""
        self.algorithm, self.env, self.clock = algorithm, env, clock
        self._is_one = len(states) == 1
        self.transitions = [state.transitions for state in states]
        self.updates = [state.updates for state in states]
        held = [(state.learner, state.stream, state.key) for state in states]
        states.clear()
        learner, stream, self._key = held[0] if self._is_one else _joined(held)
        self._learner, self._stream = flattened(learner), Flat.of(stream)
        self._next: Begun | None = None
        self._updater: Updater | None = None
        if updater is not None:
            self.learn_by(updater)

    @property
    def on_host(self) -> bool:
        """Whether the replay lies in host memory."""
        return is_on_host(self._updater)

    def learn_by(self, updater: Updater) -> None:
        """From here on the runs learn so, with everything where that wants it."""
        self._updater = updater
        self._learner = updater.place(self._learner)
        if updater.host is not None:
            # A program is compiled again for arrays that are not bound to a device.
            self._stream, self._key = jax.device_put((self._stream, self._key), updater.device)

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
        held = (restored(learners), self._stream.tree, self._key)
        learner, stream, key = self._of(lane, held)
        return RunState(learner, stream, key, self.transitions[lane], self.updates[lane])

    def need(self) -> Need | None:
        """Compile the programs that learn, once for the run, and say what they will take."""
        together = not self._is_one
        with self.clock.measure("compiling", "update"):
            needs = [
                need_of(
                    program.lowered.compile().memory_analysis(), program.held, program.beside
                )
                for program in _learning_programs(
                    self.algorithm, self.env, self._learner, self._stream, self._key,
                    together=together, updater=self._updater,
                )
            ]  # fmt: skip
        known = [need.temporaries for need in needs if need is not None]
        held = without_replay(self._learner) if self.on_host else self._learner
        return Need(bytes_of((held, self._stream)), max(known)) if known else None

    def advance(self, active: Sequence[int]) -> dict[int, News]:
        """Collect a batch for each run, look at it, and learn from it.

        A device that works beside the host is never left without work: it collects the next batch
        before anybody looks at what was learned from this one, and learns before anybody looks at
        what was collected. Whoever asks where a run stands is told of the state before the next
        batch.
        """
        # Beside the host, one cannot be told from the other.
        phase = "collecting" if self._updater is None else "learning"
        with self.clock.measure(phase, "collect"):
            gathered, key = self._next or self._begin()
            seen = self._look(gathered, active) if self._updater is None else None
        with self.clock.measure("learning", "update"):
            metrics = self._learn(gathered.data, key)
            counts, faults = seen or self._look(gathered, active)
            self._stream = gathered.stream
            each = {lane: self._of(lane, counts) for lane in active}
            for lane, own in each.items():
                self.transitions[lane] += int(own.transitions)
                self.updates[lane] += 1
            self._next = None if self._updater is None else self._begin()
        is_under_way = self._next is not None
        return {
            lane: News(own, self._read(metrics, lane), is_under_way, faults[lane])
            for lane, own in each.items()
        }

    def _look(
        self, gathered: Gathered, active: Sequence[int]
    ) -> tuple[Counts, dict[int, EnvError | None]]:
        """What a batch brought, and what is wrong with it."""
        counts, sound = jax.device_get((gathered.counts, gathered.sound))
        health = None if np.all(sound) else jax.device_get(gathered.health)
        faults = {lane: self._fault(self._of(lane, health)) for lane in active}
        if self._is_one and (fault := faults[0]) is not None:
            raise fault
        return counts, faults

    def _read(self, metrics: Callable[[], Scalars], lane: int) -> Callable[[], Mapping[str, Any]]:
        def read() -> Mapping[str, Any]:
            with self.clock.measure("learning", "update"):
                return self._of(lane, metrics()).by_name()

        return read

    def _begin(self) -> Begun:
        """Let the device collect the next batch."""
        together = not self._is_one
        updates = np.asarray(self.updates if together else self.updates[0], np.int32)
        key_collect, key_update = _batch_keys(self._key, updates, together=together)
        actors = _actors(self._learner, on_host=self.on_host)
        gathered = _collect(
            self.algorithm, self.env, actors, self._stream, key_collect, together=together
        )
        return Begun(gathered, key_update)

    def _learn(self, data: Experience, key: Key[Array, "..."]) -> Callable[[], Scalars]:
        """Let the device learn from a batch; what waits for that and returns metrics."""
        if self._updater is not None:
            self._learner, metrics = self._updater(self._learner, data, key)
            return metrics
        together = not self._is_one
        self._learner, told = _update(self.algorithm, self._learner, data, key, together=together)
        return functools.cache(functools.partial(jax.device_get, told))

    def _fault(self, health: Health | None) -> EnvError | None:
        """What is wrong with the rows of one run; without a health nothing is."""
        try:
            check_health(health or {}, self.env.spec, self.algorithm.cadence.num_envs)
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


def is_on_host(updater: Updater | None) -> bool:
    """Whether what learns so has its replay in host memory."""
    return updater is not None and updater.host is not None


def lane_programs(
    algorithm: Algorithm, env: Env, shapes: RunState, runs: int, updater: Updater | None
) -> Iterator[tuple[str, jax.stages.Lowered]]:
    """What will advance so many runs, by the names that the clock has for them, traced for a state
    of which there are only shapes yet."""
    held = (shapes.learner, shapes.stream, shapes.key)
    if runs > 1:
        held = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((runs, *leaf.shape), leaf.dtype), held
        )
    learner, stream, key = flattened(held[0]), Flat.of(held[1]), held[2]
    together = runs > 1
    for program in _learning_programs(
        algorithm, env, learner, stream, key, together=together, updater=updater
    ):
        yield "update", program.lowered
    actors = _actors(learner, on_host=is_on_host(updater))
    yield "collect", _collect.lower(algorithm, env, actors, stream, key, together=together)
    updates = jax.ShapeDtypeStruct((runs,) if together else (), np.int32)
    yield "keys", _batch_keys.lower(key, updates, together=together)


def _learning_programs(
    algorithm: Algorithm, env: Env, learner: Any, stream: Flat[Stream], key: Any, *,
    together: bool, updater: Updater | None,
) -> Iterator[Program]:  # fmt: skip
    """What learns, traced for arrays or their shapes."""
    actors = _actors(learner, on_host=is_on_host(updater))
    data = jax.eval_shape(
        functools.partial(_collect, algorithm, env, together=together), actors, stream, key
    ).data
    if updater is not None:
        yield from updater.programs(learner, data, key)
        return
    lowered = _update.lower(algorithm, learner, data, key, together=together)
    yield Program(lowered, learner)


def _actors(learner: Any, *, on_host: bool) -> Any:
    """What collects; a replay comes along, unread, unless it lies where no program may read it."""
    return without_replay(learner) if on_host else learner


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="together")
def _collect(
    algorithm: Algorithm, env: Env, learner: Any, stream: Flat[Stream], key: Key[Array, "..."], *,
    together: bool,
) -> Gathered:  # fmt: skip
    def one(learner: Any, stream: Stream, key: Key[Array, ""]) -> Collected:
        return collect(algorithm, env, learner, stream, key, rows=algorithm.cadence.rows)

    acting = restored(without_replay(learner))
    found = (packed(one) if together else one)(acting, stream.tree, key)
    sound = [jnp.all(fault.amount == 0, axis=-1) for fault in found.health.values()]
    return Gathered(
        found.data, Flat.of(found.stream), found.counts, jnp.all(jnp.stack(sound), axis=0),
        found.health,
    )  # fmt: skip


@functools.partial(
    jax.jit,
    static_argnums=0,
    donate_argnums=1,
    static_argnames="together",
    compiler_options=COMPILER_OPTIONS,
)
def _update(
    algorithm: Algorithm, learner: Any, data: Experience, key: Key[Array, "..."], *, together: bool
) -> tuple[Any, Scalars]:
    def one(learner: Any, data: Experience, key: Key[Array, ""]) -> tuple[Any, Scalars]:
        learner, metrics = algorithm.update(learner, data, key)
        return learner, Scalars.of(metrics)

    learner, metrics = (packed(one) if together else one)(restored(learner), data, key)
    return flattened(learner), metrics


@functools.partial(jax.jit, static_argnames="together")
def _batch_keys(
    key: Key[Array, "..."], update: Int[Array | np.ndarray, "..."], *, together: bool
) -> tuple[Array, Array]:
    def one(key: Key[Array, ""], update: Any) -> tuple[Array, Array]:
        key_collect, key_update = jax.random.split(jax.random.fold_in(key, update))
        return key_collect, key_update

    return (packed(one) if together else one)(key, update)
