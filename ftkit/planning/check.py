"""The plan of a run that is about to start, made in a process of its own.

The supervisor imports no torch: it starts
`python -m ftkit.planning.check RECIPE.yaml GPU FAILED PLUGIN`, with the fields of a `Gpu` as JSON
and the file of a `Plugin` or nothing, and reads JSON from its standard output.
"""

import dataclasses
import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ftkit.utils.imports import prepare_imports

if __name__ == "__main__":
    gc.disable()  # as in quick_imports
    prepare_imports()

from ftkit.errors import UserError
from ftkit.planning.gpus import Gpu
from ftkit.planning.predict import Planned, plan_files
from ftkit.planning.suggest import changes_that_fit
from ftkit.recipe.parsing import Override
from ftkit.recipe.plugin import Plugin, using

_ADVICE = 3
"""Changes that a refusal names."""


def check(file: str, gpu: Gpu, *, failed: bool = False) -> dict[str, object]:
    """Plan a recipe: whether it fits, its micro-batch, and changes that help if it does not.

    Args:
        file: the recipe.
        gpu: device of each rank.
        failed: whether a run of it ran out of memory, so that there is less than predicted.
    """
    if failed:
        # It ran out of memory although the prediction says that it fits: assume less memory than
        # predicted.
        needed_bytes = plan_files([file], gpu=gpu).high_bytes
        less_bytes = min(gpu.memory_bytes, needed_bytes - 1)
        gpu = dataclasses.replace(gpu, memory_bytes=less_bytes, swap_bytes=0)

    def attempt(changed: Sequence[Override]) -> Planned:
        return plan_files([file], changed, gpu=gpu)

    planned = attempt(())
    changes = []
    if planned.fits is False or failed:
        changes = changes_that_fit(planned, attempt, most=_ADVICE)
    return {
        "fits": planned.fits,
        "micro_batch_size": planned.plan.micro_batch_size,
        "micro_batch_tokens": planned.plan.micro_batch_tokens,
        "low_bytes": planned.least_bytes,
        "high_bytes": planned.high_bytes,
        "other_model": planned.other_model_words,
        "host_bytes": planned.memory.host_bytes,
        "host_low_bytes": planned.memory.host_low_bytes,
        "peak_bytes": planned.memory.peak_bytes,
        "length_source": planned.length.source,
        "length": planned.length.words,
        "changes": [
            {
                "title": change.title,
                "fits": change.planned.fits,
                "method": change.planned.plan.recipe.method,
                "overrides": change.overrides,
            }
            for change in changes
        ],
    }


if __name__ == "__main__":
    # What was imported is never garbage.
    gc.freeze()
    gc.enable()
    _file, _gpu, _failed, _plugin = sys.argv[1:]
    _own = Plugin.from_json(json.loads(Path(_plugin).read_bytes())) if _plugin else None
    try:
        with using(_own):
            _found = check(_file, Gpu(**json.loads(_gpu)), failed=_failed == "True")
    except UserError as error:  # the run itself reports it better
        _found = {"error": str(error)}
    print(json.dumps(_found))
