"""The report in a real browser: drawn without errors, without network, with a battle that plays."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from chromium import Browser, Page, chromium

from majepa.config import preset, to_json
from majepa.envs import make_env
from majepa.recording import ScriptedPlayer, record
from majepa.report import write_report
from majepa.viewer.page import embed

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run of ten lines that learned something."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    folder.mkdir()
    config = dataclasses.replace(preset("majepa", "small", "sim:3m"), steps=1_000)
    (folder / "config.json").write_text(json.dumps(to_json(config)))
    (folder / "versions.json").write_text(json.dumps({"majepa": "0", "environment_version": "1.0"}))
    lines, episodes = [], []
    for step in range(1, 11):
        rate, at = step / 10, 100 * step
        kind = "final" if step == 10 else "training"
        lines.append({
            "transitions": at, "seconds": 10.0 * step, "updates": step, "kind": kind,
            "evaluation/win_rate": rate, "evaluation/win_rate_low": max(rate - 0.1, 0),
            "evaluation/win_rate_high": min(rate + 0.1, 1), "evaluation/sampled_win_rate": rate / 2,
            "evaluation/return": 20 * rate, "evaluation/episodes": 10, "loss/model": 10 - step,
            **{f"rollout/reward_error_{k}": 0.1 * k / step for k in range(1, 6)},
        })  # fmt: skip
        for actions in ("argmax", "sampled"):
            episodes += [
                {"transitions": at, "kind": kind, "actions": actions, "episode": index,
                 "won": index < step, "return": 2.0 * step, "length": 20}
                for index in range(10)
            ]  # fmt: skip
    for name, records in (("metrics", lines), ("evaluations", episodes)):
        text = "".join(f"{json.dumps(record)}\n" for record in records)
        (folder / f"{name}.jsonl").write_text(text)
    env = make_env("3m")
    battle = record(env, ScriptedPlayer.named("nearest", env.spec), seed=0)
    write_report(folder, embed(battle))
    return folder


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


def opened(browser: Browser, folder: Path, **options) -> Page:
    return browser.open((folder / "report.html").as_uri(), **options)


def test_it_loads_without_a_complaint_and_asks_for_nothing(browser, folder):
    page = opened(browser, folder)
    page.wait_for("document.querySelectorAll('.line-chart').length > 3")
    assert page.complaints() == []
    assert [url for url in page.requests() if url.startswith(("http", "ws", "ftp"))] == []
    assert "100" in page.evaluate("document.body.innerText")


def test_the_battle_in_it_plays(browser, folder):
    page = opened(browser, folder)
    inside = "document.querySelector('#battle iframe').contentWindow"
    page.wait_for(f"{inside} && {inside}.majepaViewer")
    before = page.evaluate(f"JSON.stringify({inside}.majepaViewer.units())")
    page.evaluate(f"{inside}.majepaViewer.play()")
    page.wait_for(f"Number({inside}.document.body.dataset.step) > 3")
    assert page.evaluate(f"JSON.stringify({inside}.majepaViewer.units())") != before
    assert page.complaints() == []


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_sticks_out(browser, folder, width):
    page = opened(browser, folder, width=width)
    page.wait_for("document.querySelectorAll('.line-chart').length > 3")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_chart_says_its_numbers_under_the_pointer(browser, folder):
    page = opened(browser, folder)
    page.wait_for("document.querySelectorAll('.line-chart').length > 3")
    page.evaluate("document.querySelector('.line-chart').scrollIntoView({block: 'center'})")
    box = "document.querySelector('.line-chart').getBoundingClientRect()"
    left, top, width, height = (
        page.evaluate(f"{box}.{side}") for side in ("left", "top", "width", "height")
    )
    said = "[...document.querySelectorAll('.readout')].some(x => x.textContent.trim())"
    page.hover_until(left + 0.5 * width, top + 0.5 * height, said)
