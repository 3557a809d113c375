"""Python files of the user's own, named on a command line: executed, and their mistakes described.

Nothing that a recipe, a checkpoint or a data file contains ever comes here.
"""

import ast
import linecache
import sys
import traceback
import types
from contextlib import redirect_stdout
from pathlib import Path

from ftkit.errors import UserError


def parse(source: bytes, path: Path, option: str) -> ast.Module:
    """Parse a file without executing it.

    Args:
        source: its content.
        path: for messages.
        option: of the command line that names it, with its value.

    Raises:
        UserError: it is not Python.
    """
    try:
        return ast.parse(source, filename=str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f", line {line}" if line else ""
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise UserError(f"{option}: {path}{where} is not Python: {reason}. Correct it.") from None


def execute(source: bytes, file: str, name: str, option: str) -> types.ModuleType:
    """Execute a file as a module; its output goes to standard error.

    Args:
        source: its content.
        file: its path, which need not exist here.
        name: of the module.
        option: of the command line that names it, with its value.

    Raises:
        UserError: it fails.
    """
    module = types.ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module  # dataclasses and pickle look for it
    # Tracebacks quote the lines that are executed, whatever is in the file by now.
    lines = source.decode("utf-8", "replace").splitlines(keepends=True)
    linecache.cache[file] = (len(source), None, lines, file)
    try:
        with redirect_stdout(sys.stderr):
            exec(compile(source, file, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{option}: {Path(file).name} cannot be executed: {description(error, file)}. "
            f"Correct it, or leave out {option.split()[0]}."
        ) from None
    return module


def description(error: BaseException, file: str) -> str:
    """An error in words, with the line of a file that raised it."""
    line = line_in(error, file)
    where = f" (line {line})" if line else ""
    return f"{type(error).__name__}: {error}{where}"


def line_in(error: BaseException, file: str) -> int | None:
    """Line of a file at which an error was raised, or called what raised it; None: it is not."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    return lines[-1] if lines else None
