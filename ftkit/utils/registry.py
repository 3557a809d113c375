"""Tables of what can be named: rows of the core, of our extensions, and of other packages.

A registry holds the rows of one kind, such as commands. Its name is also that of the module in
``ftkit/extensions/*/`` whose ``ROWS`` it has, and, after ``ftkit.``, of the group of entry points
by which another package names rows::

    [project.entry-points."ftkit.commands"]
    hello = "my_package.rows:HELLO"

A row is light: names, options, help, and where its object is, which is imported when it is used.
"""

import hashlib
import importlib
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ftkit.errors import UserError
from ftkit.utils.files import cache_root, write_json
from ftkit.utils.progress import print_shown

if TYPE_CHECKING:
    from importlib.metadata import Distribution

EXTENSIONS = Path(__file__).parents[1] / "extensions"
"""Folder of our extensions, each a folder in it. The core works without it."""
_PREFIX = "ftkit."
"""Of the groups of entry points that are ours."""


class Row(Protocol):
    """What every row of a registry has."""

    @property
    def name(self) -> str:
        """The name by which it is used."""


RowType = TypeVar("RowType", bound=Row)


@dataclass(frozen=True)
class Installed:
    """A row of another package, of which nothing is imported yet."""

    registry: str
    name: str
    place: str
    """Module and name of the row, as MODULE:NAME."""
    package: str
    version: str
    summary: str
    """What the package says of itself, in one line."""


class Registry(Generic[RowType]):
    """Rows of one kind by their names."""

    def __init__(self, name: str, kinds: tuple[type, ...], core: Iterable[RowType]) -> None:
        """Begin with the rows of the core.

        Args:
            name: of the registry, in the plural, such as commands.
            kinds: classes that a row may have.
            core: rows that are there without any extension.
        """
        self.name = name
        self._kinds = kinds
        self._core = {row.name: row for row in core}
        self.broken: dict[str, str] = {}
        """Extensions of ours whose rows cannot be read, and why."""
        self.opened: dict[str, RowType] = {}
        """Rows of other packages that have been used."""
        self.held: dict[str, RowType] = {}
        """Rows that a `with` block holds: those of the plugin in use."""

    @contextmanager
    def holding(self, rows: Iterable[RowType]) -> Iterator[None]:
        """Have further rows inside the block, in place of those that a block around it holds."""
        before, self.held = self.held, {row.name: row for row in rows}
        try:
            yield
        finally:
            self.held = before

    def get(self, name: str) -> RowType | None:
        """Return the row of a name; None: there is none.

        The core's rows come first, then those of our extensions, those that a block holds, and
        those of other packages: what is beside ftkit changes no name that ftkit has.

        Raises:
            UserError: it is a row of another package, which cannot be used.
        """
        row = self._core.get(name) or self._of_extensions.get(name) or self.held.get(name)
        if row is not None:
            return row
        other = next((one for one in self.installed if one.name == name), None)
        return None if other is None else self._opened(other)

    def __iter__(self) -> Iterator[RowType]:
        """Rows of the core and of our extensions."""
        yield from self._core.values()
        yield from self._of_extensions.values()

    @property
    def names(self) -> list[str]:
        """Every name, also those of other packages; none of a row that a block holds."""
        return [*(row.name for row in self), *(one.name for one in self.installed)]

    def of_extension(self, extension: str) -> list[RowType]:
        """Rows that an extension of ours brings."""
        return self._by_extension.get(extension, [])

    @cached_property
    def installed(self) -> list[Installed]:
        """Rows of other packages whose names are not taken."""
        own = {row.name for row in self}
        return [
            one for one in installed_rows() if one.registry == self.name and one.name not in own
        ]

    @cached_property
    def _of_extensions(self) -> dict[str, RowType]:
        return {row.name: row for rows in self._by_extension.values() for row in rows}

    @cached_property
    def _by_extension(self) -> dict[str, list[RowType]]:
        found = {}
        for extension in extension_names():
            if (EXTENSIONS / extension / f"{self.name}.py").is_file():
                try:
                    module = importlib.import_module(f"ftkit.extensions.{extension}.{self.name}")
                    found[extension] = list(module.ROWS)
                # Whatever one extension does wrong, the others and the core work.
                except Exception as error:
                    self.broken[extension] = described(error)
                    print_shown(
                        f"The extension {extension} cannot be used: {self.broken[extension]}",
                        sys.stderr,
                    )
        return found

    def _opened(self, one: Installed) -> RowType:
        source = f"{one.name} comes from the package {one.package} {one.version}, which"
        advice = f"Update it, or remove it with pip uninstall {one.package}."
        try:
            row: RowType = imported(one.place)
        # Code of another package: it may fail in any way.
        except Exception as error:
            raise UserError(f"{source} cannot be used: {described(error)} {advice}") from error
        if not isinstance(row, self._kinds) or row.name != one.name:
            kinds = " or a ".join(kind.__name__ for kind in self._kinds)
            raise UserError(
                f"{source} cannot be used: {one.place} is not a {kinds} of the name {one.name}. "
                f"{advice}"
            )
        self.opened[one.name] = row
        return row


