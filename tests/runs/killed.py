"""A run of an algorithm that learns in no time and whose checkpoints take a while to write.

    python killed.py FOLDER

Starts or goes on, and prints the transitions reached.
"""

import dataclasses
import sys
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
from counting import CountingEnv, FakeAlgorithm
from rich.console import Console

from majepa.config import MAPPO_DEBUG, EvaluationConfig, TrainConfig
from majepa.lanes import Lanes
from majepa.run_folder import CONFIG
from majepa.training import train

CONFIGURATION = TrainConfig(
    MAPPO_DEBUG,
    env="test:counting",
    steps=6_000,
    evaluation=EvaluationConfig(every=300, episodes=3, final_episodes=3),
    save_every=120,
)


class Large(NamedTuple):
    inner: object
    ballast: object


@dataclasses.dataclass(frozen=True)
class Slow(FakeAlgorithm):
    def init(self, key):
        return Large(super().init(key), jnp.zeros(3_000_000))

    def act(self, state, carry, step, key, *, greedy):
        return super().act(state.inner, carry, step, key, greedy=greedy)

    def update(self, state, data, key):
        inner, metrics = super().update(state.inner, data, key)
        return Large(inner, state.ballast + 1), metrics


def main(folder: Path) -> None:
    advance = Lanes.advance

    def tell(self, active):
        news = advance(self, active)
        print(*self.transitions, flush=True)
        return news

    Lanes.advance = tell
    env = CountingEnv(lengths=(3, 5, 4), limit=5)
    resume = (folder / CONFIG).exists()
    train(
        CONFIGURATION, folder, env=env, algorithm=Slow(), resume=resume, console=Console(quiet=True)
    )
    print("done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
