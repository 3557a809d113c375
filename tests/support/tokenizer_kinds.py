"""Tokenizers of several kinds, with and without rules for BOS and EOS."""

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Processor

from ftkit.models.pretrained.tokenizer import Tokenizer

SPECIAL = ["<s>", "</s>", "[UNK]"]
TEXTS = [
    "User: the red cat\nAssistant: a blue dog\n\n",
    "red blue cat dog  the a\n\n red\n blue",
] * 20


def _byte_level() -> Processor:
    made = Processor(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def _lines_merged() -> Processor:
    made = _byte_level()
    # Line breaks are one token with all that precede them, as in tokenizers of Llama 3 and Qwen.
    cuts = pre_tokenizers.Split(Regex(r"\s*[\r\n]+| ?\w+| ?[^\s\w]+|\s+(?!\S)|\s+"), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return made


def _metaspace(scheme: str) -> Processor:
    made = Processor(models.BPE(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return made


def _unigram() -> Processor:
    made = Processor(models.Unigram())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    return made


def _word_piece() -> Processor:
    made = Processor(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return made


KINDS = {
    "bytes": _byte_level,
    "line breaks": _lines_merged,
    "space always": lambda: _metaspace("always"),
    "space first": lambda: _metaspace("first"),
    "unigram": _unigram,
    "word pieces": _word_piece,
}
RULES: dict[str, dict[str, Any]] = {
    "none": {},
    "adds bos": {"add_bos_token": True},
    "file adds bos": {"single": "<s> $A"},
    "file adds both": {"single": "<s> $A </s>"},
    "file adds eos": {"single": "$A </s>"},
}
"""What begins and ends texts, by settings or by the rules of the file itself."""


def write_tokenizer_of(directory: Path, kind: str, rule: str = "none") -> Tokenizer:
    """A tokenizer of a kind with a rule, of a few hundred tokens."""
    made, settings = KINDS[kind](), dict(RULES[rule])
    options: dict[str, Any] = {"special_tokens": SPECIAL, "show_progress": False}
    if kind in ("bytes", "line breaks"):
        options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    of_kind = {"unigram": trainers.UnigramTrainer, "word pieces": trainers.WordPieceTrainer}
    if kind == "unigram":
        options |= {"unk_token": "[UNK]", "vocab_size": 60}
    else:
        options["vocab_size"] = 400
    made.train_from_iterator(TEXTS, of_kind.get(kind, trainers.BpeTrainer)(**options))
    if single := settings.pop("single", None):
        made.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    directory.mkdir(parents=True, exist_ok=True)
    made.save(str(directory / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named | settings))
    return Tokenizer(directory)
