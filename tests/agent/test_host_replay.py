"""A replay in host memory: the run is what it is with one on the device."""

import contextlib
import dataclasses
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from agent.test_agent import batch_of, blank, compiled, marking
from agent.test_packed import ALGO, ALGORITHM, ENV
from drawn import jit
from runs.counting import CountingEnv
from safetensors.numpy import load_file

from majepa import host_replay, lanes, machine
from majepa import training as loop
from majepa.algorithm import HostReplayed
from majepa.checks import Memory
from majepa.config import MAPPO_DEBUG, ConfigError, EvaluationConfig, TrainConfig
from majepa.memory import Need, bytes_of
from majepa.run import Result
from majepa.run_folder import CHECKPOINT, read_config
from majepa.training import run_shapes, train, train_together

(DEVICE, *_) = jax.devices()
CONFIG = TrainConfig(
    ALGO, env="test:counting", steps=60, evaluation=EvaluationConfig(every=1000, final_episodes=6)
)


def placed(place: str, config: TrainConfig = CONFIG) -> TrainConfig:
    replay = dataclasses.replace(config.algo.replay, place=place)
    return dataclasses.replace(config, algo=dataclasses.replace(config.algo, replay=replay))


def assert_same(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("none", marks=pytest.mark.slow),
        "model",
        pytest.param("behaviour", marks=pytest.mark.slow),
    ],
)
def test_every_batch_leaves_the_same_learner_and_metrics(mode):
    """Views, marks in the replay, counters: of an algorithm that leaves marks, not learning."""
    algorithm = marking(mode)
    assert isinstance(algorithm, HostReplayed)
    update = algorithm.host_update(DEVICE, DEVICE)
    on_device, on_host = blank(algorithm), update.place(blank(algorithm))
    for row in range(24):
        key = jax.random.key(row)
        on_device, expected = compiled(algorithm)(on_device, batch_of(row), key)
        on_host, metrics = update(on_host, batch_of(row), key)
        assert_same(on_device, on_host)
        assert_same(expected, metrics)
    assert on_host.calls > 2


@pytest.mark.slow
def test_a_run_compiles_and_traces_each_program_once(tmp_path, times_compiled, monkeypatch):
    algorithm = marking()
    traced, learn = [], algorithm.learn
    monkeypatch.setattr(algorithm, "learn", lambda *given: traced.append(1) or learn(*given))
    train(placed("host"), tmp_path / "run", env=CountingEnv(), algorithm=algorithm)
    assert load_file(tmp_path / "run" / CHECKPOINT)["learner/calls"] > 2
    for name in ("_collect", "_learn_wanted", "_take_in", "draw", "store", "_play"):
        assert times_compiled()[name] == 1, name
    assert len(traced) == 1


def test_shapes_are_not_asked_for_again(monkeypatch):
    algorithm = marking()
    update = algorithm.host_update(DEVICE, DEVICE)
    learner, _ = update(update.place(blank(algorithm)), batch_of(0), jax.random.key(0))
    monkeypatch.setattr(jax, "eval_shape", lambda *_: 1 / 0)
    update(learner, batch_of(1), jax.random.key(1))


@pytest.mark.slow
@pytest.mark.parametrize(("place", "is_host"), [("auto", True), ("device", False)])
def test_the_replay_leaves_for_temporaries_too(tmp_path, monkeypatch, capsys, place, is_host):
    def ends_at_once(runs, lanes, _):
        assert lanes.on_host
        return [Result(run.folder, 0, 0.0, None, None, None) for run in runs]

    monkeypatch.setattr(loop, "_loop", ends_at_once)
    monkeypatch.setattr(loop, "_programs", lambda *_: ())
    monkeypatch.setattr(machine, "device_memory", lambda: Memory(10**9, 10**9))
    monkeypatch.setattr(lanes.Lanes, "need", lambda self: Need(1, 1 if self.on_host else 10**9))
    refused = pytest.raises(ConfigError, match=r"--algo.replay.place host")
    with contextlib.nullcontext() if is_host else refused:
        train(placed(place), tmp_path / "run", env=CountingEnv(), algorithm=marking())
    assert ("the replay lies in the memory of the host" in capsys.readouterr().out) == is_host
    assert (tmp_path / "run").exists() == is_host


