"""What type checkers and editors see of `import ftkit`, which imports nothing before it is used.

Options of functions that take keys of recipes are Any here: as `**{"train.epochs": 2}` these keys
could be any of them, for all that a type checker knows.
"""

import os
from collections.abc import Sequence
from typing import Any

from ftkit.errors import DoesNotFit as DoesNotFit
from ftkit.errors import UserError as UserError
from ftkit.extensions.comparison.compare import compare as compare
from ftkit.extensions.notebook.api import Run as Run
from ftkit.extensions.notebook.api import attach as attach
from ftkit.extensions.notebook.experiments import Experiments as Experiments
from ftkit.extensions.notebook.plans import Plans as Plans
from ftkit.extensions.notebook.plans import ShownPlan
from ftkit.extensions.notebook.previews import ShownInspection
from ftkit.extensions.notebook.results import Chat as Chat
from ftkit.extensions.notebook.results import chat as chat
from ftkit.extensions.notebook.results import evaluate as evaluate
from ftkit.extensions.notebook.results import export as export
from ftkit.extensions.notebook.results import generate as generate
from ftkit.extensions.notebook.results import merge as merge
from ftkit.extensions.notebook.results import push as push
from ftkit.models.loss import LogProbabilities as LogProbabilities
from ftkit.models.loss import SummedLoss as SummedLoss
from ftkit.objectives.objective import Objective as Objective
from ftkit.objectives.objective import Term as Term
from ftkit.training.callbacks import Callback as Callback

_Path = str | os.PathLike[str]

__all__: list[str]
__version__: str

def finetune(
    recipe: _Path | Sequence[_Path] | None = None,
    /,
    *,
    wait: Any = True,
    overwrite: Any = False,
    force: Any = False,
    stop_after: Any = None,
    plugin: _Path | None = None,
    **keys: Any,
) -> Run: ...
def finetune_full(
    recipe: _Path | Sequence[_Path] | None = None,
    /,
    *,
    wait: Any = True,
    overwrite: Any = False,
    force: Any = False,
    stop_after: Any = None,
    plugin: _Path | None = None,
    **keys: Any,
) -> Run: ...
def plan(
    recipe: _Path | Sequence[_Path] | None = None,
    /,
    *,
    command: str | None = None,
    gpu: Any = None,
    name: Any = "",
    plugin: _Path | None = None,
    **keys: Any,
) -> ShownPlan: ...
def preview(
    recipe: _Path | Sequence[_Path] | None = None, /, *, show: Any = 3, **keys: Any
) -> ShownInspection: ...