def imported(place: str) -> Any:
    """Import what a row names as MODULE:NAME, and return it."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def extension_names() -> list[str]:
    """Names of our extensions that are here."""
    if not EXTENSIONS.is_dir():
        return []
    return sorted(path.parent.name for path in EXTENSIONS.glob("*/__init__.py"))


def missing_extension(error: ModuleNotFoundError) -> str | None:
    """The extension of ours that an import has not found; None: what it has not found is no such.

    One extension may import another, and a folder may be taken away.
    """
    parts = (error.name or "").split(".")
    is_ours = parts[:2] == ["ftkit", EXTENSIONS.name] and len(parts) > 2
    return parts[2] if is_ours and parts[2] not in extension_names() else None


def installed_rows() -> list[Installed]:
    """Rows that the entry points of installed packages name, without importing any of them.

    Reading the metadata of all packages takes up to half a second, so what a directory of
    `sys.path` holds is kept until its time changes, as it does with every package that comes or
    goes.
    """
    environment = hashlib.sha256(sys.prefix.encode()).hexdigest()[:16]
    file = cache_root() / f"entry-points-{environment}.json"
    kept: dict[str, Any] = {}
    # A cache that cannot be read or written, or holds something else, only costs time.
    with suppress(OSError, ValueError, TypeError):
        kept = dict(json.loads(file.read_text(encoding="utf-8")))
    rows: list[Installed] = []
    now: dict[str, Any] = {}
    for directory in dict.fromkeys(str(Path(path).absolute()) for path in sys.path):
        try:
            changed = Path(directory).stat().st_mtime_ns
        except OSError:
            continue
        try:
            then, texts = kept[directory]
            found = [Installed(*map(str, row)) for row in texts] if then == changed else None
        except (KeyError, TypeError, ValueError):
            found = None
        if found is None:
            found = _read_entry_points(directory)
        rows += found
        now[directory] = (changed, [astuple(row) for row in found])
    if json.dumps(now) != json.dumps(kept):
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, now)
    return sorted(rows, key=lambda row: (row.registry, row.name, row.package))


def _read_entry_points(directory: str) -> list[Installed]:
    from importlib import metadata  # 20 ms, which a cached answer does not need

    return [
        Installed(
            point.group.removeprefix(_PREFIX),
            point.name,
            point.value,
            _field(package, "Name"),
            _field(package, "Version"),
            _field(package, "Summary"),
        )
        for package in metadata.distributions(path=[directory])
        for point in package.entry_points
        if point.group.startswith(_PREFIX)
    ]


def _field(package: "Distribution", name: str) -> str:
    """A field of the metadata of a package; "": it has none."""
    (first, *_) = package.metadata.get_all(name) or [""]
    return str(first)


def described(error: Exception) -> str:
    """Kind and text of an error of foreign code, as a sentence."""
    return f"{type(error).__name__}: {str(error).rstrip('.')}."
