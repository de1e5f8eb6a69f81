"""The objective and what it is made of, compiled once for all tests of the world model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import jit
from episodes import altered, make_models, random_sequence

from majepa.config import DEBUG, JointWeights, LocalWeights, Routes
from majepa.replay import Record, Sequence
from majepa.world_model import losses
from majepa.world_model.joint import JointModel
from majepa.world_model.local import Encoder, LocalModel
from majepa.world_model.losses import ModelLoss, model_loss
from majepa.world_model.tokens import Tokens, tokens_of
from majepa.world_model.unroll import Past, States, infer, rebuild_context


class World(NamedTuple):
    """Models with noise in all parameters, and a view of a replay."""

    local: LocalModel
    joint: JointModel
    target_encoder: Encoder
    sequence: Sequence
    key: jax.Array


class Evaluation(NamedTuple):
    """The objective of preset `debug` and its gradients."""

    total: jax.Array
    loss: ModelLoss
    local: LocalModel
    joint: JointModel
    target_encoder: Encoder
    observation: jax.Array


class Given(NamedTuple):
    """What the losses are computed from, for the learning records of `World`."""

    record: Record
    tokens: Tokens
    past: Past
    states: States
    e_bar: jax.Array


@functools.partial(jit, static_argnames="condensed")
def _evaluate(
    parameters, sequence, local_weights, joint_weights, routes, others, key, *, condensed
):
    loss = altered(
        DEBUG.loss,
        **others,
        local=altered(DEBUG.loss.local, **local_weights),
        joint=altered(DEBUG.loss.joint, **joint_weights),
    )
    config = altered(DEBUG, loss=loss, routes=altered(DEBUG.routes, **routes))

    def objective(parameters):
        local, joint, target_encoder, observation = parameters
        record = sequence.record._replace(observation=observation)
        sequence_ = sequence._replace(record=record)
        return model_loss((local, joint), target_encoder, sequence_, config, key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "pays", lambda dynamics: condensed)
        found = jax.value_and_grad(objective, has_aux=True)(parameters)
    (total, loss), gradients = found
    return Evaluation(total, loss, *gradients)


@pytest.fixture(scope="session")
def world() -> World:
    local, joint = make_models(0)
    return World(
        local, joint, make_models(1)[0].encoder, random_sequence(42, episode=14), jax.random.key(0)
    )


@pytest.fixture(scope="session")
def evaluate(world: World) -> Callable[..., Evaluation]:
    """The objective, for other weights, routes and views where they are given."""

    def evaluate(
        local: LocalWeights = DEBUG.loss.local,
        joint: JointWeights = DEBUG.loss.joint,
        routes: Routes = DEBUG.routes,
        sequence: Sequence = world.sequence,
        free_nats: float = DEBUG.loss.free_nats,
        margin: float = DEBUG.loss.margin,
        condensed: bool = False,
    ) -> Evaluation:
        parameters = (
            world.local, world.joint, world.target_encoder, sequence.record.observation
        )  # fmt: skip
        numbers = [
            {name: jnp.asarray(value) for name, value in dataclasses.asdict(config).items()}
            for config in (local, joint, routes)
        ]
        others = {"free_nats": jnp.asarray(free_nats), "margin": jnp.asarray(margin)}
        found = _evaluate(parameters, sequence, *numbers, others, world.key, condensed=condensed)
        return jax.tree.map(np.asarray, found)

    return evaluate


@jit
def _prepare(local, joint, target_encoder, sequence, key):
    context = DEBUG.context
    tokens = tokens_of(sequence, sequence.record.latent)
    record: Record = jax.tree.map(lambda leaf: leaf[:, context:], sequence.record)
    past = rebuild_context(local, joint, sequence, tokens, context)
    suffix = tokens.between(context, None)
    states = infer(local, record, suffix, past, key)
    return Given(record, suffix, past, states, target_encoder(record.observation))


@pytest.fixture(scope="session")
def given(world: World) -> Given:
    return _prepare(
        world.local, world.joint, world.target_encoder, world.sequence, jax.random.key(1)
    )
