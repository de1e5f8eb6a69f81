"""SMAC's own Python interface to the simulator, for training code written for StarCraft II.

Replace `from smac.env import StarCraft2Env` by `from majepa.envs.smac_api import StarCraft2Env`:
constructor options, methods, shapes and return values are SMAC's. One battle is stepped from
ordinary Python, with one compiled call and one transfer per step.
"""

from __future__ import annotations

import functools
import logging
import operator
import secrets
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .base import EnvError, HostStep, TimeStep
from .make import LARGEST_SEED, nearest_names
from .sim import SCENARIOS, BattleEnv, Options, Rules, Scenario
from .sim.battle import FIRST_TARGET, NORTH
from .sim.state import State, Units

logger = logging.getLogger(__name__)
Number = float | int
_HP = Units._fields.index("hp")

REFUSED: Mapping[str, tuple[object, str]] = {
    "difficulty": ("7", "the opponent plays at SMAC's level '7' only"),
    "game_version": (None, "there is no game; the numbers are those of StarCraft II 4.10"),
    "obs_pathing_grid": (False, "observations have no pathing grid"),
    "obs_terrain_height": (False, "the ground has no height"),
    "window_size_x": (1920, "there is no window"),
    "window_size_y": (1200, "there is no window"),
    **dict.fromkeys(("replay_dir", "replay_prefix"), ("", "there is no StarCraft II replay")),
    **dict.fromkeys(("heuristic_ai", "heuristic_rest"), (False, "agents do what step() is told")),
}
"""SMAC's options that the simulator cannot honour: the defaults, and why."""

MAP_TYPES: Mapping[tuple[str, ...], str] = {
    ("marine",): "marines", ("stalker",): "stalkers", ("zealot",): "zealots",
    ("hydralisk",): "hydralisks", ("stalker", "zealot"): "stalkers_and_zealots",
    ("colossus", "stalker", "zealot"): "colossi_stalkers_zealots",
    ("marauder", "marine", "medivac"): "MMM", ("baneling", "zergling"): "bane",
}  # fmt: skip
"""What SMAC calls a team of these types; it calls others by the names of the types."""


class IllegalActionError(EnvError, AssertionError):
    """An agent was told to do what it cannot; SMAC raises an `AssertionError` here."""


