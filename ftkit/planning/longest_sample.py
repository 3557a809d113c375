"""The longest sample of a data set, found by tokenising as little of it as possible."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ftkit.data.prepare import fit
from ftkit.data.records.record import Record
from ftkit.data.rendering.renderer import Overlong, Renderer
from ftkit.data.samples.sample_set import Samples

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


def longest_of(samples: Samples) -> Longest | None:
    """The longest of samples that are here; None: there are none."""
    if not len(samples):
        return None
    index = int(samples.lengths.argmax())
    tokens = int(samples.lengths[index]) + 1
    labels = int(samples.label_counts[index])
    return Longest(at_most=tokens, at_least=tokens, label_tokens=labels, is_exact=True)


def longest_in_all(found: Iterable[Longest | None]) -> Longest | None:
    """The longest sample of several sources; None: they make none."""
    known = [longest for longest in found if longest is not None]
    if not known:
        return None
    longest = max(known, key=lambda one: one.at_least)
    return dataclasses.replace(
        longest,
        at_most=max(one.at_most for one in known),
        is_exact=all(one.is_exact for one in known),
    )


def longest_sample(
    records: Sequence[Record],
    renderer: Renderer,
    *,
    max_seq_length: int,
    overlong: Overlong = "truncate",
    by_bytes: bool = False,
) -> Longest | None:
    """The longest sample among records, as `load_data` would make them; None: it would make none.

    A token stands for at least one byte. So samples are tokenised from the largest down, until the
    next one has fewer bytes than the longest has tokens.

    Args:
        records: of the data set, or of a part of it.
        renderer: makes samples of them.
        max_seq_length: no sample has more tokens.
        overlong: what becomes of those that have.
        by_bytes: there is no tokenizer here, and bytes are all that is known.
    """
    texts = [renderer.text(record) for record in records]
    answered = [(record, text) for record, text in zip(records, texts, strict=True) if text]
    if not answered:
        return None
    sizes = np.array([len(text.encode()) for _, text in answered])
    falling = np.argsort(-sizes, kind="stable")
    largest = int(sizes[falling[0]])
    if by_bytes:
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
        renderings = renderer.render([answered[i][0] for i in chunk])
        for index, rendering in zip(chunk, renderings, strict=True):
            for whole in rendering.samples:
                densest = max(densest, len(whole.ids) / sizes[index])
                for kept in fit(whole, max_seq_length, overlong):
                    if tokens < len(kept.ids):
                        tokens, label_tokens = len(kept.ids), kept.label_count
        done_bytes += int(sizes[chunk].sum())
    if not tokens:
        return None
    return Longest(at_most=tokens, at_least=tokens, label_tokens=label_tokens, is_exact=True)
