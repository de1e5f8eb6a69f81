"""How long one agent takes for one step on this machine, beside the floor of an empty program.

    uv run python benchmarks/act.py --presets small paper

Prints one JSON line per preset: the median and the slowest twentieth of the steps in ms, and the
median of a compiled program that does nothing, measured in between.
"""

from __future__ import annotations

import argparse
import json
import time

import jax
import numpy as np

from majepa.config import preset
from majepa.envs import make_env
from majepa.team import OpenRun, Policy
from majepa.training import RunState, make_algorithm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--presets", nargs="+", default=["small", "paper"])
    parser.add_argument("--env", default="sim:3m")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    env = make_env(options.env)
    for name in options.presets:
        config = preset("majepa", name, options.env)
        algorithm = make_algorithm(config, env.spec)
        learner = jax.jit(algorithm.init)(jax.random.key(0))
        state = RunState(learner, None, jax.random.key(0), transitions=0, updates=0)  # type: ignore[arg-type]
        policy = Policy(OpenRun(config, env, algorithm, state))
        step, floor = measure(policy, options.steps)
        line = {
            "preset": name,
            "env": options.env,
            "device": jax.devices()[0].device_kind,
            "median_ms": round(float(np.median(step)), 3),
            "p95_ms": round(float(np.quantile(step, 0.95)), 3),
            "floor_ms": round(float(np.median(floor)), 3),
        }
        print(json.dumps(line), flush=True)


def measure(policy: Policy, steps: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each step of an agent, and of an empty program right after it."""
    rng = np.random.default_rng(0)
    legal = np.ones(policy.spec.num_actions, bool)
    nothing = jax.jit(lambda x: x + 1)
    state = policy.begin(0)
    spent, floor = [], []
    for number in range(steps + 5):
        observation = rng.normal(size=policy.spec.observation_size).astype(np.float32)
        key = jax.random.key(number)
        started = time.perf_counter()
        acted = policy.act(observation, legal, state, key)
        between = time.perf_counter()
        int(nothing(np.int32(number)))
        ended = time.perf_counter()
        state = acted.state
        if number >= 5:
            spent.append(1e3 * (between - started))
            floor.append(1e3 * (ended - between))
    return spent, floor


if __name__ == "__main__":
    main()
