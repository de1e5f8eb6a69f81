"""MA-JEPA: joint-embedding predictive world models for cooperative multi-agent RL."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import evaluate as evaluate
    from .api import load as load
    from .api import train as train
    from .api import train_seeds as train_seeds
    from .envs import make_env as make_env

__version__ = "0.1.0"

_HOMES = {
    "make_env": "envs", "load": "api", "train": "api", "train_seeds": "api", "evaluate": "api",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Heavy imports wait until somebody asks for them."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
