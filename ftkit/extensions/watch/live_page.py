"""`ftkit watch`, in a terminal or, with --serve, as a page for browsers of this machine.

The server answers a few fixed paths and the names of runs that are shown: no request names a file,
and none changes anything.
"""

import hmac
import json
import math
import secrets
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ftkit.errors import UserError
from ftkit.extensions.comparison.runs import ComparedRun, LeftOutRun, look_at_runs, read_runs
from ftkit.extensions.comparison.table import comparison_as_html
from ftkit.extensions.watch.commands import WatchOptions
from ftkit.extensions.watch.watch import RunSnapshot, Watcher, snapshot_as_html, watch
from ftkit.runs.checkpoints import CheckpointEntry, entry_of
from ftkit.runs.directory import RunDirectory
from ftkit.runs.lock import is_at_work_here
from ftkit.runs.report.metrics import Row, loss_columns
from ftkit.runs.report.table import example_rows, report_as_html
from ftkit.runs.url_runs import url_runs
from ftkit.utils.console.formatting import age_text, bytes_text, loss_text, parse_duration
from ftkit.utils.console.html import escaped, grid, labelled
from ftkit.utils.process import Interrupts
from ftkit.utils.url_files import StorageError, unreachable
from ftkit.utils.urls import display_path, url_of

_MOST_POINTS = 400
_MOST_COMPARED = 10
"""Most curves in one picture."""
_LOOK_INTERVAL_S = 1.0
"""Least time between two readings of the files, however many pages are open."""
_SCALES = {"_bytes": 2.0**-30, "_utilization": 100.0, "_power_w": 1.0}
"""Factors that turn samples into GiB, % and W, by the ending of their names."""
_LONG_S = 3 * 3600
"""Longest time that is shown in minutes; above it, in hours."""
_LOGARITHMIC = ("Loss", "Gradient norm")
"""Charts that can be shown on a logarithmic scale."""
# Units of amounts, whose charts begin at zero.
_FROM_ZERO = ("tokens/s", "GiB", "%", "W")

_Points = list[tuple[float, ...]]


