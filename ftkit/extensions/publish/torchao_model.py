"""Models whose weights are written as quantisation-aware training has rounded them, for torchao.

The form is that of transformers' `TorchAoConfig`: safetensors with integers, scales and zero points
of a weight as tensors of their own, and what belongs together in the metadata. torchao 0.18 stores
an integer of any width in a byte.
"""

import json
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torchao.core.config import config_to_dict
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import quantize_
from torchao.quantization.qat.linear import FakeQuantizedLinear

from ftkit.extensions.torchao.keys import Qat
from ftkit.extensions.torchao.layers import qat_config, round_in_forward
from ftkit.models.language_model import outline_plain
from ftkit.models.lora.targets import our_name
from ftkit.models.pretrained.base_model import BaseModel, parameter_shapes, storage_of
from ftkit.utils.output_files import as_written


class TorchaoWeights:
    """The form of a rounded model, a `Packing`."""

    def __init__(self, base: BaseModel, qat: Qat, dtype: torch.dtype) -> None:
        """Find the layers that training has rounded.

        Args:
            base: the model.
            qat: of its run.
            dtype: number format of scales, and of the weights that are not rounded.
        """
        self._config, self._dtype = qat_config(qat), dtype
        model = outline_plain(base, dtype, tied=base.tied)
        round_in_forward(model.body, qat)
        storage = storage_of(base.architecture, "hf")
        names = {True: set[str](), False: set[str]()}
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear):
                stored = storage.written_name(f"{our_name(name)}.weight")
                names[isinstance(layer, FakeQuantizedLinear)].add(stored)
        self._rounded, self._plain = names[True], names[False]
        outlined = (
            (name, torch.empty(shape, dtype=dtype, device="meta"))
            for name, shape in parameter_shapes(base).items()
        )
        self._outlined = dict(storage.written(outlined))

    @cached_property
    def bytes(self) -> int:
        """Size of all tensors."""
        return sum(part.nbytes for pair in self._outlined.items() for _, part in self.parts(*pair))

    @cached_property
    def metadata(self) -> dict[str, str]:
        """Metadata of each file of weights, which describe those of all files."""
        # transformers 5.24 merges the metadata of the files, and the last list of names wins.
        found: dict[str, str] = {}
        for name, tensor in self._outlined.items():
            found |= flatten_tensor_state_dict({name: self._packed(name, tensor)})[1]
        return found | {"tensor_names": json.dumps(list(self._outlined))}

    @property
    def settings(self) -> dict[str, Any]:
        """Keys of config.json that describe the form."""
        kept = sorted(name.removesuffix(".weight") for name in self._plain)
        return {
            "quantization_config": {
                "quant_method": "torchao",
                "quant_type": {"default": config_to_dict(self._config)},
                "modules_to_not_convert": kept,
                "include_input_output_embeddings": False,
                "untie_embedding_weights": False,
            }
        }

    def parts(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that are written for one, with their names in files."""
        tensors, _ = flatten_tensor_state_dict({name: self._packed(name, tensor)})
        yield from tensors.items()

    def _packed(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor of torchao's class if training has rounded it, else the plain one."""
        if name not in self._rounded:
            return tensor if tensor.is_meta else as_written(name, tensor, self._dtype)
        layer = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False, device="meta")
        # Rounded in its own number format, as in training: only the scales are converted.
        layer.weight = nn.Parameter(tensor, requires_grad=False)
        quantize_(layer, self._config)
        packed: Tensor = layer.weight.to(self._dtype)
        return packed
