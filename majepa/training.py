"""The loop for any algorithm on device environments: collect, learn, evaluate, log, save.

Collecting and learning are compiled; the host schedules. The budget counts real transitions. All
randomness derives from the seed and from counters, and a checkpoint holds everything that the next
batch depends on, so that a run that was stopped goes on bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key
from rich.console import Console

from . import checkpoint
from .algorithm import Algorithm, Experience
from .collect import Collected, Counts, Stream, begin, check_health, collect
from .config import (
    AlgorithmConfig,
    ConfigError,
    MajepaConfig,
    MappoConfig,
    MatConfig,
    QmixConfig,
    TrainConfig,
)
from .envs.base import Env, EnvSpec
from .envs.make import make_env
from .evaluation import EVALUATION_SEED, Evaluation, evaluate
from .interrupt import interruptible
from .log import Averages, Clock, JsonLines, cut_back, episode_records, evaluation_metrics
from .progress import Remaining, clock_time, make_progress
from .run_folder import (
    BEST,
    CHECKPOINT,
    CONFIG,
    EVALUATIONS,
    METRICS,
    claim,
    new_folder,
    newest_checkpoint,
    reclaim,
    sweep,
)
from .sinks import make_sinks, require_packages

REPLAY = "learner/replay"
"""The branch of a run's state that only learning needs."""
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
    env = env or make_env(config.env)
    algorithm = algorithm or make_algorithm(config, env.spec)
    _require_possible(config, algorithm)
    plan = _Plan(config, folder or new_folder(config), resume)
    limits = (stop_after_seconds, stop_after)
    return _train([plan], env, algorithm, limits, console or Console())[0]


def train_together(
    configs: Sequence[TrainConfig], folders: Sequence[Path], *, console: Console | None = None
) -> list[Result]:
    """Train runs that differ in nothing but their seed in one program, each in its own folder.

    A folder that holds a run already goes on with it. Each run does what it would do alone, up to
    the rounding of a batched program. A run that has ended waits for the others.
    """
    first = configs[0]
    for config in configs:
        if dataclasses.replace(config, seed=first.seed) != first:
            raise ConfigError("runs that are trained together may differ in their seed alone")
    if len({config.seed for config in configs}) < len(configs):
        raise ConfigError("runs that are trained together need seeds of their own")
    env = make_env(first.env)
    algorithm = make_algorithm(first, env.spec)
    _require_possible(first, algorithm)
    plans = [
        _Plan(config, folder, (folder / CONFIG).exists())
        for config, folder in zip(configs, folders, strict=True)
    ]
    return _train(plans, env, algorithm, (None, None), console or Console())


class _Plan(NamedTuple):
    config: TrainConfig
    folder: Path
    resume: bool


def _train(
    plans: Sequence[_Plan],
    env: Env,
    algorithm: Algorithm,
    limits: tuple[float | None, int | None],
    console: Console,
) -> list[Result]:
    """The runs of all plans; several share a program."""
    for config, folder, resume in plans:
        if resume:
            reclaim(folder, config, env.spec)
            sweep(folder)
        else:
            claim(folder, config, env.spec)
    clock = Clock()
    with interruptible(PROMISE) as is_interrupted, contextlib.ExitStack() as opened:
        starts = [_start(plan, algorithm, env, clock) for plan in plans]
        clock.go_on_from(
            max((start.seconds for start in starts), key=lambda spent: spent["elapsed"])
        )
        runs = []
        for plan, start in zip(plans, starts, strict=True):
            for name in (METRICS, EVALUATIONS):
                cut_back(plan.folder / name, start.state.transitions)
            shown = Console(quiet=True, force_terminal=False) if runs else console
            run = _Run(plan.config, plan.folder, env, algorithm, clock, shown, start.best)
            runs.append(opened.enter_context(run))
            run.announce(start.state, plan.resume)
        clock.on_phase = runs[0].progress.phase
        lanes = _Lanes(algorithm, env, [start.state for start in starts], clock)
        del starts
        return _loop(runs, lanes, _Limits(*limits, is_interrupted))


