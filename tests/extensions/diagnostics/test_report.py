"""ftkit report: the table of a run again, and diagnostics without data and secrets."""

import dataclasses
import re
from pathlib import Path

import pytest
from compared_runs import make_run
from messages import message_of, says

from ftkit.cli.app import run
from ftkit.extensions.diagnostics.diagnostics import diagnostics, without_records
from ftkit.runs.directory import RunDirectory
from ftkit.runs.report.answers import AnsweredExample
from ftkit.runs.report.report import write_report
from ftkit.runs.report.table import render
from ftkit.utils.console.display import Display

PRIVATE = "a private question of many words " * 12
TOKEN = f"hf_{'aB3' * 11}"


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose log and report show a record, and that was given secrets."""
    monkeypatch.chdir(tmp_path)
    path = Path("out")
    made = make_run(path, "failed", data__path=str(Path.home() / "chats.jsonl"))
    example = AnsweredExample(
        instruction=PRIVATE, input=PRIVATE, expected=PRIVATE, before=PRIVATE, after=PRIVATE
    )
    report = dataclasses.replace(
        made,
        examples=[example],
        recipe=made.recipe | {"access_token": TOKEN, "plugin_secret": "supersecret"},
        command=["ftkit", "finetune", "base", "--access_token", TOKEN],
        versions={"python": "3.12.0", "torch": "2.0.0"},
        warnings=["the loss rose"],
    )
    write_report(report, path)
    with Display(path) as display:
        display.message("data of chats.jsonl: 300 conversations")
        display.message(f"sample: {PRIVATE}\n{PRIVATE}\nanswer: {PRIVATE}")
        display.message(f"fetching https://me:supersecret@host/base with {TOKEN}")
        display.notice(render(report, path))
    return path


def test_diagnostics_have_what_a_bug_report_needs_and_no_data_and_no_secrets(out: Path) -> None:
    text = diagnostics(RunDirectory(out))
    assert says(text, "failed", "data.json does not exist", "torch 2.0.0", "NVIDIA A100")
    assert says(text, "checkpoint_dir: base", "~/chats.jsonl", "the loss rose")
    assert says(text, "data of chats.jsonl: 300 conversations", "now: ")
    assert "private" not in text and "supersecret" not in text and TOKEN not in text
    assert str(Path.home()) not in text


def test_they_are_shown_before_they_are_written_and_as_they_are(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", "out", "--diagnostics"]) == 0
    seen, _, following = capsys.readouterr().out.partition("next:")
    assert "ftkit report out --diagnostics --out bug.md" in following
    assert [path.name for path in Path().iterdir()] == ["out"]
    assert run(["report", "out", "--diagnostics", "--out", "bug.md"]) == 0
    assert capsys.readouterr().out == seen == Path("bug.md").read_text()


def test_a_run_without_a_report_has_its_log(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("checkpoint_dir: base\n")
    (tmp_path / "run.log").write_text("2026-01-01T00:00:00Z loading weights ...\n")
    text = diagnostics(RunDirectory(tmp_path))
    assert says(text, "without a report", "checkpoint_dir: base", "loading weights")


def test_a_long_log_keeps_its_ends(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("checkpoint_dir: base\n")
    lines = "".join(f"2026-01-01T00:00:00Z step {n}/5000\n" for n in range(5000))
    (tmp_path / "run.log").write_text(lines)
    text = diagnostics(RunDirectory(tmp_path))
    assert says(text, "step 0/5000", "step 4999/5000", "... 4,600 lines ...")
    assert len(re.findall("step ", text)) == 400


def test_lines_beside_records_stay() -> None:
    lines = ["sample: a", "b", "answer: c", "before training", "example  d", "     e", "result f"]
    assert list(without_records(lines)) == ["before training", "result f"]


def test_the_report_is_shown_again(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "out"]) == 0
    assert says(capsys.readouterr().out, "failed", "data.json does not exist")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "nowhere holds no run"),
        (["nowhere", "--diagnostics"], "nowhere holds no run"),
        (["out", "--out", "bug.md"], "--out ... --diagnostics"),
        (["out", "--diagnostics", "--out", "no/bug.md"], "--out no/bug.md ... existing directory"),
    ],
)
def test_what_cannot_be_shown_or_written_is_one_message(
    out: Path, words: list[str], said: str
) -> None:
    assert says(message_of(run, ["report", *words]), said)
