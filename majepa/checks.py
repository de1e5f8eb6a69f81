"""What `majepa doctor` checks: each check judges what it is given and looks at nothing itself."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

State = Literal["ok", "note", "problem"]
CHECKPOINTS = 3
"""The last, the best, and the one being written."""
COPIES = 2
"""A checkpoint is copied to the host before it is written: twice the state is there at a time."""


@dataclasses.dataclass(frozen=True)
class Check:
    name: str
    state: State
    seen: str
    fix: str = ""
    """What to do about it, in one line; empty if there is nothing to do."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """In bytes."""

    total: int
    available: int


@dataclasses.dataclass(frozen=True)
class DeviceInfo:
    platform: str
    kind: str
    memory: Memory | None
    """None where it has none of its own and takes the host's."""


@dataclasses.dataclass(frozen=True)
class RunSize:
    """What the state of a run takes."""

    parts: Mapping[str, int]
    """Bytes by part."""
    replay_rows: int
    """Rows that the replay holds over all environments; 0 without a replay."""
    may_leave: bool = False
    """Whether the replay goes to the host where the device cannot hold it."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclasses.dataclass(frozen=True)
class Played:
    """What a short battle showed."""

    finite: bool
    legal: bool
    """Every agent had a legal action at all times."""
    steps_per_second: float
    compile_seconds: float


def check_python(version: str, requires: str) -> Check:
    seen = f"{version}; majepa needs {requires}"
    if SpecifierSet(requires).contains(version, prereleases=True):
        return Check("python", "ok", seen)
    return Check("python", "problem", seen, "`uv run --python 3.12 majepa ...` brings another one")


def check_packages(requirements: Sequence[str], installed: Mapping[str, str]) -> list[Check]:
    """Against the bounds that majepa declares; one line if all is well, else one for each.

    `installed`: versions by canonical name.
    """
    bad, good = [], [f"majepa {installed.get('majepa')}"]
    for requirement in map(Requirement, requirements):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, bounds = requirement.name, requirement.specifier
        version = installed.get(canonicalize_name(name))
        upgrade = f"`uv sync`, or `pip install '{name}{bounds}'`"
        if version is None:
            bad.append(Check(name, "problem", f"not installed; majepa needs {bounds}", upgrade))
        elif not bounds.contains(version, prereleases=True):
            bad.append(Check(name, "problem", f"{version}; majepa needs {bounds}", upgrade))
        else:
            good.append(f"{name} {version}")
    return bad or [Check("packages", "ok", ", ".join(good))]


def check_backend(
    devices: Sequence[DeviceInfo],
    gpu: str | None,
    plugins: Mapping[str, str],
    variables: Mapping[str, str],
) -> Check:
    """Whether JAX uses the best of the machine; `gpu` says by what an NVIDIA GPU was noticed."""
    names = ", ".join(_describe(device) for device in devices)
    if gpu is None or any(device.platform != "cpu" for device in devices):
        return Check("jax", "ok", f"computes on {names}")
    hiding = _hiding(variables)
    if hiding:
        seen = f"computes on the CPU, as {hiding} says, beside an NVIDIA GPU ({gpu})"
        return Check("jax", "note", seen, f"unset {hiding.partition('=')[0]} to use the GPU")
    seen = f"COMPUTES ON THE CPU although the machine has an NVIDIA GPU ({gpu})"
    if not plugins:
        fix = "`uv run --extra cuda majepa ...`, or `pip install '.[cuda]'`"
    else:
        fix = (
            f"{_listed(plugins)} found no GPU to use: CUDA 13 needs driver 580 or newer "
            "(`nvidia-smi` shows it), CUDA 12 needs 525: `pip install 'jax[cuda12]'`"
        )
    return Check("jax", "problem", seen, fix)


def fix_of_start(variables: Mapping[str, str]) -> str:
    """What to do when JAX finds no backend at all."""
    platforms = variables.get("JAX_PLATFORMS")
    if platforms:
        return f"unset JAX_PLATFORMS, or install what {platforms} needs (`pip install '.[cuda]'`)"
    return "`pip install --upgrade --force-reinstall jax jaxlib`"


def check_plugins(jaxlib: str, plugins: Mapping[str, str]) -> Check:
    """A CUDA plugin of another version than jaxlib's is not used by JAX."""
    wrong = {
        name: version
        for name, version in plugins.items()
        if Version(version).release != Version(jaxlib).release
    }
    if wrong:
        cuda = max(re.findall(r"cuda\d+", " ".join(wrong)))
        return Check(
            "cuda plugin",
            "problem",
            f"{_listed(wrong)} beside jaxlib {jaxlib}: JAX leaves a plugin of another version out",
            f"`uv sync --extra cuda`, or `pip install --upgrade 'jax[{cuda}]=={jaxlib}'`",
        )
    seen = f"{_listed(plugins)}, as jaxlib" if plugins else "none installed"
    return Check("cuda plugin", "ok", seen)


