"""`majepa doctor`: whether this machine can train, what stands in the way, and what to do."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from . import checks, compilation, machine
from .checks import Check, DeviceInfo, Memory
from .config import PRESETS, TrainConfig, preset
from .envs.make import make_env

RUNS = Path("runs")
FIX_OF_RUN = "put right what it names: `majepa train --help` lists settings, `majepa maps` the maps"
FIX_OF_BUG = "please report it, with the output of `majepa doctor --json`"
COLOURS = {"ok": "green", "note": "yellow", "problem": "bold red"}


@dataclasses.dataclass(frozen=True)
class Run:
    """The run to check for, as the command line names it."""

    algorithm: str = "majepa"
    preset: str | None = None
    env: str = "sim:3m"
    steps: int | None = None

    @property
    def config(self) -> TrainConfig:
        config = preset(self.algorithm, self.preset, self.env)
        return config if self.steps is None else dataclasses.replace(config, steps=self.steps)

    @property
    def words(self) -> str:
        name = self.preset or next(iter(PRESETS[self.algorithm]))
        return f"{self.algorithm} ({name}) on {self.env}, {self.config.steps:,} transitions"

    @property
    def smaller_preset(self) -> str | None:
        is_large = self.preset == "paper" and "small" in PRESETS[self.algorithm]
        return "small" if is_large else None


def doctor(run: Run, *, as_json: bool = False, parent: Path = RUNS) -> int:
    """Check, print, and return the exit code: 1 if there is a problem.

    A run that is named wrongly is an error of whoever named it, before anything is looked at.
    """
    make_env(run.config.env)
    found = list(diagnose(run, parent))
    if as_json:
        print(json.dumps([dataclasses.asdict(check) for check in found], indent=2))
    else:
        show(found)
    return int(any(check.state == "problem" for check in found))


def diagnose(run: Run, parent: Path = RUNS) -> Iterator[Check]:
    """Every check of this machine; those that need JAX are left out where it does not start."""
    variables = dict(os.environ)
    installed = functools.cache(machine.installed_packages)
    host = functools.cache(machine.host_memory)
    devices: list[DeviceInfo] = []

    def backend() -> Check:
        devices.extend(machine.jax_devices())
        plugins = machine.cuda_plugins(installed())
        return checks.check_backend(devices, machine.nvidia_gpu(), plugins, variables)

    def plugins() -> Check:
        return checks.check_plugins(installed()["jaxlib"], machine.cuda_plugins(installed()))

    yield from guarded("python", _python)
    yield from guarded("packages", lambda: _packages(installed()))
    yield from guarded("jax", backend, checks.fix_of_start(variables))
    yield from guarded("cuda plugin", plugins)
    yield from guarded("variables", lambda: checks.check_variables(variables))
    yield from guarded("compiled programs", lambda: _cache(variables))
    yield from guarded("host memory", lambda: checks.check_host_memory(host()))
    yield from guarded("run folder", lambda: checks.check_folder(parent))
    yield from guarded("optional", lambda: checks.check_optional(installed(), _extras()))
    yield from guarded("ffmpeg", lambda: checks.check_ffmpeg(machine.ffmpeg()))
    if not devices:
        yield Check("run, self-test", "note", "not checked, as JAX does not start")
        return
    yield from guarded("run", lambda: _afford(run, devices, host(), parent), FIX_OF_RUN)
    yield from guarded("self-test", lambda: checks.check_played(machine.play_3m()), FIX_OF_BUG)


def guarded(name: str, look: Callable[[], Check | list[Check]], fix: str = "") -> list[Check]:
    """What a check says; one that raises is a problem itself."""
    try:
        found = look()
    except Exception as error:
        reason = " ".join(str(error).split()) or "it gives no reason"
        return [Check(name, "problem", f"{type(error).__name__}: {reason}", fix)]
    return [found] if isinstance(found, Check) else found


def _afford(run: Run, devices: list[DeviceInfo], host: Memory | None, parent: Path) -> list[Check]:
    from .run_size import run_size

    size = run_size(run.config)
    free = shutil.disk_usage(checks.nearest_folder(parent)).free
    return [
        *checks.check_run_memory(run.words, size, devices, host, run.smaller_preset),
        checks.check_disk(free, size.total),
    ]


def _cache(variables: dict[str, str]) -> Check:
    folder = compilation.cache_folder(variables)
    if folder is None:
        return checks.check_cache(None, None, 0)
    unusable = compilation.why_unusable(folder)
    held = 0 if unusable else sum(x.stat().st_size for x in folder.rglob("*") if x.is_file())
    return checks.check_cache(folder, unusable, held)


def _python() -> Check:
    requires = importlib.metadata.metadata("majepa")["Requires-Python"]
    return checks.check_python(platform.python_version(), requires)


def _packages(installed: dict[str, str]) -> list[Check]:
    return checks.check_packages(importlib.metadata.requires("majepa") or [], installed)


def _extras() -> list[str]:
    return importlib.metadata.metadata("majepa").get_all("Provides-Extra") or []


def show(found: list[Check]) -> None:
    """A table on a terminal, aligned lines elsewhere."""
    problems = sum(check.state == "problem" for check in found)
    end = f"{problems} problem{'s' * (problems != 1)}" if problems else "no problems"
    if sys.stdout.isatty():
        _show_table(found, end)
    else:
        print("\n".join([*lines(found), "", end]))


def lines(found: list[Check]) -> list[str]:
    """Each check on a line, and its fix on the same one."""
    width = max(len(check.name) for check in found)
    return [
        f"{check.state:7}  {check.name:{width}}  {check.seen}"
        + (f"  -> {check.fix}" if check.fix else "")
        for check in found
    ]


def _show_table(found: list[Check], end: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in found:
        told = Text(check.seen)
        if check.fix:
            told.append(f"\n-> {check.fix}", style=COLOURS[check.state])
        table.add_row(Text(check.state, style=COLOURS[check.state]), Text(check.name), told)
    console = Console()
    console.print(table)
    style = COLOURS["ok" if end == "no problems" else "problem"]
    console.print(Text(f"\n{end}", style=style))
