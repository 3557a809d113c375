"""Metrics of one's own: checked before a file is executed, and how their mistakes are reported."""

import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest
from messages import key_words, message_of, says

from ftkit.errors import UserError
from ftkit.recipe.own_metric import LoadedMetric, own_metrics

SCORE = "def score(answer, expected, record):\n    "


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mine.py"


def named(file: Path, function: str = "score") -> str:
    return f"{file}:{function}"


def loaded(file: Path, content: str) -> LoadedMetric:
    file.write_text(content)
    (metric,) = own_metrics([named(file)])
    return LoadedMetric(metric)


def mistake(*texts: str) -> str:
    return message_of(own_metrics, texts)


def test_a_file_is_looked_at_without_being_executed(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    witness = file.with_name("executed")
    content = f"open({str(witness)!r}, 'w')\n{SCORE}return 1\n"
    file.write_text(content)
    monkeypatch.chdir(file.parent)
    (metric,) = own_metrics(["mine.py:score"])
    assert (metric.file, metric.function) == (str(file), "score")
    assert metric.sha256 == hashlib.sha256(content.encode()).hexdigest()
    assert not witness.exists()
    LoadedMetric(metric)
    assert witness.exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mine.py", "FILE.py:FUNCTION ... --metric metrics.py:score"),
        (":score", "must be FILE.py:FUNCTION"),
        ("mine.py:1st", "must be FILE.py:FUNCTION"),
        ("missing.py:score", "missing.py is not a file"),
        (".:score", ". is not a file"),
        ("mine.py:scor", "scor ... score, two, named, many ... --metric"),
        ("mine.py:VALUE", "defines no function VALUE"),
        ("mine.py:method", "defines no function method"),
        ("mine.py:later", "defines no function later"),
        ("mine.py:two", "(answer, expected, record) ... takes (answer, expected)"),
        ("mine.py:named", "takes (answer, expected, record, *, strict)"),
        ("empty.py:score", "score ... none"),
        ("broken.py:score", "broken.py, line 2 ... Python"),
        ("null.py:score", "is not Python"),
    ],
)
def test_an_invalid_metric_is_refused_with_a_remedy(
    text: str, words: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    file.write_text(
        "VALUE = 1\n"
        "def score(answer, expected, record): ...\n"
        "def two(answer, expected): ...\n"
        "def named(answer, expected, record, *, strict): ...\n"
        "def many(answer, *rest, strict=False): ...\n"
        "async def later(answer, expected, record): ...\n"
        "class Scores:\n    def method(answer, expected, record): ...\n"
    )
    Path("empty.py").write_text("")
    Path("broken.py").write_text("def score(answer, expected, record):\nreturn 1\n")
    Path("null.py").write_bytes(b"\0")
    assert says(mistake(text), words)
    assert own_metrics(["mine.py:many"])[0].function == "many"


def test_two_functions_of_one_name_are_refused(file: Path) -> None:
    other = file.with_name("other.py")
    for path in (file, other):
        path.write_text(f"{SCORE}return 1\n")
    assert "Rename one of them." in mistake(named(file), named(other))
    assert "Rename one of them." in mistake(named(file), named(file))


@pytest.mark.parametrize("value", ["True", "0.25", "3", "__import__('torch').tensor(0.5)"])
def test_a_score_is_a_number_of_any_kind(value: str, file: Path) -> None:
    expected = {"True": 1.0, "0.25": 0.25, "3": 3.0}.get(value, 0.5)
    assert loaded(file, f"{SCORE}return {value}\n").score("", "", {}, 0) == expected


def test_a_function_gets_answer_expected_text_and_a_copy_of_the_record(file: Path) -> None:
    metric = loaded(
        file,
        f"{SCORE}found = [answer, expected, record['messages'][0].pop('content')]\n"
        "    return float(found == ['a', 'b', 'c'])\n",
    )
    record: dict[str, Any] = {"messages": [{"role": "user", "content": "c"}]}
    assert metric.score("a", "b", record, 0) == 1.0
    assert record == {"messages": [{"role": "user", "content": "c"}]}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("return 'good'", "'good' ... finite number"),
        ("return None", "None ... finite number"),
        ("return float('nan')", "nan ... finite number"),
        ("return 1e400", "inf ... finite number"),
        ("return [1.0] * 999", "returned [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, ...], but"),
        ("return record['points']", "raised KeyError: 'points' (line 2)"),
        ("import json; json.loads('')", "raised JSONDecodeError: Expecting value"),
        ("exit(3)", "raised SystemExit: 3 (line 2)"),
    ],
)
def test_a_mistake_in_a_function_names_the_record(line: str, words: str, file: Path) -> None:
    metric = loaded(file, f"{SCORE}{line}\n")
    text = message_of(metric.score, "a", "b", {}, 7)
    assert text.startswith("--metric mine.py:score: for validation record 7 (counted from 0) it ")
    assert says(text, words, "Correct the function ... --metric")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("import no_such_package\n", "no_such_package ... line 1 ... Correct"),
        ("def other():\n    1 / 0\nother()\n", "ZeroDivisionError: division by zero (line 2)"),
        ("raise SystemExit('usage')\n", "SystemExit: usage (line 1)"),
    ],
)
def test_a_file_that_does_not_run_is_one_clear_error(content: str, words: str, file: Path) -> None:
    file.write_text(f"{content}{SCORE}return 1\n")
    (metric,) = own_metrics([named(file)])
    assert says(message_of(LoadedMetric, metric), words)


def test_what_is_executed_is_what_was_named(file: Path) -> None:
    file.write_text(f"{SCORE}return 1\n")
    (metric,) = own_metrics([named(file)])
    file.write_text(f"{SCORE}return 2\n")
    with pytest.raises(UserError, match=key_words("changed ... Start again")):
        LoadedMetric(metric)
    file.unlink()
    with pytest.raises(UserError, match=key_words("No such file or directory")):
        LoadedMetric(metric)


def test_what_a_metric_prints_does_not_mix_with_the_result(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metric = loaded(file, f"print('begins')\n{SCORE}print('scores')\n    return 1\n")
    metric.score("", "", {}, 0)
    assert capsys.readouterr() == ("", "begins\nscores\n")


def test_a_file_may_define_dataclasses(file: Path) -> None:
    content = (
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Found:\n    share: float\n"
        f"{SCORE}return Found(0.5).share\n"
    )
    before = set(sys.modules)
    assert loaded(file, content).score("", "", {}, 0) == 0.5
    assert len(set(sys.modules) - before) == 1
