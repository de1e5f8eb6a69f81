"""One page that tells how a run went: no server, no network, nothing beside it."""

from __future__ import annotations

from pathlib import Path

from ..files import written_beside
from .data import ReportError as ReportError
from .data import read_run
from .page import page

NAME = "report.html"


def write_report(folder: Path, battle_html: str | None = None, *, out: Path | None = None) -> Path:
    """Write the page of a run to `out`, by default into its folder, and say where it is.

    `battle_html` is a fragment of HTML to show a battle in, such as an iframe with `srcdoc`.
    """
    text = page(read_run(folder), battle_html)
    out = out or folder / NAME
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a folder; name a file such as {out / NAME}")
    with written_beside(out) as partial:
        partial.write_text(text, encoding="utf-8")
    return out
