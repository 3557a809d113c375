"""Chat templates drawn at random, each with what it should write, message by message, in Python."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from chats import TOOL, call, said

Part = Literal["header", "said", "end", "space", "final", "other"]
_TURN_PARTS = ("header", "thought", "content", "calls", "end", "space", "final")
"""What a template writes of the assistant, in this order."""
_FORMATS = [
    # role headers, end of a message, end of a turn
    ({role: f"<|im_start|>{role}\n" for role in ("user", "assistant")}, "<|im_end|>", "<|im_end|>"),
    ({"user": "<|user|>\n", "assistant": "<|assistant|>\n"}, "<|end|>", "<|end|>"),
    ({"user": "<|user|>", "assistant": "<|assistant|>"}, "", "</s>"),
    ({"user": "[INST] ", "assistant": ""}, " [/INST]", "</s>"),
    ({"user": "USER: ", "assistant": "ASSISTANT:"}, "\n", "</s>"),
    ({"user": "user: ", "assistant": "assistant: "}, "\n", ""),
    ({"user": "", "assistant": "<|assistant|>"}, "", "</s>"),
    ({"user": "", "assistant": ""}, "\n", "<|end|>"),
    ({"user": "", "assistant": ""}, "", ""),
]
_TEXTS = [
    *("the answer", "Red.", "Tell me another one", " the", "a ", "早 👍🏽", "é", "0", "\nx\n"),
    *("", " \n", "</s>", "</s> and more", "<|endoftext|>x", "Red.<|end|>", "<|im_end|>\n"),
    *("<|user|>\nTell", "<|im_start|>assistant\nRed.<|im_end|>", "assistant: ", "{{ x }}", "USER:"),
]


class Piece(NamedTuple):
    """Some characters that a template writes, and what they are."""

    text: str
    part: Part
    message: int | None
    """Number of the message that they are written for."""


@dataclass(frozen=True, kw_only=True)
class DrawnTemplate:
    """A template of some parts."""

    headers: dict[str, str]
    message_end: str
    turn_end: str
    space: str
    """Behind the end of a turn."""
    final: str
    """Behind the whole conversation."""
    final_in_turn: bool
    """Whether the last turn of the assistant is written with it, and not the conversation."""
    marks: tuple[int, int] | None
    """First part of a turn that is marked as generated, and the end of these parts."""
    bos: bool
    trims: bool
    prompts: bool
    """Whether it writes the header where an answer is to follow."""
    system: Literal["as_others", "in_question", "left_out", "behind"]
    thoughts: Literal["left_out", "all", "of_last"]
    tools: bool

    @classmethod
    def drawn(cls, seed: int) -> "DrawnTemplate":
        drawn = random.Random(seed)
        headers, message_end, turn_end = drawn.choice(_FORMATS)
        first, end = drawn.choice([0, 1, 1, 1]), drawn.choice([4, 5, 5, 6, 7])
        return cls(
            headers=headers,
            message_end=message_end + drawn.choice(["", "\n"]),
            turn_end=turn_end,
            space=drawn.choice(["", "\n"]),
            final=drawn.choice(["", "", "<|endoftext|>", "</s>"]),
            final_in_turn=drawn.random() < 0.7,
            marks=(first, end) if drawn.random() < 0.7 else None,
            bos=drawn.random() < 0.5,
            trims=drawn.random() < 0.3,
            prompts=drawn.random() < 0.9,
            system=drawn.choice(["as_others", "as_others", "in_question", "left_out", "behind"]),
            thoughts=drawn.choice(["left_out", "all", "of_last"]),
            tools=drawn.random() < 0.7,
        )

    @property
    def marks_stay_in_turns(self) -> bool:
        """Return whether no token outside of the assistant's turns is marked."""
        return self.marks is not None and (self.marks[0] > 0 or not self.headers["assistant"])

    @property
    def learned_end(self) -> str:
        """The token with which every turn ends that carries loss; "": they end otherwise."""
        last = self.marks[1] if self.marks else len(_TURN_PARTS)
        end = self.turn_end if last > _TURN_PARTS.index("end") else ""
        is_marked = self.final_in_turn and last > _TURN_PARTS.index("final")
        final = self.final if is_marked or not self.marks else ""
        # Where turns have no end, each is learned alone, and the conversation ends behind it. Else
        # only the last one ends so.
        return end if final in ("", end) else final * (not end)

    @property
    def source(self) -> str:
        """Jinja."""
        content = "(m.content | trim)" if self.trims else "m.content"
        late = "loop.last and not add_generation_prompt"
        turn = {
            "header": _put(self.headers["assistant"]),
            "thought": self._thought_source(),
            "content": "{{ " + content + " }}",
            "calls": "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function | tojson }}"
            "{% endfor %}",
            "end": _put(self.turn_end),
            "space": _put(self.space),
            "final": f"{{% if {late} %}}{_put(self.final)}{{% endif %}}" * self.final_in_turn,
        }
        parts = [turn[part] for part in _TURN_PARTS]
        if self.marks:
            parts.insert(self.marks[1], "{% endgeneration %}")
            parts.insert(self.marks[0], "{% generation %}")
        header = _put(self.headers["user"])
        in_question = (
            "{% if m.role == 'user' and state.system %}{{ state.system + '\\n\\n' }}"
            "{% set state.system = '' %}{% endif %}"
        ) * (self.system == "in_question")
        leaves_out = "" if self.system == "as_others" else " and m.role != 'system'"
        behind = "{% if state.system and not add_generation_prompt %}{{ '<|system|>' + "
        behind += f"state.system }}}}{_put(self.message_end)}{{% endif %}}"
        ends = "{% if not add_generation_prompt %}" + _put(self.final) + "{% endif %}"
        prompt = "{% if add_generation_prompt %}" + turn["header"] + "{% endif %}"
        return (
            "{{ bos_token }}" * self.bos
            + "{% if tools %}{{ '<tools>' + tools | tojson + '\\n' }}{% endif %}" * self.tools
            + "{% set state = namespace(last=-1, system='') %}{% for m in messages %}"
            "{% if m.role == 'user' %}{% set state.last = loop.index0 %}{% endif %}"
            "{% if m.role == 'system' %}{% set state.system = m.content %}{% endif %}{% endfor %}"
            "{% for m in messages %}{% if m.role == 'assistant' %}"
            + "".join(parts)
            + f"{{% elif true{leaves_out} %}}{header}{in_question}{{{{ {content} }}}}"
            + _put(self.message_end)
            + "{% endif %}{% endfor %}"
            + behind * (self.system == "behind")
            + ends * (not self.final_in_turn)
            + prompt * self.prompts
        )

    def pieces(self, record: dict[str, Any]) -> Iterator[Piece]:
        """Pieces that the template should write of a conversation, without a prompt behind it."""
        messages = record["messages"]
        if self.bos:
            yield Piece("<s>", "other", None)
        if self.tools and record.get("tools"):
            yield Piece(f"<tools>{_json(record['tools'])}\n", "other", None)
        last_question = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
        systems = [m["content"] for m in messages if m["role"] == "system"]
        system = systems[-1] if systems else ""
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                yield from self._turn_pieces(message, i, i > last_question, i + 1 == len(messages))
                continue
            if message["role"] == "system" and self.system != "as_others":
                continue
            yield Piece(self.headers["user"], "header", i)
            if message["role"] == "user" and self.system == "in_question" and system:
                yield Piece(system + "\n\n", "other", None)
                system = ""
            yield Piece(self._trimmed(message["content"]), "said", i)
            yield Piece(self.message_end, "end", i)
        if self.system == "behind" and system:
            yield Piece("<|system|>" + system + self.message_end, "other", None)
        if not self.final_in_turn:
            yield Piece(self.final, "final", len(messages) - 1)

    def _turn_pieces(
        self, message: dict[str, Any], index: int, is_late: bool, is_last: bool
    ) -> Iterator[Piece]:
        yield Piece(self.headers["assistant"], "header", index)
        thought = message.get("reasoning_content")
        if thought and (self.thoughts == "all" or (self.thoughts == "of_last" and is_late)):
            yield Piece(f"<think>\n{thought}\n</think>\n\n", "said", index)
        yield Piece(self._trimmed(message["content"]), "said", index)
        for one in message.get("tool_calls") or ():
            yield Piece("<call>" + _json(one["function"]), "said", index)
        yield Piece(self.turn_end, "end", index)
        yield Piece(self.space, "space", index)
        if self.final_in_turn and is_last:
            yield Piece(self.final, "final", index)

    def _trimmed(self, content: str) -> str:
        return content.strip() if self.trims else content

    def _thought_source(self) -> str:
        condition = {"left_out": "false", "all": "true", "of_last": "loop.index0 > state.last"}
        return (
            f"{{% if m.reasoning_content and {condition[self.thoughts]} %}}"
            "{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"
        )


