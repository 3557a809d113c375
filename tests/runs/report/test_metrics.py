"""The metric logs: full precision, one flushed row at a time, readable whatever happened."""

import math
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
from messages import key_words, says

from ftkit.errors import UserError
from ftkit.runs.report import metrics
from ftkit.runs.report.metrics import (
    MetricsWriter,
    ValidationWriter,
    cut_rows,
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
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.csv"


def test_the_columns_of_metrics_are_exactly_these(path: Path) -> None:
    MetricsWriter(path).close()
    assert path.read_text() == "step,samples,loss,lr,grad_norm,tokens,tokens_per_s\n"


def test_the_columns_of_validation_are_exactly_these(path: Path) -> None:
    ValidationWriter(path).close()
    assert path.read_text() == "step,samples,val_loss,perplexity\n"


def test_the_loss_of_routers_is_a_last_column_where_there_is_one(path: Path) -> None:
    with MetricsWriter(path, sources=["a", "b"]) as writer:
        writer.add_router_loss()
        writer.write(**ROW, of_sources=[1, 15], router_aux_loss=2.5)
    assert path.read_text().splitlines()[0].endswith(",samples/a,samples/b,router_aux_loss")
    assert read_metrics(path) == [{**ROW, "samples/a": 1, "samples/b": 15, "router_aux_loss": 2.5}]


def test_rows_from_before_the_loss_of_routers_have_an_empty_cell(path: Path) -> None:
    with MetricsWriter(path) as writer:
        writer.write(**ROW)
    with MetricsWriter(path, after_step=1) as writer:
        writer.add_router_loss()
        writer.add_router_loss()
        writer.write(**ROW | {"step": 2}, router_aux_loss=2.5)
    with MetricsWriter(path, after_step=2) as writer:  # switched off again
        writer.write(**ROW | {"step": 3})
    assert path.read_text().startswith("step,samples,loss,lr,grad_norm,tokens,tokens_per_s,router_")
    assert [row["router_aux_loss"] for row in read_metrics(path)] == [None, 2.5, None]
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]


def test_numbers_read_back_to_the_last_bit(path: Path) -> None:
    with MetricsWriter(path) as writer:
        writer.write(**ROW)
    (row,) = read_metrics(path)
    assert row == ROW
    assert {name: type(value) for name, value in row.items()} == {
        name: type(value) for name, value in ROW.items()
    }


def test_a_row_is_in_the_file_before_write_returns(path: Path) -> None:
    writer = MetricsWriter(path)
    for step in range(1, 4):
        writer.write(**{**ROW, "step": step})
        assert [row["step"] for row in read_metrics(path)] == list(range(1, step + 1))
    writer.close()


@pytest.mark.parametrize("missing", [None, math.nan])
@pytest.mark.parametrize("column", ["loss", "lr", "grad_norm", "tokens_per_s"])
def test_a_missing_number_is_an_empty_cell(column: str, missing: float | None, path: Path) -> None:
    with MetricsWriter(path) as writer:
        writer.write(**{**ROW, column: missing})
    assert read_metrics(path) == [{**ROW, column: None}]
    assert "nan" not in path.read_text().lower()


def test_numpy_numbers_are_written_as_numbers(path: Path) -> None:
    with MetricsWriter(path) as writer:
        writer.write(**{**ROW, "loss": numpy.float64(1.5), "lr": numpy.float32(0.5)})
    (row,) = read_metrics(path)
    assert (row["loss"], row["lr"]) == (1.5, 0.5)


def test_validation_rows_carry_the_perplexity(path: Path) -> None:
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


def test_perplexity_is_infinite_where_no_float_can_hold_it() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(1e4) == math.inf


def test_half_a_row_is_not_read(path: Path) -> None:
    with MetricsWriter(path) as writer:
        writer.write(**ROW)
    path.write_text(path.read_text() + "2,32,0.1")
    assert read_metrics(path) == [ROW]


def test_a_new_run_starts_a_new_file(path: Path) -> None:
    for _ in range(2):
        with MetricsWriter(path) as writer:
            writer.write(**ROW)
    assert len(read_metrics(path)) == 1


def test_a_full_disk_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match="No space left"):
        MetricsWriter(Path("/dev/full"))


