from pathlib import Path

import jax
import pytest

# Wrong ranks and silent promotions are mistakes in this code base.
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share compiled programs run in one process."""
    for item in items:
        folder = item.path.parent
        shared = folder if folder.name == "world_model" else item.path
        item.add_marker(pytest.mark.xdist_group(str(shared)))


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs():
    """Each compiled program holds memory maps, of which Linux gives a process 65,530."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > 25_000:
        jax.clear_caches()
