"""Transformers against a slow one in NumPy, and what may and may not influence what."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn, jit
from lowering import broadcasts_to, lower_for_gpus

from majepa.nn import transformer
from majepa.nn.attention import attention_weights, drop, heads_of, kept, rotate, turns
from majepa.nn.layers import Biased, cast
from majepa.nn.transformer import (
    AgentAttention,
    Block,
    DropoutKeys,
    History,
    TemporalTransformer,
    apart,
    blocks_of,
    teams_together,
)

BATCH, AGENTS, LENGTH, WIDTH, HEADS = 2, 2, 20, 8, 2


class Kind(NamedTuple):
    layers: int
    window: int

    @property
    def reach(self) -> int:
        """Records that an output may look back on."""
        return self.layers * (self.window - 1)


LOCAL, JOINT, ONE_LAYER = Kind(2, 7), Kind(4, 3), Kind(1, 6)
kinds = pytest.mark.parametrize("kind", [LOCAL, JOINT])


def normals(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


@functools.cache
def temporal(kind: Kind) -> TemporalTransformer:
    """With dropout, which nothing is to notice without a key."""
    key = jax.random.key(0)
    return drawn(
        lambda: TemporalTransformer(kind.layers, WIDTH, HEADS, kind.window, dropout=0.1, key=key)
    )


@functools.cache
def among_agents() -> AgentAttention:
    return drawn(lambda: AgentAttention(2, WIDTH, HEADS, dropout=0.1, key=jax.random.key(0)))


@jit
def at_once(model, x, episode, past, key=None):
    return model(x, episode, past, key=key)


def step_by_step(model, x, episode, past):
    """The same records, each with the memory that the one before it left."""

    def step(past: History, row):
        x, episode = row
        out, history = model(x[:, :, None], episode[:, None], past)
        return history.last(model.window - 1), out[:, :, 0]

    past, out = jax.lax.scan(step, past, (jnp.moveaxis(x, 2, 0), episode.T))
    return jnp.moveaxis(out, 0, 2), past


one_by_one = jit(step_by_step)


@jit
def attend(model, x, present, key=None):
    return model(x, present, key=key)


def empty(kind: Kind) -> History:
    return jax.device_get(temporal(kind).empty(BATCH, AGENTS))


def records(seed: int = 0) -> np.ndarray:
    return normals(BATCH, AGENTS, LENGTH, WIDTH, seed=seed)


def episodes(*resets: tuple[int, ...]) -> np.ndarray:
    """Episode numbers of records, given where each row begins anew."""
    is_first = np.zeros((len(resets), LENGTH), np.int32)
    for row, places in enumerate(resets):
        is_first[row, list(places)] = 1
    return np.cumsum(is_first, axis=1, dtype=np.int32)


UNBROKEN = episodes((), ())
RESETS = [UNBROKEN, episodes((0, 9), (4, 5, 17)), episodes((1, 2, 3), (8, 19))]


def close(one, other, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def block_by_hand(block: Block, x: np.ndarray, attention) -> np.ndarray:
    """One layer on `[T D]`; `attention` gives the weights `[H T S]` from queries and keys."""

    def norm(x, gain):
        return gain * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-4)

    def linear(layer, x):
        return x @ layer.weight + layer.bias

    parts = linear(block.query_key_value, norm(x, block.norm_attention.gain))
    query, key, value = (
        part.reshape(len(x), HEADS, -1).swapaxes(0, 1) for part in np.split(parts, 3, axis=-1)
    )
    mixed = attention(query, key) @ value
    x = x + linear(block.out, mixed.swapaxes(0, 1).reshape(len(x), -1))
    wide = linear(block.widen, norm(x, block.norm_feed.gain))
    return x + linear(block.narrow, wide / (1 + np.exp(-wide)))


def softmax(scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
    weight = np.where(mask, np.exp(scores), 0.0)
    return weight / weight.sum(-1, keepdims=True)


def layers_of(model) -> list[Block]:
    doubles = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), model.layers)
    count = doubles.norm_attention.gain.shape[0]
    return [jax.tree.map(lambda leaf, index=index: leaf[index], doubles) for index in range(count)]


def turned(x: np.ndarray) -> np.ndarray:
    """Rotary positions as products of complex numbers, on `[H T K]`."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] / 10_000.0 ** (np.arange(half) / half)
    both = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([both.real, both.imag], axis=-1)


