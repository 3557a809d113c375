"""Two texts as one sequence: a query and a document, or a premise and a hypothesis."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftkit.models.chat_templates.template import ChatTemplate
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
    return bool(_own_tokens(tokenizer)[1])


def pair_template(tokenizer: "Tokenizer") -> "ChatTemplate":
    """Return the chat template that writes two messages as `encode_wholes` encodes two texts.

    Whatever their roles are: sentence-transformers calls them query and document.
    """
    from ftkit.models.chat_templates.template import ChatTemplate  # imports jinja2

    own, gap = _own_tokens(tokenizer), tokenizer.bos_gap
    before, between, behind = ("".join(map(tokenizer.token_text, ids)) for ids in own)
    if between:
        before, between = before + gap * bool(before), between + gap
    else:
        bos_id = tokenizer.bos_id if tokenizer.use_bos else None
        before = "" if bos_id is None else tokenizer.token_text(bos_id) + gap
        between, behind = BETWEEN, ""
    begin = f"({json.dumps(before)} if loop.first else {json.dumps(between)})"
    # Every tag trims the white space around it: the lines of this source are in no text.
    lines = (
        "{%- for message in messages -%}",
        f"{{{{- {begin} ~ message.content -}}}}",
        f"{{%- endfor -%}}{{{{- {json.dumps(behind)} -}}}}",
    )
    return ChatTemplate("\n".join(lines), "query and document", tokenizer.special_tokens)


def _own_tokens(tokenizer: "Tokenizer") -> tuple[list[int], list[int], list[int]]:
    """Tokens that belong to neither of two texts: before, between and behind them."""
    pair = tokenizer.processor.encode("a", "a")
    ids, sides = pair.ids, pair.sequence_ids
    if 0 not in sides or 1 not in sides:
        return [], [], []
    of_second = [place for place, side in enumerate(sides) if side == 1]
    of_first = [place for place, side in enumerate(sides) if side == 0]
    return ids[: of_first[0]], ids[of_first[-1] + 1 : of_second[0]], ids[of_second[-1] + 1 :]
