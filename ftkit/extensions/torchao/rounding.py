"""Rules of linear layers whose products are rounded in training: float8 and qat."""

import importlib.util

from ftkit.errors import UserError
from ftkit.extensions.torchao.keys import RoundingKeys, rounding
from ftkit.recipe.facts import Facts
from ftkit.recipe.recipe import LoraRecipe
from ftkit.recipe.recipe_sections import keys_of
from ftkit.utils.accelerators.kinds import HOST_KIND, USUAL_KIND


def check_rounding(facts: Facts) -> list[str]:
    """Refuse rounded products of linear layers that are not possible in this run."""
    recipe, devices, precision = facts.recipe, facts.devices, facts.precision
    keys, kind = keys_of(recipe, RoundingKeys), devices.accelerator
    # What makes training faster is no part of its result.
    qat, float8 = keys.qat, keys.float8 and facts.trains
    if qat.activations is not None and qat.weights is None:
        raise UserError(
            f"qat.activations is {qat.activations}, but qat.weights is empty: weights are rounded "
            "too. Try --qat.weights int4, or --qat.activations null."
        )
    if rounding(recipe, facts.trains) is None:
        return []
    key, value, off = "qat.weights", str(qat.weights), "--qat.weights null"
    if float8:
        key, value, off = "float8", "true", "--float8 false"
    why = ""
    if float8 and qat.weights is not None:
        why = f"qat.weights is {qat.weights}, and a layer rounds in one way. Try"
    elif isinstance(recipe, LoraRecipe):
        why = "LoRA trains no weights of these layers. Try ftkit finetune_full, or"
        if not float8:
            why = (
                "LoRA trains an adapter beside weights that stay as they are, and rounds them with "
                "--quantize. Try ftkit finetune_full, or"
            )
    elif importlib.util.find_spec("torchao") is None:
        why = "torchao is not installed. Try pip install 'ftkit[torchao]', or"
    elif kind not in (HOST_KIND, USUAL_KIND):
        why = f"torchao's layers were not tried on accelerator {kind}. Try --accelerator cpu, or"
    elif not facts.strategy.rounds:
        strategy = facts.strategy.name
        why = f"torchao's layers were not tried with {strategy}. Try --strategy fsdp, or"
    elif float8 and kind == USUAL_KIND and not devices.float8_native:
        name = devices.names[0] if devices.names else "this GPU"
        why = f"{name} has no float8 arithmetic (compute capability below 8.9). Try"
    elif float8 and kind == USUAL_KIND and not precision.startswith("bf16"):
        why = (
            f"precision is {precision}: on GPUs products of float8 with a scale for each row have "
            "results in bfloat16. Try --precision bf16-mixed, or"
        )
    if why:
        raise UserError(f"{key} is {value}, but {why} {off}.")
    return []
