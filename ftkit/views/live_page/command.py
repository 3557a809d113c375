"""`ftkit watch`: a run in a terminal or, with --serve, the runs of a directory in a browser."""

import secrets
from pathlib import Path
from tempfile import TemporaryDirectory

from ftkit.errors import UserError
from ftkit.recipe.options import WatchOptions
from ftkit.runs.directory import RunDirectory
from ftkit.runs.sync.download import is_at_work_here
from ftkit.utils.console.formatting import parse_duration
from ftkit.utils.process import Interrupts
from ftkit.utils.remote.urls import display_path, url_of
from ftkit.views.live_page.server import PageServer
from ftkit.views.live_page.sights import Sights
from ftkit.views.watch import watch


def watch_runs(options: WatchOptions) -> int:
    """Show a run until it has ended, or runs until Ctrl+C; the exit code.

    Raises:
        UserError: there is nothing to show, or no port to show it on.
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
        sights = Sights(directory, copy_at=Path(name) if is_elsewhere else None)
        _serve(sights, options.serve, interval_s)
    return 0


def _serve(sights: Sights, port: int, interval_s: float) -> None:
    token = secrets.token_hex(24)
    try:
        server = PageServer(sights, port, token, interval_s)
    except OSError as error:
        raise UserError(
            f"--serve is {port}, but nothing can listen there ({error.strerror}). "
            "Try --serve 0 for a free port."
        ) from error
    with server, Interrupts(even_if_ignored=True):
        print(
            f"http://127.0.0.1:{server.server_port}/?token={token} shows {sights.title}. "
            "Ctrl+C ends it and leaves the runs alone.",
            flush=True,
        )
        server.serve_forever()
