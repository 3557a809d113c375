"""The plugin: a Python file of the user's own, named by --plugin, with classes that recipes name.

Only the command line names one: nothing that a recipe, a checkpoint or a data file contains is
executed. The file is read once. Its content goes with the run, to its ranks on all hosts, its
directory and its checkpoints.

What it defines is found by executing it in a process of its own
(`ftkit.extensions.plugin.contents`): a command that imports no torch knows it, and mistakes in it
show before anything starts.
"""

import dataclasses
import hashlib
import importlib
import json
import re
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any, Literal, Union

from ftkit.errors import UserError
from ftkit.utils.json_values import from_json
from ftkit.utils.names import nearest
from ftkit.utils.own_code import execute, line_in, parse
from ftkit.utils.process import run_program
from ftkit.utils.registry import Registry
from ftkit.utils.url_files import url_files
from ftkit.utils.urls import display_path, is_url, local_path

PACKAGE = "plugin"
"""Package of class paths in recipes: plugin.NAME."""
Kind = Literal["objective", "optimizer", "data", "callback", "metric", "logger"]
METRIC_ARGUMENTS = ("answer", "expected", "record")
"""Arguments of a metric, by which it is recognised."""
_MOST_BYTES = 2**20
"""Largest plugin: its content is part of small files."""
_TYPES: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str, "None": NoneType}
MOST_SECONDS = 60.0
"""Most time to execute a plugin, which only defines things."""
_DIGITS = 16
"""Digits of a checksum that are shown."""


@dataclass(frozen=True, kw_only=True)
class OwnOption:
    """An option of a class: an argument of its `__init__`."""

    name: str
    types: tuple[str, ...] = ()
    """Names of types that it accepts; empty: any value."""
    choices: tuple[Any, ...] = ()
    """Values that it accepts besides."""
    default: Any = None
    required: bool = False
    """Whether it has no default."""

    @property
    def annotation(self) -> Any:
        """Its type."""
        kinds = [_TYPES[name] for name in self.types]
        if self.choices:
            kinds.append(Literal[self.choices])  # type: ignore[arg-type]
        return Union[tuple(kinds)] if kinds else Any  # noqa: UP007  # of types known at run time

    def check(self, value: Any, key: str) -> None:
        """Refuse a value of another type.

        Raises:
            UserError: it is not accepted.
        """
        # Types themselves, not subclasses: in Python, true is an int.
        kinds = {_TYPES[name] for name in self.types}
        if float in kinds:
            kinds.add(int)
        if not (self.types or self.choices) or type(value) in kinds or value in self.choices:
            return
        words = {"bool": "true or false", "int": "a whole number", "float": "a number"}
        words |= {"str": "text", "None": "empty"}
        wanted = [words[name] for name in self.types]
        if self.choices:
            wanted.append(f"one of: {', '.join(map(str, self.choices))}")
        example = self.choices[0] if self.choices else self.default
        advice = "Give another value." if example is None else f"Try --{key} {example}."
        raise UserError(f"{key} is {value!r}, but must be {' or '.join(wanted)}. {advice}")


