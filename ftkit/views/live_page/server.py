"""The server of the live page: this machine alone may ask, with a token, and nothing changes.

What may be asked are a few fixed paths and the names of runs that are shown: no request names a
file.
"""

import hmac
import json
from functools import partial
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ftkit.utils.console.html import escaped
from ftkit.views.live_page.sights import Sights

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
_PATIENCE_S = 30.0


class PageServer(ThreadingHTTPServer):
    """Listens on the loopback address."""

    daemon_threads = True

    def __init__(self, sights: Sights, port: int, token: str, interval_s: float) -> None:
        """Listen; `serve_forever` answers.

        Args:
            sights: what is shown.
            port: where; 0: on a free one.
            token: who does not know it sees nothing.
            interval_s: between two looks of a page.

        Raises:
            OSError: the port is taken, or may not be used.
        """
        self.sights, self.token, self.interval_s = sights, token, interval_s
        super().__init__((_ADDRESS, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a browser that went away is none, and an answer is an error page otherwise."""


class _Handler(BaseHTTPRequestHandler):
    """Answers a request; see the module."""

    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "ftkit", ""
    timeout = _PATIENCE_S

    def do_GET(self) -> None:
        """Answer."""
        port = self.server.server_port
        # A page elsewhere whose name was made to lead here has that name as its host.
        hosts = self.headers.get_all("Host")
        if hosts not in ([f"{_ADDRESS}:{port}"], [f"localhost:{port}"]):
            self._refuse(403, f"This page is at http://{_ADDRESS}:{port} alone.")
            return
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self._refuse(400, "What is asked here has no content.")
            return
        address = urlsplit(self.path)
        asked = {key: values[0] for key, values in parse_qs(address.query).items()}
        by_link = address.path == "/" and self._is_token(asked.get("token", ""))
        if not by_link and not self._is_token(self._cookie()):
            self._refuse(403, "Open the link that ftkit watch has printed: it has the token.")
            return
        try:
            self._answer(address.path, asked.get("run", ""), with_cookie=by_link)
        except (ConnectionError, TimeoutError):
            raise  # the browser is gone
        except Exception as error:
            self._refuse(500, f"{type(error).__name__}: {error}")

    def do_HEAD(self) -> None:
        """Answer without the content."""
        self.do_GET()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is no request for a page: of another method, or none at all."""
        self.command = getattr(self, "command", None) or "GET"
        self._refuse(405 if code == 501 else code, message or "This is no request.")

    def log_message(self, *_: object) -> None:
        """Nothing: the terminal has the link, and requests have the token."""

    def _answer(self, path: str, run: str, *, with_cookie: bool) -> None:
        sights, as_json = self.server.sights, partial(self._send, 200, "application/json")
        if path == "/":
            page = (files(__package__) / "assets" / "page.html").read_text(encoding="utf-8")
            page = page.replace("{title}", escaped(sights.title))
            page = page.replace("{interval_ms}", str(round(1000 * self.server.interval_s)))
            self._send(200, "text/html", page, with_cookie=with_cookie)
        elif path in _ASSETS:
            asset = files(__package__) / "assets" / path[1:]
            self._send(200, _ASSETS[path], asset.read_text(encoding="utf-8"))
        elif path == "/runs.json":
            as_json(json.dumps(sights.all_runs(), allow_nan=False))
        elif path == "/run.json" and (found := sights.run(run)) is not None:
            as_json(json.dumps(found, allow_nan=False))
        else:
            self._refuse(404, "There is no such page.")

    def _cookie(self) -> str:
        try:
            cookies = SimpleCookie(self.headers.get("Cookie", ""))
        except CookieError:
            return ""
        found = cookies.get(self._cookie_name)
        return "" if found is None else found.value

    @property
    def _cookie_name(self) -> str:
        return f"ftkit-{self.server.server_port}"  # a browser sends cookies to every port

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self.server.token.encode())

    def _refuse(self, status: int, reason: str) -> None:
        self.close_connection = True  # what else was sent is not read
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
