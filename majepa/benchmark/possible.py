"""Whether the runs of a grid can be, before any of them is begun."""

from __future__ import annotations

from ..config import ConfigError
from ..envs.make import make_env
from .grids import Cell, Grid


def require_possible_runs(grid: Grid) -> None:
    """Refuse a grid with a method that cannot be trained on one of its maps; starts no device."""
    for env in grid.envs:
        for method in grid.methods:
            # Seeds differ in nothing that could make a run impossible.
            cell = Cell(method, env, grid.seeds[0], grid.steps)
            try:
                require_possible_run(cell)
            except ConfigError as error:
                raise ConfigError(f"{method.name} on {cell.map}: {error}") from error


def require_possible_run(cell: Cell) -> None:
    from ..training import make_algorithm, require_possible

    config = cell.config()
    require_possible(config, make_algorithm(config, make_env(config.env).spec))
