"""A headless Chromium that is spoken to through two pipes (the DevTools protocol). `page_in_browser` looks at pages in
it; the test suite needs no browser."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-headless-shell", "google-chrome", "chromium-browser", "chrome")
_TIMEOUT = 30.0


def found() -> str | None:
    """The path of an installed browser."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab.

    Args:
        path: of the executable.

    Attributes:
        events: what the browser said by itself, in order.
    """

    def __init__(self, path: str) -> None:
        self.events: list[dict[str, Any]] = []
        self._number = 0
        self._rest = b""
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # its helpers end a little later
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # The browser reads its descriptor 3 and writes its descriptor 4.
        shell = f'exec 3<&{to_read} 4>&{to_write}; exec "$0" "$@"'
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            ["bash", "-c", shell, path, *flags, f"--user-data-dir={self._folder.name}"],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session: str | None = None
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self(f"{domain}.enable")

    _session: str | None = None

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(10)
        os.close(self._read)
        os.close(self._write)
        self._folder.cleanup()

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask, and wait for the answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            said = self._next()
            if said.get("id") == self._number:
                if "error" in said:
                    raise RuntimeError(f"{method}: {said['error']}")
                result: dict[str, Any] = said["result"]
                return result
            self.events.append(said)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + _TIMEOUT
        while b"\0" not in self._rest:
            if not select.select([self._read], [], [], max(end - time.monotonic(), 0.0))[0]:
                raise TimeoutError("the browser said nothing")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise RuntimeError("the browser ended")
            self._rest += part
        whole, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(whole)
        return message

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False, media: str = "") -> None:
        """Show a page, and wait until it is loaded."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.events.clear()
        self("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        done = self("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(f"{expression}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key: "Tab", "Enter", " "."""
        codes = {"Tab": 9, "Enter": 13, " ": 32}
        text = {"Enter": "\r", " ": " "}.get(key, "")
        common: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": codes[key], "text": text}
        self("Input.dispatchKeyEvent", type="keyDown", **common)
        self("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=codes[key])

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Write the page, or what the window shows of it, as a PNG."""
        shot = self("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def printed(self, path: Path) -> None:
        """Print to a PDF, A4."""
        made = self(
            "Page.printToPDF", printBackground=False, paperWidth=8.27, paperHeight=11.69, preferCSSPageSize=True
        )
        path.write_bytes(base64.b64decode(made["data"]))
