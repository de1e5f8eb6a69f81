"""Where metrics go besides the log file."""

import builtins
import dataclasses
import importlib

import pytest

from majepa.config import ConfigError, LogConfig, preset
from majepa.sinks import make_sinks

RECORD = {"transitions": 80, "seconds": 1.5, "kind": "training", "loss/actor": -0.25}


def config(**log):
    return dataclasses.replace(preset("mappo", "debug", "sim:3m"), log=LogConfig(**log))


def test_none_by_default(tmp_path):
    assert make_sinks(config(), tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_holds_every_scalar(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    (sink,) = make_sinks(config(tensorboard=True), tmp_path)
    sink.write(RECORD)
    sink.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    data, found = file.read_bytes(), {}
    while data:
        length = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]
        found |= {value.tag: (event.step, value.simple_value) for value in event.summary.value}
    assert found["loss/actor"] == (80, -0.25)
    assert found["seconds"] == (80, 1.5)
    assert "kind" not in found


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_package_that_is_missing(tmp_path, monkeypatch, name, package):
    load = importlib.import_module

    def missing(wanted, *rest):
        if wanted == package:
            raise ImportError(wanted)
        return load(wanted, *rest)

    monkeypatch.setattr("majepa.sinks.importlib.import_module", missing)
    with pytest.raises(
        ConfigError, match=f"log.{name} needs the package {package}.*--extra {name}"
    ):
        make_sinks(config(**{name: True}), tmp_path)


@pytest.mark.extras
def test_weights_and_biases_stays_on_the_machine(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("it asks for an account"))
    (sink,) = make_sinks(config(wandb=True), tmp_path)
    sink.write(RECORD)
    sink.close()
    kept = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(kept) == 1 and kept[0].stat().st_size > 0
