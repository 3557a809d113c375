"""What training data decide of objectives on queries: how many documents do not answer each."""

import json
import sys
from typing import Any

from ftkit.data.sources import data_source
from ftkit.recipe.hubs import as_owner_of
from ftkit.recipe.objectives import check_objective, objective_options
from ftkit.recipe.recipe import Recipe
from ftkit.utils.progress import print_notice


def settle_rerank(recipe: Recipe) -> dict[str, Any]:
    """Return the options of a reranker's recipe with the number that its training data decide.

    Raises:
        UserError: a setting is wrong, or the data cannot be read or do not suit it.
    """
    check_objective(recipe)  # settings that need no data come first
    options = objective_options(recipe.objective)
    if options["negatives"] is None:
        takes_labels = options["loss"] == "points"
        options["negatives"] = settled_negatives(recipe, least=1, takes_labels=takes_labels)
    return options


def settle_embed(recipe: Recipe) -> dict[str, Any]:
    """Return the options of an embedding model's recipe with the number that its data decide.

    Raises:
        UserError: a setting is wrong, or the data cannot be read.
    """
    check_objective(recipe)  # settings that need no data come first
    options = objective_options(recipe.objective)
    if options["negatives"] is None:
        options["negatives"] = settled_negatives(recipe, least=0, takes_labels=False)
    return options


def settled_negatives(recipe: Recipe, *, least: int, takes_labels: bool) -> int:
    """Return the number of negatives that all training records of a recipe have.

    Args:
        recipe: with checked options of its objective.
        least: number without which nothing is learned; records that have fewer are refused, or
            left out with data.skip_bad_records.
        takes_labels: whether records may have one document and a label instead; where one has,
            all must, and the number is 0.

    Raises:
        UserError: the data cannot be read, or records have too few.
    """
    records = _records(recipe, labelled=None if takes_labels else False)
    if any("target" in record for record in records):
        if any("target" not in record for record in records):
            _records(recipe, labelled=True)  # names the records
        return 0
    counts = [len(record["texts"]) - 2 for record in records]
    if any(count < least for count in counts):
        _records(recipe, labelled=False, negatives=least)  # names the records
        counts = [count for count in counts if count >= least]
    found = min(counts, default=least)
    if more := sum(count > found for count in counts):
        print_notice(
            f"Each query is learned with {found} of its negatives, as many as every training "
            f"record has: {more:,} of {len(counts):,} have more, of which the first ones count. "
            "--objective.negatives names another number.",
            sys.stderr,
        )
    return found


def _records(recipe: Recipe, **options: Any) -> list[dict[str, Any]]:
    """All training records, before any are held out: each with the texts of its documents."""
    source = data_source(recipe.data, preference=f"queries {json.dumps(options)}")
    source.files()  # a missing one is named first
    with as_owner_of(recipe.data_token):
        return [*source.given_records()]
