"""The metric logs of a run: ``metrics.csv``, a row a step, and ``validation.csv``.

Numbers are written with full precision; a value that is missing or not a number is an empty cell.
"""

import csv
import io
import math
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

METRICS_COLUMNS = ("step", "samples", "loss", "lr", "grad_norm", "tokens", "tokens_per_s")
VALIDATION_COLUMNS = ("step", "samples", "val_loss", "perplexity")
_INTEGERS = frozenset({"step", "samples", "tokens"})

Number: TypeAlias = int | float | None
Row: TypeAlias = dict[str, Number]


def perplexity(loss: float) -> float:
    """exp(loss), infinite where a float cannot hold it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


class _CsvWriter:
    """Rows of numbers in a new CSV file, each given to the system before the call returns.

    A row that cannot be written (disk full) raises OSError and leaves none of its bytes behind, so
    that the file stays readable and a later row can follow.
    """

    def __init__(self, path: Path, columns: tuple[str, ...]) -> None:
        self._file = path.open("wb", buffering=0)
        self._write_cells(columns)

    def __enter__(self) -> "_CsvWriter":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; it is complete after every row anyway."""
        self._file.close()

    def _write_cells(self, cells: tuple[str, ...]) -> None:
        line = (",".join(cells) + "\n").encode()
        end = self._file.tell()
        try:
            if self._file.write(line) != len(line):
                raise OSError(f"cannot write all of a row to {self._file.name}")
        except OSError:
            with suppress(OSError):
                os.truncate(self._file.fileno(), end)
                self._file.seek(end)
            raise


class MetricsWriter(_CsvWriter):
    """Writes ``metrics.csv``: one row per optimizer step."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, METRICS_COLUMNS)

    def __enter__(self) -> "MetricsWriter":
        return self

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
    ) -> None:
        """Add the row of one step.

        Args:
            step: optimizer steps done, this one included.
            samples: samples consumed since the run began, this step's included.
            loss: mean over the step's label tokens, in nats.
            lr: learning rate of this step (of the first parameter group).
            grad_norm: before clipping; None where it was not computed.
            tokens: real tokens of this step, over all ranks.
            tokens_per_s: real tokens of this step per second of this step.
        """
        numbers = (loss, lr, grad_norm)
        self._write_cells(
            (str(step), str(samples), *map(_cell, numbers), str(tokens), _cell(tokens_per_s))
        )


class ValidationWriter(_CsvWriter):
    """Writes ``validation.csv``: one row per validation."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, VALIDATION_COLUMNS)

    def __enter__(self) -> "ValidationWriter":
        return self

    def write(self, *, step: int, samples: int, val_loss: float | None) -> None:
        """Add the row of one validation; the perplexity follows from its loss."""
        value = None if val_loss is None else perplexity(val_loss)
        self._write_cells((str(step), str(samples), _cell(val_loss), _cell(value)))


def read_metrics(path: Path) -> list[Row]:
    """The rows of a ``metrics.csv``; empty cells are None."""
    return _read(path)


def read_validation(path: Path) -> list[Row]:
    """The rows of a ``validation.csv``; empty cells are None."""
    return _read(path)


def _cell(value: float | None) -> str:
    if value is None or math.isnan(value):
        return ""
    return repr(float(value))  # float: the repr of a numpy scalar names its type


def _read(path: Path) -> list[Row]:
    text = path.read_text(encoding="utf-8")
    complete = text[: text.rfind("\n") + 1]  # a machine that died may leave half a row
    return [
        {column: _number(column, cell) for column, cell in row.items()}
        for row in csv.DictReader(io.StringIO(complete))
    ]


def _number(column: str, cell: str) -> Number:
    if not cell:
        return None
    return int(cell) if column in _INTEGERS else float(cell)
