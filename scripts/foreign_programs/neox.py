"""DeepSpeed's pipeline engine with a Llama in GPT-NeoX's layout: ZeRO 1, data parallel.

torchrun --nproc_per_node N neox.py BASE OUT [--bf16]

Layers have GPT-NeoX's names and places in the pipeline; query, key and value are one matrix, head
by head, and up and gate projection another. The engine also saves what GPT-NeoX adds to its state
(states of random generators). GPT-NeoX itself needs GPUs.
"""

import argparse
import os
import random
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import numpy
import torch
from common import MAX_NORM, RATE, STEPS, note_next, read_samples
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb


class Norm(nn.Module):
    """RMS norm; GPT-NeoX calls its weight scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Any) -> Any:
        return nn.functional.rms_norm(x, self.scale.shape, self.scale, self._eps)


class Embedding(nn.Module):
    """Embedding, at place 0 of the pipeline."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, ids: Any) -> Any:
        return self.word_embeddings(ids)


class Attention(nn.Module):
    """Attention with query, key and value of all heads in one matrix."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        heads, of_head = (
            config.num_attention_heads,
            config.hidden_size // config.num_attention_heads,
        )
        self._heads, self._of_head = heads, of_head
        self._shared = of_head * config.num_key_value_heads // heads
        rows = heads * (of_head + 2 * self._shared)
        self.query_key_value = nn.Linear(config.hidden_size, rows, bias=False)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self._rotary = LlamaRotaryEmbedding(config)

    def forward(self, x: Any) -> Any:
        batch, length, _ = x.shape
        joined = self.query_key_value(x).view(batch, length, self._heads, -1)
        parts = joined.split([self._of_head, self._shared, self._shared], dim=-1)
        query, key, value = (
            part.reshape(batch, length, -1, self._of_head).transpose(1, 2) for part in parts
        )
        cosine, sine = self._rotary(x, torch.arange(length)[None])
        query, key = apply_rotary_pos_emb(query, key, cosine, sine)
        found = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return self.dense(found.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    """MLP with up and gate projection in one matrix."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.linear1 = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.linear2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Any) -> Any:
        up, gate = self.linear1(x).chunk(2, dim=-1)
        return self.linear2(nn.functional.silu(gate) * up)


class Layer(nn.Module):
    """A block."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class FinalNorm(nn.Module):
    """Final norm, at the last place but one."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Any) -> Any:
        return self.norm(x)


