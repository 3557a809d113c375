"""The one tiny model and data set that tests train, made on the spot."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

WORDS = ["red", "blue", "green", "cat", "dog", "sun", "moon", "tree"]
TEXT = "Below is an instruction that describes a task. Write a response. ### Instruction: Input: "


def make_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer of 400 entries in Hugging Face layout."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT + " ".join(WORDS)] * 10, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def make_llama(directory: Path, **changes: Any) -> Path:
    """A random Llama of 2 layers with grouped-query attention in Hugging Face layout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 400,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    directory.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**settings | changes)).save_pretrained(directory)
    make_tokenizer(directory)
    return directory


def make_records(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Alpaca records with answers of different lengths."""
    rng = random.Random(seed)
    return [
        {
            "instruction": f"what is the colour of {rng.choice(WORDS)} {rng.choice(WORDS)}",
            "input": rng.choice(["", f"the {rng.choice(WORDS)}"]),
            "output": " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 12))),
        }
        for _ in range(count)
    ]


def make_data(file: Path, count: int = 60) -> Path:
    """Alpaca records in a JSON file."""
    file.write_text(json.dumps(make_records(count)))
    return file
