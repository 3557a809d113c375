"""Frozen models: loaded beside the model that is trained, or before it."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from ftkit.models.bodies.attention import attention_kernel
from ftkit.models.language_model import LanguageModel, outline_plain
from ftkit.models.load_weights import Sharding, fill
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.recipe.objectives import is_compared_with_base
from ftkit.recipe.plan import Plan
from ftkit.recipe.recipe import LoraRecipe
from ftkit.strategies.strategy import Strategy, compute_dtype, parameter_dtype
from ftkit.utils.progress import OnProgress


def outline_frozen(base: BaseModel, plan: Plan) -> LanguageModel:
    """Build a model that only computes, on the meta device: as it is, in the formats of a plan.

    Args:
        base: the model.
        plan: of the run; if it quantises the trained model, this one is quantised too.
    """
    # The recipe's quantization saves memory for this model as much as for the trained one.
    recipe = plan.recipe
    kind = recipe.quantize if isinstance(recipe, LoraRecipe) else None
    dtypes, tied = (parameter_dtype(plan), compute_dtype(plan)), base.tied
    # The base model as the reference is the one with which training begins, tied as that is.
    is_begin = recipe.teacher is None and is_compared_with_base(recipe)
    if is_begin and recipe.train.tie_embeddings is not None:
        tied = recipe.train.tie_embeddings
    model = outline_plain(base, *dtypes, tied=tied, kind=kind)
    traits = base.architecture.attention
    model.kernel = attention_kernel(traits, plan.accelerator, has_flash=plan.has_flash)
    return model.requires_grad_(False).eval()


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, wherever they are."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def bytes_on_rank(model: LanguageModel, plan: Plan) -> int:
    """Bytes of the weights beside the trained model that each rank holds: all, or a share."""
    return math.ceil(bytes_of(model.parameters()) / plan.shards_beside)


@contextmanager
def frozen(
    model: LanguageModel,
    base: BaseModel,
    strategy: Strategy,
    sharding: Sharding,
    *,
    rope_length: int,
    seed: int,
    adapter: Mapping[str, Tensor] | None = None,
    progress: OnProgress,
) -> Iterator[LanguageModel]:
    """Load a model that only computes; every rank does, and holds its part of it.

    Nothing of it is kept after the context but what the caller still refers to.

    Args:
        model: outlined, on the meta device.
        base: the model whose weights are read.
        strategy: connected; whether it has a model to train already makes no difference.
        sharding: of the strategy, for this model.
        rope_length: positions of the table of rotary embeddings.
        seed: of an adapter's initial values.
        adapter: initial values of an adapter by our names, instead of drawn ones.
        progress: called with (parameters filled, parameters in all).
    """
    model.requires_grad_(False)
    fill(
        model,
        base,
        sharding=sharding,
        device=strategy.device,
        rope_length=rope_length,
        seed=seed,
        adapter=adapter,
        progress=progress,
    )
    model.body.exchange = strategy.exchange
    with strategy.computing_with(model.eval()):
        yield model
