"""Kinds of models that an objective needs beside the trained one: a reference, a teacher."""

import importlib
from dataclasses import dataclass
from typing import Any

from ftkit.errors import UserError
from ftkit.recipe.objectives import objective_rules
from ftkit.recipe.recipe import Component
from ftkit.utils.registry import Registry


@dataclass(frozen=True, kw_only=True)
class CompanionRow:
    """A kind of other models."""

    name: str
    """Key of recipes that names such a model."""
    module: str
    """Module with these functions, imported where an objective needs it:

    - ``check_files(name, other, key, *, token)``: refuse a model by its files, before weights are
      downloaded; no torch.
    - ``check_settings(base, other, key, max_seq_length)``: refuse it by its settings.
    - ``planned(base, plan, length, steps, other)``: a `PlannedReference` or `PlannedBeside` of
      `ftkit.planning.predict`; None: nothing is known of it.
    - ``of_run(job, start, base, max_seq_length)``: a `ftkit.training.setup.RunCompanion`.
    - ``of_result(result, options, base, max_seq_length, wanted)``: a
      `ftkit.evaluation.evaluate.ResultCompanion`.
    - ``simulated(objective, plan, model, frozen, sharding, context, sequences)``: a
      `ftkit.objectives.companion.Companion` of fake tensors.
    """

    def code(self) -> Any:
        """Import its module."""
        return importlib.import_module(self.module)


COMPANIONS: Registry[CompanionRow] = Registry("companions", (CompanionRow,), core=())


def companion_row(objective: Component) -> CompanionRow | None:
    """Return the kind of model that an objective needs; None: it needs none.

    Raises:
        UserError: the extension with it is not here.
    """
    rules = objective_rules(objective)
    if not (rules.needs_teacher or rules.needs_reference):
        return None
    return named_companion("teacher" if rules.needs_teacher else "reference")


def named_companion(key: str) -> CompanionRow:
    """Return the kind of model that a key of recipes names.

    Raises:
        UserError: the extension with it is not here.
    """
    row = COMPANIONS.get(key)
    if row is None:
        raise UserError(
            f"The objective needs a {key}, which this ftkit cannot compute. Install ftkit with the "
            "extension other_models, or try --objective sft."
        )
    return row
