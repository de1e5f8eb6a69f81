"""A page read back as a tree."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser

from majepa.report.html import VOID


@dataclasses.dataclass
class Node:
    name: str
    attributes: dict[str, str]
    children: list[Node | str] = dataclasses.field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def all(self, name: str, **attributes: str) -> list[Node]:
        found = [child for child in self.children if isinstance(child, Node)]
        here = [one for one in found if one.name == name and one.has(**attributes)]
        return here + [deeper for one in found for deeper in one.all(name, **attributes)]

    def has(self, **attributes: str) -> bool:
        return all(
            value in self.attributes.get(key.rstrip("_"), "").split()
            for key, value in attributes.items()
        )


class Tree(HTMLParser):
    """Refuses what a browser would silently mend."""

    def __init__(self, text: str):
        super().__init__()
        self.root = Node("", {})
        self.open = [self.root]
        self.feed(text)
        self.close()
        assert self.open == [self.root], f"{self.open[-1].name} is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"{tag} has an attribute twice"
        node = Node(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().name == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def every(node: Node) -> list[Node]:
    below = [child for child in node.children if isinstance(child, Node)]
    return below + [deeper for child in below for deeper in every(child)]
