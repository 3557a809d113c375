"""The progress display of a run: a live line on a terminal, plain lines anywhere else.

The same plain lines, with the time before each, always go to ``run.log``. Neither a full disk nor
a terminal that has gone away stops the training. With --quiet warnings and results alone are shown.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from ftkit.redaction import redacted
from ftkit.utils.console.formatting import duration_text, printable, utc_now
from ftkit.utils.console.progress import Phase, TrainingProgress
from ftkit.utils.console.terminal import LastingStream, plain_text, print_directly, terminal_of
from ftkit.utils.progress import is_quiet, told_if_late

LOG_NAME = "run.log"


class Display:
    """Shows messages, phases and training progress; used by the process of rank 0.

    Everything also goes to ``out_dir/run.log``, at its end if it exists already.
    """

    def __init__(
        self,
        out_dir: Path | None,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], str] = utc_now,
    ) -> None:
        """Open the log.

        Args:
            out_dir: the run's directory; None: keep no log.
            stream: where a person looks; default: standard output.
            clock: seconds, for durations.
            now: the time stamp of a log line.
        """
        self._clock = clock
        self._now = now
        self._warnings: list[str] = []
        self._is_quiet = is_quiet()
        self._stream = LastingStream(stream or sys.stdout, self._on_stream_failure)
        self._console = terminal_of(self._stream)
        if self._console:
            os.register_at_fork(after_in_child=print_directly)
        self._live: Live | None = None
        self._shown: list[Phase | TrainingProgress] = []
        self._log: LastingStream | None = None
        if out_dir is None:
            return
        self._log_path = out_dir / LOG_NAME
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
            file = self._log_path.open("a", encoding="utf-8", buffering=1)
            self._log = LastingStream(file, self._on_log_failure)
        except OSError as error:
            self._on_log_failure(error)

    def __enter__(self) -> "Display":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()
            self._live = None
        if self._log:
            self._log.close()
            self._log = None

    @property
    def warnings(self) -> list[str]:
        """Every distinct warning so far, in order."""
        return list(self._warnings)

    def message(self, text: str) -> None:
        """Show a text, of one line or several."""
        self._tell(redacted(printable(text)))

    def warning(self, text: str) -> None:
        """Show a warning on one line, the first time it is given."""
        text = " ".join(redacted(printable(text)).split())
        if text not in self._warnings:
            self._warnings.append(text)
            self._write(f"warning: {text}", style="yellow")

    def show_text(self, text: str) -> None:
        """Show a text that is a result, of one line or several, so that it can be copied."""
        self._write(redacted(printable(text)), wraps=False)

    def notice(self, renderable: RenderableType) -> None:
        """Show a table or another rich renderable that --quiet leaves out."""
        if self._is_quiet:
            self._log_lines(plain_text(renderable))
        else:
            self.show(renderable)

    def show(self, renderable: RenderableType) -> None:
        """Show a table or another rich renderable: a result."""
        plain = plain_text(renderable)
        self._log_lines(plain)
        if self._console:
            self._console.print(renderable)
        else:
            self._stream.write(plain + "\n")

    @contextmanager
    def phase(self, title: str, *, brief: bool = False) -> Iterator[Phase]:
        """Show that something takes time, and at the end how long it took.

        Args:
            title: what is being done.
            brief: leave no line behind, unless it takes long or is cut short. Where there is
                neither a live line nor a log, one line says after a while that it goes on.
        """
        phase = Phase(redacted(printable(title)), write=self._write_progress, clock=self._clock)
        if not brief:
            self._log_lines(phase.start_line)
        verb = "stopped after "
        try:
            mute = brief and not (self._console or self._log or self._is_quiet)
            with self._showing(phase), told_if_late(phase.announce) if mute else nullcontext():
                yield phase
            verb = ""
        finally:
            if verb or not brief or phase.is_long:
                self._tell(f"{phase.start_line} {verb}{duration_text(phase.elapsed_s)}")

    @contextmanager
    def training(self, total_steps: int, start_step: int = 0) -> Iterator[TrainingProgress]:
        """Show the progress of training.

        Args:
            total_steps: the step at which training is done.
            start_step: steps done before, in an earlier run.
        """
        training = TrainingProgress(
            total_steps, start_step, write=self._write_progress, clock=self._clock
        )
        try:
            with self._showing(training):
                yield training
        finally:
            training.finish()
            if self._console and not self._is_quiet:
                self._console.print(training)

    @contextmanager
    def _showing(self, item: Phase | TrainingProgress) -> Iterator[None]:
        """Keep the item on the terminal, below all that is printed meanwhile."""
        if not self._console or self._is_quiet:
            yield
            return
        self._shown.append(item)
        if not self._live:
            self._live = Live(
                console=self._console,
                get_renderable=lambda: Group(*self._shown),
                transient=True,
                vertical_overflow="crop",
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start()
        self._live.refresh()
        try:
            yield
        finally:
            if len(self._shown) == 1:
                self._live.stop()
                self._live = None
            self._shown.remove(item)
            if self._live:
                self._live.refresh()

    def _tell(self, text: str) -> None:
        """Write lines to the log, and to the person looking if they want to know all."""
        if self._is_quiet:
            self._log_lines(text)
        else:
            self._write(text)

    def _write(self, text: str, *, style: str = "", wraps: bool = True) -> None:
        """Write lines to the log, and to the person looking.

        Args:
            text: of one line or several.
            style: on a terminal.
            wraps: between words; else the terminal does, and a copied line is whole.
        """
        self._log_lines(text)
        if self._console:
            self._console.print(Text(text, style), soft_wrap=not wraps)
        else:
            self._stream.write(text + "\n")

    def _write_progress(self, text: str) -> None:
        """Write lines to the log, and to the person looking if there is no live line."""
        self._log_lines(text)
        if not self._console and not self._is_quiet:
            self._stream.write(text + "\n")

    def _log_lines(self, text: str) -> None:
        if self._log:
            now = self._now()
            self._log.write("".join(f"{now} {line}\n" for line in text.splitlines()))

    def _on_log_failure(self, error: OSError) -> None:
        self.warning(f"{self._log_path} cannot be written ({error.strerror}); the run goes on")

    def _on_stream_failure(self, error: OSError) -> None:
        self._stream.discard()
        self._log_lines(f"warning: no output can be shown any more ({error.strerror})")
