"""How far a world model can be trusted: its own predictions against what happened, by horizon.

python examples/trust_the_model.py runs/majepa-3m-0-1
"""

import json
import sys
from pathlib import Path

QUESTIONS = {
    "reward_error": "error of the reward",
    "cont_error": "error of the continuation",
    "alive_error": "survival foretold wrongly",
    "illegal": "imagined actions that are illegal",
    "similarity": "similarity of embeddings",
}


def main(run: Path) -> dict[str, list[float]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    measured = [json.loads(line) for line in lines if '"rollout/' in line]
    if not measured:
        sys.exit(f"{run} has measured nothing yet: its learner was not called, or is no MA-JEPA")
    last = measured[-1]
    print(f"after {last['transitions']:,} transitions, 1 to 5 steps ahead:")
    table = {}
    for name, meaning in QUESTIONS.items():
        steps = [last[f"rollout/{name}_{k}"] for k in range(1, 6) if f"rollout/{name}_{k}" in last]
        print(f"{meaning:36}", *(f"{value:8.3f}" for value in steps))
        table[name] = steps
    return table


if __name__ == "__main__":
    main(Path(sys.argv[1]))
