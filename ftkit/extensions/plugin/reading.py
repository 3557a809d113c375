"""The file that --plugin names: read, and executed in a process of its own to find what it defines.

So a command that imports no torch knows it, and mistakes in it show before anything starts.
"""

import dataclasses
import json
import re
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ftkit.errors import UserError
from ftkit.recipe.plugin import Plugin
from ftkit.utils.own_code import parse
from ftkit.utils.process import run_program
from ftkit.utils.url_files import url_files
from ftkit.utils.urls import is_url, local_path

_MOST_BYTES = 2**20
"""Largest plugin: its content is part of small files."""
MOST_SECONDS = 60.0
"""Most time to execute a plugin, which only defines things."""


def open_plugin(named: str | Path) -> Plugin:
    """Read the file that --plugin names, and find what it defines.

    Args:
        named: a path or url.

    Raises:
        UserError: there is no such file, it is not Python, or it fails when it is executed.
    """
    path = local_path(named).expanduser()
    if is_url(str(named)):
        path.unlink(missing_ok=True)  # it may have changed since it was fetched
        url_files(path).fetch_missing(path.parent, [path.name])
    option = f"--plugin {named}"
    if not path.is_file():
        raise UserError(f"{option}: there is no such file. Name a Python file.")
    content = path.read_bytes()
    if len(content) > _MOST_BYTES:
        raise UserError(
            f"{option} has {len(content):,} bytes, but a plugin is at most {_MOST_BYTES:,}: it "
            "goes with every checkpoint. Move data into files of their own."
        )
    parse(content, path, option)
    try:
        source = content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{option} is not text in UTF-8: {error}. Save it so.") from None
    plugin = Plugin(file=str(path.absolute()), source=source)
    return dataclasses.replace(plugin, definitions=_definitions_in(plugin))


def _definitions_in(plugin: Plugin) -> tuple[dict[str, Any], ...]:
    """Execute a plugin in a process of its own, and return what it defines."""
    given = json.dumps(plugin.to_json()).encode()
    # A file and not a pipe: the plugin may print, or leave processes behind.
    with tempfile.TemporaryFile() as exchange:
        exchange.write(given)
        exchange.flush()
        code = run_program(
            "ftkit.extensions.plugin.contents",
            str(MOST_SECONDS),
            exchange=exchange,
            stdout=subprocess.DEVNULL,
        )
        exchange.seek(0)
        answer = exchange.read()
    if code == -signal.SIGALRM:
        where = _where_it_hangs(answer[len(given) :].decode(errors="replace"), plugin.file)
        raise UserError(
            f"{plugin.option} was still being executed after {MOST_SECONDS:g} s{where}. Reading it "
            "may only define classes and functions: move what takes longer into one of them, or "
            "leave out --plugin."
        )
    if code != 0:
        raise UserError(
            f"{plugin.option} ends Python with exit code {code} when it is executed. Correct it, "
            "or leave out --plugin."
        )
    found = json.loads(answer)
    if "error" in found:
        raise UserError(found["error"])
    return tuple(found["definitions"])


def _where_it_hangs(traceback: str, file: str) -> str:
    """The line of a plugin that a traceback of faulthandler names first."""
    line = re.search(rf'File "{re.escape(file)}", line (\d+)', traceback)
    return f", in line {line[1]}" if line else ""
