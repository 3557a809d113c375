"""`ftkit watch`: a live view of a run from another terminal, read from its files alone."""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ftkit.extensions.watch.commands import WatchOptions
from ftkit.recipe.adapter_types import method_text
from ftkit.redaction import shown
from ftkit.runs.checkpoints import entry_of
from ftkit.runs.directory import RunDirectory
from ftkit.runs.lock import is_at_work_here
from ftkit.runs.report import numbers
from ftkit.runs.report.metrics import (
    METRICS_COLUMNS,
    SYSTEM_COLUMNS,
    VALIDATION_COLUMNS,
    Row,
    RowsReader,
    loss_columns,
)
from ftkit.runs.report.report import Progress, Report, Resolved
from ftkit.runs.report.table import STYLE_OF_OUTCOME, memory_text
from ftkit.runs.state import RunState, StateName, look
from ftkit.runs.url_runs import RunCopy, url_runs
from ftkit.utils.console.display import Display
from ftkit.utils.console.formatting import (
    age_text,
    clock_text,
    duration_text,
    from_to_text,
    loss_text,
    number_text,
    parse_duration,
    percent_text,
)
from ftkit.utils.console.html import bar, block, curve_picture, escaped, labelled, styled
from ftkit.utils.console.terminal import labelled_grid, terminal_of
from ftkit.utils.finite_numbers import finite
from ftkit.utils.process import Interrupts
from ftkit.utils.progress import print_shown
from ftkit.utils.urls import display_path, url_of

_RECENT_STEPS = 20
"""Number of last steps over which the current speed is averaged."""
_SILENT_S = 30.0
"""Least time without a step of training that the view mentions."""
_CURVE_LINES = 8
_PICTURE_POINTS = 240
_MOST_WIDTH = 100
"""Most columns of a curve: with eight lines, wider ones show nothing more."""


@dataclass(frozen=True, kw_only=True)
class RunSnapshot:
    """State, rows and newest checkpoint of a run at one moment."""

    run: RunState
    """Its state and report."""
    rows: list[Row]
    """Rows of metrics.csv."""
    validations: list[Row]
    """Rows of validation.csv."""
    samples: list[Row]
    """Rows of system.csv."""
    checkpoint_step: int | None
    """Step of the newest complete checkpoint."""
    checkpoint_age_s: float | None
    """Time since it was written."""
    elapsed_s: float | None
    """Time since the command started; of a run that has ended, until its end."""
    silent_s: float | None
    """Time since the last row of metrics.csv."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        noted = (self.report.progress or Progress()).steps if self.report else 0
        # Each step has a row; the report is written every few seconds.
        return int(self.rows[-1]["step"] or 0) if self.rows else noted

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run."""
        return self.resolved.total_steps

    @property
    def report(self) -> Report | None:
        """Report of the run, as far as there is one."""
        return self.run.report

    @property
    def resolved(self) -> Resolved:
        """Resolved values of the recipe, as far as they are known."""
        return (self.report and self.report.resolved) or Resolved()

    @property
    def epoch(self) -> float | None:
        """Epochs done, as a fraction."""
        samples = self.rows[-1]["samples"] if self.rows else None
        per_epoch = self.resolved.samples_per_epoch
        if samples is not None and per_epoch:
            return samples / per_epoch
        return self.report.progress.epochs if self.report and self.report.progress else None

    @property
    def tokens_per_s(self) -> float | None:
        """Mean speed of the last steps."""
        tokens, seconds = self._recent
        return tokens / seconds if seconds else None

    @property
    def step_s(self) -> float | None:
        """Mean duration of the last steps."""
        seconds = self._recent[1]
        return seconds / min(len(self.rows), _RECENT_STEPS) if seconds else None

    @property
    def left_s(self) -> float | None:
        """Time that the remaining steps take at the speed of the last ones."""
        # An ended run has no time left, even if steps are missing.
        if not self.run.at_work or self.total_steps is None or self.step_s is None:
            return None
        return self.step_s * max(self.total_steps - self.step, 0)

    @property
    def losses(self) -> list[float]:
        """Loss of every step, where it is finite."""
        losses = (row["loss"] for row in self.rows)
        return [loss for loss in losses if loss is not None and math.isfinite(loss)]

    @property
    def _recent(self) -> tuple[float, float]:
        """Tokens and seconds of the last steps."""
        pairs = [
            (tokens, seconds)
            for row in self.rows[-_RECENT_STEPS:]
            if (tokens := row["tokens"]) and (speed := row["tokens_per_s"])
            if (seconds := finite(tokens / speed)) is not None
        ]
        return sum(tokens for tokens, _ in pairs), sum(seconds for _, seconds in pairs)


