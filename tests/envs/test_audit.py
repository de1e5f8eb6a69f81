"""A thousand random battles on every map (slow; the log is in docs/random-battles.md)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from majepa.envs.scripted import scripted_policy
from majepa.envs.sim import SCENARIOS, BattleEnv
from majepa.envs.sim.audit import _blank, _wall_depths, _watch_loop, audit, excess_return

pytestmark = pytest.mark.slow

BLASTS = {"bane_vs_bane", "so_many_baneling"}


def check(map_name: str, episodes: int) -> None:
    env = BattleEnv(SCENARIOS[map_name])
    tally = audit(env, scripted_policy("random", env.spec), episodes=episodes)
    assert tally.is_over.all(), "every episode ends"
    assert tally.is_finite.all(), "no NaN"
    assert tally.off_map.max() <= 0, "no unit leaves the map"
    assert tally.wall_depth.max() < 0.3, "no centre is inside a wall, let alone beyond a radius"
    assert tally.longest_crush.max() <= 8, "no pair stays below half its separation"
    assert tally.total.min() >= 0
    assert excess_return(tally).max() < 1e-3, "returns beyond 20 come from what the enemy regained"
    assert (tally.length <= env.spec.episode_limit).all()
    if map_name not in BLASTS:
        assert tally.won.mean() <= 1 / 20, "random play does not win"


@pytest.mark.parametrize("map_name", ["2s3z"])
def test_random_battles(map_name):
    check(map_name, 50)


@pytest.mark.slow
@pytest.mark.parametrize("map_name", SCENARIOS)
def test_a_thousand_random_battles(map_name):
    check(map_name, 1000)


def test_the_audit_sees_what_it_looks_for():
    env = BattleEnv(SCENARIOS["3m"])
    clean = audit(env, scripted_policy("stop", env.spec), episodes=2)
    assert clean.longest_crush.max() == 0 and clean.wall_depth.max() == 0
    assert (clean.lost_allies == 3).all() and (clean.contact > 5).all()

    state, _ = jax.jit(env.reset)(jax.random.split(jax.random.key(0), 1))
    place = np.array([[10.0], [10.2], [33.0], [20.0], [24.0], [28.0]], np.float32)
    level = np.array([[16.0], [16.0], [16.0], [6.5], [16.0], [16.0]], np.float32)
    units = state.units._replace(x=jnp.asarray(place), y=jnp.asarray(level))
    tally, crush = _blank(1), jnp.zeros((6, 6, 1), jnp.int8)
    for _ in range(3):
        tally, crush = _watch_loop(env, _wall_depths(env), state.units, units, tally, crush)
    assert tally.longest_crush[0] == 3, "two marines 0.2 apart, three loops in a row"
    assert tally.off_map[0] == 1.0, "a marine at x = 33 of 32"
    assert abs(float(tally.wall_depth[0]) - 1.5) < 0.1, "a marine 1.5 below the ground at y = 8"
