"""What `majepa doctor` looks at: the packages, devices and memory of this very machine."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from .checks import DeviceInfo, Memory, Played

CUDA_PLUGIN = re.compile(r"jax-cuda\d+-(plugin|pjrt)")
CGROUP = Path("/sys/fs/cgroup")


def installed_packages() -> dict[str, str]:
    """Versions by name, in the spelling that all names are compared in."""
    return {
        canonicalize_name(distribution.name): distribution.version
        for distribution in importlib.metadata.distributions()
    }


def cuda_plugins(installed: Mapping[str, str]) -> dict[str, str]:
    """Versions of the packages that bring CUDA to JAX."""
    return {name: installed[name] for name in installed if CUDA_PLUGIN.fullmatch(name)}


def nvidia_gpu() -> str | None:
    """By what an NVIDIA GPU shows, if there is one."""
    listed = _nvidia_smi()
    if listed.startswith("GPU "):
        return listed.splitlines()[0].partition(" (UUID")[0]
    for place in (Path("/dev/nvidia0"), Path("/proc/driver/nvidia/gpus")):
        if place.exists():
            return str(place)
    return None


def _nvidia_smi(*query: str) -> str:
    """What the program answers, a line for each GPU, or nothing."""
    if not shutil.which("nvidia-smi"):
        return ""
    try:
        answer = subprocess.run(
            ["nvidia-smi", *(query or ("-L",))],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def usable_gpus() -> list[str]:
    """NVIDIA GPUs that JAX would compute on, as `CUDA_VISIBLE_DEVICES` names them.

    Asks neither JAX nor CUDA, so that nothing is started on them.
    """
    platforms = os.environ.get("JAX_PLATFORMS") or "cuda"
    asked = platforms.partition(",")[0] in ("cuda", "gpu")
    if not asked or nvidia_gpu() is None or not cuda_plugins(installed_packages()):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name not in ("", "-1")]
    return [str(index) for index in range(max(1, _listed_gpus()))]


def _listed_gpus() -> int:
    listed = _nvidia_smi()
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def gpu_memory() -> int | None:
    """Bytes of the smallest NVIDIA GPU, none if they are not told.

    Of the smallest: CUDA need not number the GPUs as they are listed.
    """
    listed = _nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    return min(
        (int(line) << 20 for line in listed.splitlines() if line.strip().isdigit()), default=None
    )


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def jax_devices() -> list[DeviceInfo]:
    """Those that JAX computes on; starts its backend."""
    import jax

    return [
        DeviceInfo(device.platform, device.device_kind, _memory_of(device))
        for device in jax.local_devices()
    ]


def _memory_of(device: Any) -> Memory | None:
    stats = device.memory_stats() if device.platform != "cpu" else None
    if not stats or "bytes_limit" not in stats:
        return None
    total = stats["bytes_limit"]
    return Memory(total, total - stats.get("bytes_in_use", 0))


def device_memory() -> Memory | None:
    """Of the device that JAX computes on; none where it has none of its own."""
    import jax

    return _memory_of(jax.local_devices()[0])


def device_peak() -> int | None:
    """The most bytes that were ever in use on the device, where it tells."""
    import jax

    stats = jax.local_devices()[0].memory_stats()
    return (stats or {}).get("peak_bytes_in_use")


def host_memory() -> Memory | None:
    """Of the machine, or of the container if that may have less."""
    table = Path("/proc/meminfo")
    if table.exists():
        numbers = _numbers(table)
        memory = Memory(1024 * numbers["MemTotal"], 1024 * numbers["MemAvailable"])
        return _within_container(memory)
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" in names and "SC_PAGE_SIZE" in names:
        # What is available is not told here; most of it can be taken.
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Memory(total, total)
    return None


def _within_container(memory: Memory) -> Memory:
    limit = CGROUP / "memory.max"
    if not limit.exists() or not limit.read_text().strip().isdigit():
        return memory
    total = int(limit.read_text())
    # Cached files go when memory is asked for.
    used = int((CGROUP / "memory.current").read_text())
    used -= _numbers(CGROUP / "memory.stat").get("inactive_file", 0)
    return Memory(min(memory.total, total), min(memory.available, max(0, total - used)))


def _numbers(table: Path) -> dict[str, int]:
    """Lines such as `MemTotal: 123 kB` as numbers by name."""
    rows = (line.replace(":", " ").split() for line in table.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def ffmpeg() -> str | None:
    """The program that writes .mp4."""
    try:
        import imageio_ffmpeg

        return imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError):
        return None


def play_3m(num_envs: int = 256, steps: int = 20) -> Played:
    """Random legal actions in the simulator, compiled as one program."""
    import jax
    import jax.numpy as jnp

    from .envs.make import make_env

    env = make_env("sim:3m")

    def advance(carry, key):
        state, row = carry
        state, row = env.step(state, jax.random.categorical(key, jnp.log(row.legal * 1.0)))
        finite = jnp.isfinite(row.observation).all() & jnp.isfinite(row.reward).all()
        return (state, row), (finite, row.legal.any(-1).all())

    def play(key):
        key_reset, key_act = jax.random.split(key)
        begun = env.reset(jax.random.split(key_reset, num_envs))
        _, shown = jax.lax.scan(advance, begun, jax.random.split(key_act, steps))
        return jax.tree.map(jnp.all, shown)

    key = jax.random.key(0)
    started = time.perf_counter()
    program = jax.jit(play).lower(key).compile()
    compiled = time.perf_counter()
    jax.block_until_ready(program(key))
    warm = time.perf_counter()
    finite, legal = jax.device_get(program(key))
    seconds = time.perf_counter() - warm
    return Played(bool(finite), bool(legal), num_envs * steps / seconds, compiled - started)
