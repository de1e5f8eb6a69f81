"""The log: lines that programs can read, lines that people can read."""

import io
import json
import math

from rich.console import Console

from majepa.log import Averages, Clock, JsonLines, cut_back
from majepa.progress import Lines, Panel, Remaining, clock_time


def test_lines_are_complete_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    sink.write({"transitions": 1, "loss": math.nan, "norm": math.inf})
    assert json.loads(path.read_text()) == {"transitions": 1, "norm": "inf"}
    sink.write({"transitions": 2})
    assert len(path.read_text().splitlines()) == 2
    sink.close()


def test_averages_ignore_what_was_not_measured():
    averages = Averages()
    averages.add({"loss": 1.0, "rare": math.nan, "learner/calls": 5})
    averages.add({"loss": 3.0, "rare": 7.0, "learner/calls": 9})
    averages.add({"loss": math.nan, "rare": math.nan, "never": math.nan})
    assert averages.take() == {"loss": 2.0, "rare": 7.0, "learner/calls": 9.0}
    assert averages.take() == {}


def test_cutting_back_keeps_what_a_checkpoint_knows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    cut_back(path, 10)
    assert not path.exists()
    kept = ['{"transitions": 5}', '{"transitions": 10, "kind": "stopped"}']
    gone = ['{"transitions": 10, "kind": "final"}', '{"transitions": 11}', '{"transi']
    path.write_text("\n".join([*kept, *gone]))
    cut_back(path, 10)
    assert path.read_text().splitlines() == kept


def test_the_first_time_of_a_program_is_compilation():
    clock = Clock()
    for _ in range(2):
        with clock.measure("learning", "update"):
            pass
    assert clock.phases["compiling"] > 0 and clock.phases["learning"] > 0
    assert clock.phases["collecting"] == 0
    later = Clock()
    later.go_on_from(clock.stored() | {"elapsed": 100.0})
    assert later.elapsed > 100 > later.here
    assert later.phases["learning"] == clock.phases["learning"]


def test_console_lines_are_aligned_and_plain():
    text = io.StringIO()
    sink = Lines(Console(file=text, width=60), budget=30_000)
    sink.write({"transitions": 80, "seconds": 1.0, "updates": 1, "training/return": 2.0}, None)
    sink.write(
        {
            "transitions": 5_000, "seconds": 3_723.0, "updates": 64, "learner/calls": 640,
            "evaluation/win_rate": 0.5, "evaluation/win_rate_low": 0.336,
            "evaluation/win_rate_high": 0.664, "evaluation/sampled_win_rate": 0.4375,
            "evaluation/return": 12.345, "speed/transitions_per_second": 1234.5,
            "loss/actor": -0.0123, "loss/critic": 1.5,
        },
        90.0,
    )  # fmt: skip
    heading, first, second = text.getvalue().splitlines()
    for words in (
        "5,000 / 30,000",
        "50.0%",
        "33.6 - 66.4",
        "43.8%",
        "12.35",
        "1:02:03",
        "0:01:30",
        "640",
    ):
        assert words in second
    assert second.endswith("actor -0.0123, critic 1.5")
    for name, cell in (("win rate", "50.0%"), ("return", "12.35"), ("calls", "640")):
        assert heading.index(name) + len(name) == second.index(cell) + len(cell)
    assert first.index("2.00") + 4 == second.index("12.35") + 5


def test_times_read_as_clocks():
    assert [clock_time(s) for s in (0, 61.9, 36_000)] == ["0:00:00", "0:01:01", "10:00:00"]


def test_a_torn_line_does_not_spoil_the_next_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"transitions": 1}\n{"trans')
    sink = JsonLines(path)
    sink.write({"transitions": 3})
    sink.close()
    assert path.read_text().splitlines()[-1] == '{"transitions": 3}'


def test_the_remaining_time_leaves_out_what_does_not_go_on():
    left = Remaining(budget=1_000)
    assert left.seconds is None
    for second in range(20):  # gathering before learning: ten times as fast
        left.add(float(second), 10 * second, learns=False)
        assert left.seconds is None
    for second in range(20, 90):
        left.add(float(second), 190 + (second - 19), learns=True)
    assert left.seconds == 1_000 - 260
    left.add(95.0, 1_000, learns=True)
    assert left.seconds == 0


def test_a_terminal_shows_where_a_run_is():
    text = io.StringIO()
    clock = Clock()
    clock.phases["compiling"] = 30.0
    panel = Panel(Console(file=text, force_terminal=True, width=120), 1_000, clock)
    panel.phase("compiling")
    panel.write({
        "transitions": 250, "seconds": 61.0, "updates": 3,
        "evaluation/win_rate": 0.5, "evaluation/win_rate_low": 0.34,
        "evaluation/win_rate_high": 0.66, "evaluation/sampled_win_rate": 0.25,
        "evaluation/return": 9.5, "speed/collecting": 1234.5, "speed/learning": 3.2,
        "speed/evaluating": 40.0,
    }, 75.0)  # fmt: skip
    panel.close()
    shown = text.getvalue()
    for words in (
        "compiling", "250 of 1,000 transitions", "50.0%", "34.0 - 66.0", "25.0%", "9.50",
        "1,234.5 steps/s", "3.2 updates/s", "40.0 episodes/s", "0:00:30", "about 0:01:15",
    ):  # fmt: skip
        assert words in shown, words
