"""The progress display of a run: a live line on a terminal, plain lines anywhere else.

The same plain lines, each with its time, always go to ``run.log``. Neither a full disk nor a closed
terminal stops the training. With --quiet only warnings and results are shown.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from ftkit.redaction import shown
from ftkit.utils.console.formatting import (
    clock_text,
    duration_text,
    loss_text,
    number_text,
    utc_now,
)
from ftkit.utils.console.terminal import LastingStream, plain_text, print_directly, terminal_of
from ftkit.utils.progress import announced_if_late, is_quiet

LOG_NAME = "run.log"
LINE_INTERVAL_S = 5.0
"""Seconds between two progress lines where there is no live line."""
_GAP = 2
"""Spaces between the fields of a progress line."""
# Characters; below the least the bar is left out.
_MIN_BAR, _MAX_BAR = 8, 40
_BY_WORTH = ("loss", "bar", "eta", "speed", "elapsed", "lr")
"""Fields that a live line shows beside the step, as far as the width allows."""
_STYLES = {"step": "bold", "loss": "cyan", "lr": "dim", "elapsed": "dim"}
_SMOOTHING = 0.9
"""Weight of the mean so far in the smoothed loss: a mean over about ten steps."""


class Phase:
    """One phase of a run, in progress; made by Display.phase."""

    def __init__(
        self, title: str, *, write: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        """Start the clock.

        Args:
            title: what is being done.
            write: takes a plain line of progress.
            clock: seconds.
        """
        self.start_line = f"{title} ..."
        self._title = title
        self._write_line, self._clock = write, clock
        self._start = self._last_line = clock()
        self._fraction: float | None = None
        self._spinner: Spinner | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the phase began."""
        return self._clock() - self._start

    @property
    def is_long(self) -> bool:
        """True if the phase has taken long enough to be worth a line."""
        return self.elapsed_s >= LINE_INTERVAL_S

    def announce(self) -> None:
        """Write that the phase is under way, where there is no live line."""
        self._write_line(self.start_line)

    def advance(self, done: float, total: float) -> None:
        """Show how much is done, in any unit."""
        self._fraction = min(done / total, 1.0) if total > 0 else None
        now = self._clock()
        if now - self._last_line >= LINE_INTERVAL_S:
            self._last_line = now
            self._write_line(f"{self.start_line} {self._state}")

    @property
    def _state(self) -> str:
        done = "" if self._fraction is None else f"{round(self._fraction * 100)} % "
        return done + duration_text(self.elapsed_s)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._spinner is None:
            self._spinner = Spinner("line" if options.ascii_only else "dots", style="green")
        frame = self._spinner.render(console.get_time())
        assert isinstance(frame, Text)
        line = Text.assemble(frame, " ", self._title, " ", (self._state, "dim"))
        line.truncate(options.max_width, overflow="ellipsis")
        line.no_wrap = True
        yield line


