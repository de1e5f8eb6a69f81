"""`majepa train --seeds`: several runs from one command, each of them an ordinary one."""

import dataclasses
import json
import re

import pytest
from counting import CountingEnv, FakeAlgorithm

from majepa import api, cli
from majepa import training as loop
from majepa.config import MAPPO_DEBUG, ConfigError, TrainConfig, with_seeds
from majepa.run_folder import read_config

SHORT = ("mappo", "--preset", "debug", "--steps", "60", "--evaluation.every", "30",
         "--evaluation.episodes", "4", "--evaluation.final-episodes", "6")  # fmt: skip
NAMES = {".lock", "checkpoints", "config.json", "evaluations.jsonl", "metrics.jsonl", "report.html",
         "versions.json"}  # fmt: skip


@pytest.fixture
def world(monkeypatch, tmp_path):
    """A quick one, in an empty folder, with agents that nobody can watch."""

    def unwatchable(_):
        raise OSError("nothing to see")

    monkeypatch.setattr(loop, "make_env", lambda _: CountingEnv())
    monkeypatch.setattr(loop, "make_algorithm", lambda *_: FakeAlgorithm())
    monkeypatch.setattr(cli, "record_battle", unwatchable)
    monkeypatch.setattr(cli, "_keep_programs", lambda: None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def kinds(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line.get("kind") for line in map(json.loads, lines)]


def test_a_number_of_seeds_counts_from_the_first(world, capsys):
    cli.train([*SHORT, "--seeds", "3", "--seed", "5"])
    said = capsys.readouterr().out
    runs = sorted((world / "runs").iterdir())
    assert [run.name for run in runs] == ["mappo-3m-5-1", "mappo-3m-6-1", "mappo-3m-7-1"]
    assert [read_config(run).seed for run in runs] == [5, 6, 7]
    for run in runs:
        assert {path.name for path in run.iterdir()} == NAMES
        assert kinds(run)[-1] == "final"
        assert (
            sum(line.startswith(f"runs/{run.name}  win rate ") for line in said.splitlines()) == 1
        )
    assert "one program for seeds 5, 6, 7" in said and "--resume" not in said


@pytest.mark.slow
def test_seeds_may_be_named(world):
    cli.train([*SHORT, "--seeds", "1302", "2771", "--out", "mine"])
    assert sorted(path.name for path in (world / "mine").iterdir()) == ["seed-1302", "seed-2771"]
    assert read_config(world / "mine" / "seed-2771").seed == 2771


def test_runs_that_were_stopped_go_on_together(world, capsys):
    cli.train([*SHORT, "--seeds", "2", "--minutes", "1e-9"])
    said = capsys.readouterr().out
    runs = [world / "runs" / f"mappo-3m-{seed}-1" for seed in (0, 1)]
    assert "stopped      the time limit" in said
    (again,) = (line for line in said.splitlines() if line.startswith("go on with"))
    words = again.split()[5:]
    assert words == ["--resume", "runs/mappo-3m-0-1", "runs/mappo-3m-1-1"]
    cli.train(words)
    assert [kinds(run)[-1] for run in runs] == ["final", "final"]
    assert "--resume" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seeds", "0"), "seeds is 0; it must be one or more"),
        (("--seeds", "4", "4"), "seeds are 4, 4; each must be there once"),
        (("--seeds", "4", "-1"), "seed is -1"),
        (("--seeds", "1", "2", "--seed", "3"), "leave out --seed"),
        (("--seeds", "1302"), "64 at most; did you mean --seed 1302?"),
        (("--seeds",), "--seeds has no value; it needs how many seeds"),
        (("--seeds=",), "--seeds has no value"),
        (("--seeds", "1", "--seeds", "2"), "--seeds is there 2 times"),
        (("--resume",), "--resume has no value; it needs the folder of a run"),
        (("--resume", ""), "--resume has no value"),
        (("--resume", "--minutes", "3"), "--resume has no value"),
        (("--resume", "one", "--resume", "two"), "--resume is there 2 times"),
    ],
)
def test_seeds_that_cannot_be_are_refused(world, arguments, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        cli.train([*SHORT, *arguments])
    assert not any(world.iterdir())


def test_runs_that_are_there_already_are_all_named(world):
    for seed in (0, 1):
        cli.train([*SHORT, "--seed", str(seed), "--out", f"mine/seed-{seed}"])
    again = "mine/seed-0 holds a run already; continue all with `majepa train --resume"
    for count in ("2", "3"):
        with pytest.raises(FileExistsError, match=f"{again} mine/seed-0 mine/seed-1`"):
            cli.train([*SHORT, "--seeds", count, "--out", "mine"])
    with pytest.raises(FileExistsError, match=r"continue it with .* --resume mine/seed-1`"):
        cli.train([*SHORT, "--seeds", "1", "5", "--out", "mine"])


def test_a_folder_that_cannot_be_made_is_named(world):
    (world / "runs").touch()
    with pytest.raises(OSError, match=r"^cannot write runs: runs is a file$"):
        cli.train([*SHORT])
    with pytest.raises(OSError, match=r"^cannot write runs/mine: Not a directory$"):
        cli.train([*SHORT, "--out", "runs/mine"])


def test_a_folder_that_is_taken_leaves_all_as_they_are(world):
    (world / "mine" / "seed-1").mkdir(parents=True)
    (world / "mine" / "seed-1" / "note").touch()
    with pytest.raises(FileExistsError, match="seed-1 is not an empty folder"):
        cli.train([*SHORT, "--seeds", "3", "--out", "mine"])
    assert [path.name for path in (world / "mine").iterdir()] == ["seed-1"]


def test_resumed_runs_keep_their_settings(world):
    cli.train([*SHORT, "--out", "one"])
    cli.train([*SHORT, "--out", "two", "--seed", "1", "--save-every", "7"])
    with pytest.raises(ConfigError, match="two was started with save_every = 7, not 10000"):
        cli.train(["--resume", "one", "two"])
    with pytest.raises(ConfigError, match="leave out --out, --preset, --config and --seeds"):
        cli.train(["--resume", "one", "--seeds", "2"])


def test_from_python(world):
    results = api.train_seeds(2, "mappo", preset="debug", steps=60, folder="mine")
    assert [result.folder.name for result in results] == ["seed-0", "seed-1"]
    (other,) = api.train_seeds([7], "mappo", preset="debug", steps=60)
    assert read_config(other.folder).seed == 7


def test_no_seeds_are_refused_in_python_too(world):
    with pytest.raises(ConfigError, match="seeds are none"):
        api.train_seeds([], "mappo", preset="debug")
    with pytest.raises(ConfigError, match="did you mean --seed 65"):
        api.train_seeds(65, "mappo", preset="debug")
    with pytest.raises(ConfigError, match="no runs to train together"):
        loop.train_together([])
    assert not any(world.iterdir())


def test_configs_differ_in_their_seed_alone():
    config = TrainConfig(MAPPO_DEBUG, seed=3)
    assert with_seeds(config, 2) == [config, dataclasses.replace(config, seed=4)]
    assert [one.seed for one in with_seeds(config, [9, 2])] == [9, 2]
