"""Records of a path: files or a data set of the hub, read in one form and by split."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ftkit.data.records.formats import format_of
from ftkit.data.records.hub import HubData, HubName
from ftkit.data.records.keys import UnusedKeys
from ftkit.data.records.paths import DataFiles
from ftkit.data.records.record import Record
from ftkit.data.records.shapes import Form, RecordReader


@dataclass(frozen=True, kw_only=True)
class RecordSet:
    """The records of one source."""

    form: Form
    where: str
    """For people: the file, directory or data set they are of."""
    train: list[Record]
    val: list[Record] | None = None
    """None: a part of the others is for validation."""
    version: str | None = None
    """Of a data set of the hub."""
    val_split: str | None = None
    """The name of the split that is validated on, where the source has such names."""
    unused: UnusedKeys = field(default_factory=UnusedKeys)
    """Keys that records have, and of which nothing is known."""


def read_records(file: Path, *, answered: bool = True) -> list[Record]:
    """The records of one file of any format.

    Args:
        file: what to read.
        answered: whether each must have its answer.

    Raises:
        UserError: with file, place and reason.
    """
    return _records([file], RecordReader(answered=answered))


def read_files(files: DataFiles, where: str, columns: Mapping[str, str] | None) -> RecordSet:
    """The records of files.

    Args:
        files: for training and, if there are, for validation.
        where: what they are of, for people.
        columns: their names of keys, by ours.

    Raises:
        UserError: with file, place and reason.
    """
    reader = RecordReader(columns)
    train = _records(files.train, reader)
    val = _records(files.val, reader) if files.val else None
    return RecordSet(
        form=reader.finish(where), where=where, train=train, val=val, unused=reader.unused
    )


def read_hub(name: HubName, columns: Mapping[str, str] | None, *, whole: bool = False) -> RecordSet:
    """The records of a data set of the hub.

    Args:
        name: which.
        columns: their names of keys, by ours.
        whole: read the split for training alone.

    Raises:
        UserError: the data set cannot be had, or a record does not fit.
    """
    data, reader = HubData(name), RecordReader(columns)

    def records(split: str) -> list[Record]:
        return reader.records(data.rows(split), partial(data.place, split))

    train = records(data.train_split)
    val_split = None if whole else data.val_split
    val = None if val_split is None else records(val_split)
    return RecordSet(
        form=reader.finish(name.name),
        where=name.name,
        version=data.commit,
        train=train,
        val=val,
        val_split=val_split,
        unused=reader.unused,
    )


def _records(files: Sequence[Path], reader: RecordReader) -> list[Record]:
    records: list[Record] = []
    for file in files:
        kind = format_of(file)
        assert kind is not None
        place = partial("{}, {} {}".format, file, kind.unit)
        records += reader.records(kind.rows(file), place)
    return records
