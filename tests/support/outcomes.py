"""Recipe and data of a run that has ended, as the run had them."""

from pathlib import Path

from rank_jobs import Outcome

from ftkit.data.dataset import DataSets, load_data
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.objectives import objective_rules
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.recipe import Method, Recipe


def recipe_of(outcome: Outcome) -> Recipe:
    method: Method = "lora" if (outcome.out_dir / "final/adapter_config.json").exists() else "full"
    return read_recipe([outcome.checkpoint / "recipe.yaml"], [], method=method)


def data_of(outcome: Outcome, directory: Path) -> DataSets:
    """Its data, tokenised by the tokenizer in a directory."""
    recipe = recipe_of(outcome)
    preference = objective_rules(recipe.objective).preference
    return load_data(recipe.data, Tokenizer(directory), 200, preference=preference)
