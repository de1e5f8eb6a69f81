"""Confirm a run's win rate on fresh episodes, with seeds that no evaluation of it has used.

    uv run python benchmarks/confirm.py runs/majepa-3m-0-1 --seed 99 --episodes 100

Prints one JSON line: argmax and sampled rates with their 95 % intervals, and the transitions that
the checkpoint was trained for.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jax

from majepa.envs import make_env
from majepa.evaluation import EVALUATION_SEED, evaluate
from majepa.run_folder import read_config
from majepa.training import load_run, make_algorithm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--seed", type=int, default=99)
    parser.add_argument("--episodes", type=int, default=100)
    options = parser.parse_args()
    if options.seed == EVALUATION_SEED:
        parser.error("that seed is the one runs are evaluated with; choose another")
    config = read_config(options.run)
    env = make_env(config.env)
    algorithm = make_algorithm(config, env.spec)
    state = load_run(options.run, config, algorithm, env)
    line = {"run": options.run.name, "env": config.env, "transitions": int(state.transitions)}
    for name, greedy in (("argmax", True), ("sampled", False)):
        played = evaluate(
            algorithm,
            env,
            state.learner,
            episodes=options.episodes,
            key=jax.random.key(options.seed),
            greedy=greedy,
        )
        line[name] = round(played.win_rate, 3)
        line[f"{name}_interval"] = [round(bound, 3) for bound in played.interval]
        line[f"{name}_return"] = round(played.mean_return, 2)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