class StarCraft2Env:
    """SMAC's environment with the simulator in the game's place.

    Seed s plays what the simulator's `Env` plays from `jax.random.key(s)`, episode after episode.
    """

    def __init__(
        self, map_name: str | Scenario = "8m", step_mul: int = 8, move_amount: Number = 2,
        difficulty: str | int = "7", game_version: str | None = None, seed: Any = None,
        continuing_episode: bool = False, obs_all_health: bool = True, obs_own_health: bool = True,
        obs_last_action: bool = False, obs_pathing_grid: bool = False,
        obs_terrain_height: bool = False, obs_instead_of_state: bool = False,
        obs_timestep_number: bool = False, state_last_action: bool = True,
        state_timestep_number: bool = False, reward_sparse: bool = False,
        reward_only_positive: bool = True, reward_death_value: Number = 10,
        reward_win: Number = 200, reward_defeat: Number = 0, reward_negative_scale: Number = 0.5,
        reward_scale: bool = True, reward_scale_rate: Number = 20, replay_dir: str | None = "",
        replay_prefix: str | None = "", window_size_x: int = 1920, window_size_y: int = 1200,
        heuristic_ai: bool = False, heuristic_rest: bool = False, debug: bool = False,
    ):  # fmt: skip
        given = dict(locals(), difficulty=str(difficulty))
        _refuse(given)
        options = Options(**{name: given[name] for name in Options.__dataclass_fields__})
        self._machine = _machine(_scenario(map_name), _rules(step_mul, move_amount), options)
        self.sim = self._machine.env
        self.continuing_episode, self.debug = continuing_episode, debug
        self.battles_won = self.battles_game = self.timeouts = self.force_restarts = 0
        self._episode_steps = self._episode_count = 0
        self.win_counted = self.defeat_counted = False
        self.seed(secrets.randbits(31) if seed is None else seed)
        self._describe(self.sim)

    def _describe(self, env: BattleEnv) -> None:
        arena, scenario, self.spec = env.arena, env.arena.scenario, env.spec
        types = tuple(unit.name for unit in scenario.ally_types)
        self.map_name, self.map_type = scenario.name, MAP_TYPES.get(types, "_and_".join(types))
        self.n_agents, self.n_enemies = arena.num_allies, arena.num_enemies
        self.n_actions, self.n_actions_move = self.spec.num_actions, FIRST_TARGET - NORTH
        self.n_actions_no_attack, self.unit_type_bits = FIRST_TARGET, len(scenario.feature_types)
        self.shield_bits_ally = int((arena.shield_max[arena.allies] > 0).any())
        self.shield_bits_enemy = int((arena.shield_max[arena.enemies] > 0).any())
        self.episode_limit, self.max_reward = scenario.limit, env.outcome.max_reward
        self.map_x = self.max_distance_x = scenario.terrain.width
        self.map_y = self.max_distance_y = scenario.terrain.height

    # Episodes.

    def reset(self) -> tuple[list[Float[np.ndarray, " O"]], Float[np.ndarray, " S"]]:
        """Start the next episode, even in the middle of one."""
        self._state, self._now = self._machine.advance(self._state)
        self._episode_steps = 0
        self.win_counted = self.defeat_counted = False
        return self.get_obs(), self.get_state()

    def step(self, actions: Any) -> tuple[float, bool, dict[str, Any]]:
        """One action per agent; an illegal one raises and changes nothing."""
        order = self._checked(actions)
        self._state, now = self._machine.advance(self._state, np.array([order], np.int32))
        self._now = now
        self._episode_steps += 1
        dead = {name: int(now.info[name]) for name in ("dead_allies", "dead_enemies")}
        info = {"battle_won": bool(now.won), **dead}
        if now.is_last:
            self._count_episode(now)
            if self.continuing_episode and not now.is_terminal:
                info["episode_limit"] = True
        if self.debug:
            logger.debug("step %d: %s, reward %g", self._episode_steps, order, now.reward)
        return float(now.reward), bool(now.is_last), info

    def _count_episode(self, now: HostStep) -> None:
        """A draw counts as a battle only; what SMAC calls draws are the timeouts."""
        self._episode_count += 1
        self.battles_game += 1
        self.timeouts += int(not now.is_terminal)
        self.battles_won += int(now.won)
        self.win_counted = bool(now.won)
        is_draw = not (now.info["units"][:, _HP] > 0).any() and not self.sim.arena.is_healer.any()
        self.defeat_counted = bool(now.is_terminal and not now.won and not is_draw)

    def _checked(self, actions: Any) -> list[int]:
        if self._row.is_last:
            raise EnvError("the episode is over; call reset() before the next step")
        order, names = whole_numbers(actions, range(self.n_agents)), self.spec.action_names
        for agent, (action, legal) in enumerate(zip(order, self._row.legal, strict=True)):
            exists = 0 <= action < self.n_actions
            if not (exists and legal[action]):
                can = ", ".join(f"{names[index]} ({index})" for index in np.flatnonzero(legal))
                name = names[action] if exists else "what does not exist"
                raise IllegalActionError(f"agent {agent} cannot do {name} ({action}); legal: {can}")
        return order

    @property
    def _row(self) -> HostStep:
        if self._now is None:
            raise EnvError("no episode has begun; call reset() first")
        return self._now

    def seed(self, seed: Any = None) -> int:
        """The seed in use. A new one needs a reset to follow."""
        if seed is not None:
            if not hasattr(seed, "__index__") or not 0 <= operator.index(seed) <= LARGEST_SEED:
                raise EnvError(f"a seed is an integer from 0 to 2**32 - 1, or None; not {seed!r}")
            self._seed = operator.index(seed)
            self._state, self._now = self._machine.before_first(self._seed), None
        return self._seed

    def full_restart(self) -> None:
        """Start a new episode and count it under `restarts`."""
        self.force_restarts += 1
        self.reset()

    def close(self) -> None:
        self._now = None

    def __enter__(self) -> StarCraft2Env:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save_replay(self) -> None:
        raise EnvError("there is no StarCraft II replay; collect render(mode='rgb_array') instead")

    def render(self, mode: str = "human") -> np.ndarray:
        """A picture of the present moment."""
        if mode != "rgb_array":
            raise EnvError(f"there is no window for mode {mode!r}; use render(mode='rgb_array')")
        if self._now is None:
            raise EnvError("there is nothing to draw yet; call reset() first")
        from .sim.render import to_rgb
        from .sim.scene import scene_of

        return to_rgb(scene_of(self.sim, self._state, 0))

    # What agents see and may do.

    def get_obs(self) -> list[Float[np.ndarray, " O"]]:
        return list(self._row.observation.copy())

    def get_obs_agent(self, agent_id: int) -> Float[np.ndarray, " O"]:
        return self._row.observation[self._agent(agent_id)].copy()

    def get_state(self) -> Float[np.ndarray, " S"]:
        return self._row.state.copy()

    def get_avail_actions(self) -> list[list[int]]:
        return self._row.legal.astype(int).tolist()

    def get_avail_agent_actions(self, agent_id: int) -> list[int]:
        return self._row.legal[self._agent(agent_id)].astype(int).tolist()

    def _agent(self, agent_id: int) -> int:
        if not 0 <= agent_id < self.n_agents:
            raise EnvError(f"{self.map_name} has agents 0 to {self.n_agents - 1}, not {agent_id}")
        return agent_id

    # Sizes and counts.

    def get_obs_size(self) -> int:
        return self.spec.observation_size

    def get_state_size(self) -> int:
        return self.spec.state_size

    def get_total_actions(self) -> int:
        return self.n_actions

    def get_obs_move_feats_size(self) -> int:
        return self._num_features("move_")

    def get_obs_enemy_feats_size(self) -> tuple[int, int]:
        return self.n_enemies, self._num_features("enemy_0/")

    def get_obs_ally_feats_size(self) -> tuple[int, int]:
        return self.n_agents - 1, self._num_features("ally_0/")

    def get_obs_own_feats_size(self) -> int:
        return self._num_features("own/", "timestep")

    def _num_features(self, *prefixes: str) -> int:
        return sum(name.startswith(prefixes) for name in self.spec.observation_names)

    def get_env_info(self) -> dict[str, Any]:
        types = [f"type_{bit}" for bit in range(self.unit_type_bits)]
        ally, enemy = ["shield"] * self.shield_bits_ally, ["shield"] * self.shield_bits_enemy
        return {
            "state_shape": self.get_state_size(),
            "obs_shape": self.get_obs_size(),
            "n_actions": self.n_actions,
            "n_agents": self.n_agents,
            "episode_limit": self.episode_limit,
            "agent_features": ["health", "energy/cooldown", "rel_x", "rel_y", *ally, *types],
            "enemy_features": ["health", "rel_x", "rel_y", *enemy, *types],
        }

    def get_stats(self) -> dict[str, Any]:
        return {
            "battles_won": self.battles_won,
            "battles_game": self.battles_game,
            "battles_draw": self.timeouts,
            "win_rate": self.battles_won / max(self.battles_game, 1),
            "timeouts": self.timeouts,
            "restarts": self.force_restarts,
        }

    # The battlefield.

    @property
    def agents(self) -> dict[int, SimpleNamespace]:
        return self._units(self.sim.arena.allies, owner=1)

    @property
    def enemies(self) -> dict[int, SimpleNamespace]:
        return self._units(self.sim.arena.enemies, owner=2)

    def _units(self, side: slice, owner: int) -> dict[int, SimpleNamespace]:
        """The dead have health 0 and lie where they fell."""
        rows = zip(self.sim.arena.units[side], self._row.info["units"][side].tolist(), strict=True)
        return {
            index: SimpleNamespace(
                tag=side.start + index, owner=owner, unit_type=unit.name,
                pos=SimpleNamespace(x=x, y=y), health=hp, health_max=unit.hp, shield=shield,
                shield_max=unit.shield, energy=energy, weapon_cooldown=cooldown,
            )
            for index, (unit, (x, y, hp, shield, energy, cooldown)) in enumerate(rows)
        }  # fmt: skip

    @property
    def death_tracker_ally(self) -> Float[np.ndarray, " N"]:
        return 1 - self._row.alive.astype(np.float32)

    @property
    def death_tracker_enemy(self) -> Float[np.ndarray, " E"]:
        return (self._row.info["units"][self.sim.arena.enemies, _HP] <= 0).astype(np.float32)

    @property
    def last_action(self) -> Float[np.ndarray, "N A"]:
        """One-hot; all zeros before the first action."""
        done = self._row.info["last_action"][:, None] == np.arange(self.n_actions)
        return done.astype(np.float32)


