"""Two texts as one sequence: a query and a document, or a premise and a hypothesis."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftkit.models.pretrained.tokenizer import Tokenizer

BETWEEN = "\n"
"""What stands between two texts where the tokenizer puts no token there."""


def text_of(record: Mapping[str, Any]) -> str:
    """Return the text of a record with one or two, as people read it."""
    text: str = record["text"]
    return f"{text}{BETWEEN}{record['text_pair']}" if "text_pair" in record else text


def encode_alone(tokenizer: "Tokenizer", texts: Sequence[str]) -> list[list[int]]:
    """Tokenize texts whose vectors are learned, as `tokenizer(text)` of transformers does.

    With all tokens that the tokenizer adds, also at the end (as that of Qwen3-Embedding does).
    """
    return [found.ids for found in tokenizer.processor.encode_batch([*texts])]


def encode_wholes(tokenizer: "Tokenizer", records: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Tokenize texts as they are scored: one alone, or two together.

    Two are encoded as the tokenizer encodes pairs (as `tokenizer(text, text_pair)` of transformers
    does), if it puts a token between them, such as a separator or a second BOS. Most tokenizers of
    decoders put none: there, they are one text with a line break between.

    Args:
        tokenizer: of the model.
        records: each with text, and text_pair if it has two.

    Returns:
        Ids of each, without a token at the end but for those of such a pair.
    """
    is_separated = separates(tokenizer)
    as_pairs = [is_separated and "text_pair" in record for record in records]
    pairs = iter(
        tokenizer.processor.encode_batch(
            [
                (record["text"], record["text_pair"])
                for record, is_pair in zip(records, as_pairs, strict=True)
                if is_pair
            ]
        )
    )
    texts = iter(
        tokenizer.encode_all(
            [
                text_of(record)
                for record, is_pair in zip(records, as_pairs, strict=True)
                if not is_pair
            ]
        )
    )
    return [next(pairs).ids if is_pair else next(texts) for is_pair in as_pairs]


def separates(tokenizer: "Tokenizer") -> bool:
    """Return whether the tokenizer puts a token between two texts that it encodes together."""
    sides = tokenizer.processor.encode("a", "a").sequence_ids
    # Tokens of its own rules belong to neither text.
    return 0 in sides and 1 in sides and None in sides[sides.index(0) : sides.index(1)]
