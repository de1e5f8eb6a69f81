"""The whole learner, compiled once: what a call changes, what it leaves alone, and resuming."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import jit
from runs.counting import CountingEnv
from safetensors.numpy import load_file

from majepa import agent, lanes
from majepa import run as host
from majepa import training as loop
from majepa.agent import Learner, Majepa
from majepa.algorithm import Experience, without_replay
from majepa.collect import collect
from majepa.config import DEBUG, EvaluationConfig, MajepaConfig, TrainConfig
from majepa.evaluation import Evaluation
from majepa.flat import Flat, Scalars, flattened, restored
from majepa.replay import insert, sample
from majepa.run_folder import CHECKPOINT
from majepa.training import RunState, train

pytestmark = pytest.mark.slow

ENV = CountingEnv(lengths=(3, 5, 4, 2), limit=5)
ALGO = dataclasses.replace(
    DEBUG,
    # Every further horizon would take long to compile.
    joint=dataclasses.replace(DEBUG.joint, horizons=(1, 2)),
    loss=dataclasses.replace(DEBUG.loss, self_fed_horizons=(2, 3)),
    replay=dataclasses.replace(DEBUG.replay, learning=8),
    optimizer=dataclasses.replace(
        DEBUG.optimizer, model_rate=1e-3, actor_rate=1e-3, critic_rate=1e-3
    ),
    collect=dataclasses.replace(DEBUG.collect, prefill=24, train_ratio=6.0, model_only_calls=2),
)
"""A call for every four transitions."""
CONFIG = TrainConfig(
    ALGO, env="test:counting", steps=80, evaluation=EvaluationConfig(every=1000), save_every=1000
)
assert isinstance(CONFIG.algo, MajepaConfig)


@functools.cache
def algorithm() -> Majepa:
    return Majepa(CONFIG.algo, ENV.spec, steps=CONFIG.steps)


@functools.cache
def begun() -> RunState:
    start = jit(loop._fresh(algorithm(), ENV))
    return start(jax.random.key(CONFIG.seed))._replace(transitions=0, updates=0)


collect_rows = jit(collect, static_argnums=(0, 1), static_argnames="rows")
update = jit(lambda algorithm, *given: algorithm.update(*given), static_argnums=0)


class Ready(NamedTuple):
    """A learner whose replay is full enough, and the next row."""

    learner: Learner
    data: Experience


@functools.cache
def ready() -> Ready:
    learner, stream = begun().learner, begun().stream
    rows = collect_rows(algorithm(), ENV, learner, stream, jax.random.key(0), rows=20)
    data = rows.data
    replay = jit(insert)(learner.replay, data.rows, data.rows.kept)
    more = collect_rows(algorithm(), ENV, learner, rows.stream, jax.random.key(1), rows=1)
    encoder = jax.tree.map(lambda leaf: leaf + 0.5, learner.target_encoder)
    learner = learner._replace(
        replay=replay, transitions=jnp.asarray(60, jnp.int32), target_encoder=encoder
    )
    return Ready(learner, more.data)


def one_call(learner: Learner, seed: int = 0) -> tuple[Learner, dict[str, float]]:
    """A batch after which exactly one call is owed."""
    learner = learner._replace(due=jnp.asarray(0.5, jnp.float32))
    after, metrics = update(algorithm(), learner, ready().data, jax.random.key(seed))
    assert after.calls == learner.calls + 1
    return after, {name: float(value) for name, value in metrics.items()}


def with_calls(calls: int) -> Learner:
    return ready().learner._replace(calls=jnp.asarray(calls, jnp.int32))


@functools.cache
def model_only():
    return one_call(with_calls(0))


@functools.cache
def active():
    return one_call(with_calls(CONFIG.algo.collect.model_only_calls))


def same(one, other) -> bool:
    return all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


def moved(group: str, one: Learner, other: Learner) -> bool:
    pairs = [(getattr(x.params, group), getattr(x.optimizers, group)) for x in (one, other)]
    return not same(*pairs)


def test_the_first_calls_train_the_model_alone():
    before, (after, metrics) = with_calls(0), model_only()
    assert moved("local", before, after)
    assert moved("joint", before, after)
    assert not moved("actor", before, after)
    assert not moved("critic", before, after)
    assert [int(moments.steps) for moments in after.optimizers] == [1, 1, 0, 0]
    assert np.isnan(metrics["loss/actor"])
    assert np.isfinite(metrics["loss/model"])


def test_later_calls_train_all_four_groups():
    before, (after, metrics) = with_calls(2), active()
    assert all(moved(group, before, after) for group in before.params._fields)
    assert [int(moments.steps) for moments in after.optimizers] == [1, 1, 5, 5]
    assert [name for name, value in metrics.items() if not np.isfinite(value)] == []
    for group in before.params._fields:
        assert metrics[f"finite/{group}"] == 1
        assert metrics[f"update_ratio/{group}"] > 0


MEASURED = {
    *(f"loss/{name}" for name in dataclasses.asdict(ALGO.loss.local)),
    *(f"loss/{name}" for name in dataclasses.asdict(ALGO.loss.joint)),
    "loss/model", "loss/actor", "loss/critic_imagined", "loss/critic_replayed",
    *(f"self_fed/{name}" for name in (
        "emb", "interface", "reward", "cont", "alive", "joint_legal", "trajectory"
    )),
    *(f"{what}/{group}"
      for what in ("gradient", "update_ratio", "finite")
      for group in ("local", "joint", "actor", "critic")),
    "kl", "embedding/rank", "embedding/spread",
    *(f"valid/{mask}" for mask in (
        "present", "sigreg", "source", "team", "ahead", "self_fed", "decisions"
    )),
    *(f"rollout/{what}_{step}"
      for what in ("reward_error", "cont_error", "alive_error", "illegal", "similarity")
      for step in (1, 2, 3)),
    *(f"imagined/{what}" for what in ("reward", "cont", "return", "alive", "legal_actions")),
    "value/imagined", "value/imagined_error",
    "value/replayed", "value/replayed_return", "value/replayed_error",
    "policy/entropy", "policy/clipped", "policy/divergence",
    "learner/calls", "learner/replay_rows", "nonfinite_in_a_row",
}  # fmt: skip


def test_a_call_reports_every_diagnostic():
    _, metrics = active()
    assert metrics.keys() == MEASURED
    weights = dataclasses.asdict(ALGO.loss.joint) | {"trajectory": ALGO.loss.trajectory}
    parts = [name for name in MEASURED if name.startswith("self_fed/")]
    total = sum(weights[name.removeprefix("self_fed/")] * metrics[name] for name in parts)
    assert metrics["loss/self_fed"] == pytest.approx(total, rel=1e-5)


def test_replayed_returns_lean_on_the_imagined_ones_of_the_same_records(monkeypatch):
    """The first imagined returns are those of the roots, which are the replayed records."""
    seen = {}

    def note(record, bootstrap, config):
        seen["bootstrap"] = bootstrap
        raise StopIteration

    returns = np.arange(3 * 4).reshape(3, 4)
    monkeypatch.setattr(agent, "reinfer", lambda *_: SimpleNamespace(s=None))
    monkeypatch.setattr(agent, "imagine", lambda *_: None)
    monkeypatch.setattr(agent, "freeze", lambda *_: SimpleNamespace(returns=returns))
    monkeypatch.setattr(agent, "replay_targets", note)
    learner = begun().learner
    draw = jit(lambda replay, key: sample(replay, ALGO.replay, ALGO.context, key))
    view = draw(ready().learner.replay, jax.random.key(0))
    with pytest.raises(StopIteration):
        algorithm().train_behaviour(learner.params, learner.optimizers, view, jax.random.key(0))
    assert seen["bootstrap"].tolist() == [0, 1, 2, 3]


def test_the_model_learns_the_same_whether_behaviour_does_or_not():
    (one, _), (other, _) = model_only(), active()
    assert same(one.params[:2], other.params[:2])
    assert same(one.optimizers[:2], other.optimizers[:2])


def test_the_target_encoder_follows_the_new_encoder():
    before, (after, _) = ready().learner, model_only()
    old, new = (jax.tree.leaves(x) for x in (before.target_encoder, after.params.local.encoder))
    for slow, fast, got in zip(old, new, jax.tree.leaves(after.target_encoder), strict=True):
        expected = 0.99 * np.asarray(slow, np.float64) + 0.01 * np.asarray(fast, np.float64)
        np.testing.assert_allclose(got, expected, rtol=3e-7, atol=1e-9)


def test_a_learner_starts_with_a_copy_of_its_encoder():
    learner = begun().learner
    assert same(learner.target_encoder, learner.params.local.encoder)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(learner.optimizers))


def test_the_critic_of_the_calls_start_is_the_target():
    """A fresh critic says exactly zero: so do the targets in the call that changes it."""
    after, metrics = active()
    assert metrics["value/imagined"] == 0
    assert metrics["value/replayed"] == 0
    assert metrics["value/imagined_error"] > 0
    _, following = one_call(after)
    assert following["value/imagined"] != 0
    assert following["value/replayed"] != 0


@functools.cache
def broken() -> Learner:
    """No reward of the replay is a number."""
    learner = with_calls(0)
    stored = learner.replay.stored
    stored = stored._replace(reward=jnp.full_like(stored.reward, jnp.nan))
    return learner._replace(replay=learner.replay._replace(stored=stored))


def test_a_step_that_is_no_number_leaves_everything_as_it_is():
    before = broken()
    after, metrics = one_call(before)
    assert same(after.params, before.params)
    assert same(after.optimizers, before.optimizers)
    assert same(after.target_encoder, before.target_encoder)
    rows = ready().data.rows
    untouched = jit(insert)(before.replay, rows, rows.kept).stored.latent
    assert same(after.replay.stored.latent, untouched)
    assert not same(model_only()[0].replay.stored.latent, untouched)
    assert after.nonfinite == metrics["nonfinite_in_a_row"] == 1
    assert metrics["finite/local"] == metrics["finite/joint"] == 0


@pytest.mark.parametrize("start", [lambda: ready().learner, broken], ids=["good", "bad"])
def test_a_half_that_is_not_wanted_changes_nothing(start):
    """Neither what it would learn nor what it would count."""
    learner = start()._replace(nonfinite=jnp.asarray(3, jnp.int32))
    given, key = algorithm(), jax.random.key(0)

    def half(learner, wanted):
        views = given.draw(learner.replay, key)
        before = without_replay(learner)
        return given.model_half(before, views.model, key, wanted)[::2]

    (after, active), before = jit(half)(learner, jnp.asarray(False)), without_replay(learner)
    assert same(after, before) and not active


def test_bad_steps_in_a_row_are_counted():
    once, _ = one_call(broken())
    twice, metrics = one_call(once)
    assert twice.nonfinite == metrics["nonfinite_in_a_row"] == 2
    healed, metrics = one_call(twice._replace(replay=ready().learner.replay))
    assert healed.nonfinite == metrics["nonfinite_in_a_row"] == 0
    assert same(healed.params[:2], model_only()[0].params[:2])


def test_bad_rewards_spare_model_and_critic_in_later_calls_too():
    before = broken()._replace(calls=jnp.asarray(5, jnp.int32))
    after, metrics = one_call(before)
    for group in ("local", "joint", "critic"):
        assert not moved(group, before, after)
        assert metrics[f"finite/{group}"] == 0
    # The actor learns from imagined rewards only.
    assert moved("actor", before, after)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after.params))


def test_a_critic_that_is_no_number_is_counted_though_the_model_goes_on():
    before = with_calls(2)
    critic = jax.tree.map(lambda leaf: leaf * jnp.nan, before.params.critic)
    before = before._replace(params=before.params._replace(critic=critic))
    once, metrics = one_call(before)
    assert metrics["finite/local"] == 1
    assert metrics["finite/actor"] == metrics["finite/critic"] == 0
    assert moved("local", before, once)
    assert not moved("actor", before, once)
    assert once.nonfinite == 1
    assert one_call(once)[0].nonfinite == 2


def two_calls(seed: int) -> Learner:
    after, _ = one_call(with_calls(2), seed)
    return one_call(after, seed + 1)[0]


def test_keys_decide():
    one, again, other = two_calls(0), two_calls(0), two_calls(7)
    assert same(one, again)
    for group in one.params._fields:
        assert moved(group, one, other)
    assert not same(one.replay.stored.latent, other.replay.stored.latent)


# Runs.


@pytest.fixture
def prepared(monkeypatch):
    """The loop with programs that are compiled already, and evaluation in no time.

    Gives the random keys that the programs are called with.
    """

    def judge(*_, episodes, key, greedy):
        zeros = np.zeros(episodes, np.float32)
        return Evaluation(zeros > 0, zeros, zeros.astype(np.int32), greedy)

    def noting_keys(program):
        def run(*given, together):
            assert not together
            keys.append(np.asarray(jax.random.key_data(given[-1])).tobytes())
            return program(*given)

        return run

    def gather(algorithm, env, learner, stream, key):
        acting = restored(without_replay(learner))
        data, stream, *rest = collect_rows(algorithm, env, acting, stream.tree, key, rows=1)
        return lanes.Gathered(data, Flat.of(stream), rest[0], np.True_, rest[1])

    def learn(algorithm, learner, data, key):
        learner, metrics = update(algorithm, restored(learner), data, key)
        return flattened(learner), Scalars.of(metrics)

    keys = []
    monkeypatch.setattr(host, "evaluate", judge)
    monkeypatch.setattr(loop, "_programs", lambda *_: ())
    monkeypatch.setattr(lanes, "_collect", noting_keys(gather))
    monkeypatch.setattr(lanes, "_update", noting_keys(learn))
    monkeypatch.setattr(loop, "_updater", lambda *_: None)
    monkeypatch.setattr(lanes.Lanes, "need", lambda _: None)
    state = begun()
    monkeypatch.setattr(loop, "_fresh", lambda *_: lambda _: state)
    return keys


def test_a_stopped_run_goes_on_bit_for_bit(prepared, tmp_path):
    def run(name, **options):
        return train(CONFIG, tmp_path / name, env=ENV, algorithm=algorithm(), **options)

    whole = run("whole")
    used = list(prepared)
    assert len(used) == len(set(used))
    part = run("parts", stop_after=52)
    assert 52 <= part.transitions < whole.transitions
    stopped = load_file(tmp_path / "parts" / CHECKPOINT)
    rest = run("parts", resume=True)
    assert rest.transitions == whole.transitions
    assert prepared[len(used) :] == used
    assert update._cache_size() == 1
    one, other = (load_file(tmp_path / name / CHECKPOINT) for name in ("whole", "parts"))
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert array.tobytes() == other[name].tobytes(), name
    # Model and behaviour learned before and after the stop, and nothing was left out.
    calls = int(one["learner/calls"])
    assert calls > 8
    assert one["learner/optimizers/critic/steps"] == 5 * (calls - 2)
    first = begun().learner.params
    for path, leaf in jax.tree_util.tree_leaves_with_path(first):
        name = "learner/params/" + jax.tree_util.keystr(path, simple=True, separator="/")
        assert np.any(one[name] != np.asarray(leaf)), name
    # What goes on needs its replay, what has ended does not.
    replay = {name.rpartition("/")[2] for name in stopped if name.startswith("learner/replay/")}
    assert {"latent", "observation", "action", "inserted"} <= replay
    assert stopped["learner/replay/inserted"] == stopped["updates"]
    assert not any(name.startswith("learner/replay/") for name in one)
