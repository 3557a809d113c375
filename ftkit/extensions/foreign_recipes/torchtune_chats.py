"""How torchtune's tokenizers write conversations, as chat templates of ours."""

from dataclasses import dataclass

# The texts are Stanford Alpaca's format, as torchtune.data.AlpacaToMessages has it.
_ALPACA = "Below is an instruction that describes a task"
_WITH_INPUT = (
    f"{_ALPACA}, paired with an input that provides further context. Write a response that "
    "appropriately completes the request.\n\n### Instruction:\n"
)
_WITHOUT_INPUT = (
    f"{_ALPACA}. Write a response that appropriately completes the request.\n\n### Instruction:\n"
)
_INPUT, _RESPONSE = "\n\n### Input:\n", "\n\n### Response:\n"


_WITHOUT_SPACES = "text.rstrip(' ')"


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a tokenizer of torchtune writes around messages. ROLE stands for the role."""

    before: str = ""
    """Before a message."""
    after: str = ""
    """Behind a message of anyone but the assistant."""
    end: str
    """Behind an answer, as jinja."""
    begin: str = ""
    """Before the first message, as jinja."""
    begin_turn: str = ""
    """Before the first message and each one behind an answer, as jinja."""
    question: tuple[str, str] = ("", "")
    """Around the text of the user."""
    system: tuple[str, str] | None = None
    """Around a system message that stands before every text of the user; None: it is a message."""
    has_system: bool = True
    content: str = _WITHOUT_SPACES
    """The text of a message, as jinja."""
    prompt_template: str | None = None
    """Value of prompt_template with which it writes so, which is its default."""
    cuts_before_last: bool = False
    """Whether the last of max_seq_len tokens never carries a loss."""
    told: str = ""
    """What differs from torchtune all the same."""


_CHATML = Form(
    before="<|im_start|>ROLE\n",
    after="<|im_end|>\n",
    end="('<|im_end|>' if loop.last else '<|im_end|>\\n')",
    content="text",
    told="torchtune trains the line end behind Qwen's answers that are not the last, too",
)
_APART = (
    "torchtune encodes the parts of a conversation apart, ftkit its whole text, which differs "
    "where a tokenizer begins texts with a space"
)
TOKENIZERS = {
    "llama3_tokenizer": Form(
        before="<|start_header_id|>ROLE<|end_header_id|>\n\n",
        after="<|eot_id|>",
        end="'<|eot_id|>'",
        begin="bos_token",
        content="text | trim",
        cuts_before_last=True,
    ),
    "qwen2_tokenizer": _CHATML,
    "qwen2_5_tokenizer": _CHATML,
    "gemma_tokenizer": Form(end="eos_token", begin_turn="bos_token", told=_APART),
    "llama2_tokenizer": Form(
        end="eos_token",
        begin_turn="bos_token",
        question=("[INST] ", " [/INST] "),
        system=("<<SYS>>\n", "\n<</SYS>>\n\n"),
        prompt_template="torchtune.models.llama2.Llama2ChatTemplate",
        told=_APART,
    ),
    "mistral_tokenizer": Form(
        end="eos_token",
        begin_turn="bos_token",
        question=("[INST] ", " [/INST] "),
        has_system=False,
        prompt_template="torchtune.models.mistral.MistralChatTemplate",
        told=_APART,
    ),
    "phi3_mini_tokenizer": Form(
        before="<|ROLE|>\n",
        after="<|end|>\n",
        end="'<|end|>\\n'",
        begin="bos_token",
        told=_APART,
    ),
    "phi4_tokenizer": Form(
        before="<|im_start|>ROLE<|im_sep|>",
        after="<|im_end|>",
        end="''",
        told="phi4_tokenizer writes no end behind answers, so that no model learns to stop",
    ),
}
"""Forms by the functions that make tokenizers."""


def chat_template(form: Form, *, is_alpaca: bool, system: str | None) -> str:
    """The jinja text that writes a conversation as a tokenizer of torchtune does.

    Args:
        form: of the tokenizer.
        is_alpaca: whether the user's messages are instructions in Alpaca's format.
        system: a message in the place of those of the records; None: those of the records.
    """
    is_message = form.system is None
    fixed = ""
    if system is not None and is_message:
        written = form.before.replace("ROLE", "system") + system + form.after
        fixed = _out(" ~ ".join(filter(None, (form.begin_turn, _quoted(written)))))
    said = ""
    if system is not None and form.system is not None:
        said = _around(form.system, system)
    is_first = "false" if fixed else "true"
    message = f"{_before(form, 'message.role')} ~ ({form.content}) ~ {_quoted(form.after)}"
    answer = f"({form.content}) ~ {form.end}"
    ask, behind = map(_quoted, form.question)
    question = f"{ask} ~ turn.system ~ ({form.content}) ~ {behind}"
    lines = (
        _out(form.begin),
        f"{{%- set turn = namespace(first={is_first}, system={_quoted(said)}) -%}}",
        fixed,
        "{%- for message in messages -%}",
        "{%- set text = message.content -%}",
        _ALPACA_TEXT if is_alpaca else "",
        f"{{%- if turn.first -%}}{_out(form.begin_turn)}{{%- endif -%}}" * bool(form.begin_turn),
        "{%- set turn.first = message.role == 'assistant' -%}",
        "{%- if message.role == 'assistant' -%}",
        f"{_out(_before(form))}{{%- generation -%}}{_out(answer)}{{%- endgeneration -%}}",
        "{%- elif message.role == 'user' -%}",
        _out(question if any(form.question) else message),
        _system(form, message) if system is None else "{%- elif message.role == 'system' -%}",
        "{%- else -%}",
        "{{- raise_exception('torchtune has no place for the role ' ~ message.role) -}}",
        "{%- endif -%}",
        "{%- endfor -%}",
        f"{{%- if add_generation_prompt -%}}{_out(_before(form))}{{%- endif -%}}",
    )
    return "\n".join(filter(None, lines))


def _system(form: Form, message: str) -> str:
    """What becomes of a system message of the records."""
    if not form.has_system:
        return ""
    head = "{%- elif message.role == 'system' -%}"
    if form.system is None:
        return head + _out(message)
    before, after = map(_quoted, form.system)
    return f"{head}{{%- set turn.system = {before} ~ ({form.content}) ~ {after} -%}}"


def _around(texts: tuple[str, str], text: str) -> str:
    before, after = texts
    return before + text + after


def _before(form: Form, role: str = "'assistant'") -> str:
    """What stands before a message, as jinja; the role is a jinja expression."""
    before, place, after = form.before.partition("ROLE")
    return f"{_quoted(before)} ~ {role} ~ {_quoted(after)}" if place else "''"


def _out(expression: str) -> str:
    return f"{{{{- {expression} -}}}}" if expression else ""


def _quoted(text: str) -> str:
    """A text as a literal of jinja."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"


_ALPACA_TEXT = "\n".join(
    (
        "{%- if message.role == 'user' and message.input -%}",
        f"{{%- set text = {_quoted(_WITH_INPUT)} ~ text -%}}",
        f"{{%- set text = text ~ {_quoted(_INPUT)} ~ message.input ~ {_quoted(_RESPONSE)} -%}}",
        "{%- elif message.role == 'user' -%}",
        f"{{%- set text = {_quoted(_WITHOUT_INPUT)} ~ text ~ {_quoted(_RESPONSE)} -%}}",
        "{%- endif -%}",
    )
)
