"""How sure measured rates are, over episodes and over seeds, and how two sets of them compare.

Bootstrap intervals are percentiles over redraws from a fixed seed, so that the same results give
the same interval. Where one seed is all there is, nothing is known about other seeds: deviations
and intervals over seeds are None then.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

REDRAWS = 10_000
BOOTSTRAP_SEED = 20_260
CONFIDENCE = 0.95
FEW_SEEDS = 3
"""Up to this many, an interval over seeds is a hint and no more."""

Strata = Sequence[Sequence[float]]
"""Scores of one method: for each map, one for each seed."""


class Interval(NamedTuple):
    low: float
    high: float


def wilson(wins: int, count: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's score interval of a win rate over independent episodes; (0, 1) without any."""
    if not 0 <= wins <= count:
        raise ValueError(f"{wins} wins in {count} episodes cannot be")
    if count == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate = wins / count
    centre = (rate + z**2 / (2 * count)) / (1 + z**2 / count)
    spread = z * math.sqrt(rate * (1 - rate) / count + z**2 / (4 * count**2)) / (1 + z**2 / count)
    # A rate of 0 or 1 lies on its own bound; rounding must not push the bound past it.
    return min(rate, max(0.0, centre - spread)), max(rate, min(1.0, centre + spread))


def deviation(values: Sequence[float]) -> float | None:
    """Sample standard deviation."""
    return stdev(values) if len(values) > 1 else None


def mean_rate_interval(
    wins: Sequence[int], episodes: Sequence[int], redraws: int = REDRAWS
) -> Interval | None:
    """Of the mean win rate over seeds, from the episodes that each seed won and played.

    Two levels: a redraw takes as many seeds as there are, with replacement, and for each of them a
    rate that its episodes leave possible, from Beta(wins + ½, losses + ½). Resampling the episodes
    themselves would call three seeds that won everything exact; this does not.
    """
    if len(wins) < 2:
        return None
    won, played = np.asarray(wins), np.asarray(episodes)
    random = np.random.default_rng(BOOTSTRAP_SEED)
    seeds = random.integers(len(won), size=(redraws, len(won)))
    rates = random.beta(won[seeds] + 0.5, (played - won)[seeds] + 0.5)
    return _interval(rates.mean(axis=1), float((won / played).mean()))


def iqm(values: Sequence[float]) -> float:
    """Interquartile mean: without the lowest and the highest quarter, both rounded down."""
    return float(_iqm(np.asarray(values, float)[None])[0])


def iqm_interval(strata: Strata, redraws: int = REDRAWS) -> Interval | None:
    """Of the IQM over all scores; seeds are redrawn within each map."""
    if not _can_redraw(strata):
        return None
    drawn = _redraw(strata, np.random.default_rng(BOOTSTRAP_SEED), redraws)
    return _interval(_iqm(np.concatenate(drawn, axis=1)), iqm(list(itertools.chain(*strata))))


def improvement(x: Strata, y: Strata) -> float:
    """Probability that a run of X beats one of Y on the same map, averaged over maps.

    A tie counts half.
    """
    as_one = ([np.asarray(runs, float)[None] for runs in strata] for strata in (x, y))
    return float(_improvement(*as_one)[0])


def improvement_interval(x: Strata, y: Strata, redraws: int = REDRAWS) -> Interval | None:
    """Seeds of both methods are redrawn within each map, apart from each other."""
    if not (_can_redraw(x) and _can_redraw(y)):
        return None
    random = np.random.default_rng(BOOTSTRAP_SEED)
    drawn = _improvement(_redraw(x, random, redraws), _redraw(y, random, redraws))
    return _interval(drawn, improvement(x, y))


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Rank correlation, ties at their mean rank; None where one side has only one rank."""
    if len(x) != len(y):
        raise ValueError(f"{len(x)} values cannot be paired with {len(y)}")
    if len(set(x)) < 2 or len(set(y)) < 2:
        return None
    return float(np.corrcoef(_ranks(x), _ranks(y))[0, 1])


def mean_absolute_difference(x: Sequence[float], y: Sequence[float]) -> float | None:
    """None without any pair."""
    return fmean(abs(a - b) for a, b in zip(x, y, strict=True)) if len(x) else None


def _can_redraw(strata: Strata) -> bool:
    """A map with one seed would always be redrawn as it is, and look certain."""
    return bool(strata) and all(len(runs) > 1 for runs in strata)


def _redraw(
    strata: Strata, random: np.random.Generator, redraws: int
) -> list[Float[np.ndarray, "R _"]]:
    scores = [np.asarray(runs, float) for runs in strata]
    return [runs[random.integers(len(runs), size=(redraws, len(runs)))] for runs in scores]


def _iqm(scores: Float[np.ndarray, "R S"]) -> Float[np.ndarray, " R"]:
    cut = scores.shape[1] // 4
    return np.sort(scores, axis=1)[:, cut : scores.shape[1] - cut].mean(axis=1)


def _improvement(
    x: Sequence[Float[np.ndarray, "R _"]], y: Sequence[Float[np.ndarray, "R _"]]
) -> Float[np.ndarray, " R"]:
    by_map = []
    for one, other in zip(x, y, strict=True):
        difference = one[:, :, None] - other[:, None, :]
        by_map.append((0.5 + 0.5 * np.sign(difference)).mean(axis=(1, 2)))
    return np.mean(by_map, axis=0)


def _interval(drawn: Float[np.ndarray, " R"], measured: float) -> Interval:
    """Widened to hold what was measured, which need not lie among the redraws."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, (tail, 1 - tail))
    return Interval(min(float(low), measured), max(float(high), measured))


def _ranks(values: Sequence[float]) -> Float[np.ndarray, " n"]:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[places]
