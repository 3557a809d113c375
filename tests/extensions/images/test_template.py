"""Templates that take content parts, or texts: images become the characters of their places."""

import pytest
from seeing_models import FIRST, MARKS, template_of

from ftkit.data.records.media import place_of
from ftkit.extensions.images.template import MediaTemplate
from ftkit.models.chat_templates.template import ChatTemplate, TemplateRefusal, text_template

A, B = place_of(0), place_of(1)
_CHAT = [
    {"role": "user", "content": f"{A}what {B}is it"},
    {"role": "assistant", "content": "red"},
]


@pytest.mark.parametrize("kind", FIRST)
def test_a_template_of_parts_writes_places_where_its_marks_were(kind: str) -> None:
    mark = MARKS[kind]
    template = MediaTemplate.of(ChatTemplate(template_of(kind), kind), mark, "image")
    found = template.render(_CHAT)
    parts = [
        {"role": "user", "content": [
            {"type": "image"}, {"type": "text", "text": "what "},
            {"type": "image"}, {"type": "text", "text": "is it"},
        ]},
        {"role": "assistant", "content": [{"type": "text", "text": "red"}]},
    ]  # fmt: skip
    theirs = ChatTemplate(template_of(kind), kind).render(parts)
    assert found.replace(A, mark).replace(B, mark) == theirs
    assert found.index(A) < found.index(B)


@pytest.mark.parametrize("kind", FIRST)
def test_texts_alone_are_written_as_before(kind: str) -> None:
    template = MediaTemplate.of(ChatTemplate(template_of(kind), kind), MARKS[kind], "image")
    assert "what is it" in template.render([{"role": "user", "content": "what is it"}])


def test_a_template_of_texts_keeps_places() -> None:
    template = MediaTemplate.of(text_template("chatml", {}), "<image>", "image")
    assert template.takes == "texts"
    assert f"{A}what {B}is it" in template.render(_CHAT)


def test_a_mark_in_a_text_is_no_image() -> None:
    template = MediaTemplate.of(
        ChatTemplate(template_of("llava"), "llava"), MARKS["llava"], "image"
    )
    with pytest.raises(TemplateRefusal, match="2 images for 1"):
        template.render([{"role": "user", "content": f"{A}and <image>\n"}])


def test_marked_spans_move_with_the_places() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}"
        "{% if p.type == 'image' %}<|image|>{% else %}{{ p.text }}{% endif %}{% endfor %}: "
        "{% else %}{% generation %}{{ m.content[0].text }};{% endgeneration %}{% endif %}"
        "{% endfor %}"
    )
    template = MediaTemplate.of(ChatTemplate(source, "marked"), "<|image|>", "image")
    text, spans = template.render_marked(_CHAT)
    assert [text[first:end] for first, end in spans] == ["red;"]
