import jax
import pytest

# Wrong ranks and silent promotions are mistakes in this code base.
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)
