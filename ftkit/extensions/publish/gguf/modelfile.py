"""The Modelfile beside a GGUF file, from which `ollama create` makes a model of Ollama's.

https://docs.ollama.com/modelfile. Ollama writes prompts by a Go template, not by the jinja template
in the file. A template that treats every turn of a role alike is turned into one, and tried on
conversations; of others Ollama has to know a template itself.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from ftkit.evaluation.prompting import Prompting
from ftkit.models.chat_templates.template import ChatTemplate, TemplateRefusal
from ftkit.models.pretrained.base_model import BaseModel

MODELFILE = "Modelfile"

_SYSTEM, _FIRST, _ANSWER, _SECOND = "Besystematic", "Firstquestion", "Oneanswer", "Secondquestion"
"""Texts of turns, which no template has of its own."""
_TURNS = (
    {"role": "system", "content": _SYSTEM},
    {"role": "user", "content": _FIRST},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": _SECOND},
)
_QUOTES = '"""'
_SPACES = str.maketrans("\t\n", "  ")


@dataclass(frozen=True, kw_only=True)
class _Turns:
    """Texts around the turns of each role."""

    begin: str
    """Before everything; without the BOS that llama.cpp puts there itself."""
    default_system: str
    """Default system turn of a conversation without a system message; "": none."""
    system: tuple[str, str] | None
    """None: the template takes no system message."""
    user: tuple[str, str]
    assistant: tuple[str, str]
    begin_answer: str
    """After the last turn of a user."""

    def text(self, messages: Sequence[dict[str, str]]) -> str:
        """Render a conversation that ends with a user."""
        has_system = any(message["role"] == "system" for message in messages)
        parts = [self.begin, "" if has_system else self.default_system]
        for message in messages:
            before, after = self.roles[message["role"]]
            parts += [before, message["content"], after]
        return "".join([*parts, self.begin_answer])

    @property
    def roles(self) -> dict[str, tuple[str, str]]:
        """Texts around a turn, by its role."""
        own = {"user": self.user, "assistant": self.assistant}
        return own if self.system is None else {"system": self.system} | own

    def as_go(self) -> str:
        """Template in Go's text/template, with Ollama's variables."""
        cases = [
            f'{{{{ if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}{{{{ end }}}}'
            for role, (before, after) in self.roles.items()
        ]
        turns = f"{{{{ range .Messages }}}}{''.join(cases)}{{{{ end }}}}"
        system = self.default_system
        default = f"{{{{ if not .System }}}}{system}{{{{ end }}}}" if system else ""
        return f"{self.begin}{default}{turns}{self.begin_answer}"

    @property
    def is_plain(self) -> bool:
        """True if the texts contain no syntax of Go's templates or Modelfiles.

        Reading a Modelfile, Ollama leaves out what cannot be printed, but for spaces and new lines.
        """
        pairs = (text for pair in self.roles.values() for text in pair)
        around = [self.begin, self.default_system, self.begin_answer, *pairs]
        return not any(
            "{{" in text or _QUOTES in text or not text.translate(_SPACES).isprintable()
            for text in around
        )


def modelfile(file: str, base: BaseModel, prompting: Prompting) -> str:
    """The content of a Modelfile.

    Args:
        file: name of the GGUF file beside it.
        base: its tokenizer.
        prompting: how prompts are built.
    """
    texts = [base.tokenizer.token_text(token) for token in sorted(prompting.end_ids)]
    lines = [
        f"FROM ./{file}",
        *_template_lines(base, prompting),
        # A quotation mark would end the value, and Ollama drops what cannot be printed.
        *(f'PARAMETER stop "{t}"' for t in texts if '"' not in t and t.isprintable()),
    ]
    return "\n".join(lines) + "\n"


