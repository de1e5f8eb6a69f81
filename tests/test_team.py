"""Agents of a run, loaded and executed apart."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import jit

from majepa.algorithm import Decentralised, agent_key, agent_keys
from majepa.config import DEBUG, MAPPO_DEBUG, MAT_DEBUG, ConfigError, MappoConfig, TrainConfig
from majepa.envs import EnvError, make_env
from majepa.recording import record
from majepa.team import OpenRun, Policy, TeamPlayer, make_player, open_run
from majepa.training import RunState, make_algorithm

ENV = make_env("3m")
STACKED = MappoConfig(width=16, rollout=20, num_envs=4, epochs=2, recurrent=False, frames=3)
ALGORITHMS = {"majepa": DEBUG, "mappo": MAPPO_DEBUG, "mappo with frames": STACKED}


def sharpened(tree):
    """Policies begin near uniform; these prefer something, depending on what agents know."""
    rng = np.random.default_rng(0)

    def shake(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return leaf + jnp.asarray(0.3 * rng.normal(size=leaf.shape), leaf.dtype)

    return jax.tree.map(shake, tree)


@functools.cache
def opened(name: str) -> OpenRun:
    algo = MAT_DEBUG if name == "mat" else ALGORITHMS[name]
    config = TrainConfig(algo, env="sim:3m", steps=100)
    algorithm = make_algorithm(config, ENV.spec)
    learner = jit(algorithm.init)(jax.random.key(0))
    if name == "majepa":
        learner = learner._replace(params=sharpened(learner.params))
    elif name != "mat":
        learner = learner._replace(actor=sharpened(learner.actor))
    state = RunState(learner, None, jax.random.key(0), transitions=100, updates=1)  # type: ignore[arg-type]
    return OpenRun(config, ENV, algorithm, state)


@functools.cache
def team_play(name: str, greedy: bool):
    """Rows and actions of two battles, played as evaluation plays them."""
    run = opened(name)
    act = jit(functools.partial(run.algorithm.act, greedy=greedy))
    reset, step = jit(ENV.reset), jit(ENV.step)
    state, row = reset(jax.random.split(jax.random.key(1), 2))
    carry = run.algorithm.begin(2)
    key, rows = jax.random.key(5), []
    for t in range(25):
        decision = act(run.state.learner, carry, row, jax.random.fold_in(key, t))
        rows.append((row, np.asarray(decision.action)))
        carry = decision.carry
        state, row = step(state, decision.action)
    return key, rows


@pytest.mark.parametrize("greedy", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_agent_alone_does_what_it_does_in_the_team(name, greedy):
    key, rows = team_play(name, greedy)
    policy = Policy(opened(name))
    seen = set()
    for env, agent in ((0, 0), (1, 2)):
        state = policy.begin(agent)
        for t, (row, actions) in enumerate(rows):
            if row.is_first[env]:
                state = policy.begin(agent)
            own = agent_key(jax.random.fold_in(key, t), env, agent)
            acted = policy.act(
                row.observation[env, agent], row.legal[env, agent], state, own, greedy=greedy
            )
            assert acted.action == actions[env, agent], (env, agent, t)
            legal = np.asarray(row.legal[env, agent])
            assert acted.probabilities.sum() == pytest.approx(1, abs=1e-5)
            assert (acted.probabilities[~legal] == 0).all()
            state = acted.state
            seen.add(acted.action)
    assert len(seen) > 2


def test_keys_of_a_team_are_those_of_its_agents():
    keys = agent_keys(jax.random.key(3), 4, 3)
    one = agent_key(jax.random.key(3), jnp.asarray(2), jnp.asarray(1))
    assert np.array_equal(jax.random.key_data(keys[2, 1]), jax.random.key_data(one))


@pytest.mark.slow
def test_a_recorded_battle_of_a_team():
    player = TeamPlayer(opened("majepa"), greedy=False)
    recording = record(ENV, player, seed=0, max_steps=6)
    assert recording.header.choice == "sampled"
    assert "100 transitions" in recording.header.player
    first = recording.steps[0]
    assert first.probabilities is not None
    for legal, probabilities in zip(first.legal, first.probabilities, strict=True):
        assert len(legal) == len(probabilities)
        assert sum(probabilities) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"observation": np.zeros(7)}, r"observation has the shape \(7,\); one agent of sim:3m"),
        ({"legal": np.ones((3, 9), bool)}, r"legal has the shape \(3, 9\)"),
        ({"legal": np.zeros(9, bool)}, "legal allows no action"),
    ],
)
def test_bad_input_of_one_agent(change, message):
    policy = Policy(opened("mappo"))
    given = {
        "observation": np.zeros(ENV.spec.observation_size),
        "legal": np.ones(ENV.spec.num_actions, bool),
        "state": policy.begin(0),
        "key": jax.random.key(0),
    }
    with pytest.raises(ValueError, match=message):
        policy.act(**(given | change))


def test_agents_that_do_not_exist():
    with pytest.raises(ValueError, match="agent is 3; sim:3m has agents 0 to 2"):
        Policy(opened("mappo")).begin(3)


def test_agents_of_mat_cannot_act_apart():
    run = opened("mat")
    assert not isinstance(run.algorithm, Decentralised)
    with pytest.raises(ConfigError, match=r"agents of mat cannot act apart: .* act together"):
        Policy(run)


def test_a_recorded_battle_of_a_team_that_decides_as_one():
    player = make_player(opened("mat"))
    recording = record(ENV, player, seed=0, max_steps=6)
    assert (recording.header.choice, recording.header.player[:5]) == ("argmax", "mat, ")
    assert all(step.probabilities is None for step in recording.steps)
    again = record(ENV, make_player(opened("mat")), seed=0, max_steps=6)
    assert [step.orders for step in recording.steps] == [step.orders for step in again.steps]
    assert isinstance(make_player(opened("mappo")), TeamPlayer)


def test_a_folder_without_a_checkpoint(tmp_path):
    from majepa.run_folder import claim

    config = dataclasses.replace(opened("mappo").config)
    claim(tmp_path / "run", config, ENV.spec)
    with pytest.raises(FileNotFoundError, match="no last checkpoint yet; train on with"):
        open_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="choose one of last, best"):
        open_run(tmp_path / "run", "worst")


def test_a_run_made_under_other_rules(tmp_path):
    import json

    from majepa.run_folder import CHECKPOINT, VERSIONS, claim

    run = tmp_path / "run"
    claim(run, opened("mappo").config, ENV.spec)
    (run / VERSIONS).write_text(json.dumps({"environment_version": "0.1"}))
    (run / CHECKPOINT).parent.mkdir()
    (run / CHECKPOINT).write_bytes(b"")
    with pytest.raises(EnvError, match=r"started in version 0\.1 of sim:3m"):
        open_run(run)
