"""A base model in one file, which is converted once into a Hugging Face directory and reused."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftkit.utils.registry import Registry


@dataclass(frozen=True)
class FileFormat:
    """A format of such files."""

    name: str
    title: str
    """In texts."""
    suffix: str
    """Of its files, in lower case, with the dot."""
    module: str
    """Module with the functions that `SingleFile` calls, of the same names and arguments."""


FILE_FORMATS: Registry[FileFormat] = Registry("file_formats", (FileFormat,), core=())


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Disk space and memory that the conversion of a file needs."""

    place: Path
    """Its directory."""
    disk_bytes: int
    """Bytes of its weights on disk."""
    memory_bytes: int
    """Most host memory used by the conversion."""
    is_made: bool
    """True if the conversion exists already."""


@dataclass(frozen=True)
class SingleFile:
    """A file with a whole base model."""

    path: Path
    format: FileFormat

    def settings(self) -> dict[str, Any]:
        """Build config.json from its header; nothing is converted.

        Raises:
            UserError: it cannot be read, or is of a model that ftkit would compute otherwise.
        """
        found: dict[str, Any] = self._reader.settings(self.path)
        return found

    def conversion_place(self, root: Path) -> Path:
        """Return the directory of the converted model, whether it exists or not.

        Args:
            root: where downloads go.

        Raises:
            UserError: the file cannot be read.
        """
        place: Path = self._reader.conversion_place(self.path, root)
        return place

    def planned_conversion(self, root: Path) -> Conversion:
        """Plan its conversion, or describe an earlier one; nothing is converted.

        Raises:
            UserError: as `settings`.
        """
        planned: Conversion = self._reader.planned_conversion(self.path, root)
        return planned

    def convert(self, root: Path, licences: Mapping[str, bytes]) -> Path:
        """Convert it, unless it is converted already; return the Hugging Face directory.

        Args:
            root: where downloads go.
            licences: licence files of the model, by name.

        Raises:
            UserError: as `settings`, or the disk is too full.
        """
        place: Path = self._reader.convert(self.path, root, licences)
        return place

    @property
    def _reader(self) -> Any:
        return importlib.import_module(self.format.module)


def single_file(path: Path) -> SingleFile | None:
    """Return what a path is by its suffix, whether it exists or not; None: no file of a model."""
    suffix = path.suffix.lower()
    if not suffix:
        return None
    found = next((one for one in FILE_FORMATS if one.suffix == suffix), None)
    return None if found is None else SingleFile(path, found)


def or_single_files() -> str:
    """Kinds of such files in a list of what a base model may be, each after a comma."""
    return "".join(f", a {one.title} file" for one in FILE_FORMATS)
