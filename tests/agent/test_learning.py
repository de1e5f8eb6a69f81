"""That it learns: a batch by heart, embeddings that keep their dimensions, a game of two agents."""

import copy
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import jit
from runs.counting import CountingEnv
from world_model import plain
from world_model.episodes import make_models, random_sequence

from majepa.agent import Learner, Majepa
from majepa.collect import begin, collect
from majepa.config import DEBUG, LocalWeights, Routes
from majepa.envs.base import EnvSpec, TimeStep
from majepa.nn.dists import TwoHot
from majepa.replay import Sequence, insert, sample
from majepa.world_model.losses import model_loss
from majepa.world_model.masks import team

pytestmark = pytest.mark.slow

# One batch, by heart.


class Echo(CountingEnv):
    """Every observation tells the time and the last action, to each agent in another way."""

    def row(self, where):
        row = super().row(where)
        agent = jnp.arange(2.0)[None]
        seen = row.observation.at[..., 1].set(where.last_action[:, None] + agent)
        seen = seen.at[..., 2].set(jnp.sin(1.0 * where.time)[:, None] * (agent + 1))
        return row._replace(observation=seen)


ECHO = Echo(lengths=(3, 5, 4, 6), limit=20)
TINY = dataclasses.replace(
    DEBUG,
    joint=dataclasses.replace(DEBUG.joint, horizons=(1, 2)),
    loss=dataclasses.replace(DEBUG.loss, self_fed_horizons=(2, 3)),
    replay=dataclasses.replace(DEBUG.replay, batch=4, learning=8),
    optimizer=dataclasses.replace(DEBUG.optimizer, model_rate=3e-3),
)


def altered(config, **numbers):
    """A copy whose numbers may be arrays, so that one program serves for all of them."""
    new = copy.copy(config)
    vars(new).update(numbers)
    return new


@functools.cache
def batch() -> tuple[Learner, Sequence]:
    algorithm = Majepa(TINY, ECHO.spec, steps=400)

    @jit
    def play(key):
        learner = algorithm.init(key)
        stream = begin(algorithm, ECHO, jax.random.split(key, TINY.collect.num_envs))
        rows = collect(algorithm, ECHO, learner, stream, key, rows=40).data.rows
        replay = insert(learner.replay, rows, rows.kept)
        return learner, sample(replay, TINY.replay, TINY.context, key)

    return play(jax.random.key(0))


@jit
def practise(learner, view, weights, routes, is_own_target, keys):
    """Model updates on the same view; losses, and the common direction of the embeddings."""
    config = altered(
        TINY,
        loss=altered(TINY.loss, local=altered(TINY.loss.local, **weights)),
        routes=altered(TINY.routes, **routes),
    )
    algorithm = Majepa(config, ECHO.spec, steps=400)

    def step(learner, key):
        own, target = learner.params.local.encoder, learner.target_encoder
        target = jax.tree.map(lambda *leaves: jnp.where(is_own_target, *leaves), own, target)
        learner = learner._replace(target_encoder=target)
        learner, _, metrics = algorithm.train_model(learner, view, key)
        e = learner.params.local.encoder(view.record.observation[:, TINY.context :])
        unit = e / jnp.linalg.norm(e, axis=-1, keepdims=True)
        common = jnp.linalg.norm(jnp.mean(unit.reshape(-1, e.shape[-1]), axis=0))
        return learner, metrics | {"common": common}

    return jax.lax.scan(step, learner, keys)[1]


def curves(weights: LocalWeights, routes: Routes, is_own_target: bool) -> dict[str, np.ndarray]:
    numbers = [
        {name: jnp.asarray(value, jnp.float32) for name, value in dataclasses.asdict(part).items()}
        for part in (weights, routes)
    ]
    keys = jax.random.split(jax.random.key(1), 1000)
    got = practise(*batch(), *numbers, jnp.asarray(is_own_target), keys)
    return {name: np.asarray(curve) for name, curve in got.items()}


@functools.cache
def as_it_is() -> dict[str, np.ndarray]:
    return curves(LocalWeights(), Routes(), False)


@functools.cache
def unguarded() -> dict[str, np.ndarray]:
    """Nothing but JEPA losses reaches the encoder, and its target is itself."""
    jepa_alone = LocalWeights(sigreg=0.0, legal=0.0, dyn_reg=0.0, rep_reg=0.0)
    return curves(jepa_alone, Routes(outcome=0.0), True)


def end(curve: np.ndarray) -> float:
    return float(curve[-50:].mean())


def test_a_batch_is_learned_by_heart():
    got = as_it_is()
    for name in ("loss/emb", "loss/post", "loss/dyn"):
        assert got[name][0] > 0.5
        assert end(got[name]) < 0.05
    record = jax.tree.map(lambda leaf: leaf[:, TINY.context :], batch()[1].record)
    encoded = np.asarray(TwoHot(TINY.bins).encode(record.reward[:, 1:]))
    entropy = -np.sum(encoded * np.log(np.maximum(encoded, 1e-30)), axis=-1)
    least = entropy[np.asarray(team(record))[..., 0]].mean()
    assert got["loss/reward"][0] > least + 1.5
    assert end(got["loss/reward"]) < least + 0.05
    assert end(got["loss/alive"]) < 0.01
    assert end(got["finite/local"]) == end(got["finite/joint"]) == 1


