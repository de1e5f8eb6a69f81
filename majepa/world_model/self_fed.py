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
from ..nn.few_rows import for_few_rows
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


@jax.named_scope("self_fed")
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
    """Where rollouts stand: what was predicted last, who takes part, and what is remembered."""

    h: Float[Array, "R N H"]
    latent: Int[Array, "R N S"]
    alive: Bool[Array, "R N"]
    present: Bool[Array, "R N"]
    episode: Int[Array, " R"]
    local: History
    joint: History


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

    No gradient enters the states that the joint model is given, or crosses the start of a chunk.
    So these states are found first, without gradients; then the joint model takes all at once.
    """
    classes = frozen.posterior.classes
    a = jax.nn.one_hot(_recorded_actions(record, root, steps), record.legal.shape[-1])
    begin = _State(
        states.h[root.row, root.time],
        states.latent[root.row, root.time],
        record.alive[root.row, root.time],
        record.present[root.row, root.time],
        tokens.episode[root.row, root.time],
        *_histories(joint, states, record, tokens, past, root),
    )
    noise = jax.random.uniform(key, (steps, *begin.latent.shape))
    before = _find_states(*for_few_rows((frozen, joint)), sg(begin), a[:-1], noise[:-1])
    outcome, h, q = _predict(frozen, joint, before, a, config.loss.self_fed_chunk)
    last = sample_by(q[-1], noise[-1])
    z = jax.nn.one_hot(jnp.append(before.latent[1:], last[None], axis=0), classes)
    legal = frozen.legal(feature(sg(h), z)).astype(jnp.float32)
    return _Rollout(outcome, q, legal)


def _find_states(
    frozen: LocalModel,
    joint: JointModel,
    begin: _State,
    a: Float[Array, "H R N A"],
    noise: Float[Array, "H R N S"],
) -> _State:
    """The states before and after each step, on a first axis."""

    def step(state: _State, given: tuple[Array, Array]) -> tuple[_State, _State]:
        a, noise = given
        z = jax.nn.one_hot(state.latent, frozen.posterior.classes)
        u, joint_past = joint(
            feature(state.h, z)[:, None], a[:, None], state.present[:, None],
            state.alive[:, None], state.episode[:, None], state.joint,
        )  # fmt: skip
        # Of its heads, only those that are read are computed.
        outcome = joint.read(u[:, 0])
        h, local_past = _remember(frozen, z, a, state.episode, state.local)
        after = state._replace(
            h=h,
            latent=frozen.posterior.draw(h, outcome.e_hat, noise),
            alive=state.alive & (outcome.alive >= 0),
            local=local_past,
            joint=joint_past.last(joint.temporal.window - 1),
        )
        return after, state

    # Written out: a loop would copy all that is remembered, in every turn.
    last, others = jax.lax.scan(step, begin, (a, noise), unroll=True)
    return jax.tree.map(lambda some, one: jnp.append(some, one[None], axis=0), others, last)


def _predict(
    frozen: LocalModel, joint: JointModel, before: _State, a: Float[Array, "H R N A"], size: int
) -> tuple[Outcome, Float[Array, "H R N D"], Float[Array, "H R N S K"]]:
    """What `H` known states lead to, with gradients: outcomes, the next h and their posteriors.

    Chunks of `size` steps are one batch. The joint model takes all steps of a chunk at once; the
    local one goes through them, since a latent passes gradients on to the next h.
    """
    steps, roots = a.shape[:2]
    local_past, joint_past = (_at_chunks(history, size) for history in (before.local, before.joint))
    h, latent, alive, present, episode, a = (_by_chunk(leaf, size) for leaf in (*before[:5], a))
    z = jax.nn.one_hot(latent, frozen.posterior.classes)
    u, _ = joint(feature(h, z), a, present, alive, episode, joint_past)
    outcome = joint.read(u)
    seen = frozen.posterior.seen(outcome.e_hat)
    z, all_h, all_q = z[:, 0], [], []
    for k in range(size):
        if k > 0:
            z = straight_through(all_q[-1], latent[:, k])
        h, local_past = _remember(frozen, z, a[:, k], episode[:, k], local_past)
        all_h.append(h)
        all_q.append(frozen.posterior.given(h, seen[:, k]))
    found = (outcome, jnp.stack(all_h, axis=1), jnp.stack(all_q, axis=1))
    # Back to the order of time.
    apart = jax.tree.map(lambda leaf: leaf.reshape(-1, roots, *leaf.shape[1:]), found)
    return jax.tree.map(lambda leaf: _merge(leaf.swapaxes(1, 2), 0)[:steps], apart)


def _remember(
    frozen: LocalModel,
    z: Float[Array, "R N S K"],
    a: Float[Array, "R N A"],
    episode: Int[Array, " R"],
    past: History,
) -> tuple[Float[Array, "R N H"], History]:
    """The next h, and the local history with it."""
    token = frozen.dynamics.embed(z.reshape(*z.shape[:-2], -1), a, jnp.zeros(a.shape[:2], bool))
    h, history = frozen.dynamics.history(token[:, :, None], episode[:, None], past)
    return h[:, :, 0], history.last(frozen.dynamics.transformer.window - 1)


def _by_chunk(x: Shaped[Array, "H R *f"], size: int) -> Shaped[Array, "Q C *f"]:
    """Chunks of `size` steps each, as more rollouts; the last step fills up the last chunk."""
    full = jnp.concatenate([x, *[x[-1:]] * (-len(x) % size)])
    return _merge(full.reshape(-1, size, *x.shape[1:]).swapaxes(1, 2), 0)


def _at_chunks(history: History, size: int) -> History:
    """Of the histories of all steps, on a first axis, those of the chunks, as more rollouts."""
    return jax.tree.map(lambda leaf: _merge(leaf[::size], 0), history)


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

    Both in inference mode and constant; the joint model takes those sequences alone that have one.
    """
    s, own, episode = jax.tree.map(
        lambda leaf: leaf[root.row], (sg(states.s), record, tokens.episode)
    )
    _, whole = run_joint(sg(joint), s, own, episode, past.joint.of(root.row))
    local_window, joint_window = past.local.episode.shape[1] + 1, joint.temporal.window
    each = jnp.arange(root.row.shape[0])
    return sg((
        states.history.ending_at(root.row, local_window - 1 + root.time, local_window - 1),
        whole.ending_at(each, joint_window - 2 + root.time, joint_window - 1),
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
