"""The Python API: `import ftkit` has all of it.

A run is a child process, the `ftkit` command: any strategy works, its memory is free again when it
ends, and this process survives a crash of the run. Everything shown is read from the files of the
run, so a run of another process can be followed in the same way.
"""

import dataclasses
import os
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ftkit.errors import UserError
from ftkit.extensions.comparison.compare import compare
from ftkit.extensions.comparison.plots import Picture
from ftkit.extensions.notebook import display
from ftkit.extensions.notebook.children import printed, refusal
from ftkit.extensions.notebook.display import short, summary_as_html
from ftkit.extensions.watch.watch import Watcher, snapshot_as_html
from ftkit.recipe.parsing import Override, as_text, read_recipe
from ftkit.recipe.recipe import FINETUNE
from ftkit.runs.lock import Supervisor
from ftkit.runs.report import table
from ftkit.runs.report.report import Report
from ftkit.runs.state import RunState, StateName, look
from ftkit.runs.unfinished import follow_moved
from ftkit.utils.console.formatting import exact_utc_text
from ftkit.utils.console.terminal import plain_text
from ftkit.utils.process import PassingOn, start_command

PathLike = str | os.PathLike[str]
_POLL_S = 0.1


class ShownReport(Report):
    """A report that a notebook shows; `print` shows the table of the command."""

    def __str__(self) -> str:
        return plain_text(table.render(self))

    def __repr__(self) -> str:
        return f"<ftkit report: {self.outcome.replace('_', ' ')}, {self.exit_reason}>"

    def _repr_html_(self) -> str:
        return table.report_as_html(self)


class Run(os.PathLike[str]):
    """A run, running or ended; used as a path, it is its out_dir."""

    def __init__(self, out_dir: Path) -> None:
        self.out_dir = out_dir
        """Its absolute directory."""
        self._child: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._started_at = exact_utc_text(time.time())

    @property
    def outcome(self) -> StateName:
        """Starting, running, completed, stopped, interrupted, out_of_memory, failed or killed."""
        return self._look().state

    @property
    def report(self) -> ShownReport | None:
        """Measurements so far; None: there are none yet."""
        report = self._look().report
        if report is None:
            return None
        # Field by field and not by `asdict`, which would turn the inner dataclasses into dicts.
        values = {f.name: getattr(report, f.name) for f in dataclasses.fields(report)}
        return ShownReport(**values)

    def plot(self) -> Picture:
        """Draw losses, memory and throughput, also while it is running.

        Raises:
            UserError: nothing has been measured yet, or matplotlib is missing.
        """
        return compare([self]).plot()

    def wait(self) -> "Run":
        """Follow the run until it has ended, in the cell or in lines; return the run itself.

        Interrupting the kernel, or Ctrl+C, ends a run that was started here after its current step,
        with its state saved; a second one ends it at once. A run of another process continues;
        only following it ends.

        Raises:
            UserError: the command refused to run; the message says why.
            KeyboardInterrupt: after a second interrupt; after the first for another process's run.
        """
        with PassingOn(*([signal.SIGINT] if self._child else [])) as signals:
            if self._child is not None:
                signals.to(self._child)
            return self._follow(display.place(), signals)

    def stop(self) -> "Run":
        """End the run after its current step, save its state, and wait until it has ended.

        Raises:
            UserError: it is running on another machine.
        """
        if self._look().at_work:
            if self._child is not None:
                self._child.send_signal(signal.SIGINT)
            elif (process := self._process()) is not None:
                # It may just have ended by itself.
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGINT)
        return self.wait()

    def __fspath__(self) -> str:
        return str(self.out_dir)

    def __repr__(self) -> str:
        return f"<ftkit run {short(self.out_dir)}: {self.outcome}>"

    def _repr_html_(self) -> str:
        state = self._look()
        if state.at_work:
            return snapshot_as_html(Watcher(short(self.out_dir)).look())
        return summary_as_html(state)

    def _look(self) -> RunState:
        return look(short(self.out_dir))

    def _process(self) -> int | None:
        """Process of the supervisor; None: the run has just ended.

        Raises:
            UserError: it is running on another machine.
        """
        while (supervisor := Supervisor.of(self.out_dir)) is None:
            # The lock names nobody for a moment at the start, and after the end.
            if not self._look().at_work:
                return None
            time.sleep(_POLL_S)
        # A process id means something on its own host only.
        if supervisor.host != Supervisor.here().host:
            raise UserError(f"{self.out_dir} is running on {supervisor.host}. Stop it there.")
        return supervisor.process

    def _follow(self, place: display.OutputPlace, signals: PassingOn) -> "Run":
        watcher = Watcher(short(self.out_dir))
        is_noted = False
        while True:
            ended = self._has_ended(place.interval_s)
            if ended:
                self._raise_refusal()
            try:
                # After the check for the end, so that the last snapshot has all rows.
                snapshot = watcher.look()
            except UserError:  # a command that refuses to run has removed its directory
                if ended or self._child is None:
                    raise
                continue
            if signals.received and not is_noted:
                place.note("ending after the current step; interrupt again to end at once")
                is_noted = True
            place.show(snapshot)
            if ended or (self._child is None and not snapshot.run.at_work):
                break
        if self._child is not None and not self._has_reported():
            place.note(self._printed().strip())  # such as: nothing to do
        place.conclude(snapshot.run)
        # After one interrupt the run is returned: the user wants its report and how to continue.
        if len(signals.received) > 1:
            raise KeyboardInterrupt
        return self

    def _has_ended(self, within_s: float) -> bool:
        """Return whether the child has ended; never for a run of another process."""
        if self._child is None:
            # There is no child to wait for: `RunState.at_work` tells whether the run has ended.
            time.sleep(within_s if self._look().at_work else 0)
            return False
        try:
            self._child.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _raise_refusal(self) -> None:
        """Raise the message of a child that refused to run."""
        if self._child is None or self._child.poll() is None or self._has_reported():
            return
        code = self._child.returncode
        if code and (error := refusal(self._printed(), code)) is not None:
            raise error

    def _has_reported(self) -> bool:
        """Return whether the run that was started here has written a report."""
        try:
            report = self._look().report
        except UserError:
            return False
        # An earlier run in the same directory has an older report. Times in UTC in ISO format
        # compare as texts.
        return report is not None and report.started_at >= self._started_at

    def _printed(self) -> str:
        return "" if self._output is None else printed(self._output)


