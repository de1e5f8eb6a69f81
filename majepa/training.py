"""The loop for any algorithm on device environments: collect, learn, evaluate, log, save.

Collecting and learning are compiled; the host schedules. The budget counts real transitions. All
randomness derives from the seed and from counters, and a checkpoint holds everything that the next
batch depends on, so that a run that was stopped goes on bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key
from rich.console import Console

from . import checkpoint, machine
from .ahead import Ahead
from .algorithm import (
    Algorithm,
    Device,
    InPrograms,
    Updater,
    shapes_on,
    without_replay,
)
from .checks import Memory
from .collect import begin
from .config import ConfigError, MajepaConfig, MappoConfig, MatConfig, QmixConfig, TrainConfig
from .envs.base import Env, EnvError, EnvSpec
from .envs.make import make_env
from .evaluation import evaluation_program
from .interrupt import interruptible
from .lanes import Lanes, RunState, is_on_host, joining, lane_programs
from .log import Clock, cut_back, read_evaluation, read_final
from .memory import Need, NoRoom, bytes_of, require_room
from .progress import clock_time
from .run import INTERRUPTED, Result, Run, Score, TrainError, batch_size, has_budget
from .run_folder import (
    BEST,
    CHECKPOINT,
    CONFIG,
    EVALUATIONS,
    METRICS,
    claim,
    give_back,
    hold,
    new_folder,
    newest_checkpoint,
    reclaim,
    require_free,
    sweep,
)
from .sinks import require_packages

PROMISE = "stopping after this batch; Ctrl-C again stops at once, unsaved"
ON_HOST = "the replay lies in the memory of the host"


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
    require_possible(config, algorithm)
    folders = None if folder is None else [folder]
    limits = (stop_after_seconds, stop_after)
    console = console or Console()
    return _train([config], folders, resume, env, algorithm, limits, console)[0]


def train_together(
    configs: Sequence[TrainConfig],
    folders: Sequence[Path] | None = None,
    *,
    resume: bool | None = None,
    stop_after_seconds: float | None = None,
    env: Env | None = None,
    console: Console | None = None,
) -> list[Result]:
    """Train runs that differ in nothing but their seed in one program, each in its own folder.

    Without `folders` each run gets a new one under `runs/`. `resume` goes on with all of them or
    with none; if it is not said, with those whose folder holds a run already. Each run does what it
    would do alone, up to the rounding of a batched program. A run that has ended waits for the
    others, and one that fails leaves them alone: `results` of the error are theirs.
    """
    if not configs:
        raise ConfigError("there are no runs to train together; name at least one")
    first = configs[0]
    for config in configs:
        if dataclasses.replace(config, seed=first.seed) != first:
            raise ConfigError("runs that are trained together may differ in their seed alone")
    if len({config.seed for config in configs}) < len(configs):
        raise ConfigError("runs that are trained together need seeds of their own")
    env = env or make_env(first.env)
    algorithm = make_algorithm(first, env.spec)
    require_possible(first, algorithm)
    limits = (stop_after_seconds, None)
    return _train(configs, folders, resume, env, algorithm, limits, console or Console())


class _Plan(NamedTuple):
    config: TrainConfig
    folder: Path
    resume: bool


def _train(
    configs: Sequence[TrainConfig],
    folders: Sequence[Path] | None,
    resume: bool | None,
    env: Env,
    algorithm: Algorithm,
    limits: tuple[float | None, int | None],
    console: Console,
) -> list[Result]:
    """The runs of all configs; several share a program."""
    there = machine.device_memory()
    shapes = run_shapes(algorithm, env)
    updater = _require_room_at_first(configs, algorithm, shapes, there)
    plans = _plans(configs, folders, resume)
    clock = Clock()
    with (
        _claimed(plans, env.spec),
        interruptible(PROMISE) as is_interrupted,
        Ahead(machine.cores()) as ahead,
        contextlib.ExitStack() as opened,
    ):
        on_host = is_on_host(updater)
        starts = [_start(plan, algorithm, env, on_host=on_host) for plan in plans]
        clock.go_on_from(
            max((start.seconds for start in starts), key=lambda spent: spent["elapsed"])
        )
        runs = [
            opened.enter_context(run)
            for run in _open(plans, starts, shapes, env, algorithm, clock, console)
        ]
        clock.on_phase = runs[0].progress.phase
        with clock.measure("compiling"):
            states = _states(plans, starts, shapes, env, algorithm, updater, ahead, clock)
        del starts
        lanes = Lanes(algorithm, env, states, clock, updater)
        if on_host:
            runs[0].progress.say(ON_HOST)
        with clock.measure("compiling"):
            ahead.wait()
        _plan_memory(runs, lanes, there)
        with clock.measure("compiling"):
            _compile_end(runs, lanes, shapes, ahead)
        return _loop(runs, lanes, _Limits(*limits, is_interrupted))


def _require_room_at_first(
    configs: Sequence[TrainConfig], algorithm: Algorithm, shapes: RunState, there: Memory | None
) -> Updater | None:
    """Refuse states that cannot fit, before anything is touched; how the runs learn."""
    first, runs = configs[0], len(configs)
    updater = _updater(first, algorithm, runs, bytes_of(shapes), there)
    if is_on_host(updater):
        shapes = shapes._replace(learner=without_replay(shapes.learner))
    require_room(Need(runs * bytes_of(shapes), joining(shapes, runs)), there, first, runs)
    return updater


def _plans(
    configs: Sequence[TrainConfig], folders: Sequence[Path] | None, resume: bool | None
) -> list[_Plan]:
    if folders is None:
        folders = [new_folder(config) for config in configs]
    return [
        _Plan(config, folder, (folder / CONFIG).exists() if resume is None else resume)
        for config, folder in zip(configs, folders, strict=True)
    ]


def _open(
    plans: Sequence[_Plan],
    starts: Sequence[_Start],
    shapes: RunState,
    env: Env,
    algorithm: Algorithm,
    clock: Clock,
    console: Console,
) -> Iterator[Run]:
    """The host side of each run; only the first speaks."""
    for number, (plan, start) in enumerate(zip(plans, starts, strict=True)):
        if start.ended is None:
            for name in (METRICS, EVALUATIONS):
                cut_back(plan.folder / name, start.transitions)
        shown = Console(quiet=True, force_terminal=False) if number else console
        run = Run(plan.config, plan.folder, env, algorithm, clock, shown, start.best, start.ended)
        yield run
        run.announce(shapes._replace(transitions=start.transitions), plan.resume)
        if number == 0 and len(plans) > 1:
            seeds = ", ".join(str(plan.config.seed) for plan in plans)
            run.progress.say(f"one program for seeds {seeds}; progress is that of the first")


@contextlib.contextmanager
def _claimed(plans: Sequence[_Plan], spec: EnvSpec) -> Iterator[None]:
    """Every folder is that of its run and of this process, or none of them. Those of new runs are
    given back if there turns out to be no room for learning."""
    for config, folder, resume in plans:
        if resume:
            reclaim(folder, config, spec)
        else:
            require_free(folder, [plan.folder for plan in plans])
    with contextlib.ExitStack() as held:
        for _, folder, resume in plans:
            if resume:
                held.enter_context(hold(folder))
        for config, folder, resume in plans:
            if resume:
                sweep(folder)
            else:
                claim(folder, config, spec)
                held.enter_context(hold(folder))
        try:
            yield
        except NoRoom:
            for _, folder, resume in plans:
                if not resume:
                    give_back(folder)
            raise


def _plan_memory(runs: Sequence[Run], lanes: Lanes, there: Memory | None) -> None:
    """Refuse to learn what does not fit on the device; say what it takes."""
    if not any(run.has_budget(now) for run, now in zip(runs, lanes.transitions, strict=True)):
        return
    need, first = lanes.need(), runs[0]
    if need is not None and not lanes.on_host:
        updater = _updater(first.config, lanes.algorithm, len(runs), need.total, there)
        if updater is not None and is_on_host(updater):
            lanes.learn_by(updater)
            first.progress.say(ON_HOST)
            need = lanes.need()
    if need is not None:
        require_room(need, there, first.config, len(runs))
        for run in runs:
            run.plan(need, there)


def _compile_end(runs: Sequence[Run], lanes: Lanes, shapes: RunState, ahead: Ahead) -> None:
    """While the runs learn, compile what their last evaluation runs, unless an earlier one does."""
    config, algorithm = runs[0].config, lanes.algorithm
    now, final = min(lanes.transitions), config.evaluation.final_episodes
    if not has_budget(config, algorithm, now) or _next_episodes(config, algorithm, now) == final:
        return
    learner = without_replay(shapes.learner)
    if lanes.on_host:
        learner = shapes_on(jax.local_devices()[0], learner)
    program = evaluation_program(algorithm, lanes.env, learner, episodes=final)
    compiling = ahead.begin(program.compile)
    lanes.clock.compiled(f"evaluate {final}")
    for run in runs:
        run.wait_for_end = compiling.result


def require_possible(config: TrainConfig, algorithm: Algorithm) -> None:
    """Refuse a run that cannot be, before anything is touched."""
    batch = batch_size(algorithm)
    if config.steps < batch:
        what = "transitions at most" if algorithm.cadence.whole_episodes else "rows"
        raise ConfigError(
            f"steps is {config.steps:,}; {config.algorithm} collects {batch:,} {what} "
            "between two updates and needs a budget of at least that many transitions"
        )
    require_packages(config.log)


class _Start(NamedTuple):
    """Where a run goes on."""

    state: RunState | None
    """None if it begins."""
    best: Score | None
    seconds: Mapping[str, float]
    """Spent before, by phase."""
    ended: Result | None = None
    """How it ended, if there is nothing left to do."""

    @property
    def transitions(self) -> int:
        return 0 if self.state is None else self.state.transitions


def _updater(
    config: TrainConfig, algorithm: Algorithm, runs: int, held: int, there: Memory | None
) -> Updater | None:
    """How runs learn if their algorithm has programs of its own for it, and where the replay lies.

    `held`: bytes that it takes with its replay on the device; `there`: what the device has.
    """
    place = config.algo.replay.place if isinstance(config.algo, MajepaConfig) else "device"
    if place == "host" and runs > 1:
        raise ConfigError(
            "a replay in host memory is for one run: train or resume one at a time, or use "
            "--algo.replay.place device"
        )
    too_large = place == "auto" and runs == 1 and there is not None and held > there.total
    on_host = place == "host" or too_large
    if not isinstance(algorithm, InPrograms) or not (on_host or _is_accelerated()):
        return None
    return algorithm.updater(together=runs > 1, host=_host() if on_host else None)


def _is_accelerated() -> bool:
    """Whether programs run beside the host. A CPU has nothing to wait for: one does it all."""
    return jax.default_backend() != "cpu"


def _host() -> Device:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ConfigError(
            f"a replay in host memory needs JAX's CPU backend too: {error}; unset JAX_PLATFORMS, "
            "or add cpu to it"
        ) from error


def _states(
    plans: Sequence[_Plan],
    starts: Sequence[_Start],
    shapes: RunState,
    env: Env,
    algorithm: Algorithm,
    updater: Updater | None,
    ahead: Ahead,
    clock: Clock,
) -> list[RunState]:
    """Of runs that go on or begin. What they will call is compiled from here on."""
    each = list(zip(plans, starts, strict=True))
    beginning = _Beginning(algorithm, env, on_host=is_on_host(updater))
    if any(has_budget(plan.config, algorithm, start.transitions) for plan, start in each):
        begin = min(start.transitions for start in starts)
        episodes = _next_episodes(plans[0].config, algorithm, begin)
        for name, program in _programs(algorithm, env, shapes, len(plans), updater, episodes):
            ahead.begin(program.compile)
            clock.compiled(name)
    if any(start.state is None for start in starts):
        ahead.begin(beginning.lowered().compile).result()
    return [start.state or beginning(plan.config.seed) for plan, start in each]


def _next_episodes(config: TrainConfig, algorithm: Algorithm, transitions: int) -> int:
    """Of the first evaluation of a run that stands there."""
    schedule = config.evaluation
    due = (transitions // schedule.every + 1) * schedule.every
    is_on_the_way = has_budget(config, algorithm, due)
    return schedule.episodes if is_on_the_way else schedule.final_episodes


def _programs(
    algorithm: Algorithm,
    env: Env,
    shapes: RunState,
    runs: int,
    updater: Updater | None,
    episodes: int,
) -> Iterator[tuple[str, jax.stages.Lowered]]:
    """What so many runs call until an evaluation of so many episodes, by the names that the clock
    has for them, traced one by one.

    What learns takes longest to compile, so it is the first.
    """
    if updater is not None and is_on_host(updater):
        shapes = shapes_on(updater.device, shapes)
    yield from lane_programs(algorithm, env, shapes, runs, updater)
    learner = without_replay(shapes.learner)
    yield f"evaluate {episodes}", evaluation_program(algorithm, env, learner, episodes=episodes)


def _start(plan: _Plan, algorithm: Algorithm, env: Env, *, on_host: bool) -> _Start:
    """A run at its newest checkpoint, or at its beginning; `on_host`: with its replay there."""
    config, folder, _ = plan
    which = newest_checkpoint(folder)
    if which is None:
        return _Start(None, None, Clock().stored())
    try:
        with jax.default_device(_host()) if on_host else contextlib.nullcontext():
            state = load_run(folder, algorithm, env, which=which)
    except checkpoint.CheckpointError as error:
        other = which == CHECKPOINT and (folder / BEST).is_file()
        remedy = (
            f"remove it to go on from {folder / BEST}"
            if other
            else "remove it and --resume to train again from the start, or name another folder"
        )
        raise checkpoint.CheckpointError(f"{error}; {remedy}") from error
    if checkpoint.read_omitted(folder / which) and has_budget(config, algorithm, state.transitions):
        raise checkpoint.CheckpointError(
            f"{folder / which} was kept without its replay when the run ended and cannot be "
            "continued; remove it and --resume to train again from the start"
        )
    meta = checkpoint.read_meta(folder / which)
    best = meta["best"] and Score(**meta["best"])
    is_over = which == CHECKPOINT and not has_budget(config, algorithm, state.transitions)
    # A run that has had no best state was killed before that of its end was written.
    ended = _ended(folder, config, state.transitions) if is_over and best else None
    return _Start(state, best, meta["seconds"], ended)


def _ended(folder: Path, config: TrainConfig, transitions: int) -> Result | None:
    """How a run ended whose last checkpoint was judged already, and nothing is left to be done."""
    count = config.evaluation.final_episodes
    final = read_final(folder / METRICS, folder / EVALUATIONS, count)
    if final is None or final.line["transitions"] != transitions:
        return None
    last, best = folder / CHECKPOINT, folder / BEST
    if best.is_file() and checkpoint.read_omitted(best) != checkpoint.read_omitted(last):
        return None  # It was killed before the best state lost its replay.
    judged = (read_evaluation(episodes) for episodes in (final.argmax, final.sampled))
    return Result(folder, transitions, final.line["seconds"], None, *judged)


class _Beginning:
    """How runs begin: one program for all seeds. A replay that belongs on the host is never on the
    device."""

    def __init__(self, algorithm: Algorithm, env: Env, *, on_host: bool) -> None:
        self._fresh = _fresh(algorithm, env)
        self._on_host = on_host
        self._program = jax.jit(self._without_replay if on_host else self._fresh)

    def lowered(self) -> jax.stages.Lowered:
        """Traced for a key of which there is the shape alone."""
        return self._program.lower(jax.eval_shape(lambda: jax.random.key(0)))

    def __call__(self, seed: int) -> RunState:
        state = self._program(jax.random.key(seed))._replace(transitions=0, updates=0)
        if not self._on_host:
            return state
        with jax.default_device(_host()):
            replay = jax.jit(self._only_replay)(jax.random.key(seed))
        return state._replace(learner=state.learner._replace(replay=replay))

    def _without_replay(self, key: Key[Array, ""]) -> RunState:
        state = self._fresh(key)
        return state._replace(learner=without_replay(state.learner))

    def _only_replay(self, key: Key[Array, ""]) -> Any:
        return self._fresh(key).learner.replay


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
    algorithm: Algorithm,
    env: Env,
    *,
    which: Path = CHECKPOINT,
) -> RunState:
    """The state of a run as one of its checkpoints holds it."""
    shapes = run_shapes(algorithm, env)
    return checkpoint.load(folder / which, shapes._replace(transitions=0, updates=0))


def run_shapes(algorithm: Algorithm, env: Env) -> RunState:
    """The state of a run as shapes and types alone; nothing is computed or allocated."""
    return jax.eval_shape(_fresh(algorithm, env), jax.random.key(0))


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


def _loop(runs: Sequence[Run], lanes: Lanes, limits: _Limits) -> list[Result]:
    """Batches until the budget or a limit of every run; one that fails leaves the others alone."""
    results: dict[int, Result] = {}
    failed: dict[int, Exception] = {}
    for lane, run in enumerate(runs):
        if not run.has_budget(lanes.transitions[lane]):
            results[lane] = run.end(lanes, lane, None)
    while active := [lane for lane in range(len(runs)) if lane not in results | failed]:
        before = list(lanes.transitions)
        news = lanes.advance(active)
        for lane in active:
            run, now, stopped = runs[lane], lanes.transitions[lane], None
            try:
                run.learned(now, lanes.updates[lane], news[lane])
                if run.has_budget(now):
                    stopped = limits.reached(now, run.clock.here)
                    run.tend(lanes, lane, before[lane], stopped)
                if stopped or not run.has_budget(now):
                    results[lane] = run.end(lanes, lane, stopped)
            except (TrainError, EnvError) as error:
                failed[lane] = error
                if len(runs) > 1:
                    runs[0].progress.say(f"{run.folder} failed: {error}")
    if failed:
        raise _failure(runs, failed, list(results.values()))
    return [results[lane] for lane in range(len(runs))]


def _failure(
    runs: Sequence[Run], failed: Mapping[int, Exception], others: Sequence[Result]
) -> Exception:
    """Of one run its own error; of several what each of them met."""
    if len(runs) == 1:
        return failed[0]
    what = "; ".join(f"{runs[lane].folder.name}: {error}" for lane, error in failed.items())
    error = TrainError(f"{len(failed)} of {len(runs)} runs trained together failed: {what}")
    error.results = others
    return error


def _fresh(algorithm: Algorithm, env: Env) -> Callable[[Key[Array, ""]], RunState]:
    """How a run begins with the key of its seed, to compile or to take shapes from."""

    def start(key: Key[Array, ""]) -> RunState:
        num_envs = algorithm.cadence.num_envs
        keys = jax.random.split(_named_key(key, "environments"), num_envs)
        state = RunState(
            algorithm.init(_named_key(key, "learner")),
            begin(algorithm, env, keys),
            _named_key(key, "batches"),
            transitions=0,
            updates=0,
        )
        return jax.tree.map(_settled, state)

    return start


def _named_key(key: Key[Array, ""], name: str) -> Key[Array, ""]:
    """The random key that a run uses for one purpose."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def _settled(leaf: Any) -> Any:
    """Without a weak type, which would compile every program a second time."""
    is_key = jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key)
    return leaf if is_key else jnp.asarray(leaf, jnp.asarray(leaf).dtype)
