"""Fine-tune language models with PyTorch Lightning: full, LoRA and QLoRA.

In Python and in notebooks::

    import ftkit

    run = ftkit.finetune("recipes/x.yaml", **{"train.micro_batch_size": 8})
    run.report
    print(ftkit.generate(run, "Tell me a story."))
    ftkit.compare([run, "out/other"]).plot()
"""

import importlib
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ftkit.version import __version__ as __version__

_MODULE_OF = {
    "Chat": "views.notebook.results",
    "Callback": "training.callbacks",
    "DoesNotFit": "errors",
    "Experiments": "views.notebook.experiments",
    "LogProbabilities": "models.loss",
    "Objective": "objectives.objective",
    "Plans": "views.notebook.plans",
    "Run": "views.notebook.api",
    "SummedLoss": "models.loss",
    "Term": "objectives.objective",
    "UserError": "errors",
    "attach": "views.notebook.api",
    "chat": "views.notebook.results",
    "compare": "views.comparison.compare",
    "evaluate": "views.notebook.results",
    "export": "views.notebook.results",
    "finetune": "views.notebook.api",
    "finetune_full": "views.notebook.api",
    "generate": "views.notebook.results",
    "merge": "views.notebook.results",
    "plan": "views.notebook.plans",
    "preview": "views.notebook.previews",
    "push": "views.notebook.results",
}
"""Module below ftkit of each name of the Python API; it is imported when the name is first used."""
__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ftkit' has no attribute {name!r}")
    backends = importlib.import_module("ftkit.utils.accelerators.backends")
    with _told_in_a_cell(), backends.backends_kept_out():
        module = importlib.import_module(f"ftkit.{_MODULE_OF[name]}")
    return getattr(module, name)


def _told_in_a_cell() -> AbstractContextManager[None]:
    """In a notebook, show that libraries are loaded if that takes long."""
    # A kernel has imported IPython before any cell runs; other processes are spared the import of
    # the display.
    if "IPython" not in sys.modules:
        return nullcontext()
    display = importlib.import_module("ftkit.views.notebook.display")
    if not display.in_notebook():
        return nullcontext()
    shown: AbstractContextManager[None] = display.shown_if_late("loading libraries ...")
    return shown


def __dir__() -> list[str]:
    # Completion in a notebook offers names that are not imported yet.
    return sorted({*globals(), *__all__})
