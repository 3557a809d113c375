"""Continuations: what the assistant writes after a prompt that its turn does not begin with.

Prompts of models that think often open a thought, or open and close one, while the same template
writes earlier turns without. The answer then begins where the prompt ends. What it consists of is
read from renderings in which every text of a message stands between brackets, so that what the
template writes around it is known:

- If the prompt leaves a thought open, the continuation is the thought (empty if the message has
  none), what the template writes between a thought and an answer, the answer and its end.
- If the prompt closes the thought, or writes nothing of it, the continuation is the answer and its
  end, without what the prompt already says of the turn.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ftkit.models.chat_templates.template import ChatTemplate, TemplateRefusal

_PRIVATE_USE = (0xE000, 0xF900)
"""Characters of Unicode that no text needs: some of them are brackets."""
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message in which templates look for its thought."""
_PROBE = "thought"
"""Thought of a message that has none, to see how the template writes one."""
_OWN_THOUGHT = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)
"""A content that begins with its thought."""


class Brackets(NamedTuple):
    """A pair of characters that a conversation does not have."""

    opening: str
    closing: str

    def around(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message with brackets around its texts, inside any white space there.

        So a template that trims its texts trims them as before.
        """
        keys = [key for key in ("content", *_THOUGHTS) if message.get(key)]
        return {**message} | {key: self._around(message[key]) for key in keys}

    def removed(self, text: str) -> str:
        return text.replace(self.opening, "").replace(self.closing, "")

    def _around(self, text: str) -> str:
        core = text.strip()
        return text.replace(core, self.opening + core + self.closing, 1) if core else text


def unused_brackets(*texts: str) -> Iterator[Brackets]:
    """Yield pairs of characters that none of the texts has."""
    unused = (
        chr(code) for code in range(*_PRIVATE_USE) if not any(chr(code) in text for text in texts)
    )
    return map(Brackets._make, zip(unused, unused, strict=False))


class _Rest(NamedTuple):
    """A turn as the template writes it, behind all that it writes of other messages."""

    text: str
    thought: tuple[int, int] | None
    """Place of the thought, without the white space around it."""
    content: tuple[int, int] | None

    @property
    def before(self) -> str:
        """What the template writes before the first text of the message."""
        places = [place[0] for place in (self.thought, self.content) if place]
        return self.text[: min(places, default=len(self.text))]

    @property
    def between(self) -> str:
        """What it writes between thought and answer; without an answer, all behind the thought."""
        assert self.thought is not None
        end = self.content[0] if self.content else len(self.text)
        return self.text[self.thought[1] : end]


class Continuer:
    """Finds the continuations of prompts of one template."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        added_tokens: Collection[str],
    ) -> None:
        """Prepare for one conversation.

        Args:
            template: renders it.
            messages: of the conversation.
            tools: that may be called.
            added_tokens: texts that are never cut, like tags and words.
        """
        self._template, self._messages, self._tools = template, messages, tools
        longest_first = sorted(filter(str.strip, added_tokens), key=len, reverse=True)
        tags = "|".join([*map(re.escape, longest_first), r"<[^<>\n]*>", r"\[[^\[\]\n]*\]"])
        self._tag = re.compile(tags)
        self._piece = re.compile(rf"{tags}|\w+")

    def after(self, prompt: str, turn: str, index: int) -> str | None:
        """What message number `index` adds to a prompt; None: that cannot be told.

        Args:
            prompt: the rendering of the messages before it, with the generation prompt.
            turn: the rendering of these messages and itself.
            index: of the message.
        """
        message = _with_own_thought(self._messages[index])
        pairs = unused_brackets(prompt, turn)
        others, own = next(pairs), next(pairs)
        before = [others.around(other) for other in self._messages[:index]]
        marked = self._rendered(before, add_generation_prompt=True)
        if marked is None or others.removed(marked) != prompt:
            return None
        # What the prompt writes behind all that the other messages say.
        given = marked.rpartition(others.closing)[2]
        bare = {key: value for key, value in message.items() if key not in _THOUGHTS}
        thought = message.get("reasoning_content") or ""
        plain = _rest(self._rendered([*before, own.around(bare)]), bare, others, own)
        if plain is None:
            return None
        so_far = self._rendered(self._messages[:index])
        if so_far == prompt:
            # No generation prompt: the template writes earlier messages otherwise once it has an
            # answer, such as a system message that stands in the last question.
            return self._rest_of(given, plain)
        if so_far is None or not (prompt.startswith(so_far) and turn.startswith(so_far)):
            return None
        # A template that writes no thoughts writes the same with one.
        probe = bare | {"reasoning_content": thought or _PROBE}
        probed = self._rendered([*before, own.around(probe)])
        thinking = _rest(probed, probe, others, own)
        if probed is None or (thinking is not None and thinking.thought is None):
            return self._without_thoughts(given, plain, thought)
        if thinking is None or thinking.thought is None:
            return None
        rest = self._rest_of(given, thinking if thought else plain)
        if rest is not None:
            return rest
        begun = self._begun(given, thinking.before)
        closing = self._piece.search(thinking.between)
        if closing is None:
            return None
        if closing.group() in given[begun:]:
            return self._after_thought(given, plain)
        if thinking.before[begun:].strip():
            return None
        return thinking.text[thinking.thought[0 if thought else 1] :]

    def _without_thoughts(self, given: str, plain: _Rest, thought: str) -> str | None:
        """The continuation of a template that writes no thought in a turn."""
        rest = self._rest_of(given, plain)
        if rest is not None:
            return rest
        begun = self._begun(given, plain.before)
        tags = self._tag.findall(given[begun:])
        # The template itself shows by which tag thoughts end: it looks for it in texts.
        if tags and (closing := _closing_of(tags[-1])) and closing in self._template.source:
            # Behind a thought comes the answer, and nothing that would have to stand before it.
            if plain.content and plain.before[begun:].strip():
                return None
            return f"{thought.strip()}\n{closing}\n\n{plain.text[begun:].lstrip()}"
        # A thought that is open has one tag, one that is closed has two.
        return self._after_thought(given, plain) if tags and not len(tags) % 2 else None

    def _rest_of(self, given: str, turn: _Rest) -> str | None:
        """What a turn adds to what is given of it; None: it begins otherwise."""
        begun = self._begun(given, turn.before)
        return None if given[begun:].strip() else turn.text[begun:]

    def _after_thought(self, given: str, plain: _Rest) -> str:
        """The continuation of a prompt that has closed the thought."""
        begun = self._begun(given, plain.before)
        rest, left = given[begun:].rstrip(), plain.before[begun:]
        # The turn may write the end of the thought too: </think>, after <think></think>.
        ends = [piece.end() for piece in self._piece.finditer(left)]
        said = next((end for end in reversed(ends) if rest.endswith(left[:end].strip())), 0)
        return plain.text[begun + said :]

    def _begun(self, given: str, before: str) -> int:
        """Number of characters with which both begin, without cutting a tag or a word."""
        pairs = enumerate(zip(given, before, strict=False))
        count = next((i for i, (a, b) in pairs if a != b), min(len(given), len(before)))
        for text in (given, before):
            for piece in self._piece.finditer(text):
                if piece.start() < count < piece.end():
                    count = piece.start()
        return count

    def _rendered(self, messages: Sequence[Mapping[str, Any]], **options: bool) -> str | None:
        try:
            return self._template.render(messages, tools=self._tools, **options)
        except TemplateRefusal:  # it looks at how a text begins or ends
            return None


