"""Names of `import ftkit`: each is imported from its module when it is first used."""

import importlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from ftkit.utils.accelerators.backends import backends_kept_out
from ftkit.utils.registry import Registry, imported


@dataclass(frozen=True)
class PythonName:
    """A class or a function of the Python API."""

    name: str
    module: str
    """Where it is."""
    while_loading: str = ""
    """MODULE:FUNCTION that gives the context in which the module is imported; "": none."""


PYTHON_NAMES = Registry(
    "python_names",
    (PythonName,),
    core=[
        PythonName("Callback", "ftkit.training.callbacks"),
        PythonName("DoesNotFit", "ftkit.errors"),
        PythonName("LogProbabilities", "ftkit.models.loss"),
        PythonName("Objective", "ftkit.objectives.objective"),
        PythonName("SummedLoss", "ftkit.models.loss"),
        PythonName("Term", "ftkit.objectives.objective"),
        PythonName("UserError", "ftkit.errors"),
    ],
)


def value_of(row: PythonName) -> Any:
    """Return what a name stands for."""
    shown: AbstractContextManager[None] = nullcontext()
    if row.while_loading:
        shown = imported(row.while_loading)()
    with shown, backends_kept_out():
        return getattr(importlib.import_module(row.module), row.name)
