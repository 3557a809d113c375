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
from ftkit.recipe.objectives import Preference


@dataclass(frozen=True, kw_only=True)
class RecordSet:
    """Records of one source, by split."""

    form: Form
    where: str
    """File, directory or data set that they come from, for messages."""
    train: list[Record]
    val: list[Record] | None = None
    """None: a share of the others is split off."""
    version: str | None = None
    """Commit of a hub data set."""
    val_split: str | None = None
    """Name of the validation split, where the source has named splits."""
    unused: UnusedKeys = field(default_factory=UnusedKeys)
    """Keys of the records that are not used."""


def read_records(file: Path, *, answered: bool = True) -> list[Record]:
    """Read the records of one file of any format.

    Args:
        file: what to read.
        answered: whether each must have its answer.

    Raises:
        UserError: with file, place and reason.
    """
    return _records([file], RecordReader(answered=answered))


def read_files(
    files: DataFiles,
    where: str,
    columns: Mapping[str, str] | None,
    *,
    preference: Preference | None = None,
) -> RecordSet:
    """Read the records of files.

    Args:
        files: for training and, if there are, for validation.
        where: what they are of, for people.
        columns: their names of keys, by ours.
        preference: how records say which answers are better; None: they do not.

    Raises:
        UserError: with file, place and reason.
    """
    reader = RecordReader(columns, preference=preference)
    train = _records(files.train, reader)
    val = _records(files.val, reader) if files.val else None
    return RecordSet(
        form=reader.finish(where), where=where, train=train, val=val, unused=reader.unused
    )


def read_hub(
    name: HubName,
    columns: Mapping[str, str] | None,
    *,
    whole: bool = False,
    preference: Preference | None = None,
) -> RecordSet:
    """Read the records of a hub data set.

    Args:
        name: of the data set, and what of it.
        columns: their names of keys, by ours.
        whole: read the split for training alone.
        preference: how records say which answers are better; None: they do not.

    Raises:
        UserError: the data set cannot be read, or a record does not fit.
    """
    data, reader = HubData(name), RecordReader(columns, preference=preference)

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
