"""The loop for any algorithm on device environments: collect, learn, evaluate, log, save.

Collecting and learning are compiled; the host schedules. The budget counts real transitions. All
randomness derives from the seed and from counters, and a checkpoint holds everything that the next
batch depends on, so that a run that was stopped goes on bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key
from rich.console import Console

from . import checkpoint
from .algorithm import Algorithm, Experience, Metrics
from .collect import Counts, Stream, begin, check_health, collect
from .config import (
    AlgorithmConfig,
    ConfigError,
    MajepaConfig,
    MappoConfig,
    MatConfig,
    TrainConfig,
)
from .envs.base import Env, EnvSpec
from .envs.make import make_env
from .evaluation import EVALUATION_SEED, Evaluation, evaluate
from .log import Averages, Clock, JsonLines, cut_back, episode_records, evaluation_metrics
from .progress import Remaining, clock_time, make_progress
from .run_folder import (
    BEST,
    CHECKPOINT,
    EVALUATIONS,
    METRICS,
    claim,
    new_folder,
    newest_checkpoint,
    reclaim,
    sweep,
)
from .sinks import make_sinks, require_packages

PATIENCE = 20
"""Non-finite updates in a row that an algorithm without a setting of its own may have."""
LINE_SECONDS = 30.0
"""Longest time without a line in the log while batches are finished."""

Kind = Literal["training", "stopped", "final"]
"""Of an evaluation: on the way, at an early stop, at the end of the budget."""


class TrainError(RuntimeError):
    """Training cannot go on; the message says why and where the last good state is."""


class RunState(NamedTuple):
    """Everything that the rest of a run depends on."""

    learner: Any
    stream: Stream
    key: Key[Array, ""]
    transitions: int
    updates: int


class Score(NamedTuple):
    """Of an evaluation with argmax actions; the larger is the better one."""

    win_rate: float
    mean_return: float
    transitions: int


@dataclasses.dataclass(frozen=True)
class Result:
    folder: Path
    transitions: int
    seconds: float
    stopped: str | None
    """Why the run ended before its budget; none if it did not."""
    argmax: Evaluation | None
    """Of the last checkpoint; none if the run was interrupted."""
    sampled: Evaluation | None


def train(
    config: TrainConfig,
    folder: Path | None = None,
    *,
    resume: bool = False,
    stop_after_seconds: float | None = None,
    stop_after: int | None = None,
    env: Env | None = None,
    algorithm: Algorithm | None = None,
    console: Console | None = None,
) -> Result:
    """Train to the budget, or until `stop_after_seconds` or `stop_after` transitions, and save.

    Without a `folder` the run gets a new one under `runs/`. `resume` goes on from the checkpoint in
    `folder`, which must belong to the same config. `env` and `algorithm` replace those that the
    config names.
    """
    clock = Clock()
    env = env or make_env(config.env)
    algorithm = algorithm or make_algorithm(config, env.spec)
    if config.steps < _batch(algorithm):
        raise ConfigError(
            f"steps is {config.steps:,}; {config.algorithm} collects {_batch(algorithm):,} rows "
            "between two updates and needs a budget of at least that many transitions"
        )
    require_packages(config.log)
    folder = folder or new_folder(config)
    if resume:
        reclaim(folder, config, env.spec)
        sweep(folder)
    else:
        claim(folder, config, env.spec)
    with _interruptible() as is_interrupted:
        state, best = _start(folder, config, algorithm, env, clock)
        for name in (METRICS, EVALUATIONS):
            cut_back(folder / name, state.transitions)
        with _Run(config, folder, env, algorithm, clock, console or Console(), best) as run:
            run.announce(state, resume)
            limits = _Limits(stop_after_seconds, stop_after, is_interrupted)
            state, stopped = _loop(run, state, limits)
            run.save(state)
            argmax, sampled = None, None
            if stopped != INTERRUPTED:
                argmax, sampled = run.evaluate(state, "stopped" if stopped else "final")
            return Result(folder, state.transitions, run.clock.elapsed, stopped, argmax, sampled)


def _start(
    folder: Path, config: TrainConfig, algorithm: Algorithm, env: Env, clock: Clock
) -> tuple[RunState, Score | None]:
    """Where a run goes on: at its newest checkpoint, or at its beginning; and its best score."""
    which = newest_checkpoint(folder)
    if which is None:
        with clock.measure("compiling"):
            state = jax.jit(_fresh(config, algorithm, env))()
        return state._replace(transitions=0, updates=0), None
    try:
        state = load_run(folder, config, algorithm, env, which=which)
    except checkpoint.CheckpointError as error:
        other = which == CHECKPOINT and (folder / BEST).is_file()
        remedy = (
            f"remove it to go on from {folder / BEST}"
            if other
            else "remove it and --resume to train again from the start, or name another folder"
        )
        raise checkpoint.CheckpointError(f"{error}; {remedy}") from error
    meta = checkpoint.read_meta(folder / which)
    clock.go_on_from(meta["seconds"])
    return state, meta["best"] and Score(**meta["best"])


def make_algorithm(config: TrainConfig, spec: EnvSpec) -> Algorithm:
    """The algorithm that a config describes, for an environment."""
    match config.algo:
        case MajepaConfig():
            from .agent import Majepa

            return Majepa(config.algo, spec, steps=config.steps)
        case MappoConfig():
            from .baselines.mappo import Mappo

            return Mappo(config.algo, spec)
        case MatConfig():
            from .baselines.mat import Mat

            return Mat(config.algo, spec)


def load_run(
    folder: Path,
    config: TrainConfig,
    algorithm: Algorithm,
    env: Env,
    *,
    which: Path = CHECKPOINT,
) -> RunState:
    """The state of a run as one of its checkpoints holds it."""
    shapes = run_shapes(config, algorithm, env)
    return checkpoint.load(folder / which, shapes._replace(transitions=0, updates=0))


def run_shapes(config: TrainConfig, algorithm: Algorithm, env: Env) -> RunState:
    """The state of a run as shapes and types alone; nothing is computed or allocated."""
    return jax.eval_shape(_fresh(config, algorithm, env))


def memory(learner: Any) -> dict[str, int]:
    """Bytes of each part of a learner, those too small to matter together."""
    parts = learner._asdict() if hasattr(learner, "_asdict") else {"learner": learner}
    sizes = {
        name: sum(leaf.nbytes for leaf in jax.tree.leaves(part)) for name, part in parts.items()
    }
    large = {name: size for name, size in sizes.items() if size >= 10_000}
    return large | {"other": sum(sizes.values()) - sum(large.values())}


def named_key(seed: int, name: str) -> Key[Array, ""]:
    """The random key that a run with this seed uses for one purpose."""
    return jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))


INTERRUPTED = "interrupted"


@dataclasses.dataclass(frozen=True)
class _Limits:
    """What may end a run before its budget."""

    seconds: float | None
    transitions: int | None
    is_interrupted: Callable[[], bool]

    def reached(self, state: RunState, seconds: float) -> str | None:
        if self.is_interrupted():
            return INTERRUPTED
        if self.seconds is not None and seconds >= self.seconds:
            return f"the time limit of {clock_time(self.seconds)} was reached"
        if self.transitions is not None and state.transitions >= self.transitions:
            return f"asked to stop after {self.transitions:,} transitions"
        return None


def _loop(run: _Run, state: RunState, limits: _Limits) -> tuple[RunState, str | None]:
    """Batches until the budget or a limit; what is due at the very end is left to the caller."""
    config = run.config
    while run.has_budget(state):
        before = state.transitions
        state = run.advance(state)
        if not run.has_budget(state):
            break
        stopped = limits.reached(state, run.clock.here)
        is_due = _crosses(before, state.transitions, config.evaluation.every)
        if is_due and stopped != INTERRUPTED:
            run.evaluate(state, "training")
        elif stopped or run.is_line_due:
            run.log(state)
        if stopped:
            return state, stopped
        if _crosses(before, state.transitions, config.save_every):
            run.save(state)
    return state, None


class _Run:
    """The host side of a run: schedule, clock, log files and checkpoints."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        env: Env,
        algorithm: Algorithm,
        clock: Clock,
        console: Console,
        best: Score | None,
    ):
        self.config = config
        self.folder = folder
        self.env = env
        self.algorithm = algorithm
        self.batch = _batch(algorithm)
        self.clock = clock
        self.best = best
        self._sinks = make_sinks(config, folder)
        self._metrics = JsonLines(folder / METRICS)
        self._evaluations = JsonLines(folder / EVALUATIONS)
        self._writer = checkpoint.Writer()
        self._averages = Averages()
        self._counts = Counts()
        self._since = _Since(dict(clock.phases))
        self._line_seconds: float | None = None
        self._remaining = Remaining(config.steps)
        self._saved: int | None = None
        self.progress = make_progress(console, config.steps, clock)
        clock.on_phase = self.progress.phase

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as closing:
            closing.callback(self._writer.wait)
            for file in (self._metrics, self._evaluations, *self._sinks, self.progress):
                closing.callback(file.close)

    def announce(self, state: RunState, resume: bool) -> None:
        spec, config = self.env.spec, self.config
        verb = f"continues at {state.transitions:,} transitions" if resume else "starts"
        self.progress.say(
            f"{config.algorithm} on {spec.name} ({spec.num_agents} agents, seed {config.seed}) "
            f"{verb}; budget {config.steps:,} transitions; folder {self.folder}"
        )
        sizes = memory(state.learner)
        held = ", ".join(f"{name} {size / 1e6:,.2f}" for name, size in sizes.items())
        self.progress.say(f"memory: {sum(sizes.values()) / 1e6:,.1f} MB ({held})")
        self.progress.moved(state.transitions, None)
        if self.has_budget(state):
            self.progress.say("compiling; the first line follows the first batch")

    def has_budget(self, state: RunState) -> bool:
        """Whether another batch can be collected without exceeding the budget."""
        return state.transitions + self.batch <= self.config.steps

    def advance(self, state: RunState) -> RunState:
        """Collect a batch, look at it, and learn from it."""
        key_collect, key_update = _batch_keys(state.key, state.updates)
        with self.clock.measure("collecting", "collect"):
            gathered = _collect(
                self.algorithm, self.env, state.learner, state.stream, key_collect,
                rows=self.algorithm.cadence.rows,
            )  # fmt: skip
            counts, health = jax.device_get((gathered.counts, gathered.health))
        check_health(health, self.env.spec, self.algorithm.cadence.num_envs)
        with self.clock.measure("learning", "update"):
            learner, metrics = _update(self.algorithm, state.learner, gathered.data, key_update)
            metrics = jax.device_get(jax.block_until_ready((learner, metrics))[1])
        self._averages.add(metrics)
        self._counts = self._counts.plus(counts)
        self._since.updates += 1
        state = RunState(
            learner,
            gathered.stream,
            state.key,
            state.transitions + int(counts.transitions),
            state.updates + 1,
        )
        learns = metrics.get("learner/calls", 1) > 0
        self._remaining.add(self.clock.work, state.transitions, learns=bool(learns))
        self.progress.moved(state.transitions, self._remaining.seconds)
        self._require_finite(state, metrics)
        return state

    def evaluate(self, state: RunState, kind: Kind) -> tuple[Evaluation, Evaluation]:
        """Judge the learner with argmax and with sampled actions, and log a line with both."""
        schedule = self.config.evaluation
        episodes = schedule.episodes if kind == "training" else schedule.final_episodes
        results = []
        for greedy in (True, False):
            with self.clock.measure("evaluating", f"evaluate {episodes}"):
                result = evaluate(
                    self.algorithm, self.env, state.learner,
                    episodes=episodes, key=jax.random.key(EVALUATION_SEED), greedy=greedy,
                )  # fmt: skip
            results.append(result)
            self._since.episodes += episodes
            common = {"transitions": state.transitions, "kind": kind}
            self._evaluations.write_all(episode_records(result, **common))
        self.log(state, {"kind": kind, **evaluation_metrics(*results)})
        score = Score(results[0].win_rate, results[0].mean_return, state.transitions)
        # The final evaluation has more episodes; a few lucky ones would look better than it.
        if self.best is None or (kind == "training" and score > self.best):
            self.best = score
            self.save(state, is_best=True)
        return results[0], results[1]

    @property
    def is_line_due(self) -> bool:
        last = self._line_seconds
        return last is None or self.clock.here - last >= LINE_SECONDS

    def log(self, state: RunState, more: Mapping[str, Any] | None = None) -> None:
        """One line of everything since the last one."""
        counts, phases = self._counts, self.clock.phases
        record: dict[str, Any] = {
            "transitions": state.transitions,
            "seconds": round(self.clock.elapsed, 3),
            "updates": state.updates,
            **(more or {}),
            **{f"seconds/{name}": round(spent, 3) for name, spent in phases.items()},
            **self._averages.take(),
        }
        if counts.episodes:
            record["training/episodes"] = int(counts.episodes)
            record["training/win_rate"] = float(counts.wins / counts.episodes)
            record["training/return"] = float(counts.returns / counts.episodes)
        record |= self._since.speeds(phases, int(counts.transitions))
        self._metrics.write(record)
        for sink in self._sinks:
            sink.write(record)
        self.progress.write(record, self._remaining.seconds)
        self._counts = Counts()
        self._since = _Since(dict(phases))
        self._line_seconds = self.clock.here

    def save(self, state: RunState, *, is_best: bool = False) -> None:
        """Copy the state to the host; the disk follows in the background."""
        if state.transitions == self._saved and not is_best:
            return
        self._saved = state.transitions
        with self.clock.measure("saving"):
            self._writer.wait()
            best = self.best and self.best._asdict()
            taken = checkpoint.snapshot(state, {"seconds": self.clock.stored(), "best": best})
            twin = self.folder / BEST if is_best else None
            self._writer.write(self.folder / CHECKPOINT, taken, twin=twin)

    def _require_finite(self, state: RunState, metrics: Mapping[str, Any]) -> None:
        count = int(metrics.get("nonfinite_in_a_row", 0))
        if count < _patience(self.config.algo):
            return
        self.log(state)
        where = self.folder / CHECKPOINT
        kept = f"the last good state is {where}" if where.exists() else "nothing was saved yet"
        raise TrainError(
            f"{count} updates in a row had gradients that are not finite, at "
            f"{state.transitions:,} transitions; {kept}. Lower the learning rates (--help lists "
            f"them) and see the losses in {self.folder / METRICS}"
        )


