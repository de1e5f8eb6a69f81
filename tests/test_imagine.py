"""Imagination: the rules of teams and masks against a loop, and the same states as at execution.

Most tests let a script say what the joint model predicts. The last ones let an oracle predict the
embeddings that were really observed: then imagination must live through the recorded episodes.
"""

import dataclasses
import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn, jit
from lowering import broadcasts_to, lower_for_gpus
from runs.counting import CountingEnv
from world_model.episodes import ACTIONS, AGENTS, SIZE, random_sequence
from world_model.plain import run_history

from majepa.agent import Learner, Majepa, Optimizers
from majepa.collect import begin, collect
from majepa.config import DEBUG
from majepa.envs.base import EnvSpec
from majepa.imagine import Imagined, imagine
from majepa.nn.dists import TwoHot
from majepa.policy.ppo import freeze
from majepa.replay import Record, Sequence, insert, sample
from majepa.world_model.joint import JointModel, Outcome
from majepa.world_model.local import feature
from majepa.world_model.tokens import tokens_of
from majepa.world_model.unroll import reinfer, run_joint

NOOP = 3
SURE = 50.0
"""A logit of certainty."""
CONFIG = dataclasses.replace(DEBUG, local=dataclasses.replace(DEBUG.local, unimix=1e-12))
"""Without uniform noise, so that a sharp posterior leaves nothing to chance."""
OBSERVED = dataclasses.replace(
    CONFIG, imagination=dataclasses.replace(CONFIG.imagination, dead_embedding="observed")
)
HORIZON, BATCH, ROOTS = CONFIG.imagination.horizon, CONFIG.replay.batch, CONFIG.replay.learning
SIZE_H, CLASSES = CONFIG.local.deterministic, CONFIG.local.classes
SHAPE = (HORIZON, BATCH, ROOTS, AGENTS)
SPEC = EnvSpec("test:none", AGENTS, ACTIONS, SIZE, 1, 1, episode_limit=10)


def sharpen(params, *, legal: float | list[float]):
    """A deterministic posterior, and actions that are legal with these logits in any state."""

    def last(mlp):
        return mlp.linears[-1]

    local = params.local
    local = eqx.tree_at(lambda m: last(m.posterior.mlp).weight, local, replace_fn=lambda w: 1e6 * w)
    local = eqx.tree_at(lambda m: last(m.legal).weight, local, replace_fn=jnp.zeros_like)
    bias = jnp.broadcast_to(jnp.asarray(legal, jnp.float32), last(local.legal).bias.shape)
    return params._replace(local=eqx.tree_at(lambda m: last(m.legal).bias, local, bias))


class Scripted(JointModel):
    """A joint model whose predictions are known beforehand."""

    script: Outcome
    """With an axis for the steps in front."""

    def __init__(self, joint, script):
        for field in dataclasses.fields(JointModel):
            setattr(self, field.name, getattr(joint, field.name))
        self.script = script

    def branch(self, token, history, last, episode, branches, step):
        u, branches = super().branch(token, history, last, episode, branches, step)
        return jnp.full_like(u, step), branches

    def read(self, u):
        step = u.reshape(-1)[0].astype(jnp.int32)
        return jax.tree.map(lambda leaf: leaf[step], self.script)


def make_script(seed: int = 0, survival: float = 1.0) -> Outcome:
    """Slots die and come back, disagree on everything, and sometimes are in balance."""
    rng = np.random.default_rng(seed)
    alive = rng.normal(survival, 1.0, SHAPE)
    alive[rng.random(SHAPE) < 0.05] = 0.0
    drawn = Outcome(
        e_hat=rng.normal(size=(*SHAPE, CONFIG.local.embedding)),
        reward=rng.normal(size=(*SHAPE, CONFIG.bins.count)),
        cont=rng.normal(2.0, 1.0, SHAPE),
        alive=alive,
        legal=rng.normal(size=(*SHAPE, ACTIONS)),
    )
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), drawn)


