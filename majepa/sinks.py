"""Where the lines of a log go besides `metrics.jsonl`: TensorBoard and Weights & Biases.

Both are optional packages, imported when they are asked for. Nothing leaves the machine unless
`WANDB_MODE=online` says so.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from .config import ConfigError, LogConfig, TrainConfig, to_json


@runtime_checkable
class Sink(Protocol):
    def write(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def require_packages(log: LogConfig) -> None:
    """Refuse a run whose sinks cannot be opened, before anything is made for it."""
    for extra, package in PACKAGES.items():
        if getattr(log, extra):
            _import(package, extra)


def make_sinks(config: TrainConfig, folder: Path) -> list[Sink]:
    sinks: list[Sink] = []
    if config.log.tensorboard:
        sinks.append(TensorBoard(folder))
    if config.log.wandb:
        sinks.append(WeightsAndBiases(config, folder))
    return sinks


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        package = _import(PACKAGES["tensorboard"], "tensorboard")
        self._writer = package.SummaryWriter(str(folder / "tensorboard"))

    def write(self, record: Mapping[str, Any]) -> None:
        for name, value in _scalars(record).items():
            self._writer.add_scalar(name, value, record["transitions"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    def __init__(self, config: TrainConfig, folder: Path) -> None:
        package = _import(PACKAGES["wandb"], "wandb")
        self._run = package.init(
            project="majepa",
            name=folder.name,
            dir=str(folder),
            config=to_json(config),
            mode=os.environ.get("WANDB_MODE", "offline"),
        )

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log(_scalars(record), step=record["transitions"])

    def close(self) -> None:
        self._run.finish()


def _scalars(record: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(x) for name, x in record.items() if isinstance(x, int | float)}


def _import(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"log.{extra} needs the package {name}, which is not installed; "
            f"`uv sync --extra {extra}` or `pip install '.[{extra}]'` brings it"
        ) from error