MultiAgentEnv = StarCraft2Env
"""SMAC's base class, which PyMARL imports beside the environment for an annotation."""


class _Machine:
    """What equal environments of a process share: a battle of a batch of one, compiled."""

    def __init__(self, scenario: Scenario, rules: Rules, options: Options):
        try:
            # A batch of one is quicker here than on any accelerator.
            self.device = jax.devices("cpu")[0]
        except RuntimeError:
            self.device = jax.devices()[0]
        with jax.default_device(self.device):
            self.env = env = BattleEnv(scenario, rules=rules, options=options)

        def before_first(seed: Array) -> State:
            state, _ = env.reset(jax.random.key(seed)[None])
            return state._replace(episode=state.episode - 1)

        def advance(state: State, action: Array, restarts: Array) -> tuple[State, HostStep]:
            state, row = env.step(state._replace(is_over=state.is_over | restarts), action)
            return state, _only(state, row)

        self._before_first = jax.jit(before_first)
        self._advance = jax.jit(lambda *now: _packed(*advance(*now)), donate_argnums=0)
        self._idle = np.zeros((1, env.arena.num_allies), np.int32)
        state = self.before_first(0)
        _, row = jax.eval_shape(advance, state, self._idle, True)
        self._leaves, self._tree = jax.tree.flatten(row)
        self._cuts = np.cumsum([leaf.size for leaf in self._leaves])[:-1].tolist()
        self.advance(state)

    def before_first(self, seed: int) -> State:
        """A state from which the next episode is the first one of a seed."""
        return self._before_first(jax.device_put(np.uint32(seed), self.device))

    def advance(
        self, state: State, action: Int[np.ndarray, "1 N"] | None = None
    ) -> tuple[State, HostStep]:
        """Act, or without an action begin the next episode."""
        order = self._idle if action is None else action
        state, packed = self._advance(state, order, action is None)
        parts = zip(np.split(np.asarray(packed), self._cuts), self._leaves, strict=True)
        row = [part.reshape(leaf.shape).astype(leaf.dtype, copy=False) for part, leaf in parts]
        return state, self._tree.unflatten(row)


