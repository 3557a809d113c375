"""A Jupyter server used from outside, as a browser does: HTTP, and a websocket to a kernel."""

import json
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httpx
import websocket

COLAB = "https://colab.research.google.com"
TIMEOUT_S = 300
OUTPUTS = ("stream", "display_data", "update_display_data", "execute_result", "error")


@dataclass(frozen=True, kw_only=True)
class Server:
    """The address of a server and its token."""

    url: str
    token: str

    def request(
        self, method: str, path: str, token: str | None = None, **options: Any
    ) -> httpx.Response:
        headers = {
            "Authorization": f"token {self.token if token is None else token}",
            **options.pop("headers", {}),
        }
        return httpx.request(
            method, f"{self.url}{path}", headers=headers, trust_env=False, timeout=30, **options
        )

    def connect(self, kernel: str, origin: str, token: str | None = None) -> websocket.WebSocket:
        """As Colab's page does: the token is in the address."""
        address = f"{self.url.replace('http', 'ws', 1)}/api/kernels/{kernel}/channels"
        token = self.token if token is None else token
        return websocket.create_connection(
            f"{address}?token={token}", origin=origin, timeout=TIMEOUT_S, http_no_proxy=["*"]
        )


def execute(socket: websocket.WebSocket, source: str) -> list[dict[str, Any]]:
    """Run a cell in the kernel; its outputs, in nbformat's terms."""
    identity = uuid.uuid4().hex
    header = {
        "msg_id": identity,
        "msg_type": "execute_request",
        "username": "",
        "session": identity,
        "version": "5.3",
    }
    content = {"code": source, "silent": False, "store_history": True, "allow_stdin": False}
    message = {"header": header, "parent_header": {}, "metadata": {}, "content": content}
    socket.send(json.dumps(message | {"channel": "shell"}))
    outputs = []  # type: ignore[var-annotated]
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        answer = json.loads(socket.recv())
        if answer["parent_header"].get("msg_id") != identity:
            continue
        kind = answer["msg_type"]
        if kind == "status" and answer["content"]["execution_state"] == "idle":
            return outputs
        if kind in OUTPUTS:
            outputs.append({"output_type": kind, **answer["content"]})
    raise TimeoutError(source)


def run_cells(server: Server, sources: Iterable[str]) -> list[list[dict[str, Any]]]:
    """Run cells in a new kernel of the server, and end that kernel."""
    kernel = server.request("POST", "/api/kernels", json={"name": "python3"}).json()["id"]
    try:
        socket = server.connect(kernel, COLAB)
        try:
            return [execute(socket, source) for source in sources]
        finally:
            socket.close()
    finally:
        server.request("DELETE", f"/api/kernels/{kernel}").raise_for_status()
