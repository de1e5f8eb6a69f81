"""Self-fed recurrent supervision: predicted states drive the joint model under recorded actions.

From a few factual roots the joint model and the frozen local model take turns for five transitions.
Real observations are targets only. The joint model never sends a gradient into the state it is
given; gradients run through its own cache, and through the frozen local transition for the
alignment of trajectories, and are cut at the start of every chunk of two transitions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from ..config import MajepaConfig
from ..nn.dists import TwoHot, kl, sample_by, straight_through
from ..nn.means import masked_mean
from ..nn.transformer import History
from ..replay import Record
from . import masks
from .joint import JointModel, Outcome
from .local import LocalModel, feature
from .targets import Target, outcome_losses, sg, targets
from .tokens import Tokens
from .unroll import Past, States, run_joint


class SelfFed(NamedTuple):
    """The loss, and how imagined and real outcomes compare after each number of steps."""

    loss: Float[Array, ""]
    """Mean over endpoints of the weighted sum; its own coefficient is not applied yet."""
    terms: Mapping[str, Float[Array, ""]]
    """Its parts, before their coefficients."""
    valid_roots: Float[Array, ""]
    """Share of the drawn roots that were eligible."""
    reward_error: Float[Array, " H"]
    """Mean absolute error of the team reward after 1, 2, ... steps."""
    cont_error: Float[Array, " H"]
    alive_error: Float[Array, " H"]
    """Share of living agents whose survival was foretold wrongly."""
    illegal: Float[Array, " H"]
    """Share of the actions drawn as legal by the local head that were not."""
    embedding: Float[Array, " H"]
    """Cosine similarity of predicted and real embeddings."""


class _Rollout(NamedTuple):
    """Predictions after each step, `[H, R, N, ...]`."""

    outcome: Outcome
    q: Float[Array, "H R N S K"]
    legal: Float[Array, "H R N A"]
    """Logits of the local availability head."""


class _Root(NamedTuple):
    row: Int[Array, " R"]
    time: Int[Array, " R"]
    valid: Bool[Array, " R"]


def self_fed(
    local: LocalModel,
    joint: JointModel,
    states: States,
    e_bar: Float[Array, "B T N E"],
    record: Record,
    tokens: Tokens,
    past: Past,
    config: MajepaConfig,
    key: Key[Array, ""],
) -> SelfFed:
    """Eq. self-fed-objective, without its leading coefficient of 0.1."""
    key_roots, key_latent = jax.random.split(key)
    steps = max(config.loss.self_fed_horizons)
    root = draw_roots(record, config.loss.self_fed_roots, key_roots)
    rollout = _roll_out(
        sg(local), joint, states, record, tokens, past, root, steps, config, key_latent
    )
    at = root.time[None, :] + jnp.arange(1, steps + 1)[:, None]
    at = jnp.minimum(at, record.reward.shape[1] - 1)
    target: Target = jax.tree.map(
        lambda leaf: leaf[root.row[None, :], at], targets(states, e_bar, record)
    )
    entry = outcome_losses(rollout.outcome, target, config)
    entry["trajectory"] = kl(sg(states.q)[root.row[None, :], at], rollout.q)
    team, agent = endpoint_masks(record, root.row, root.time, root.valid, steps)
    endpoints = jnp.asarray(config.loss.self_fed_horizons) - 1
    terms = {
        name: jnp.mean(
            _mean_per_step(loss, team if name in ("reward", "cont") else agent)[endpoints]
        )
        for name, loss in entry.items()
    }
    coefficients = {**dataclasses.asdict(config.loss.joint), "trajectory": config.loss.trajectory}
    return SelfFed(
        sum((coefficients[name] * term for name, term in terms.items()), jnp.zeros(())),
        sg(terms),
        jnp.mean(root.valid, dtype=jnp.float32),
        *_diagnose(rollout, entry, target, team, agent, config),
    )


def draw_roots(record: Record, count: int, key: Key[Array, ""]) -> _Root:
    """Up to `count` eligible records of the batch, without replacement."""
    eligible = masks.self_fed_roots(record)
    score = jnp.where(eligible, jax.random.uniform(key, eligible.shape), -1.0)
    best, flat = jax.lax.top_k(score.reshape(-1), count)
    return _Root(flat // eligible.shape[1], flat % eligible.shape[1], best >= 0)


def endpoint_masks(
    record: Record,
    row: Int[Array, " R"],
    time: Int[Array, " R"],
    valid: Bool[Array, " R"],
    steps: int,
) -> tuple[Bool[Array, "H R N"], Bool[Array, "H R N"]]:
    """Slots that count after 1, 2, ... steps: for team outcomes, and for an agent's own."""
    length = record.reward.shape[1]
    at = time[None, :] + jnp.arange(1, steps + 1)[:, None]
    reached = jnp.minimum(at, length - 1)
    crossed = jnp.cumsum(record.is_first[row[None, :], reached], axis=0) > 0
    inside = valid[None, :] & (at < length) & ~crossed
    team = inside[..., None] & record.present[row[None, :], reached]
    return team, team & (record.present & record.alive)[row, time][None]


