"""Which kernels GPUs take: those that were measured, and others where they are asked for."""

import functools

import jax.numpy as jnp
import pytest
from lowering import SIGNAL, lower_for_gpus

from majepa.config import ConfigError
from majepa.nn import gpu, kernels


def lowered(tile: str) -> str:
    """A kernel of a size that a card takes, under the name of a tile."""

    def doubled(x):
        def kernel(x, out):
            out[...] = x[...] + x[...]

        return kernels.launch(kernel, kernels.like(x), (1,), x, tile=tile)

    return lower_for_gpus(doubled, jnp.zeros((kernels.ROWS, kernels.ROWS)))


@pytest.mark.parametrize(
    ("wish", "tile", "signals"),
    [
        (None, "enter", False),
        ("few_rows", "enter", False),
        ("early", "enter", True),
        ("few_rows, early", "enter", True),
        ("all", "enter", True),
        ("all", "draw", False),
        ("all", "project", False),
    ],
)
def test_kernels_let_the_next_one_start_where_ours_alone_read_them(
    monkeypatch, wish, tile, signals
):
    monkeypatch.delenv(gpu.SWITCH, raising=False)
    if wish is not None:
        monkeypatch.setenv(gpu.SWITCH, wish)
    assert (SIGNAL in lowered(tile)) == signals


@pytest.mark.parametrize(
    ("wish", "kinds", "trials"),
    [
        (None, True, set()),
        ("", True, set()),
        ("0", False, set()),
        ("early", True, {gpu.EARLY}),
        ("few_rows,early", True, {gpu.EARLY, gpu.FEW_ROWS}),
        ("all", True, {gpu.EARLY, gpu.FEW_ROWS}),
    ],
)
def test_what_the_environment_asks_for(monkeypatch, wish, kinds, trials):
    monkeypatch.delenv(gpu.SWITCH, raising=False)
    if wish is not None:
        monkeypatch.setenv(gpu.SWITCH, wish)
    assert gpu.may_take_kernels(jnp.bfloat16) == kinds
    assert not gpu.may_take_kernels(jnp.float32)
    assert set(filter(gpu.is_asked_for, gpu.TRIALS)) == trials


@pytest.mark.parametrize("wish", ["1", "few-rows", "0,early", "0 0", "early,fast"])
def test_a_wish_that_cannot_be_is_told(monkeypatch, wish):
    monkeypatch.setenv(gpu.SWITCH, wish)
    for ask in (
        functools.partial(gpu.may_take_kernels, jnp.bfloat16),
        functools.partial(gpu.is_asked_for, gpu.EARLY),
    ):
        with pytest.raises(ConfigError) as told:
            ask()
        assert str(told.value) == (
            f"MAJEPA_KERNELS is '{wish}'; it may be 0 alone, all, or some of few_rows, early with "
            "commas between them"
        )
