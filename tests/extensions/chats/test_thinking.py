"""What is learned where a template's prompt opens or closes a thought."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chats import TOOLS, random_conversation, said, write_chat_tokenizer
from thinking_templates import THINKERS
from tokenizers import Tokenizer as Processor

from ftkit.data.records.record import Record
from ftkit.data.rendering import Rendering
from ftkit.evaluation.prompting import prompt_text, question_of
from ftkit.extensions.chats.rendering import ChatRenderer
from ftkit.extensions.chats.turns import CHANGED, OTHER_PROMPT
from ftkit.models.chat_templates.template import ChatTemplate
from ftkit.models.pretrained.tokenizer import Tokenizer

QUESTION, ANSWER = said("user", "1+1?"), said("assistant", "2")
THOUGHT = {"reasoning_content": "one more"}
TURNS = [
    said("system", "Be brief."),
    QUESTION,
    ANSWER | THOUGHT,
    said("user", "So?"),
    ANSWER | THOUGHT,
]
# Built as the prompt of a thought, but without any sign of where one ends.
UNTOLD = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><muse>' }}{% endif %}"
)
ALWAYS_PROMPTS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{{ '<|assistant|><think></think>' }}"
)


def make_tokenizer(directory: Path, *, merged: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer with the tokens of all templates, and others for texts across their borders."""
    processor = Processor.from_file(str(write_chat_tokenizer(directory) / "tokenizer.json"))
    tokens = dict.fromkeys(token for one in THINKERS.values() for token in one.tokens)
    processor.add_special_tokens([*tokens])
    processor.add_tokens([*merged])
    processor.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("chats"))


@pytest.fixture(scope="module", params=[(), ("\n\n", "\n1")], ids=["tokens apart", "merged"])
def any_tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("chats"), merged=request.param)


