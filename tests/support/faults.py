"""Faults that are injected into a rank; see preloaded.py."""

import errno
import itertools
import os
import resource
import signal
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import witness

from ftkit.checkpoint import saver as saver_module
from ftkit.checkpoint.saver import Saver
from ftkit.launch import preflight, ranks
from ftkit.objectives.step_loss import StepLoss
from ftkit.training import rank as training_rank
from ftkit.training.recorder import Recorder
from ftkit.training.step import TrainStep
from ftkit.utils import safetensors_files

CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.chmod", "os.truncate"}
"""Audit events of calls that change a file system; see docs.python.org/3/library/audit_events."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
BALLAST = "ballast"
"""File that fills a disk."""


def _before_save(step: int, action: Callable[[Saver], None]) -> None:
    """Do something right before a step is saved, when nothing else is being written."""
    save = Saver.save

    def with_action(saver: Saver, metadata: Any, *arguments: Any, **options: Any) -> None:
        if metadata.step == step:
            saver.wait()
            action(saver)
        save(saver, metadata, *arguments, **options)

    Saver.save = with_action


def killed_at(step: int, number: int) -> None:
    """Die at one moment from the saving of a step on; see `killed_in`."""
    _before_save(step, lambda saver: killed_in(str(saver.store.directory.parent), number))


def killed_in(out_dir: str, number: int) -> None:
    """Die at one moment from now on.

    The moments lie before each call that changes something beside the logs, and so after each.
    What is not synced yet is half there.

    Args:
        out_dir: of the run.
        number: calls that happen before.
    """
    left, process = number, os.getpid()

    def happens(path: object) -> None:
        nonlocal left
        if os.getpid() != process or not _concerns(path, out_dir):
            return
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES or (event == "open" and (arguments[2] or 0) & WRITING):
            happens(arguments[0])

    def fsync(descriptor: int, fsync: Callable[[int], None] = os.fsync) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        status = os.fstat(descriptor)
        if left == 0 and stat.S_ISREG(status.st_mode) and _concerns(path, out_dir):
            with path.open("r+b") as file:
                file.truncate(status.st_size // 2)
        happens(path)
        fsync(descriptor)

    def save_file(
        tensors: Any,
        path: Path,
        save: Callable[..., None] = safetensors_files.save_file,  # type: ignore[attr-defined]
        **options: Any,
    ) -> None:
        happens(path)
        save(tensors, path, **options)
        happens(path)

    os.fsync = fsync
    safetensors_files.save_file = save_file  # type: ignore[attr-defined]
    sys.addaudithook(audit)


def _concerns(path: object, out_dir: str) -> bool:
    """Return whether a path is in the run, outside of the messages of ranks and supervisor."""
    if not isinstance(path, str | Path):
        return False
    if not Path(path).is_absolute():  # an entry of a directory that is being deleted
        return True
    is_log = str(path).endswith((".csv", ".log"))
    return str(path).startswith(f"{out_dir}/") and f"{out_dir}/.run" not in str(path) and not is_log


def full_disk(full_at: int, free_at: int | None) -> None:
    """Fill the disk right before a step is saved, to the last byte.

    Args:
        full_at: this step.
        free_at: the step before whose saving there is space again; None: never.
    """

    def fill(saver: Saver) -> None:
        with (saver.store.directory.parent / BALLAST).open("wb", buffering=0) as file:
            for size in (2**16, 2**12, 1):
                with suppress(OSError):
                    while file.write(bytes(size)):
                        pass

    _before_save(full_at, fill)
    if free_at is not None:
        _before_save(free_at, lambda saver: (saver.store.directory.parent / BALLAST).unlink())


def small_files(limit: int, full_at: int, free_at: int | None) -> None:
    """From one step on, no file can be written beyond a limit, until another step.

    Args:
        limit: in bytes.
        full_at: the step before whose saving that begins.
        free_at: the step before whose saving it ends; None: never.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    lower = (limit, before[1])
    _before_save(full_at, lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, lower))
    if free_at is not None:
        _before_save(free_at, lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, before))


def little_memory(more: int) -> None:
    """This process and those that it starts may take no more than so many bytes beyond now."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])  # data and stack
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def kernel_that_kills_for_memory() -> None:
    """The kernel's count of processes that it killed for memory grows each time it is read."""
    counts = itertools.count(7)
    ranks.processes_killed_for_memory = lambda: next(counts)  # type: ignore[attr-defined, misc]
    no_advice()


def no_advice() -> None:
    """Nothing is found that would fit; importing takes too long for every test."""
    preflight.check = lambda *_, **__: {}