def _require_possible(config: TrainConfig, algorithm: Algorithm) -> None:
    """Refuse a run that cannot be, before anything is touched."""
    if config.steps < _batch(algorithm):
        what = "transitions at most" if algorithm.cadence.whole_episodes else "rows"
        raise ConfigError(
            f"steps is {config.steps:,}; {config.algorithm} collects {_batch(algorithm):,} {what} "
            "between two updates and needs a budget of at least that many transitions"
        )
    require_packages(config.log)


class _Start(NamedTuple):
    """Where a run goes on."""

    state: RunState
    best: Score | None
    seconds: Mapping[str, float]
    """Spent before, by phase."""


def _start(plan: _Plan, algorithm: Algorithm, env: Env, clock: Clock) -> _Start:
    """A run at its newest checkpoint, or at its beginning."""
    config, folder, _ = plan
    which = newest_checkpoint(folder)
    if which is None:
        with clock.measure("compiling"):
            state = jax.jit(_fresh(config, algorithm, env))()
        return _Start(state._replace(transitions=0, updates=0), None, Clock().stored())
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
    if checkpoint.read_omitted(folder / which) and _has_budget(
        config, algorithm, state.transitions
    ):
        raise checkpoint.CheckpointError(
            f"{folder / which} was kept without its replay when the run ended and cannot be "
            "continued; remove it and --resume to train again from the start"
        )
    meta = checkpoint.read_meta(folder / which)
    return _Start(state, meta["best"] and Score(**meta["best"]), meta["seconds"])


def make_algorithm(config: TrainConfig, spec: EnvSpec) -> Algorithm:
    """The algorithm that a config describes, for an environment."""
    match config.algo:
        case MajepaConfig():
            from .agent import Majepa

            return Majepa(config.algo, spec, steps=config.steps)
        case MappoConfig():
            from .baselines.mappo import Mappo

            return Mappo(config.algo, spec)
        case QmixConfig():
            from .baselines.qmix import Qmix

            return Qmix(config.algo, spec, steps=config.steps)
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
PROMISE = "stopping after this batch; Ctrl-C again stops at once, unsaved"


@dataclasses.dataclass(frozen=True)
class _Limits:
    """What may end a run before its budget."""

    seconds: float | None
    transitions: int | None
    is_interrupted: Callable[[], bool]

    def reached(self, transitions: int, seconds: float) -> str | None:
        if self.is_interrupted():
            return INTERRUPTED
        if self.seconds is not None and seconds >= self.seconds:
            return f"the time limit of {clock_time(self.seconds)} was reached"
        if self.transitions is not None and transitions >= self.transitions:
            return f"asked to stop after {self.transitions:,} transitions"
        return None