def finetune(
    recipe: PathLike | Sequence[PathLike] | None = None,
    /,
    *,
    wait: bool = True,
    overwrite: bool = False,
    force: bool = False,
    stop_after: str | int | None = None,
    plugin: PathLike | None = None,
    **keys: Any,
) -> Run:
    """Fine-tune with LoRA or QLoRA, as `ftkit finetune`; return the run, however it ended.

    Args:
        recipe: recipe files; later ones win.
        wait: whether to follow the run until it has ended; else call `Run.wait`.
        overwrite: replace what is in out_dir.
        force: start even if memory is predicted to be too small.
        stop_after: end this session early: steps, or a time such as 90min.
        plugin: Python file of your own, as --plugin.
        keys: of the recipe, dotted: `**{"train.micro_batch_size": 8}`.

    Raises:
        UserError: the command refused to run; the message says why.
        KeyboardInterrupt: it was interrupted before it started, or twice.
    """
    words = switches(overwrite=overwrite, force=force, stop_after=stop_after, plugin=plugin)
    return start("finetune", recipe, keys, words, display.place(), wait=wait)


def finetune_full(
    recipe: PathLike | Sequence[PathLike] | None = None,
    /,
    *,
    wait: bool = True,
    overwrite: bool = False,
    force: bool = False,
    stop_after: str | int | None = None,
    plugin: PathLike | None = None,
    **keys: Any,
) -> Run:
    """Fine-tune every parameter, as `ftkit finetune_full`; arguments as of `finetune`."""
    words = switches(overwrite=overwrite, force=force, stop_after=stop_after, plugin=plugin)
    return start("finetune_full", recipe, keys, words, display.place(), wait=wait)


