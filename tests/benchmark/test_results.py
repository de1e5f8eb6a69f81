"""What the cells of a grid came to, from their folders or kept as data, and what does not count."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from made_up_grid import EPISODES, GRID, MAPPO, WINS, WORLD, write_cell, write_grid

from majepa.benchmark import output
from majepa.benchmark.curves import mean_curve
from majepa.benchmark.data_files import CURVES, RESULTS, curves_csv, read_data, results_csv
from majepa.benchmark.grids import Grid
from majepa.benchmark.results import Gap, Point, Result, Results, ResultsError, read_folders


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    return write_grid(tmp_path_factory.mktemp("grid"))


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(finished, tmp_path / "grid")


def cell_folder(folder: Path, index: int = 0) -> Path:
    return folder / "cells" / GRID.cells()[index].name


def only_gap(folder: Path) -> Gap:
    results = read_folders(GRID, folder)
    assert len(results.finished) == len(GRID.cells()) - 1
    (gap,) = results.gaps
    return gap


def test_a_finished_grid_is_read(finished):
    results = read_folders(GRID, finished)
    assert not results.gaps and not results.notes
    assert [one.cell for one in results.finished] == GRID.cells()
    for one in results.finished:
        wins = WINS[one.cell.method.name, one.cell.map][GRID.seeds.index(one.cell.seed)]
        assert (one.wins, one.episodes) == (wins, EPISODES)
        assert (one.sampled_wins, one.sampled_episodes) == (wins // 2, EPISODES)
        assert one.mean_return == pytest.approx((20 * wins + 4 * (10 - wins)) / 10)
        assert (one.mean_length, one.transitions, one.budget) == (30, 100_000, 100_000)
        assert (one.seconds, one.phases["learning"], one.phases["saving"]) == (100, 50, 0.5)
        assert one.environment_version == WORLD and one.majepa_version
        assert one.curve == (
            Point(50_000, wins // 2 / 10, EPISODES),
            Point(100_000, wins / 10, EPISODES),
        )
        assert (finished / (one.folder or "")).is_dir()
    assert results.world == "simulator v9.8"


def test_cells_that_are_not_there_are_named(folder):
    shutil.rmtree(cell_folder(folder))
    gap = only_gap(folder)
    assert (gap.cell, gap.state, gap.reason) == (GRID.cells()[0], "missing", "not started")
    nothing = read_folders(GRID, folder / "elsewhere")
    assert not nothing.finished and len(nothing.gaps) == len(GRID.cells())
    assert nothing.world == "simulator (no results yet)"


@pytest.mark.parametrize("kind, how", [("training", "not finished"), ("stopped", "stopped early")])
def test_a_cell_on_the_way_is_no_result(folder, kind, how):
    shutil.rmtree(cell_folder(folder))
    write_cell(folder, GRID.cells()[0], [9, 9], kind=kind)
    gap = only_gap(folder)
    assert gap.state == "unfinished"
    assert gap.reason == f"{how}, at 100,000 of 100,000 transitions"


def test_a_cell_that_goes_on_after_its_end_is_no_result(folder):
    with (cell_folder(folder) / "metrics.jsonl").open("a") as file:
        file.write('{"transitions": 10500, "seconds": 101.0}\n')
    assert only_gap(folder).state == "unfinished"


def test_a_cell_that_only_began(folder):
    (cell_folder(folder) / "metrics.jsonl").write_text("")
    gap = only_gap(folder)
    assert (gap.state, gap.reason) == ("unfinished", "started, nothing is logged yet")


def without_last_episode(run: Path) -> None:
    path = run / "evaluations.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def with_an_episode_twice(run: Path) -> None:
    path = run / "evaluations.jsonl"
    path.write_text(path.read_text() + path.read_text().splitlines(keepends=True)[-1])


def change_last_line(run: Path, name: str, **fields: object) -> None:
    *lines, last = (run / name).read_text().splitlines()
    lines.append(json.dumps(json.loads(last) | fields))
    (run / name).write_text("\n".join(lines) + "\n")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "episode lost": (without_last_episode, "holds 9 different final sampled episodes in 9 lines"),
    "episode twice": (with_an_episode_twice, "10 different final sampled episodes in 11 lines"),
    "episode in place of another": (
        lambda run: change_last_line(run, "evaluations.jsonl", episode=0),
        "9 different final sampled episodes in 10 lines",
    ),
    "episode without number": (
        lambda run: change_last_line(run, "evaluations.jsonl", episode=[]),
        "9 different final sampled episodes in 10 lines",
    ),
    "episode without outcome": (
        lambda run: change_last_line(run, "evaluations.jsonl", won="yes"),
        "episode without its outcome",
    ),
    "no episodes": (lambda run: (run / "evaluations.jsonl").unlink(), "0 different final argmax"),
    "files disagree": (
        lambda run: change_last_line(run, "metrics.jsonl", **{"evaluation/win_rate": 0.3}),
        "has evaluation/win_rate = 0.3, but evaluations.jsonl 9 of 10",
    ),
    "rate missing": (
        lambda run: change_last_line(run, "metrics.jsonl", **{"evaluation/win_rate": None}),
        "has evaluation/win_rate = None",
    ),
    "no versions": (
        lambda run: (run / "versions.json").unlink(), "does not tell the version",
    ),
    "no config": (lambda run: (run / "config.json").unlink(), "not the folder of a run"),
    "torn config": (lambda run: (run / "config.json").write_text('{"env'), "is not JSON"),
    "binary config": (lambda run: (run / "config.json").write_bytes(b"\xff\x00"), "is not JSON"),
    "empty config": (lambda run: (run / "config.json").write_text("{}"), "does not tell env"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_cells_are_listed_with_their_reason(folder, damage):
    do, reason = DAMAGES[damage]
    do(cell_folder(folder))
    gap = only_gap(folder)
    assert gap.state == "damaged" and reason in gap.reason
    output.write(GRID, folder)
    assert reason.split("'")[0] in (folder / "table.md").read_text()


def test_asked_evaluations_and_torn_lines_change_no_result(folder):
    run = cell_folder(folder)
    path = run / "evaluations.jsonl"
    last = json.loads(path.read_text().splitlines()[-1])
    with path.open("a") as file:
        file.write("not json\n")
        file.write(json.dumps(last | {"kind": "asked", "actions": "argmax", "won": False}) + "\n")
    results = read_folders(GRID, folder)
    assert results.finished[0].wins == 9
    assert results.notes == (
        f"cells/{run.name}: evaluations.jsonl: 1 lines could not be read and are left out.",
    )


def change_config(run: Path, **fields: object) -> None:
    path = run / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    "fields, told",
    [
        ({"seed": 7}, "it has seed = 7, the cell 1"),
        ({"env": "3m"}, "it has env = '3m', the cell '8m'"),
        ({"steps": 5}, "it has steps = 5, the cell 100000"),
    ],
)
def test_a_folder_with_another_run_is_refused(folder, fields, told):
    change_config(cell_folder(folder), **fields)
    with pytest.raises(ResultsError) as error:
        output.write(GRID, folder)
    assert f"cells/{GRID.cells()[0].name} is not the run of its cell: {told}" in str(error.value)
    assert "\n" not in str(error.value) and not (folder / "index.html").exists()


def test_settings_of_the_algorithm_count_and_all_such_cells_are_counted(folder):
    for index in (0, 1):
        run = cell_folder(folder, index)
        algo = json.loads((run / "config.json").read_text())["algo"]
        change_config(run, algo=algo | {"routes": {"outcome": 0.5, "jepa": 0.1}})
    with pytest.raises(ResultsError, match=r"algo\.routes\.outcome = 0\.5, .*and 1 more cells"):
        read_folders(GRID, folder)


def test_settings_without_effect_and_of_other_versions_may_differ(folder):
    run = cell_folder(folder)
    stored = json.loads((run / "config.json").read_text())
    del stored["algo"]["collect"]
    stored |= {"log": {"tensorboard": True}, "save_every": 3, "newer": 1}
    (run / "config.json").write_text(json.dumps(stored))
    assert not read_folders(GRID, folder).gaps


def test_worlds_are_not_mixed(folder):
    shutil.rmtree(cell_folder(folder, 1))
    write_cell(folder, GRID.cells()[1], [10, 10], version="9.9")
    with pytest.raises(ResultsError) as error:
        read_folders(GRID, folder)
    assert "9.8 (7 cells, such as majepa-8m-1), 9.9 (1 cell, such as majepa-8m-2)" in str(
        error.value
    )


def test_folders_of_no_cell_are_told(folder):
    (folder / "cells" / "other-3m-1").mkdir()
    assert read_folders(GRID, folder).notes == ("cells/other-3m-1 is no cell of this grid.",)


def test_an_algorithm_that_this_version_does_not_know(folder):
    unknown = dataclasses.replace(MAPPO, name="majepa", algorithm="soon")
    grid = dataclasses.replace(GRID, methods=(unknown,))
    states = {(gap.state, gap.reason.partition(";")[0]) for gap in read_folders(grid, folder).gaps}
    assert states == {("damaged", "unknown algorithm 'soon'")}


def test_data_tells_the_same_without_the_runs(finished, tmp_path):
    results = read_folders(GRID, finished)
    (tmp_path / RESULTS).write_text(results_csv(results))
    (tmp_path / CURVES).write_text(curves_csv(results))
    kept = read_data(GRID, tmp_path)
    without_folders = [dataclasses.replace(one, folder=None) for one in results.finished]
    assert list(kept.finished) == without_folders and not kept.gaps and not kept.notes


def test_data_has_one_line_for_each_cell(finished):
    lines = results_csv(read_folders(GRID, finished)).splitlines()
    assert len(lines) == 1 + len(GRID.cells())
    assert lines[0].startswith("method,map,seed,budget,transitions,wins,episodes,sampled_wins,")
    assert lines[3].startswith("mappo,8m,1,100000,100000,2,10,1,10,7.2,30.0,100.0,9.8,")


@pytest.fixture
def data(finished: Path, tmp_path: Path) -> Path:
    results = read_folders(GRID, finished)
    (tmp_path / RESULTS).write_text(results_csv(results))
    (tmp_path / CURVES).write_text(curves_csv(results))
    return tmp_path


def test_cells_that_were_not_kept_are_gaps(data):
    path = data / RESULTS
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    (gap,) = read_data(GRID, data).gaps
    assert (gap.cell, gap.reason) == (GRID.cells()[-1], "not in results.csv")


def test_a_part_of_a_grid_can_be_made_from_all_its_data(data):
    part = GRID.only(methods=["mappo"])
    results = read_data(part, data)
    assert len(results.finished) == 4 and not results.gaps
    assert results.notes == ("results.csv has 4 lines of cells outside this grid.",)


@pytest.mark.parametrize(
    "name, before, after, told",
    [
        (
            RESULTS,
            "mappo,8m,1,100000,100000,2,10",
            "mappo,8m,1,100000,100000,12,10",
            "line 4: 12 wins",
        ),
        (RESULTS, "mappo,8m,1,100000", "mappo,8m,1,many", "line 4: invalid literal"),
        (RESULTS, "mappo,8m,2,", "mappo,8m,1,", "has mappo on 8m with seed 1 twice"),
        (RESULTS, "sampled_wins", "drawn_wins", "lacks 1 column: sampled_wins"),
        (CURVES, "majepa,8m,1,50000,0.4", "majepa,8m,1,50000,40", "a win rate of 40 cannot be"),
    ],
)
def test_wrong_data_is_one_clear_error(data, name, before, after, told):
    path = data / name
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    with pytest.raises(ResultsError, match=told):
        read_data(GRID, data)


def test_data_of_two_worlds_is_refused(data):
    path = data / RESULTS
    path.write_text(path.read_text().replace(",9.8,", ",9.9,", 1))
    with pytest.raises(ResultsError, match="different versions of the environment"):
        read_data(GRID, data)


def test_no_data(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no curves\.csv in"):
        read_data(GRID, tmp_path)


def with_curve(*points: tuple[int, float], budget: int = 100) -> Result:
    curve = tuple(Point(at, rate, 10) for at, rate in points)
    cell = Grid("g", "", (MAPPO,), ("3m",)).cells()[0]
    return Result(cell, budget, budget, 0, 1, 0, 1, 0.0, 1.0, 1.0, {}, "1", "1", curve)


def test_curves_are_put_together_where_all_seeds_were_evaluated():
    """One seed is evaluated a little later than the other, and one point was lost."""
    one = with_curve((10, 0.0), (20, 0.2), (30, 0.4), (100, 1.0))
    other = with_curve((13, 0.4), (22, 0.0), (96, 0.5))
    curve = mean_curve([one, other])
    assert curve.transitions == [11.5, 21, 98]
    assert curve.mean == pytest.approx([0.2, 0.1, 0.75])
    assert (curve.low, curve.high) == ([0.0, 0.0, 0.5], [0.4, 0.2, 1.0])
    assert mean_curve([]).transitions == [] and mean_curve([with_curve()]).transitions == []


def test_other_families_of_environments_are_not_called_a_simulator():
    grid = dataclasses.replace(GRID, envs=("smac:8m",))
    assert Results(grid, (), ()).world == "smac (no results yet)"
