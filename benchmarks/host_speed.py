"""Steps per second of one `StarCraft2Env` in a plain Python loop: one JSON line per map.

Each step asks for legal actions, observations and the state, as SMAC's training loops do, and plays
a random legal action for every agent. Run it with `python benchmarks/host_speed.py [seconds]`.
"""

from __future__ import annotations

import json
import random
import sys
import time

from majepa.envs.smac_api import StarCraft2Env

MAPS = ("3m", "2s3z", "MMM")


def measure(map_name: str, seconds: float) -> dict[str, str | float]:
    start = time.perf_counter()
    env = StarCraft2Env(map_name=map_name, seed=0)
    env.reset()
    setup = time.perf_counter() - start
    dice = random.Random(0)
    num_steps = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        legal = env.get_avail_actions()
        env.get_obs()
        env.get_state()
        actions = [dice.choice([k for k, can in enumerate(row) if can]) for row in legal]
        _, terminated, _ = env.step(actions)
        num_steps += 1
        if terminated:
            env.reset()
    rate = num_steps / (time.perf_counter() - start)
    return {"map": map_name, "steps_per_second": round(rate), "setup_seconds": round(setup, 2)}


if __name__ == "__main__":
    duration = float(sys.argv[1]) if len(sys.argv) > 1 else 5.0
    for name in MAPS:
        print(json.dumps(measure(name, duration)), flush=True)