class TestAgainstNumPy:
    @kinds
    def test_time(self, kind):
        model, x, episode = temporal(kind), records(), RESETS[1]
        out, _ = at_once(model, x, episode, empty(kind))
        place = np.arange(LENGTH)
        distance = place[:, None] - place[None, :]
        for row in range(BATCH):
            number = np.asarray(episode[row])
            mask = (distance >= 0) & (distance < kind.window) & (number[:, None] == number)

            def attention(query, key, mask=mask):
                scores = turned(query) @ turned(key).swapaxes(1, 2)
                return softmax(scores / np.sqrt(WIDTH / HEADS), mask)

            y = np.asarray(x[row, 1], np.float64)
            for block in layers_of(model):
                y = block_by_hand(block, y, attention)
            y = np.asarray(model.norm.gain) * y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-4)
            close(out[row, 1], y, 1e-4)

    def test_agents(self):
        model, x = among_agents(), normals(3, 4, WIDTH)
        present = np.array([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]], bool)
        out = attend(model, x, jnp.asarray(present))
        for row in range(3):
            mask = present[row][None, :] | np.eye(4, dtype=bool)

            def attention(query, key, mask=mask):
                return softmax(query @ key.swapaxes(1, 2) / np.sqrt(WIDTH / HEADS), mask)

            y = np.asarray(x[row], np.float64)
            for block in layers_of(model):
                y = block_by_hand(block, y, attention)
            close(out[row], y, 1e-4)


def blocks_at_once(blocks, x, mask, turn):
    """Layers on `[... T D]` that add each bias where it belongs."""
    for block in blocks:
        query, key, value = heads_of(block.query_key_value(block.norm_attention(x)), HEADS)
        if turn is not None:
            query, key = rotate(query, turn), rotate(key, turn)
        mixed = jnp.einsum("...hts,...shk->...thk", attention_weights(query, key, mask), value)
        x = x + block.out(mixed.reshape(x.shape))
        x = x + block.narrow(jax.nn.silu(block.widen(block.norm_feed(x))))
    return x


