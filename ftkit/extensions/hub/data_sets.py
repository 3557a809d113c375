"""Data sets of the Hugging Face hub, by the datasets library; no code of a hub is ever run."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ftkit.data.records.paths import VALIDATION
from ftkit.data.records.tables import batch_rows
from ftkit.errors import UserError
from ftkit.recipe.hubs import READ_BUILDERS, HubName
from ftkit.utils.names import nearest

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder

_AT_ONCE = 1000
_UNREACHABLE = "client has been closed"
"""Message of huggingface_hub 1.3 when it cannot resolve the address of the hub."""
_COMMIT = re.compile(r"[0-9a-f]{7,40}")


class HubData:
    """A downloaded data set of the hub."""

    def __init__(self, wanted: HubName) -> None:
        """Download what is missing, with $HF_TOKEN if the hub requires one.

        Args:
            wanted: its name, and what of it.

        Raises:
            UserError: there is no such data set, or it cannot be downloaded or read.
        """
        self._wanted = wanted
        self._builder = _prepared(wanted)
        self._splits = list(self._builder.info.splits or ())
        # Now: a split that cannot be chosen is refused before any record is read.
        self.train_split = self._training_split()

    @property
    def commit(self) -> str:
        """Abbreviated commit of the version that was read."""
        return str(self._builder.hash)[:7]

    @property
    def val_split(self) -> str | None:
        """The split to validate on: the counterpart of the one to train on; None: there is none."""
        name = self.train_split.partition("[")[0]
        # The counterpart of train_sft is test_sft.
        counterparts = [name.replace("train", counterpart, 1) for counterpart in VALIDATION]
        return next((c for c in counterparts if c in self._splits and c != name), None)

    def rows(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """The rows of a split, from 1.

        Raises:
            UserError: the data set has no such split.
        """
        try:
            found: Dataset = self._builder.as_dataset(split=split)
        except (ValueError, AssertionError) as error:
            raise UserError(self._explain_split(split, error)) from None
        # As tables, so that their rows are converted like those of files.
        tables = found.with_format("arrow").iter(batch_size=_AT_ONCE)
        return batch_rows(batch for table in tables for batch in table.to_batches())

    def place(self, split: str, number: int) -> str:
        """Name a row in a message."""
        return f"{self._wanted.name}, {split} record {number}"

    def _training_split(self) -> str:
        if self._wanted.split is not None:
            return self._wanted.split
        if "train" in self._splits or len(self._splits) == 1:
            return "train" if "train" in self._splits else self._splits[0]
        # One split such as train_sft is as clear as train.
        named = [split for split in self._splits if split.startswith("train")]
        if len(named) == 1:
            return named[0]
        raise UserError(
            f"{self._wanted.name} has no split train; its splits: {', '.join(self._splits)}.\n"
            f"Say which to train on: --data.split {(named or self._splits)[0]}."
        )

    def _explain_split(self, split: str, error: Exception) -> str:
        # A slice such as train[:1000] is of the split train.
        name = split.partition("[")[0]
        near = nearest(name, self._splits, cutoff=0.3) or self._splits[0]
        reason = f"its splits: {', '.join(self._splits)}"
        if name in self._splits:
            reason, near = str(error).partition("\n")[0], f"'{name}[:1000]'"
        return (
            f"data.split is {split}, but {self._wanted.name} has no such split; {reason}.\n"
            f"Try --data.split {near}."
        )


def _prepared(wanted: HubName) -> "DatasetBuilder":
    """Download a data set into the cache of the datasets library, and return its builder."""
    import datasets

    # Our display shows progress; two of them overwrite each other's lines.
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        builder = datasets.load_dataset_builder(
            wanted.name, wanted.subset, revision=wanted.revision, data_files=wanted.data_files
        )
        kind = type(builder).__module__.rpartition(".")[2]
        # Before the files are fetched: a builder that is not on the list may unpickle or run code.
        if kind not in READ_BUILDERS:
            raise UserError(
                f"data.path is {wanted.name}, whose files are of the kind {kind}, which is not "
                "read from a hub.\nDownload its records and give them as files."
            )
        # Without network, datasets takes the last version in its cache, whatever revision is
        # requested.
        _check_revision(wanted, builder, is_cached=kind == "cache")
        builder.download_and_prepare()
    except (OSError, RuntimeError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(_explained(error, wanted)) from error
    return builder


def _check_revision(wanted: HubName, builder: "DatasetBuilder", *, is_cached: bool) -> None:
    """Refuse a cached version other than the requested one, which is used without the hub."""
    if wanted.revision is None or not is_cached:
        return
    # Branches and tags move, so only a commit can be compared without the hub.
    if _COMMIT.fullmatch(wanted.revision) and str(builder.hash).startswith(wanted.revision):
        return
    raise UserError(
        f"data.revision is {wanted.revision}, but the hub cannot be reached to look that up, "
        f"and the last one in the cache is {builder.hash}.\n"
        f"Try --data.revision {builder.hash}, or run this where the hub can be reached."
    )


def _explained(error: Exception, wanted: HubName) -> str:
    """Explain a failure and its remedy. Never quotes requests or tokens."""
    import datasets
    from huggingface_hub import constants

    hub, name, text = constants.ENDPOINT, wanted.name, str(error)
    # Without the file, or the hub, the library looks in its cache, where it finds whole sets alone.
    if wanted.data_files is not None and isinstance(error, FileNotFoundError | ValueError):
        return (
            f"data.data_files is {wanted.data_files}, but {name} has no such file that can be "
            f"read, or {hub} cannot be reached from this machine.\n"
            f"Give a name from {hub}/datasets/{name}/tree/main, or a pattern, such as '*.jsonl', "
            "or download the file and give its path."
        )
    if isinstance(error, datasets.exceptions.DataFilesNotFoundError):
        return f"{name} has no data files that can be read.\nChoose another copy of the data."
    if isinstance(error, datasets.exceptions.DatasetNotFoundError):
        # The library raises one class for all of these: only its message distinguishes them.
        if "gated" in text:
            return (
                f"{name} is gated: its owners grant access to accounts, one by one.\nAccept its "
                f"terms at {hub}/datasets/{name} and give a token of that account: set HF_TOKEN or "
                "--access_token."
            )
        if text.startswith("Revision"):
            return (
                f"data.revision is {wanted.revision}, but {name} has no such version.\n"
                "Try --data.revision main."
            )
        return (
            f"There is no data set {name} at {hub}, or it is private, and there is no local file "
            f"or directory {name}.\n"
            "Check the spelling; for a private one set HF_TOKEN or --access_token."
        )
    if isinstance(error, ConnectionError) or _UNREACHABLE in text:
        return (
            f"{name} is not a local file or directory, it is not in the cache of data sets, and "
            f"{hub} cannot be reached from this machine.\n"
            "Check the network and HF_HUB_OFFLINE, set HF_ENDPOINT to a mirror, or copy "
            "~/.cache/huggingface from a machine where this command has run."
        )
    if "scripts are no longer supported" in text:
        return (
            f"{name} is read by a program of its own, which ftkit does not run.\n"
            f"Try --data.revision refs/convert/parquet, where the hub keeps its records as files."
        )
    # The library lists the subsets in its message, as ['main', 'socratic'].
    if isinstance(error, ValueError) and (subsets := re.search(r"\[(.*)\]", text)):
        names = re.findall(r"'([^']+)'", subsets.group(1))
        near = nearest(wanted.subset or "", names, cutoff=0.3) or (names or ["NAME"])[0]
        requested = "" if wanted.subset is None else f", but data.subset is {wanted.subset}"
        return (
            f"{name} has the subsets {', '.join(names[:20])}{requested}.\n"
            f"Say which: --data.subset {near}."
        )
    # The library wraps errors of readers in one of its own that says less.
    cause = error.__cause__ or error
    reason = str(cause).partition("\n")[0].rstrip(".") or "no reason given"
    return (
        f"{name} could not be loaded: {type(cause).__name__}: {reason}.\nDownload its files and "
        "give them instead, or run this again."
    )
