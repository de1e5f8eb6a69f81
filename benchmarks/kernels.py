"""What a learner call of MA-JEPA is made of on a GPU, seen on a machine that has none.

    uv run --extra cuda python benchmarks/kernels.py --env 2s3z --list 20

Compiles the programs of a call for an H200 that is only described, without the library's trials of
its kernels, and prints one JSON line for each: kernels (those of loops as often as they run, of
branches those of the last one), what they read and write, and a rough guess of their time, a
microsecond for each and three terabytes a second. A kernel that writes into a part of an array is
counted with all of it, and one that works within caches, or multiplies much, takes another time: a
guess is good for comparing two versions, and for finding what is there that should not be.
`--parts` adds a line for each part of a program, a named scope of the package, `--list` the groups
of equal kernels that take longest by that guess.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator

# Before JAX is loaded: its plugin for NVIDIA's cards would look for one.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from compiled import H200, Kernel, kernels_of, part_of
from jax.experimental import topologies
from jax.sharding import use_abstract_mesh

from majepa.agent import Majepa
from majepa.algorithm import shapes_on
from majepa.call_by_call import CallByCall
from majepa.config import preset
from majepa.envs import make_env
from majepa.flat import flattened

CARD = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 12 } runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="2s3z")
    parser.add_argument("--preset", default="paper")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", nargs="+", help="programs whose names hold one of these words")
    parser.add_argument("--parts", action="store_true", help="a line for each part, too")
    parser.add_argument("--list", type=int, default=0, help="groups of kernels to show")
    options = parser.parse_args()
    for name, text in programs(options.env, options.preset, options.seeds, options.only):
        found = Counter(kernels_of(text))
        shared = {"env": options.env, "preset": options.preset, "seeds": options.seeds}
        print(json.dumps({"program": name, **summed(found), **shared}), flush=True)
        if options.parts:
            by_part: dict[str, Counter[Kernel]] = defaultdict(Counter)
            for one, times in found.items():
                by_part[part_of(one.source)][one] = times
            for part, own in by_part.items():
                print(json.dumps({"program": name, "part": part, **summed(own)}), flush=True)
        longest = sorted(found.items(), key=lambda item: -item[0].guess * item[1])
        for one, times in longest[: options.list]:
            print(f"  {one.guess * times:9.1f} us {times:5} x {one.kind:24.24} {one.shape:44.44} "
                  f"{one.source[-60:]}")  # fmt: skip


def summed(found: Counter[Kernel]) -> dict[str, float]:
    return {
        "kernels": sum(found.values()),
        "gib": round(sum(one.bytes * times for one, times in found.items()) / 2**30, 3),
        "guess_ms": round(sum(one.guess * times for one, times in found.items()) / 1e3, 3),
    }


def programs(env: str, size: str, seeds: int, words: list[str] | None) -> Iterator[tuple[str, str]]:
    """Names and compiled texts; of several that differ in lengths alone, all."""
    jax.devices()  # Loads the plugin that knows such cards.
    card = topologies.get_topology_desc("cuda", "cuda", target_config=CARD, topology="1x1x1")
    config = preset("majepa", size, env)
    algorithm = Majepa(config.algo, make_env(config.env).spec, steps=config.steps)  # pyright: ignore
    held = (jax.eval_shape(algorithm.init, jax.random.key(0)), jax.eval_shape(jax.random.key, 0))
    if seeds > 1:
        held = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((seeds, *leaf.shape), leaf.dtype), held
        )
    learner, key = shapes_on(card.devices[0], held)
    updater = CallByCall(algorithm, together=seeds > 1)
    with use_abstract_mesh(H200):
        found = [one.lowered for one in updater.programs_of_calls(flattened(learner), key)]
    for lowered in found:
        name = re.search(r"module @jit_+(\w+)", lowered.as_text()[:200])
        name = "?" if name is None else name[1]
        if words is None or any(word in name for word in words):
            options = {"xla_gpu_autotune_level": 0}
            yield name, lowered.compile(compiler_options=options).as_text()  # pyright: ignore


if __name__ == "__main__":
    main()