class TestBiases:
    """They travel beside what they add to, and give what they give where they belong."""

    @pytest.fixture(autouse=True)
    def as_if_rows_were_many(self, monkeypatch):
        monkeypatch.setattr(transformer, "LEAST_ROWS", 1)

    def test_they_wait_where_rows_are_many(self, monkeypatch):
        x, present = jnp.asarray(normals(3, 4, WIDTH)), jnp.ones((3, 4), bool)
        for least, waits in ((12, True), (13, False)):
            monkeypatch.setattr(transformer, "LEAST_ROWS", least)
            found = among_agents().with_bias_apart(x, present)
            assert (found.bias is not None) == waits
            close(found.whole(), among_agents()(x, present))

    @kinds
    def test_over_time(self, kind):
        model, episode, place = temporal(kind), jnp.asarray(RESETS[1]), jnp.arange(LENGTH)
        distance = place[:, None] - place[None, :]
        mask = (distance >= 0) & (distance < kind.window)
        mask = (mask[None] & (episode[:, :, None] == episode[:, None, :]))[:, None]

        def at_once(model, x):
            x = blocks_at_once(blocks_of(model.layers), x, mask, turns(place, WIDTH // HEADS))
            return model.norm(x)

        past = empty(kind)
        self.compare(model, records(), at_once, lambda model, x: model(x, episode, past)[0])

    def test_of_chunks(self):
        """Of which upper layers take fewer."""
        model, x = temporal(JOINT), jnp.asarray(normals(BATCH, 10, AGENTS, 2, WIDTH))
        episode, past = jnp.ones((BATCH, 10, 2), jnp.int32), empty(JOINT)

        def remembered(model, x):
            y, history = model.recall(x, episode, 3, outputs=True)
            return y, history.keys, history.values

        def at_once(model, x):
            x = jnp.moveaxis(x, 1, 2).reshape(BATCH, AGENTS, 20, WIDTH)
            y, history = model(x, episode.reshape(BATCH, 20), past)
            y = jnp.moveaxis(y.reshape(BATCH, AGENTS, 10, 2, WIDTH), 2, 1)
            return y, history.last(3).keys, history.last(3).values

        self.compare(model, x, at_once, remembered)

    def test_among_agents(self):
        mask = jnp.ones((3, 4, 4), bool)
        self.compare(
            among_agents(), normals(3, 4, WIDTH),
            lambda model, x: blocks_at_once(blocks_of(model.layers), x, mask, None),
            lambda model, x: model(x, jnp.ones((3, 4), bool)),
        )  # fmt: skip

    def test_for_a_norm_that_adds_the_last_one(self):
        norm, present = temporal(LOCAL).norm, jnp.ones((3, 4), bool)
        self.compare(
            among_agents(), normals(3, 4, WIDTH),
            lambda model, x: norm(model(x, present)),
            lambda model, x: norm(*model.with_bias_apart(x, present)),
        )  # fmt: skip

    def test_where_something_is_dropped_they_are_added_at_once(self, key):
        block = jax.tree.map(lambda leaf: leaf[0], among_agents().layers)
        x, mixed = (jnp.asarray(normals(3, 4, WIDTH, seed=seed)) for seed in range(2))
        waiting = Biased(x, jnp.asarray(normals(WIDTH, seed=2)))
        keys = DropoutKeys(attended=key, fed=key)
        found = block.finish(waiting, mixed, keys)
        assert found.bias is None
        close(found.x, block.finish(Biased(waiting.whole()), mixed, keys).x)
        keep = kept(key, block.dropout, x.shape)
        middle = waiting.whole() + drop(block.out(mixed), block.dropout, keep)
        fed = block.narrow(jax.nn.silu(block.widen(block.norm_feed(middle))))
        close(found.x, middle + drop(fed, block.dropout, keep))

    def compare(self, model, x, plain, run):
        """Values and gradients of everything."""

        @functools.partial(jit, static_argnums=0)
        def both(run, model, x):
            def weighted(model, x):
                found = run(model, x)
                weight = jax.tree.map(lambda leaf: jnp.asarray(normals(*leaf.shape)), found)
                return sum(map(jnp.vdot, *map(jax.tree.leaves, (found, weight)))), found

            return jax.grad(weighted, (0, 1), has_aux=True)(model, x)

        pairs = zip(*(jax.tree.leaves(both(each, model, x)) for each in (run, plain)), strict=True)
        for one, other in pairs:
            close(one, other, 1e-5 * max(1.0, np.abs(other).max()))


class TestCache:
    @kinds
    @pytest.mark.parametrize("episode", RESETS)
    def test_one_by_one_equals_at_once(self, kind, episode):
        assert 2 * kind.window < LENGTH
        model, x = temporal(kind), records()
        whole, history = at_once(model, x, episode, empty(kind))
        steps, past = one_by_one(model, x, episode, empty(kind))
        close(steps, whole)
        jax.tree.map(close, past, history.last(kind.window - 1))

    @kinds
    def test_at_random_resets(self, kind):
        model = temporal(kind)
        for seed in range(5):
            is_first = np.random.default_rng(seed).random((BATCH, LENGTH)) < 0.2
            episode, x = np.cumsum(is_first, axis=1, dtype=np.int32), records(seed)
            whole, _ = at_once(model, x, episode, empty(kind))
            close(one_by_one(model, x, episode, empty(kind))[0], whole)

    def test_a_past_longer_than_the_window_is_no_different(self):
        model, x, episode = temporal(LOCAL), records(), RESETS[1]
        whole, history = jax.device_get(at_once(model, x, episode, empty(LOCAL)))
        assert history.episode.shape[1] == LENGTH + LOCAL.window - 1
        end = LOCAL.window - 1 + 12
        keys, values = (tuple(leaf[:, :, :end] for leaf in leaves) for leaves in history[:2])
        past = History(keys, values, history.episode[:, :end])
        rest, again = at_once(model, x[:, :, 12:], episode[:, 12:], past)
        close(rest, whole[:, :, 12:])
        jax.tree.map(close, again, history)

    @kinds
    def test_an_empty_memory_has_no_influence(self, kind):
        model, x = temporal(kind), records()
        past = empty(kind)
        junk = past._replace(
            keys=tuple(normals(*leaf.shape, scale=30.0) for leaf in past.keys),
            values=tuple(normals(*leaf.shape, seed=1) for leaf in past.values),
        )
        for episode in RESETS[:2]:
            same = [at_once(model, x, episode, one)[0] for one in (past, junk)]
            np.testing.assert_array_equal(*same)

    def test_ending_at_cuts_out_windows(self):
        _, history = at_once(temporal(LOCAL), records(), RESETS[0], empty(LOCAL))
        history = history.last(LENGTH)
        row, last, length = [0, 1, 1, 0], [19, 9, 2, 0], 5
        ending_at = jit(History.ending_at, static_argnums=3)
        history, cut = jax.device_get(
            (history, ending_at(history, jnp.array(row), jnp.array(last), length))
        )
        for index, (r, end) in enumerate(zip(row, last, strict=True)):
            begin = max(end - length + 1, 0)
            found = end + 1 - begin
            both = [(*one.keys, *one.values) for one in (cut, history)]
            for leaf, whole in zip(*both, strict=True):
                assert leaf.shape == (4, AGENTS, length, HEADS, WIDTH // HEADS)
                np.testing.assert_array_equal(
                    leaf[index, :, length - found :], whole[r, :, begin : end + 1]
                )
            episode = np.full(length, -1)
            episode[length - found :] = history.episode[r, begin : end + 1]
            np.testing.assert_array_equal(cut.episode[index], episode)


@functools.partial(jit, static_argnames=("last", "outputs"))
def recalled(model, x, episode, last, *, outputs):
    return model.recall(x, episode, last, outputs=outputs)


class TestRecall:
    """Known records in chunks, against all of them at once."""

    LENGTH = 24
    EPISODE = np.cumsum(np.eye(24)[[5, 17]] + np.eye(24)[[0, 6]], axis=1).astype(np.int32)

    def chunks(self, leaf, size: int, axis: int):
        """`[B, C, ...]` with time where it was, behind."""
        parts = leaf.shape[axis] // size
        return np.stack(np.split(np.asarray(leaf), parts, axis), axis=1)

    @pytest.mark.parametrize("outputs", [True, False])
    @pytest.mark.parametrize(
        ("kind", "size"), [(LOCAL, 6), (LOCAL, 24), (JOINT, 2), (JOINT, 8), (Kind(2, 1), 4)]
    )
    def test_it_equals_one_run(self, kind, size, outputs):
        model, x = temporal(kind), normals(BATCH, AGENTS, self.LENGTH, WIDTH)
        y, whole = at_once(model, x, self.EPISODE, model.empty(BATCH, AGENTS))
        given = (self.chunks(x, size, 2), self.chunks(self.EPISODE, size, 1))
        for last in (kind.window - 1, kind.window + 4):
            found, history = recalled(model, *given, last, outputs=outputs)
            for one, other in zip(history, whole.last(last), strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
            if outputs:
                np.testing.assert_allclose(found, self.chunks(y, size, 2), rtol=0, atol=1e-5)
            else:
                assert found is None

    @pytest.mark.parametrize(("last", "read"), [(2, 8), (3, 9), (6, 12)])
    def test_what_nobody_looks_back_on_is_not_read(self, last, read):
        """Four layers of two records before each: what the last ones know of the others."""
        model, x = temporal(JOINT), normals(BATCH, AGENTS, self.LENGTH, WIDTH)
        x[:, :, : self.LENGTH - read - read % 2] = np.nan
        x, episode = self.chunks(x, 2, 2), np.ones((BATCH, 12, 2), np.int32)
        _, history = recalled(model, x, episode, last, outputs=False)
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(history))
        x[:, 12 - (read + 1) // 2] = np.nan
        _, history = recalled(model, x, episode, last, outputs=False)
        assert not all(np.all(np.isfinite(leaf)) for leaf in history.keys)


class TestInfluence:
    @pytest.mark.parametrize("kind", [ONE_LAYER, LOCAL, JOINT])
    @pytest.mark.parametrize("episode", RESETS[:2])
    def test_a_record_reaches_exactly_its_window(self, kind, episode):
        """Backwards nothing, forwards `layers * (window - 1)` records of its own episode."""
        model, x = temporal(kind), records()
        before = np.asarray(at_once(model, x, episode, empty(kind))[0])
        number = np.asarray(episode)
        for place in range(LENGTH):
            disturbed = x.copy()
            disturbed[:, :, place] += normals(BATCH, AGENTS, WIDTH, seed=9)
            after = at_once(model, disturbed, episode, empty(kind))[0]
            changed = (np.asarray(after) != before).any(-1)
            distance = np.arange(LENGTH) - place
            expected = (distance >= 0) & (distance <= kind.reach)
            expected = expected & (number == number[:, place, None])
            np.testing.assert_array_equal(changed, np.repeat(expected[:, None], AGENTS, axis=1))

    @kinds
    def test_agents_and_rows_are_apart(self, kind):
        model, x = temporal(kind), records()
        disturbed = x.copy()
        disturbed[0, 1] += 1.0
        before, after = (
            np.asarray(at_once(model, one, UNBROKEN, empty(kind))[0]) for one in (x, disturbed)
        )
        changed = (after != before).any(axis=(2, 3))
        np.testing.assert_array_equal(changed, [[False, True], [False, False]])

    @kinds
    def test_after_a_reset_the_past_never_was(self, kind):
        model, x, begin = temporal(kind), records(), 12
        episode = episodes((3, begin), (begin,))
        mixed = np.asarray(at_once(model, x, episode, empty(kind))[0])[:, :, begin:]
        # Alone: the records of the new episode first; what follows them cannot matter.
        rest = LENGTH - begin
        alone, _ = at_once(model, np.roll(x, rest, axis=2), episodes((), (rest,)), empty(kind))
        close(mixed, np.asarray(alone)[:, :, :rest])
        # Beside other records and other resets: the same bits.
        other = x.copy()
        other[:, :, :begin] = 100 * records(5)[:, :, :begin]
        again = at_once(model, other, episodes((begin,), (5, 8, begin)), empty(kind))[0]
        np.testing.assert_array_equal(np.asarray(again)[:, :, begin:], mixed)

    def test_gradients_stop_at_a_reset_and_at_the_future(self):
        model, x, episode = temporal(JOINT), records(), jnp.asarray(episodes((12,), (12,)))
        weight = jnp.asarray(records(3))
        late = (jnp.arange(LENGTH) >= 14)[None, None, :, None]

        @jit
        def gradients(x, past):
            def early_and_late(x, keys, values):
                past_ = past._replace(keys=keys, values=values)
                weighted = model(x, episode, past_)[0] * weight
                return jnp.sum(jnp.where(late, 0, weighted)), jnp.sum(jnp.where(late, weighted, 0))

            return jax.jacrev(early_and_late, (0, 1, 2))(x, past.keys, past.values)

        of_early, of_late = jax.device_get(gradients(x, empty(JOINT)))
        for gradient in jax.tree.leaves((of_early, of_late)):
            assert np.isfinite(gradient).all()
        assert not np.any(of_late[0][:, :, :12]) and np.any(of_late[0][:, :, 12:], axis=-1).all()
        assert not np.any(of_early[0][:, :, 14:]) and np.any(of_early[0][:, :, :14], axis=-1).all()
        # Nothing was there before the first record.
        of_past = jax.tree.leaves((of_early[1:], of_late[1:]))
        assert not any(np.any(gradient) for gradient in of_past)


class TestBranches:
    STEPS = 5

    @staticmethod
    @functools.cache
    def runner():
        @jit
        def run(model, x, history, last, episode):
            """Steps `[P, B, N, R, D]` of all roots, on shared keys and values."""
            trunk, room = model.fork(history, last.shape[0], x.shape[0])

            def step(room, given):
                k, x = given
                out, room = model.branch(x, trunk, last, episode, room, k)
                return room, out

            return jax.lax.scan(step, room, (jnp.arange(x.shape[0]), x))[1]

        return run

    @staticmethod
    @functools.cache
    def copier():
        @jit
        def run(model, x, history, last, episode):
            """The same with a memory of its own for every root."""
            steps, batch, agents, roots, width = x.shape
            row = jnp.repeat(jnp.arange(batch), roots)
            past = history.ending_at(row, jnp.tile(last, batch), model.window - 1)
            flat = jnp.transpose(x, (1, 3, 2, 0, 4)).reshape(batch * roots, agents, steps, width)
            number = jnp.repeat(episode.reshape(-1, 1), steps, axis=1)
            out, _ = step_by_step(model, flat, number, past)
            out = out.reshape(batch, roots, agents, steps, width)
            return jnp.transpose(out, (3, 0, 2, 1, 4))

        return run

    @kinds
    @pytest.mark.parametrize("resets", RESETS)
    def test_shared_keys_equal_copied_caches(self, kind, resets):
        """Roots from the last record before the sequence on, some of them just before a reset."""
        assert JOINT.window < self.STEPS
        model = temporal(kind)
        _, history = at_once(model, records(), resets, empty(kind))
        # Root `r` continues what ends with record `r - 1`, in the episode of record `r`.
        last = kind.window - 2 + np.arange(LENGTH)
        x = normals(self.STEPS, BATCH, AGENTS, LENGTH, WIDTH, seed=4)
        shared = self.runner()(model, x, history, last, resets)
        close(shared, self.copier()(model, x, history, last, resets))

    @kinds
    def test_imagining_what_was_recorded_gives_what_was_recorded(self, kind):
        model, x, episode = temporal(kind), records(), RESETS[1]
        whole, history = at_once(model, x, episode, empty(kind))
        root = np.arange(LENGTH)
        follow = root[None, :] + 1 + np.arange(self.STEPS)[:, None]
        inside = np.minimum(follow, LENGTH - 1)
        ahead, expected = (np.moveaxis(np.asarray(y)[:, :, inside], 2, 0) for y in (x, whole))
        out = self.runner()(model, ahead, history, kind.window - 1 + root, episode)
        same = (follow < LENGTH)[None] & (episode[:, inside] == episode[:, None])
        assert 0 < same.sum() < same.size
        same = np.moveaxis(same, 1, 0)[:, :, None, :, None]
        close(np.where(same, out, 0.0), np.where(same, expected, 0.0))

    @kinds
    def test_what_was_never_written_is_not_read(self, kind):
        """Room for imagined records begins with anything, even with what is no number."""
        model, last = temporal(kind), kind.window - 2 + jnp.arange(LENGTH)
        x = normals(self.STEPS, BATCH, AGENTS, LENGTH, WIDTH, seed=4)
        episode = jnp.asarray(RESETS[0])
        _, history = at_once(model, records(), episode, empty(kind))

        @jit
        def run(x, history, there):
            trunk, room = model.fork(history, LENGTH, self.STEPS)
            room = jax.tree.map(lambda leaf: jnp.full_like(leaf, there), room)

            def step(room, given):
                out, room = model.branch(given[1], trunk, last, episode, room, given[0])
                return room, out

            return jax.lax.scan(step, room, (jnp.arange(self.STEPS), x))[1]

        expected = run(x, history, 0.0)
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(run(x, history, jnp.nan), expected)

    def test_several_runs_have_rooms_of_their_own(self):
        """One for all of them would be copied."""
        model, runs = temporal(LOCAL), 3

        @jax.vmap
        def rooms(history):
            return model.fork(history, LENGTH, self.STEPS)[1]

        history = jax.tree.map(lambda leaf: jnp.stack([leaf] * runs), empty(LOCAL))
        shape = (runs, BATCH, AGENTS, HEADS, LENGTH, self.STEPS, WIDTH // HEADS)
        assert {leaf.shape for leaf in jax.tree.leaves(rooms(history))} == {shape}
        lowered = lower_for_gpus(rooms, history)
        assert "x".join(map(str, shape)) in lowered
        assert not broadcasts_to(shape, lowered)

    def test_roots_do_not_see_each_other(self):
        model, episode = temporal(LOCAL), RESETS[1]
        _, history = at_once(model, records(), episode, empty(LOCAL))
        last = LOCAL.window - 2 + np.arange(LENGTH)
        x = normals(self.STEPS, BATCH, AGENTS, LENGTH, WIDTH, seed=4)
        disturbed = x.copy()
        disturbed[1, :, :, 6] += 1.0
        before, after = (
            np.asarray(self.runner()(model, one, history, last, episode)) for one in (x, disturbed)
        )
        changed = (after != before).any(axis=(1, 2, 4))
        expected = np.zeros((self.STEPS, LENGTH), bool)
        expected[1:, 6] = True
        np.testing.assert_array_equal(changed, expected)


class TestApart:
    """Layers that are held apart are the layers of the stack."""

    def test_of_time(self):
        model, x = temporal(LOCAL), jnp.asarray(normals(2, 3, 6, WIDTH))
        episode, past = jnp.zeros((2, 6), jnp.int32), model.empty(2, 3)
        self.compare(model, lambda model: model(x, episode, past)[0])
        for one, other in zip(past, apart(model).empty(2, 3), strict=True):
            np.testing.assert_array_equal(one, other)

    def test_of_agents(self):
        x, present = jnp.asarray(normals(4, 4, WIDTH)), jnp.ones((4, 4), bool)
        self.compare(among_agents(), lambda model: model(x, present))

    def compare(self, model, run):
        def total(split):
            return lambda model: jnp.sum(run(split(model)) ** 2)

        (value, gradient), (expected, expected_gradient) = (
            jit(jax.value_and_grad(total(split)))(model) for split in (apart, lambda model: model)
        )
        close(value, expected)
        for one, other in zip(*map(jax.tree.leaves, (gradient, expected_gradient)), strict=True):
            close(one, other)


class TestAgents:
    PRESENT = np.array([[1, 1, 1, 1], [1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]], bool)

    def test_an_order_of_agents_is_an_order_of_outputs(self):
        x, present = normals(4, 4, WIDTH), self.PRESENT
        out = np.asarray(attend(among_agents(), x, present))
        for order in ([3, 1, 0, 2], [1, 2, 3, 0]):
            close(attend(among_agents(), x[:, order], present[:, order]), out[:, order])

    def test_only_the_present_are_seen(self):
        x, present = normals(4, 4, WIDTH), self.PRESENT
        out = np.asarray(attend(among_agents(), x, present))
        for agent in range(4):
            disturbed = x.copy()
            disturbed[:, agent] += normals(4, WIDTH, seed=1)
            changed = (np.asarray(attend(among_agents(), disturbed, present)) != out).any(-1)
            expected = np.repeat(present[:, agent, None], 4, axis=1)
            expected[:, agent] = True
            np.testing.assert_array_equal(changed, expected)

    def test_padding_with_absent_agents_changes_nothing(self):
        """And leading axes are batches."""
        x, present = normals(4, 4, WIDTH), self.PRESENT
        wide = np.concatenate([x, normals(4, 2, WIDTH, seed=1, scale=10.0)], axis=1)
        there = np.pad(present, ((0, 0), (0, 2)))
        out = attend(among_agents(), wide.reshape(2, 2, 6, WIDTH), there.reshape(2, 2, 6))
        out = np.asarray(out).reshape(4, 6, WIDTH)
        close(out[:, :4], attend(among_agents(), x, present))

    @pytest.mark.parametrize("teams", [1, 3, 12, 32])
    def test_teams_at_once_are_as_each_by_itself(self, teams):
        """Whatever number of them shares a sequence, and so with their gradients."""
        x, weight = normals(teams, 4, WIDTH), normals(teams, 4, WIDTH, seed=1)
        present = np.random.default_rng(2).random((teams, 4)) < 0.7

        @jit
        def together(model, x, present):
            return jax.value_and_grad(lambda x: jnp.sum(model(x, present) * weight))(x)

        @jit
        def apart(model, x, present):
            def one(x, present, weight):
                return jax.value_and_grad(lambda x: jnp.sum(model(x, present) * weight))(x)

            values, gradients = jax.lax.map(lambda team: one(*team), (x, present, weight))
            return values.sum(), gradients

        value, gradient = together(among_agents(), x, present)
        expected, expected_gradient = apart(among_agents(), x, present)
        close(value, expected)
        close(gradient, expected_gradient)

    def test_as_many_teams_share_a_sequence_as_fit_and_divide_them(self):
        assert [teams_together(64, agents) for agents in (1, 2, 5, 8, 10, 27, 64, 100)] == [
            32, 16, 4, 4, 2, 1, 1, 1,
        ]  # fmt: skip
        assert [teams_together(teams, 5) for teams in (1, 2, 3, 12, 63, 1008)] == [1, 2, 3, 6, 3, 6]

    def test_absent_teams_stay_finite(self):
        @jit
        def value_and_gradient(model, x):
            absent = jnp.zeros(x.shape[:-1], bool)
            return jax.value_and_grad(lambda m, x: jnp.sum(m(x, absent) ** 2), (0, 1))(model, x)

        value, gradients = value_and_gradient(among_agents(), normals(4, 4, WIDTH))
        assert np.isfinite(value)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
        assert np.any(gradients[1])


class TestDropout:
    def test_it_keeps_the_expectation(self, key):
        x = jnp.full((100, 1000), 2.0)
        dropped = np.asarray(jit(lambda x, key: drop(x, 0.1, kept(key, 0.1, x.shape)))(x, key))
        left = dropped != 0
        np.testing.assert_allclose(dropped[left], 2 / 0.9, rtol=1e-6)
        np.testing.assert_allclose(left.mean(), 0.9, atol=0.005)
        np.testing.assert_allclose(dropped.mean(), 2, atol=0.01)

    def test_no_key_or_no_rate_drops_nothing(self, key):
        x = jnp.asarray(normals(3, 4))
        assert drop(x, 0.5, kept(None, 0.5, x.shape)) is x
        assert drop(x, 0.0, kept(key, 0.0, x.shape)) is x

    def test_a_key_switches_it_on_over_time(self):
        model, x, past = temporal(JOINT), records(), empty(JOINT)
        outs = [
            np.asarray(at_once(model, x, UNBROKEN, past, key)[0])
            for key in (None, *map(jax.random.key, (0, 1, 0)))
        ]
        np.testing.assert_array_equal(outs[3], outs[1])
        for one, other in ((0, 1), (0, 2), (1, 2)):
            assert np.any(outs[one] != outs[other], axis=-1).all()

    def test_a_key_switches_it_on_among_agents(self, key):
        x, present = normals(4, 4, WIDTH), np.ones((4, 4), bool)
        certain, noisy = (
            np.asarray(attend(among_agents(), x, present, one)) for one in (None, key)
        )
        assert np.any(noisy != certain, axis=-1).all()


class TestRotary:
    def test_products_depend_on_the_distance_alone(self):
        query, key = jnp.asarray(normals(3, 6)), jnp.asarray(normals(3, 6, seed=1))

        @jit
        def product(here, there):
            return jnp.sum(rotate(query, turns(here, 6)) * rotate(key, turns(there, 6)), axis=-1)

        def at(here, there):
            return np.asarray(product(np.int32(here), np.int32(there)))

        for distance in (0, 1, 5, 63):
            for there in (7, 200):
                close(at(there + distance, there), at(distance, 0), 1e-4)
        close(at(9, 9), np.sum(np.asarray(query) * np.asarray(key), axis=-1))
        assert np.all(np.abs(at(1, 0) - at(5, 0)) > 1e-3)
        assert np.all(np.abs(at(1, 0) - at(0, 1)) > 1e-3)

    def test_lengths_stay(self):
        x = normals(10, 2, 6)
        around = jit(lambda x: rotate(x, turns(jnp.arange(10), 6)))(x)
        close(np.linalg.norm(around, axis=-1), np.linalg.norm(x, axis=-1))
        np.testing.assert_array_equal(around[0], x[0])


def test_half_precision_stays_half_and_near():
    model, half = temporal(LOCAL), cast(temporal(LOCAL), jnp.bfloat16)
    past = half.empty(BATCH, AGENTS, jnp.bfloat16)
    x = jnp.asarray(records(), jnp.bfloat16)
    exact, _ = at_once(model, records(), RESETS[1], empty(LOCAL))
    out, history = at_once(half, x, RESETS[1], past)
    held = jax.tree.leaves((out, history.keys, history.values))
    assert {leaf.dtype for leaf in held} == {jnp.dtype(jnp.bfloat16)}
    error = np.asarray(out, np.float32) - np.asarray(exact)
    assert 0 < np.linalg.norm(error) < 0.03 * np.linalg.norm(exact)
