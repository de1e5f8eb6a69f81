"""Which metrics are drawn together; those that no chapter names go by their prefix."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from .numbers import Unit


@dataclasses.dataclass(frozen=True)
class Panel:
    """One small chart."""

    title: str
    metrics: Mapping[str, str]
    """Names in the log, with the labels of their lines."""
    meaning: str
    unit: Unit = "number"
    is_log: bool = False
    is_share: bool = False
    """Drawn from 0 to 100 %."""
    is_ordered: bool = False
    """The lines are steps of one thing, such as a horizon, and share a hue."""
    name: str = ""
    """The metrics in short; by default their names."""


@dataclasses.dataclass(frozen=True)
class Chapter:
    title: str
    introduction: str
    panels: Sequence[Panel]


LOGGED_ELSEWHERE = (
    "transitions", "updates", "kind", "seconds", "speed/transitions_per_second",
    "evaluation/win_rate", "evaluation/win_rate_low", "evaluation/win_rate_high",
    "evaluation/return", "evaluation/length", "evaluation/sampled_win_rate",
    "evaluation/sampled_return", "evaluation/episodes", "training/win_rate", "training/return",
)  # fmt: skip
"""Metrics with a place of their own on the page."""


def chapters_of(written: Sequence[Chapter], names: Collection[str]) -> list[Chapter]:
    """What to draw of these metrics: these chapters, then all they leave, by prefix."""
    known = [_with(names, chapter) for chapter in written]
    drawn = {name for chapter in known for panel in chapter.panels for name in panel.metrics}
    rest = [name for name in names if name not in drawn and not _is_elsewhere(name)]
    prefixes = sorted({name.rpartition("/")[0] for name in rest})
    others = [
        Chapter(
            f"{prefix}/" if prefix else "Other metrics",
            "As the algorithm logs them.",
            [
                Panel(name.rpartition("/")[2], {name: name}, "")
                for name in sorted(rest)
                if name.rpartition("/")[0] == prefix
            ],
        )
        for prefix in prefixes
    ]
    return [chapter for chapter in [*known, *others] if chapter.panels]


def _with(names: Collection[str], chapter: Chapter) -> Chapter:
    """The part of a chapter that these metrics can fill."""
    panels = []
    for panel in chapter.panels:
        metrics = {name: label for name, label in panel.metrics.items() if name in names}
        if metrics:
            panels.append(dataclasses.replace(panel, metrics=metrics))
    return dataclasses.replace(chapter, panels=panels)


def _is_elsewhere(name: str) -> bool:
    return name in LOGGED_ELSEWHERE or name.startswith("seconds/")
