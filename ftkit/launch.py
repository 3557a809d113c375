"""The supervisor: owns the run's directory, starts the rank, and says how the run ended.

It is no rank itself and imports no torch, so it can still name the cause, write the report and
leave nothing behind when a rank is killed.
"""

import dataclasses
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from ftkit.datafiles import check_data
from ftkit.display import Display
from ftkit.errors import UserError
from ftkit.hub import find_or_download
from ftkit.job import Job, RankError
from ftkit.machine import hardware, versions
from ftkit.parsing import to_yaml
from ftkit.planning import Devices, make_plan
from ftkit.recipe import Recipe
from ftkit.rendering import render
from ftkit.report import (
    FILE_NAME,
    PhaseTimes,
    Progress,
    Report,
    read_report,
    recipe_as_dict,
    utc_now,
    utc_text,
    without_tokens,
    write_report,
)

STATE = ".run"
"""Directory inside out_dir with what the ranks and the supervisor tell each other."""

EXIT_OUT_OF_MEMORY = 3
EXIT_BY_SIGNAL = {
    signal.SIGINT: (130, "Ctrl+C"),
    signal.SIGTERM: (143, "SIGTERM"),
    signal.SIGHUP: (129, "SIGHUP"),
}


def launch(recipe: Recipe, *, command: Sequence[str], overwrite: bool = False) -> int:
    """Check, start and supervise one run; the exit code of the command.

    Args:
        recipe: what was asked.
        command: the command line, for the report.
        overwrite: replace what is in out_dir instead of taking another directory.

    Raises:
        UserError: before anything has started, and nothing is left behind.
    """
    started_at_s = time.time()
    check_data(recipe.data)
    devices = find_devices(recipe)
    make_plan(recipe, devices)
    base = recipe.checkpoint_dir
    if not base.startswith("random:"):
        base = str(find_or_download(base, token=recipe.access_token).resolve())
    wanted = recipe.out_dir.expanduser()
    with _SignalRelay() as relay, claim(wanted, overwrite=overwrite) as out_dir:
        if out_dir != wanted:
            print(f"{wanted} holds another run: this one goes to {out_dir}", flush=True)
        recipe = dataclasses.replace(recipe, out_dir=out_dir)
        job = Job(
            recipe=recipe,
            devices=devices,
            base=base,
            command=tuple(without_tokens(command)),
            started_at_s=started_at_s,
        )
        try:
            (out_dir / "recipe.yaml").write_text(to_yaml(recipe), encoding="utf-8")
            job.write(out_dir / STATE / "job.json")
        except OSError as error:
            raise _unwritable(out_dir, error) from None
        return _supervise(job, relay)


def find_devices(recipe: Recipe) -> Devices:
    """What this machine offers for the recipe's accelerator."""
    cpu = Devices(accelerator="cpu", count=os.cpu_count() or 1)
    driver = any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/dxg"))
    if recipe.accelerator == "cpu" or (recipe.accelerator == "auto" and not driver):
        return cpu
    import torch

    if not torch.cuda.is_available():
        if recipe.accelerator == "cuda":
            raise UserError(
                "accelerator is cuda, but torch sees no CUDA GPU here. Try --accelerator cpu, or "
                "check nvidia-smi and that torch is a CUDA build."
            )
        return cpu
    count = torch.cuda.device_count()
    return Devices(
        accelerator="cuda",
        count=count,
        names=tuple(torch.cuda.get_device_name(i) for i in range(count)),
        bf16_native=torch.cuda.is_bf16_supported(including_emulation=False),
    )


@contextmanager
def claim(wanted: Path, *, overwrite: bool) -> Iterator[Path]:
    """A run directory of one's own, locked while the run lasts.

    A directory that holds anything is left alone and WANTED-2, WANTED-3, ... is taken, unless
    it may be overwritten.

    Raises:
        UserError: another run is at work there, or it cannot be written.
    """
    out_dir = wanted
    number = 2
    try:
        while not overwrite and out_dir.is_dir() and any(out_dir.iterdir()):
            out_dir = wanted.with_name(f"{wanted.name}-{number}")
            number += 1
        state = out_dir / STATE
        created = [path for path in (out_dir, *out_dir.parents) if not path.exists()]
        state.mkdir(parents=True, exist_ok=True)
        lock = (state / "lock").open("w")
    except OSError as error:
        raise _unwritable(out_dir, error) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"out_dir {out_dir} belongs to a run that is still at work. "
                "Wait for it, or try another --out_dir."
            ) from None
        _remove_entries(state, keep="lock")  # of a run that was killed with its supervisor
        replaced = state / "replaced"
        replaced.mkdir()
        _move_entries(out_dir, replaced)
        try:
            yield out_dir
        except UserError:  # nothing has run: leave the directory as it was
            _remove_entries(out_dir, keep=STATE)
            _move_entries(replaced, out_dir)
            raise
        finally:
            shutil.rmtree(state, ignore_errors=True)
            for path in created:
                if any(path.iterdir()):
                    break
                path.rmdir()


