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
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ftkit.datafiles import check_data
from ftkit.display import Display
from ftkit.errors import UserError
from ftkit.hub import find_or_download
from ftkit.job import Job, RankError
from ftkit.parsing import to_yaml
from ftkit.planning import Devices, make_plan
from ftkit.recipe import Recipe
from ftkit.rendering import render
from ftkit.report import FILE_NAME, Report, read_report, utc_now, without_tokens, write_report

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
    devices = find_devices(recipe)
    make_plan(recipe, devices)
    check_data(recipe.data)
    base = recipe.checkpoint_dir
    if not base.startswith("random:"):
        base = str(find_or_download(base, token=recipe.access_token).resolve())
    with claim(recipe.out_dir, overwrite=overwrite) as out_dir:
        if out_dir != recipe.out_dir:
            print(f"{recipe.out_dir} holds another run: this one goes to {out_dir}", flush=True)
        recipe = dataclasses.replace(recipe, out_dir=out_dir)
        (out_dir / "recipe.yaml").write_text(to_yaml(recipe), encoding="utf-8")
        job = Job(
            recipe=recipe,
            devices=devices,
            base=base,
            command=tuple(without_tokens(command)),
            started_at_s=started_at_s,
        )
        return _supervise(job)


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
    while not overwrite and out_dir.is_dir() and any(out_dir.iterdir()):
        out_dir = wanted.with_name(f"{wanted.name}-{number}")
        number += 1
    try:
        state = out_dir / STATE
        state.mkdir(parents=True, exist_ok=True)
        lock = (state / "lock").open("w")
    except OSError as error:
        raise UserError(
            f"out_dir {out_dir} cannot be written: {error.strerror}. Try another --out_dir."
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"out_dir {out_dir} belongs to a run that is still at work. "
                "Wait for it, or try another --out_dir."
            ) from None
        replaced = state / "replaced"
        replaced.mkdir(exist_ok=True)
        _move_entries(out_dir, replaced)
        try:
            yield out_dir
        except UserError:  # nothing has run: leave the directory as it was
            for entry in out_dir.iterdir():
                if entry != state:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            _move_entries(replaced, out_dir)
            raise
        finally:
            shutil.rmtree(state, ignore_errors=True)
            if not any(out_dir.iterdir()):
                out_dir.rmdir()


def _move_entries(source: Path, target: Path) -> None:
    for entry in source.iterdir():
        if entry.name != STATE:
            entry.rename(target / entry.name)


def _supervise(job: Job) -> int:
    out_dir = job.recipe.out_dir
    state = out_dir / STATE
    job.write(state / "job.json")
    environment = dict(os.environ)
    if job.recipe.access_token:
        environment["HF_TOKEN"] = job.recipe.access_token
    rank = subprocess.Popen(
        [sys.executable, "-m", "ftkit.train", str(state / "job.json")],
        env=environment,
        stdin=subprocess.DEVNULL,
        process_group=0,
    )
    with _forwarding_signals(rank) as received:
        code = rank.wait()
    error = RankError.read(state / "error.json")
    if error is not None and error.kind == "user":
        raise UserError(error.message)
    report = _conclude(read_report(state / FILE_NAME), code, received, error)
    write_report(report, out_dir)
    with Display(out_dir) as display:
        display.show(render(report, out_dir))
    return report.exit_code


@contextmanager
def _forwarding_signals(rank: "subprocess.Popen[bytes]") -> Iterator[list[signal.Signals]]:
    """Pass the first signal on, so that the rank ends gracefully; the second one ends it at once.

    The rank has a process group of its own: Ctrl+C reaches only this process.
    """
    received: list[signal.Signals] = []

    def handle(number: int, _: FrameType | None) -> None:
        received.append(signal.Signals(number))
        if len(received) == 1:
            print(
                "\nftkit: stopping after the current step (Ctrl+C again stops at once)",
                file=sys.stderr,
                flush=True,
            )
            rank.send_signal(number)
        else:
            rank.kill()

    before = {number: signal.signal(number, handle) for number in EXIT_BY_SIGNAL}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if rank.poll() is None:
            rank.kill()
            rank.wait()


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
