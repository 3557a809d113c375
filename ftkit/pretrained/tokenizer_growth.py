"""How much longer a tokenizer.json can make a text: bounded before the library reads it.

The library runs the steps that the file lists, in Rust, without a limit of its own: 30 of them that
each double a text make a billion characters of one.
"""

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ftkit.errors import UserError

MOST_GROWTH = 2**14
"""The steps of published tokenizers come to at most some hundreds, counted as here."""

_PARTS = ("normalizer", "pre_tokenizer", "decoder")
_LONGEST_NFKC = 18
"""Characters of the longest form of one (U+FDFA)."""
_GROWTH = {
    "NFD": 4,
    "NFC": 3,
    "NFKD": _LONGEST_NFKC,
    "NFKC": _LONGEST_NFKC,
    "Lowercase": 3,
    "BertNormalizer": 12,
    "ByteLevel": 4,
    "Metaspace": 2,
    "Prepend": 2,
}
"""By the kind of a step, at most: characters for each one that it gets."""


def require_bounded(content: Mapping[str, Any], file: Path) -> None:
    """Refuse a tokenizer whose steps can make a text many times longer.

    Args:
        content: of tokenizer.json.
        file: for the message.

    Raises:
        UserError: names the part of the file.
    """
    for part in _PARTS:
        growth = 1.0
        for step in _steps(content.get(part)):
            growth *= _growth(step)
            if growth > MOST_GROWTH:
                raise UserError(
                    f"{file}: the steps of its {part} can make a text more than {MOST_GROWTH:,} "
                    "times longer, which no sound tokenizer does. Download it again."
                )


def _steps(content: Any) -> Iterator[Mapping[str, Any]]:
    """Every step of a part, also of those that hold others."""
    if isinstance(content, list):
        for item in content:
            yield from _steps(item)
    elif isinstance(content, Mapping):
        yield content
        for item in content.values():
            if isinstance(item, list):
                yield from _steps(item)


def _growth(step: Mapping[str, Any]) -> float:
    kind = step.get("type")
    if kind == "Replace":
        return _growth_of_replacement(step.get("pattern"), str(step.get("content", "")))
    if kind == "Precompiled":
        return _longest_of_map(str(step.get("precompiled_charsmap") or ""))
    if kind == "Prepend":
        return max(_GROWTH["Prepend"], len(str(step.get("prepend", ""))))
    return _GROWTH.get(str(kind), 1)


def _growth_of_replacement(pattern: Any, content: str) -> float:
    """A text is replaced where it stands; an expression may also match between two characters."""
    text = pattern.get("String") if isinstance(pattern, Mapping) else None
    if isinstance(text, str) and text:
        return max(1.0, len(content) / len(text))
    return 1.0 + len(content)


def _longest_of_map(encoded: str) -> float:
    """SentencePiece's map: the length of a trie, the trie, and what it replaces with, each ended.

    https://github.com/google/sentencepiece/blob/master/src/normalizer.cc
    """
    content = base64.b64decode(encoded)
    replacements = content[4 + int.from_bytes(content[:4], "little") :]
    return max(1, *(len(text.decode(errors="replace")) for text in replacements.split(b"\0")))
