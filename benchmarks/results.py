"""Keep finished runs of MA-JEPA as data, and draw docs/results.md's table and curves from it.

    uv run python benchmarks/results.py keep RUN --commit b4c33a3 --machine "one H200"
    uv run python benchmarks/results.py draw
    uv run python benchmarks/results.py facts 3s_vs_4z-1302

`keep` writes the episodes of every evaluation of a run to `results/majepa/MAP-SEED.csv` and a line
about the run, with a command that makes it, to `results/majepa/runs.csv`. `draw` prints the table,
with the baselines of the calibration beside it, and writes the curves to `docs/results.svg`.
`facts` prints what kept episodes say of a run: how battles end and what they return, by evaluation,
and how the returns of victories go with their lengths.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import correlation, mean, stdev
from typing import Any, NamedTuple

from majepa.benchmark.data_files import csv_text, read_data
from majepa.benchmark.grids import ALL_MAPS, find_grid
from majepa.benchmark.results import Result
from majepa.config import preset
from majepa.envs import make_env
from majepa.run_folder import read_config
from majepa.stats import wilson

ROOT = Path(__file__).parents[1]
KEPT, CALIBRATION = ROOT / "results" / "majepa", ROOT / "results" / "calibration"
RUNS = KEPT / "runs.csv"
BASELINES = ("MAPPO", "QMIX", "MAT")
COLUMNS = 3
"""Of maps in the figure."""
EPISODE = ("transitions", "kind", "actions", "episode", "won", "return", "length")
RUN = (
    "map", "seed", "budget", "transitions", "wins", "episodes", "sampled_wins", "minutes",
    "environment_version", "commit", "machine", "command",
)  # fmt: skip


class Kept(NamedTuple):
    """A run as `runs.csv` has it, and the win rates of its evaluations with argmax actions."""

    run: dict[str, str]
    curve: Sequence[tuple[int, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = parser.add_subparsers(dest="what", required=True)
    keeping = parts.add_parser("keep")
    keeping.add_argument("runs", nargs="+", type=Path)
    keeping.add_argument("--commit", required=True)
    keeping.add_argument("--machine", required=True)
    parts.add_parser("draw")
    telling = parts.add_parser("facts")
    telling.add_argument("runs", nargs="+", help="MAP-SEED")
    options = parser.parse_args()
    if options.what == "keep":
        for folder in options.runs:
            keep(folder, options.commit, options.machine)
    elif options.what == "facts":
        for name in options.runs:
            print(facts(name))
    else:
        found = [read(line) for line in lines_of(RUNS)]
        print(table(found))
        draw(found, ROOT / "docs" / "results.svg")


def keep(folder: Path, commit: str, machine: str) -> None:
    config = read_config(folder)
    wanted = preset("majepa", "paper", config.env)
    if config.algo != wanted.algo or config.steps != wanted.steps:
        sys.exit(f"{folder} is no run of preset paper at its map's budget, {wanted.steps:,}")
    episodes = [json.loads(line) for line in (folder / "evaluations.jsonl").open()]
    final = [one for one in episodes if one["kind"] == "final"]
    best, sampled = ([x for x in final if x["actions"] == name] for name in ("argmax", "sampled"))
    if min(len(best), len(sampled)) < 100:
        sys.exit(f"{folder} has no 100 episodes of each kind at its end: it is not finished")
    world = config.env.rpartition(":")[2]
    KEPT.mkdir(parents=True, exist_ok=True)
    write(KEPT / f"{world}-{config.seed}.csv", EPISODE, map(shortened, episodes))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    versions = json.loads((folder / "versions.json").read_text())
    line = {
        "map": world,
        "seed": config.seed,
        "budget": config.steps,
        "transitions": best[0]["transitions"],
        "wins": sum(x["won"] for x in best),
        "episodes": len(best),
        "sampled_wins": sum(x["won"] for x in sampled),
        "minutes": f"{metrics[-1]['seconds'] / 60:.1f}",
        "environment_version": versions["environment_version"],
        "commit": commit,
        "machine": machine,
        "command": f"majepa train --preset paper --env {world} --steps {config.steps} "
        f"--seed {config.seed}",
    }
    others = [
        x for x in (lines_of(RUNS) if RUNS.exists() else ())
        if (x["map"], x["seed"]) != (world, str(config.seed))
    ]  # fmt: skip
    order = {name: place for place, name in enumerate(ALL_MAPS)}
    write(RUNS, RUN, sorted([*others, line], key=lambda x: (order[x["map"]], int(x["seed"]))))


def shortened(episode: dict[str, Any]) -> dict[str, Any]:
    return {**episode, "won": int(episode["won"]), "return": f"{episode['return']:.4f}"}


def write(path: Path, columns: tuple[str, ...], lines: Iterable[dict[str, Any]]) -> None:
    path.write_text(csv_text(columns, ([line[name] for name in columns] for line in lines)))


def lines_of(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="") as file:
        yield from csv.DictReader(file)


def read(run: dict[str, str]) -> Kept:
    won: dict[int, list[int]] = {}
    for line in lines_of(KEPT / f"{run['map']}-{run['seed']}.csv"):
        if line["actions"] == "argmax":
            won.setdefault(int(line["transitions"]), []).append(int(line["won"]))
    return Kept(run, [(at, mean(wins)) for at, wins in sorted(won.items())])


def baselines() -> dict[tuple[str, str], list[Result]]:
    """Seed by seed, by map and method."""
    calibration = read_data(find_grid("calibration"), CALIBRATION)
    return {
        (world, method.title): calibration.of(method, env)
        for env, world in calibration.maps.items()
        for method in calibration.grid.methods
    }


def table(found: list[Kept]) -> str:
    """One line for each map that has a run."""
    head = ["map", "budget", "MA-JEPA, argmax", "by seed", "sampled", *BASELINES]
    rows, others = [head, ["---"] * len(head)], baselines()
    for world in dict.fromkeys(one.run["map"] for one in found):
        runs = [one.run for one in found if one.run["map"] == world]
        wins, episodes = (sum(int(run[x]) for run in runs) for x in ("wins", "episodes"))
        low, high = wilson(wins, episodes)
        rows.append([
            world,
            f"{int(runs[0]['budget']) // 1000}k",
            f"**{100 * wins / episodes:.1f}** ({100 * low:.1f} - {100 * high:.1f})",
            ", ".join(f"{run['seed']}: {run['wins']}" for run in runs),
            ", ".join(run["sampled_wins"] for run in runs),
            *(spread(others[world, name]) for name in BASELINES),
        ])  # fmt: skip
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def spread(results: list[Result]) -> str:
    rates = [100 * one.win_rate for one in results]
    return f"{mean(rates):.1f} ({stdev(rates):.1f})"


class Battle(NamedTuple):
    at: int
    """Transitions when it was fought."""
    greedy: bool
    won: bool
    episode_return: float
    length: int


def battles_of(name: str) -> list[Battle]:
    return [
        Battle(
            int(line["transitions"]), line["actions"] == "argmax", line["won"] == "1",
            float(line["return"]), int(line["length"]),
        )
        for line in lines_of(KEPT / f"{name}.csv")
    ]  # fmt: skip


def facts(name: str) -> str:
    """A table of a run's evaluations, and a few lines about all of its victories."""
    limit = make_env(name.rpartition("-")[0]).spec.episode_limit
    battles = battles_of(name)
    rows = [[
        "transitions", "argmax, %", "sampled, %", "lost", "of them to the clock",
        "length of victories", "their return",
    ]]  # fmt: skip
    rows.append(["---"] * len(rows[0]))
    for at in sorted({one.at for one in battles}):
        here = [one for one in battles if one.at == at]
        argmax, sampled = ([one for one in here if one.greedy == kind] for kind in (True, False))
        lost, won = ([one for one in argmax if one.won == kind] for kind in (False, True))
        rates = (100 * mean(one.won for one in each) for each in (argmax, sampled))
        ends = zip(*((one.length, one.episode_return) for one in won), strict=True)
        means = [f"{mean(leaf):.1f}" for leaf in ends] or ["-", "-"]
        rows.append([
            f"{at:,}", *(f"{rate:.0f}" for rate in rates),
            str(len(lost)), str(sum(one.length >= limit for one in lost)),
            *means,
        ])  # fmt: skip
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    won = [one for one in battles if one.won]
    lengths, returns = [one.length for one in won], [one.episode_return for one in won]
    told = f"All {len(won)} victories, sampled ones too"
    if len(set(lengths)) > 1 and len(set(returns)) > 1:
        told += f": correlation of length and return {correlation(lengths, returns):.3f}"
    lines = [
        f"{name}: lost are battles with argmax actions, victories of the table too.",
        told + (f"; highest return {max(returns):.2f}" if returns else ""),
    ]
    for low in range(0, limit + 1, 10):
        some = [one.episode_return for one in won if low <= one.length < low + 10]
        if some:
            lines.append(f"{low} to {low + 9} steps: {len(some)} victories return {mean(some):.2f}")
    return "\n".join(["", table, "", *lines])