def template(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    source = THINKERS[name].source if name in THINKERS else name
    return ChatTemplate(source, name, tokenizer.special_tokens)


def rendering(name: str, tokenizer: Tokenizer, record: Record, **options: Any) -> Rendering:
    renderer = ChatRenderer(
        tokenizer, template(name, tokenizer), **{"train_on": "assistant"} | options
    )
    (made,) = renderer.render([record])
    return made


def learned(name: str, tokenizer: Tokenizer, record: Record, **options: Any) -> list[str] | str:
    """The text that carries loss in each sample, or why there is none."""
    made = rendering(name, tokenizer, record, **options)
    decode = tokenizer.processor.decode
    texts = []
    for sample in made.samples:
        ((first, end),) = sample.trained
        texts.append(decode(sample.ids[first:end], skip_special_tokens=False))
    return made.refused or texts


@pytest.mark.parametrize("name", THINKERS)
def test_the_answer_begins_where_the_prompt_ends(name: str, tokenizer: Tokenizer) -> None:
    one = THINKERS[name]
    plain, thinking = [QUESTION, ANSWER], [QUESTION, ANSWER | THOUGHT]
    assert learned(name, tokenizer, {"messages": plain}) == [one.plain]
    assert learned(name, tokenizer, {"messages": thinking}) == [one.thinking]
    # Each turn is a sample: earlier turns are written otherwise than after their prompts.
    assert learned(name, tokenizer, {"messages": TURNS}) == [one.thinking] * 2
    assert learned(name, tokenizer, {"messages": TURNS}, train_on="last") == [one.thinking]
    texts = learned(name, tokenizer, TOOLS)
    assert texts[0] == one.call and "Sunny." in texts[1] and len(texts) == 2


@pytest.mark.parametrize("name", THINKERS)
def test_a_turn_is_learned_after_the_prompt_that_generate_sends(
    name: str, any_tokenizer: Tokenizer
) -> None:
    tokenizer = any_tokenizer
    stop_ids = ChatRenderer(tokenizer, template(name, tokenizer), train_on="last").stop_ids
    seen = 0
    for record in map(random_conversation, range(12)):
        turns = [i for i, m in enumerate(record["messages"]) if m["role"] == "assistant"]
        made = rendering(name, tokenizer, record)
        spans = [(sample, span) for sample in made.samples for span in sample.trained]
        assert len(spans) == len(turns), made.refused
        for index, (sample, (first, end)) in zip(turns, spans, strict=True):
            question = question_of(record | {"messages": record["messages"][: index + 1]})
            prompt = prompt_text(question, template(name, tokenizer))
            assert sample.ids[:first] == tokenizer.encode_rendered(prompt).ids
            answer = tokenizer.processor.decode(sample.ids[first:end], skip_special_tokens=False)
            assert record["messages"][index]["content"].strip() in answer
            # Nothing follows the token that ends the turn.
            assert not tokenizer.processor.decode(
                sample.ids[end:], skip_special_tokens=False
            ).strip()
            assert sample.ids[end - 1] in stop_ids or name == "glm 4.7"
            seen += 1
    assert seen > 20


def test_a_thought_that_stands_in_the_text_is_written_after_the_prompt(
    tokenizer: Tokenizer,
) -> None:
    for name, one in THINKERS.items():
        answer = said("assistant", "<think>\none more\n</think>\n\n2")
        found = learned(name, tokenizer, {"messages": [QUESTION, answer]})
        assert found == [one.thinking], name


@pytest.mark.parametrize("name", ["gemma 4", "deepseek v3.2", "qwq"])
def test_a_thought_that_the_prompt_closes_is_left_out_and_counted(
    name: str, tokenizer: Tokenizer
) -> None:
    assert rendering(name, tokenizer, {"messages": [QUESTION, ANSWER | THOUGHT]}).omits_reasoning
    assert not rendering(name, tokenizer, {"messages": [QUESTION, ANSWER]}).omits_reasoning


def test_one_answer_is_not_split_but_several_are(tokenizer: Tokenizer) -> None:
    alone = {"messages": [QUESTION, ANSWER]}
    name = "minimax m2"
    assert learned(name, tokenizer, alone, reasoning="refuse") == [THINKERS[name].plain]
    assert learned(name, tokenizer, {"messages": TURNS}, reasoning="refuse") == CHANGED


def test_marks_that_lie_in_a_turn_mark_all_that_follows_its_prompt(tokenizer: Tokenizer) -> None:
    for name, one in THINKERS.items():
        marked = one.source.replace("{{ text }}", "{% generation %}{{ text }}{% endgeneration %}")
        if marked != one.source:
            source = ChatTemplate(marked, name, tokenizer.special_tokens)
            renderer = ChatRenderer(tokenizer, source, train_on="assistant")
            (made,) = renderer.render([{"messages": [QUESTION, ANSWER]}])
            (sample,) = made.samples
            ((first, end),) = sample.trained
            text = tokenizer.processor.decode(sample.ids[first:end], skip_special_tokens=False)
            assert text.strip() == one.plain.strip()


@pytest.mark.parametrize("source", [UNTOLD, ALWAYS_PROMPTS])
def test_what_cannot_be_told_is_refused(source: str, tokenizer: Tokenizer) -> None:
    found = learned(source, tokenizer, {"messages": [QUESTION, ANSWER]})
    assert isinstance(found, str) and found.startswith(OTHER_PROMPT)


def test_a_system_message_that_only_stands_in_an_open_question_is_learned_from(
    tokenizer: Tokenizer,
) -> None:
    """As Mistral's do it."""
    source = (
        "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}{{ '[INST] ' }}"
        "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}"
        "{% endif %}{{ m.content + '[/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}"
        "{% endif %}{% endfor %}"
    )
    made = rendering(source, tokenizer, {"messages": TURNS})
    assert learned(source, tokenizer, {"messages": TURNS}) == [" 2</s>"] * 2
    texts = [tokenizer.processor.decode(sample.ids) for sample in made.samples]
    assert [text.count("Be brief.") for text in texts] == [1, 1]
