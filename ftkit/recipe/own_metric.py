"""User-defined metrics: functions in Python files, named by --metric or defined by a plugin.

Only the process that scores answers executes the file; whatever can be checked without executing it
is checked before. No recipe, checkpoint or data file can name one.
"""

import ast
import copy
import hashlib
import math
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsFloat

from ftkit.errors import UserError
from ftkit.recipe.plugin import plugin_in_use
from ftkit.utils.own_code import description, execute, parse

METRIC_ARGUMENTS = ("answer", "expected", "record")
"""Arguments of a metric, by which it is recognised."""


@dataclass(frozen=True, kw_only=True)
class OwnMetric:
    """A function that scores an answer, identified by its name and the hash of its file."""

    file: str
    """Absolute path."""
    function: str
    sha256: str
    """SHA-256 of the file."""
    option: str = "--metric"
    """Option of the command line that names the file: --metric or --plugin."""

    def __str__(self) -> str:
        return f"{self.option} {Path(self.file).name}:{self.function}"


def own_metrics(texts: Sequence[str]) -> tuple[OwnMetric, ...]:
    """Find the functions that `--metric` names, and those of the plugin in use; none is executed.

    Args:
        texts: FILE.py:FUNCTION each.

    Raises:
        UserError: there is no such file or function, it takes other arguments, or two
            have the same name.
    """
    found: dict[str, OwnMetric] = {}
    if (plugin := plugin_in_use()) is not None:
        for name in plugin.names("metric"):
            found[name] = OwnMetric(
                file=plugin.file, function=name, sha256=plugin.sha256, option="--plugin"
            )
    for text in texts:
        metric = _own_metric(text)
        if metric.function in found:
            raise UserError(
                f"--metric {text}: there is a metric {metric.function} already, and scores are "
                "named after their functions. Rename one of them."
            )
        found[metric.function] = metric
    return tuple(found.values())


def _own_metric(text: str) -> OwnMetric:
    file, colon, name = text.rpartition(":")
    path = Path(file).expanduser()
    if not (colon and file and name.isidentifier()):
        raise UserError(
            f"--metric is {text!r}, but must be FILE.py:FUNCTION. Try --metric metrics.py:score."
        )
    if not path.is_file():
        raise UserError(f"--metric {text}: {path} is not a file. Name one that defines {name}.")
    content = path.read_bytes()
    # Parsed and not imported: nothing of the file runs in this process.
    module = parse(content, path, f"--metric {text}")
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        known = f"it defines {', '.join(functions)}" if functions else "it defines none"
        example = next(iter(functions), name)
        raise UserError(
            f"--metric {text}: {path} defines no function {name}; {known}. "
            f"Try --metric {file}:{example}."
        )
    if not _takes_three(functions[name].args):
        wanted = ", ".join(METRIC_ARGUMENTS)
        raise UserError(
            f"--metric {text}: {name} must take ({wanted}), but takes "
            f"({ast.unparse(functions[name].args)}). Write def {name}({wanted})."
        )
    sha256 = hashlib.sha256(content).hexdigest()
    return OwnMetric(file=str(path.absolute()), function=name, sha256=sha256)


def _takes_three(arguments: ast.arguments) -> bool:
    """Return whether a function may be called with three arguments."""
    places = len(arguments.posonlyargs) + len(arguments.args)
    needed = places - len(arguments.defaults)
    most = math.inf if arguments.vararg else places
    return needed <= len(METRIC_ARGUMENTS) <= most and None not in arguments.kw_defaults


class LoadedMetric:
    """A metric whose file has been executed."""

    def __init__(self, metric: OwnMetric) -> None:
        """Execute the file, or take the function from the plugin in use.

        Raises:
            UserError: it cannot be read, has changed since the command started, or fails.
        """
        self.metric = metric
        self._function: Callable[..., Any]
        plugin = plugin_in_use()
        if metric.option == "--plugin":
            assert plugin is not None
            self._function = getattr(plugin.module, metric.function)
            return
        path = Path(metric.file)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(f"{metric}: {path} cannot be read ({error.strerror}).") from None
        # What runs must be what was checked, and what the report names.
        if hashlib.sha256(content).hexdigest() != metric.sha256:
            raise UserError(f"{metric}: {path} has changed since the command started. Start again.")
        # Under a name of its own, so that it never replaces an installed module.
        module = execute(content, metric.file, f"metric_{metric.sha256[:16]}", str(metric))
        self._function = getattr(module, metric.function)

    def score(self, answer: str, expected: str, record: Mapping[str, Any], place: int) -> float:
        """Score an answer; output of the function goes to standard error.

        Args:
            answer: of the model.
            expected: text that is trained for the record.
            record: the function gets a copy of it.
            place: index among the answered records, from 0.

        Raises:
            UserError: it raises, or returns no finite number.
        """
        try:
            with redirect_stdout(sys.stderr):
                # A copy: the function may change it, and other metrics get the record too.
                value = self._function(answer, expected, copy.deepcopy(record))
                number = float(value) if isinstance(value, SupportsFloat) else math.nan
        except (Exception, SystemExit) as error:
            raise self._mistake(place, f"raised {description(error, self.metric.file)}") from None
        if not math.isfinite(number):
            returned = f"returned {reprlib.repr(value)}, but must return a finite number"
            raise self._mistake(place, returned)
        return number

    def _mistake(self, place: int, what: str) -> UserError:
        return UserError(
            f"{self.metric}: for validation record {place} (counted from 0) it {what}.\n"
            f"Correct the function, or leave out {self.metric.option}."
        )
