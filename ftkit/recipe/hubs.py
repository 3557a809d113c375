"""Hubs, from which models and data sets come by name: OWNER/NAME."""

import importlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ftkit.errors import UserError
from ftkit.utils.names import nearest_directory
from ftkit.utils.registry import Registry, imported
from ftkit.utils.url_files import UrlObjects

READ_BUILDERS = ("arrow", "cache", "csv", "json", "parquet", "text")
"""Builders of the datasets library that read tables and texts. All others are refused: one of them
unpickles."""


@dataclass(frozen=True, kw_only=True)
class HubName:
    """Name of a hub data set with subset, split, revision and files."""

    name: str
    """owner/name."""
    subset: str | None = None
    split: str | None = None
    """Split to train on; None: train."""
    revision: str | None = None
    data_files: str | None = None
    """A file of its repository, or a pattern of several; None: those of its splits."""


class HubDataSet(Protocol):
    """A downloaded data set of a hub, made of its `HubName`."""

    train_split: str
    """Name of the split to train on."""

    @property
    def val_split(self) -> str | None:
        """The split to validate on; None: there is none."""

    @property
    def commit(self) -> str:
        """Abbreviated name of the version that was read."""

    def rows(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """The rows of a split, from 1."""

    def place(self, split: str, number: int) -> str:
        """Name a row in a message."""


class HubFiles(UrlObjects, Protocol):
    """The files of a data set of a hub at one commit, made of its `HubName`.

    The version of a file changes with its content. Unlike those of a url, all methods raise
    `UserError`.
    """

    commit: str
    """Which names the same files for ever."""
    directory: str
    """Of its repository, which names begin in; "": its root."""


@dataclass(frozen=True, kw_only=True)
class Hub:
    """A hub."""

    name: str
    """Also what stands before a colon in the names of what another package's hub has, as in
    HUB:OWNER/NAME."""
    models: str
    """Module with the functions `download` and `fetch_settings` that the methods here call, of the
    same arguments."""
    data_sets: str
    """MODULE:CLASS of a `HubDataSet`."""
    files: str = ""
    """MODULE:CLASS of `HubFiles`; "": files of its data sets are not read by ranges."""

    def download(self, name: str, *, token: str | None, root: Path) -> Path:
        """Download a model to root/OWNER/NAME, unless it is complete there; return that directory.

        Args:
            name: OWNER/NAME, or OWNER/NAME@VERSION, which is part of the directory's name.
            token: of an account; None: that of the environment.
            root: directory of downloads.

        Raises:
            UserError: it cannot be downloaded; with a remedy.
        """
        directory: Path = self._models.download(name, token=token, root=root)
        return directory

    def fetch_settings(self, name: str, *, token: str | None, root: Path) -> UserError | None:
        """Download settings and tokenizer of a model alone, as `download` does.

        Returns:
            Error of the failed download, with a remedy; None: nothing failed.
        """
        failure: UserError | None = self._models.fetch_settings(name, token=token, root=root)
        return failure

    def data_set(self, wanted: HubName) -> HubDataSet:
        """Download a data set.

        Raises:
            UserError: there is no such data set, or it cannot be downloaded or read.
        """
        found: HubDataSet = imported(self.data_sets)(wanted)
        return found

    def data_files(self, wanted: HubName) -> HubFiles:
        """List the files of a data set, which are read by ranges.

        Raises:
            UserError: there is no such data set or file, or no files of this hub are read so.
        """
        if not self.files:
            raise UserError(
                f"{wanted.name} is of the hub {self.name}, which reads whole data sets alone.\n"
                "Download its files and give their directory, or try --data JSON."
            )
        found: HubFiles = imported(self.files)(wanted)
        return found

    @property
    def _models(self) -> Any:
        return importlib.import_module(self.models)


HUBS: Registry[Hub] = Registry("hubs", (Hub,), core=())
# Neither OWNER nor NAME begins with a dot: ../x and ./x are paths.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_VERSION = re.compile(r"\w[\w.-]*")


def is_hub_name(text: str, *, has_version: bool) -> bool:
    """Return whether a text can be the name of something on a hub.

    Args:
        text: OWNER/NAME, or HUB:OWNER/NAME for the hub of another package.
        has_version: whether @VERSION may stand behind it.
    """
    hub, colon, name = text.rpartition(":")
    name, at, version = name.partition("@") if has_version else (name, "", "")
    if not _NAME.fullmatch(name) or (at and not _VERSION.fullmatch(version)):
        return False
    return not colon or hub in (one.name for one in HUBS.installed)


def hub_of(text: str, key: str) -> tuple[Hub, str]:
    """Return the hub that a text of `is_hub_name` means, and the name of the thing there.

    Args:
        text: what was given.
        key: of the recipe, for errors.

    Raises:
        UserError: our extension, which finds what names without a hub mean, is missing; or a
            package cannot be used.
    """
    package, _, name = text.rpartition(":")
    hub = HUBS.get(package) if package else next(iter(HUBS), None)
    if hub is None:
        raise UserError(
            f"{key} is {text}, but nothing here has this name, and what it is on a hub is found by "
            "ftkit's extension hub, which is missing.\nGive the path of a file or a directory."
            f"{nearest_directory(name)}"
        )
    return hub, name


def or_download(name: str) -> str:
    """The end of an advice, ", or try ftkit download NAME"; "": the extension of it is missing."""
    return f", or try ftkit download {name}" if any(HUBS) else ""


def split_version(name: str) -> tuple[str, str | None]:
    """Split ORG/NAME@VERSION; None: it names no version."""
    repo_id, _, version = name.partition("@")
    return repo_id, version or None


@contextmanager
def as_owner_of(token: str | None) -> Iterator[None]:
    """Read data with this Hugging Face token, as the ranks of a run do; None: with $HF_TOKEN.

    Readers take it from the environment, also those of a plugin.
    """
    before = os.environ.get("HF_TOKEN")
    if token is not None:
        os.environ["HF_TOKEN"] = token
    try:
        yield
    finally:
        # As it was: this also runs inside a notebook, which goes on.
        if token is not None and before is None:
            del os.environ["HF_TOKEN"]
        elif token is not None and before is not None:
            os.environ["HF_TOKEN"] = before
