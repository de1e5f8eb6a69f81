"""The grids as data: methods × maps × seeds, each cell one training run at its map's budget."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cattrs
from cattrs.v import format_exception

from ..config import (
    ConfigError,
    EvaluationConfig,
    TrainConfig,
    preset,
    require_seed,
    with_overrides,
)
from ..envs.make import nearest_names

SEEDS = (1302, 2771, 7636)
"""The paper's."""
TABLE_MAPS = (
    "2s_vs_1sc", "2s3z", "8m", "MMM", "so_many_baneling", "3s_vs_4z", "2c_vs_64zg", "corridor",
)  # fmt: skip
"""Of the paper's Table 1, in its order."""
ALL_MAPS = (
    "2m_vs_1z", "2s_vs_1sc", "2s3z", "3m", "3s_vs_3z", "8m", "MMM", "so_many_baneling",
    "3s_vs_4z", "3s_vs_5z", "2c_vs_64zg", "corridor",
)  # fmt: skip
"""Of the paper's appendix."""
POINTS = 10
"""Evaluations on the way to the budget, for the learning curves."""
SAVES = 4
"""Checkpoints on the way; a run that is killed loses no more than what came since the last."""
OF_THE_GRID = ("seed", "env", "steps", "algo", "algo.algorithm")
"""What a grid says by fields of its own, or by the algorithm of a method."""
PACKED = frozenset({"mappo", "qmix", "mat"})
"""Algorithms of which several seeds fit into one program."""


