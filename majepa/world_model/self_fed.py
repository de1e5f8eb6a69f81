"""Self-fed recurrent supervision: predicted states drive the joint model under recorded actions.

From a few factual roots the joint model and the frozen local model take turns for five transitions.
Real observations are targets only. The joint model never sends a gradient into the state it is
given; gradients run through its own cache, and through the frozen local transition for the
alignment of trajectories, and are cut at the start of every chunk of two transitions.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from ..config import MajepaConfig
from ..nn.dists import TwoHot, kl, sample_index, straight_through
from ..nn.means import masked_mean
from ..nn.transformer import History
from ..replay import Record
from . import masks
from .joint import JointModel, Outcome
from .local import LocalModel, feature
from .targets import Target, outcome_losses, sg, targets
from .unroll import Past, States, Tokens, run_history, run_joint


class SelfFed(NamedTuple):
    """The loss, and how imagined and real outcomes compare after each number of steps."""

    loss: Float[Array, ""]
    """Mean over endpoints of the weighted sum; its own coefficient is not applied yet."""
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
    every = targets(states, e_bar, record)
    q_real = sg(states.q)
    losses, diagnostics = [], []
    for horizon in range(1, steps + 1):
        reached: _Rollout = jax.tree.map(lambda leaf, k=horizon - 1: leaf[k], rollout)
        at = jnp.minimum(root.time + horizon, record.reward.shape[1] - 1)
        target: Target = jax.tree.map(lambda leaf, at=at: leaf[root.row, at], every)
        team, agent = endpoint_masks(record, root.row, root.time, root.valid, horizon)
        if horizon in config.loss.self_fed_horizons:
            entry = outcome_losses(reached.outcome, target, config)
            entry["trajectory"] = kl(q_real[root.row, at], reached.q)
            losses.append(_weigh(entry, team, agent, config))
        diagnostics.append(_diagnose(reached, target, team, agent, config))
    columns = (jnp.stack(column) for column in zip(*diagnostics, strict=True))
    loss = sum(losses, jnp.zeros(())) / len(losses)
    return SelfFed(loss, jnp.mean(root.valid, dtype=jnp.float32), *columns)


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
    horizon: int,
) -> tuple[Bool[Array, "R N"], Bool[Array, "R N"]]:
    """Slots whose endpoint counts: for team outcomes, and for an agent's own."""
    length = record.reward.shape[1]
    steps = time[:, None] + jnp.arange(1, horizon + 1)[None]
    crosses = record.is_first[row[:, None], jnp.minimum(steps, length - 1)].any(-1)
    inside = valid & (time + horizon < length) & ~crosses
    there = record.present[row, jnp.minimum(time + horizon, length - 1)]
    team = inside[:, None] & there
    return team, team & record.present[row, time] & record.alive[row, time]


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
    """Five transitions from each root, as a batch of `R` sequences."""
    z_root, present = states.latent[root.row, root.time], record.present[root.row, root.time]
    local_past, joint_past = _histories(frozen, joint, states, record, tokens, past, root)
    episode = tokens.episode[root.row, root.time][:, None]
    num_actions, classes = record.legal.shape[-1], frozen.posterior.classes
    actions = jax.nn.one_hot(_recorded_actions(record, root, steps), num_actions)

    def step(carry: tuple, given: tuple[Array, Array, Array]) -> tuple[tuple, _Rollout]:
        k, a, noise = given
        starts = k % config.loss.self_fed_chunk == 0
        h, z, alive, local_past, joint_past = _cut(carry, starts)
        s = sg(feature(h, z))
        u, joint_past = joint(
            s[:, None], a[:, None], present[:, None], alive[:, None], episode, joint_past
        )
        outcome = joint.read(u[:, 0])
        token = frozen.dynamics.embed(z.reshape(*z.shape[:-2], -1), a, jnp.zeros(alive.shape, bool))
        h, local_past = frozen.dynamics.history(token[:, :, None], episode, local_past)
        h = h[:, :, 0]
        q = frozen.posterior(h, outcome.e_hat)
        z = straight_through(q, sample_index(q, noise))
        alive = alive & (outcome.alive >= 0)
        legal = frozen.legal(feature(h, z)).astype(jnp.float32)
        memory = (_shorten(local_past, frozen.dynamics.transformer.window),
                  _shorten(joint_past, joint.temporal.window))  # fmt: skip
        return (h, z, alive, *memory), _Rollout(outcome, q, legal)

    h_root = sg(states.h[root.row, root.time])
    alive = record.alive[root.row, root.time]
    carry = (h_root, jax.nn.one_hot(z_root, classes), alive, local_past, joint_past)
    given = (jnp.arange(steps), actions, jax.random.split(key, steps))
    return jax.lax.scan(step, carry, given)[1]


