"""The learner as it is defined: record after record, whole states, every alternative predicted."""

import contextlib
import sys

import jax
import jax.numpy as jnp
import pytest

from majepa import agent
from majepa.nn.dists import straight_through
from majepa.nn.means import masked_mean
from majepa.nn.transformer import History
from majepa.world_model import local, losses, recurrence, self_fed
from majepa.world_model.local import feature
from majepa.world_model.targets import cosine
from majepa.world_model.tokens import enter, one_hot_vec, tokens_of
from majepa.world_model.unroll import Past, Roots, States, run_joint, sg


def draw(q, key, t):
    """The sample that the package would take of record `t`."""

    def noise(sequence):
        own = jax.random.fold_in(jax.random.fold_in(key, t), sequence)
        return jax.random.uniform(own, q.shape[1:-1])

    return chosen(q, jax.vmap(noise)(jnp.arange(len(q))))


def chosen(q, noise):
    """The first class with which probabilities add up to more than the noise."""
    return jnp.argmax(jnp.cumsum(jnp.exp(q), axis=-1) > noise[..., None], axis=-1)


def run_history(dynamics, tokens, past, *, classes, num_actions):
    """All states h at once, for known latents, and the whole history."""
    token = enter(dynamics, tokens, classes=classes, num_actions=num_actions)
    token = dynamics.token_norm(token).swapaxes(1, 2)
    h, history = dynamics.history(token, tokens.episode, past)
    return h.swapaxes(1, 2), history


def infer(local, record, tokens, past, key) -> States:
    classes, num_actions = local.posterior.classes, record.legal.shape[-1]
    e = local.encoder(record.observation)
    dynamics, window = local.dynamics, local.dynamics.transformer.window

    def step(carry, row):
        history, z_before = carry
        e, a_before, is_first, episode, t = row
        first = jnp.broadcast_to(is_first[:, None], a_before.shape)
        token = dynamics.embed(z_before, jax.nn.one_hot(a_before, num_actions), first)
        h, history = dynamics.history(token[:, :, None], episode[:, None], history)
        h = h[:, :, 0]
        q = local.posterior(h, e)
        index = draw(q, key, t)
        z = straight_through(q, index)
        z_next = z.reshape(*z.shape[:-2], -1).astype(h.dtype)
        return (history.last(window - 1), z_next), (h, q, z, index)

    length = record.reward.shape[1]
    rows = (e.swapaxes(0, 1), tokens.a_before.swapaxes(0, 1), tokens.is_first.T, tokens.episode.T)
    z_before = one_hot_vec(tokens.z_before[:, 0], classes).astype(e.dtype)
    _, outputs = jax.lax.scan(step, (past.local, z_before), (*rows, jnp.arange(length)))
    h, q, z, index = (output.swapaxes(0, 1) for output in outputs)
    _, history = run_history(
        dynamics, tokens.inferred(index), past.local, classes=classes, num_actions=num_actions
    )
    return States(e, h, q, z, index, sg(history))


def rebuild_context(local, joint, sequence, tokens, context) -> Past:
    """The whole context at once, however little of it is remembered."""
    record = jax.tree.map(lambda leaf: leaf[:, :context], sequence.record)
    history, joint_history = _run(local, joint, record, tokens.between(0, context))[1:]
    return sg(Past(
        history.last(local.dynamics.transformer.window - 1),
        joint_history.last(joint.temporal.window - 1),
    ))  # fmt: skip


def reinfer(local, joint, sequence, context, key) -> Roots:
    """Every record of a sequence, from the first one on."""
    record, stored = sequence.record, tokens_of(sequence, sequence.record.latent)
    classes, num_actions = local.posterior.classes, record.legal.shape[-1]
    batch, length, agents = record.alive.shape
    dynamics, window = local.dynamics, local.dynamics.transformer.window
    history: History = dynamics.transformer.empty(batch, agents, dynamics.token.weight.dtype)

    def step(carry, given):
        history, z_before = carry
        t, now, observation = given
        now = jax.tree.map(lambda leaf: leaf[:, None], now._replace(z_before=z_before))
        h, history = run_history(dynamics, now, history, classes=classes, num_actions=num_actions)
        z = draw(local.posterior(h[:, 0], local.encoder(observation)), key, t)
        return (history.last(window - 1), z), z

    rows = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), (stored, record.observation))
    carry = (history, stored.z_before[:, 0])
    latent = jax.lax.scan(step, carry, (jnp.arange(length), *rows))[1].swapaxes(0, 1)
    tokens = tokens_of(sequence, latent)
    s, history, joint_history = _run(local, joint, record._replace(latent=latent), tokens)
    learning = length - context
    return Roots(
        s=s[:, context:],
        z=latent[:, context:],
        local=history.last(window - 1 + learning),
        joint=joint_history.last(joint.temporal.window - 1 + learning),
        episode=tokens.episode[:, context:],
    )


