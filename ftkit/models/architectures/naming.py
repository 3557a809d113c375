"""Parameter names of each family of models, and our names.

Our names are those of `litgpt.GPT`, with the fused ``attn.qkv`` split into ``attn.qkv.q_proj``,
``k_proj`` and ``v_proj``, each with its rows in the order of the heads.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

_QKV = tuple(f"transformer.h.{{}}.attn.qkv.{projection}_proj" for projection in "qkv")
_GATE_UP = ("transformer.h.{}.mlp.fc_1", "transformer.h.{}.mlp.fc_2")
_LAYER = re.compile(r"\.(\d+)(?=\.)")


@dataclass(frozen=True)
class Fused:
    """Several of our modules stored as one."""

    parts: tuple[str, ...]
    """Our modules, in the order of their rows."""
    layout: Literal["rows", "heads"] = "rows"
    """rows: one part after the other. heads: for each head, its rows of every part."""

    def modules_beside(self, ours: str) -> list[str]:
        """Names of all parts of a layer, given one of them, or a parameter of one.

        Raises:
            ValueError: the name is not in a layer.
        """
        layer = _LAYER.search(ours)
        if layer is None:
            raise ValueError(f"{ours} is not in a layer")
        return [part.format(layer[1]) for part in self.parts]

    def parameters_beside(self, ours: str) -> list[str]:
        """Names of a parameter (weight, bias) in all parts of a layer, given one of them."""
        kind = ours.rpartition(".")[2]
        return [f"{module}.{kind}" for module in self.modules_beside(ours)]


@dataclass(frozen=True)
class Naming:
    """Module names of a checkpoint by ours; ``{}`` stands for the layer."""

    modules: Mapping[str, str]
    """Ours -> theirs, one to one."""
    fused: Mapping[str, Fused] = field(default_factory=lambda: MappingProxyType({}))
    """Name in files -> names in ftkit, where one tensor of a file holds several."""

    def theirs(self, ours: str) -> str | None:
        """Their name of a module or parameter; None if it has no name of its own there."""
        return _renamed(ours, self.modules)

    def stored_in(self, ours: str) -> tuple[str, Fused | None]:
        """Their name of the tensor that holds our parameter, and how it is fused there, if so."""
        for module, fused in self.fused.items():
            if theirs := _renamed(ours, dict.fromkeys(fused.parts, module)):
                return theirs, fused
        theirs = self.theirs(ours)
        assert theirs is not None, f"{ours} is not a parameter of this architecture"
        return theirs, None


@dataclass(frozen=True)
class SameNames(Naming):
    """Names equal to ours, except for the output layer."""

    modules: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    head: str = "lm_head"
    """Their name of the output layer."""

    def theirs(self, ours: str) -> str:
        """Their name of a module or parameter."""
        module, *kind = ours.split(".", 1)
        return ".".join((self.head, *kind)) if module == "lm_head" else ours


def _renamed(name: str, modules: Mapping[str, str]) -> str | None:
    """Replace the module at the start of a name as ``modules`` says; None: it is not there."""
    layer = _LAYER.search(name)
    module = name if layer is None else f"{name[: layer.start()]}.{{}}{name[layer.end() :]}"
    suffix = ""
    # The longest known beginning of the name wins: adapters add modules below those of the table.
    while module and module not in modules:
        module, _, last = module.rpartition(".")
        suffix = f".{last}{suffix}"
    if not module:
        return None
    return (modules[module] + suffix).format(layer.group(1) if layer else "")


_LLAMA = {
    "transformer.wte": "model.embed_tokens",
    "transformer.h.{}.norm_1": "model.layers.{}.input_layernorm",
    "transformer.h.{}.attn.qkv.q_proj": "model.layers.{}.self_attn.q_proj",
    "transformer.h.{}.attn.qkv.k_proj": "model.layers.{}.self_attn.k_proj",
    "transformer.h.{}.attn.qkv.v_proj": "model.layers.{}.self_attn.v_proj",
    "transformer.h.{}.attn.proj": "model.layers.{}.self_attn.o_proj",
    "transformer.h.{}.norm_2": "model.layers.{}.post_attention_layernorm",
    "transformer.h.{}.mlp.fc_1": "model.layers.{}.mlp.gate_proj",
    "transformer.h.{}.mlp.fc_2": "model.layers.{}.mlp.up_proj",
    "transformer.h.{}.mlp.proj": "model.layers.{}.mlp.down_proj",
    "transformer.ln_f": "model.norm",
    "lm_head": "lm_head",
}
LLAMA = Naming(_LLAMA)

QWEN3 = Naming(
    _LLAMA
    | {
        "transformer.h.{}.attn.norm_q": "model.layers.{}.self_attn.q_norm",
        "transformer.h.{}.attn.norm_k": "model.layers.{}.self_attn.k_norm",
    }
)

GEMMA2 = Naming(
    _LLAMA
    | {
        "transformer.h.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
        "transformer.h.{}.norm_2": "model.layers.{}.pre_feedforward_layernorm",
        "transformer.h.{}.post_mlp_norm": "model.layers.{}.post_feedforward_layernorm",
    }
)

PHI3 = Naming(
    {ours: theirs for ours, theirs in _LLAMA.items() if ours not in (*_QKV, *_GATE_UP)},
    {
        "model.layers.{}.self_attn.qkv_proj": Fused(_QKV),
        "model.layers.{}.mlp.gate_up_proj": Fused(_GATE_UP),
    },
)

GPT_NEOX = Naming(
    {
        "transformer.wte": "gpt_neox.embed_in",
        "transformer.h.{}.norm_1": "gpt_neox.layers.{}.input_layernorm",
        "transformer.h.{}.attn.proj": "gpt_neox.layers.{}.attention.dense",
        "transformer.h.{}.norm_2": "gpt_neox.layers.{}.post_attention_layernorm",
        "transformer.h.{}.mlp.fc": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
        "transformer.h.{}.mlp.proj": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
        "transformer.ln_f": "gpt_neox.final_layer_norm",
        "lm_head": "embed_out",
    },
    {"gpt_neox.layers.{}.attention.query_key_value": Fused(_QKV, "heads")},
)

LITGPT = Naming(
    {"transformer": "transformer", "lm_head": "lm_head"},
    {"transformer.h.{}.attn.qkv": Fused(_QKV)},
)
"""Parameters of a LitGPT checkpoint of any architecture."""
