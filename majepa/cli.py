"""The command line: parse, call, print. Heavy imports wait until a command needs them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from . import __version__
from .config import ConfigError, TrainConfig, preset
from .envs.base import EnvError

if TYPE_CHECKING:
    from .train import Result

app = tyro.extras.SubcommandApp()


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
    """Watch a battle, played by a scripted policy or recorded, in the terminal or as a file.

    Args:
        source: A map, such as 2s3z or sim:2s3z (`majepa maps` lists them), or a recorded battle,
            such as x.battle.json.gz.
        policy: Who plays on a map: random, nearest, weakest, kite or stop; nearest if not given.
        seed: Another seed, another battle; 0 if not given.
        out: Write a file here instead of showing the battle in the terminal: .html for a page to
            look into the battle, .battle.json or .battle.json.gz to keep it, .gif, .mp4 or .svg.
    """
    from .watch import watch as watch_battle

    watch_battle(source, policy=policy, seed=seed, out=out)


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
        algorithm: Of the run to check for: majepa or mappo.
        preset: As `majepa train` takes it.
        env: As `majepa train` takes it.
        steps: As `majepa train` takes it; the budget of the preset and map if not given.
        as_json: Print JSON, for programs.
    """
    from .doctor import Run
    from .doctor import doctor as check

    sys.exit(check(Run(algorithm, preset, env, steps), as_json=as_json))


@app.command(name="train")
def _train_entry() -> None:
    """Train agents: MA-JEPA by default, `majepa train mappo` for MAPPO; `--resume RUN` goes on."""
    train(["--help"])


@dataclasses.dataclass(frozen=True)
class TrainCommand:
    """Train agents and say how good they are.

    ALGORITHM, --preset and --env pick the defaults; all other flags override them.
    """

    algorithm: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ALGORITHM")]
    """majepa or mappo; it comes before all flags."""
    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    preset: str | None = None
    """small, paper or debug for majepa; paper or debug for mappo."""
    out: Path | None = None
    """Folder of the run; by default a new one under runs/."""
    resume: Path | None = None
    """Go on with the run in this folder, with its own settings."""
    minutes: float | None = None
    """Wall time after which to save, evaluate and end; --resume goes on from there."""


def train(arguments: Sequence[str]) -> None:
    """`majepa train`, from its arguments to the lines at the end."""
    command = parse_train(arguments)
    from .train import train as run

    folder = command.resume or command.out
    seconds = None if command.minutes is None else 60 * command.minutes
    resume = command.resume is not None
    result = run(command.config, folder, resume=resume, stop_after_seconds=seconds)
    print_result(result, command.config)


def parse_train(arguments: Sequence[str]) -> TrainCommand:
    """Read what picks the defaults, then everything over them."""
    named = bool(arguments) and not arguments[0].startswith("-")
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--preset", "--env", "--resume"):
        first.add_argument(flag, nargs="?")
    picked, _ = first.parse_known_args(arguments)
    if picked.resume is not None:
        from .run_folder import read_config

        config = read_config(Path(picked.resume))
    else:
        algorithm = arguments[0] if named else "majepa"
        config = preset(algorithm, picked.preset, picked.env or "sim:3m")
    command = tyro.cli(
        TrainCommand,
        args=arguments,
        default=TrainCommand(config.algorithm, config),
        prog="majepa train",
        config=(tyro.conf.AvoidSubcommands,),
    )
    _check_train(command, config)
    return command


def _check_train(command: TrainCommand, default: TrainConfig) -> None:
    if command.algorithm != default.algorithm:
        hint = (
            f"{command.resume} is a run of {default.algorithm}"
            if command.resume
            else f"name the algorithm before all flags: majepa train {command.algorithm} ..."
        )
        raise ConfigError(f"cannot train {command.algorithm!r} here; {hint}")
    if command.resume is not None and (command.out or command.preset):
        raise ConfigError("--resume goes on in its own folder with its own settings; "
                          "leave out --out and --preset")  # fmt: skip
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
    if isinstance(error, EnvError | ConfigError | OSError):
        return 2
    from .checkpoint import CheckpointError
    from .recording import RecordingError
    from .train import TrainError

    return {CheckpointError: 2, RecordingError: 2, TrainError: 1}.get(type(error))


if __name__ == "__main__":
    main()
