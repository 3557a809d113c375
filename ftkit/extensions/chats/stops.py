"""Turns that end with the token that begins the next message, as GLM's do.

Such a template writes nothing behind an answer, and the model's settings name `<|user|>` among the
tokens that end one. A model that is not taught to write it would never stop.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ftkit.models.chat_templates.template import ChatTemplate, TemplateRefusal

_CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
TYPICAL: Mapping[str, dict[str, Any]] = {
    "user": {
        "messages": [
            {"role": "user", "content": "First?"},
            {"role": "assistant", "content": "One."},
            {"role": "user", "content": "Second?"},
            {"role": "assistant", "content": "Two."},
        ]
    },
    "tool": {
        "messages": [
            {"role": "user", "content": "First?"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "000000001", **_CALL}]},
            {"role": "tool", "content": "Found.", "name": "look", "tool_call_id": "000000001"},
            {"role": "assistant", "content": "One."},
        ],
        "tools": [_TOOL],
    },
}
"""Conversations that show how turns end, by the role of the message behind the first answer."""


class Stops:
    """Tells which token ends a turn that its template ends with none."""

    def __init__(self, template: ChatTemplate, tokens: Collection[str]) -> None:
        """Prepare for conversations of one template.

        Args:
            template: renders them.
            tokens: texts of the tokens at which the model's settings stop.
        """
        self._template, self._tokens = template, tuple(tokens)
        # Not functools.cache: renderings run in another process, which gets a copy of this.
        self._before: dict[str, str] = {}

    def behind(self, messages: Sequence[Mapping[str, Any]], index: int) -> str:
        """Return the token that begins the message after a turn, if it stops there; "" if not.

        At the end of a conversation the next message is a tool's if the turn calls one, else a
        user's.
        """
        if index + 1 < len(messages):
            role = messages[index + 1]["role"]
        else:
            role = "tool" if messages[index].get("tool_calls") else "user"
        if not self._tokens or role not in TYPICAL:
            return ""
        if role not in self._before:
            self._before[role] = self._found_before(role)
        return self._before[role]

    def _found_before(self, role: str) -> str:
        """The last stop between an answer and the text of the next message."""
        record = TYPICAL[role]
        _, answer, following = messages = record["messages"][:3]
        try:
            text = self._template.render(messages, tools=record.get("tools"))
        except TemplateRefusal:  # it has no tools
            return ""
        end = text.rfind(following["content"])
        start = text.rfind(answer["content"] or "look", 0, max(end, 0))
        between = text[start:end] if start >= 0 else ""
        places = {between.rfind(token): token for token in self._tokens if token in between}
        return places[max(places)] if places else ""
