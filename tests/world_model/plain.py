"""The recurrence of local states as it is defined: one record after another, differentiated as such."""

import jax
import jax.numpy as jnp

from majepa.nn.dists import straight_through
from majepa.nn.transformer import History
from majepa.world_model.local import feature
from majepa.world_model.tokens import one_hot_vec, tokens_of
from majepa.world_model.unroll import Past, Roots, States, run_history, run_joint, sg


def draw(q, key, t):
    """The sample that the package would take of record `t`."""
    noise = jax.random.gumbel(jax.random.fold_in(key, t), q.shape)
    return jnp.argmax(q + noise, axis=-1)


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
    z_before = one_hot_vec(past.z, classes).astype(e.dtype)
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
        record.latent[:, -1],
    ))  # fmt: skip


def reinfer(local, joint, sequence, context, key) -> Roots:
    """Every record of a sequence, from the first one on."""
    record, stored = sequence.record, tokens_of(sequence, sequence.record.latent)
    classes, num_actions = local.posterior.classes, record.legal.shape[-1]
    batch, length, agents = record.alive.shape
    dynamics, window = local.dynamics, local.dynamics.transformer.window
    history: History = dynamics.transformer.empty(batch, agents, dynamics.token.weight.dtype)
    z_before, latents = stored.z_before[:, 0], []
    for t in range(length):
        now = stored.between(t, t + 1)._replace(z_before=z_before[:, None])
        h, history = run_history(dynamics, now, history, classes=classes, num_actions=num_actions)
        history = history.last(window - 1)
        q = local.posterior(h[:, 0], local.encoder(record.observation[:, t]))
        z_before = draw(q, key, t)
        latents.append(z_before)
    latent = jnp.stack(latents, axis=1)
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
