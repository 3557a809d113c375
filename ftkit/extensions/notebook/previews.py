"""`ftkit.preview`: inspection of data before training, for notebooks."""

# Not in `plans`, which imports torch: the inspection runs in a child process.

import json
import os
from collections.abc import Sequence
from typing import Any

from ftkit.data.inspection.display import InspectionText, inspection_fragment
from ftkit.data.inspection.inspection import Inspection
from ftkit.extensions.notebook.children import output_of
from ftkit.recipe.parsing import as_text
from ftkit.utils.console.terminal import plain_text
from ftkit.utils.json_values import from_json


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
    words += [f"--{key}={as_text(value, key)}" for key, value in keys.items()]
    values = json.loads(output_of([*words, "--format=json"]))
    inspection: ShownInspection = from_json(ShownInspection, values)
    return inspection
