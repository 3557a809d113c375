"""Summary of the data before the first step: samples that are cut or left out, and why."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ftkit.data.dataset import load_data
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.recipe import Component
from ftkit.runs.report.report import DataCounts, Source
from ftkit.training.journal import log_data_summary
from ftkit.utils.console.formatting import percent_text


@pytest.fixture
def tell(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives the lines that are shown, the warnings, and what the report gets."""
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "cache"))

    def tell_(**init_args: Any) -> tuple[list[str], list[str], Any]:
        data = Component(class_path="JSON", init_args={"val_split_fraction": 0.2, **init_args})
        journal = Mock()
        log_data_summary(load_data(data, Tokenizer(tiny_base), 120), journal)
        lines = [call.args[0] for call in journal.display.message.call_args_list]
        warnings = [call.args[0] for call in journal.warn.call_args_list]
        return lines, warnings, journal.recorder.on_data.call_args.args

    return tell_


def write(file: Path, outputs: list[str]) -> str:
    file.write_text(json.dumps([{"instruction": "red", "output": text} for text in outputs]))
    return str(file)


def test_complete_data_get_one_line(
    tell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines, warnings, (counts, sources) = tell(path=write(Path("a.json"), ["sun"] * 10))
    (line,) = lines
    assert line.startswith("data of a.json: 10 instructions")
    assert warnings == []
    assert counts["train"].lost_fraction == 0.0
    assert list(sources) == ["JSON"]


@pytest.mark.parametrize(
    ("overlong", "told"),
    [("truncate", "cut to max_seq_length"), ("drop", "left out (longer than max_seq_length)")],
)
def test_cut_dropped_and_skipped_samples_are_shown_with_their_share(
    tell: Any, tmp_path: Path, overlong: str, told: str
) -> None:
    path = write(tmp_path / "a.json", ["sun"] * 40 + ["sun " * 80] * 20 + [""] * 10)
    lines, _, (counts, _) = tell(path=path, overlong=overlong)
    train: DataCounts = counts["train"]
    cut = train.truncated + train.dropped
    assert cut > 0 and train.skipped_empty_output > 0
    assert lines[1] == (
        f"train data: of 56 records: {train.skipped_empty_output} left out (empty output), "
        f"{cut} {told}; the longest sample has {train.longest_tokens} tokens, "
        f"{percent_text(train.lost_fraction)} of all tokens are lost "
        "(train.max_seq_length decides that; of JSON data, data.overlong too)"
    )
    assert lines[2].startswith("val data: of 14 records: ")


def test_skipped_records_get_no_advice_on_max_seq_length(tell: Any, tmp_path: Path) -> None:
    lines, _, _ = tell(path=write(tmp_path / "a.json", ["sun"] * 40 + [""] * 20))
    assert lines[1].endswith("left out (empty output)")


def test_bad_records_are_counted(tell: Any, tmp_path: Path) -> None:
    file = Path(write(tmp_path / "a.json", ["sun"] * 40))
    file.write_text(json.dumps([*json.loads(file.read_text()), {"instruction": "red"}]))
    lines, _, (counts, _) = tell(path=str(file), skip_bad_records=True)
    assert lines[1] == "train data: of 33 records: 1 left out (bad record: has no output)"
    assert counts["train"].refused == {"bad record: has no output": 1}


def test_lines_name_each_of_several_sources(
    tell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    entries = [
        {"path": write(Path("a.json"), ["sun"] * 20), "weight": 2},
        {"path": write(Path("b.json"), ["sun " * 80] * 20)},
    ]
    lines, _, (counts, sources) = tell(sources=entries)
    assert [line.partition(":")[0] for line in lines] == [
        "data of a.json",
        "data of b.json",
        "train data of b.json",
        "val data of b.json",
    ]
    assert counts["train"].records == 32
    assert [source.samples_per_epoch for source in sources.values()] == [32, 16]
    assert all(isinstance(source, Source) for source in sources.values())


def test_an_unusable_cache_is_a_warning(
    tell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.json", ["sun"] * 10)
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "taken"))
    (warning,) = tell(path=path)[1]
    assert "cannot be written" in warning
