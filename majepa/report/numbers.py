"""Numbers as people read them, and the round ones that belong on an axis."""

from __future__ import annotations

import itertools
import math
from typing import Literal

Unit = Literal["number", "percent", "seconds"]

DURATIONS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200)
"""Steps between ticks of a time axis, in seconds; beyond, whole days."""


def written(value: float, unit: Unit = "number") -> str:
    """A value with its unit: `0.0192`, `12,345`, `96.0 %`, `1 h 05 min`."""
    if unit == "percent":
        return percent(value)
    if unit == "seconds":
        return duration(value)
    return number(value)


def number(value: float) -> str:
    """Three significant digits, or all of a whole number."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000 or value == round(value):
        return f"{value:,.0f}".replace("-", "−")
    if 0 < abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    return f"{value:#.3g}".replace("-", "−")


def percent(rate: float, digits: int = 1) -> str:
    return f"{100 * rate:.{digits}f}\u202f%"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 or seconds == 0 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{int(seconds) // 60} min {int(seconds) % 60:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def linear_ticks(low: float, high: float, count: int, unit: Unit = "number") -> list[float]:
    """Round values from `low` to `high`, about `count` of them."""
    rough = (high - low) / count
    step = _duration_step(rough) if unit == "seconds" else _round_step(rough)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def enclosing_ticks(low: float, high: float, count: int) -> list[float]:
    """Round values, the first at or below `low`, the last at or above `high`."""
    step = _round_step((high - low) / count)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def reach(high: float, count: int, unit: Unit = "number") -> float:
    """The end of an axis from zero: a little more, if that takes in the next tick."""
    return max(high, *linear_ticks(0, 1.04 * high, count, unit))


def log_ticks(low: float, high: float, count: int) -> list[float]:
    """1, 2 and 5 times powers of ten around both ends; powers alone where that is too many."""
    first, last = math.floor(math.log10(low)), math.floor(math.log10(high)) + 1
    fine = [digit * 10.0**power for power in range(first, last + 1) for digit in (1, 2, 5)]
    start = max(index for index, tick in enumerate(fine) if tick <= low * (1 + 1e-9))
    end = min(index for index, tick in enumerate(fine) if tick > high * (1 + 1e-9))
    if end - start <= count + 1:
        return fine[start : end + 1]
    stride = max(1, math.ceil((last - first) / count))
    return [10.0**power for power in range(first, last + stride, stride)]


def tick_labels(ticks: list[float], unit: Unit = "number") -> list[str]:
    """Labels of one axis, with as many digits as their distance asks for."""
    if unit == "seconds":
        return _time_labels(ticks)
    scale = 100 if unit == "percent" else 1
    gaps = [b - a for a, b in itertools.pairwise(ticks)]
    digits = max((_digits(scale * gap) for gap in gaps), default=2)
    if unit == "percent":
        return [percent(tick, digits) for tick in ticks]
    if digits > 4:
        return [number(tick) for tick in ticks]
    return [f"{tick:,.{digits}f}".replace("-", "−") for tick in ticks]


def log_labels(ticks: list[float]) -> list[str]:
    return [f"{tick:,.10g}" if tick >= 1e-4 else number(tick) for tick in ticks]


def _round_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, at least nearly as much."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= 0.8 * rough)


def _duration_step(rough: float) -> float:
    day = 86_400
    return next((step for step in DURATIONS if step >= rough), day * math.ceil(rough / day))


def _digits(gap: float) -> int:
    """Decimals that tell two ticks apart."""
    digits = 0
    while digits < 12 and abs(round(gap, digits) - gap) > 1e-6 * gap:
        digits += 1
    return digits


def _time_labels(ticks: list[float]) -> list[str]:
    longest = max(ticks, default=0)
    if longest < 120:
        return [f"{tick:.0f} s" for tick in ticks]
    if longest < 7200:
        return [f"{tick / 60:.10g} min" for tick in ticks]
    return [f"{tick / 3600:.10g} h" for tick in ticks]
