"""Every loss against slow sums over single entries, and what the objective is made of."""

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import jit
from episodes import ACTIONS, AGENTS, Slow, build_models, loop, make_models, random_sequence

from majepa.config import DEBUG, SMALL, JointWeights, LocalWeights, MajepaConfig
from majepa.nn.dists import TwoHot
from majepa.nn.layers import as_rows
from majepa.replay import Sequence
from majepa.world_model.joint import Outcome
from majepa.world_model.losses import (
    horizon_weights,
    joint_losses,
    local_losses,
    model_loss,
    weigh,
)
from majepa.world_model.pairs import pairs_of
from majepa.world_model.sigreg import sigreg
from majepa.world_model.targets import Target, arrivals, cosine, outcome_losses, smooth_l1
from majepa.world_model.unroll import run_joint

STILL = dataclasses.replace(DEBUG, joint=dataclasses.replace(DEBUG.joint, dropout=0.0))
"""Without dropout, so that a prediction can be had twice."""
DISCOUNT = 1 - 1 / 333
TERMS = {**dataclasses.asdict(LocalWeights()), **dataclasses.asdict(JointWeights())}
FARTHEST = 8


def normals(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def similarity(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    x, y = x.astype(np.float64), y.astype(np.float64)
    return (x * y).sum(-1) / np.sqrt((x**2).sum(-1) * (y**2).sum(-1))


def binary(logit: float, target: float) -> float:
    p = 1 / (1 + np.exp(-np.float64(logit)))
    return -target * np.log(p) - (1 - target) * np.log(1 - p)


def balanced(logits: np.ndarray, legal: np.ndarray) -> float:
    """The mean over kinds of actions of the mean over the actions of a kind."""
    kinds = [[], []]
    for logit, is_legal in zip(logits, legal, strict=True):
        kinds[int(is_legal)].append(binary(logit, float(is_legal)))
    return float(np.mean([np.mean(kind) for kind in kinds if kind]))


def divergence(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    log_p, log_q = log_p.astype(np.float64), log_q.astype(np.float64)
    return (np.exp(log_p) * (log_p - log_q)).sum((-2, -1))


def huber(x: np.ndarray, y: np.ndarray) -> float:
    errors = [abs(float(a) - float(b)) for a, b in zip(x, y, strict=True)]
    return float(np.mean([e**2 / 2 if e < 1 else e - 0.5 for e in errors]))


def mean(losses: np.ndarray, valid: np.ndarray) -> float:
    return float(losses[valid].mean()) if valid.any() else 0.0


class TestDistances:
    def test_cosine(self):
        x, y = normals(4, 3, 7), normals(4, 3, 7, seed=1)
        found = jit(cosine)(jnp.asarray(x), jnp.asarray(y))
        np.testing.assert_allclose(found, similarity(x, y), rtol=1e-5)
        scaled = jit(cosine)(jnp.asarray(100 * x), jnp.asarray(0.01 * y))
        np.testing.assert_allclose(scaled, found, rtol=1e-5)

    def test_cosine_of_one_against_many(self):
        x, y = normals(2, 5, 7), normals(2, 1, 7, seed=1)
        found = jit(cosine)(jnp.asarray(x), jnp.asarray(y))
        np.testing.assert_allclose(found, similarity(x, np.repeat(y, 5, axis=1)), rtol=1e-5)

    def test_cosine_with_nothing_is_zero_and_has_a_finite_gradient(self):
        value, gradient = jit(jax.value_and_grad(cosine))(jnp.zeros(3), jnp.ones(3))
        assert value == 0
        assert np.isfinite(gradient).all()

    def test_smooth_l1_turns_at_an_error_of_one(self):
        errors = jnp.array([0.0, 0.5, -0.5, 0.999, 1.0, 1.001, -3.0])[:, None]
        loss = jit(jax.vmap(jax.value_and_grad(smooth_l1)))
        value, gradient = loss(errors, jnp.zeros_like(errors))
        expected = [0.0, 0.125, 0.125, 0.999**2 / 2, 0.5, 0.501, 2.5]
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        np.testing.assert_allclose(gradient[:, 0], [0, 0.5, -0.5, 0.999, 1, 1, -1], rtol=1e-5)

    def test_smooth_l1_is_a_mean_over_coordinates(self):
        x = jnp.array([0.5, 3.0, 0.0, 0.0])
        assert float(jit(smooth_l1)(x, jnp.zeros(4))) == pytest.approx((0.125 + 2.5) / 4)


class TestOutcomes:
    def test_against_slow_sums(self):
        shape, bins = (2, 3), TwoHot(DEBUG.bins)
        rng = np.random.default_rng(0)
        outcome = Outcome(
            e_hat=jnp.asarray(normals(*shape, 4)),
            reward=jnp.asarray(normals(*shape, DEBUG.bins.count, seed=1)),
            cont=jnp.asarray(normals(*shape, seed=2)),
            alive=jnp.asarray(normals(*shape, seed=3)),
            legal=jnp.asarray(normals(*shape, 5, seed=4)),
        )
        legal = rng.random((*shape, 5)) < 0.5
        legal[0, 0], legal[0, 1] = True, False
        target = Target(
            e_bar=jnp.asarray(normals(*shape, 4, seed=5)),
            e=jnp.asarray(normals(*shape, 4, seed=6)),
            reward=jnp.asarray(normals(*shape, seed=7)),
            terminal=jnp.asarray(rng.random(shape) < 0.5),
            alive=jnp.asarray(rng.random(shape) < 0.5),
            legal=jnp.asarray(legal),
        )
        found = jit(outcome_losses, static_argnums=2)(outcome, target, DEBUG)
        weights = np.asarray(bins.encode(target.reward))
        logits = np.asarray(outcome.reward, np.float64)
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        expected = {name: np.zeros(shape) for name in found}
        for at in itertools.product(*map(range, shape)):
            expected["emb"][at] = 1 - similarity(
                np.asarray(outcome.e_hat[at]), np.asarray(target.e_bar[at])
            )
            expected["interface"][at] = huber(outcome.e_hat[at], target.e[at])
            expected["reward"][at] = -(weights[at] * log_probs[at]).sum()
            cont = 0.0 if target.terminal[at] else DISCOUNT
            expected["cont"][at] = binary(outcome.cont[at], cont)
            expected["alive"][at] = binary(outcome.alive[at], float(target.alive[at]))
            expected["joint_legal"][at] = balanced(outcome.legal[at], legal[at])
        assert expected.keys() == {"emb", "interface", "reward", "cont", "alive", "joint_legal"}
        for name, losses in expected.items():
            np.testing.assert_allclose(found[name], losses, rtol=1e-4, err_msg=name)

    def test_targets_are_the_records_that_transitions_arrive_at(self, given):
        found = jit(arrivals)(given.states, given.e_bar, given.record)
        record = given.record
        for i in range(AGENTS):
            np.testing.assert_array_equal(found.reward[..., i], record.reward[:, 1:])
            np.testing.assert_array_equal(found.terminal[..., i], record.is_terminal[:, 1:])
        np.testing.assert_array_equal(found.alive, record.alive[:, 1:])
        np.testing.assert_array_equal(found.legal, record.legal[:, 1:])
        np.testing.assert_array_equal(found.e, given.states.e[:, 1:])
        np.testing.assert_array_equal(found.e_bar, given.e_bar[:, 1:])


class Parts(NamedTuple):
    """Losses of given states, and the predictions they are made of."""

    local: Any
    joint: Any
    routed: Any
    p: Any
    post: Any
    dyn: Any
    legal: Any
    sigreg: Any
    u: Any
    outcome: Any
    q_hat: Any
    """Posteriors of the predicted embeddings, given the real histories."""
    factual: Any
    """By horizon: the embedding that far ahead."""
    replaced: Any
    """The same for each action in place of the last one, one by one."""
    alternatives: Any
    """How similar each of those is to what came, without predicting them."""


@jit
def compute(local, joint, given, alive_before, key) -> Parts:
    record, states, episode = given.record, given.states, given.tokens.episode
    local_terms, gaussian = local_losses(
        local, states, given.e_bar, record, alive_before, STILL, key
    )
    joint_terms, routed = joint_losses(
        local, joint, None, states, given.e_bar, record, episode, given.past, STILL, key
    )
    u, _ = run_joint(joint, states.s, record, episode, given.past.joint)
    outcome = joint.read(u[:, :-1])
    roots = u.shape[1] - FARTHEST
    factual, replaced, alternatives = {}, {}, {}
    for horizon, head in zip(STILL.joint.horizons, joint.ahead, strict=True):
        steps = [record.action[:, k : k + roots, :, None] for k in range(1, horizon)]
        tail = jnp.concatenate([jnp.zeros((*u[:, :roots].shape[:3], 0), jnp.int32), *steps], -1)
        factual[horizon] = head(u[:, :roots], tail)
        if horizon > 1:
            tails = [tail.at[..., -1].set(action) for action in range(ACTIONS)]
            replaced[horizon] = jnp.stack([head(u[:, :roots], tail) for tail in tails], -2)
            e_future = given.e_bar[:, horizon : horizon + roots]
            rows = (as_rows(leaf) for leaf in (u[:, :roots], tail, e_future))
            every = pairs_of(jnp.ones((tail[..., 0].size, ACTIONS), bool))
            similar = head.comparison(*rows).similarities(every)
            alternatives[horizon] = similar.reshape(*tail.shape[:-1], ACTIONS)
    return Parts(
        local_terms, joint_terms, routed,
        p=local.prior(states.h), post=local.predict_post(states.s),
        dyn=local.predict_dyn(states.h), legal=local.legal(states.s),
        sigreg=sigreg(states.e, gaussian, key, projections=DEBUG.loss.sigreg_projections),
        u=u, outcome=outcome, q_hat=local.posterior(states.h[:, 1:], outcome.e_hat),
        factual=factual, replaced=replaced, alternatives=alternatives,
    )  # fmt: skip


@pytest.fixture(scope="module")
def still_models():
    return make_models(0, STILL)


@pytest.fixture(scope="module")
def alive_before(world):
    return world.sequence.record.alive[:, DEBUG.context - 1]


@pytest.fixture(scope="module")
def parts(still_models, given, alive_before) -> Parts:
    found = compute(*still_models, given, alive_before, jax.random.key(3))
    return jax.tree.map(np.asarray, found)


@pytest.fixture(scope="module")
def data(given):
    return jax.tree.map(np.asarray, given)


def at_entries(valid: np.ndarray, loss) -> float:
    """Mean of a function of the indices of valid entries."""
    return float(np.mean([loss(*index) for index in np.argwhere(valid)]))


class TestLocal:
    def test_predictions_of_embeddings(self, parts, data):
        valid = data.record.present
        for name, predicted in (("post", parts.post), ("dyn", parts.dyn)):
            expected = mean(1 - similarity(predicted, data.e_bar), valid)
            assert parts.local[name] == pytest.approx(expected, rel=1e-5)

    def test_legal_actions(self, parts, data):
        legal = data.record.legal
        expected = at_entries(data.record.present, lambda *at: balanced(parts.legal[at], legal[at]))
        assert parts.local["legal"] == pytest.approx(expected, rel=1e-5)

    def test_regularizers_have_free_nats_for_each_entry(self, parts, data):
        """Summed over latents, then bounded below, then averaged."""
        valid = data.record.present
        found = divergence(data.states.q, parts.p)
        assert (found[valid] < 1).any()
        assert (found[valid] > 1).any()
        expected = mean(np.maximum(found, 1.0), valid)
        assert parts.local["dyn_reg"] == pytest.approx(expected, rel=1e-5)
        assert parts.local["rep_reg"] == pytest.approx(expected, rel=1e-5)

    def test_sigreg_is_scaled_to_a_number_of_samples(self, parts, data):
        scale = DEBUG.loss.sigreg_samples / data.record.reward.size
        assert parts.local["sigreg"] == pytest.approx(scale * parts.sigreg, rel=1e-5)

    def test_below_the_free_nats_there_is_no_gradient(self, evaluate):
        none = LocalWeights(**dict.fromkeys(dataclasses.asdict(LocalWeights()), 0.0))
        no_joint = JointWeights(**dict.fromkeys(dataclasses.asdict(JointWeights()), 0.0))
        weights = dataclasses.replace(none, dyn_reg=1.0, rep_reg=1.0)
        found = evaluate(weights, no_joint, free_nats=1000.0)
        assert found.loss.terms["dyn_reg"] == found.loss.terms["rep_reg"] == 1000
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(found.local))


class TestJoint:
    def test_one_step_predictions(self, parts, data):
        slow, outcome = Slow(data.record), parts.outcome
        entries = parts.outcome.cont.shape
        source, team = loop(entries, slow.source), loop(entries, slow.team)
        arrival: Any = jax.tree.map(lambda leaf: leaf[:, 1:], data.record)
        e, e_bar = data.states.e[:, 1:], data.e_bar[:, 1:]
        rewards = np.repeat(arrival.reward[..., None], AGENTS, axis=-1)
        reward = np.asarray(TwoHot(DEBUG.bins).loss(*map(jnp.asarray, (outcome.reward, rewards))))
        cont = DISCOUNT * (1 - arrival.is_terminal.astype(np.float64))
        expected = {
            "emb": mean(1 - similarity(outcome.e_hat, e_bar), source),
            "interface": at_entries(source, lambda *at: huber(outcome.e_hat[at], e[at])),
            "reward": mean(reward, team),
            "cont": at_entries(
                team, lambda b, t, i: binary(outcome.cont[b, t, i], cont[b, t])
            ),
            "alive": at_entries(
                source, lambda *at: binary(outcome.alive[at], float(arrival.alive[at]))
            ),
            "joint_legal": at_entries(
                source, lambda *at: balanced(outcome.legal[at], arrival.legal[at])
            ),
            "align": mean(divergence(data.states.q[:, 1:], parts.q_hat), source),
        }  # fmt: skip
        for name, value in expected.items():
            assert parts.joint[name] == pytest.approx(value, rel=1e-4), name

    def test_routes_are_the_outcomes_and_the_embedding(self, parts):
        weights, routes, terms = STILL.loss.joint, STILL.routes, parts.joint
        outcome = sum(getattr(weights, name) * terms[name] for name in ("reward", "cont", "alive"))
        expected = routes.outcome * outcome + routes.jepa * weights.emb * terms["emb"]
        assert parts.routed == pytest.approx(expected, rel=1e-5)


class TestAhead:
    def test_weights_of_horizons(self):
        share = horizon_weights(4, 0.75)
        np.testing.assert_allclose(share, [0.3657, 0.2743, 0.2057, 0.1543], atol=5e-5)
        assert sum(share) == pytest.approx(1)
        later = [weight / sum(share[1:]) for weight in share[1:]]
        np.testing.assert_allclose(later, [0.4324, 0.3243, 0.2432], atol=6e-5)

    def test_alternatives_at_once_equal_one_by_one(self, parts, data):
        assert parts.replaced.keys() == {2, 4, 8}
        roots = data.record.action.shape[1] - FARTHEST
        for horizon, predicted in parts.replaced.items():
            came = np.asarray(data.e_bar)[:, horizon : horizon + roots, :, None]
            lengths = np.linalg.norm(predicted, axis=-1) * np.linalg.norm(came, axis=-1)
            similar = np.sum(predicted * came, axis=-1) / lengths
            np.testing.assert_allclose(parts.alternatives[horizon], similar, rtol=1e-4, atol=1e-5)

    def test_the_factual_action_is_one_of_them(self, parts, data):
        roots = data.record.action.shape[1] - FARTHEST
        for horizon, predicted in parts.replaced.items():
            last = data.record.action[:, horizon - 1 : horizon - 1 + roots]
            own = np.take_along_axis(predicted, last[..., None, None], axis=-2)[..., 0, :]
            np.testing.assert_allclose(own, parts.factual[horizon], rtol=1e-4, atol=1e-5)

    def test_multi_step(self, parts, data):
        slow, total = Slow(data.record), 0.0
        for share, horizon in zip((0.3657, 0.2743, 0.2057, 0.1543), (1, 2, 4, 8), strict=True):
            predicted = parts.factual[horizon]
            losses = [
                1 - similarity(predicted[b, t, i], data.e_bar[b, t + horizon, i])
                for b, t, i in np.ndindex(predicted.shape[:3])
                if slow.ahead(horizon, b, t, i)
            ]
            assert losses, horizon
            total += share * np.mean(losses)
        assert parts.joint["multi_step"] == pytest.approx(total, rel=2e-4)

    def test_discrimination(self, parts, data):
        slow, total, margin = Slow(data.record), 0.0, 0.1
        alone = separated = 0
        for share, horizon in zip((0.4324, 0.3243, 0.2432), (2, 4, 8), strict=True):
            per_root = []
            for b, t, i in np.ndindex(parts.factual[horizon].shape[:3]):
                legal = data.record.legal[b, t + horizon - 1, i]
                taken = data.record.action[b, t + horizon - 1, i]
                others = [a for a in range(ACTIONS) if legal[a] and a != taken]
                if not slow.ahead(horizon, b, t, i):
                    continue
                if not others:
                    alone += 1
                    continue
                real = data.e_bar[b, t + horizon, i]
                own = similarity(parts.factual[horizon][b, t, i], real)
                hinges = [
                    max(0.0, margin - own + similarity(parts.replaced[horizon][b, t, i, a], real))
                    for a in others
                ]
                separated += hinges.count(0.0)
                per_root.append(np.mean(hinges))
            total += share * np.mean(per_root)
        assert alone, "a root without an alternative"
        assert separated, "an alternative that is far enough"
        assert parts.joint["discrimination"] == pytest.approx(total, rel=5e-4)

    def test_separated_alternatives_cost_nothing(self, evaluate):
        """No two cosines are more than two apart."""
        assert evaluate(margin=-2.001).loss.terms["discrimination"] == 0
        assert evaluate(margin=2.001).loss.terms["discrimination"] > 1


class TestSymmetry:
    def test_agents_have_no_order(self, parts, still_models, given, alive_before):
        order = np.array([2, 0, 1])

        def permute(tree, axis):
            return jax.tree.map(lambda leaf: jnp.take(leaf, order, axis=axis), tree)

        def history(memory):
            return memory._replace(
                keys=permute(memory.keys, 1), values=permute(memory.values, 1)
            )  # fmt: skip

        record = given.record
        agents = ("observation", "legal", "alive", "present", "action", "latent")
        record = record._replace(**{name: permute(getattr(record, name), 2) for name in agents})
        states = permute(given.states._replace(history=None), 2)
        states = states._replace(history=history(given.states.history))
        permuted = given._replace(
            record=record,
            states=states,
            e_bar=permute(given.e_bar, 2),
            past=given.past._replace(joint=history(given.past.joint)),
        )
        found = compute(*still_models, permuted, permute(alive_before, 1), jax.random.key(3))

        def close(one, two):
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)

        close(found.u, parts.u[:, :, order])
        jax.tree.map(lambda one, two: close(one, two[:, :, order]), found.outcome, parts.outcome)
        for horizon in parts.factual:
            close(found.factual[horizon], parts.factual[horizon][:, :, order])
        jax.tree.map(close, (found.local, found.joint), (parts.local, parts.joint))

    def test_absent_slots_are_not_seen(self, still_models, given):
        """A team with an absent slot, whatever it holds, predicts what the team without it does."""
        joint, record = still_models[1], given.record

        @jit
        def predict(s, record, past):
            u, _ = run_joint(joint, s, record, given.tokens.episode, past)
            return u

        def keep(tree, count, axis=2):
            return jax.tree.map(lambda leaf: jax.lax.slice_in_dim(leaf, 0, count, axis=axis), tree)

        def team_of(count):
            """The past is empty: there an absent slot would have to be absent too."""
            agents = ("alive", "present", "action", "legal")
            fewer = record._replace(**{name: keep(getattr(record, name), count) for name in agents})
            past = joint.temporal.empty(record.reward.shape[0], count)
            return keep(given.states.s, count), fewer, past

        s, others, past = team_of(AGENTS - 1)
        expected = predict(s, others, past)
        s, whole, past = team_of(AGENTS)
        absent = whole._replace(present=whole.present.at[..., -1].set(False))
        for junk in (0.0, 100.0):
            found = predict(s.at[:, :, -1].set(junk), absent, past)
            np.testing.assert_allclose(found[:, :, :-1], expected, rtol=1e-4, atol=1e-5)
        assert np.abs(predict(s, whole, past)[:, :, :-1] - expected).max() > 1e-2


class TestObjective:
    def test_the_total_is_the_weighted_sum(self, evaluate):
        found = evaluate()
        assert found.loss.terms.keys() == TERMS.keys()
        expected = sum(weight * float(found.loss.terms[name]) for name, weight in TERMS.items())
        assert float(found.total) == pytest.approx(expected, rel=1e-5)

    def test_weights_must_have_the_names_of_the_terms(self):
        terms = {name: jnp.ones(()) for name in dataclasses.asdict(LocalWeights())}
        assert float(weigh(terms, LocalWeights())) == pytest.approx(2 + 2 + 0.05 + 1 + 1 + 0.1)
        with pytest.raises(AssertionError, match="extra"):
            weigh({**terms, "extra": jnp.ones(())}, LocalWeights())
        del terms["post"]
        with pytest.raises(AssertionError, match="post"):
            weigh(terms, LocalWeights())

    def test_every_term_counts_in_preset_debug(self, evaluate):
        terms = evaluate().loss.terms
        assert all(np.isfinite(term) and term > 0 for term in terms.values()), terms

    @pytest.mark.slow
    def test_every_term_counts_in_preset_small(self):
        local, joint = make_models(0, SMALL)
        sequence = random_sequence(0, SMALL, episode=20)
        _, loss = jit(model_loss, static_argnums=3)(
            (local, joint), make_models(1, SMALL)[0].encoder, sequence, SMALL, jax.random.key(0)
        )
        assert loss.terms.keys() == TERMS.keys()
        assert all(np.isfinite(term) and term > 0 for term in loss.terms.values()), loss.terms

    def test_the_paper_has_the_same_terms_in_the_same_precision(self):
        paper = MajepaConfig()
        paper = dataclasses.replace(paper, replay=dataclasses.replace(paper.replay, batch=2))
        sequence = random_sequence(0, paper)

        def objective(sequence, key):
            local, joint = build_models(paper)
            return model_loss((local, joint), local.encoder, sequence, paper, key)

        total, loss = jax.eval_shape(objective, sequence, jax.random.key(0))
        assert loss.terms.keys() == TERMS.keys()
        assert {leaf.dtype for leaf in (total, *loss.terms.values())} == {jnp.dtype("float32")}

    def test_the_report_agrees_with_the_data(self, evaluate, data):
        """Shares of entries, and what is inferred about the learning records."""
        loss, record, slow = evaluate().loss, data.record, Slow(data.record)
        transitions = (record.alive.shape[0], record.alive.shape[1] - 1, AGENTS)
        entries = loss.entries
        assert float(entries["present"]) == pytest.approx(record.present.mean())
        assert float(entries["source"]) == pytest.approx(loop(transitions, slow.source).mean())
        assert float(entries["team"]) == pytest.approx(loop(transitions, slow.team).mean())
        assert entries["self_fed"] == 1
        assert loss.latent.shape == record.latent.shape
        np.testing.assert_allclose(loss.e, data.states.e, rtol=1e-4, atol=1e-5)
        # The regularizer is the same mean, but for its threshold.
        assert 0 < loss.kl <= loss.terms["dyn_reg"]

    def test_a_death_on_entering_the_learning_records_is_seen(self, evaluate, world):
        """SIGReg asks the last record of the context who was alive."""
        record, context = world.sequence.record, DEBUG.context
        row = int(np.argmin(record.is_first[:, context]))
        assert not record.is_first[row, context]
        assert record.present[row, context].all()
        alive = (
            record.alive.at[row, context:].set(False).at[row, context - 1].set([True, False, True])
        )
        sequence = world.sequence._replace(record=record._replace(alive=alive))
        loss = evaluate(sequence=sequence).loss
        learning: Any = jax.tree.map(lambda leaf: np.asarray(leaf)[:, context:], sequence.record)
        before = np.asarray(alive[:, context - 1])
        active = loop(learning.alive.shape, lambda *at: Slow(learning).active(before, *at))
        np.testing.assert_array_equal(active[row, 0], [True, False, True])
        np.testing.assert_array_equal(loss.gaussian, active)
        assert float(loss.entries["sigreg"]) == pytest.approx(active.mean())


class TestContext:
    def changed(self, sequence: Sequence, **fields) -> Sequence:
        """Other values in the context, the same ones in the learning records."""
        record = sequence.record
        new = {
            name: getattr(record, name).at[:, : DEBUG.context].set(value)
            for name, value in fields.items()
        }
        return sequence._replace(record=record._replace(**new))

    def test_only_histories_come_from_it(self, evaluate, world):
        lead = (world.sequence.record.reward.shape[0], DEBUG.context)
        junk = self.changed(
            world.sequence,
            observation=100 * normals(*lead, AGENTS, world.sequence.record.observation.shape[-1]),
            reward=100 * normals(*lead),
            is_last=normals(*lead) > 0,
            is_terminal=normals(*lead, seed=1) > 0,
            legal=normals(*lead, AGENTS, ACTIONS) > 0,
        )
        plain, found = evaluate(), evaluate(sequence=junk)
        jax.tree.map(
            np.testing.assert_array_equal,
            (found.loss, found.local, found.joint),
            (plain.loss, plain.local, plain.joint),
        )

    @pytest.mark.parametrize("field", ["action", "latent"])
    def test_histories_do_come_from_it(self, evaluate, world, field):
        other = (getattr(world.sequence.record, field)[:, : DEBUG.context] + 1) % 4
        terms = evaluate(sequence=self.changed(world.sequence, **{field: other})).loss.terms
        plain = evaluate().loss.terms
        assert terms["emb"] != plain["emb"]
        assert terms["dyn"] != plain["dyn"]
        assert terms["sigreg"] == plain["sigreg"]

    def test_its_observations_get_no_gradient(self, evaluate, data):
        gradient = np.asarray(evaluate().observation)
        assert not gradient[:, : DEBUG.context].any()
        learning = gradient[:, DEBUG.context :].any(axis=-1)
        assert learning[data.record.alive].all()


class TestNothing:
    """Masks without entries give zero, gradients of zero, and no NaN."""

    def assert_finite(self, found) -> None:
        """All but the report on rollouts, which says NaN where it measured nothing."""
        loss = found.loss._replace(self_fed=found.loss.self_fed.loss)
        for leaf in jax.tree.leaves(found._replace(loss=loss)):
            assert np.isfinite(leaf).all()

    def zeros(self, found) -> set[str]:
        return {name for name, term in found.loss.terms.items() if term == 0}

    def test_padding(self, evaluate, world):
        record = jax.tree.map(jnp.zeros_like, world.sequence.record)
        record = record._replace(is_first=jnp.ones_like(record.is_first))
        found = evaluate(sequence=world.sequence._replace(record=record))
        self.assert_finite(found)
        assert self.zeros(found) == TERMS.keys()
        assert found.total == 0
        gradients = jax.tree.leaves((found.local, found.joint, found.observation))
        assert not any(np.any(leaf) for leaf in gradients)

    def test_nothing_but_resets(self, evaluate, world):
        record = world.sequence.record
        record = record._replace(
            is_first=jnp.ones_like(record.is_first), present=jnp.ones_like(record.present)
        )
        found = evaluate(sequence=world.sequence._replace(record=record))
        self.assert_finite(found)
        assert self.zeros(found) == dataclasses.asdict(JointWeights()).keys()
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(found.joint))

    def test_a_dead_team(self, evaluate, world):
        record = world.sequence.record
        legal = jnp.zeros_like(record.legal).at[..., 0].set(True)
        record = record._replace(
            alive=jnp.zeros_like(record.alive), legal=legal, action=jnp.zeros_like(record.action),
            observation=jnp.zeros_like(record.observation),
        )  # fmt: skip
        found = evaluate(sequence=world.sequence._replace(record=record))
        self.assert_finite(found)
        team = {"reward", "cont"}
        local = dataclasses.asdict(LocalWeights()).keys() - {"sigreg"}
        assert self.zeros(found) == TERMS.keys() - local - team
        heads = found.joint
        assert np.any(heads.reward.linears[-1].weight)
        for head in (heads.embed, heads.alive, heads.legal, heads.ahead):
            assert not any(np.any(leaf) for leaf in jax.tree.leaves(head))
