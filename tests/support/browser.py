"""A headless Chromium that a test drives through its DevTools."""

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tornado.websocket import WebSocketClientConnection, websocket_connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_PATIENCE_S = 60.0
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)


class Page:
    """A page that is open."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, connection: WebSocketClientConnection
    ) -> None:
        self._loop, self._connection = loop, connection
        self._number = 0

    def open(self, address: str) -> None:
        """Go to an address."""
        self._tell("Page.navigate", url=address)

    def value(self, expression: str) -> Any:
        """Value of a JavaScript expression on the page."""
        answer = self._tell("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Value of an expression once it is true; fails with the text of the page."""
        end_s = time.monotonic() + _PATIENCE_S
        while not (value := self.value(expression)):
            if time.monotonic() > end_s:
                raise AssertionError(f"{expression}: {self.value('document.body.innerText')}")
            time.sleep(0.05)
        return value

    def resize(self, width: int, *, dark: bool = False) -> None:
        """Make it so wide, in a system that is light or dark."""
        self._tell(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._tell("Emulation.setEmulatedMedia", features=[scheme])

    def _tell(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._loop.run_until_complete(self._told(method, parameters))

    async def _told(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        request = {"id": self._number, "method": method, "params": parameters}
        await self._connection.write_message(json.dumps(request))
        while True:
            said = await asyncio.wait_for(self._connection.read_message(), _PATIENCE_S)
            assert said is not None, "the browser is gone"
            answer: dict[str, Any] = json.loads(said)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A browser with a page, until the block ends.

    Args:
        profile: a directory of its own.
    """
    assert CHROMIUM is not None
    command = [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    loop = asyncio.new_event_loop()
    try:
        port_file = profile / "DevToolsActivePort"
        end_s = time.monotonic() + _PATIENCE_S
        while not (port_file.exists() and "\n" in port_file.read_text()):
            assert process.poll() is None and time.monotonic() < end_s, "Chromium did not start"
            time.sleep(0.05)
        port = port_file.read_text().splitlines()[0]
        with urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
            (target,) = (one for one in json.load(answer) if one["type"] == "page")
        address = target["webSocketDebuggerUrl"]
        connection = loop.run_until_complete(_connected(address))
        yield Page(loop, connection)
        connection.close()
    finally:
        process.terminate()
        process.wait(_PATIENCE_S)
        loop.close()


async def _connected(address: str) -> WebSocketClientConnection:
    return await websocket_connect(address, max_message_size=2**26)
