"""Object storage on loopback: real servers, and what goes wrong between them and their users.

A server runs in a process of its own. Between it and those who ask stands a proxy in the process of
the test, which breaks off, delays or answers in its place what the test wants.
"""

import base64
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

BUCKET = "bucket"
SECRET = "a-secret-of-the-tests"
AZURE_ACCOUNT, AZURE_KEY = "account", base64.b64encode(SECRET.encode()).decode()
AZURITE = "azurite-blob"
_S3_SERVER = """
import sys, logging
logging.getLogger("werkzeug").setLevel(logging.ERROR)
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
_GS_SERVER = f"""
import sys
from gcp_storage_emulator.server import create_server
server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="{BUCKET}")
server.start()
print(server._api._httpd.server_port, flush=True)
sys.stdin.read()
"""
_AZ_SERVER = f"""
import os
from ftkit.utils.process import die_with_parent
die_with_parent({os.getpid()})
words = "--inMemoryPersistence --blobPort 0 --silent --skipApiVersionCheck --disableTelemetry"
os.environ["AZURITE_ACCOUNTS"] = "{AZURE_ACCOUNT}:{AZURE_KEY}"
os.execvp("{AZURITE}", ["{AZURITE}", *words.split()])
"""
_SAYS_PORT = re.compile(rb"(?:.*http://127\.0\.0\.1:)?([0-9]+)\n")


@dataclass(frozen=True, eq=False)
class Request:
    """A request to the storage; others may be equal at the same time."""

    method: str
    path: str
    """With bucket and key, decoded."""
    query: str
    headers: dict[str, str]


@dataclass(frozen=True)
class Fault:
    """A fault that requests meet instead of an answer."""

    status: int = 0
    """Answer with this status; 0: break the connection off."""
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    """Of the answer, beside its length."""
    delay_s: float = 0.0
    """Wait before the request is passed on; then it is answered as ever."""
    breaks_off: bool = False
    """Pass it on, and break the connection off in the middle of the answer."""
    when_whole: Callable[[], object] | None = None
    """Called when all of the request is here, before it is passed on."""


Decide = Callable[[Request], Fault | None]
"""Which fault a request meets; None: none."""


def s3_error(code: str) -> bytes:
    """The body of an error of S3."""
    return f"<Error><Code>{code}</Code><Message>{code} happened</Message></Error>".encode()


def gs_error(status: int, reason: str) -> bytes:
    """The body of an error of Google's."""
    errors = [{"reason": reason, "message": f"{reason} happened"}]
    return json.dumps({"error": {"code": status, **errors[0], "errors": errors}}).encode()


def az_fault(status: int, code: str, message: str = "") -> Fault:
    """An error of Azure's."""
    said = f"{message or f'{code} happened'}\nRequestId:1f5d9e0c\nTime:2026-11-23T10:00:00Z"
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{said}</Message></Error>"
    return Fault(status, body.encode(), headers=(("x-ms-error-code", code),))


INTERNAL = Fault(500, s3_error("InternalError"))
SLOW_DOWN = Fault(503, s3_error("SlowDown"))
EXPIRED = Fault(400, s3_error("ExpiredToken"))
FULL = Fault(507, s3_error("XMinioStorageFull"))
BROKEN = Fault()
"""The connection, while the body of a request is read."""
CUT = Fault(breaks_off=True)
HANGS = Fault(delay_s=1000.0)


