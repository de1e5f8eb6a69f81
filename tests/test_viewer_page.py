"""The viewer's page as text: whole, inert whatever names it holds, and shut to the network."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import json
import re

import pytest

from majepa.envs import make_env
from majepa.recording import Recording, ScriptedPlayer, from_json, record
from majepa.viewer.page import embed, to_html

NASTY = '</script><script>alert("{{script}}")</script><!-- & \u2028'


@pytest.fixture(scope="module")
def recording() -> Recording:
    env = make_env("3m")
    return record(env, ScriptedPlayer.named("nearest", env.spec), seed=0)


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="battle">(.*?)</script>', page, re.S)
    return json.loads(found[1])


def test_the_page_holds_the_recording_and_its_attacks(recording):
    data = data_of(to_html(recording))
    assert from_json(json.dumps(data["recording"])) == recording
    for scene, attacks in zip(recording.scenes(), data["attacks"], strict=True):
        assert [(scene.units[a], scene.units[b]) for a, b in attacks] == list(scene.attacks())


def test_names_cannot_become_code(recording):
    header = dataclasses.replace(recording.header, player=NASTY)
    nasty = dataclasses.replace(recording, header=header)
    page = to_html(nasty)
    assert from_json(json.dumps(data_of(page)["recording"])) == nasty
    assert page.count("<script") == to_html(recording).count("<script") == 2


def test_only_the_style_and_the_script_of_the_page_may_run(recording):
    page = to_html(recording)
    policy = html.unescape(re.search(r'Content-Security-Policy" content="(.*?)"', page)[1])
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.keys() == {"default-src", "style-src", "script-src"}
    assert rules["default-src"] == "'none'"
    for tag in ("style", "script"):
        text = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.S)[1]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert not re.search(r'(src|href)="|url\(|@import|https?://(?!www\.w3\.org/2000/svg)', page)


def test_an_embedded_page_is_the_page(recording):
    frame = embed(recording, height=500)
    assert frame.startswith("<iframe") and frame.endswith("</iframe>") and 'height="500"' in frame
    assert html.unescape(re.search(r'srcdoc="([^"]*)"', frame)[1]) == to_html(recording)
