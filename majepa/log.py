"""What a run tells: numbers to `metrics.jsonl`, episodes to `evaluations.jsonl`, lines to people.

Metrics of the updates between two lines are averaged; those that were not measured (NaN) count
for nothing and are left out. Time is kept apart by what it was spent on, compilation included.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from .evaluate import Evaluation

LATEST = ("learner/", "nonfinite_in_a_row")
"""How metrics begin that count by themselves: a line shows their last value, not a mean."""
LOSSES = ("loss/model", "loss/actor", "loss/critic", "loss/critic_imagined")
"""Losses that the console shows, where an algorithm reports them."""


class JsonLines:
    """A file that grows by one object per line; every line is on disk when `write` returns."""

    def __init__(self, path: Path):
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        self.write_all([record])

    def write_all(self, records: Sequence[Mapping[str, Any]]) -> None:
        lines = (json.dumps(_without_nan(record), allow_nan=False) for record in records)
        self._file.write("".join(f"{line}\n" for line in lines))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def cut_back(path: Path, transitions: int) -> None:
    """Drop what was written after a checkpoint, a torn line, and the end of a finished run."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if record["transitions"] <= transitions and record.get("kind") != "final":
                kept.append(f"{line}\n")
    partial = path.with_name(f".{path.name}")
    partial.write_text("".join(kept), encoding="utf-8")
    partial.replace(path)


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
    """Seconds by phase; the first time of each program is compilation."""

    def __init__(self) -> None:
        names = ("collecting", "learning", "evaluating", "saving", "compiling")
        self.phases: dict[str, float] = dict.fromkeys(names, 0.0)
        self._started = time.perf_counter()
        self._before = 0.0
        self._seen: set[str] = set()

    @contextlib.contextmanager
    def measure(self, phase: str, program: str | None = None) -> Iterator[None]:
        started = time.perf_counter()
        yield
        is_first = program is not None and program not in self._seen
        self._seen.add(program or phase)
        self.phases["compiling" if is_first else phase] += time.perf_counter() - started

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


class ConsoleLines:
    """One aligned line per record, with a heading now and then."""

    def __init__(self, console: Console, budget: int):
        self._console = console
        self._budget = budget
        self._lines = 0

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def write(self, record: Mapping[str, Any]) -> None:
        losses = [
            f"{name.partition('/')[2]} {record[name]:.3g}" for name in LOSSES if name in record
        ]
        cells = {
            "transitions": f"{record['transitions']:,} / {self._budget:,}",
            "win rate": _percent(record.get("evaluation/win_rate")),
            "95 % interval": _range(record),
            "sampled": _percent(record.get("evaluation/sampled_win_rate")),
            "training": _percent(record.get("training/win_rate")),
            "return": _number(record.get("evaluation/return", record.get("training/return"))),
            "steps/s": _number(record.get("speed/transitions_per_second"), 0),
            "elapsed": clock_time(record["seconds"]),
            "calls": _number(record.get("learner/calls", record["updates"]), 0),
        }
        widths = [21, 8, 13, 8, 8, 8, 8, 8, 8]
        if self._lines % 30 == 0:
            self.say(_aligned(cells.keys(), widths) + "  losses")
        self.say(_aligned(cells.values(), widths) + "  " + ", ".join(losses))
        self._lines += 1


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


def describe(evaluation: Evaluation) -> str:
    """A win rate with its interval, in words."""
    low, high = evaluation.interval
    return f"{evaluation.win_rate:.1%} [{low:.1%}, {high:.1%}] over {evaluation.episodes} episodes"


def clock_time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _without_nan(record: Mapping[str, Any]) -> dict[str, Any]:
    """JSON knows neither NaN nor infinity: one is left out, the other becomes text."""
    return {
        name: str(value) if isinstance(value, float) and math.isinf(value) else value
        for name, value in record.items()
        if not (isinstance(value, float) and math.isnan(value))
    }


def _aligned(cells: Any, widths: Sequence[int]) -> str:
    return "".join(f"{cell:>{width}}  " for cell, width in zip(cells, widths, strict=True)).rstrip()


def _percent(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.1%}"


def _range(record: Mapping[str, Any]) -> str:
    if "evaluation/win_rate_low" not in record:
        return ""
    low, high = record["evaluation/win_rate_low"], record["evaluation/win_rate_high"]
    return f"{100 * low:.1f} - {100 * high:.1f}"


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:,.{digits}f}"
