"""Which loss moves which parameters: the whole table, with exact zeros, for every ablation.

The parameters are noise, since an output layer of zeros passes no gradient back.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import jit

from majepa.config import DEBUG, JointWeights, LocalWeights, Routes
from majepa.world_model.losses import part_gradients
from majepa.world_model.unroll import run_joint

ON, OFF = Routes(), Routes(0.0, 0.0)
ABLATIONS = {
    "both": ON, "outcome": Routes(1.0, 0.0), "jepa": Routes(0.0, 0.1), "none": OFF,
}  # fmt: skip
NO_LOCAL = LocalWeights(**dict.fromkeys(dataclasses.asdict(LocalWeights()), 0.0))
NO_JOINT = JointWeights(**dict.fromkeys(dataclasses.asdict(JointWeights()), 0.0))

STATE = {"encoder", "dynamics", "posterior"}
"""What a local state s is made by."""
LOCAL = {
    "post": STATE | {"predict_post"},
    "dyn": STATE | {"predict_dyn"},
    "sigreg": {"encoder"},
    "legal": STATE | {"legal"},
    "dyn_reg": STATE | {"prior"},
    "rep_reg": STATE,
}
JOINT = {
    "emb": {"trunk", "embed"},
    "interface": {"trunk", "embed"},
    "align": {"trunk", "embed"},
    "reward": {"trunk", "reward"},
    "cont": {"trunk", "cont"},
    "alive": {"trunk", "alive"},
    "joint_legal": {"trunk", "joint_legal"},
    "multi_step": {"trunk", "next", "later"},
    "discrimination": {"trunk", "later"},
}
SELF_FED = {"trunk", "embed", "reward", "cont", "alive", "joint_legal"}
ROUTED = {"reward": "outcome", "cont": "outcome", "alive": "outcome", "emb": "jepa"}


def groups_of(local, joint) -> dict[str, object]:
    """The columns of the table."""
    return {
        "encoder": local.encoder,
        "dynamics": local.dynamics,
        "posterior": local.posterior,
        "prior": local.prior,
        "predict_post": local.predict_post,
        "predict_dyn": local.predict_dyn,
        "legal": local.legal,
        "trunk": (joint.enter, joint.enter_norm, joint.agents, joint.temporal),
        "embed": joint.embed,
        "reward": joint.reward,
        "cont": joint.cont,
        "alive": joint.alive,
        "joint_legal": joint.legal,
        "next": joint.ahead[0],
        "later": joint.ahead[1:],
    }


def assert_touched(gradients: dict[str, object], expected: set[str]) -> None:
    """Every tensor of the expected groups has a gradient, and none of the others has any."""
    for name, group in gradients.items():
        for path, leaf in jax.tree.leaves_with_path(group):
            where = f"{name}{jax.tree_util.keystr(path)}"
            assert np.isfinite(leaf).all(), where
            assert np.any(leaf) == (name in expected), where


def assert_same(one, two) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, two)


def assert_close(one, two) -> None:
    """Equal to the precision of a sum of floats."""

    def check(a, b):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6 * np.abs(a).max())

    jax.tree.map(check, one, two)


@pytest.fixture(params=["wide", "condensed"], scope="module")
def evaluate(request, evaluate):
    """With gradients of states as they are, and of condensed ones."""
    return functools.partial(evaluate, condensed=request.param == "condensed")


def test_the_columns_are_all_parameters(world):
    columns = groups_of(world.local, world.joint)
    leaves = [id(leaf) for leaf in jax.tree.leaves(columns)]
    assert sorted(leaves) == sorted(id(leaf) for leaf in jax.tree.leaves(world[:2]))
    assert LOCAL.keys() == dataclasses.asdict(LocalWeights()).keys()
    assert JOINT.keys() | {"self_fed"} == dataclasses.asdict(JointWeights()).keys()


@pytest.mark.parametrize("name", LOCAL)
def test_local_losses(evaluate, name):
    found = evaluate(dataclasses.replace(NO_LOCAL, **{name: 1.0}), NO_JOINT)
    assert_touched(groups_of(found.local, found.joint), LOCAL[name])


@pytest.mark.parametrize("ablation", ABLATIONS)
@pytest.mark.parametrize("name", JOINT)
def test_joint_losses(evaluate, name, ablation):
    routes = ABLATIONS[ablation]
    found = evaluate(NO_LOCAL, dataclasses.replace(NO_JOINT, **{name: 1.0}), routes)
    is_routed = name in ROUTED and getattr(routes, ROUTED[name]) > 0
    expected = JOINT[name] | STATE if is_routed else JOINT[name]
    assert_touched(groups_of(found.local, found.joint), expected)


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_the_self_fed_loss(evaluate, ablation):
    """Its terms have the weights of the joint losses, so that it cannot be had alone."""
    routes = ABLATIONS[ablation]
    with_it = evaluate(joint=JointWeights(self_fed=1.0), routes=routes)
    without = evaluate(joint=JointWeights(self_fed=0.0), routes=routes)
    pairs = (with_it.local, with_it.joint), (without.local, without.joint)
    assert_touched(groups_of(*jax.tree.map(np.subtract, *pairs)), SELF_FED)


def test_after_a_reset_nothing_reaches_back(evaluate, world):
    """Where every record begins an episode, h knows nothing: what is learned from h alone cannot
    move what embeddings and latents are made by."""
    record = world.sequence.record
    record = record._replace(
        is_first=jnp.ones_like(record.is_first), present=jnp.ones_like(record.present)
    )
    resets = world.sequence._replace(record=record)
    expected = LOCAL | {
        "dyn": {"dynamics", "predict_dyn"},
        "dyn_reg": {"dynamics", "prior"},
    }
    for name, groups in expected.items():
        found = evaluate(
            dataclasses.replace(NO_LOCAL, **{name: 1.0}), NO_JOINT, sequence=resets
        )  # fmt: skip
        gradients = groups_of(found.local, found.joint)
        # Nothing but zeros enters the history, whose keys and queries then do not matter.
        dynamics = gradients.pop("dynamics")
        assert np.any(dynamics.state.weight) == ("dynamics" in groups)
        assert not np.any(dynamics.token.weight)
        assert_touched(gradients, groups - {"dynamics"})


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_targets_receive_no_gradient(evaluate, ablation):
    found = evaluate(routes=ABLATIONS[ablation])
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(found.target_encoder))


class TestRoutes:
    def test_they_change_no_value_and_no_joint_gradient(self, evaluate):
        plain = evaluate(routes=OFF)
        for routes in (*ABLATIONS.values(), Routes(7.0, 30.0)):
            found = evaluate(routes=routes)
            assert_same(found.joint, plain.joint)
            assert_same(found.loss, plain.loss)
            assert found.total == plain.total

    def test_without_them_only_the_local_objective_moves_the_local_model(self, evaluate):
        assert_same(evaluate(routes=OFF).local, evaluate(joint=NO_JOINT).local)

    @pytest.mark.parametrize(
        ("more", "less", "ratio"),
        [
            (Routes(0.0, 0.2), Routes(0.0, 0.1), 2.0),
            (Routes(1.0, 0.0), Routes(0.5, 0.0), 2.0),
            (Routes(1.0, 0.1), Routes(0.25, 0.025), 4.0),
        ],
    )
    def test_they_are_linear_in_their_scales(self, evaluate, more, less, ratio):
        one, two = (evaluate(NO_LOCAL, routes=routes).local for routes in (more, less))
        assert_close(one, jax.tree.map(lambda leaf: ratio * leaf, two))

    def test_they_add(self, evaluate):
        whole, outcome, jepa = (
            evaluate(NO_LOCAL, routes=ABLATIONS[name]).local for name in ("both", "outcome", "jepa")
        )
        assert_close(whole, jax.tree.map(np.add, outcome, jepa))

    def test_the_scale_of_the_jepa_route_multiplies_the_weighted_loss(self, evaluate):
        """0.1 on 2 L_emb moves the states as 0.2 on L_emb does."""
        twice = evaluate(NO_LOCAL, dataclasses.replace(NO_JOINT, emb=2.0), Routes(0.0, 0.1)).local
        once = evaluate(NO_LOCAL, dataclasses.replace(NO_JOINT, emb=1.0), Routes(0.0, 0.2)).local
        assert_close(twice, once)

    def test_each_outcome_has_its_own_part(self, evaluate):
        parts = [
            evaluate(NO_LOCAL, dataclasses.replace(NO_JOINT, **{name: 1.0}), ON).local
            for name in ("reward", "cont", "alive")
        ]
        weights = dataclasses.replace(NO_JOINT, reward=1.0, cont=1.0, alive=1.0)
        whole = evaluate(NO_LOCAL, weights, ON).local
        assert_close(whole, jax.tree.map(lambda *leaves: sum(leaves), *parts))


class TestPartGradients:
    def test_they_equal_two_passes_with_the_same_dropout(self, world, given):
        """J(ω, sg s) teaches the model and J(sg ω, s) the states."""
        sg = jax.lax.stop_gradient

        def predict(joint, s):
            return run_joint(
                joint, s, given.record, given.tokens.episode, given.past.joint, key=world.key
            )[0]

        def two_passes(joint, s):
            return predict(joint, sg(s)), predict(sg(joint), s)

        @jit
        def gradients(joint, s, to_model, to_states):
            def of(pair):
                def pull(joint, s):
                    one, two = pair(joint, s)
                    return jnp.sum(to_model * one**2) + jnp.sum(to_states * two**2)

                return jax.value_and_grad(pull, argnums=(0, 1))(joint, s)

            return of(part_gradients(predict)), of(two_passes)

        keys = jax.random.split(world.key, 2)
        shape = (*given.states.s.shape[:3], DEBUG.joint.width)
        to_model, to_states = (jax.random.normal(key, shape) for key in keys)
        (value, parted), (expected_value, expected) = gradients(
            world.joint, given.states.s, to_model, to_states
        )
        assert float(value) == pytest.approx(float(expected_value), rel=1e-5)
        assert_close(parted, expected)
        assert all(np.any(leaf) for leaf in jax.tree.leaves(expected[1]))