def attach(out_dir: PathLike) -> Run:
    """Return a run that was started elsewhere, running or ended.

    Raises:
        UserError: the directory holds no run.
    """
    run = Run(Path(out_dir).expanduser().absolute())
    run._look()
    return run


def switches(
    *,
    overwrite: bool,
    force: bool,
    stop_after: str | int | None = None,
    plugin: PathLike | None = None,
) -> list[str]:
    """Return the words of the command line for options that are no keys of a recipe."""
    words = ["--overwrite"] * overwrite + ["--force"] * force
    words += [] if stop_after is None else [f"--stop_after={stop_after}"]
    return words if plugin is None else [*words, f"--plugin={os.fspath(plugin)}"]


def start(
    command: str,
    recipe: PathLike | Sequence[PathLike] | None,
    keys: dict[str, Any],
    further: list[str],
    place: display.OutputPlace,
    *,
    wait: bool = True,
) -> Run:
    """Start a command and wait until it has claimed its directory.

    Args:
        command: finetune or finetune_full.
        recipe: recipe files; later ones win.
        keys: of the recipe, dotted.
        further: words of the command line that are no keys.
        place: where the run is shown.
        wait: whether to follow the run until it has ended.

    Raises:
        UserError: the command refused to run; the message says why.
        KeyboardInterrupt: it was interrupted before it started, or twice.
    """
    several = [recipe] if isinstance(recipe, str | os.PathLike) else recipe or ()
    files = [os.fspath(file) for file in several]
    overrides: list[Override] = [(key, as_text(value, key)) for key, value in keys.items()]
    # Errors of the recipe are raised here, before a process starts.
    parsed = read_recipe(files, overrides, method=FINETUNE[command])
    if files and "out_dir" not in keys:
        # The command does the same: both must agree on the directory.
        moved_to = follow_moved(parsed.resume, parsed.out_dir, Path(files[-1]))
        parsed = dataclasses.replace(parsed, out_dir=moved_to)
    words = [command, *(f"--config={file}" for file in files)]
    words += [f"--{key}={text}" for key, text in overrides]
    # A file, because a run would block at a full pipe that nobody reads.
    output = tempfile.TemporaryFile()  # noqa: SIM115 - it belongs to the run
    with PassingOn(signal.SIGINT) as signals:
        run = Run(parsed.out_dir.expanduser().absolute())
        run._output = output
        # Callers may drop the run: a file that is closed by being forgotten is a ResourceWarning.
        weakref.finalize(run, output.close)
        # Inside PassingOn, so that an interrupt between start and wait reaches the child.
        run._child = child = start_command([*words, *further], output)
        signals.to(child)
        # Until the command has claimed its directory it may refuse to run, have nothing to do, or
        # take another name.
        while (out_dir := _claimed(run.out_dir, child.pid)) is None:
            if child.poll() is not None:
                return _without_directory(run, place, interrupted=bool(signals.received))
            lines = run._printed().split("\n")[:-1]
            # Behind this prefix stands an error, which is raised as an exception.
            if lines and not lines[-1].startswith("ftkit: "):
                place.say(lines[-1])
            time.sleep(_POLL_S)
        run.out_dir = out_dir
        return run._follow(place, signals) if wait else run


def _claimed(wanted: Path, process: int) -> Path | None:
    """Find the directory that a command has claimed: OUT_DIR, OUT_DIR-2, ...; None: none yet."""
    number, out_dir = 2, wanted
    while out_dir.exists():
        here = Supervisor(host=Supervisor.here().host, process=process)
        if Supervisor.of(out_dir) == here:
            return out_dir
        # The command takes the next free name by itself: only its lock shows which one.
        out_dir = wanted.with_name(f"{wanted.name}-{number}")
        number += 1
    return None


def _without_directory(run: Run, place: display.OutputPlace, *, interrupted: bool) -> Run:
    """Conclude a command that ended before it claimed a directory: it had nothing to do."""
    assert run._child is not None
    if interrupted:
        raise KeyboardInterrupt
    run._raise_refusal()
    text = run._printed().strip()
    if run._child.returncode:
        raise RuntimeError(f"ftkit ended with exit code {run._child.returncode}:\n{text}")
    place.note(text)
    place.conclude(run._look())
    return run
