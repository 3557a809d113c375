"""As rank_cases.py, with torch's profiler as a witness of every measured step.

It sees each byte that the allocator of the CPU hands out, also inside operations. What it saw lies
beside the job: `witness-RANK.json`.
"""

import json
import runpy
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ftkit.planning import meter
from ftkit.strategies.distributed import rank
from ftkit.training.loop import Training


class Witness(meter.MemoryMeter):
    """Compares the tracked tensors with the allocations."""

    directory: Path

    def _begin(self) -> None:
        super()._begin()
        self._known_bytes = self._live.total_bytes
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.start()

    def _end(self) -> None:
        self._profile.stop()
        tracked_bytes = self._live.peak().total_bytes
        end_bytes = self._live.total_bytes
        events = self._profile.profiler.kineto_results.events()
        now = highest = self._known_bytes
        for event in sorted(events, key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                now += event.nbytes()
                highest = max(highest, now)
        file = self.directory / f"witness-{rank()}.json"
        seen = json.loads(file.read_text()) if file.exists() else []
        seen.append(
            {
                "step": self._step + 1,
                "tracked_bytes": tracked_bytes,
                "allocated_bytes": highest,
                "tracked_at_end_bytes": end_bytes,
                "allocated_at_end_bytes": now,
            }
        )
        file.write_text(json.dumps(seen))
        super()._end()


def of_run(training: Training) -> None:
    Witness.directory = training._recipe.out_dir / ".run"


if __name__ == "__main__":
    from ftkit.training import loop

    # On a processor without bfloat16, oneDNN converts the factors of a product to float32 inside
    # the operation; torch's own kernel takes no memory there on any processor.
    torch.backends.mkldnn.enabled = False
    run = loop.Training.run

    def witnessed(self: Training) -> None:
        of_run(self)
        run(self)

    loop.Training.run = witnessed
    loop.MemoryMeter = Witness  # type: ignore[attr-defined]
    runpy.run_path(
        str(Path(__file__).with_name("rank_cases.py")),
        run_name="__main__",
        init_globals={"MEASURES_MEMORY": True},
    )
