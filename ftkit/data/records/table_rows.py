"""Tables as rows: CSV and TSV, parquet, and the Arrow directories of the datasets library."""

import csv
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftkit.data.records.json_rows import explain_empty
from ftkit.data.records.opening import explain_too_large, lines_of, most_unpacked_bytes, opened
from ftkit.errors import UserError
from ftkit.utils.damaged_files import reading, require_regular

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
    import pyarrow.parquet

    with opened(file) as stream:
        table = pyarrow.parquet.ParquetFile(stream)
        groups = [table.metadata.row_group(i) for i in range(table.metadata.num_row_groups)]
        if sum(group.total_byte_size for group in groups) > most_unpacked_bytes(_size(file)):
            raise UserError(explain_too_large(file))
        yield from _numbered(file, table.iter_batches(batch_size=_AT_ONCE), _size(file))


def is_arrow_directory(path: Path) -> bool:
    """Whether save_to_disk of a data set of the datasets library wrote it."""
    return (path / _STATE).is_file() and (path / "dataset_info.json").is_file()


def arrow_files(directory: Path) -> list[Path]:
    """The files of an Arrow directory that hold its rows, in order.

    Raises:
        UserError: it does not name them.
    """
    with reading(directory / _STATE, expected="a JSON object with _data_files"):
        state = json.loads((directory / _STATE).read_text(encoding="utf-8"))
        names = [Path(entry["filename"]).name for entry in state["_data_files"]]
    return [directory / name for name in names]


def arrow_rows(directory: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of an Arrow directory, from 1.

    Raises:
        UserError: files of it are missing or damaged.
    """
    import pyarrow

    files = arrow_files(directory)

    def batches() -> Iterator["pyarrow.RecordBatch"]:
        for file in files:
            require_regular(file)
            with pyarrow.memory_map(str(file)) as mapped:
                yield from pyarrow.ipc.open_stream(mapped)

    size = sum(map(_size, filter(Path.is_file, files)))
    yield from _numbered(directory, batches(), size)


def batch_rows(batches: Iterable["pyarrow.RecordBatch"]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of record batches, from 1, with objects as they were before they became a table.

    A table gives every object all keys that any of them has: those without a value are left out.
    """
    number = 0
    for batch in batches:
        found = {field.name: _converter(field.type) for field in batch.schema}
        nested = {key: convert for key, convert in found.items() if convert is not None}
        for row in batch.to_pylist():
            number += 1
            for key, convert in nested.items():
                row[key] = convert(row[key])
            yield number, row


def _numbered(
    file: Path, batches: Iterable["pyarrow.RecordBatch"], packed: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of all batches, as long as they are not much larger than the file."""

    def justified() -> Iterator["pyarrow.RecordBatch"]:
        left = most_unpacked_bytes(packed)
        for batch in batches:
            # A value takes Python some bytes too, also where a table has none for it.
            left -= batch.nbytes + 16 * batch.num_rows * max(batch.num_columns, 1)
            if left < 0:
                raise UserError(explain_too_large(file))
            yield batch

    number = 0
    for number, row in batch_rows(justified()):
        yield number, row
    if number == 0:
        raise UserError(explain_empty(file))


def _converter(kind: "pyarrow.DataType") -> Callable[[Any], Any] | None:
    """What makes JSON values of a column of this type; None: they are that already."""
    import pyarrow

    if isinstance(kind, pyarrow.JsonType):  # of the datasets library, for values of mixed types
        return lambda value: None if value is None else json.loads(value)
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        of_item = _converter(kind.value_type)
        return of_item and (lambda items: items and [of_item(item) for item in items])
    if pyarrow.types.is_struct(kind):
        of_field = {
            kind.field(i).name: _converter(kind.field(i).type) or _same
            for i in range(kind.num_fields)
        }
        return lambda item: (
            item and {key: of_field[key](value) for key, value in item.items() if value is not None}
        )
    return None


def _same(value: Any) -> Any:
    return value


def _check_names(file: Path, names: list[str]) -> None:
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if names and names[0].lstrip().startswith(("{", "[")):
        raise UserError(
            f"{file} holds JSON, not a table.\nRename it to end in .json (a list of records) or "
            ".jsonl (a record per line)."
        )
    if twice is not None:
        raise UserError(
            f"{file} has two columns named {twice!r} in its first line.\nRename or remove one."
        )


def _size(file: Path) -> int:
    return file.stat().st_size