def on_card(
    counts_in: str, shortage: dict[str, Any] | None, follows_memory: bool, *others: str
) -> None:
    """Faults of a rank on a simulated card.

    Args:
        counts_in: directory for what is counted in it.
        shortage: arguments of simulated_card.settings.Shortage; None: memory does not run out.
        follows_memory: whether the memory of some steps is measured, which has synchronisations
            of its own.
        *others: names of functions here to call too.
    """
    from simulated_card import counts
    from simulated_card.settings import Shortage

    from ftkit.training import loop
    from ftkit.training import rank as training_rank

    run_rank = training_rank.run_rank
    for other in others:
        globals()[other]()
    if not follows_memory:
        loop.steps_to_measure = lambda order: set()  # type: ignore[attr-defined]

    def counted(*arguments: Any) -> int:
        try:
            return run_rank(*arguments)
        finally:
            counts.write(Path(counts_in))

    training_rank.run_rank = counted
    if shortage is not None:
        counts.run_out(Shortage(**shortage))


def reads_a_number_in_each_micro_step() -> None:
    """A line that makes the host wait for the device, such as slips in with a print."""
    loss_of = StepLoss.of_micro_batch

    def reading(self: StepLoss, *arguments: Any) -> Any:
        loss = loss_of(self, *arguments)
        loss.item()
        return loss

    StepLoss.of_micro_batch = reading


def skips_the_last_block() -> None:
    """The last block returns its input, so that its parameters have no gradient."""
    prepare = TrainStep.__init__

    def prepare_without(self: TrainStep, model: Any, *arguments: Any, **options: Any) -> None:
        model.body.blocks[-1].forward = lambda hidden, *_, **__: hidden
        prepare(self, model, *arguments, **options)

    TrainStep.__init__ = prepare_without


def has_little_memory() -> None:
    """Another program takes all memory of the device that is free."""
    torch.cuda.mem_get_info = lambda *_: (0, 2**30)


def killed_in_training() -> None:
    """SIGKILL in the first forward pass."""
    _in_training(lambda: os.kill(os.getpid(), signal.SIGKILL))


def out_of_memory(where: str, words: str | None = None) -> None:
    """No memory on a GPU, in the forward or the backward pass or when the optimizer is made.

    Args:
        where: forward, backward or optimizer.
        words: of the driver; None: torch's allocator says it.
    """

    def fail(*_: Any, **__: Any) -> None:
        if words is not None:
            raise RuntimeError(words)
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
            "23.60 GiB of which 1.00 GiB is free."
        )

    if where == "forward":
        _in_training(fail)
        return
    if where == "optimizer":
        torch.optim.Optimizer.__init__ = fail
        return
    loss_of = StepLoss.of_micro_batch

    def failing(self: StepLoss, *arguments: Any) -> Any:
        loss = loss_of(self, *arguments)
        loss.register_hook(fail)
        return loss

    StepLoss.of_micro_batch = failing


def memory_for(tokens: int, first_pass: int, how: str) -> None:
    """Larger micro-batches find no memory.

    Args:
        tokens: in the largest that does.
        first_pass: forward pass of this process, counted from 1, with which that begins.
        how: raise, or kill, as the kernel does.
    """
    micro_step, count = TrainStep.micro_step, itertools.count(1)

    def limited(self: TrainStep, batch: Any) -> None:
        if next(count) >= first_pass and batch["input_ids"].numel() > tokens:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise torch.OutOfMemoryError("no memory left for this micro-batch")
        micro_step(self, batch)

    TrainStep.micro_step = limited


def ended_by_a_library(exit_summary: str) -> None:
    """Compiled code says why, and ends the process in the first forward pass."""

    def end() -> None:
        os.write(2, f"{exit_summary}\n".encode())
        os._exit(1)

    _in_training(end)


def fails_and_predicts_late() -> None:
    """An error in the first forward pass, and a prediction that takes until others have ended."""

    def predict_late(recorder: Recorder, *_: object) -> None:
        supervisor = psutil.Process(os.getppid())
        give_up_s = time.monotonic() + 60
        while len(supervisor.children()) > 1:
            if time.monotonic() > give_up_s:
                return
            time.sleep(0.05)
        recorder.warn("predicted when the others had ended")

    training_rank._note_prediction = predict_late
    _in_training(lambda: 1 / 0)


def watched(directory: str, ends_at: int | None) -> None:
    """Training beside a witness.

    Args:
        directory: where it writes.
        ends_at: the forward pass, counted from 1, that fails; None: none does.
    """
    micro_step, count = TrainStep.micro_step, itertools.count(1)

    def failing(self: TrainStep, batch: Any) -> None:
        assert next(count) != ends_at
        micro_step(self, batch)

    TrainStep.micro_step = failing
    witness.watch(Path(directory))


def _in_training(action: Callable[[], object]) -> None:
    def act(*_: Any) -> None:
        action()

    TrainStep.micro_step = act


def failing_shard(*steps: int) -> None:
    """The shard of this rank cannot be written at these steps."""

    def failing(write: Callable[..., None]) -> Callable[..., None]:
        def write_or_fail(path: Path, *arguments: Any) -> None:
            if any(path.parent.name == f".step-{step:08}.partial" for step in steps):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            write(path, *arguments)

        return write_or_fail

    for name in ("write_shard", "write_shard_in_portions"):
        setattr(saver_module, name, failing(getattr(saver_module, name)))
