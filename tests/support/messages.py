"""Key words of messages: tests check what a message names, never its wording."""

import re
from collections.abc import Callable

import pytest

from ftkit.errors import UserError


def message_of(call: Callable[..., object], *arguments: object, **keys: object) -> str:
    """Return the message of the UserError that a call raises."""
    with pytest.raises(UserError) as error:
        call(*arguments, **keys)
    return str(error.value)


def key_words(*phrases: object) -> str:
    """Return a pattern for texts that have all these phrases as whole words, in any order.

    In a phrase, " ... " stands for any text.
    """
    return r"(?s)\A" + "".join(f"(?=.*{_pattern(str(phrase))})" for phrase in phrases)


def says(text: str, *phrases: object) -> bool:
    """Return whether a text has all these phrases as whole words; see `key_words`."""
    return re.search(key_words(*phrases), text) is not None


def _pattern(phrase: str) -> str:
    return ".*".join(
        (r"(?<!\w)(?<!\d[.,])" if part[:1].isalnum() else "")
        + re.escape(part)
        + (r"(?!\w)(?![.,]\d)" if part[-1:].isalnum() else "")  # 5 is not in 15, 1.5 or 5,000
        for part in phrase.split(" ... ")
    )
