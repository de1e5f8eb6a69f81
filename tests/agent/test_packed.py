"""MA-JEPA with several seeds in one program: each does what it does alone, at no hidden cost."""

import dataclasses
import functools
import json
from collections.abc import Iterator
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import jit, quick
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from runs.counting import Lottery
from safetensors.numpy import load_file

from majepa import call_by_call, lanes
from majepa import training as loop
from majepa.agent import Majepa
from majepa.collect import collect
from majepa.config import DEBUG, EvaluationConfig, TrainConfig
from majepa.nn.optim import join
from majepa.packing import if_wanted, is_packed, least, most, packed
from majepa.run_folder import CHECKPOINT, METRICS
from majepa.training import run_shapes, train, train_together


def test_packed_runs_look_at_each_other():
    def one(x):
        return most(x), least(x), if_wanted(x > 1, x, 0), jnp.asarray(is_packed())

    x = jnp.asarray([3, 1, 2])
    np.testing.assert_array_equal(
        np.stack(packed(jax.jit(one))(x)), [[3, 3, 3], [1, 1, 1], [3, 0, 2], [1, 1, 1]]
    )


def test_a_run_alone_looks_at_nobody():
    x = jnp.asarray(1)
    assert most(x) is x and least(x) is x and not is_packed()
    assert if_wanted(jnp.asarray(False), x, None) is x


ENV = Lottery()
ALGO = dataclasses.replace(
    DEBUG,
    # Every further horizon would take long to compile.
    joint=dataclasses.replace(DEBUG.joint, horizons=(1, 2)),
    loss=dataclasses.replace(DEBUG.loss, self_fed_horizons=(2, 3)),
    replay=dataclasses.replace(DEBUG.replay, learning=8, capacity=1_000),
    collect=dataclasses.replace(DEBUG.collect, prefill=24, train_ratio=12.0, model_only_calls=3),
)
"""A call for every two transitions."""
SEEDS = (1, 0, 10)
CONFIGS = [
    TrainConfig(
        ALGO,
        env="test:counting",
        seed=seed,
        steps=60,
        evaluation=EvaluationConfig(every=1000, final_episodes=6),
    )
    for seed in SEEDS
]
ALGORITHM = Majepa(ALGO, ENV.spec, steps=60)


def steps_of(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Of a program and of everything that it calls."""
    for step in jaxpr.eqns:
        yield step
        for value in jax.tree.leaves(step.params, is_leaf=is_program):
            if is_program(value):
                yield from steps_of(getattr(value, "jaxpr", value))


def is_program(value: object) -> bool:
    return isinstance(value, ClosedJaxpr | Jaxpr)


@pytest.mark.slow
def test_no_run_copies_its_replay_to_wait_for_another():
    """A loop or a branch that each run decides for itself becomes a choice between all arrays."""
    state = run_shapes(ALGORITHM, ENV)
    gather = functools.partial(collect, ALGORITHM, ENV, rows=1)
    data = jax.eval_shape(gather, state.learner, state.stream, state.key).data
    given = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((3, *leaf.shape), leaf.dtype),
        (state.learner, data, state.key),
    )
    steps = list(steps_of(jax.make_jaxpr(packed(ALGORITHM.update))(*given).jaxpr))
    loops = [step.params["cond_jaxpr"] for step in steps if step.primitive.name == "while"]
    assert len(loops) >= 2
    assert all(condition.out_avals[0].shape == () for condition in loops)
    branches = [step.invars[0] for step in steps if step.primitive.name == "cond"]
    assert branches and all(which.aval.shape == () for which in branches)
    rings = {leaf.shape for leaf in jax.tree.leaves(given[0].replay.stored)}
    made = {
        step.primitive.name for step in steps for out in step.outvars if out.aval.shape in rings
    }
    assert "scatter" in made and "select_n" not in made


NOISE = "agents/layers/query_key_value/bias"
"""A bias of all keys in attention over agents changes nothing: its gradient is rounding, which the
optimizer scales up to that of the others."""


def without_noise(name: str, array: np.ndarray) -> np.ndarray:
    """What a checkpoint holds under a name, with zeros for what is noise."""
    if name.endswith(NOISE):
        return np.zeros_like(array)
    if not (name.startswith("learner/optimizers/") and name.endswith("/small")):
        return array
    group = name.split("/")[2]
    params = getattr(ALGORITHM.make_params(jax.random.key(0)), group)

    def counts(path: tuple, leaf: jax.Array) -> jax.Array:
        is_noise = jax.tree_util.keystr(path, simple=True, separator="/").endswith(NOISE)
        return jnp.full(leaf.shape, not is_noise)

    return array * np.asarray(join(jax.tree_util.tree_map_with_path(counts, params)).small)


@pytest.mark.slow
@pytest.mark.parametrize("programs", ["one", "several"])
def test_each_seed_learns_what_it_learns_alone(tmp_path, monkeypatch, programs):
    monkeypatch.setattr(loop, "_is_accelerated", lambda: programs == "several")
    one = jit(lanes._update.__wrapped__, static_argnums=0, static_argnames="together")
    monkeypatch.setattr(lanes, "_update", one)
    monkeypatch.setattr(call_by_call, "jax", SimpleNamespace(**{**vars(jax), "jit": quick}))
    updaters = {together: ALGORITHM.updater(together=together) for together in (False, True)}
    monkeypatch.setattr(ALGORITHM, "updater", lambda *, together, **_: updaters[together])
    monkeypatch.setattr(loop, "make_env", lambda _: ENV)
    monkeypatch.setattr(loop, "make_algorithm", lambda *_: ALGORITHM)
    folders = [tmp_path / f"packed-{seed}" for seed in SEEDS]
    results = train_together(CONFIGS, folders)
    updates = set()
    for config, folder, result in zip(CONFIGS, folders, results, strict=True):
        alone = train(config, tmp_path / f"alone-{config.seed}")
        assert result.transitions == alone.transitions
        for name in ("argmax", "sampled"):
            np.testing.assert_array_equal(
                getattr(result, name).episode_return, getattr(alone, name).episode_return
            )
        one, lane = (load_file(x.folder / CHECKPOINT) for x in (alone, result))
        assert one.keys() == lane.keys()
        for name in one:
            # Moments of normalised gradients have the size of one, parameters that of a rate.
            atol = 1e-2 if name.startswith("learner/optimizers") else 1e-5
            got, wanted = (without_noise(name, x[name]) for x in (lane, one))
            np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=atol, err_msg=name)
        assert metrics_of(folder).keys() == metrics_of(alone.folder).keys()
        for name, value in metrics_of(alone.folder).items():
            assert metrics_of(folder)[name] == pytest.approx(value, rel=1e-2, abs=1e-4), name
        assert one["learner/calls"] > ALGO.collect.model_only_calls
        updates.add(int(one["updates"]))
    assert len(updates) > 1


def metrics_of(folder):
    """What was measured in the last batches."""
    line = json.loads((folder / METRICS).read_text().splitlines()[-1])
    return {
        name: value
        for name, value in line.items()
        if not name.startswith(("seconds", "speed", "kind"))
    }