@functools.cache
def params():
    algorithm = Majepa(CONFIG, SPEC, steps=100)
    return sharpen(drawn(lambda: algorithm.make_params(jax.random.key(0))), legal=1.0)


@functools.cache
def view() -> Sequence:
    """Padding, absent slots, dead teams, last records; the living always have an action."""
    sequence = random_sequence(3, CONFIG, episode=8, vanish=0.15)
    record = sequence.record
    stuck = record.alive & ~record.legal.any(-1)
    record = record._replace(legal=record.legal.at[..., 1].set(record.legal[..., 1] | stuck))
    # In one row the stream begins with the third learning record; in another one all are dead.
    real = jnp.ones(record.reward.shape, bool).at[2, : CONFIG.context + 2].set(False)
    living = real.at[1, -2:].set(False)

    def keep(leaf, where):
        where = where.reshape(*where.shape, *(1,) * (leaf.ndim - 2))
        return jnp.where(where, leaf, jnp.zeros((), leaf.dtype))

    record = jax.tree.map(lambda leaf: keep(leaf, real), record)
    record = record._replace(
        alive=keep(record.alive, living),
        is_first=record.is_first | ~real | jnp.roll(~real, 1, axis=1),
        is_last=record.is_last.at[1, -2].set(False),
    )
    return sequence._replace(record=record)


def learning(sequence: Sequence) -> Record:
    return jax.tree.map(lambda leaf: leaf[:, CONFIG.context :], sequence.record)


def _run(params, script, sequence, key, config):
    key_infer, key_imagine = jax.random.split(key)
    joint = Scripted(params.joint, script)
    roots = reinfer(params.local, joint, sequence, config.context, key_infer)
    imagined = imagine(
        params.local, joint, params.actor, roots, learning(sequence), config, NOOP, key_imagine
    )
    return roots, imagined


_run_as_predicted = jit(functools.partial(_run, config=CONFIG))
_run_as_observed = jit(functools.partial(_run, config=OBSERVED))


def run(script=None, sequence=None, legal=1.0, seed=0, observed=False, models=None):
    program = _run_as_observed if observed else _run_as_predicted
    models = sharpen(models or params(), legal=legal)
    roots, imagined = program(
        models, script or make_script(), sequence or view(), jax.random.key(seed)
    )
    return roots, jax.tree.map(np.asarray, imagined)


@functools.cache
def usual() -> tuple[Outcome, Imagined]:
    """A script under which some teams die out, and what became of it."""
    script = make_script()
    imagined = run(script)[1]
    somebody = (imagined.present & imagined.alive).any(-1)
    assert np.any(somebody[0] & ~somebody[-2])
    assert np.any(somebody[-1])
    return script, imagined


def test_shapes():
    imagined = usual()[1]
    size = SIZE_H + CONFIG.local.latents * CLASSES
    assert HORIZON == 5
    assert imagined.s.shape == (6, BATCH, ROOTS, AGENTS, size)
    assert imagined.legal.shape == (5, BATCH, ROOTS, AGENTS, ACTIONS)
    for name in ("alive", "value_valid"):
        assert getattr(imagined, name).shape == (6, BATCH, ROOTS, AGENTS)
    for name in ("action", "reward", "cont"):
        assert getattr(imagined, name).shape == (5, BATCH, ROOTS, AGENTS)


def test_several_runs_imagine_what_each_does_alone():
    """In states that are theirs from the beginning: one room for all would be copied."""
    keys = jax.vmap(jax.random.key)(jnp.arange(2))
    models, script, sequence = sharpen(params(), legal=1.0), make_script(), view()
    together = jax.vmap(lambda key: _run(models, script, sequence, key, CONFIG)[1])
    found = jit(together)(keys)
    for number in range(2):
        alone = run(script, sequence, seed=number)[1]
        for one, other in zip(found, alone, strict=True):
            np.testing.assert_allclose(one[number], other, rtol=1e-4, atol=1e-4)
    lowered = lower_for_gpus(together, keys)
    assert "x".join(map(str, found.s.shape)) in lowered
    assert not broadcasts_to(found.s.shape, lowered)