def _run(local, joint, record, tokens):
    batch, _, agents = record.alive.shape
    dtype, classes = local.dynamics.token.weight.dtype, local.posterior.classes
    h, history = run_history(
        local.dynamics, tokens, local.dynamics.transformer.empty(batch, agents, dtype),
        classes=classes, num_actions=record.legal.shape[-1],
    )  # fmt: skip
    s = feature(h, jax.nn.one_hot(record.latent, classes))
    nothing = joint.temporal.empty(batch, agents, dtype)
    _, joint_history = run_joint(joint, s, record, tokens.episode, nothing)
    return s, history, joint_history


def roll_out(frozen, joint, states, record, tokens, past, root, steps, config, key):
    """A self-fed rollout step by step, its carried state made constant where a chunk begins."""
    z = jax.nn.one_hot(states.latent[root.row, root.time], frozen.posterior.classes)
    noise = jax.random.uniform(key, (steps, *z.shape[:-1]))
    present, episode = record.present[root.row, root.time], tokens.episode[root.row, root.time]
    actions = jax.nn.one_hot(
        self_fed._recorded_actions(record, root, steps), record.legal.shape[-1]
    )
    h, alive = sg(states.h[root.row, root.time]), record.alive[root.row, root.time]
    histories = self_fed._histories(joint, states, record, tokens, past, root)
    state, steps_taken = (h, z, alive, *histories), []
    for k in range(steps):
        state = sg(state) if k % config.loss.self_fed_chunk == 0 else state
        state, predicted = _step(frozen, joint, present, episode, state, actions[k], noise[k])
        steps_taken.append(predicted)
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *steps_taken)


def _step(frozen, joint, present, episode, state, a, noise):
    """One transition, from a state that sends no gradient back to what predicted it."""
    h, z, alive, local_past, joint_past = state
    s = sg(feature(h, z))
    u, joint_past = joint(
        s[:, None], a[:, None], present[:, None], alive[:, None], episode[:, None], joint_past
    )
    outcome = joint.read(u[:, 0])
    token = frozen.dynamics.embed(z.reshape(*z.shape[:-2], -1), a, jnp.zeros(alive.shape, bool))
    h, local_past = frozen.dynamics.history(token[:, :, None], episode[:, None], local_past)
    h = h[:, :, 0]
    q = frozen.posterior(h, outcome.e_hat)
    z = straight_through(q, chosen(q, noise))
    legal = frozen.legal(feature(h, z)).astype(jnp.float32)
    alive = alive & (outcome.alive >= 0)
    local_past = local_past.last(frozen.dynamics.transformer.window - 1)
    joint_past = joint_past.last(joint.temporal.window - 1)
    return (h, z, alive, local_past, joint_past), self_fed._Rollout(outcome, q, legal)


def discriminate(asked, margin):
    """Each alternative of each root predicted, then compared."""
    return [mean_hinge(*each, margin) for each in asked]


def mean_hinge(head, u, tail, target, similar, counted, margin):
    hinge = jax.nn.relu(margin - similar[..., None] + similarities(head, u, tail, target))
    per_root = jnp.where(counted, hinge, 0.0).sum(-1) / jnp.maximum(counted.sum(-1), 1)
    return masked_mean(per_root, counted.any(-1))


def similarities(head, u, tail, target):
    others = [head(u, tail.at[..., -1].set(action)) for action in range(head.num_actions)]
    return cosine(jnp.stack(others, axis=-2), target[..., None, :])


@contextlib.contextmanager
def plainly():
    """The learner without any saving."""

    def same(module, basis):
        return module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "pays", lambda dynamics: False)
        patch.setattr(losses, "infer", infer)
        patch.setattr(losses, "rebuild_context", rebuild_context)
        patch.setattr(self_fed, "_roll_out", roll_out)
        patch.setattr(losses, "discriminate", discriminate)
        patch.setattr(agent, "reinfer", reinfer)
        for name in ("local", "joint", "actor", "critic"):
            patch.setattr(agent, f"condense_{name}", same)
        yield


def by_chance_alone(monkeypatch) -> None:
    """From now on all classes of a latent are as likely: rounding changes no sample."""

    def by_noise(log_probs, noise):
        classes = log_probs.shape[-1]
        return jnp.minimum(jnp.floor(classes * noise).astype(jnp.int32), classes - 1)

    for module in (recurrence, self_fed):
        monkeypatch.setattr(module, "sample_by", by_noise)
    monkeypatch.setattr(sys.modules[__name__], "chosen", by_noise)
    monkeypatch.setattr(local, "sample_mixed", lambda logits, _, noise: by_noise(logits, noise))
