"""What a grid reads off its folders: whose they are, and how far the runs in them."""

import dataclasses
import json

import pytest
from tiny_grids import MAPPO, TINY, begin, finish, progress

from majepa.benchmark.folder import claim
from majepa.benchmark.grids import Method
from majepa.benchmark.states import Standing, require_own, standing
from majepa.config import ConfigError

CELL = TINY.cells()[0]


def look(folder):
    return standing(folder, CELL.config())


def test_a_run_is_missing_then_begun_then_finished(tmp_path):
    assert look(tmp_path / "nowhere") == Standing("missing")
    folder = begin(tmp_path / "one", CELL)
    assert look(folder) == Standing("begun", 0)
    progress(folder, 500, 0.25)
    progress(folder, 1_000, 0.5)
    assert look(folder) == Standing("begun", 1_000, 0.5)
    assert look(finish(tmp_path / "two", CELL, wins=3)) == Standing("finished", 2_000, 0.75)


def test_a_final_evaluation_that_is_torn_does_not_count(tmp_path):
    folder = finish(tmp_path, CELL)
    path = folder / "evaluations.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-5])
    assert look(folder).state == "begun"
    lines = whole.splitlines(keepends=True)
    path.write_text("".join(lines[:4]))
    assert look(folder).state == "begun"
    path.write_text(whole)
    assert look(folder).state == "finished"


def test_nor_one_that_was_not_logged(tmp_path):
    folder = finish(tmp_path, CELL)
    (folder / "metrics.jsonl").unlink()
    progress(folder, 1_920, 0.5)
    assert look(folder) == Standing("begun", 1_920, 0.5)


def test_evaluations_on_the_way_do_not_finish_a_run(tmp_path):
    folder = finish(tmp_path, CELL)
    path = folder / "evaluations.jsonl"
    path.write_text(path.read_text().replace('"final"', '"training"'))
    assert look(folder).state == "begun"


def test_runs_of_other_settings_are_refused(tmp_path):
    other = dataclasses.replace(CELL, method=dataclasses.replace(MAPPO, overrides={}))
    folder = finish(tmp_path, CELL)
    require_own(folder, CELL.config())
    with pytest.raises(ConfigError, match=r"evaluation\.every = 500.*choose another --out"):
        require_own(folder, other.config())


def test_runs_of_another_world_are_refused(tmp_path):
    folder = finish(tmp_path, CELL, version="0.9")
    with pytest.raises(ConfigError, match=r"version 0\.9 of .*choose another --out"):
        require_own(folder, CELL.config())


def test_a_folder_belongs_to_one_grid(tmp_path):
    root = tmp_path / "grid"
    claim(root, TINY)
    claim(root, TINY)
    assert json.loads((root / "grid.json").read_text())["seeds"] == [1, 2]
    with pytest.raises(ConfigError, match=r"seeds is \[1, 2\], here it is \[3\]"):
        claim(root, dataclasses.replace(TINY, seeds=(3,)))
    longer = dataclasses.replace(MAPPO, overrides={**MAPPO.overrides, "save_every": 7})
    with pytest.raises(ConfigError, match=r"methods\.mappo\.overrides\.save_every is 300"):
        claim(root, dataclasses.replace(TINY, methods=(longer,)))


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="not an empty folder"):
        claim(tmp_path, TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (dataclasses.replace(TINY, methods=(Method("../up", "Up", "mappo"),)), "name of a folder"),
        (dataclasses.replace(TINY, envs=("3m", "sim:3m")), "share the folder"),
    ],
)
def test_names_must_make_folders(tmp_path, grid, message):
    with pytest.raises(ConfigError, match=message):
        claim(tmp_path / "grid", grid)
