"""The display: a live line on a terminal, plain lines elsewhere and in run.log."""

import contextlib
import errno
import fcntl
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import ROOT
from messages import says
from rich.table import Table

from ftkit.utils import progress
from ftkit.utils.console.display import Display
from ftkit.utils.console.formatting import clock_text
from ftkit.utils.console.terminal import fitted, terminal_of

STAMP = "2026-11-20T21:30:00Z"


class Clock:
    """Time that passes on command."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> Any:
        return self.now


class Terminal(io.StringIO):
    """A stream that is a terminal, and can say what is on its screen."""

    def isatty(self) -> Any:
        return True

    @property
    def screen(self) -> Any:
        return screen_of(self.getvalue())


def screen_of(output: str) -> list[str]:
    """The lines a terminal shows after this output; knows the few codes rich writes."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", output):
        if token == "\r":
            column = 0
        elif token == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif token.startswith("\x1b["):
            count, code = token[2:-1], token[-1]
            if code == "A":
                row -= int(count or 1)
            elif code == "K":
                lines[row] = ""
            else:
                assert code == "m", f"unknown code {token!r}"
        else:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + token + line[column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in lines]


@pytest.fixture(autouse=True)
def terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def plain(tmp_path: Path, clock: Clock) -> Iterator[Display]:
    with Display(tmp_path, stream=io.StringIO(), clock=clock, now=lambda: STAMP) as display:
        yield display


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


@pytest.fixture
def live(tmp_path: Path, clock: Clock, terminal: Terminal) -> Iterator[Display]:
    with Display(tmp_path, stream=terminal, clock=clock, now=lambda: STAMP) as display:
        yield display


def shown_by(display: Display) -> list[str]:
    """The plain lines of a display that is not on a terminal."""
    return display._stream._stream.getvalue().splitlines()  # type: ignore[attr-defined]


def log_of(out_dir: Path) -> list[str]:
    """The lines of the log without their time stamp, which each must have."""
    lines = (out_dir / "run.log").read_text().splitlines()
    assert all(line.startswith(f"{STAMP} ") for line in lines)
    return [line.removeprefix(f"{STAMP} ") for line in lines]


def train(
    display: Display,
    clock: Clock,
    steps: int,
    step_s: float,
    until: int | None = None,
    tokens_per_s: float = 12_345.6,
) -> None:
    """A run of training with steps of equal length."""
    with display.training(steps) as training:
        for step in range(1, (until or steps) + 1):
            clock.now += step_s
            training.step(step, 2.0 + 1 / step, 2e-4, tokens_per_s, step / 10)


