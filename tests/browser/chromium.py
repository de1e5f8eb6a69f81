"""Headless Chromium, driven over the pipe of its DevTools protocol; needs no other package."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
TIMEOUT = 60.0

# Chromium listens on descriptor 3 and answers on 4, whatever numbers our ends of the pipes have.
LAUNCHER = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def executable() -> str:
    """Where Chromium is: `CHROMIUM`, or the first of its usual names."""
    names = (os.environ["CHROMIUM"],) if "CHROMIUM" in os.environ else NAMES
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise RuntimeError(
            f"these tests need Chromium, and there is no {' or '.join(names)}: "
            "`apt-get install chromium`, or name the program in CHROMIUM"
        )
    return found


class Browser:
    """One Chromium with an empty profile and no network of its own."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer = b""
        self._number = 0
        self._pages: dict[str, Page] = {}

    def open(self, url: str, *, width: int = 1280, height: int = 800, dark: bool = False) -> Page:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        page.prefer("dark" if dark else "light")
        page.go(url)
        return page

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        message |= {"sessionId": session} if session else {}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive(TIMEOUT)
            if answer is None:
                raise TimeoutError(f"Chromium did not answer {method} in {TIMEOUT:g} s")
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """The next message, if one comes in time; events go to their page on the way."""
        while b"\0" not in self._buffer:
            if not select.select([self._answers], [], [], timeout)[0]:
                return None
            chunk = os.read(self._answers, 1 << 20)
            if not chunk:
                raise RuntimeError("Chromium ended")
            self._buffer += chunk
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        page = self._pages.get(message.get("sessionId", ""))
        if page is not None and "method" in message:
            page.events.append((message["method"], message["params"]))
        return message


class Page:
    """One tab, and everything that was reported about it."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser = browser
        self.session = session
        self.events: list[tuple[str, dict[str, Any]]] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def go(self, url: str) -> None:
        self.events.clear()
        failure = self.call("Page.navigate", url=url).get("errorText")
        if failure:
            raise RuntimeError(f"{url}: {failure}")
        self._wait(lambda: any(name == "Page.loadEventFired" for name, _ in self.events), url)
        # Before its first frames a page may miss what the mouse does, or not have its size yet.
        self.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def evaluate(self, expression: str) -> Any:
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Wait until an expression is true, and return its value."""
        return self._wait(lambda: self.evaluate(expression), expression)

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=scale, mobile=False)  # fmt: skip

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def hover(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def hover_until(self, x: float, y: float, expression: str) -> None:
        """Move about a place, as a hand does, until an expression is true."""

        def moved() -> Any:
            self.hover(x + 1, y)
            self.hover(x, y)
            return self.evaluate(expression)

        self._wait(moved, expression)

    def click(self, x: float, y: float) -> None:
        self.hover(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1,
                      clickCount=1)  # fmt: skip

    def press(self, key: str) -> None:
        named = {"key": key, "code": "Space" if key == " " else key}
        codes = {" ": 32, "Tab": 9, "Enter": 13, "Escape": 27}
        named |= {"windowsVirtualKeyCode": codes[key]} if key in codes else {}
        text = {" ": " ", "Enter": "\r"}.get(key)
        self.call(
            "Input.dispatchKeyEvent", type="keyDown", **named, **({"text": text} if text else {})
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def print(self, path: Path) -> None:
        pdf = self.call("Page.printToPDF", printBackground=True)["data"]
        path.write_bytes(base64.b64decode(pdf))

    def requests(self) -> list[str]:
        """What was asked of any network or disk, the page itself included."""
        return [
            params["request"]["url"]
            for name, params in self.events
            if name == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """Exceptions, console messages, and what the browser itself logged."""
        names = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(params) for name, params in self.events if name in names]

    def _wait(self, is_done: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + TIMEOUT
        while not (result := is_done()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {TIMEOUT:g} s for {what}")
            self.browser.receive(0.05)
        return result


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Start Chromium and end it."""
    command_end, commands = os.pipe()
    answers, answer_end = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = [
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--remote-debugging-pipe", "--hide-scrollbars",
            "--disable-background-networking", f"--user-data-dir={profile}",
        ]  # fmt: skip
        launcher = [sys.executable, "-c", LAUNCHER, str(command_end), str(answer_end)]
        process = subprocess.Popen(
            [*launcher, executable(), *flags],
            pass_fds=(command_end, answer_end),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_end)
        os.close(answer_end)
        try:
            yield Browser(commands, answers)
        finally:
            os.close(commands)
            os.close(answers)
            process.terminate()
            process.wait(TIMEOUT)
