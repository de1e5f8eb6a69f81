"""The simulator as a PettingZoo `ParallelEnv`: `parallel_env("2s3z")`.

**Masks.** What an agent may do is in its observation, `{"observation", "action_mask"}`, where
PettingZoo's own tests and most trainers look, and again in `infos[agent]["action_mask"]`. Code that
samples without a mask must not crash: an illegal action of the space becomes stop, and
`infos[agent]["illegal_actions"]` counts those of the agent in this episode.

**Endings.** All agents receive the team's reward. An agent that dies is terminated and leaves
`agents`, as in SMAC's own wrapper; later rewards go to the living. Victory, defeat and draw
terminate those who are left; the time limit truncates them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from .base import EnvError
from .sim import Scenario
from .sim.battle import NOOP, STOP
from .smac_api import StarCraft2Env, whole_numbers

if TYPE_CHECKING:
    from gymnasium import logger, spaces
    from pettingzoo import ParallelEnv

    _missing: ImportError | None
else:
    try:
        from gymnasium import logger, spaces
        from pettingzoo import ParallelEnv

        _missing = None
    except ImportError as error:
        ParallelEnv, _missing = object, error

ByAgent = dict[str, Any]


def parallel_env(
    map_name: str | Scenario = "8m", *, render_mode: str | None = None, **options: Any
) -> SmacParallelEnv:
    """Battles on one map; the options are those of `StarCraft2Env`."""
    if _missing is not None:
        raise EnvError(f"PettingZoo is needed ({_missing}); pip install 'majepa[pettingzoo]'")
    return SmacParallelEnv(map_name, render_mode, options)


class SmacParallelEnv(ParallelEnv):
    """Agents are named by type and id, such as `stalker_0` and `zealot_2`."""

    metadata = {"name": "majepa_smac_v1", "render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012

    def __init__(
        self, map_name: str | Scenario, render_mode: str | None, options: Mapping[str, Any]
    ):
        self._recipe = map_name, render_mode, options
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise EnvError(f"unknown render_mode {render_mode!r}; use None or 'rgb_array'")
        self.render_mode = render_mode
        self.smac = StarCraft2Env(map_name, **{**options, "continuing_episode": True})
        spec = self.smac.spec
        self.possible_agents = [f"{name}_{index}" for index, name in enumerate(spec.agent_names)]
        self.agents: list[str] = []
        self.action_spaces = {
            agent: spaces.Discrete(spec.num_actions) for agent in self.possible_agents
        }
        self.observation_spaces = {
            agent: spaces.Dict({
                "observation": spaces.Box(-1.0, 1.0, (spec.observation_size,), np.float32),
                "action_mask": spaces.Box(0, 1, (spec.num_actions,), np.int8),
            })
            for agent in self.possible_agents
        }  # fmt: skip
        self.state_space = spaces.Box(-1.0, self._state_bound(), (spec.state_size,), np.float32)
        self._illegal = dict.fromkeys(self.possible_agents, 0)

    def __reduce__(self) -> tuple[type, tuple]:
        """Compiled programs do not travel; a pickle builds the environment anew."""
        return SmacParallelEnv, self._recipe

    def observation_space(self, agent: str) -> spaces.Space:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Space:
        return self.action_spaces[agent]

    def _state_bound(self) -> float:
        """All features are parts of their ceilings, but SMAC's for cooldowns are too low."""
        arena = self.smac.sim.arena
        longest = [
            (unit.period + arena.rules.weapon_jitter[1]) / unit.smac_cooldown
            for unit in arena.units[arena.allies]
            if not unit.is_healer
        ]
        return max([1.0, *longest])

    def reset(
        self, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[ByAgent, dict[str, dict[str, Any]]]:
        """The first episode of a seed, or without one the next episode; there are no options."""
        if seed is not None:
            self.smac.seed(seed)
        self.smac.reset()
        self.agents = self.possible_agents[:]
        self._illegal = dict.fromkeys(self.possible_agents, 0)
        return self._views(self.agents)

    def step(
        self, actions: Mapping[str, Any]
    ) -> tuple[ByAgent, dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict]]:
        """One action for each of `agents`."""
        acted = self.agents
        reward, is_last, info = self.smac.step(self._orders(actions))
        is_timeout = "episode_limit" in info
        is_dead = dict(zip(self.possible_agents, self.smac.death_tracker_ally > 0, strict=True))
        terminations = {a: bool(is_dead[a] or (is_last and not is_timeout)) for a in acted}
        truncations = {a: is_timeout and not terminations[a] for a in acted}
        self.agents = [a for a in acted if not (terminations[a] or truncations[a])]
        observations, infos = self._views(acted, info)
        return observations, dict.fromkeys(acted, reward), terminations, truncations, infos

    def _orders(self, actions: Mapping[str, Any]) -> list[int]:
        """What all agents do, the dead included; illegal actions of the space replaced."""
        wrong = [name for name in actions if name not in self.action_spaces]
        absent = [agent for agent in self.agents if agent not in actions]
        if wrong or absent:
            raise EnvError(f"actions must name each of agents; unknown: {wrong}, missing: {absent}")
        chosen = whole_numbers([actions[agent] for agent in self.agents], self.agents)
        outside = [action for action in chosen if action not in range(self.smac.n_actions)]
        if outside:
            raise EnvError(f"actions are 0 to {self.smac.n_actions - 1}, not {outside}")
        orders = [NOOP] * len(self.possible_agents)
        for agent, action in zip(self.agents, chosen, strict=True):
            index = self.possible_agents.index(agent)
            is_legal = self.smac.get_avail_agent_actions(index)[action]
            orders[index] = action if is_legal else STOP
            self._illegal[agent] += not is_legal
        return orders

    def _views(
        self, agents: list[str], info: Mapping[str, Any] | None = None
    ) -> tuple[ByAgent, dict[str, dict[str, Any]]]:
        """Observations and infos of some agents."""
        news = {"battle_won": False, "dead_allies": 0, "dead_enemies": 0, **(info or {})}
        news.pop("episode_limit", None)
        views = self.smac.get_obs()
        masks = np.array(self.smac.get_avail_actions(), np.int8)
        observations, infos = {}, {}
        for index, agent in enumerate(self.possible_agents):
            if agent in agents:
                observations[agent] = {"observation": views[index], "action_mask": masks[index]}
                infos[agent] = {"action_mask": masks[index].copy(), **news}
                infos[agent]["illegal_actions"] = self._illegal[agent]
        return observations, infos

    def state(self) -> Float[np.ndarray, " S"]:
        return self.smac.get_state()

    def render(self) -> np.ndarray | None:
        if self.render_mode is None:
            logger.warn("render() draws nothing without a mode; use parallel_env(..., "
                        "render_mode='rgb_array')")  # fmt: skip
            return None
        return self.smac.render(self.render_mode)

    def close(self) -> None:
        self.agents = []
        self.smac.close()
