"""A stand-in for the hub: a server on this machine that the libraries take for the real one."""

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from huggingface_hub import HfFileSystem, close_session, constants

NAME = "some-org/some-data"
COMMIT = "c" * 40
TOKEN = "hf_secretsecretsecret"


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


@dataclass
class DataHub:
    """Files of a data set that the stand-in serves, and the requests it got."""

    files: dict[str, bytes]
    gated: bool = False
    """Only the owner of TOKEN may read."""
    commit: str = COMMIT
    transfers: list[str] = field(default_factory=list)
    gives_ranges: bool = True
    """Whether parts of files are given; a range is answered with the whole file otherwise."""
    ranges: list[tuple[str, str]] = field(default_factory=list)
    """Commit and range of each request for a part of a file."""
    busy: int = 0
    """So many requests for files are answered with 503 first."""
    earlier: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files of the commits before."""

    def push(self, commit: str, files: dict[str, bytes]) -> None:
        """Let another commit be the newest."""
        self.earlier[self.commit] = self.files
        self.commit, self.files = commit, files


def _handler(served: DataHub) -> type[HubHandler]:
    class Handler(HubHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.reply_json([entry for entry in self.tree() if entry["path"] in request["paths"]])

        def answer(self) -> None:
            path = urlsplit(self.path).path
            file = path.partition("/resolve/")[2].partition("/")[2]
            found = re.search("/(?:resolve|tree|revision)/([^/]+)", path)
            revision = found[1] if found else ""
            if NAME not in path:
                self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
            elif served.gated and self.headers["Authorization"] != f"Bearer {TOKEN}":
                self.reply(401, b"", {"X-Error-Code": "GatedRepo"})
            elif revision and revision not in ("main", "v1", served.commit, *served.earlier):
                self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"})
            elif file and served.busy > 0:
                served.busy -= 1
                self.reply(503, b"", {})
            elif file and file in self.files(revision):
                if self.command == "GET":
                    served.transfers.append(file)
                self.give(self.files(revision)[file], revision)
            elif file:
                self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
            elif "/tree/" in path:
                self.reply_json(self.tree(revision))
            else:
                siblings = [{"rfilename": name} for name in served.files]
                self.reply_json({"id": NAME, "sha": served.commit, "siblings": siblings})

        def give(self, content: bytes, revision: str) -> None:
            """Answer with a file, or with the part that is asked for."""
            headers = {"ETag": f'"{hash(content):x}"', "Accept-Ranges": "bytes"}
            asked = self.headers["Range"]
            if asked is None or not served.gives_ranges:
                self.reply(200, content, headers)
                return
            served.ranges.append((revision, asked))
            first, _, last = asked.removeprefix("bytes=").partition("-")
            part = content[int(first) : int(last or len(content)) + 1]
            span = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
            self.reply(206, part, {**headers, "Content-Range": span})

        def files(self, revision: str) -> dict[str, bytes]:
            return served.earlier.get(revision, served.files)

        def tree(self, revision: str = "main") -> list[dict[str, object]]:
            return [
                {"type": "file", "path": name, "size": len(content), "oid": f"{hash(content):x}"}
                for name, content in self.files(revision).items()
            ]

        def reply_json(self, value: object) -> None:
            self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def reply(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
            super().reply(status, body, {**headers, "X-Repo-Commit": served.commit})

    return Handler


@contextmanager
def serving_data(hub: DataHub, monkeypatch: pytest.MonkeyPatch, directory: Path) -> Iterator[None]:
    """Have the libraries take a data set for one of the hub, although they are imported already.

    Args:
        hub: what is served.
        monkeypatch: takes everything back.
        directory: of caches, and where relative paths begin.
    """
    import datasets

    with serving(_handler(hub), monkeypatch, directory) as url:
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", url)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", directory / "datasets")
        monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", directory / "downloads")
        monkeypatch.setattr(datasets.config, "USE_PARQUET_EXPORT", False)  # of another server
        monkeypatch.chdir(directory)
        HfFileSystem.clear_instance_cache()
        yield
