"""The command line as a user meets it: subprocesses, exit codes, one clear line for a mistake."""

import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from majepa.cli import main, parse_train
from majepa.config import PRESETS, ConfigError, TrainConfig, preset
from majepa.envs.make import make_env
from majepa.envs.sim import SCENARIOS
from majepa.run_folder import BEST, CHECKPOINT, claim

MAPPO_TABLE = ("benchmark", "paper", "--methods", "mappo")


def told(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The same in this process: an interpreter takes seconds to start."""
    out, error, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["majepa", *arguments]
    code: object = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            main()
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = before
    return subprocess.CompletedProcess(arguments, int(str(code)), out.getvalue(), error.getvalue())


def majepa(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "majepa", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=os.environ | environment,
    )


def test_help_names_every_command():
    result = majepa("--help")
    assert result.returncode == 0
    assert all(
        command in result.stdout for command in ("maps", "watch", "train", "report", "benchmark")
    )
    assert "StarCraft" in result.stdout


def test_maps_as_json_is_complete():
    result = told("maps", "--json")
    entries = json.loads(result.stdout)
    assert [entry["map"] for entry in entries] == list(SCENARIOS)
    by_name = {entry["map"]: entry for entry in entries}
    assert by_name["2s3z"] | {"sim_version": ""} == {
        "map": "2s3z",
        "agents": 5,
        "enemies": 5,
        "limit": 120,
        "actions": 11,
        "observation": 80,
        "state": 120,
        "agent_state": 173,
        "allies": {"stalker": 2, "zealot": 3},
        "opponents": {"stalker": 2, "zealot": 3},
        "sim_version": "",
    }


def test_maps_as_a_table_has_a_row_per_map():
    result = told("maps")
    assert result.returncode == 0
    for name in SCENARIOS:
        assert f" {name} " in result.stdout


@pytest.mark.slow
def test_watch_writes_a_file_and_says_how_it_ended(tmp_path):
    out = tmp_path / "deep" / "battle.gif"
    result = told("watch", "3m", "--policy", "nearest", "--out", str(out))
    assert result.returncode == 0, result.stderr
    assert out.read_bytes()[:4] == b"GIF8"
    assert "3m" in result.stdout and "steps" in result.stdout
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("watch", "2s4z"), "did you mean 2s3z"),
        (("watch", "3m", "--policy", "nearst"), "did you mean nearest"),
        (("watch", "3m", "--out", "battle.avi"), ".gif"),
        (("watch", "nope"), "unknown map 'nope'; choose one of 2m_vs_1z"),
        (("watch", "no/pe"), "no/pe is neither a run's folder, a map nor a recorded battle"),
        (("watch", "3m", "--out", "/proc/battle.gif"), "cannot write /proc/battle.gif: No such"),
        (("watch", "3m", "--out", "/proc/battle.mp4"), "cannot write /proc/battle.mp4: No such"),
        (("watch", "nowhere.battle.json.gz"), "no recorded battle at nowhere.battle.json.gz"),
        (("watch", "/dev/null/x.battle.json"), "no recorded battle at /dev/null/x.battle.json"),
        (("report", "nowhere"), "nowhere is not the folder of a run"),
        (("train", "mapo"), "did you mean mappo"),
        (("train", "2s3z"), "majepa, mappo, qmix, mat; did you mean --env 2s3z?"),
        (("train", "sim:2s3z", "--seed", "1"), "did you mean --env sim:2s3z?"),
        (("train", "majepa", "2s3z"), "'2s3z' belongs to no flag; did you mean --env 2s3z?"),
        (("train", "--seed", "1", "2s3z"), "did you mean --env 2s3z?"),
        (("train", "--seed=1", "2s3z"), "did you mean --env 2s3z?"),
        (("train", "--preset", "smal"), "did you mean small"),
        (("train", "mappo", "--env", "3mm"), "did you mean 3m"),
        (("train", "--steps", "0"), "steps is 0; it must be at least one transition"),
        (
            ("train", "--steps", f"1{20 * '0'}"),
            "steps is 100000000000000000000; it must be at most",
        ),
        (("train", "--resume", "nowhere"), "nowhere is not the folder of a run"),
        (
            ("train", "mappo", "--preset", "debug", "--out", "/proc/run"),
            "cannot write /proc/run: No such file or directory",
        ),
        (("train", "--seed", "-1"), "seed is -1; it must be from 0 to 4294967295"),
        (("train", "--seed", "4294967296"), "seed is 4294967296; it must be from 0 to 4294967295"),
        (("train", "--seeds", "2", "--seed", "4294967295"), "seed is 4294967296; it must be from"),
        (("train", "--seeds", "1", "4294967296"), "seed is 4294967296; it must be from 0"),
        (("watch", "3m", "--seed", "-1"), "seed is -1; it must be from 0 to 4294967295"),
        (("watch", "3m", "--seed", "1e23"), f"seed is 1{23 * '0'}; it must be from 0"),
        (("evaluate", "nowhere", "--seed", "-2"), "seed is -2; it must be from 0 to 4294967295"),
        (("doctor", "--preset", "foo"), "unknown preset 'foo' of majepa"),
        (("doctor", "--env", "3mm", "--json"), "did you mean 3m"),
        (("benchmark", "papr"), "did you mean paper"),
        (("benchmark", "nowhere.json"), "there is no grid file at nowhere.json"),
        (("benchmark", "paper", "--methods", "mapo"), "no method 'mapo'; it has majepa, mappo"),
        (("benchmark", "paper", "--maps", "3m", "2s3z"), "no map '3m'; it has 2s_vs_1sc"),
        (("benchmark", "paper", "--maps"), "grid 'paper' has no maps; it needs at least one"),
        (("benchmark", "paper", "--seeds", "1"), "no seed 1; it has 1302, 2771, 7636"),
        (("benchmark", "paper", "--jobs", "0"), "--jobs is 0; it must be 1 or more"),
        ((*MAPPO_TABLE, "--out", "/proc/grid"), "cannot write into /proc/grid"),
        ((*MAPPO_TABLE, "--cluster", "127.0.0.1:1"), "nobody answers at 127.0.0.1:1"),
        ((*MAPPO_TABLE, "--cluster", "there"), "must be HOST:PORT or auto"),
        ((*MAPPO_TABLE, "--cluster", "ray://there:10001"), "must be HOST:PORT or auto"),
    ],
)
def test_a_mistake_is_one_clear_line(arguments, message):
    result = told(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_wrong_variable_is_one_clear_line_before_anything_is_begun(tmp_path, monkeypatch):
    monkeypatch.setenv("MAJEPA_KERNELS", "fast")
    result = told("train", "--out", str(tmp_path / "run"))
    assert result.returncode == 2
    assert result.stderr == (
        "majepa: MAJEPA_KERNELS is 'fast'; it may be 0, for none of our kernels, or unset\n"
    )
    assert not (tmp_path / "run").exists()


def test_an_unknown_command_lists_the_known_ones():
    result = told("wach")
    assert result.returncode != 0
    assert "watch" in result.stdout + result.stderr


def test_help_of_train_shows_every_field():
    result = majepa("train", "--help", COLUMNS="120")
    assert result.returncode == 0
    for flag in (
        "--env",
        "--preset",
        "--resume",
        "--minutes",
        "--evaluation.every",
        "--save-every",
    ):
        assert flag in result.stdout
    assert "--algo.imagination.horizon" in result.stdout
    assert "--algo.frames" in told("train", "mappo", "--help").stdout


@pytest.mark.parametrize("algorithm", PRESETS)
def test_help_of_train_calls_the_defaults_of_no_preset_those_of_another(algorithm):
    for name in PRESETS[algorithm]:
        said = told("train", algorithm, "--preset", name, "--help").stdout
        assert "Settings of" in said and "defaults are" not in said


def test_a_wrong_flag_of_train_is_answered_with_the_right_one():
    result = told("train", "--algo.imagination.horizn", "7")
    assert result.returncode == 2
    assert "--algo.imagination.horizon" in result.stderr and "Traceback" not in result.stderr


def test_a_wrong_value_of_train_is_named():
    result = majepa("train", "--algo.replay.batch", "0")
    assert result.returncode == 2
    assert "algo.replay.batch is 0; it must be one or more" in result.stderr


def test_a_preset_picks_defaults_and_flags_override_them():
    command = parse_train(["--env", "8m", "--algo.imagination.horizon", "7", "--minutes", "1.5"])
    default = preset("majepa", "small", "8m")
    horizon = dataclasses.replace(default.algo.imagination, horizon=7)
    algo = dataclasses.replace(default.algo, imagination=horizon)
    assert command.config == dataclasses.replace(default, algo=algo)
    assert type(command.config) is TrainConfig and command.minutes == 1.5
    paper = parse_train(["--preset=paper", "--seed", "3", "--evaluation.every", "2000"]).config
    assert paper.algo == preset("majepa", "paper").algo
    assert (paper.seed, paper.evaluation.every, paper.steps) == (3, 2000, 100_000)
    mappo = parse_train(["mappo", "--env", "sim:corridor", "--algo.recurrent"]).config
    assert mappo.algo.epochs == 5 and mappo.algo.recurrent and mappo.steps == 400_000
    assert parse_train([]).config == preset()
    assert parse_train(["--out", "3m", "--env", "2s3z"]).config.env == "2s3z"


@pytest.mark.parametrize(
    ("text", "number"),
    [("30000", 30_000), ("1e5", 100_000), ("2.5E+3", 2_500), ("30_000", 30_000), ("7e0", 7)],
)
def test_whole_numbers_may_be_written_short(text, number):
    command = parse_train(["--steps", text, "--save-every", text, "--seeds", "1", text])
    assert command.config.steps == command.config.save_every == number
    assert command.seeds == (1, number) and type(command.config.steps) is int


@pytest.mark.parametrize("text", ["1e-5", "2.5", "many", "1e", "nan", "inf", "1e999999999"])
@pytest.mark.parametrize("command", ["train", "doctor"])
def test_what_is_no_whole_number_is_told(command, text):
    result = told(command, "--steps", text)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    said = " ".join(result.stderr.replace("│", " ").split())
    assert f": {text!r} is not a whole number, such as 30000 or 3e4" in said
    assert "INT" in told(command, "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--env", "3m", "mappo"], "before all flags: majepa train mappo"),
        (["--minutes", "0"], "minutes is 0.0; it must be more than 0"),
        (["--evaluation.episodes", "0"], "evaluation.episodes is 0"),
    ],
)
def test_settings_that_cannot_be_used(arguments, message):
    with pytest.raises(ConfigError) as caught:
        parse_train(arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("last", [None, b"nonsense"])
def test_evaluate_leads_to_the_best_checkpoint_where_there_is_one(last, tmp_path):
    run = tmp_path / "run"
    config = preset("mappo", "debug", "3m")
    claim(run, config, make_env(config.env).spec)
    (run / CHECKPOINT).parent.mkdir()
    if last is not None:
        (run / CHECKPOINT).write_bytes(last)
    reason = "has no last checkpoint yet" if last is None else "is no complete checkpoint"
    hint = f"; `--checkpoint best` takes {run / BEST}\n"
    for is_there in (False, True):
        if is_there:
            (run / BEST).write_bytes(b"nonsense, too")
        result = told("evaluate", str(run))
        assert result.returncode == 2 and reason in result.stderr
        assert result.stderr.endswith(hint) == is_there == ("--checkpoint" in result.stderr)
        assert "--checkpoint" not in told("evaluate", str(run), "--checkpoint", "best").stderr
        assert "--checkpoint" not in told("watch", str(run)).stderr


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["mappo", "qmix", "mat", "majepa"])
def test_train_from_the_first_line_to_the_last_and_on(algorithm, tmp_path):
    run = tmp_path / "run"
    # A round of QMIX's episodes may take 240 transitions, and there must be a second one.
    steps = 480 if algorithm == "qmix" else 240
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def succeeds(*arguments: str) -> str:
        result = majepa(*arguments, **cache)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def fails(*arguments: str) -> str:
        result = majepa(*arguments, **cache)
        assert result.returncode == 2 and len(result.stderr.splitlines()) == 1, result.stderr
        return result.stderr

    arguments = (
        algorithm, "--preset", "debug", "--steps", str(steps), "--out", str(run),
        "--evaluation.every", "80", "--evaluation.episodes", "8",
        "--evaluation.final-episodes", "8", "--log.tensorboard",
    )  # fmt: skip
    said = succeeds("train", *arguments, "--minutes", "1e-4")
    assert "stopped early at" in said and "time limit" in said
    assert f"majepa train --resume {run}" in said
    assert "--resume" in fails("train", *arguments)
    assert "seed = 0, not 1" in fails("train", "--resume", str(run), "--seed", "1")
    said = succeeds("train", "--resume", str(run))
    assert "(argmax actions)" in said and "over 8 episodes" in said
    assert "stopped early" not in said
    assert f"report       {run / 'report.html'}" in said
    assert f"battle       {run / 'replays' / 'final.html'}" in said
    assert {path.name for path in run.iterdir()} == {
        ".lock", "checkpoints", "config.json", "evaluations.jsonl", "metrics.jsonl", "replays",
        "report.html", "tensorboard", "versions.json",
    }  # fmt: skip
    assert {path.name for path in (run / "checkpoints").iterdir()} == {
        "last.safetensors", "best.safetensors",
    }  # fmt: skip

    judged = json.loads(succeeds("evaluate", str(run), "--episodes", "4", "--json"))
    assert judged["episodes"] == 4 and 0 <= judged["argmax"] <= 1
    last = (run / "evaluations.jsonl").read_text().splitlines()[-8:]
    assert {json.loads(line)["kind"] for line in last} == {"asked"}
    said = succeeds("evaluate", str(run), "--checkpoint", "best", "--seed", "3", "--episodes", "2")
    assert "best checkpoint" in said and "over 2 episodes" in said
    page = tmp_path / "battle.html"
    assert f"wrote {page}" in succeeds("watch", str(run), "--seed", "4", "--out", str(page))
    assert algorithm in page.read_text()
    assert "argmax or sampled" in fails("watch", str(run), "--policy", "nearest")
    assert "iframe" in Path(succeeds("report", str(run)).strip()).read_text()

    copy = tmp_path / "copy"
    said = succeeds("train", "--config", str(run / "config.json"), "--out", str(copy),
                    "--seed", "1", "--minutes", "1e-4")  # fmt: skip
    stored = json.loads((copy / "config.json").read_text())
    assert stored["seed"] == 1 and stored["steps"] == steps
    (run / "checkpoints" / "last.safetensors").write_bytes(b"nonsense")
    assert "is no complete checkpoint" in fails("evaluate", str(run))
    assert "--checkpoint" not in fails("watch", str(run))
    assert "is no complete checkpoint" in fails("train", "--resume", str(run))
    stored["algo"]["from_the_future"] = 1
    (copy / "config.json").write_text(json.dumps(stored))
    (copy / "versions.json").write_text(json.dumps({"majepa": "9.9"}))
    assert "written by majepa 9.9" in fails("evaluate", str(copy))
