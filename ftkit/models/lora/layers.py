"""LoRA layers of PEFT with ftkit's variants: added, initialised, computed and merged.

LoRA: Hu et al. 2021, https://arxiv.org/abs/2106.09685. rsLoRA (scaled by the square root of the
rank): Kalajdzievski 2023, https://arxiv.org/abs/2312.03732. DoRA: Liu et al. 2024,
https://arxiv.org/abs/2402.09353. PiSSA: Meng et al. 2024, https://arxiv.org/abs/2404.02948.
OLoRA: Büyükakyüz 2024, https://arxiv.org/abs/2406.01775. LoftQ: Li et al. 2023,
https://arxiv.org/abs/2310.08659.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ftkit.errors import UserError
from ftkit.models.architectures.architecture import seed_of
from ftkit.models.bodies.experts import PAIRS
from ftkit.models.lora.peft_layers import layers_of, tuner_layers, without_bitsandbytes
from ftkit.models.lora.targets import INITIAL, TRAINED, adapted_layers, our_name, whole_layers
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.models.token_numbers import TokenDropout, dropped
from ftkit.recipe.recipe import RELATIVE_INITS, Lora, LoraInit


def add_adapter(model: nn.Module, base: BaseModel, lora: Lora) -> None:
    """Freeze the model and add an adapter to the chosen layers; no memory is taken.

    Args:
        model: outlined on the meta device.
        base: gives Hugging Face's names of the layers.
        lora: layers, and type of the adapter with its options.

    Raises:
        UserError: a name matches no layer, or one that cannot be adapted or trained.
    """
    model.requires_grad_(False)
    targets = adapted_layers(model, base, lora)
    trained_whole = whole_layers(model, base, lora)
    # PEFT raises if there is nothing to adapt, such as with experts alone.
    if targets:
        layers_of(lora).add(model, base, targets)
    if lora.lora_experts:
        from ftkit.models.lora.experts import add_expert_pairs

        add_expert_pairs(model, base, lora)
    _drop_by_tokens(model, lora)
    # After the injection, which freezes all but its own parameters.
    for module in trained_whole:
        module.requires_grad_(True)


def add_lora(model: nn.Module, lora: Lora, targets: list[str]) -> None:
    """Add the matrices of LoRA to layers, and what its variants compute with."""
    from peft.tuners.lora import Linear, LoraConfig, LoraModel  # takes a second

    config = LoraConfig(
        r=lora.lora_r,
        # PEFT's annotation is int, but it only divides by the rank.
        lora_alpha=lora.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=lora.lora_dropout,
        use_rslora=lora.lora_variant == "rslora",
        target_modules=targets,
    )
    with without_bitsandbytes():
        from ftkit.models.lora.adapted import AdaptedLinear  # which imports PEFT

        # Adapters on the meta device, like the model.
        LoraModel(model, config, adapter_name=TRAINED, low_cpu_mem_usage=True)
    for name, layer in lora_layers(model):
        layer.cast_input_dtype_enabled = False  # the variants handle autocast themselves
        layer.lora_variant[TRAINED] = Plain()
        if lora.lora_variant == "dora":
            layer.lora_magnitude_vector[TRAINED] = Magnitude(layer.out_features)
            layer.lora_variant[TRAINED] = Dora()
        if lora.lora_init != "default":
            _check_rank(name, layer, lora.lora_r, lora.lora_init)
        if lora.lora_init in RELATIVE_INITS:
            _relate_to_initial(layer, lora.lora_r)
        is_plain = isinstance(layer.lora_variant[TRAINED], Plain)
        if is_plain and type(layer) is Linear:
            layer.__class__ = AdaptedLinear


def _drop_by_tokens(model: Any, lora: Lora) -> None:
    """Replace dropout whose masks a generator draws."""
    kind = layers_of(lora).dropout
    if kind is None:
        return
    # Listed first: the layers are changed.
    for name, layer in list(tuner_layers(model)):
        of_adapters = getattr(layer, kind)
        if isinstance(of_adapters[TRAINED], nn.Dropout):
            of_adapters[TRAINED] = TokenDropout(
                of_adapters[TRAINED].p, our_name(name), layer.in_features, model.body.tokens
            )


def _check_rank(name: str, layer: Any, lora_r: int, lora_init: LoraInit) -> None:
    most = min(layer.in_features, layer.out_features)
    if lora_r > most:
        raise UserError(
            f"lora_r is {lora_r}, but {our_name(name)} has {most} singular values, of "
            f"which lora_init {lora_init} takes that many. Try --lora_r {most}."
        )


def _relate_to_initial(layer: Any, lora_r: int) -> None:
    """Add a frozen copy of a layer's initial matrices, on the meta device."""
    layer.lora_A[INITIAL] = nn.Linear(layer.in_features, lora_r, bias=False)
    layer.lora_B[INITIAL] = nn.Linear(lora_r, layer.out_features, bias=False)
    layer.lora_variant[TRAINED] = FromInitial()
    for matrices in (layer.lora_A, layer.lora_B):
        matrices[INITIAL].requires_grad_(False)


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and module of every adapted linear layer."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and not name.endswith(PAIRS):
            yield name, module


