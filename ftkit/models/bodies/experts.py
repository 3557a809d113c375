"""Fused experts: the matrices of a layer's experts are one parameter of three dimensions."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from ftkit.utils.accelerators.kinds import HOST_KIND

_PACKED = "packed_matrices"
"""Attribute of a module that holds its `PackedMatrices` by the names of its parameters."""
PAIRS = "_pairs"
"""Suffix: a parameter's name and this is the name of the module with its low-rank pairs."""
BYTES_AT_ONCE = 128 * 2**20
"""Bytes of quantised matrices that a device unpacks at once, but at least one matrix. In bfloat16
all of a layer of Qwen3-30B-A3B would be 1.2 GB; a GPU unpacks as many as these in about the time in
which the host launches the operations of a group."""


@dataclass(frozen=True)
class FusedExperts:
    """Experts of a layer."""

    module: nn.Module
    matrices: tuple[str, ...]
    """Names of its parameters that hold a matrix of each expert."""
    transposed: bool
    """True if the parameters are [experts, in, out]; else [experts, out, in]."""
    takes_pairs: bool = True
    """True if LoRA can adapt the matrices."""

    def sizes(self, name: str) -> tuple[int, int, int]:
        """Return the number of experts of a parameter, and out and in of each matrix."""
        if packed := packed_in(self.module).get(name):
            return packed.experts, packed.rows, packed.columns
        experts, first, second = self.module.get_parameter(name).shape
        return (experts, second, first) if self.transposed else (experts, first, second)


class PackedMatrices(ABC):
    """Scales that unpack a parameter with one packed matrix for each expert.

    Each matrix is packed like the weight of a linear layer, by rows of [out, in], whatever layout
    the model has.
    """

    takes_stored = False
    """Whether `pack` takes what files hold, and no plain parameter."""

    def __init__(self, shape: torch.Size, *, transposed: bool, compute_dtype: torch.dtype) -> None:
        """Describe the matrices; no memory is taken.

        Args:
            shape: of the unpacked parameter.
            transposed: whether the shape is [experts, in, out]; else [experts, out, in].
            compute_dtype: of the arithmetic.
        """
        self.transposed, self.compute_dtype = transposed, compute_dtype
        # shape[:0:-1] is [out, in] of [experts, in, out].
        of_one = shape[:0:-1] if transposed else shape[1:]
        self.experts, self.rows, self.columns = shape[0], *of_one
        self.device_kind: str | None = None
        """For which kind of device matrices are grouped; None: for that of the rows."""
        self._scales: Tensor | None = None

    @property
    def numbers(self) -> int:
        """Number of weights in all matrices."""
        return self.experts * self.rows * self.columns

    def at_once(self, kind: str) -> int:
        """Return the number of matrices that are unpacked at once, for rows on a kind of device."""
        # A CPU has no launches to save, and malloc maps and clears memory anew for each block of
        # more than 32 MiB: in groups, products in float32 took 2.4 times the time.
        if (self.device_kind or kind) == HOST_KIND:
            return 1
        bytes_of_one = self.rows * self.columns * self.compute_dtype.itemsize
        return max(1, BYTES_AT_ONCE // bytes_of_one)

    @abstractmethod
    def outline(self) -> Tensor:
        """Make the packed parameter on the meta device; its first dimension is the experts."""

    @abstractmethod
    def allocate(self, device: torch.device) -> None:
        """Allocate the scales."""

    def pack(self, value: Tensor, device: torch.device | None = None) -> Tensor:
        """Quantise one matrix after the other: keep the scales and return the packed parameter.

        Args:
            value: the unpacked parameter.
            device: of the computation; None: of the value.
        """
        device = value.device if device is None else device
        if self._scales is None:
            self.allocate(device)
        # One matrix after the other is moved to the device, so that it never holds all of them
        # unpacked.
        packed = torch.empty_like(self.outline(), device=device)
        for expert, matrix in enumerate(value):
            matrix = matrix.to(device)
            # As [out, in] in every layout: `ftkit merge` computes the same scales.
            packed[expert] = self._pack_one(matrix.t() if self.transposed else matrix, expert)
        return packed

    @abstractmethod
    def _pack_one(self, matrix: Tensor, expert: int) -> Tensor:
        """Quantise an expert's matrix, [out, in]; keep its scales and return it packed."""

    @abstractmethod
    def unpacked(self, packed: Tensor, experts: slice) -> Tensor:
        """Unpack matrices of some experts at once, in the dtype of the computation.

        Args:
            packed: the parameter.
            experts: `at_once` of them or fewer, one after the other.

        Returns:
            [some experts, out, in].
        """


def packed_in(module: nn.Module) -> Mapping[str, PackedMatrices]:
    """Quantised matrices of experts in a module, by the name of the parameter."""
    found: Mapping[str, PackedMatrices] = getattr(module, _PACKED, {})
    return found


def hold_packed(module: nn.Module, name: str, matrices: PackedMatrices) -> None:
    """Replace a parameter by packed matrices, frozen and on the meta device."""
    # Outside of the parameters and buffers, so that no strategy shards or casts the scales.
    setattr(module, _PACKED, {**packed_in(module), name: matrices})
    setattr(module, name, nn.Parameter(matrices.outline(), requires_grad=False))