class _Lanes:
    """Where runs stand on the device. Several lie in the same arrays, on a first axis of their own,
    and advance in one program; what one of them does after its end nobody looks at."""

    def __init__(
        self, algorithm: Algorithm, env: Env, states: Sequence[RunState], clock: Clock
    ) -> None:
        self.algorithm, self.env, self.clock = algorithm, env, clock
        self._is_one = len(states) == 1
        self._learner, self._stream, self._key = (
            self._joined([getattr(state, name) for state in states])
            for name in ("learner", "stream", "key")
        )
        self.transitions = [state.transitions for state in states]
        self.updates = [state.updates for state in states]

    def _joined(self, trees: list[Any]) -> Any:
        return trees[0] if self._is_one else jax.tree.map(lambda *x: jnp.stack(x), *trees)

    def _of(self, lane: int, tree: Any) -> Any:
        """What belongs to one run of what holds for all."""
        return tree if self._is_one else jax.tree.map(lambda leaf: leaf[lane], tree)

    def __getitem__(self, lane: int) -> RunState:
        """One run by itself."""
        learner, stream, key = self._of(lane, (self._learner, self._stream, self._key))
        return RunState(learner, stream, key, self.transitions[lane], self.updates[lane])

    def advance(self, active: Sequence[int]) -> dict[int, tuple[Counts, Mapping[str, Any]]]:
        """Collect a batch for each run, look at it, and learn from it."""
        algorithm, env, is_one = self.algorithm, self.env, self._is_one
        updates = self.updates[0] if is_one else jnp.asarray(self.updates)
        keys = _batch_keys(self._key, updates, together=not is_one)
        with self.clock.measure("collecting", "collect"):
            gathered = _collect(
                algorithm, env, self._learner, self._stream, keys[0], together=not is_one
            )
            found = jax.device_get((gathered.counts, gathered.health))
        each = {lane: self._of(lane, found) for lane in active}
        for _, health in each.values():
            check_health(health, env.spec, algorithm.cadence.num_envs)
        with self.clock.measure("learning", "update"):
            self._learner, metrics = _update(
                algorithm, self._learner, gathered.data, keys[1], together=not is_one
            )
            metrics = jax.device_get(jax.block_until_ready((self._learner, metrics))[1])
        self._stream = gathered.stream
        for lane, (counts, _) in each.items():
            self.transitions[lane] += int(counts.transitions)
            self.updates[lane] += 1
        return {lane: (counts, self._of(lane, metrics)) for lane, (counts, _) in each.items()}


