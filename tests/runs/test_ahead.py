"""Programs are compiled side by side, once each, and what goes wrong there is heard of."""

import dataclasses
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from counting import CountingEnv, FakeAlgorithm

from majepa import run as host
from majepa import training as loop
from majepa.ahead import Ahead
from majepa.config import MAPPO_DEBUG, EvaluationConfig, TrainConfig
from majepa.memory import NoRoom
from majepa.run import Run
from majepa.training import train, train_together

ENV = CountingEnv()
CONFIG = TrainConfig(
    MAPPO_DEBUG, env="test:counting", steps=120, evaluation=EvaluationConfig(30, 4, 4)
)
SECONDS = 60.0
"""After which a test that hangs fails instead."""


def test_programs_are_compiled_at_the_same_time_where_there_are_cores():
    meeting = threading.Barrier(4)
    with Ahead(cores=16) as ahead:
        for _ in range(4):
            ahead.begin(lambda: meeting.wait(SECONDS))
        ahead.wait()


def test_on_few_cores_they_take_turns():
    turn = threading.Lock()

    def compiling():
        assert turn.acquire(blocking=False)
        time.sleep(0.02)
        turn.release()

    with Ahead(cores=2) as ahead:
        for _ in range(4):
            ahead.begin(compiling)
        ahead.wait()


def test_what_a_compiler_raises_is_raised_by_whoever_waits():
    with Ahead(cores=2) as ahead, pytest.raises(ZeroDivisionError):
        ahead.begin(lambda: 1)
        failed = ahead.begin(lambda: 1 / 0)
        ahead.begin(lambda: 2)
        assert isinstance(failed.exception(SECONDS), ZeroDivisionError)
        ahead.wait()


def test_ctrl_c_is_heard_while_waiting_and_waits_for_nobody():
    # Processes that share the tests among them may not hear it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    enough = threading.Event()
    ctrl_c = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt), Ahead(cores=2) as ahead:
            compiling = ahead.begin(lambda: enough.wait(SECONDS))
            ctrl_c.start()
            ahead.wait()
        assert not compiling.done()
    finally:
        signal.signal(signal.SIGINT, before)
        enough.set()


@pytest.mark.parametrize("runs", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_compiles_each_of_its_programs_once(tmp_path, monkeypatch, times_compiled, runs):
    # Of a size that no other test has a program for.
    algorithm = FakeAlgorithm(rows=5, num_envs=2 + runs)
    monkeypatch.setattr(loop, "make_env", lambda _: ENV)
    monkeypatch.setattr(loop, "make_algorithm", lambda *_: algorithm)
    configs = [dataclasses.replace(CONFIG, seed=seed) for seed in range(runs)]
    folders = [tmp_path / str(seed) for seed in range(runs)]
    train_together(configs, folders, stop_after_seconds=1e-6)
    for name in ("start", "_collect", "_update", "_play"):
        assert times_compiled()[name] == 1, name
    train_together(configs, folders)
    for name in ("start", "_collect", "_update", "_play"):
        assert times_compiled()[name] == 1, name


def test_nothing_is_left_to_compile_when_the_first_batch_begins(
    tmp_path, monkeypatch, times_compiled
):
    class Begun(Exception):
        pass

    def first_batch(*_):
        assert {"start", "_collect", "_update", "_play"} <= times_compiled().keys()
        raise Begun

    monkeypatch.setattr(loop, "_loop", first_batch)
    with pytest.raises(Begun):
        train(CONFIG, tmp_path / "run", env=ENV, algorithm=FakeAlgorithm(rows=7))


def test_the_last_evaluation_is_compiled_while_the_run_learns(
    tmp_path, monkeypatch, times_compiled
):
    """By a thread of its own, which the end of the run waits for."""
    config = dataclasses.replace(CONFIG, evaluation=EvaluationConfig(30, 4, 5))
    is_ending, begun, compile_end, end = threading.Event(), [], loop._compile_end, Run.end

    def compile_late(runs, lanes, shapes, ahead):
        begin = ahead.begin

        def begin_late(compiling):
            def compile_program():
                assert is_ending.wait(SECONDS)
                time.sleep(0.2)
                return compiling()

            begun.append(begin(compile_program))
            return begun[-1]

        ahead.begin = begin_late
        compile_end(runs, lanes, shapes, ahead)

    def note_end(run, *given):
        assert times_compiled()["_play"] == 1
        is_ending.set()
        return end(run, *given)

    def judge(*given, episodes, **more):
        assert episodes == 4 or begun[0].done()
        return evaluate(*given, episodes=episodes, **more)

    evaluate = host.evaluate
    monkeypatch.setattr(host, "evaluate", judge)
    monkeypatch.setattr(loop, "_compile_end", compile_late)
    monkeypatch.setattr(Run, "end", note_end)
    result = train(config, tmp_path / "run", env=ENV, algorithm=FakeAlgorithm(rows=9))
    (compiling,) = begun
    assert compiling.result(SECONDS) is not None and result.argmax.episodes == 5
    assert times_compiled()["_play"] == 2


@pytest.mark.parametrize("error", [RuntimeError("no such instruction"), NoRoom("too large")])
def test_an_error_of_the_compiler_ends_the_run(tmp_path, monkeypatch, error):
    def compile_program():
        raise error

    program = SimpleNamespace(compile=compile_program)
    monkeypatch.setattr(loop, "_programs", lambda *_: [("update", program)])
    with pytest.raises(type(error), match=str(error)):
        train(CONFIG, tmp_path / "run", env=ENV, algorithm=FakeAlgorithm())
    assert (tmp_path / "run").exists() == isinstance(error, RuntimeError)
