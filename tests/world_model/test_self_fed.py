"""Self-fed rollouts against rollouts without caches, and where their gradients are cut."""

import dataclasses
import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import plain
import pytest
from drawn import jit
from episodes import ACTIONS, AGENTS, Slow, altered

from majepa.config import DEBUG
from majepa.nn.dists import TwoHot, kl
from majepa.nn.transformer import Block
from majepa.world_model import self_fed as module
from majepa.world_model.joint import JointModel
from majepa.world_model.local import feature
from majepa.world_model.losses import model_loss
from majepa.world_model.self_fed import SelfFed, draw_roots, self_fed
from majepa.world_model.targets import outcome_losses, targets
from majepa.world_model.unroll import run_joint

ENDPOINTS = (2, 4, 5)
STEPS = 5
BATCH, LENGTH = DEBUG.replay.batch, DEBUG.replay.learning
KEY = jax.random.key(7)


def roots_at(time) -> module._Root:
    """The same record of every sequence."""
    time = jnp.full(BATCH, time, jnp.int32)
    return module._Root(jnp.arange(BATCH), time, jnp.ones(BATCH, bool))


def run(local, joint, given, root, config, key) -> module._Rollout:
    return module._roll_out(
        local, joint, given.states, given.record, given.tokens, given.past, root, STEPS, config, key
    )


def entries_of(rollout, given, root) -> dict[str, jax.Array]:
    """Losses after every step, `[H, R, N]`."""
    at = jnp.minimum(root.time[None] + jnp.arange(1, STEPS + 1)[:, None], LENGTH - 1)
    target = targets(given.states, given.e_bar, given.record)
    target = jax.tree.map(lambda leaf: leaf[root.row[None], at], target)
    entries = outcome_losses(rollout.outcome, target, DEBUG)
    return entries | {"trajectory": kl(given.states.q[root.row[None], at], rollout.q)}


@jit
def roll_out(local, joint, given, time) -> module._Rollout:
    return run(local, joint, given, roots_at(time), DEBUG, KEY)


@jit
def whole(local, joint, given, latent, tokens, alive, present):
    """All predictions at once, in inference mode, for given latents."""
    z_before = jnp.concatenate([given.tokens.z_before[:, :1], latent[:, :-1]], axis=1)
    classes = local.posterior.classes
    h, _ = plain.run_history(
        local.dynamics, tokens._replace(z_before=z_before), given.past.local,
        classes=classes, num_actions=ACTIONS,
    )  # fmt: skip
    s = feature(h, jax.nn.one_hot(latent, classes))
    record = given.record._replace(alive=alive, present=present)
    u, _ = run_joint(joint, s, record, tokens.episode, given.past.joint)
    outcome = joint.read(u[:, :-1])
    return outcome, local.posterior(h[:, 1:], outcome.e_hat)


def assert_close(one, two) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), one, two)


@pytest.fixture(scope="module")
def rollouts(world, given) -> list[module._Rollout]:
    """From every record."""
    return [roll_out(world.local, world.joint, given, t) for t in range(LENGTH)]


