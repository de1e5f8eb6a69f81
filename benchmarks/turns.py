"""Versions of a learner call of MA-JEPA against each other: they take turns on one machine.

    uv run python benchmarks/turns.py --env 3m --preset small . ../before
    python benchmarks/turns.py --env 2s3z --side-by-side . ../before .,MAJEPA_KERNELS=0

A version is a folder that holds the repository, at a commit whose `learner.py` makes records up,
and variables of the environment after commas; several values of one variable have + between them.
Each version has a process of its own, which makes up the same records and compiles its calls, one
after another or, but for the first, side by side. Then they take turns, every second round in the
opposite order: each makes as many calls as the others, on the same views, while the others wait.

Prints what each round took to stderr, in milliseconds a call, and at the end one JSON line per
version: the median and the least of its turns; the median over rounds of what its turn took,
divided by the first version's turn of the same round; and how alike the first calls changed the
parameters in both, a cosine (rounding leaves it below one; another draw of latents, or tiny
gradients of another sign, more so). If a version fails, the rounds before it are summed up.
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
MEMORY, SWITCH = "XLA_PYTHON_CLIENT_MEM_FRACTION", "MAJEPA_KERNELS"
"""Variables that whoever calls this cannot set for all versions at once."""


class Failed(Exception):
    """A version ended before its time."""


class Version(NamedTuple):
    name: str
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
        learner = Path(folder).resolve() / "benchmarks" / "learner.py"
        if not learner.is_file() or "def make_up(" not in learner.read_text():
            raise argparse.ArgumentTypeError(f"{learner} is not there, or makes up no records")
        given = {name: value.replace("+", ",") for name, _, value in pairs}
        return Version(text, learner.parents[1], given)


class Player:
    """A process that makes calls of one version when it is told to."""

    def __init__(self, version: Version, given: Sequence[str], share: float) -> None:
        self.version, folder = version, version.folder
        paths = os.pathsep.join([str(folder), str(folder / "benchmarks"), *sys.path[1:]])
        shared = {name: value for name, value in os.environ.items() if name != SWITCH}
        shared |= {MEMORY: f"{share:.2f}", "PYTHONPATH": paths}
        self._process = subprocess.Popen(
            # What lies beside this file is not what the version holds.
            [sys.executable, "-P", __file__, "--play", *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=shared | version.variables,
        )

    def wait(self) -> float:
        """Until it has compiled: how many seconds that took."""
        return self._answer()

    def take_turn(self, calls: int) -> float:
        """Milliseconds a call."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(calls, file=self._process.stdin, flush=True)
        return 1e3 * self._answer() / calls

    def leave(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise Failed(f"{self.version.name} ended with exit status {status}; see above")
        return float(line)


def main() -> None:
    if "--play" in sys.argv:
        play(*sys.argv[sys.argv.index("--play") + 1 :])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="+", type=Version.of, metavar="FOLDER[,NAME=VALUE]...")
    parser.add_argument("--env", default="2s3z")
    parser.add_argument("--preset", default="paper")
    parser.add_argument("--seeds", type=int, default=1, help="in one program")
    parser.add_argument("--calls", type=int, default=20, help="of a turn")
    parser.add_argument(
        "--side-by-side",
        action="store_true",
        help="compile all versions but the first at once; what the library's trials of its kernels "
        "found for the first is kept for the others, unless the cache of compiled programs is off",
    )
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    if min(options.seeds, options.calls, options.rounds) < 1:
        parser.error("--seeds, --calls and --rounds are one or more")
    with tempfile.TemporaryDirectory() as scratch:
        try:
            compete(options, Path(scratch))
        except Failed as failure:
            sys.exit(str(failure))


def compete(options: argparse.Namespace, scratch: Path) -> None:
    share = 0.85 / len(options.versions)
    given = [options.env, options.preset, str(options.seeds), str(options.calls)]
    changes = [scratch / f"{number}.npy" for number in range(len(options.versions))]
    started: list[float] = []
    rounds: list[list[float]] = []
    with contextlib.ExitStack() as stack:
        players: list[Player] = []
        for version, change in zip(options.versions, changes, strict=True):
            players.append(Player(version, [*given, str(change)], share))
            stack.callback(players[-1].leave)
            if not options.side_by_side or len(players) == 1:
                started.append(players[-1].wait())
        started += [player.wait() for player in players[len(started) :]]
        try:
            for number in range(options.rounds):
                order = players if number % 2 == 0 else players[::-1]
                taken = {player: player.take_turn(options.calls) for player in order}
                rounds.append([taken[player] for player in players])
                said = ", ".join(f"{each:.2f}" for each in rounds[-1])
                print(f"round {number + 1}: {said}", file=sys.stderr, flush=True)
        finally:
            if rounds:
                sum_up(options, started, rounds, [np.load(path) for path in changes])


def sum_up(
    options: argparse.Namespace,
    started: Sequence[float],
    rounds: Sequence[Sequence[float]],
    changed: Sequence[np.ndarray],
) -> None:
    shared = {"env": options.env, "preset": options.preset, "seeds": options.seeds}
    shared |= {"calls": options.calls, "rounds": len(rounds)}
    for number, version in enumerate(options.versions):
        turns = [turn[number] for turn in rounds]
        line = {
            "version": version.name,
            "ms": round(statistics.median(turns), 2),
            "least_ms": round(min(turns), 2),
            "ratio": round(statistics.median(turn[number] / turn[0] for turn in rounds), 4),
            "alike": likeness(changed[number], changed[0]),
            "starting_s": round(started[number], 1),
        }
        print(json.dumps(line | shared), flush=True)


def likeness(one: np.ndarray, other: np.ndarray) -> float | None:
    """A cosine; none of what cannot be compared."""
    if one.shape != other.shape:
        return None
    product = float(np.linalg.norm(one) * np.linalg.norm(other))
    found = float(one @ other) / product if product else float("nan")
    return round(found, 4) if np.isfinite(found) else None


def play(env: str, preset: str, seeds: str, calls: str, change: str) -> None:
    """Compile, say how long that took, and then, for each number that is read, how long so many
    calls took."""
    # Those of the version.
    from learner import Calls, make_up  # type: ignore[import-not-found]

    from majepa.compilation import keep_programs

    # What else is printed is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(seconds: float) -> None:
        print(seconds, file=answers, flush=True)

    on_cpu = jax.default_backend() == "cpu"
    if on_cpu and seeds != "1":
        sys.exit("several seeds in one program are measured on an accelerator")
    keep_programs()
    started = time.perf_counter()
    subject = make_up(env, preset, [60, 120])
    if on_cpu:
        made = OneProgram.of(subject)
    else:
        made = Calls.of(subject, int(seeds))
        made.compiled()
    before = weights(made.learner)
    made = made.made(WARM, 0)
    np.save(change, weights(made.learner) - before)
    # The same views as in every turn: what a program does once, when it first runs, is done.
    made = made.made(int(calls), 1)
    answer(time.perf_counter() - started)
    for line in sys.stdin:
        started = time.perf_counter()
        made = made.made(int(line), 1)
        answer(time.perf_counter() - started)


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
