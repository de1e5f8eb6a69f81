"""The log: lines that programs can read, lines that people can read."""

import io
import json
import math

from rich.console import Console

from majepa.log import Averages, Clock, ConsoleLines, JsonLines, clock_time, cut_back


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
    sink = ConsoleLines(Console(file=text, width=60), budget=30_000)
    sink.write({"transitions": 80, "seconds": 1.0, "updates": 1, "training/return": 2.0})
    sink.write(
        {
            "transitions": 5_000, "seconds": 3_723.0, "updates": 64, "learner/calls": 640,
            "evaluation/win_rate": 0.5, "evaluation/win_rate_low": 0.336,
            "evaluation/win_rate_high": 0.664, "evaluation/sampled_win_rate": 0.4375,
            "evaluation/return": 12.345, "speed/transitions_per_second": 1234.5,
            "loss/actor": -0.0123, "loss/critic": 1.5,
        }
    )  # fmt: skip
    heading, first, second = text.getvalue().splitlines()
    for words in ("5,000 / 30,000", "50.0%", "33.6 - 66.4", "43.8%", "12.35", "1:02:03", "640"):
        assert words in second
    assert second.endswith("actor -0.0123, critic 1.5")
    for name, cell in (("win rate", "50.0%"), ("return", "12.35"), ("calls", "640")):
        assert heading.index(name) + len(name) == second.index(cell) + len(cell)
    assert first.index("2.00") + 4 == second.index("12.35") + 5


def test_times_read_as_clocks():
    assert [clock_time(s) for s in (0, 61.9, 36_000)] == ["0:00:00", "0:01:01", "10:00:00"]