class TestRollout:
    def test_roots_and_predictions_are_of_all_kinds(self, given, rollouts):
        first, alive = np.asarray(given.record.is_first), np.asarray(given.record.alive)
        assert first[:, 1:-1].any(), "right after a reset"
        assert not first[:, 0].all(), "a history that begins in the context"
        foretold = np.stack([rollout.outcome.alive[0] >= 0 for rollout in rollouts], axis=1)
        assert (~foretold & alive).any(), "a predicted death"
        assert (foretold & ~alive).any(), "a predicted resurrection"

    def test_the_first_step_is_the_factual_prediction(self, world, given, rollouts):
        """At every record: at the start, where the past is context, and right after a reset."""
        record = given.record
        outcome, q = whole(
            world.local, world.joint, given, given.states.latent, given.tokens, record.alive,
            record.present,
        )  # fmt: skip
        for t in range(LENGTH - 1):
            first = jax.tree.map(lambda leaf: leaf[0], rollouts[t])
            assert_close(first.outcome, jax.tree.map(lambda leaf, t=t: leaf[:, t], outcome))
            stays = ~np.asarray(record.is_first[:, t + 1])
            assert_close(first.q[stays], q[stays, t])

    @pytest.mark.parametrize("time", range(LENGTH - STEPS))
    def test_all_steps_equal_a_rollout_without_caches(self, world, given, rollouts, time):
        """Predicted latents and survivors take the places of recorded ones; actions stay."""
        after = jnp.arange(LENGTH)[None] > time

        def hold(x):
            """The value at the root, from there on."""
            later = after if x.ndim == 2 else after[..., None]
            return jnp.where(later, x[:, time, None], x)

        tokens, latent, alive = given.tokens, given.states.latent, given.record.alive
        tokens = tokens._replace(
            is_first=tokens.is_first & ~after, episode=hold(tokens.episode)
        )  # fmt: skip
        present = hold(given.record.present)
        shape = (STEPS, BATCH, AGENTS, DEBUG.local.latents)
        for k, noise in enumerate(jax.random.uniform(KEY, shape)):
            now = time + k
            outcome, q = whole(world.local, world.joint, given, latent, tokens, alive, present)
            outcome: Any = jax.tree.map(lambda leaf, now=now: leaf[:, now], outcome)
            step = jax.tree.map(lambda leaf, k=k: leaf[k], rollouts[time])
            assert_close((step.outcome, step.q), (outcome, q[:, now]))
            latent = latent.at[:, now + 1].set(plain.chosen(q[:, now], noise))
            alive = alive.at[:, now + 1].set(alive[:, now] & (outcome.alive >= 0))

    def test_recorded_actions_drive_it_even_if_they_look_illegal(self, world, given, rollouts):
        time = 3
        joint = eqx.tree_at(
            lambda joint: joint.legal.linears[-1].bias,
            world.joint,
            replace_fn=lambda bias: bias - 1e3,
        )
        record = given.record._replace(legal=jnp.zeros_like(given.record.legal))
        found = roll_out(world.local, joint, given._replace(record=record), time)
        assert (found.outcome.legal < 0).all()
        expected = rollouts[time]
        same = found.outcome._replace(legal=expected.outcome.legal)
        jax.tree.map(
            np.testing.assert_array_equal, (same, found.q), (expected.outcome, expected.q)
        )  # fmt: skip

    def test_recorded_actions_count_from_their_own_step_on(self, world, given, rollouts):
        time = 3
        action = (given.record.action.at[:, time + 2].add(1)) % ACTIONS
        record = given.record._replace(action=action)
        found = roll_out(world.local, world.joint, given._replace(record=record), time)
        same = [bool((a == b).all()) for a, b in zip(found.q, rollouts[time].q, strict=True)]
        assert same == [True, True, False, False, False]

    def test_real_futures_do_not_enter_it(self, world, given, rollouts):
        """Latents, histories, survivors and resets after the root change nothing."""
        time = 3
        later = jnp.arange(LENGTH)[None, :, None] > time
        states, record = given.states, given.record
        changed = given._replace(
            states=states._replace(
                h=jnp.where(later[..., None], 9.0, states.h),
                z=jnp.where(later[..., None, None], 0.5, states.z),
                latent=jnp.where(later[..., None], 1, states.latent),
            ),
            record=record._replace(
                alive=record.alive & ~later,
                present=record.present & ~later,
                is_first=record.is_first | later[..., 0],
                reward=record.reward + later[..., 0],
            ),
        )
        found = roll_out(world.local, world.joint, changed, time)
        jax.tree.map(np.testing.assert_array_equal, found, rollouts[time])


class Single(NamedTuple):
    """All that `self_fed` returns, and the gradient of its loss."""

    fed: SelfFed
    gradient: Any


def single(chunk: int, steps: int, *, is_plain: bool):
    """With losses after every step."""
    loss = altered(
        DEBUG.loss, self_fed_chunk=chunk, self_fed_horizons=tuple(range(1, steps + 1))
    )  # fmt: skip

    def compute(joint, local, given):
        fed = self_fed(
            local, joint, given.states, given.e_bar, given.record, given.tokens, given.past,
            altered(DEBUG, loss=loss), KEY,
        )  # fmt: skip
        return fed.loss, fed

    @jit
    def run(local, joint, given) -> Single:
        with pytest.MonkeyPatch.context() as patch:
            if is_plain:
                patch.setattr(module, "_roll_out", plain.roll_out)
            gradient, fed = jax.grad(compute, has_aux=True)(joint, local, given)
        return Single(fed, gradient)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunk", "steps"),
    [(1, 3), (2, 3), (2, 4), (2, 5), (3, 2), (3, 5), (5, 5)],
)
def test_chunks_at_once_are_single_steps(world, given, chunk, steps):
    """Values and gradients; whether or not the last chunk is full."""
    expected, got = (
        single(chunk, steps, is_plain=is_plain)(world.local, world.joint, given)
        for is_plain in (True, False)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(b, a, rtol=3e-6, atol=3e-6),
        expected.fed, got.fed,
    )  # fmt: skip
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(expected.gradient),
        jax.tree.leaves(got.gradient),
        strict=True,
    ):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(a).max(), jax.tree_util.keystr(path)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(expected.gradient.temporal))


