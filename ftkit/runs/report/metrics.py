"""Metrics of a run: ``metrics.csv``, one row per step, and ``validation.csv``.

Numbers are written with full precision; a value that is missing or not a number is an empty cell.
If the data have several sources, further columns hold the samples and the validation loss of each;
each set of eval.sets has a column with its loss. What an objective reports beside its loss has a
column in both, in validation.csv with val_ before its name. If routers have a loss, it is the last
column of metrics.csv.
"""

import errno
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TypeAlias

from ftkit.errors import UserError
from ftkit.utils.damaged_files import DamagedFile, reading, require_regular
from ftkit.utils.files import widen_table, write_durably
from ftkit.utils.names import column_name

METRICS_COLUMNS = ("step", "samples", "loss", "lr", "grad_norm", "tokens", "tokens_per_s")
ROUTER_COLUMN = "router_aux_loss"
VALIDATION_COLUMNS = ("step", "samples", "val_loss", "perplexity")
# Rows of time in a file of their own: a step may take minutes or milliseconds, and a run that
# continues on other devices gets further columns.
SYSTEM_COLUMNS = ("step", "time_s")
"""First columns of ``system.csv``."""
_BLOCK_BYTES = 64 * 2**10
_INTEGERS = frozenset({"step", "samples", "tokens"})
_SAMPLES_OF, _VAL_LOSS_OF = "samples/", "val_loss/"

Number: TypeAlias = int | float | None
Row: TypeAlias = dict[str, Number]


def samples_column(source: str) -> str:
    """Return the column of metrics.csv with the samples of a source."""
    return _SAMPLES_OF + column_name(source)


def loss_column(source: str) -> str:
    """Return the column of validation.csv with the loss on a source."""
    return _VAL_LOSS_OF + column_name(source)


def term_column(name: str) -> str:
    """Return the column of validation.csv with a term that an objective reports."""
    return f"val_{name}"


