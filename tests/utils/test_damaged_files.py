"""The guard around readers: one message for the user, the traceback for us."""

import errno
import json
import os
from pathlib import Path

import pytest
from messages import key_words

from ftkit.errors import UserError
from ftkit.utils.damaged_files import DamagedFile, reading, traceback_log


@pytest.fixture(autouse=True)
def own_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "cache"))


def nest(depth: int) -> object:
    return json.loads("[" * depth)


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (lambda: dict[str, int]()["rope"], "KeyError: 'rope'"),
        (lambda: int("x"), "ValueError: invalid literal"),
        (lambda: nest(100_000), "nested too deeply"),
        (lambda: bytearray(2**62), "too large for memory"),
        (lambda: 1 // 0, "ZeroDivisionError"),
    ],
)
def test_any_failure_of_a_reader_names_file_key_and_what_was_expected(
    fails: object, words: str
) -> None:
    with pytest.raises(DamagedFile) as caught, reading("x.json", "a JSON object", key="layers"):
        fails()  # type: ignore[operator]
    message = str(caught.value)
    assert message.startswith("x.json is damaged: layers: ")
    assert words in message
    assert "Expected: a JSON object" in message
    assert "Traceback" in traceback_log().read_text()


def test_a_message_for_the_user_passes_as_it_is() -> None:
    with pytest.raises(UserError, match=r"^num_layers is 0$"), reading("x.json", "anything"):
        raise UserError("num_layers is 0")
    assert not traceback_log().exists()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        RuntimeError("unable to mmap 33108176 bytes from file <x>: Cannot allocate memory (12)"),
    ],
)
def test_a_machine_without_memory_is_not_blamed_on_the_file(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, reading("x.safetensors", "weights"):
        raise error
    assert caught.value is error


def test_a_file_that_cannot_be_opened_is_not_called_damaged(tmp_path: Path) -> None:
    with pytest.raises(DamagedFile, match=key_words("No such file")), reading("x", "text"):
        (tmp_path / "x").read_text()


def test_tracebacks_never_fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftkit.utils.damaged_files._MOST_LOG_BYTES", 10_000)
    for _ in range(100):
        with pytest.raises(DamagedFile), reading("x", "text"):
            raise ValueError("y" * 500)
    kept = list(traceback_log().parent.iterdir())
    assert sum(file.stat().st_size for file in kept) < 30_000


def test_a_log_that_cannot_be_written_does_not_hide_the_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(DamagedFile, match="KeyError"), reading("x", "text"):
        raise KeyError("a")
