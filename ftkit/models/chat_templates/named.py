"""Chat templates by name, of the tokenizer, or in a file: what data.chat_template stands for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from ftkit.errors import UserError
from ftkit.models.chat_templates.template import ChatTemplate, read_template
from ftkit.utils.names import nearest

OF_TOKENIZER = "tokenizer"
"""The template of the base model's tokenizer."""

_DIRECTORY = Path(__file__).parent / "named"
NAMED = {file.stem: file for file in sorted(_DIRECTORY.glob("*.jinja"))}
"""Templates of ours, after published formats."""


class TemplatedTokenizer(Protocol):
    """What a template needs of a tokenizer."""

    model_name: str

    @property
    def special_tokens(self) -> Mapping[str, str]: ...

    @property
    def chat_template(self) -> str | None: ...


def check_chat_template(value: object, key: str = "data.chat_template") -> None:
    """Refuse what data.chat_template cannot be, as far as it can be told without a tokenizer.

    Args:
        value: what it is.
        key: where it is named.

    Raises:
        UserError: it is no name and no file.
    """
    if value == OF_TOKENIZER or value in NAMED:
        return
    if isinstance(value, str | Path) and Path(value).expanduser().is_file():
        return
    near = nearest(str(value), [OF_TOKENIZER, *NAMED]) or "chatml"
    raise UserError(
        f"{key} is {value}, but has to be {OF_TOKENIZER} (the model's own), the path "
        f"of a jinja file, or one of {', '.join(NAMED)}.\nTry --{key} {near}."
    )


def resolve_chat_template(
    value: str | Path, tokenizer: TemplatedTokenizer, key: str = "data.chat_template"
) -> ChatTemplate:
    """The template that data.chat_template names.

    Args:
        value: tokenizer, a name, or the path of a file.
        tokenizer: of the base model.
        key: where it is named.

    Raises:
        UserError: there is none, or it is no template.
    """
    check_chat_template(value, key)
    special_tokens = dict(tokenizer.special_tokens)
    if value == OF_TOKENIZER:
        if tokenizer.chat_template is None:
            raise UserError(
                f"{key} is {OF_TOKENIZER}, but the tokenizer of "
                f"{tokenizer.model_name} has no chat template, as those of base models.\n"
                f"Try --{key} zephyr, which ends turns with EOS; chatml and others "
                "have tokens of their own."
            )
        return ChatTemplate(tokenizer.chat_template, "of the tokenizer", special_tokens)
    return text_template(value, special_tokens)


def text_template(value: str | Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
    """The template of a name or a file, where there need not be a tokenizer.

    Raises:
        UserError: it is no template.
    """
    file = NAMED.get(str(value)) or Path(value).expanduser()
    return ChatTemplate(read_template(file), str(value), special_tokens)