def _loop(runs: Sequence[_Run], lanes: _Lanes, limits: _Limits) -> list[Result]:
    """Batches until the budget or a limit of every run."""
    results: dict[int, Result] = {}
    for lane, run in enumerate(runs):
        if not run.has_budget(lanes.transitions[lane]):
            results[lane] = run.end(lanes[lane], None)
    while len(results) < len(runs):
        active = [lane for lane in range(len(runs)) if lane not in results]
        before = list(lanes.transitions)
        news = lanes.advance(active)
        for lane in active:
            run, now = runs[lane], lanes.transitions[lane]
            run.learned(now, lanes.updates[lane], *news[lane])
            stopped = None
            if run.has_budget(now):
                stopped = limits.reached(now, run.clock.here)
                run.tend(functools.partial(lanes.__getitem__, lane), before[lane], now, stopped)
            if stopped or not run.has_budget(now):
                results[lane] = run.end(lanes[lane], stopped)
    return [results[lane] for lane in range(len(runs))]


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
        if self.has_budget(state.transitions):
            self.progress.say("compiling; the first line follows the first batch")

    def has_budget(self, transitions: int) -> bool:
        """Whether another batch can be collected without exceeding the budget."""
        return _has_budget(self.config, self.algorithm, transitions)

    def learned(
        self, transitions: int, updates: int, counts: Counts, metrics: Mapping[str, Any]
    ) -> None:
        """Take note of a batch that was collected and learned from."""
        self._averages.add(metrics)
        self._counts = self._counts.plus(counts)
        self._since.updates += 1
        learns = metrics.get("learner/calls", 1) > 0
        self._remaining.add(self.clock.work, transitions, learns=bool(learns))
        self.progress.moved(transitions, self._remaining.seconds)
        self._require_finite(transitions, updates, metrics)

    def tend(
        self, state: Callable[[], RunState], before: int, now: int, stopped: str | None
    ) -> None:
        """What is due after a batch that was not the last: an evaluation, a line, a checkpoint."""
        config = self.config
        if _crosses(before, now, config.evaluation.every):
            # Even if somebody wants to leave: it could not be made up for.
            self.evaluate(state(), "training")
        elif stopped or self.is_line_due:
            self.log(now, state().updates)
        if _crosses(before, now, config.save_every) and not stopped:
            self.save(state())

    def end(self, state: RunState, stopped: str | None) -> Result:
        """Save, and judge the run unless it was interrupted."""
        self.save(state)
        argmax, sampled = None, None
        if stopped != INTERRUPTED:
            argmax, sampled = self.evaluate(state, "stopped" if stopped else "final")
        if stopped is None:
            self._writer.wait()
            if (self.folder / BEST).is_file():
                checkpoint.prune(self.folder / BEST, REPLAY)
        return Result(self.folder, state.transitions, self.clock.elapsed, stopped, argmax, sampled)

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
        more = {"kind": kind, **evaluation_metrics(*results)}
        self.log(state.transitions, state.updates, more)
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

    def log(self, transitions: int, updates: int, more: Mapping[str, Any] | None = None) -> None:
        """One line of everything since the last one."""
        counts, phases = self._counts, self.clock.phases
        record: dict[str, Any] = {
            "transitions": transitions,
            "seconds": round(self.clock.elapsed, 3),
            "updates": updates,
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
        """Copy the state to the host; the disk follows in the background.

        Nothing is learned after the budget, so then it is kept without the replay.
        """
        if state.transitions == self._saved and not is_best:
            return
        self._saved = state.transitions
        with self.clock.measure("saving"):
            self._writer.wait()
            best = self.best and self.best._asdict()
            meta = {"seconds": self.clock.stored(), "best": best}
            is_done = not self.has_budget(state.transitions)
            taken = checkpoint.snapshot(state, meta, without=REPLAY if is_done else None)
            twin = self.folder / BEST if is_best else None
            self._writer.write(self.folder / CHECKPOINT, taken, twin=twin)

    def _require_finite(self, transitions: int, updates: int, metrics: Mapping[str, Any]) -> None:
        count = int(np.nan_to_num(metrics.get("nonfinite_in_a_row", 0)))
        if count < _patience(self.config.algo):
            return
        self.log(transitions, updates)
        where = self.folder / CHECKPOINT
        kept = f"the last good state is {where}" if where.exists() else "nothing was saved yet"
        raise TrainError(
            f"{count} updates in a row had gradients that are not finite, at "
            f"{transitions:,} transitions; {kept}. Lower the learning rates (--help lists "
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


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="together")
def _collect(
    algorithm: Algorithm, env: Env, learner: Any, stream: Stream, key: Key[Array, "..."], *,
    together: bool,
) -> Collected:  # fmt: skip
    one = functools.partial(collect, algorithm, env, rows=algorithm.cadence.rows)
    return (jax.vmap(one) if together else one)(learner, stream, key)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1, static_argnames="together")
def _update(
    algorithm: Algorithm, learner: Any, data: Experience, key: Key[Array, "..."], *, together: bool
) -> tuple[Any, Mapping[str, Array]]:
    one = algorithm.update
    return (jax.vmap(one) if together else one)(learner, data, key)


@functools.partial(jax.jit, static_argnames="together")
def _batch_keys(
    key: Key[Array, "..."], update: Int[Array, "..."] | int, *, together: bool
) -> tuple[Array, Array]:
    def one(key: Key[Array, ""], update: Int[Array, ""] | int) -> tuple[Array, Array]:
        key_collect, key_update = jax.random.split(jax.random.fold_in(key, update))
        return key_collect, key_update

    return (jax.vmap(one) if together else one)(key, update)


def _batch(algorithm: Algorithm) -> int:
    """Rows of a batch: the most transitions that it can bring."""
    return algorithm.cadence.num_envs * algorithm.cadence.rows


def _has_budget(config: TrainConfig, algorithm: Algorithm, transitions: int) -> bool:
    return transitions + _batch(algorithm) <= config.steps


def _crosses(before: int, after: int, every: int) -> bool:
    return before // every != after // every


def _patience(config: AlgorithmConfig) -> int:
    return config.optimizer.patience if isinstance(config, MajepaConfig) else PATIENCE
