"""LoRA of fused experts: a low-rank pair for the matrix of each expert, also in PEFT's files.

In an adapter with `target_parameters` (PEFT 0.21), A holds the experts one after the other,
[experts * rank, in], and B has them as its innermost dimension, [out, rank * experts]. If a module
has several such parameters, their wrappers lie around each other, the first one innermost.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ftkit.errors import UserError
from ftkit.models.bodies.expert_products import grouped_product
from ftkit.models.bodies.experts import PAIRS, FusedExperts
from ftkit.models.lora.targets import TRAINED, our_name
from ftkit.models.pretrained.base_model import BaseModel, parameter_shapes
from ftkit.recipe.recipe import Lora

_ALIGNED = 8
"""Torch's grouped products need rows of a multiple of this many numbers: 16 bytes, 2 for each."""


class _Matrices(nn.Module):
    """One matrix for each expert."""

    def __init__(self, experts: int, rows: int, columns: int, *, pads: bool) -> None:
        """Allocate without initial values; pads: whether results may end with zeros."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, rows, columns))
        self._pads = pads

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Multiply each row by the matrix of its expert."""
        weight: Tensor = self.weight
        beyond = x.size(-1) - weight.size(-1)  # zeros that the other matrix has added
        more = -weight.size(1) % _ALIGNED if self._pads else 0
        if beyond or more:
            weight = F.pad(weight, (0, beyond, 0, more))
        return grouped_product(x, weight, ends, transposed=False)


