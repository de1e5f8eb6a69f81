"""The command line: parse, call, print. Heavy imports wait until a command needs them."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import decimal
import itertools
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console

from . import __version__
from .config import PRESETS, ConfigError, TrainConfig, preset, with_seeds
from .envs.base import EnvError

if TYPE_CHECKING:
    from .training import Result

BATTLE = Path("replays") / "final.battle.json.gz"
BATTLE_PAGE = Path("replays") / "final.html"
DIGITS = 30
"""That a number may stand for; 1e999999999 would take a while."""

app = tyro.extras.SubcommandApp()
numbers = tyro.constructors.ConstructorRegistry()
"""How whole numbers are read."""


@numbers.primitive_rule
def _whole_numbers(
    kind: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[int] | None:
    if kind.type is not int:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda texts: whole_number(texts[0]),
        is_instance=lambda value: type(value) is int,
        str_from_instance=lambda value: [str(value)],
    )


def whole_number(text: str) -> int:
    """Also from a text such as 1e5, as long as that is a whole number."""
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(decimal.InvalidOperation):
        number = decimal.Decimal(text)
        if number.is_finite() and number.adjusted() < DIGITS and number == int(number):
            return int(number)
    raise ValueError(f"{text!r} is not a whole number, such as 30000 or 3e4")


@app.command(name="maps")
def maps(as_json: Annotated[bool, tyro.conf.arg(name="json")] = False) -> None:
    """List the maps of the embedded simulator: who fights whom, limits, sizes.

    Args:
        as_json: Print JSON, for programs.
    """
    from .envs.sim.catalogue import catalogue, print_catalogue

    if as_json:
        print(json.dumps(catalogue(), indent=2))
    else:
        print_catalogue()


@app.command(name="watch")
def watch(
    source: Annotated[str, tyro.conf.Positional],
    policy: str | None = None,
    seed: int | None = None,
    out: Path | None = None,
) -> None:
    """Watch a battle of a run, of a scripted policy or from a file, in the terminal or as a file.

    Args:
        source: The folder of a run, whose agents play; or a map, such as 2s3z or sim:2s3z
            (`majepa maps` lists them); or a recorded battle, such as x.battle.json.gz.
        policy: Who plays on a map: random, nearest, weakest, kite or stop; nearest if not given.
            For a run: argmax or sampled; argmax if not given.
        seed: Another seed, another battle; 0 if not given.
        out: Write a file here instead of showing the battle in the terminal: .html for a page to
            look into the battle, .battle.json or .battle.json.gz to keep it, .gif, .mp4 or .svg.
    """
    from .watch import watch as watch_battle

    watch_battle(source, policy=policy, seed=seed, out=out)


@app.command(name="report")
def report(run: Annotated[Path, tyro.conf.Positional], out: Path | None = None) -> None:
    """Write one HTML page about a run: result, curves, diagnostics, settings.

    Args:
        run: Folder of a run, finished or not.
        out: Write the page here instead of RUN/report.html.
    """
    from .report import write_report
    from .report.data import read_run
    from .run_folder import newest_checkpoint

    read_run(run)  # whatever is wrong with the folder, before anything is played
    if newest_checkpoint(run) is not None and not (run / BATTLE).is_file():
        try:
            record_battle(run)
        except (EnvError, OSError, RuntimeError, ValueError) as error:
            print(f"majepa: without a battle: {error}", file=sys.stderr)
    print(write_report(run, _battle(run), out=out))


def _battle(run: Path) -> str | None:
    """The viewer of the battle that was recorded when a run ended, if there is one."""
    from .recording import RecordingError, read
    from .viewer.page import embed

    kept = run / BATTLE
    try:
        return embed(read(kept)) if kept.is_file() else None
    except RecordingError as error:
        print(f"majepa: without a battle: {error}", file=sys.stderr)
        return None


@app.command(name="evaluate")
def evaluate(
    run: Annotated[Path, tyro.conf.Positional],
    episodes: int = 100,
    seed: int | None = None,
    checkpoint: Literal["last", "best"] = "last",
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Play episodes with the agents of a run: win rates with argmax and with sampled actions.

    Args:
        run: Folder of a run.
        episodes: Episodes of each of the two.
        seed: Other episodes than those every run is judged on.
        checkpoint: The last state of the run, which is its result, or the best on the way.
        as_json: Print one JSON object, for programs.
    """
    from .api import evaluate as judge
    from .checkpoint import CheckpointError
    from .evaluation import EVALUATION_SEED
    from .log import describe
    from .run_folder import BEST

    _keep_programs()
    chosen = EVALUATION_SEED if seed is None else seed
    try:
        result = judge(run, episodes=episodes, seed=chosen, checkpoint=checkpoint)
    except (CheckpointError, FileNotFoundError) as error:
        if checkpoint == "best" or not (run / BEST).is_file():
            raise
        raise type(error)(f"{error}; `--checkpoint best` takes {run / BEST}") from error
    if as_json:
        line: dict[str, object] = {"run": str(run), "transitions": result.transitions}
        for name, played in (("argmax", result.argmax), ("sampled", result.sampled)):
            line[name] = played.win_rate
            line[f"{name}_interval"] = played.interval
            line[f"{name}_return"] = played.mean_return
        print(json.dumps(line | {"episodes": episodes, "seed": chosen, "checkpoint": checkpoint}))
        return
    print(f"{run}, {checkpoint} checkpoint, {result.transitions:,} transitions")
    print(f"win rate     {describe(result.argmax)} (argmax actions), "
          f"return {result.argmax.mean_return:.2f}")  # fmt: skip
    print(f"             {describe(result.sampled)} (sampled actions), "
          f"return {result.sampled.mean_return:.2f}")  # fmt: skip


