"""However a run ends, its report says what metrics.csv and the checkpoints say."""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from command import command_environment, command_line
from messages import says
from runs import DEFAULT_SIGNALS, FOREVER, Run, command_of, rows, watched

from ftkit.checkpoint.store import Store
from ftkit.extensions.comparison.runs import read_runs
from ftkit.runs.report.report import Checkpoints, Loss, Report, read_report
from ftkit.runs.state import look

End = Callable[[Run, random.Random], None]


def signals(count: int, *, to_group: bool) -> End:
    """Ctrl+C so many times, a moment apart, since signals that come together are one."""

    def end(run: Run, dice: random.Random) -> None:
        for _ in range(count):
            with contextlib.suppress(ProcessLookupError):  # it may end before the last
                (os.killpg if to_group else os.kill)(run.process.pid, signal.SIGINT)
            time.sleep(dice.uniform(0.0, 0.05))

    return end


def kill_rank(run: Run, _: random.Random) -> None:
    run.rank().kill()


def kill_supervisor(run: Run, _: random.Random) -> None:
    os.kill(run.process.pid, signal.SIGKILL)


def kill_all(run: Run, _: random.Random) -> None:
    for process in run.processes():
        process.kill()


def storm(run: Run, dice: random.Random) -> None:
    """Signals of all kinds to all processes, at any moment."""
    for _ in range(dice.randint(1, 8)):
        number = dice.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
        processes = run.processes()
        if not processes:
            return
        target = dice.choice(processes)
        try:
            if number != signal.SIGKILL and dice.random() < 0.3:
                os.killpg(target.pid, number)
            else:
                target.send_signal(number)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
        time.sleep(dice.uniform(0.0, 0.3))


ENDS: dict[str, End] = {
    **{
        f"{count} x Ctrl+C to the {'group' if to_group else 'command'}": signals(
            count, to_group=to_group
        )
        for count in (1, 2, 5)
        for to_group in (True, False)
    },
    "kill -9 of the rank": kill_rank,
    "kill -9 of the command": kill_supervisor,
    "kill -9 of all": kill_all,
}
QUICK = ("5 x Ctrl+C to the group", "kill -9 of the rank")


@dataclass
class Runs:
    """Sessions of one run in one directory."""

    directory: Path
    common: list[str]

    @property
    def out_dir(self) -> Path:
        return self.directory / "out"

    def check_session(self, end: End, dice: random.Random) -> None:
        """Go on, if there is something to go on from, end it, and compare what is left."""
        keys = FOREVER | {"train__save_interval": 4, "checkpoint__keep_last": 2, "resume": "auto"}
        line = command_line(*command_of(self.out_dir, self.common, **keys), before=DEFAULT_SIGNALS)
        newest, before = Store(self.out_dir / "checkpoints").newest(), rows(self.out_dir)
        lost = len(before) - (newest or 0)
        with watched(self.out_dir, line, self.directory, command_environment()) as run:
            goal = (newest or 0) + dice.randint(1, 12)
            run.wait_for(lambda: (r := rows(self.out_dir)) != before and len(r) >= goal)
            end(run, dice)
            code, out, err = run.end()
        assert "Traceback" not in out + err, out + err
        if look(self.out_dir).state == "killed":
            self._check_killed()
        else:  # if the command was killed after that, it had written its report
            self._check_report(code, out)
        report = look(self.out_dir).report
        if newest is not None and report is not None:
            assert report.resumed is not None and report.resumed.from_step == newest
            assert report.restarts[-1].steps_lost == lost, "as the rows say"

    def _check_killed(self) -> None:
        """Nobody could write a report: whoever looks says so, with what the rows say."""
        found = look(self.out_dir)
        assert (self.out_dir / ".run/lock").exists()
        assert found.report is not None
        agrees(found.report, self.out_dir)
        (compared,), _ = read_runs([self.out_dir])
        assert (compared.state, compared.report) == ("killed", found.report)
        watch = command_line("watch", self.out_dir, "--once")
        said = subprocess.run(
            watch, capture_output=True, text=True, env=command_environment(), timeout=120
        )
        assert says(" ".join(said.stdout.split()), "killed ... report"), said

    def _check_report(self, code: int, out: str) -> None:
        report = read_report(self.out_dir)
        agrees(report, self.out_dir)
        assert look(self.out_dir).state == report.outcome
        assert report.outcome in ("interrupted", "failed")
        if code > 0:  # else a signal came after all was said
            assert report.exit_code == code
            steps, newest = len(rows(self.out_dir)), Store(self.out_dir / "checkpoints").newest()
            words = " ".join(out.split())
            assert f"stopped after step {steps:,}" in words
            assert ("nothing was saved" in words) == (newest is None)
            assert ("saved to" in words) == (newest == steps)


def agrees(report: Report, out_dir: Path) -> None:
    """Compare a report with the rows and the checkpoints."""
    table, store = rows(out_dir), Store(out_dir / "checkpoints")
    steps = [int(row["step"]) for row in table]
    assert steps == list(range(1, len(table) + 1)), "no row twice, none missing"
    assert report.progress is not None
    assert report.progress.steps == len(table)
    assert report.progress.samples == int(table[-1]["samples"])
    assert report.resolved is not None and report.resolved.samples_per_epoch
    epochs = report.progress.samples / report.resolved.samples_per_epoch
    assert report.progress.epochs == pytest.approx(epochs)
    loss = report.loss or Loss()
    assert (loss.first, loss.last) == tuple(float(table[n]["loss"]) for n in (0, -1))
    first = report.resumed.from_step if report.resumed else 0
    tokens = sum(int(row["tokens"]) for row in table[first:])
    assert (report.tokens.real if report.tokens else 0) == tokens
    saved, newest = report.checkpoints or Checkpoints(), store.newest()
    if newest is None or newest <= first:
        assert saved.saved == 0 and saved.last is None
    else:
        assert saved.last == f"checkpoints/{store.path(newest).name}"
        assert saved.saved >= len([step for step in store.steps() if step > first])
    assert not [problem for step in store.steps() for problem in store.verify(step)]


OTHERS = tuple(name for name in ENDS if name not in QUICK)
OFTEN = ("2 x Ctrl+C to the command", "kill -9 of the command", "kill -9 of all")
"""Of each kind; the others repeat them."""


@pytest.mark.parametrize(
    "names",
    [
        *((name,) for name in QUICK),
        pytest.param((*OFTEN, OFTEN[0]), marks=pytest.mark.slow, id="one after the other"),
        pytest.param((*OTHERS, OTHERS[0]), marks=pytest.mark.matrix, id="all, one after the other"),
    ],
)
def test_the_report_agrees_with_the_rows_and_the_checkpoints(
    names: tuple[str, ...], tmp_path: Path, common: list[str]
) -> None:
    """After each end, and in a session that continues after it."""
    runs, dice = Runs(tmp_path, common), random.Random(str(names))
    for name in names:
        runs.check_session(ENDS[name], dice)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(8))
def test_so_it_does_after_storms_of_signals(seed: int, tmp_path: Path, common: list[str]) -> None:
    runs, dice = Runs(tmp_path, common), random.Random(seed)
    for _ in range(5):
        runs.check_session(storm, dice)
