"""The keys images.* of recipes: which parts of a model that see are trained."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ftkit.errors import UserError
from ftkit.recipe.facts import Facts
from ftkit.recipe.key_types import Fixed
from ftkit.recipe.objectives import objective_rules
from ftkit.recipe.recipe import Recipe
from ftkit.recipe.recipe_sections import keys_of


@dataclass(frozen=True, kw_only=True)
class Images:
    """Parts of a model that see, which are frozen otherwise."""

    projector: Fixed[bool] = False
    """Also train the projector, which makes features for the language model of what the tower has
    computed. With LoRA it is trained whole beside the adapter. Its names are those of the model:
    train.only and train.freeze choose among them, too."""
    tower: Fixed[bool] = False
    """Also train the tower, which computes images patch by patch; as images.projector. Activations
    of an image are computed again in the backward pass, so that memory does not grow with their
    number."""


@dataclass(frozen=True, kw_only=True)
class ImageKeys:
    """What is trained beside the language model."""

    images: Images = field(default_factory=Images)


def trained(recipe: Recipe) -> Sequence[str]:
    """Return which parts that see a recipe trains: projector, tower."""
    keys = keys_of(recipe, ImageKeys).images
    return [name for name in ("projector", "tower") if getattr(keys, name)]


def check(facts: Facts) -> list[str]:
    """Refuse runs that cannot train parts that see."""
    recipe = facts.recipe
    parts = trained(recipe) if facts.trains else []
    if not parts:
        return []
    key = f"images.{parts[0]}"
    why = ""
    if recipe.train.optimizer_in_backward:
        why = (
            "whether a step has images is known when all ranks have computed it, and "
            "train.optimizer_in_backward updates before. Try --train.optimizer_in_backward false, "
            "or"
        )
    elif recipe.train.from_scratch:
        why = "train.from_scratch begins a language model alone. Try"
    elif objective_rules(recipe.objective).preference or recipe.teacher is not None:
        why = "only supervised training is given images so far. Try --objective sft, or"
    if why:
        raise UserError(f"{key} is true, but {why} --{key} false.")
    return []
