"""Real tokenizers in llama.cpp's source: the rule by which each is known, and its tokens of texts.

Files are those of models/ggml-vocab-*.gguf; the tokens beside them were made by the original
tokenizers. Other families' tokenizers have not been tried.
"""

import os
from pathlib import Path

import pytest
from llama_cpp import VARIABLE, needs_llama_cpp
from tokenizers import Tokenizer

from ftkit.extensions.gguf.header import read_header
from ftkit.extensions.gguf.tokenizer import rule_of, tokenizer_files

VOCABULARIES = {
    "gpt-2": "gpt-2",
    "mpt": "gpt-2",
    "starcoder": "smollm",
    "refact": "smollm",
    "command-r": "smollm",
    "qwen2": "qwen2",
    "qwen35": "qwen35",
    "llama-bpe": "llama-bpe",
    "llama-spm": None,
    "phi-3": None,
}
"""The rule that is written; None: SentencePiece, which has no rule. Rules of one name cut alike."""


@needs_llama_cpp
@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_real_vocabulary_gives_its_tokens_and_is_known_by_its_rule(name: str) -> None:
    file = Path(os.environ[VARIABLE]) / "models" / f"ggml-vocab-{name}.gguf"
    tokenizer = Tokenizer.from_str(tokenizer_files(read_header(file))["tokenizer.json"].decode())
    if VOCABULARIES[name] is not None:
        assert rule_of(tokenizer) == VOCABULARIES[name]
    texts = file.with_name(f"{file.name}.inp").read_text(encoding="utf-8")
    lines = file.with_name(f"{file.name}.out").read_text().splitlines()
    # An empty text follows the last mark.
    samples = texts.split("\n__ggml_vocab_test__\n")[: len(lines)]
    for text, line in zip(samples, lines, strict=True):
        found = tokenizer.encode(text, add_special_tokens=False).ids
        assert found == [int(number) for number in line.split()], text
