"""Shared by the benchmarks: a random base model, and the memory of a run's ranks."""

import shutil
from pathlib import Path

import psutil

from ftkit.utils import embedded
from ftkit.utils.hardware import host_memory

MIB = 2**20


def make_base(directory: Path, layers: int, width: int, dtype: str = "float32") -> tuple[int, int]:
    """Write a random Llama in Hugging Face layout; return its parameters and bytes of weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(directory)
    # The tokenizer of the quick start has 864 tokens: the other rows of the embedding are unused.
    for file in (embedded.path("quickstart") / "model").glob("tokenizer*"):
        shutil.copy(file, directory)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return parameters, sum(parameter.nbytes for parameter in model.parameters())


def anonymous_bytes(supervisor: int) -> list[int]:
    """RssAnon + RssShmem of each rank, in bytes; processes that they fork share their pages."""
    found = []
    for process in psutil.Process(supervisor).children():
        try:
            status = Path(f"/proc/{process.pid}/status")
            if status.exists():
                found.append(host_memory(status).rss_anon_plus_shmem_bytes)
        except (psutil.Error, OSError):
            continue
    return found
