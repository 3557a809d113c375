"""Names inside of messages that data.columns says: of their keys, and of roles."""

from collections.abc import Mapping
from typing import Any

from ftkit.data.records.keys import ANSWER_KEYS, CONVERSATION_KEYS
from ftkit.data.records.shapes import with_our_names as named

_ROLES = {f"{role}_role": role for role in ("system", "user", "assistant", "tool")}
_WITH_TURNS = (
    *(*ANSWER_KEYS, *CONVERSATION_KEYS),
    *("prompt", "completion", "instruction", "question", "query", "input", "sys_prompt"),
)
"""Keys of a row that may hold messages."""


def with_our_names(
    row: dict[str, Any], names: Mapping[str, str]
) -> tuple[dict[str, Any], set[str]]:
    """Return a row whose messages have our names, and those of them that it has.

    Args:
        row: with our names of its own keys.
        names: of keys of messages and of roles, by ours, such as assistant_role.
    """
    found = set[str]()
    made = dict(row)
    for key in _WITH_TURNS:
        if isinstance(turns := row.get(key), list):
            made[key] = [_turn(turn, names, found) for turn in turns]
    return made, found


def _turn(turn: Any, names: Mapping[str, str], found: set[str]) -> Any:
    """A message with our names of its keys and of its role, which are added to those found."""
    if not isinstance(turn, dict):
        return turn
    keys = {ours: name for ours, name in names.items() if ours not in _ROLES}
    made, of_keys = named(turn, keys)
    found |= of_keys
    # A message has OpenAI's keys or ShareGPT's, not one of each.
    for ours, theirs in (("role", "from"), ("content", "value")) if keys else ():
        if ours not in made and theirs in made:
            made[ours] = made.pop(theirs)
    sender = "role" if "role" in made else "from"
    for ours, name in names.items():
        if ours in _ROLES and made.get(sender) == name:
            found.add(ours)
            return made | {sender: _ROLES[ours]}
    return made
