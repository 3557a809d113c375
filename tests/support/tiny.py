"""The one tiny model and data set that tests train, made on the spot."""

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from ftkit.recipe.objectives import ScoreLabels

WORDS = ["red", "blue", "green", "cat", "dog", "sun", "moon", "tree"]
TEXT = "Below is an instruction that describes a task. Write a response. ### Instruction: Input: "

LLAMA: dict[str, Any] = {
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
"""Settings of the tiny Llama."""


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

    directory.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**LLAMA | changes)).save_pretrained(directory)
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


LITGPT_ONLY = {
    "OLMo-2-1124-7B": {},
    "falcon-7b": {},
    "phi-2": {"rotary_percentage": 0.5},
    "Gemma-3-1b-it": {},
    "Mixtral-8x7B-v0.1": {"n_expert": 2, "n_expert_per_token": 2},
    "Qwen3-30B-A3B": {"n_expert": 2, "n_expert_per_token": 2, "moe_intermediate_size": 32},
}
"""Architectures that LitGPT's layout alone holds, with what makes them small."""


def make_litgpt_only(directory: Path, name: str) -> Path:
    """A random model of 2 layers that ftkit can write in no other layout than LitGPT's."""
    import litgpt
    from litgpt.utils import save_config

    settings: dict[str, Any] = {
        "n_layer": 2,
        "n_embd": 64,
        "n_head": 4,
        "head_size": 16,
        "intermediate_size": 96,
        "block_size": 256,
        "vocab_size": 400,
        "padded_vocab_size": 400,
    }
    known = litgpt.Config.from_name(name)
    settings["n_query_groups"] = {1: 1, known.n_head: 4}.get(known.n_query_groups, 2)
    if known.sliding_window_size is not None:
        settings["sliding_window_indices"] = [1, 0]
        settings["rope_indices"] = [1, 0] if known.rope_indices is not None else None
    config = litgpt.Config.from_name(name, **settings | LITGPT_ONLY[name])  # type: ignore[operator]
    directory.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torch.save(litgpt.GPT(config).state_dict(), directory / "lit_model.pth")
    save_config(config, directory)
    make_tokenizer(directory)
    return directory


def make_pairs(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Preference pairs whose better answer names the colour first; both of different lengths."""
    rng = random.Random(seed)
    pairs = []
    for _ in range(count):
        prompt = f"what is the colour of {rng.choice(WORDS)} {rng.choice(WORDS)}"
        answers = [" ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 12))) for _ in range(2)]
        pairs.append({"prompt": prompt, "chosen": f"red {answers[0]}", "rejected": answers[1]})
    return pairs


def make_labelled(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Answers with a label, of which two thirds are desirable: they name the colour first."""
    rows = []
    for number, pair in enumerate(make_pairs(count, seed)):
        is_desirable = number % 3 > 0
        answer = pair["chosen" if is_desirable else "rejected"]
        rows.append({"prompt": pair["prompt"], "completion": f" {answer}", "label": is_desirable})
    return rows


def make_classified(count: int, problem: str, seed: int = 0) -> list[dict[str, Any]]:
    """Texts of different lengths with a class, classes, or a number that their words give."""
    rng = random.Random(seed)
    kinds = {"colour": WORDS[:3], "animal": WORDS[3:5], "sky": WORDS[5:7]}
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        kind = rng.choice([*kinds])
        words = [rng.choice(kinds[kind]) for _ in range(rng.randint(1, 12))]
        several = [kind, *(["long"] if len(words) > 6 else [])]
        labels = {"regression": len(words) / 4, "multi_label_classification": several}
        rows.append({"text": " ".join(words), "label": labels.get(problem, kind)})
    return rows


def make_queries(count: int, negatives: int, seed: int = 0) -> list[dict[str, Any]]:
    """Queries with a document about the same, and others."""
    rng = random.Random(seed)
    kinds = {"colour": WORDS[:3], "animal": WORDS[3:5], "sky": WORDS[5:7]}

    def text(kind: str) -> str:
        return " ".join(rng.choice(kinds[kind]) for _ in range(rng.randint(1, 6)))

    rows: list[dict[str, Any]] = []
    for _ in range(count):
        kind, *others = rng.sample([*kinds], 3)
        about = [kind, *(rng.choice(others) for _ in range(negatives))]
        positive, *rest = map(text, about)
        rows.append({"query": text(kind), "positive": positive, "negative": rest})
    return rows


def make_labelled_queries(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Queries with one document, and a label that says whether it is about the same."""
    return [
        {"query": row["query"], "document": text, "label": label}
        for row in make_queries(count // 2, 1, seed)
        for label, text in ((1, row["positive"]), (0, row["negative"][0]))
    ]


def make_scored_model(directory: Path, scores: "ScoreLabels") -> Path:
    """A tiny model that gives sequences scores, in Hugging Face layout, without a run."""
    from ftkit.models.architectures.architecture import HEAD
    from ftkit.models.load_weights import initial_score
    from ftkit.models.pretrained.base_model import open_base, weights
    from ftkit.models.pretrained.save import save_hf
    from ftkit.models.pretrained.scored_model import as_scored

    base = as_scored(open_base(str(make_llama(directory / "base"))), scores)
    head = initial_score(base.architecture.parameter_shapes(tied=False)[HEAD], seed=1)
    save_hf(base, [*weights(base), (HEAD, head)], directory / "model")
    return directory / "model"
