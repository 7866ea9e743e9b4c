"""A headless Chromium from PATH, driven over its debugging pipe with the standard library only."""

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.conftest import not_run
from tests.patience import PATIENCE

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Puts the pipe's ends where Chromium looks for them: it reads 3 and writes 4.
_START = (
    "import os, sys; ends = [os.dup(int(fd)) for fd in sys.argv[1:3]]; "
    "[(os.dup2(fd, to), os.set_inheritable(to, True)) for fd, to in zip(ends, (3, 4))]; "
    "os.execvp(sys.argv[3], sys.argv[3:])"
)
# Events that mean something went wrong in the page.
BAD = ("Runtime.exceptionThrown", "Log.entryAdded", "Network.loadingFailed")


class Page:
    """One tab. `events` are all messages so far; every wait ends after `timeout` seconds."""

    def __init__(self, read: int, write: int, timeout: float = PATIENCE) -> None:
        self._read, self._write, self._timeout = read, write, timeout
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)  # as the window in front

    def call(self, method: str, **params: Any) -> Any:
        """Send a command, return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, path: Path) -> None:
        """Load a file, wait until it has loaded and what follows its first layout has run."""
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._message()
        self.settle()

    def settle(self) -> None:
        """Wait until two frames were drawn: observers of sizes have run, and what they changed."""
        self.evaluate("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of the page, of a promise what it gives."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def click(self, selector: str) -> None:
        """Click the middle of an element with the mouse."""
        where = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', inline: 'center'});"
            "const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=where[0],
                y=where[1],
                button="left",
                clickCount=1,
            )

    def show(self, width: int, scheme: str = "light", height: int = 1000, scale: float = 1) -> None:
        """Give the window a size in CSS pixels and the system a scheme, `light` or `dark`."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def press(self, key: str) -> None:
        """Press and release a key by its DOM name: Tab, Enter, ArrowDown, Escape."""
        codes = {
            "Tab": 9,
            "Enter": 13,
            "Escape": 27,
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
        }
        text = {"text": "\r"} if key == "Enter" else {}
        for kind, more in (("keyDown", text), ("keyUp", {})):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
                **more,
            )

    def picture(self, whole: bool = False) -> bytes:
        """Return a screenshot of what is seen, or of the whole page, as PNG."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(found["data"])

    def requests(self) -> list[str]:
        """Return the addresses the page asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[dict[str, Any]]:
        """Return what went wrong: exceptions, console errors, requests that failed."""
        return [
            event
            for event in self.events
            if event["method"] in BAD
            or event["params"].get("type") in ("error", "warning", "assert")  # of a console call
        ]

    def _message(self) -> Any:
        end = time.monotonic() + self._timeout
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has gone"
            self._buffer += data
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(raw)
        if "method" in message:
            self.events.append(message)
        return message


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Start a browser with a profile of its own in `folder`; NOT-RUN without one in PATH."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        not_run(f"none of {', '.join(NAMES)} is in PATH")
    to_browser, from_browser = os.pipe(), os.pipe()
    ends = (to_browser[0], from_browser[1])
    command = [
        sys.executable, "-c", _START, *map(str, ends), str(program), "--headless=new",
        "--remote-debugging-pipe", f"--user-data-dir={folder}", "--no-first-run", "--disable-gpu",
        "--disable-quic", "--disable-background-networking", "--disable-component-update",
        "--disable-sync", "--window-size=1400,1200",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
    ]  # fmt: skip
    child = subprocess.Popen(
        command,
        pass_fds=ends,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for end in ends:
        os.close(end)
    try:
        yield Page(from_browser[0], to_browser[1])
    finally:
        for end in (from_browser[0], to_browser[1]):
            os.close(end)  # a closed pipe ends the browser
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait(20)