def initial_adapter(name: str, shape: torch.Size, seed: int, lora: Lora) -> Tensor:
    """Initial values of an adapter's parameter, the same on every device and layout.

    A of LoRA is drawn as in PEFT (Kaiming-uniform), B is zero, so that training starts at the base
    model; so are their like of other types. Each matrix has its own generator: no other matrix
    changes its values. They are float32 in every precision, because other numbers would be drawn
    in 16 bits.

    Args:
        name: by which it is seeded, see `Architecture.seed_name`.
        shape: of the parameter.
        seed: of the run.
        lora: type of the adapter and its options.
    """
    constant = layers_of(lora).first_number(name)
    if constant is not None:
        return torch.full(shape, constant, dtype=torch.float32, device="cpu")
    generator = torch.Generator(device="cpu").manual_seed(seed_of(name, seed))
    matrix = torch.empty(shape, dtype=torch.float32, device="cpu")
    # Matrices of experts lie one after the other, as in PEFT.
    nn.init.kaiming_uniform_(matrix.flatten(0, -2), a=math.sqrt(5), generator=generator)
    return matrix


def follows_from_base(name: str, model: nn.Module, lora: Lora) -> bool:
    """Return whether the initial values of an adapter's parameter depend on the base weight.

    Args:
        name: full name in the model.
        model: adapted.
        lora: initialisation.
    """
    if lora.lora_init == "loftq":
        # Layers that are not quantised, such as the head, have no error to begin with.
        layer: Any = model.get_submodule(name.partition(".lora_")[0])
        return hasattr(layer.get_base_layer(), "unpacked")
    return lora.lora_init != "default" or ".lora_magnitude_vector." in name


def adapter_from_base(
    weight: Tensor, original: Tensor, layer: Any, lora: Lora
) -> Mapping[str, Tensor]:
    """Initial values computed from the base weight, by the end of the parameter's name.

    Args:
        weight: [out, in], unpacked.
        original: [out, in], before it was packed.
        layer: the adapted layer.
        lora: rank, variant and initialisation.
    """
    weight = weight.float()  # LAPACK has no decompositions in 16 bits
    if lora.lora_variant == "dora":
        return {f"lora_magnitude_vector.{TRAINED}.weight": torch.linalg.vector_norm(weight, dim=1)}
    rank, scaling = lora.lora_r, layer.scaling[TRAINED]
    if lora.lora_init in ("pissa", "loftq"):
        # One step of LoftQ, as in PEFT's own for quantised models: with more, the base weight would
        # be another one, that of no model's files.
        part = original.to(weight) - weight if lora.lora_init == "loftq" else weight
        left, values, right = torch.linalg.svd(part, full_matrices=False)
        # Divided by the scaling, so that the product of A and B is exactly the principal part.
        root = (values[:rank] / scaling).sqrt()
        a, b = root[:, None] * right[:rank], left[:, :rank] * root
    else:
        q, r = torch.linalg.qr(weight)
        a, b = r[:rank], q[:, :rank]
    return {
        f"lora_{matrix}.{adapter}.weight": tensor
        for matrix, tensor in (("A", a), ("B", b))
        for adapter in (TRAINED, INITIAL)
        if adapter in layer.lora_A
    }


