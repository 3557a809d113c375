"""Tables as rows: CSV and TSV, parquet, and the Arrow directories of the datasets library."""

import csv
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftkit.errors import UserError
from ftkit.records.json_rows import explain_empty
from ftkit.records.opening import lines_of, opened

if TYPE_CHECKING:
    import pyarrow

_AT_ONCE = 1000
_STATE = "state.json"


def csv_rows(file: Path, delimiter: str = ",") -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a .csv file by the names of its first one, from 1; every value is a text.

    Raises:
        UserError: a row has more or fewer values than there are names, or it cannot be read.
    """
    csv.field_size_limit(sys.maxsize)  # texts may be long
    table = csv.reader(lines_of(file), delimiter=delimiter, strict=True)
    try:
        names = next(table, None)
        if names is None:
            raise UserError(explain_empty(file))
        _check_names(file, names)
        number = 0
        for values in table:
            if not values:
                continue
            number += 1
            if len(values) != len(names):
                raise UserError(
                    f"{file}, record {number}, which ends in line {table.line_num}, has "
                    f"{len(values)} values, but the first line has {len(names)} names.\n"
                    f"Correct it; a text with {delimiter!r} inside stands between double quotes."
                )
            yield number, dict(zip(names, values, strict=True))
    except csv.Error as error:
        raise UserError(
            f"{file}, line {table.line_num}, is not valid CSV: {error}.\nCorrect it there."
        ) from None
    if number == 0:
        raise UserError(explain_empty(file))


def tsv_rows(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """The same with tabs.

    Raises:
        UserError: as `csv_rows`.
    """
    return csv_rows(file, "\t")


def parquet_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a parquet file, from 1.

    Raises:
        UserError: it is none, or damaged.
    """
    import pyarrow
    import pyarrow.parquet

    with opened(file) as stream:
        try:
            table = pyarrow.parquet.ParquetFile(stream)
            yield from _numbered(file, table.iter_batches(batch_size=_AT_ONCE))
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(_explain_damage(file, error)) from None


def is_arrow_directory(path: Path) -> bool:
    """Whether save_to_disk of a data set of the datasets library wrote it."""
    return (path / _STATE).is_file() and (path / "dataset_info.json").is_file()


def arrow_files(directory: Path) -> list[Path]:
    """The files of an Arrow directory that hold its rows, in order.

    Raises:
        UserError: it does not name them.
    """
    try:
        state = json.loads((directory / _STATE).read_text(encoding="utf-8"))
        names = [Path(entry["filename"]).name for entry in state["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(_explain_damage(directory / _STATE, error)) from None
    return [directory / name for name in names]


def arrow_rows(directory: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of an Arrow directory, from 1.

    Raises:
        UserError: files of it are missing or damaged.
    """
    import pyarrow

    def batches() -> Iterator["pyarrow.RecordBatch"]:
        for file in arrow_files(directory):
            with pyarrow.memory_map(str(file)) as mapped:
                yield from pyarrow.ipc.open_stream(mapped)

    try:
        yield from _numbered(directory, batches())
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(_explain_damage(directory, error)) from None


def batch_rows(batches: Iterable["pyarrow.RecordBatch"]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of record batches, from 1.

    A table has every key in every row: those without a value are left out inside of lists and
    objects, where none was written.
    """
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield (
                number,
                {
                    key: _without_nulls(value) if isinstance(value, list | dict) else value
                    for key, value in row.items()
                },
            )


def _numbered(
    file: Path, batches: Iterable["pyarrow.RecordBatch"]
) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    for number, row in batch_rows(batches):
        yield number, row
    if number == 0:
        raise UserError(explain_empty(file))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _check_names(file: Path, names: list[str]) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if names and names[0].lstrip().startswith(("{", "[")):
        raise UserError(
            f"{file} holds JSON, not a table.\nRename it to end in .json (a list of records) or "
            ".jsonl (a record per line)."
        )
    if twice is not None:
        raise UserError(
            f"{file} has two columns named {twice!r} in its first line.\nRename or remove one."
        )


def _explain_damage(file: Path, error: Exception) -> str:
    reason = str(error).partition("\n")[0]
    return f"{file} cannot be read: {reason}.\nWrite, copy or download it again."
