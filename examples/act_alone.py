"""Agents of a run in SMAC's own interface, each deciding from nothing but what it sees itself.

python examples/act_alone.py runs/majepa-3m-0-1
"""

import sys
from pathlib import Path

import jax
import numpy as np

import majepa
from majepa.envs import StarCraft2Env


def main(run: Path, episodes: int = 1) -> list[bool]:
    policy = majepa.load(run)
    env = StarCraft2Env(map_name=policy.config.env.removeprefix("sim:"), seed=3)
    wins = []
    for episode in range(episodes):
        env.reset()
        states = [policy.begin(agent) for agent in range(env.n_agents)]
        over, step, info = False, 0, {}
        while not over:
            actions = []
            for agent in range(env.n_agents):
                acted = policy.act(
                    observation=env.get_obs_agent(agent),
                    legal=np.asarray(env.get_avail_agent_actions(agent), bool),
                    state=states[agent],
                    key=jax.random.key(hash((episode, step, agent)) % 2**31),
                )
                states[agent] = acted.state
                actions.append(acted.action)
            _, over, info = env.step(actions)
            step += 1
        wins.append(bool(info.get("battle_won", False)))
        print(f"battle {episode}: {'won' if wins[-1] else 'not won'} after {step} steps")
    return wins


if __name__ == "__main__":
    main(Path(sys.argv[1]), episodes=5)
