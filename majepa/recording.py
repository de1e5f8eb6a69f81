"""A battle on file: everything needed to see it again, and why each agent did what it did.

A `Recording` is one episode of the simulator as plain numbers: a header with all that stays the
same, then a table of units for every row from reset to the end. It is what all pictures of a
battle are made from, and is kept as JSON, `.battle.json` or `.battle.json.gz`; the fields are
described in docs/watching.md.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import math
import zlib
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import cattrs
import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from . import __version__
from .envs.base import EnvSpec, TimeStep
from .envs.scripted import Policy, scripted_policy
from .envs.sim.env import BattleEnv
from .envs.sim.scene import Outcome, Scene, SceneUnit, Side, scene_of
from .envs.sim.state import State
from .envs.sim.terrain import Terrain
from .files import written_beside

KIND = "majepa battle"
FORMAT = 1
SUFFIXES = (".battle.json", ".battle.json.gz")
DECIMALS = 3
"""Of positions, health and rewards."""
PROBABILITY_DECIMALS = 4

Choice = Literal["argmax", "sampled", "scripted"]


class RecordingError(ValueError):
    """A file is no recording of a battle that this version can read; the message says why."""


@dataclasses.dataclass(frozen=True)
class UnitFacts:
    """What does not change about a unit."""

    side: Side
    kind: str
    glyph: str
    plane: str
    weapon: str
    radius: float
    weapon_range: float
    sweep: float
    sight_range: float
    hp_max: float
    shield_max: float
    energy_max: float


class UnitRow(NamedTuple):
    """A unit at one row; `target` is whom it is after, as an index into the units."""

    x: float
    y: float
    hp: float
    shield: float
    energy: float
    cooldown: float
    alive: bool
    target: int | None


@dataclasses.dataclass(frozen=True)
class Header:
    majepa: str
    """Version of the package that made the recording."""
    environment: str
    environment_version: str
    player: str
    choice: Choice
    """How actions were taken from the policy's probabilities."""
    seed: int
    limit: int
    """Transitions after which the episode is cut off."""
    action_names: tuple[str, ...]
    agent_names: tuple[str, ...]
    terrain: Terrain
    units: tuple[UnitFacts, ...]
    """Allies first; the first ones are the agents, in id order."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A row of the index convention: what is known there, what arrived with it, what was done."""

    units: tuple[UnitRow, ...]
    reward: float
    total_reward: float
    """Return so far."""
    legal: tuple[tuple[int, ...], ...]
    """The legal actions of each agent, in ascending order."""
    probabilities: tuple[tuple[float, ...], ...] | None
    """One for each legal action; None for a policy that has none, and where nobody acts."""
    orders: tuple[int, ...] | None
    """The action each agent carried out; None on the last row."""


@dataclasses.dataclass(frozen=True)
class Recording:
    """One episode, from its first row to its last."""

    header: Header
    steps: tuple[Step, ...]
    outcome: Outcome | None
    """None if the recording stops before the episode does."""

    @property
    def map_name(self) -> str:
        return self.header.environment.rpartition(":")[2]

    def scenes(self) -> list[Scene]:
        return [self._scene(at) for at in range(len(self.steps))]

    def _scene(self, at: int) -> Scene:
        header, step = self.header, self.steps[at]
        orders = self.steps[at - 1].orders if at else None
        return Scene(
            map_name=self.map_name,
            step=at,
            limit=header.limit,
            terrain=header.terrain,
            units=tuple(
                SceneUnit(**{name: getattr(facts, name) for name in CONSTANTS}, **row._asdict())
                for facts, row in zip(header.units, step.units, strict=True)
            ),
            last_actions=(None,) * len(header.agent_names)
            if orders is None
            else tuple(header.action_names[order] for order in orders),
            outcome=self.outcome if at == len(self.steps) - 1 else None,
            total_reward=step.total_reward,
        )


CONSTANTS = {field.name for field in dataclasses.fields(UnitFacts)} & {
    field.name for field in dataclasses.fields(SceneUnit)
}


# Playing.


@runtime_checkable
class Player(Protocol):
    """Whoever plays the agents of one battle; `carry` is its memory."""

    @property
    def name(self) -> str: ...

    @property
    def choice(self) -> Choice: ...

    def begin(self) -> Any: ...

    def act(
        self, carry: Any, row: TimeStep, key: PRNGKeyArray
    ) -> tuple[Int[Array, "1 N"], Float[Array, "1 N A"] | None, Any]:
        """Actions, the log-probabilities of all actions where there are any, and the memory."""
        ...


