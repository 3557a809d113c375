"""Arguments of chat templates: defaults of a run, and values of a record."""

from typing import Any

import pytest
from chats import said, write_chat_tokenizer
from messages import message_of, says
from thinking_templates import THINKERS
from transformers.utils.chat_template_utils import render_jinja_template

from ftkit.evaluation.prompting import prompt_text, question_of
from ftkit.models.chat_templates.template import ChatTemplate
from ftkit.models.pretrained.tokenizer import Tokenizer

MESSAGES = [said("user", "1+1?"), said("assistant", "2")]
VALUE = "{{ mood | tojson }}"
VALUES: list[Any] = [True, False, 0, -1.5, 1e-9, "", "a\nb", "\\", "'\"{{ }} %} {#", "é👋\0"]
VALUES += [["a", [1, None]], {"a": {"b": False}, "c-d": []}]
# Where white space at the beginning of a template, or of a line, matters.
SOURCES = [
    f"{VALUE}",
    f"\n{VALUE}\n",
    f"  {{% if mood %}}{VALUE}{{% endif %}}",
    f"\n\n  {{%- if mood %}}\n  {VALUE}{{% endif %}}",
    f"  {VALUE}",
    f"{{% macro a() %}}{VALUE}{{% endmacro %}}{{% for m in messages %}}{{{{ a() }}}}{{% endfor %}}",
    f"{{% if mood is not defined %}}{{% set mood = 3 %}}{{% endif %}}{VALUE}",
]


def template(source: str = VALUE, **defaults: Any) -> ChatTemplate:
    return ChatTemplate(source, "tried").with_defaults(defaults)


def as_transformers_renders(source: str, **arguments: Any) -> list[str]:
    found: Any = render_jinja_template([MESSAGES], chat_template=source, **arguments)
    texts: list[str] = found[0]
    return texts


@pytest.mark.parametrize("value", VALUES)
def test_a_default_is_the_value_everywhere(value: Any) -> None:
    found = template(mood=value)
    theirs = as_transformers_renders(found.source)
    assert [found.render(MESSAGES)] == theirs == [template().render(MESSAGES, mood=value)]


@pytest.mark.parametrize("source", SOURCES)
def test_a_default_changes_nothing_else(source: str) -> None:
    found = template(source, mood="sun")
    expected = as_transformers_renders(source, mood="sun")
    theirs = as_transformers_renders(found.source)
    assert [found.render(MESSAGES)] == theirs == expected


def test_what_is_given_replaces_the_default() -> None:
    found = template(mood="sun")
    assert found.with_arguments({"mood": "moon"}).render(MESSAGES) == '"moon"'
    assert found.with_arguments(None).render(MESSAGES, mood=False) == "false"


def test_a_name_that_the_template_does_not_read_is_refused() -> None:
    text, _, advice = message_of(template, "{{ enable_thinking }}", enable_thinkin=1).partition(
        "\n"
    )
    assert says(text, "data.chat_template_kwargs.enable_thinkin is 1 ... tried ... does not read")
    assert says(advice, "enable_thinking")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_chat_tokenizer(tmp_path_factory.mktemp("chats")))


@pytest.mark.extensions
@pytest.mark.parametrize("of_run", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
@pytest.mark.parametrize("of_record", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
@pytest.mark.parametrize("name", ["gemma 4", "glm 4.7", "nemotron 3"])
def test_an_answer_is_learned_after_the_prompt_with_its_arguments(
    name: str, of_run: dict[str, Any], of_record: dict[str, Any], tokenizer: Tokenizer
) -> None:
    from ftkit.extensions.chats.rendering import ChatRenderer

    ours = template(THINKERS[name].source, **of_run)
    record = {"messages": MESSAGES} | ({"chat_template_kwargs": of_record} if of_record else {})
    renderer = ChatRenderer(tokenizer, ours, train_on="assistant")
    (made,) = renderer.render([record])
    (sample,) = made.samples
    expected = ChatTemplate(THINKERS[name].source, "plain").render(
        MESSAGES[:1], add_generation_prompt=True, **of_run | of_record
    )
    prompt = prompt_text(question_of(record), ours)
    assert prompt == expected
    ((first, end),) = sample.trained
    assert sample.ids[:first] == tokenizer.encode_rendered(prompt).ids
    assert renderer.example(record).prompt == sample.ids[:first]
    answer = tokenizer.processor.decode(sample.ids[first:end], skip_special_tokens=False)
    thinks = (of_run | of_record).get("enable_thinking")
    assert ("</think>" in answer) == (name != "gemma 4" and thinks is not False)


@pytest.mark.extensions
def test_parts_without_loss_are_found_with_arguments(tokenizer: Tokenizer) -> None:
    from ftkit.extensions.chats.rendering import ChatRenderer

    renderer = ChatRenderer(
        tokenizer, template("{{ mood }}" + THINKERS["qwq"].source), train_on="all"
    )
    answer = said("assistant", "one two") | {"spans": [[0, 3, 0.0]], "train": True}
    record = {"messages": [MESSAGES[0], answer], "chat_template_kwargs": {"mood": "sun"}}
    (made,) = renderer.render([record])
    (sample,) = made.samples
    learned = "".join(
        tokenizer.processor.decode(sample.ids[first:end]) for first, end in sample.trained
    )
    assert learned.startswith("sun") and " two" in learned and "one" not in learned
