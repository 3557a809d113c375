"""The Modelfile beside a GGUF file, from which `ollama create` makes a model of Ollama's.

https://docs.ollama.com/modelfile. Ollama writes prompts by a Go template, not by the jinja template
in the file. A template that treats every turn of a role alike is turned into one, and tried on
conversations; of others Ollama has to know a template itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ftkit.chat_templates.template import ChatTemplate, TemplateRefusal
from ftkit.inference.prompting import Prompting
from ftkit.pretrained.base_model import BaseModel

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


@dataclass(frozen=True, kw_only=True)
class _Turns:
    """What stands around the turns of each role."""

    begin: str
    """Before everything; without the BOS that llama.cpp puts there itself."""
    system: tuple[str, str] | None
    """None: the template takes no system message."""
    user: tuple[str, str]
    assistant: tuple[str, str]
    begin_answer: str
    """After the last turn of a user."""

    def text(self, messages: Sequence[dict[str, str]]) -> str:
        """What the template makes of a conversation that ends with a user."""
        parts = [self.begin]
        for message in messages:
            before, after = self.roles[message["role"]]
            parts += [before, message["content"], after]
        return "".join([*parts, self.begin_answer])

    @property
    def roles(self) -> dict[str, tuple[str, str]]:
        """What stands around a turn, by its role."""
        own = {"user": self.user, "assistant": self.assistant}
        return own if self.system is None else {"system": self.system} | own

    def as_go(self) -> str:
        """As Go's text/template, with Ollama's variables."""
        cases = [
            f'{{{{ if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}{{{{ end }}}}'
            for role, (before, after) in self.roles.items()
        ]
        turns = f"{{{{ range .Messages }}}}{''.join(cases)}{{{{ end }}}}"
        return f"{self.begin}{turns}{self.begin_answer}"

    @property
    def is_plain(self) -> bool:
        """Whether nothing in the texts means something in Go's templates or Modelfiles."""
        around = [self.begin, self.begin_answer, *(t for pair in self.roles.values() for t in pair)]
        return not any(mark in text for text in around for mark in ("{{", _QUOTES))


def modelfile(file: str, base: BaseModel, prompting: Prompting) -> str:
    """The content of a Modelfile.

    Args:
        file: name of the GGUF file beside it.
        base: its tokenizer.
        prompting: how the model is asked.
    """
    texts = [base.tokenizer.token_text(token) for token in sorted(prompting.end_ids)]
    lines = [
        f"FROM ./{file}",
        *_template_lines(base, prompting),
        *(f'PARAMETER stop "{t}"' for t in texts if '"' not in t and t.isprintable()),
    ]
    return "\n".join(lines) + "\n"


def _template_lines(base: BaseModel, prompting: Prompting) -> list[str]:
    if prompting.origin == "name":  # the model has no template: texts are given as they are
        return [f"TEMPLATE {_QUOTES}{{{{ .Prompt }}}}{_QUOTES}"]
    tokenizer = base.tokenizer
    bos = tokenizer.special_tokens.get("bos_token", "")
    turns = _turns_of(prompting.template, bos, puts_bos=tokenizer.use_bos)
    if turns is not None:
        return [f"TEMPLATE {_QUOTES}{turns.as_go()}{_QUOTES}"]
    return [
        "# The chat template in the file treats some turns in ways of their own. Unless Ollama",
        "# knows it, write a TEMPLATE here.",
    ]


def _turns_of(template: ChatTemplate, bos: str, *, puts_bos: bool) -> _Turns | None:
    """What stands around turns; None: no such texts make what the template makes."""

    def rendered(messages: Sequence[dict[str, str]]) -> str:
        return template.render(messages, add_generation_prompt=True)

    try:
        begin = bos if rendered(_TURNS[1:2]).startswith(bos) else ""
        first = rendered(_TURNS[1:2]).removeprefix(begin)
        user, _, begin_answer = first.partition(_FIRST)
        talk = rendered(_TURNS[1:]).partition(_FIRST)[2]
        before, _, after = talk.partition(_SECOND)[0].partition(_ANSWER)
        after = after.removesuffix(user)
        # What ends both turns alike belongs to each, not to the beginning of an answer.
        end = after if before.startswith(after) and begin_answer.startswith(after) else ""
        found = _Turns(
            begin=begin,
            system=_around_system(rendered, begin, user),
            user=(user, end),
            assistant=(before.removeprefix(end), after),
            begin_answer=begin_answer.removeprefix(end),
        )
        tried = [_TURNS[1:2], _TURNS[1:], (*_TURNS[1:], _TURNS[2], _TURNS[1])]
        if found.system is not None:
            tried += [(_TURNS[0], *messages) for messages in tried]
        is_same = all(found.text(turns) == rendered(turns) for turns in tried)
    except TemplateRefusal:
        return None
    if puts_bos:
        found = replace(found, begin=found.begin.removeprefix(bos))
    return found if is_same and found.is_plain else None


def _around_system(
    rendered: Callable[[Sequence[dict[str, str]]], str], begin: str, user: str
) -> tuple[str, str] | None:
    try:
        text = rendered(_TURNS[:2]).removeprefix(begin)
    except TemplateRefusal:
        return None
    before, found, after = text.partition(_SYSTEM)
    return (before, after.partition(_FIRST)[0].removesuffix(user)) if found else None
