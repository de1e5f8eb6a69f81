"""Updates of MA-JEPA with the replay in host memory: for one that the accelerator cannot hold.

The host does what it does with a replay on the device: rows go in, views are drawn with the same
random keys, fresh latents come back. In between, views travel to the accelerator for each call.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Key

from .agent import Fresh, Learner, Majepa, Views
from .algorithm import Device, Experience, Metrics, Row, shapes_on, without_replay
from .compilation import COMPILER_OPTIONS
from .diagnostics import Totals
from .replay import Replay, insert, num_starts


class HostReplay:
    """The update of an algorithm whose learners have their replay on the device `host`."""

    def __init__(self, algorithm: Majepa, host: Device, device: Device) -> None:
        self._algorithm, self._host, self.device = algorithm, host, device
        self._insert = jax.jit(self._take_in, donate_argnums=0)
        self._draw = jax.jit(algorithm.draw)
        self._store = jax.jit(algorithm.store, donate_argnums=0)
        self._owe = jax.jit(algorithm.owe)
        self._learn = jax.jit(
            self._learn_wanted, donate_argnums=0, compiler_options=COMPILER_OPTIONS
        )
        self._add = jax.jit(functools.partial(jax.tree.map, jnp.add))
        self._report = jax.jit(algorithm.report)
        self._nothing: Totals | None = None

    def place(self, learner: Learner) -> Learner:
        """A learner with every part where it belongs."""
        replay = jax.device_put(learner.replay, self._host)
        return jax.device_put(without_replay(learner), self.device)._replace(replay=replay)

    def lowered(self, learner: Learner, key: Any) -> jax.stages.Lowered:
        """The program of a call, traced for arrays or their shapes."""
        views = self._shapes_of_views(learner.replay, key)
        return self._learn.lower(without_replay(learner), views, key)

    def __call__(
        self, state: Learner, data: Experience, key: Key[Array, ""]
    ) -> tuple[Learner, Metrics]:
        """What `Majepa.update` does."""
        replay, enough = self._insert(state.replay, jax.device_put(data.rows, self._host))
        learner, calls = self._owe(without_replay(state), data, jax.device_put(enough, self.device))
        if self._nothing is None:
            self._nothing = self._zero(learner, self._shapes_of_views(replay, key), key)
        totals = self._nothing
        for number in range(int(calls)):
            key_call = jax.random.fold_in(key, number)
            views = self._draw(replay, jax.device_put(key_call, self._host))
            learner, fresh, counted = self._learn(
                learner, jax.device_put(views, self.device), key_call
            )
            totals = self._add(totals, counted)
            replay = self._store(replay, views, jax.device_put(fresh, self._host))
        rows = jax.device_put(jnp.minimum(replay.inserted, replay.rows), self.device)
        metrics = self._report(learner, totals, calls, rows)
        return learner._replace(replay=replay), metrics

    def _take_in(self, replay: Replay, rows: Row) -> tuple[Replay, Bool[Array, ""]]:
        config = self._algorithm.config
        replay = insert(replay, rows, rows.kept)
        return replay, num_starts(replay, config.context, config.replay.learning) > 0

    def _learn_wanted(
        self, learner: Learner, views: Views, key: Key[Array, ""]
    ) -> tuple[Learner, Fresh, Totals]:
        return self._algorithm.learn(learner, views, key, jnp.asarray(True))

    def _shapes_of_views(self, replay: Replay, key: Any) -> Views:
        """As a call gets them: on the device."""
        return shapes_on(self.device, jax.eval_shape(self._draw, replay, key))

    def _zero(self, learner: Learner, views: Views, key: Key[Array, ""]) -> Totals:
        """What no call adds up to, on the device."""
        shapes = jax.eval_shape(self._learn, learner, views, key)[2]
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return jax.device_put(zeros, self.device)
