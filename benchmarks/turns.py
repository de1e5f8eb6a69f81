"""Versions of a learner call of MA-JEPA against each other: they take turns on one machine.

    uv run python benchmarks/turns.py --env 3m --preset small . ../before
    python benchmarks/turns.py --env 2s3z . .,MAJEPA_KERNELS=few_rows .,MAJEPA_KERNELS=early

A version is a folder that holds the repository, and variables of the environment after commas. Each
has a process of its own, which makes up the same records (`learner.py --made-up`) and compiles its
calls, one version after another. Then they take turns: each makes as many calls as the others, of
the same views, while the others wait.

Prints one JSON line per version: the median and the least of its turns in milliseconds a call; the
median over rounds of what its turn took, divided by the first version's turn of the same round; and
how alike the first calls changed the parameters in both, a cosine (rounding leaves it below one;
another draw of latents, or tiny gradients of another sign, more so).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

WARM = 3
"""Calls before anything is measured; what they change is compared."""


class Version(NamedTuple):
    folder: Path
    variables: dict[str, str]

    @staticmethod
    def of(text: str) -> Version:
        folder, *variables = text.split(",")
        pairs = [one.partition("=") for one in variables]
        if not all(name and equals for name, equals, _ in pairs):
            raise argparse.ArgumentTypeError(
                f"{text}: after a folder and a comma stands NAME=VALUE; several values of one "
                "variable are written with + between them"
            )
        where = Path(folder).resolve()
        if not (where / "benchmarks" / "learner.py").is_file():
            raise argparse.ArgumentTypeError(f"{folder} has no benchmarks/learner.py")
        return Version(where, {name: value.replace("+", ",") for name, _, value in pairs})


class Player:
    """A process that makes calls of one version when it is told to."""

    def __init__(self, version: Version, given: Sequence[str], share: float) -> None:
        folder = version.folder
        paths = os.pathsep.join([str(folder), str(folder / "benchmarks"), *sys.path[1:]])
        variables = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:.2f}", **os.environ}
        self._process = subprocess.Popen(
            # What lies beside this file is not what the version holds.
            [sys.executable, "-P", __file__, "--play", *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**variables, "PYTHONPATH": paths, **version.variables},
        )
        self.started_s = self._answer()

    def take_turn(self, calls: int) -> float:
        """Milliseconds a call."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(calls, file=self._process.stdin, flush=True)
        return 1e3 * self._answer() / calls

    def leave(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"a version ended with exit status {self._process.wait()}; see above")
        return float(line)


def main() -> None:
    if "--play" in sys.argv:
        play(*sys.argv[sys.argv.index("--play") + 1 :])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="+", type=Version.of, metavar="FOLDER[,NAME=VALUE]...")
    parser.add_argument("--env", default="2s3z")
    parser.add_argument("--preset", default="paper")
    parser.add_argument("--seeds", type=int, default=1, help="in one program")
    parser.add_argument("--calls", type=int, default=20, help="of a turn")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        compete(options, Path(scratch))


def compete(options: argparse.Namespace, scratch: Path) -> None:
    share = 0.85 / len(options.versions)
    changes = [scratch / f"{number}.npy" for number in range(len(options.versions))]
    given = [options.env, options.preset, str(options.seeds)]
    players = [
        Player(version, [*given, str(change)], share)
        for version, change in zip(options.versions, changes, strict=True)
    ]
    rounds = [
        [player.take_turn(options.calls) for player in players] for _ in range(options.rounds)
    ]
    for player in players:
        player.leave()
    changed = [np.load(path) for path in changes]
    for number, version in enumerate(options.versions):
        turns = [turn[number] for turn in rounds]
        line = {
            "version": version.folder.name,
            **version.variables,
            "ms": round(statistics.median(turns), 2),
            "least_ms": round(min(turns), 2),
            "ratio": round(statistics.median(turn[number] / turn[0] for turn in rounds), 4),
            "alike": round(cosine(changed[number], changed[0]), 4),
            "starting_s": round(players[number].started_s, 1),
        }
        print(json.dumps(line | {"env": options.env, "preset": options.preset}
                         | {"seeds": options.seeds, "calls": options.calls}
                         | {"rounds": options.rounds}), flush=True)  # fmt: skip


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    product = np.linalg.norm(one) * np.linalg.norm(other)
    return float(one @ other / product) if product else float("nan")


def play(env: str, preset: str, seeds: str, change: str) -> None:
    """Compile, say how long that took, and then, for each number that is read, how long so many
    calls took."""
    # Those of the version.
    from learner import Calls, make_up  # type: ignore[import-not-found]

    from majepa.compilation import keep_programs

    keep_programs()
    started = time.perf_counter()
    subject = make_up(env, preset, [60, 120])
    if jax.default_backend() == "cpu":
        if seeds != "1":
            sys.exit("several seeds in one program are measured on an accelerator")
        calls = OneProgram.of(subject)
    else:
        calls = Calls.of(subject, int(seeds))
        calls.compiled()
    before = weights(calls.learner)
    calls = calls.made(WARM, 0)
    np.save(change, weights(calls.learner) - before)
    answer(time.perf_counter() - started)
    for turn, line in enumerate(sys.stdin, 1):
        started = time.perf_counter()
        calls = calls.made(int(line), turn)
        answer(time.perf_counter() - started)


def answer(seconds: float) -> None:
    print(seconds, flush=True)


class OneProgram(NamedTuple):
    """Calls as a CPU has them, each in one program."""

    call: Callable[..., Any]
    learner: Any

    @staticmethod
    def of(subject: Any) -> OneProgram:
        from majepa.compilation import COMPILER_OPTIONS

        options = {"donate_argnums": 0, "compiler_options": COMPILER_OPTIONS}
        return OneProgram(jax.jit(subject.algorithm.call, **options), subject.learner)

    def made(self, calls: int, key: int) -> OneProgram:
        learner = self.learner
        for each in jax.random.split(jax.random.key(key), calls):
            learner, _ = self.call(learner, each, np.True_)
        return self._replace(learner=jax.block_until_ready(learner))


def weights(learner: Any) -> np.ndarray:
    """All parameters in one row."""
    leaves = jax.tree.leaves(jax.device_get(learner.params))
    return np.concatenate([np.ravel(np.asarray(leaf, np.float32)) for leaf in leaves])


if __name__ == "__main__":
    main()
