"""Stands for the process that works on a job, without any training.

    python fake_work.py ROOT/jobs/JOB.json

`ROOT/plan.json` says, by job, what its attempts do, the last one again and again: `finish`, `fail`,
`die`, `nothing`, or `wait` until a signal or the end of the parent, and then `save`.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

STOPPED = 75


def main(path: Path) -> int:
    root = path.parents[1]
    job = json.loads(path.read_text())
    plan = json.loads((root / "plan.json").read_text()).get(job["job"], ["finish"])
    tries = root / f"{job['job']}.tries"
    number = len(tries.read_text()) if tries.exists() else 0
    tries.write_text("x" * (number + 1))
    print(f"attempt {number + 1} of {job['job']}", flush=True)
    return ACTIONS[plan[min(number, len(plan) - 1)]](root, job)


def finish(root: Path, job: dict) -> int:
    for name, config in job["cells"].items():
        folder = root / "cells" / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        episodes = config["evaluation"]["final_episodes"]
        lines = [
            json.dumps({"kind": "final", "actions": actions, "won": True})
            for actions in ("argmax", "sampled")
            for _ in range(episodes)
        ]
        (folder / "evaluations.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "metrics.jsonl").write_text('{"transitions": 2000, "kind": "final"}\n')
    return 0


def fail(root: Path, job: dict) -> int:
    print("the weights are too heavy")
    return 3


def die(root: Path, job: dict) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def wait(root: Path, job: dict) -> int:
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    threading.Thread(target=lambda: (sys.stdin.read(), asked.set()), daemon=True).start()
    (root / f"{job['job']}.ready").write_text(str(os.getpid()))
    asked.wait()
    (root / f"{job['job']}.saved").touch()
    return STOPPED


def stubborn(root: Path, job: dict) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (root / f"{job['job']}.ready").write_text(str(os.getpid()))
    threading.Event().wait()
    return 0


ACTIONS = {
    "finish": finish, "fail": fail, "die": die, "wait": wait, "stubborn": stubborn,
    "nothing": lambda root, job: 0,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
