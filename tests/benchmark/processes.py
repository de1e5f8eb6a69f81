"""Processes of this machine, as its kernel lists them."""

from collections.abc import Iterator
from pathlib import Path


def workers_on(part: str) -> list[int]:
    """Those that work on jobs with this in the path of their file, whoever started them."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"majepa.benchmark.work" in command and part.encode() in command[-2]:
                found.append(int(folder.name))
    return found


def ancestors(process: int) -> Iterator[int]:
    """Who started a process, who started that one, and so on."""
    while process > 1:
        # The second word is a name in brackets, which may hold anything.
        status = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2]
        process = int(status.split()[1])
        yield process