def drawn_conversation(seed: int) -> dict[str, Any]:
    """A conversation whose texts may be those that a template writes, or those of other turns."""
    drawn = random.Random(seed)

    def text() -> str:
        return "".join(drawn.choice(_TEXTS) for _ in range(drawn.choice([1, 1, 1, 2, 3])))

    system = text()
    messages = [said("system", system if system.strip() else "Be brief.")] * (drawn.random() < 0.4)
    with_tools = drawn.random() < 0.2
    messages += [said("assistant", text())] * (drawn.random() < 0.1)
    for _ in range(drawn.randint(1, 4)):
        messages += [said("user", text()) for _ in range(drawn.choice([1, 1, 1, 2]))]
        if with_tools and drawn.random() < 0.5:
            messages.append(said("assistant", "", tool_calls=[call(at=text())]))
            messages.append(said("tool", text(), name="weather", tool_call_id="call00001"))
        for _ in range(drawn.choice([1, 1, 1, 2])):
            more: dict[str, Any] = {"reasoning_content": text()} if drawn.random() < 0.2 else {}
            if drawn.random() < 0.15:
                more["train"] = drawn.random() < 0.3
            messages.append(said("assistant", text(), **more))
    messages += [said("user", text())] * (drawn.random() < 0.2)
    return {"messages": messages, **({"tools": [TOOL]} if with_tools else {})}


def _put(text: str) -> str:
    """Jinja that writes a text."""
    return "{{ '" + text.replace("\n", "\\n") + "' }}" if text else ""


def _json(value: Sequence[Any] | dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)
