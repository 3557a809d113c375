"""Infinite numbers and NaN in the files of a run: shown as such, never the best, no traceback."""

import csv
import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from compared_runs import at_work, make_run, note_in_ranks
from messages import key_words
from rich.console import Console

from ftkit.cli.app import run
from ftkit.errors import UserError
from ftkit.extensions.comparison.columns import number_columns
from ftkit.extensions.comparison.compare import compare
from ftkit.extensions.watch.live_page import RunSnapshots
from ftkit.extensions.watch.watch import View, Watcher, snapshot_as_html
from ftkit.runs.report.metrics import read_metrics, read_validation
from ftkit.runs.report.report import read_report
from ftkit.runs.report.table import render
from ftkit.utils.console.terminal import plain_text

WORDS = ("nan", "inf", "-1e999", "1e-320", "")
NUMBERS = ("NaN", "-Infinity", "1e999")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs of which the first has the lower losses."""
    make_run(tmp_path / "a", final_loss=0.2)
    make_run(tmp_path / "b", final_loss=0.7)
    return tmp_path


def with_cell(file: Path, column: str, cell: str, row: int = -1) -> None:
    """Change a cell of a log; -1 is that of the last row."""
    with file.open() as stream:
        rows = list(csv.DictReader(stream))
    rows[row][column] = cell
    lines = [",".join(rows[0]), *(",".join(values.values()) for values in rows)]
    file.write_text("\n".join(lines) + "\n")


def with_number(file: Path, number: str, *keys: str | int) -> None:
    """Change a number of a report."""
    report = value = json.loads(file.read_text())
    for key in keys[:-1]:
        value = value[key]
    value[keys[-1]] = "here"
    file.write_text(json.dumps(report).replace('"here"', number))


def shown(out: Path) -> str:
    """What `ftkit watch` shows of a run."""
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(View(Watcher(out).look()))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def assert_shown_everywhere(root: Path) -> None:
    """Whatever shows runs, of one that has ended and of one that is at work."""
    for form in ("json", "csv", "markdown"):
        assert run(["compare", str(root), "--format", form]) == 0
    assert run(["watch", str(root / "a"), "--once"]) == 0
    compared = {one.name: one for one in compare([root]).runs}
    assert compared.keys() == {"a", "b"}
    assert compared["b"].training.steps and compared["b"].validation, "its files are whole"
    _ = compared["a"].training, compared["a"].validation
    report = read_report(root / "a")
    plain_text(render(report, None))
    (root / "a/report.json").unlink()
    note_in_ranks(root / "a", report)
    with at_work(root / "a"):
        assert "running" in shown(root / "a")
        assert "running" in snapshot_as_html(Watcher(root / "a").look())
        page = RunSnapshots(root, copy_at=None)
        assert {one["name"] for one in page.all_runs()["runs"]} == {"a", "b"}
        json.dumps([page.all_runs(), page.run("a")], allow_nan=False)  # which a browser reads


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("metrics.csv", "loss"),
        ("metrics.csv", "tokens_per_s"),
        ("metrics.csv", "step"),
        ("metrics.csv", "samples"),
        ("validation.csv", "val_loss"),
        ("validation.csv", "perplexity"),
    ],
)
def test_any_number_of_a_log_can_be_shown(runs: Path, name: str, column: str, word: str) -> None:
    with_cell(runs / "a" / name, column, word)
    assert_shown_everywhere(runs)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    ("part", "key"),
    [
        ("phases_s", "total"),
        ("throughput", "mfu"),
        ("loss", "last"),
        ("loss", "validation_last"),
        ("loss", "validation_best"),
    ],
)
def test_a_number_that_a_report_may_lack_is_missing(
    runs: Path, part: str, key: str, number: str
) -> None:
    with_number(runs / "a/report.json", number, part, key)
    assert getattr(getattr(read_report(runs / "a"), part), key) is None
    assert_shown_everywhere(runs)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(("part", "key"), [("progress", "epochs"), ("throughput", "tokens_per_s")])
def test_a_report_without_a_number_that_each_has_is_named_and_not_compared(
    runs: Path, part: str, key: str, number: str
) -> None:
    with_number(runs / "a/report.json", number, part, key)
    with pytest.raises(UserError, match=key_words("report.json")):
        read_report(runs / "a")
    assert [one.name for one in compare([runs]).runs] == ["b"]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_loss_that_is_not_finite_is_not_the_best_of_a_comparison(runs: Path, number: str) -> None:
    make_run(runs / "c", final_loss=0.9)
    assert [one.name for one in compare([runs]).runs] == ["a", "b", "c"]
    with_number(runs / "a/report.json", number, "loss", "validation_last")
    comparison = compare([runs])
    assert [one.name for one in comparison.runs] == ["b", "c", "a"]
    (losses,) = [one for one in number_columns(comparison.runs) if one.key == "validation_loss"]
    assert losses.values[2] is None and losses.best == {0}


@pytest.mark.parametrize("word", ["nan", "inf", ""])
def test_watch_says_that_the_last_loss_is_not_finite(runs: Path, word: str) -> None:
    assert "not finite" not in shown(runs / "a")
    with_cell(runs / "a/metrics.csv", "loss", word)
    with_cell(runs / "a/validation.csv", "val_loss", word)
    lines = [line for line in shown(runs / "a").splitlines() if "not finite" in line]
    assert [line.split()[0] for line in lines] == ["loss", "validation"]
    with_cell(runs / "a/metrics.csv", "loss", word, row=3)
    with_cell(runs / "a/metrics.csv", "loss", "0.5")
    lines = [line for line in shown(runs / "a").splitlines() if "not finite" in line]
    assert [line.split()[0] for line in lines] == ["validation"]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a column has another name": lambda content: content.replace(b"s", b"x", 1),
    "a row has a cell more": lambda content: content[:-1] + b",5\n",
    "not text": lambda content: content[:-4] + b"\xff\xfe\n",
    "a long cell": lambda content: content[:-1] + b"9" * 200_000 + b"\n",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("name", ["metrics.csv", "validation.csv", "system.csv"])
def test_a_damaged_log_is_passed_over(
    runs: Path, name: str, damage: Callable[[bytes], bytes]
) -> None:
    file = runs / "a" / name
    if name == "system.csv":
        file.write_text("step,time_s,host_cpu_utilization\n1,2.0,0.5\n2,3.0,0.5\n")
    file.write_bytes(damage(file.read_bytes()))
    assert_shown_everywhere(runs)


@pytest.mark.parametrize("name", ["metrics.csv", "validation.csv", "system.csv"])
def test_what_is_no_file_keeps_nobody_waiting(runs: Path, name: str) -> None:
    (runs / "a" / name).unlink(missing_ok=True)
    os.mkfifo(runs / "a" / name)
    assert_shown_everywhere(runs)
    read = read_validation if name == "validation.csv" else read_metrics
    with pytest.raises(UserError, match=name):
        read(runs / "a" / name)
