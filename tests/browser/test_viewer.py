"""The viewer in a real browser: what a person does with it, and that it asks for nothing."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from chromium import Browser, Page, chromium

from majepa.envs import make_env
from majepa.envs.scripted import scripted_policy
from majepa.recording import Recording, ScriptedPlayer, record
from majepa.viewer.page import embed, to_html

pytestmark = pytest.mark.browser


class HesitantPlayer:
    """Mostly what the nearest policy does, with probabilities for everything else."""

    name, choice = "hesitant", "sampled"

    def __init__(self, spec) -> None:
        self.policy = jax.jit(scripted_policy("nearest", spec))

    def begin(self) -> None:
        return None

    def act(self, carry, row, key):
        wish = jax.nn.one_hot(self.policy(row.observation, row.legal, key), row.legal.shape[-1])
        log_probs = jax.nn.log_softmax(jnp.where(row.legal, 3.0 * wish, -jnp.inf))
        return jax.random.categorical(key, log_probs), log_probs, None


@pytest.fixture(scope="module")
def recording() -> Recording:
    env = make_env("2s3z")
    return record(env, HesitantPlayer(env.spec), seed=1)


@pytest.fixture(scope="module")
def file(recording, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("viewer") / "battle.html"
    path.write_text(to_html(recording), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@pytest.fixture
def page(browser: Browser, file: Path):
    page = browser.open(file.as_uri())
    yield page
    assert page.complaints() == []
    assert page.requests() == [file.as_uri()], "nothing is asked of any network"


def step_of(page: Page) -> int:
    return int(page.evaluate("document.body.dataset.step"))


def text_of(page: Page, selector: str) -> str:
    return page.evaluate(f"document.querySelector('{selector}').innerText")


def centre_of(page: Page, selector: str) -> tuple[float, float]:
    box = page.evaluate(f"document.querySelector('{selector}').getBoundingClientRect().toJSON()")
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def pixels(page: Page) -> str:
    return page.evaluate("document.querySelector('canvas').toDataURL()")


def test_the_page_says_what_it_shows(page, recording):
    assert text_of(page, "h1") == "2s3z"
    assert text_of(page, "#outcome").lower() == recording.outcome
    played = text_of(page, "#played")
    assert "hesitant" in played and "seed 1" in played and "sampled" in played
    assert step_of(page) == 0
    units = page.evaluate("majepaViewer.units()")
    rows = recording.steps[0].units
    assert [(u["x"], u["y"]) for u in units] == [(row.x, row.y) for row in rows]


def test_space_plays_and_pauses_and_units_move_smoothly(page, recording):
    start = page.evaluate("majepaViewer.units()")
    picture = pixels(page)
    page.press(" ")
    page.wait_for("majepaViewer.step >= 3")
    page.press(" ")
    assert not page.evaluate("'playing' in document.body.dataset")
    assert pixels(page) != picture
    now = page.evaluate("majepaViewer.units()")
    assert any(a["x"] != b["x"] for a, b in zip(start, now, strict=True))
    before, after = recording.steps[step_of(page)], recording.steps[step_of(page) + 1]
    for unit, a, b in zip(now, before.units, after.units, strict=True):
        assert min(a.x, b.x) - 1e-6 <= unit["x"] <= max(a.x, b.x) + 1e-6


def test_a_battle_plays_to_its_end_and_from_the_start_again(page, recording):
    last = len(recording.steps) - 1
    page.evaluate(f"majepaViewer.seek({last - 1})")
    page.click(*centre_of(page, "#play"))
    page.wait_for(f"majepaViewer.step === {last} && !('playing' in document.body.dataset)")
    page.press(" ")
    page.wait_for("majepaViewer.step < 3")
    page.press(" ")


def test_scrubbing_and_stepping(page, recording):
    last = len(recording.steps) - 1
    x, y = centre_of(page, "#scrub")
    page.click(x, y)
    assert abs(step_of(page) - last / 2) <= 1
    middle = step_of(page)
    page.press("ArrowRight")
    assert step_of(page) == middle + 1
    page.click(*centre_of(page, "#back"))
    page.press("ArrowLeft")
    assert step_of(page) == middle - 1
    page.press("End")
    assert step_of(page) == last
    assert text_of(page, "#return") == f"{recording.steps[-1].total_reward:.2f}"
    page.press("ArrowRight")
    assert step_of(page) == last
    page.press("Home")
    page.press("ArrowLeft")
    assert step_of(page) == 0
    page.click(*centre_of(page, "#returns"))
    assert abs(step_of(page) - last / 2) <= 1


@pytest.mark.parametrize("index", [1, 7])
def test_hovering_shows_the_numbers_of_that_unit(page, recording, index):
    page.evaluate("majepaViewer.seek(4)")
    unit = page.evaluate("majepaViewer.units()")[index]
    page.hover_until(unit["pageX"], unit["pageY"], "!document.querySelector('#tip').hidden")
    facts, row = recording.header.units[index], recording.steps[4].units[index]
    words = text_of(page, "#tip")
    assert unit["name"] in words.lower() and facts.side in words
    assert f"{row.hp:g} / {facts.hp_max:g}" in words
    assert f"{round(row.shield, 1):g} / {facts.shield_max:g}" in words
    page.hover_until(2, 2, "document.querySelector('#tip').hidden")


def chances(page: Page) -> list[float]:
    rows = "[...document.querySelectorAll('#actions .legal')]"
    return page.evaluate(f"{rows}.map((row) => Number(row.dataset.probability))")


def test_a_chosen_agent_shows_its_legal_actions_and_probabilities(page, recording):
    page.evaluate("majepaViewer.seek(12)")
    picture = pixels(page)
    unit = page.evaluate("majepaViewer.units()")[0]
    page.click(unit["pageX"], unit["pageY"])
    assert page.evaluate("document.body.dataset.agent") == "0"
    assert pixels(page) != picture, "what it does not see is dimmed"
    step = recording.steps[12]
    assert chances(page) == list(step.probabilities[0])
    assert sum(chances(page)) == pytest.approx(1, abs=2e-3)
    name = recording.header.action_names[step.orders[0]]
    chosen = "document.querySelector('#actions .chosen')"
    assert name in page.evaluate(f"{chosen}.title")
    assert page.evaluate(f"{chosen}.querySelector('.mark').textContent") == "●"
    ally = step.units[0]
    seen = [(u.x - ally.x) ** 2 + (u.y - ally.y) ** 2 < 81 and u.alive for u in step.units]
    enemies = sum(seen[5:])
    assert f"{enemies} {'enemy' if enemies == 1 else 'enemies'}" in text_of(page, "#sees")
    page.press("Escape")
    assert page.evaluate("document.querySelector('#agent').hidden")


def test_agents_are_reached_with_the_keyboard(page):
    for _ in range(30):
        page.press("Tab")
        if page.evaluate("document.activeElement.dataset.agent") == "2":
            break
    page.press("Enter")
    assert page.evaluate("document.body.dataset.agent") == "2"
    assert chances(page)


def test_themes_and_narrow_windows(page):
    light = pixels(page)
    page.prefer("dark")
    page.wait_for(f"document.querySelector('canvas').toDataURL() !== {light!r}")
    page.resize(400, 800)
    page.wait_for("document.querySelector('canvas').clientWidth < 400")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_paper_shows_the_end(page, tmp_path):
    page.evaluate(
        "window.addEventListener('beforeprint', () => { window.printed = majepaViewer.step })"
    )
    page.print(tmp_path / "battle.pdf")
    assert page.evaluate("printed") == page.evaluate("Number(document.querySelector('#scrub').max)")
    assert step_of(page) == 0


def test_a_scripted_policy_has_actions_but_no_probabilities(browser, tmp_path):
    env = make_env("3m")
    battle = record(env, ScriptedPlayer.named("stop", env.spec), seed=0, max_steps=3)
    path = tmp_path / "scripted.html"
    path.write_text(to_html(battle), encoding="utf-8")
    page = browser.open(f"{path.as_uri()}#step=2&agent=1")
    assert step_of(page) == 2 and text_of(page, "#outcome").lower() == "stopped"
    assert "no probabilities" in text_of(page, "#remark")
    assert "stop" in page.evaluate("document.querySelector('#actions .chosen').title")
    assert page.complaints() == []


def test_several_viewers_share_a_page(browser, recording, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(f"<!doctype html><title>r</title>{embed(recording)}{embed(recording)}")
    page = browser.open(path.as_uri())
    frame = "document.querySelectorAll('iframe')[{}].contentWindow"
    one, two = frame.format(0), frame.format(1)
    page.wait_for(f"{one}.majepaViewer && {two}.majepaViewer && true")
    page.evaluate(f"{one}.majepaViewer.seek(5), {one}.majepaViewer.choose(1)")
    assert page.evaluate(f"{one}.document.body.dataset.step") == "5"
    assert page.evaluate(f"{two}.document.body.dataset.step") == "0"
    assert page.evaluate(f"{two}.document.body.dataset.agent") == ""
    assert page.complaints() == []
    assert [url for url in page.requests() if not url.startswith("about:")] == [path.as_uri()]
