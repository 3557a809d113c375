"""What training data decide of the objective embed: how many documents do not answer each query."""

from typing import Any

from ftkit.extensions.heads.negatives import settled_negatives
from ftkit.recipe.objectives import check_objective, objective_options
from ftkit.recipe.recipe import Recipe


def settle(recipe: Recipe) -> dict[str, Any]:
    """Return the options of a recipe's objective with the number that its training data decide.

    Raises:
        UserError: a setting is wrong, or the data cannot be read.
    """
    check_objective(recipe)  # settings that need no data come first
    options = objective_options(recipe.objective)
    if options["negatives"] is None:
        options["negatives"] = settled_negatives(recipe, least=0, takes_labels=False)
    return options
