"""The folder of a run: where it is, what it holds, and which run may write into it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from . import __version__
from .config import ConfigError, TrainConfig, from_json, to_json
from .envs.base import EnvError, EnvSpec
from .files import partials, told_of, written_beside

CONFIG = "config.json"
VERSIONS = "versions.json"
METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
SINKS = ("tensorboard", "wandb")
LOCK = ".lock"
CHECKPOINT = Path("checkpoints") / "last.safetensors"
REPLAY_PLACE = "algo.replay.place"
"""A setting of the machine, not of the run: it may change from one resume to the next."""
BEST = Path("checkpoints") / "best.safetensors"
"""At the best evaluation so far; the result of a run is that of the last one all the same."""


def new_folder(config: TrainConfig, parent: Path = Path("runs")) -> Path:
    """An empty folder that no other run has: `runs/majepa-3m-0-1`, then `-2` and so on."""
    name = f"{config.algorithm}-{config.env.rpartition(':')[2]}-{config.seed}"
    with told_of(parent):
        parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = parent / f"{name}-{number}"
        with told_of(folder), contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("counting does not end")


def require_free(folder: Path, together: Sequence[Path] = ()) -> None:
    """Refuse a folder that holds anything; `together`: all of its command's."""
    if (folder / CONFIG).exists():
        runs = [other for other in together if (other / CONFIG).exists()] or [folder]
        it, named = "all" if len(runs) > 1 else "it", " ".join(map(str, runs))
        raise FileExistsError(
            f"{folder} holds a run already; continue {it} with `majepa train --resume {named}`, "
            "or name another folder"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not an empty folder; name another one for this run")


def claim(folder: Path, config: TrainConfig, spec: EnvSpec) -> None:
    """Make a folder this run's own; a folder that holds anything else is left as it is."""
    require_free(folder)
    with told_of(folder):
        folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / VERSIONS, versions(spec))
    _write_json(folder / CONFIG, to_json(config))


def give_back(folder: Path) -> None:
    """Take away what a new run wrote before it was refused, so that another may have the folder;
    it was empty when it was claimed, and files that no run writes stay."""
    for name in (CONFIG, VERSIONS, METRICS, EVALUATIONS, LOCK):
        (folder / name).unlink(missing_ok=True)
    for name in SINKS:
        shutil.rmtree(folder / name, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def reclaim(folder: Path, config: TrainConfig, spec: EnvSpec) -> None:
    """Make sure that a folder holds this very run, in the world that it began in."""
    stored = read_config(folder)
    for name, before, now in differences(to_json(stored), to_json(config)):
        if name == REPLAY_PLACE:
            continue
        raise ConfigError(
            f"{folder} was started with {name} = {before!r}, not {now!r}; "
            "a run continues with its own settings"
        )
    require_same_world(folder, spec)


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Be the only process that trains this run, where the system can tell."""
    try:
        import fcntl
    except ImportError:  # Windows has other locks.
        yield
        return
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(
                f"another process is training {folder}; wait until it ends, or stop it first"
            ) from error
        except OSError:
            pass  # Some file systems that machines share have no locks.
        try:
            yield
        finally:
            # Not only by closing: a child of this process may hold the file, too.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)


def require_same_world(folder: Path, spec: EnvSpec) -> None:
    """Refuse a run that was made under other rules than those of this version."""
    stored = _read_json(folder / VERSIONS) if _has(folder, VERSIONS) else {}
    recorded = stored.get("environment_version", spec.version)
    if recorded != spec.version:
        raise EnvError(
            f"{folder} was started in version {recorded} of {spec.name}, this is {spec.version}; "
            "start a new run, or use the majepa that it was started with"
        )


def newest_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint of a run, the best one where that is missing, or none."""
    return next((path for path in (CHECKPOINT, BEST) if (folder / path).is_file()), None)


def sweep(folder: Path) -> None:
    """Remove what a save that was killed left behind; nobody else may be saving now."""
    for checkpoint in (CHECKPOINT, BEST):
        for partial in partials(folder / checkpoint):
            partial.unlink()


def read_config(folder: Path) -> TrainConfig:
    """The config that a run was started with."""
    stored = stored_config(folder)
    try:
        return from_json(stored)
    except ConfigError as error:
        writer = _read_json(folder / VERSIONS).get("majepa") if _has(folder, VERSIONS) else None
        if writer in (None, __version__):
            raise
        raise ConfigError(
            f"{folder / CONFIG} was written by majepa {writer}, this is {__version__}: {error}"
        ) from error


def read_config_file(path: Path) -> TrainConfig:
    """A config from any JSON file of one."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no config file at {path}")
    return from_json(_read_json(path))


def stored_config(folder: Path) -> dict[str, Any]:
    """The same as plain data, readable whichever version of majepa wrote it."""
    if not _has(folder, CONFIG):
        raise FileNotFoundError(f"{folder} is not the folder of a run: it has no {CONFIG}")
    return _read_json(folder / CONFIG)


def _has(folder: Path, name: str) -> bool:
    return (folder / name).is_file()


def versions(spec: EnvSpec) -> dict[str, Any]:
    """What a result depends on besides its config."""
    packages = ("jax", "jaxlib", "equinox", "optax", "numpy")
    return {
        "majepa": __version__,
        **{name: importlib.metadata.version(name) for name in packages},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "environment": spec.name,
        "environment_version": spec.version,
        "devices": [f"{device.platform}: {device.device_kind}" for device in jax.devices()],
    }


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    with written_beside(path) as partial:
        partial.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold one JSON object, not a {type(data).__name__}")
    return data


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Fields of two configs that differ, as (name, one value, other value)."""
    for name in {**one, **other}:
        before, now = one.get(name), other.get(name)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            yield from differences(before, now, f"{prefix}{name}.")
        elif before != now:
            yield f"{prefix}{name}", before, now
