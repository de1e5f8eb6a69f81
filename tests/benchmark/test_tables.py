"""Tables, the comparison and the aggregates, against text written by hand for a small grid."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
from made_up_grid import GRID, MAJEPA, MAPPO, write_cell, write_grid

from majepa.benchmark import output
from majepa.benchmark.aggregates import aggregate
from majepa.benchmark.comparison import MEAN_OF_ALL, Pair, compare
from majepa.benchmark.comparison import Comparison as Compared
from majepa.benchmark.grids import GRIDS, Grid, Method
from majepa.benchmark.results import Results, read_folders
from majepa.benchmark.scores import caution, score_rows
from majepa.benchmark.tables import latex_text, markdown_text
from majepa.stats import mean_rate_interval


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = write_grid(tmp_path_factory.mktemp("grid"))
    output.write(GRID, folder)
    return folder


def written(folder: Path, grid: Grid, wins: dict[tuple[str, str, int], int]) -> dict[str, str]:
    """The texts of a grid of which only these cells are finished."""
    for cell in grid.cells():
        key = (cell.method.name, cell.map, cell.seed)
        if key in wins:
            write_cell(folder, cell, [wins[key]])
    return {path.name: path.read_text() for path in output.write(grid, folder)}


def interval(*wins: int) -> str:
    found = mean_rate_interval(wins, [10] * len(wins))
    assert found is not None
    return f"[{100 * found.low:.1f}, {100 * found.high:.1f}]"


EIGHT_MAJEPA, EIGHT_MAPPO, ALL_WON = interval(9, 10), interval(2, 5), interval(10, 10)

ABOUT = (
    "Our win rate with argmax actions after the budget, in per cent, in the simulator v9.8, over "
    "2 seeds unless a cell says otherwise. Mean over seeds (sample standard deviation) [95 % "
    "interval: seeds are redrawn, each with a win rate that its episodes leave possible]; the best "
    "mean of each map is bold."
)
ABOUT_LATEX = ABOUT.replace("%", r"\%")
CAUTION = (
    "All numbers are from only 2 seeds: deviations and intervals over so few are rough, and "
    "differences between methods may be chance."
)
MARKDOWN = f"""# A small grid

{ABOUT}

{CAUTION}

## Ours: simulator v9.8

| map | MA-JEPA | MAPPO |
| --- | ---: | ---: |
| 8m | **95.0** (7.1) {EIGHT_MAJEPA} | 35.0 (21.2) {EIGHT_MAPPO} |
| 2s_vs_1sc | **100.0** (0.0) {ALL_WON} | **100.0** (0.0) {ALL_WON} |

## Real StarCraft II, published: paper

| map | MA-JEPA | MAPPO |
| --- | ---: | ---: |
| 8m | 92.0 (1.0) | 65.7 (33.1) |
| 2s_vs_1sc | 97.3 (2.5) | 100.0 (0.0) |

## Real StarCraft II, published: MARIE

| map | MA-JEPA | MAPPO |
| --- | ---: | ---: |
| 8m | – | 70.3 (19.5) |
| 2s_vs_1sc | – | 100.0 (0.0) |

## Over all maps

Over 2 of 2 maps, those on which every method that was begun has a result.

| method | IQM of win rates | 95 % interval | runs |
| --- | ---: | ---: | ---: |
| MA-JEPA | 100.0 | [95.0, 100.0] | 4 |
| MAPPO | 75.0 | [60.0, 75.0] | 4 |

| probability of improvement | % | 95 % interval |
| --- | ---: | ---: |
| MA-JEPA over MAPPO | 75.0 | [75.0, 75.0] |
"""

LATEX = f"""% Needs \\usepackage{{booktabs}}.
\\begin{{table}}
  \\centering
  \\caption{{A small grid. {ABOUT_LATEX} {CAUTION}}}
  \\label{{tab:small}}
  \\begin{{tabular}}{{lrr}}
    \\toprule
    map & MA-JEPA & MAPPO \\\\
    \\midrule
    \\multicolumn{{3}}{{l}}{{\\emph{{Ours: simulator v9.8}}}} \\\\
    8m & \\textbf{{95.0}} (7.1) {{\\scriptsize {EIGHT_MAJEPA}}} & \
35.0 (21.2) {{\\scriptsize {EIGHT_MAPPO}}} \\\\
    2s\\_vs\\_1sc & \\textbf{{100.0}} (0.0) {{\\scriptsize {ALL_WON}}} & \