class Watcher:
    """Reads the files of a run again and again, but only new rows of its logs."""

    def __init__(self, out_dir: Path, copy: RunCopy | None = None) -> None:
        """Read nothing yet; see `look`.

        Args:
            out_dir: of the run.
            copy: local copy to read instead, if out_dir stands for a url.
        """
        self._out_dir, self._copy = out_dir, copy
        self._directory = RunDirectory(out_dir if copy is None else copy.directory)
        self.rows = RowsReader(self._directory.metrics, METRICS_COLUMNS)
        self._validations = RowsReader(self._directory.validation, VALIDATION_COLUMNS)
        self._samples = RowsReader(self._directory.system, SYSTEM_COLUMNS, several_in_step=True)

    def look(self) -> RunSnapshot:
        """Return a snapshot of the run.

        Raises:
            UserError: the directory holds no run.
        """
        # The state is read before the rows, which are then complete if the run has ended.
        run = look(self._out_dir, self._copy)
        rows = self.rows.read_on()
        step, age_s = self._newest_checkpoint()
        return RunSnapshot(
            run=run,
            rows=rows,
            validations=self._validations.read_on(),
            samples=self._samples.read_on(),
            checkpoint_step=step,
            checkpoint_age_s=age_s,
            elapsed_s=_elapsed_s(run),
            # The time of a copy is that of its download.
            silent_s=_age_s(self._directory.metrics) if rows and self._copy is None else None,
        )

    def _newest_checkpoint(self) -> tuple[int | None, float | None]:
        store = self._directory.store
        newest = store.newest()
        if newest is None:
            return None, None
        return newest, time.time() - entry_of(store.path(newest)).written_s


class View:
    """View of a snapshot for a terminal of any width."""

    def __init__(self, snapshot: RunSnapshot) -> None:
        self._snapshot = snapshot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        snapshot = self._snapshot
        yield Text.assemble(
            (shown(display_path(snapshot.run.out_dir)), "bold"),
            "  ",
            (snapshot.run.state.replace("_", " "), _style_of(snapshot.run.state)),
            shown(f"  {_why(snapshot)}"),
            # Paths and reasons may be longer than a line.
            overflow="fold",
        )
        if snapshot.total_steps:
            yield self._progress(options.max_width, snapshot.total_steps)
        yield labelled_grid((label, text) for label, text in _rows_of(snapshot) if text)
        width = min(options.max_width, _MOST_WIDTH)
        lines = curve(snapshot.losses, width, _CURVE_LINES, ascii_only=options.ascii_only)
        # A single loss is no curve; it is in the grid above.
        if len(snapshot.losses) > 1:
            yield Text("\n".join(["", *lines]), "cyan", no_wrap=True, overflow="crop")
            yield Text(f"loss from step {snapshot.rows[0]['step']:,} to {snapshot.step:,}", "dim")

    def _progress(self, width: int, total: int) -> Table:
        line = Table.grid(padding=(0, 2))
        step = f"step {self._snapshot.step:,}/{total:,}"
        rest = "  ".join(_clock_texts(self._snapshot))
        # Four for the gaps around the bar; without room for eight characters it is left out.
        room = width - len(step) - len(rest) - 4
        cells: list[Text | ProgressBar] = [Text(step, "bold")]
        if room >= 8:
            done = min(self._snapshot.step, total)
            cells.append(ProgressBar(total=total, completed=done, width=min(room, 40)))
        cells.append(Text(rest, "dim"))
        line.add_row(*cells)
        return line


def snapshot_as_html(snapshot: RunSnapshot, *, with_curve: bool = True) -> str:
    """Return a snapshot as HTML for a notebook or, without its curve, for the live page."""
    state = styled(snapshot.run.state.replace("_", " "), _style_of(snapshot.run.state))
    head = f"<b>{escaped(display_path(snapshot.run.out_dir))}</b> {state} {escaped(_why(snapshot))}"
    parts = [head]
    if snapshot.total_steps:
        parts.append(bar(min(snapshot.step, snapshot.total_steps), snapshot.total_steps))
        clock = "  ".join(
            (f"step {snapshot.step:,}/{snapshot.total_steps:,}", *_clock_texts(snapshot))
        )
        parts.append(f'<span style="white-space:pre-wrap">{escaped(clock)}</span>')
    parts.append(labelled(_rows_of(snapshot)))
    if with_curve and len(losses := snapshot.losses) > 1:
        parts.append(curve_picture(means(losses, _PICTURE_POINTS)))
        parts.append(f"loss from step {snapshot.rows[0]['step']:,} to {snapshot.step:,}")
    return block(*parts)


