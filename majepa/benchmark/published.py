"""Win rates that others published, in per cent, on the real game at the same budgets.

They stand beside ours for comparison only: the simulator is not StarCraft II.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Rate(NamedTuple):
    mean: float
    deviation: float | None = None
    """Sample standard deviation over seeds, where given."""


Table = Mapping[str, Mapping[str, Rate]]
"""By map, then by title of the method."""

PAPER: Table = {
    "2s_vs_1sc": {
        "MA-JEPA": Rate(97.3, 2.5), "DMAWM": Rate(95.7, 5.9), "MAPPO": Rate(100.0, 0.0),
        "QMIX": Rate(13.7, 7.4), "MAT": Rate(51.3, 27.1),
    },
    "2s3z": {
        "MA-JEPA": Rate(78.7, 14.5), "DMAWM": Rate(88.0, 7.0), "MAPPO": Rate(8.0, 2.6),
        "QMIX": Rate(31.3, 24.5), "MAT": Rate(16.5, 9.2),
    },
    "8m": {
        "MA-JEPA": Rate(92.0, 1.0), "DMAWM": Rate(92.0, 4.6), "MAPPO": Rate(65.7, 33.1),
        "QMIX": Rate(83.0, 10.1), "MAT": Rate(26.0, 22.6),
    },
    "MMM": {
        "MA-JEPA": Rate(91.0, 3.0), "DMAWM": Rate(90.0, 4.6), "MAPPO": Rate(20.7, 17.0),
        "QMIX": Rate(3.0, 2.6), "MAT": Rate(0.0, 0.0),
    },
    "so_many_baneling": {
        "MA-JEPA": Rate(95.0, 6.1), "DMAWM": Rate(99.5, 0.7), "MAPPO": Rate(77.0, 7.2),
        "QMIX": Rate(21.7, 18.0), "MAT": Rate(32.0, 24.3),
    },
    "3s_vs_4z": {
        "MA-JEPA": Rate(74.0, 7.5), "DMAWM": Rate(95.7, 2.3), "MAPPO": Rate(0.0, 0.0),
        "QMIX": Rate(0.0, 0.0), "MAT": Rate(0.0, 0.0),
    },
    "2c_vs_64zg": {
        "MA-JEPA": Rate(78.3, 9.5), "DMAWM": Rate(75.3, 8.9), "MAPPO": Rate(0.0, 0.0),
        "QMIX": Rate(0.0, 0.0), "MAT": Rate(0.0, 0.0),
    },
    "corridor": {
        "MA-JEPA": Rate(66.0, 3.5), "DMAWM": Rate(50.0, 44.9), "MAPPO": Rate(0.0, 0.0),
        "QMIX": Rate(0.0, 0.0), "MAT": Rate(0.0, 0.0),
    },
}  # fmt: skip
"""Table 1 of the MA-JEPA paper."""

MARIE: Table = {
    "2m_vs_1z": {"MAPPO": Rate(86.7)},
    "2s_vs_1sc": {"MAPPO": Rate(100.0, 0.0), "QMIX": Rate(0.0)},
    "2s3z": {"MAPPO": Rate(31.2, 12.9), "QMIX": Rate(37.7, 15.5)},
    "3m": {"MAPPO": Rate(80.5)},
    "3s_vs_3z": {"MAPPO": Rate(1.2)},
    "8m": {"MAPPO": Rate(70.3, 19.5), "QMIX": Rate(69.5, 12.8)},
    "MMM": {"MAPPO": Rate(5.5, 4.5), "QMIX": Rate(31.1, 17.3)},
    "so_many_baneling": {"MAPPO": Rate(43.8, 15.0), "QMIX": Rate(20.0, 8.9)},
    "3s_vs_4z": {"MAPPO": Rate(0.0), "QMIX": Rate(0.0)},
    "2c_vs_64zg": {"MAPPO": Rate(7.8, 10.2), "QMIX": Rate(0.5)},
    "corridor": {"MAPPO": Rate(0.4, 0.7), "QMIX": Rate(0.0)},
}
"""Baselines as measured by the authors of MARIE."""

TITLES = {"majepa": "MA-JEPA", "mappo": "MAPPO", "qmix": "QMIX", "mat": "MAT"}
"""Of our algorithms in these tables."""
SOURCES: Mapping[str, Table] = {"paper": PAPER, "MARIE": MARIE}
