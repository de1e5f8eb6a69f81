"""The page of a grid, read back: its table, its drawings, and what it says of what is missing."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from made_up_grid import GRID, MAPPO, write_cell, write_grid
from page_tree import Node, Tree, every

from majepa.benchmark import output
from majepa.benchmark.grids import Grid
from majepa.benchmark.published import PAPER
from majepa.report.charts import Axis
from majepa.report.dots import Dot, Point, dot_plot, scatter
from majepa.report.drawing import Size

PERCENT = "\u202f%"
SECTIONS = ["table", "curves", "aggregates", "published", "time", "cells"]


def page_of(grid: Grid, folder: Path) -> Node:
    output.write(grid, folder)
    return Tree((folder / "index.html").read_text()).root


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_grid(tmp_path_factory.mktemp("grid"))


@pytest.fixture(scope="module")
def page(folder: Path) -> Node:
    return page_of(GRID, folder)


def section(page: Node, identifier: str) -> Node:
    return next(one for one in page.all("section") if one.attributes["id"] == identifier)


def figure(page: Node, title: str) -> Node:
    return next(one for one in page.all("figure") if one.all("b") and one.all("b")[0].text == title)


def test_the_page_is_well_formed_and_stands_alone(folder, page):
    text = (folder / "index.html").read_text()
    identifiers = [node.attributes["id"] for node in every(page) if "id" in node.attributes]
    assert identifiers == SECTIONS
    assert not re.search(r"https?://", text)
    assert not [node for node in every(page) if {"src", "srcset"} & node.attributes.keys()]
    policy = page.all("meta", **{"http-equiv": "Content-Security-Policy"})[0]
    assert policy.attributes["content"].startswith("default-src 'none'")
    inner = [link.attributes["href"] for link in page.all("a")]
    assert [link for link in inner if link.startswith("#")] == [f"#{name}" for name in SECTIONS]


def test_the_table_marks_the_best_and_sets_the_game_apart(page):
    ours, *published = section(page, "table").all("tbody")
    assert ours.all("th")[0].text == "Ours: simulator v9.8"
    assert [block.all("th")[0].text for block in published] == [
        "Real StarCraft II, published: paper",
        "Real StarCraft II, published: MARIE",
    ]
    cells = {
        row.all("th")[0].text: [
            (cell.text.split(" ")[0], bool(cell.all("strong"))) for cell in row.all("td")
        ]
        for row in ours.all("tr")[1:]
    }
    assert cells == {
        "8m": [("95.0", True), ("35.0", False)],
        "2s_vs_1sc": [("100.0", True), ("100.0", True)],
    }
    assert not any(block.all("strong") for block in published)


def test_the_header_says_what_it_is_and_how_sure(page):
    header = page.all("header")[0].text
    assert "A small grid" in header and "2 methods × 2 maps × 2 seeds · simulator v9.8" in header
    assert "Complete. All 8 cells are finished." in header
    assert "only 2 seeds" in header and "real StarCraft II" in header


def test_curves_are_means_in_bands_with_published_marks(page):
    chart = figure(section(page, "curves"), "8m")
    lines = {one.attributes["data-label"]: one for one in chart.all("g", class_="series")}
    assert lines["MA-JEPA"].attributes["data-y"] == "0.45 0.95"
    assert lines["MAPPO"].attributes["data-x"] == "50000 100000"
    assert len(chart.all("polygon", class_="band")) == 2
    marks = chart.all("g", class_="mark")
    assert [mark.all("title")[0].text for mark in marks] == [
        f"MA-JEPA, published by paper: 92.0{PERCENT}",
        f"MAPPO, published by paper: 65.7{PERCENT}",
        f"MAPPO, published by MARIE: 70.3{PERCENT}",
    ]
    # At the budget, where the lines end, and as high as the axis says.
    line = lines["MAPPO"].all("polyline")[0].attributes["points"].split()[-1]
    ring = marks[1].all("circle")[0].attributes
    assert float(ring["cx"]) == pytest.approx(float(line.split(",")[0]))
    ticks = {
        one.text: float(one.attributes["y"]) - 3.5
        for one in chart.all("text", class_="tick")
        if one.attributes["text-anchor"] == "end" and PERCENT in one.text
    }
    zero, full = ticks[f"0{PERCENT}"], ticks[f"100{PERCENT}"]
    share = (zero - float(ring["cy"])) / (zero - full)
    assert share == pytest.approx(PAPER["8m"]["MAPPO"].mean / 100, abs=1e-3)
    (legend,) = section(page, "curves").all("p", class_="shapes")
    assert [one.text for one in legend.all("span")] == [
        "Real StarCraft II, published: paper",
        "Real StarCraft II, published: MARIE",
    ]


def test_aggregates_and_comparisons_are_drawn(page):
    aggregates = section(page, "aggregates")
    means, pairs = aggregates.all("svg", class_="dot-plot")
    assert f"MAPPO: 75.0{PERCENT} [60.0{PERCENT}, 75.0{PERCENT}]" in means.text
    assert f"MA-JEPA over MAPPO: 75.0{PERCENT}" in pairs.text
    assert len(pairs.all("line", class_="reference")) == 1
    published = section(page, "published")
    drawings = published.all("svg", class_="scatter")
    assert [len(one.all("circle", class_="point")) for one in drawings] == [4, 2, 2]
    assert "MAPPO on 8m: ours 35.0, paper 65.7" in drawings[0].text
    first = published.all("table")[0]
    assert [cell.text for cell in first.all("tr")[1].all("td")] == ["4", "0.95", "9.1", "−6.2"]


def test_every_cell_is_listed_with_its_folder(folder, page):
    rows = section(page, "cells").all("tbody")[0].all("tr")
    assert [row.all("th")[0].text for row in rows] == [cell.name for cell in GRID.cells()]
    for row in rows:
        assert (folder / row.all("a")[0].attributes["href"]).is_dir()
    assert [cell.text for cell in rows[2].all("td")][:-1] == [
        "2 of 10", "1 of 10", "7.20", "30", "100,000 of 100,000", "1 min 40 s", "9.8",
    ]  # fmt: skip
    time = figure(section(page, "time"), "MAPPO")
    # Two seeds of each map share a clock of 100 s.
    assert "3 min 20 s in 4 cells" in time.text
    assert "6 min 40 s in 4 cells" in figure(section(page, "time"), "MA-JEPA").text
    assert f"learning: 50.0{PERCENT}" in time.text


def test_what_is_missing_or_damaged_is_listed(tmp_path):
    first, second, third, *_ = GRID.cells()
    write_cell(tmp_path, first, [9])
    write_cell(tmp_path, second, [9], kind="stopped")
    (write_cell(tmp_path, third, [9]) / "versions.json").unlink()
    page = page_of(GRID, tmp_path)
    header = page.all("header")[0].text
    assert "Incomplete. 1 of 8 cells are finished; 1 unfinished, 1 damaged, 5 missing." in header
    rows = {row.all("th")[0].text: row.text for row in section(page, "cells").all("tr")[1:]}
    assert "unfinished: stopped early, at 100,000 of 100,000" in rows[second.name]
    assert "damaged: versions.json does not tell the version" in rows[third.name]
    assert "missing: not started" in rows[GRID.cells()[-1].name]
    table = section(page, "table")
    assert "1 of 2 seeds" in table.text and "0 of 2 seeds" in table.text


def test_one_seed_has_no_band_and_no_interval(tmp_path):
    grid = dataclasses.replace(GRID, seeds=(1,))
    for cell in grid.cells():
        write_cell(tmp_path, cell, [2, 4])
    page = page_of(grid, tmp_path)
    assert "Every number is from one seed" in page.all("header")[0].text
    assert not page.all("polygon", class_="band")
    assert not page.all("line", class_="interval")
    assert page.all("g", class_="series")


def test_nothing_finished_is_a_page_too(tmp_path):
    page = page_of(GRID, tmp_path)
    assert [one.attributes["id"] for one in page.all("section")] == SECTIONS
    assert "0 of 8 cells are finished; 8 missing." in page.all("header")[0].text
    assert "No cell is finished." in section(page, "curves").text
    assert "There is nothing to compare." in section(page, "published").text
    assert "no results yet" in page.all("header")[0].text


def test_hostile_text_stays_text(tmp_path):
    evil = "<script>alert(1)</script>\"'&"
    method = dataclasses.replace(MAPPO, title=evil)
    grid = Grid("g", evil, (method,), ("8m",), (1, 2), steps=100_000)
    for cell in grid.cells():
        write_cell(tmp_path, cell, [3, 6], version=evil)
    page = page_of(grid, tmp_path)
    assert len(page.all("script")) == 1 and "alert" not in page.all("script")[0].text
    assert page.all("h1")[0].text == evil
    assert evil in section(page, "cells").text


def test_data_alone_gives_the_same_page_without_links(folder, page, tmp_path):
    output.from_data(GRID, folder, tmp_path)
    again = (tmp_path / "index.html").read_text()
    original = (folder / "index.html").read_text()
    assert re.sub(r'<a href="cells/[^"]*">([^<]*)</a>', r"\1", original) == again
    assert "cells/" not in again and len(original) > len(again)


def test_the_same_results_give_the_same_page(folder, page):
    before = (folder / "index.html").read_bytes()
    output.write(GRID, folder)
    assert (folder / "index.html").read_bytes() == before


def test_dots_stand_where_their_values_are():
    axis = Axis("percent", domain=(0, 1))
    drawn = Tree(dot_plot([Dot("a", 0.25, "c1", 0.0, 0.5), Dot("b", 0.5, "c2")], axis, 400, ""))
    first, second = (one.attributes for one in drawn.root.all("circle", class_="dot"))
    (interval,) = (one.attributes for one in drawn.root.all("line", class_="interval"))
    assert float(interval["x2"]) == pytest.approx(float(second["cx"]))
    middle = (float(interval["x1"]) + float(interval["x2"])) / 2
    assert float(first["cx"]) == pytest.approx(middle, abs=0.01)
    assert float(first["cy"]) < float(second["cy"])


def test_equal_values_lie_on_the_diagonal():
    axis = Axis("percent", "x", domain=(0, 1))
    points = [Point(share, share, "c1", "") for share in (0.0, 0.3, 1.0)]
    drawing = Tree(scatter(points, axis, axis, Size(400, 300, 4, 4), "")).root
    (line,) = (one.attributes for one in drawing.all("line", class_="reference"))
    x1, x2, y1, y2 = (float(line[name]) for name in ("x1", "x2", "y1", "y2"))
    for circle in drawing.all("circle"):
        x, y = float(circle.attributes["cx"]), float(circle.attributes["cy"])
        assert (y - y1) * (x2 - x1) == pytest.approx((x - x1) * (y2 - y1), abs=5)