@dataclasses.dataclass
class _Since:
    """What was done since the last line of the log, beside what its time went into."""

    phases: dict[str, float]
    updates: int = 0
    episodes: int = 0

    def speeds(self, now: Mapping[str, float], transitions: int) -> dict[str, float]:
        spent = {name: now[name] - before for name, before in self.phases.items()}
        work = {
            "speed/transitions_per_second": (transitions, spent["collecting"] + spent["learning"]),
            "speed/collecting": (transitions, spent["collecting"]),
            "speed/learning": (self.updates, spent["learning"]),
            "speed/evaluating": (self.episodes, spent["evaluating"]),
        }
        return {name: round(n / time, 1) for name, (n, time) in work.items() if n and time > 0}


def _fresh(config: TrainConfig, algorithm: Algorithm, env: Env) -> Callable[[], RunState]:
    """How a run begins, as a function to compile or to take shapes from."""

    def start() -> RunState:
        num_envs = algorithm.cadence.num_envs
        keys = jax.random.split(named_key(config.seed, "environments"), num_envs)
        state = RunState(
            algorithm.init(named_key(config.seed, "learner")),
            begin(algorithm, env, keys),
            named_key(config.seed, "batches"),
            transitions=0,
            updates=0,
        )
        return jax.tree.map(_settled, state)

    return start