class TrainingProgress:
    """Training in progress; made by Display.training."""

    def __init__(
        self,
        total_steps: int,
        start_step: int,
        *,
        write: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """Start the clock.

        Args:
            total_steps: the step at which training is done.
            start_step: steps done before, in an earlier run.
            write: takes a plain line of progress.
            clock: seconds.
        """
        self._write, self._clock = write, clock
        self._total_steps = total_steps
        self._step = start_step
        self._start = self._last_time = clock()
        self._end: float | None = None
        self._first: tuple[int, float] | None = None
        self._line: tuple[int, float] | None = None
        self._loss_sum = self._loss_weight = 0.0
        self._smooth_loss = ""
        self._fields: dict[str, str] = {}

    def step(
        self,
        step: int,
        loss: float | None,
        lr: float | None,
        tokens_per_s: float | None,
        epoch: float,
    ) -> None:
        """Show a step that is done.

        Args:
            step: steps done, this one included.
            loss: of this step, in nats.
            lr: learning rate of this step.
            tokens_per_s: real tokens per second.
            epoch: epochs done, with a fraction.
        """
        now = self._clock()
        self._step, self._last_time = step, now
        # The speed counts from the end of the first step: see `_eta_text`.
        self._first = self._first or (step, now)
        smooth = self._smoothed(loss)
        self._smooth_loss = "" if smooth is None else f"loss {loss_text(smooth)}"
        self._fields = {
            "loss": "" if loss is None else f"loss {loss_text(loss)}",
            "lr": "" if lr is None else f"lr {lr:.2e}",
            "speed": "" if tokens_per_s is None else f"{number_text(tokens_per_s)} tokens/s",
            "epoch": f"epoch {epoch:.2f}",
        }
        due = self._line is None or now - self._line[1] >= LINE_INTERVAL_S
        if due or step == self._total_steps:
            self._write_line(now)

    def finish(self) -> None:
        """Stop the clock, and write the line of the last step if it is not there yet."""
        self._end = self._clock()
        # Without a line no step was done in this session.
        if self._line and self._line[0] != self._step:
            self._write_line(self._end)

    def _smoothed(self, loss: float | None) -> float | None:
        """Exponential mean without bias to zero at the start; NaN is shown but not averaged."""
        if loss is None or not math.isfinite(loss):
            return loss
        self._loss_sum = _SMOOTHING * self._loss_sum + (1 - _SMOOTHING) * loss
        self._loss_weight = _SMOOTHING * self._loss_weight + 1 - _SMOOTHING
        return self._loss_sum / self._loss_weight

    def _write_line(self, now: float) -> None:
        self._line = (self._step, now)
        elapsed = f"elapsed {clock_text(now - self._start)}"
        texts = (self._step_text(), *self._fields.values(), elapsed, self._eta_text(now))
        self._write((" " * _GAP).join(filter(None, texts)))

    def _step_text(self) -> str:
        return f"step {self._step:,}/{self._total_steps:,}"

    def _eta_text(self, now: float) -> str:
        """Time left at the mean speed since the first step, which is excluded: it is often slow."""
        ended = self._end is not None or self._step >= self._total_steps
        if ended or not self._first or self._step == self._first[0]:
            return ""
        first_step, first_time = self._first
        step_s = (self._last_time - first_time) / (self._step - first_step)
        # Counted down during a step, too; rich's own time left stands still, and is unknown where a
        # step takes more than 30 s.
        left_s = step_s * (self._total_steps - self._step) - (now - self._last_time)
        return f"eta {clock_text(max(left_s, 0))}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # Not rich's Progress: on a narrow terminal that cuts off what stands last. Here the
        # fields that matter least are left out, and the others stay whole.
        now = self._clock() if self._end is None else self._end
        texts = {
            "step": self._step_text(),
            "bar": " " * _MIN_BAR,
            "loss": self._smooth_loss if self._end is None else self._fields.get("loss", ""),
            "lr": self._fields.get("lr", ""),
            "speed": self._fields.get("speed", ""),
            "elapsed": clock_text(now - self._start),
            "eta": self._eta_text(now),
        }
        # The step always stays; other fields take the rest of the width by their worth.
        space = options.max_width - len(texts["step"])
        chosen = {"step"}
        for name in _BY_WORTH:
            if texts[name] and len(texts[name]) + _GAP <= space:
                chosen.add(name)
                space -= len(texts[name]) + _GAP
        line = Table.grid(padding=(0, _GAP))
        cells: list[RenderableType] = []
        # Shown in the order of `texts`, not of their worth.
        for name in (name for name in texts if name in chosen):
            line.add_column(no_wrap=True, overflow="crop")
            if name == "bar":
                width = min(_MIN_BAR + space, _MAX_BAR)
                total = max(self._total_steps, 1)
                cells.append(ProgressBar(total=total, completed=self._step, width=width))
            else:
                cells.append(Text(texts[name], _STYLES.get(name, "")))
        line.add_row(*cells)
        yield line


class Display:
    """Messages, phases and training progress, shown by the process of rank 0.

    Everything is also appended to ``out_dir/run.log``.
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
            stream: shown to the user; default: standard output.
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
            # Workers that load data are forked while rich redirects the streams.
            os.register_at_fork(after_in_child=print_directly)
        self._live: Live | None = None
        self._shown: list[Phase | TrainingProgress] = []
        self._log: LastingStream | None = None
        self._has_log = out_dir is not None
        if out_dir is None:
            return
        self._log_path = out_dir / LOG_NAME
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
            # Line by line, so that a kill loses nothing that was shown.
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
        self._write(shown(text), is_shown=not self._is_quiet)

    def warning(self, text: str) -> None:
        """Show a warning on one line, the first time it is given."""
        text = " ".join(shown(text).split())
        if text not in self._warnings:
            self._warnings.append(text)
            self._write(f"warning: {text}", style="yellow")

    def show_text(self, text: str) -> None:
        """Show a text that is a result, of one line or several, so that it can be copied."""
        # The terminal wraps it and not rich, so that a long line is copied as one.
        self._write(shown(text), wraps=False)

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
        """Show a phase while it takes time, and at its end how long it took.

        Args:
            title: what is being done.
            brief: leave no line behind, unless it takes long or is cut short. Without a live line
                and a log, one line says after a while that it is still running.
        """
        phase = Phase(shown(title), write=self._write_progress, clock=self._clock)
        if not brief:
            self._log_lines(phase.start_line)
        verb = "stopped after "
        try:
            # Without a live line and a log a brief phase shows nothing, however long it takes.
            mute = brief and not (self._console or self._log or self._is_quiet)
            with self._showing(phase), announced_if_late(phase.announce) if mute else nullcontext():
                yield phase
            verb = ""
        finally:
            # `verb` is empty only if the block was left without an exception.
            if verb or not brief or phase.is_long:
                text = f"{phase.start_line} {verb}{duration_text(phase.elapsed_s)}"
                self._write(text, is_shown=not self._is_quiet)

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
                # The live line is erased at its end; this one stays.
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
                # Phases that are nested deeper than the terminal is high are cut, not scrolled.
                vertical_overflow="crop",
                # A rank draws on a descriptor of its own, and its standard streams are pipes:
                # rich would send what libraries print there to the terminal.
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

    def _write(
        self, text: str, *, is_shown: bool = True, style: str = "", wraps: bool = True
    ) -> None:
        """Write lines to the log and to the terminal or stream."""
        self._log_lines(text)
        if is_shown and self._console:
            self._console.print(Text(text, style), soft_wrap=not wraps)
        elif is_shown:
            self._stream.write(text + "\n")

    def _write_progress(self, text: str) -> None:
        self._write(text, is_shown=not (self._console or self._is_quiet))

    def _log_lines(self, text: str) -> None:
        if self._log:
            now = self._now()
            self._log.write("".join(f"{now} {line}\n" for line in text.splitlines()))

    def _on_log_failure(self, error: OSError) -> None:
        self.warning(f"{self._log_path} cannot be written ({error.strerror}); the run continues")

    def _on_stream_failure(self, error: OSError) -> None:
        # Further writes would fail as well, up to the flush when Python exits. What no log has is
        # a result: the flush then tells that it is lost.
        if self._has_log or isinstance(error, BrokenPipeError):
            self._stream.discard()
        self._log_lines(f"warning: no output can be shown any more ({error.strerror})")