class ExpertPairs(nn.Module):
    """The low-rank pairs beside the matrices of a parameter: A is [rank, in], B is [out, rank]."""

    is_on = True
    """Whether their products are added."""

    def __init__(
        self, sizes: tuple[int, int, int], rank: int, scaling: float, *, transposed: bool
    ) -> None:
        """Allocate without initial values.

        Args:
            sizes: experts, out and in of the parameter.
            rank: of each pair.
            scaling: of its product.
            transposed: whether the parameter is [experts, in, out].
        """
        super().__init__()
        # Three dimensions, unlike PEFT's two: each product is one grouped product, and matrices are
        # sharded by expert.
        experts, rows, columns = sizes
        a = _Matrices(experts, rank, columns, pads=True)
        b = _Matrices(experts, rows, rank, pads=False)
        self.lora_A, self.lora_B = nn.ModuleDict({TRAINED: a}), nn.ModuleDict({TRAINED: b})
        self.scaling, self.transposed = scaling, transposed

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return [rows, out]: for each row, the product that the pair of its expert adds.

        Args:
            x: [rows, in], sorted by expert.
            ends: [experts] int32, the end of each expert's rows.
        """
        narrow = self.lora_A[TRAINED](x, ends)
        # Scaled in between, where there are the fewest numbers.
        result: Tensor = self.lora_B[TRAINED](narrow * self.scaling, ends)
        return result


def add_expert_pairs(model: Any, base: BaseModel, lora: Lora) -> None:
    """Add low-rank pairs to the matrices of all experts; no memory is taken.

    Args:
        model: outlined on the meta device.
        base: named in the message.
        lora: rank, scale and variant.

    Raises:
        UserError: the model has no experts whose matrices are one parameter.
    """
    # rsLoRA divides alpha by the square root of the rank.
    divisor = math.sqrt(lora.lora_r) if lora.lora_variant == "rslora" else lora.lora_r
    fused: Iterator[FusedExperts] = model.body.fused_experts()
    layers = [experts for experts in fused if experts.takes_pairs]
    if not layers:
        has_experts = base.architecture.expert_share < 1
        raise UserError(
            f"lora_experts is true, but {base.name} has no experts whose matrices are one "
            "parameter. "
            + (
                "Its experts are linear layers: try --lora_experts false --lora_mlp true."
                if has_experts
                else "Try --lora_experts false."
            )
        )
    for layer in layers:
        for name in layer.matrices:
            pairs = ExpertPairs(
                layer.sizes(name),
                lora.lora_r,
                lora.lora_alpha / divisor,
                transposed=layer.transposed,
            )
            # Not PEFT's ParamWrapper, which adds the product of every expert's pair to its whole
            # matrix, for all experts at once.
            layer.module.add_module(f"{name}{PAIRS}", pairs)


def expert_pairs(model: nn.Module) -> Iterator[tuple[str, ExpertPairs]]:
    """Yield our name of every adapted parameter of experts, and its pairs."""
    for name, module in model.named_modules():
        if isinstance(module, ExpertPairs):
            yield our_name(name).removesuffix(PAIRS), module


@torch.no_grad()
def merged_experts(weight: Tensor, a: Tensor, b: Tensor, pairs: ExpertPairs) -> Tensor:
    """Merge low-rank pairs into the matrices of experts; float32.

    Args:
        weight: as in the model, [experts, out, in] or [experts, in, out].
        a: [experts, rank, in].
        b: [experts, out, rank].
        pairs: give layout and scale.
    """
    # A copy even of float32, because the products are added in place.
    merged = weight.to(torch.float32, copy=True)
    for matrix, left, right in zip(merged, b.float(), a.float(), strict=True):
        (matrix.t() if pairs.transposed else matrix).addmm_(left, right, alpha=pairs.scaling)
    return merged


def in_peft(pairs: Mapping[str, tuple[Tensor, Tensor]], base: BaseModel) -> dict[str, Tensor]:
    """Return the tensors of an adapter of experts by PEFT's names, without its prefix.

    Args:
        pairs: A, [experts, rank, in], and B, [experts, out, rank], by our names of the parameters.
        base: the adapted model.
    """
    tensors = {}
    for ours, name in _wrappers(base, pairs).items():
        a, b = pairs[ours]
        tensors[f"{name}.lora_A.weight"] = a.flatten(0, 1).contiguous()
        # [out, rank, experts] before the last two become one.
        tensors[f"{name}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1).contiguous()
    return tensors


def parameters_adapted(base: BaseModel, targets: Iterable[str]) -> dict[str, str]:
    """Map PEFT's names of the modules that adapt experts to our names of their parameters.

    Args:
        base: the adapted model.
        targets: the adapter's target_parameters, at least one.

    Raises:
        UserError: they differ from the parameters that `lora_experts` adapts.
    """
    endings = tuple(f".{target}" for target in targets)
    shapes = parameter_shapes(base)
    chosen = [name for name in shapes if name.endswith(endings)]
    owners = {name.rpartition(".")[0] for name in chosen}
    # All matrices of these modules, in the order of the model.
    expected = [n for n, s in shapes.items() if len(s) == 3 and n.rpartition(".")[0] in owners]
    if not chosen or chosen != expected:
        raise UserError(
            f"The adapter adapts the parameters {', '.join(sorted(targets))}, but ftkit adapts all "
            f"matrices of experts or none, and no other parameters of {base.name}. Give another "
            "adapter, or none."
        )
    return {name: ours for ours, name in _wrappers(base, chosen).items()}


def from_peft(tensor: Tensor, matrix: str, experts: int) -> Tensor:
    """Return a tensor of an adapter's file as [experts, rows, columns].

    Args:
        tensor: in the layout of `in_peft`.
        matrix: lora_A or lora_B.
        experts: number of experts.
    """
    if matrix == "lora_A":
        return tensor.unflatten(0, (experts, -1))
    return tensor.unflatten(1, (-1, experts)).permute(2, 0, 1).contiguous()


def _wrappers(base: BaseModel, parameters: Iterable[str]) -> dict[str, str]:
    """PEFT's name of the module that wraps each of our parameters."""
    wanted, by_owner = set(parameters), dict[str, list[str]]()
    for name in parameter_shapes(base):
        if name in wanted:
            by_owner.setdefault(name.rpartition(".")[0], []).append(name)
    # PEFT wraps a module once for each of its parameters; the first wrapper is the innermost.
    return {
        name: owner + ".base_layer" * (len(names) - 1 - index)
        for owner, names in by_owner.items()
        for index, name in enumerate(names)
    }
