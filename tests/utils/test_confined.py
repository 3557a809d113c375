"""Readers in a child process: their results, their errors, and the limits that hold for them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from runs import DEFAULT_SIGNALS

from ftkit.errors import UserError
from ftkit.utils.confinement import checked_size, confined
from ftkit.utils.damaged_files import DamagedFile, traceback_log

READERS = """
import os, sys, time
from ftkit.errors import UserError
from ftkit.utils.damaged_files import DamagedFile, reading
from ftkit.utils.confinement import without_limits

def sizes(*paths): return {path: os.path.getsize(path) for path in paths}
def refuse(): raise UserError("layers is 0. Try 1.")
def is_damaged():
    with reading("x.bin", "numbers"): return 1 / 0
def fail(): print("half a sentence", flush=True); raise KeyError("rope")
def loop():
    while True: pass
def swallow_and_loop():
    while True:
        try:
            while True: pass
        except Exception: pass
def loop_in_a_library(): return sum(range(10**12))
def allocate(): return len(bytearray(2**28))
def allocate_at_ease():
    with without_limits(): held = bytearray(2**28)
    return len(held) + len(bytearray(2**24))
def abort(): os.abort()
def wait_long(mark):
    try:
        open(mark, "w").write(str(os.getpid())); time.sleep(600)
    finally:
        os.remove(mark)
def leave(): sys.exit(3)
"""


@pytest.fixture(autouse=True)
def readers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "readers_here.py").write_text(READERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "cache"))


def call(name: str, *arguments: object, file: Path = Path(__file__), seconds: float = 20) -> object:
    return confined(
        f"readers_here:{name}", *arguments, file=file, seconds=seconds, memory_bytes=2**26
    )


def test_plain_values_go_in_and_come_out(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    file.write_bytes(bytes(1000))
    assert call("sizes", str(file), file=file) == {str(file): 1000}


@pytest.mark.parametrize(
    ("reader", "kind", "words"),
    [
        ("refuse", UserError, r"^layers is 0\. Try 1\.$"),
        ("is_damaged", DamagedFile, r"^x\.bin is damaged: ZeroDivisionError"),
        ("fail", DamagedFile, r"test_confined\.py cannot be read.*exit code 1"),
        ("leave", DamagedFile, r"exit code 3"),
        ("abort", DamagedFile, r"SIGABRT"),
        ("loop", DamagedFile, r"more than 1 s of processor time"),
        pytest.param("loop_in_a_library", DamagedFile, r"SIGVTALRM", marks=pytest.mark.slow),
        ("swallow_and_loop", DamagedFile, r"more than 1 s of processor time"),
        (
            "allocate",
            DamagedFile,
            r"more than 0\.1 GiB of memory, the limit for its size \(0\.0 MiB",
        ),
    ],
)
def test_whatever_a_reader_does_ends_as_one_message(
    reader: str, kind: type[UserError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        call(reader, seconds=1)


def test_what_a_reader_has_printed_goes_to_the_log_if_it_fails() -> None:
    with pytest.raises(DamagedFile):
        call("fail")
    log = traceback_log().read_text()
    assert "half a sentence" in log and "KeyError: 'rope'" in log


def test_the_size_of_a_file_raises_the_limits(tmp_path: Path) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(2**27)
    assert call("allocate", file=large) == 2**28


def test_only_reading_of_files_counts_for_the_limit() -> None:
    assert call("allocate_at_ease") == 2**28 + 2**24


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_pipe_or_a_device_in_the_place_of_a_file_is_refused(
    tmp_path: Path, is_inside: bool
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to("/dev/zero")
    for file in [tmp_path] if is_inside else [tmp_path / "pipe", tmp_path / "null"]:
        with pytest.raises(DamagedFile, match=r"is a pipe or a device"):
            checked_size(file)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_end_reaches_the_child_which_tidies_up(
    tmp_path: Path, number: signal.Signals
) -> None:
    mark = tmp_path / "mark"
    program = (
        f"{DEFAULT_SIGNALS}\nfrom pathlib import Path\n"
        "from ftkit.utils.confinement import confined\n"
        f"confined('readers_here:wait_long', {str(mark)!r}, file=Path({__file__!r}))"
    )
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) as parent:
        while not (mark.exists() and mark.read_text()):
            time.sleep(0.02)
            assert parent.poll() is None
        child = int(mark.read_text())
        parent.send_signal(number)
        assert parent.wait() == (-signal.SIGINT if number == signal.SIGINT else 143)
    assert not psutil.pid_exists(child)
    assert number == signal.SIGTERM or not mark.exists()


def test_the_child_ends_with_its_parent(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    program = (
        "from pathlib import Path\nfrom ftkit.utils.confinement import confined\n"
        f"confined('readers_here:wait_long', {str(mark)!r}, file=Path({__file__!r}))"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as parent:
        while not (mark.exists() and mark.read_text()):
            time.sleep(0.02)
            assert parent.poll() is None
        child = psutil.Process(int(mark.read_text()))
        parent.kill()
    child.wait(timeout=60)
