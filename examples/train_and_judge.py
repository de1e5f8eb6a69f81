"""Train a small run, judge it on other battles than the usual ones, and look at its log.

python examples/train_and_judge.py runs/first
"""

import json
import sys
from pathlib import Path

import majepa


def main(folder: Path, algorithm: str = "majepa", **options) -> float:
    result = majepa.train(algorithm, "sim:3m", folder=folder, **options)
    print(f"trained for {result.transitions:,} transitions in {result.seconds:.0f} s")

    judged = majepa.evaluate(folder, seed=7)
    low, high = judged.argmax.interval
    print(f"wins {judged.argmax.win_rate:.0%} [{low:.0%}, {high:.0%}] of its battles")

    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "evaluation/win_rate" in record:
            print(f"{record['transitions']:>8,}  {record['evaluation/win_rate']:.0%}")
    return judged.argmax.win_rate


if __name__ == "__main__":
    main(Path(sys.argv[1]))
