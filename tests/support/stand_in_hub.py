"""A stand-in for the hub: a server on this machine that the libraries take for the real one."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants


class HubHandler(BaseHTTPRequestHandler):
    """Answers HEAD and GET alike, in silence; a subclass says what."""

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        """Answer the request."""
        self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})

    def reply(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.send_body(body)

    def reply_json(self, content: object) -> None:
        self.reply(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def list_files(self, path: str, files: Mapping[str, bytes], info: Mapping[str, object]) -> None:
        """Answer /api/models/ORG/NAME, and the list of files that version 2 of the client reads.

        Args:
            path: of the request.
            files: contents by name.
            info: of the repository, beside its files.
        """
        if "/tree/" in path:
            self.reply_json(
                [{"type": "file", "path": n, "size": len(c), "oid": "0"} for n, c in files.items()]
            )
        else:
            siblings = [{"rfilename": name, "size": len(c)} for name, c in files.items()]
            self.reply_json({**info, "siblings": siblings})

    def send_body(self, body: bytes) -> None:
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(
    handler: type[HubHandler], monkeypatch: pytest.MonkeyPatch, directory: Path
) -> Iterator[str]:
    """Have huggingface_hub take this for the hub, although it is imported already; the address.

    Args:
        handler: answers.
        monkeypatch: takes everything back.
        directory: of the cache; there is no token.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    url = f"http://127.0.0.1:{server.server_port}"
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(directory / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(directory / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # a protocol of its own
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    close_session()  # the next session reads the environment anew
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield url
    server.shutdown()
    server.server_close()
    thread.join()
    close_session()