def _unwritable(out_dir: Path, error: OSError) -> UserError:
    return UserError(
        f"out_dir {out_dir} cannot be written: {error.strerror}. Try another --out_dir."
    )


def _remove_entries(directory: Path, *, keep: str) -> None:
    for entry in directory.iterdir():
        if entry.name != keep:
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _move_entries(source: Path, target: Path) -> None:
    for entry in source.iterdir():
        if entry.name != STATE:
            entry.rename(target / entry.name)


def _supervise(job: Job, relay: "_SignalRelay") -> int:
    out_dir = job.recipe.out_dir
    state = out_dir / STATE
    code = relay.run_rank(job)
    report = _last_report(job)
    error = RankError.read(state / "error.json")
    if error is not None and error.kind == "user" and not (report.progress or Progress()).steps:
        raise UserError(error.message)
    report = _conclude(report, code, relay.received, error)
    write_report(report, out_dir)
    with Display(out_dir) as display:
        display.show(render(report, out_dir))
    return report.exit_code


def _last_report(job: Job) -> Report:
    """The report as the rank last wrote it, or what is known of a rank that never came to that."""
    written = job.recipe.out_dir / STATE / FILE_NAME
    if written.exists():
        return read_report(written)
    seconds = time.time() - job.started_at_s
    return Report(
        outcome="failed",
        exit_reason="",
        exit_code=1,
        phase="set_up",
        started_at=utc_text(job.started_at_s),
        finished_at=utc_now(),
        command=list(job.command),
        method=job.recipe.method,
        recipe=recipe_as_dict(job.recipe),
        versions=versions(),
        hardware=hardware(),
        phases_s=PhaseTimes(set_up=seconds, total=seconds),
        progress=Progress(),
    )


class _SignalRelay:
    """Passes the first signal on to the rank, which ends gracefully; the second one kills it.

    The rank has a process group of its own: Ctrl+C and Ctrl+Z reach only this process. A signal
    that is ignored stays so, as `nohup` wants it.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._rank: subprocess.Popen[bytes] | None = None
        self._ready = Path()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "_SignalRelay":
        handlers = dict.fromkeys(EXIT_BY_SIGNAL, self._stop) | {signal.SIGTSTP: self._pause}
        for number, handler in handlers.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run_rank(self, job: Job) -> int:
        """Run the rank to its end, whatever happens here; its exit code."""
        state = job.recipe.out_dir / STATE
        self._ready = state / FILE_NAME
        environment = dict(os.environ)
        if job.recipe.access_token:
            environment["HF_TOKEN"] = job.recipe.access_token
        self._rank = subprocess.Popen(
            # -P: modules in the current directory are the user's, not ours
            [sys.executable, "-P", "-m", "ftkit.train", str(state / "job.json")],
            env=environment,
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
        try:
            if self.received:
                self._rank.kill()
            return self._rank.wait()
        finally:
            if self._rank.poll() is None:
                self._rank.kill()
                self._rank.wait()

    def _pause(self, _: int, __: FrameType | None) -> None:
        """Ctrl+Z: stand still with the rank and its workers until `fg` or `bg`."""
        self._signal_group(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._signal_group(signal.SIGCONT)

    def _signal_group(self, number: signal.Signals) -> None:
        if self._rank is not None and self._rank.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._rank.pid, number)

    def _stop(self, number: int, _: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        if self._rank is None or self._rank.poll() is not None:
            return
        if len(self.received) == 1 and self._ready.exists():
            self._rank.send_signal(signal.SIGINT)  # Lightning has ways of its own with SIGTERM
            text = "stopping after the current step (Ctrl+C again stops at once)"
        else:  # it has nothing to lose yet, or was asked before
            self._rank.kill()
            text = "stopping"
        with suppress(OSError):  # the terminal may be gone
            print(f"\nftkit: {text}", file=sys.stderr, flush=True)


def _conclude(
    report: Report, code: int, received: Sequence[signal.Signals], error: RankError | None
) -> Report:
    """The rank's report, completed with how the run ended."""
    report = dataclasses.replace(report, finished_at=utc_now())
    if error is None and code == 0:
        return report
    if received and (error is None or error.kind == "interrupted"):
        exit_code, reason = EXIT_BY_SIGNAL[received[0]]
        return dataclasses.replace(
            report, outcome="interrupted", exit_code=exit_code, exit_reason=reason
        )
    if error is None:
        return dataclasses.replace(report, exit_reason=_died(code))
    if error.kind == "out_of_memory":
        return dataclasses.replace(
            report,
            outcome="out_of_memory",
            exit_code=EXIT_OUT_OF_MEMORY,
            exit_reason=error.message,
        )
    return dataclasses.replace(report, exit_reason=error.message)


def _died(code: int) -> str:
    """How a rank ended that could not say it itself."""
    if code >= 0:
        return f"the training process ended with exit code {code}; see run.log"
    name = signal.Signals(-code).name
    hint = "; the kernel does this when host memory runs out" if name == "SIGKILL" else ""
    return f"the training process was killed by {name}{hint}"
