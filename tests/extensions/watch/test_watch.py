"""ftkit watch: a run as its files tell it, from another terminal, whatever becomes of it."""

import dataclasses
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import save
from command import Start, command_environment, command_line
from compared_runs import at_work, make_run, note_in_ranks
from messages import message_of, says
from runs import FOREVER, content, wait_for

from ftkit.checkpoint.store import Store
from ftkit.cli.app import run
from ftkit.extensions.watch.watch import Watcher
from ftkit.runs.report.metrics import ValidationWriter
from ftkit.runs.report.report import Report

NOW_S = 1767323105.0
"""2026-01-02T03:05:05Z, a minute after the start of `make_run`."""


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a run, by a path as people write it, one minute after its start."""
    monkeypatch.chdir(tmp_path)
    stand_in = SimpleNamespace(time=lambda: time.time() - started_s + NOW_S, sleep=time.sleep)  # type: ignore[has-type]
    started_s = time.time()
    monkeypatch.setattr("ftkit.extensions.watch.watch.time", stand_in)
    return Path("out/lora")


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Lines that the command prints: `said(out, "--once")`."""

    def run_(*argv: object) -> list[str]:
        assert run(["watch", *map(str, argv)]) == 0
        printed, err = capsys.readouterr()
        assert err == ""
        return printed.splitlines()

    return run_


def noted(out: Path, steps: int = 20, **changes: object) -> Report:
    """A run that is or was on its way."""
    report = make_run(out, "failed", steps=steps, total_steps=40, write=False)
    report = dataclasses.replace(report, **changes)
    note_in_ranks(out, report)
    return report


def test_a_run_at_work_shows_progress_measurements_and_a_curve(
    said: Callable[..., list[str]], out: Path
) -> None:
    noted(out)
    with at_work(out):
        lines = said(out, "--once")
    assert lines[:6] == [
        "out/lora  running  training: lora on base, 1 x NVIDIA A100, single, bf16-mixed",
        "step 20/40  ━━━━━━━━━━━━━━━━                  epoch 1.00  elapsed 0:15  eta 0:10",
        "loss         2.2214 -> 0.5996",
        "validation   1.0463 -> 0.6996",
        "speed now    4,000 tokens/s, 500 ms a step",
        "peak memory  10.0 GiB allocated, 11.0 GiB reserved, 3.0 GiB host",
    ]
    assert lines[6] == ""
    assert lines[7].startswith(" 2.221 ⠑") and lines[14].startswith("0.5996 ")
    assert lines[15:] == ["loss from step 1 to 20"]


def test_each_source_and_set_is_shown_with_its_losses(
    said: Callable[..., list[str]], out: Path
) -> None:
    make_run(out)
    with ValidationWriter(out / "validation.csv", sources=["code", "some.json"]) as rows:
        for step, code in ((10, 2.0), (20, 1.0), (30, 1.5)):
            losses = {"code": code, "some.json": 3.0}
            rows.write(step=step, samples=step, val_loss=2.5, of_sources=losses)
    lines = [re.sub("  +", "  ", line) for line in said(out, "--once")]
    assert "on code  2.0000 -> 1.5000, best 1.0000" in lines
    assert "on some.json  3.0000" in lines


def test_a_run_that_has_ended_shows_its_outcome_and_nothing_is_waited_for(
    said: Callable[..., list[str]], out: Path
) -> None:
    make_run(out, "out_of_memory", steps=12)
    lines = said(out)
    assert says(lines[0], "out/lora  out of memory  CUDA out of memory ... 2.00 GiB")
    assert lines[1].startswith("step 12/40 ") and lines[1].endswith("elapsed 0:11")


def test_a_run_that_was_killed_is_known_by_its_lock(
    said: Callable[..., list[str]], out: Path
) -> None:
    noted(out)
    (line,) = (line for line in said(out) if "killed" in line)
    assert says(line, "out/lora  killed")


def test_a_run_that_has_just_been_started_is_in_set_up(
    said: Callable[..., list[str]], out: Path
) -> None:
    (out / ".run").mkdir(parents=True)
    with at_work(out):
        assert said(out, "--once") == ["out/lora  starting  set-up"]


def test_the_newest_checkpoint_is_shown_with_its_age(
    said: Callable[..., list[str]], out: Path
) -> None:
    noted(out)
    save(Store(out / "checkpoints"), 10, saved_at="2026-01-02T03:04:50Z")
    save(Store(out / "checkpoints"), 20, saved_at="2026-01-02T03:05:00Z")
    with at_work(out):
        assert "checkpoint   step 20, 5 s ago" in said(out, "--once")


def test_a_stalled_run_is_reported(said: Callable[..., list[str]], out: Path) -> None:
    noted(out)
    os.utime(out / "metrics.csv", (NOW_S - 300, NOW_S - 300))
    with at_work(out):
        assert says("\n".join(said(out, "--once")), "no step for 5 min")


def test_a_run_in_validation_does_not_stand_still(
    said: Callable[..., list[str]], out: Path
) -> None:
    noted(out, phase="validation")
    os.utime(out / "metrics.csv", (NOW_S - 300, NOW_S - 300))
    with at_work(out):
        lines = said(out, "--once")
    assert "silent" not in "".join(lines)
    assert lines[0].startswith("out/lora  running  validation: ")