_machine = functools.lru_cache(maxsize=64)(_Machine)


def _only(state: State, row: TimeStep) -> HostStep:
    """The row of the only battle, its units and last actions added, what SMAC lacks left out."""
    units = jnp.stack(state.units).T
    info = {**row.info, "units": units, "last_action": state.last_action.T}
    row = row._replace(info=info, agent_state=row.agent_state[..., :0])
    return HostStep(*jax.tree.map(lambda leaf: leaf[0], row))


def _packed(state: State, row: HostStep) -> tuple[State, Float[Array, " F"]]:
    """A row as one array: transfers cost by their number."""
    return state, jnp.concatenate([jnp.float32(x).reshape(-1) for x in jax.tree.leaves(row)])


def whole_numbers(actions: Any, agents: Sequence[int | str]) -> list[int]:
    """From a sequence of integers, or of arrays or tensors of one element each."""
    if isinstance(actions, Mapping) or not hasattr(actions, "__iter__"):
        raise EnvError(f"actions must be a sequence in agent order, not {type(actions).__name__}")
    items, numbers = list(actions), []
    if len(items) != len(agents):
        raise EnvError(f"{len(agents)} agents need {len(agents)} actions, got {len(items)}")
    for agent, item in zip(agents, items, strict=True):
        try:
            value: Any = item.item() if hasattr(item, "item") else item
            number = operator.index(int(value) if value == int(value) else value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise EnvError(f"agent {agent} needs an integer for its action, not {item!r}") from None
        numbers.append(number)
    return numbers


def _refuse(given: Mapping[str, Any]) -> None:
    wrong = [f"{name}={given[name]!r} ({why})" for name, (default, why) in REFUSED.items()
             if given[name] not in (default, None)]  # fmt: skip
    if wrong:
        raise EnvError(f"the simulator cannot honour these options: {'; '.join(wrong)}. "
                       "Leave them out, or use SMAC with StarCraft II itself.")  # fmt: skip


def _rules(step_mul: int, move_amount: Number) -> Rules:
    if step_mul < 1 or move_amount <= 0:
        raise EnvError(f"step_mul={step_mul} and move_amount={move_amount} must be positive")
    return Rules(loops_per_step=step_mul, move_amount=float(move_amount))


def _scenario(map_name: str | Scenario) -> Scenario:
    if isinstance(map_name, Scenario):
        return map_name
    if map_name not in SCENARIOS:
        raise EnvError(f"unknown map {map_name!r}; {nearest_names(map_name, SCENARIOS)}")
    return SCENARIOS[map_name]
