"""Tokens are those of transformers, masks are made by hand, for templates of many families."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from chats import CONVERSATIONS, random_conversation, said, write_chat_tokenizer
from families import FAMILIES

from ftkit.data.records.record import Record
from ftkit.data.rendering import Rendered
from ftkit.extensions.chats.rendering import ChatRenderer
from ftkit.extensions.chats.turns import (
    CHANGED,
    NO_TURN,
    NOT_MARKED,
    OTHER_PROMPT,
    REFUSED,
)
from ftkit.models.chat_templates import NO_TOOLS
from ftkit.models.chat_templates.template import NAMED, ChatTemplate, resolve_chat_template
from ftkit.models.pretrained.tokenizer import Tokenizer

ALL = [*NAMED, *FAMILIES]
PUT_TOGETHER = ("deepseek-r1", "mistral-v3")
DATE = {"date_string": "26 Jul 2024"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_chat_tokenizer(tmp_path_factory.mktemp("chats")))


def template_of_family(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    if name in NAMED:
        return resolve_chat_template(name, tokenizer)
    return ChatTemplate(FAMILIES[name], name, tokenizer.special_tokens)


def samples(
    template: ChatTemplate, tokenizer: Tokenizer, record: Record, **options: Any
) -> tuple[Rendered, ...] | str:
    options = {"train_on": "assistant", "reasoning": "split"} | options
    (rendering,) = ChatRenderer(tokenizer, template, **options).render([record])
    assert bool(rendering.samples) != (rendering.refused is not None)
    return rendering.refused or rendering.samples


def trained(
    template: ChatTemplate, tokenizer: Tokenizer, record: Record, **options: Any
) -> list[list[str]] | str:
    """The texts that carry loss in each sample, or why there is none."""
    found = samples(template, tokenizer, record, **options)
    if isinstance(found, str):
        return found
    decode = tokenizer.processor.decode
    return [
        [decode(one.ids[first:end], skip_special_tokens=False) for first, end in one.trained]
        for one in found
    ]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    from transformers import PreTrainedTokenizerFast

    directory = write_chat_tokenizer(tmp_path_factory.mktemp("theirs"))

    @cache
    def make(source: str) -> Any:
        return PreTrainedTokenizerFast(
            tokenizer_file=str(directory / "tokenizer.json"),
            bos_token="<s>",
            eos_token="</s>",
            chat_template=source,
        )

    return make


TURNS = {
    "chatml qwen phi4 smollm2": ["Hello.<|im_end|>", "So long 👋<|im_end|>"],
    "llama3 llama-3.1": ["Hello.<|eot_id|>", "So long 👋<|eot_id|>"],
    "mistral vicuna": [" Hello.</s>", " So long 👋</s>"],
    "zephyr": ["Hello.</s>", "So long 👋</s>"],
    "gemma": ["Hello.<end_of_turn>", "So long 👋<end_of_turn>"],
    "phi": ["Hello.<|end|>", "So long 👋<|end|>"],
    "phi-3": ["Hello.<|end|>", "So long 👋<|end|>\n<|endoftext|>"],
    "llama2": [" Hello. </s>", " So long 👋 </s>"],
    "deepseek": ["Hello.<｜end▁of▁sentence｜>", "So long 👋<｜end▁of▁sentence｜>"],
    "command-r": ["Hello.<|END_OF_TURN_TOKEN|>", "So long 👋<|END_OF_TURN_TOKEN|>"],
}
THOUGHT = "<think>\n{}\n</think>\n\n{}<|im_end|>"
TAGGED = '<tool_call>\n{"name": "weather", "arguments": {"at": "Bonn"}}\n</tool_call><|im_end|>'
BARE = '{"name": "weather", "parameters": {"at": "Bonn"}}<|eot_id|>'
LISTED = '[TOOL_CALLS] [{"name": "weather", "arguments": {"at": "Bonn"}, "id": "call00001"}]</s>'
OTHERS: dict[tuple[str, str], list[list[str]] | str] = {
    ("qwen3", "turns"): [[THOUGHT.format("", "Hello.")], [THOUGHT.format("", "So long 👋")]],
    ("deepseek-r1", "turns"): [
        ["\n</think>\n\nHello.<｜end▁of▁sentence｜>"],
        ["\n</think>\n\nSo long 👋<｜end▁of▁sentence｜>"],
    ],
    ("mistral-v3", "turns"): [[" Hello.</s>"], [" So long 👋</s>"]],
    ("qwen", "tools"): [[TAGGED, "Sunny.<|im_end|>"]],
    ("qwen3", "tools"): [["<think>\n\n</think>\n\n\n" + TAGGED], [THOUGHT.format("", "Sunny.")]],
    ("llama3 llama-3.1", "tools"): [[BARE, "Sunny.<|eot_id|>"]],
    ("mistral mistral-v3", "tools"): [[LISTED, " Sunny.</s>"]],
    ("phi-3 smollm2", "tools"): NO_TOOLS,
    ("zephyr", "tools"): REFUSED + "zephyr has no place for tools; qwen has",
    ("gemma", "thinking"): REFUSED + "gemma has no place for tool calls and reasoning; qwen has",
    ("qwen qwen3", "thinking"): [[THOUGHT.format("one more", "2")], [THOUGHT.format("again", "3")]],
    ("deepseek", "thinking"): [
        ["<think>one more</think>2<｜end▁of▁sentence｜>"],
        ["<think>again</think>3<｜end▁of▁sentence｜>"],
    ],
    ("llama-3.1", "thinking"): [["2<|eot_id|>", "3<|eot_id|>"]],
}
BY_HAND = {
    **{(name, "turns"): [texts] for names, texts in TURNS.items() for name in names.split()},
    **{(name, kind): texts for (names, kind), texts in OTHERS.items() for name in names.split()},
}


@pytest.mark.parametrize(("name", "kind"), BY_HAND)
def test_masks_are_those_made_by_hand(name: str, kind: str, tokenizer: Tokenizer) -> None:
    template = template_of_family(name, tokenizer)
    assert trained(template, tokenizer, CONVERSATIONS[kind]) == BY_HAND[name, kind]


@pytest.mark.parametrize("kind", CONVERSATIONS)
@pytest.mark.parametrize("name", ALL)
def test_tokens_are_those_of_transformers(
    name: str, kind: str, tokenizer: Tokenizer, theirs: Callable[[str], Any]
) -> None:
    template, record = template_of_family(name, tokenizer), CONVERSATIONS[kind]
    apply = theirs(template.source).apply_chat_template
    found = samples(template, tokenizer, record)
    if isinstance(found, str):
        if not found.startswith((OTHER_PROMPT, NO_TOOLS)):
            with pytest.raises(Exception, match=re.escape(found.removeprefix(REFUSED))):
                apply(record["messages"], tools=record.get("tools"))
        return
    said_at = [i for i, m in enumerate(record["messages"]) if m["role"] == "assistant"]
    ends = [len(record["messages"])] if len(found) == 1 else [i + 1 for i in said_at]
    for sample, end in zip(found, ends, strict=True):
        messages, tools = record["messages"][:end], record.get("tools")
        if sample.ids != apply(messages, tools=tools, **DATE)["input_ids"]:
            # Put together: what the template's prompt writes is not what the turn begins with.
            prompt = apply(messages[:-1], tools=tools, add_generation_prompt=True, **DATE)
            assert (
                name in PUT_TOGETHER and sample.ids[: sample.trained[0][0]] == prompt["input_ids"]
            )


@pytest.mark.parametrize("name", NAMED)
def test_masks_of_marked_templates_are_those_of_transformers(
    name: str, tokenizer: Tokenizer, theirs: Callable[[str], Any]
) -> None:
    template, record = template_of_family(name, tokenizer), CONVERSATIONS["turns"]
    if name == "paligemma":  # one question and one answer
        record = {"messages": record["messages"][1:3]}
    found = samples(template, tokenizer, record)
    assert not isinstance(found, str)
    (sample,) = found
    expected = theirs(template.source).apply_chat_template(
        record["messages"], return_assistant_tokens_mask=True, return_dict=True
    )["assistant_masks"]
    spans = [range(*span) for span in sample.trained]
    assert [int(any(i in span for span in spans)) for i in range(len(sample.ids))] == expected


@pytest.mark.parametrize("name", ALL)
def test_a_turn_is_learned_after_exactly_what_the_model_is_given(
    name: str, tokenizer: Tokenizer
) -> None:
    template = template_of_family(name, tokenizer)
    stop_ids = ChatRenderer(tokenizer, template, train_on="last").stop_ids
    for record in map(random_conversation, range(8)):
        found = samples(template, tokenizer, record)
        if isinstance(found, str):
            continue
        messages, tools = record["messages"], record.get("tools")
        said_at = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        spans = [(sample.ids, span) for sample in found for span in sample.trained]
        for (ids, (first, end)), index in zip(spans, said_at, strict=True):
            prompt = template.render(messages[:index], tools=tools, add_generation_prompt=True)
            assert ids[:first] == tokenizer.encode_rendered(prompt).ids
            answer = tokenizer.processor.decode(ids[first:end], skip_special_tokens=False)
            assert messages[index]["content"].strip() in answer
            assert ids[end - 1] in stop_ids


@pytest.mark.parametrize("name", NAMED)
def test_without_its_marks_a_template_has_the_same_masks(name: str, tokenizer: Tokenizer) -> None:
    marked = template_of_family(name, tokenizer)
    source = re.sub(r"\{%-? (end)?generation %\}", "{%- if true %}{% endif %}", marked.source)
    plain = ChatTemplate(source, name, marked.special_tokens)
    assert marked.marks_generation and not plain.marks_generation
    for record in map(random_conversation, range(8)):
        assert samples(plain, tokenizer, record) == samples(marked, tokenizer, record)


class TestOptions:
    """Which turns carry loss, on ChatML."""

    @pytest.fixture(autouse=True)
    def chatml(self, tokenizer: Tokenizer) -> None:
        self.template = template_of_family("chatml", tokenizer)
        self.tokenizer = tokenizer

    def trained(self, *messages: dict[str, Any], **options: Any) -> list[list[str]] | str:
        record = {"messages": list(messages)}
        return trained(self.template, self.tokenizer, record, **options)

    TALK = (said("user", "a"), said("assistant", "b"), said("user", "c"), said("assistant", "d"))

    def test_last_is_the_last_turn_alone(self) -> None:
        assert self.trained(*self.TALK, train_on="last") == [["d<|im_end|>"]]

    def test_all_is_every_token(self) -> None:
        whole = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in self.TALK)
        assert self.trained(*self.TALK, train_on="all") == [[whole]]

    def test_a_message_may_say_itself_whether_it_carries_loss(self) -> None:
        messages = [dict(message) for message in self.TALK]
        messages[1]["train"] = False
        assert self.trained(*messages) == [["d<|im_end|>"]]
        found = self.trained(*messages, train_on="all")
        assert not isinstance(found, str)
        first, second = found[0]
        assert first.endswith("assistant\n") and second.startswith("<|im_start|>user\nc")
        messages[1]["train"] = True
        assert self.trained(*messages, train_on="last") == [["b<|im_end|>", "d<|im_end|>"]]
        messages[1]["train"] = messages[3]["train"] = False
        assert self.trained(*messages) == NO_TURN

    def test_a_conversation_may_end_with_a_question(self) -> None:
        assert self.trained(*self.TALK[:3]) == [["b<|im_end|>"]]
        assert self.trained(self.TALK[0]) == NO_TURN

    def test_several_messages_in_a_row_are_several_turns(self) -> None:
        said_twice = [*self.TALK[:2], said("assistant", "more")]
        assert self.trained(*said_twice) == [["b<|im_end|>", "more<|im_end|>"]]

    def test_nobody_asked_for_a_greeting(self) -> None:
        greeting = said("assistant", "Hi!")
        assert self.trained(greeting, *self.TALK[:2]) == [["b<|im_end|>"]]
        assert self.trained(greeting | {"train": True}, *self.TALK[:2]) == [
            ["Hi!<|im_end|>", "b<|im_end|>"]
        ]

    def test_an_empty_answer_is_none(self) -> None:
        assert self.trained(said("user", "a"), said("assistant", " \n")) == NO_TURN


def test_conversations_whose_turns_change_may_be_refused(tokenizer: Tokenizer) -> None:
    template = template_of_family("qwen3", tokenizer)
    record = CONVERSATIONS["thinking"]
    assert trained(template, tokenizer, record, reasoning="refuse") == CHANGED
    alone = {"messages": record["messages"][:2]}
    assert trained(template, tokenizer, alone, reasoning="refuse") == [
        [THOUGHT.format("one more", "2")]
    ]


def test_a_call_that_the_template_leaves_out_is_noticed_though_its_name_is_there(
    tokenizer: Tokenizer,
) -> None:
    source = (
        "{{ tools | tojson }}{% for m in messages %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
    )
    template = ChatTemplate(source, "tried")
    assert trained(template, tokenizer, CONVERSATIONS["tools"]) == NO_TOOLS


def test_marks_decide_what_carries_loss(tokenizer: Tokenizer) -> None:
    source = (
        "{% for m in messages %}{{ '<|im_start|>' }}{% if m.role == 'assistant' %}"
        "{{ m.content[:1] }}{% generation %}{{ m.content[1:] }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
    )
    template = ChatTemplate(source, "tried")
    messages = [said("user", "a"), said("assistant", "1 23")]
    assert trained(template, tokenizer, {"messages": messages}) == [[" 23"]]
    unsaid = [said("user", "a"), said("assistant", "1")]
    assert trained(template, tokenizer, {"messages": unsaid}) == NOT_MARKED


def test_a_turn_without_a_token_that_ends_it_ends_with_the_text(tokenizer: Tokenizer) -> None:
    source = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    template = ChatTemplate(source, "tried")
    messages = [said("user", "a"), said("assistant", "b")]
    assert trained(template, tokenizer, {"messages": messages}) == [["assistant: b\n"]]
    assert ChatRenderer(tokenizer, template, train_on="last").stop_ids == {tokenizer.eos_id}


@pytest.mark.parametrize("trims", [True, False])
def test_a_token_with_the_space_before_it_begins_there(trims: bool, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Processor
    from tokenizers import processors

    file = write_chat_tokenizer(tmp_path) / "tokenizer.json"
    processor = Processor.from_file(str(file))
    processor.post_processor = processors.ByteLevel(trim_offsets=trims)
    processor.save(str(file))
    tokenizer = Tokenizer(tmp_path)
    messages = [said("user", "a"), said("assistant", "the answer")]
    template = template_of_family("vicuna", tokenizer)
    assert trained(template, tokenizer, {"messages": messages}) == [[" the answer</s>"]]
