"""Model and data that all programs train on, made with ftkit's own libraries."""

import json
import random
from pathlib import Path

WORDS = [
    *("the", "a", "red", "blue", "green", "old", "new", "cat", "dog", "sun", "moon", "tree"),
    *("house", "sees", "likes", "finds", "and", "or", "is", "was"),
]
SAMPLES, LENGTH = 6, 12


def make_base(directory: Path, layers: int) -> None:
    """Write a tiny Llama, its tokenizer, six texts of equal length, and ftkit's tokens of them."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    directory.mkdir(parents=True)
    vocabulary = {word: number for number, word in enumerate(["<s>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    config = LlamaConfig(
        vocab_size=len(vocabulary) + 1,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=LENGTH)) for _ in range(SAMPLES + 1)]
    data = directory / "data"
    data.mkdir()
    for name, of_file in (("train", texts[:SAMPLES]), ("val", texts[SAMPLES:])):
        records = [{"text": text} for text in of_file]
        (data / f"{name}.json").write_text(json.dumps(records, indent=1))
    (directory / "samples.json").write_text(json.dumps(_tokens(directory, data)))


def _tokens(directory: Path, data: Path) -> list[list[int]]:
    from ftkit.data.dataset import load_data
    from ftkit.models.pretrained.tokenizer import Tokenizer
    from ftkit.recipe.recipe import Component

    data_source = Component(class_path="litgpt.data.JSON", init_args={"path": str(data)})
    found = load_data(data_source, Tokenizer(directory), 64, progress=lambda *_: None).train
    return [found[i].ids.tolist() for i in range(len(found))]