def watch(options: WatchOptions) -> int:
    """Show a run until it ends; return the exit code.

    Raises:
        UserError: the directory holds no run.
    """
    interval_s = parse_duration(options.interval, "interval")
    out_dir = options.out_dir.expanduser()
    with TemporaryDirectory(prefix="ftkit-watch-") as name:
        is_elsewhere = url_of(out_dir) is not None and not is_at_work_here(RunDirectory(out_dir))
        copy = url_runs(out_dir).run_copy(out_dir, Path(name)) if is_elsewhere else None
        # A later look would correct the state, but with --once there is none.
        if options.once and copy is not None:
            copy.settle()
        _show(Watcher(out_dir, copy), options, interval_s)
    return 0


def _show(watcher: Watcher, options: WatchOptions, interval_s: float) -> None:
    snapshot = watcher.look()
    terminal = terminal_of(sys.stdout)
    if options.once or not snapshot.run.at_work:
        with Display(None) as display:
            display.show(View(snapshot))
    elif terminal is None:
        _print_lines(watcher, snapshot, interval_s)
    else:  # Ctrl+C ends the view even where the shell started it with interrupts ignored
        with (
            Interrupts(even_if_ignored=True) as interrupts,
            # Nothing changes between two looks.
            Live(View(snapshot), console=terminal, auto_refresh=False) as live,
        ):
            while snapshot.run.at_work:
                interrupts.sleep(interval_s)
                snapshot = watcher.look()
                live.update(View(snapshot), refresh=True)


def _print_lines(watcher: Watcher, snapshot: RunSnapshot, interval_s: float) -> None:
    """Print a line for each change, for pipes and files."""
    lines = Lines()
    lines.show(snapshot)
    with Interrupts() as interrupts:
        while snapshot.run.at_work:
            interrupts.sleep(interval_s)
            snapshot = watcher.look()
            lines.show(snapshot)


class Lines:
    """Prints what a run does, then a line for each change."""

    def __init__(self) -> None:
        self._shown: str | None = None

    def show(self, snapshot: RunSnapshot) -> None:
        """Print a line if it differs from the last one."""
        if self._shown is None:
            print_shown(f"{display_path(snapshot.run.out_dir)}: {_why(snapshot)}")
            # The first line has named the phase: `_line` must not repeat it.
            self._shown = _phase(snapshot)
        text = _line(snapshot)
        if text != self._shown:
            print_shown(text)
            self._shown = text


def _line(snapshot: RunSnapshot) -> str:
    """Current step, loss and speed, in one line."""
    if not snapshot.run.at_work:
        state = snapshot.run.state.replace("_", " ")
        return shown(f"{state} at step {snapshot.step:,}: {_why(snapshot)}")
    if not snapshot.rows:
        return _phase(snapshot)
    total = f"/{snapshot.total_steps:,}" if snapshot.total_steps else ""
    loss, left_s = snapshot.rows[-1]["loss"], snapshot.left_s
    parts = [
        f"step {snapshot.step:,}{total}",
        "" if loss is None else f"loss {loss_text(loss)}",
        f"{number_text(snapshot.tokens_per_s)} tokens/s" if snapshot.tokens_per_s else "",
        "" if snapshot.epoch is None else f"epoch {snapshot.epoch:.2f}",
        "" if left_s is None else f"eta {clock_text(left_s)}",
        f"checkpoint {snapshot.checkpoint_step:,}" if snapshot.checkpoint_step is not None else "",
        # Training is the usual phase, and is not mentioned.
        "" if _phase(snapshot) == "training" else _phase(snapshot),
    ]
    return "  ".join(filter(None, parts))


