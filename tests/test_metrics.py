"""The metric logs: full precision, one flushed row at a time, readable whatever happened."""

import math
from pathlib import Path

import numpy
import pytest

from ftkit.report.metrics import (
    MetricsWriter,
    ValidationWriter,
    perplexity,
    read_metrics,
    read_validation,
)

ROW = {
    "step": 1,
    "samples": 16,
    "loss": 0.1 + 0.2,
    "lr": 2e-4 / 3,
    "grad_norm": 1e-300,
    "tokens": 4096,
    "tokens_per_s": 12345.678901234567,
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log.csv"


def test_the_columns_of_metrics_are_exactly_these(path):
    MetricsWriter(path).close()
    assert path.read_text() == "step,samples,loss,lr,grad_norm,tokens,tokens_per_s\n"


def test_the_columns_of_validation_are_exactly_these(path):
    ValidationWriter(path).close()
    assert path.read_text() == "step,samples,val_loss,perplexity\n"


def test_numbers_read_back_to_the_last_bit(path):
    with MetricsWriter(path) as writer:
        writer.write(**ROW)
    (row,) = read_metrics(path)
    assert row == ROW
    assert {name: type(value) for name, value in row.items()} == {
        name: type(value) for name, value in ROW.items()
    }


def test_a_row_is_in_the_file_before_write_returns(path):
    writer = MetricsWriter(path)
    for step in range(1, 4):
        writer.write(**{**ROW, "step": step})
        assert [row["step"] for row in read_metrics(path)] == list(range(1, step + 1))
    writer.close()


@pytest.mark.parametrize("missing", [None, math.nan])
@pytest.mark.parametrize("column", ["loss", "lr", "grad_norm", "tokens_per_s"])
def test_a_missing_number_is_an_empty_cell(column, missing, path):
    with MetricsWriter(path) as writer:
        writer.write(**{**ROW, column: missing})
    assert read_metrics(path) == [{**ROW, column: None}]
    assert "nan" not in path.read_text().lower()


def test_numpy_numbers_are_written_as_numbers(path):
    with MetricsWriter(path) as writer:
        writer.write(**{**ROW, "loss": numpy.float64(1.5), "lr": numpy.float32(0.5)})
    (row,) = read_metrics(path)
    assert (row["loss"], row["lr"]) == (1.5, 0.5)


def test_validation_rows_carry_the_perplexity(path):
    with ValidationWriter(path) as writer:
        writer.write(step=0, samples=0, val_loss=2.0)
        writer.write(step=10, samples=160, val_loss=None)
        writer.write(step=20, samples=320, val_loss=1e4)
        writer.write(step=30, samples=480, val_loss=math.nan)
    assert read_validation(path) == [
        {"step": 0, "samples": 0, "val_loss": 2.0, "perplexity": math.exp(2.0)},
        {"step": 10, "samples": 160, "val_loss": None, "perplexity": None},
        {"step": 20, "samples": 320, "val_loss": 1e4, "perplexity": math.inf},
        {"step": 30, "samples": 480, "val_loss": None, "perplexity": None},
    ]


def test_perplexity_is_infinite_where_no_float_can_hold_it():
    assert perplexity(0.0) == 1.0
    assert perplexity(1e4) == math.inf


def test_half_a_row_is_not_read(path):
    with MetricsWriter(path) as writer:
        writer.write(**ROW)
    path.write_text(path.read_text() + "2,32,0.1")
    assert read_metrics(path) == [ROW]


def test_a_new_run_starts_a_new_file(path):
    for _ in range(2):
        with MetricsWriter(path) as writer:
            writer.write(**ROW)
    assert len(read_metrics(path)) == 1


def test_a_full_disk_is_an_error_of_the_system():
    with pytest.raises(OSError, match="No space left"):
        MetricsWriter(Path("/dev/full"))


def test_after_a_row_that_did_not_fit_the_file_is_whole_and_goes_on(path):
    writer = MetricsWriter(path)
    writer.write(**ROW)
    writer._file = DiskFullAfter(writer._file, room=10)
    with pytest.raises(OSError, match="cannot write all of a row"):
        writer.write(**{**ROW, "step": 2})
    assert read_metrics(path) == [ROW]
    writer._file.room = 10_000
    writer.write(**{**ROW, "step": 3})
    writer.close()
    assert [row["step"] for row in read_metrics(path)] == [1, 3]
    assert path.read_text().count("\n") == 3


class DiskFullAfter:
    """A file that takes only so many bytes of a write."""

    def __init__(self, file, room):
        self._file = file
        self.room = room

    def write(self, line):
        return self._file.write(line[: self.room])

    def __getattr__(self, name):
        return getattr(self._file, name)
