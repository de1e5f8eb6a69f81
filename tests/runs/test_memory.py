"""What learning takes is known before it begins, and what cannot fit is refused with advice."""

import dataclasses
import json
import weakref
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import CountingEnv, FakeAlgorithm

from majepa import lanes, machine
from majepa import training as loop
from majepa.checks import Memory
from majepa.config import DEBUG, MAPPO_DEBUG, ConfigError, EvaluationConfig, TrainConfig
from majepa.memory import Need, bytes_of, need_of, require_room
from majepa.run_folder import claim, give_back
from majepa.training import train, train_together

CONFIG = TrainConfig(
    MAPPO_DEBUG, env="test:counting", steps=60, evaluation=EvaluationConfig(1000, 4, 4)
)
ENV, ALGORITHM = CountingEnv(), FakeAlgorithm()


def learn(folder, config=CONFIG):
    return train(config, folder, env=ENV, algorithm=ALGORITHM)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def has(monkeypatch, size):
    monkeypatch.setattr(machine, "device_memory", lambda: Memory(size, size))


def test_what_is_given_away_is_not_counted_twice():
    stats = SimpleNamespace(
        argument_size_in_bytes=1000,
        output_size_in_bytes=900,
        alias_size_in_bytes=800,
        temp_size_in_bytes=50,
    )
    learner = np.zeros(800, np.uint8)
    assert need_of(stats, learner) == Need(800, 350)
    assert need_of(stats, learner, beside=learner) == Need(800, 1150)
    assert need_of(None, learner) is None


def test_a_compiled_program_tells_its_temporaries():
    def program(state, x):
        return state + jnp.sum(jnp.sort(x @ x.T, axis=0))

    state, x = jnp.zeros((1000,)), jnp.zeros((1000, 8))
    stats = jax.jit(program).lower(state, x).compile().memory_analysis()
    need = need_of(stats, state)
    assert need.state == 4000 and 4_000_000 < need.temporaries < 5_000_000


def test_bytes_are_those_of_arrays_or_shapes():
    tree = {"a": jnp.zeros((3, 2), jnp.bfloat16), "b": np.zeros(5, np.uint8)}
    assert bytes_of(tree) == bytes_of(jax.eval_shape(lambda: tree)) == 17


def test_a_run_says_what_it_will_take_and_compiles_once(tmp_path, capsys, times_compiled):
    train(CONFIG, tmp_path / "run", env=ENV, algorithm=FakeAlgorithm(rows=3))
    assert times_compiled()["_update"] == 1
    (said,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("learning takes"))
    assert "state" in said and "temporaries" in said and "on the device" not in said
    assert not any("memory/peak" in line for line in lines(tmp_path / "run"))


def test_the_peak_stands_beside_the_plan(tmp_path, monkeypatch):
    has(monkeypatch, 10**9)
    monkeypatch.setattr(machine, "device_peak", lambda: 12_345)
    learn(tmp_path / "run")
    last = lines(tmp_path / "run")[-1]
    assert last["memory/peak"] == 12_345 and 0 < last["memory/planned"] < 10**6


def test_a_state_that_cannot_fit_is_refused_before_anything_is_touched(tmp_path, monkeypatch):
    has(monkeypatch, 100)
    with pytest.raises(ConfigError, match=r"learning needs .* the device has 100 B for JAX; use "):
        learn(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_temporaries_that_cannot_fit_are_refused_before_learning(tmp_path, monkeypatch):
    has(monkeypatch, 10**6)
    monkeypatch.setattr(lanes.Lanes, "need", lambda _: Need(1000, 10**6))
    refused = r"needs 1\.0 MB \(state 1\.0 kB, temporaries 1\.0 MB\)"
    for _ in range(2):
        with pytest.raises(ConfigError, match=refused):
            learn(tmp_path / "run")
        assert not any(tmp_path.iterdir())


def test_a_refusal_takes_away_only_what_is_new(tmp_path, monkeypatch):
    train(CONFIG, tmp_path / "run", env=ENV, algorithm=ALGORITHM, stop_after=12)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    has(monkeypatch, 10**6)
    monkeypatch.setattr(lanes.Lanes, "need", lambda _: Need(1000, 10**6))
    with pytest.raises(ConfigError, match="learning needs"):
        train(CONFIG, tmp_path / "run", env=ENV, algorithm=ALGORITHM, resume=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_note_of_somebody_else_stays(tmp_path):
    claim(tmp_path / "run", CONFIG, ENV.spec)
    (tmp_path / "run" / "note").touch()
    give_back(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["note"]


def test_no_folder_is_made_for_a_run_that_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    has(monkeypatch, 100)
    with pytest.raises(ConfigError, match="learning needs"):
        learn(None)
    monkeypatch.setattr(loop, "make_env", lambda _: ENV)
    monkeypatch.setattr(loop, "make_algorithm", lambda *_: ALGORITHM)
    with pytest.raises(ConfigError, match="learning needs"):
        train_together([CONFIG, dataclasses.replace(CONFIG, seed=1)])
    assert not any(tmp_path.iterdir())


def test_states_are_joined_without_holding_all_of_them_twice():
    trees = [{"a": jnp.full((1000,), float(n)), "b": jnp.arange(3)} for n in range(2)]
    held = [weakref.ref(tree["a"]) for tree in trees]
    shapes, most = jax.eval_shape(lambda: trees[0]), []

    def stack(leaves):
        most.append([ref() is not None for ref in held])
        return jnp.stack(leaves)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(lanes, "jnp", SimpleNamespace(stack=stack))
        joined = lanes._joined(trees)
    np.testing.assert_array_equal(joined["a"], np.repeat([[0.0], [1.0]], 1000, 1))
    np.testing.assert_array_equal(joined["b"], [[0, 1, 2]] * 2)
    assert most == [[True, True], [False, False]]
    assert lanes.joining(shapes, 2) == 8000 and lanes.joining(shapes, 1) == 0


def test_room_to_join_packed_states_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "make_env", lambda _: ENV)
    monkeypatch.setattr(loop, "make_algorithm", lambda *_: ALGORITHM)
    has(monkeypatch, 2 * bytes_of(loop.run_shapes(ALGORITHM, ENV)))
    with pytest.raises(ConfigError, match="use fewer `--seeds`"):
        train_together(
            [CONFIG, dataclasses.replace(CONFIG, seed=1)], [tmp_path / "0", tmp_path / "1"]
        )


def test_packed_runs_count_together(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "make_env", lambda _: ENV)
    monkeypatch.setattr(loop, "make_algorithm", lambda *_: ALGORITHM)
    one = bytes_of(loop.run_shapes(ALGORITHM, ENV))
    has(monkeypatch, 2 * one)
    configs = [dataclasses.replace(CONFIG, seed=seed) for seed in range(3)]
    with pytest.raises(ConfigError, match="use fewer `--seeds`, or"):
        train_together(configs, [tmp_path / str(seed) for seed in range(3)])


def test_advice_fits_the_algorithm():
    majepa = dataclasses.replace(CONFIG, algo=DEBUG)
    there = Memory(10, 10)
    require_room(Need(5, 5), there, majepa)
    require_room(Need(5, 50), None, majepa)
    with pytest.raises(ConfigError, match=r"--algo.replay.batch` \(now 3\).*--preset small"):
        require_room(Need(5, 6), there, majepa)
    with pytest.raises(ConfigError, match=r"use a smaller `--algo.num-envs`"):
        require_room(Need(5, 6), there, CONFIG)
