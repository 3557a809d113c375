"""The keys float8 and qat of recipes."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from ftkit.recipe.key_types import Tunable, at_least
from ftkit.recipe.recipe import Recipe
from ftkit.recipe.recipe_sections import keys_of

Weights = Literal["int2", "int3", "int4", "int5", "int6", "int7", "int8"]


@dataclass(frozen=True, kw_only=True)
class Qat:
    """Quantisation-aware training: learning with the rounded numbers of serving."""

    weights: Tunable[Weights | None] = None
    """Only of finetune_full: round the weights of the linear layers in the blocks to these integers
    in every forward pass, while the optimizer updates the weights themselves (pip install
    'ftkit[torchao]'). ftkit export --format torchao then writes the rounded model. Empty: no
    quantisation-aware training."""
    activations: Tunable[Literal["int8"] | None] = None
    """Round the inputs of these layers, too, with a scale for each token. Empty: they are not
    rounded."""
    group_size: Annotated[Tunable[int | None], at_least(2)] = 32
    """Weights of a row that share a scale: a divisor of the widths of all these layers. Empty: a
    row has one scale."""

    @property
    def text(self) -> str | None:
        """What is rounded, in words; None: nothing."""
        if self.weights is None:
            return None
        groups = "by row" if self.group_size is None else f"in groups of {self.group_size}"
        inputs = f", {self.activations} inputs" if self.activations else ""
        return f"{self.weights} weights {groups}{inputs}"


@dataclass(frozen=True, kw_only=True)
class RoundingKeys:
    """From which numbers linear layers compute."""

    float8: Tunable[bool] = False
    """Only of finetune_full: compute the products of the linear layers in the blocks from float8
    numbers of torchao, with a scale for each token and each row of a weight; gradients of weights
    are computed as without it, and so are validation and answers. Layers whose widths are no
    multiples of 16 stay as they are. Needs a GPU of compute capability 8.9 (CPUs emulate it, to
    test) and pip install 'ftkit[torchao]'."""
    qat: Qat = field(default_factory=Qat)


def rounding(recipe: Recipe, trains: bool) -> str | None:
    """Return from which rounded numbers layers compute, in words; None: from their own.

    Args:
        recipe: of a run.
        trains: False: in its result, which is served as rounded by qat and without float8.
    """
    keys = keys_of(recipe, RoundingKeys)
    if not trains:
        return keys.qat.text
    if keys.qat.text is not None:
        return f"QAT with {keys.qat.text}"
    return "float8" if keys.float8 else None
