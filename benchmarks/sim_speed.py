"""Environment steps per second of the simulator, beside SMAX where SMAX has the map.

Both run in this process, on the same device, with random legal actions, inside one compiled scan.
A checksum of observations, states, masks and rewards leaves the scan, so nothing is optimised away.
Prints one JSON line per measurement; the two alternate and each reports its best repeat.

    uv run --with jaxmarl python benchmarks/sim_speed.py --maps 2s3z 3s_vs_5z --envs 1024
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from majepa.envs import make_env
from majepa.envs.sim import SIM_VERSION


def ours(map_name: str, envs: int, steps: int) -> tuple[Callable, Callable]:
    env = make_env(map_name)

    def start(key):
        return env.reset(jax.random.split(key, envs))

    def play(carry, key):
        def step(carry, key):
            (state, row), total = carry
            state, row = env.step(state, random_legal(row.legal, key))
            total += row.observation.sum() + row.state.sum() + row.legal.sum() + row.reward.sum()
            return ((state, row), total), None

        keys = jax.random.split(key, steps)
        return jax.lax.scan(step, (carry, jnp.float32(0)), keys)[0]

    return start, play


def smax(map_name: str, envs: int, steps: int) -> tuple[Callable, Callable]:
    with silent_stdout():
        from jaxmarl.environments.smax import HeuristicEnemySMAX, map_name_to_scenario

    env = HeuristicEnemySMAX(scenario=map_name_to_scenario(map_name))

    def start(key):
        return jax.vmap(env.reset)(jax.random.split(key, envs))

    def play(carry, key):
        def step(carry, key):
            (observation, state), total = carry
            key_act, key_step = jax.random.split(key)
            legal = jax.vmap(env.get_avail_actions)(state)
            keys = jax.random.split(key_act, len(legal))
            action = {
                agent: random_legal(mask, key_agent)
                for (agent, mask), key_agent in zip(legal.items(), keys, strict=True)
            }
            keys_step = jax.random.split(key_step, envs)
            observation, state, reward, _, _ = jax.vmap(env.step)(keys_step, state, action)
            for tree in (observation, legal, reward):
                total += sum(leaf.sum() for leaf in jax.tree.leaves(tree))
            return ((observation, state), total), None

        keys = jax.random.split(key, steps)
        return jax.lax.scan(step, (carry, jnp.float32(0)), keys)[0]

    return start, play


@contextlib.contextmanager
def silent_stdout() -> Iterator[None]:
    """jaxmarl prints when imported, past any replacement of `sys.stdout`."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def random_legal(legal: jax.Array, key: jax.Array) -> jax.Array:
    score = jax.random.uniform(key, legal.shape)
    return jnp.argmax(jnp.where(legal, score, -1.0), axis=-1).astype(jnp.int32)


class Contestant:
    """One simulator, compiled and started; each `measure` plays on from where the last ended."""

    def __init__(self, start: Callable, play: Callable, envs: int, steps: int):
        self.transitions = envs * steps
        begun = time.perf_counter()
        self.carry = jax.block_until_ready(jax.jit(start)(jax.random.key(0)))
        self.play = jax.jit(play, donate_argnums=0)
        self.carry, self.checksum = jax.block_until_ready(self.play(self.carry, jax.random.key(1)))
        self.first_call = time.perf_counter() - begun
        self.best = 0.0

    def measure(self, repeat: int) -> None:
        begun = time.perf_counter()
        key = jax.random.key(repeat + 2)
        self.carry, self.checksum = jax.block_until_ready(self.play(self.carry, key))
        self.best = max(self.best, self.transitions / (time.perf_counter() - begun))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--maps", nargs="+", default=["2s3z", "3s_vs_5z"])
    parser.add_argument("--envs", nargs="+", type=int, default=[1024])
    parser.add_argument("--steps", type=int, default=50, help="steps of one timed scan")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-smax", action="store_true", help="measure ours alone")
    arguments = parser.parse_args()
    for map_name in arguments.maps:
        for envs in arguments.envs:
            steps = arguments.steps
            mine = Contestant(*ours(map_name, envs, steps), envs, steps)
            peer = None
            if not arguments.no_smax:
                with contextlib.suppress(KeyError):  # SMAX does not have every map
                    peer = Contestant(*smax(map_name, envs, steps), envs, steps)
            for repeat in range(arguments.repeats):
                mine.measure(repeat)
                if peer:
                    peer.measure(repeat)
            report(map_name, envs, mine, peer)


def report(map_name: str, envs: int, mine: Contestant, peer: Contestant | None) -> None:
    line = {
        "map": map_name,
        "envs": envs,
        "device": jax.devices()[0].device_kind,
        "ours": round(mine.best),
        "smax": round(peer.best) if peer else None,
        "ratio": round(mine.best / peer.best, 2) if peer else None,
        "first_call_s": round(mine.first_call, 1),
        "checksum": float(mine.checksum),
        "smax_checksum": float(peer.checksum) if peer else None,
        "sim_version": SIM_VERSION,
        "jax": jax.__version__,
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