class RunSnapshots:
    """Runs of a directory, or the run in it, read again when a page requests them."""

    def __init__(self, directory: Path, *, copy_at: Path | None) -> None:
        """Read nothing yet.

        Args:
            directory: of a run or of runs; it may still be empty.
            copy_at: directory for local copies of files at a url; None: it is on this machine.
        """
        self._directory = directory
        self._copies = (
            None if copy_at is None else url_runs(directory).run_copies(directory, copy_at)
        )
        # The server answers each request in a thread of its own.
        self._lock = threading.Lock()
        self._watchers: dict[Path, Watcher] = {}
        self._entries: dict[Path, dict[Path, CheckpointEntry]] = {}
        """Checkpoints of runs."""
        self._losses: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}
        """Thinned losses of runs, with size and time of the file that they were read from."""
        self._runs: list[ComparedRun] = []
        self._left_out: list[LeftOutRun] = []
        self._looked_s = -math.inf

    @property
    def title(self) -> str:
        """Directory or url, as the user knows it."""
        return display_path(self._directory if self._directory.name else self._directory.resolve())

    def all_runs(self) -> dict[str, Any]:
        """Return all runs in short, their losses, and the comparison of several, ready for JSON."""
        with self._lock:
            self._look()
            several = len(self._runs) > 1
            return {
                "runs": [_in_short(run) for run in self._runs],
                "left_out": [f"{display_path(one.path)} {one.reason}" for one in self._left_out],
                "comparison": comparison_as_html(self._runs) if several else "",
                "losses": [self._loss(run) for run in _drawn(self._runs)] if several else [],
            }

    def run(self, name: str) -> dict[str, Any] | None:
        """Return a run in full, ready for JSON; None: no run has this name."""
        with self._lock:
            self._look()
            for run in self._runs:
                if run.name == name:
                    return self._in_full(run)
        return None

    def _look(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_INTERVAL_S:
            return
        self._runs, self._left_out = self._read_runs()
        self._looked_s = now_s
        places = {run.files.path for run in self._runs}
        # A run that was removed and made again is read from its beginning.
        for gone in self._watchers.keys() - places:
            del self._watchers[gone]
            self._losses.pop(gone, None)
            self._entries.pop(gone, None)

    def _read_runs(self) -> tuple[list[ComparedRun], list[LeftOutRun]]:
        # Files at a url are copied before they are read; a local directory is read in place.
        if self._copies is None:
            runs, left_out = read_runs([self._directory])
            # A directory that is still empty is not an error: runs may appear in it.
            return runs, [one for one in left_out if one.path != self._directory]
        try:
            copies = self._copies.look()
        except StorageError as error:
            reason = str(unreachable(error)).splitlines()[0].removeprefix(f"{self.title}: ")
            return [], [LeftOutRun(path=self._directory, reason=reason)]
        return look_at_runs({copy.path: copy for copy in copies})

    def _watcher(self, run: ComparedRun) -> Watcher:
        place = run.files.path
        if place not in self._watchers:
            self._watchers[place] = Watcher(run.out_dir, run.copy)
        return self._watchers[place]

    def _loss(self, run: ComparedRun) -> dict[str, Any]:
        """Losses of a run; only new rows of its file are read."""
        metrics = run.files.metrics
        try:
            status = metrics.stat()
        except OSError:
            return {"name": run.name, "of": run.loss_of, "points": []}
        # A long run takes longer to thin out than the interval: an unchanged file is skipped.
        stamp, place = (status.st_size, status.st_mtime_ns), run.files.path
        if place not in self._losses or self._losses[place][0] != stamp:
            rows = self._watcher(run).rows.read_on()
            self._losses[place] = stamp, _by_step(rows, "loss", run.name, noisy=True)
        return {**self._losses[place][1], "name": run.name, "of": run.loss_of}

    def _in_full(self, run: ComparedRun) -> dict[str, Any] | None:
        try:
            snapshot = self._watcher(run).look()
        except UserError:  # its directory has been removed meanwhile
            return None
        report = snapshot.report
        ended = report is not None and not snapshot.run.at_work
        return {
            **_in_short(run),
            "status": snapshot_as_html(snapshot, with_curve=False),
            "charts": [chart for chart in _charts(snapshot) if chart["series"]],
            "memory": _memory(run),
            "memory_limit": bytes_text(limit) if (limit := run.memory_limit_bytes) else "",
            "checkpoints": self._checkpoints(run.files),
            # Before the run ends, its report has the answer before training.
            "example": labelled(example_rows(report))
            if report and report.examples and not ended
            else "",
            "report": report_as_html(report, snapshot.run.out_dir) if ended and report else "",
        }

    def _checkpoints(self, run: RunDirectory) -> str:
        """Table of complete checkpoints, the newest first; each is read once."""
        paths = [run.store.path(step) for step in reversed(run.store.steps())]
        known = self._entries.get(run.path, {})
        # Not those that were removed, whose paths may come again in a run that is made anew.
        self._entries[run.path] = {path: known.get(path) or entry_of(path) for path in paths}
        rows = [
            (
                f"{entry.step:,}" if entry.step is not None else "?",
                age_text(time.time() - entry.written_s) + " ago",
                bytes_text(entry.size_bytes),
                loss_text(loss)
                if entry.metadata and (loss := entry.metadata.validation_loss) is not None
                else "",
                escaped("; ".join((entry.state, *entry.problems))),
            )
            for entry in self._entries[run.path].values()
        ]
        heads = ("step", "written", "size", "validation loss", "state")
        return grid(heads, rows, right=(0, 2, 3)) if rows else ""


def thinned(points: Iterable[tuple[float, float]], most: int = _MOST_POINTS) -> _Points:
    """Reduce a series to its finite points, at most `most` of them.

    If there are more, each result stands for several: it has their mean and their lowest and
    highest value, so that a spike of one step can be seen.
    """
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if len(finite) <= most:
        return list(finite)
    # There are more points than parts, so that none is empty.
    edges = [round(i * len(finite) / most) for i in range(most + 1)]
    made: _Points = []
    for start, end in pairwise(edges):
        xs, ys = zip(*finite[start:end], strict=True)
        made.append((sum(xs) / len(xs), sum(ys) / len(ys), min(ys), max(ys)))
    return made


def _in_short(run: ComparedRun) -> dict[str, Any]:
    progress, loss = run.report.progress, run.report.loss
    return {
        "name": run.name,
        "state": run.state.replace("_", " "),
        "steps": progress.steps if progress else 0,
        "total_steps": run.resolved.total_steps,
        "loss": loss_text(loss.last) if loss and loss.last is not None else "",
        "method": run.report.method,
    }


def _drawn(runs: list[ComparedRun]) -> list[ComparedRun]:
    """Runs whose losses are drawn in one picture: of many, those that began last."""
    latest = sorted(runs, key=lambda run: run.report.started_at, reverse=True)[:_MOST_COMPARED]
    names = {run.name for run in latest}
    # In the order of the table.
    return [run for run in runs if run.name in names]


def _memory(run: ComparedRun) -> list[dict[str, Any]]:
    """Measured and predicted memory at the peak by its parts, in bytes and as text."""
    measured = run.memory_parts
    of_step = run.report.step_memory
    predicted: dict[str, int] = {}
    if of_step and of_step.predicted:
        named = asdict(of_step.predicted.peak_breakdown_bytes)
        predicted = {name.replace("_", " "): size for name, size in named.items() if size}
    return [
        {
            "name": name,
            "measured": [measured.get(name, 0), _size(measured.get(name))],
            "predicted": [predicted.get(name, 0), _size(predicted.get(name))],
        }
        for name in dict.fromkeys((*measured, *predicted))
    ]


def _size(size_bytes: int | None) -> str:
    return "" if size_bytes is None else bytes_text(size_bytes)


def _charts(snapshot: RunSnapshot) -> list[dict[str, Any]]:
    """Charts by step, and charts of host and devices by time."""

    def chart(title: str, unit: str, *series: dict[str, Any], x: str = "step") -> dict[str, Any]:
        drawn = [one for one in series if one["points"]]
        least = 0 if unit in _FROM_ZERO else None
        most = 100 if unit == "%" else None
        return {
            "title": title,
            "unit": unit,
            "x": x,
            "least": least,
            "most": most,
            "log": title in _LOGARITHMIC,
            "series": drawn,
        }

    rows, of_sources = snapshot.rows, loss_columns(snapshot.validations)
    samples = snapshot.samples
    sampled_s = (samples[-1]["time_s"] or 0) - (samples[0]["time_s"] or 0) if samples else 0
    across, unit_s = ("hours", 3600) if sampled_s > _LONG_S else ("minutes", 60)
    return [
        chart(
            "Loss",
            "nats per label token",
            _by_step(rows, "loss", "training", noisy=True),
            _by_step(snapshot.validations, "val_loss", "validation"),
            *(_by_step(snapshot.validations, column, name) for name, column in of_sources),
        ),
        chart("Speed", "tokens/s", _by_step(rows, "tokens_per_s", "speed", noisy=True)),
        chart("Learning rate", "", _by_step(rows, "lr", "learning rate")),
        chart("Gradient norm", "", _by_step(rows, "grad_norm", "norm", noisy=True)),
        *(
            chart(title, unit, *_of_system(samples, ending, unit_s), x=across)
            for title, unit, ending in (
                ("Memory", "GiB", "_bytes"),
                ("Busy", "%", "_utilization"),
                ("Power", "W", "_power_w"),
            )
        ),
    ]


def _by_step(rows: list[Row], column: str, name: str, *, noisy: bool = False) -> dict[str, Any]:
    """A series by step; noisy ones can be shown smoothed."""
    return {"name": name, "noisy": noisy, "points": thinned(_column(rows, "step", column))}


def _of_system(samples: list[Row], ending: str, unit_s: float) -> list[dict[str, Any]]:
    """Series of the columns with this ending, by time since the first sample."""
    columns = [column for column in (samples[-1] if samples else ()) if column.endswith(ending)]
    began_s = samples[0]["time_s"] or 0.0 if samples else 0.0
    scale = _SCALES[ending]
    return [
        {
            "name": column.removesuffix(ending).replace("_", " "),
            "points": thinned(
                ((time_s - began_s) / unit_s, value * scale)
                for time_s, value in _column(samples, "time_s", column)
            ),
        }
        for column in columns
    ]


def _column(rows: list[Row], x: str, y: str) -> Iterable[tuple[float, float]]:
    for row in rows:
        across, up = row.get(x), row.get(y)
        if across is not None and up is not None:
            yield float(across), float(up)


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
    # A run of this machine that is uploaded to its url is read where it lies.
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
    # Ctrl+C also ends it where the shell started it in the background.
    with server, Interrupts(even_if_ignored=True):
        print(
            f"http://127.0.0.1:{server.server_port}/?token={token} shows {snapshots.title}. Ctrl+C "
            "stops the server; the runs continue.",
            flush=True,
        )
        server.serve_forever()


_FOLDER = files("ftkit.extensions.watch") / "assets"
_ADDRESS = "127.0.0.1"
# Nothing is loaded from elsewhere, and only our own script runs. unsafe-inline is for the style
# attributes of HTML that notebooks show as well.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # the first address contains the token
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_ASSETS = {"/page.js": "text/javascript", "/page.css": "text/css"}
# Seconds after which a connection that sends nothing is closed.
_PATIENCE_S = 30.0


# The standard library's server: for a few read-only paths and one reader, a framework would be more
# code to trust than all of this.
class PageServer(ThreadingHTTPServer):
    """HTTP server on the loopback address."""

    # Open pages keep their connections, which must not keep the process alive after Ctrl+C.
    daemon_threads = True

    def __init__(self, snapshots: RunSnapshots, port: int, token: str, interval_s: float) -> None:
        """Listen; `serve_forever` answers requests.

        Args:
            snapshots: content of the page.
            port: to listen on; 0: a free one.
            token: secret that every request must contain.
            interval_s: between two requests of an open page.

        Raises:
            OSError: the port is taken, or may not be used.
        """
        self.snapshots, self.token, self.interval_s = snapshots, token, interval_s
        super().__init__((_ADDRESS, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a connection: the browser has gone; all others get an error page."""


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: PageServer
    # An open page sends requests again and again, over one connection.
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
        # An unread body would be taken for the next request of the connection.
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self._refuse(400, "A request must not have a body.")
            return
        address = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(address.query).items()}
        # A port of this machine is open to all its users and to every page in a browser: the token
        # is in the link, and then in a cookie that no other site can use.
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
        # A malformed request has no command, by which `_send` decides on a body.
        self.command = getattr(self, "command", None) or "GET"
        # http.server answers 501 to methods that the handler does not have.
        self._refuse(405 if code == 501 else code, message or "This is not a valid request.")

    def log_message(self, *_: object) -> None:
        """Print nothing: addresses of requests contain the token."""

    def _answer(self, path: str, run: str, *, with_cookie: bool) -> None:
        snapshots, as_json = self.server.snapshots, partial(self._send, 200, "application/json")
        if path == "/":
            page = (files("ftkit.extensions.watch") / "assets" / "page.html").read_text(
                encoding="utf-8"
            )
            page = page.replace("{title}", escaped(snapshots.title))
            page = page.replace("{interval_ms}", str(round(1000 * self.server.interval_s)))
            self._send(200, "text/html", page, with_cookie=with_cookie)
        elif path in _ASSETS:
            asset = _FOLDER / path[1:]
            self._send(200, _ASSETS[path], asset.read_text(encoding="utf-8"))
        elif path == "/runs.json":
            # JSON.parse of browsers refuses NaN.
            as_json(json.dumps(snapshots.all_runs(), allow_nan=False))
        # A name selects among the runs that are shown, and is never used as a path.
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
        return f"ftkit-{self.server.server_port}"  # browsers send cookies to all ports of a host

    def _is_token(self, text: str) -> bool:
        # In constant time, which does not reveal how much of the token is right.
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
