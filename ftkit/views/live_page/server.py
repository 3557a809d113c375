"""`ftkit watch`, in a terminal or, with --serve, as a page for browsers of this machine.

The server answers a few fixed paths and the names of runs that are shown: no request names a file,
and none changes anything.
"""

import hmac
import json
import secrets
from functools import partial
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ftkit.errors import UserError
from ftkit.recipe.options import WatchOptions
from ftkit.runs.directory import RunDirectory
from ftkit.runs.sync.download import is_at_work_here
from ftkit.utils.console.formatting import parse_duration
from ftkit.utils.console.html import escaped
from ftkit.utils.process import Interrupts
from ftkit.utils.remote.urls import display_path, url_of
from ftkit.views.live_page.snapshots import RunSnapshots
from ftkit.views.watch import watch


def watch_runs(options: WatchOptions) -> int:
    """Show a run until it has ended or, with --serve, runs until Ctrl+C; return the exit code.

    Raises:
        UserError: there is nothing to show, or the port cannot be used.
    """
    if options.serve is None:
        return watch(options)
    if options.once:
        raise UserError(
            "--once shows a run in the terminal, but --serve shows it in a browser. "
            "Leave one of the two out."
        )
    interval_s = parse_duration(options.interval, "interval")
    directory = options.out_dir.expanduser()
    is_elsewhere = url_of(directory) is not None and not is_at_work_here(RunDirectory(directory))
    if not is_elsewhere and not directory.is_dir():
        raise UserError(
            f"{display_path(directory)} is not a directory. Name the out_dir of a run, or a "
            "directory with runs, such as out."
        )
    with TemporaryDirectory(prefix="ftkit-watch-") as name:
        snapshots = RunSnapshots(directory, copy_at=Path(name) if is_elsewhere else None)
        _serve(snapshots, options.serve, interval_s)
    return 0


def _serve(snapshots: RunSnapshots, port: int, interval_s: float) -> None:
    token = secrets.token_hex(24)
    try:
        server = PageServer(snapshots, port, token, interval_s)
    except OSError as error:
        raise UserError(
            f"--serve is {port}, but nothing can listen there ({error.strerror}). "
            "Try --serve 0 for a free port."
        ) from error
    with server, Interrupts(even_if_ignored=True):
        print(
            f"http://127.0.0.1:{server.server_port}/?token={token} shows {snapshots.title}. Ctrl+C "
            "stops the server; the runs continue.",
            flush=True,
        )
        server.serve_forever()


_ADDRESS = "127.0.0.1"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # the first address has the token
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_ASSETS = {"/page.js": "text/javascript", "/page.css": "text/css"}
# A connection that sends nothing for so long is closed.
_PATIENCE_S = 30.0


# The standard library's server: for a few paths that are only read, by one person, a framework
# would be more code to trust than all of this.
class PageServer(ThreadingHTTPServer):
    """HTTP server on the loopback address."""

    daemon_threads = True

    def __init__(self, snapshots: RunSnapshots, port: int, token: str, interval_s: float) -> None:
        """Listen; `serve_forever` answers requests.

        Args:
            snapshots: content of the page.
            port: to listen on; 0: a free one.
            token: every request must know it.
            interval_s: between two requests of an open page.

        Raises:
            OSError: the port is taken, or may not be used.
        """
        self.snapshots, self.token, self.interval_s = snapshots, token, interval_s
        super().__init__((_ADDRESS, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a connection: the browser has gone away; others have an error page."""


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "ftkit", ""
    timeout = _PATIENCE_S

    def do_GET(self) -> None:
        """Answer with a page, or refuse."""
        port = self.server.server_port
        # DNS rebinding: a foreign page whose name was made to resolve to this address sends that
        # name as its host.
        hosts = self.headers.get_all("Host")
        if hosts not in ([f"{_ADDRESS}:{port}"], [f"localhost:{port}"]):
            self._refuse(403, f"This page is only at http://{_ADDRESS}:{port}.")
            return
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self._refuse(400, "A request must not have a body.")
            return
        address = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(address.query).items()}
        # A port of this machine is open to all its users and to every page that a browser shows:
        # the token is in the link, and then in a cookie that no other site can use.
        by_link = address.path == "/" and self._is_token(query.get("token", ""))
        if not by_link and not self._is_token(self._cookie()):
            self._refuse(403, "Open the link that ftkit watch has printed: it has the token.")
            return
        try:
            self._answer(address.path, query.get("run", ""), with_cookie=by_link)
        except (ConnectionError, TimeoutError):
            raise  # the browser has gone
        except Exception as error:
            self._refuse(500, f"{type(error).__name__}: {error}")

    def do_HEAD(self) -> None:
        """Answer without the body."""
        self.do_GET()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request of another method, or a malformed one."""
        self.command = getattr(self, "command", None) or "GET"
        # http.server answers 501 to methods that the handler does not have.
        self._refuse(405 if code == 501 else code, message or "This is not a valid request.")

    def log_message(self, *_: object) -> None:
        """Print nothing: addresses of requests contain the token."""

    def _answer(self, path: str, run: str, *, with_cookie: bool) -> None:
        snapshots, as_json = self.server.snapshots, partial(self._send, 200, "application/json")
        if path == "/":
            page = (files(__package__) / "assets" / "page.html").read_text(encoding="utf-8")
            page = page.replace("{title}", escaped(snapshots.title))
            page = page.replace("{interval_ms}", str(round(1000 * self.server.interval_s)))
            self._send(200, "text/html", page, with_cookie=with_cookie)
        elif path in _ASSETS:
            asset = files(__package__) / "assets" / path[1:]
            self._send(200, _ASSETS[path], asset.read_text(encoding="utf-8"))
        elif path == "/runs.json":
            # JSON.parse of browsers takes no NaN.
            as_json(json.dumps(snapshots.all_runs(), allow_nan=False))
        elif path == "/run.json" and (shown := snapshots.run(run)) is not None:
            as_json(json.dumps(shown, allow_nan=False))
        else:
            self._refuse(404, "There is no such page.")

    def _cookie(self) -> str:
        try:
            cookies = SimpleCookie(self.headers.get("Cookie", ""))
        except CookieError:
            return ""
        cookie = cookies.get(self._cookie_name)
        return "" if cookie is None else cookie.value

    @property
    def _cookie_name(self) -> str:
        return f"ftkit-{self.server.server_port}"  # a browser sends cookies to every port

    def _is_token(self, text: str) -> bool:
        # The time does not tell how much of the token is right.
        return hmac.compare_digest(text.encode(), self.server.token.encode())

    def _refuse(self, status: int, reason: str) -> None:
        self.close_connection = True  # the rest of the request is not read
        self._send(status, "text/plain", f"{reason}\n")

    def _send(self, status: int, kind: str, text: str, *, with_cookie: bool = False) -> None:
        content = text.encode()
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if with_cookie:
            cookie = f"{self._cookie_name}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            self.send_header("Set-Cookie", cookie)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
