"""A document of sections: a head that lets nothing in from outside, contents, the sections."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from .html import Markup, tag

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; media-src data: blob:; base-uri 'none'; "
    "form-action 'none'"
)
"""What the page may load: only what stands in it, or in a battle embedded in it."""


@dataclasses.dataclass(frozen=True)
class Section:
    identifier: str
    title: str
    content: Markup
    introduction: str = ""


def document(title: str, header: Markup, sections: Sequence[Section], style: str = "") -> str:
    """All of it as text; `style` is CSS on top of that of every page."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(_file("style.css") + style)),
    )
    body = tag(
        "body",
        header,
        _contents(sections),
        tag("main", *(_section(section) for section in sections)),
        tag("script", Markup(_file("readout.js"))),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def absent(text: str) -> Markup:
    """What stands where there is nothing to show."""
    return tag("p", text, class_="absent")


def _contents(sections: Sequence[Section]) -> Markup:
    links = [tag("li", tag("a", one.title, href=f"#{one.identifier}")) for one in sections]
    return tag("nav", tag("ol", *links), aria_label="Contents")


def _section(section: Section) -> Markup:
    return tag(
        "section",
        tag("h2", section.title),
        tag("p", section.introduction, class_="introduction") if section.introduction else None,
        section.content,
        id=section.identifier,
    )


def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
