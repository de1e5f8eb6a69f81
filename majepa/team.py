"""A trained team, ready to act: one agent at a time, or all agents of a battle to be recorded."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from .algorithm import Algorithm, Decentralised, agent_keys
from .compilation import EVALUATION_OPTIONS
from .config import ConfigError, TrainConfig
from .envs.base import Env, EnvSpec, TimeStep
from .envs.make import make_env
from .recording import Choice, Player
from .run_folder import BEST, CHECKPOINT, read_config, require_same_world
from .training import RunState, load_run, make_algorithm

CHECKPOINTS = {"last": CHECKPOINT, "best": BEST}


class AgentState(NamedTuple):
    """What one agent remembers between its steps; made by `Policy.begin`."""

    memory: Any
    is_first: Bool[Array, ""] | Bool[np.ndarray, ""]


class Act(NamedTuple):
    """One agent's step."""

    action: int
    state: AgentState
    probabilities: Float[np.ndarray, " A"]
    """Of every action; zero for those that are not legal."""


class Policy:
    """The agents of a run. They share parameters and nothing else: what one does depends on its
    own observations, legal actions, state and key alone."""

    def __init__(self, run: OpenRun) -> None:
        algorithm = run.algorithm
        if not isinstance(algorithm, Decentralised):
            raise ConfigError(
                f"agents of {run.config.algorithm} cannot act apart: each needs to know what the "
                "others see and do; `majepa evaluate` and `majepa watch` let them act together"
            )
        self.config = run.config
        self.spec: EnvSpec = run.env.spec
        self.transitions = run.state.transitions
        self._algorithm = algorithm
        self._executor = jax.tree.map(jnp.asarray, algorithm.executor(run.state.learner))
        self._act = jax.jit(algorithm.act_alone, static_argnames="greedy")

    def begin(self, agent: int = 0) -> AgentState:
        """The state of an agent before its first observation of an episode."""
        if not 0 <= agent < self.spec.num_agents:
            raise ValueError(
                f"agent is {agent}; {self.spec.name} has agents 0 to {self.spec.num_agents - 1}"
            )
        return AgentState(self._algorithm.wake(jnp.asarray(agent)), jnp.asarray(True))

    def act(
        self,
        observation: Float[Array, " O"] | np.ndarray,
        legal: Bool[Array, " A"] | np.ndarray,
        state: AgentState,
        key: Key[Array, ""],
        *,
        greedy: bool = True,
    ) -> Act:
        """One decentralised step: the most probable legal action, or a sampled one."""
        observation = np.asarray(observation, np.float32)
        legal = np.asarray(legal, bool)
        self._check("observation", observation, self.spec.observation_size)
        self._check("legal", legal, self.spec.num_actions)
        if not legal.any():
            raise ValueError("legal allows no action; an agent needs at least one, a dead one its "
                             f"no-op ({self.spec.noop_index})")  # fmt: skip
        action, log_probs, memory = self._act(
            self._executor, state.memory, observation, legal, state.is_first, key, greedy=greedy
        )
        probabilities = np.where(legal, np.exp(np.asarray(log_probs, np.float32)), 0.0)
        return Act(int(action), AgentState(memory, _NOT_FIRST), probabilities)

    def _check(self, name: str, array: np.ndarray, size: int) -> None:
        if array.shape != (size,):
            raise ValueError(
                f"{name} has the shape {array.shape}; one agent of {self.spec.name} has ({size},)"
            )


_NOT_FIRST = np.asarray(False)


class OpenRun(NamedTuple):
    """A run with everything that its checkpoint needs to be used."""

    config: TrainConfig
    env: Env
    algorithm: Any
    state: RunState


def open_run(folder: Path, checkpoint: str = "last", *, env: Env | None = None) -> OpenRun:
    """The run in a folder as its last or its best checkpoint has it."""
    if checkpoint not in CHECKPOINTS:
        raise ConfigError(f"checkpoint is {checkpoint!r}; choose one of {', '.join(CHECKPOINTS)}")
    config = read_config(folder)
    if not (folder / CHECKPOINTS[checkpoint]).is_file():
        raise FileNotFoundError(
            f"{folder} has no {checkpoint} checkpoint yet; train on with "
            f"`majepa train --resume {folder}`"
        )
    env = env or make_env(config.env)
    require_same_world(folder, env.spec)
    algorithm = make_algorithm(config, env.spec)
    state = load_run(folder, algorithm, env, which=CHECKPOINTS[checkpoint])
    return OpenRun(config, env, algorithm, state)


def make_player(run: OpenRun, *, greedy: bool = True) -> Player:
    """Whoever plays the agents of a run for a recording: each by itself, if they can."""
    kind = TeamPlayer if isinstance(run.algorithm, Decentralised) else CentralPlayer
    return kind(run, greedy=greedy)


class TeamPlayer:
    """All agents of a run in one battle, each by itself."""

    def __init__(self, run: OpenRun, *, greedy: bool = True) -> None:
        self.name = _player_name(run)
        self.choice: Choice = "argmax" if greedy else "sampled"
        self._algorithm: Decentralised = run.algorithm
        self._executor = self._algorithm.executor(run.state.learner)
        self._agents = run.env.spec.num_agents
        step = functools.partial(self._step, greedy=greedy)
        self._act = jax.jit(step, compiler_options=EVALUATION_OPTIONS)

    def begin(self) -> Any:
        return jax.vmap(self._algorithm.wake)(jnp.arange(self._agents))

    def act(
        self, carry: Any, row: TimeStep, key: Key[Array, ""]
    ) -> tuple[Int[Array, "1 N"], Float[Array, "1 N A"] | None, Any]:
        return self._act(self._executor, carry, row, key)

    def _step(
        self, executor: Any, carry: Any, row: TimeStep, key: Key[Array, ""], *, greedy: bool
    ) -> tuple[Int[Array, "1 N"], Float[Array, "1 N A"], Any]:
        alone = jax.vmap(
            functools.partial(self._algorithm.act_alone, greedy=greedy),
            in_axes=(None, 0, 0, 0, None, 0),
        )
        keys = agent_keys(key, 1, self._agents)[0]
        action, log_probs, carry = alone(
            executor, carry, row.observation[0], row.legal[0], row.is_first[0], keys
        )
        return action[None], log_probs[None], carry


class CentralPlayer:
    """A team in one battle that decides as one; its probabilities are not known."""

    def __init__(self, run: OpenRun, *, greedy: bool = True) -> None:
        self.name = _player_name(run)
        self.choice: Choice = "argmax" if greedy else "sampled"
        self._algorithm: Algorithm = run.algorithm
        self._learner = run.state.learner
        act = functools.partial(self._algorithm.act, greedy=greedy)
        self._act = jax.jit(act, compiler_options=EVALUATION_OPTIONS)

    def begin(self) -> Any:
        return self._algorithm.begin(1)

    def act(
        self, carry: Any, row: TimeStep, key: Key[Array, ""]
    ) -> tuple[Int[Array, "1 N"], None, Any]:
        decision = self._act(self._learner, carry, row, key)
        return decision.action, None, decision.carry


def _player_name(run: OpenRun) -> str:
    return f"{run.config.algorithm}, {run.state.transitions:,} transitions"
