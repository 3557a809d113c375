"""Progress lines: a phase with its spinner, training with its bar and the time left.

Each is a renderable of rich for a terminal, and writes the same as plain lines now and then.
"""

import math
from collections.abc import Callable

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from ftkit.utils.console.formatting import clock_text, duration_text, loss_text, number_text

LINE_INTERVAL_S = 5.0
"""Seconds between two progress lines where there is no live line."""


class Phase:
    """Something that takes time, on its way; made by Display.phase."""

    def __init__(
        self, title: str, *, write: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        """Begin.

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
        """Whether it takes so long that it is worth a line."""
        return self.elapsed_s >= LINE_INTERVAL_S

    def announce(self) -> None:
        """Show that it goes on, where there is no live line."""
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
        done = "" if self._fraction is None else f"{self._fraction:.0%} ".replace("%", " %")
        return done + duration_text(self.elapsed_s)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._spinner is None:
            self._spinner = Spinner("line" if options.ascii_only else "dots", style="green")
        frame = self._spinner.render(console.get_time())
        assert isinstance(frame, Text)
        line = Text.assemble(frame, " ", self._title, " ")
        line.append(self._state, "dim")
        line.truncate(options.max_width, overflow="ellipsis")
        line.no_wrap = True
        yield line


class TrainingProgress:
    """Training on its way; made by Display.training."""

    def __init__(
        self,
        total_steps: int,
        start_step: int,
        *,
        write: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """Begin.

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
        self._loss = _Smoothed()
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
        self._first = self._first or (step, now)
        smooth = self._loss.add(loss)
        self._fields = {
            "smooth_loss": "" if smooth is None else f"loss {loss_text(smooth)}",
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
        if self._line and self._line[0] != self._step:
            self._write_line(self._end)

    def _write_line(self, now: float) -> None:
        self._line = (self._step, now)
        fields = {"step": self._step_text(), **self._fields}
        fields |= {
            "elapsed": f"elapsed {clock_text(now - self._start)}",
            "eta": self._eta_text(now),
        }
        parts = [text for name, text in fields.items() if text and name != "smooth_loss"]
        self._write("  ".join(parts))

    def _step_text(self) -> str:
        return f"step {self._step:,}/{self._total_steps:,}"

    def _eta_text(self, now: float) -> str:
        """Time left at the mean speed since the first step, which itself is often slow."""
        ended = self._end is not None or self._step >= self._total_steps
        if ended or not self._first or self._step == self._first[0]:
            return ""
        first_step, first_time = self._first
        step_s = (self._last_time - first_time) / (self._step - first_step)
        left_s = step_s * (self._total_steps - self._step) - (now - self._last_time)
        return f"eta {clock_text(max(left_s, 0))}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """One line: as much of the progress, in the order of its worth, as the width can hold."""
        now = self._clock() if self._end is None else self._end
        elapsed, eta = clock_text(now - self._start), self._eta_text(now)
        texts = {
            "step": self._step_text(),
            "loss": self._fields.get("smooth_loss" if self._end is None else "loss", ""),
            "lr": self._fields.get("lr", ""),
            "speed": self._fields.get("speed", ""),
            "elapsed": elapsed,
            "eta": eta,
        }
        space = options.max_width - len(texts["step"])
        chosen = {"step"}
        for name in ("loss", "bar", "eta", "speed", "elapsed", "lr"):
            width = _MIN_BAR if name == "bar" else len(texts[name])
            if width and width + _GAP <= space:
                chosen.add(name)
                space -= width + _GAP
        line = Table.grid(padding=(0, _GAP))
        cells: list[RenderableType] = []
        for name in ("step", "bar", "loss", "lr", "speed", "elapsed", "eta"):
            if name not in chosen:
                continue
            line.add_column(no_wrap=True, overflow="crop")
            if name == "bar":
                width = min(_MIN_BAR + space, _MAX_BAR)
                total = max(self._total_steps, 1)
                cells.append(ProgressBar(total=total, completed=self._step, width=width))
            else:
                cells.append(Text(texts[name], _STYLES.get(name, "")))
        line.add_row(*cells)
        yield line


_GAP = 2
_MIN_BAR = 8
_MAX_BAR = 40
_STYLES = {"step": "bold", "loss": "cyan", "lr": "dim", "elapsed": "dim"}


class _Smoothed:
    """Exponential mean over about ten values, without the pull to zero at the start."""

    _KEPT = 0.9

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, value: float | None) -> float | None:
        """The mean with this value in it; a value that is no finite number stands for itself."""
        if value is None or not math.isfinite(value):
            return value
        self._sum = self._KEPT * self._sum + (1 - self._KEPT) * value
        self._weight = self._KEPT * self._weight + 1 - self._KEPT
        return self._sum / self._weight
