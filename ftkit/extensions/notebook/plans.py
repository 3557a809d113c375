"""`ftkit.plan`: predictions of memory, disk space and steps, for notebooks."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from ftkit.utils.imports import silence_libraries

silence_libraries()  # they report what they do not find when they are imported

from ftkit.errors import UserError  # noqa: E402
from ftkit.extensions.notebook import display  # noqa: E402
from ftkit.planning import predict  # noqa: E402
from ftkit.planning.gpus import find_gpu  # noqa: E402
from ftkit.planning.table import (  # noqa: E402
    plan_table,
    plan_title,
    plans_as_html,
    side_by_side,
    verdict,
)
from ftkit.recipe.parsing import as_text  # noqa: E402
from ftkit.recipe.plugin import open_plugin, using  # noqa: E402
from ftkit.recipe.recipe import FINETUNE  # noqa: E402
from ftkit.utils.accelerators.backends import refuse_idle_backend  # noqa: E402
from ftkit.utils.console.formatting import bytes_text  # noqa: E402
from ftkit.utils.console.terminal import REPORT_WIDTH, plain_text  # noqa: E402


class ShownPlan(predict.Planned):
    """A plan that a notebook shows; `print` shows the table of the command."""

    def __str__(self) -> str:
        return plain_text(plan_table(self))

    def __repr__(self) -> str:
        needs = bytes_text(self.high_bytes)
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
    plugin: str | os.PathLike[str] | None = None,
    **keys: Any,
) -> ShownPlan:
    """Predict what a run needs, as `ftkit plan`, without loading or downloading weights.

    Args:
        recipe: recipe files, later ones win.
        command: finetune or finetune_full. Default: finetune if the recipe has a LoRA key or
            quantize, or if there is no recipe.
        gpu: GPU to predict for: a100-80gb, 24GiB, or auto for the one of this machine. Default:
            the devices that a run would use here.
        name: label among several plans. Default: the name of the recipe.
        plugin: Python file of your own, as --plugin.
        keys: of the recipe, dotted: `**{"train.micro_batch_size": 8}`.

    Raises:
        UserError: as a run would.
    """
    if command is not None and command not in FINETUNE:
        raise UserError(f"command is {command!r}, but must be one of {', '.join(FINETUNE)}.")
    refuse_idle_backend()  # memory is predicted from a simulated step, with its backward pass
    several = [recipe] if isinstance(recipe, str | os.PathLike) else recipe or ()
    with (
        display.shown_if_late("ftkit plan ..."),
        using(open_plugin(None if plugin is None else os.fspath(plugin))),
    ):
        planned = predict.plan_files(
            [os.fspath(file) for file in several],
            [(key, as_text(value, key)) for key, value in keys.items()],
            command=command,
            gpu=None if gpu is None else find_gpu(gpu),
            name=name,
        )
    # Field by field and not by `asdict`, which would turn the inner dataclasses into dicts.
    return ShownPlan(**{f.name: getattr(planned, f.name) for f in dataclasses.fields(planned)})
