"""What benchmarks read from the texts of compiled programs."""

import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from scripts import benchmark

ROOT = Path(__file__).parents[2]
TEXT = """HloModule jit_f, is_scheduled=true

%body (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %twice = f32[8]{0} fusion(%x), kind=kLoop, calls=%g, metadata={op_name="jit(f)/critic/mul"}
  ROOT %copy.1 = f32[8]{0} copy(%twice), metadata={op_name="jit(f)/transpose(jvp(actor))/add"}
}

%cond (x: f32[8]) -> pred[] {
  ROOT %true = pred[] constant(true)
}

%few (x: f32[8]) -> f32[8] {
  ROOT %small = f32[8]{0} fusion(%x), kind=kLoop, calls=%g
}

%many (x: f32[8]) -> f32[8] {
  ROOT %large = f32[8]{0} custom-call(%x), custom_call_target="__cublas$lt$matmul"
}

ENTRY %main (a: f32[8], b: s32[]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %b = s32[] parameter(1)
  %room = f32[8]{0} custom-call(), custom_call_target="AllocateBuffer"
  %w = f32[8] while(%a), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %c = f32[8]{0} conditional(%b, %w), branch_computations={%few, %many}
}
"""


@pytest.fixture(scope="module")
def compiled():
    return benchmark("compiled")


def test_kernels_of_loops_count_as_often_as_they_run_and_memory_is_none(compiled):
    found = Counter(compiled.kernels_of(TEXT))
    assert {(one.kind, one.bytes): times for one, times in found.items()} == {
        ("twice", 64): 3, ("copy", 64): 3, ("__cublas$lt$matmul", 32): 1,
    }  # fmt: skip


def test_a_kernel_belongs_to_the_innermost_part(compiled):
    parts = compiled.parts_of(TEXT)
    assert (parts["twice"], parts["copy.1"], parts["w"]) == ("critic", "actor", "rest")
    assert compiled.part_of("jit(f)/transpose(jvp(self_fed))/latents/jit(g)/mul") == "latents"


def test_parts_are_the_scopes_of_the_package(compiled):
    sources = [path.read_text() for path in (ROOT / "majepa").rglob("*.py")]
    scopes = {name for text in sources for name in re.findall(r'named_scope\("(\w+)"\)', text)}
    assert scopes == set(compiled.PARTS)


def test_scopes_are_in_programs(compiled):
    """On the way there and on the way back."""

    @jax.named_scope("critic")
    def loss(x):
        return jnp.sum(jnp.sin(x) @ x)

    text = jax.jit(jax.grad(loss)).lower(jnp.ones((4, 4))).compile().as_text()
    assert text is not None
    names = re.findall(r'op_name="([^"]*)"', text)
    assert {"critic"} == {compiled.part_of(name) for name in names if "jvp" in name}
    assert any("transpose(" in name for name in names)