def test_a_row_that_does_not_fit_waits_and_the_file_is_whole_meanwhile(path: Path) -> None:
    writer = MetricsWriter(path)
    writer.write(**ROW)
    writer._file = DiskFullAfter(writer._file, room=10)
    for step in (2, 3):
        writer.write(**{**ROW, "step": step})
        assert "No space left" in str(writer.failure)
        assert read_metrics(path) == [ROW]
    writer._file.room = 10_000  # type: ignore[attr-defined]
    writer.write(**{**ROW, "step": 4})
    assert writer.failure is None
    assert steps_in(path) == [1, 2, 3, 4]
    assert path.read_text().count("\n") == 5


def test_a_validation_that_is_repeated_has_one_row(tmp_path: Path) -> None:
    path = tmp_path / "validation.csv"
    for start in ({}, {"after_step": 8}):
        with ValidationWriter(path, **start) as writer:
            writer.write(step=8, samples=80, val_loss=1.5)
    with ValidationWriter(path, after_step=8) as writer:
        writer.write(step=12, samples=120, val_loss=1.25)
    assert [row["step"] for row in read_validation(path)] == [8, 12]


def test_rows_that_wait_are_written_at_the_end_if_there_is_space(path: Path) -> None:
    with MetricsWriter(path) as writer:
        writer._file = DiskFullAfter(writer._file, room=10)
        writer.write(**ROW)
        writer._file.room = 10_000  # type: ignore[attr-defined]
    assert read_metrics(path) == [ROW]


@pytest.mark.parametrize("by", ["removed", "replaced", "removed at the end"])
def test_a_file_that_another_program_takes_away_is_written_anew(by: str, path: Path) -> None:
    with MetricsWriter(path) as writer:
        writer.write(**ROW)
        if by == "replaced":
            other = path.with_name("other")
            other.write_text("something else\n")
            other.replace(path)
        elif by == "removed":
            path.unlink()
        writer.write(**{**ROW, "step": 2})
        if by == "removed at the end":
            path.unlink()
    assert steps_in(path) == [1, 2]
    assert says(writer.interference or "", "removed or replaced")
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_file_that_another_program_cuts_keeps_its_header_and_later_rows(path: Path) -> None:
    with MetricsWriter(path) as writer:
        writer.write(**ROW)
        path.write_text("")
        writer.write(**{**ROW, "step": 2})
    assert steps_in(path) == [2]
    assert says(writer.interference or "", "cut")


def test_rows_wait_while_their_directory_is_away(tmp_path: Path) -> None:
    here, away = tmp_path / "here", tmp_path / "away"
    here.mkdir()
    with MetricsWriter(here / "log.csv") as writer:
        writer.write(**ROW)
        here.rename(away)
        writer.write(**{**ROW, "step": 2})
        assert "No such file" in str(writer.failure)
        away.rename(here)
        writer.write(**{**ROW, "step": 3})
    assert steps_in(here / "log.csv") == [1, 2, 3]
    assert writer.interference is None


def steps_in(path: Path) -> list[int]:
    return [row["step"] for row in read_metrics(path)]  # type: ignore[misc]


def write_steps(path: Path, steps: range, **start: int) -> None:
    with MetricsWriter(path, **start) as writer:
        for step in steps:
            writer.write(**{**ROW, "step": step})


@pytest.mark.parametrize("ending", ["", "8,13", "7,112,0.1,,,4096,", "\0\0\0\0", "\0\0\n"])
def test_a_run_that_continues_appends_after_its_last_whole_row(ending: str, path: Path) -> None:
    write_steps(path, range(1, 6))
    with path.open("a") as file:
        file.write(ending)
    write_steps(path, range(6, 9), after_step=5)
    assert steps_in(path) == list(range(1, 9))
    assert path.read_text().count("step") == 1


@pytest.mark.parametrize("content", [None, "", "step,sam"])
def test_without_rows_to_continue_a_new_file_begins(content: str | None, path: Path) -> None:
    if content is not None:
        path.write_text(content)
    write_steps(path, range(6, 9), after_step=5)
    assert steps_in(path) == [6, 7, 8]


def test_rows_after_the_start_must_be_gone_before_a_run_continues(path: Path) -> None:
    write_steps(path, range(1, 9))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=key_words("row of step 8, after 5")):
        MetricsWriter(path, after_step=5)
    assert path.read_bytes() == before


