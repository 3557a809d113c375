"""The plugin: a Python file of the user's own, named by --plugin, with classes that recipes name.

Only the command line names one: nothing that a recipe, a checkpoint or a data file contains is
executed. The file is read once. Its content goes with the run, to its ranks on all hosts, its
directory and its checkpoints. An extension reads it, and has registries hold what it defines.
"""

import hashlib
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from ftkit.errors import UserError
from ftkit.utils.names import nearest
from ftkit.utils.own_code import execute, line_in
from ftkit.utils.registry import Registry, imported
from ftkit.utils.urls import display_path

PACKAGE = "plugin"
"""Package of class paths in recipes: plugin.NAME."""
_DIGITS = 16
"""Digits of a checksum that are shown."""


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """A plugin: its content, and what that defines."""

    file: str
    """Absolute path that was named."""
    source: str
    """Content of the file."""
    definitions: tuple[dict[str, Any], ...] = ()
    """Plain values of each class and function that ftkit uses, with its name, its kind, and
    `missing`, the methods that it lacks; its reader knows the rest."""

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

    def line_of(self, error: BaseException) -> int | None:
        """Line of the file that raised an error; None: another file did."""
        return line_in(error, self.file)

    def names(self, kind: str) -> list[str]:
        """Names of a kind that it defines."""
        return [one["name"] for one in self.definitions if one["kind"] == kind]

    def check(self, kind: str, name: str) -> None:
        """Refuse a name of which it defines nothing complete.

        Raises:
            UserError: it defines none of this kind and name, or an incomplete one.
        """
        known = self.names(kind)
        if name not in known:
            has = f"it defines {', '.join(known)}" if known else "it defines none"
            near = nearest(name, known)
            advice = f"Try --{kind} {near}." if near else f"Name another --{kind}."
            raise UserError(f"{self.option} defines no {kind} {PACKAGE}.{name}; {has}. {advice}")
        (missing,) = [one["missing"] for one in self.definitions if one["name"] == name]
        if missing:
            raise UserError(
                f"{self.option}: {name} lacks {', '.join(missing)}. Define what is missing."
            )

    def to_json(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Plugin":
        """The inverse of `to_json`."""
        return cls(**values | {"definitions": tuple(values["definitions"])})


@dataclass(frozen=True)
class PluginReader:
    """What makes a plugin's classes rows of registries."""

    name: str
    open: str
    """MODULE:FUNCTION that reads the file which --plugin names, and returns a `Plugin`."""
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
    concerned = plugin or plugin_in_use()
    if concerned is None:
        yield
        return
    _IN_USE.append(plugin)
    try:
        with _reader(concerned.option, "rows")(plugin):
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
    found: Callable[..., Any] = imported(getattr(row, what))
    return found


def plugin_in_use() -> Plugin | None:
    """The plugin of this process; None: it has none."""
    return _IN_USE[-1]


def place_in_plugin(error: BaseException) -> str | None:
    """Line of the plugin in use that raised an error, as "my.py, line 5"; None: it did not."""
    plugin = plugin_in_use()
    line = None if plugin is None else plugin.line_of(error)
    return None if plugin is None or line is None else f"{Path(plugin.file).name}, line {line}"


def open_plugin(named: str | Path | None) -> Plugin | None:
    """Read the file that --plugin names, and find what it defines; None: it names none.

    Args:
        named: a path or url.

    Raises:
        UserError: there is no such file, it is not Python, it fails when it is executed, or nothing
            here reads plugins.
    """
    if named is None:
        return None
    found: Plugin = _reader(f"--plugin {named}", "open")(named)
    return found


# Names in recipes


def own_name(class_path: str) -> str | None:
    """Name of a plugin's class in a class path; None: the path is not of a plugin."""
    package, _, name = str(class_path).rpartition(".")
    return name if package == PACKAGE else None


def own_path(field: str, name: str) -> str | None:
    """Class path of a short name in a recipe, if the plugin in use defines it."""
    return f"{PACKAGE}.{name}" if name in own_names(field) else None


def own_names(kind: str) -> list[str]:
    """Return the names of a kind that the plugin in use defines."""
    plugin = plugin_in_use()
    return [] if plugin is None else plugin.names(kind)


def short_names(class_paths: Iterable[str]) -> list[str]:
    """Names by which recipes may name classes of a plugin too."""
    return [path.removeprefix(f"{PACKAGE}.") for path in class_paths]


def require_own(kind: str, class_path: str) -> None:
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
    plugin.check(kind, name)


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
