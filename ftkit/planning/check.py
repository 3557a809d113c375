"""The plan of a run that is about to start, made in a process of its own.

The supervisor imports no torch: it starts
`python -m ftkit.planning.check PARENT`, writes the recipe, the fields of a `Gpu` and a `Plugin` or
null to its standard input, and reads the answer from its standard output, all in JSON.
"""

import dataclasses
import gc
import io
import json
import sys
from collections.abc import Sequence

from ftkit.utils.imports import prepare_imports
from ftkit.utils.process import begin_as_child

if __name__ == "__main__":
    begin_as_child()
    gc.disable()  # as in quick_imports
    prepare_imports()

from ftkit.errors import UserError
from ftkit.planning.gpus import Gpu
from ftkit.planning.predict import Planned, plan_files
from ftkit.planning.suggest import changes_that_fit
from ftkit.recipe.batches import MicroBatch
from ftkit.recipe.parsing import Override
from ftkit.recipe.plugin import Plugin, using
from ftkit.utils.json_values import from_json
from ftkit.utils.yaml_files import STANDARD_INPUT

_ADVICE = 3
"""Changes that a refusal names."""


def check(
    file: str, gpu: Gpu, *, failed: bool = False, chosen: MicroBatch | None = None
) -> dict[str, object]:
    """Plan a recipe: whether it fits, its micro-batch, and changes that help if it does not.

    Args:
        file: the recipe.
        gpu: device of each rank.
        failed: whether a run of it ran out of memory, so that there is less than predicted.
        chosen: the largest micro-batch to plan where the recipe leaves it open; None: the usual
            one.
    """

    def attempt(changed: Sequence[Override]) -> Planned:
        return plan_files([file], changed, gpu=gpu, chosen=chosen, shrinks=not failed)

    if failed:
        # It ran out of memory although the prediction says that it fits: assume less memory than
        # predicted.
        needed_bytes = attempt(()).high_bytes
        less_bytes = min(gpu.memory_bytes, needed_bytes - 1)
        gpu = dataclasses.replace(gpu, memory_bytes=less_bytes, swap_bytes=0)

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
    _request = json.load(sys.stdin)
    _own = Plugin.from_json(_request["plugin"]) if _request["plugin"] else None
    # A file in a directory for temporary ones would stay there if the parent is killed.
    sys.stdin = io.StringIO(_request["recipe"])
    try:
        with using(_own):
            _found = check(
                str(STANDARD_INPUT),
                Gpu(**_request["gpu"]),
                failed=_request["failed"],
                chosen=from_json(MicroBatch | None, _request["chosen"]),
            )
    except UserError as error:  # the run itself reports it better
        _found = {"error": str(error)}
    print(json.dumps(_found))
