"""The loop: budget, schedule, files, resume bit for bit, and what stops it."""

import dataclasses
import io
import json
import os
import shutil
import signal
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from counting import CountingEnv, FakeAlgorithm
from rich.console import Console
from safetensors.numpy import load_file

from majepa import checkpoint, evaluate, lanes
from majepa import run as host
from majepa.checkpoint import CheckpointError
from majepa.config import MAPPO_DEBUG, ConfigError, EvaluationConfig, TrainConfig
from majepa.envs import make_env
from majepa.envs.base import EnvError
from majepa.evaluation import Evaluation
from majepa.run_folder import BEST, CHECKPOINT, LOCK, hold, new_folder, read_config
from majepa.team import open_run
from majepa.training import TrainError, load_run, make_algorithm, train

ENV = CountingEnv(lengths=(3, 5, 2))
ALGORITHM = FakeAlgorithm()
"""Three environments, four rows each: at most 12 transitions in a batch."""
CONFIG = TrainConfig(
    MAPPO_DEBUG,
    env="test:counting",
    steps=100,
    evaluation=EvaluationConfig(every=30, episodes=4, final_episodes=6),
    save_every=40,
)


def run(folder, config=CONFIG, env=ENV, algorithm=ALGORITHM, **options):
    return train(config, folder, env=env, algorithm=algorithm, **options)