@dataclasses.dataclass(frozen=True)
class Method:
    """One column of a table: an algorithm with its settings."""

    name: str
    """Of its run folders, such as `mappo`; unique in a grid."""
    title: str
    """In tables and plots."""
    algorithm: str
    preset: str = "paper"
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings by dotted name, such as `algo.routes.jepa`."""

    def __post_init__(self) -> None:
        for name in self.overrides:
            if name in OF_THE_GRID:
                raise ConfigError(
                    f"method {self.name!r} overrides {name}, which is for the grid to say: by its "
                    "seeds, envs and steps, and by the algorithm and preset of a method"
                )

    @property
    def is_packed(self) -> bool:
        """Whether all seeds train together; a run of MA-JEPA fills a device by itself."""
        return self.algorithm in PACKED


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a grid."""

    method: Method
    env: str
    seed: int
    steps: int | None = None
    """Budget; none is the one of the preset and map."""

    @property
    def map(self) -> str:
        return self.env.rpartition(":")[2]

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.method.name}-{self.map}-{self.seed}"

    def config(self) -> TrainConfig:
        """The run that the cell stands for; the same for every way to run it."""
        method = self.method
        base = preset(method.algorithm, method.preset, self.env)
        steps = base.steps if self.steps is None else self.steps
        # As many episodes on the way as at the end: one program less to compile.
        schedule = EvaluationConfig(every=max(1, steps // POINTS), episodes=100)
        base = dataclasses.replace(
            base, steps=steps, seed=self.seed, evaluation=schedule,
            save_every=max(1, steps // SAVES),
        )  # fmt: skip
        return with_overrides(base, method.overrides)


@dataclasses.dataclass(frozen=True)
class Grid:
    name: str
    title: str
    methods: tuple[Method, ...]
    envs: tuple[str, ...]
    seeds: tuple[int, ...] = SEEDS
    steps: int | None = None
    """Budget of every cell; none leaves it to preset and map."""

    def __post_init__(self) -> None:
        if not is_folder_name(self.name):
            raise ConfigError(f"a grid cannot be named {self.name!r}; its folder has that name")
        named: Mapping[str, list[Any]] = {
            "methods": [method.name for method in self.methods],
            "maps": list(self.envs),
            "seeds": list(self.seeds),
        }
        for what, items in named.items():
            if not items:
                raise ConfigError(f"grid {self.name!r} has no {what}; it needs at least one")
            twice = [item for item in items if items.count(item) > 1]
            if twice:
                raise ConfigError(f"grid {self.name!r} names {twice[0]!r} twice among its {what}")
        for seed in self.seeds:
            require_seed(seed)

    def cells(self) -> list[Cell]:
        """Map by map, then method by method, then seed by seed."""
        every = itertools.product(self.envs, self.methods, self.seeds)
        return [Cell(method, env, seed, self.steps) for env, method, seed in every]

    def only(
        self,
        methods: Sequence[str] | None = None,
        maps: Sequence[str] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> Grid:
        """A part of the grid."""
        known = {method.name: method for method in self.methods}
        envs = {env.rpartition(":")[2]: env for env in self.envs}
        return dataclasses.replace(
            self,
            methods=tuple(_picked("method", known, methods)),
            envs=tuple(_picked("map", envs, maps)),
            seeds=tuple(_picked("seed", {seed: seed for seed in self.seeds}, seeds)),
        )


def is_folder_name(name: str) -> bool:
    """Whether a folder can have this name where it is made, and be seen there."""
    return Path(name).name == name != "" and not name.startswith(".") and name.isprintable()


def _picked(what: str, known: Mapping[Any, Any], names: Sequence[Any] | None) -> list[Any]:
    if names is None:
        return list(known.values())
    for name in names:
        if name not in known:
            have = ", ".join(map(str, known))
            raise ConfigError(f"the grid has no {what} {name!r}; it has {have}")
    return [known[name] for name in dict.fromkeys(names)]


MAJEPA = Method("majepa", "MA-JEPA", "majepa")
MAPPO = Method("mappo", "MAPPO", "mappo")
QMIX = Method("qmix", "QMIX", "qmix")
MAT = Method("mat", "MAT", "mat")


def _routes(name: str, title: str, outcome: float, jepa: float) -> Method:
    scales = {"algo.routes.outcome": outcome, "algo.routes.jepa": jepa}
    return Method(name, title, "majepa", overrides=scales)


GRIDS: Mapping[str, Grid] = {
    grid.name: grid
    for grid in (
        Grid("calibration", "Is the simulator as hard as the game?", (MAPPO, QMIX, MAT), ALL_MAPS),
        Grid("paper", "The paper's table", (MAJEPA, MAPPO, QMIX, MAT), TABLE_MAPS),
        Grid(
            "ablation",
            "Gradient routes from joint losses into local states",
            (
                _routes("both", "MA-JEPA", 1.0, 0.1),
                _routes("outcome", "w/o factual JEPA", 1.0, 0.0),
                _routes("jepa", "w/o outcomes", 0.0, 0.1),
                _routes("none", "w/o both", 0.0, 0.0),
            ),
            ("2s3z", "3s_vs_4z", "2c_vs_64zg"),
        ),
    )
}


def find_grid(name: str) -> Grid:
    """A grid of ours by name, or anyone's from a JSON file."""
    if name.endswith(".json"):
        return read_grid(Path(name))
    if name not in GRIDS:
        raise ConfigError(
            f"unknown grid {name!r}; {nearest_names(name, GRIDS)}; "
            "a grid of your own is a file that ends in .json"
        )
    return GRIDS[name]


def read_grid(path: Path) -> Grid:
    """A grid from a file of the fields of `Grid`; the settings of each cell are such."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no grid file at {path}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        _require_shape(data)
        grid = _CONVERTER.structure(data, Grid)
    except (cattrs.BaseValidationError, cattrs.errors.ForbiddenExtraKeysError) as error:
        reasons = "; ".join(cattrs.transform_error(error, "grid", _reason))
        raise ConfigError(f"{path} is not a grid: {reasons}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a grid: {error}") from error
    for cell in grid.cells():
        cell.config()
    return grid


def _require_shape(data: Any) -> None:
    """Refuse lists and objects in each other's place, and texts that would be taken for lists."""
    if not isinstance(data, dict):
        raise ConfigError(f"it holds {_kind(data)}, not an object with the fields of a grid")
    for name in ("methods", "envs", "seeds"):
        if not isinstance(data.get(name, []), list):
            raise ConfigError(f"{name} must be a list, not {_kind(data[name])}")
    for method in data.get("methods", []):
        if not isinstance(method, dict):
            raise ConfigError(
                f"each of methods must be an object with name, title and algorithm, "
                f"not {_kind(method)}"
            )


def _kind(data: Any) -> str:
    kinds = {list: "a list", dict: "an object", str: f"the text {data!r}"}
    return kinds.get(type(data), json.dumps(data))


def _reason(error: BaseException, kind: Any) -> str:
    """Our own words where we have some."""
    return str(error) if isinstance(error, ConfigError) else format_exception(error, kind)


def to_json(grid: Grid) -> dict[str, Any]:
    return _CONVERTER.unstructure(grid)


_CONVERTER = cattrs.Converter(forbid_extra_keys=True)
