"""Numbers of each source of the data, where there are several."""

import json
from pathlib import Path

import pytest

from ftkit.errors import UserError
from ftkit.runs.report.meters import SourceMeter
from ftkit.runs.report.metrics import (
    METRICS_COLUMNS,
    VALIDATION_COLUMNS,
    MetricsWriter,
    ValidationWriter,
    cut_rows,
    read_metrics,
    read_validation,
)
from ftkit.runs.report.report import DataCounts, Source

NAMES = ("some.json", 'odd, "name"\n')
STEP = {"loss": 1.0, "lr": 0.1, "grad_norm": 1.0, "tokens": 5, "tokens_per_s": 2.0}


def write(path: Path, steps: range, after_step: int | None = None) -> None:
    with MetricsWriter(path, after_step=after_step, sources=NAMES) as metrics:
        for step in steps:
            metrics.write(step=step, samples=4 * step, of_sources=[3 * step, step], **STEP)


def test_metrics_have_a_column_of_each_source(tmp_path: Path) -> None:
    write(tmp_path / "metrics.csv", range(1, 4))
    header = (tmp_path / "metrics.csv").read_text().splitlines()[0]
    assert header == ",".join([*METRICS_COLUMNS, "samples/some.json", "samples/odd_name_"])
    rows = read_metrics(tmp_path / "metrics.csv")
    assert [(row["samples/some.json"], row["samples/odd_name_"]) for row in rows] == [
        (3, 1),
        (6, 2),
        (9, 3),
    ]


def test_rows_of_sources_are_cut_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, range(1, 6))
    assert cut_rows(path, 3, tmp_path / "removed.csv") == 2
    write(path, range(4, 6), after_step=3)
    assert [row["samples/some.json"] for row in read_metrics(path)] == [3, 6, 9, 12, 15]
    with pytest.raises(UserError, match="other columns"):
        MetricsWriter(path, after_step=5)


def test_a_source_without_validation_samples_has_an_empty_cell(tmp_path: Path) -> None:
    path = tmp_path / "validation.csv"
    with ValidationWriter(path, sources=NAMES) as validation:
        validation.write(step=1, samples=4, val_loss=1.5, of_sources={NAMES[0]: 1.25})
    header = path.read_text().splitlines()[0]
    assert header == ",".join([*VALIDATION_COLUMNS, "val_loss/some.json", "val_loss/odd_name_"])
    (row,) = read_validation(path)
    assert (row["val_loss/some.json"], row["val_loss/odd_name_"]) == (1.25, None)


def test_a_single_source_has_no_columns_and_no_section(tmp_path: Path) -> None:
    assert SourceMeter(["JSON"], {}).sources == {}
    with MetricsWriter(tmp_path / "metrics.csv"):
        pass
    assert (tmp_path / "metrics.csv").read_text() == ",".join(METRICS_COLUMNS) + "\n"


def test_samples_and_losses_continue_where_an_earlier_session_ended() -> None:
    meter = SourceMeter(["a", "b"], {})
    counts = {"train": DataCounts(records=5, used=5)}
    meter.prepare({name: Source(data=counts, samples_per_epoch=5) for name in "ab"})
    meter.validate({"a": 3.0, "b": None}, is_first=True)
    meter.add([2, 0])
    meter.validate({"a": 1.0, "b": 2.0}, is_first=False)
    later = SourceMeter.from_carried(["a", "b"], json.loads(json.dumps(meter.carried)))
    later.add([1, 3])
    later.validate({"a": 2.0, "b": 1.5, "another": 1.0}, is_first=False)
    assert later.samples == [3, 3]
    assert later.sources["a"] == Source(
        data=counts,
        samples_per_epoch=5,
        samples=3,
        validation_first=3.0,
        validation_last=2.0,
        validation_best=1.0,
    )
    assert later.sources["b"].validation_first is None
    assert later.sources["b"].validation_best == 1.5


def test_a_loss_that_is_not_a_number_is_never_the_best_of_a_source() -> None:
    meter = SourceMeter(["a", "b"], {})
    for loss in (float("nan"), 2.0, float("nan"), -float("inf")):
        meter.validate({"a": loss}, is_first=False)
    assert meter.sources["a"].validation_best == 2.0


def test_losses_on_other_records_of_one_name_are_not_compared() -> None:
    meter = SourceMeter(["code"], {}, least=1)
    meter.prepare({"code": Source(data={"val": DataCounts(records=5, used=5)})})
    meter.validate({"code": 1.0}, is_first=True)
    same = SourceMeter.from_carried(["code"], meter.carried, least=1)
    same.prepare({"code": Source(data={"val": DataCounts(records=5, used=5)})})
    assert same.sources == meter.sources
    other = SourceMeter.from_carried(["code"], meter.carried, least=1)
    other.prepare({"code": Source(data={"val": DataCounts(records=6, used=6)})})
    assert other.sources["code"].validation_first is None
    assert other.sources["code"].validation_best is None


def test_a_continued_file_of_validations_keeps_its_columns_and_gets_further_ones(
    tmp_path: Path,
) -> None:
    path = tmp_path / "validation.csv"
    with ValidationWriter(path, sources=["code"]) as validation:
        validation.write(step=1, samples=4, val_loss=1.5, of_sources={"code": 1.25})
    with path.open("a") as file:
        file.write("2,8,0.1")  # the machine died
    with ValidationWriter(path, after_step=1, sources=["french"]) as validation:
        validation.write(step=2, samples=8, val_loss=1.0, of_sources={"french": 0.5})
    with ValidationWriter(path, after_step=2, sources=["french", "code"]) as validation:
        validation.write(step=3, samples=12, val_loss=1.0, of_sources={"code": 2.0, "french": 3.0})
    header, *lines = path.read_text().splitlines()
    assert header == ",".join([*VALIDATION_COLUMNS, "val_loss/code", "val_loss/french"])
    assert lines[0].endswith(",1.25,")
    columns = ("samples", "val_loss/code", "val_loss/french")
    assert [tuple(row[column] for column in columns) for row in read_validation(path)] == [
        (4, 1.25, None),
        (8, None, 0.5),
        (12, 2.0, 3.0),
    ]
    assert list(tmp_path.iterdir()) == [path]


def test_validations_without_new_columns_are_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "validation.csv"
    with ValidationWriter(path, sources=["code"]) as validation:
        validation.write(step=1, samples=4, val_loss=1.5, of_sources={"code": 1.25})
    before = path.stat().st_ino
    ValidationWriter(path, after_step=1).close()
    assert path.stat().st_ino == before
