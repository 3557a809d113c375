import json
import os
import pickle
from pathlib import Path

import pytest
from chats import TOOL

from ftkit.errors import UserError
from ftkit.models.chat_templates.template import (
    ChatTemplate,
    TemplateRefusal,
    read_template,
    template_of,
)

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def test_a_template_is_given_what_transformers_gives() -> None:
    source = (
        "{{ bos_token }}{{ pad_token }}{{ tools is none }}{{ documents is none }}"
        "{{ add_generation_prompt }}{{ thinking }}"
    )
    template = ChatTemplate(source, "tried", {"bos_token": "<s>"})
    assert template.render(MESSAGES, thinking=1) == "<s>TrueTrueFalse1"
    assert template.render(MESSAGES, tools=[TOOL]) == "<s>FalseTrueFalse"


def test_settings_and_filters_are_those_of_transformers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = """
    {%- for message in messages %}
        {%- if loop.first %}{% continue %}{% endif %}
        {% set ns = namespace(n=loop.index) %}
  {{ message | tojson }} {{ message | tojson(indent=2) }}
  {{ {'b': '<é>', 'a': [1]} | tojson(sort_keys=true) }}
        {% if loop.index > 1 %}{% break %}{% endif %}
    {% endfor %}
{{ messages | map(attribute='role') | join(', ') }} {{ 'a\\nb' | indent(3) }}
{{ '%s-%d' % ('x', 3) }} {{ '{:>4}'.format('y') }} {{ 'ab' * 2 }} {{ 7 // 2 ** 2 }}
{{ messages[::-1] | length }} {{ ([1] + [2]) | list }} {{ {'k': (1, 2)}.items() | list }}
"""
    found = render_jinja_template([MESSAGES], chat_template=source)
    assert [ChatTemplate(source, "tried").render(MESSAGES)] == list(found[0])


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_a_thought_has_the_names_that_transformers_gives_it(name: str) -> None:
    source = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}"
    message = {"role": "assistant", "content": "3", name: "1"}
    assert ChatTemplate(source, "tried").render([message]) == "11"


def test_what_a_template_raises_is_the_reason() -> None:
    template = ChatTemplate("{{ raise_exception('No system role.') }}", "tried")
    with pytest.raises(TemplateRefusal, match=r"^No system role$"):
        template.render(MESSAGES)


def test_blocks_of_generation_are_found() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}."
        "{% endgeneration %}{% else %}Q:{{ m.content }}{% endif %}{% endfor %}"
    )
    template = ChatTemplate(source, "tried")
    assert template.marks_generation
    assert template.render_marked(MESSAGES * 2) == ("Q:hiA:yo.Q:hiA:yo.", [(6, 9), (15, 18)])
    assert template.render(MESSAGES) == "Q:hiA:yo."


def test_a_block_that_is_filtered_has_no_place() -> None:
    source = "{% filter upper %}x{% generation %}yo{% endgeneration %}{% endfilter %}"
    with pytest.raises(TemplateRefusal, match="in macros or filtered"):
        ChatTemplate(source, "tried").render_marked(MESSAGES)


def test_what_is_no_template_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"\(mine\) is not a valid Jinja template: line 2: .*\n.*chatml"
    ):
        ChatTemplate("a\n{% if %}", "mine")


def test_a_template_can_be_handed_to_another_process() -> None:
    template = ChatTemplate("{{ messages[0].content }}", "tried", {"eos_token": "</s>"})
    assert pickle.loads(pickle.dumps(template)).render(MESSAGES) == "hi"  # noqa: S301


class TestBesideATokenizer:
    def test_the_file_goes_before_the_settings(self, tmp_path: Path) -> None:
        assert template_of(tmp_path) is None
        settings = tmp_path / "tokenizer_config.json"
        settings.write_text("{}")
        assert template_of(tmp_path) is None
        settings.write_text(json.dumps({"chat_template": "in settings"}))
        assert template_of(tmp_path) == "in settings"
        (tmp_path / "chat_template.jinja").write_text("in a file\n")
        assert template_of(tmp_path) == "in a file\n"

    def test_of_several_the_one_for_tools_is_taken_where_there_are_tools(
        self, tmp_path: Path
    ) -> None:
        named = {"default": "\n no tools{% if true %}\n{% endif %}\n", "tool_use": "  tools\n"}
        entries = [{"name": name, "template": text} for name, text in named.items()]
        settings = tmp_path / "tokenizer_config.json"
        settings.write_text(json.dumps({"chat_template": entries}))
        template = ChatTemplate(template_of(tmp_path), "tried")
        for name, tools in (("default", None), ("tool_use", [TOOL])):
            expected = ChatTemplate(named[name], name).render(MESSAGES, tools=tools)
            assert template.render(MESSAGES, tools=tools) == expected
        settings.write_text(json.dumps({"chat_template": entries[:1]}))
        assert template_of(tmp_path) == named["default"]

    @pytest.mark.parametrize(
        "settings",
        ["[", "[]", "[" * 100_000, '{"chat_template": [1]}', '{"chat_template": [{"name": "x"}]}'],
    )
    def test_settings_that_cannot_be_read_are_refused(self, tmp_path: Path, settings: str) -> None:
        (tmp_path / "tokenizer_config.json").write_text(settings)
        with pytest.raises(UserError, match=r"tokenizer_config.json is damaged: chat_template"):
            template_of(tmp_path)


def test_a_file_that_is_no_template_is_refused_unread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(UserError, match=f"{file} is not a regular file"):
            read_template(file)
    (tmp_path / "long").write_text("x" * 2**23)
    with pytest.raises(UserError, match="more than 4,194,304 characters"):
        read_template(tmp_path / "long")


_TYPED = "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}"
PARTS = {
    "parts alone": _TYPED,
    "texts and parts": "{% if m.content is string %}{{ m.content }}{% else %}"
    + _TYPED
    + "{% endif %}",
    "texts alone": "{{ m.content }}",
    "texts, and a type": "{{ m.content }}{% if m.type %}!{% endif %}",
}


@pytest.mark.parametrize("name", PARTS)
def test_a_text_is_written_where_a_template_takes_parts_alone(name: str) -> None:
    source = f"{{% for m in messages %}}{{{{ m.role }}}}: {PARTS[name]};{{% endfor %}}"
    found = ChatTemplate(source, "tried").render(
        [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    )
    assert found == "user: 1+1?;assistant: 2;"