def _rows_of(snapshot: RunSnapshot) -> list[tuple[str, str]]:
    """Label and text of each measurement; the text is empty if there is none."""
    losses = snapshot.losses
    validations = [
        loss for row in snapshot.validations if (loss := finite(row["val_loss"])) is not None
    ]
    report, speed, step_s = snapshot.report, snapshot.tokens_per_s, snapshot.step_s
    return [
        ("loss", _from_to(losses) + _then_not_finite(snapshot.rows, "loss")),
        (
            "validation",
            _from_to(validations)
            + _best(validations)
            + _then_not_finite(snapshot.validations, "val_loss"),
        ),
        *(
            (f"on {name}", _from_to(losses) + _best(losses))
            for name, losses in _losses_by_source(snapshot.validations)
        ),
        (
            "speed now" if snapshot.run.at_work else "last speed",
            f"{number_text(speed)} tokens/s, {duration_text(step_s)} a step"
            if speed and step_s
            else "",
        ),
        ("peak memory", memory_text(report.peak_memory) if report and report.peak_memory else ""),
        *(numbers.rows_of_their_own(report) if report else ()),
        ("system", _system_text(snapshot) if snapshot.run.at_work else ""),
        ("checkpoint", _checkpoint_text(snapshot)),
        ("silent", _silence(snapshot)),
        *(("warning", warning) for warning in (report.warnings if report else ())),
    ]


def _losses_by_source(validations: list[Row]) -> list[tuple[str, list[float]]]:
    """Names of sources and sets with their validation losses."""
    return [
        (name, [loss for row in validations if (loss := finite(row[column])) is not None])
        for name, column in loss_columns(validations)
    ]


def _system_text(snapshot: RunSnapshot) -> str:
    """Return the newest sample as a text: "GPU 0 busy 93 %, 310 W; CPU busy 45 %"."""
    newest = snapshot.samples[-1] if snapshot.samples else {}
    parts = []
    for name, busy in newest.items():
        device, _, kind = name.rpartition("_")
        if kind == "utilization" and busy is not None:
            noun = "CPU" if device == "host_cpu" else device.replace("device", "GPU ")
            watts = newest.get(f"{device}_power_w")
            parts.append(
                f"{noun} busy {percent_text(busy)}" + (f", {watts:.0f} W" if watts else "")
            )
    # Devices first: the columns begin with the host.
    return "; ".join(reversed(parts))


def _from_to(losses: list[float]) -> str:
    if not losses:
        return ""
    first, last = losses[0], losses[-1]
    # A single loss is not shown twice.
    return from_to_text(first, None if last == first else last, loss_text)


def _best(losses: list[float]) -> str:
    """Return the best loss, if it is not the last one."""
    return f", best {loss_text(min(losses))}" if losses and losses[-1] > min(losses) else ""


def _then_not_finite(rows: list[Row], column: str) -> str:
    """Return that the last loss is not finite; these losses have a cell in every row."""
    return ", then not finite" if rows and finite(rows[-1][column]) is None else ""


def _clock_texts(snapshot: RunSnapshot) -> list[str]:
    left_s = snapshot.left_s
    return [
        text
        for text in (
            "" if snapshot.epoch is None else f"epoch {snapshot.epoch:.2f}",
            "" if snapshot.elapsed_s is None else f"elapsed {clock_text(snapshot.elapsed_s)}",
            "" if left_s is None else f"eta {clock_text(left_s)}",
        )
        if text
    ]


def _why(snapshot: RunSnapshot) -> str:
    """Return why a run ended or, while it is running, its phase, model and devices."""
    if snapshot.run.state == "killed":
        return "the process was killed before it could write a report; --resume auto continues it"
    if snapshot.report is None:
        return "set-up"
    if not snapshot.run.at_work:
        return snapshot.report.exit_reason
    resolved = snapshot.resolved
    model = resolved.base_model or snapshot.report.recipe.get("checkpoint_dir")
    device = resolved.device or resolved.accelerator
    where = f"{resolved.world_size or 1} x {device}" if device else ""
    method = method_text(snapshot.report.method or "", snapshot.report.recipe.get("peft"))
    parts = (f"{method} on {model}", where, resolved.strategy, resolved.precision)
    return f"{_phase(snapshot)}: {', '.join(part for part in parts if part)}"


def _phase(snapshot: RunSnapshot) -> str:
    return (snapshot.report.phase if snapshot.report else "set_up").replace("set_up", "set-up")


def _checkpoint_text(snapshot: RunSnapshot) -> str:
    if snapshot.checkpoint_step is None or snapshot.checkpoint_age_s is None:
        return ""
    return f"step {snapshot.checkpoint_step:,}, {age_text(snapshot.checkpoint_age_s)} ago"