class Nudged(JointModel):
    """A joint model that adds numbers to what it makes in each step of each rollout."""

    at_token: jax.Array
    at_embedding: jax.Array

    def __init__(self, joint: JointModel, at_token: jax.Array, at_embedding: jax.Array) -> None:
        for field in dataclasses.fields(JointModel):
            setattr(self, field.name, getattr(joint, field.name))
        self.at_token, self.at_embedding = at_token, at_embedding

    def mix(self, *args, **kwargs):
        return super().mix(*args, **kwargs) + self.at_token[..., None, None]

    def read(self, u):
        outcome = super().read(u)
        return outcome._replace(e_hat=outcome.e_hat + self.at_embedding[..., None, None])


@pytest.fixture(scope="module")
def jacobian(world, given):
    """Derivatives of each loss after each step, for a number of transitions in a chunk."""
    predict = module._predict

    def losses(nudges, chunk):
        config = altered(DEBUG, loss=altered(DEBUG.loss, self_fed_chunk=chunk))
        root = roots_at(3)

        def nudged(frozen, joint, before, a, size):
            number = jnp.broadcast_to(jnp.arange(STEPS)[:, None], (STEPS, BATCH))
            number = module._by_chunk(number, size)
            each = {name: nudge[number] for name, nudge in nudges.items()}
            return predict(frozen, Nudged(joint, **each), before, a, size)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_predict", nudged)
            rollout = run(world.local, world.joint, given, root, config, KEY)
        entries = entries_of(rollout, given, root)
        return {name: jnp.mean(entry, axis=(1, 2)) for name, entry in entries.items()}

    @functools.cache
    def found(chunk: int):
        nudges = {"at_token": jnp.zeros(STEPS), "at_embedding": jnp.zeros(STEPS)}
        return jit(jax.jacrev(functools.partial(losses, chunk=chunk)))(nudges)

    return found


class TestCuts:
    """What a change in one step does to the losses of another: rows are steps of the losses."""

    @pytest.mark.parametrize(
        "chunk",
        [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(5, marks=pytest.mark.slow)],
    )
    def test_gradients_stay_in_their_chunk(self, jacobian, chunk):
        step = np.arange(STEPS)
        within = step[:, None] // chunk == step[None, :] // chunk
        same_chunk = within & (step[:, None] >= step[None, :])
        only_itself, nothing = np.eye(STEPS, dtype=bool), np.zeros((STEPS, STEPS), bool)
        # Through the keys and values that the joint model remembers.
        of_token = dict.fromkeys(
            ("emb", "interface", "reward", "cont", "alive", "joint_legal", "trajectory"), same_chunk
        )
        # An embedding makes a state, and only the local model passes gradients on through it.
        of_embedding = dict.fromkeys(of_token, nothing) | {
            "emb": only_itself,
            "interface": only_itself,
            "trajectory": same_chunk,
        }
        found = jacobian(chunk)
        assert found.keys() == of_token.keys()
        for name, gradient in found.items():
            for cause, expected in (("at_token", of_token), ("at_embedding", of_embedding)):
                touched = np.asarray(gradient[cause]) != 0
                np.testing.assert_array_equal(touched, expected[name], err_msg=f"{name} {cause}")

    def test_the_paper_cuts_every_two_transitions(self, jacobian):
        """A change of the first embedding reaches the second posterior, not those of 4 and 5."""
        assert DEBUG.loss.self_fed_chunk == 2
        reached = np.asarray(jacobian(DEBUG.loss.self_fed_chunk)["trajectory"]["at_embedding"])
        assert reached[1, 0] != 0
        assert not reached[[3, 4], 0].any()


class Fed(NamedTuple):
    fed: SelfFed
    root: Any
    rollout: Any
    entries: Any
    gradient: Any
    """Of the loss, in the target embeddings."""


@jit
def feed(local, joint, given, key) -> Fed:
    def loss(e_bar):
        fed = self_fed(
            local, joint, given.states, e_bar, given.record, given.tokens, given.past, DEBUG, key
        )
        return fed.loss, fed

    gradient, fed = jax.grad(loss, has_aux=True)(given.e_bar)
    key_roots, key_latent = jax.random.split(key)
    root = draw_roots(given.record, DEBUG.loss.self_fed_roots, key_roots)
    rollout = run(local, joint, given, root, DEBUG, key_latent)
    return Fed(fed, root, rollout, entries_of(rollout, given, root), gradient)


@pytest.fixture(scope="module")
def results(world, given) -> list[Fed]:
    keys = jax.random.split(KEY, 6)
    results = [feed(world.local, world.joint, given, key) for key in keys]
    return jax.tree.map(np.asarray, results)


