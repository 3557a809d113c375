"""Texts of tokens, one by one, as they stand in the text of their sample."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftkit.models.pretrained.tokenizer import Tokenizer

_BEFORE = 4
"""Tokens before one that decide how it is written: whether a space is its own."""
_MOST_IN_CHARACTER = 8
"""Tokens that a character may be made of."""
_INCOMPLETE = "\ufffd"


def token_texts(tokenizer: "Tokenizer", ids: Sequence[int]) -> tuple[list[str], list[bool]]:
    """The text of each token, and whether it is a mark and no text.

    Joined, they are the text of the sample. A token that ends within a character has none; the one
    that completes the character has it.

    Args:
        tokenizer: of the base model.
        ids: tokens.
    """
    marks = _marks(tokenizer, ids)
    texts: list[str] = []
    first = 0  # token that the text not yet told begins with
    for i, token in enumerate(ids):
        if token in marks:
            texts.append(marks[token])
            first = i + 1
            continue
        before = _decode(tokenizer, ids[max(first - _BEFORE, 0) : first])
        text = _decode(tokenizer, ids[max(first - _BEFORE, 0) : i + 1])
        is_open = text.endswith(_INCOMPLETE) and i + 1 - first < _MOST_IN_CHARACTER
        if is_open and i + 1 < len(ids) and ids[i + 1] not in marks:
            texts.append("")
            continue
        texts.append(text[len(before) :])
        first = i + 1
    return texts, [token in marks for token in ids]


def token_name(tokenizer: "Tokenizer", token: int) -> str:
    """A token as the vocabulary has it."""
    processor = tokenizer.processor
    if tokenizer.backend == "huggingface":
        return str(processor.id_to_token(token))
    return str(processor.id_to_piece(token))


def _marks(tokenizer: "Tokenizer", ids: Sequence[int]) -> dict[int, str]:
    """Those of the tokens that are marks, with their names."""
    processor = tokenizer.processor
    if tokenizer.backend == "huggingface":
        added = processor.get_added_tokens_decoder()
        return {i: added[i].content for i in {*ids} if i in added and added[i].special}
    return {i: token_name(tokenizer, i) for i in {*ids} if processor.is_control(i)}


def _decode(tokenizer: "Tokenizer", ids: Sequence[int]) -> str:
    if tokenizer.backend == "huggingface":
        return str(tokenizer.processor.decode(list(ids), skip_special_tokens=False))
    return str(tokenizer.processor.decode(list(ids)))