@dataclasses.dataclass(frozen=True)
class ScriptedPlayer:
    """A scripted policy, which remembers nothing and has no probabilities."""

    name: str
    policy: Policy
    choice: Choice = "scripted"

    @classmethod
    def named(cls, name: str, spec: EnvSpec) -> ScriptedPlayer:
        return cls(name, scripted_policy(name, spec))

    def begin(self) -> None:
        return None

    def act(
        self, carry: None, row: TimeStep, key: PRNGKeyArray
    ) -> tuple[Int[Array, "1 N"], None, None]:
        return _scripted_action(self.policy, row, key), None, None


def record(env: BattleEnv, player: Player, *, seed: int, max_steps: int | None = None) -> Recording:
    """One episode, from its first row to its last or to `max_steps`."""
    key_env, key_policy = jax.random.split(jax.random.key(seed))
    state, row = _reset(env, key_env[None])
    carry = player.begin()
    total = 0.0
    scenes = [scene_of(env, state)]
    steps = [_step(scenes[0], row, total)]
    while not row.is_last[0] and (max_steps is None or len(steps) <= max_steps):
        key = jax.random.fold_in(key_policy, len(steps))
        action, log_probs, carry = player.act(carry, row, key)
        state, row = _advance(env, state, action)
        # Not the action asked for: the environment replaces illegal ones.
        orders = tuple(state.last_action[:, 0].tolist())
        probabilities = None if log_probs is None else _of_legal(log_probs, steps[-1].legal)
        steps[-1] = dataclasses.replace(steps[-1], orders=orders, probabilities=probabilities)
        total += float(row.reward[0])
        scenes.append(scene_of(env, state))
        steps.append(_step(scenes[-1], row, total))
    return Recording(_header(env, player, seed, scenes[0]), tuple(steps), scenes[-1].outcome)


@functools.partial(jax.jit, static_argnums=0)
def _reset(env: BattleEnv, keys: Key[Array, " B"]) -> tuple[State, TimeStep]:
    return env.reset(keys)


@functools.partial(jax.jit, static_argnums=0)
def _advance(env: BattleEnv, state: State, action: Int[Array, "B N"]) -> tuple[State, TimeStep]:
    return env.step(state, action)


@functools.partial(jax.jit, static_argnums=0)
def _scripted_action(policy: Policy, row: TimeStep, key: PRNGKeyArray) -> Int[Array, "B N"]:
    return policy(row.observation, row.legal, key)


def _header(env: BattleEnv, player: Player, seed: int, start: Scene) -> Header:
    spec, sight = env.spec, env.arena.rules.sight_range
    return Header(
        majepa=__version__,
        environment=spec.name,
        environment_version=spec.version,
        player=player.name,
        choice=player.choice,
        seed=seed,
        limit=spec.episode_limit,
        action_names=spec.action_names,
        agent_names=spec.agent_names,
        terrain=start.terrain,
        units=tuple(
            UnitFacts(
                **{name: getattr(unit, name) for name in CONSTANTS},
                glyph=unit.glyph,
                sight_range=float(sight),
            )
            for unit in start.units
        ),
    )


def _step(scene: Scene, row: TimeStep, total_reward: float) -> Step:
    legal: Bool[np.ndarray, "N A"] = np.asarray(row.legal[0])
    return Step(
        units=tuple(_unit_row(unit) for unit in scene.units),
        reward=round(float(row.reward[0]), DECIMALS),
        total_reward=round(total_reward, DECIMALS),
        legal=tuple(tuple(np.flatnonzero(of_agent).tolist()) for of_agent in legal),
        probabilities=None,
        orders=None,
    )


def _unit_row(unit: SceneUnit) -> UnitRow:
    numbers = (unit.x, unit.y, unit.hp, unit.shield, unit.energy, unit.cooldown)
    rounded = (round(number, DECIMALS) for number in numbers)
    return UnitRow._make((*rounded, unit.alive, unit.target))


def _of_legal(
    log_probs: Float[Array, "1 N A"], legal: tuple[tuple[int, ...], ...]
) -> tuple[tuple[float, ...], ...]:
    table = np.exp(np.asarray(log_probs[0], np.float64))
    return tuple(
        tuple(round(float(of_agent[action]), PROBABILITY_DECIMALS) for action in actions)
        for of_agent, actions in zip(table, legal, strict=True)
    )


