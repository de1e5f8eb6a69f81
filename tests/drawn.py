"""What keeps compilation out of the tests of models: parameters from NumPy, and a quick `jit`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def is_known(option: str, value: object) -> bool:
    """Whether the compiler that is installed has such an option: they come and go."""
    try:
        jax.jit(lambda: 0, compiler_options={option: value}).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return False
    return True


WISHES = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
QUICK = {option: value for option, value in WISHES.items() if is_known(option, value)}
jit = functools.partial(jax.jit, compiler_options=QUICK)
"""For programs that run a few times only: optimising them would take longer."""


def quick(*given, **options):
    """In the place of `jax.jit` with options of its own."""
    return jax.jit(*given, **{**options, "compiler_options": QUICK})


def drawn(build, seed: int = 0):
    """What `build()` returns, but every parameter is drawn anew and away from where it starts."""
    rng = np.random.default_rng(seed)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        noise = rng.normal(size=leaf.shape)
        name = path[-1].name
        if name in ("weight", "token"):
            return jnp.asarray(noise * leaf.shape[-2] ** -0.5, leaf.dtype)
        return jnp.asarray(
            {"gain": 1.0, "bias": 0.0, "offset": 0.0}[name] + 0.1 * noise, leaf.dtype
        )

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(build))
