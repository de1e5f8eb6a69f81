"""Grids from files: what is wrong with one is told before anything is begun, in one line."""

import dataclasses
import json

import pytest
from rich.console import Console
from tiny_grids import MAJEPA, MAPPO, TINY, write_grid

from majepa.benchmark.command import Options, benchmark
from majepa.benchmark.grids import GRIDS, Grid, Method, read_grid, to_json
from majepa.benchmark.possible import require_possible_runs
from majepa.config import ConfigError
from majepa.envs.base import EnvError


@pytest.mark.parametrize("grid", [*GRIDS.values(), TINY], ids=lambda grid: grid.name)
def test_a_grid_comes_back_from_its_file_and_can_be_run(grid, tmp_path):
    path = tmp_path / "grid.json"
    path.write_text(json.dumps(to_json(grid)))
    assert read_grid(path) == grid
    require_possible_runs(grid)


METHOD = to_json(TINY)["methods"][0]
NOT_GRIDS = {
    "a list": ([], "it holds a list, not an object with the fields of a grid"),
    "nothing": (None, "it holds null, not an object"),
    "methods as text": ({"methods": "mappo"}, "methods must be a list, not the text 'mappo'"),
    "methods as an object": ({"methods": METHOD}, "methods must be a list, not an object"),
    "a method as text": ({"methods": [METHOD, "qmix"]}, "not the text 'qmix'"),
    "maps as text": ({"envs": "3m"}, "envs must be a list, not the text '3m'"),
    "one seed": ({"seeds": 3}, "seeds must be a list, not 3"),
    "a negative seed": ({"seeds": [1, -1]}, "seed is -1; it must be from 0 to 4294967295"),
    "a seed too large": ({"seeds": [2**32]}, "seed is 4294967296; it must be from 0"),
    "unknown field": ({"sedes": [1]}, "sedes"),
    "no maps": ({"envs": []}, "grid 'tiny' has no maps; it needs at least one"),
    "a name with a way out": ({"name": "../x"}, "a grid cannot be named '../x'"),
    "another seed": (
        {"methods": [METHOD | {"overrides": {"seed": 4}}]}, "method 'mappo' overrides seed, ",
    ),
    "another map": ({"methods": [METHOD | {"overrides": {"env": "8m"}}]}, "overrides env, "),
    "another budget": ({"methods": [METHOD | {"overrides": {"steps": 9}}]}, "overrides steps, "),
    "another algorithm": (
        {"methods": [METHOD | {"overrides": {"algo.algorithm": "mat"}}]},
        "overrides algo.algorithm, ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", NOT_GRIDS)
def test_what_is_no_grid_is_told_once_and_in_one_line(mistake, tmp_path):
    changed, message = NOT_GRIDS[mistake]
    data = to_json(TINY) | changed if isinstance(changed, dict) else changed
    path = tmp_path / "grid.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError) as error:
        read_grid(path)
    text = str(error.value)
    assert text.startswith(f"{path} is not a grid: ")
    assert text.count(message) == 1 and "\n" not in text and "unknown error" not in text


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/x", ".x", "a\nb", "a\0"])
def test_a_grid_has_the_name_of_a_plain_folder(name):
    with pytest.raises(ConfigError, match="a grid cannot be named"):
        dataclasses.replace(TINY, name=name)


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": (Method("mappo", "M", "mappo"),), "steps": 100}, "mappo on 3m: steps is 100;"),
        ({"methods": (MAJEPA, MAPPO), "steps": 10}, "mappo on 3m: steps is 10;"),
        ({"envs": ("3m", "3n")}, "unknown map '3n'"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_any_begins(change, message, dry_run, tmp_path):
    grid: Grid = dataclasses.replace(TINY, **change)
    options = Options("", out=tmp_path / "grid")
    with pytest.raises((ConfigError, EnvError), match=message):
        benchmark(write_grid(grid, tmp_path), options, dry_run=dry_run, console=Console(quiet=True))
    assert not (tmp_path / "grid").exists()
