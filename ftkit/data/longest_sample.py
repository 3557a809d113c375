"""The longest sample of a data set, found by tokenising as little of it as possible."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ftkit.data.dataset import prompts_and_answers
from ftkit.data.json_records import Record

if TYPE_CHECKING:
    from litgpt.prompts import PromptStyle
    from litgpt.tokenizer import Tokenizer


BESIDE_TEXT = 8
"""Tokens of a sample that no byte of its text stands for, at most: special ones at both ends of
prompt and answer, and the space that some tokenizers put before each."""
MOST_BYTES = 16 * 2**20
"""Of text that is tokenised: a few seconds on one core."""
_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True)
class Longest:
    """How long the longest sample is that can be trained on."""

    at_most: int
    """Tokens that no sample exceeds; of a large data set, most likely."""
    at_least: int = 0
    """Tokens of the longest one that was tokenised; 0: none was."""
    label_tokens: int = 0
    """Those of them that carry loss."""
    is_exact: bool = False
    """Whether this sample is the longest of all."""


def longest_sample(
    records: Sequence[Record],
    prompt_style: "PromptStyle",
    tokenizer: "Tokenizer | None",
    *,
    mask_prompt: bool,
    max_seq_length: int,
) -> Longest | None:
    """The longest sample among records, as `load_data` would make them; None: it would make none.

    A token stands for at least one byte. So samples are tokenised from the largest down, until the
    next one has fewer bytes than the longest has tokens.

    Args:
        records: of the data set, or of a part of it.
        prompt_style: how an instruction becomes a prompt.
        tokenizer: of the base model; None: it is not here, and bytes are all that is known.
        mask_prompt: whether answers alone carry loss.
        max_seq_length: samples are cut to this many tokens.
    """
    answered = [record for record in records if record["output"].strip()]
    if not answered:
        return None
    texts = [
        prompt_style.apply(prompt=record["instruction"], **record) + record["output"]
        for record in answered
    ]
    sizes = np.array([len(text.encode()) for text in texts])
    falling = np.argsort(-sizes, kind="stable")
    largest = int(sizes[falling[0]])
    if tokenizer is None:
        return Longest(at_most=min(largest + BESIDE_TEXT, max_seq_length))
    tokens = label_tokens = done_bytes = 0
    densest = 0.0
    for start in range(0, len(falling), _AT_ONCE):
        chunk = falling[start : start + _AT_ONCE]
        largest = int(sizes[chunk[0]])
        if tokens >= min(largest + BESIDE_TEXT, max_seq_length):
            break
        if done_bytes > MOST_BYTES:
            expected = max(tokens, math.ceil(densest * largest))
            at_most = min(expected, largest + BESIDE_TEXT, max_seq_length)
            return Longest(at_most=at_most, at_least=tokens, label_tokens=label_tokens)
        chosen = [answered[i] for i in chunk]
        pairs = prompts_and_answers(chosen, tokenizer, prompt_style, lambda _: None)
        for index, (prompt, answer) in zip(chunk, pairs, strict=True):
            whole = len(prompt) + len(answer)
            densest = max(densest, whole / sizes[index])
            length = min(whole, max_seq_length)
            first_label = max(len(prompt) if mask_prompt else 0, 1)
            if tokens < length and first_label < length:
                tokens, label_tokens = length, length - first_label
        done_bytes += int(sizes[chunk].sum())
    if not tokens:
        return None
    return Longest(at_most=tokens, at_least=tokens, label_tokens=label_tokens, is_exact=True)
