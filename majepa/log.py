"""What a run writes down: numbers to `metrics.jsonl`, episodes to `evaluations.jsonl`.

Metrics of the updates between two lines are averaged; those that were not measured (NaN) count
for nothing and are left out. Time is kept apart by what it was spent on, compilation included.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from .evaluation import Evaluation
from .files import written_beside

Record = Mapping[str, Any]
TAIL = 1 << 18
"""Bytes at the end of a file in which its last evaluation is looked for."""
LATEST = ("learner/", "nonfinite_in_a_row")
"""How metrics begin that count by themselves: a line shows their last value, not a mean."""


class JsonLines:
    """A file that grows by one object per line; a line is out of our hands when `write` returns.

    It is opened when there is something to write.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file: IO[str] | None = None

    def _opened(self) -> IO[str]:
        if self._file is None:
            kept = self._path.read_bytes() if self._path.is_file() else b""
            is_torn = kept != b"" and not kept.endswith(b"\n")
            self._file = self._path.open("a", encoding="utf-8")
            if is_torn:
                self._file.write("\n")
        return self._file

    def write(self, record: Mapping[str, Any]) -> None:
        self.write_all([record])

    def write_all(self, records: Sequence[Mapping[str, Any]]) -> None:
        lines = (json.dumps(_without_nan(record), allow_nan=False) for record in records)
        try:
            file = self._opened()
            file.write("".join(f"{line}\n" for line in lines))
            file.flush()
        except OSError as error:
            raise OSError(f"cannot write {self._path}: {error}") from error

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()


def cut_back(path: Path, transitions: int) -> None:
    """Drop what was written after a checkpoint, a torn line, and an end that is to come again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if record["transitions"] <= transitions and record.get("kind") != "final":
                kept.append(f"{line}\n")
    with written_beside(path) as partial:
        partial.write_text("".join(kept), encoding="utf-8")


class Averages:
    """Means of metrics since they were last taken."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            number = float(value)
            if math.isnan(number):
                continue
            total, count = (0.0, 0) if name.startswith(LATEST) else self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + number, count + 1)

    def take(self) -> dict[str, float]:
        means = {name: total / count for name, (total, count) in self._sums.items()}
        self._sums = {}
        return means


class Clock:
    """Seconds by phase; the first time of a program that was not compiled ahead is compilation."""

    def __init__(self) -> None:
        names = ("collecting", "learning", "evaluating", "saving", "compiling")
        self.phases: dict[str, float] = dict.fromkeys(names, 0.0)
        self.on_phase: Callable[[str], None] = lambda name: None
        """Told whenever a phase begins."""
        self._started = time.perf_counter()
        self._before = 0.0
        self._seen: set[str] = set()

    @contextlib.contextmanager
    def measure(self, phase: str, program: str | None = None) -> Iterator[None]:
        started = time.perf_counter()
        if program is not None and program not in self._seen:
            self._seen.add(program)
            phase = "compiling"
        self.on_phase(phase)
        yield
        self.phases[phase] += time.perf_counter() - started

    def compiled(self, *programs: str) -> None:
        """These were compiled ahead: their first use is none."""
        self._seen.update(programs)

    @property
    def work(self) -> float:
        """Seconds of everything that goes on until the end, compilation aside."""
        return sum(spent for name, spent in self.phases.items() if name != "compiling")

    @property
    def elapsed(self) -> float:
        """Wall seconds of the run, those before a resume included."""
        return self._before + self.here

    @property
    def here(self) -> float:
        """Wall seconds since this command began."""
        return time.perf_counter() - self._started

    def stored(self) -> dict[str, float]:
        return self.phases | {"elapsed": self.elapsed}

    def go_on_from(self, stored: Mapping[str, float]) -> None:
        """Add what was spent before a resume."""
        self._before = stored["elapsed"]
        self.phases = {name: spent + stored[name] for name, spent in self.phases.items()}


def evaluation_metrics(argmax: Evaluation, sampled: Evaluation) -> dict[str, float]:
    low, high = argmax.interval
    return {
        "evaluation/win_rate": argmax.win_rate,
        "evaluation/win_rate_low": low,
        "evaluation/win_rate_high": high,
        "evaluation/return": argmax.mean_return,
        "evaluation/length": float(argmax.length.mean()),
        "evaluation/sampled_win_rate": sampled.win_rate,
        "evaluation/sampled_return": sampled.mean_return,
        "evaluation/episodes": argmax.episodes,
    }


def episode_records(evaluation: Evaluation, **common: Any) -> list[dict[str, Any]]:
    """Every episode of an evaluation, for `evaluations.jsonl`."""
    return [
        {
            **common,
            "actions": "argmax" if evaluation.greedy else "sampled",
            "episode": index,
            "won": bool(evaluation.won[index]),
            "return": float(evaluation.episode_return[index]),
            "length": int(evaluation.length[index]),
        }
        for index in range(evaluation.episodes)
    ]


class Final(NamedTuple):
    """What a finished run left behind."""

    line: Record
    """Of the metrics."""
    argmax: list[Record]
    sampled: list[Record]


def read_final(metrics: Path, evaluations: Path, episodes: int) -> Final | None:
    """Of a run whose final evaluation, so many episodes of each kind, was written to its end, the
    line of the metrics too."""
    final = list(filter(_is_final, whole_lines(evaluations)))
    argmax, sampled = (
        [one for one in final if one.get("actions") == actions] for actions in ("argmax", "sampled")
    )
    if not len(argmax) == len(sampled) == len(final) / 2 == episodes:
        return None
    lines = list(filter(_is_final, whole_lines(metrics, tail=TAIL)))
    return Final(lines[-1], argmax, sampled) if lines else None


def _is_final(record: Record) -> bool:
    return record.get("kind") == "final"


def read_evaluation(episodes: Sequence[Record]) -> Evaluation:
    """What `episode_records` made records of."""
    won, returns, length = (
        np.asarray([one[name] for one in episodes]) for name in ("won", "return", "length")
    )
    return Evaluation(won, returns, length, greedy=episodes[0]["actions"] == "argmax")


def whole_lines(path: Path, *, tail: int | None = None) -> Iterator[Record]:
    """Objects of a file that may be growing at this moment, or of its end alone."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        if tail is not None:
            file.seek(max(0, path.stat().st_size - tail))
        for line in file.read().splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record


def describe(evaluation: Evaluation) -> str:
    """A win rate with its interval, in words."""
    low, high = evaluation.interval
    return f"{evaluation.win_rate:.1%} [{low:.1%}, {high:.1%}] over {evaluation.episodes} episodes"


def _without_nan(record: Mapping[str, Any]) -> dict[str, Any]:
    """JSON knows neither NaN nor infinity: one is left out, the other becomes text."""
    return {
        name: str(value) if isinstance(value, float) and math.isinf(value) else value
        for name, value in record.items()
        if not (isinstance(value, float) and math.isnan(value))
    }