@dataclass
class Proxy:
    """A server of storage as its users see it."""

    port: int
    scheme: str
    """Of the urls that it answers for."""
    address: str = "127.0.0.1"
    decide: Decide = lambda _: None
    """Set by a test."""
    requests: list[Request] = field(default_factory=list)
    """All so far."""
    freed: threading.Event = field(default_factory=threading.Event)
    """Ends the delays of those that are being delayed: their connections break off."""
    under_way: set[Request] = field(default_factory=set)
    """Those that are not answered yet; of a list threads that end at once would miss their own."""

    @property
    def url(self) -> str:
        """Address of the proxy."""
        return f"http://{self.address}:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which a process reaches the storage."""
        if self.scheme == "gs":
            return {"STORAGE_EMULATOR_HOST": self.url}
        if self.scheme == "az":
            endpoint = f"BlobEndpoint={self.url}/{AZURE_ACCOUNT}"
            account = f"AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY}"
            return {"AZURE_STORAGE_CONNECTION_STRING": f"{account};{endpoint}"}
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "key-of-the-tests",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def fails(
        self, fault: Fault, when: Callable[[Request], bool], times: int = 10**9
    ) -> list[Request]:
        """Let requests meet a fault from now on; those that have met it."""
        met: list[Request] = []

        def decide(request: Request) -> Fault | None:
            if len(met) < times and when(request):
                met.append(request)
                return fault
            return None

        self.decide = decide
        return met

    def works(self) -> None:
        """Let nothing fail any more."""
        self.decide = lambda _: None
        self.freed.set()
        self.freed = threading.Event()


def is_write(request: Request) -> bool:
    return request.method in ("PUT", "POST")


def writes(part: str) -> Callable[[Request], bool]:
    """Requests that write an object with this in its name."""
    return lambda request: is_write(request) and part in request.path


def _handler(proxy: Proxy, port: int) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def _pass_on(self) -> None:
            split = urlsplit(self.path)
            request = Request(
                self.command, unquote(split.path), split.query, dict(self.headers.items())
            )
            proxy.requests.append(request)
            proxy.under_way.add(request)
            try:
                self._treat(request, proxy.decide(request))
            finally:
                proxy.under_way.remove(request)

        def _treat(self, request: Request, fault: Fault | None) -> None:
            if fault == BROKEN:
                self.rfile.read(min(1000, int(self.headers.get("Content-Length") or 0)))
                self.close_connection = True
                self.connection.close()
                return
            if self.headers.get("Expect", "").lower() == "100-continue":
                self.send_response_only(100)
                self.end_headers()
            body = self._body()
            if fault is not None and fault.when_whole is not None:
                fault.when_whole()
            if fault is not None and fault.status:
                headers = {"Content-Type": "application/xml"} | dict(fault.headers)
                self._answer(fault.status, headers, fault.body)
                return
            if fault is not None and fault.delay_s and proxy.freed.wait(fault.delay_s):
                self.close_connection = True
                self.connection.close()
                return
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            headers = {
                k: v
                for k, v in self.headers.items()
                if k.lower() not in ("expect", "transfer-encoding", "content-length")
            }
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            breaks_off = fault is not None and fault.breaks_off
            self._answer(answer.status, dict(answer.getheaders()), content, breaks_off)
            if breaks_off:
                self.close_connection = True
                self.connection.close()

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def _answer(
            self, status: int, headers: dict[str, str], content: bytes, breaks_off: bool = False
        ) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, value)
            is_head = self.command == "HEAD"
            lengths = [value for name, value in headers.items() if name.lower() == "content-length"]
            size = next(iter(lengths), "0") if is_head else str(len(content))
            if status not in (204, 304):
                self.send_header("Content-Length", size)
            self.end_headers()
            if not is_head:
                self.wfile.write(content[: len(content) // 2] if breaks_off else content)
                self.wfile.flush()

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = _pass_on

    return Handler


@contextmanager
def behind_proxy(port: int, scheme: str, listening: socket.socket | None = None) -> Iterator[Proxy]:
    """A proxy before the server at a port.

    Args:
        port: of the server, on loopback.
        scheme: of the urls that it answers for.
        listening: where the proxy takes connections; None: on loopback, too.
    """
    proxy = Proxy(0, scheme)
    if listening is None:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(proxy, port))
    else:
        where = listening.getsockname()
        server = ThreadingHTTPServer(where, _handler(proxy, port), bind_and_activate=False)
        server.socket.close()
        server.socket, server.server_address, proxy.address = listening, where, where[0]
    server.daemon_threads = True
    server.handle_error = lambda *_: None
    proxy.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def _served(program: str, scheme: str) -> Iterator[Proxy]:
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"MOTO_S3_CUSTOM_ENDPOINTS": ""},
    )
    try:
        assert process.stdout is not None
        said = (_SAYS_PORT.fullmatch(line) for line in process.stdout)
        with behind_proxy(next(int(port[1]) for port in said if port), scheme) as proxy:
            yield proxy
    finally:
        process.kill()
        process.communicate()


