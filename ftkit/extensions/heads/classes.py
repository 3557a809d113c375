"""What training data decide of the objective: the kind of their labels, and the classes."""

from collections.abc import Sequence
from typing import Any

from ftkit.data.sources import data_source
from ftkit.errors import UserError
from ftkit.extensions.heads.labels import class_names
from ftkit.recipe.hubs import as_owner_of
from ftkit.recipe.objectives import ProblemType, objective_options
from ftkit.recipe.recipe import Recipe


def settle(recipe: Recipe) -> dict[str, Any]:
    """Return the options of a recipe's objective with those that its training data decide.

    Raises:
        UserError: an option is wrong, the data cannot be read, or they have one class alone.
    """
    options = objective_options(recipe.objective)
    problem, classes = options["problem_type"], options["classes"]
    if problem == "regression" or (problem is not None and classes is not None):
        return options
    source = data_source(recipe.data, preference="classes")
    source.files()  # a missing one is named first
    with as_owner_of(recipe.data_token):
        labels = [record["target"][0] for record in source.given_records()]
    problem = problem or _problem_of(labels)
    if problem != "regression" and classes is None:
        classes = _classes_of(labels, problem)
    return {"problem_type": problem, "classes": classes}


def _problem_of(labels: Sequence[Any]) -> ProblemType:
    """What labels of training data are, where the recipe does not say it."""
    if any(isinstance(label, list) for label in labels):
        return "multi_label_classification"
    if any(isinstance(label, float) and not label.is_integer() for label in labels):
        return "regression"
    return "single_label_classification"


def _classes_of(labels: Sequence[Any], problem: ProblemType) -> list[str]:
    names = {name for label in labels for name in class_names("label", label)}
    # Numbers by their value: 2 before 10.
    are_numbers = all(name.isascii() and name.lstrip("-").isdigit() for name in names)
    found = sorted(names, key=int) if are_numbers else sorted(names)
    if len(found) < (1 if problem == "multi_label_classification" else 2):
        raise UserError(
            f"All {len(labels):,} training records have the label {', '.join(found) or '[]'}, so "
            "there is nothing to learn. Add records of other classes, or name all classes: "
            "--objective.classes '[good, bad]'."
        )
    return found
