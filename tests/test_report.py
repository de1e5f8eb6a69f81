"""The page of a run, read back: its numbers, its drawings, and what it says of what is missing."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from page_tree import Node, Tree, every

from majepa.config import ConfigError, preset, to_json
from majepa.report import ReportError, write_report
from majepa.report.bars import bin_edges
from majepa.report.charts import MOST_POINTS, Axis, Series, line_chart
from majepa.report.drawing import Size
from majepa.report.numbers import duration, enclosing_ticks, log_ticks, number, tick_labels
from majepa.stats import wilson

PERCENT = "\u202f%"


def evaluation(transitions: int, wins: int, sampled: int, kind: str, episodes: int = 50) -> dict:
    low, high = wilson(wins, episodes)
    return {
        "transitions": transitions, "seconds": transitions / 10, "updates": transitions // 16,
        "kind": kind, "evaluation/win_rate": wins / episodes, "evaluation/win_rate_low": low,
        "evaluation/win_rate_high": high, "evaluation/return": 20 * wins / episodes,
        "evaluation/length": 30.0, "evaluation/sampled_win_rate": sampled / episodes,
        "evaluation/sampled_return": 20 * sampled / episodes, "evaluation/episodes": episodes,
        "seconds/collecting": transitions / 40, "seconds/learning": transitions / 20,
        "seconds/evaluating": 0.0, "seconds/saving": 0.0, "seconds/compiling": transitions / 50,
        "loss/post": 1000 / transitions, "gradient/local": 10.0, "gradient/joint": 1.0,
        **{f"rollout/reward_error_{k}": 0.1 * k for k in range(1, 6)},
        "speed/transitions_per_second": 50.0,
    }  # fmt: skip


LINES = [
    evaluation(2_000, 10, 0, "training"),
    {"transitions": 3_000, "seconds": 300.0, "updates": 187, "loss/post": 0.4},
    evaluation(4_000, 35, 20, "training"),
    evaluation(10_000, 48, 40, "final"),
]


def episodes_of(line: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "transitions": line["transitions"], "kind": line["kind"], "actions": actions,
            "episode": index, "won": index < wins, "return": 20.0 if index < wins else 0.0,
            "length": 30,
        }
        for actions, name in (("argmax", "win_rate"), ("sampled", "sampled_win_rate"))
        for wins in [round(line[f"evaluation/{name}"] * line["evaluation/episodes"])]
        for index in range(line["evaluation/episodes"])
    ]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = dataclasses.replace(preset("majepa", "small", "sim:3m"), seed=7)
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "last.safetensors").write_bytes(b"")
    (run / "config.json").write_text(json.dumps(to_json(config)))
    versions = {"majepa": "0.1.0", "environment_version": "9.8", "devices": ["cpu: cpu"]}
    (run / "versions.json").write_text(json.dumps(versions))
    write_lines(run / "metrics.jsonl", LINES)
    evaluated = [line for line in LINES if "kind" in line]
    write_lines(run / "evaluations.jsonl", [one for line in evaluated for one in episodes_of(line)])
    return run


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def page_of(folder: Path) -> Node:
    return Tree(write_report(folder).read_text()).root


def header_of(folder: Path) -> str:
    return page_of(folder).all("header")[0].text


def figure(page: Node, title: str) -> Node:
    return next(one for one in page.all("figure") if one.all("b")[0].text == title)


def series(drawing: Node, label: str) -> list[tuple[float, float]]:
    """Values of a line, from its pixels and the labels of the axes alone."""
    group = next(g for g in drawing.all("g") if g.attributes.get("data-label") == label)
    points = group.all("polyline")[0].attributes["points"]
    ticks = drawing.all("text", class_="tick")
    left = [tick for tick in ticks if float(tick.attributes["x"]) < 60 and is_left(tick)]
    below = [t for t in ticks if t not in left and t.attributes["text-anchor"] == "middle"]
    x = axis([(float(tick.attributes["x"]), value(tick.text)) for tick in below])
    y = axis([(float(tick.attributes["y"]) - 3.5, value(tick.text)) for tick in left])
    return [(x(float(a)), y(float(b))) for a, b in (pair.split(",") for pair in points.split())]


def is_left(tick: Node) -> bool:
    return tick.attributes["text-anchor"] == "end"


def value(label: str) -> float:
    plain = re.sub(r"[,%\u202f]|min", "", label).replace("−", "-")
    return float(plain) * (0.01 if "%" in label else 60 if "min" in label else 1)


def axis(places: list[tuple[float, float]]):
    (first, low), *_, (last, high) = places
    return lambda pixel: low + (pixel - first) / (last - first) * (high - low)


def test_the_result_stands_in_the_header_with_its_interval(folder):
    page = page_of(folder)
    header = page.all("header")[0]
    assert page.all("h1")[0].text == "MA-JEPA on 3m"
    assert [one.text for one in header.all("p", class_="value")] == [
        f"96.0{PERCENT}",
        f"80.0{PERCENT}",
    ]
    low, high = wilson(48, 50)
    said = f"interval {100 * low:.1f}{PERCENT} to {100 * high:.1f}{PERCENT} (Wilson)"
    assert said in header.text
    assert "50 episodes at 10,000 transitions" in header.text
    assert "Final win rate, argmax actions" in header.text
    assert "Finished." in header.text and "10,000 of 10,000" in header.text
    assert "seed 7 · preset small · " in header.text
    assert "version 9.8" in header.text and "not StarCraft II" in header.text
    assert not header.all("ul")


def test_curves_are_where_the_numbers_are(folder):
    page = page_of(folder)
    by_transitions = figure(page, "Win rate against transitions")
    points = series(by_transitions, "argmax")
    assert points == [
        pytest.approx(point, abs=2) for point in [(2000, 0.2), (4000, 0.7), (10000, 0.96)]
    ]
    assert [y for _, y in points] == pytest.approx([0.2, 0.7, 0.96], abs=1e-3)
    sampled = [y for _, y in series(by_transitions, "sampled")]
    assert sampled == pytest.approx([0, 0.4, 0.8], abs=1e-3)
    by_time = series(figure(page, "Win rate against wall time"), "argmax")
    assert [x for x, _ in by_time] == pytest.approx([200, 400, 1000], abs=1)
    loss = series(figure(page, "Posterior embedding"), "Posterior embedding")
    assert [y for _, y in loss] == pytest.approx([0.5, 0.4, 0.25, 0.1], abs=1e-3)
    assert [x for x, _ in loss] == pytest.approx([2000, 3000, 4000, 10000], abs=10)
    fifth = series(figure(page, "Reward error"), "k = 5")
    assert [y for _, y in fifth] == pytest.approx([0.5] * 3, abs=1e-3)


def test_bands_are_wilsons(folder):
    chart = figure(page_of(folder), "Win rate against transitions")
    band = chart.all("polygon", class_="argmax")[0].attributes["points"].split()
    heights = [float(pair.split(",")[1]) for pair in band]
    left = [tick for tick in chart.all("text", class_="tick") if is_left(tick)]
    y = axis([(float(t.attributes["y"]) - 3.5, value(t.text)) for t in left if "%" in t.text])
    intervals = [wilson(wins, 50) for wins in (10, 35, 48)]
    expected = [high for _, high in intervals] + [low for low, _ in reversed(intervals)]
    assert [y(height) for height in heights] == pytest.approx(expected, abs=1e-3)


def test_returns_have_bands_only_where_episodes_are_known(folder):
    assert figure(page_of(folder), "Return of an episode").all("polygon", class_="argmax")
    (folder / "evaluations.jsonl").unlink()
    page = page_of(folder)
    assert "evaluations.jsonl is missing" in page.all("header")[0].text
    assert "returns have no bands" in page.text
    assert not figure(page, "Return of an episode").all("polygon")
    assert "No single episodes are stored" in page.text


def test_episodes_are_counted(folder):
    returns = figure(page_of(folder), "Return, argmax actions")
    assert "48 won, 2 lost" in returns.text
    assert [title.text.partition(" from")[0] for title in returns.all("title")] == [
        "lost: 2",
        "won: 48",
    ]


def test_wall_time_adds_up(folder):
    rows = {
        row.all("th")[0].text: [cell.text for cell in row.all("td")]
        for row in page_of(folder).all("table", class_="phases")[0].all("tr")
    }
    assert rows["learning"] == ["8 min 20 s", f"50.0{PERCENT}"]
    assert rows["compiling"] == ["3 min 20 s", f"20.0{PERCENT}"]
    assert rows["other"] == ["50 s", f"5.0{PERCENT}"]


def test_the_page_is_well_formed_and_stands_alone(folder):
    text = write_report(folder).read_text()
    page = Tree(text).root
    identifiers = [node.attributes["id"] for node in every(page) if "id" in node.attributes]
    assert len(identifiers) == len(set(identifiers))
    targets = {link.attributes["href"].removeprefix("#") for link in page.all("a")}
    assert targets == set(identifiers)
    assert not re.search(r"https?://", text)
    assert not [node for node in every(page) if {"src", "srcset"} & node.attributes.keys()]
    policy = page.all("meta", **{"http-equiv": "Content-Security-Policy"})[0]
    assert policy.attributes["content"].startswith("default-src 'none'")
    assert "majepa train --resume" in text and "majepa evaluate" in text


def test_the_same_run_gives_the_same_page(folder):
    first = write_report(folder).read_bytes()
    assert write_report(folder, out=folder / "again" / "page.html").read_bytes() == first
    assert not list(folder.glob(".*"))


def test_hostile_text_stays_text(folder):
    evil = "<script>alert(1)</script>\"'&"
    change_config(folder, env=f"sim:{evil}", steps=evil, seed=evil, more={evil: evil})
    (folder / "versions.json").write_text(json.dumps({evil: evil, "devices": [evil]}))
    name = f"{evil}/{evil}"
    write_lines(folder / "metrics.jsonl", [{**line, name: 1.0, "kind": evil} for line in LINES])
    page = page_of(folder)
    assert len(page.all("script")) == 1 and "alert" not in page.all("script")[0].text
    assert page.all("h1")[0].text == f"MA-JEPA on {evil}"
    assert any(code.text == name for code in page.all("code"))


def test_a_run_that_was_stopped_early_says_so(folder):
    write_lines(folder / "metrics.jsonl", [*LINES[:-1], evaluation(6_000, 40, 40, "stopped")])
    header = header_of(folder)
    assert "Stopped early at 6,000 of 10,000" in header
    assert "not the result of the full budget" in header and "at the early stop" in header
    assert f"80.0{PERCENT}" in header and "Finished" not in header


def test_an_unfinished_run_says_what_its_number_is(folder):
    going_on = {"transitions": 5_000, "seconds": 500.0, "updates": 312, "nonfinite_in_a_row": 3.0}
    write_lines(folder / "metrics.jsonl", [*LINES[:-1], going_on])
    header = header_of(folder)
    assert "Win rate so far" in header and "Unfinished, at 5,000 of 10,000" in header
    assert "last evaluation on the way, at 4,000 transitions over 50 episodes" in header
    assert "The last 3 updates were refused" in header


def test_a_run_goes_on_after_a_stop(folder):
    lines = [LINES[0], evaluation(3_000, 40, 40, "stopped"), LINES[1] | {"transitions": 3_500}]
    write_lines(folder / "metrics.jsonl", lines)
    assert "Unfinished, at 3,500" in header_of(folder)


def test_a_run_without_an_evaluation(folder):
    write_lines(folder / "metrics.jsonl", LINES[1:2])
    page = page_of(folder)
    assert "No score yet" in page.text and "not yet evaluated" in page.text
    assert "Not evaluated yet" in page.text
    assert figure(page, "Posterior embedding")


def test_a_torn_last_line_is_ignored_and_another_is_told(folder):
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text() + '{"transitions": 11000, "sec')
    assert "could not be read" not in header_of(folder)
    path.write_text("not json\n" + path.read_text())
    assert "metrics.jsonl: 1 lines could not be read" in header_of(folder)
    assert f"96.0{PERCENT}" in header_of(folder)


def test_what_is_missing_is_said(folder):
    (folder / "versions.json").unlink()
    (folder / "checkpoints" / "last.safetensors").unlink()
    page = page_of(folder)
    notes = page.all("ul", class_="notes")[0].text
    assert "versions.json is missing" in notes and "nothing can be evaluated" in notes
    assert "version unknown" in page.text and "Not recorded." in page.text


def test_infinite_values_are_left_out_and_told(folder):
    write_lines(folder / "metrics.jsonl", [*LINES[:-1], LINES[-1] | {"loss/post": "inf"}])
    page = page_of(folder)
    assert "Infinite values are not drawn: loss/post" in page.text
    assert len(series(figure(page, "Posterior embedding"), "Posterior embedding")) == 3


@pytest.mark.parametrize("content", ["", "\n", '{"transitions": 3', None])
def test_no_metrics_is_one_clear_error(folder, content):
    path = folder / "metrics.jsonl"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ReportError, match="has nothing to report yet"):
        write_report(folder)
    assert not (folder / "report.html").exists()


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is not the folder of a run: it has no config"):
        write_report(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        write_report(tmp_path)


def test_a_page_cannot_replace_a_folder(folder):
    with pytest.raises(IsADirectoryError, match=r"report\.html"):
        write_report(folder, out=folder / "checkpoints")


def test_a_page_that_cannot_be_written_is_named_as_it_was_asked_for(folder):
    with pytest.raises(OSError, match=r"^cannot write /proc/z\.html: No such file or directory$"):
        write_report(folder, out=Path("/proc/z.html"))


def test_settings_that_differ_from_the_preset_are_marked(folder):
    config = json.loads((folder / "config.json").read_text())
    config["algo"]["imagination"]["horizon"] = 9
    change_config(folder, **config | {"save_every": 123})
    page = page_of(folder)
    assert "preset small with 2 fields changed" in page.all("header")[0].text
    changed = {
        row.all("th")[0].text: row.all("td")[0].text for row in page.all("tr", class_="changed")
    }
    assert changed == {"horizon": "9 small: 5", "save_every": "123 small: 10,000"}


def test_any_algorithm_is_drawn_by_the_prefixes_of_its_metrics(folder):
    change_config(folder, algo={"algorithm": "mine", "rate": 0.1}, env="other:world")
    lines = [line | {"mixer/weight": 2.5, "temperature": 0.5} for line in LINES]
    write_lines(folder / "metrics.jsonl", lines)
    page = page_of(folder)
    titles = [title.text for title in page.all("h2")]
    assert {"mixer/", "loss/", "rollout/", "gradient/", "Other metrics"} <= set(titles)
    assert page.all("h1")[0].text == "mine on world"
    assert "StarCraft" not in page.all("header")[0].text
    drawn = {code.text for code in page.all("code")}
    assert {"mixer/weight", "temperature", "rollout/reward_error_5"} <= drawn
    assert not {"seconds/learning", "evaluation/win_rate"} & drawn


ON_POLICY = {"Entropy": "actor/entropy", "Explained variance": "critic/explained_variance"}
OF_VALUES = {"Values and returns": "critic/value", "Random actions": "rollout/epsilon"}


@pytest.mark.parametrize(
    ("algorithm", "title", "figures"),
    [("mappo", "MAPPO", ON_POLICY), ("mat", "MAT", ON_POLICY), ("qmix", "QMIX", OF_VALUES)],
)
def test_baselines_have_chapters_of_their_own(folder, algorithm, title, figures):
    change_config(folder, algo=to_json(preset(algorithm, None, "sim:3m"))["algo"])
    lines = [line | dict.fromkeys(figures.values(), 0.5) for line in LINES]
    write_lines(folder / "metrics.jsonl", lines)
    page = page_of(folder)
    assert page.all("h1")[0].text == f"{title} on 3m"
    assert all(figure(page, name) for name in figures)


def test_a_battle_is_embedded_as_it_is(folder):
    assert "No battle is embedded" in page_of(folder).text
    battle = f'<iframe title="battle" srcdoc="{html.escape("<b>fight</b>")}"></iframe>'
    text = write_report(folder, battle).read_text()
    assert battle in text
    frame = Tree(text).root.all("iframe")[0]
    assert frame.attributes["srcdoc"] == "<b>fight</b>"
    assert "No battle is embedded" not in text


def test_long_lines_are_thinned_and_keep_their_extremes():
    y = [0.0] * 10_000
    y[1234], y[8765] = 9.0, -7.0
    chart = line_chart(
        [Series("a", range(10_000), y, "c1")], Axis(), Axis(), Size(400, 200, 4, 4), ""
    )
    drawn = Tree(chart).root.all("g", class_="series")[0]
    values = [float(one) for one in drawn.attributes["data-y"].split()]
    assert len(values) <= MOST_POINTS and max(values) == 9 and min(values) == -7
    assert drawn.attributes["data-x"].split()[0 :: len(values) - 1] == ["0", "9999"]


@pytest.mark.parametrize("y", [[0.0], [0.0, 0.0], [3.0], [-2.0, -2.0], [1e-9, 1e9], [-1.0, 1.0]])
@pytest.mark.parametrize("is_log", [False, True])
def test_any_values_can_be_drawn(y, is_log):
    lines = [Series("a", range(len(y)), y, "c1"), Series("b", [0], [y[0]], "c2")]
    chart = line_chart(lines, Axis(), Axis(is_log=is_log), Size(300, 150, 4, 4), "")
    assert "nan" not in chart and "inf" not in chart
    for circle in Tree(chart).root.all("circle"):
        assert -1 <= float(circle.attributes["cy"]) <= 151


def test_ticks_are_round_and_enclose():
    assert enclosing_ticks(0.13, 0.96, 4) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert enclosing_ticks(64.8, 80.6, 4) == [60, 65, 70, 75, 80, 85]
    assert log_ticks(0.0009, 0.003, 4) == pytest.approx([0.0005, 0.001, 0.002, 0.005])
    assert log_ticks(0.1, 950, 4) == pytest.approx([0.1, 1, 10, 100, 1000])
    assert tick_labels([0, 2500, 5000]) == ["0", "2,500", "5,000"]
    assert tick_labels([0, 0.025, 0.05], "percent") == [
        f"{x}{PERCENT}" for x in ("0.0", "2.5", "5.0")
    ]
    assert tick_labels([0, 300, 600], "seconds") == ["0 min", "5 min", "10 min"]


def test_numbers_are_readable():
    assert [number(x) for x in (12345.6, 0.01234, 3.0, -0.5, 1.5e-5)] == [
        "12,346", "0.0123", "3", "−0.500", "1.5e−5",
    ]  # fmt: skip
    assert [duration(x) for x in (0.4, 42, 61, 3599.9, 5400)] == [
        "0.4 s", "42 s", "1 min 01 s", "1 h 00 min", "1 h 30 min",
    ]  # fmt: skip


def test_bins_take_in_both_ends():
    assert bin_edges([0.0, 20.0], is_whole=False)[-1] == 20
    whole = bin_edges([3, 22], is_whole=True)
    assert whole[0] == -0.5 and whole[-1] == 22.5


@pytest.mark.slow
def test_the_command(folder, tmp_path):
    def majepa(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "majepa", "report", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    out = tmp_path / "deep" / "page.html"
    result = majepa(str(folder), "--out", str(out))
    assert (result.returncode, result.stdout.strip()) == (0, str(out)), result.stderr
    assert out.read_text().startswith("<!doctype html>")
    (folder / "metrics.jsonl").write_text("")
    result = majepa(str(folder))
    assert result.returncode == 2 and result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1 and "nothing to report" in result.stderr
