"""Data that ruin runs are reported when a run starts, once, on the terminal and in the report."""

from pathlib import Path
from typing import Any

import pytest
from command import Start
from looks import questions, write_records

from ftkit.runs.report.report import read_report


@pytest.mark.slow
def test_a_run_warns_of_what_its_data_have_before_its_first_step(
    start: Start, tmp_path: Path
) -> None:
    records = [row | {"instruction": f"<s><s>{row['instruction']}"} for row in questions(30)] * 2
    data = write_records(tmp_path / "records.jsonl", [row | {"source": "x"} for row in records])
    keys: dict[str, Any] = {
        "data__val_split_fraction": 0.2,
        "data__prompt_style": "litgpt.prompts.Default",
    }
    with start(tmp_path / "out", data__json_path=data, devices=2, **keys) as run:
        code, out, _ = run.end()
    assert code == 0
    lines = out.splitlines()
    first_step = next(i for i, line in enumerate(lines) if line.startswith("step 1"))
    for words in ("begin with <s> twice", "are training samples too"):
        (place,) = [i for i, line in enumerate(lines[:first_step]) if words in line]
        assert lines[place].startswith("warning: ")
    (described,) = [line for line in lines[:first_step] if line.startswith("data of ")]
    assert described.endswith("; not used: source")
    warnings = read_report(tmp_path / "out").warnings
    assert len([text for text in warnings if "<s> twice" in text]) == 1


@pytest.mark.slow
def test_a_run_on_good_data_says_nothing(start: Start, tmp_path: Path) -> None:
    data = write_records(tmp_path / "records.jsonl", questions(30))
    with start(tmp_path / "out", data__json_path=data, eval__initial_validation=True) as run:
        code, out, _ = run.end()
    assert code == 0 and "warning" not in out and "notice" not in out