class _State(NamedTuple):
    """Where rollouts stand: what was predicted last, and what is remembered."""

    h: Float[Array, "R N H"]
    z: Float[Array, "R N S K"]
    alive: Bool[Array, "R N"]
    local: History
    joint: History


class _Given(NamedTuple):
    """What drives one step."""

    a: Float[Array, "R N A"]
    noise: Float[Array, "R N S K"]


def _roll_out(
    frozen: LocalModel,
    joint: JointModel,
    states: States,
    record: Record,
    tokens: Tokens,
    past: Past,
    root: _Root,
    steps: int,
    config: MajepaConfig,
    key: Key[Array, ""],
) -> _Rollout:
    """`H` transitions from each root, as a batch of `R` sequences.

    Gradients end where a chunk begins. So the chunks' beginnings are found first, without
    gradients, and then all chunks are run at once.
    """
    size = config.loss.self_fed_chunk
    chunks = -(-steps // size)
    actions = _recorded_actions(record, root, chunks * size)
    z_root = states.latent[root.row, root.time]
    shape = (chunks * size, *z_root.shape, frozen.posterior.classes)
    given = _Given(jax.nn.one_hot(actions, record.legal.shape[-1]), jax.random.gumbel(key, shape))
    by_chunk = jax.tree.map(lambda leaf: leaf.reshape(chunks, size, *leaf.shape[1:]), given)
    present = record.present[root.row, root.time]
    episode = tokens.episode[root.row, root.time]

    def run_chunk(state: _State, given: _Given) -> tuple[_State, _State]:
        def step(state: _State, given: _Given) -> tuple[_State, None]:
            return _step(frozen, sg(joint), present, episode, state, given)[0], None

        return jax.lax.scan(step, state, given)[0], state

    begin = sg(_State(
        states.h[root.row, root.time],
        jax.nn.one_hot(z_root, frozen.posterior.classes),
        record.alive[root.row, root.time],
        *_histories(joint, states, record, tokens, past, root),
    ))  # fmt: skip
    last, starts = jax.lax.scan(run_chunk, begin, jax.tree.map(lambda leaf: leaf[:-1], by_chunk))
    starts = jax.tree.map(lambda one, other: jnp.append(one, other[None], axis=0), starts, last)

    present, episode = (jnp.concatenate([leaf] * chunks) for leaf in (present, episode))

    def step(state: _State, given: _Given) -> tuple[_State, _Rollout]:
        return _step(frozen, joint, present, episode, state, given)

    together = jax.tree.map(lambda leaf: _merge(leaf.swapaxes(0, 1), 1), by_chunk)
    _, rollout = jax.lax.scan(step, _as_one_batch(sg(starts)), together)
    return jax.tree.map(lambda leaf: _in_order(leaf, chunks)[:steps], rollout)


def _step(
    frozen: LocalModel,
    joint: JointModel,
    present: Bool[Array, "R N"],
    episode: Int[Array, " R"],
    state: _State,
    given: _Given,
) -> tuple[_State, _Rollout]:
    """One transition, from states that send no gradient back to what predicted them."""
    h, z, alive, local_past, joint_past = state
    s, a = sg(feature(h, z)), given.a
    u, joint_past = joint(
        s[:, None], a[:, None], present[:, None], alive[:, None], episode[:, None], joint_past
    )
    outcome = joint.read(u[:, 0])
    token = frozen.dynamics.embed(z.reshape(*z.shape[:-2], -1), a, jnp.zeros(alive.shape, bool))
    h, local_past = frozen.dynamics.history(token[:, :, None], episode[:, None], local_past)
    h = h[:, :, 0]
    q = frozen.posterior(h, outcome.e_hat)
    z = straight_through(q, sample_by(q, given.noise))
    legal = frozen.legal(feature(h, z)).astype(jnp.float32)
    after = _State(
        h,
        z,
        alive & (outcome.alive >= 0),
        local_past.last(frozen.dynamics.transformer.window - 1),
        joint_past.last(joint.temporal.window - 1),
    )
    return after, _Rollout(outcome, q, legal)


def _as_one_batch(states: _State) -> _State:
    """The states of all chunks, on a first axis, as more rollouts."""

    def history(memory: History) -> History:
        keys, values = (_merge(leaf.swapaxes(0, 1), 1) for leaf in (memory.keys, memory.values))
        return History(keys, values, _merge(memory.episode, 0))

    h, z, alive = (_merge(leaf, 0) for leaf in states[:3])
    return _State(h, z, alive, history(states.local), history(states.joint))


def _in_order(x: Shaped[Array, "C R *f"], chunks: int) -> Shaped[Array, "H Q *f"]:
    """Steps of chunks that ran at once, in the order of time."""
    apart = x.reshape(x.shape[0], chunks, -1, *x.shape[2:])
    return _merge(apart.swapaxes(0, 1), 0)


def _merge(x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
    """One axis of two."""
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _histories(
    joint: JointModel,
    states: States,
    record: Record,
    tokens: Tokens,
    past: Past,
    root: _Root,
) -> tuple[History, History]:
    """Caches at the roots: local records up to the root, joint transitions up to the one before.

    Both in inference mode and constant.
    """
    _, whole = run_joint(sg(joint), sg(states.s), record, tokens.episode, past.joint)
    local_window, joint_window = past.local.episode.shape[1] + 1, joint.temporal.window
    return sg((
        states.history.ending_at(root.row, local_window - 1 + root.time, local_window - 1),
        whole.ending_at(root.row, joint_window - 2 + root.time, joint_window - 1),
    ))  # fmt: skip


def _recorded_actions(record: Record, root: _Root, steps: int) -> Int[Array, "H R N"]:
    """The actions that drive a rollout; what lies beyond the sample is masked later."""
    at = root.time[None, :] + jnp.arange(steps)[:, None]
    return record.action[root.row[None, :], jnp.minimum(at, record.reward.shape[1] - 1)]


def _diagnose(
    rollout: _Rollout,
    entry: dict[str, Float[Array, "H R N"]],
    target: Target,
    team: Bool[Array, "H R N"],
    agent: Bool[Array, "H R N"],
    config: MajepaConfig,
) -> tuple[Float[Array, " H"], ...]:
    outcome = rollout.outcome
    reward_error = jnp.abs(TwoHot(config.bins).mean(outcome.reward) - target.reward)
    real_cont = config.policy.discount * (1.0 - target.terminal)
    cont_error = jnp.abs(jax.nn.sigmoid(outcome.cont) - real_cont)
    alive_error = ((outcome.alive >= 0) != target.alive).astype(jnp.float32)
    drawn = jax.nn.sigmoid(rollout.legal) * agent[..., None]
    illegal = jnp.sum(drawn * ~target.legal, axis=(1, 2, 3))
    return sg((
        _known_mean(reward_error, team),
        _known_mean(cont_error, team),
        _known_mean(alive_error, agent),
        illegal / jnp.sum(drawn, axis=(1, 2, 3)),
        _known_mean(1 - entry["emb"], agent),
    ))  # fmt: skip


def _mean_per_step(x: Float[Array, "H R N"], valid: Bool[Array, "H R N"]) -> Float[Array, " H"]:
    return jax.vmap(masked_mean)(x, valid)


def _known_mean(x: Float[Array, "H R N"], valid: Bool[Array, "H R N"]) -> Float[Array, " H"]:
    """NaN after as many steps as no root could follow: nothing was measured."""
    return jnp.where(valid.any(axis=(1, 2)), _mean_per_step(x, valid), jnp.nan)
