"""What the folder of a run holds, as far as it got: nothing here fails because a run did."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any, Literal

from ..config import PRESETS, preset, to_json
from ..run_folder import CHECKPOINT, EVALUATIONS, METRICS, VERSIONS, stored_config
from ..stats import wilson

Record = Mapping[str, Any]
Actions = Literal["argmax", "sampled"]

CONFIDENT = NormalDist().inv_cdf(0.975)


class ReportError(ValueError):
    """There is nothing to report on yet; the message says what is missing."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over episodes and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Score:
    """One evaluation, as a line of the metrics has it."""

    transitions: int
    kind: str
    episodes: int
    argmax: Estimate
    sampled: Estimate | None


@dataclasses.dataclass(frozen=True)
class Preset:
    """The preset that a config is nearest to."""

    name: str
    values: Mapping[str, Any]
    """All its fields, by dotted name."""


@dataclasses.dataclass(frozen=True)
class Run:
    folder: Path
    config: Mapping[str, Any]
    versions: Mapping[str, Any]
    metrics: Sequence[Record]
    episodes: Sequence[Record]
    """Of all evaluations."""
    notes: Sequence[str]
    """What is missing or could not be read, in sentences."""
    has_checkpoint: bool

    @property
    def algorithm(self) -> str:
        algo = self.config.get("algo")
        return str(algo.get("algorithm", "unknown")) if isinstance(algo, Mapping) else "unknown"

    @property
    def map_name(self) -> str:
        return str(self.config.get("env", "unknown")).rpartition(":")[2]

    @property
    def is_simulated(self) -> bool:
        """Whether the world is the embedded simulator; a bare map name means that, too."""
        return str(self.config.get("env", "")).rpartition(":")[0] in ("", "sim")

    @property
    def budget(self) -> int | None:
        steps = self.config.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def last(self) -> Record:
        return self.metrics[-1]

    @property
    def seconds(self) -> float | None:
        """Wall time of the run."""
        return self.last_value("seconds")

    def last_value(self, name: str) -> float | None:
        values = self.values(name)
        return values[-1][1] if values else None

    @property
    def metric_names(self) -> list[str]:
        """Every name with a number somewhere, in order of appearance."""
        names = dict.fromkeys(name for record in self.metrics for name in record)
        return [name for name in names if self.values(name)]

    def values(self, name: str) -> list[tuple[Record, float]]:
        """The lines that have a finite number under this name, and the number."""
        pairs = ((record, finite(record.get(name))) for record in self.metrics)
        return [(record, value) for record, value in pairs if value is not None]

    @property
    def evaluated(self) -> list[Record]:
        return [record for record, _ in self.values("evaluation/win_rate")]

    @functools.cached_property
    def score(self) -> Score | None:
        """The last evaluation; none if there was none."""
        if not self.evaluated:
            return None
        record = self.evaluated[-1]
        argmax = win_rate(record, "argmax")
        assert argmax is not None
        return Score(
            record["transitions"],
            str(record.get("kind", "training")),
            _episode_count(record),
            argmax,
            win_rate(record, "sampled"),
        )

    @property
    def status(self) -> Literal["finished", "stopped", "unfinished"]:
        """`finished` and `stopped` if an evaluation says so and nothing came after it."""
        match self.last.get("kind"):
            case "final":
                return "finished"
            case "stopped":
                return "stopped"
        return "unfinished"

    def episodes_of(self, record: Record, actions: Actions) -> list[Record]:
        """The single episodes of an evaluation."""
        wanted = (record["transitions"], record.get("kind"), actions)
        keys = ("transitions", "kind", "actions")
        return [one for one in self.episodes if tuple(one.get(key) for key in keys) == wanted]

    def mean_return(self, record: Record, actions: Actions) -> Estimate | None:
        """With an interval where the single episodes are known, without any width otherwise."""
        name = "evaluation/return" if actions == "argmax" else "evaluation/sampled_return"
        logged = finite(record.get(name))
        if logged is None:
            return None
        returns = [finite(one.get("return")) for one in self.episodes_of(record, actions)]
        known = [value for value in returns if value is not None]
        half = CONFIDENT * stdev(known) / math.sqrt(len(known)) if len(known) > 1 else 0.0
        centre = fmean(known) if known else logged
        return Estimate(logged, centre - half, centre + half)

    @functools.cached_property
    def preset(self) -> Preset | None:
        """None for an algorithm that has no presets."""
        known = [
            Preset(name, flat(as_stored(to_json(preset(self.algorithm, name, self.map_name)))))
            for name in PRESETS.get(self.algorithm, ())
        ]
        mine = flat(self.config)
        return min(known, key=lambda one: _distance(mine, one.values), default=None)

    @functools.cached_property
    def changed(self) -> frozenset[str]:
        """Fields of the config that differ from the preset's; map and seed always may."""
        if self.preset is None:
            return frozenset()
        usual, missing = self.preset.values, object()
        fields = flat(self.config).items()
        differing = {name for name, value in fields if value != usual.get(name, missing)}
        return frozenset(differing - {"env", "seed"})


