"""Forms of frozen weights in 4 or 8 bits: which devices and strategies run them."""

from dataclasses import dataclass

from ftkit.errors import UserError
from ftkit.recipe.facts import Facts
from ftkit.recipe.recipe import Lora, LoraRecipe, Quantization, Recipe


@dataclass(frozen=True, kw_only=True)
class QuantizationTraits:
    """What is known of a form; by default ftkit quantises weights to it when it loads them."""

    is_made: bool = True
    """Whether ftkit quantises; else the weights stay as they are published."""
    shards: bool = True
    """Whether several ranks can share a weight."""


QUANTIZATIONS: dict[Quantization, QuantizationTraits] = {
    "bnb.nf4": QuantizationTraits(),
    "bnb.nf4-dq": QuantizationTraits(),
    "bnb.fp4": QuantizationTraits(),
    "bnb.fp4-dq": QuantizationTraits(),
    "bnb.int8": QuantizationTraits(shards=False),
    "stored": QuantizationTraits(is_made=False),
}
"""Forms by their name."""


def is_quantised(lora: Lora) -> bool:
    """Return whether ftkit quantises the base model of a recipe."""
    return lora.quantize is not None and QUANTIZATIONS[lora.quantize].is_made


def unshardable(recipe: Recipe) -> Quantization | None:
    """Return the form of a recipe's base model if ranks cannot share its weights."""
    quantize = recipe.quantize if isinstance(recipe, LoraRecipe) else None
    return None if quantize is None or QUANTIZATIONS[quantize].shards else quantize


def check_shared_base(facts: Facts) -> list[str]:
    """Refuse a form that ranks cannot share where the strategy shards the base model."""
    quantize = unshardable(facts.recipe)
    if quantize is not None and facts.strategy.shards_base:
        raise UserError(
            f"quantize is {quantize}, but {facts.strategy.name} shards the base model and only "
            "supports the 4-bit kinds. Try --strategy ddp, or for a new run --quantize bnb.nf4-dq."
        )
    return []


def check_quantize(facts: Facts) -> list[str]:
    """Refuse a quantised base model on devices without such numbers."""
    quantize = facts.recipe.quantize if isinstance(facts.recipe, LoraRecipe) else None
    if quantize is not None:
        facts.require_few_bits("quantize", quantize, "null")
    return []