MEANINGS: Mapping[str, str] = {
    "JAX_PLATFORMS": "JAX uses these platforms alone and fails if the first is not there",
    "JAX_DISABLE_JIT": "nothing is compiled: thousands of times slower",
    "JAX_ENABLE_X64": "numbers have 64 bits where 32 are meant: slower, and other results",
    "CUDA_VISIBLE_DEVICES": "JAX sees these GPUs alone; empty or -1 hides all",
    "XLA_FLAGS": "changes how programs are compiled; results may differ in the last digits",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false: GPU memory is taken when it is needed, which is "
    "slower and may run out late; JAX otherwise takes three quarters at once",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "share of the GPU's memory that JAX takes at once; 0.75 "
    "if not set",
    "MAJEPA_KERNELS": "0: GPUs compute the recurrence with XLA's kernels, about half as fast",
}


def check_variables(variables: Mapping[str, str]) -> list[Check]:
    """Environment variables that change what JAX does."""
    found = [
        Check("variable", "note", f"{name}={variables[name]}: {meaning}")
        for name, meaning in MEANINGS.items()
        if name in variables
    ]
    return found or [Check("variables", "ok", "none that changes what JAX does")]


def check_cache(folder: Path | None, unusable: str | None, held: int) -> Check:
    """Where compiled programs are kept; `held`: bytes of those that are there."""
    if folder is None:
        fix = "unset JAX_COMPILATION_CACHE_DIR and JAX_ENABLE_COMPILATION_CACHE to keep them"
        return Check("compiled programs", "note", "not kept: every run compiles anew", fix)
    if unusable:
        fix = "JAX_COMPILATION_CACHE_DIR names another folder"
        return Check("compiled programs", "note", f"not kept: {unusable}", fix)
    seen = f"kept in {folder} ({in_bytes(held)}), which may be removed at any time"
    return Check("compiled programs", "ok", seen)


def check_host_memory(memory: Memory | None) -> Check:
    if memory is None:
        return Check("host memory", "note", "this system does not say how much there is")
    seen = f"{in_bytes(memory.available)} available of {in_bytes(memory.total)}"
    return Check("host memory", "ok", seen)


def check_run_memory(
    run: str,
    size: RunSize,
    devices: Sequence[DeviceInfo],
    host: Memory | None,
    smaller_preset: str | None = None,
) -> list[Check]:
    """Whether the state of a run fits where it is held, and its copy where it is saved from."""
    parts = ", ".join(f"{name} {in_bytes(part)}" for name, part in _largest_first(size.parts))
    what = f"{run}: {in_bytes(size.total)} ({parts})"
    on_device = [device.memory for device in devices if device.memory is not None]
    if not on_device and host is None:
        return [Check("run memory", "note", f"{what}; how much is available is not known")]
    saved = f"{in_bytes(COPIES * size.total)} while it is saved"
    on_the_way = "what the learner computes on the way (activations) comes on top"
    checks = []
    if on_device:
        available = min(memory.available for memory in on_device)
        seen = f"{what}; {in_bytes(available)} available on the device; {on_the_way}"
        rest = size.total - size.parts.get("replay", 0)
        if size.may_leave and rest <= available < size.total:
            seen += "; the replay will lie in the host's memory, which is slower"
            checks.append(Check("run memory", "note", seen))
        else:
            checks.append(_fits("run memory", seen, size, available, smaller_preset, spare=2))
    if host is not None:
        seen = f"{saved}; {in_bytes(host.available)} available on the host"
        room = host.available // COPIES
        if on_device:
            checks.append(_fits("saving", seen, size, room, smaller_preset))
        else:
            seen = f"{what}, {seen}; {on_the_way}"
            checks.append(_fits("run memory", seen, size, room, smaller_preset, spare=2))
    return checks