@contextmanager
def s3_server() -> Iterator[Proxy]:
    """S3 with an empty bucket."""
    with _served(_S3_SERVER, "s3") as proxy:
        connection = http.client.HTTPConnection("127.0.0.1", proxy.port)
        connection.request("PUT", f"/{BUCKET}")
        assert connection.getresponse().status == 200
        connection.close()
        yield proxy


def gs_server() -> AbstractContextManager[Proxy]:
    """Google Cloud Storage with an empty bucket; it knows no conditions."""
    return _served(_GS_SERVER, "gs")


@contextmanager
def az_server() -> Iterator[Proxy]:
    """Azure Blob Storage with an empty container, where its emulator is installed."""
    from azure.storage.blob import BlobServiceClient

    with _served(_AZ_SERVER, "az") as proxy:
        text = proxy.environment["AZURE_STORAGE_CONNECTION_STRING"]
        with BlobServiceClient.from_connection_string(text) as client:
            client.create_container(BUCKET)
        yield proxy


def has_azurite() -> bool:
    """Return whether Azurite is installed, a program of npm."""
    return shutil.which(AZURITE) is not None


class Bucket:
    """The objects in the bucket of a server, as somebody else sees them."""

    def __init__(self, proxy: Proxy) -> None:
        import s3fs
        from adlfs import AzureBlobFileSystem
        from gcsfs.core import GCSFileSystem

        options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
        self._fs: Any
        if proxy.scheme == "s3":
            self._fs = s3fs.S3FileSystem(
                key=proxy.environment["AWS_ACCESS_KEY_ID"],
                secret=proxy.environment["AWS_SECRET_ACCESS_KEY"],
                endpoint_url=proxy.url,
                **options,
            )
        elif proxy.scheme == "az":
            text = proxy.environment["AZURE_STORAGE_CONNECTION_STRING"]
            self._fs = AzureBlobFileSystem(connection_string=text, **options)
        else:
            self._fs = GCSFileSystem(token="anon", endpoint_url=proxy.url, **options)

    def names(self, prefix: str) -> list[str]:
        """Names of all objects below a prefix, relative to it."""
        self._fs.invalidate_cache()
        root = f"{BUCKET}/{prefix}/"
        return sorted(name.removeprefix(root) for name in self._fs.find(f"{BUCKET}/{prefix}"))

    def read(self, name: str) -> bytes:
        content: bytes = self._fs.cat_file(f"{BUCKET}/{name}")
        return content

    def write(self, name: str, content: bytes) -> None:
        self._fs.pipe_file(f"{BUCKET}/{name}", content)

    def delete(self, name: str) -> None:
        self._fs.rm_file(f"{BUCKET}/{name}")

    def fetch(self, prefix: str, target: Path) -> Path:
        """All objects below a prefix as files."""
        for name in self.names(prefix):
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.read(f"{prefix}/{name}"))
        return target

    def steps(self, prefix: str) -> list[int]:
        """Steps of the checkpoints that are complete."""
        found = [name.split("/") for name in self.names(prefix)]
        return [
            int(parts[1].removeprefix("step-"))
            for parts in found
            if len(parts) == 3 and parts[0] == "checkpoints" and parts[2] == "metadata.json"
        ]
