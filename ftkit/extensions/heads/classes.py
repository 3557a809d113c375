"""What training data decide of the objective: the kind of their labels, and the classes."""

import json
from collections.abc import Sequence
from typing import Any

from ftkit.data.records.keys import Refusal
from ftkit.data.sources import data_source
from ftkit.errors import UserError
from ftkit.extensions.heads.labels import class_names, is_fraction, is_number
from ftkit.recipe.hubs import as_owner_of
from ftkit.recipe.objectives import ProblemType, check_objective, objective_options
from ftkit.recipe.recipe import Recipe


def settle(recipe: Recipe) -> dict[str, Any]:
    """Return the options of a recipe's objective with those that its training data decide.

    Raises:
        UserError: a setting is wrong, the data cannot be read, or they have one class alone.
    """
    check_objective(recipe)  # settings that need no data come first
    options = objective_options(recipe.objective)
    problem, classes = options["problem_type"], options["classes"]
    if problem == "regression" or (problem is not None and classes is not None):
        return options
    labels = _labels(recipe, problem)
    problem = problem or _problem_of(labels, has_classes=classes is not None)
    if problem == "regression" and not all(isinstance(one, int | float) for one in labels):
        _labels(recipe, problem)  # names the records
    if problem != "regression" and classes is None:
        try:
            classes = _classes_of(labels, problem)
        except Refusal:
            _labels(recipe, problem)  # names the records
            raise
    return {"problem_type": problem, "classes": classes}


def _labels(recipe: Recipe, problem: ProblemType | None) -> list[Any]:
    """Labels of all training records, before any are held out."""
    preference = f"classes {json.dumps({'problem_type': problem})}"
    source = data_source(recipe.data, preference=preference)
    source.files()  # a missing one is named first
    with as_owner_of(recipe.data_token):
        return [record["target"][0] for record in source.given_records()]


def _problem_of(labels: Sequence[Any], *, has_classes: bool) -> ProblemType:
    """What labels of training data are, where the recipe does not say it."""
    if any(isinstance(label, list) for label in labels):
        return "multi_label_classification"
    if not has_classes and any(map(is_fraction, labels)):
        return "regression"
    return "single_label_classification"


def _classes_of(labels: Sequence[Any], problem: ProblemType) -> list[str]:
    names = {name for label in labels for name in class_names("label", label)}
    # Numbers by their value: 2 before 10.
    found = sorted(names, key=int) if all(map(is_number, names)) else sorted(names)
    if len(found) < (1 if problem == "multi_label_classification" else 2):
        raise UserError(
            f"All {len(labels):,} training records have the label {', '.join(found) or '[]'}, so "
            "there is nothing to learn. Add records of other classes, or name all classes: "
            "--objective.classes '[good, bad]'."
        )
    return found
