"""Seconds from nothing to the first step of every map, in a fresh process each.

Includes importing, path tables, compiling `reset` and `step`, and running both once.
Prints one JSON line per map.

    uv run python benchmarks/first_step.py --envs 64
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

from majepa.envs.sim import SCENARIOS

CODE = """
import jax, jax.numpy as jnp
from majepa.envs import make_env
env = make_env({name!r})
state, row = jax.jit(env.reset)(jax.random.split(jax.random.key(0), {envs}))
action = jnp.argmax(row.legal, axis=-1).astype(jnp.int32)
jax.block_until_ready(jax.jit(env.step)(state, action))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--maps", nargs="+", default=list(SCENARIOS), choices=list(SCENARIOS))
    parser.add_argument("--envs", type=int, default=64)
    arguments = parser.parse_args()
    for name in arguments.maps:
        begun = time.perf_counter()
        code = CODE.format(name=name, envs=arguments.envs)
        subprocess.run([sys.executable, "-c", code], check=True)
        seconds = round(time.perf_counter() - begun, 1)
        print(json.dumps({"map": name, "envs": arguments.envs, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
