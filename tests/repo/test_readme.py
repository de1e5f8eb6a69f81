"""Every command of the README works, long ones with shortened budgets."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHORT = ("--preset", "debug", "--steps", "160", "--evaluation.every", "80",
         "--evaluation.episodes", "4", "--evaluation.final-episodes", "4")  # fmt: skip
RUN = re.compile(r"runs/(majepa|mappo)-(\w+)-0-1")
ELSEWHERE = ("pytest", "sync")
"""First words of commands that other tests, or the tests themselves, are."""

pytestmark = pytest.mark.slow


def commands() -> list[str]:
    text = (ROOT / "README.md").read_text()
    found = []
    for block in re.findall(r"^```bash\n(.*?)^```", text, flags=re.M | re.S):
        for line in block.splitlines():
            found.append(line.partition("#")[0].strip().removeprefix("pip install uv && "))
    return [line for line in found if line]


def test_the_two_lines_are_there():
    text = (ROOT / "README.md").read_text()
    for line in ("pip install uv && uv run majepa train", "pip install uv && uv run pytest"):
        assert f"\n{line}\n" in text


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where commands run: the runs that they speak of are there."""
    folder = tmp_path_factory.mktemp("clone")
    for name in {match.group(2) for line in commands() if (match := RUN.search(line))}:
        run = f"runs/majepa-{name}-0-1"
        arguments = ["mappo", *SHORT, "--env", name, "--out", run, "--minutes", "1e-4"]
        result = majepa(folder, "train", *arguments)
        assert result.returncode == 0, result.stderr
    return folder


def majepa(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    cache = folder / "cache"
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.run(
        [sys.executable, "-m", "majepa", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def shortened(words: list[str]) -> list[str]:
    """The same command with the smallest preset and budget; a grid of runs is planned only."""
    if words[0] == "benchmark" and "--dry-run" not in words:
        return [*words, "--dry-run"]
    if words[0] != "train" or "--resume" in words:
        return words
    for flag in ("--preset", "--minutes"):
        if flag in words:
            at = words.index(flag)
            words = words[:at] + words[at + 2 :]
    named = len(words) > 1 and not words[1].startswith("-")
    # MA-JEPA takes minutes to compile on two cores: once is enough.
    algorithm = [] if named else ["mappo"] if "--env" in words else ["majepa"]
    return ["train", *algorithm, *words[1:], *SHORT]


@pytest.mark.parametrize("command", commands())
def test_a_command_runs(command, folder):
    words = shlex.split(command)
    assert words[:2] == ["uv", "run"]
    if words[2] in ELSEWHERE or words[2].startswith("--"):
        return
    assert words[2] == "majepa"
    result = majepa(folder, *shortened(words[3:]))
    assert result.returncode == 0, result.stderr
    assert result.stdout
