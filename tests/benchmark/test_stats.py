"""Statistics over seeds, against slow loops, hand computation and scipy."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import rankdata, spearmanr, trim_mean

from majepa import stats


def test_deviation_is_the_samples():
    assert stats.deviation([0.0, 1.0]) == pytest.approx(0.5**0.5)
    assert stats.deviation([0.3, 0.3, 0.3]) == 0
    assert stats.deviation([0.3]) is None


def test_iqm_by_hand():
    assert stats.iqm([5.0]) == 5
    assert stats.iqm([0, 1, 2, 9]) == 1.5
    # Ten values: two go at each end, wherever they stood.
    assert stats.iqm([100, 3, 4, 5, 6, 7, 8, -50, 1, 2]) == pytest.approx(4.5)
    # Three values: a quarter of them is none.
    assert stats.iqm([0, 0, 9]) == 3


@pytest.mark.parametrize("count", [1, 3, 4, 7, 24, 36])
def test_iqm_is_scipys_trimmed_mean(count):
    values = np.random.default_rng(count).random(count)
    assert stats.iqm(values.tolist()) == pytest.approx(trim_mean(values, 0.25))


def test_improvement_by_hand_with_ties():
    assert stats.improvement([[1.0, 0.5]], [[0.5, 0.0]]) == pytest.approx(3.5 / 4)
    assert stats.improvement([[0.0, 0.0]], [[0.0, 0.0, 0.0]]) == 0.5
    # Maps count alike, whatever their numbers of runs.
    assert stats.improvement([[1.0], [0.0, 0.0, 0.0]], [[0.0], [1.0, 1.0, 1.0]]) == 0.5


def test_improvement_is_what_a_loop_counts():
    random = np.random.default_rng(3)
    x, y = (
        [(random.integers(0, 4, size=n) / 4).tolist() for n in sizes] for sizes in ([3, 2], [4, 5])
    )
    by_map = []
    for one, other in zip(x, y, strict=True):
        wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a in one for b in other]
        by_map.append(sum(wins) / len(wins))
    assert stats.improvement(x, y) == pytest.approx(sum(by_map) / 2)
    assert stats.improvement(x, y) + stats.improvement(y, x) == pytest.approx(1)


def exact_interval(outcomes: list[float]) -> tuple[float, float]:
    low, high = np.quantile(outcomes, (0.025, 0.975), method="inverted_cdf")
    return float(low), float(high)


def test_seeds_are_redrawn_within_their_map():
    """Against every redraw there can be: each map's seeds in all 2 × 2 and 3 × 3 × 3 ways."""
    strata = [[0.0, 1.0], [10.0, 20.0, 60.0]]
    outcomes = [
        float(trim_mean([*first, *second], 0.25))
        for first in itertools.product(strata[0], repeat=2)
        for second in itertools.product(strata[1], repeat=3)
    ]
    assert stats.iqm_interval(strata) == pytest.approx(exact_interval(outcomes), abs=0.2)


def test_improvement_redraws_both_sides():
    x, y = [[0.2, 0.6]], [[0.1, 0.5]]
    outcomes = [
        statistics.fmean(float(a > b) for a in one for b in other)
        for one in itertools.product(x[0], repeat=2)
        for other in itertools.product(y[0], repeat=2)
    ]
    assert stats.improvement_interval(x, y) == pytest.approx(exact_interval(outcomes), abs=0.01)


def test_intervals_cover_what_they_should():
    """Four maps of ten seeds, symmetric, so that the IQM of all is 0 in truth."""
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(300):
        strata = [random.normal(size=10).tolist() for _ in range(4)]
        interval = stats.iqm_interval(strata, redraws=1_000)
        assert interval is not None
        covered += interval.low <= 0 <= interval.high
    assert 0.90 < covered / 300 < 0.985


def test_strata_keep_what_maps_differ_in_out_of_the_interval():
    """Maps far apart, seeds alike: redrawing runs across maps would be far too wide."""
    strata = [[0.1, 0.1, 0.1], [0.5, 0.5, 0.5], [0.9, 0.9, 0.9]]
    assert stats.iqm_interval(strata) == pytest.approx((0.5, 0.5))


def test_win_rates_cover_what_they_should():
    """Ten seeds whose true rates differ, each seen through 100 episodes."""
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(300):
        wins = random.binomial(100, random.beta(6, 4, size=10))
        interval = stats.mean_rate_interval(wins.tolist(), [100] * 10, redraws=1_000)
        assert interval is not None
        covered += interval.low <= 0.6 <= interval.high
    assert 0.90 < covered / 300 < 0.985


def test_seeds_that_won_all_are_not_certain():
    interval = stats.mean_rate_interval([100, 100, 100], [100, 100, 100])
    assert interval is not None
    page = (Path(__file__).parents[2] / "docs" / "benchmark-results.md").read_text()
    assert f"interval of [{100 * interval.low:.1f}, {100 * interval.high:.1f}] and" in page
    assert interval.high == 1 and 0.97 < interval.low < 0.995
    lost = stats.mean_rate_interval([0, 0, 0], [100, 100, 100])
    assert lost == pytest.approx((0, 1 - interval.low), abs=1e-3)


def test_seeds_matter_more_than_their_episodes():
    """Two seeds at opposite ends: a quarter of the redraws has only one of them."""
    interval = stats.mean_rate_interval([0, 1000], [1000, 1000])
    assert interval is not None and interval.low < 0.01 and interval.high > 0.99


def test_more_episodes_make_a_rate_surer():
    few = stats.mean_rate_interval([5, 5, 5], [10, 10, 10])
    many = stats.mean_rate_interval([500, 500, 500], [1000, 1000, 1000])
    assert few is not None and many is not None
    assert few.high - few.low > 5 * (many.high - many.low)


def test_one_seed_says_nothing_about_others():
    assert stats.mean_rate_interval([7], [10]) is None
    assert stats.mean_rate_interval([], []) is None
    assert stats.iqm_interval([]) is None
    assert stats.iqm_interval([[0.1, 0.2], [0.5]]) is None
    assert stats.improvement_interval([[0.1, 0.2]], [[0.5]]) is None


def test_the_same_results_give_the_same_interval():
    strata = [[0.1, 0.4, 0.3], [0.9, 0.2, 0.8]]
    assert stats.iqm_interval(strata) == stats.iqm_interval(strata)
    again = [stats.mean_rate_interval([3, 9], [10, 10]) for _ in range(2)]
    assert again[0] == again[1]


def test_spearman_is_scipys():
    random = np.random.default_rng(5)
    for size in (2, 3, 10, 40):
        x, y = random.integers(0, 6, size=(2, size))
        x[0], x[1], y[0], y[1] = 0, 1, 5, 4
        expected = spearmanr(x, y).statistic
        assert stats.spearman(x.tolist(), y.tolist()) == pytest.approx(expected)


def test_spearman_with_ties_by_hand():
    # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4.
    assert stats.spearman([0, 5, 5, 9], [1, 2, 3, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert list(rankdata([0, 5, 5, 9])) == [1, 2.5, 2.5, 4]


def test_spearman_needs_two_ranks_on_both_sides():
    assert stats.spearman([], []) is None
    assert stats.spearman([1.0], [2.0]) is None
    assert stats.spearman([0, 0, 0], [1, 2, 3]) is None
    with pytest.raises(ValueError, match="cannot be paired"):
        stats.spearman([1], [1, 2])


def test_mean_absolute_difference():
    assert stats.mean_absolute_difference([1, 5], [3, 4]) == 1.5
    assert stats.mean_absolute_difference([], []) is None
