"""Tables as records: .csv and .tsv files, and columns of parquet and Arrow."""

import csv
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftkit.data.records.formats import (
    arrow_files,
    explain_empty,
    explain_too_large,
    lines_of,
    most_unpacked_bytes,
    opened,
    without_nul,
)
from ftkit.data.records.record import Misfit
from ftkit.errors import UserError
from ftkit.utils.damaged_files import require_regular

if TYPE_CHECKING:
    import pyarrow

# Rows of a batch: as Python objects, all rows would take many times the file.
_AT_ONCE = 1000


def csv_rows(file: Path, delimiter: str = ",") -> Iterator[tuple[int, dict[str, str] | Misfit]]:
    """Yield the rows of a .csv file, numbered from 1, by the names in its first row, as texts.

    A row with more or fewer values than there are names gives a Misfit.

    Raises:
        UserError: it cannot be read.
    """
    csv.field_size_limit(sys.maxsize)  # texts may be long
    # strict: else a quotation mark that is never closed takes the rest of the file into one value.
    lines = (without_nul(file, line) for line in lines_of(file))
    table = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        names = next(table, None)
        if names is None:
            raise UserError(explain_empty(file))
        _check_names(file, names)
        number = 0
        for values in table:
            # csv returns an empty list for an empty line.
            if not values:
                continue
            number += 1
            # A missing quotation mark or delimiter: other columns would silently get these values.
            if len(values) != len(names):
                misfit = Misfit(
                    f", which ends in line {table.line_num}, has {len(values)} values, but the "
                    f"first line has {len(names)} names.\n"
                    f"Correct it; a text with {delimiter!r} inside stands between double quotes.",
                    delimiter.join(values),
                )
                yield number, misfit
            else:
                yield number, dict(zip(names, values, strict=True))
    except csv.Error as error:
        raise UserError(
            f"{file}, line {table.line_num}, is not valid CSV: {error}.\nCorrect it there."
        ) from None
    if number == 0:
        raise UserError(explain_empty(file))


def tsv_rows(file: Path) -> Iterator[tuple[int, dict[str, str] | Misfit]]:
    """Read the rows of a .tsv file like those of a .csv file.

    Raises:
        UserError: as `csv_rows`.
    """
    return csv_rows(file, "\t")


def parquet_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a parquet file, numbered from 1.

    Raises:
        UserError: it is not a parquet file, or damaged.
    """
    import pyarrow.parquet

    with opened(file) as stream:
        # The sizes in the footer are the writer's word: they refuse an honest bomb before it is
        # read, and `_numbered` counts what really comes out.
        table = pyarrow.parquet.ParquetFile(stream)
        groups = [table.metadata.row_group(i) for i in range(table.metadata.num_row_groups)]
        if sum(group.total_byte_size for group in groups) > most_unpacked_bytes(_size(file)):
            raise UserError(explain_too_large(file))
        yield from _numbered(file, table.iter_batches(batch_size=_AT_ONCE), _size(file))


def arrow_rows(directory: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of an Arrow directory, numbered from 1.

    Raises:
        UserError: files of it are missing or damaged.
    """
    import pyarrow

    files = arrow_files(directory)

    def batches() -> Iterator["pyarrow.RecordBatch"]:
        for file in files:
            require_regular(file)
            # Mapped, so that pages are read when a batch needs them.
            with pyarrow.memory_map(str(file)) as mapped:
                yield from pyarrow.ipc.open_stream(mapped)

    # A missing file counts 0 here: opening it raises the error that names it.
    size = sum(map(_size, filter(Path.is_file, files)))
    yield from _numbered(directory, batches(), size)


def batch_rows(batches: Iterable["pyarrow.RecordBatch"]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of record batches, from 1."""
    number = 0
    for batch in batches:
        found = {field.name: _converter(field.type) for field in batch.schema}
        # Most columns are plain and need no conversion.
        mixed = {key: convert for key, convert in found.items() if convert is not None}
        for row in batch.to_pylist():
            number += 1
            for key, convert in mixed.items():
                row[key] = convert(row[key])
            yield number, row


def _numbered(
    file: Path, batches: Iterable["pyarrow.RecordBatch"], packed: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of batches, unless they are much larger than the file."""

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
    """Return a converter of a column to JSON values; None: no conversion is needed."""
    import pyarrow

    if isinstance(kind, pyarrow.JsonType):  # of the datasets library, for values of mixed types
        return lambda value: None if value is None else json.loads(value)
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        of_item = _converter(kind.value_type)
        return of_item and (lambda items: items and [of_item(item) for item in items])
    if pyarrow.types.is_struct(kind):
        fields = (kind.field(i) for i in range(kind.num_fields))
        found = {field.name: _converter(field.type) for field in fields}
        of_field = {name: convert for name, convert in found.items() if convert is not None}
        if of_field:
            return lambda item: item and item | {k: of_field[k](item[k]) for k in of_field}
    return None


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
