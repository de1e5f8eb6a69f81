"""Whether GPUs take kernels of ours, as the environment has it."""

import jax.numpy as jnp
import pytest

from majepa.config import ConfigError
from majepa.nn import gpu


@pytest.mark.parametrize(("wish", "taken"), [(None, True), ("", True), ("0", False)])
def test_what_the_environment_asks_for(monkeypatch, wish, taken):
    monkeypatch.delenv(gpu.SWITCH, raising=False)
    if wish is not None:
        monkeypatch.setenv(gpu.SWITCH, wish)
    assert gpu.may_take_kernels(jnp.bfloat16) == taken
    assert not gpu.may_take_kernels(jnp.float32)


@pytest.mark.parametrize("wish", ["1", "off", "0 0"])
def test_a_wish_that_cannot_be_is_told(monkeypatch, wish):
    monkeypatch.setenv(gpu.SWITCH, wish)
    with pytest.raises(ConfigError) as told:
        gpu.may_take_kernels(jnp.bfloat16)
    assert str(told.value) == (
        f"MAJEPA_KERNELS is '{wish}'; it may be 0, for none of our kernels, or unset"
    )