# Files.


def is_recording(name: str | Path) -> bool:
    """Whether a name is that of a recorded battle."""
    return str(name).lower().endswith(SUFFIXES)


def write(recording: Recording, path: Path) -> None:
    if not is_recording(path):
        raise RecordingError(
            f"cannot write {str(path)!r}: a recording's name ends in {' or '.join(SUFFIXES)}"
        )
    text = to_json(recording).encode()
    if path.suffix.lower() == ".gz":
        # Without the time of day: equal battles are equal files.
        text = gzip.compress(text, mtime=0)
    with written_beside(path) as partial:
        partial.write_bytes(text)


def read(path: Path) -> Recording:
    if not path.is_file():
        raise FileNotFoundError(f"there is no recorded battle at {path}")
    data = path.read_bytes()
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        text = data.decode()
    except (EOFError, OSError, zlib.error, UnicodeDecodeError) as error:
        raise RecordingError(f"{path} is damaged or truncated: {error}") from error
    try:
        return from_json(text)
    except RecordingError as error:
        raise RecordingError(f"{path} {error}") from error


def to_json(recording: Recording) -> str:
    content = {"kind": KIND, "format": FORMAT, **dataclasses.asdict(recording)}
    return json.dumps(_compact(content), separators=(",", ":"), allow_nan=False)


def from_json(text: str) -> Recording:
    try:
        content = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise RecordingError(f"is not JSON, or is truncated: {error}") from error
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise RecordingError(f"is not a recorded battle: its kind is not {KIND!r}")
    number = content.get("format")
    if not isinstance(number, int) or not 1 <= number <= FORMAT:
        raise RecordingError(
            f"has format {number!r}; majepa {__version__} reads up to {FORMAT}: update majepa"
        )
    try:
        recording = _converter().structure(content, Recording)
    except cattrs.BaseValidationError as error:
        raise RecordingError(f"is broken: {cattrs.transform_error(error)[0]}") from error
    _check(recording)
    return recording


def _compact(value: Any) -> Any:
    """Whole numbers without their `.0`, facts as 0 and 1."""
    if isinstance(value, dict):
        return {key: _compact(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_compact(item) for item in value]
    return int(value) if isinstance(value, float | bool) and value == value // 1 else value


@functools.cache
def _converter() -> cattrs.Converter:
    """Takes numbers for numbers alone; by itself cattrs turns whatever it can into them."""
    converter = cattrs.Converter()
    converter.register_structure_hook(float, _number)
    converter.register_structure_hook(int, _number)
    columns = tuple[float, float, float, float, float, float, int, int | None]

    def unit_row(value: Any, _: type) -> UnitRow:
        *numbers, alive, target = converter.structure(value, columns)
        return UnitRow._make((*numbers, bool(alive), target))

    converter.register_structure_hook(UnitRow, unit_row)
    return converter


def _number(value: Any, accepted: type) -> Any:
    if isinstance(value, int | accepted) and math.isfinite(value):
        return accepted(value)
    raise ValueError(f"{value!r} is not {'a whole' if accepted is int else 'a'} number")


def _check(recording: Recording) -> None:
    """That the tables of all steps fit the header."""
    header, agents = recording.header, len(recording.header.agent_names)
    is_ally = [unit.side == "ally" for unit in header.units]
    if not recording.steps or is_ally != sorted(is_ally, reverse=True) or sum(is_ally) != agents:
        raise RecordingError("is broken: it has no steps, or its units are not its agents")
    for number, step in enumerate(recording.steps):
        if not _fits(step, header):
            raise RecordingError(f"is broken: step {number} does not fit the header")


def _fits(step: Step, header: Header) -> bool:
    agents, units = len(header.agent_names), range(len(header.units))
    per_agent = (step.legal, step.orders or step.legal, step.probabilities or step.legal)
    return (
        len(step.units) == len(units)
        and all(unit.target is None or unit.target in units for unit in step.units)
        and all(len(table) == agents for table in per_agent)
        and {a for legal in step.legal for a in legal} <= set(range(len(header.action_names)))
        and all(a in legal for a, legal in zip(step.orders or (), step.legal, strict=False))
        and all(map(lambda a, b: len(a) == len(b), step.probabilities or (), step.legal))
    )
