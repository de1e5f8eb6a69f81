"""Record battles of a run, keep the best one, and make a page and a video of it.

python examples/watch_and_keep.py runs/majepa-3m-0-1
"""

import sys
from pathlib import Path

from majepa.recording import record, write
from majepa.team import make_player, open_run
from majepa.viewer.page import to_html
from majepa.watch import write_video


def main(run: Path, battles: int = 5) -> Path:
    opened = open_run(run)
    player = make_player(opened, greedy=True)
    recordings = [record(opened.env, player, seed=seed) for seed in range(battles)]
    best = max(recordings, key=lambda one: one.steps[-1].total_reward)

    folder = run / "replays"
    folder.mkdir(exist_ok=True)
    write(best, folder / "best.battle.json.gz")
    page = folder / "best.html"
    page.write_text(to_html(best), encoding="utf-8")
    write_video(best.scenes(), folder / "best.gif", size=320)
    print(f"{best.outcome}, open {page}")
    return page


if __name__ == "__main__":
    main(Path(sys.argv[1]))
