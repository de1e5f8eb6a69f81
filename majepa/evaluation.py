"""How good a policy is: parallel fresh environments, one episode each, each counted once.

An episode's start and the chance in its world depend on the key and on its number alone, so that
every method meets the same ones. Training and evaluation share no keys.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from .algorithm import Algorithm
from .collect import Stream, begin, endless
from .compilation import EVALUATION_OPTIONS
from .envs.base import Env
from .stats import wilson

EVALUATION_SEED = 2_718_281
"""Of the episodes on which every method and every seed is judged."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Every episode of one evaluation."""

    won: Bool[np.ndarray, " E"]
    episode_return: Float[np.ndarray, " E"]
    length: Int[np.ndarray, " E"]
    """Transitions."""
    greedy: bool
    """Whether the agents took their most probable actions, or sampled."""

    @property
    def episodes(self) -> int:
        return len(self.won)

    @property
    def win_rate(self) -> float:
        return float(self.won.mean())

    @property
    def interval(self) -> tuple[float, float]:
        """In which the win rate lies with 95 % confidence."""
        return wilson(int(self.won.sum()), self.episodes)

    @property
    def mean_return(self) -> float:
        return float(self.episode_return.mean())


def evaluate(
    algorithm: Algorithm,
    env: Env,
    state: Any,
    *,
    episodes: int,
    key: Key[Array, ""],
    greedy: bool,
) -> Evaluation:
    """Play `episodes` episodes; argmax and sampled actions share one compiled program."""
    tally = jax.device_get(_play(algorithm, env, episodes, state, key, np.asarray(greedy)))
    if not tally.is_over.all():
        raise endless(env.spec, int((~tally.is_over).sum()), episodes)
    return Evaluation(tally.won, tally.episode_return, tally.length, greedy)


def evaluation_program(
    algorithm: Algorithm, env: Env, state: Any, *, episodes: int
) -> jax.stages.Lowered:
    """What `evaluate` runs, traced for a state that may be shapes alone."""
    # Shapes alone: making an array is a program too, which would wait for those being compiled.
    key, greedy = jax.eval_shape(lambda: (jax.random.key(EVALUATION_SEED), jnp.asarray(True)))
    return _play.lower(algorithm, env, episodes, state, key, greedy)


class _Tally(NamedTuple):
    """What the first episode of each environment came to so far."""

    won: Bool[Array, " E"]
    episode_return: Float[Array, " E"]
    length: Int[Array, " E"]
    is_over: Bool[Array, " E"]


@functools.partial(jax.jit, static_argnums=(0, 1, 2), compiler_options=EVALUATION_OPTIONS)
def _play(
    algorithm: Algorithm,
    env: Env,
    episodes: int,
    state: Any,
    key: Key[Array, ""],
    greedy: Bool[Array, ""],
) -> _Tally:
    key_env, key_act = jax.random.split(key)
    each = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    stream = begin(algorithm, env, each(key_env, jnp.arange(episodes)))

    def is_playing(play: tuple[Int[Array, ""], Stream, _Tally]) -> Bool[Array, ""]:
        row, _, tally = play
        return (row < env.spec.episode_limit) & ~jnp.all(tally.is_over)

    def advance(play: tuple[Int[Array, ""], Stream, _Tally]) -> tuple:
        row, stream, tally = play
        key = jax.random.fold_in(key_act, row)
        choice = jax.lax.cond(
            greedy,
            functools.partial(algorithm.act, greedy=True),
            functools.partial(algorithm.act, greedy=False),
            *(state, stream.carry, stream.step, key),
        )
        env_state, arrival = env.step(stream.env_state, choice.action)
        counts = ~tally.is_over
        tally = _Tally(
            tally.won | (counts & arrival.won),
            tally.episode_return + jnp.where(counts, arrival.reward, 0.0),
            tally.length + counts,
            tally.is_over | arrival.is_last,
        )
        return row + 1, Stream(env_state, arrival, choice.carry, stream.running_return), tally

    nobody = jnp.zeros(episodes, bool)
    tally = _Tally(nobody, jnp.zeros(episodes), jnp.zeros(episodes, jnp.int32), nobody)
    return jax.lax.while_loop(is_playing, advance, (jnp.zeros((), jnp.int32), stream, tally))[2]
