"""What is seen of a grid while it runs."""

import io

import pytest
from rich.console import Console
from tiny_grids import TINY, begin, finish, progress

from majepa.benchmark import live
from majepa.benchmark.jobs import jobs_of
from majepa.benchmark.live import Board, Panel, make_board

LARGE, SMALL = jobs_of(TINY.cells())


def console(*, terminal=False):
    return Console(file=io.StringIO(), width=100, force_terminal=terminal, color_system=None)


def shown(board):
    target = console()
    target.print(board.picture())
    text = target.file.getvalue()
    return {
        row.split("│")[1].strip(): row.split("│")[2].strip()
        for row in text.splitlines()
        if row.startswith("│")
    }, text


@pytest.fixture
def board(tmp_path):
    return Board(tmp_path, TINY, console())


def lines(board):
    return board.console.file.getvalue().splitlines()


def test_nothing_yet(board):
    rows, text = shown(board)
    assert rows == {"3m": "-", "2m_vs_1z": "-"}
    assert "0 of 4 runs finished; jobs: 0 running, 0 waiting, 0 failed" in text
    assert "MAPPO" in text and "Tiny" in text


def test_running_jobs_show_how_far_they_are(board, tmp_path, monkeypatch):
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.0)
    board.started(LARGE, 1, "here")
    first, second = (begin(tmp_path, cell) for cell in LARGE.cells)
    progress(first, 1_000, 0.5)
    progress(second, 500, 0.25)
    board.refresh(1)
    rows, text = shown(board)
    # The last of the runs, and the mean over them.
    assert rows["3m"] == "500/2000 37.5%"
    assert "1 running, 1 waiting" in text


def test_finished_cells_show_their_win_rate(board, tmp_path):
    board.started(LARGE, 1, "here")
    for cell, wins in zip(LARGE.cells, (1, 4), strict=True):
        finish(tmp_path, cell, wins)
    board.ended(LARGE, "finished", 61.0, None, again=False)
    rows, text = shown(board)
    assert rows == {"3m": "62.5%", "2m_vs_1z": "-"}
    assert "2 of 4 runs finished" in text
    assert lines(board)[-1].endswith("mappo-3m finished after 0:01:01: 25.0%, 100.0% won")


def test_failures_are_shown(board):
    board.started(SMALL, 1, "here")
    board.ended(SMALL, "failed", 5.0, "exit code 1", again=True)
    assert shown(board)[0]["2m_vs_1z"] == "-"
    board.started(SMALL, 2, "here")
    board.ended(SMALL, "failed", 5.0, "exit code 1", again=False)
    rows, text = shown(board)
    assert rows["2m_vs_1z"] == "failed"
    assert "1 failed (2 failed attempts)" in text
    assert "attempt 2" in lines(board)[-2]
    assert lines(board)[-1].endswith("failed after 0:00:05: exit code 1")


def test_a_job_that_was_stopped_has_not_failed(board):
    board.started(SMALL, 1, "here")
    board.ended(SMALL, "stopped", 5.0, "it was asked to stop", again=False)
    rows, text = shown(board)
    assert rows["2m_vs_1z"] == "-" and "0 failed (0 failed attempts)" in text
    assert lines(board)[-1].endswith("mappo-2m_vs_1z stopped after 0:00:05")


def test_lines_tell_of_running_jobs_now_and_then(board, tmp_path, monkeypatch):
    board.started(LARGE, 1, "here")
    progress(begin(tmp_path, LARGE.cells[0]), 1_000, 0.5)
    board.refresh(0)
    assert len(lines(board)) == 1
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(live, "LINE_SECONDS", 0.0)
    board.refresh(0)
    assert lines(board)[1].endswith("mappo-3m 0/2000 50.0%")


def test_what_was_there_before_counts(tmp_path):
    finish(tmp_path, LARGE.cells[0], wins=4)
    rows, text = shown(Board(tmp_path, TINY, console()))
    assert rows["3m"] == "0/2000 100.0%"
    assert "1 of 4 runs finished" in text


def test_a_terminal_gets_the_table_and_the_rest_lines(tmp_path):
    assert type(make_board(tmp_path, TINY, console())) is Board
    with make_board(tmp_path, TINY, console(terminal=True)) as panel:
        assert type(panel) is Panel
        panel.started(LARGE, 1, "here")
        panel.refresh(0)
    text = panel.console.file.getvalue()
    assert "mappo-3m started on here" in text
    assert "2m_vs_1z" in text and "1 running" in text


def test_large_numbers_are_short():
    assert [live._short(count) for count in (0, 9_999, 42_300, 400_000)] == [
        "0", "9999", "42k", "400k",
    ]  # fmt: skip
