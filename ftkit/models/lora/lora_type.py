"""LoRA as a type of adapter."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn as nn
from torch import Tensor

from ftkit.models.lora.adapter_files import check_names, lora_files
from ftkit.models.lora.layers import add_lora, merged
from ftkit.models.lora.peft_layers import AdapterFiles, PeftLayers
from ftkit.models.lora.targets import TRAINED
from ftkit.models.pretrained.base_model import BaseModel


class LoraLayers(PeftLayers):
    """LoRA, and its variants."""

    dropout = "lora_dropout"

    def check(self, base: BaseModel, layers: Sequence[str]) -> None:
        check_names(base, layers)

    def add(self, model: nn.Module, base: BaseModel, targets: list[str]) -> None:
        add_lora(model, self.lora, targets)

    def first_number(self, name: str) -> float | None:
        return 0.0 if ".lora_B." in name else None

    def files(self, adapter: Mapping[str, Tensor], base: BaseModel) -> AdapterFiles:
        return lora_files(adapter, base, self.lora)

    def merged(self, layer: Any, values: Mapping[str, Tensor], kind: str, base: Tensor) -> Tensor:
        a, b = (values[f"lora_{matrix}.{TRAINED}.weight"] for matrix in "AB")
        magnitude = values.get(f"lora_magnitude_vector.{TRAINED}.weight")
        return merged(base, a, b, layer.scaling[TRAINED], magnitude)