def _template_lines(base: BaseModel, prompting: Prompting) -> list[str]:
    if prompting.origin == "name":  # the model has no template: texts are given as they are
        return [f"TEMPLATE {_QUOTES}{{{{ .Prompt }}}}{_QUOTES}"]
    tokenizer = base.tokenizer
    bos = tokenizer.special_tokens.get("bos_token", "")
    ends = [tokenizer.token_text(token) for token in prompting.end_ids]
    turns = _turns_of(prompting.template, bos, ends, puts_bos=prompting.puts_bos(tokenizer))
    if turns is not None:
        return [f"TEMPLATE {_QUOTES}{turns.as_go()}{_QUOTES}"]
    return [
        "# The chat template in the file treats some turns in ways of their own. Unless Ollama",
        "# knows it, write a TEMPLATE here.",
    ]


def _turns_of(
    template: ChatTemplate, bos: str, ends: Collection[str], *, puts_bos: bool
) -> _Turns | None:
    """Texts around turns that reproduce the template; None: no such texts do."""

    def rendered(messages: Sequence[dict[str, str]]) -> str:
        return template.render(messages, add_generation_prompt=True)

    # BOS may also be what begins a turn, as in SmolLM2.
    for begin in (bos, "") if puts_bos else ("", bos):
        try:
            found = _turns_after(begin, rendered, ends)
            tried = [_TURNS[1:2], _TURNS[1:], (*_TURNS[1:], _TURNS[2], _TURNS[1])]
            if found.system is not None:
                tried += [(_TURNS[0], *messages) for messages in tried]
            # Tried on several conversations: a template may treat the first or last turn in its own
            # way.
            is_same = all(found.text(turns) == rendered(turns) for turns in tried)
        except TemplateRefusal:
            return None
        if is_same and found.is_plain:
            # llama.cpp puts the BOS there itself.
            return replace(found, begin="") if puts_bos else found
    return None


def _turns_after(
    begin: str, rendered: Callable[[Sequence[dict[str, str]]], str], ends: Collection[str]
) -> _Turns:
    """Candidate texts around turns, in conversations that begin with a given text."""
    default = _default_system(rendered, begin, ends)
    # Texts that no template has show, by where they stand, what is written around them.
    first = rendered(_TURNS[1:2]).removeprefix(begin + default)
    user, _, begin_answer = first.partition(_FIRST)
    talk = rendered(_TURNS[1:]).partition(_FIRST)[2]
    before, _, after = talk.partition(_SECOND)[0].partition(_ANSWER)
    after = after.removesuffix(user)
    # What ends both turns alike belongs to each, not to the beginning of an answer.
    end = after if before.startswith(after) and begin_answer.startswith(after) else ""
    return _Turns(
        begin=begin,
        default_system=default,
        system=_around_system(rendered, begin, user),
        user=(user, end),
        assistant=(before.removeprefix(end), after),
        begin_answer=begin_answer.removeprefix(end),
    )


def _default_system(
    rendered: Callable[[Sequence[dict[str, str]]], str], begin: str, ends: Collection[str]
) -> str:
    """System turn of a conversation without a system message; "": the template writes none."""
    try:
        with_system, plain = (
            rendered(turns).removeprefix(begin) for turns in (_TURNS[:2], _TURNS[1:2])
        )
    except TemplateRefusal:
        return ""
    before, found, after = with_system.partition(_SYSTEM)
    words = plain.removeprefix(before).removesuffix(after)
    if not found or f"{before}{words}{after}" != plain:
        return ""
    # The end token still belongs to the system's turn; the rest begins the user's.
    end = re.match(rf"(?:{'|'.join(map(re.escape, ends))})\s*", after)
    return before + words + (end.group() if end else "")


def _around_system(
    rendered: Callable[[Sequence[dict[str, str]]], str], begin: str, user: str
) -> tuple[str, str] | None:
    try:
        text = rendered(_TURNS[:2]).removeprefix(begin)
    except TemplateRefusal:
        return None
    before, found, after = text.partition(_SYSTEM)
    return (before, after.partition(_FIRST)[0].removesuffix(user)) if found else None
