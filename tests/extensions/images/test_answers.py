"""Answers about images: those of transformers' model, by every command that gives answers."""

import io
import json
import os
import pty
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import Command
from messages import says
from seeing_models import FIRST, PlainLoop

import ftkit as python
from ftkit.cli.app import run

pytestmark = pytest.mark.slow

_TOKENS = 6


@pytest.mark.parametrize(
    "kind",
    [
        *FIRST,
        *(
            pytest.param(kind, marks=pytest.mark.matrix)
            for kind in ("qwen3_vl", "qwen3_5", "llava_onevision")
        ),
    ],
)
def test_answers_to_records_are_those_of_transformers(
    ftkit: Command, seen: Path, rows: list[dict[str, Any]], kind: str
) -> None:
    ended = ftkit(
        *("generate", seen / kind, "--prompts", seen / "chats.jsonl", "--format", "json"),
        *("--max_new_tokens", _TOKENS),
    )
    assert ended.returncode == 0, ended.stderr
    loop = PlainLoop(kind, seen / kind, seen)
    found = json.loads(ended.stdout)
    assert [one["answer"] for one in found] == [loop.answer(row, _TOKENS) for row in rows]
    assert [len(one.get("images", ())) for one in found] == [
        len(row.get("images", ())) for row in rows
    ]


def test_a_prompt_takes_images(ftkit: Command, seen: Path, rows: list[dict[str, Any]]) -> None:
    loop = PlainLoop("llava", seen / "llava", seen)
    row = next(row for row in rows if len(row["images"]) == 2)
    text = row["messages"][0]["content"].replace("<image>", "")
    images = [word for image in row["images"] for word in ("--image", seen / image)]
    ended = ftkit(
        *("generate", seen / "llava", *images, "--prompt", text, "--format", "json"),
        *("--max_new_tokens", _TOKENS),
    )
    assert json.loads(ended.stdout)["answer"] == loop.answer(row, _TOKENS)


def test_a_chat_takes_images(
    seen: Path,
    rows: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    loop, row = PlainLoop("gemma3", seen / "gemma3", seen), rows[0]
    asked = {
        "prompt": row["messages"][0]["content"].replace("<image>", ""),
        "images": [str(seen / image) for image in row["images"]],
    }
    missing = {"prompt": "and this", "images": ["no.png"]}
    lines = "".join(json.dumps(line) + "\n" for line in (missing, asked))
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    words = ("chat", str(seen / "gemma3"), "--format", "json")
    assert run([*words, "--max_new_tokens", str(_TOKENS)]) == 0
    _, refused, answered = map(json.loads, capsys.readouterr().out.splitlines())
    assert "no.png is not there" in refused["error"]
    assert answered["answer"] == loop.answer(row, _TOKENS)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The other end of a terminal from which this process reads."""
    main, own = pty.openpty()
    with os.fdopen(own) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        yield main
    os.close(main)


def test_a_chat_on_a_terminal_takes_images(
    seen: Path, rows: list[dict[str, Any]], terminal: int, capsys: pytest.CaptureFixture[str]
) -> None:
    loop, (row, *_) = PlainLoop("llava", seen / "llava", seen), rows
    asked = row["messages"][0]["content"].replace("<image>", "")
    picture = seen / row["images"][0]
    lines = ["/image", f"/image {seen}/no.png", "and this", f"/image {picture}", asked]
    os.write(terminal, ("\n".join(lines) + "\n\x04").encode())
    assert run(["chat", str(seen / "llava"), "--max_new_tokens", str(_TOKENS)]) == 0
    said, aside = capsys.readouterr()
    assert said.replace("> ", "").strip() == loop.answer(row, _TOKENS).strip()
    assert says(aside, "/image FILE adds an image", "Write /image FILE")
    assert says(aside, f"{seen}/no.png is not there", f"{picture} comes before the next line")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--image", "no.png"), "no.png is not there"),
        (("--image", "https://example.org/a.png"), "fetches no images"),
        (("--image", "a.png", "--raw"), "--image"),
    ],
)
def test_an_image_that_cannot_be_given_is_refused(
    ftkit: Command, seen: Path, words: tuple[str, ...], named: str
) -> None:
    ended = ftkit("generate", seen / "llava", "--prompt", "what", *words)
    assert ended.returncode == 2
    assert named in ended.stderr


def test_a_chat_in_python_takes_images(seen: Path, rows: list[dict[str, Any]]) -> None:
    loop, row = PlainLoop("llava", seen / "llava", seen), rows[0]
    text = row["messages"][0]["content"].replace("<image>", "")
    with python.chat(seen / "llava", max_new_tokens=_TOKENS) as chat:
        answer = chat.ask(text, [seen / image for image in row["images"]])
    assert answer.text == loop.answer(row, _TOKENS)


def test_an_instruction_takes_images(ftkit: Command, seen: Path, tmp_path: Path) -> None:
    record = {"instruction": "<image>what colour", "input": "is it", "images": ["images/0.png"]}
    file = seen / "asked.jsonl"
    file.write_text(json.dumps(record) + "\n")
    words = ("--prompts", file, "--format", "json", "--max_new_tokens", _TOKENS)
    (found,) = json.loads(ftkit("generate", seen / "llava", *words).stdout)
    loop = PlainLoop("llava", seen / "llava", seen)
    asked = {"role": "user", "content": "<image>what colour\n\nis it"}
    row = {"messages": [asked], "images": record["images"]}
    assert found["answer"] == loop.answer(row, _TOKENS)
    assert found["instruction"] == record["instruction"]
    assert [Path(image).name for image in found["images"]] == ["0.png"]