def lines(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def assert_same_state(one, other):
    """Every leaf of two checkpoints, bit for bit."""
    left, right = load_file(one / CHECKPOINT), load_file(other / CHECKPOINT)
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert array.dtype == right[name].dtype, name
        assert array.tobytes() == right[name].tobytes(), name


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, run(folder)


def test_the_budget_counts_transitions_and_is_never_exceeded(finished):
    folder, result = finished
    arrays = load_file(folder / CHECKPOINT)
    assert 100 - 12 < result.transitions <= 100
    assert arrays["transitions"] == result.transitions
    rows = 4 * int(arrays["updates"])
    firsts = sum(rows // (length + 1) for length in ENV.lengths)
    assert result.transitions == 3 * rows - firsts
    assert result.stopped is None


def test_evaluations_come_on_schedule_with_every_episode(finished):
    folder, result = finished
    found = lines(folder, "evaluations.jsonl")
    kinds = {(line["transitions"], line["kind"]) for line in found}
    # The one due after 90 transitions is the final one.
    assert sorted((at // 30, kind) for at, kind in kinds) == [
        (1, "training"), (2, "training"), (3, "final"),
    ]  # fmt: skip
    for at, kind in kinds:
        for actions in ("argmax", "sampled"):
            here = [x for x in found if (x["transitions"], x["actions"]) == (at, actions)]
            assert [x["episode"] for x in here] == list(range(6 if kind == "final" else 4))
    assert [x["length"] for x in found[:4]] == [3, 5, 2, 3]
    assert result.argmax.greedy and not result.sampled.greedy
    assert result.argmax.win_rate == pytest.approx(4 / 6)


def test_metrics_are_averaged_and_those_not_measured_are_left_out(finished):
    folder, result = finished
    found = lines(folder, "metrics.jsonl")
    assert [line["transitions"] for line in found] == sorted(line["transitions"] for line in found)
    last = found[-1]
    assert last["kind"] == "final" and last["transitions"] == result.transitions
    assert last["learner/calls"] == last["updates"]
    assert "not_measured" not in last and "loss/actor" in last
    assert last["evaluation/win_rate_low"] < last["evaluation/win_rate"]
    assert found[0]["seconds/compiling"] > 0 and last["seconds"] >= found[0]["seconds"]
    episodes = sum(line.get("training/episodes", 0) for line in found)
    rows = 4 * last["updates"]
    assert episodes == sum((rows + 1) // (length + 1) for length in ENV.lengths)


def test_a_folder_says_what_made_it(finished):
    folder, _ = finished
    assert read_config(folder) == CONFIG
    versions = json.loads((folder / "versions.json").read_text())
    assert versions["environment_version"] == "counting-1"
    assert {"majepa", "jax", "jaxlib", "equinox", "python", "devices"} <= versions.keys()


@pytest.mark.parametrize("stop", [1, 45])
def test_a_stopped_run_goes_on_bit_for_bit(finished, tmp_path, stop):
    folder = tmp_path / "parts"
    part = run(folder, stop_after=stop)
    assert stop <= part.transitions < stop + 12 and "asked to stop" in part.stopped
    whole, result = finished
    rest = run(folder, resume=True)
    assert rest.transitions == result.transitions and rest.stopped is None
    assert_same_state(whole, folder)
    kept = [x for x in lines(folder, "evaluations.jsonl") if x["kind"] != "stopped"]
    assert kept == lines(whole, "evaluations.jsonl")
    assert rest.seconds > part.seconds


def test_what_came_after_a_checkpoint_is_forgotten(finished, tmp_path):
    folder = tmp_path / "killed"
    run(folder, stop_after=45)
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"transitions": 77, "kind": "training"}\n{"transitions": 8')
    run(folder, resume=True)
    ends = [x["transitions"] for x in lines(folder, "metrics.jsonl")]
    assert 77 not in ends and ends == sorted(ends)
    assert_same_state(finished[0], folder)


def contents(folder):
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK)
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def test_a_finished_run_is_left_as_it_is(finished, tmp_path):
    """Nothing is written, and its result is told again."""
    folder = tmp_path / "again"
    first = run(folder)
    before = contents(folder)
    console = Console(file=io.StringIO(), width=200)
    again = run(folder, resume=True, console=console)
    assert "is finished at" in console.file.getvalue()
    assert contents(folder) == before
    assert (again.transitions, again.stopped) == (first.transitions, None)
    assert again.seconds == lines(folder, "metrics.jsonl")[-1]["seconds"]
    for one, other in ((again.argmax, first.argmax), (again.sampled, first.sampled)):
        assert one.greedy == other.greedy
        for name in ("won", "episode_return", "length"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("lost", ["metrics.jsonl", "evaluations.jsonl"])
def test_a_run_that_was_killed_while_it_was_judged_is_judged_again(finished, tmp_path, lost):
    whole, result = finished
    folder = tmp_path / "killed"
    shutil.copytree(whole, folder)
    kept = (folder / lost).read_text().splitlines(keepends=True)[:-1]
    (folder / lost).write_text("".join(kept))
    again = run(folder, resume=True)
    assert again.argmax.win_rate == result.argmax.win_rate
    assert lines(folder, "evaluations.jsonl") == lines(whole, "evaluations.jsonl")
    assert lines(folder, "metrics.jsonl")[-1]["kind"] == "final"


def test_a_run_that_was_killed_before_its_best_was_written_writes_it(tmp_path, monkeypatch):
    """Its only evaluation is the final one."""
    schedule = dataclasses.replace(CONFIG.evaluation, every=1000)
    config, folder = dataclasses.replace(CONFIG, evaluation=schedule), tmp_path / "killed"
    with monkeypatch.context() as killed:
        write = checkpoint.Writer.write

        def only_the_first(self, path, taken, *, twin=None):
            if twin is None:
                write(self, path, taken)

        killed.setattr(checkpoint.Writer, "write", only_the_first)
        run(folder, config)
    assert not (folder / BEST).exists()
    run(folder, config, resume=True)
    assert (folder / BEST).is_file()
    # From now on it is finished.
    before = contents(folder)
    run(folder, config, resume=True)
    assert contents(folder) == before


def test_a_run_that_was_killed_before_its_best_lost_the_replay_ends_again(
    finished, tmp_path, monkeypatch
):
    folder = tmp_path / "killed"
    shutil.copytree(finished[0], folder)
    before = contents(folder)
    monkeypatch.setattr(
        checkpoint, "read_omitted", lambda path: ["x"] if path.name == CHECKPOINT.name else []
    )
    pruned = []
    monkeypatch.setattr(checkpoint, "prune", lambda path, branch: pruned.append(path))
    run(folder, resume=True)
    assert pruned == [folder / BEST] and contents(folder) != before


def test_a_lost_last_checkpoint_is_written_again(finished, tmp_path):
    """Though the best one is of the end, and the run was judged."""
    folder = tmp_path / "lost"
    shutil.copytree(finished[0], folder)
    shutil.copy(folder / CHECKPOINT, folder / BEST)
    (folder / CHECKPOINT).unlink()
    run(folder, resume=True)
    assert_same_state(finished[0], folder)


def test_a_run_is_trained_by_one_process_at_a_time(tmp_path):
    """A second one is told so, and disturbs nothing."""
    folder = tmp_path / "busy"
    run(folder, stop_after=1)
    partial = folder / CHECKPOINT.parent / f".{CHECKPOINT.stem}.1{CHECKPOINT.suffix}"
    partial.write_bytes(b"half")
    before = contents(folder)
    with hold(folder), pytest.raises(OSError, match=r"another process is training .*busy; wait"):
        run(folder, resume=True)
    assert contents(folder) == before
    assert run(folder, resume=True).stopped is None


def test_seeds_matter(finished, tmp_path):
    run(tmp_path / "other", dataclasses.replace(CONFIG, seed=1))
    one, other = load_file(finished[0] / CHECKPOINT), load_file(tmp_path / "other" / CHECKPOINT)
    assert (one["learner/weight"] != other["learner/weight"]).all()


def test_programs_compile_once(tmp_path):
    algorithm = FakeAlgorithm(num_envs=2)
    before = lanes._collect._cache_size(), lanes._update._cache_size()
    run(tmp_path / "run", algorithm=algorithm)
    assert (lanes._collect._cache_size(), lanes._update._cache_size()) == tuple(
        count + 1 for count in before
    )


def test_a_budget_below_one_batch_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"steps is 11; mappo collects 12 rows .* at least that"):
        run(tmp_path / "tiny", dataclasses.replace(CONFIG, steps=11))
    assert not (tmp_path / "tiny").exists()


def test_a_run_that_reached_its_budget_is_finished_whatever_the_limits_say(tmp_path):
    config = dataclasses.replace(CONFIG, steps=12)
    result = run(tmp_path / "done", config, stop_after_seconds=1e-6, stop_after=1)
    assert result.stopped is None
    assert {x["kind"] for x in lines(tmp_path / "done", "evaluations.jsonl")} == {"final"}


def test_a_stop_where_an_evaluation_is_due_does_not_lose_it(finished, tmp_path):
    whole = [x["transitions"] for x in lines(finished[0], "metrics.jsonl") if "kind" in x]
    run(tmp_path / "parts", stop_after=whole[0])
    run(tmp_path / "parts", resume=True)
    parts = [x for x in lines(tmp_path / "parts", "metrics.jsonl") if "kind" in x]
    assert [x["transitions"] for x in parts if x["kind"] != "stopped"] == whole


def test_a_time_limit_saves_evaluates_and_says_where_it_stopped(tmp_path):
    result = run(tmp_path / "short", stop_after_seconds=1e-6)
    assert "time limit" in result.stopped and 0 < result.transitions <= 12
    assert result.argmax.episodes == 6
    assert {x["kind"] for x in lines(tmp_path / "short", "evaluations.jsonl")} == {"stopped"}
    assert (tmp_path / "short" / CHECKPOINT).exists()


def test_without_its_last_checkpoint_a_run_goes_on_from_the_best(finished, tmp_path):
    folder = tmp_path / "parts"
    run(folder, stop_after=45)
    best = load_file(folder / BEST)["transitions"]
    (folder / CHECKPOINT).write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"no complete checkpoint.*remove it to go on from"):
        run(folder, resume=True)
    (folder / CHECKPOINT).unlink()
    run(folder, resume=True)
    assert 0 < best <= 45
    assert_same_state(finished[0], folder)


def test_killed_before_its_first_checkpoint_a_run_starts_again(finished, tmp_path):
    folder = tmp_path / "parts"
    run(folder, stop_after=1)
    for path in (folder / CHECKPOINT).parent.iterdir():
        path.unlink()
    partial = folder / CHECKPOINT.parent / f".{CHECKPOINT.stem}.1{CHECKPOINT.suffix}"
    partial.write_bytes(b"half")
    run(folder, resume=True)
    assert not partial.exists()
    assert_same_state(finished[0], folder)
    kinds = [x["kind"] for x in lines(folder, "metrics.jsonl") if "kind" in x]
    assert kinds == [x["kind"] for x in lines(finished[0], "metrics.jsonl") if "kind" in x]


def test_looking_at_a_run_leaves_a_save_under_way_alone(tmp_path):
    folder = tmp_path / "live"
    run(folder, stop_after=1)
    partial = folder / CHECKPOINT.parent / f".{CHECKPOINT.stem}.1{CHECKPOINT.suffix}"
    partial.write_bytes(b"half")
    with pytest.raises(EnvError):  # its world has no name that leads to it
        open_run(folder)
    load_run(folder, ALGORITHM, ENV)
    assert partial.exists()


def test_an_interrupt_saves_and_ends(finished, tmp_path, monkeypatch):
    checks = iter(range(100))

    def interrupt(*_):
        if next(checks) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(lanes, "check_health", interrupt)
        before = signal.getsignal(signal.SIGINT)
        result = run(tmp_path / "run")
        assert signal.getsignal(signal.SIGINT) is before
    assert result.stopped == "interrupted" and result.argmax is None
    assert load_file(tmp_path / "run" / CHECKPOINT)["updates"] == 3
    run(tmp_path / "run", resume=True)
    assert_same_state(finished[0], tmp_path / "run")


def test_an_evaluation_that_is_due_at_an_interrupt_is_made(finished, tmp_path, monkeypatch):
    whole = [x for x in lines(finished[0], "metrics.jsonl") if "kind" in x]
    due = whole[0]["updates"]
    checks = iter(range(1, 100))

    def interrupt(*_):
        if next(checks) == due:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(lanes, "check_health", interrupt)
        result = run(tmp_path / "run")
    assert result.stopped == "interrupted" and result.transitions == whole[0]["transitions"]
    (last,) = [x for x in lines(tmp_path / "run", "metrics.jsonl") if "kind" in x]
    assert (last["kind"], last["transitions"]) == ("training", result.transitions)
    run(tmp_path / "run", resume=True)
    assert_same_state(finished[0], tmp_path / "run")
    parts, undisturbed = (
        lines(folder, "evaluations.jsonl") for folder in (tmp_path / "run", finished[0])
    )
    assert parts == undisturbed


class Remembering(NamedTuple):
    inner: Any
    replay: Any


class Hoarder(FakeAlgorithm):
    """Learns from what it kept of the last update."""

    def init(self, key):
        return Remembering(super().init(key), {"rows": jnp.zeros(50), "head": jnp.asarray(0)})

    def act(self, state, carry, step, key, *, greedy):
        return super().act(state.inner, carry, step, key, greedy=greedy)

    def update(self, state, data, key):
        kept = state.inner._replace(weight=state.inner.weight + state.replay["rows"][:4])
        inner, metrics = super().update(kept, data, key)
        replay = {"rows": state.replay["rows"] + 1, "head": state.replay["head"] + 1}
        return Remembering(inner, replay), metrics


@pytest.fixture(scope="module")
def hoarded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, run(folder, algorithm=Hoarder())


def replay_of(path):
    return [name for name in load_file(path) if "replay" in name]


def test_a_replay_is_kept_as_long_as_it_is_needed(hoarded, tmp_path, monkeypatch):
    whole, result = hoarded
    folder = tmp_path / "parts"
    part = run(folder, algorithm=Hoarder(), stop_after=45)
    monkeypatch.setattr("majepa.team.make_algorithm", lambda *_: Hoarder())
    for name, which in {"last": CHECKPOINT, "best": BEST}.items():
        assert len(replay_of(folder / which)) == 2 and replay_of(whole / which) == []
        stopped, ended = (load_run(x, Hoarder(), ENV, which=which) for x in (folder, whole))
        assert stopped.learner.replay["head"] == stopped.updates
        assert ended.learner.replay["head"] == 0 and not ended.learner.replay["rows"].any()
        judged = evaluate(whole, episodes=6, checkpoint=name, env=ENV)
        np.testing.assert_array_equal(judged.argmax.length, result.argmax.length)
        assert evaluate(folder, episodes=2, checkpoint=name, env=ENV).transitions <= 57
    assert part.transitions == load_run(folder, Hoarder(), ENV).transitions
    run(folder, algorithm=Hoarder(), resume=True)
    assert_same_state(whole, folder)
    assert replay_of(folder / BEST) == []


def test_what_was_kept_without_its_replay_is_not_continued(hoarded, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(hoarded[0], folder)
    (folder / CHECKPOINT).unlink()
    with pytest.raises(CheckpointError, match=r"best\.safetensors .* without .* train again"):
        run(folder, algorithm=Hoarder(), resume=True)
    (folder / BEST).unlink()
    run(folder, algorithm=Hoarder(), resume=True)
    assert_same_state(hoarded[0], folder)


def test_a_run_whose_best_checkpoint_was_removed_still_ends(hoarded, tmp_path):
    folder = tmp_path / "copy"
    run(folder, algorithm=Hoarder(), stop_after=75)
    (folder / BEST).unlink()
    assert run(folder, algorithm=Hoarder(), resume=True).stopped is None
    assert_same_state(hoarded[0], folder)


def test_bad_rows_end_the_run_before_anything_is_learned(tmp_path, monkeypatch):
    monkeypatch.setattr(lanes, "_update", SimpleNamespace(lower=lanes._update.lower))
    with pytest.raises(EnvError, match=r"environment 2, agent 1 \(medic\), feature 3"):
        run(tmp_path / "nan", env=dataclasses.replace(ENV, nan_at=(2, 1, 3)))
    with pytest.raises(EnvError, match=r"no legal action for environment 0, agent 1 \(medic\)"):
        run(tmp_path / "stuck", env=dataclasses.replace(ENV, stuck_at=(0, 1)))
    assert not (tmp_path / "nan" / CHECKPOINT).exists()


def test_updates_that_are_not_finite_end_the_run_and_spare_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "PATIENCE", 3)
    folder = tmp_path / "run"
    config = dataclasses.replace(CONFIG, steps=1000)
    with pytest.raises(TrainError, match="3 updates in a row") as caught:
        run(folder, config, algorithm=FakeAlgorithm(nonfinite_from=5))
    assert str(folder / CHECKPOINT) in str(caught.value)
    arrays = load_file(folder / CHECKPOINT)
    assert arrays["updates"] < 8 and np.isfinite(arrays["learner/weight"]).all()
    assert lines(folder, "metrics.jsonl")[-1]["nonfinite_in_a_row"] == 3


def test_folders_of_others_are_left_alone(finished, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not an empty folder"):
        run(tmp_path)
    with pytest.raises(FileExistsError, match="--resume"):
        run(finished[0])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_resume_refuses_what_is_not_this_run(finished, tmp_path):
    folder = finished[0]
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        run(tmp_path, resume=True)
    changed = dataclasses.replace(CONFIG, algo=dataclasses.replace(MAPPO_DEBUG, clip=0.3))
    with pytest.raises(ConfigError, match=r"algo\.clip = 0\.2, not 0\.3"):
        run(folder, changed, resume=True)

    class Newer(CountingEnv):
        spec = property(lambda self: dataclasses.replace(ENV.spec, version="counting-2"))

    with pytest.raises(EnvError, match="version counting-1 of test:counting, this is counting-2"):
        run(folder, env=Newer(), resume=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "one JSON object"),
        ("unknown", "clipp"),
        ("algorithm", "must name its algorithm"),
    ],
)
def test_a_stored_config_that_cannot_be_used(finished, tmp_path, text, message):
    data = json.loads((finished[0] / "config.json").read_text())
    if text == "unknown":
        data["algo"]["clipp"] = 0.1
    elif text == "algorithm":
        data["algo"]["algorithm"] = "nobody"
    is_raw = text in ("{", "[]")
    (tmp_path / "config.json").write_text(text if is_raw else json.dumps(data))
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


def test_new_folders_are_numbered(tmp_path):
    names = [new_folder(CONFIG, tmp_path).name for _ in range(3)]
    assert names == ["mappo-counting-0-1", "mappo-counting-0-2", "mappo-counting-0-3"]


@pytest.mark.slow
def test_mappo_goes_on_bit_for_bit_in_the_simulator(tmp_path, monkeypatch):
    def judge(*_, episodes, key, greedy):
        """In no time; the command line's test plays real episodes."""
        zeros = np.zeros(episodes, np.float32)
        return Evaluation(zeros > 0, zeros, zeros.astype(np.int32), greedy)

    monkeypatch.setattr(host, "evaluate", judge)
    env = make_env("sim:3m")
    config = TrainConfig(MAPPO_DEBUG, steps=320)
    algorithm = make_algorithm(config, env.spec)
    whole = run(tmp_path / "whole", config, env, algorithm)
    part = run(tmp_path / "parts", config, env, algorithm, stop_after=120)
    assert 120 <= part.transitions < whole.transitions
    rest = run(tmp_path / "parts", config, env, algorithm, resume=True)
    assert rest.transitions == whole.transitions
    assert_same_state(tmp_path / "whole", tmp_path / "parts")
