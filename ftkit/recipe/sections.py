"""Rules of sections of a recipe: ranges of values, and settings that exclude each other."""

import math
from operator import attrgetter
from typing import Any

from ftkit.errors import UserError
from ftkit.recipe.adapter_types import check_peft
from ftkit.recipe.facts import Facts
from ftkit.recipe.objectives import model_beside, objective_rules
from ftkit.recipe.quantizations import unshardable
from ftkit.recipe.recipe import Eval, LoraRecipe, Recipe
from ftkit.recipe.recipe_keys import key_fields, range_of
from ftkit.utils.accelerators.kinds import HOST_KIND
from ftkit.utils.console.formatting import parse_duration
from ftkit.utils.urls import display_path, url_of


def check_ranges(recipe: Recipe) -> None:
    """Refuse values out of their ranges, with a value that works."""
    train, evaluation = recipe.train, recipe.eval
    _check_numbers(recipe)
    _check_intervals(recipe.checkpoint.keep_every)
    if recipe.checkpoint.save_every not in (None, "auto"):
        parse_duration(recipe.checkpoint.save_every)
    parse_duration(recipe.checkpoint.time_between_losses, "checkpoint.time_between_losses")
    if recipe.seed >= 2**63:
        raise UserError(f"seed is {recipe.seed}, but must be below 2**63. Try --seed 1337.")
    rate = recipe.optimizer["init_args"].get("lr")
    if rate is not None and (not isinstance(rate, int | float) or not 0 <= rate < math.inf):
        raise UserError(
            f"optimizer.lr is {rate!r}, but must be a number of at least 0. "
            "Try --optimizer.lr 2e-4."
        )
    if train.epochs is None and train.max_steps is None and train.max_tokens is None:
        raise UserError(
            "train.epochs and train.max_steps are both empty: how long to train? "
            "Try --train.epochs 1."
        )
    is_validated = evaluation.interval or evaluation.interval_epochs
    if evaluation.patience is not None and not is_validated:
        raise UserError(
            f"eval.patience is {evaluation.patience}, but eval.interval is 0: there is no "
            "validation during training. Try --eval.interval 100, or --eval.patience null."
        )
    if recipe.checkpoint.result == "best" and not recipe.checkpoint.save:
        raise UserError(
            "checkpoint.result is best, but checkpoint.save is false: no checkpoint is kept. "
            "Try --checkpoint.save true, or --checkpoint.result last."
        )
    for name, records in evaluation.metrics.items():
        # Exact match ends an answer with its first mistake.
        if name != "exact_match" and records and not evaluation.max_new_tokens:
            raise UserError(
                f"eval.{name} is {records}, but eval.max_new_tokens is "
                f"{'empty' if evaluation.max_new_tokens is None else 0}: how long may answers be? "
                "Try --eval.max_new_tokens 100."
            )
    example = evaluation.evaluate_example
    if isinstance(example, str) and example not in ("first", "random"):
        raise UserError(
            f'eval.evaluate_example is {example!r}, but must be "first", "random" or the index of '
            "a validation record. Try --eval.evaluate_example first."
        )
    if recipe.train.from_scratch:
        _check_from_scratch(recipe)
    if isinstance(recipe, LoraRecipe):
        check_peft(recipe)


def _check_from_scratch(recipe: Recipe) -> None:
    """Refuse settings for which the weights of the base model are needed."""
    train, rules = recipe.train, objective_rules(recipe.objective)
    why = None
    if isinstance(recipe, LoraRecipe):
        why = "an adapter is trained beside given weights. Try ftkit finetune_full, or"
    elif train.trains_part:
        key = "only" if train.only is not None else "freeze"
        why = f"train.{key} keeps given weights as they are. Try --train.{key} null, or"
    elif rules.scores or (rules.needs_reference and recipe.reference is None):
        name = recipe.objective["class_path"]
        why = f"objective {name} begins at a language model. Try --objective sft, or"
    if why is not None:
        raise UserError(f"train.from_scratch is true, but {why} --train.from_scratch false.")


