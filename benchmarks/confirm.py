"""Confirm a run's win rate on fresh episodes, with seeds that no evaluation of it has used.

    uv run python benchmarks/confirm.py runs/majepa-3m-0-1 --seed 99 --episodes 100

The same as `majepa evaluate RUN --seed 99 --json`, but it refuses the seed that runs are judged by.
"""

from __future__ import annotations

import argparse
import sys

from majepa.cli import main as majepa
from majepa.evaluation import EVALUATION_SEED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--seed", type=int, default=99)
    parser.add_argument("--episodes", type=int, default=100)
    options = parser.parse_args()
    if options.seed == EVALUATION_SEED:
        parser.error("that seed is the one runs are evaluated with; choose another")
    sys.argv = [
        "majepa", "evaluate", options.run, "--json",
        "--seed", str(options.seed), "--episodes", str(options.episodes),
    ]  # fmt: skip
    majepa()


if __name__ == "__main__":
    main()
