"""Records of a path: files or a data set of the hub, read in one form and by split."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ftkit.data.records.bad import BadRecords
from ftkit.data.records.formats import format_of
from ftkit.data.records.forms import Form
from ftkit.data.records.keys import UnusedKeys
from ftkit.data.records.paths import DataFiles
from ftkit.data.records.record import Record
from ftkit.data.records.shapes import RecordReader, reader_of
from ftkit.recipe.hubs import HubName, hub_of
from ftkit.recipe.objectives import Preference

Rows = tuple[Iterable[tuple[Any, Any]], Callable[[Any], str]]
"""Rows with their numbers, and what names the place of one."""


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
    bad: Mapping[str, BadRecords] = field(default_factory=dict)
    """Bad records that are left out, by split (train, val)."""


def read_records(
    file: Path, *, answered: bool = True, reader: RecordReader | None = None
) -> list[Record]:
    """Read the records of one file of any format.

    Args:
        file: what to read.
        answered: whether each must have its answer.
        reader: of records of another kind; None: each has one answer, or none.

    Raises:
        UserError: with file, place and reason.
    """
    reader = RecordReader(answered=answered) if reader is None else reader
    return reader.records(_rows([file], reader), _place)


def read_files(
    files: DataFiles,
    where: str,
    columns: Mapping[str, str] | None,
    *,
    preference: Preference | None = None,
    skips_bad: bool = False,
) -> RecordSet:
    """Read the records of files.

    Args:
        files: for training and, if there are, for validation.
        where: what they are of, for people.
        columns: their names of keys, by ours.
        preference: how records say which answers are better; None: they do not.
        skips_bad: whether bad records are left out.

    Raises:
        UserError: with file, place and reason.
    """
    reader = reader_of(columns, preference=preference, keeps_bad=True)
    splits: dict[str, Rows] = {"train": (_rows(files.train, reader), _place)}
    if files.val:
        splits["val"] = (_rows(files.val, reader), _place)
    return record_set(reader, splits, where, skips_bad=skips_bad)


def read_hub(
    name: HubName,
    columns: Mapping[str, str] | None,
    *,
    whole: bool = False,
    preference: Preference | None = None,
    skips_bad: bool = False,
) -> RecordSet:
    """Read the records of a hub data set.

    Args:
        name: of the data set, and what of it.
        columns: their names of keys, by ours.
        whole: read the split for training alone.
        preference: how records say which answers are better; None: they do not.
        skips_bad: whether bad records are left out.

    Raises:
        UserError: the data set cannot be read, or a record does not fit.
    """
    hub, there = hub_of(name.name, "data.path")
    data = hub.data_set(replace(name, name=there))
    reader = reader_of(columns, preference=preference, keeps_bad=True)
    # Whoever wrote the data set says nothing about files of this machine.
    reader.names_files = False
    val_split = None if whole else data.val_split
    splits: dict[str, Rows] = {
        part: (data.rows(split), partial(data.place, split))
        for part, split in (("train", data.train_split), ("val", val_split))
        if split is not None
    }
    found = record_set(reader, splits, name.name, skips_bad=skips_bad)
    return replace(found, version=data.commit, val_split=val_split)


def record_set(
    reader: RecordReader, splits: Mapping[str, Rows], where: str, *, skips_bad: bool
) -> RecordSet:
    """Read the records of all splits, and refuse bad ones of all of them together.

    Args:
        reader: keeps bad records.
        splits: rows of train and, if there are, of val.
        where: what they come from, for people.
        skips_bad: whether bad records are left out.

    Raises:
        UserError: there are bad records that are not left out, or no others.
    """
    found, bad = dict[str, list[Record]](), dict[str, BadRecords]()
    for split, (rows, place) in splits.items():
        found[split] = reader.records(rows, place)
        bad[split] = reader.bad
    every = BadRecords(kind for one in bad.values() for kind in one.kinds)
    good = sum(map(len, found.values()))
    if every.count and not (skips_bad and good):
        raise every.refusal(good + every.count, may_skip=good > 0)
    return RecordSet(
        form=reader.finish(where),
        where=where,
        train=found["train"],
        val=found.get("val"),
        unused=reader.unused,
        bad=bad,
    )


def _rows(files: Sequence[Path], reader: RecordReader) -> Iterator[tuple[tuple[Path, int], Any]]:
    for file in files:
        kind = format_of(file)
        assert kind is not None
        for number, row in kind.rows(file):
            yield (file, number), reader.values_of_cells(row) if kind.has_cells else row


def _place(of_row: tuple[Path, int]) -> str:
    file, number = of_row
    kind = format_of(file)
    assert kind is not None
    return f"{file}, {kind.unit} {number}"