@app.command(name="doctor")
def doctor(
    algorithm: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ALGORITHM")] = "majepa",
    preset: str | None = None,
    env: str = "sim:3m",
    steps: int | None = None,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Check this machine for a run: versions, devices, memory, disk, a battle; exit code 1 if bad.

    Args:
        algorithm: Of the run to check for: majepa, mappo, qmix or mat.
        preset: As `majepa train` takes it.
        env: As `majepa train` takes it.
        steps: As `majepa train` takes it; the budget of the preset and map if not given.
        as_json: Print JSON, for programs.
    """
    from .doctor import Run
    from .doctor import doctor as check

    sys.exit(check(Run(algorithm, preset, env, steps), as_json=as_json))


@app.command(name="benchmark")
def benchmark(
    name: Annotated[str, tyro.conf.Positional],
    out: Path | None = None,
    jobs: int | None = None,
    methods: tuple[str, ...] | None = None,
    maps: tuple[str, ...] | None = None,
    seeds: tuple[int, ...] | None = None,
    retries: int = 2,
    minutes: float | None = None,
    dry_run: bool = False,
    mps: bool = True,
    cluster: str | None = None,
    cpus_per_job: int | None = None,
    gpus_per_job: float | None = None,
) -> None:
    """Run a grid of methods, maps and seeds, or go on with it, and write tables of the results.

    Args:
        name: paper, calibration, ablation, or a file of your own grid that ends in .json.
        out: Folder of the grid; runs/benchmark-NAME if not given.
        jobs: How many jobs at a time, whatever they are; if not given, as many as this machine, or
            the cluster, holds of them.
        methods: Only these methods of the grid.
        maps: Only these maps.
        seeds: Only these seeds.
        retries: How often a job that fails is tried again, from its last checkpoint.
        minutes: Wall time after which jobs save and end; the same command goes on.
        dry_run: Only print what would be run, and how far it is.
        mps: Let jobs share an NVIDIA GPU through NVIDIA's multi-process service, if there is one.
        cluster: Run on the Ray cluster at this address, HOST:PORT or auto, not on this machine.
        cpus_per_job: Of the cluster; if not given 1 for jobs on a GPU, 2 for others.
        gpus_per_job: Of the cluster; if not given what fits the algorithm where it has GPUs, 0
            elsewhere.
    """
    from .benchmark.command import Options
    from .benchmark.command import benchmark as run

    again = shlex.join(["majepa", *sys.argv[1:]])
    options = Options(again, out, jobs, retries, minutes, mps, cluster, cpus_per_job, gpus_per_job)
    sys.exit(run(name, options, methods=methods, maps=maps, seeds=seeds, dry_run=dry_run))


@app.command(name="train")
def _train_entry() -> None:
    """Train agents: MA-JEPA, or a baseline as in `majepa train mappo`; `--resume RUN` goes on."""
    train(["--help"])


@dataclasses.dataclass(frozen=True)
class TrainCommand:
    """Train agents and say how good they are.

    ALGORITHM, --preset and --env pick the defaults; all other flags override them.
    """

    algorithm: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ALGORITHM")]
    """majepa, mappo, qmix or mat; it comes before all flags."""
    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    preset: str | None = None
    """small, paper or debug for majepa; paper, tuned or debug for the baselines."""
    out: Path | None = None
    """Folder of the run; by default a new one under runs/. With --seeds, the folder that gets a
    folder for each, such as seed-0."""
    config_file: Annotated[Path | None, tyro.conf.arg(name="config")] = None
    """Take the defaults from this file instead of a preset: the config.json of a run, say."""
    seeds: tuple[int, ...] = ()
    """Train several seeds in one program, each in its own folder: one number is how many, counted
    from --seed, several are the seeds themselves."""
    resume: tuple[Path, ...] = ()
    """Go on with the run in this folder, with its own settings; or with the runs in these folders,
    in one program, if they differ in their seed alone."""
    minutes: float | None = None
    """Wall time after which to save, evaluate and end; --resume goes on from there."""


def train(arguments: Sequence[str]) -> None:
    """`majepa train`, from its arguments to the lines at the end."""
    command = parse_train(arguments)
    from .training import TrainError, train_together

    _keep_programs()
    configs = _configs(command)
    seconds = None if command.minutes is None else 60 * command.minutes
    try:
        results = train_together(
            configs, _folders(command, configs),
            resume=bool(command.resume), stop_after_seconds=seconds,
        )  # fmt: skip
    except TrainError as error:
        if error.results:
            print_results(error.results, command.config)
        raise
    if len(results) > 1:
        print_results(results, command.config)
        return
    print_result(results[0], command.config)
    if results[0].argmax is not None:
        print_pages(results[0].folder)


def _keep_programs() -> None:
    from .compilation import keep_programs

    reason = keep_programs()
    if reason:
        print(f"majepa: compiled programs are not kept: {reason}", file=sys.stderr)


def _configs(command: TrainCommand) -> list[TrainConfig]:
    """The runs that a command asks for, which differ in their seed alone."""
    if command.resume:
        from .run_folder import read_config

        others = [read_config(folder).seed for folder in command.resume[1:]]
        return [
            command.config,
            *(dataclasses.replace(command.config, seed=seed) for seed in others),
        ]
    if not command.seeds:
        return [command.config]
    count = command.seeds[0] if len(command.seeds) == 1 else command.seeds
    return with_seeds(command.config, count)


def _folders(command: TrainCommand, configs: Sequence[TrainConfig]) -> list[Path] | None:
    if command.resume or command.out is None:
        return list(command.resume) or None
    if not command.seeds:
        return [command.out]
    return [command.out / f"seed-{config.seed}" for config in configs]


def print_pages(folder: Path) -> None:
    """Record a battle of the trained agents, write the report, and say where both are."""
    from .report import write_report

    try:
        record_battle(folder)
        print(f"battle       {folder / BATTLE_PAGE}")
        print(f"watch it     majepa watch {folder}")
    except (EnvError, OSError, RuntimeError) as error:
        print(f"no battle    {error}")
    print(f"report       {write_report(folder, _battle(folder))}")


def record_battle(folder: Path) -> None:
    """Let the agents of a run fight once, and keep it as a recording and as a page."""
    from .watch import play_run, show

    recording = play_run(folder, "argmax", 0)
    for name in (BATTLE, BATTLE_PAGE):
        show(recording, folder / name, console=Console(quiet=True))


def parse_train(arguments: Sequence[str]) -> TrainCommand:
    """Read what picks the defaults, then everything over them."""
    named = bool(arguments) and not arguments[0].startswith("-")
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--preset", "--env", "--config"):
        first.add_argument(flag, nargs="?")
    for flag in ("--resume", "--seeds"):
        first.add_argument(flag, nargs="*", action="append")
    picked, _ = first.parse_known_args(arguments)
    _require_values("--resume", picked.resume, "the folder of a run, or of several")
    _require_values("--seeds", picked.seeds, "how many seeds, or several seeds")
    if picked.resume:
        from .run_folder import read_config

        config = read_config(Path(picked.resume[0][0]))
    elif picked.config is not None:
        from .run_folder import read_config_file

        config = read_config_file(Path(picked.config))
    else:
        algorithm = arguments[0] if named else "majepa"
        if algorithm not in PRESETS and _is_map(algorithm):
            known = ", ".join(PRESETS)
            raise ConfigError(f"unknown algorithm {algorithm!r}; choose one of {known}; "
                              f"did you mean --env {algorithm}?")  # fmt: skip
        config = preset(algorithm, picked.preset, picked.env or "sim:3m")
        _require_no_map(arguments)
    command = tyro.cli(
        TrainCommand,
        args=arguments,
        default=TrainCommand(config.algorithm, config),
        prog="majepa train",
        config=(tyro.conf.AvoidSubcommands,),
        registry=numbers,
    )
    _check_train(command, config)
    return command


def _require_no_map(arguments: Sequence[str]) -> None:
    """Refuse a map that stands where no flag takes it."""
    for before, word in itertools.pairwise(arguments):
        follows_flag = before.startswith("-") and "=" not in before
        if not follows_flag and _is_map(word):
            raise ConfigError(f"{word!r} belongs to no flag; did you mean --env {word}?")


def _is_map(word: str) -> bool:
    from .envs.sim import SCENARIOS

    return word.removeprefix("sim:") in SCENARIOS


def _require_values(flag: str, given: list[list[str]] | None, wanted: str) -> None:
    """Refuse a flag that is there without a value, or more than once."""
    if given is None:
        return
    if len(given) > 1:
        raise ConfigError(f"{flag} is there {len(given)} times; name all its values after one")
    if not given[0] or "" in given[0]:
        raise ConfigError(f"{flag} has no value; it needs {wanted}")


def _check_train(command: TrainCommand, default: TrainConfig) -> None:
    if command.algorithm != default.algorithm:
        hint = (
            f"{command.resume[0]} is a run of {default.algorithm}"
            if command.resume
            else f"name the algorithm before all flags: majepa train {command.algorithm} ..."
        )
        raise ConfigError(f"cannot train {command.algorithm!r} here; {hint}")
    chosen = command.out or command.preset or command.config_file or command.seeds
    if command.resume and chosen:
        raise ConfigError("--resume goes on in its own folder with its own settings; "
                          "leave out --out, --preset, --config and --seeds")  # fmt: skip
    if command.config_file is not None and command.preset is not None:
        raise ConfigError("--config and --preset both pick the defaults; leave one of them out")
    if len(command.seeds) > 1 and command.config.seed != default.seed:
        raise ConfigError("--seeds names every seed; leave out --seed, or give --seeds one number: "
                          "how many seeds from --seed on")  # fmt: skip
    if command.minutes is not None and not command.minutes > 0:
        raise ConfigError(f"--minutes is {command.minutes}; it must be more than 0")


def print_result(result: Result, config: TrainConfig) -> None:
    """How a run ended, in a few lines."""
    from .log import describe
    from .progress import clock_time

    print()
    if result.stopped:
        print(f"stopped early at {result.transitions:,} of {config.steps:,} transitions: "
              f"{result.stopped}")  # fmt: skip
    if result.argmax and result.sampled:
        print(f"win rate     {describe(result.argmax)} (argmax actions)")
        print(f"             {describe(result.sampled)} (sampled actions)")
    print(f"transitions  {result.transitions:,} of {config.steps:,}")
    print(f"wall time    {clock_time(result.seconds)}")
    print(f"folder       {result.folder}")
    if result.stopped:
        print(f"go on with   majepa train --resume {result.folder}")


def print_results(results: Sequence[Result], config: TrainConfig) -> None:
    """How runs ended that were trained together, a line for each, and their pages written."""
    from .log import describe
    from .progress import clock_time

    print()
    for result in results:
        told = f"{result.transitions:,} of {config.steps:,} transitions"
        if result.argmax and result.sampled:
            told = f"win rate {describe(result.argmax)} (argmax actions), {told}"
            with contextlib.redirect_stdout(None):
                print_pages(result.folder)
        print(f"{result.folder}  {told}")
    stopped = [result for result in results if result.stopped]
    print(f"wall time    {clock_time(max(result.seconds for result in results))}")
    if stopped:
        print(f"stopped      {stopped[0].stopped}")
        print(f"go on with   majepa train --resume {' '.join(str(one.folder) for one in results)}")


def main() -> None:
    """Run the command line; a caller's mistake is one line on standard error, exit code 2."""
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        print(f"majepa {__version__}")
        return
    try:
        if arguments[:1] == ["train"]:
            train(arguments[1:])
        else:
            app.cli(
                prog="majepa",
                registry=numbers,
                description=(
                    "World models for cooperative multi-agent RL: SMAC's battles on the "
                    "accelerator, without StarCraft II. Start with `majepa watch 2s3z`, then "
                    "`majepa train`."
                ),
            )
    except BrokenPipeError:
        sys.exit(0)
    except KeyboardInterrupt:
        print("majepa: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        print(f"majepa: {error}", file=sys.stderr)
        sys.exit(code)


def _exit_code(error: Exception) -> int | None:
    """2 for what a caller can set right, 1 for a run that failed, none for a bug of ours."""
    from .report import ReportError

    if isinstance(error, EnvError | ConfigError | ReportError | OSError):
        return 2
    from .checkpoint import CheckpointError
    from .recording import RecordingError
    from .training import TrainError

    return {CheckpointError: 2, RecordingError: 2, TrainError: 1}.get(type(error))


if __name__ == "__main__":
    main()
