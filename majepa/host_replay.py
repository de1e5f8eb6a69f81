"""Updates of MA-JEPA with the replay in host memory: for one that the accelerator cannot hold.

The host does what it does with a replay on the device: rows go in, views are drawn with the same
random keys, fresh latents come back. In between, views travel to the accelerator for each call.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Key

from .agent import Fresh, Learner, Majepa, Views
from .algorithm import Device, Experience, Metrics, Row, without_replay
from .diagnostics import Totals
from .replay import Replay, insert, num_starts


class HostReplay:
    """The update of an algorithm whose learners have their replay on the device `host`."""

    def __init__(self, algorithm: Majepa, host: Device, device: Device) -> None:
        self._algorithm, self._host, self._device = algorithm, host, device
        self._insert = jax.jit(self._take_in, donate_argnums=0)
        self._draw = jax.jit(algorithm.draw)
        self._store = jax.jit(algorithm.store, donate_argnums=0)
        self._owe = jax.jit(algorithm.owe)
        self._learn = jax.jit(self._learn_and_count, donate_argnums=(0, 1))
        self._report = jax.jit(algorithm.report)

    def place(self, learner: Learner) -> Learner:
        """A learner with every part where it belongs."""
        replay = jax.device_put(learner.replay, self._host)
        return jax.device_put(without_replay(learner), self._device)._replace(replay=replay)

    def compiled(self, learner: Learner, key: Key[Array, ""]) -> jax.stages.Compiled:
        """The program of a call, made ahead."""
        totals, views = self._shapes(learner, key)
        return self._learn.lower(without_replay(learner), totals, views, key).compile()

    def __call__(
        self, state: Learner, data: Experience, key: Key[Array, ""]
    ) -> tuple[Learner, Metrics]:
        """What `Majepa.update` does."""
        replay, enough = self._insert(state.replay, jax.device_put(data.rows, self._host))
        learner, calls = self._owe(
            without_replay(state), data, jax.device_put(enough, self._device)
        )
        totals = jax.tree.map(
            lambda leaf: jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), self._device),
            self._shapes(state._replace(replay=replay), key)[0],
        )
        for number in range(int(calls)):
            key_call = jax.random.fold_in(key, number)
            views = self._draw(replay, jax.device_put(key_call, self._host))
            learner, totals, fresh = self._learn(
                learner, totals, jax.device_put(views, self._device), key_call
            )
            replay = self._store(replay, views, jax.device_put(fresh, self._host))
        rows = jax.device_put(jnp.minimum(replay.inserted, replay.rows), self._device)
        metrics = self._report(learner, totals, calls, rows)
        return learner._replace(replay=replay), metrics

    def _take_in(self, replay: Replay, rows: Row) -> tuple[Replay, Bool[Array, ""]]:
        config = self._algorithm.config
        replay = insert(replay, rows, rows.kept)
        return replay, num_starts(replay, config.context, config.replay.learning) > 0

    def _learn_and_count(
        self, learner: Learner, totals: Totals, views: Views, key: Key[Array, ""]
    ) -> tuple[Learner, Totals, Fresh]:
        learner, fresh, counted = self._algorithm.learn(learner, views, key, jnp.asarray(True))
        return learner, jax.tree.map(jnp.add, totals, counted), fresh

    def _shapes(self, learner: Learner, key: Key[Array, ""]) -> tuple[Any, Any]:
        """Of what a call adds up and of the views that it gets."""
        views = jax.eval_shape(self._draw, learner.replay, key)
        totals = jax.eval_shape(
            self._algorithm.learn, without_replay(learner), views, key,
            jax.ShapeDtypeStruct((), bool),
        )[2]  # fmt: skip
        return totals, views
