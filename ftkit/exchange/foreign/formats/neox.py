"""Names and matrices of GPT-NeoX, as transformers has them.

GPT-NeoX counts the layers of its pipeline: 0 is the embedding, 1 a function, the blocks follow,
then another function, the last norm and the head. In a Llama it joins query, key and value head by
head, and the up and the gate projection one after the other
(tools/ckpts/convert_neox_to_hf.py in EleutherAI/gpt-neox).
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from ftkit.errors import UserError
from ftkit.exchange.foreign.state import ForeignTensors
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.models.pretrained.weights.files import WeightTensor

_PLACED = re.compile(r"(?:module\.)?(?:sequential\.)?(\d+)\.(.+)")
_TIED = re.compile(r"(?:module\.)?tied_modules\.embed\.word_embeddings\.weight")
_FIRST = 2
"""Place of the first block."""
_OF_NEOX = {
    "mlp.linear1": "mlp.dense_h_to_4h",
    "mlp.linear2": "mlp.dense_4h_to_h",
}
"""New names of layers in transformers' GPTNeoX; the others have the same in both."""
_OF_LLAMA = {
    "attention.dense": "self_attn.o_proj",
    "mlp.linear2": "mlp.down_proj",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w3": "mlp.up_proj",
    "mlp.w2": "mlp.down_proj",
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
}
_QKV, _GATED = "attention.query_key_value", "mlp.linear1"
_LLAMAS = ("llama", "mistral")
_Split = Callable[[Tensor], Tensor]


def is_neox(names: Iterable[str]) -> bool:
    """Whether parameters are named by their places in a pipeline of GPT-NeoX."""
    return any(
        _TIED.fullmatch(name)
        or ((found := _PLACED.fullmatch(name)) and found[2] == "word_embeddings.weight")
        for name in names
    )


class NeoxNames:
    """What the parameters of a model are in a checkpoint of GPT-NeoX."""

    def __init__(self, base: BaseModel) -> None:
        """Of a base model in Hugging Face's layout.

        Raises:
            UserError: it is of a family that GPT-NeoX does not train, or not known.
        """
        settings = base.settings or {}
        self._family = str(settings.get("model_type"))
        if self._family not in ("gpt_neox", *_LLAMAS):
            raise UserError(
                f"checkpoint_dir {base.name} is of the family {self._family}, but models of "
                "GPT-NeoX that can be read are gpt_neox, llama or mistral. Give the model that its "
                "tools/ckpts/convert_neox_to_hf.py makes of the checkpoint."
            )
        self._base = base.name
        self._layers = int(settings["num_hidden_layers"])
        self._heads = int(settings["num_attention_heads"])
        self._shared = int(settings.get("num_key_value_heads") or self._heads)
        self._of_head = int(settings["hidden_size"]) // self._heads

    def held(self, tensors: ForeignTensors) -> dict[str, WeightTensor]:
        """Tensors by transformers' names, those that hold several of them apart.

        Raises:
            UserError: a tensor has no place in the model.
        """
        found: dict[str, WeightTensor] = {}
        for name, tensor in tensors.items():
            for theirs, split in self._parts(name).items():
                found[theirs] = tensor if split is None else _part_of(tensor, split)
        return found

    def names(self, name: str) -> list[str]:
        """Transformers' names of what a parameter holds."""
        return list(self._parts(name))

    def _parts(self, name: str) -> Mapping[str, _Split | None]:
        is_llama = self._family in _LLAMAS
        body, last = ("model", "norm") if is_llama else ("gpt_neox", "final_layer_norm")
        embedding = f"{body}.embed_{'tokens' if is_llama else 'in'}.weight"
        if _TIED.fullmatch(name):
            return {embedding: None}
        placed = _PLACED.fullmatch(name)
        place, inside = (int(placed[1]), placed[2]) if placed else (-1, name)
        layer, _, kind = inside.replace(".scale", ".weight").rpartition(".")
        whole = {
            (0, "word_embeddings"): embedding,
            (self._layers + 3, "norm"): f"{body}.{last}.{kind}",
            (self._layers + 4, "final_linear"): f"{'lm_head' if is_llama else 'embed_out'}.{kind}",
        }
        if (place, layer) in whole:
            return {whole[place, layer]: None}
        if _FIRST <= place < _FIRST + self._layers:
            block = f"{body}.layers.{place - _FIRST}"
            if not is_llama:
                return {f"{block}.{_OF_NEOX.get(layer, layer)}.{kind}": None}
            if layer == _QKV:
                return {
                    f"{block}.self_attn.{part}_proj.{kind}": partial(self._of_heads, number)
                    for number, part in enumerate("qkv")
                }
            if layer == _GATED:
                return {
                    f"{block}.mlp.{part}_proj.{kind}": partial(_half, number)
                    for number, part in enumerate(("up", "gate"))
                }
            if layer in _OF_LLAMA:
                return {f"{block}.{_OF_LLAMA[layer]}.{kind}": None}
        raise UserError(
            f"The checkpoint holds {name}, for which {self._base} ({self._layers} layers) has no "
            "place. Give the model that tools/ckpts/convert_neox_to_hf.py of GPT-NeoX makes of it, "
            "as --checkpoint_dir."
        )

    def _of_heads(self, number: int, joined: Tensor) -> Tensor:
        """Query (0), key (1) or value (2) of a matrix in which each head has its own rows of all.

        Where heads share keys and values, each has its share of those rows.
        """
        shared = self._of_head * self._shared // self._heads
        sizes = [self._of_head, shared, shared]
        by_head = joined.view(self._heads, sum(sizes), *joined.shape[1:])
        return by_head.split(sizes, dim=1)[number].flatten(0, 1)


def _half(number: int, joined: Tensor) -> Tensor:
    return joined.chunk(2)[number]


def _part_of(tensor: WeightTensor, split: _Split) -> WeightTensor:
    shape = split(torch.empty(tensor.shape, device="meta")).shape
    return WeightTensor(shape, tensor.dtype, lambda: split(tensor.read()))