\\textbf{{100.0}} (0.0) {{\\scriptsize {ALL_WON}}} \\\\
    \\midrule
    \\multicolumn{{3}}{{l}}{{\\emph{{Real StarCraft II, published: paper}}}} \\\\
    8m & 92.0 (1.0) & 65.7 (33.1) \\\\
    2s\\_vs\\_1sc & 97.3 (2.5) & 100.0 (0.0) \\\\
    \\midrule
    \\multicolumn{{3}}{{l}}{{\\emph{{Real StarCraft II, published: MARIE}}}} \\\\
    8m & -- & 70.3 (19.5) \\\\
    2s\\_vs\\_1sc & -- & 100.0 (0.0) \\\\
    \\bottomrule
  \\end{{tabular}}
\\end{{table}}
"""

COMPARISON = """# Ours against published numbers

Our means over seeds in the simulator v9.8, theirs in real StarCraft II: another world. Agreement \
says that the two rank alike, not that one can stand for the other.

## Real StarCraft II, published: paper

| over | cells | Spearman | mean absolute difference | ours − published |
| --- | ---: | ---: | ---: | ---: |
| all cells | 4 | 0.95 | 9.1 | −6.2 |
| published above 0 | 4 | 0.95 | 9.1 | −6.2 |
| MA-JEPA | 2 | – | 2.9 | +2.9 |
| MAPPO | 2 | – | 15.4 | −15.4 |

