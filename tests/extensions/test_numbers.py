"""Numbers of the report: one declaration is enough for a new one, wherever reports are shown."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from compared_runs import GIB, at_work, make_run, note_in_ranks
from recorders import make_recorder, train

from ftkit.extensions.comparison.compare import compare
from ftkit.extensions.notebook.display import ended_as_html
from ftkit.extensions.watch.live_page import RunSnapshots
from ftkit.extensions.watch.watch import View, Watcher
from ftkit.runs.report import numbers
from ftkit.runs.report.numbers import NUMBERS, ReportNumber
from ftkit.runs.report.report import PeakMemory, RankMemory, Report, read_report, write_report
from ftkit.runs.report.table import render, report_as_html
from ftkit.runs.state import look
from ftkit.utils.console.formatting import number_text
from ftkit.utils.console.terminal import plain_text


def share_of_labels(report: Report) -> float | None:
    return None if report.tokens is None else (report.tokens.label or 0) / report.tokens.real


LABEL_SHARE = ReportNumber(
    key="label_share",
    label="label share",
    text=lambda share: f"{number_text(100 * share)} in 100",
    definition="Share of the real tokens that carry loss.",
    better="higher",
    measure=share_of_labels,
)


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> ReportNumber:
    """The one place where the new number is added."""
    monkeypatch.setattr(numbers, "NUMBERS", (*NUMBERS, LABEL_SHARE))
    return LABEL_SHARE


def measure_in_a_rank(tmp_path: Path) -> Report:
    """The report of a rank that trained eight steps, as the supervisor reads it."""
    with make_recorder(tmp_path) as recorder:
        train(recorder, range(1, 9))
    return read_report(tmp_path / "out/.run/rank-0")


def test_a_number_declared_in_one_place_is_in_the_report_its_table_comparisons_and_pages(
    declared: ReportNumber, tmp_path: Path
) -> None:
    found = measure_in_a_rank(tmp_path).numbers
    assert found == {"label_share": 0.3}
    for name, values in (("a", found), ("b", {"label_share": 0.25})):
        report = dataclasses.replace(make_run(tmp_path / "runs" / name), numbers=values)
        file = write_report(report, tmp_path / "runs" / name)
    assert json.loads(file.read_text())["numbers"] == {"label_share": 0.25}

    row = re.compile("^label share +25 in 100$", re.MULTILINE)
    assert row.search(plain_text(render(report)))
    assert row.search(plain_text(View(Watcher(tmp_path / "runs/b").look())))
    assert "25 in 100" in report_as_html(report)
    assert "25 in 100" in ended_as_html(look(tmp_path / "runs/b"))

    comparison = compare([tmp_path / "runs"], sort="label_share")
    runs = comparison.to_json()["runs"]
    assert [run["results"]["label_share"] for run in runs] == [0.3, 0.25]
    assert ["label_share" in run["best"] for run in runs] == [True, False]
    assert re.search(r"^label share +\* 30 in 100 +25 in 100$", str(comparison), re.M)
    assert "label_share" in comparison.to_csv().splitlines()[0]
    assert f'title="{declared.definition}"' in comparison._repr_html_()

    page = RunSnapshots(tmp_path / "runs", copy_at=None)
    assert "30 in 100" in page.all_runs()["comparison"]
    shown = page.run("b")
    assert shown is not None and "25 in 100" in shown["report"] and "25 in 100" in shown["status"]


def test_the_page_of_a_run_at_work_shows_what_its_ranks_have_noted(
    declared: ReportNumber, tmp_path: Path
) -> None:
    report = make_run(tmp_path / "run", "failed", steps=12, write=False)
    note_in_ranks(tmp_path / "run", dataclasses.replace(report, numbers={declared.key: 0.5}))
    with at_work(tmp_path / "run"):
        shown = RunSnapshots(tmp_path, copy_at=None).run("run")
    assert shown is not None and "50 in 100" in shown["status"]


def test_a_report_without_the_number_leaves_it_out(declared: ReportNumber, tmp_path: Path) -> None:
    report = make_run(tmp_path / "run")
    assert "label share" not in report_as_html(report)
    assert "label share" not in str(compare([tmp_path]))


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.key)
def test_every_number_has_a_meaning_and_a_name_of_its_own(number: ReportNumber) -> None:
    assert re.fullmatch(r"[A-Z].{8,}\.", number.meaning), number.meaning
    assert [other.key for other in NUMBERS].count(number.key) == 1


def test_a_number_is_read_from_its_place_in_the_report(tmp_path: Path) -> None:
    memory = PeakMemory.of([RankMemory(rank=0, allocated_bytes=GIB)])
    report = dataclasses.replace(make_run(tmp_path / "run", write=False), peak_memory=memory)
    values = {number.key: number.of(report) for number in NUMBERS}
    assert report.throughput is not None and report.loss is not None
    assert values["tokens_per_s"] == report.throughput.tokens_per_s
    assert values["loss"] == report.loss.last
    assert (values["allocated_bytes"], values["host_bytes"]) == (GIB, None)
    without = dataclasses.replace(report, throughput=None, loss=None, step_memory=None)
    values = {number.key: number.of(without) for number in NUMBERS}
    assert [values[key] for key in ("loss", "mfu", "tensors_bytes")] == [None] * 3


def test_a_number_that_fails_is_left_out_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failing = dataclasses.replace(
        LABEL_SHARE, key="failing", label="share", measure=lambda _: 1 / 0
    )
    monkeypatch.setattr(numbers, "NUMBERS", (*NUMBERS, failing, LABEL_SHARE))
    report = measure_in_a_rank(tmp_path)
    assert report.numbers == {"label_share": 0.3}
    assert report.warnings == [
        "the report lacks share, which cannot be measured: ZeroDivisionError: division by zero"
    ]
