"""HTML and SVG as nested calls: what is not markup already is escaped, and every tag is closed."""

from __future__ import annotations

import html

VOID = frozenset({"br", "col", "hr", "link", "meta"})
"""Elements that hold nothing."""


class Markup(str):
    """Text that is markup and goes into a page as it stands."""


def tag(name: str, /, *children: str | None, **attributes: str | float | None) -> Markup:
    """An element. `class_` is the attribute class, `data_x` is data-x; None is left out."""
    written = "".join(
        f' {_attribute_name(key)}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{joined(*children)}</{name}>")


def joined(*children: str | None) -> Markup:
    """Markup as it is, text escaped, None left out."""
    return Markup("".join(_escaped(child) for child in children if child is not None))


def _escaped(child: str) -> str:
    return child if isinstance(child, Markup) else html.escape(child)


def _attribute_name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")
