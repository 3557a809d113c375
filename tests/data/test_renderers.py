"""Renderers of every shape, and what chooses between them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import CONVERSATIONS, TURNS, marked, said, write_chat_tokenizer

from ftkit.data.dataset import load_data
from ftkit.data.prepare import make_renderer
from ftkit.data.records.record import Record, Shape
from ftkit.data.rendering import NO_OUTPUT, Example, Renderer
from ftkit.data.spec import Part, Rules
from ftkit.errors import UserError
from ftkit.models.chat_templates.template import resolve_chat_template
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.planning.sequence_length import longest_sample
from ftkit.recipe.recipe import Component

TEMPLATE = "{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("chats")
    return Tokenizer(write_chat_tokenizer(directory, add_bos_token=True, chat_template=TEMPLATE))


def part(shape: Shape, records: Sequence[Record] = (), **rules: Any) -> Part:
    return Part(name="mine", shape=shape, rules=Rules(**rules), train=records, val=[])


def texts(renderer: Renderer, tokenizer: Tokenizer, *records: Record) -> list[list[str] | str]:
    """The samples of records with what carries loss in brackets, or why there are none."""
    return [
        rendering.refused or [marked(sample, tokenizer) for sample in rendering.samples]
        for rendering in renderer.render(records)
    ]


def decoded(example: Example, tokenizer: Tokenizer) -> str:
    return str(tokenizer.processor.decode(example.expected, skip_special_tokens=False))


class TestCompletions:
    def test_prompt_and_completion_are_taken_as_they_are(self, tokenizer: Tokenizer) -> None:
        record = {"prompt": " the question", "completion": " the answer\n"}
        empty = {"prompt": "a", "completion": " "}
        renderer = make_renderer(part("completion", train_on="last"), tokenizer)
        assert texts(renderer, tokenizer, record, empty) == [
            ["<s> the question⟦ the answer\n</s>⟧"],
            NO_OUTPUT,
        ]
        whole = make_renderer(part("completion", train_on="all"), tokenizer)
        assert texts(whole, tokenizer, record) == [["⟦<s> the question the answer\n</s>⟧"]]
        assert renderer.text(record) == " the question the answer\n"
        assert renderer.text(empty) == ""

    def test_its_example_ends_before_the_completion(self, tokenizer: Tokenizer) -> None:
        renderer = make_renderer(part("completion", train_on="last"), tokenizer)
        example = renderer.example({"prompt": "a", "completion": "b"})
        assert example.prompt == tokenizer.encode_rendered("<s>a").ids
        assert (decoded(example, tokenizer), example.instruction) == ("b", "a")
        assert example.stop_ids == renderer.stop_ids == {tokenizer.eos_id}
        messages = [said("user", "a"), said("assistant", "b")]
        assert renderer.template.render(messages) == "<s>ab</s>"


class TestDocuments:
    def test_every_token_carries_loss(self, tokenizer: Tokenizer) -> None:
        renderer = make_renderer(part("text", train_on="all"), tokenizer)
        assert texts(renderer, tokenizer, {"text": "the answer"}, {"text": "\n"}) == [
            ["⟦<s>the answer</s>⟧"],
            "no text",
        ]

    def test_its_example_is_its_continuation(self, tokenizer: Tokenizer) -> None:
        renderer = make_renderer(part("text", train_on="all"), tokenizer)
        text = "the answer to a question of the user"
        example = renderer.example({"text": text})
        assert example.instruction + decoded(example, tokenizer) == text
        assert tokenizer.decode(torch.tensor(example.prompt)) == example.instruction
        assert renderer.example({"text": "a"}).expected == []


class TestConversations:
    def renderer(self, tokenizer: Tokenizer | None, template: str = "qwen") -> Renderer:
        return make_renderer(part("messages", chat_template=template), tokenizer)

    @pytest.mark.extensions
    def test_its_example_is_the_last_turn(self, tokenizer: Tokenizer) -> None:
        example = self.renderer(tokenizer).example(TURNS)
        prompt = resolve_chat_template("qwen", tokenizer).render(
            TURNS["messages"][:-1], add_generation_prompt=True
        )
        assert example.prompt == tokenizer.encode_rendered(prompt).ids
        asked = "system: Be brief.\nuser: Hi\nassistant: Hello.\nuser: Bye"
        assert (decoded(example, tokenizer), example.instruction) == ("So long 👋", asked)
        assert example.stop_ids == {tokenizer.eos_id, tokenizer.added_tokens["<|im_end|>"]}

    @pytest.mark.extensions
    def test_a_question_without_an_answer_is_one_too(self, tokenizer: Tokenizer) -> None:
        example = self.renderer(tokenizer).example({"messages": TURNS["messages"][1:2]})
        text = tokenizer.processor.decode(example.prompt, skip_special_tokens=False)
        assert text.endswith("Hi<|im_end|>\n<|im_start|>assistant\n")
        assert (example.expected, example.instruction) == ([], "Hi")

    @pytest.mark.extensions
    def test_people_see_all_that_comes_before_the_answer(self, tokenizer: Tokenizer) -> None:
        shown = self.renderer(tokenizer).example(CONVERSATIONS["tools"]).instruction
        assert shown == "user: Bonn?\nassistant: (calls weather)\ntool: sun"

    @pytest.mark.extensions
    def test_an_answer_may_be_a_call(self, tokenizer: Tokenizer) -> None:
        record = CONVERSATIONS["tools"] | {"messages": CONVERSATIONS["tools"]["messages"][:2]}
        expected = '<tool_call>\n{"name": "weather", "arguments": {"at": "Bonn"}}\n</tool_call>'
        assert decoded(self.renderer(tokenizer).example(record), tokenizer) == expected

    @pytest.mark.extensions
    def test_the_longest_one_is_found_by_its_bytes(self, tokenizer: Tokenizer) -> None:
        renderer = self.renderer(tokenizer)
        records = [
            {"messages": [said("user", "a" * n), said("assistant", "b")]} for n in (5, 80, 20)
        ]
        (longest,) = renderer.render([records[1]])
        found = longest_sample(records, renderer, max_seq_length=1000)
        assert found is not None and found.is_exact
        assert found.at_most == len(longest.samples[0].ids)

    @pytest.mark.extensions
    @pytest.mark.parametrize("template", ["tokenizer", "qwen"])
    def test_bytes_are_known_without_a_tokenizer(self, template: str) -> None:
        assert "So long 👋<|im_end|>" in self.renderer(None, template).text(TURNS)
        assert self.renderer(None, template).text({"messages": [said("user", "a")]}) == ""

    @pytest.mark.extensions
    def test_an_answer_that_goes_on_with_a_word_of_its_prompt_is_trained(
        self, tmp_path: Path
    ) -> None:
        tokenizer = Tokenizer(write_chat_tokenizer(tmp_path))
        file = tmp_path / "glued.jinja"
        file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
        renderer = self.renderer(tokenizer, str(file))
        record = {"messages": [said("user", "th"), said("assistant", "e")]}
        assert texts(renderer, tokenizer, record) == [["th⟦e⟧"]]


class TestData:
    """From a file to samples."""

    def load(self, tmp_path: Path, tokenizer: Tokenizer, record: Record, **options: Any) -> Any:
        file = tmp_path / "chats.json"
        file.write_text(json.dumps([record] * 4))
        init_args = {"path": str(file), "val_split_fraction": 0.5, **options}
        data = Component(class_path="JSON", init_args=init_args)
        return load_data(data, tokenizer, 1000)

    def text(self, loaded: Any, tokenizer: Tokenizer) -> str:
        ids, spans, *_ = loaded.val[0]
        decode = tokenizer.processor.decode
        return "|".join(
            decode(ids[first:end].tolist(), skip_special_tokens=False) for first, end in spans
        )

    @pytest.mark.extensions
    def test_messages_take_the_template_of_the_tokenizer(
        self, tmp_path: Path, tokenizer: Tokenizer
    ) -> None:
        loaded = self.load(tmp_path, tokenizer, TURNS)
        assert self.text(loaded, tokenizer) == "assistant:Hello.</s>|assistant:So long 👋</s>"

    @pytest.mark.extensions
    def test_instructions_may_be_conversations(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        record = {"instruction": "do", "input": "this", "output": "done"}
        loaded = self.load(tmp_path, tokenizer, record, chat_template="chatml")
        assert self.text(loaded, tokenizer) == "done<|im_end|>"

    @pytest.mark.extensions
    @pytest.mark.parametrize(
        ("options", "trained"),
        [
            ({"mask_prompt": True}, "done</s>"),
            ({"train_on": "assistant"}, "an answer</s>|done</s>"),
            (
                {"train_on": "all"},
                "<s>Q: a question\nA:an answer</s>Q: do\n\nthis\nA:done</s>",
            ),
            ({"chat_template": "chatml"}, "an answer<|im_end|>|done<|im_end|>"),
        ],
    )
    def test_a_history_is_a_conversation_before_the_instruction(
        self,
        options: dict[str, Any],
        trained: str,
        tmp_path: Path,
        tokenizer: Tokenizer,
    ) -> None:
        record: Record = {"instruction": "do", "input": "this", "output": "done"}
        record |= {"history": [["a question", "an answer"]]}
        if "chat_template" not in options:
            options = options | {"prompt_style": "Q: {instruction}\nA:"}
        loaded = self.load(tmp_path, tokenizer, record, **options)
        assert self.text(loaded, tokenizer) == trained
        (question, _) = loaded.questions[:]
        prompt = tokenizer.processor.decode(question.prompt, skip_special_tokens=False)
        assert "a question" in prompt and "an answer" in prompt
        assert decoded(question, tokenizer) == "done"

    def test_a_prompt_may_be_a_text(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        record = {"instruction": "do", "input": "", "output": "done"}
        loaded = self.load(tmp_path, tokenizer, record, prompt_style="Q: {instruction}\nA: ")
        assert self.text(loaded, tokenizer) == "<s>Q: do\nA: done</s>"

    def test_a_missing_template_is_refused(self, tmp_path: Path, tokenizer: Tokenizer) -> None:
        with pytest.raises(UserError, match=r"--data.chat_template chatml"):
            self.load(tmp_path, tokenizer, TURNS, chat_template="chatmll")