class Head(nn.Module):
    """Head, at the last place."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.final_linear = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x: Any) -> Any:
        return self.final_linear(x)


def main() -> None:
    """Train, save, and train one step more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("base", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled at its first use
    deepspeed.init_distributed("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    theirs = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32)
    config = theirs.config
    # Places 1 and last but two are of functions that transpose tensors and have no weights.
    blocks = [LayerSpec(Layer, config) for _ in range(config.num_hidden_layers)]
    ends = [LayerSpec(kind, config) for kind in (FinalNorm, Head)]
    model = PipelineModule(
        [LayerSpec(Embedding, config), nn.Identity(), *blocks, nn.Identity(), *ends],
        num_stages=1,
        loss_fn=_loss,
    )
    model.load_state_dict(_as_neox(theirs.state_dict(), config))
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(
            model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1
        ),
        config={
            "train_micro_batch_size_per_gpu": 6 // world,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": MAX_NORM,
            "zero_optimization": {"stage": 1},
            "bf16": {"enabled": options.bf16},
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    samples = read_samples(options.base)
    share = len(samples) // world
    ids = torch.tensor(samples)[rank * share : (rank + 1) * share]

    def step() -> float:
        return float(engine.train_batch(iter([(ids, ids)])))

    for _ in range(STEPS):
        step()
    kept = {
        "iteration": STEPS,
        "random_rng_state": random.getstate(),
        "np_rng_state": numpy.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
    }
    engine.save_checkpoint(str(options.out), client_state=kept)
    held = {} if not options.bf16 else _state_of(model, config)
    loss = step()
    if not options.bf16:
        held = {name: p.detach().clone() for name, p in model.named_parameters()}
        held = _as_transformers(held, config)
    if rank == 0:
        note_next(options.out, loss, optimizer.param_groups[0]["lr"], held)
    torch.distributed.barrier()


def _loss(logits: Any, ids: Any) -> Any:
    logits = logits[:, :-1].float()
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].flatten())


def _state_of(model: nn.Module, config: Any) -> dict[str, torch.Tensor]:
    """Master weights and moments of a run in bfloat16, before the step."""
    found = {}
    for kind in ("parameter", "exp_avg", "exp_avg_sq"):
        tensors = {
            name: safe_get_full_fp32_param(parameter)
            if kind == "parameter"
            else safe_get_full_optimizer_state(parameter, kind)
            for name, parameter in model.named_parameters()
        }
        for name, tensor in _as_transformers(tensors, config).items():
            found[f"{kind}/{name}"] = tensor
    return found


def _sizes(config: Any) -> tuple[int, list[int]]:
    of_head = config.hidden_size // config.num_attention_heads
    shared = of_head * config.num_key_value_heads // config.num_attention_heads
    return config.num_attention_heads, [of_head, shared, shared]


def _as_neox(weights: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    last, (heads, sizes) = config.num_hidden_layers + 3, _sizes(config)
    found = {
        "0.word_embeddings.weight": weights["model.embed_tokens.weight"],
        f"{last}.norm.scale": weights["model.norm.weight"],
        f"{last + 1}.final_linear.weight": weights["lm_head.weight"],
    }
    for i in range(config.num_hidden_layers):
        ours, layer = f"{i + 2}.", f"model.layers.{i}."
        parts = [weights[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv"]
        by_head = [part.view(heads, size, -1) for part, size in zip(parts, sizes, strict=True)]
        joined = torch.cat(by_head, dim=1).flatten(0, 1)
        found[f"{ours}attention.query_key_value.weight"] = joined
        found[f"{ours}attention.dense.weight"] = weights[f"{layer}self_attn.o_proj.weight"]
        up, gate = (weights[f"{layer}mlp.{part}_proj.weight"] for part in ("up", "gate"))
        found[f"{ours}mlp.linear1.weight"] = torch.cat([up, gate])
        found[f"{ours}mlp.linear2.weight"] = weights[f"{layer}mlp.down_proj.weight"]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{ours}{norm}.scale"] = weights[f"{layer}{norm}.weight"]
    return found


def _as_transformers(weights: dict[str, Any], config: Any) -> dict[str, torch.Tensor]:
    last, (heads, sizes) = config.num_hidden_layers + 3, _sizes(config)
    found = {
        "model.embed_tokens.weight": weights["0.word_embeddings.weight"],
        "model.norm.weight": weights[f"{last}.norm.scale"],
        "lm_head.weight": weights[f"{last + 1}.final_linear.weight"],
    }
    for i in range(config.num_hidden_layers):
        ours, layer = f"{i + 2}.", f"model.layers.{i}."
        joined = weights[f"{ours}attention.query_key_value.weight"]
        by_head = joined.view(heads, sum(sizes), -1).split(sizes, dim=1)
        for part, tensor in zip("qkv", by_head, strict=True):
            found[f"{layer}self_attn.{part}_proj.weight"] = tensor.flatten(0, 1)
        found[f"{layer}self_attn.o_proj.weight"] = weights[f"{ours}attention.dense.weight"]
        up, gate = weights[f"{ours}mlp.linear1.weight"].chunk(2)
        found[f"{layer}mlp.up_proj.weight"] = up
        found[f"{layer}mlp.gate_proj.weight"] = gate
        found[f"{layer}mlp.down_proj.weight"] = weights[f"{ours}mlp.linear2.weight"]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}{norm}.weight"] = weights[f"{ours}{norm}.scale"]
    return found


if __name__ == "__main__":
    main()
