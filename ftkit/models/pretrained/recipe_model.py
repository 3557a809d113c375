"""The model that a recipe trains, made of a base model."""

import dataclasses
from collections.abc import Collection

from ftkit.errors import UserError
from ftkit.models.pretrained.added_tokens import with_added_tokens
from ftkit.models.pretrained.base_model import BaseModel, storage_of
from ftkit.recipe.objectives import objective_rules
from ftkit.recipe.recipe import Recipe
from ftkit.recipe.recipe_sections import sections, trained_parts
from ftkit.utils.registry import imported


def base_for(base: BaseModel, recipe: Recipe) -> BaseModel:
    """Return the model that a recipe trains, with its tokens, its head and its trained parts.

    Raises:
        UserError: the objective needs logits and the base gives scores, or the model cannot
            have what the recipe asks for.
    """
    base = with_added_tokens(base, recipe.added_tokens)
    if (scores := objective_rules(recipe.objective).scores) is not None:
        from ftkit.models.pretrained.scored_model import as_scored

        return as_scored(base, scores)
    if (found := base.architecture.scores) is not None:
        raise UserError(
            f"checkpoint_dir {base.name} is {found.noun}, which gives sequences scores and "
            f"predicts no tokens, but objective is {recipe.objective['class_path']}. Try "
            f"--objective {found.objective['class_path']}, or the model that it was made of."
        )
    return with_trained_parts(base, recipe)


def with_trained_parts(base: BaseModel, recipe: Recipe | None) -> BaseModel:
    """Return a model whose parameters include the parts beside it that a recipe trains.

    Args:
        base: a language model with parts beside it that compute media.
        recipe: of a run; None: nothing is trained.

    Raises:
        UserError: it has no such parts.
    """
    found = None if recipe is None else trained_parts(recipe)
    if found is None:
        return base
    row, parts = found
    return _with_modules(base, row.encoder, imported(row.encoder).modules_of(base, parts))


def with_named_parts(base: BaseModel, targets: Collection[str]) -> BaseModel:
    """Return a model whose parameters include the parts beside it that an adapter trains whole.

    Args:
        base: the adapted model.
        targets: names of modules, or their ends, as of lora_modules_to_save.
    """
    of_rest = {name.rpartition(".")[0] for name in base.architecture.rest_shapes}
    around = {
        ".".join(words[:n])
        for words in (one.split(".") for one in of_rest)
        for n in range(1, len(words) + 1)
    }
    ends = tuple(f".{target}" for target in targets)
    named = {name for name in around if ends and f".{name}".endswith(ends)}
    place = next((row.encoder for row in sections() if row.encoder), None)
    if not named or place is None:
        return base
    outermost = [n for n in named if not any(n.startswith(f"{other}.") for other in named)]
    return _with_modules(base, place, sorted(outermost))


def _with_modules(base: BaseModel, encoder: str, modules: Collection[str]) -> BaseModel:
    architecture = base.architecture.with_encoder(encoder, tuple(modules))
    storage = storage_of(architecture, base.layout)
    rest = {name: tensor for name, tensor in base.rest.items() if storage.is_kept(name)}
    return dataclasses.replace(base, architecture=architecture, rest=rest)
