"""A headless browser, spoken to in the Chrome DevTools Protocol over two pipes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from base64 import b64decode
from pathlib import Path
from typing import Any

__all__ = ["BROWSER", "NAMES", "Chromium"]

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
ERRORS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
# A frame, and what was waiting for it.
NEXT_FRAME = "new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"


class Chromium:
    """One tab. `console` are the messages since the page was opened."""

    def __init__(self, folder: Path) -> None:
        assert BROWSER is not None
        reading, self._out = os.pipe()
        self._in, writing = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        flags += ["--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
        # The browser reads commands from file descriptor 3 and writes to 4.
        start = f'exec "$@" 3</dev/fd/{reading} 4>/dev/fd/{writing}'
        command = ["sh", "-c", start, "sh", BROWSER, *flags]
        self._process = subprocess.Popen(
            command, pass_fds=(reading, writing), stderr=subprocess.DEVNULL
        )
        os.close(reading)
        os.close(writing)
        self._buffer, self._sent, self._session = b"", 0, ""
        self.console: list[Any] = []
        (tab, *_) = (
            target["targetId"]
            for target in self.send("Target.getTargets")["targetInfos"]
            if target["type"] == "page"
        )
        attached = self.send("Target.attachToTarget", targetId=tab, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.send("Emulation.setFocusEmulationEnabled", enabled=True)

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        self._process.wait(10)

    def send(self, method: str, **parameters: Any) -> Any:
        """Send a command and return its result."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._sent:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._in, 1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if message.get("method") in ERRORS:
            self.console.append(message["params"])
        return message

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a page and wait until it has drawn its charts."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.console = []
        self.send("Page.navigate", url=f"file://{path}")
        # A page that is being left has no `started` either.
        while not self.run(f"location.pathname === {json.dumps(str(path))} && !!document.body"):
            pass
        self.run(
            "new Promise((done) => document.readyState === 'complete' ? done() "
            ": addEventListener('load', done)).then(() => started)"
        )
        self.run(NEXT_FRAME)

    def run(self, expression: str) -> Any:
        """Return the value of an expression in the page; of a promise, what it gives."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press and release keys, and wait for a frame."""
        for key in keys:
            for kind in ("rawKeyDown", "keyUp"):
                self.send("Input.dispatchKeyEvent", type=kind, key=key)
        self.run(NEXT_FRAME)

    def mouse(self, kind: str, x: float, y: float, **details: Any) -> None:
        """Send an event of the mouse, and wait for a frame."""
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **details)
        self.run(NEXT_FRAME)

    def text(self, identifier: str) -> str:
        """Return the text of an element; "" if it is hidden."""
        part = f"document.getElementById({json.dumps(identifier)})"
        text: str = self.run(f"{part}.hidden ? '' : {part}.textContent")
        return text

    def picture(self) -> bytes:
        """Return what the window shows as PNG."""
        return b64decode(self.send("Page.captureScreenshot", format="png")["data"])