class TestPlain:
    """Pipes, files and notebooks."""

    def test_messages_are_lines(self, plain: Display, tmp_path: Path) -> None:
        plain.message("one")
        plain.message("two\nlines")
        assert shown_by(plain) == ["one", "two", "lines"]
        assert log_of(tmp_path) == ["one", "two", "lines"]

    def test_a_long_message_is_not_wrapped(self, plain: Display) -> None:
        plain.message("word " * 100)
        assert len(shown_by(plain)) == 1

    def test_each_distinct_warning_is_shown_once(self, plain: Display) -> None:
        for text in ("slow disk", "small\n  data", "slow disk"):
            plain.warning(text)
        assert shown_by(plain) == ["warning: slow disk", "warning: small data"]
        assert plain.warnings == ["slow disk", "small data"]

    def test_a_phase_has_one_line_and_in_the_log_one_at_its_start_too(
        self, plain: Display, clock: Clock, tmp_path: Path
    ) -> None:
        with plain.phase("loading weights"):
            assert shown_by(plain) == []
            clock.now += 3.2
        assert shown_by(plain) == ["loading weights ... 3.2 s"]
        assert log_of(tmp_path) == ["loading weights ...", "loading weights ... 3.2 s"]

    @pytest.mark.parametrize(("seconds", "lines"), [(3.2, 0), (6.0, 1)])
    def test_a_brief_phase_has_a_line_only_if_it_takes_long(
        self, plain: Display, clock: Clock, seconds: float, lines: int
    ) -> None:
        with plain.phase("validating", brief=True):
            clock.now += seconds
        assert len(shown_by(plain)) == lines

    def test_a_long_phase_reports_progress_every_five_seconds(
        self, plain: Display, clock: Clock
    ) -> None:
        with plain.phase("loading weights") as phase:
            for done in range(12):
                phase.advance(done + 1, 12)
                clock.now += 1
        assert shown_by(plain) == [
            "loading weights ... 50 % 5.0 s",
            "loading weights ... 92 % 10.0 s",
            "loading weights ... 12.0 s",
        ]

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_an_interrupted_phase_is_marked_as_stopped(
        self, error: type[Any], plain: Display, clock: Clock
    ) -> None:
        def cut_short() -> None:
            with plain.phase("loading weights"):
                clock.now += 3.2
                raise error

        with pytest.raises(error):
            cut_short()
        assert shown_by(plain)[-1] == "loading weights ... stopped after 3.2 s"

    def test_a_progress_line_has_all_fields(self, plain: Display, clock: Clock) -> None:
        train(plain, clock, steps=90, step_s=6.0, until=2, tokens_per_s=100.2)
        assert shown_by(plain) == [
            "step 1/90  loss 3.0000  lr 2.00e-04  100 tokens/s  epoch 0.10  elapsed 0:06",
            "step 2/90  loss 2.5000  lr 2.00e-04  100 tokens/s  epoch 0.20  elapsed 0:12  eta 8:48",
        ]

    @pytest.mark.parametrize(
        ("steps", "step_s", "lines"),
        [
            (12, 1.0, [1, 6, 11, 12]),
            (3, 60.0, [1, 2, 3]),
            (1000, 0.001, [1, 1000]),
            (1, 1.0, [1]),
        ],
    )
    def test_progress_has_its_first_its_last_and_one_line_every_five_seconds(
        self,
        steps: int,
        step_s: float,
        lines: list[int],
        plain: Display,
        clock: Clock,
        tmp_path: Path,
    ) -> None:
        train(plain, clock, steps, step_s)
        assert [
            int(re.match(r"step ([\d,]+)/", line)[1].replace(",", ""))  # type: ignore[index]
            for line in shown_by(plain)
        ] == lines
        assert log_of(tmp_path) == shown_by(plain)

    def test_the_last_step_has_its_line_when_training_stops_early(
        self, plain: Display, clock: Clock
    ) -> None:
        train(plain, clock, steps=100, step_s=1.0, until=4)
        assert [line.split()[1] for line in shown_by(plain)] == ["1/100", "4/100"]

    def test_values_that_are_not_known_are_left_out(self, plain: Display) -> None:
        with plain.training(10) as training:
            training.step(1, None, None, None, 0.1)
            training.step(10, float("nan"), 0.0, 5.0, 1.0)
        assert shown_by(plain) == [
            "step 1/10  epoch 0.10  elapsed 0:00",
            "step 10/10  loss nan  lr 0.00e+00  5 tokens/s  epoch 1.00  elapsed 0:00",
        ]

    def test_the_time_left_follows_from_the_steps_of_this_run(
        self, plain: Display, clock: Clock
    ) -> None:
        with plain.training(total_steps=110, start_step=100) as training:
            clock.now += 60
            training.step(101, 1.0, 1e-4, 1.0, 1.0)
            clock.now += 10
            training.step(102, 1.0, 1e-4, 1.0, 1.0)
        assert shown_by(plain)[1].endswith("elapsed 1:10  eta 1:20")

    def test_training_without_a_step_has_no_line(self, plain: Display) -> None:
        with plain.training(0):
            pass
        assert shown_by(plain) == []

    def test_a_table_is_shown_as_text(self, plain: Display, tmp_path: Path) -> None:
        table = Table.grid(padding=(0, 2))
        table.add_row("loss", "[bold]1.2")
        plain.show(table)
        assert shown_by(plain) == log_of(tmp_path) == ["loss  1.2"]

    @pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"])
    def test_no_escape_sequence_is_ever_written(
        self, variable: str, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(variable, "1")
        stream = io.StringIO()
        with Display(tmp_path, stream=stream, clock=clock) as display:
            display.message("answer: \x1b[31mred\x1b[0m\x07")
            display.warning("odd")
            with display.phase("loading") as phase:
                phase.advance(1, 2)
            train(display, clock, 3, 1.0)
        assert "\x1b" not in stream.getvalue()
        assert "\x1b" not in (tmp_path / "run.log").read_text()
        assert stream.getvalue().startswith("answer: red\n")

    def test_a_dumb_terminal_gets_plain_lines(
        self, clock: Clock, terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TERM", "dumb")
        with Display(tmp_path, stream=terminal, clock=clock) as display:
            train(display, clock, 3, 1.0)
        assert "\x1b" not in terminal.getvalue()
        assert terminal.screen[0].startswith("step 1/3")

    def test_characters_the_stream_does_not_know_are_replaced(
        self, clock: Clock, tmp_path: Path
    ) -> None:
        stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        with Display(tmp_path, stream=stream, clock=clock) as display:
            display.message("Zürich \ud800")
        assert stream.buffer.getvalue() == b"Z?rich ?\n"
        assert "Zürich ?" in (tmp_path / "run.log").read_text()


class TestTerminal:
    """A person looking on."""

    def test_the_bar_shows_progress_and_stays_below_what_is_printed(
        self, live: Display, clock: Clock, terminal: Terminal
    ) -> None:
        with live.training(20) as training:
            for step in range(1, 11):
                clock.now += 1
                training.step(step, 2.0, 2e-4, 12_345.6, step / 10)
            live.message("validation: loss 1.2345")
            assert terminal.screen[0] == "validation: loss 1.2345"
            assert re.fullmatch(
                r"step 10/20  ━+[╸╺]?━+  loss 2.0000  lr 2.00e-04  12,346 tokens/s  0:10  eta 0:10",
                terminal.screen[1],
            )
            live.message("answer: Paris")
            assert terminal.screen[:2] == ["validation: loss 1.2345", "answer: Paris"]
            assert terminal.screen[2].startswith("step 10/20")

    def test_the_last_state_of_the_bar_remains(
        self, live: Display, clock: Clock, terminal: Terminal
    ) -> None:
        train(live, clock, steps=20, step_s=1.0)
        live.message("done")
        (bar, message, *rest) = terminal.screen
        assert re.match(r"step 20/20  ━+  loss 2.0500 .* 0:20$", bar)
        assert message == "done"
        assert not any(rest)

    def test_the_bar_remains_where_training_was_interrupted(
        self, live: Display, clock: Clock, terminal: Terminal
    ) -> None:
        def interrupted() -> None:
            with live.training(20) as training:
                training.step(7, 2.0, 2e-4, 1.0, 0.7)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert [line[:9] for line in terminal.screen if line] == ["step 7/20"]

    def test_the_bar_shows_the_smoothed_loss_and_at_the_end_the_last(
        self, live: Display, terminal: Terminal
    ) -> None:
        with live.training(9) as training:
            training.step(1, 4.0, None, None, 0.1)
            training.step(2, 2.0, None, None, 0.2)
            live.message("now")
            # (0.09 * 4 + 0.1 * 2) / (0.09 + 0.1)
            assert "loss 2.9474" in terminal.screen[1]
        assert "loss 2.0000" in terminal.screen[1]

    def test_a_loss_of_nan_shows_and_does_not_stay(self, live: Display, terminal: Terminal) -> None:
        with live.training(9) as training:
            for step, loss in enumerate((2.0, float("nan"), 2.0), start=1):
                training.step(step, loss, None, None, 0.1)
                live.message("now")
                expected = "loss nan" if step == 2 else "loss 2.0000"
                assert expected in terminal.screen[step]

    def test_a_phase_is_a_spinner_and_then_one_line(
        self, live: Display, clock: Clock, terminal: Terminal
    ) -> None:
        with live.phase("loading weights") as phase:
            clock.now += 1.5
            phase.advance(1, 4)
            live.message("reading 3 files")
            assert terminal.screen[0] == "reading 3 files"
            assert re.fullmatch(r"\S loading weights 25 % 1.5 s", terminal.screen[1])
            clock.now += 2
        assert [line for line in terminal.screen if line] == [
            "reading 3 files",
            "loading weights ... 3.5 s",
        ]

    def test_a_phase_within_training_shows_below_the_bar(
        self, live: Display, clock: Clock, terminal: Terminal
    ) -> None:
        with live.training(20) as training:
            training.step(1, 2.0, 2e-4, 1.0, 0.1)
            with live.phase("validation"):
                live.message("now")
                assert terminal.screen[1].startswith("step 1/20")
                assert "validation" in terminal.screen[2]
                clock.now += 2
            live.message("after")
            assert terminal.screen[:3] == ["now", "validation ... 2.0 s", "after"]
            assert terminal.screen[3].startswith("step 1/20")
            assert not any(terminal.screen[4:])

    @pytest.mark.parametrize("width", [1, 5, 12, 20, 30, 40, 50, 60, 80, 120, 250])
    def test_the_live_lines_fit_any_width(
        self, width: int, live: Display, clock: Clock, terminal: Terminal
    ) -> None:
        live._console.width = width
        with live.training(123_456) as training, live.phase("validation of the model") as phase:
            for step in (12_345, 12_346):
                training.step(step, 2.0, 2e-4, 12_345.6, 0.1)
                clock.now += 4000
            phase.advance(1, 3)
            live.message("x")
            assert all(len(line) <= width for line in terminal.screen)
            assert terminal.screen[1].startswith("step 12,346"[:width].rstrip())

    def test_a_narrow_terminal_keeps_what_matters_most(
        self, live: Display, clock: Clock, terminal: Terminal
    ) -> None:
        live._console.width = 40
        with live.training(20) as training:
            for step in (1, 2):
                clock.now += 1
                training.step(step, 2.0, 2e-4, 12_345.6, 0.1)
            live.message("x")
        assert re.match(r"step 2/20  \S+  loss 2.0000", terminal.screen[1])

    def test_without_colour_there_is_no_colour(
        self, clock: Clock, terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("NO_COLOR", "1")
        with Display(tmp_path, stream=terminal, clock=clock) as display:
            display.warning("odd")
            train(display, clock, 3, 1.0)
        codes = {
            code
            for codes in re.findall(r"\x1b\[([\d;]*)m", terminal.getvalue())
            for code in codes.split(";")
        }
        assert not {code for code in codes if code.startswith(("3", "9", "48")) and code != "3"}
        assert terminal.screen[0] == "warning: odd"

    def test_the_cursor_is_never_hidden(
        self, live: Display, clock: Clock, terminal: Terminal
    ) -> None:
        """A process that is killed could not bring it back."""
        train(live, clock, 3, 1.0)
        assert "\x1b[?25l" not in terminal.getvalue()

    def test_the_log_is_that_of_a_plain_run(
        self, live: Display, clock: Clock, tmp_path: Path
    ) -> None:
        plain_dir = tmp_path / "plain"
        with Display(plain_dir, stream=io.StringIO(), clock=clock, now=lambda: STAMP) as plain:
            for display in (live, plain):
                display.message("hello")
                display.warning("odd")
                with display.phase("loading") as phase:
                    clock.now += 6
                    phase.advance(1, 2)
                train(display, clock, 12, 1.0)
        assert log_of(tmp_path) == log_of(plain_dir)
        assert log_of(tmp_path)[-1] == shown_by(plain)[-1]

    def test_markup_in_a_message_is_text(self, live: Display, terminal: Terminal) -> None:
        live.message("[red]:smile:[/red] [")
        assert terminal.screen[0] == "[red]:smile:[/red] ["


class TestFailures:
    """Nothing that happens to the output stops the run."""

    def test_a_log_on_a_full_disk_warns_once(self, clock: Clock, tmp_path: Path) -> None:
        (tmp_path / "run.log").symlink_to("/dev/full")
        stream = io.StringIO()
        with Display(tmp_path, stream=stream, clock=clock) as display:
            display.message("one")
            train(display, clock, 3, 1.0)
            display.message("two")
        assert stream.getvalue().count("cannot be written (No space left on device)") == 1
        assert "two\n" in stream.getvalue()
        assert len(display.warnings) == 1

    def test_a_log_that_cannot_be_opened_warns_once(self, clock: Clock, tmp_path: Path) -> None:
        (tmp_path / "run.log").mkdir()
        stream = io.StringIO()
        with Display(tmp_path, stream=stream, clock=clock) as display:
            display.message("one")
        assert stream.getvalue().splitlines() == [
            f"warning: {tmp_path}/run.log cannot be written (Is a directory); the run continues",
            "one",
        ]

    def test_lines_go_to_the_end_of_an_older_log(
        self, plain: Display, tmp_path: Path, clock: Clock
    ) -> None:
        plain.message("first")
        with Display(tmp_path, stream=io.StringIO(), clock=clock, now=lambda: STAMP) as second:
            second.message("second")
        assert log_of(tmp_path) == ["first", "second"]

    def test_a_terminal_that_went_away_is_noted_in_the_log(
        self, clock: Clock, tmp_path: Path
    ) -> None:
        class Gone(Terminal):
            def write(self, text: Any) -> None:  # type: ignore[override]
                raise OSError(errno.EIO, "Input/output error")

        with Display(tmp_path, stream=Gone(), clock=clock, now=lambda: STAMP) as display:
            train(display, clock, 3, 1.0)
            display.message("two")
        log = log_of(tmp_path)
        assert log.count("warning: no output can be shown any more (Input/output error)") == 1
        assert log[-1] == "two"

    def test_a_reader_that_closed_the_pipe_does_not_end_the_process(self, tmp_path: Path) -> None:
        script = f"""
            import sys
            from pathlib import Path
            from ftkit.utils.console.display import Display
            with Display(Path({str(tmp_path)!r})) as display:
                display.message("one")
                sys.stdin.read()
                display.message("two")
                print("three")
                display.message("four")
        """
        process = start(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"one\n"
        process.stdout.close()
        process.stdin.close()
        errors = process.stderr.read()
        assert process.wait(timeout=60) == 0, errors
        assert errors == b""
        log = (tmp_path / "run.log").read_text()
        assert says(log, "Broken pipe")
        assert log.endswith(" four\n")


class TestPseudoTerminal:
    """A real process on a real (pseudo) terminal."""

    def test_bar_messages_and_stray_prints_share_the_terminal(self, tmp_path: Path) -> None:
        code, output = on_terminal(f"""
            import sys
            from pathlib import Path
            from ftkit.utils.console.display import Display
            with Display(Path({str(tmp_path)!r})) as display:
                with display.phase("loading weights"):
                    pass
                with display.training(5) as training:
                    for step in range(1, 6):
                        training.step(step, 2.0, 2e-4, 100.0, step / 5)
                        print("stray", step)
                        print("stray error", step, file=sys.stderr)
                display.message("done")
        """)
        assert code == 0
        assert "━" in output
        lines = [line for line in screen_of(output) if line]
        assert lines[0].startswith("loading weights ... ")
        assert lines[1:11] == [f"stray{kind} {n}" for n in range(1, 6) for kind in ("", " error")]
        assert lines[11].startswith("step 5/5  ━")
        assert lines[12:] == ["done"]
        assert "\x1b" not in (tmp_path / "run.log").read_text()

    def test_a_forked_process_can_print_while_the_console_is_locked(self, tmp_path: Path) -> None:
        """Processes that load data are forked, perhaps while the bar is being drawn."""
        code, output = on_terminal(f"""
            import os, threading
            from pathlib import Path
            from ftkit.utils.console.display import Display
            with Display(Path({str(tmp_path)!r})) as display, display.training(5):
                locked, forked = threading.Event(), threading.Event()
                def draw():
                    with display._console._lock:
                        locked.set()
                        forked.wait()
                threading.Thread(target=draw).start()
                locked.wait()
                child = os.fork()
                if child == 0:
                    print("from the child", flush=True)
                    os._exit(7)
                forked.set()
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        """)
        assert code == 0, output
        assert "from the child" in output


def start(script: str, **streams: object) -> subprocess.Popen[bytes]:
    """A Python process that runs the script from the root of the repository."""
    return subprocess.Popen(  # type: ignore[call-overload]
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
        **{"stderr": subprocess.PIPE, **streams},
    )


def on_terminal(script: str) -> tuple[int, str]:
    """Exit code and output of a process on a pseudo terminal of 80 columns."""
    terminal, process_side = pty.openpty()
    process = start(script, stdin=process_side, stdout=process_side, stderr=process_side)
    os.close(process_side)
    too_long = threading.Timer(60, os.killpg, (process.pid, signal.SIGKILL))
    too_long.start()
    output = b""
    with os.fdopen(terminal, "rb", buffering=0) as file, contextlib.suppress(OSError):
        while chunk := file.read(65536):  # ends with EIO when the last process has ended
            output += chunk
    code = process.wait()
    too_long.cancel()
    return code, output.decode()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (7.4, "0:07"),
        (59.6, "1:00"),
        (754, "12:34"),
        (3753, "1:02:33"),
        (90000, "25:00:00"),
    ],
)
def test_times_on_the_bar(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text


def test_a_console_is_as_wide_as_its_stream_whatever_standard_input_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank draws on a descriptor that it was given: 0 to 2 are no terminal there."""
    monkeypatch.delenv("COLUMNS", raising=False)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 57, 0, 0))
    with os.fdopen(theirs, "w") as stream:
        console = terminal_of(stream)
        assert console is not None and console.width == 57
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 203, 0, 0))
        assert console.width == 203
    os.close(ours)


def test_a_sentence_breaks_between_words_on_a_terminal_and_nowhere_on_a_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = "\nftkit: stopping after the current step (Ctrl+C again stops at once)"
    assert fitted(text, io.StringIO()) == text
    assert says(fitted(text, Terminal()), "stopping after the current step ... Ctrl+C")


def test_slow_loading_of_libraries_is_shown_only_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "LATE_S", 0.01)
    pipe, terminal = io.StringIO(), Terminal()
    for stream in (pipe, terminal):
        with progress.loading_shown(stream):
            deadline = time.monotonic() + 10
            while stream is terminal and not terminal.getvalue():
                assert time.monotonic() < deadline
            before = stream.getvalue()
    assert (pipe.getvalue(), before) == ("", "loading libraries ...")
    assert terminal.getvalue() == "loading libraries ...\r\x1b[K"
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    with progress.loading_shown(terminal):
        while not terminal.getvalue():
            assert time.monotonic() < deadline
    assert terminal.getvalue() == "loading libraries ...\n", "a line that is not erased"


def test_a_slow_phase_without_a_live_line_is_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "LATE_S", 0.01)
    stream = io.StringIO()
    with Display(None, stream=stream) as display, display.phase("merging", brief=True):
        deadline = time.monotonic() + 10
        while not stream.getvalue():
            assert time.monotonic() < deadline
    assert stream.getvalue() == "merging ...\n"
