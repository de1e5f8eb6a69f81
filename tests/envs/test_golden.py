"""SMAC's own code computed these vectors; the functions that `step` calls must reproduce them.

The file holds, for each map, synthetic transitions: a unit table before and after, a walkability
grid, actions, and SMAC's observations, states, masks, rewards and endings. Another file of the same
format is read instead when MAJEPA_GOLDEN names one.
"""

import functools
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from majepa.envs import make_env
from majepa.envs.sim import SCENARIOS, BattleEnv, battle
from majepa.envs.sim.state import Units

GOLDEN = Path(os.environ.get("MAJEPA_GOLDEN", Path(__file__).with_name("smac_interface.npz")))
COLUMNS = ("alive", "x", "y", "hp", "shield", "energy", "cooldown")


@functools.cache
def vectors() -> dict[str, dict[str, np.ndarray]]:
    maps: dict[str, dict[str, np.ndarray]] = {}
    with np.load(GOLDEN) as file:
        for name, array in file.items():
            map_name, _, field = name.partition("/")
            maps.setdefault(map_name, {})[field] = array
    return maps


def units_of(table: np.ndarray) -> Units:
    """A simulator's unit table, batch last, from the vectors' `[B, U, columns]`."""
    column = {name: table[..., i].T for i, name in enumerate(COLUMNS)}
    alive = column.pop("alive")
    column["hp"] = np.where(alive > 0, column["hp"], np.float32(0))
    return Units(**column)


def arrive(env: BattleEnv, grid, before, after, steps_before, action):
    """The rows before and after each transition, one batch after the other, by the code that
    `reset` and `step` run once the battle has been fought."""
    batch = steps_before.shape[0]
    no_seed = jnp.zeros((2, 2 * batch), jnp.uint32)
    blank = battle.begin(env.arena, no_seed, no_seed[0])
    starts = blank._replace(units=twice(before, before), steps=twice(steps_before, steps_before))
    ends = blank._replace(
        units=twice(before, after),
        steps=twice(steps_before, steps_before + 1),
        last_action=twice(jnp.full_like(action, -1), action),
    )
    is_first = jnp.arange(2 * batch) < batch
    return env.arrive(starts, ends, is_first, grid)[1]


def twice(one, other):
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=-1), one, other)


def halves(row):
    half = len(row.reward) // 2
    return jax.tree.map(lambda leaf: leaf[:half], row), jax.tree.map(lambda leaf: leaf[half:], row)


def test_every_map_is_covered():
    assert set(vectors()) == set(SCENARIOS)


AT_ONCE = ("2s3z", "3m", "MMM", "so_many_baneling", "2c_vs_64zg", "corridor")
"""Maps of every race, shape of ground and size of team; all others take their minute later."""


@pytest.mark.parametrize(
    "map_name",
    [name if name in AT_ONCE else pytest.param(name, marks=pytest.mark.slow) for name in SCENARIOS],
)
def test_interface_matches_smac(map_name):
    golden = vectors()[map_name]
    env = make_env(map_name)
    assert [unit.name for unit in env.arena.units] == list(golden["kinds"])
    assert env.spec.num_agents == golden["n_agents"]
    rows = jax.jit(functools.partial(arrive, env))
    # Transitions that share a grid go through in one batch.
    for grid in np.unique(golden["grid"], axis=0):
        chosen = np.flatnonzero((golden["grid"] == grid).all((1, 2)))
        chosen = np.resize(chosen, len(golden["grid"]))  # one shape, one compilation
        row = rows(
            grid,
            units_of(golden["before"][chosen]),
            units_of(golden["after"][chosen]),
            golden["steps_before"][chosen],
            golden["action"][chosen].T,
        )
        first, second = halves(jax.device_get(row))
        computed = {
            "obs0": first.observation,
            "state0": first.state,
            "legal0": first.legal,
            "agent_state0": first.agent_state,
            "obs1": second.observation,
            "state1": second.state,
            "legal1": second.legal,
            "agent_state1": second.agent_state,
            "reward": second.reward,
            "terminated": second.is_last,
            "battle_won": second.won,
            "dead_allies": second.info["dead_allies"],
            "dead_enemies": second.info["dead_enemies"],
        }
        for name, value in computed.items():
            expected = golden[name][chosen]
            assert value.shape == expected.shape, name
            np.testing.assert_allclose(
                np.asarray(value, np.float64), expected, atol=1e-5, rtol=0, err_msg=name
            )
