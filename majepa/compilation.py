"""How programs are compiled, and where they are kept for the next run.

JAX does the keeping, here is where. `JAX_COMPILATION_CACHE_DIR` names another place; if it is
empty, or with `JAX_ENABLE_COMPILATION_CACHE=false`, nothing is kept.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
"""Of programs that learn, for GPUs; CPUs do not mind. Products are those of the library: to try
kernels of the compiler's own against them takes longer than all the rest of compiling. Nor are
products joined, for which their factors would be copied next to each other."""
EVALUATION_OPTIONS = {**COMPILER_OPTIONS, "xla_gpu_autotune_level": 0}
"""Of programs that evaluate: they are compiled while others learn, whose times on the device would
be taken for their own, and which would be held up. And of those that play a battle to be watched:
to choose among kernels takes longer than the battle."""
VARIABLE = "JAX_COMPILATION_CACHE_DIR"
SWITCH = "JAX_ENABLE_COMPILATION_CACHE"


def cache_folder(variables: Mapping[str, str]) -> Path | None:
    """Where compiled programs are kept; none if they are not."""
    if variables.get(SWITCH, "").lower() in ("false", "0", "no", "off", "n", "f"):
        return None
    if VARIABLE in variables:
        return Path(variables[VARIABLE]) if variables[VARIABLE] else None
    home = variables.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "majepa" / "jax"


def why_unusable(folder: Path) -> str | None:
    """Why files cannot be written into a folder, which is made if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return str(error)


def keep_programs() -> str | None:
    """Let JAX keep what it compiles from now on; where that cannot be, returns why."""
    import jax

    folder = cache_folder(os.environ)
    reason = None if folder is None else why_unusable(folder)
    kept = None if folder is None or reason else str(folder)
    jax.config.update("jax_compilation_cache_dir", kept)
    return reason and f"{reason}; {VARIABLE} names another place"
