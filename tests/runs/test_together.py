"""Several seeds in one program: each run is what it would be alone, and its folder as well."""

import contextlib
import dataclasses
import io
import json
import os
import shutil
import signal
from typing import NamedTuple

import jax
import numpy as np
import pytest
from counting import FakeAlgorithm, Lottery
from matching import Matching
from rich.console import Console
from safetensors.numpy import load_file

from majepa import lanes
from majepa import run as host
from majepa import training as loop
from majepa.config import (
    MAPPO_DEBUG,
    QMIX_DEBUG,
    ConfigError,
    EvaluationConfig,
    MappoConfig,
    QmixConfig,
    TrainConfig,
)
from majepa.log import Clock
from majepa.progress import Lines
from majepa.run_folder import BEST, CHECKPOINT, read_config
from majepa.training import TrainError, load_run, make_algorithm, train, train_together

ENV = Lottery()
ALGORITHM = FakeAlgorithm()
"""At most 12 transitions in a batch; after the same rows, each seed has its own number of them."""
SEEDS = (1, 0, 10)
CONFIGS = [
    TrainConfig(
        MAPPO_DEBUG,
        env="test:counting",
        seed=seed,
        steps=120,
        evaluation=EvaluationConfig(every=30, episodes=4, final_episodes=6),
        save_every=40,
    )
    for seed in SEEDS
]


@contextlib.contextmanager
def world(env=ENV, algorithm=ALGORITHM):
    """What the names in the configs stand for."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "make_env", lambda _: env)
        patched.setattr(loop, "make_algorithm", lambda *_: algorithm)
        yield patched


def together(folders, configs=CONFIGS, **options):
    with world():
        return train_together(configs, folders, **options)


def alone(config, folder, **options):
    return train(config, folder, env=ENV, algorithm=ALGORITHM, **options)


def lines(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def measured(folder):
    """The lines of a run's log, those of them that a clock asked for left out."""
    return [
        {k: v for k, v in line.items() if not k.startswith(("seconds", "speed"))}
        for line in lines(folder, "metrics.jsonl")
        if "kind" in line
    ]


def assert_same_state(one, other, which=CHECKPOINT):
    left, right = load_file(one / which), load_file(other / which)
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert array.dtype == right[name].dtype, name
        assert array.tobytes() == right[name].tobytes(), name


