"""The shape of the package: what imports what, and what importing does."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import majepa

PACKAGE = Path(majepa.__file__).parent

MAY_IMPORT = {
    "ahead": (),
    "config": ("envs.make",),
    "algorithm": ("envs.base",),
    "stats": (),
    "files": (),
    "interrupt": (),
    "call_by_call": (
        "agent", "algorithm", "compilation", "flat", "packing", "replay", "world_model",
    ),
    "packing": (),
    "flat": (),
    "compilation": (),
    "recording": ("__version__", "envs", "files"),
    "viewer": ("envs.sim", "recording"),
    "checkpoint": ("__version__", "files"),
    "checks": (),
    "machine": ("checks", "envs.make"),
    "memory": ("checks", "config"),
    "run_size": ("checks", "config", "envs.make", "memory", "training"),
    "collect": ("algorithm", "envs.base"),
    "evaluation": ("algorithm", "collect", "compilation", "envs.base", "stats"),
    "lanes": (
        "algorithm", "collect", "envs.base", "flat", "log", "memory", "packing", "compilation",
    ),
    "run": (
        "algorithm", "checkpoint", "checks", "collect", "config", "envs.base", "evaluation",
        "lanes", "log", "machine", "memory", "progress", "run_folder", "sinks",
    ),
    "nn": ("config",),
    "replay": ("algorithm", "config", "envs.base"),
    "world_model": ("config", "envs.base", "nn", "packing", "replay"),
    "imagine": ("config", "nn", "replay", "world_model"),
    "policy": ("algorithm", "config", "envs.base", "imagine", "nn", "replay",
               "world_model.condense"),
    "policy/actor": ("config", "nn"),
    "policy/critic": ("config", "nn"),
    "policy/ppo": ("config", "imagine", "nn", "policy", "replay"),
    "policy/returns": ("nn",),
    "policy/rollout": ("algorithm", "nn", "policy.returns"),
    "policy/view": ("envs.base",),
    "report": ("config", "files", "run_folder", "stats"),
    "episode_replay": (),
    "benchmark": (
        "__version__", "config", "envs.base", "envs.make", "files", "interrupt", "log", "machine",
        "progress", "report", "run_folder", "stats", "training",
    ),
    "benchmark/published": (),
    "benchmark/grids": ("config", "envs.make"),
    "benchmark/results": (
        "benchmark.folder", "benchmark.grids", "config", "report", "run_folder",
    ),
    "benchmark/data_files": ("benchmark.grids", "benchmark.results", "report"),
    "benchmark/curves": ("benchmark.grids", "benchmark.results"),
    "benchmark/scores": (
        "benchmark.grids", "benchmark.published", "benchmark.results", "config", "stats",
    ),
    "benchmark/aggregates": ("benchmark.grids", "benchmark.results", "stats"),
    "benchmark/tables": (
        "benchmark.aggregates", "benchmark.data_files", "benchmark.published",
        "benchmark.results", "benchmark.scores", "stats",
    ),
    "benchmark/comparison": (
        "benchmark.published", "benchmark.results", "benchmark.scores", "benchmark.tables",
        "stats",
    ),
    "benchmark/page": ("benchmark", "report"),
    "benchmark/output": ("benchmark", "files"),
    "baselines": (
        "algorithm", "config", "envs.base", "episode_replay", "nn", "policy.returns",
        "policy.rollout", "policy.view",
    ),
}  # fmt: skip
"""What a part of the package may know besides itself; `agent`, `train` and `cli` may know all."""


def imports_of(path: Path) -> set[str]:
    """Modules of ours that a file imports, as dotted names."""
    parts = ("majepa", *path.relative_to(PACKAGE).with_suffix("").parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = list(parts[: -node.level]) if node.level else []
            module = [*base, *([node.module] if node.module else [])]
            found |= {".".join([*module, alias.name]) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("majepa")}


def test_the_simulator_stands_on_the_protocol_alone():
    for path in (PACKAGE / "envs" / "sim").glob("*.py"):
        for name in imports_of(path):
            assert name.startswith(("majepa.envs.sim", "majepa.envs.base")), f"{path.name}: {name}"


def test_environments_do_not_look_up():
    for path in (PACKAGE / "envs").rglob("*.py"):
        for name in imports_of(path):
            assert name.startswith("majepa.envs"), f"{path}: {name}"


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_arrows_go_one_way(part):
    files = [PACKAGE / f"{part}.py", *(PACKAGE / part).rglob("*.py")]
    known = tuple(f"majepa.{name}" for name in (part.replace("/", "."), *MAY_IMPORT[part]))
    for path in filter(Path.exists, files):
        for name in imports_of(path):
            assert any(name == one or name.startswith(f"{one}.") for one in known), (
                f"{path.relative_to(PACKAGE)}: {name}"
            )


def test_importing_prints_nothing_and_starts_no_device_work():
    code = (
        "import majepa, majepa.envs, majepa.cli, majepa.training, majepa.benchmark.command\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "import sys\n"
        "optional = {'pettingzoo', 'gymnasium', 'matplotlib', 'imageio', 'ray'}\n"
        "assert not optional & set(sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
