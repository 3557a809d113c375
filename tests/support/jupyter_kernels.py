"""A real Jupyter kernel, as a notebook has it."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty
from typing import Any

from command import command_environment
from jupyter_client.manager import KernelManager
from runs import TIMEOUT_S, wait_for


class Kernel:
    """Runs cells and collects what they show."""

    def __init__(self, manager: KernelManager) -> None:
        self._manager = manager
        self._client = manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=TIMEOUT_S)

    def run(self, code: str) -> "Cell":
        """Run a cell to its end."""
        return self.start(code).end()

    def start(self, code: str) -> "Cell":
        return Cell(self, self._client.execute(code))

    def message(self, timeout_s: float = 1) -> dict[str, Any] | None:
        """The next one of what cells show."""
        try:
            return self._client.get_iopub_msg(timeout=timeout_s)
        except Empty:
            return None

    def interrupt(self) -> None:
        """The stop button."""
        self._manager.interrupt_kernel()

    def kill(self) -> None:
        """As the button that restarts a kernel ends it that does not answer."""
        self._manager.shutdown_kernel(now=True)

    def close(self) -> None:
        self._client.stop_channels()
        if self._manager.is_alive():
            self._manager.shutdown_kernel(now=True)


class Cell:
    """A cell that is being run, or has been."""

    def __init__(self, kernel: Kernel, request: str) -> None:
        self._kernel, self._request = kernel, request
        self.shown: list[dict[str, Any]] = []
        """Displays in their order, each by its forms; an updated one as it is now."""
        self.updates: list[str] = []
        """The HTML of every change of a display."""
        self.printed = ""
        self.error: str | None = None
        """Name and text of what was raised."""
        self._places: dict[str, int] = {}
        self._has_ended = False

    @property
    def html(self) -> str:
        """All HTML that stands below the cell."""
        return "".join(data.get("text/html", "") for data in self.shown)

    @property
    def text(self) -> str:
        """The output as text."""
        return " ".join(re.sub("<[^>]*>", " ", self.html).split())

    def wait_for(self, text: str) -> None:
        """Until this can be read below the cell."""

        def there() -> bool:
            self.read()
            assert not self._has_ended, (self.error, self.printed, self.text)
            return text in self.text or text in self.printed

        wait_for(there)

    def end(self) -> "Cell":
        def ended() -> bool:
            self.read()
            return self._has_ended

        wait_for(ended)
        return self

    def read(self) -> None:
        message = self._kernel.message()
        if message is None or message["parent_header"].get("msg_id") != self._request:
            return
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            self.printed += content["text"]
        elif kind in ("display_data", "execute_result"):
            if name := content.get("transient", {}).get("display_id"):
                self._places[name] = len(self.shown)
                self.updates.append(content["data"].get("text/html", ""))
            self.shown.append(content["data"])
        elif kind == "update_display_data":
            self.shown[self._places[content["transient"]["display_id"]]] = content["data"]
            self.updates.append(content["data"]["text/html"])
        elif kind == "error":
            self.error = f"{content['ename']}: {content['evalue']}"
        elif kind == "status" and content["execution_state"] == "idle":
            self._has_ended = True


@contextmanager
def kernel(directory: Path) -> Iterator[Kernel]:
    """A kernel that works in a directory; it does not outlive the block."""
    environment = command_environment() | {
        "IPYTHONDIR": str(directory / ".ipython"),
        "JUPYTER_RUNTIME_DIR": str(directory / ".jupyter"),
        "PYTHONPATH": os.pathsep.join(
            [command_environment()["PYTHONPATH"], str(Path(__file__).parent)]
        ),
    }
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(directory), env=environment)
    found = None
    try:
        found = Kernel(manager)
        yield found
    finally:
        if found is not None:
            found.close()
        elif manager.is_alive():
            manager.shutdown_kernel(now=True)