def _silence(snapshot: RunSnapshot) -> str:
    """Return a note if the next step is long overdue."""
    if not snapshot.run.at_work or snapshot.silent_s is None or _phase(snapshot) != "training":
        return ""
    # A step that waits for data or a checkpoint may take several times as long as usual.
    usual_s = max(_SILENT_S, 5 * (snapshot.step_s or 0.0))
    return f"no step for {duration_text(snapshot.silent_s)}" if snapshot.silent_s > usual_s else ""


def _style_of(state: StateName) -> str:
    return {"killed": "bold red", **STYLE_OF_OUTCOME}.get(state, "bold")


def _elapsed_s(run: RunState) -> float | None:
    # By the clock of the run: of a running one, up to its report a few seconds ago.
    return run.report.phases_s.total if run.report and run.report.phases_s else None


def _age_s(path: Path) -> float | None:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return None


_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a Braille character by row and column, from U+2800 on."""
_LOGARITHMIC_FROM = 20.0
"""Ratio of highest to lowest value from which the scale is logarithmic."""


# Our own code, because the library for such curves has no types.
def curve(
    values: Sequence[float], width: int, height: int, *, ascii_only: bool = False
) -> list[str]:
    """Draw a curve as lines of text, with its highest and lowest value on its left.

    Args:
        values: equally spaced and finite; if there are too many, means of neighbours are drawn.
        width: of curve and labels, in characters.
        height: in lines, at least 2.
        ascii_only: whether the terminal lacks Braille characters.
    """
    if not values:
        return []
    # A Braille character has two columns of four dots.
    across, down = (1, 1) if ascii_only else (2, 4)
    labels = list(dict.fromkeys((_label(max(values)), _label(min(values)))))
    margin = max(map(len, labels)) + 1
    columns = max(width - margin, 1) * across
    scaled = _levels(_resampled(values, columns), min(values), max(values), height * down - 1)
    dots = [[False] * columns for _ in range(height * down)]
    for x, (before, level) in enumerate(pairwise([scaled[0], *scaled])):
        # Vertical parts start beside the last dot, so that a steep curve has no gaps.
        first, last = sorted((level, before + (level > before) - (level < before)))
        for y in range(first, last + 1):
            dots[y][x] = True
    lines = []
    for row in range(height):
        # The highest value is named in the first line, the lowest in the last.
        label = labels[-1] if row == height - 1 else labels[0] if row == 0 < len(labels) - 1 else ""
        cells = dots[row * down : (row + 1) * down]
        drawn = "".join(
            _character([line[x : x + across] for line in cells], ascii_only)
            for x in range(0, columns, across)
        )
        lines.append(f"{label:>{margin - 1}} {drawn}".rstrip())
    return lines


def _label(value: float) -> str:
    return f"{value:.4g}"


def means(values: Sequence[float], count: int) -> list[float]:
    """Reduce values to at most `count`, by averaging neighbours."""
    if len(values) <= count:
        return list(values)
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def _resampled(values: Sequence[float], count: int) -> list[float]:
    """Return `count` values: means if there are more, linear interpolation if there are fewer."""
    if len(values) > count:
        return means(values, count)
    if len(values) == 1:
        return [values[0]]
    found = []
    for i in range(count):
        position = i * (len(values) - 1) / max(count - 1, 1)
        left = min(int(position), len(values) - 2)
        share = position - left
        found.append(values[left] * (1 - share) + values[left + 1] * share)
    return found


def _levels(values: list[float], low: float, high: float, most: int) -> list[int]:
    """Distance of each value from the top, in dots."""
    # Else the first high losses would press the rest of the curve flat.
    if low > 0 and high / low > _LOGARITHMIC_FROM:
        # Rounding may put a mean of neighbours below the lowest value.
        values, low, high = [math.log(max(v, low)) for v in values], math.log(low), math.log(high)
    if high == low:
        # A constant curve lies at the bottom.
        return [most] * len(values)
    return [round((high - value) / (high - low) * most) for value in values]


def _character(cells: list[list[bool]], ascii_only: bool) -> str:
    if ascii_only:
        return "*" if cells[0][0] else " "
    bits = sum(
        _DOTS[y][x] for y, line in enumerate(cells) for x, is_set in enumerate(line) if is_set
    )
    return chr(0x2800 + bits) if bits else " "