def read_run(folder: Path) -> Run:
    """Everything that a report needs; only a folder without config or metrics is an error."""
    config = stored_config(folder)
    notes: list[str] = []
    metrics = _read_lines(folder / METRICS, notes, _is_metrics_line)
    if not metrics:
        raise ReportError(
            f"{folder} has nothing to report yet: {METRICS} holds no line; "
            "the first one follows the first batch"
        )
    episodes = _read_lines(folder / EVALUATIONS, notes, _is_metrics_line)
    versions = _read_versions(folder / VERSIONS, notes)
    has_checkpoint = (folder / CHECKPOINT).is_file()
    if not has_checkpoint:
        notes.append(
            f"{CHECKPOINT} is missing: nothing was saved yet, and nothing can be evaluated."
        )
    infinite = sorted({name for record in metrics for name in record if _is_infinite(record[name])})
    if infinite:
        notes.append(f"Infinite values are not drawn: {', '.join(infinite)}.")
    return Run(folder, config, versions, metrics, episodes, notes, has_checkpoint)


def finite(value: Any) -> float | None:
    """A number that can be drawn; infinity is logged as text."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def win_rate(record: Record, actions: Actions) -> Estimate | None:
    """Of an evaluation, with Wilson's interval."""
    name = "evaluation/win_rate" if actions == "argmax" else "evaluation/sampled_win_rate"
    rate, episodes = finite(record.get(name)), _episode_count(record)
    if rate is None:
        return None
    return Estimate(rate, *wilson(round(rate * episodes), episodes))


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested fields by dotted name."""
    fields: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            fields |= flat(value, f"{prefix}{name}.")
        else:
            fields[f"{prefix}{name}"] = value
    return fields


def as_stored(config: dict[str, Any]) -> dict[str, Any]:
    """As `config.json` would have it: lists for tuples."""
    return json.loads(json.dumps(config))


def _episode_count(record: Record) -> int:
    return int(finite(record.get("evaluation/episodes")) or 0)


def _read_lines(path: Path, notes: list[str], is_wanted: Callable[[Any], bool]) -> list[Record]:
    """The good lines of a file; a last one that a crash cut off goes without a word."""
    if not path.is_file():
        notes.append(f"{path.name} is missing.")
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    records, unreadable = [], 0
    for index, line in enumerate(lines):
        try:
            record = json.loads(line)
        except ValueError:
            unreadable += index < len(lines) - 1
            continue
        if is_wanted(record):
            records.append(record)
        else:
            unreadable += 1
    if unreadable:
        notes.append(f"{path.name}: {unreadable} lines could not be read and are left out.")
    return records


def _is_metrics_line(record: Any) -> bool:
    return isinstance(record, dict) and finite(record.get("transitions")) is not None


def _read_versions(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        versions = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"{VERSIONS} is missing.")
        return {}
    except ValueError:
        versions = None
    if not isinstance(versions, dict):
        notes.append(f"{VERSIONS} could not be read.")
        return {}
    return versions


def _is_infinite(value: Any) -> bool:
    return value in ("inf", "-inf") or (isinstance(value, float) and math.isinf(value))


def _distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    return sum(one.get(name) != other.get(name) for name in {**one, **other})