class TestLoss:
    def slots(self, result: Fed, slow: Slow, horizon: int, *, own: bool) -> list[tuple]:
        """Roots and agents that count at an endpoint."""
        return [
            (r, i)
            for r, (b, t) in enumerate(zip(result.root.row, result.root.time, strict=True))
            for i in range(AGENTS)
            if result.root.valid[r]
            and slow.endpoint(b, t, i, horizon)
            and (slow.can_act(b, t, i) or not own)
        ]

    def mean(self, entry: np.ndarray, horizon: int, slots: list[tuple]) -> float:
        return float(np.mean([entry[horizon - 1, r, i] for r, i in slots])) if slots else 0.0

    def test_it_is_the_mean_over_endpoints_of_the_weighted_terms(self, results, given):
        slow = Slow(given.record)
        weights = {
            "emb": 2, "interface": 1, "reward": 1, "cont": 1, "joint_legal": 1, "alive": 1,
            "trajectory": 0.1,
        }  # fmt: skip
        for result in results:
            total = 0.0
            for horizon in ENDPOINTS:
                for name, weight in weights.items():
                    own = name not in ("reward", "cont")
                    slots = self.slots(result, slow, horizon, own=own)
                    total += weight * self.mean(result.entries[name], horizon, slots)
            assert result.fed.loss == pytest.approx(total / 3, rel=1e-4)
            assert result.fed.valid_roots == result.root.valid.mean()

    def test_it_looks_at_valid_endpoints_only(self, results, given):
        slow, lost = Slow(given.record), 0
        for result in results:
            expected = np.zeros((BATCH, LENGTH, AGENTS), bool)
            for horizon in ENDPOINTS:
                slots = self.slots(result, slow, horizon, own=True)
                for r, i in slots:
                    expected[result.root.row[r], result.root.time[r] + horizon, i] = True
                lost += len(self.slots(result, slow, 2, own=True)) - len(slots)
            np.testing.assert_array_equal(result.gradient.any(axis=-1), expected)
        assert lost > 0, "endpoints beyond a reset or the sample"

    def test_its_report(self, results, given):
        """What was not measured is NaN."""
        slow = Slow(given.record)
        for result in results:
            root, outcome = result.root, result.rollout.outcome
            reward = np.asarray(TwoHot(DEBUG.bins).mean(jnp.asarray(outcome.reward)))
            for h in range(1, STEPS + 1):
                own = self.slots(result, slow, h, own=True)
                team = self.slots(result, slow, h, own=False)
                at = [(root.row[r], root.time[r] + h) for r, _ in team]
                rewards = [
                    abs(reward[h - 1, r, i] - slow.record.reward[place])
                    for (r, i), place in zip(team, at, strict=True)
                ]
                ends = [0.0 if slow.record.is_terminal[place] else 1 - 1 / 333 for place in at]
                conts = [
                    abs(1 / (1 + np.exp(-outcome.cont[h - 1, r, i])) - end)
                    for (r, i), end in zip(team, ends, strict=True)
                ]
                wrong = [
                    (outcome.alive[h - 1, r, i] >= 0)
                    != slow.record.alive[root.row[r], root.time[r] + h, i]
                    for r, i in own
                ]
                fed = result.fed
                for found, values in (
                    (fed.reward_error, rewards), (fed.cont_error, conts), (fed.alive_error, wrong)
                ):  # fmt: skip
                    expected = np.mean(values) if values else np.nan
                    np.testing.assert_allclose(found[h - 1], expected, rtol=1e-4, atol=1e-6)
                drawn = {at: 1 / (1 + np.exp(-result.rollout.legal[h - 1][at])) for at in own}
                illegal = {
                    (r, i): ~slow.record.legal[root.row[r], root.time[r] + h, i] for r, i in own
                }
                mistaken = sum(float((drawn[at] * illegal[at]).sum()) for at in own)
                everything = sum(float(drawn[at].sum()) for at in own)
                expected = mistaken / everything if own else np.nan
                np.testing.assert_allclose(fed.illegal[h - 1], expected, rtol=1e-4)
                similar = self.mean(1 - result.entries["emb"], h, own) if own else np.nan
                np.testing.assert_allclose(fed.embedding[h - 1], similar, rtol=1e-4, atol=1e-5)


def test_states_are_found_with_blocks_for_few_rows(world, monkeypatch):
    """Of all Transformers, whose layers are held apart: stacked ones would have no kernels."""
    given = []
    monkeypatch.setattr(module, "for_few_rows", lambda models: given.append(models) or models)

    def objective(local, joint):
        return model_loss((local, joint), world.target_encoder, world.sequence, DEBUG, world.key)

    jax.eval_shape(objective, world.local, world.joint)
    nodes = jax.tree.leaves(given, is_leaf=lambda node: isinstance(node, Block))
    blocks = [node for node in nodes if isinstance(node, Block)]
    assert len(given) == 1
    assert len(blocks) == DEBUG.local.layers + DEBUG.joint.layers + DEBUG.joint.agent_layers
    assert all(block.out.weight.ndim == 2 for block in blocks)
