"""The workload of the benchmarks: random models, a tokenizer, and records, made on the spot.

Nothing is downloaded, and nothing is drawn without a seed: everybody who runs the benchmarks
computes on the same weights and the same tokens. A record is a text of words "w17", each of which
is one token, so that all programs see the same ids, however they treat spaces.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCABULARY = 32_000
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
LONGEST = 512
"""Most tokens of a sample."""
SHARD_BYTES = 4 * 2**30

Record = dict[str, Any]


_GEMMA2: dict[str, object] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_QWEN3: dict[str, object] = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True}
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", _GEMMA2),
    "qwen3": ("Qwen3ForCausalLM", _QWEN3),
}
"""By model_type: Hugging Face's class, and the settings that differ from a Llama's."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of a model."""

    layers: int
    width: int
    intermediate: int
    heads: int
    key_value_heads: int
    positions: int = 2048
    """Longest sequence that it was made for."""
    model_type: str = "llama"
    """One of FAMILIES."""

    @property
    def settings(self) -> dict[str, object]:
        """Settings of its config.json, except the number format."""
        class_name, own = FAMILIES[self.model_type]
        return {
            "architectures": [class_name],
            "model_type": self.model_type,
            "vocab_size": VOCABULARY,
            "hidden_size": self.width,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **({} if self.model_type == "llama" else {"head_dim": self.head_size}),
            **({"query_pre_attn_scalar": self.head_size} if self.model_type == "gemma2" else {}),
            **own,
        }

    @property
    def head_size(self) -> int:
        """Size of a head of attention."""
        return self.width // self.heads

    @property
    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Hugging Face's names of its weights, and their shapes `[out, in]`."""
        key_value = self.head_size * self.key_value_heads
        yield "model.embed_tokens.weight", (VOCABULARY, self.width)
        for layer in range(self.layers):
            block = f"model.layers.{layer}."
            yield block + "input_layernorm.weight", (self.width,)
            yield block + "self_attn.q_proj.weight", (self.width, self.width)
            yield block + "self_attn.k_proj.weight", (key_value, self.width)
            yield block + "self_attn.v_proj.weight", (key_value, self.width)
            yield block + "self_attn.o_proj.weight", (self.width, self.width)
            if self.model_type == "qwen3":
                yield block + "self_attn.q_norm.weight", (self.head_size,)
                yield block + "self_attn.k_norm.weight", (self.head_size,)
            yield block + "post_attention_layernorm.weight", (self.width,)
            if self.model_type == "gemma2":
                yield block + "pre_feedforward_layernorm.weight", (self.width,)
                yield block + "post_feedforward_layernorm.weight", (self.width,)
            yield block + "mlp.gate_proj.weight", (self.intermediate, self.width)
            yield block + "mlp.up_proj.weight", (self.intermediate, self.width)
            yield block + "mlp.down_proj.weight", (self.width, self.intermediate)
        yield "model.norm.weight", (self.width,)
        if not self.settings["tie_word_embeddings"]:
            yield "lm_head.weight", (VOCABULARY, self.width)

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(torch.Size(shape).numel() for _, shape in self.shapes)


SIZES = {
    "llama-1m": Size(layers=2, width=16, intermediate=44, heads=2, key_value_heads=2),
    "llama-10m": Size(layers=3, width=128, intermediate=352, heads=2, key_value_heads=2),
    "llama-34m": Size(layers=5, width=384, intermediate=1056, heads=6, key_value_heads=6),
    "llama-90m": Size(layers=10, width=640, intermediate=1760, heads=10, key_value_heads=10),
    "tinyllama-1.1b": Size(layers=22, width=2048, intermediate=5632, heads=32, key_value_heads=4),
    "llama-3b": Size(layers=26, width=3200, intermediate=8640, heads=32, key_value_heads=32),
    "llama-7b": Size(layers=32, width=4096, intermediate=11008, heads=32, key_value_heads=32),
    "gemma2-1m": Size(
        layers=2, width=32, intermediate=88, heads=2, key_value_heads=1, model_type="gemma2"
    ),
    "gemma2-34m": Size(
        layers=12, width=384, intermediate=1152, heads=6, key_value_heads=3, model_type="gemma2"
    ),
    "qwen3-1m": Size(
        layers=2, width=32, intermediate=88, heads=2, key_value_heads=1, model_type="qwen3"
    ),
    "qwen3-34m": Size(
        layers=12, width=384, intermediate=1152, heads=6, key_value_heads=3, model_type="qwen3"
    ),
}
"""Sizes by name. The largest Llamas have the shapes of TinyLlama, OpenLLaMA 3B and Llama 2 7B."""


