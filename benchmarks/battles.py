"""Tables of scripted battles: how hard each map is for policies that do not learn.

    uv run python benchmarks/battles.py random          # 1,000 audited random battles per map
    uv run python benchmarks/battles.py policies        # every map and scripted policy

Prints Markdown, with the command, the rules' version and the date on top.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time

import jax

from majepa.envs.scripted import POLICIES, scripted_policy
from majepa.envs.sim import SCENARIOS, SIM_VERSION, BattleEnv
from majepa.envs.sim.audit import Tally, audit, excess_return


def play(map_name: str, policy: str, episodes: int) -> Tally:
    env = BattleEnv(SCENARIOS[map_name])
    return audit(env, scripted_policy(policy, env.spec), episodes=episodes)


def random_table(maps: list[str], episodes: int) -> None:
    print(
        "| map | won | length | return: least, mean, most | regained by the enemy (mean) | "
        "beyond 20 + 2 × regained (most) | NaN | off map | in wall | longest crush, loops | s |"
    )
    print("|---" * 11 + "|")
    for name in maps:
        begun = time.perf_counter()
        t = play(name, "random", episodes)
        print(
            f"| {name} | {t.won.mean():.3f} | {t.length.mean():.1f} | {t.total.min():.2f}, "
            f"{t.total.mean():.2f}, {t.total.max():.2f} | {t.recovered.mean():.2f} | "
            f"{excess_return(t).max():.2f} | {int((~t.is_finite).sum())} | {t.off_map.max():.3f} | "
            f"{t.wall_depth.max():.3f} | {int(t.longest_crush.max())} | "
            f"{time.perf_counter() - begun:.0f} |",
            flush=True,
        )


def policy_table(maps: list[str], episodes: int) -> None:
    print("| map | policy | won | length | first contact | allies lost | enemies lost | return |")
    print("|---" * 8 + "|")
    for name in maps:
        for policy in POLICIES:
            t = play(name, policy, episodes)
            met = t.contact[t.contact > 0]
            contact = f"{met.mean():.1f}" if len(met) else "never"
            print(
                f"| {name} | {policy} | {t.won.mean():.2f} | {t.length.mean():.1f} | {contact} | "
                f"{t.lost_allies.mean():.1f} of {len(SCENARIOS[name].ally_roster)} | "
                f"{t.lost_enemies.mean():.1f} of {len(SCENARIOS[name].enemy_roster)} | "
                f"{t.total.mean():.2f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("table", choices=["random", "policies"])
    parser.add_argument("--maps", nargs="+", default=list(SCENARIOS), choices=list(SCENARIOS))
    parser.add_argument("--episodes", type=int, default=None)
    arguments = parser.parse_args()
    episodes = arguments.episodes or {"random": 1000, "policies": 200}[arguments.table]
    print(
        f"`python benchmarks/battles.py {' '.join(sys.argv[1:])}`, {episodes} battles each, rules "
        f"{SIM_VERSION}, {jax.devices()[0].device_kind}, {datetime.date.today()}\n"
    )
    table = random_table if arguments.table == "random" else policy_table
    table(arguments.maps, episodes)


if __name__ == "__main__":
    main()
