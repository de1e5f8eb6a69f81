"""The page of a grid in a real browser: drawn without errors, without network, in both schemes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from chromium import Browser, Page, chromium
from made_up_grid import GRID, write_cell, write_grid

from majepa.benchmark import output

pytestmark = pytest.mark.browser

CHARTS = ("svg.line-chart", "svg.dot-plot", "svg.scatter", "svg.parts")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = write_grid(tmp_path_factory.mktemp("grid"))
    output.write(GRID, folder)
    return folder


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


def opened(browser: Browser, folder: Path, **options) -> Page:
    return browser.open((folder / "index.html").as_uri(), **options)


@pytest.mark.parametrize("dark", [False, True])
def test_it_is_drawn_without_a_complaint_and_asks_for_nothing(browser, folder, dark):
    page = opened(browser, folder, dark=dark)
    for kind in CHARTS:
        boxes = page.evaluate(
            f"[...document.querySelectorAll('{kind}')].map(x => x.getBoundingClientRect().height)"
        )
        assert boxes and min(boxes) > 10, kind
    assert page.complaints() == []
    assert [url for url in page.requests() if url.startswith(("http", "ws", "ftp"))] == []
    ink, paper = (brightness(page, name) for name in ("color", "backgroundColor"))
    assert (ink > paper + 300) if dark else (paper > ink + 300)


def brightness(page: Page, name: str) -> int:
    """Of a colour of the body, from 0 to 765."""
    colour = page.evaluate(f"getComputedStyle(document.body).{name}")
    return sum(int(part) for part in re.findall(r"\d+", colour))


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_sticks_out(browser, folder, width):
    page = opened(browser, folder, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_curve_says_its_numbers_under_the_pointer(browser, folder):
    page = opened(browser, folder)
    page.evaluate("document.querySelector('.line-chart').scrollIntoView({block: 'center'})")
    box = "document.querySelector('.line-chart').getBoundingClientRect()"
    left, top, width, height = (
        page.evaluate(f"{box}.{side}") for side in ("left", "top", "width", "height")
    )
    said = "document.querySelector('.readout').textContent.includes('MAPPO 15.0 %')"
    page.hover_until(left + 0.45 * width, top + 0.5 * height, said)


def test_a_page_without_results_is_drawn(browser, tmp_path):
    write_cell(tmp_path, GRID.cells()[0], [3], kind="stopped")
    output.write(GRID, tmp_path)
    page = opened(browser, tmp_path)
    assert "stopped early" in page.evaluate("document.body.innerText")
    assert page.complaints() == []
