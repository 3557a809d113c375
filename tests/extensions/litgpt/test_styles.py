import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
from chats import write_chat_tokenizer

from ftkit.errors import UserError
from ftkit.models.chat_templates.prompt_styles import STYLES as KNOWN
from ftkit.models.chat_templates.prompt_styles import (
    TextPrompt,
    prompt_style_file,
    resolve_prompt_style,
    style_of_model,
    template_of_style,
)
from ftkit.models.chat_templates.template import TemplateRefusal
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.parsing import read_recipe

try:  # here, since libraries set variables of the environment, which tests must not
    from litgpt import prompts as theirs
except ImportError:
    theirs = None

CLASSES = {style.class_name: style for style in KNOWN}
NAMED = {style.name: style for style in KNOWN if style.name != style.class_name}
STYLES = {
    **NAMED,
    **{name: CLASSES[name] for name in ("Default", "R1Base", "Falcon3")},
    "chatml with a system message": resolve_prompt_style(
        {
            "class_path": "litgpt.prompts.ChatML",
            "init_args": {"system_message": "It's {mine}.\n"},
        }
    ),
    "text": TextPrompt("{sys_prompt}\nQ: {instruction} {input}\nA: "),
    "text without places": TextPrompt("Q: {instruction}\nA: "),
    "two texts": TextPrompt("{sys_prompt}Q: {instruction}, {input}\nA: ", "Q: {instruction}\nA: "),
}
RECORDS = [
    {"instruction": " Say\n{x} 'hi'\\n  ", **more}
    for more in (
        {},
        {"input": ""},
        {"input": " an 'input'\\ \n"},
        {"sys_prompt": ""},
        {"sys_prompt": "  Be {terse}.\n"},
        {"sys_prompt": "Be terse.", "input": "早上好"},
    )
]


class Texts:
    use_bos = True
    bos_gap = ""
    special_tokens: ClassVar[Mapping[str, str]] = {"bos_token": "<s>", "eos_token": "</s>"}


def asked(record: dict[str, str]) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": record["instruction"]}]
    if "input" in record:
        messages[0]["input"] = record["input"]
    if "sys_prompt" in record:
        messages.insert(0, {"role": "system", "content": record["sys_prompt"]})
    return messages


@pytest.mark.skipif(theirs is None, reason="LitGPT is not installed")
class TestAsLitgptHasThem:
    """Recipes of LitGPT train on the same tokens."""

    def test_there_are_the_same_ones(self) -> None:
        named = {name: kind.__name__ for name, kind in theirs.prompt_styles.items()}
        assert {name: style.class_name for name, style in NAMED.items()} == named
        classes = inspect.getmembers(theirs, inspect.isclass)
        base = theirs.PromptStyle
        assert set(CLASSES) == {n for n, c in classes if issubclass(c, base) and c is not base}

    @pytest.mark.parametrize("name", CLASSES)
    def test_they_make_the_same_prompts(self, name: str) -> None:
        for record in RECORDS:
            prompt = record["instruction"]
            expected = getattr(theirs, name)().apply(prompt=prompt, **record)
            assert CLASSES[name].apply(prompt, **record) == expected

    @pytest.mark.parametrize("name", CLASSES)
    def test_the_same_tokens_end_answers(self, name: str) -> None:
        class Spelled:
            eos_id = "</s>"
            token_to_id = staticmethod(str)

        sequences = getattr(theirs, name)().stop_tokens(Spelled)
        expected = {ids[0] for ids in sequences if len(ids) == 1} - {Spelled.eos_id}
        assert set(CLASSES[name].stops) == expected

    def test_models_have_the_same_styles(self) -> None:
        from litgpt.config import configs

        for name in [config["name"] for config in configs]:
            expected = type(theirs.model_name_to_prompt_style(name)).__name__
            assert style_of_model(name).class_name == expected


@pytest.mark.parametrize("name", STYLES)
def test_a_style_as_a_template_makes_the_same_prompts(name: str) -> None:
    style = STYLES[name]
    template = template_of_style(style, Texts)
    for record in RECORDS:
        expected = "<s>" + style.apply(prompt=record["instruction"], **record)
        assert template.render(asked(record), add_generation_prompt=True) == expected