def _with_own_thought(message: Mapping[str, Any]) -> dict[str, Any]:
    """Move the thought with which a content begins to a key of its own."""
    found = _OWN_THOUGHT.fullmatch(message["content"])
    if message.get("reasoning_content") or found is None:
        return {**message}
    return {**message, "reasoning_content": found[1].strip(), "content": found[2].lstrip()}


def _closing_of(tag: str) -> str | None:
    """The tag that closes <name>; None: the tag opens nothing."""
    return f"</{tag[1:]}" if re.fullmatch(r"<[\w:]+>", tag) else None


def _rest(
    marked: str | None, message: Mapping[str, Any], others: Brackets, own: Brackets
) -> _Rest | None:
    """Read a turn in a rendering with brackets; None: it cannot be told from other messages.

    Args:
        marked: the rendering of the messages up to the turn; None: the template refuses them.
        message: of the turn.
        others: around texts of the messages before it.
        own: around its own texts.
    """
    before, _, rest = (marked or "").rpartition(others.closing)
    if marked is None or own.opening in before:
        return None
    text, places = "", []
    for piece in re.split(f"([{own.opening}{own.closing}])", rest):
        if piece == own.opening:
            places.append((len(text), len(text)))
        elif piece == own.closing and places:
            places[-1] = (places[-1][0], len(text))
        else:
            text += piece
    found = [text[first:end] for first, end in places]
    thought, content = (
        (message.get(key) or "").strip() for key in ("reasoning_content", "content")
    )
    if found == [content] * bool(content):
        return _Rest(text, None, places[0] if places else None)
    if found == [thought] + [content] * bool(content):
        return _Rest(text, places[0], places[1] if content else None)
    return None
