"""Runs jobs one after the other in the ranks of one process group and counts their tensors.

As rank_cases.py; beside each rank's report it leaves `peak.json` with the bytes of all tensors at
the highest moment after the first step.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from ftkit.process import die_with_parent

if __name__ == "__main__":
    die_with_parent(os.getppid())
    gc.disable()
    import torch

    from ftkit import train
    from ftkit.callbacks import StepMeter
    from ftkit.memory.live import LiveTensors
    from ftkit.ranks import rank_directory
    from ftkit.strategy import rank

    measure, predict = StepMeter.on_train_batch_end, train._note_prediction
    live = LiveTensors(torch.device("cpu"))
    state = Path()

    def restart_after_first_step(self: StepMeter, trainer: Any, *args: Any) -> None:
        measure(self, trainer, *args)
        if trainer.global_step == 1 and not trainer.fit_loop._should_accumulate():
            live.restart()

    def count_before_prediction(job: Any, recorder: Any) -> None:
        live.__exit__(None, None, None)
        (state / "peak.json").write_text(json.dumps(live.peak().bytes))
        predict(job, recorder)

    train._note_prediction = count_before_prediction
    StepMeter.on_train_batch_end = restart_after_first_step  # type: ignore[method-assign]
    gc.freeze()
    gc.enable()
    with Path(os.devnull).open("w") as nowhere:
        for job in map(Path, sys.argv[1:]):
            live = LiveTensors(torch.device("cpu"))
            state = rank_directory(job.parent, rank())
            live.__enter__()
            if train.run_rank(job, nowhere):
                sys.exit(f"{job} failed")
            gc.collect()  # as in rank_cases.py: what a run leaves would be counted in the next
