"""The host side of one run: when to evaluate, what to log, what to keep."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from rich.console import Console

from . import checkpoint, machine
from .algorithm import Algorithm
from .checks import Memory, in_bytes
from .collect import Counts
from .config import AlgorithmConfig, MajepaConfig, TrainConfig
from .envs.base import Env
from .evaluation import EVALUATION_SEED, Evaluation, evaluate
from .lanes import Lanes, News, RunState
from .log import Averages, Clock, JsonLines, episode_records, evaluation_metrics
from .memory import Need, bytes_of
from .progress import Remaining, make_progress
from .run_folder import BEST, CHECKPOINT, EVALUATIONS, METRICS
from .sinks import make_sinks

INTERRUPTED = "interrupted"
REPLAY = "learner/replay"
"""The branch of a run's state that only learning needs."""
PATIENCE = 20
"""Non-finite updates in a row that an algorithm without a setting of its own may have."""
LINE_SECONDS = 30.0
"""Longest time without a line in the log while batches are finished."""

Kind = Literal["training", "stopped", "final"]
"""Of an evaluation: on the way, at an early stop, at the end of the budget."""


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


class TrainError(RuntimeError):
    """Training cannot go on; the message says why and where the last good state is."""

    results: Sequence[Result] = ()
    """Of the other runs of the same program, which went on to their ends."""


