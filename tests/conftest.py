import logging
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

# Wrong ranks and silent promotions are mistakes in this code base.
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config: pytest.Config) -> None:
    """Keep what is compiled for other tests of this process, and out of the user's own folder.

    Processes of tests do not share one: JAX may read what another has not written to its end.
    """
    folder = tempfile.TemporaryDirectory(prefix="majepa-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder.name
    jax.config.update("jax_compilation_cache_dir", folder.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Most tests take longer to compile than to run. What is compiled for those that run long, and
    for all slow ones, is compiled as users have it."""
    runs_long = {"slow", "optimized"} & {marker.name for marker in item.iter_markers()}
    jax.config.update("jax_disable_most_optimizations", not runs_long)


FIRST = ("agent", "world_model", "baselines", "envs")
"""Folders whose files take longest: begun first, so that both processes end at the same time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        folder = item.path.parent.name
        return FIRST.index(folder) if folder in FIRST else len(FIRST)

    items.sort(key=place)


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)


@pytest.fixture
def times_compiled(caplog: pytest.LogCaptureFixture) -> Callable[[], Counter[str]]:
    """How often each program was compiled so far, in whatever thread."""
    caplog.set_level(logging.DEBUG, logger="jax._src.dispatch")

    def count() -> Counter[str]:
        found = (re.match(r"Finished XLA compilation of jit\((.*)\)", x) for x in caplog.messages)
        return Counter(match[1] for match in found if match)

    return count


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs():
    """Each compiled program holds memory maps, of which Linux gives a process 65,530."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > 25_000:
        jax.clear_caches()