def assert_same_run(one, other):
    assert_same_state(one, other)
    assert_same_state(one, other, BEST)
    assert lines(one, "evaluations.jsonl") == lines(other, "evaluations.jsonl")


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Each run by itself."""
    parent = tmp_path_factory.mktemp("single")
    return [
        (parent / str(config.seed), alone(config, parent / str(config.seed))) for config in CONFIGS
    ]


@pytest.fixture(scope="module")
def joint(tmp_path_factory):
    """All of them in one program."""
    parent = tmp_path_factory.mktemp("joint")
    folders = [parent / str(seed) for seed in SEEDS]
    with (parent / "said").open("w") as file:
        results = together(folders, console=Console(file=file, width=300))
    return list(zip(folders, results, strict=True))


@pytest.fixture
def folders(tmp_path):
    return [tmp_path / str(seed) for seed in SEEDS]


def test_each_run_is_what_it_is_alone(single, joint):
    for (one, expected), (other, result) in zip(single, joint, strict=True):
        assert_same_run(one, other)
        assert measured(one) == measured(other)
        assert result.folder == other and result.stopped is None
        assert result.transitions == expected.transitions
        for name in ("argmax", "sampled"):
            judged, wanted = getattr(result, name), getattr(expected, name)
            assert judged.greedy == wanted.greedy
            np.testing.assert_array_equal(judged.episode_return, wanted.episode_return)


def test_each_run_ends_at_its_own_batch_within_the_budget(joint):
    updates = set()
    for folder, result in joint:
        arrays = load_file(folder / CHECKPOINT)
        assert 120 - 12 < result.transitions <= 120
        assert arrays["transitions"] == result.transitions
        assert arrays["updates"] == arrays["learner/updates"]
        ends = [x["transitions"] for x in lines(folder, "metrics.jsonl")]
        assert ends == sorted(ends) and ends[-1] == result.transitions
        updates.add(int(arrays["updates"]))
    assert len(updates) > 1
    assert len({result.transitions for _, result in joint}) > 1


def test_every_folder_is_that_of_an_ordinary_run(joint, tmp_path):
    names = {
        ".lock", "checkpoints", "config.json", "evaluations.jsonl", "metrics.jsonl",
        "versions.json",
    }  # fmt: skip
    for config, (folder, result) in zip(CONFIGS, joint, strict=True):
        assert {path.name for path in folder.iterdir()} == names
        assert read_config(folder) == config
        for which in (CHECKPOINT, BEST):
            state = load_run(folder, ALGORITHM, ENV, which=which)
            assert state.learner.weight.shape == (4,) and state.learner.updates == state.updates
        assert state.transitions <= result.transitions


def interrupted(folders, call, place, monkeypatch):
    """Runs that a signal meets at a certain call of a function of the loop."""
    target, name = (lanes, "check_health") if place == "collecting" else (host.Run, "learned")
    calls, inner = iter(range(1, 1000)), getattr(target, name)

    def interrupt(*arguments):
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(target, name, interrupt)
        return together(folders)


@pytest.mark.slow
def test_interrupted_runs_go_on_together_bit_for_bit(joint, folders, monkeypatch):
    parts = interrupted(folders, 8, "collecting", monkeypatch)
    assert all(part.stopped == "interrupted" and part.argmax is None for part in parts)
    assert [load_file(folder / CHECKPOINT)["updates"] for folder in folders] == [3, 3, 3]
    for (whole, expected), folder, rest in zip(joint, folders, together(folders), strict=True):
        assert rest.transitions == expected.transitions and rest.stopped is None
        assert_same_run(whole, folder)


@pytest.mark.slow
def test_a_signal_may_come_between_two_of_the_runs(joint, folders, monkeypatch):
    """The first has already begun another batch when the second hears of it."""
    interrupted(folders, 3 * 3 + 2, "learning", monkeypatch)
    assert [load_file(folder / CHECKPOINT)["updates"] for folder in folders] == [5, 4, 4]
    together(folders)
    for (whole, _), folder in zip(joint, folders, strict=True):
        assert_same_run(whole, folder)


@pytest.mark.slow
def test_interrupted_runs_go_on_alone(joint, folders, monkeypatch):
    interrupted(folders, 8, "collecting", monkeypatch)
    for lane in (0, 2):
        alone(CONFIGS[lane], folders[lane], resume=True)
        assert_same_run(joint[lane][0], folders[lane])


@pytest.mark.slow
def test_runs_begun_alone_go_on_together_wherever_they_are(joint, folders):
    """One is finished, one is half-way, one has not begun."""
    done = alone(CONFIGS[0], folders[0])
    before = load_file(folders[0] / CHECKPOINT)
    part = alone(CONFIGS[1], folders[1], stop_after=45)
    assert done.stopped is None and part.transitions < 60
    results = together(folders)
    assert results[0].transitions == done.transitions
    assert results[0].argmax.episode_return.tolist() == done.argmax.episode_return.tolist()
    after = load_file(folders[0] / CHECKPOINT)
    assert all(array.tobytes() == after[name].tobytes() for name, array in before.items())
    for number, ((whole, expected), folder) in enumerate(zip(joint, folders, strict=True)):
        assert results[number].transitions == expected.transitions
        assert_same_state(whole, folder)
        kept = [x for x in lines(folder, "evaluations.jsonl") if x["kind"] != "stopped"]
        assert kept == lines(whole, "evaluations.jsonl")


@pytest.mark.slow
def test_finished_runs_are_not_trained_again(joint, folders, monkeypatch):
    for (whole, _), folder in zip(joint, folders, strict=True):
        shutil.copytree(whole, folder)
    monkeypatch.setattr(lanes, "_update", None)
    results = together(folders)
    for (whole, expected), folder, result in zip(joint, folders, results, strict=True):
        assert result.transitions == expected.transitions
        assert_same_run(whole, folder)


@pytest.mark.slow
def test_one_run_is_no_special_case(joint, tmp_path):
    (result,) = together([tmp_path / "one"], CONFIGS[1:2])
    assert result.transitions == joint[1][1].transitions
    assert_same_run(joint[1][0], tmp_path / "one")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 0}, "need seeds of their own"),
        ({"steps": 130}, "differ in their seed alone"),
        ({"algo": dataclasses.replace(MAPPO_DEBUG, clip=0.3)}, "differ in their seed alone"),
        ({"env": "test:other"}, "differ in their seed alone"),
    ],
)
def test_runs_that_do_not_belong_together_are_refused(folders, change, message):
    configs = [*CONFIGS[:2], dataclasses.replace(CONFIGS[2], **change)]
    with pytest.raises(ConfigError, match=message):
        together(folders, configs)
    assert not any(folder.exists() for folder in folders)


def test_a_budget_below_one_batch_is_refused(folders):
    with pytest.raises(ConfigError, match="steps is 11"):
        together(folders, [dataclasses.replace(config, steps=11) for config in CONFIGS])
    assert not any(folder.exists() for folder in folders)


class Trap(Lottery):
    """Nothing is legal in the world of a run whose first environment has long episodes."""

    def row(self, where):
        row = super().row(where)
        is_bad = (where.length[0] == self.limit) & (where.total[0] >= 4)
        return row._replace(legal=row.legal.at[0, 0].set(~is_bad))


def test_a_run_that_fails_leaves_the_others_alone(joint, folders):
    lengths = [load_file(whole / CHECKPOINT)["stream/env_state/length"][0] for whole, _ in joint]
    assert [length == ENV.limit for length in lengths] == [False, True, False]
    message = "1 of 3 runs trained together failed: .* no legal action for environment 0, agent 0"
    with world(Trap()), pytest.raises(TrainError, match=message) as caught:
        train_together(CONFIGS, folders)
    assert {result.folder for result in caught.value.results} == {folders[0], folders[2]}
    assert not (folders[1] / CHECKPOINT).exists()
    for lane in (0, 2):
        assert lines(folders[lane], "metrics.jsonl")[-1]["kind"] == "final"
        assert_same_state(joint[lane][0], folders[lane])


def test_the_group_hears_of_a_failure_when_it_happens(folders):
    said = io.StringIO()
    with world(Trap()), pytest.raises(TrainError):
        train_together(CONFIGS, folders, console=Console(file=said, width=300))
    *before, last = said.getvalue().splitlines()
    assert sum("0 failed: " in line for line in before) == 1 and "failed" not in last


def test_runs_that_all_fail_after_others_have_ended_leave_those_their_results(joint, folders):
    """The first is finished already; all that are left fail."""
    shutil.copytree(joint[0][0], folders[0])
    message = "2 of 3 runs trained together failed: .* no legal action .*; .* no legal action"
    with world(Lottery(stuck_at=(0, 0))), pytest.raises(TrainError, match=message) as caught:
        train_together(CONFIGS, folders)
    assert [result.folder for result in caught.value.results] == [folders[0]]


def test_agents_are_judged_without_a_copy_of_their_replay():
    class Learner(NamedTuple):
        weight: jax.Array
        replay: jax.Array

    def state(seed):
        learner = Learner(jax.numpy.full(3, seed), jax.numpy.zeros(1000))
        return lanes.RunState(learner, jax.numpy.zeros(2), jax.random.key(seed), seed, 0)

    both = lanes.Lanes(ALGORITHM, ENV, [state(0), state(1)], Clock())
    assert both.acting(1).learner.replay is None and both.acting(1).transitions == 1
    np.testing.assert_array_equal(both.acting(1).learner.weight, 1)
    assert both[1].learner.replay.shape == (1000,)


def test_only_the_first_run_speaks(joint):
    said = (joint[0][0].parent / "said").read_text()
    assert [f"seed {seed}) starts" in said for seed in SEEDS] == [True, False, False]
    assert said.count("  losses") == 1


@pytest.mark.slow
def test_a_panel_follows_the_work_of_all_runs(folders, monkeypatch):
    phases = []
    monkeypatch.setattr(host, "make_progress", recorder(phases))
    configs = [dataclasses.replace(config, steps=12) for config in CONFIGS]
    together(folders, configs, console=Console(file=io.StringIO(), force_terminal=True))
    assert [is_terminal for is_terminal, _ in phases] == [True, False, False]
    assert {"evaluating", "saving"} <= set(phases[0][1]) and not phases[1][1] + phases[2][1]


def recorder(phases):
    """Progress that takes note of what each run is told."""

    class Recorder(Lines):
        def __init__(self, console, budget, _clock):
            super().__init__(Console(quiet=True), budget)
            self.heard = []
            phases.append((console.is_terminal, self.heard))

        def phase(self, name):
            self.heard.append(name)

    return Recorder


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["mappo", "qmix"])
def test_a_real_algorithm_learns_the_same_in_a_lane(algorithm, tmp_path):
    env = Matching()
    algo: MappoConfig | QmixConfig = MAPPO_DEBUG
    if algorithm == "qmix":
        algo = dataclasses.replace(QMIX_DEBUG, epsilon_steps=50)
    schedule = EvaluationConfig(every=1000, episodes=4, final_episodes=8)
    configs = [
        TrainConfig(algo, env="toy:matching", seed=seed, steps=200, evaluation=schedule)
        for seed in (0, 1)
    ]
    learner = make_algorithm(configs[0], env.spec)
    with world(env, learner):
        results = train_together(configs, [tmp_path / "0", tmp_path / "1"])
    expected = train(configs[1], tmp_path / "alone", env=env, algorithm=learner)
    assert results[1].transitions == expected.transitions
    np.testing.assert_allclose(
        results[1].argmax.episode_return, expected.argmax.episode_return, atol=1e-5
    )
    one, lane, other = (load_file(tmp_path / x / CHECKPOINT) for x in ("alone", "1", "0"))
    assert one.keys() == lane.keys()
    for name, array in one.items():
        np.testing.assert_allclose(lane[name], array, rtol=1e-3, atol=1e-5, err_msg=name)
    assert any(not np.allclose(lane[name], array) for name, array in other.items())
