"""Models of transformers by their published shapes; nothing is downloaded."""

from typing import Any

import torch
from torch import Tensor, nn

_MISTRAL = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "sliding_window": None,
}
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral-7B-v0.1": ("mistral", _MISTRAL),
    "Mixtral-8x7B-Instruct-v0.1": ("mixtral", _MISTRAL | {"num_local_experts": 8}),
    "Llama-2-70b-hf": (
        "llama",
        {
            "vocab_size": 32000,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
        },
    ),
    "Llama-3.1-8B": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
        },
    ),
    "Llama-3.2-3B": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
}


def causal_lm(name: str) -> Any:
    """Make the model of a name, in bfloat16, with torch's fused attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, shape = _SHAPES[name]
    config = AutoConfig.for_model(kind, **shape)
    return AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="sdpa"
    )


class _Expert(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, hidden, bias=False)
        self.w3 = nn.Linear(hidden, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))
        return y


class _Mixture(nn.Module):
    """Two experts for each token, of which each takes as many tokens as the others."""

    def __init__(self, hidden: int, inner: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(_Expert(hidden, inner) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights = torch.topk(self.gate(flat).float().softmax(-1), 2, dim=-1)[0]
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        total = torch.zeros_like(flat)
        count = 2 * len(flat) // len(self.experts)
        for expert in self.experts:
            chosen = torch.zeros(count, dtype=torch.long)
            y = expert(flat[chosen]) * weights[chosen, chosen, None]
            total.index_add_(0, chosen, y.to(x.dtype))
        return total.view_as(x)


def mixture_of_linear_layers(model: Any) -> None:
    """Give experts a linear layer for each matrix, as transformers before version 5 had them.

    bitsandbytes only quantises such. Nothing changes in a model without experts.
    """
    config = model.config
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp = _Mixture(
                config.hidden_size, config.intermediate_size, config.num_local_experts
            )
