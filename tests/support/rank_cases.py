"""Runs several jobs one after the other in the ranks of one process group.

Imports and connecting cost more than the tiny runs themselves. Started by test_strategies.py with
torchrun's environment variables: `python rank_cases.py JOB.json ...`.
"""

import functools
import gc
import os
import sys
from importlib import metadata
from pathlib import Path

from ftkit.utils.process import die_with_parent

if __name__ == "__main__":
    die_with_parent(os.getppid())
    gc.disable()
    from ftkit.models import language_model
    from ftkit.training import loop, rank, setup

    # They take longer than such a run; memory_cases.py measures, counted_cases.py predicts, and
    # tests/models/test_dry_run.py tries models.
    rank._note_prediction = lambda *_: None
    setup.require_trainable = lambda *_, **__: None  # type: ignore[attr-defined]
    if "MEASURES_MEMORY" not in globals():
        loop.steps_to_measure = lambda order: set()  # type: ignore[attr-defined]
    # Every run reports the versions of all packages, which takes a tenth of such a run.
    metadata.version = functools.cache(metadata.version)
    language_model.COMPILE_BACKEND = "aot_eager"  # the same graphs, without half a minute of g++
    gc.freeze()  # as ftkit.utils.imports.quick_imports; a fifth of the time in which cases run
    gc.enable()
    with Path(os.devnull).open("w") as nowhere:
        for job in sys.argv[1:]:
            if rank.run_rank(Path(job), nowhere):
                sys.exit(f"{job} failed")
            gc.collect()  # else the memory of one run would still be there in the next
