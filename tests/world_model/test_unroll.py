"""Local states along sequences: what each is made of, what it may know, and what it may not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import plain
import pytest
from drawn import drawn, jit

from majepa.config import DEBUG
from majepa.nn.layers import cast
from majepa.replay import Record, Sequence
from majepa.world_model import unroll
from majepa.world_model.joint import JointModel
from majepa.world_model.local import LocalModel
from majepa.world_model.tokens import tokens_of
from majepa.world_model.unroll import draw_latents, infer, rebuild_context, reinfer

BATCH, AGENTS, ACTIONS, OBSERVATION = 2, 2, 3, 5
LATENTS, CLASSES, SIZE_H = DEBUG.local.latents, DEBUG.local.classes, DEBUG.local.deterministic
LAYERS, WINDOW = DEBUG.local.layers, DEBUG.local.window
CONTEXT, LEARNING, REACH = DEBUG.context, 6, LAYERS * (WINDOW - 1)
LENGTH = CONTEXT + LEARNING


def normals(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@functools.cache
def models() -> tuple[LocalModel, JointModel]:
    def build():
        local = LocalModel(OBSERVATION, ACTIONS, DEBUG.local, key=jax.random.key(0))
        feature = SIZE_H + LATENTS * CLASSES
        embedding, joint = DEBUG.local.embedding, DEBUG.joint
        return local, JointModel(
            feature, ACTIONS, embedding, joint, DEBUG.bins, key=jax.random.key(0)
        )

    return drawn(build)


def make_sequence(*resets: tuple[int, ...], length: int = LENGTH, seed: int = 0) -> Sequence:
    """Random rows, given where episodes begin in each."""
    rng = np.random.default_rng(seed)
    lead = (len(resets), length)
    is_first = np.zeros(lead, bool)
    for row, places in enumerate(resets):
        is_first[row, list(places)] = True
    record = Record(
        observation=normals(*lead, AGENTS, OBSERVATION, seed=seed),
        legal=rng.random((*lead, AGENTS, ACTIONS)) < 0.7,
        alive=rng.random((*lead, AGENTS)) < 0.8,
        present=np.ones((*lead, AGENTS), bool),
        reward=normals(*lead, seed=seed + 1),
        is_first=is_first,
        is_last=np.roll(is_first, -1, axis=1),
        is_terminal=np.roll(is_first, -1, axis=1),
        action=rng.integers(ACTIONS, size=(*lead, AGENTS), dtype=np.int32),
        latent=rng.integers(CLASSES, size=(*lead, AGENTS, LATENTS), dtype=np.int32),
    )
    return Sequence(
        record,
        previous_latent=rng.integers(CLASSES, size=(lead[0], AGENTS, LATENTS), dtype=np.int32),
        previous_action=rng.integers(ACTIONS, size=(lead[0], AGENTS), dtype=np.int32),
        start=np.zeros(lead[0], np.int32),
        env=np.zeros(lead[0], np.int32),
    )


def cut(sequence: Sequence, begin: int) -> Sequence:
    """The same records from `begin` on, as the replay would give them."""
    record = sequence.record
    return sequence._replace(
        record=jax.tree.map(lambda leaf: leaf[:, begin:], record),
        previous_latent=record.latent[:, begin - 1],
        previous_action=record.action[:, begin - 1],
    )


def with_junk(sequence: Sequence, *before: int, fields: tuple[str, ...] = Record._fields):
    """Other records before the given place of each row."""
    other = make_sequence(*[(1,)] * len(before), seed=99)
    early = np.arange(LENGTH)[None, :] < np.array(before)[:, None]

    def mix(name: str) -> np.ndarray:
        old, new = getattr(sequence.record, name), getattr(other.record, name)
        if name not in fields:
            return old
        return np.where(early.reshape(*early.shape, *(1,) * (old.ndim - 2)), new, old)

    return other._replace(record=Record(*map(mix, Record._fields)))


shifted = jit(tokens_of)


@functools.partial(jit, static_argnums=2)
def replayed(local, sequence, context):
    """States h of the records after the context, all latents as stored."""
    tokens = tokens_of(sequence, sequence.record.latent)
    past = rebuild_context(local, models()[1], sequence, tokens, context)
    return known(local, tokens.between(context, None), past.local)[0]


def inferred(local, joint, sequence, key):
    tokens = tokens_of(sequence, sequence.record.latent)
    past = rebuild_context(local, joint, sequence, tokens, CONTEXT)
    record = jax.tree.map(lambda leaf: leaf[:, CONTEXT:], sequence.record)
    return infer(local, record, tokens.between(CONTEXT, None), past, key)


infer_all = jit(inferred)


@jit
def reinfer_all(local, joint, sequence, key):
    return reinfer(local, joint, sequence, CONTEXT, key)


def known(local, tokens, past):
    return plain.run_history(local.dynamics, tokens, past, classes=CLASSES, num_actions=ACTIONS)


def nothing(local, batch: int = BATCH):
    return local.dynamics.transformer.empty(batch, AGENTS)


@jit
def from_nothing(local, tokens):
    return known(local, tokens, nothing(local))


@jit
def one_by_one(local, tokens):
    def step(past, now):
        h, history = known(local, jax.tree.map(lambda leaf: leaf[:, None], now), past)
        return history.last(WINDOW - 1), h[:, 0]

    rows = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), tokens)
    past, h = jax.lax.scan(step, nothing(local), rows)
    return h.swapaxes(0, 1), past


@jit
def posterior_by_hand(local, h, observation):
    both = jnp.concatenate([h, local.encoder(observation)], axis=-1)
    logits = local.posterior.mlp(both).reshape(*h.shape[:-1], LATENTS, CLASSES)
    return jnp.log(0.99 * jax.nn.softmax(logits) + 0.01 / CLASSES)


@jit
def draw_each(q, key, times):
    """Latents of every record, each from a key of its own."""

    def one(time, sequence, q):
        own = jax.random.fold_in(jax.random.fold_in(key, time), sequence)
        return plain.chosen(q, jax.random.uniform(own, q.shape[:-1]))

    return jax.vmap(jax.vmap(one, (0, None, 0)), (None, 0, 0))(times, jnp.arange(len(q)), q)


def close(one, other, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def layers_of(history):
    """Keys, then values, of every layer."""
    return (*history.keys, *history.values)


def same(one, other) -> None:
    np.testing.assert_array_equal(one, other)


class TestTokens:
    def test_they_are_one_record_late(self):
        sequence = make_sequence((0, 5), (3,))
        latent = make_sequence((), (), seed=7).record.latent
        tokens = shifted(sequence, latent)
        same(tokens.z_before[:, 1:], latent[:, :-1])
        same(tokens.a_before[:, 1:], sequence.record.action[:, :-1])
        same(tokens.z_before[:, 0], sequence.previous_latent)
        same(tokens.a_before[:, 0], sequence.previous_action)
        same(tokens.is_first, sequence.record.is_first)
        same(tokens.episode, np.cumsum(sequence.record.is_first, axis=1))
        assert tokens.episode.dtype == jnp.int32
        assert tokens.between(3, 5).a_before.shape == (BATCH, 2, AGENTS)
        same(tokens.between(3, None).episode, tokens.episode[:, 3:])

    def test_at_a_start_they_hold_nothing(self):
        local, _ = models()
        embed = jit(lambda local, *given: local.dynamics.embed(*given))
        z, a = np.abs(normals(6, LATENTS * CLASSES)), np.abs(normals(6, ACTIONS, seed=1))
        is_first = np.arange(6) % 2 == 0
        token = np.asarray(embed(local, z, a, is_first))
        bias = np.asarray(local.dynamics.token.bias, np.float64)
        content = np.concatenate([z, a], axis=-1) @ np.asarray(local.dynamics.token.weight)
        expected = np.where(is_first[:, None], 0, content) + bias
        expected /= np.sqrt((expected**2).mean(-1, keepdims=True) + 1e-4)
        close(token, expected * np.asarray(local.dynamics.token_norm.gain))
        same(token[is_first], np.broadcast_to(token[0], (3, DEBUG.local.width)))


class TestHistory:
    def test_at_once_equals_one_by_one(self):
        local, _ = models()
        for seed, resets in enumerate([((), ()), ((0, 7), (3, 4)), ((13,), (0,))]):
            sequence = make_sequence(*resets, seed=seed)
            tokens = jax.device_get(shifted(sequence, sequence.record.latent))
            whole, history = from_nothing(local, tokens)
            steps, past = one_by_one(local, tokens)
            close(steps, whole)
            jax.tree.map(close, past, history.last(WINDOW - 1))

    def test_a_state_is_of_what_came_before_its_record(self):
        """Latent and action of record `t` change no state up to `h_t`, and change `h_{t+1}`."""
        local, _ = models()
        sequence = make_sequence((4,), ())
        record = sequence.record
        tokens = jax.device_get(shifted(sequence, record.latent))
        before = np.asarray(from_nothing(local, tokens)[0])
        for time in range(LENGTH):
            latent, action = record.latent.copy(), record.action.copy()
            latent[:, time] = (latent[:, time] + 1) % CLASSES
            action[:, time] = (action[:, time] + 1) % ACTIONS
            other = sequence._replace(record=record._replace(action=action))
            tokens = jax.device_get(shifted(other, latent))
            changed = (np.asarray(from_nothing(local, tokens)[0]) != before).any(-1)
            delay = np.arange(LENGTH) - time - 1
            reached = np.stack([(delay >= 0) & (delay <= REACH)] * BATCH)
            # The token of a first record is empty, and older ones are of another episode.
            reached[0, 4:] &= time >= 4
            same(changed, np.repeat(reached[..., None], AGENTS, axis=2))


class TestContext:
    PAST = 21

    def check(self, context: int, *resets: tuple[int, ...]) -> np.ndarray:
        """Difference that a context of some records makes to one of many more, `[B T N H]`."""
        local, _ = models()
        far = make_sequence(*resets, length=self.PAST + LEARNING)
        near = replayed(local, cut(far, self.PAST - context), context)
        whole, _ = from_nothing(local, shifted(far, far.record.latent))
        return np.asarray(near) - np.asarray(whole)[:, self.PAST :]

    @pytest.mark.parametrize("context", [CONTEXT, REACH])
    def test_it_stands_for_all_of_the_past(self, context):
        assert CONTEXT == LAYERS * WINDOW
        close(self.check(context, (2,), ()), 0)

    def test_one_record_less_would_not_do(self):
        difference = self.check(REACH - 1, (2,), ())
        assert np.all(np.abs(difference[:, 0]).max(-1) > 1e-4)
        close(difference[:, 1:], 0)

    def test_unless_an_episode_begins_in_it(self):
        context = REACH - 1
        resets = (self.PAST - context, self.PAST + 3), (self.PAST - context + 3,)
        close(self.check(context, *resets), 0)

    def test_it_is_constant(self):
        sequence = jax.tree.map(jnp.asarray, make_sequence((), (5,)))

        def size(local_and_joint):
            tokens = tokens_of(sequence, sequence.record.latent)
            past = rebuild_context(*local_and_joint, sequence, tokens, CONTEXT)
            held = jax.tree.leaves((past.local[:2], past.joint[:2]))
            return sum(jnp.sum(leaf**2) for leaf in held)

        value, gradient = jit(jax.value_and_grad(size))(models())
        assert value > 0
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_a_past_of_several_chunks_is_that_of_whole_sequences(monkeypatch, key):
    """As long views have it: here two chunks of four records, and two of seven."""
    monkeypatch.setattr(unroll, "SHORTEST_CHUNK", WINDOW)
    sequence = jax.tree.map(jnp.asarray, make_sequence((2, CONTEXT + 2), (5,)))
    tokens = tokens_of(sequence, sequence.record.latent)
    for one, given in (("rebuild_context", (tokens, CONTEXT)), ("reinfer", (CONTEXT, key))):
        found, expected = (
            jit(lambda *models, run=run, given=given: run(*models, sequence, *given))(*models())
            for run in (getattr(unroll, one), getattr(plain, one))
        )
        for leaf, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            close(leaf, other)


@pytest.mark.parametrize("begins", [(5, 7), (CONTEXT - 1, 4), (CONTEXT, 3), (CONTEXT, CONTEXT)])
def test_what_no_learning_record_remembers_may_be_left_out(monkeypatch, key, begins):
    monkeypatch.setattr(unroll, "SHORTEST_CHUNK", WINDOW)
    windows = WINDOW, DEBUG.joint.window
    sequence = jax.tree.map(jnp.asarray, make_sequence(*((place,) for place in begins)))
    begin = next(n for n in unroll.beginnings(CONTEXT, *windows) if n <= min(begins))
    assert begin > 0 or min(begins) < WINDOW

    def found(begin):
        tokens = tokens_of(sequence, sequence.record.latent)

        def run(local, joint):
            past = rebuild_context(local, joint, sequence, tokens, CONTEXT, begin)
            latent = draw_latents(local, sequence, key, 0)
            return past, unroll.roots_of(local, joint, sequence, CONTEXT, latent, begin)

        return jax.device_get(jit(run)(*models()))

    (past, roots), (whole_past, whole_roots) = found(begin), found(0)
    for one, other in zip(roots[:2], whole_roots[:2], strict=True):
        close(one, other)
    same(roots.episode, whole_roots.episode)
    ends = (CONTEXT, CONTEXT, LENGTH, LENGTH)
    histories = (past.local, past.joint, roots.local, roots.joint)
    expected = (whole_past.local, whole_past.joint, whole_roots.local, whole_roots.joint)
    for end, one, other in zip(ends, histories, expected, strict=True):
        same(one.episode, other.episode)
        first = end - one.episode.shape[1]
        for row, place in enumerate(begins):
            # What is seen of them; there may be other records before.
            for a, b in zip(layers_of(one), layers_of(other), strict=True):
                remembered = slice(max(place - first, 0), None)
                close(a[row, :, remembered], b[row, :, remembered])


def test_contexts_begin_with_whole_chunks():
    assert unroll.beginnings(192, 64, 16) == [128, 64, 0]
    assert unroll.beginnings(200, 64, 16) == [136, 72, 0]
    assert unroll.beginnings(192, 100, 16) == [93, 0]
    assert unroll.beginnings(300, 100, 16) == [201, 102, 0]
    assert unroll.beginnings(100, 100, 16) == [0]
    assert unroll.beginnings(32, 16, 8) == [0]


class TestInfer:
    def test_states_against_a_slow_one(self, key):
        """Given the sampled latents, everything follows from whole sequences."""
        local, joint = models()
        for resets in (((), ()), ((5, 10), (CONTEXT,))):
            sequence = make_sequence(*resets)
            states = jax.device_get(infer_all(local, joint, sequence, key))
            latent = np.concatenate([sequence.record.latent[:, :CONTEXT], states.latent], axis=1)
            tokens = jax.device_get(shifted(sequence, latent))
            h = np.asarray(from_nothing(local, tokens)[0])[:, CONTEXT:]
            observation = sequence.record.observation[:, CONTEXT:]
            q = np.asarray(posterior_by_hand(local, h, observation))
            close(states.h, h)
            close(states.q, q)
            close(states.e, jit(lambda local, o: local.encoder(o))(local, observation))
            same(states.latent, draw_each(q, key, np.arange(LEARNING)))
            same(states.z, np.eye(CLASSES)[states.latent])

    def test_it_sees_only_latents_and_actions_of_the_context(self, key):
        local, joint = models()
        sequence = make_sequence((), (5,))
        states = infer_all(local, joint, sequence, key)
        read = ("latent", "action", "is_first")
        unread = tuple(name for name in Record._fields if name not in read)
        other = with_junk(sequence, CONTEXT, CONTEXT, fields=unread)._replace(
            previous_latent=sequence.previous_latent, previous_action=sequence.previous_action
        )
        jax.tree.map(same, infer_all(local, joint, other, key), states)

    def test_gradients_flow_through_sampled_latents_and_no_further(self, key):
        local, joint = models()
        sequence = make_sequence((), (CONTEXT + 3,))
        weight = jnp.asarray(normals(BATCH, 1, AGENTS, SIZE_H))

        @jit
        def gradients(observation):
            def states(observation):
                record = sequence.record._replace(observation=observation)
                given = jax.tree.map(jnp.asarray, sequence._replace(record=record))
                found = inferred(local, joint, given, key)
                # One number for each record and agent: rows are apart anyway.
                return jnp.sum(weight * found.h, (0, 3)), jnp.sum(found.q[..., 0], (0, 3))

            return jax.jacrev(states)(observation)

        of_h, of_q = jax.device_get(gradients(jnp.asarray(sequence.record.observation)))
        # From here on `[record, agent, row, observed record, observing agent]`.
        of_h, of_q = np.any(of_h, axis=-1), np.any(of_q, axis=-1)
        assert not of_h[..., :CONTEXT, :].any() and not of_q[..., :CONTEXT, :].any()
        time = np.arange(LEARNING)
        for row, number in enumerate([time * 0, time >= 3]):
            is_same = number[:, None] == number[None, :]
            earlier = is_same & (time[None, :] < time[:, None])
            for found, expected in (
                (of_h, earlier),
                (of_q, earlier | np.eye(LEARNING, dtype=bool)),
            ):
                for agent in range(AGENTS):
                    same(found[:, agent, row, CONTEXT:, agent], expected)
                    assert not found[:, agent, row, :, 1 - agent].any()


class TestReinfer:
    @pytest.mark.parametrize("begin", [(5, 7), (7, 2), (CONTEXT, CONTEXT)])
    def test_what_came_before_a_start_never_was(self, begin, key):
        local, joint = models()
        sequence = make_sequence(*[(place,) for place in begin])
        roots = jax.device_get(reinfer_all(local, joint, sequence, key))
        junk = with_junk(sequence, *begin)
        other = jax.device_get(reinfer_all(local, joint, junk, key))
        same(other.s, roots.s)
        same(other.z, roots.z)
        for name, window in (("local", WINDOW), ("joint", DEBUG.joint.window)):
            one, two = getattr(other, name), getattr(roots, name)
            first = CONTEXT - window + 1
            for row, place in enumerate(begin):
                for a, b in zip(layers_of(one), layers_of(two), strict=True):
                    remembered = slice(max(place - first, 0), None)
                    same(a[row, :, remembered], b[row, :, remembered])

    def test_a_later_start_changes_nothing_but_the_work(self, key):
        """One row's reset decides for the batch how early inference begins."""
        local, joint = models()
        begins = [((5,), (7,)), ((5,), (0,)), ((5,), ())]
        roots = [reinfer_all(local, joint, make_sequence(*resets), key) for resets in begins]
        for other in roots[1:]:
            same(other.s[0], roots[0].s[0])
            same(other.z[0], roots[0].z[0])

    def test_states_follow_from_fresh_latents(self, key):
        local, joint = models()
        begin = (CONTEXT, CONTEXT + 3)
        sequence = make_sequence((begin[0],), (3, begin[1]))
        roots = jax.device_get(reinfer_all(local, joint, sequence, key))
        h = roots.s[..., :SIZE_H]
        q = posterior_by_hand(local, h, sequence.record.observation[:, CONTEXT:])
        times = np.arange(CONTEXT, LENGTH)
        same(roots.z, draw_each(q, key, times))
        same(roots.s[..., SIZE_H:], np.eye(CLASSES)[roots.z].reshape(*h.shape[:-1], -1))
        same(roots.episode, np.cumsum(sequence.record.is_first, axis=1)[:, CONTEXT:])
        assert roots.local.episode.shape[1] == WINDOW - 1 + LEARNING
        assert roots.joint.episode.shape[1] == DEBUG.joint.window - 1 + LEARNING
        same(roots.local.episode[:, WINDOW - 1 :], roots.episode)
        # From the last reset on, all is known of what the states were made of.
        latent = np.concatenate([sequence.record.latent[:, :CONTEXT], roots.z], axis=1)
        expected, history = jax.device_get(
            from_nothing(local, jax.device_get(shifted(sequence, latent)))
        )
        for row, first in enumerate(begin):
            length = LENGTH - first
            close(h[row, -length:], expected[row, -length:])
            for one, other in zip(layers_of(roots.local), layers_of(history), strict=True):
                close(one[row, :, -length:], other[row, :, -length:])

    def test_stored_latents_are_not_used(self, key):
        local, joint = models()
        sequence = make_sequence((), ())
        roots = reinfer_all(local, joint, sequence, key)

        def after(place, **changed):
            record = sequence.record
            fields = {name: leaf.copy() for name, leaf in record._asdict().items()}
            for name, value in changed.items():
                fields[name][:, place] = value
            return reinfer_all(local, joint, sequence._replace(record=Record(**fields)), key)

        same(after(slice(None), latent=0).s, roots.s)
        # What was seen in the context counts, and so does what was done.
        assert np.any(after(CONTEXT - 2, observation=3.0).s != roots.s)
        assert np.any(after(CONTEXT - 2, action=0).s != roots.s)
        before = sequence._replace(previous_latent=(sequence.previous_latent + 1) % CLASSES)
        assert np.any(reinfer_all(local, joint, before, key).local.keys[0] != roots.local.keys[0])


def test_half_precision_runs_through(key):
    """Without computing: loops refuse a memory that changes its type."""
    half = cast(models(), jnp.bfloat16)
    sequence = jax.tree.map(jnp.asarray, make_sequence((), ()))
    states = jax.eval_shape(infer_all, *half, sequence, key)
    roots = jax.eval_shape(reinfer_all, *half, sequence, key)
    assert {states.h.dtype, states.e.dtype, roots.s.dtype} == {jnp.dtype(jnp.bfloat16)}
    assert states.q.dtype == jnp.float32
    held = jax.tree.leaves((roots.local[:2], roots.joint[:2]))
    assert {leaf.dtype for leaf in held} == {jnp.dtype(jnp.bfloat16)}
