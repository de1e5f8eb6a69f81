"""What a program for a GPU launches, read from the text that it was compiled to.

Its parts are the named scopes of the package; a kernel belongs to the innermost one.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from jax.sharding import AbstractDevice, AbstractMesh

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda"))
"""What programs are lowered for where there is none: kernels that are written by hand ask for it,
from JAX 0.11 on. Within `jax.sharding.use_abstract_mesh`."""
PARTS = (
    "context", "states", "latents", "gradients_of_latents", "local_losses", "joint_losses",
    "ahead_losses", "self_fed", "optimizer", "roots", "imagination", "advantages", "actor",
    "critic",
)  # fmt: skip
REST = "rest"
BYTES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "s8": 1, "u8": 1, "s64": 8, "u64": 8,
         "s16": 2, "u16": 2, "f16": 2}  # fmt: skip
LAUNCHED = {"fusion", "custom-call", "copy", "sort", "scatter", "reduce", "transpose"}
LAUNCH_US, BYTES_A_US = 1.0, 3e6
NO_KERNEL = re.compile(r'custom_call_target="AllocateBuffer"')
"""Memory alone."""
SCRATCH = re.compile(r"s8\[33554432\]")
"""Of the library's products; hardly used."""


class Kernel(NamedTuple):
    """One launch, or several alike."""

    kind: str
    shape: str
    source: str
    bytes: int

    @property
    def guess(self) -> float:
        """Microseconds."""
        return LAUNCH_US + self.bytes / BYTES_A_US


class Instruction(NamedTuple):
    name: str
    shape: str
    operation: str
    rest: str


def part_of(source: str) -> str:
    """Of what an operation of a program is called, its path of scopes."""
    words = re.findall(r"\w+", source)
    return next((word for word in reversed(words) if word in PARTS), REST)


def parts_of(text: str) -> dict[str, str]:
    """The part of each operation of a program."""
    computations, _ = parse(text)
    return {one.name: part_of(source_of(one)) for found in computations.values() for one in found}


def source_of(one: Instruction) -> str:
    found = re.search(r'op_name="([^"]*)"', one.rest)
    return found[1] if found else ""


def kernels_of(text: str) -> Iterator[Kernel]:
    """All that are launched, once for each time."""
    computations, entry = parse(text)
    counts: dict[str, int] = defaultdict(int)
    waiting = [(entry, 1)]
    while waiting:
        name, times = waiting.pop()
        counts[name] += times
        for one in computations[name]:
            if one.operation == "while":
                body = re.search(r"body=%([\w.\-]+)", one.rest)
                turns = re.search(r'known_trip_count":\{"n":"(\d+)"', one.rest)
                waiting.append((body[1], times * (int(turns[1]) if turns else 1)))  # pyright: ignore
            elif one.operation == "conditional":
                branches = re.search(r"branch_computations=\{([^}]*)\}", one.rest)
                last = branches[1].split(",")[-1] if branches else ""
                waiting += [(last.strip(" %"), times)] if last else []
            elif one.operation == "call":
                called = re.search(r"to_apply=%([\w.\-]+)", one.rest)
                waiting += [(called[1], times)] if called else []
    for name, times in counts.items():
        shapes = {one.name: one.shape for one in computations[name]}
        for one in computations[name]:
            if one.operation in LAUNCHED and not NO_KERNEL.search(one.rest):
                for _ in range(times):
                    yield kernel_of(one, shapes)


def kernel_of(one: Instruction, shapes: dict[str, str]) -> Kernel:
    target = re.search(r'custom_call_target="([^"]*)"', one.rest)
    given = re.findall(r"%([\w.\-]+)", one.rest.split("),")[0])
    size = sum(map(size_of, [one.shape, *(shapes.get(name, "") for name in given)]))
    kind = target[1] if target else re.sub(r"[\d.]+$", "", one.name)
    shape = re.sub(r"\{[^}]*\}", "", SCRATCH.sub("", one.shape))
    return Kernel(kind, shape, source_of(one), size)


def size_of(shape: str) -> int:
    """Bytes of all arrays of a shape."""
    return sum(
        BYTES[kind] * math.prod(int(length) for length in lengths.split(",") if length)
        for kind, lengths in re.findall(r"(\w+)\[([\d,]*)\]", SCRATCH.sub("", shape))
        if kind in BYTES
    )


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Instructions by computation, and the name of the one that a program begins with."""
    computations: dict[str, list[Instruction]] = {}
    entry = name = ""
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%([\w.\-]+) \(", line)
        if head:
            name = head[2]
            computations[name] = []
            entry = name if head[1] else entry
            continue
        found = re.match(r"\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*)", line)
        if found and name:
            computations[name].append(Instruction(*found.groups()))
    return computations, entry
