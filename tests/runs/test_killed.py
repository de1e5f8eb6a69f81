"""Killed at any moment, a run goes on from a complete checkpoint and ends as it would have."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from killed import CONFIGURATION
from safetensors.numpy import load_file

from majepa.run_folder import BEST, CHECKPOINT, CONFIG

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "killed.py"
KILLS = 20


def start(folder: Path, cache: Path) -> subprocess.Popen:
    environment = os.environ | {
        "PYTHONPATH": str(SCRIPT.parent),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, str(SCRIPT), str(folder)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(folder: Path, cache: Path) -> None:
    process = start(folder, cache)
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0 and out.endswith("done\n"), error


def saved(folder: Path) -> int:
    path = folder / CHECKPOINT
    return int(load_file(path)["transitions"]) if path.exists() else 0


def test_a_run_survives_any_number_of_kills(tmp_path):
    whole, folder, cache = tmp_path / "whole", tmp_path / "killed", tmp_path / "cache"
    finish(whole, cache)
    rng = random.Random(0)
    during_saves = 0
    for kill in range(KILLS):
        process = start(folder, cache)
        while not (folder / CONFIG).exists() and process.poll() is None:
            time.sleep(0.01)
        before = saved(folder)
        if kill % 2:
            time.sleep(rng.uniform(0.0, 4.0))
        else:  # in the middle of a save
            while process.poll() is None and not any((folder / CHECKPOINT).parent.glob(".*")):
                time.sleep(0.001)
        during_saves += any((folder / CHECKPOINT).parent.glob(".*"))
        process.send_signal(signal.SIGKILL)
        out, error = process.communicate()
        assert process.returncode in (-signal.SIGKILL, 0), error
        reached = [int(line) for line in out.splitlines() if line.isdigit()]
        now = saved(folder)
        assert now >= before
        if reached:
            # One interval, and what was reached while the next save was being written.
            assert reached[-1] - now <= 2 * CONFIGURATION.save_every + 12
        if process.returncode == 0:
            break
    assert during_saves > 0
    finish(folder, cache)
    one, other = load_file(whole / CHECKPOINT), load_file(folder / CHECKPOINT)
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert array.tobytes() == other[name].tobytes(), name
    assert {path.name for path in (folder / CHECKPOINT).parent.iterdir()} == {
        CHECKPOINT.name, BEST.name,
    }  # fmt: skip
    evaluations = [(path / "evaluations.jsonl").read_text() for path in (whole, folder)]
    assert evaluations[0] == evaluations[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_polite_signal_saves_and_ends(tmp_path, number):
    folder, cache = tmp_path / "run", tmp_path / "cache"
    process = start(folder, cache)
    assert process.stdout is not None
    while not process.stdout.readline().strip().isdigit():
        pass
    process.send_signal(number)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    reached = [int(line) for line in out.splitlines() if line.isdigit()]
    assert not reached or saved(folder) == reached[-1] < CONFIGURATION.steps


def test_a_disk_that_is_full_costs_nothing_that_was_saved(tmp_path):
    folder, cache = tmp_path / "run", tmp_path / "cache"
    process = start(folder, cache)
    while saved(folder) == 0:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    before = (folder / CHECKPOINT).read_bytes()
    code = (
        "import resource, runpy, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))\n"
        f"sys.argv = ['killed.py', {str(folder)!r}]\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parent)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    assert f"cannot write {folder / CHECKPOINT}" in result.stderr
    assert (folder / CHECKPOINT).read_bytes() == before
    finish(folder, cache)
