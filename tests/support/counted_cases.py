"""Runs jobs one after the other in the ranks of one process group and counts their tensors.

As rank_cases.py; beside each rank's report it leaves `peak.json` with the bytes of all tensors at
the highest moment after the first step.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftkit.utils.process import die_with_parent

MESSAGES = (
    "all_gather_single",
    "all_gather_into_tensor",
    "all_reduce",
    "reduce",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)


def returning_when_let_go(send: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch.distributed that returns once gloo's threads hold its tensors no more.

    A thread of gloo that is not scheduled may keep them for 20 ms after the message has arrived:
    memory that is taken, but not by what is tested here, and one time in twenty.
    """

    def sent(*args: Any, **kwargs: Any) -> Any:
        storages = [
            a.untyped_storage() for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)
        ]

        def holders() -> list[int]:
            return [torch._C._storage_Use_Count(storage._cdata) for storage in storages]

        before = holders()
        work = send(*args, **kwargs)
        give_up_s = time.monotonic() + 60
        while work is None and any(now > then for now, then in zip(holders(), before, strict=True)):
            assert time.monotonic() < give_up_s
            time.sleep(0.0001)
        return work

    return sent


if __name__ == "__main__":
    die_with_parent(os.getppid())
    gc.disable()
    import torch

    from ftkit.data.media import Pending
    from ftkit.planning.tracker import LiveTensors
    from ftkit.runs.job import Job
    from ftkit.strategies.distributed import rank
    from ftkit.training import rank as training_rank
    from ftkit.training.step import TrainStep

    run_step, predict = TrainStep.run, training_rank._note_prediction
    begin = Pending.begin
    live = LiveTensors(torch.device("cpu"))
    state = Path()

    def restart_after_first_step(self: TrainStep, step: int, batches: Any) -> Any:
        record = run_step(self, step, batches)
        if step == 0:
            live.restart()
        return record

    def count_before_prediction(*arguments: Any) -> None:
        live.__exit__(None, None, None)
        (state / "peak.json").write_text(json.dumps(live.peak().bytes))
        predict(*arguments)

    def read_at_once(self: Pending) -> None:
        begin(self)
        assert self._future is not None
        self._future.result()  # on a busy machine a thread may read it after the peak, or before

    for name in MESSAGES:  # those that this version of torch has
        if hasattr(torch.distributed, name):
            setattr(
                torch.distributed, name, returning_when_let_go(getattr(torch.distributed, name))
            )
    training_rank._note_prediction = count_before_prediction
    TrainStep.run = restart_after_first_step
    Pending.begin = read_at_once
    gc.freeze()
    gc.enable()
    with Path(os.devnull).open("w") as nowhere:
        for job in map(Path, sys.argv[1:]):
            live = LiveTensors(torch.device("cpu"))
            state = Job.read(job).directory.rank(rank()).path
            live.__enter__()
            if training_rank.run_rank(job, nowhere):
                sys.exit(f"{job} failed")
            gc.collect()  # as in rank_cases.py: what a run leaves would be counted in the next