@dataclass(frozen=True, kw_only=True)
class Defined:
    """A class or function that a plugin defines, and ftkit uses."""

    name: str
    kind: Kind
    options: tuple[OwnOption, ...] = ()
    rules: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of an objective: its `ftkit.recipe.objectives.ObjectiveRules`, but for the options."""
    missing: tuple[str, ...] = ()
    """Methods that it has to define and does not."""

    @cached_property
    def options_class(self) -> type:
        """A dataclass of its options."""
        fields: list[Any] = []
        for option in sorted(self.options, key=lambda one: not one.required):
            default = () if option.required else (dataclasses.field(default=option.default),)
            fields.append((option.name, option.annotation, *default))
        return dataclasses.make_dataclass(self.name, fields, frozen=True, kw_only=True)

    def check_options(self, given: Mapping[str, Any], beside: tuple[str, ...] = ()) -> None:
        """Check options that a recipe gives.

        Args:
            given: by name.
            beside: options of the same component that are not of this class.

        Raises:
            UserError: one is unknown, missing, or of another type.
        """
        known = {option.name: option for option in self.options}
        for name, value in given.items():
            if name in beside:
                continue
            if name not in known:
                near = nearest(name, (*known, *beside))
                has = f"It takes {', '.join(known)}." if known else "It takes none; remove it."
                advice = f"Did you mean {self.kind}.{near}?" if near else has
                raise UserError(f"{self.kind}.{name} is not an option of {self.name}. {advice}")
            known[name].check(value, f"{self.kind}.{name}")
        for option in self.options:
            if option.required and option.name not in given:
                raise UserError(
                    f"{self.kind}.{option.name} is missing: {self.name} needs it. "
                    f"Try --{self.kind}.{option.name} VALUE."
                )


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """A plugin: its content, and what that defines."""

    file: str
    """Absolute path that was named."""
    source: str
    """Content of the file."""
    definitions: tuple[Defined, ...]

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the content."""
        return hashlib.sha256(self.source.encode()).hexdigest()

    @property
    def option(self) -> str:
        """Option of the command line that names it, for messages."""
        return f"--plugin {Path(self.file).name}"

    @cached_property
    def module(self) -> ModuleType:
        """The module, executed once.

        Raises:
            UserError: it fails.
        """
        # By content: a process may use several versions of a file, one after another.
        name = f"ftkit_plugin_{self.sha256[:_DIGITS]}"
        return execute(self.source.encode(), self.file, name, self.option)

    def of_kind(self, kind: Kind) -> list[Defined]:
        """Return the classes and functions of a kind that it defines."""
        return [one for one in self.definitions if one.kind == kind]

    def find(self, kind: Kind, name: str) -> Defined:
        """Find a class by its name.

        Raises:
            UserError: it defines none of this kind and name, or an incomplete one.
        """
        known = {one.name: one for one in self.of_kind(kind)}
        if name not in known:
            has = f"it defines {', '.join(known)}" if known else "it defines none"
            near = nearest(name, known)
            advice = f"Try --{kind} {near}." if near else f"Name another --{kind}."
            raise UserError(f"{self.option} defines no {kind} {PACKAGE}.{name}; {has}. {advice}")
        found = known[name]
        if found.missing:
            raise UserError(
                f"{self.option}: {name} lacks {', '.join(found.missing)}. Define what is missing."
            )
        return found

    def make(self, kind: Kind, name: str, /, *arguments: Any, **options: Any) -> Any:
        """Make an object of one of its classes.

        Raises:
            UserError: the class does not take the arguments.
        """
        self.find(kind, name)
        try:
            return getattr(self.module, name)(*arguments, **options)
        except UserError:
            raise
        except Exception as error:  # of any kind: it is the user's code
            line = line_in(error, self.file)
            where = f" (line {line})" if line else ""
            raise UserError(
                f"{self.option}: {name} cannot be made: {type(error).__name__}: {error}{where}. "
                "Correct it, or its options."
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "file": self.file,
            "source": self.source,
            "definitions": [dataclasses.asdict(one) for one in self.definitions],
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Plugin":
        """The inverse of `to_json`."""
        plugin = from_json(cls, values)
        assert isinstance(plugin, cls)
        return plugin


@dataclass(frozen=True)
class PluginReader:
    """What makes a plugin's classes rows of registries."""

    name: str
    rows: str
    """MODULE:FUNCTION that returns a context, in which registries hold rows of the `Plugin` that it
    gets, or of none for None."""


PLUGIN_READERS: Registry[PluginReader] = Registry("plugin_readers", (PluginReader,), core=())
_IN_USE: list[Plugin | None] = [None]


@contextmanager
def using(plugin: Plugin | None) -> Iterator[None]:
    """Have recipes name the classes of a plugin inside the block; None: of none.

    Raises:
        UserError: nothing here reads plugins.
    """
    # As an imported module, a plugin belongs to a process and not to each call: whatever makes an
    # objective, an optimizer or a data set of a recipe finds its row in a registry.
    before = plugin_in_use()
    if plugin is before is None:
        yield
        return
    option = (plugin or before).option  # type: ignore[union-attr]  # one of both is there
    _IN_USE.append(plugin)
    try:
        with _reader(option, "rows")(plugin):
            yield
    finally:
        _IN_USE.pop()


def _reader(option: str, what: str) -> Callable[..., Any]:
    """What a row of readers names.

    Args:
        option: that names the plugin, for the message.
        what: field of the row.
    """
    row = next(iter(PLUGIN_READERS), None)
    if row is None:
        raise UserError(
            f"{option} names a plugin, but the extension plugin, which reads it, is missing. Put "
            "it back into ftkit/extensions, or leave out --plugin."
        )
    module, _, name = getattr(row, what).partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def plugin_in_use() -> Plugin | None:
    """The plugin of this process; None: it has none."""
    return _IN_USE[-1]


def place_in_plugin(error: BaseException) -> str | None:
    """Line of the plugin in use that raised an error, as "my.py, line 5"; None: it did not."""
    plugin = plugin_in_use()
    line = None if plugin is None else line_in(error, plugin.file)
    return None if plugin is None or line is None else f"{Path(plugin.file).name}, line {line}"


def open_plugin(named: str | Path | None) -> Plugin | None:
    """Read the file that --plugin names, and find what it defines; None: it names none.

    Args:
        named: a path or url.

    Raises:
        UserError: there is no such file, it is not Python, or it fails when it is executed.
    """
    if named is None:
        return None
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
    plugin = Plugin(file=str(path.absolute()), source=source, definitions=())
    definitions = _definitions_in(plugin)
    return dataclasses.replace(plugin, definitions=definitions)


def _definitions_in(plugin: Plugin) -> tuple[Defined, ...]:
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
    definitions: tuple[Defined, ...] = from_json(tuple[Defined, ...], found["definitions"])
    return definitions


def _where_it_hangs(traceback: str, file: str) -> str:
    """The line of a plugin that a traceback of faulthandler names first."""
    line = re.search(rf'File "{re.escape(file)}", line (\d+)', traceback)
    return f", in line {line[1]}" if line else ""


# Names in recipes


def own_name(class_path: str) -> str | None:
    """Name of a plugin's class in a class path; None: the path is not of a plugin."""
    package, _, name = str(class_path).rpartition(".")
    return name if package == PACKAGE else None


def own_path(field: str, name: str) -> str | None:
    """Class path of a short name in a recipe, if the plugin in use defines it."""
    plugin = plugin_in_use()
    definitions = () if plugin is None else plugin.definitions
    is_own = any((one.kind, one.name) == (field, name) for one in definitions)
    return f"{PACKAGE}.{name}" if is_own else None


def own_names(kind: str) -> list[str]:
    """Return the names of a kind that the plugin in use defines."""
    plugin = plugin_in_use()
    definitions = () if plugin is None else plugin.definitions
    return [one.name for one in definitions if one.kind == kind]


def short_names(class_paths: Iterable[str]) -> list[str]:
    """Names by which recipes may name classes of a plugin too."""
    return [path.removeprefix(f"{PACKAGE}.") for path in class_paths]


def require_own(kind: Kind, class_path: str) -> None:
    """Refuse a class path of a plugin for which there is no row.

    Raises:
        UserError: no plugin is in use, or it defines no such class.
    """
    name = own_name(class_path)
    if name is None:
        return
    plugin = plugin_in_use()
    if plugin is None:
        raise UserError(
            f"{kind} is {class_path}, which a plugin defines, but there is none: nothing that a "
            f"recipe names is executed. Add --plugin FILE.py with the file that defines {name}."
        )
    plugin.find(kind, name)


def require_same_plugin(checksum: str | None, file: Path, command: str) -> None:
    """Refuse to continue from a checkpoint with another plugin than it was written with.

    Args:
        checksum: SHA-256 of the checkpoint's plugin; None: it has none.
        file: that plugin, in the directory of the checkpoint.
        command: the command that continues, without --plugin.

    Raises:
        UserError: the plugin in use is another one, or there is none.
    """
    plugin = plugin_in_use()
    if checksum is None or (plugin is not None and plugin.sha256 == checksum):
        return
    now = "there is none now"
    if plugin is not None:
        now = f"{plugin.option} has {plugin.sha256[:_DIGITS]}"
    raise UserError(
        f"The checkpoint {display_path(file.parent)} was written with a plugin whose checksum is "
        f"{checksum[:_DIGITS]}, but {now}. A run cannot change what it learns. Its plugin lies in "
        f"the checkpoint: try {command} --plugin {shlex.quote(display_path(file))}"
    )
