"""Chat templates whose prompt opens or closes a thought, built as those of the model families.

Each is written for these tests, with the same parts as the published one: how a turn is written
with and without a thought, and what the generation prompt writes.
"""

from typing import NamedTuple


class Thinker(NamedTuple):
    """A template, and what the model writes after its prompt."""

    source: str
    plain: str
    """After the prompt, for the answer "2"."""
    thinking: str
    """The same, for the thought "one more" before it."""
    call: str
    """The same, for a call of the tool."""
    tokens: tuple[str, ...]
    """Tokens of its own."""


_LAST = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
_TOOLS = "{% if tools %}{{ '<tools>' + tools | tojson + '</tools>' }}{% endif %}"
_CALL = (
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.name + '(' + "
    "c.function.arguments | tojson + ')</tool_call>' }}{% endfor %}"
)
_CALLED = '<tool_call>weather({"at": "Bonn"})</tool_call>'


def _of(*, before: str = "", other: str, turn: str, prompt: str, end: str) -> str:
    """A template of its parts; `thought` and `text` are variables of a turn."""
    return (
        f"{before}{_TOOLS}{_LAST}{{% for m in messages %}}{{% if m.role == 'assistant' %}}"
        "{% set text = m.content %}{% set thought = m.reasoning_content or '' %}"
        "{% if not thought and '</think>' in text %}"
        "{% set thought = text.split('</think>')[0].split('<think>')[-1].strip() %}"
        "{% set text = text.split('</think>')[-1].lstrip() %}{% endif %}"
        "{% set recent = loop.index0 > ns.last %}"
        f"{turn}{_CALL}{end}{{% else %}}{other}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    )


def _put(text: str) -> str:
    return "{{ '" + text.replace("\n", "\\n") + "' }}"


_CHATML = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
_IM = _put("<|im_start|>assistant\n")

THINKERS = {
    # The prompt has an empty thought, turns have none.
    "gemma 4": Thinker(
        _of(
            before="{{ bos_token }}",
            other="{{ '<|turn>' + m.role + '\\n' + m.content + '<turn|>\\n' }}",
            turn=_put("<|turn>model\n") + "{{ text }}",
            end=_put("<turn|>\n"),
            prompt=_put("<|turn>model\n") + "{% if enable_thinking is not defined or not "
            "enable_thinking %}{{ '<|channel>thought\\n<channel|>' }}{% endif %}",
        ),
        "2<turn|>",
        "2<turn|>",
        _CALLED + "<turn|>",
        ("<|turn>", "<turn|>", "<|channel>", "<channel|>"),
    ),
    # The prompt opens a thought, a turn without one only closes it.
    "glm 4.7": Thinker(
        _of(
            other="{{ '<|' + m.role + '|>' + m.content }}",
            turn=_put("<|assistant|>") + "{% if recent and thought %}{{ '<think>' + thought + "
            "'</think>' }}{% else %}{{ '</think>' }}{% endif %}{{ text }}",
            end="",
            prompt="{{ '<|assistant|>' + ('</think>' if enable_thinking is defined and not "
            "enable_thinking else '<think>') }}",
        ),
        "</think>2",
        "one more</think>2",
        "</think>" + _CALLED,
        ("<|tool|>", "<think>", "</think>"),
    ),
    # The prompt opens a thought with a line end, a turn without one has none.
    "nemotron 3": Thinker(
        _of(
            other=_CHATML,
            turn=_IM + "{% if recent and thought %}{{ '<think>\\n' + thought + '\\n</think>\\n' }}"
            "{% else %}{{ '<think></think>' }}{% endif %}{{ text }}",
            end=_put("<|im_end|>\n"),
            prompt=_IM + "{{ '<think></think>' if enable_thinking is defined and not "
            "enable_thinking else '<think>\\n' }}",
        ),
        "</think>2<|im_end|>",
        "one more\n</think>\n2<|im_end|>",
        "</think>" + _CALLED + "<|im_end|>",
        ("<think>", "</think>"),
    ),
    # The prompt opens a thought, no turn has one, and those in texts are cut off.
    "deepseek r1": Thinker(
        _of(
            before="{{ bos_token }}",
            other="{{ '<｜User｜>' + m.content }}",
            turn=_put("<｜Assistant｜>") + "{{ text }}",
            end=_put("<｜end▁of▁sentence｜>"),
            prompt=_put("<｜Assistant｜><think>\n"),
        ),
        "\n</think>\n\n2<｜end▁of▁sentence｜>",
        "one more\n</think>\n\n2<｜end▁of▁sentence｜>",
        "\n</think>\n\n" + _CALLED + "<｜end▁of▁sentence｜>",
        (),
    ),
    # The prompt has an empty thought, a turn only its end.
    "deepseek v3.2": Thinker(
        _of(
            before="{{ bos_token }}",
            other="{{ '<｜User｜>' + m.content }}",
            turn=_put("<｜Assistant｜></think>") + "{{ text }}",
            end=_put("<｜end▁of▁sentence｜>"),
            prompt=_put("<｜Assistant｜><think></think>"),
        ),
        "2<｜end▁of▁sentence｜>",
        "2<｜end▁of▁sentence｜>",
        _CALLED + "<｜end▁of▁sentence｜>",
        ("<think>", "</think>"),
    ),
    # The prompt opens and closes a thought, no turn has one.
    "qwq": Thinker(
        _of(
            other=_CHATML,
            turn=_IM + "{{ text }}",
            end=_put("<|im_end|>\n"),
            prompt=_IM + _put("<think>\n</think>"),
        ),
        "2<|im_end|>",
        "2<|im_end|>",
        _CALLED + "<|im_end|>",
        (),
    ),
    # The prompt opens a thought, a turn without one begins with its answer.
    "minimax m2": Thinker(
        _of(
            other="{{ ']~b]' + m.role + '\\n' + m.content + '[e~[\\n' }}",
            turn=_put("]~b]ai\n") + "{% if recent and thought %}{{ '<think>\\n' + thought + "
            "'\\n</think>\\n\\n' }}{% endif %}{{ text }}",
            end=_put("[e~[\n"),
            prompt=_put("]~b]ai\n<think>\n"),
        ),
        "\n</think>\n\n2[e~[",
        "one more\n</think>\n\n2[e~[",
        "\n</think>\n\n" + _CALLED + "[e~[",
        ("]~b]", "[e~[", "<think>", "</think>"),
    ),
    # As before, and the answer has a beginning of its own.
    "cohere2 moe": Thinker(
        _of(
            other="{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + m.content + "
            "'<|END_OF_TURN_TOKEN|>' }}",
            turn=_put("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>") + "{% if recent and thought %}"
            "{{ '<|START_THINKING|>' + thought + '<|END_THINKING|>' }}{% endif %}"
            "{% if text %}{{ '<|START_TEXT|>' + text + '<|END_TEXT|>' }}{% endif %}",
            end=_put("<|END_OF_TURN_TOKEN|>"),
            prompt=_put("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>"),
        ),
        "<|END_THINKING|><|START_TEXT|>2<|END_TEXT|><|END_OF_TURN_TOKEN|>",
        "one more<|END_THINKING|><|START_TEXT|>2<|END_TEXT|><|END_OF_TURN_TOKEN|>",
        "<|END_THINKING|>" + _CALLED + "<|END_OF_TURN_TOKEN|>",
        ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    # The prompt opens a thought with words.
    "apriel": Thinker(
        _of(
            other="{{ '<|' + m.role + '|>\\n' + m.content + '\\n' }}",
            turn=_put("<|assistant|>\n") + "{% if recent and thought %}{{ thought + "
            "'\\n[BEGIN FINAL RESPONSE]\\n' }}{% endif %}{{ text }}",
            end=_put("<|end|>"),
            prompt=_put("<|assistant|>\nHere are my reasoning steps:\n"),
        ),
        "\n[BEGIN FINAL RESPONSE]\n2<|end|>",
        "one more\n[BEGIN FINAL RESPONSE]\n2<|end|>",
        "\n[BEGIN FINAL RESPONSE]\n" + _CALLED + "<|end|>",
        (),
    ),
}