class Plain:
    """Plain LoRA, as a variant of PEFT's LoRA layers; `AdaptedLinear` computes most by itself."""

    # PEFT scales the wide product and adds it to a copy of the layer's result; here one product
    # is scaled and added in the memory of the result: a block keeps up to 28 % less for its
    # backward pass (34 M parameters, all layers adapted).

    @staticmethod
    def forward(
        module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any
    ) -> Tensor:
        """Add the low-rank product to the layer's result."""
        b = module.lora_B[active_adapter].weight
        return _add_product(
            result, _narrow(module, active_adapter, x), b, module.scaling[active_adapter]
        )


class Magnitude(nn.Module):
    """DoRA's trained magnitudes, one for each row of a weight."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows))

    def forward(self, result: Tensor, norms: Tensor) -> Tensor:
        """Rescale the result of a weight with row norms `norms` to the trained magnitudes."""
        return result * (self.weight / norms.to(self.weight.dtype)).to(result.dtype)


class Dora:
    """DoRA for all layers and strategies, as a variant of PEFT's LoRA layers.

    Dropout applies to the input of the low-rank matrices alone; without it, and in evaluation, the
    results are those of PEFT.
    """

    # PEFT's own reads bitsandbytes' parameters, and multiplies by the base weight a second time if
    # there is dropout.

    @staticmethod
    def forward(
        module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any
    ) -> Tensor:
        """Compute the layer with adapted directions and trained magnitudes of its rows."""
        a, b = module.lora_A[active_adapter].weight, module.lora_B[active_adapter].weight
        base, scaling = module.get_base_layer(), module.scaling[active_adapter]
        norms = _row_norms(unpacked_weight(base), a, b, scaling)
        unbiased = result if base.bias is None else result - base.bias
        adapted = _add_product(unbiased, _narrow(module, active_adapter, x), b, scaling)
        rescaled: Tensor = module.lora_magnitude_vector[active_adapter](adapted, norms)
        return rescaled if base.bias is None else rescaled + base.bias


class FromInitial:
    """LoRA relative to its initial values (PiSSA, OLoRA), as a variant of PEFT's LoRA layers.

    The initial product is subtracted from the layer's result, not from the base weight.
    """

    # Subtracting it from the weight would round the weight, and would have to be repeated exactly
    # wherever training continues. Subtracting it from the result is the same in exact arithmetic,
    # starts at the base model in every dtype, on shards and quantised weights too, and is what a
    # PEFT adapter of the original model needs. Checkpoints hold the initial matrices: a second
    # decomposition could differ in signs.

    @staticmethod
    def forward(
        module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any
    ) -> Tensor:
        """Add the change of the low-rank product since the start to the layer's result."""
        a, b = module.lora_A[INITIAL].weight, module.lora_B
        # In one product, so that the difference is rounded and not its two terms.
        narrow = (_narrow(module, active_adapter, x), F.linear(_cast_like(x, a), a))
        wide = torch.cat((b[active_adapter].weight, -b[INITIAL].weight), dim=1)
        return _add_product(result, torch.cat(narrow, -1), wide, module.scaling[active_adapter])