def _fits(
    name: str, seen: str, size: RunSize, room: int, smaller_preset: str | None, spare: int = 1
) -> Check:
    """Whether a state fits into `room` bytes, or `spare` times so that others find room too."""
    if size.total > room:
        return Check(name, "problem", seen, _knob(size, room // spare, smaller_preset))
    if spare * size.total > room:
        return Check(name, "note", seen, _knob(size, room // spare, smaller_preset))
    return Check(name, "ok", seen)


def _knob(size: RunSize, room: int, smaller_preset: str | None) -> str:
    """The setting that would bring a state down to `room` bytes."""
    replay = size.parts.get("replay", 0)
    left = room - (size.total - replay)
    rows = left * size.replay_rows // replay if replay else 0
    knobs = []
    if rows >= size.replay_rows / 20:
        knobs.append(f"`--algo.replay.capacity {_rounded_down(rows)}`")
    if smaller_preset:
        knobs.append(f"`--preset {smaller_preset}`")
    return ", or ".join([*knobs, "a machine with more memory"])


def check_folder(parent: Path) -> Check:
    """Whether runs can be written below a folder, which need not exist yet."""
    place = nearest_folder(parent)
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        fix = "`majepa train --out FOLDER` with a folder that you may write into"
        return Check("run folder", "problem", f"cannot write into {place}: {error}", fix)
    return Check("run folder", "ok", f"{parent} can be written")


def nearest_folder(path: Path) -> Path:
    """The path itself or the closest one above it that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def check_disk(free: int, checkpoint: int) -> Check:
    """`checkpoint`: bytes of one."""
    needed = CHECKPOINTS * checkpoint
    seen = (
        f"{in_bytes(free)} free; checkpoints need {in_bytes(needed)} "
        f"({CHECKPOINTS} of {in_bytes(checkpoint)}: last, best, the one being written)"
    )
    if free >= needed:
        return Check("disk", "ok", seen)
    fix = "make room, or `majepa train --out FOLDER` on another disk"
    return Check("disk", "problem", seen, fix)


OPTIONAL: Mapping[str, tuple[str, str]] = {
    "tensorboardX": ("tensorboard", "`--log.tensorboard`"),
    "wandb": ("wandb", "`--log.wandb`"),
    "pettingzoo": ("pettingzoo", "`majepa.envs.parallel_env`"),
    "gymnasium": ("pettingzoo", "`majepa.envs.parallel_env`"),
    "ray": ("cluster", "`majepa benchmark --cluster`"),
}
"""Packages that majepa can do without: the extra that brings each, and what it is for."""


def check_optional(installed: Mapping[str, str], extras: Sequence[str]) -> list[Check]:
    """`extras`: those that the installed majepa declares."""
    checks = []
    for name, (extra, use) in OPTIONAL.items():
        version = installed.get(canonicalize_name(name))
        if version is not None:
            checks.append(Check(name, "ok", f"{version}, for {use}"))
            continue
        pip = f"`pip install '.[{extra}]'`" if extra in extras else f"`pip install {name}`"
        fix = f"`uv sync --extra {extra}`, or {pip}" if extra in extras else pip
        checks.append(Check(name, "note", f"not installed; for {use} alone", fix))
    return checks


def check_ffmpeg(program: str | None) -> Check:
    if program is None:
        fix = "`pip install --force-reinstall imageio-ffmpeg`, whose wheel has one inside"
        return Check("ffmpeg", "note", "none; `majepa watch` cannot write .mp4", fix)
    return Check("ffmpeg", "ok", f"{Path(program).name}, for .mp4")


def check_played(played: Played) -> Check:
    """Judge a short battle of the simulator."""
    faults = [
        *([] if played.finite else ["observations that are not finite"]),
        *([] if played.legal else ["agents without a legal action"]),
    ]
    if faults:
        fix = "another version of jax or of the CUDA plugin; please report it with `--json`"
        return Check("self-test", "problem", f"3m shows {' and '.join(faults)}", fix)
    seen = (
        f"3m plays {played.steps_per_second:,.0f} steps a second, "
        f"after {played.compile_seconds:.1f} s of compiling"
    )
    return Check("self-test", "ok", seen)


def in_bytes(size: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size:.0f} B"


def _describe(device: DeviceInfo) -> str:
    if device.memory is None:
        return device.kind
    return (
        f"{device.kind} ({in_bytes(device.memory.available)} available of "
        f"{in_bytes(device.memory.total)} for JAX)"
    )


def _hiding(variables: Mapping[str, str]) -> str | None:
    """The variable that keeps JAX from a GPU, with its value."""
    platforms = variables.get("JAX_PLATFORMS", "")
    if platforms and platforms.split(",")[0] == "cpu":
        return f"JAX_PLATFORMS={platforms}"
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    return f"CUDA_VISIBLE_DEVICES={visible}" if visible in ("", "-1") else None


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _largest_first(parts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(parts.items(), key=lambda item: -item[1])


def _rounded_down(number: int) -> int:
    """To two digits."""
    scale = 10 ** max(0, len(str(number)) - 2)
    return number // scale * scale