def test_a_table_of_something_else_is_not_continued(path: Path) -> None:
    ValidationWriter(path).close()
    with pytest.raises(UserError, match=key_words("columns ... step,samples,loss")):
        MetricsWriter(path, after_step=5)


@pytest.mark.parametrize("half", ["", "9,14"])
def test_later_rows_are_moved_with_a_header_of_their_own(
    half: str, path: Path, tmp_path: Path
) -> None:
    write_steps(path, range(1, 9))
    original = path.read_text()
    path.write_text(original + half)
    into = tmp_path / "set_aside/1/metrics.csv"
    assert cut_rows(path, 5, into) == 3
    assert steps_in(path) == [1, 2, 3, 4, 5]
    assert steps_in(into) == [6, 7, 8]
    header, *_ = original.splitlines(keepends=True)
    assert path.read_text() + into.read_text().removeprefix(header) == original
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.csv", "set_aside"]


def test_only_half_a_row_after_the_start_is_dropped_and_nothing_set_aside(
    path: Path, tmp_path: Path
) -> None:
    write_steps(path, range(1, 6))
    whole = path.read_text()
    path.write_text(whole + "6,96,0.")
    assert cut_rows(path, 5, tmp_path / "backup/metrics.csv") == 0
    assert path.read_text() == whole
    assert not (tmp_path / "backup").exists()


@pytest.mark.parametrize("content", [None, "", "step,sam", "step,samples,val_loss,perplexity\n"])
def test_where_there_are_no_rows_none_are_cut(
    content: str | None, path: Path, tmp_path: Path
) -> None:
    if content is not None:
        path.write_text(content)
    assert cut_rows(path, 0, tmp_path / "backup.csv") == 0
    assert (path.read_text() if path.exists() else None) == content
    assert not (tmp_path / "backup.csv").exists()


def test_validation_rows_are_cut_and_continued_too(path: Path, tmp_path: Path) -> None:
    for start, steps in ((None, (0, 10, 20)), (10, (20, 30))):
        if start is not None:
            assert cut_rows(path, start, tmp_path / "backup.csv") == 1
        with ValidationWriter(path, after_step=start) as writer:
            for step in steps:
                writer.write(step=step, samples=16 * step, val_loss=2.0)
    assert [row["step"] for row in read_validation(path)] == [0, 10, 20, 30]
    assert [row["step"] for row in read_validation(tmp_path / "backup.csv")] == [20]


def test_a_disk_that_is_full_while_rows_are_cut_loses_none(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_steps(path, range(1, 9))
    before = path.read_bytes()

    def full(target: Path, text: str) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(metrics, "write_durably", full)
    with pytest.raises(OSError, match="No space left"):
        cut_rows(path, 5, tmp_path / "backup.csv")
    assert path.read_bytes() == before


class DiskFullAfter:
    """A file that takes only so many bytes of a write."""

    def __init__(self, file: Any, room: Any) -> None:
        self._file = file
        self.room = room

    def write(self, line: Any) -> Any:
        return self._file.write(line[: self.room])

    def __getattr__(self, name: Any) -> Any:
        return getattr(self._file, name)


@pytest.mark.parametrize("block", [1, 2, 7, 64, 10_000])
def test_rows_are_cut_alike_however_the_file_is_read(
    block: int, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_steps(path, range(1, 30))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines) + "30,4")
    monkeypatch.setattr(metrics, "_BLOCK_BYTES", block)
    assert cut_rows(path, 17, tmp_path / "backup.csv") == 12
    assert path.read_text() == "".join(lines[:18])
    assert (tmp_path / "backup.csv").read_text() == "".join([lines[0], *lines[18:]])
    with MetricsWriter(path, after_step=17) as writer:
        writer.write(**ROW | {"step": 18})
    assert steps_in(path) == list(range(1, 19))
    assert cut_rows(path, 0, tmp_path / "all.csv") == 18
    assert path.read_text() == lines[0]


def test_rows_far_into_a_long_file_are_cut_without_reading_it(path: Path, tmp_path: Path) -> None:
    write_steps(path, range(1, 3))
    header, row, _ = path.read_text().splitlines(keepends=True)
    rest = row.partition(",")[2]
    path.write_text(header + "".join(f"{step},{rest}" for step in range(1, 1_000_001)))
    started = time.perf_counter()
    assert cut_rows(path, 999_999, tmp_path / "backup.csv") == 1
    assert time.perf_counter() - started < 0.5
