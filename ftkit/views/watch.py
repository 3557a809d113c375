"""`ftkit watch`: a live view of a run from another terminal, made of its files alone."""

import math
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ftkit.recipe.options import WatchOptions
from ftkit.runs.checkpoints import entry_of
from ftkit.runs.directory import RunDirectory
from ftkit.runs.report.metrics import Row, RowsReader, loss_columns
from ftkit.runs.report.report import Progress, Report, Resolved
from ftkit.runs.report.rows import memory_text
from ftkit.runs.report.table import STYLE_OF_OUTCOME
from ftkit.runs.state import RunState, StateName, look
from ftkit.runs.sync.download import UrlCopy, is_at_work_here
from ftkit.utils.console.curve import curve, means
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
    printable,
)
from ftkit.utils.console.html import bar, block, curve_picture, escaped, labelled, styled
from ftkit.utils.console.terminal import labelled_grid, terminal_of
from ftkit.utils.process import Interrupts
from ftkit.utils.remote.urls import display_path, url_of

_RECENT_STEPS = 20
"""Steps whose mean is the speed now."""
_SILENT_S = 30.0
"""Time without a step, and without another phase, that is worth a word."""
_CURVE_LINES = 8
_PICTURE_POINTS = 240
_MOST_WIDTH = 100
"""Wider than this, a curve of eight lines tells no more."""


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What there is to see of a run at one moment."""

    run: RunState
    """Its state and report."""
    rows: list[Row]
    """Of its steps."""
    validations: list[Row]
    """Of its validations."""
    samples: list[Row]
    """Of host and devices."""
    checkpoint_step: int | None
    """Of the newest complete checkpoint."""
    checkpoint_age_s: float | None
    """How long ago it was written."""
    elapsed_s: float | None
    """Since the command started; of a run that has ended, until its end."""
    silent_s: float | None
    """Since the last row."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        noted = (self.report.progress or Progress()).steps if self.report else 0
        return int(self.rows[-1]["step"] or 0) if self.rows else noted

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run."""
        return self.resolved.total_steps

    @property
    def report(self) -> Report | None:
        """As far as there is one."""
        return self.run.report

    @property
    def resolved(self) -> Resolved:
        """What the recipe came to, as far as it is known."""
        return (self.report and self.report.resolved) or Resolved()

    @property
    def epoch(self) -> float | None:
        """Epochs done, with a fraction."""
        samples = self.rows[-1]["samples"] if self.rows else None
        per_epoch = self.resolved.samples_per_epoch
        if samples is not None and per_epoch:
            return samples / per_epoch
        return self.report.progress.epochs if self.report and self.report.progress else None

    @property
    def tokens_per_s(self) -> float | None:
        """Speed of the last steps."""
        tokens, seconds = self._recent
        return tokens / seconds if seconds else None

    @property
    def step_s(self) -> float | None:
        """Mean duration of the last steps."""
        seconds = self._recent[1]
        return seconds / min(len(self.rows), _RECENT_STEPS) if seconds else None

    @property
    def left_s(self) -> float | None:
        """Time of the steps that are left, at the speed of the last ones."""
        if not self.run.at_work or self.total_steps is None or self.step_s is None:
            return None
        return self.step_s * max(self.total_steps - self.step, 0)

    @property
    def losses(self) -> list[float]:
        """Of every step, where it is a number."""
        found = (row["loss"] for row in self.rows)
        return [loss for loss in found if loss is not None and math.isfinite(loss)]

    @property
    def _recent(self) -> tuple[float, float]:
        """Tokens and seconds of the last steps."""
        pairs = [
            (tokens, tokens / speed)
            for row in self.rows[-_RECENT_STEPS:]
            if (tokens := row["tokens"]) and (speed := row["tokens_per_s"])
        ]
        return sum(tokens for tokens, _ in pairs), sum(seconds for _, seconds in pairs)


class Watcher:
    """Looks at a run again and again."""

    def __init__(self, out_dir: Path, copy: UrlCopy | None = None) -> None:
        """Prepare.

        Args:
            out_dir: of the run.
            copy: where to look instead, if it is at work elsewhere and out_dir stands for its url.
        """
        self._out_dir, self._copy = out_dir, copy
        self._directory = RunDirectory(out_dir if copy is None else copy.directory)
        self.rows = RowsReader(self._directory.metrics)
        self._validations = RowsReader(self._directory.validation)
        self._samples = RowsReader(self._directory.system, several_in_step=True)

    def look(self) -> Sight:
        """What there is to see now.

        Raises:
            UserError: the directory holds no run.
        """
        # Before the rows: then those of a run that has ended are all.
        run = look(self._out_dir, self._copy)
        rows = self.rows.read_on()
        step, age_s = self._newest_checkpoint()
        return Sight(
            run=run,
            rows=rows,
            validations=self._validations.read_on(),
            samples=self._samples.read_on(),
            checkpoint_step=step,
            checkpoint_age_s=age_s,
            elapsed_s=_elapsed_s(run),
            silent_s=_age_s(self._directory.metrics) if rows and self._copy is None else None,
        )

    def _newest_checkpoint(self) -> tuple[int | None, float | None]:
        store = self._directory.store
        newest = store.newest()
        if newest is None:
            return None, None
        return newest, time.time() - entry_of(store.path(newest)).written_s


class View:
    """A sight as people see it, on a terminal of any width."""

    def __init__(self, sight: Sight) -> None:
        self._sight = sight

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        sight = self._sight
        yield Text.assemble(
            (printable(display_path(sight.run.out_dir)), "bold"),
            "  ",
            (sight.run.state.replace("_", " "), _style_of(sight.run.state)),
            printable(f"  {_why(sight)}"),
            overflow="fold",
        )
        if sight.total_steps:
            yield self._progress(options.max_width, sight.total_steps)
        yield labelled_grid((label, text) for label, text in _rows_of(sight) if text)
        width = min(options.max_width, _MOST_WIDTH)
        lines = curve(sight.losses, width, _CURVE_LINES, ascii_only=options.ascii_only)
        if len(sight.losses) > 1:
            yield Text("\n".join(["", *lines]), "cyan", no_wrap=True, overflow="crop")
            yield Text(f"loss from step {sight.rows[0]['step']:,} to {sight.step:,}", "dim")

    def _progress(self, width: int, total: int) -> Table:
        line = Table.grid(padding=(0, 2))
        step = f"step {self._sight.step:,}/{total:,}"
        rest = "  ".join(_clock_texts(self._sight))
        room = width - len(step) - len(rest) - 4
        cells: list[Text | ProgressBar] = [Text(step, "bold")]
        if room >= 8:
            done = min(self._sight.step, total)
            cells.append(ProgressBar(total=total, completed=done, width=min(room, 40)))
        cells.append(Text(rest, "dim"))
        line.add_row(*cells)
        return line


def sight_as_html(sight: Sight, *, with_curve: bool = True) -> str:
    """A sight as HTML for a notebook or, without its curve, for a page that draws them."""
    state = styled(sight.run.state.replace("_", " "), _style_of(sight.run.state))
    head = f"<b>{escaped(display_path(sight.run.out_dir))}</b> {state} {escaped(_why(sight))}"
    parts = [head]
    if sight.total_steps:
        parts.append(bar(min(sight.step, sight.total_steps), sight.total_steps))
        clock = "  ".join((f"step {sight.step:,}/{sight.total_steps:,}", *_clock_texts(sight)))
        parts.append(f'<span style="white-space:pre-wrap">{escaped(clock)}</span>')
    parts.append(labelled(_rows_of(sight)))
    if with_curve and len(losses := sight.losses) > 1:
        parts.append(curve_picture(means(losses, _PICTURE_POINTS)))
        parts.append(f"loss from step {sight.rows[0]['step']:,} to {sight.step:,}")
    return block(*parts)


def watch(options: WatchOptions) -> int:
    """Show a run until it has ended; the exit code.

    Raises:
        UserError: the directory holds no run.
    """
    interval_s = parse_duration(options.interval, "interval")
    out_dir = options.out_dir.expanduser()
    with TemporaryDirectory(prefix="ftkit-watch-") as name:
        is_elsewhere = url_of(out_dir) is not None and not is_at_work_here(RunDirectory(out_dir))
        copy = UrlCopy(out_dir, Path(name)) if is_elsewhere else None
        if options.once and copy is not None:
            copy.settle()
        _show(Watcher(out_dir, copy), options, interval_s)
    return 0


def _show(watcher: Watcher, options: WatchOptions, interval_s: float) -> None:
    sight = watcher.look()
    terminal = terminal_of(sys.stdout)
    if options.once or not sight.run.at_work:
        with Display(None) as display:
            display.show(View(sight))
    elif terminal is None:
        _print_lines(watcher, sight, interval_s)
    else:  # who can see it can end it, however it was started
        with (
            Interrupts(even_if_ignored=True) as interrupts,
            Live(View(sight), console=terminal, auto_refresh=False) as live,
        ):
            while sight.run.at_work:
                interrupts.sleep(interval_s)
                sight = watcher.look()
                live.update(View(sight), refresh=True)


def _print_lines(watcher: Watcher, sight: Sight, interval_s: float) -> None:
    """A line whenever something has happened: for pipes and files."""
    lines = Lines()
    lines.show(sight)
    with Interrupts() as interrupts:
        while sight.run.at_work:
            interrupts.sleep(interval_s)
            sight = watcher.look()
            lines.show(sight)


class Lines:
    """Prints what a run is, and then a line whenever something has happened."""

    def __init__(self) -> None:
        self._shown: str | None = None

    def show(self, sight: Sight) -> None:
        """Print what is new, if anything is."""
        if self._shown is None:
            print(printable(f"{display_path(sight.run.out_dir)}: {_why(sight)}"), flush=True)
            self._shown = _phase(sight)
        text = _line(sight)
        if text != self._shown:
            print(text, flush=True)
            self._shown = text


def _line(sight: Sight) -> str:
    """What is new, in one line."""
    if not sight.run.at_work:
        state = sight.run.state.replace("_", " ")
        return printable(f"{state} at step {sight.step:,}: {_why(sight)}")
    if not sight.rows:
        return _phase(sight)
    total = f"/{sight.total_steps:,}" if sight.total_steps else ""
    loss, left_s = sight.rows[-1]["loss"], sight.left_s
    parts = [
        f"step {sight.step:,}{total}",
        "" if loss is None else f"loss {loss_text(loss)}",
        f"{number_text(sight.tokens_per_s)} tokens/s" if sight.tokens_per_s else "",
        "" if sight.epoch is None else f"epoch {sight.epoch:.2f}",
        "" if left_s is None else f"eta {clock_text(left_s)}",
        f"checkpoint {sight.checkpoint_step:,}" if sight.checkpoint_step is not None else "",
        "" if _phase(sight) == "training" else _phase(sight),
    ]
    return "  ".join(filter(None, parts))


def _rows_of(sight: Sight) -> list[tuple[str, str]]:
    """Label and text of what is measured; empty where there is nothing."""
    losses = sight.losses
    validations = [v for row in sight.validations if (v := row["val_loss"]) is not None]
    report, speed, step_s, age_s = (
        sight.report, sight.tokens_per_s, sight.step_s, sight.checkpoint_age_s,
    )  # fmt: skip
    return [
        ("loss", _from_to(losses)),
        ("validation", _from_to(validations) + _best(validations)),
        *((f"on {name}", _from_to(ls) + _best(ls)) for name, ls in _of_sources(sight.validations)),
        (
            "speed now" if sight.run.at_work else "last speed",
            f"{number_text(speed)} tokens/s, {duration_text(step_s)} a step"
            if speed and step_s
            else "",
        ),
        ("peak memory", memory_text(report.peak_memory) if report and report.peak_memory else ""),
        ("system", _system_text(sight) if sight.run.at_work else ""),
        (
            "checkpoint",
            f"step {sight.checkpoint_step:,}, {age_text(age_s)} ago" if age_s is not None else "",
        ),
        ("silent", _silence(sight)),
        *(("warning", warning) for warning in (report.warnings if report else ())),
    ]


def _of_sources(validations: list[Row]) -> list[tuple[str, list[float]]]:
    """Sources of the data and sets of eval.sets by their names, with the losses of each."""
    return [
        (name, [loss for row in validations if (loss := row[column]) is not None])
        for name, column in loss_columns(validations)
    ]


def _system_text(sight: Sight) -> str:
    """What the newest sample says: GPU busy 93 %, 310 W; CPU busy 45 %."""
    newest = sight.samples[-1] if sight.samples else {}
    parts = []
    for name, busy in newest.items():
        device, _, kind = name.rpartition("_")
        if kind == "utilization" and busy is not None:
            noun = "CPU" if device == "host_cpu" else device.replace("device", "GPU ")
            watts = newest.get(f"{device}_power_w")
            parts.append(
                f"{noun} busy {percent_text(busy)}" + (f", {watts:.0f} W" if watts else "")
            )
    return "; ".join(reversed(parts))


def _from_to(losses: list[float]) -> str:
    if not losses:
        return ""
    first, last = losses[0], losses[-1]
    return from_to_text(first, None if last == first else last, loss_text)


def _best(losses: list[float]) -> str:
    """That the last is not the best, if so."""
    return f", best {loss_text(min(losses))}" if losses and losses[-1] > min(losses) else ""


def _clock_texts(sight: Sight) -> list[str]:
    left_s = sight.left_s
    return [
        text
        for text in (
            "" if sight.epoch is None else f"epoch {sight.epoch:.2f}",
            "" if sight.elapsed_s is None else f"elapsed {clock_text(sight.elapsed_s)}",
            "" if left_s is None else f"eta {clock_text(left_s)}",
        )
        if text
    ]


def _why(sight: Sight) -> str:
    """Why it has ended; else what it does, and on what."""
    if sight.run.state == "killed":
        return "the process was killed before it could write a report; --resume auto goes on"
    if sight.report is None:
        return "set-up"
    if not sight.run.at_work:
        return sight.report.exit_reason
    resolved = sight.resolved
    model = resolved.base_model or sight.report.recipe.get("checkpoint_dir")
    device = resolved.device or resolved.accelerator
    where = f"{resolved.world_size or 1} x {device}" if device else ""
    parts = (f"{sight.report.method} on {model}", where, resolved.strategy, resolved.precision)
    return f"{_phase(sight)}: {', '.join(part for part in parts if part)}"


def _phase(sight: Sight) -> str:
    return (sight.report.phase if sight.report else "set_up").replace("set_up", "set-up")


def _silence(sight: Sight) -> str:
    """A word about a run that should have done a step long ago."""
    if not sight.run.at_work or sight.silent_s is None or _phase(sight) != "training":
        return ""
    usual_s = max(_SILENT_S, 5 * (sight.step_s or 0.0))
    return f"no step for {duration_text(sight.silent_s)}" if sight.silent_s > usual_s else ""


def _style_of(state: StateName) -> str:
    return {"killed": "bold red", **STYLE_OF_OUTCOME}.get(state, "bold")


def _elapsed_s(run: RunState) -> float | None:
    if run.report is None:
        return None
    if run.state != "running":
        return run.report.phases_s.total if run.report.phases_s else None
    try:
        return time.time() - datetime.fromisoformat(run.report.started_at).timestamp()
    except ValueError:
        return None


def _age_s(path: Path) -> float | None:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return None