def _histories(
    frozen: LocalModel,
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
    z_before = jnp.concatenate([past.z[:, None], states.latent[:, :-1]], axis=1)
    _, local = run_history(
        frozen.dynamics, tokens._replace(z_before=z_before), past.local,
        classes=frozen.posterior.classes, num_actions=record.legal.shape[-1],
    )  # fmt: skip
    _, whole = run_joint(sg(joint), sg(states.s), record, tokens.episode, past.joint)
    local_window, joint_window = frozen.dynamics.transformer.window, joint.temporal.window
    return sg((
        local.ending_at(root.row, local_window - 1 + root.time, local_window - 1),
        whole.ending_at(root.row, joint_window - 2 + root.time, joint_window - 1),
    ))  # fmt: skip


def _recorded_actions(record: Record, root: _Root, steps: int) -> Int[Array, "H R N"]:
    """The actions that drive a rollout; what lies beyond the sample is masked later."""
    at = root.time[None, :] + jnp.arange(steps)[:, None]
    return record.action[root.row[None, :], jnp.minimum(at, record.reward.shape[1] - 1)]


def _cut(carry: tuple, starts: Bool[Array, ""]) -> tuple:
    """The carried state, constant at the start of a chunk."""

    def cut(leaf: Array) -> Array:
        return jnp.where(starts, sg(leaf), leaf)

    return jax.tree.map(cut, carry)


def _shorten(history: History, window: int) -> History:
    return history.last(window - 1)


def _weigh(
    entry: dict[str, Float[Array, "R N"]],
    team: Bool[Array, "R N"],
    agent: Bool[Array, "R N"],
    config: MajepaConfig,
) -> Float[Array, ""]:
    """The bracket of Eq. self-fed-objective at one endpoint."""
    weights = config.loss.joint
    total = config.loss.trajectory * masked_mean(entry.pop("trajectory"), agent)
    for name, loss in entry.items():
        valid = team if name in ("reward", "cont") else agent
        total += getattr(weights, name) * masked_mean(loss, valid)
    return total


def _diagnose(
    reached: _Rollout,
    target: Target,
    team: Bool[Array, "R N"],
    agent: Bool[Array, "R N"],
    config: MajepaConfig,
) -> tuple[Float[Array, ""], ...]:
    reward = TwoHot(config.bins).mean(reached.outcome.reward)
    cont = jax.nn.sigmoid(reached.outcome.cont)
    drawn = jax.nn.sigmoid(reached.legal) * agent[..., None]
    real_cont = config.policy.discount * (1.0 - target.terminal)
    similar = 1 - outcome_losses(reached.outcome, target, config)["emb"]
    return sg((
        masked_mean(jnp.abs(reward - target.reward), team),
        masked_mean(jnp.abs(cont - real_cont), team),
        masked_mean(((reached.outcome.alive >= 0) != target.alive).astype(jnp.float32), agent),
        jnp.sum(drawn * ~target.legal) / jnp.maximum(jnp.sum(drawn), 1e-8),
        masked_mean(similar, agent),
    ))  # fmt: skip
