"""A recorded battle as one HTML page that needs nothing else: no network, no other file.

The page holds a style, a script and the recording. Its content security policy lets exactly this
style and this script run, and nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib import resources
from typing import Any

from ..envs.sim.render import bounds
from ..envs.sim.scene import Scene
from ..recording import Recording, to_json

EMBEDDED_HEIGHT = 720


def to_html(recording: Recording) -> str:
    """A page to open in a browser; `#step=30&agent=1` at the end of its address starts there."""
    style, script = _asset("viewer.css"), _asset("field.js") + _asset("viewer.js")
    policy = f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}"
    parts = {
        "policy": policy,
        "title": html.escape(_title(recording)),
        "style": style,
        "data": _inert(_data(recording)),
        "script": script,
    }
    return re.sub(r"{{(\w+)}}", lambda place: parts[place[1]], _asset("viewer.html"))


def embed(recording: Recording, *, height: int = EMBEDDED_HEIGHT) -> str:
    """The same page as an element of another one; there may be several, each a world of its own."""
    return (
        f'<iframe class="majepa-viewer" title="{html.escape(_title(recording))}" width="100%" '
        f'height="{height}" frameborder="0" srcdoc="{html.escape(to_html(recording))}"></iframe>'
    )


def _title(recording: Recording) -> str:
    header = recording.header
    return f"{recording.map_name}: {header.player}, {recording.outcome or 'stopped'}"


def _data(recording: Recording) -> dict[str, Any]:
    """The recording as on file, and what the package knows how to derive from it."""
    return {
        "recording": json.loads(to_json(recording)),
        "map": recording.map_name,
        "bounds": bounds(recording.header.terrain),
        "attacks": [_attacks(scene) for scene in recording.scenes()],
    }


def _attacks(scene: Scene) -> list[tuple[int, int]]:
    index = {id(unit): number for number, unit in enumerate(scene.units)}
    return [(index[id(unit)], index[id(target)]) for unit, target in scene.attacks()]


def _inert(data: dict[str, Any]) -> str:
    """JSON that cannot end the element it stands in, whatever names it holds."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return resources.files("majepa.viewer").joinpath(name).read_text(encoding="utf-8")