def _settled(leaf: Any) -> Any:
    """Without a weak type, which would compile every program a second time."""
    is_key = jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key)
    return leaf if is_key else jnp.asarray(leaf, jnp.asarray(leaf).dtype)


_collect = jax.jit(collect, static_argnums=(0, 1), static_argnames="rows")


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _update(
    algorithm: Algorithm, learner: Any, data: Experience, key: Key[Array, ""]
) -> tuple[Any, Metrics]:
    return algorithm.update(learner, data, key)


@jax.jit
def _batch_keys(key: Key[Array, ""], update: Int[Array, ""] | int) -> tuple[Array, Array]:
    key_collect, key_update = jax.random.split(jax.random.fold_in(key, update))
    return key_collect, key_update


def _batch(algorithm: Algorithm) -> int:
    """Rows of a batch: the most transitions that it can bring."""
    return algorithm.cadence.num_envs * algorithm.cadence.rows


def _crosses(before: int, after: int, every: int) -> bool:
    return before // every != after // every


def _patience(config: AlgorithmConfig) -> int:
    return config.optimizer.patience if isinstance(config, MajepaConfig) else PATIENCE


IMPATIENT = 1.0
"""Seconds after which another Ctrl-C is a second one, not an echo of the first."""


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C or SIGTERM ask for an end after this batch; another Ctrl-C ends at once."""
    asked: list[float] = []

    def ask(number: int, _: object) -> None:
        if asked and number == signal.SIGINT and time.monotonic() - asked[0] > IMPATIENT:
            raise KeyboardInterrupt
        if not asked:
            asked.append(time.monotonic())
            # Not through the console, which may be in the middle of a line.
            os.write(2, b"stopping after this batch; Ctrl-C again stops at once, unsaved\n")

    if threading.current_thread() is not threading.main_thread():
        yield lambda: bool(asked)
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in previous:
        signal.signal(number, ask)
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