class Run:
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
        ended: Result | None = None,
    ):
        self.config = config
        self.folder = folder
        self.env = env
        self.algorithm = algorithm
        self.clock = clock
        self.best = best
        self._ended = ended
        self._sinks = make_sinks(config, folder) if ended is None else []
        self._metrics = JsonLines(folder / METRICS)
        self._evaluations = JsonLines(folder / EVALUATIONS)
        self._writer = checkpoint.Writer()
        self._averages = Averages()
        self._counts = Counts()
        self._unread: tuple[int, int, Callable[[], Mapping[str, Any]]] | None = None
        """Transitions and updates of the last batch, and what tells what was learned from it."""
        self._since = _Since(dict(clock.phases))
        self._line_seconds: float | None = None
        self._remaining = Remaining(config.steps)
        self._saved: int | None = None
        self._planned: int | None = None
        self.progress = make_progress(console, config.steps, clock)
        self.wait_for_end: Callable[[], Any] | None = None
        """Until what the last evaluation runs is compiled, by a thread that does so meanwhile."""

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as closing:
            closing.callback(self._writer.wait)
            for file in (self._metrics, self._evaluations, *self._sinks, self.progress):
                closing.callback(file.close)

    def announce(self, state: RunState, resume: bool) -> None:
        """`state` may be shapes, but for its transitions."""
        spec, config = self.env.spec, self.config
        verb = f"continues at {state.transitions:,} transitions" if resume else "starts"
        verb = verb if self._ended is None else f"is finished at {state.transitions:,} transitions"
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

    def plan(self, need: Need, there: Memory | None) -> None:
        """Say how much memory learning will take, to be compared with what it took."""
        self._planned = need.total
        room = f" of {in_bytes(there.total)} on the device" if there else ""
        self.progress.say(f"learning takes {need}{room}")

    def has_budget(self, transitions: int) -> bool:
        """Whether another batch can be collected without exceeding the budget."""
        return has_budget(self.config, self.algorithm, transitions)

    def learned(self, transitions: int, updates: int, news: News) -> None:
        """Take note of a batch that was collected, and of what was learned from the one before.

        What was learned from this one is read when the next batch is on its way, or before
        anything is written: a device that works beside the host need not wait.
        """
        if news.fault is not None:
            raise news.fault
        self._read()
        self._counts = self._counts.plus(news.counts)
        self._since.updates += 1
        self._unread = transitions, updates, news.metrics
        if not news.is_under_way:
            self._read()

    def _read(self) -> None:
        """Take note of what was learned from the last batch, if it is not known yet."""
        if self._unread is None:
            return
        (transitions, updates, read), self._unread = self._unread, None
        metrics = read()
        self._averages.add(metrics)
        learns = metrics.get("learner/calls", 1) > 0
        self._remaining.add(self.clock.work, transitions, learns=bool(learns))
        self.progress.moved(transitions, self._remaining.seconds)
        self._require_finite(transitions, updates, metrics)

    def tend(self, lanes: Lanes, lane: int, before: int, stopped: str | None) -> None:
        """What is due after a batch that was not the last: an evaluation, a line, a checkpoint."""
        config, now = self.config, lanes.transitions[lane]
        if _crosses(before, now, config.evaluation.every):
            # Even if somebody wants to leave: it could not be made up for.
            self.evaluate(lanes, lane, "training")
        elif stopped or self.is_line_due:
            self.log(now, lanes.updates[lane])
        if _crosses(before, now, config.save_every) and not stopped:
            self.save(lanes[lane])

    def end(self, lanes: Lanes, lane: int, stopped: str | None) -> Result:
        """Save, and judge the run unless it was interrupted. One that had ended before is left as
        it is."""
        if self._ended is not None:
            return self._ended
        self.save(lanes[lane])
        argmax, sampled = None, None
        if stopped != INTERRUPTED:
            if self.wait_for_end is not None:
                with self.clock.measure("compiling"):
                    self.wait_for_end()
            argmax, sampled = self.evaluate(lanes, lane, "stopped" if stopped else "final")
        if stopped is None:
            self._writer.wait()
            if (self.folder / BEST).is_file():
                checkpoint.prune(self.folder / BEST, REPLAY)
        transitions = lanes.transitions[lane]
        return Result(self.folder, transitions, self.clock.elapsed, stopped, argmax, sampled)

    def evaluate(self, lanes: Lanes, lane: int, kind: Kind) -> tuple[Evaluation, Evaluation]:
        """Judge the learner with argmax and with sampled actions, and log a line with both."""
        self._read()
        state = lanes.acting(lane)
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
            self.save(lanes[lane], is_best=True)
        return results[0], results[1]

    @property
    def is_line_due(self) -> bool:
        last = self._line_seconds
        return last is None or self.clock.here - last >= LINE_SECONDS

    def log(self, transitions: int, updates: int, more: Mapping[str, Any] | None = None) -> None:
        """One line of everything since the last one."""
        self._read()
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
        record |= self._since.speeds(phases, int(counts.transitions)) | self._memory()
        self._metrics.write(record)
        for sink in self._sinks:
            sink.write(record)
        self.progress.write(record, self._remaining.seconds)
        self._counts = Counts()
        self._since = _Since(dict(phases))
        self._line_seconds = self.clock.here

    def _memory(self) -> dict[str, int]:
        """What was planned and what was used, where the device tells."""
        peak = machine.device_peak()
        if peak is None or self._planned is None:
            return {}
        return {"memory/planned": self._planned, "memory/peak": peak}

    def save(self, state: RunState, *, is_best: bool = False) -> None:
        """Copy the state to the host; the disk follows in the background.

        Nothing is learned after the budget, so then it is kept without the replay.
        """
        if state.transitions == self._saved and not is_best:
            return
        self._read()
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


def memory(learner: Any) -> dict[str, int]:
    """Bytes of each part of a learner, those too small to matter together."""
    parts = learner._asdict() if hasattr(learner, "_asdict") else {"learner": learner}
    sizes = {name: bytes_of(part) for name, part in parts.items()}
    large = {name: size for name, size in sizes.items() if size >= 10_000}
    return large | {"other": sum(sizes.values()) - sum(large.values())}


def batch_size(algorithm: Algorithm) -> int:
    """Rows of a batch: the most transitions that it can bring."""
    return algorithm.cadence.num_envs * algorithm.cadence.rows


def has_budget(config: TrainConfig, algorithm: Algorithm, transitions: int) -> bool:
    return transitions + batch_size(algorithm) <= config.steps


def _crosses(before: int, after: int, every: int) -> bool:
    return before // every != after // every


def _patience(config: AlgorithmConfig) -> int:
    return config.optimizer.patience if isinstance(config, MajepaConfig) else PATIENCE
