"""A cooperative world of one's own in thirty lines, and MAPPO on it.

Two agents see a signal, 1 or 2, and win if both take the action of that number.
"""

import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

import majepa
from majepa.envs import EnvSpec, TimeStep


class State(NamedTuple):
    key: jax.Array
    signal: jax.Array
    is_over: jax.Array


class Signal:
    spec = EnvSpec("toy:signal", 2, 3, 3, 1, 1, episode_limit=1)

    def reset(self, keys):
        key, draw = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
        signal = jax.vmap(lambda key: jax.random.randint(key, (), 1, 3))(draw)
        state = State(key, signal, jnp.zeros(len(keys), bool))
        return state, self._row(state, jnp.zeros(len(keys), bool))

    def step(self, state, action):
        won = (action == state.signal[:, None]).all(-1) & ~state.is_over
        over = state._replace(is_over=~state.is_over)
        fresh, _ = self.reset(state.key)
        begins = state.is_over
        key = jnp.where(begins, fresh.key, state.key)
        signal = jnp.where(begins, fresh.signal, state.signal)
        after = State(key, signal, over.is_over)
        return after, self._row(after, won)

    def _row(self, state, won):
        batch = len(won)
        seen = jax.nn.one_hot(state.signal, 3)[:, None].repeat(2, axis=1)
        everybody = jnp.ones((batch, 2), bool)
        return TimeStep(
            observation=seen, legal=jnp.ones((batch, 2, 3), bool), alive=everybody,
            agent_state=jnp.zeros((batch, 2, 1)), state=jnp.zeros((batch, 1)),
            reward=won.astype(jnp.float32), is_first=~state.is_over, is_last=state.is_over,
            is_terminal=state.is_over, won=won, info={},
        )  # fmt: skip


if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp()) / "signal"
    settings = {"algo.num_envs": 64, "algo.rollout": 20, "evaluation.every": 5_000}
    result = majepa.train("mappo", Signal(), steps=20_000, folder=folder, overrides=settings)
    print(f"both agree in {result.argmax.win_rate:.0%} of the rounds" if result.argmax else "")
