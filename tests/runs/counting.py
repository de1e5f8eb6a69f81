"""A world whose rows say where they are, and an algorithm whose numbers say what it saw.

`observation[t] = t` and `reward[t] = 10 * t`, counted from the first row of an episode. Environment
`b` plays episodes of `lengths[b % len(lengths)]` transitions. The last action of agent 0 is in the
state, so that the alignment of actions and rows can be read off.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from majepa.algorithm import Cadence, Decision, Experience
from majepa.envs.base import EnvSpec, TimeStep

AGENTS, ACTIONS, FEATURES = 2, 3, 4


class Where(NamedTuple):
    time: jax.Array
    length: jax.Array
    is_over: jax.Array
    total: jax.Array
    """Rows since the reset, first rows included; never reset."""
    last_action: jax.Array


@dataclasses.dataclass(frozen=True)
class CountingEnv:
    lengths: tuple[int, ...] = (3,)
    limit: int = 5
    """Episodes this long end by the clock; shorter ones end for a reason of their own."""
    nan_at: tuple[int, int, int] | None = None
    """Environment, agent and feature that is not a number from row 4 of the stream on."""
    stuck_at: tuple[int, int] | None = None
    """Environment and agent without a legal action from row 4 of the stream on."""

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(
            name="test:counting",
            num_agents=AGENTS,
            num_actions=ACTIONS,
            observation_size=FEATURES,
            state_size=2,
            agent_state_size=2,
            episode_limit=self.limit,
            action_names=("rest", "left", "right"),
            observation_names=("time", "time again", "own/health", "enemy_0/distance"),
            agent_names=("scout", "medic"),
            version="counting-1",
        )

    def reset(self, keys):
        batch = keys.shape[0]
        length = jnp.resize(jnp.asarray(self.lengths, jnp.int32), (batch,))
        zero = jnp.zeros(batch, jnp.int32)
        where = Where(zero, length, zero == 1, zero, zero)
        return where, self.row(where)

    def step(self, where, action):
        time = jnp.where(where.is_over, 0, where.time + 1)
        last = jnp.where(where.is_over, 0, action[:, 0])
        after = Where(time, where.length, time == where.length, where.total + 1, last)
        return after, self.row(after)

    def row(self, where):
        batch = where.time.shape[0]
        time = where.time.astype(jnp.float32)
        observation = jnp.tile(time[:, None, None], (1, AGENTS, FEATURES))
        legal = jnp.ones((batch, AGENTS, ACTIONS), bool)
        is_late = where.total >= 4
        if self.nan_at is not None:
            env, agent, feature = self.nan_at
            bad = jnp.where(is_late[env], jnp.nan, time[env])
            observation = observation.at[env, agent, feature].set(bad)
        if self.stuck_at is not None:
            env, agent = self.stuck_at
            legal = legal.at[env, agent].set(~is_late[env])
        state = jnp.stack([time, where.last_action.astype(jnp.float32)], axis=-1)
        is_timeout = where.time == self.limit
        return TimeStep(
            observation=observation,
            legal=legal,
            alive=jnp.ones((batch, AGENTS), bool),
            agent_state=jnp.tile(state[:, None, :], (1, AGENTS, 1)),
            state=state,
            reward=10 * time,
            is_first=where.time == 0,
            is_last=where.is_over,
            is_terminal=where.is_over & ~is_timeout,
            won=where.is_over & (where.length % 2 == 1),
            info={"total": where.total},
        )


class Learner(NamedTuple):
    weight: jax.Array
    half: jax.Array
    key: jax.Array
    updates: jax.Array


class Lottery(CountingEnv):
    """Environments whose episodes have the length that their key says."""

    def reset(self, keys):
        where, _ = super().reset(keys)
        draw = jax.vmap(lambda key: jax.random.randint(key, (), 1, self.limit + 1))
        where = where._replace(length=draw(keys))
        return where, self.row(where)


@dataclasses.dataclass(frozen=True)
class FakeAlgorithm:
    """Greedy agents take action 2, the others 0 or 1 by chance. Learning mixes data and chance."""

    num_envs: int = 3
    rows: int = 4
    timeout_is_terminal: bool = True
    nonfinite_from: int | None = None
    """Update from which on gradients are reported to be non-finite."""
    whole_episodes: bool = False

    @property
    def cadence(self) -> Cadence:
        return Cadence(self.num_envs, self.rows, self.whole_episodes)

    def init(self, key):
        return Learner(
            jax.random.normal(key, (4,)), jnp.full(3, 0.1, jnp.bfloat16), key, jnp.asarray(0)
        )

    def begin(self, num_envs):
        return {"seen": jnp.zeros(num_envs, jnp.int32)}

    def act(self, state, carry, step, key, *, greedy):
        shape = step.alive.shape
        chance = jax.random.randint(key, shape, 0, 2)
        action = jnp.full_like(chance, 2) if greedy else chance
        kept = step.observation[..., 0] + 0 * state.weight[0]
        return Decision(action, {"seen": carry["seen"] + 1}, kept)

    def update(self, state, data: Experience, key):
        noise = jax.random.normal(key, state.weight.shape)
        signal = jnp.mean(data.rows.action * 1.0) + jnp.mean(data.rows.step.reward)
        updates = state.updates + 1
        learner = Learner(
            state.weight * 0.9 + noise + signal,
            state.half + jnp.asarray(0.1, jnp.bfloat16),
            jax.random.fold_in(state.key, updates),
            updates,
        )
        is_bad = jnp.asarray(self.nonfinite_from is not None) & (
            updates > (self.nonfinite_from or 0)
        )
        return learner, {
            "loss/actor": jnp.where(is_bad, jnp.nan, signal),
            "not_measured": jnp.asarray(jnp.nan),
            "learner/calls": updates * 1.0,
            "nonfinite_in_a_row": jnp.where(is_bad, updates - (self.nonfinite_from or 0), 0) * 1.0,
        }
