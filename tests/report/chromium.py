"""A headless Chromium over its debugging pipe: nothing but the standard library, and no port that others could reach."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-quic", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--hide-scrollbars",
    "--remote-debugging-pipe", "--window-size=1100,1000",
)  # fmt: skip


def find_chromium() -> str | None:
    """The browser of this machine, or None: Debian calls it chromium, others chromium-browser or google-chrome."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for path in map(shutil.which, names) if path), None)


class Browser:
    """One page in one browser.

    Attributes:
        requests: URLs that the page asked for, itself included. errors: what its console complained about.
    """

    def __init__(self, program: str, profile: Path) -> None:
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        self._buffer = b""
        self._count = 0
        self.requests: list[str] = []
        self.errors: list[str] = []
        # Chromium reads commands from descriptor 3 and answers on 4; the shell puts ours there.
        script = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        command = ["bash", "-c", script, program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(to_read, to_write), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        pages = self._send("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        with contextlib.suppress(OSError, RuntimeError, TimeoutError):
            self._send("Browser.close")
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def open(self, path: Path) -> None:
        """Show a file and wait until it is loaded."""
        self.requests.clear()
        self.errors.clear()
        self.call("Page.navigate", url=path.as_uri())
        while self.js("document.readyState") != "complete" or not self.js("location.href").startswith("file:"):
            time.sleep(0.05)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._send(method, self._session, **params)

    def js(self, expression: str) -> Any:
        """The value of a JavaScript expression; raises RuntimeError where it throws."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """A key, pressed and released, as a person would."""
        text = {"text": key} if len(key) == 1 else {}
        code = {"Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "Escape": 27}.get(key, ord(key.upper()[0]))
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more)

    def look(self, dark: bool = False, media: str = "screen") -> None:
        """Show the page as in a light or dark system, on a screen or on paper."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[feature])

    def screenshot(self, path: Path, whole: bool = False) -> None:
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def _send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._count += 1
        number = self._count
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        for answer in self._messages():
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._note(answer)
        raise RuntimeError(f"the browser ended before it answered {method}")

    def _messages(self) -> Iterator[dict[str, Any]]:
        while True:
            while b"\0" in self._buffer:
                message, self._buffer = self._buffer.split(b"\0", 1)
                yield json.loads(message)
            if not select.select([self._from], [], [], 120)[0]:
                raise TimeoutError("the browser has not answered for two minutes")
            data = os.read(self._from, 2**16)
            if not data:
                return
            self._buffer += data

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(str(params["entry"]))
