"""What the simulator offers, as data and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from .env import BattleEnv
from .maps import SCENARIOS
from .units import SIM_VERSION, UnitType


def catalogue() -> list[dict[str, Any]]:
    """One entry per map, in the order of the scenarios."""
    entries: list[dict[str, Any]] = []
    for name, scenario in SCENARIOS.items():
        spec = BattleEnv(scenario).spec
        entries.append({
            "map": name,
            "agents": spec.num_agents,
            "enemies": len(spec.opponent_names),
            "limit": spec.episode_limit,
            "actions": spec.num_actions,
            "observation": spec.observation_size,
            "state": spec.state_size,
            "agent_state": spec.agent_state_size,
            "allies": _army(scenario.ally_roster),
            "opponents": _army(scenario.enemy_roster),
            "sim_version": SIM_VERSION,
        })  # fmt: skip
    return entries


def print_catalogue() -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"Maps of the embedded simulator (rules {SIM_VERSION})", header_style="bold"
    )
    table.add_column("map", no_wrap=True)
    for column in ("agents", "foes", "limit", "acts", "obs", "state"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("who fights whom")
    for entry in catalogue():
        numbers = ("agents", "enemies", "limit", "actions", "observation", "state")
        armies = f"{_phrase(entry['allies'])} vs {_phrase(entry['opponents'])}"
        table.add_row(entry["map"], *(str(entry[key]) for key in numbers), armies)
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    console.print(table)


def _army(roster: Sequence[UnitType]) -> dict[str, int]:
    return dict(Counter(unit.name for unit in roster))


def _phrase(army: dict[str, int]) -> str:
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in army.items())
