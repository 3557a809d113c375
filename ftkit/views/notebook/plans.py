"""`ftkit.plan` and `ftkit.preview`: memory, steps and data of a run before it starts."""

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any

from ftkit.errors import UserError
from ftkit.recipe.parsing import as_text
from ftkit.recipe.recipe import FINETUNE
from ftkit.utils.console.formatting import bytes_text
from ftkit.utils.console.terminal import REPORT_WIDTH, plain_text
from ftkit.utils.imports import silence_libraries
from ftkit.utils.json_values import from_json
from ftkit.views.notebook import display
from ftkit.views.notebook.commands import output_of

silence_libraries()  # before they are imported

from ftkit.data.inspection.display import InspectionText, inspection_fragment  # noqa: E402
from ftkit.data.inspection.inspection import Inspection  # noqa: E402
from ftkit.planning import predict  # noqa: E402
from ftkit.planning.gpus import find_gpu  # noqa: E402
from ftkit.planning.table import (  # noqa: E402
    plan_table,
    plan_title,
    plans_as_html,
    side_by_side,
    verdict,
)


class ShownPlan(predict.Planned):
    """A plan that a notebook shows; `print` shows the table of the command."""

    def __str__(self) -> str:
        return plain_text(plan_table(self))

    def __repr__(self) -> str:
        needs = bytes_text(self.memory.high_bytes)
        words = f", {verdict(self)} on {self.gpu.name}" if self.gpu else ""
        return f"<ftkit {plan_title(self)}: needs up to {needs}{words}>"

    def _repr_html_(self) -> str:
        return plans_as_html([self])


class Plans(list[ShownPlan]):
    """Plans in one table: `Plans([ftkit.plan(...), ftkit.plan(...)])`."""

    def __str__(self) -> str:
        return plain_text(side_by_side(self, REPORT_WIDTH))

    def _repr_html_(self) -> str:
        return plans_as_html(self)


def plan(
    recipe: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    /,
    *,
    command: str | None = None,
    gpu: str | None = None,
    name: str = "",
    **keys: Any,
) -> ShownPlan:
    """Predict what a run needs, as `ftkit plan`, without loading or downloading weights.

    Args:
        recipe: recipe files, later ones win.
        command: finetune or finetune_full. Default: finetune if the recipe has a LoRA key or
            quantize, or if there is no recipe.
        gpu: GPU to predict for: a100-80gb, 24GiB, or auto for the one of this machine. Default:
            the devices that a run would take here.
        name: label among several plans. Default: the name of the recipe.
        keys: of the recipe, dotted: `**{"train.micro_batch_size": 8}`.

    Raises:
        UserError: as a run would.
    """
    if command is not None and command not in FINETUNE:
        raise UserError(f"command is {command!r}, but must be one of {', '.join(FINETUNE)}.")
    several = [recipe] if isinstance(recipe, str | os.PathLike) else recipe or ()
    with display.shown_if_late("ftkit plan ..."):
        planned = predict.plan_files(
            [os.fspath(file) for file in several],
            [(key, as_text(value)) for key, value in keys.items()],
            command=command,
            gpu=None if gpu is None else find_gpu(gpu),
            name=name,
        )
    return ShownPlan(**{f.name: getattr(planned, f.name) for f in dataclasses.fields(planned)})


class ShownInspection(Inspection):
    """An inspection that a notebook shows; `print` shows the text of the command."""

    def __str__(self) -> str:
        return plain_text(InspectionText(self))

    def __repr__(self) -> str:
        train = [source.train for source in self.sources]
        return (
            f"<ftkit preview: samples {sum(each.samples for each in train):,}, "
            f"tokens {sum(each.tokens for each in train):,}, findings {len(self.findings)}>"
        )

    def _repr_html_(self) -> str:
        return inspection_fragment(self)


def preview(
    recipe: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    /,
    *,
    show: int = 3,
    **keys: Any,
) -> ShownInspection:
    """Inspect the data of a recipe before training, as `ftkit data`.

    Args:
        recipe: recipe files, later ones win.
        show: training samples to show token by token.
        keys: of the recipe, dotted: `**{"data.path": "chats.jsonl"}`.

    Raises:
        UserError: as a run would.
        KeyboardInterrupt: it was interrupted.
    """
    several = [recipe] if isinstance(recipe, str | os.PathLike) else recipe or ()
    words = ["data", *(f"--config={os.fspath(file)}" for file in several), f"--show={show}"]
    words += [f"--{key}={as_text(value)}" for key, value in keys.items()]
    values = json.loads(output_of([*words, "--format=json"]))
    inspection: ShownInspection = from_json(ShownInspection, values)
    return inspection