def _add_product(result: Tensor, narrow: Tensor, matrix: Tensor, scaling: float) -> Tensor:
    """Add a scaled low-rank product to a layer's result, in the memory of the result.

    Args:
        result: [..., out]; nothing else may use it afterwards.
        narrow: [..., rank].
        matrix: [out, rank].
        scaling: of narrow times the transposed matrix.
    """
    # If autograd knew this as a view, changing it would copy the gradient of the whole.
    rows = torch.ops.aten._unsafe_view(result, (-1, result.shape[-1]))
    dtype = result.dtype
    rows.addmm_(narrow.flatten(0, -2).to(dtype), matrix.t().to(dtype), alpha=scaling)
    return rows.view_as(result)


def _narrow(module: Any, adapter: str, x: Tensor) -> Tensor:
    """Return [..., rank], the product of the input, after dropout, and an adapter's matrix A."""
    matrix, dropout = module.lora_A[adapter].weight, module.lora_dropout[adapter]
    x = _cast_like(x, matrix)
    if dropout.training and isinstance(dropout, TokenDropout):
        narrow: Tensor = _DroppedProduct.apply(x, matrix, dropout.kept(x), dropout.p)
        return narrow
    return F.linear(x, matrix)


def _cast_like(x: Tensor, matrix: Tensor) -> Tensor:
    """Cast the input to the dtype of a matrix, unless autocast chooses one for both."""
    return x if torch.is_autocast_enabled(x.device.type) else x.to(matrix.dtype)


class _DroppedProduct(torch.autograd.Function):
    """Product of an input after dropout and a matrix; keeps the input and the mask."""

    # All adapters of an input keep the same tensor; after dropout, each would keep its own.

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, kept: Tensor, p: float) -> Tensor:
        ctx.scale = 1 / (1 - p)
        ctx.save_for_backward(x, matrix, kept)
        narrow = F.linear(dropped(x, kept, ctx.scale), matrix)
        # Narrow, so that nothing wide is scaled.
        return narrow.mul_(ctx.scale) if x.device.type == "cpu" else narrow

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, matrix, kept = ctx.saved_tensors
        gradient, scale = gradients[0], ctx.scale
        dtype = gradient.dtype
        if x.device.type == "cpu":
            gradient, scale = gradient * scale, 1.0  # narrow, too
        of_matrix = gradient.flatten(0, -2).t() @ dropped(x.to(dtype), kept, scale).flatten(0, -2)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = dropped(gradient @ matrix.to(dtype), kept, scale).to(x.dtype)
        return of_x, of_matrix.to(matrix.dtype), None, None


def unpacked_weight(layer: Any) -> Tensor:
    """Return the [out, in] weight of a linear layer, unpacked if it is quantised."""
    weight: Tensor = layer.weight
    return layer.unpacked(weight) if hasattr(layer, "unpacked") else weight


@torch.no_grad()
def _row_norms(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return [out] float32: norms of the rows of an adapted weight, without gradient as in DoRA."""
    # Autocast would compute the product in 16 bits, and the result is divided by its norms.
    with torch.autocast(weight.device.type, enabled=False):
        adapted = torch.mm(b.float() * scaling, a.float()).add_(weight)
        return torch.linalg.vector_norm(adapted, dim=1)


@torch.no_grad()
def merged(
    weight: Tensor, a: Tensor, b: Tensor, scaling: float, magnitude: Tensor | None
) -> Tensor:
    """Merge an adapter into a weight: [out, in] float32.

    Args:
        weight: [out, in], the base layer's.
        a: [rank, in].
        b: [out, rank].
        scaling: of their product.
        magnitude: [out], DoRA's trained magnitudes of the rows; None: not DoRA.
    """
    adapted = torch.addmm(weight.float(), b.float(), a.float(), alpha=scaling)
    if magnitude is not None:
        lengths = torch.linalg.vector_norm(adapted, dim=1)
        adapted *= (magnitude.float() / lengths)[:, None]
    return adapted
