"""Python in the README and the docs runs as it stands there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md", "docs/environments.md", "docs/new-maps.md", "docs/watching.md", "docs/training.md",
)  # fmt: skip


def blocks(page: str) -> list[str]:
    text = (ROOT / page).read_text()
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run(page):
    found = [block for block in blocks(page) if "Protocol" not in block]
    assert found
    namespace: dict[str, object] = {"__name__": "docs"}
    for block in found:
        exec(compile(block, page, "exec"), namespace)


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