def test_sigreg_keeps_the_embeddings_apart():
    """Without it the rank falls and embeddings align, as far as stopped targets let them."""
    kept, lost = as_it_is(), unguarded()
    start = kept["embedding/rank"][0]
    assert lost["embedding/rank"][0] == start
    assert end(lost["embedding/rank"]) < 0.85 * start
    assert end(kept["embedding/rank"]) > 1.2 * start
    assert end(kept["embedding/rank"]) > 1.7 * end(lost["embedding/rank"])
    assert end(kept["loss/sigreg"]) < end(lost["loss/sigreg"]) / 2
    # How far the embeddings of all observations point the same way.
    assert end(kept["common"]) < 0.2
    assert end(lost["common"]) > 0.35
    assert 0.7 < end(kept["embedding/spread"]) < 1.3


# A game.


class Round(NamedTuple):
    key: jax.Array
    steps: jax.Array
    is_over: jax.Array


@dataclasses.dataclass(frozen=True)
class Signal:
    """Two agents see the same signal, 1 or 2, and win if both take that action."""

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec("toy:signal", 2, 3, 3, 1, 1, episode_limit=1)

    def reset(self, keys):
        zeros = jnp.zeros(keys.shape[0], jnp.int32)
        state = Round(keys, zeros, zeros == 1)
        return state, self._row(state, jnp.zeros(keys.shape[0]))

    def step(self, state, action):
        wins = jnp.all(action == self._signal(state)[:, None], axis=1) & ~state.is_over
        state = Round(state.key, state.steps + 1, ~state.is_over)
        return state, self._row(state, wins.astype(jnp.float32))

    def _signal(self, state):
        keys = jax.vmap(jax.random.fold_in)(state.key, state.steps)
        return jax.vmap(lambda key: jax.random.randint(key, (), 1, 3))(keys)

    def _row(self, state, reward):
        shape = (state.steps.shape[0], 2)
        shown = jax.nn.one_hot(jnp.where(state.is_over, 0, self._signal(state)), 3)
        return TimeStep(
            observation=jnp.broadcast_to(shown[:, None], (*shape, 3)),
            legal=jnp.ones((*shape, 3), bool),
            alive=jnp.ones(shape, bool),
            agent_state=jnp.zeros((*shape, 1)),
            state=jnp.zeros((shape[0], 1)),
            reward=reward,
            is_first=~state.is_over,
            is_last=state.is_over,
            is_terminal=state.is_over,
            won=reward > 0,
            info={},
        )


GAME = dataclasses.replace(
    DEBUG,
    local=dataclasses.replace(
        DEBUG.local, encoder_width=32, deterministic=32, classes=8, layers=1, window=2, hidden=32
    ),
    joint=dataclasses.replace(DEBUG.joint, horizons=(1,), layers=1, window=2, hidden=32),
    loss=dataclasses.replace(DEBUG.loss, self_fed_horizons=(2,)),
    replay=dataclasses.replace(DEBUG.replay, batch=8, learning=8),
    policy=dataclasses.replace(DEBUG.policy, actor_width=32),
    optimizer=dataclasses.replace(
        DEBUG.optimizer, model_rate=3e-3, actor_rate=5e-4, critic_rate=2e-3
    ),
    # The policy would settle on one signal before the model knows what the other is worth.
    collect=dataclasses.replace(
        DEBUG.collect, num_envs=8, prefill=64, train_ratio=16.0, model_only_calls=800
    ),
)


def test_two_agents_learn_a_game_in_imagination():
    env = Signal()
    algorithm = Majepa(GAME, env.spec, steps=10_000)

    @jit
    def start(key):
        return algorithm.init(key), begin(algorithm, env, jax.random.split(key, 8))

    @jit
    def train(learner, stream, keys):
        def advance(now, key):
            learner, stream = now
            key_act, key_learn = jax.random.split(key)
            gathered = collect(algorithm, env, learner, stream, key_act, rows=1)
            learner, metrics = algorithm.update(learner, gathered.data, key_learn)
            return (learner, gathered.stream), (gathered.counts, metrics["policy/entropy"])

        return jax.lax.scan(advance, (learner, stream), keys)

    now = start(jax.random.key(0))
    wins = []
    for part in range(13):
        now, (counts, _) = train(*now, jax.random.split(jax.random.key(part + 1), 100))
        wins.append(float(np.sum(counts.wins) / np.sum(counts.episodes)))
    learner, _ = now
    assert learner.calls > 1200
    assert learner.nonfinite == 0
    # Chance is 1 / 9, and one half for agents that do not look.
    assert max(wins[:7]) < 0.2
    assert min(wins[-2:]) > 0.9


# Precision.


def test_half_precision_gives_the_same_losses(monkeypatch):
    """With the same latents: those are drawn by chance alone here."""
    plain.by_chance_alone(monkeypatch)
    groups, sequence = make_models(0), random_sequence(7, episode=14)
    encoder = make_models(1)[0].encoder

    def losses(precision):
        config = dataclasses.replace(DEBUG, precision=precision)
        total, loss = jit(
            lambda groups, encoder: model_loss(groups, encoder, sequence, config, jax.random.key(0))
        )(groups, encoder)
        return {"total": total, **loss.terms}

    exact, half = losses("float32"), losses("bfloat16")
    for name, value in exact.items():
        assert half[name].dtype == jnp.float32
        np.testing.assert_allclose(half[name], value, rtol=0.02, atol=2e-3, err_msg=name)
