"""Programs for GPUs, on any machine."""

import re

import jax
from scripts import benchmark

H200 = benchmark("compiled").H200

KERNEL, SIGNAL = "xla.gpu.triton", "griddepcontrol.launch_dependents"
"""What says that a kernel is ours, and that it lets the next one start early."""
SAME = re.compile(r"(?:reshape|broadcast_in_dim) .*\(tensor<(?:1x)?(\S+)>\) -> tensor<(?:1x)?\1>")
"""An array under another shape."""


def lower_for_gpus(function, *given) -> str:
    """Everything up to what the compiler of a GPU does."""
    check = jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
    exported = jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=[check])
    with jax.sharding.use_abstract_mesh(H200):
        return exported(*given).mlir_module()


def early_kernels(lowered: str) -> int:
    """How many let the next one start early, if kernels of ours alone read what they write."""
    found = 0
    for function in lowered.split("func.func"):
        early: set[str] = set()
        for line in function.splitlines():
            name, _, operation = line.strip().partition(" = ") if " = " in line else ("", "", line)
            reads = early & set(re.findall(r"%\w+", operation.partition("{")[0]))
            is_reshape = SAME.search(operation) is not None
            ours = KERNEL in line or is_reshape or "return %" in operation
            assert not reads or ours, line[:200]
            if SIGNAL in line or (reads and is_reshape):
                early.add(name.partition(":")[0])
            found += SIGNAL in line
    return found
