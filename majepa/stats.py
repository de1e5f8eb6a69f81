"""How sure a measured rate is."""

from __future__ import annotations

import math
from statistics import NormalDist


def wilson(wins: int, count: int, confidence: float = 0.95) -> tuple[float, float]:
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
