"""Runs jobs one after the other in the ranks of one process group and counts their tensors.

As rank_cases.py; beside each rank's report it leaves `peak.json` with the bytes of all tensors at
the highest moment after the first step.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from ftkit.process import die_with_parent

if __name__ == "__main__":
    die_with_parent(os.getppid())
    import torch

    from ftkit.callbacks import StepMeter
    from ftkit.memory.live import LiveTensors
    from ftkit.ranks import rank_directory
    from ftkit.strategy import rank
    from ftkit.train import run_rank

    measure = StepMeter.on_train_batch_end
    live = LiveTensors(torch.device("cpu"))

    def restart_after_first_step(self: StepMeter, trainer: Any, *args: Any) -> None:
        measure(self, trainer, *args)
        if trainer.global_step == 1 and not trainer.fit_loop._should_accumulate():
            live.restart()

    StepMeter.on_train_batch_end = restart_after_first_step  # type: ignore[method-assign]
    with Path(os.devnull).open("w") as nowhere:
        for job in map(Path, sys.argv[1:]):
            live = LiveTensors(torch.device("cpu"))
            with live:
                if run_rank(job, nowhere):
                    sys.exit(f"{job} failed")
            peak = live.peak()
            (rank_directory(job.parent, rank()) / "peak.json").write_text(json.dumps(peak.bytes))