def test_only_new_rows_are_read_and_rows_that_were_cut_are_forgotten(out: Path) -> None:
    noted(out)
    watcher = Watcher(out)
    assert watcher.look().step == 20
    rows = (out / "metrics.csv").read_text().splitlines(keepends=True)
    (out / "metrics.csv").write_text("".join(rows[:11]))
    assert watcher.look().step == 10
    with (out / "metrics.csv").open("a") as file:
        file.write("".join(rows[11:13]) + rows[13][:5])
    snapshot = watcher.look()
    assert [row["step"] for row in snapshot.rows] == list(range(1, 13))


def test_nothing_is_written(said: Callable[..., list[str]], out: Path) -> None:
    noted(out)
    before = content(out)
    with at_work(out):
        said(out, "--once")
    said(out)
    assert content(out) == before


@pytest.mark.parametrize(
    ("arguments", "said_"),
    [
        (["none"], "none holds no run ... out/finetune/lora"),
        ([".", "--interval", "2"], "interval is '2' ... s, min or h"),
    ],
)
def test_a_mistake_is_one_clear_error(out: Path, arguments: list[Any], said_: str) -> None:
    assert says(message_of(run, ["watch", *arguments]), said_)


# --- A real run -----------------------------------------------------------------------------------


class Terminal:
    """`ftkit watch` on a terminal."""

    def __init__(self, *arguments: object, before: str = "") -> None:
        self._main, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 90, 0, 0))
        environment = command_environment() | {"TERM": "xterm", "PYTHONUTF8": "1"}
        command = command_line("watch", *arguments, "--interval", "0.2s", before=before)
        self.process = subprocess.Popen(
            command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment,
            start_new_session=True,
        )  # fmt: skip
        os.close(terminal)
        os.set_blocking(self._main, False)
        self._seen = b""

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._main)

    def end(self) -> int:
        """Wait for the end: the exit code. A terminal that nobody reads would be full."""
        wait_for(lambda: bool(self.seen()) and self.process.poll() is not None)
        return self.process.wait()

    def seen(self) -> str:
        """All so far as words, without escape sequences."""
        try:
            while block := os.read(self._main, 65536):
                self._seen += block
        except OSError:  # nothing more now, or ended
            pass
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._seen.decode(errors="replace"))
        return " ".join(text.split())


SHELLS_BACKGROUND = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)"
"""As a shell without job control starts what ends in &."""
IN_A_FINALISER = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from ftkit.extensions.watch import watch

class Interrupted:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

class Watcher(watch.Watcher):
    looks = 0
    def look(self):
        Watcher.looks += 1
        if Watcher.looks == 2:
            Interrupted()
        return super().look()

watch.Watcher = Watcher
"""
"""Python can only print an exception there: it goes no further."""


def test_ctrl_c_ends_what_a_terminal_shows_however_it_was_started(out: Path) -> None:
    noted(out)
    with at_work(out), Terminal(out, before=SHELLS_BACKGROUND) as terminal:
        wait_for(lambda: "loss from step 1 to 20" in terminal.seen())
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 130


def test_ctrl_c_that_comes_in_a_finaliser_is_not_lost(out: Path) -> None:
    noted(out)
    with at_work(out), Terminal(out, before=IN_A_FINALISER) as terminal:
        assert terminal.end() == 130
    command = command_line("watch", out, "--interval", "0.2s", before=IN_A_FINALISER)
    with at_work(out):
        end = subprocess.run(
            command, capture_output=True, text=True, env=command_environment(), timeout=120
        )
    assert end.returncode == 130
    assert "Exception ignored in" in end.stderr


@pytest.mark.slow
def test_a_real_run_is_followed_on_a_terminal_and_in_a_pipe_until_it_ends(
    start: Start, tmp_path: Path
) -> None:
    out_dir = tmp_path / "out"
    with start(out_dir, **FOREVER, checkpoint__save_every="1s") as run_:
        run_.wait_for_steps(1)
        lines = subprocess.Popen(
            command_line("watch", out_dir, "--interval", "0.2s"),
            stdout=subprocess.PIPE,
            text=True,
            env=command_environment(),
        )
        with Terminal(out_dir) as terminal:
            wait_for(lambda: "eta " in terminal.seen() and "checkpoint" in terminal.seen())
            terminal.process.send_signal(signal.SIGINT)
            assert terminal.end() == 130
            assert "Traceback" not in terminal.seen()
        run_.wait_for_steps(30)  # whoever watches may leave
        with Terminal(out_dir) as terminal:
            wait_for(lambda: "running" in terminal.seen())
            run_.process.send_signal(signal.SIGINT)
            assert terminal.end() == 0
            assert "out interrupted Ctrl+C" in terminal.seen()
        printed, _ = lines.communicate()
        assert run_.end()[0] == 130
    assert lines.returncode == 0
    assert re.fullmatch(r"interrupted at step \d[\d,]*: Ctrl\+C", printed.splitlines()[-1])
    assert re.search(r"^step \d+/1,000,000  loss \d\.\d+  [\d,.]+ tokens/s ", printed, re.MULTILINE)


@pytest.mark.slow
def test_a_real_run_that_is_killed_at_once_is_shown_as_killed(start: Start, tmp_path: Path) -> None:
    out_dir = tmp_path / "out"
    with start(out_dir, **FOREVER) as run_:
        run_.wait_for_steps(2)
        with Terminal(out_dir) as terminal:
            wait_for(lambda: "running" in terminal.seen())
            run_.process.kill()
            assert terminal.end() == 0
            assert "out killed the process was killed" in terminal.seen()