| map | ours, best first | published | pairs in the same order |
| --- | --- | --- | --- |
| 8m | MA-JEPA > MAPPO | MA-JEPA > MAPPO | 1 of 1 |
| 2s_vs_1sc | MA-JEPA = MAPPO | MAPPO > MA-JEPA | 0 of 1 |
"""


def test_markdown(folder):
    assert (folder / "table.md").read_text() == MARKDOWN


def test_latex(folder):
    assert (folder / "table.tex").read_text() == LATEX


def test_comparison_in_words(folder):
    assert (folder / "comparison.md").read_text().startswith(COMPARISON)


def test_csv_has_every_number(folder):
    lines = list(csv.DictReader(io.StringIO((folder / "table.csv").read_text())))
    assert [(line["map"], line["method"]) for line in lines] == [
        (name, title) for name in ("8m", "2s_vs_1sc") for title in ("MA-JEPA", "MAPPO")
    ]
    line = lines[1]
    bounds = mean_rate_interval([2, 5], [10, 10])
    assert float(line["mean"]) == 35 and float(line["std"]) == pytest.approx(450**0.5)
    assert (float(line["low"]) / 100, float(line["high"]) / 100) == pytest.approx(bounds)
    assert (line["seeds"], line["planned_seeds"], line["is_best"]) == ("2", "2", "0")
    assert line["win_rates"] == "1:20 2:50" and line["environment_version"] == "9.8"
    assert (line["sampled_mean"], line["mean_return"], line["mean_length"]) == (
        "15.0",
        "9.6",
        "30.0",
    )
    assert (line["paper_mean"], line["paper_std"]) == ("65.7", "33.1")
    assert (lines[0]["MARIE_mean"], line["MARIE_mean"]) == ("", "70.3")
    # Each took 100 s: the seeds of MA-JEPA one after the other, those of MAPPO together.
    assert [line["wall_seconds"] for line in lines] == ["200.0", "100.0"] * 2


def test_comparison_as_data(folder):
    data = json.loads((folder / "comparison.json").read_text())
    assert data["environment_version"] == "9.8" and data["ours"] == "simulator v9.8"
    paper, marie, mean = data["sources"]
    assert [one["source"] for one in data["sources"]] == ["paper", "MARIE", MEAN_OF_ALL]
    assert paper["all"]["cells"] == 4 and marie["all"]["cells"] == mean["all"]["cells"] == 2
    differences = [95 - 92, 35 - 65.7, 100 - 97.3, 0]
    assert paper["all"]["mean_absolute_difference"] == pytest.approx(sum(map(abs, differences)) / 4)
    assert paper["all"]["mean_difference"] == pytest.approx(sum(differences) / 4)
    assert mean["cells"][0]["published"] == pytest.approx((65.7 + 70.3) / 2)


def test_incomplete_cells_say_how_many_seeds_they_have(tmp_path):
    wins = {("majepa", "8m", 1): 9, ("mappo", "8m", 1): 9, ("mappo", "8m", 2): 9}
    texts = written(tmp_path, GRID, wins)
    both = f"**90.0** (0.0) {interval(9, 9)}"
    assert f"| 8m | **90.0** (–) [–], 1 of 2 seeds | {both} |" in texts["table.md"]
    assert "| 2s_vs_1sc | –, 0 of 2 seeds | –, 0 of 2 seeds |" in texts["table.md"]
    assert "- majepa-8m-2: missing, not started" in texts["table.md"]
    assert "8m & \\textbf{90.0} (--) {\\scriptsize [--]}, 1 of 2 seeds &" in texts["table.tex"]
    assert "2s\\_vs\\_1sc & --, 0 of 2 seeds & --, 0 of 2 seeds \\\\" in texts["table.tex"]
    assert (
        "Over 1 of 2 maps, those on which every method that was begun has a result: 8m."
        in (texts["table.md"])
    )
    lines = list(csv.DictReader(io.StringIO(texts["table.csv"])))
    assert (lines[0]["seeds"], lines[0]["std"], lines[0]["low"]) == ("1", "", "")
    assert (lines[2]["seeds"], lines[2]["mean"], lines[2]["is_best"]) == ("0", "", "0")


def test_one_seed_has_neither_deviation_nor_interval(tmp_path):
    grid = dataclasses.replace(GRID, seeds=(1,))
    wins = {(method, "8m", 1): count for method, count in (("majepa", 3), ("mappo", 5))}
    texts = written(tmp_path, grid, wins)
    assert "| 8m | 30.0 (–) [–] | **50.0** (–) [–] |" in texts["table.md"]
    assert "Every number is from one seed" in texts["table.md"]
    assert "| MAPPO | 50.0 | [–] | 1 |" in texts["table.md"]
    assert "| MA-JEPA over MAPPO | 0.0 | [–] |" in texts["table.md"]


def test_nobody_is_best_where_nobody_won(tmp_path):
    wins = {
        (method.name, "8m", seed): 0 for method, seed in itertools.product(GRID.methods, GRID.seeds)
    }
    texts = written(tmp_path, GRID, wins)
    assert f"| 8m | 0.0 (0.0) {interval(0, 0)} | 0.0 (0.0) {interval(0, 0)} |" in texts["table.md"]
    assert "**" not in texts["table.md"] and "textbf" not in texts["table.tex"]
    assert "| MA-JEPA over MAPPO | 50.0 | [50.0, 50.0] |" in texts["table.md"]
    assert "| all cells | 2 | – | " in texts["comparison.md"]


def test_nothing_finished_makes_everything_all_the_same(tmp_path):
    texts = written(tmp_path, GRID, {})
    assert "## Ours: simulator (no results yet)" in texts["table.md"]
    assert texts["table.md"].count("missing, not started") == len(GRID.cells())
    assert "There is nothing to compare yet." in texts["comparison.md"]
    assert "There is no map yet" in texts["table.md"]
    assert texts["results.csv"].count("\n") == texts["curves.csv"].count("\n") == 1


def test_maps_that_not_all_have_do_not_count_for_aggregates(tmp_path):
    for cell in GRID.cells():
        if (cell.method.name, cell.map) != ("mappo", "2s_vs_1sc"):
            write_cell(tmp_path, cell, [2 if cell.map == "8m" else 10])
    found = aggregate(read_folders(GRID, tmp_path))
    assert found.maps == ("8m",)
    assert [(one.title, one.iqm, one.runs) for one in found.methods] == [
        ("MA-JEPA", 0.2, 2),
        ("MAPPO", 0.2, 2),
    ]


def test_enough_seeds_need_no_caution(tmp_path):
    grid = Grid("g", "G", (MAPPO,), ("8m",), (1, 2, 3, 4), steps=100_000)
    for cell in grid.cells():
        write_cell(tmp_path, cell, [5])
    rows = score_rows(read_folders(grid, tmp_path))
    assert caution(rows) is None
    rows = score_rows(read_folders(dataclasses.replace(grid, seeds=(1, 2, 3, 4, 5)), tmp_path))
    assert caution(rows) is None and rows[0][0].seeds == 4
    fewer = read_folders(dataclasses.replace(grid, seeds=(1, 2, 3)), tmp_path)
    assert (caution(score_rows(fewer)) or "").startswith("All numbers are from only 3 seeds")
    shutil.rmtree(tmp_path / "cells" / "mappo-8m-4")
    larger = dataclasses.replace(grid, envs=("8m", "3m"))
    for cell in larger.cells()[4:]:
        write_cell(tmp_path, cell, [5])
    some = caution(score_rows(read_folders(larger, tmp_path))) or ""
    assert some.startswith("Some numbers are from only 3 seeds")


def test_files_are_whole_or_not_there(folder):
    assert sorted(path.name for path in folder.iterdir()) == [
        "cells", "comparison.json", "comparison.md", "curves.csv", "index.html", "results.csv",
        "table.csv", "table.md", "table.tex",
    ]  # fmt: skip


def test_data_alone_gives_the_same_tables(folder, tmp_path):
    paths = output.from_data(GRID, folder, tmp_path / "again")
    for path in paths:
        if path.name != "index.html":
            assert path.read_bytes() == (folder / path.name).read_bytes()
    assert {path.name for path in paths} | {"results.csv", "curves.csv", "cells"} == {
        path.name for path in folder.iterdir()
    }


SPECIAL = r"a_b 50% & #1 {x} $y$ ~^ \z <tag> 3×2"


def test_latex_escapes_what_it_would_take_for_commands():
    text = latex_text(SPECIAL)
    assert text == (
        r"a\_b 50\% \& \#1 \{x\} \$y\$ \textasciitilde{}\textasciicircum{} \textbackslash{}z "
        r"\textless{}tag\textgreater{} 3$\times$2"
    )


def test_tables_survive_any_title(tmp_path):
    method = dataclasses.replace(MAPPO, title=f"{SPECIAL} | *x*")
    grid = Grid("odd_name", SPECIAL, (method, MAJEPA), ("8m",), (1,), steps=100_000)
    texts = written(tmp_path, grid, {("mappo", "8m", 1): 3})
    table = texts["table.tex"]
    assert "\\label{tab:oddname}" in table
    bare = re.sub(r"\\\\|\\[&%#_${}]", "", table)
    assert bare.count("{") == bare.count("}")
    rows = [line for line in table.splitlines() if " & " in line]
    assert len(rows) == 3
    assert all(len(re.findall(r"(?<!\\)&", row)) == 2 for row in rows)
    head = next(line for line in texts["table.md"].splitlines() if line.startswith("| map |"))
    assert len(re.findall(r"(?<!\\)\|", head)) == 4
    assert markdown_text("| *x*") == r"\| \*x\*" and r"\*x\*" in head


def compared(*numbers: tuple[str, float, float]) -> Compared:
    pairs = [Pair("3m", title, ours, theirs, 3, 3) for title, ours, theirs in numbers]
    return Compared("paper", tuple(pairs))


def test_agreement_by_hand():
    one = compared(("a", 90, 80), ("b", 10, 20), ("c", 30, 0), ("d", 5, 10))
    # Ranks 4, 2, 3, 1 against 4, 3, 1, 2: the squares of differences sum to 6.
    assert one.over_all.spearman == pytest.approx(1 - 6 * 6 / (4 * 15))
    assert one.over_all.mean_absolute_difference == pytest.approx((10 + 10 + 30 + 5) / 4)
    assert one.over_all.mean_difference == pytest.approx((10 - 10 + 30 - 5) / 4)
    assert (one.over_nonzero.cells, one.over_nonzero.spearman) == (3, pytest.approx(1))
    (order,) = one.orders
    assert (order.ours, order.published) == ("a > c > b > d", "a > b > d > c")
    assert (order.agreeing, order.decided) == (4, 6)


def test_published_ties_decide_nothing():
    (order,) = compared(("a", 9, 0), ("b", 3, 0), ("c", 50, 70)).orders
    assert order.published == "c > a = b"
    assert (order.agreeing, order.decided) == (2, 2)


def test_only_methods_and_maps_that_were_published_are_compared(tmp_path):
    ours = dataclasses.replace(MAPPO, name="mine", title="Mine")
    grid = Grid("g", "G", (ours, MAPPO), ("8m", "3m"), (1,), steps=100_000)
    texts = written(tmp_path, grid, {
        (name, env, 1): 5 for name in ("mine", "mappo") for env in ("8m", "3m")
    })  # fmt: skip
    cells = {
        one["source"]: [(cell["map"], cell["title"]) for cell in one["cells"]]
        for one in json.loads(texts["comparison.json"])["sources"]
    }
    assert cells == {
        "paper": [("8m", "MAPPO")],
        "MARIE": [("8m", "MAPPO"), ("3m", "MAPPO")],
        MEAN_OF_ALL: [("8m", "MAPPO")],
    }
    assert compare([]) == []


def published(method: Method, steps: int | None = None) -> list[float | None]:
    """By the paper, on 8m and on a map where MAPPO has settings of its own."""
    grid = Grid("g", "G", (method,), ("8m", "corridor"), steps=steps)
    rates = [row[0].published("paper") for row in score_rows(Results(grid, (), ()))]
    return [rate and rate.mean for rate in rates]


def test_only_what_others_ran_stands_beside_what_they_published():
    plain = Method("mine", "MAPPO", "mappo")
    assert published(plain) == [65.7, 0.0]
    assert published(dataclasses.replace(plain, overrides={"evaluation.episodes": 3})) == [
        65.7,
        0.0,
    ]
    assert published(plain, steps=100_000) == [65.7, None]
    for other in (
        {"preset": "tuned"},
        {"algorithm": "mat"},
        {"algorithm": "soon"},
        {"title": "Mine"},
        {"overrides": {"algo.width": 32}},
    ):
        assert published(dataclasses.replace(plain, **other)) == [None, None], other
    # Routes that are switched off are another method, also under its name.
    both, outcome, *_ = GRIDS["ablation"].methods
    assert published(both) == [92.0, 66.0]
    assert published(dataclasses.replace(outcome, title="MA-JEPA")) == [None, None]