def once(target: Path, make: Callable[[Path], object]) -> Path:
    """Make a directory unless it exists; it appears only when it is complete."""
    if not target.is_dir():
        unfinished = target.with_name(target.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        make(unfinished)
        unfinished.rename(target)
    return target


def model_in(place: Path, name: str, precision: str) -> Path:
    """The random model of this size and precision in a directory of models, made if missing."""
    dtype = torch.float32 if precision == "32-true" else torch.bfloat16
    target = place / f"{name}-{precision}"
    return once(target, lambda made: make_model(made, SIZES[name], dtype))


def make_model(directory: Path, size: Size, dtype: torch.dtype) -> int:
    """Write a random model in Hugging Face layout, with its tokenizer; return its parameters.

    Args:
        directory: for its files; made if needed.
        size: of the model.
        dtype: of the weights.
    """
    directory.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    for number, shard in enumerate(_shards(size, dtype), 1):
        file = f"model-{number:05}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
    _write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    settings = size.settings | {"torch_dtype": str(dtype).removeprefix("torch.")}
    _write_json(directory / "config.json", settings)
    write_tokenizer(directory)
    return size.parameters


def _shards(size: Size, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """Draw the weights, on a GPU if there is one; yield those of one file at a time.

    Norms multiply by one: by their weight, Gemma's by their weight plus one.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    for name, shape in size.shapes:
        weight = torch.full(shape, 0.0 if size.model_type == "gemma2" else 1.0, dtype=dtype)
        if len(shape) == 2:
            drawn = torch.empty(shape, device=device).normal_(0, 0.02, generator=generator)
            weight = drawn.to(dtype).cpu()
        shard[name] = weight
        if sum(one.nbytes for one in shard.values()) >= SHARD_BYTES:
            yield shard
            shard = {}
    if shard:
        yield shard


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer whose tokens are words: the id of "w17" is 17."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(SPECIAL_TOKENS)}
    words |= {f"w{number}": number for number in range(len(words), VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=SPECIAL_TOKENS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    unknown, begin, end = SPECIAL_TOKENS
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": unknown,
        "bos_token": begin,
        "eos_token": end,
        "pad_token": unknown,
        "add_bos_token": False,
        "model_max_length": LONGEST,
    }
    _write_json(directory / "tokenizer_config.json", settings)
    _write_json(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})


def alpaca_lengths(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Tokens of prompts and of answers, distributed like Alpaca's: 133 together in the mean.

    Prompts have a frame of 40 tokens; the rest is drawn from log-normal distributions. In random
    batches of 4 samples 36 % of the positions are padding, as with Alpaca itself; of 8, 48 %.
    """
    rng = random.Random(seed)
    lengths = []
    for _ in range(count):
        prompt = min(40 + round(rng.lognormvariate(2.7, 0.6)), LONGEST // 2)
        answer = min(max(1, round(rng.lognormvariate(3.95, 0.85))), LONGEST - 1 - prompt)
        lengths.append((prompt, answer))
    return lengths


def make_records(lengths: Iterable[tuple[int, int]], seed: int = 0) -> list[Record]:
    """Records of random words with these numbers of tokens of prompt and answer.

    The end-of-text token, which all programs add to an answer, is not counted in them.
    """
    rng = random.Random(seed)
    first = len(SPECIAL_TOKENS)

    def text(words: int) -> str:
        return " ".join(f"w{rng.randrange(first, VOCABULARY)}" for _ in range(words))

    return [
        {"instruction": text(prompt) + "\n", "input": "", "output": text(answer)}
        for prompt, answer in lengths
    ]


def make_pairs(
    lengths: Sequence[tuple[int, int]], *, longest_prompt: int | None = None, seed: int = 0
) -> list[Record]:
    """Make pairs of answers, each of two of these lengths; the prompt is that of the first.

    Args:
        lengths: tokens of prompts and of answers.
        longest_prompt: words that are left of a prompt; None: all.
        seed: of the words.
    """
    records = make_records(lengths, seed)
    return [
        {
            "prompt": " ".join(first["instruction"].split()[:longest_prompt]) + "\n",
            "chosen": first["output"],
            # The second prompt may be shorter than the first.
            "rejected": " ".join(second["output"].split()[: LONGEST // 2 - 1]),
        }
        for first, second in zip(records[::2], records[1::2], strict=True)
    ]


def make_labelled(lengths: Iterable[tuple[int, int]], seed: int = 0) -> list[Record]:
    """Make answers of these lengths, every third of which is not desirable."""
    return [
        {
            "prompt": record["instruction"],
            "completion": record["output"],
            "label": number % 3 != 2,
        }
        for number, record in enumerate(make_records(lengths, seed))
    ]


ANSWERS = ("chosen", "rejected", "completion", "output")
"""Keys of the answers of records."""


def tokens_of_each(record: Record) -> list[int]:
    """Tokens of the sequences of a record, with the end-of-text tokens."""
    prompt = record.get("prompt") or record["instruction"]
    answers = [record[key] for key in ANSWERS if key in record]
    return [len(prompt.split()) + len(answer.split()) + 1 for answer in answers]


def tokens_of(record: Record) -> int:
    """Tokens of a record, with the end-of-text tokens."""
    return sum(tokens_of_each(record))


def in_file_order(records: Sequence[Record], drawn: Sequence[int]) -> list[Record]:
    """Order records in a file so that a program that draws these places trains on them in order.

    Args:
        records: in the order in which to train on them.
        drawn: places in the file in the order in which the program draws them.
    """
    placed: list[Record | None] = [None] * len(records)
    for record, place in zip(records, drawn, strict=True):
        placed[place] = record
    return [record for record in placed if record is not None]


def order_of_ftkit(samples: int, seed: int) -> list[int]:
    """The places that ftkit draws in its first epoch."""
    from ftkit.data.samples.sampler import EpochOrder

    return [int(place) for place in EpochOrder([samples], [samples], seed).of(0)]


def order_of_litgpt(samples: int, seed: int) -> list[int]:
    """The places that LitGPT draws in its first epoch: those of a DataLoader with this seed."""
    from torch.utils.data import DataLoader

    generator = torch.Generator().manual_seed(seed)
    places: DataLoader[int] = DataLoader(range(samples), shuffle=True, generator=generator)  # type: ignore[arg-type]
    return [int(place) for place in places]


def write_data(directory: Path, train: list[Record], val: list[Record]) -> None:
    """Write records as train.json and val.json, which ftkit and LitGPT read."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "train.json", train)
    _write_json(directory / "val.json", val)


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content))