def _check_numbers(recipe: Recipe) -> None:
    """Refuse numbers out of the ranges of their fields; NaN is in none."""
    for key, field in key_fields(type(recipe)):
        value: Any = attrgetter(key)(recipe)
        limits = range_of(field)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if limits is not None and is_number and not limits.holds(value):
            shown = f"{value:g}" if isinstance(value, float) else value
            raise UserError(
                f"{key} is {shown}, but must {limits.rule}. Try --{key} {limits.example}."
            )


def _check_intervals(keep_every: int | dict[int, int] | None) -> None:
    """Refuse a mapping of steps to intervals with numbers below 1."""
    if not isinstance(keep_every, dict):
        return
    numbers = [number for pair in keep_every.items() for number in pair]
    if not numbers or min(numbers) < 1:
        raise UserError(
            f"checkpoint.keep_every is {keep_every}, but must have steps and intervals of at least "
            'one step. Try --checkpoint.keep_every "{1000: 100, 10000: 1000}".'
        )


def check_best(facts: Facts) -> list[str]:
    """Refuse result: best where not all machines could read the best checkpoint."""
    recipe, nodes = facts.recipe, facts.num_nodes
    if recipe.checkpoint.result == "best" and nodes > 1 and url_of(recipe.out_dir):
        raise UserError(
            f"checkpoint.result is best and out_dir is {display_path(recipe.out_dir)}: each of the "
            f"{nodes} machines has shards of its own ranks there. Try --out_dir on a disk that all "
            "of them share, or --checkpoint.result last."
        )
    return []


def check_memory(facts: Facts) -> list[str]:
    """Refuse settings that save memory where they cannot; notices where they have no effect."""
    memory, notices = facts.recipe.memory, []
    if facts.trains and memory.offload_activations:
        if not memory.activation_checkpointing:
            raise UserError(
                "memory.offload_activations is true, but memory.activation_checkpointing is false: "
                "it is the inputs kept by it that are offloaded. Try "
                "--memory.activation_checkpointing true."
            )
        if facts.devices.accelerator == HOST_KIND:
            notices.append("memory.offload_activations has no effect: this is host memory.")
    if facts.trains and memory.shard_model_beside:
        notices += _check_sharding_beside(facts)
    return notices


def _check_sharding_beside(facts: Facts) -> list[str]:
    """Refuse a format that cannot be sharded; a notice where there is nothing more to shard."""
    recipe, why = facts.recipe, ""
    if model_beside(recipe) is None:
        why = "no frozen model computes beside the trained one"
    elif facts.world_size == 1:
        why = "there is one rank"
    elif facts.shards > 1:
        why = f"{facts.strategy.name} shards that model as it does the trained one"
    if why:  # not refused: a recipe may come from a machine where it had one
        return [f"memory.shard_model_beside has no effect: {why}."]
    if (quantize := unshardable(recipe)) is not None:
        raise UserError(
            f"memory.shard_model_beside is true, but quantize is {quantize}: only the 4-bit kinds "
            "can be sharded. Try --quantize bnb.nf4-dq, or --memory.shard_model_beside false."
        )
    return []


def check_validations(
    settings: Eval, interval: int, total_steps: int, *, takes_best: bool
) -> list[str]:
    """Check the validation settings against the length of the run; returns notices.

    Args:
        settings: section eval of the recipe.
        interval: steps between validations; 0: there are none before the end.
        total_steps: of the run.
        takes_best: whether the result is the best checkpoint.

    Raises:
        UserError: the result is the best checkpoint, but none is validated.
    """
    patience = settings.patience
    before_last = (total_steps - 1) // interval if interval else 0
    if takes_best and not before_last and not settings.final_validation:
        raise UserError(
            f"checkpoint.result is best, but none of the {total_steps} steps is validated: "
            f"there are {interval} steps between validations, and eval.final_validation is false. "
            f"Try --eval.interval {max(1, total_steps // 4)}, or --checkpoint.result last."
        )
    if patience is None or before_last >= patience:
        return []
    notice = (
        f"eval.patience {patience} cannot end this run of {total_steps} steps before its last one: "
        f"there are {interval} steps between validations. "
        f"Try --eval.interval {max(1, total_steps // (4 * patience))}."
    )
    return [notice]