@pytest.mark.parametrize(
    ("place", "size", "runs", "is_on_host"),
    [
        ("device", 1, 1, False),
        ("host", None, 1, True),
        ("auto", None, 1, False),
        ("auto", 10**12, 1, False),
        ("auto", 1, 1, True),
        ("auto", 1, 3, False),
    ],
)
def test_the_host_holds_what_the_device_cannot(place, size, runs, is_on_host):
    there = None if size is None else Memory(size, size)
    held = bytes_of(run_shapes(ALGORITHM, ENV))
    update = loop._host_update(placed(place), ALGORITHM, runs, held, there)
    assert (update is not None) == is_on_host


def test_other_algorithms_have_no_such_choice():
    config = dataclasses.replace(CONFIG, algo=MAPPO_DEBUG)
    assert loop._host_update(config, ALGORITHM, 1, 10, Memory(1, 1)) is None


def test_seeds_in_one_program_keep_their_replays_on_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "make_env", lambda _: ENV)
    configs = [dataclasses.replace(placed("host"), seed=seed) for seed in (0, 1)]
    with pytest.raises(ConfigError, match="host memory is for one run: train or resume one"):
        train_together(configs, [tmp_path / "0", tmp_path / "1"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="host memory is for one run"):
        train_together(configs)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("programs", ["same", "their own"])
def test_a_run_is_the_same_wherever_its_replay_lies(tmp_path, monkeypatch, programs):
    """Bit for bit if the same programs learn in both places; two programs round differently."""
    quick = jit(lanes._update.__wrapped__, static_argnums=0, static_argnames="together")
    monkeypatch.setattr(host_replay, "jax", SimpleNamespace(**{**vars(jax), "jit": jit}))
    update = ALGORITHM.host_update(DEVICE, DEVICE)
    monkeypatch.setattr(ALGORITHM, "host_update", lambda *_: update)
    if programs == "same":
        by_parts = Mock(side_effect=lambda _, *given, together: update(*given), lower=quick.lower)
        monkeypatch.setattr(lanes, "_update", by_parts)
    else:
        monkeypatch.setattr(lanes, "_update", quick)

    def run(place, name, **options):
        return train(placed(place), tmp_path / name, env=ENV, algorithm=ALGORITHM, **options)

    # Begun on the host, gone on with on the device, ended on the host.
    run("host", "moved", stop_after=36)
    run("device", "moved", stop_after=48, resume=True)
    moved, whole = run("host", "moved", resume=True), run("device", "whole")
    assert read_config(tmp_path / "moved").algo.replay.place == "host"
    assert whole.transitions == moved.transitions
    np.testing.assert_array_equal(whole.sampled.episode_return, moved.sampled.episode_return)
    one, other = (load_file(tmp_path / name / CHECKPOINT) for name in ("whole", "moved"))
    assert one["learner/calls"] > ALGO.collect.model_only_calls
    assert one.keys() == other.keys()
    for name, array in one.items():
        if programs == "same" or array.dtype.kind != "f":
            assert array.tobytes() == other[name].tobytes(), name
        # Biases of keys have no gradient but rounding.
        elif "optimizers" not in name and "query_key_value/bias" not in name and array.size:
            slack = 1e-3 * np.abs(array).max()
            np.testing.assert_allclose(array, other[name], rtol=0, atol=slack, err_msg=name)


def test_a_replay_that_does_not_fit_goes_to_the_host_before_anything_is_refused(
    tmp_path, monkeypatch
):
    shapes = run_shapes(ALGORITHM, ENV)
    size = bytes_of(shapes) - 1
    monkeypatch.setattr(machine, "device_memory", lambda: Memory(size, size))
    monkeypatch.setattr(loop, "interruptible", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(placed("auto"), tmp_path / "auto", env=ENV, algorithm=ALGORITHM)
    with pytest.raises(ConfigError, match=r"--algo.replay.place host"):
        train(placed("device"), tmp_path / "device", env=ENV, algorithm=ALGORITHM)
