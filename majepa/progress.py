"""What a person sees of a run: a panel that stays in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .log import Clock

LOSSES = ("loss/model", "loss/actor", "loss/critic", "loss/critic_imagined")
"""Losses that lines show, where an algorithm reports them."""
WINDOW = 60.0
"""Seconds of work that the remaining time is judged by."""
ENOUGH = 5.0
"""Seconds of work without which nothing is said about the remaining time."""


class Remaining:
    """The time that a budget still takes, at the pace of the last minute of work.

    Compilation is no work: it happens once. Nor is gathering before learning has begun, which is
    far faster than what follows.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._points: deque[tuple[float, int]] = deque()

    def add(self, work: float, transitions: int, *, learns: bool) -> None:
        if not learns:
            self._points.clear()
        self._points.append((work, transitions))
        while work - self._points[0][0] > WINDOW and len(self._points) > 2:
            self._points.popleft()

    @property
    def seconds(self) -> float | None:
        if not self._points:
            return None
        (work, transitions), (now, reached) = self._points[0], self._points[-1]
        if now - work < ENOUGH or reached <= transitions:
            return None
        return max(self._budget - reached, 0) * (now - work) / (reached - transitions)


@runtime_checkable
class Progress(Protocol):
    """Where a run says how far it is."""

    def say(self, text: str) -> None:
        """A sentence that stays."""
        ...

    def phase(self, name: str) -> None:
        """What the run does now."""
        ...

    def moved(self, transitions: int, remaining: float | None) -> None: ...

    def write(self, record: Mapping[str, Any], remaining: float | None) -> None:
        """A line of the log."""
        ...

    def close(self) -> None: ...


def make_progress(console: Console, budget: int, clock: Clock) -> Progress:
    return Panel(console, budget, clock) if console.is_terminal else Lines(console, budget)


class Lines:
    """One aligned line per record, with a heading now and then."""

    def __init__(self, console: Console, budget: int) -> None:
        self._console = console
        self._budget = budget
        self._lines = 0

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def phase(self, name: str) -> None:
        pass

    def moved(self, transitions: int, remaining: float | None) -> None:
        pass

    def write(self, record: Mapping[str, Any], remaining: float | None) -> None:
        cells = {
            "transitions": f"{record['transitions']:,} / {self._budget:,}",
            "win rate": percent(record.get("evaluation/win_rate")),
            "95 % interval": interval(record),
            "sampled": percent(record.get("evaluation/sampled_win_rate")),
            "training": percent(record.get("training/win_rate")),
            "return": number(record.get("evaluation/return", record.get("training/return"))),
            "steps/s": number(record.get("speed/transitions_per_second"), 0),
            "elapsed": clock_time(record["seconds"]),
            "left": "" if remaining is None else clock_time(remaining),
            "calls": number(record.get("learner/calls", record["updates"]), 0),
        }
        widths = [21, 8, 13, 8, 8, 8, 8, 8, 8, 8]
        if self._lines % 30 == 0:
            self.say(_aligned(cells.keys(), widths) + "  losses")
        self.say(_aligned(cells.values(), widths) + "  " + ", ".join(losses(record)))
        self._lines += 1

    def close(self) -> None:
        pass


class Panel:
    """The present state at the bottom of a terminal; evaluations scroll by above it."""

    def __init__(self, console: Console, budget: int, clock: Clock) -> None:
        self._budget = budget
        self._clock = clock
        self._phase = "starting"
        self._transitions = 0
        self._remaining: float | None = None
        self._seen: dict[str, Any] = {}
        self._live = Live(
            get_renderable=self._picture, console=console, refresh_per_second=4, transient=True
        )
        self._live.start()

    def say(self, text: str) -> None:
        self._live.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def phase(self, name: str) -> None:
        self._phase = name

    def moved(self, transitions: int, remaining: float | None) -> None:
        self._transitions, self._remaining = transitions, remaining

    def write(self, record: Mapping[str, Any], remaining: float | None) -> None:
        self._seen |= record
        if "evaluation/win_rate" in record:
            self.say(
                f"{record['transitions']:>11,}  win rate {percent(record['evaluation/win_rate'])} "
                f"[{interval(record)}]  sampled {percent(record['evaluation/sampled_win_rate'])}  "
                f"return {number(record['evaluation/return'])}  {clock_time(record['seconds'])}"
            )
        self.moved(record["transitions"], remaining)

    def close(self) -> None:
        self._live.refresh()
        self._live.stop()

    def _picture(self) -> RenderableType:
        seen = self._seen
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total=self._budget, completed=self._transitions, width=40),
            f"{self._transitions:,} of {self._budget:,} transitions",
            Text(self._phase, style="bold yellow" if self._phase == "compiling" else "bold"),
        )
        facts = Table.grid(padding=(0, 2))
        facts.add_row(
            "win rate",
            f"{percent(seen.get('evaluation/win_rate')) or '-'}  {interval(seen)}",
            "sampled",
            percent(seen.get("evaluation/sampled_win_rate")) or "-",
            "return",
            number(seen.get("evaluation/return", seen.get("training/return"))) or "-",
        )
        facts.add_row(
            "collecting",
            _rate(seen, "speed/collecting", "steps/s"),
            "learning",
            _rate(seen, "speed/learning", "updates/s"),
            "evaluating",
            _rate(seen, "speed/evaluating", "episodes/s"),
        )
        facts.add_row(
            "elapsed",
            clock_time(self._clock.elapsed),
            "compiled for",
            clock_time(self._clock.phases["compiling"]),
            "left",
            "measuring" if self._remaining is None else f"about {clock_time(self._remaining)}",
        )
        return Group(bar, facts, Text(", ".join(losses(seen)), style="dim"))


def losses(record: Mapping[str, Any]) -> list[str]:
    return [f"{name.partition('/')[2]} {record[name]:.3g}" for name in LOSSES if name in record]


def clock_time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def percent(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.1%}"


def interval(record: Mapping[str, Any]) -> str:
    if "evaluation/win_rate_low" not in record:
        return ""
    low, high = record["evaluation/win_rate_low"], record["evaluation/win_rate_high"]
    return f"{100 * low:.1f} - {100 * high:.1f}"


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _rate(seen: Mapping[str, Any], name: str, unit: str) -> str:
    return f"{number(seen[name], 1)} {unit}" if name in seen else "-"


def _aligned(cells: Any, widths: Sequence[int]) -> str:
    return "".join(f"{cell:>{width}}  " for cell, width in zip(cells, widths, strict=True)).rstrip()
