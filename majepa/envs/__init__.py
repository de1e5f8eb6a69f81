"""Where experience comes from: the embedded simulator, and doors to other worlds and code."""

from typing import TYPE_CHECKING, Any

from .base import Env as Env
from .base import EnvError as EnvError
from .base import EnvSpec as EnvSpec
from .base import HostEnv as HostEnv
from .base import HostStep as HostStep
from .base import TimeStep as TimeStep
from .make import make_env as make_env
from .smac_api import StarCraft2Env as StarCraft2Env

if TYPE_CHECKING:
    from .pettingzoo import parallel_env as parallel_env


def __getattr__(name: str) -> Any:
    """`parallel_env` loads PettingZoo, so it waits until somebody asks for it."""
    if name == "parallel_env":
        from .pettingzoo import parallel_env

        return parallel_env
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
