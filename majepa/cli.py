"""The command line: parse, call, print. Heavy imports wait until a command needs them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import tyro

from . import __version__

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
    map_name: Annotated[str, tyro.conf.Positional],
    policy: str = "nearest",
    seed: int = 0,
    out: Path | None = None,
) -> None:
    """Watch a scripted policy fight one battle, in the terminal or as a file.

    Args:
        map_name: A map, such as 2s3z or sim:2s3z; `majepa maps` lists them.
        policy: random, nearest, weakest, kite or stop.
        seed: Another seed, another battle.
        out: Write a .gif, .mp4 or .svg here instead of showing the battle in the terminal.
    """
    from .watch import watch as watch_battle

    watch_battle(map_name, policy=policy, seed=seed, out=out)


def main() -> None:
    """Run the command line; a caller's mistake is one line on standard error, exit code 2."""
    from .envs.base import EnvError

    if sys.argv[1:] == ["--version"]:
        print(f"majepa {__version__}")
        return
    try:
        app.cli(
            prog="majepa",
            description=(
                "World models for cooperative multi-agent RL: SMAC's battles on the accelerator, "
                "without StarCraft II. Start with `majepa maps`, then `majepa watch 2s3z`."
            ),
        )
    except BrokenPipeError:
        sys.exit(0)
    except (EnvError, OSError) as error:
        print(f"majepa: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