def draw(found: list[Kept], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "majepa", "font.size": 9})
    maps = list(dict.fromkeys(one.run["map"] for one in found))
    rows, columns = math.ceil(len(maps) / COLUMNS), min(len(maps), COLUMNS)
    figure, grid = plt.subplots(
        rows, columns, figsize=(3.2 * columns + 1, 2.6 * rows), sharey=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    panels, others = list(grid.flat), baselines()
    for axes in panels[len(maps) :]:
        axes.remove()
    for axes, world in zip(panels, maps, strict=False):
        lines: dict[str, list[Sequence[tuple[float, ...]]]] = {
            name: [one.curve for one in others[world, name]] for name in BASELINES
        }
        lines["MA-JEPA"] = [one.curve for one in found if one.run["map"] == world]
        for number, (name, curves) in enumerate(lines.items(), start=1):
            ours = name == "MA-JEPA"
            look = {"color": "C0" if ours else f"C{number}", "lw": 1.8 if ours else 0.8}
            for place, curve in enumerate(curves):
                points = [(at / 1000, rate) for at, rate, *_ in curve]
                axes.plot(*zip(*points, strict=True), label="" if place else name, **look)
        axes.set_title(world)
        axes.set_ylim(-0.03, 1.03)
    figure.supxlabel("transitions, thousands")
    figure.supylabel("win rate, argmax")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