@pytest.mark.parametrize("adds_bos", [True, False])
def test_tokens_are_those_of_the_style(adds_bos: bool, tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_chat_tokenizer(tmp_path, add_bos_token=adds_bos))
    for style in STYLES.values():
        template = template_of_style(style, tokenizer)
        for record in RECORDS:
            prompt = style.apply(prompt=record["instruction"], **record)
            text = template.render(asked(record), add_generation_prompt=True)
            assert tokenizer.encode_rendered(text).ids == tokenizer.encode(prompt).tolist()


def test_bos_that_a_style_writes_itself_is_not_doubled() -> None:
    class Llama(Texts):
        special_tokens: ClassVar[Mapping[str, str]] = {"bos_token": "<|begin_of_text|>"}

    text = template_of_style(NAMED["llama3"], Llama).render(asked({"instruction": "a"}))
    assert text.count("<|begin_of_text|>") == 1


CONVERSATION = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "A"},
    {"role": "assistant", "content": "B"},
    {"role": "user", "content": "C"},
]


LATER_TURNS = {
    "alpaca": "S### Instruction:\nA\n\n### Response:\nB</s>### Instruction:\nC\n\n### Response:\n",
    "qwen3": (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n"
        "B</s><|im_start|>user\nC<|im_end|>\n<|im_start|>assistant\n"
    ),
    "llama2": (
        "[INST] <<SYS>>\nS\n<</SYS>>\n\n A [/INST] B</s>[INST] <<SYS>>\nS\n<</SYS>>\n\n C [/INST] "
    ),
    "llama3": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nA<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nB<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nC<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "text without places": "Q: A\nA: B</s>Q: C\nA: ",
}


@pytest.mark.parametrize("name", LATER_TURNS)
def test_further_turns_repeat_prompt_and_answer(name: str) -> None:
    text = template_of_style(STYLES[name], Texts).render(CONVERSATION)
    assert text == "<s>" + LATER_TURNS[name]


def test_a_role_that_styles_do_not_know_is_refused() -> None:
    template = template_of_style(NAMED["alpaca"], Texts)
    with pytest.raises(TemplateRefusal, match="no place for the role tool"):
        template.render([{"role": "tool", "content": "x"}])


class TestTexts:
    """Prompts of one's own."""

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("Q: {instruction}\nA: ", "Q: do\n\nthis\nA: "),
            ("Q: {instruction}\\nA: ", "Q: do\n\nthis\nA: "),
            ("{sys_prompt}|{instruction}|{input}|{{x}}", "be|do|this|{x}"),
        ],
    )
    def test_places_are_filled(self, text: str, expected: str) -> None:
        style = resolve_prompt_style(text)
        assert style.apply(prompt="do", sys_prompt="be", input="this", output="no") == expected

    @pytest.mark.parametrize(
        "text",
        [
            "{question}",
            "{instruction",
            "{instruction.__class__}",
            "{instruction!r} {instruction}",
            "{}{instruction}",
            "{input}",
        ],
    )
    def test_other_places_are_refused(self, text: str) -> None:
        with pytest.raises(UserError, match=r"data.prompt_style is .*\n(Write|Try)"):
            resolve_prompt_style(text)

    def test_on_the_command_line_it_is_no_yaml(self) -> None:
        text = "Q: {instruction}\nA: "
        keys = [("data", "JSON"), ("data.prompt_style", text), ("checkpoint_dir", "x")]
        recipe = read_recipe([], keys, method="lora")
        assert recipe.data["init_args"]["prompt_style"] == text

    def test_a_record_without_an_input_may_have_a_prompt_of_its_own(self) -> None:
        texts = {"with_input": "{instruction}: {input}=", "without_input": "{instruction}="}
        keys = [("data", "JSON"), ("checkpoint_dir", "x"), ("data.prompt_style", json.dumps(texts))]
        given = read_recipe([], keys, method="lora").data["init_args"]["prompt_style"]
        assert given == texts
        style = resolve_prompt_style(given)
        found = [style.apply(prompt="a", input=text) for text in ("b", "", None)]
        assert found == ["a: b=", "a=", "a="]

    @pytest.mark.parametrize(
        "texts",
        [
            {"with_input": "{instruction} {input}"},
            {"with_input": "{instruction}", "without_input": 1},
            {"with_input": "{instruction}", "without_input": "no place"},
        ],
    )
    def test_two_texts_need_both(self, texts: dict[str, object]) -> None:
        with pytest.raises(UserError, match=r"data.prompt_style is .*\n(Write|Try)"):
            resolve_prompt_style(texts)

    def test_there_is_no_file_for_litgpt(self) -> None:
        assert prompt_style_file(resolve_prompt_style("{instruction}")) == {}