# Teams.


def test_teams_against_a_loop():
    script, imagined = usual()
    record = jax.tree.map(np.asarray, learning(view()))
    reward = np.asarray(jax.jit(TwoHot(CONFIG.bins).mean)(script.reward))
    cont = 1 / (1 + np.exp(-np.asarray(script.cont, np.float64)))
    for b, r in np.ndindex(BATCH, ROOTS):
        here, alive = record.present[b, r], record.alive[b, r]
        valid = here & (here & alive).any() & ~record.is_last[b, r]
        np.testing.assert_array_equal(imagined.present[b, r], here)
        for k in range(HORIZON):
            np.testing.assert_array_equal(imagined.alive[k, b, r], alive)
            np.testing.assert_array_equal(imagined.value_valid[k, b, r], valid)
            was_somebody = (here & alive).any()
            alive = alive & (np.asarray(script.alive)[k, b, r] >= 0)
            is_somebody = (here & alive).any()
            valid = valid & is_somebody
            gain = reward[k, b, r][here].mean() if was_somebody else 0.0
            go_on = cont[k, b, r][here].mean() if is_somebody else 0.0
            np.testing.assert_allclose(imagined.reward[k, b, r], gain * here, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(imagined.cont[k, b, r], go_on * here, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(imagined.alive[-1, b, r], alive)
        np.testing.assert_array_equal(imagined.value_valid[-1, b, r], valid)


def test_the_dead_stay_dead():
    script, imagined = usual()
    assert np.all(imagined.alive[1:] <= imagined.alive[:-1])
    # Though the joint model would have some of them back.
    assert np.any(~imagined.alive[:-1] & (np.asarray(script.alive) > 0))


def test_a_team_shares_what_it_gets():
    imagined = usual()[1]
    for shared in (imagined.reward, imagined.cont):
        high = np.where(imagined.present, shared, -np.inf).max(-1)
        low = np.where(imagined.present, shared, np.inf).min(-1)
        somebody = np.broadcast_to(imagined.present.any(-1), high.shape)
        np.testing.assert_array_equal(high[somebody], low[somebody])
        assert not np.any(shared[:, ~imagined.present])


def test_the_last_death_brings_one_more_reward_and_then_nothing():
    script = make_script(1, survival=3.0)
    script = script._replace(alive=jnp.abs(script.alive).at[2].set(-1.0))
    imagined = run(script)[1]
    valid = imagined.value_valid
    np.testing.assert_array_equal(valid[2], valid[0])
    assert valid[0].any()
    assert not valid[3:].any()
    counts = valid[0]
    assert np.all(imagined.reward[:3, counts] != 0)
    assert not np.any(imagined.reward[3:])
    assert np.all(imagined.cont[:2, counts] > 0)
    assert not np.any(imagined.cont[2:])

    frozen = jit(functools.partial(freeze, config=CONFIG))(
        jax.tree.map(jnp.asarray, imagined), params().critic
    )
    weight = np.asarray(frozen.value_weight)
    assert np.all(weight[:3, counts] > 0)
    assert not np.any(weight[3:])
    assert not np.any(weight[:, ~counts])
    # The decision before the end is judged by the last reward alone.
    np.testing.assert_allclose(
        np.asarray(frozen.returns)[2, counts], imagined.reward[2, counts], rtol=1e-4, atol=1e-4
    )


def test_roots_that_cannot_start():
    imagined, record = usual()[1], jax.tree.map(np.asarray, learning(view()))
    team_dead = ~(record.present & record.alive).any(-1) & record.present.any(-1)
    for kind in (record.is_last, ~record.present.any(-1), team_dead):
        assert kind.any()
        assert not imagined.value_valid[:, kind].any()
    good = ~(record.is_last | ~record.present.any(-1) | team_dead)
    np.testing.assert_array_equal(imagined.value_valid[0, good], record.present[good])


# Masks and actions.


def test_roots_have_the_recorded_masks():
    roots, _ = run()
    imagined, record = usual()[1], jax.tree.map(np.asarray, learning(view()))
    np.testing.assert_array_equal(imagined.legal[0][record.alive], record.legal[record.alive])
    # Values of recorded states are read off here.
    np.testing.assert_array_equal(imagined.s[0], roots.s)
    np.testing.assert_array_equal(imagined.alive[0], record.alive)
    np.testing.assert_array_equal(imagined.present, record.present)


def test_actions_are_drawn_under_the_stored_masks():
    _, imagined = run(legal=-1.0)
    assert np.take_along_axis(imagined.legal, imagined.action[..., None], axis=-1).all()
    # Not always the first or the best of them.
    count = imagined.legal.sum(-1)
    assert len(np.unique(imagined.action[count > 2])) == ACTIONS


def test_those_who_cannot_act_have_the_no_op_only():
    imagined = usual()[1]
    idle = ~imagined.alive[:-1]
    only = np.arange(ACTIONS) == NOOP
    assert idle[0].any() and (idle[-1] & ~idle[0]).any()
    assert (imagined.legal[idle] == only).all()
    assert (imagined.action[idle] == NOOP).all()


def test_a_mask_without_actions_falls_back_to_the_no_op():
    imagined = run(legal=-SURE)[1]
    assert (imagined.legal[1:] == (np.arange(ACTIONS) == NOOP)).all()
    assert (imagined.action[1:] == NOOP).all()


def test_masks_are_drawn_from_the_local_head():
    chance = np.array([0.9, 0.5, 0.2, 0.05, 1.0])
    logits = np.clip(np.log(chance) - np.log1p(-np.minimum(chance, 1 - 1e-12)), None, SURE)
    one, other = (
        run(make_script(2, survival=3.0)._replace(legal=told), legal=logits.tolist())[1]
        for told in (jnp.full((*SHAPE, ACTIONS), SURE), jnp.full((*SHAPE, ACTIONS), -SURE))
    )
    np.testing.assert_array_equal(one.legal, other.legal)
    drawn = one.legal[1:][one.alive[1:-1]]
    deviation = np.sqrt(chance * (1 - chance) / len(drawn))
    assert np.all(np.abs(drawn.mean(0) - chance) <= 4 * deviation)
    # Each action by itself, anew in each state.
    both = (drawn[:, 0] & drawn[:, 1]).mean()
    assert abs(both - 0.45) < 4 * np.sqrt(0.45 * 0.55 / len(drawn))
    living = one.alive[1:-1].all(0)
    assert len({mask.tobytes() for mask in one.legal[1:, living]}) == HORIZON - 1


def test_noise_is_used_once():
    """Other seeds act otherwise, and the same one alike."""
    first, again, other = (run(seed=seed)[1] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.action, again.action)
    assert np.any(first.action != other.action)
    assert np.any(first.legal[1:] != other.legal[1:])


# States.


@jit
def likeliest(local, h, e):
    """Classes of a sharp posterior, and of the embedding of an observation of zeros."""
    nothing = local.encoder(jnp.zeros((1, 1, 1, 1, SIZE)))
    return tuple(
        jnp.argmax(local.posterior(h, embedding), axis=-1)
        for embedding in (e, jnp.broadcast_to(nothing, e.shape))
    )


@pytest.mark.parametrize("observed", [False, True])
def test_the_posterior_turns_predicted_embeddings_into_states(observed):
    script = make_script()
    imagined = run(script, observed=observed)[1]
    h, z = np.split(imagined.s[1:], [SIZE_H], axis=-1)
    z = z.reshape(*SHAPE, CONFIG.local.latents, CLASSES)
    assert set(np.unique(z)) == {0, 1}
    assert (z.sum(-1) == 1).all()
    from_script, from_zeros = map(np.asarray, likeliest(params().local, h, script.e_hat))
    dead = ~imagined.alive[1:, ..., None]
    expected = np.where(dead & observed, from_zeros, from_script)
    np.testing.assert_array_equal(z.argmax(-1), expected)
    assert np.any(from_script[dead[..., 0]] != from_zeros[dead[..., 0]])


def test_the_prior_has_no_part_in_it():
    models = params()
    prior = jax.tree.map(lambda leaf: leaf + 1.0, models.local.prior)
    local = eqx.tree_at(lambda local: local.prior, models.local, prior)
    imagined = run(models=models._replace(local=local))[1]
    jax.tree.map(np.testing.assert_array_equal, imagined, usual()[1])


def test_nothing_has_a_gradient_for_the_actor():
    script, sequence, key = make_script(), view(), jax.random.key(0)

    @jit
    def slopes(actor):
        def total(actor):
            models = params()._replace(actor=actor)
            _, imagined = _run(models, script, sequence, key, CONFIG)
            return sum(map(jnp.sum, (imagined.s, imagined.reward, imagined.cont)))

        return jax.grad(total)(actor)

    for slope in jax.tree.leaves(slopes(params().actor)):
        assert not np.any(slope)


# The same states as at execution.


class Oracle(JointModel):
    """The real joint model, but it knows what will be observed."""

    truth: jax.Array
    """Embeddings after each step from each root."""

    def __init__(self, joint, truth):
        for field in dataclasses.fields(JointModel):
            setattr(self, field.name, getattr(joint, field.name))
        self.truth = truth

    def branch(self, token, history, last, episode, branches, step):
        u, branches = super().branch(token, history, last, episode, branches, step)
        return jnp.concatenate([u, self.truth[step]], axis=-1), branches

    def read(self, u):
        u, truth = jnp.split(u, [CONFIG.joint.width], axis=-1)
        return super().read(u)._replace(e_hat=truth)


class Echo(CountingEnv):
    """Every observation tells the time, the last action and the place in the stream."""

    def row(self, where):
        row = super().row(where)
        agent = jnp.arange(2.0)[None]
        seen = row.observation.at[..., 1].set(where.last_action[:, None] + agent)
        seen = seen.at[..., 2].set(jnp.sin(1.0 * where.total)[:, None] * (agent + 1))
        return row._replace(observation=seen)


class Lived(NamedTuple):
    """One view as it was lived through, as it is inferred anew, and as it is imagined."""

    sequence: Sequence
    s: np.ndarray
    """Of all records, from the latents that acting agents drew."""
    reward: np.ndarray
    """Predicted along the recorded transitions."""
    roots_s: np.ndarray
    roots_z: np.ndarray
    imagined: Imagined
    posteriors: tuple[np.ndarray, np.ndarray]
    """Of the imagined states, and of the lived ones at the same places."""


@functools.cache
def lived() -> Lived:
    env = Echo(lengths=(5, 7, 6), limit=20)
    # Layers of two records remember all of an episode of eight, which the context holds.
    algorithm = Majepa(CONFIG, env.spec, steps=400)
    blunt = drawn(lambda: algorithm.make_params(jax.random.key(0)), seed=2)
    sharp = sharpen(blunt, legal=SURE)
    actor = eqx.tree_at(
        lambda a: a.mlp.linears[-1].weight, sharp.actor, replace_fn=lambda w: 1e6 * w
    )
    joint = eqx.tree_at(lambda j: j.alive.linears[-1].bias, sharp.joint, jnp.full(1, SURE))
    sharp = sharp._replace(actor=actor, joint=joint)
    zero = jnp.zeros((), jnp.int32)
    moments = Optimizers(*(algorithm.model_optimizer.init(group) for group in sharp))
    learner = Learner(
        sharp,
        sharp.local.encoder,
        moments,
        algorithm.make_replay(),
        zero,
        jnp.zeros(()),
        zero,
        zero,
    )

    @jit
    def live(learner, key):
        stream = begin(algorithm, env, jax.random.split(key, CONFIG.collect.num_envs))
        rows = collect(algorithm, env, learner, stream, key, rows=40).data.rows
        replay = insert(learner.replay, rows, rows.kept)
        return sample(replay, CONFIG.replay, CONFIG.context, key)

    @jit
    def relive(local, joint, blunt_posterior, sequence, key):
        record = sequence.record
        batch, length, agents = record.alive.shape
        tokens = tokens_of(sequence, record.latent)
        h, _ = run_history(
            local.dynamics, tokens, local.dynamics.transformer.empty(batch, agents),
            classes=CLASSES, num_actions=env.spec.num_actions,
        )  # fmt: skip
        s = feature(h, jax.nn.one_hot(record.latent, CLASSES))
        u, _ = run_joint(joint, s, record, tokens.episode, joint.temporal.empty(batch, agents))
        reward = jnp.mean(TwoHot(CONFIG.bins).mean(joint.read(u).reward), axis=-1)
        e = local.encoder(record.observation)

        place = CONFIG.context + jnp.arange(ROOTS)[None] + 1 + jnp.arange(HORIZON)[:, None]
        place = jnp.minimum(place, length - 1)
        truth = jnp.moveaxis(e[:, place], 0, 1)
        roots = reinfer(local, joint, sequence, CONFIG.context, key)
        imagined = imagine(
            local, Oracle(joint, truth), actor, roots, learning(sequence), CONFIG,
            env.spec.noop_index, key,
        )  # fmt: skip
        h_then = jnp.moveaxis(h[:, place], 0, 1)
        posteriors = tuple(
            blunt_posterior(states, truth) for states in (imagined.s[1:, ..., :SIZE_H], h_then)
        )
        return s, reward, roots.s, roots.z, imagined, posteriors

    sequence = live(learner, jax.random.key(0))
    again = relive(sharp.local, joint, blunt.local.posterior, sequence, jax.random.key(1))
    return jax.tree.map(np.asarray, Lived(sequence, *again))


def places():
    """Batch row, root, step and record of everything that a root imagines within its episode."""
    record = lived().sequence.record
    episode = np.cumsum(record.is_first, axis=1)
    for b, r, k in np.ndindex(BATCH, ROOTS, HORIZON + 1):
        root = CONFIG.context + r
        t = root + k
        inside = t < record.reward.shape[1] and episode[b, t] == episode[b, root]
        if inside and record.present[b, root].all():
            yield b, r, k, t


@pytest.mark.slow
def test_inferring_anew_gives_the_states_that_were_acted_in():
    found, context = lived(), CONFIG.context
    real = found.sequence.record.present[:, context:]
    latent = found.sequence.record.latent[:, context:]
    assert real.mean() > 0.8
    np.testing.assert_array_equal(found.roots_z[real], latent[real])
    np.testing.assert_allclose(found.roots_s[real], found.s[:, context:][real], atol=1e-5)


def test_with_true_embeddings_imagination_lives_through_what_was_recorded():
    found = lived()
    record, imagined = found.sequence.record, found.imagined
    farthest = 0
    for b, r, k, t in places():
        np.testing.assert_allclose(imagined.s[k, b, r], found.s[b, t], atol=1e-4)
        if k < HORIZON:
            np.testing.assert_array_equal(imagined.action[k, b, r], record.action[b, t])
        farthest = max(farthest, k)
    assert farthest == HORIZON
    assert len({tuple(action) for action in record.action.reshape(-1, 2).tolist()}) > 3


def test_imagined_posteriors_are_those_of_execution():
    found = lived()
    imagined, executed = found.posteriors
    checked = [(k - 1, b, r) for b, r, k, _ in places() if k > 0]
    assert len(checked) > 50
    for place in checked:
        np.testing.assert_allclose(imagined[place], executed[place], atol=1e-5)
    assert np.ptp(executed, axis=(0, 1, 2)).max() > 0.5


def test_the_joint_model_remembers_what_led_to_a_root():
    found = lived()
    for b, r, k, t in places():
        if k < HORIZON:
            np.testing.assert_allclose(
                found.imagined.reward[k, b, r], found.reward[b, t], rtol=1e-3, atol=1e-4
            )
    assert np.ptp(found.reward) > 1.0
