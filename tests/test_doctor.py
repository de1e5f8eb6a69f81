"""The doctor in good and bad situations, most of them made up: no check needs the hardware."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import pytest
from drawn import jit
from jax.numpy import zeros

from majepa import checks, cli, doctor, machine
from majepa.checks import Check, DeviceInfo, Memory, Played, RunSize
from majepa.config import ConfigError, preset
from majepa.doctor import Run
from majepa.envs.base import EnvError
from majepa.envs.make import make_env
from majepa.run_size import run_size, state_size
from majepa.training import _fresh, make_algorithm

CPU = DeviceInfo("cpu", "cpu", None)
GPU = DeviceInfo("gpu", "NVIDIA H200", Memory(100 * 10**9, 90 * 10**9))
PLENTY = Memory(10**12, 10**12)
SEEN_GPU = "GPU 0: NVIDIA H200"
RUN = RunSize({"parameters": 10**9, "optimizers": 2 * 10**9, "replay": 7 * 10**9}, 700_000)


class TestPython:
    def test_bounds(self):
        assert checks.check_python("3.11.0", ">=3.11,<3.14").state == "ok"
        assert checks.check_python("3.13.0rc1", ">=3.11,<3.14").state == "ok"

    @pytest.mark.parametrize("version", ["3.10.14", "3.14.0"])
    def test_another_python_is_a_problem(self, version):
        check = checks.check_python(version, ">=3.11,<3.14")
        assert check.state == "problem" and version in check.seen and "--python" in check.fix


class TestPackages:
    REQUIREMENTS = ("jax>=0.10", "ImageIO>=2.37", "wandb>=0.2; extra == 'wandb'")

    def test_all_there(self):
        installed = {"majepa": "0.1.0", "jax": "0.10.2", "imageio": "2.38"}
        (check,) = checks.check_packages(self.REQUIREMENTS, installed)
        assert check.state == "ok" and check.seen == "majepa 0.1.0, jax 0.10.2, ImageIO 2.38"

    def test_an_old_one_and_a_missing_one_are_named(self):
        old, missing = checks.check_packages(self.REQUIREMENTS, {"jax": "0.9.1"})
        assert (old.name, old.state, old.seen) == ("jax", "problem", "0.9.1; majepa needs >=0.10")
        assert (missing.name, missing.state) == ("ImageIO", "problem")
        assert "not installed" in missing.seen and "pip install 'ImageIO>=2.37'" in missing.fix

    def test_optional_ones_are_no_problem(self):
        found = {
            check.name: check
            for check in checks.check_optional({"tensorboardx": "2.6"}, ["pettingzoo"])
        }
        assert found["tensorboardX"].state == "ok"
        assert found["wandb"].state == "note" and found["wandb"].fix == "`pip install wandb`"
        fix = "`uv sync --extra pettingzoo`, or `pip install '.[pettingzoo]'`"
        assert found["pettingzoo"].fix == fix
        assert checks.check_ffmpeg(None).state == "note"


class TestBackend:
    def test_a_machine_without_gpu(self):
        assert checks.check_backend([CPU], None, {}, {}).state == "ok"

    def test_a_used_gpu_shows_its_memory(self):
        check = checks.check_backend([GPU], SEEN_GPU, {"jax-cuda13-plugin": "0.10.2"}, {})
        assert check.state == "ok" and "90.0 GB available of 100.0 GB" in check.seen

    def test_a_gpu_that_jax_cannot_use_is_said_loudly(self):
        check = checks.check_backend([CPU], SEEN_GPU, {}, {})
        assert check.state == "problem" and "ON THE CPU" in check.seen and SEEN_GPU in check.seen
        assert "uv run --extra cuda" in check.fix and "pip install '.[cuda]'" in check.fix

    def test_with_a_plugin_the_driver_is_suspected(self):
        check = checks.check_backend([CPU], SEEN_GPU, {"jax-cuda13-plugin": "0.10.2"}, {})
        assert check.state == "problem" and "driver 580" in check.fix

    @pytest.mark.parametrize(
        "variables", [{"JAX_PLATFORMS": "cpu"}, {"CUDA_VISIBLE_DEVICES": "-1"}]
    )
    def test_a_gpu_left_out_on_purpose_is_a_note(self, variables):
        check = checks.check_backend([CPU], SEEN_GPU, {}, variables)
        (name,) = variables
        assert check.state == "note" and f"unset {name}" in check.fix

    def test_a_plugin_of_another_version(self):
        plugins = {"jax-cuda12-plugin": "0.9.0", "jax-cuda12-pjrt": "0.10.2"}
        check = checks.check_plugins("0.10.2", plugins)
        assert check.state == "problem"
        assert "jax-cuda12-plugin 0.9.0 beside jaxlib 0.10.2" in check.seen
        assert "pjrt" not in check.seen and "jax[cuda12]==0.10.2" in check.fix

    def test_plugins_of_the_same_version(self):
        plugins = {"jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2.dev1"}
        assert checks.check_plugins("0.10.2", plugins).state == "ok"
        assert checks.check_plugins("0.10.2", {}).state == "ok"

    def test_plugins_are_found_among_all_packages(self):
        installed = {"jax": "1", "jax-cuda12-plugin": "2", "jax-cuda13-pjrt": "3", "cuda": "4"}
        assert machine.cuda_plugins(installed) == {"jax-cuda12-plugin": "2", "jax-cuda13-pjrt": "3"}

    def test_variables_are_explained(self):
        (quiet,) = checks.check_variables({"HOME": "/"})
        assert quiet.state == "ok"
        found = checks.check_variables({
            "JAX_PLATFORMS": "cuda", "XLA_FLAGS": "--x", "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": ".5",
        })  # fmt: skip
        assert len(found) == 4 and all(check.state == "note" for check in found)
        assert found[0].seen.startswith("JAX_PLATFORMS=cuda: ")


class TestRunMemory:
    def test_enough(self):
        (check,) = checks.check_run_memory("r", RUN, [CPU], PLENTY)
        assert check.state == "ok"
        assert "10.0 GB (replay 7.0 GB, optimizers 2.0 GB, parameters 1.0 GB)" in check.seen
        assert "20.0 GB while it is saved" in check.seen and "activations" in check.seen

    def test_too_little_on_the_host_names_a_capacity_that_fits(self):
        (check,) = checks.check_run_memory("r", RUN, [CPU], Memory(10**12, 16 * 10**9), "small")
        assert check.state == "problem" and "16.0 GB available" in check.seen
        assert check.fix.startswith("`--algo.replay.capacity 100000`, or `--preset small`")

    def test_no_replay_is_small_enough(self):
        (check,) = checks.check_run_memory("r", RUN, [CPU], Memory(10**12, 10**9), "small")
        assert check.state == "problem"
        assert check.fix == "`--preset small`, or a machine with more memory"

    def test_more_than_half_is_a_note(self):
        (check,) = checks.check_run_memory("r", RUN, [CPU], Memory(10**12, 30 * 10**9))
        assert check.state == "note" and "--algo.replay.capacity 450000" in check.fix

    def test_device_and_host_are_judged_apart(self):
        held, saved = checks.check_run_memory("r", RUN, [GPU], Memory(10**12, 15 * 10**9))
        assert (held.state, saved.state) == ("ok", "problem")
        small = dataclasses.replace(GPU, memory=Memory(10**10, 9 * 10**9))
        held, saved = checks.check_run_memory("r", RUN, [GPU, small], PLENTY)
        assert (held.state, saved.state) == ("problem", "ok") and "9.0 GB" in held.seen

    def test_a_replay_that_may_leave_the_device_is_a_note(self):
        size = dataclasses.replace(RUN, may_leave=True)
        for room, state in ((9, "note"), (2, "problem"), (80, "ok")):
            gpu = dataclasses.replace(GPU, memory=Memory(10**11, room * 10**9))
            held, _ = checks.check_run_memory("r", size, [gpu], PLENTY)
            assert held.state == state
            assert ("the replay will lie in the host's memory" in held.seen) == (state == "note")

    def test_unknown_memory_is_a_note(self):
        (check,) = checks.check_run_memory("r", RUN, [CPU], None)
        assert check.state == checks.check_host_memory(None).state == "note"

    @pytest.mark.parametrize("algorithm", ["majepa", "mappo", "qmix", "mat"])
    def test_the_estimate_is_what_a_run_holds(self, algorithm, monkeypatch):
        # Which numbers weights begin with does not matter, and drawing them takes long to compile.
        monkeypatch.setattr(
            jax.random, "truncated_normal", lambda _key, _a, _b, shape: zeros(shape)
        )
        monkeypatch.setattr(jax.random, "normal", lambda _key, shape: zeros(shape))
        config = preset(algorithm, "debug")
        env = make_env(config.env)
        state = jit(_fresh(make_algorithm(config, env.spec), env))(jax.random.key(0))
        estimate = run_size(config)
        assert estimate.total == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        assert estimate.may_leave == (algorithm == "majepa")
        assert dataclasses.replace(estimate, may_leave=False) == state_size(state)
        learner = state.learner
        if algorithm in ("majepa", "qmix"):
            replay = sum(leaf.nbytes for leaf in jax.tree.leaves(learner.replay))
            assert estimate.parts["replay"] == replay
            kept = learner.replay.rows if algorithm == "qmix" else learner.replay.stored
            assert estimate.replay_rows == kept.reward.size > 0
        else:
            assert estimate.replay_rows == 0 and "replay" not in estimate.parts
        if algorithm != "majepa":
            optimizers = [value for name, value in learner._asdict().items() if "optim" in name]
            held = sum(leaf.nbytes for leaf in jax.tree.leaves(optimizers))
            assert estimate.parts["optimizers"] == held


class TestFolderAndDisk:
    def test_a_new_folder_can_be_made(self, tmp_path):
        assert checks.check_folder(tmp_path / "deep" / "runs").state == "ok"
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("kind", ["a file", "no file system to write to"])
    def test_a_folder_that_cannot_be_written(self, kind, tmp_path):
        parent = tmp_path / "runs"
        if kind == "a file":
            parent.write_text("")
        else:
            parent = Path("/proc/runs")
        check = checks.check_folder(parent)
        assert check.state == "problem" and "--out" in check.fix
        assert str(checks.nearest_folder(parent)) in check.seen

    def test_room_for_three_checkpoints(self):
        assert checks.check_disk(free=300, checkpoint=100).state == "ok"
        check = checks.check_disk(free=299, checkpoint=100)
        assert check.state == "problem" and "299 B free" in check.seen


class TestSelfTest:
    def test_speed_is_told(self):
        check = checks.check_played(Played(True, True, 12_345.6, 2.0))
        assert check.state == "ok" and "12,346 steps a second" in check.seen

    def test_faults_are_named(self):
        check = checks.check_played(Played(False, False, 1.0, 1.0))
        assert check.state == "problem"
        assert "not finite and agents without a legal action" in check.seen

    def test_a_container_has_the_memory_of_its_limit(self, tmp_path, monkeypatch):
        monkeypatch.setattr(machine, "CGROUP", tmp_path)
        whole = machine.host_memory()
        (tmp_path / "memory.max").write_text("1000000\n")
        (tmp_path / "memory.current").write_text("600000\n")
        (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 100000\n")
        assert machine.host_memory() == Memory(1_000_000, 500_000)
        (tmp_path / "memory.max").write_text("max\n")
        assert whole is not None and machine.host_memory().total == whole.total


def test_a_check_that_raises_is_a_problem():
    def broken():
        raise RuntimeError("no\n  backend")

    assert doctor.guarded("x", broken, "fix it") == [
        Check("x", "problem", "RuntimeError: no backend", "fix it")
    ]


@pytest.fixture
def quick(monkeypatch):
    """The real machine, but for the battle and the GPU that it may have."""
    monkeypatch.setattr(machine, "play_3m", lambda: Played(True, True, 1.0, 1.0))
    monkeypatch.setattr(machine, "nvidia_gpu", lambda: None)


def test_a_failing_battle_does_not_end_the_doctor(quick, monkeypatch, tmp_path):
    def crash():
        raise ValueError("XLA fell over")

    monkeypatch.setattr(machine, "play_3m", crash)
    *_, last = doctor.diagnose(Run(preset="debug"), tmp_path)
    assert (last.name, last.state) == ("self-test", "problem") and "XLA fell over" in last.seen


def test_without_jax_the_rest_is_checked(quick, monkeypatch, tmp_path):
    def crash():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(machine, "jax_devices", crash)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    found = {check.name: check for check in doctor.diagnose(Run(), tmp_path)}
    assert found["jax"].state == "problem" and "unset JAX_PLATFORMS" in found["jax"].fix
    assert found["run folder"].state == "ok"
    assert "JAX does not start" in found["run, self-test"].seen


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (Run("mapo"), "did you mean mappo"),
        (Run(preset="smal"), "did you mean small"),
        (Run(env="3mm"), "did you mean 3m"),
        (Run(steps=0), "steps is 0"),
    ],
)
def test_a_run_that_is_named_wrongly_is_told_before_anything(run, message, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "diagnose", lambda *_: pytest.fail("it looked"))
    with pytest.raises((ConfigError, EnvError), match=message):
        doctor.doctor(run)
    assert capsys.readouterr().out == ""


def test_a_run_that_cannot_be_is_a_problem(quick, monkeypatch, tmp_path, capsys):
    def fails(*_):
        raise ConfigError("too few steps")

    monkeypatch.setattr("majepa.run_size.run_size", fails)
    assert doctor.doctor(Run(), parent=tmp_path) == 1
    told = capsys.readouterr().out
    (line,) = [line for line in told.splitlines() if line.startswith("problem")]
    assert "too few steps" in line and "majepa train --help" in line
    assert told.endswith("\n1 problem\n")


def test_a_terminal_gets_a_table(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    doctor.show([Check("a", "ok", "[fine]"), Check("b", "problem", "bad", "do [this]")])
    told = capsys.readouterr().out
    assert "[fine]" in told and "-> do [this]" in told and "problem" in told


def test_this_machine_is_fine(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "nvidia_gpu", lambda: None)
    with pytest.raises(SystemExit) as ended:
        cli.doctor(preset="debug", as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0, found
    assert all(set(check) == {"name", "state", "seen", "fix"} for check in found)
    names = [check["name"] for check in found]
    assert {"python", "packages", "jax", "run memory", "disk", "run folder", "self-test"} < {*names}
    assert list(tmp_path.iterdir()) == []


def test_the_help_names_what_it_takes(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.app.cli(prog="majepa", args=["doctor", "--help"])
    told = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(word in told for word in ("ALGORITHM", "--preset", "--steps", "--json"))
