"""Classes drawn from mixed logits: the kernel, its program interpreted, and where it is taken."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import KERNEL, lower_for_gpus

from majepa.nn import draw_kernels, gpu
from majepa.nn.dists import sample_by, unimix
from majepa.nn.draws import sample_mixed

SHARE = 0.01


def given(*shape, seed=0):
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(3 * rng.normal(size=shape), jnp.bfloat16)
    return logits, jnp.asarray(rng.random(shape[:-1]), jnp.float32)


@pytest.mark.parametrize(("variables", "classes"), [(64, 16), (200, 64), (7, 32)])
@pytest.mark.parametrize("share", [0.0, SHARE])
def test_the_kernel_draws_what_the_plain_version_draws(variables, classes, share):
    """Also for variables that do not fill a program."""
    logits, noise = given(variables, classes)
    found = draw_kernels.drawn(logits, noise, share, interpret=True)
    expected = sample_by(unimix(logits, share), noise)
    np.testing.assert_array_equal(found, expected)
    assert len(np.unique(expected)) > 3


def test_every_class_is_found_where_its_share_begins_and_ends():
    logits, _ = given(1, 32)
    up_to = np.cumsum(np.exp(np.asarray(unimix(logits, SHARE), np.float64)[0]))
    middle = (np.append(0, up_to[:-1]) + up_to) / 2
    found = draw_kernels.drawn(
        jnp.repeat(logits, 32, axis=0), jnp.asarray(middle, jnp.float32), SHARE, interpret=True
    )
    np.testing.assert_array_equal(found, np.arange(32))


def test_the_last_class_takes_what_rounding_leaves():
    logits, _ = given(3, 32)
    found = draw_kernels.drawn(logits, jnp.ones(3), SHARE, interpret=True)
    np.testing.assert_array_equal(found, [31] * 3)


def test_gpus_have_a_kernel_for_it_and_others_do_not():
    logits, noise = given(5, 4, 32)
    assert KERNEL in lower_for_gpus(lambda *x: sample_mixed(x[0], SHARE, x[1]), logits, noise)
    np.testing.assert_array_equal(
        sample_mixed(logits, SHARE, noise), sample_by(unimix(logits, SHARE), noise)
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_other_sizes_and_types_take_the_plain_version(dtype):
    logits, noise = given(5, 4, 32 if dtype == jnp.float32 else 24)
    assert not gpu.kernels_are_off()
    logits = logits.astype(dtype)
    assert KERNEL not in lower_for_gpus(lambda *x: sample_mixed(x[0], SHARE, x[1]), logits, noise)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_it_has_no_gradient(dtype):
    """And what GPUs have a kernel for is no obstacle to gradients of the rest."""
    logits, noise = given(4, 32)
    exact = logits.astype(dtype)

    def picked(x):
        chosen = jax.nn.one_hot(sample_mixed(x, SHARE, noise), 32)
        return jnp.sum(chosen * x), chosen

    text = lower_for_gpus(lambda x: jax.grad(picked, has_aux=True)(x)[0], exact)
    assert (KERNEL in text) == (dtype == jnp.bfloat16)
    (_, chosen), gradient = jax.value_and_grad(picked, has_aux=True)(exact)
    np.testing.assert_array_equal(gradient, chosen)