def loss_columns(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return sources and sets with a loss in rows of validation.csv, with their columns."""
    columns = rows[-1] if rows else ()
    return [(c.removeprefix(_VAL_LOSS_OF), c) for c in columns if c.startswith(_VAL_LOSS_OF)]


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity if that exceeds a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


class CsvWriter:
    """Writes rows of numbers to a CSV file, unbuffered.

    A row that cannot be written because the disk is full leaves no bytes behind. It waits in memory
    and is written before the next row once there is space, so the file is readable and has no gap.
    A file that another program removes or replaces meanwhile is written anew.
    """

    def __init__(self, path: Path, columns: tuple[str, ...], after_step: int | None) -> None:
        self._path, self._header = path, _line(columns)
        self._waiting: deque[bytes] = deque()
        self.failure: OSError | None = None
        """Error of the last write, while rows are waiting."""
        self.interference: str | None = None
        """What another program has done to the file."""
        end, self._last_step = (
            (0, None) if after_step is None else _last_row(path, columns, after_step)
        )
        # Unbuffered, so that readers see whole rows and a kill loses none.
        self._file = path.open("r+b" if end else "w+b", buffering=0)
        if end:
            # A killed session may have left a part of a row.
            self._file.truncate(end)
            self._file.seek(end)
        else:
            self._append(self._header)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def flush(self) -> None:
        """Retry writing the rows that are waiting; see `failure`."""
        try:
            self._return_to_path()
            while self._waiting:
                # It leaves the queue only once it is written, so a full disk changes neither rows
                # nor order.
                self._append(self._waiting[0])
                self._waiting.popleft()
            self.failure = None
        except OSError as error:
            self.failure = error

    def sync(self) -> None:
        """Wait until the rows so far are on the disk.

        Raises:
            OSError: they cannot be written.
        """
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Retry writing the rows that are waiting, and close the file."""
        self.flush()
        self._file.close()

    def _write_cells(self, cells: tuple[str, ...]) -> None:
        self._waiting.append(_line(cells))
        self.flush()

    def _return_to_path(self) -> None:
        """Write the file anew if the open one is no longer at its path, or has lost rows.

        Raises:
            OSError: it cannot be written.
        """
        written, status = self._file.tell(), os.fstat(self._file.fileno())
        is_cut = status.st_size < written
        with suppress(FileNotFoundError):
            if os.path.samestat(status, self._path.stat()) and not is_cut:
                return
        # A file that was removed can be read as long as it is open.
        content = self._header if is_cut else os.pread(self._file.fileno(), written, 0)
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        file = temporary.open("w+b", buffering=0)
        try:
            if file.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.replace(temporary, self._path)
        except OSError:
            file.close()
            temporary.unlink(missing_ok=True)
            raise
        self._file.close()
        self._file = file
        self.interference = (
            "was cut by another program: its rows so far are lost"
            if is_cut
            else "was removed or replaced by another program: it was written anew"
        )

    def _append(self, line: bytes) -> None:
        """Write a line completely, or raise OSError and leave the file as it was."""
        end = self._file.tell()
        try:
            # An unbuffered write may be short without an error: the disk had room for a part.
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            # Without the part of the line that was written: readers see whole rows.
            with suppress(OSError):
                os.truncate(self._file.fileno(), end)
                self._file.seek(end)
            raise


class MetricsWriter(CsvWriter):
    """Writes ``metrics.csv``: one row per optimizer step."""

    def __init__(
        self,
        path: Path,
        *,
        after_step: int | None = None,
        sources: Sequence[str] = (),
        terms: Sequence[str] = (),
    ) -> None:
        """Start a new file, or append to the one of an earlier session.

        Args:
            path: of the file.
            after_step: append after the row of this step, if there is a file; a last row that is
                incomplete is dropped. `cut_rows` must have removed later rows.
            sources: names of the sources of the data, if there are several.
            terms: names of what the objective reports beside the loss.

        Raises:
            OSError: the file cannot be written.
            UserError: it has other columns.
            ValueError: it has a row after ``after_step``.
        """
        columns = self._columns = (*METRICS_COLUMNS, *map(samples_column, sources), *terms)
        # An earlier session may have added this column: the header decides, not the recipe.
        self._of_routers = after_step is not None and _last_column(path) == ROUTER_COLUMN
        super().__init__(
            path, (*columns, ROUTER_COLUMN) if self._of_routers else columns, after_step
        )

    def add_router_loss(self) -> None:
        """Add a last column for the loss of routers, empty in the rows so far.

        Raises:
            OSError: the file cannot be written; it is as it was.
        """
        if self._of_routers:
            return
        self._return_to_path()
        # This replaces the file: the open one would be the old one.
        widen_table(self._path, (ROUTER_COLUMN,))
        self._file.close()
        self._file = self._path.open("r+b", buffering=0)
        self._file.seek(0, os.SEEK_END)
        self._header = _line((*self._columns, ROUTER_COLUMN))
        self._of_routers = True

    def write(
        self,
        *,
        step: int,
        samples: int,
        loss: float | None,
        lr: float | None,
        grad_norm: float | None,
        tokens: int,
        tokens_per_s: float | None,
        of_sources: Sequence[int] = (),
        terms: Sequence[float | None] = (),
        router_aux_loss: float | None = None,
    ) -> None:
        """Add the row of one step.

        Args:
            step: optimizer steps done, this one included.
            samples: samples consumed since the run began, this step's included.
            loss: of the step.
            lr: learning rate of this step (of the first parameter group).
            grad_norm: before clipping; None if it was not computed.
            tokens: real tokens of this step, over all ranks.
            tokens_per_s: real tokens of this step per second of this step.
            of_sources: `samples` of each source, if there are several.
            terms: values of the terms, in their order.
            router_aux_loss: of this step, if there is a column for it.
        """
        before = (str(step), str(samples), *map(cell_text, (loss, lr, grad_norm)))
        cells = (
            *before,
            str(tokens),
            cell_text(tokens_per_s),
            *map(str, of_sources),
            *map(cell_text, terms),
        )
        self._write_cells((*cells, cell_text(router_aux_loss)) if self._of_routers else cells)


class ValidationWriter(CsvWriter):
    """Writes ``validation.csv``: one row per validation."""

    def __init__(
        self,
        path: Path,
        *,
        after_step: int | None = None,
        sources: Sequence[str] = (),
        terms: Sequence[str] = (),
        is_cross_entropy: bool = True,
    ) -> None:
        """Start a new file, or append to an earlier one, which keeps its columns and gets new ones.

        Args:
            path: of the file.
            after_step: as of `MetricsWriter`.
            sources: names with a loss of their own: sources of the data, if there are several, and
                sets of eval.sets.
            terms: names of what the objective reports beside the loss.
            is_cross_entropy: whether the loss has a perplexity.

        Raises:
            OSError: the file cannot be written.
            UserError: it is another table.
            ValueError: it has a row after ``after_step``.
        """
        self._is_cross_entropy = is_cross_entropy
        terms = tuple(map(term_column, terms))
        self._columns = (*VALIDATION_COLUMNS, *terms, *map(loss_column, sources))
        if after_step is not None and path.exists():
            self._columns = widen_table(path, self._columns)
        super().__init__(path, self._columns, after_step)

    def write(
        self,
        *,
        step: int,
        samples: int,
        val_loss: float | None,
        of_sources: Mapping[str, float | None] | None = None,
        terms: Mapping[str, float] | None = None,
    ) -> None:
        """Add the row of one validation; the perplexity follows from its loss.

        A second row for the same step is ignored: a run that was killed after its last validation
        validates that step again.

        Args:
            step: optimizer steps done.
            samples: consumed since the run began.
            val_loss: of all validation samples of the data.
            of_sources: losses by source and set.
            terms: what the objective reports beside the loss, by name.
        """
        if step == self._last_step:
            return
        self._last_step = step
        value = None
        if self._is_cross_entropy and val_loss is not None:
            value = perplexity(val_loss)
        cells = (str(step), str(samples), cell_text(val_loss), cell_text(value))
        values = {loss_column(name): loss for name, loss in (of_sources or {}).items()}
        values |= {term_column(name): value for name, value in (terms or {}).items()}
        others = (values.get(column) for column in self._columns[len(cells) :])
        self._write_cells((*cells, *map(cell_text, others)))


def read_metrics(path: Path) -> list[Row]:
    """Return the rows of ``metrics.csv``; cells that are empty or NaN are None.

    Raises:
        UserError: the file cannot be read, or is damaged.
    """
    return _read(path, METRICS_COLUMNS)


def read_validation(path: Path) -> list[Row]:
    """Return the rows of ``validation.csv``; see `read_metrics`."""
    return _read(path, VALIDATION_COLUMNS)


def read_system(path: Path) -> list[Row]:
    """Return the rows of ``system.csv``; see `read_metrics`."""
    return _read(path, SYSTEM_COLUMNS)


class RowsReader:
    """Reads the rows of a log that is still being written, only new ones each time."""

    def __init__(
        self, path: Path, columns: tuple[str, ...], *, several_in_step: bool = False
    ) -> None:
        """Read nothing yet; `columns` must be there, and a step may have several rows."""
        self._path, self._needed, self._least = path, columns, 1 if several_in_step else 0
        self._file = self._end = 0
        self._columns: list[str] = []
        self._rows: list[Row] = []

    def read_on(self) -> list[Row]:
        """Return all rows so far, without those removed when the run went back to a checkpoint."""
        try:
            require_regular(self._path)
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                # Replaced, or cut: the run went back to a checkpoint.
                if status.st_ino != self._file or status.st_size < self._end:
                    self._forget()
                    self._file = status.st_ino
                file.seek(self._end)
                block = file.read()
        except (OSError, DamagedFile):
            self._forget()
            return self._rows
        # The last row may be half written at this moment.
        complete = block[: block.rfind(b"\n") + 1]
        self._end += len(complete)
        lines = complete.decode(errors="replace").splitlines()
        try:
            if lines and not self._columns:
                self._columns = _columns_in(lines.pop(0), self._needed)
            rows = _rows(self._columns, lines)
        # Part of a row: the file was cut and has grown beyond its old end. Or it is damaged.
        except ValueError:
            self._forget()
            return self._rows
        for row in rows:
            after = (row["step"] or 0) + self._least
            # The run went back to a checkpoint, and does these steps once more.
            while self._rows and (self._rows[-1]["step"] or 0) >= after:
                self._rows.pop()
            self._rows.append(row)
        return self._rows

    def _forget(self) -> None:
        self._file = self._end = 0
        self._columns, self._rows = [], []


def cut_rows(path: Path, after_step: int, into: Path) -> int:
    """Move the rows after a step to another file, for a run that goes back to that step.

    After a crash, the rows are in both files or in one of them. An incomplete row is dropped.

    Args:
        path: a metrics.csv or validation.csv; it need not exist.
        after_step: rows up to this step stay.
        into: file to create for the rows and their header, if there are any.

    Returns:
        Number of rows removed.

    Raises:
        OSError: a file cannot be read or written; ``path`` is as it was.
    """
    if not path.exists():
        return 0
    removed: list[bytes] = []
    with path.open("rb+") as file:
        header = file.readline()
        size = file.seek(0, os.SEEK_END)
        kept = len(header)
        for end, line in _lines_from_the_end(file, len(header)):
            step = _step(line, header)
            # Steps only grow in a file: everything before this row stays, too.
            if step is not None and step <= after_step:
                kept = end
                break
            if step is not None:
                removed.append(line)
        if removed:
            into.parent.mkdir(parents=True, exist_ok=True)
            write_durably(into, b"".join((header, *reversed(removed))).decode(errors="replace"))
        # Only now, when the removed rows are on the disk in the other file.
        if kept < size:
            file.truncate(kept)
            os.fsync(file.fileno())
    return len(removed)


def _last_row(path: Path, columns: tuple[str, ...], after_step: int) -> tuple[int, int | None]:
    """Bytes up to the end of the last complete row (0: not even the header is), and its step."""
    if not path.exists():
        return 0, None
    header = (",".join(columns) + "\n").encode()
    with path.open("rb") as file:
        first = file.readline()
        # The file was cut right after it was made: it is made again.
        if not first.endswith(b"\n"):
            return 0, None
        if first != header:
            raise UserError(
                f"{path} has other columns than {header.decode().strip()}. Move it elsewhere."
            )
        for end, line in _lines_from_the_end(file, len(header)):
            step = _step(line, header)
            if step is None:
                continue
            if step > after_step:
                raise ValueError(f"{path} has a row of step {step}, after {after_step}")
            return end, step
    return len(header), None


def _last_column(path: Path) -> str:
    """Last column in the header of a file; empty if there is no complete header."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        header = file.readline().decode(errors="replace")
    return header.rstrip("\n").rpartition(",")[2] if header.endswith("\n") else ""


def _lines_from_the_end(file: BinaryIO, first: int) -> Iterator[tuple[int, bytes]]:
    """Yield position of the end and content of each line, from the last to the one at `first`."""
    # In blocks from the end: of a million rows, usually only the last few are needed.
    start = file.seek(0, os.SEEK_END)
    tail = b""
    while start > first:
        position = max(first, start - _BLOCK_BYTES)
        file.seek(position)
        tail = file.read(start - position) + tail
        start = position
        # The first line of a block may begin in the one before it.
        complete = 0 if start == first else tail.find(b"\n") + 1
        # Not one whole line yet: the block before has its beginning.
        if start > first and complete in (0, len(tail)):
            continue
        end = len(tail)
        while end > complete:
            begin = max(complete, tail.rfind(b"\n", 0, end - 1) + 1)
            yield start + end, tail[begin:end]
            end = begin
        tail = tail[:complete]


def _line(cells: tuple[str, ...]) -> bytes:
    return (",".join(cells) + "\n").encode()


def _step(line: bytes, header: bytes) -> int | None:
    """Step of a row; None if the row is incomplete."""
    cells = line.split(b",")
    whole = line.endswith(b"\n") and len(cells) == header.count(b",") + 1 and cells[0].isdigit()
    return int(cells[0]) if whole else None


def cell_text(value: float | None) -> str:
    """Return a number with all its digits; empty if it is missing or NaN."""
    if value is None or math.isnan(value):
        return ""
    return repr(float(value))  # float: the repr of a numpy scalar names its type


def _read(path: Path, needed: Sequence[str]) -> list[Row]:
    require_regular(path)
    with reading(path, "rows of numbers below a line with their names"):
        text = path.read_text(encoding="utf-8")
        complete = text[: text.rfind("\n") + 1]  # a machine that died may leave half a row
        header, *lines = complete.splitlines() or [",".join(needed)]
        return _rows(_columns_in(header, needed), lines)


def _columns_in(header: str, needed: Iterable[str]) -> list[str]:
    """Split a header; ValueError if it lacks a column."""
    columns = header.split(",")
    if missing := [column for column in needed if column not in columns]:
        raise ValueError(f"no column {missing[0]}")
    return columns


def _rows(columns: Sequence[str], lines: Iterable[str]) -> list[Row]:
    """Parse rows; ValueError if one is damaged."""
    found = []
    for line in lines:
        cells = zip(columns, line.split(","), strict=True)
        row = {column: _number(column, cell) for column, cell in cells}
        if row.get("step") is None:
            raise ValueError(f"no step in the row {line[:60]!r}")
        found.append(row)
    return found


def _number(column: str, cell: str) -> Number:
    if not cell:
        return None
    if column in _INTEGERS or column.startswith(_SAMPLES_OF):
        return int(cell)
    # Other programs may write NaN in place of an empty cell.
    return None if math.isnan(value := float(cell)) else value
