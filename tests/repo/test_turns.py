"""Versions that take turns, and what is made of their times."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scripts import BENCHMARKS, benchmark

LEARNER = """
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Calls, made = None, []

def step():
    made.append(np.asarray({step}, np.float32))
    if len(made) > {most}:
        raise RuntimeError("no more")
    return made[-1]

class Learner(NamedTuple):
    params: Any

class Algorithm:
    def call(self, learner, key, wanted):
        shape = jax.ShapeDtypeStruct((2,), jnp.float32)
        return Learner(learner.params + jax.pure_callback(step, shape)), None

class Subject(NamedTuple):
    algorithm: Any
    learner: Any

def make_up(env, name, lengths):
    print("something that is no answer")
    return Subject(Algorithm(), Learner(jnp.zeros(2)))
"""


@pytest.fixture(scope="module")
def turns():
    return benchmark("turns")


def version(folder: Path, step: tuple[float, float] = (1, 1), most: int = 10**6) -> str:
    """A repository whose calls only add, and fail after the last."""
    (folder / "benchmarks").mkdir(parents=True)
    (folder / "benchmarks" / "learner.py").write_text(LEARNER.format(step=step, most=most))
    return str(folder)


def compete(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "turns.py"), *arguments],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_a_version_is_a_folder_and_variables(turns, tmp_path):
    folder = version(tmp_path / "here")
    found = turns.Version.of(f"{folder},MAJEPA_KERNELS=0,PLACES=here+there,XLA_FLAGS=--a=b")
    assert found.folder == tmp_path / "here"
    assert found.variables == {"MAJEPA_KERNELS": "0", "PLACES": "here,there", "XLA_FLAGS": "--a=b"}


@pytest.mark.parametrize(
    ("text", "message"),
    [("{}", "is not there"), ("{}/here,A=1,early", "with \\+ between them")],
)
def test_what_is_no_version_is_told(turns, tmp_path, text, message):
    version(tmp_path / "here")
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        turns.Version.of(text.format(tmp_path))


def test_changes_are_alike_or_not(turns):
    one = np.array([3.0, 4.0])
    assert turns.likeness(one, 2 * one) == 1
    assert turns.likeness(one, np.array([4.0, -3.0])) == 0
    assert turns.likeness(one, np.ones(3)) is None
    assert turns.likeness(one, np.array([np.nan, 1.0])) is None


@pytest.mark.parametrize("more", [[], ["--side-by-side"]])
def test_versions_take_turns(tmp_path, more):
    first, second = version(tmp_path / "one"), version(tmp_path / "two", (1, 0))
    result = compete(first, second, f"{first},A=1", "--rounds", "3", "--calls", "2", *more)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["version"] for line in lines] == [first, second, f"{first},A=1"]
    assert [line["alike"] for line in lines] == [1, 0.7071, 1]
    assert lines[0]["ratio"] == 1 and all(line["rounds"] == 3 for line in lines)
    assert all(0 < line["least_ms"] <= line["ms"] for line in lines)
    assert result.stderr.count("round ") == 3


def test_no_round_is_lost_when_a_version_fails(tmp_path):
    good = version(tmp_path / "good")
    bad = version(tmp_path / "bad", most=benchmark("turns").WARM + 2 * 3)
    result = compete(good, bad, "--rounds", "3", "--calls", "2")
    assert result.returncode == 1
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(line["version"], line["rounds"]) for line in lines] == [(good, 2), (bad, 2)]
    assert "no more" in result.stderr
    assert result.stderr.endswith(f"{bad} ended with exit status 1; see above\n")
