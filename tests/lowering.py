"""Programs for GPUs, on any machine."""

import re

import jax
from scripts import benchmark

H200 = benchmark("compiled").H200

KERNEL = "xla.gpu.triton"
"""What says that a kernel is ours."""


def lower_for_gpus(function, *given) -> str:
    """Everything up to what the compiler of a GPU does."""
    check = jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
    exported = jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=[check])
    with jax.sharding.use_abstract_mesh(H200):
        return exported(*given).mlir_module()


def broadcasts_to(shape: tuple[int, ...], lowered: str) -> int:
    """How often a program makes an array of this shape from a smaller one."""
    sizes = "x".join(map(str, shape))
    return len(re.findall(rf"broadcast_in_dim.*-> tensor<{sizes}x\w+>", lowered))
