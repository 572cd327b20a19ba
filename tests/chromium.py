"""A real browser to open pages in: Chromium without a window, spoken to over its pipe (the DevTools protocol)."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars", "--remote-debugging-pipe"),
)
PATIENCE = 60.0


class Browser:
    """One page of a browser. What goes wrong in it is gathered in `errors`."""

    def __init__(self, orders: int, answers: int) -> None:
        self._orders, self._answers = orders, answers
        self._rest, self._number, self._session = b"", 0, {}
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Gives an order and waits for its answer."""
        self._send(method, **parameters)
        answer = self._wait("id", self._number)
        assert "error" not in answer, f"{method}: {answer}"
        return answer["result"]

    def open(self, path: Path) -> None:
        """Loads a file."""
        self.errors.clear()
        self._send("Page.navigate", url=path.as_uri())
        self._wait("method", "Page.loadEventFired")

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def colors(self, scheme: str) -> None:
        """light or dark, as the reader prefers."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def eval(self, expression: str) -> Any:
        """The value of an expression in the page, or of its promise, in JSON's types."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """A key, down and up."""
        for kind, typed in (("keyDown", text), ("keyUp", "")):
            self.call("Input.dispatchKeyEvent", type=kind, text=typed, key=key, code=key, windowsVirtualKeyCode=code)

    def click(self, selector: str) -> None:
        self.eval(f"document.querySelector({json.dumps(selector)}).click()")

    def _send(self, method: str, **parameters: Any) -> None:
        self._number += 1
        order = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._orders, json.dumps(order).encode() + b"\0")

    def _wait(self, key: str, value: Any) -> dict[str, Any]:
        """The next message with this entry; errors among those before it are kept."""
        while True:
            while b"\0" not in self._rest:
                assert select.select([self._answers], [], [], PATIENCE)[0], "the browser does not answer"
                part = os.read(self._answers, 1 << 20)
                assert part, "the browser has gone"
                self._rest += part
            text, _, self._rest = self._rest.partition(b"\0")
            message = json.loads(text)
            if message.get(key) == value:
                return message
            logged = message.get("params", {}).get("entry", {}).get("level") in ("error", "warning")
            if logged or message.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
                self.errors.append(str(message["params"]))


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser that begins with an empty profile, reads its orders from 3 and answers on 4, and ends."""
    theirs, orders = os.pipe()
    answers, back = os.pipe()
    shell = ("bash", "-c", f'exec "$@" 3<&{theirs} 4>&{back}', "bash")
    command = [*shell, str(BINARY), *FLAGS, f"--user-data-dir={profile}"]
    with subprocess.Popen(command, pass_fds=(theirs, back), stdout=-3, stderr=-3) as process:
        os.close(theirs)
        os.close(back)
        try:
            yield Browser(orders, answers)
        finally:
            process.kill()
            os.close(orders)
            os.close(answers)
