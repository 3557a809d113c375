"""Where prompts end and answers begin and end: by tokens, as the model gets them."""

from pathlib import Path
from typing import Any

import pytest
from chats import said, write_chat_tokenizer
from tokenizer_kinds import KINDS, RULES, write_tokenizer_of
from transformers import AutoTokenizer

from ftkit.data.prepare import make_renderer
from ftkit.data.records.record import Record, Shape
from ftkit.data.rendering import Rendered, Renderer
from ftkit.data.spec import Part, Rules
from ftkit.models.chat_templates.prompt_styles import resolve_prompt_style
from ftkit.models.pretrained.tokenizer import Tokenizer

ENDS = ["", " ", "  ", "\n", "\n\n", " \n"]
"""Of generation prompts."""
TALK = [
    said("user", "the cat"),
    said("assistant", "red"),
    said("user", "a dog"),
    said("assistant", "\nblue dog\n"),
    said("user", "the"),
    said("assistant", " cat"),
]


def template(end: str) -> str:
    return (
        "{% for m in messages %}{% if m.role == 'user' %}{{ 'User: ' + m.content + '\n' }}"
        "{% else %}{{ 'Assistant:" + end.replace("\n", "\\n") + "' + m.content + '</s>\n' }}"
        "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:" + end.replace("\n", "\\n") + "' }}"
        "{% endif %}"
    )


def renderer(tokenizer: Tokenizer, shape: Shape, **rules: Any) -> Renderer:
    part = Part(name="mine", shape=shape, rules=Rules(**rules), train=[], val=[])
    return make_renderer(part, tokenizer)


def samples_of(made: Renderer, record: Record) -> tuple[Rendered, ...]:
    (rendering,) = made.render([record])
    assert rendering.refused is None
    return rendering.samples


def text(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(tokenizer.processor.decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize("end", ENDS, ids=repr)
@pytest.mark.parametrize("kind", KINDS)
def test_each_turn_is_learned_behind_the_tokens_of_its_prompt(
    kind: str, end: str, tmp_path: Path
) -> None:
    tokenizer = write_tokenizer_of(tmp_path, kind)
    made = renderer(tokenizer, "messages", chat_template=template(end), train_on="assistant")
    samples = samples_of(made, {"messages": TALK})
    trained = [(sample, span) for sample in samples for span in sample.trained]
    assert len(trained) == 3
    for turn in (1, 3, 5):
        asked = made.template.render(TALK[:turn], add_generation_prompt=True)
        prompt = tokenizer.encode_rendered(asked).ids
        ((sample, (first, last)),) = [
            (sample, (first, last))
            for sample, (first, last) in trained
            if first == len(prompt) and sample.ids[:first] == prompt
        ]
        assert sample.ids[last - 1] == tokenizer.eos_id
        answer = text(tokenizer, sample.ids[first:last])
        assert answer.split() == f"{TALK[turn]['content']} </s>".split() or (
            answer.replace(" ", "") == TALK[turn]["content"].replace(" ", "") + "</s>"
        )
        example = made.example({"messages": TALK[: turn + 1]})
        assert example.prompt == prompt
        assert [*example.expected, tokenizer.eos_id] == sample.ids[first:last]


@pytest.mark.parametrize("kind", ["bytes", "line breaks", "space always", "space first"])
@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_the_text_of_a_divided_sample_is_that_of_the_template(
    kind: str, train_on: Any, tmp_path: Path
) -> None:
    tokenizer = write_tokenizer_of(tmp_path, kind)
    made = renderer(tokenizer, "messages", chat_template=template(" "), train_on=train_on)
    talk = TALK[:2]
    (sample,) = samples_of(made, {"messages": talk})
    asked = made.template.render(talk[:1], add_generation_prompt=True)
    whole = tokenizer.encode_rendered(made.template.render(talk)).ids
    assert sample.ids != whole and text(tokenizer, sample.ids) == text(tokenizer, whole)
    prompt = tokenizer.encode_rendered(asked).ids
    assert sample.ids[: len(prompt)] == prompt
    first, last = sample.trained[0]
    assert first == (0 if train_on == "all" else len(prompt))
    assert text(tokenizer, sample.ids[len(prompt) : last]).strip() == "red</s>"


def test_samples_whose_prompt_has_the_same_tokens_are_one(tmp_path: Path) -> None:
    tokenizer = write_tokenizer_of(tmp_path, "bytes")
    made = renderer(tokenizer, "messages", chat_template=template(""), train_on="assistant")
    (rendering,) = made.render([{"messages": TALK}])
    assert len(rendering.samples) == 1 and not rendering.is_divided
    spaced = renderer(tokenizer, "messages", chat_template=template(" "), train_on="assistant")
    (rendering,) = spaced.render([{"messages": TALK}])
    assert rendering.is_divided


@pytest.mark.parametrize("kind", ["bytes", "space first"])
def test_answers_of_pairs_and_labels_are_divided_too(kind: str, tmp_path: Path) -> None:
    tokenizer = write_tokenizer_of(tmp_path, kind)
    chosen, rejected = (
        {"messages": [said("user", "the"), said("assistant", answer)]} for answer in ("red", "cat")
    )
    rules: dict[str, Any] = {"chat_template": template(" "), "train_on": "last"}
    pairs = renderer(tokenizer, "messages", **rules, preference="pairs")
    (rendering,) = pairs.render([{"chosen": chosen, "rejected": rejected}])
    assert rendering.is_divided
    for sample, answer in zip(rendering.samples, ("red", "cat"), strict=True):
        ((first, last),) = sample.trained
        assert text(tokenizer, sample.ids[first:last]).strip() == f"{answer}</s>"
    labels = renderer(tokenizer, "messages", **rules, preference="labels")
    (rendering,) = labels.render([{**chosen, "target": [1]}])
    assert (
        rendering.samples[0].ids
        == samples_of(pairs, {"chosen": chosen, "rejected": rejected})[0].ids
    )


ANSWERS = ["red", "red</s>", "red</s></s>", "red</s>\n", "red </s>"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_ends_once_and_every_prompt_begins_as_at_inference(
    kind: str, rule: str, tmp_path: Path
) -> None:
    tokenizer = write_tokenizer_of(tmp_path, kind, rule)
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    completions = renderer(tokenizer, "completion", train_on="last")
    style = resolve_prompt_style("{instruction}")
    instructions = renderer(tokenizer, "instruction", prompt_style=style, train_on="last")
    chats = renderer(tokenizer, "messages", chat_template=template(""), train_on="last")
    for start in ("", "<s>"):
        for answer in ANSWERS:
            prompt = f"{start}the cat"
            talk = [said("user", prompt), said("assistant", answer)]
            records: dict[Renderer, Record] = {
                completions: {"prompt": prompt, "completion": answer},
                instructions: {"instruction": prompt, "output": answer},
                chats: {"messages": talk},
            }
            for made, record in records.items():
                (sample,) = samples_of(made, record)
                ((first, last),) = sample.trained
                trained = sample.ids[first:last]
                assert trained[-1] == eos and trained.count(eos) == 1
                example = made.example(record)
                assert example.prompt == sample.ids[:first]
                assert [*example.expected, eos] == trained
                asked = made.template.render(talk[:1], add_generation_prompt=True)
                assert tokenizer.encode_rendered(asked).ids == example.prompt
                source = made.template.source
                exported = theirs.apply_chat_template(
                    talk[:1], add_generation_prompt=True, chat_template=source, return_dict=False
                )
                assert exported == example.prompt
                if made is not chats:
                    begins = tokenizer.use_bos or bool(start)
                    assert example.prompt.count(bos) == (example.prompt[0] == bos) == begins


def test_an_end_before_a_marked_line_break_ends_each_answer_once(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_chat_tokenizer(tmp_path))
    source = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% generation %}"
        "{{ m.content + '<|end|>\n' }}{% endgeneration %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    made = renderer(tokenizer, "messages", chat_template=source, train_on="assistant")
    end = tokenizer.added_tokens["<|end|>"]
    assert made.stop_ids == {end, tokenizer.eos_id}
    talk = [said("user", "Hi"), said("assistant", "Red.<|end|>\n")]
    (sample,) = samples_of(made, {"messages": talk})
    ((first, last),) = sample.trained
    assert text(tokenizer, sample.ids[first:last]) == "Red.<|end|>\n"


@pytest.mark.parametrize("rule", RULES)
def test_both_answers_of_a_pair_have_an_end(rule: str, tmp_path: Path) -> None:
    tokenizer = write_tokenizer_of(tmp_path, "bytes", rule)
    pairs = renderer(tokenizer, "completion", train_on="last", preference="pairs")
    chosen, rejected = samples_of(
        pairs,
        {
            "chosen": {"prompt": "the", "completion": " red</s>"},
            "rejected": {"prompt": "the", "completion": " cat"},
        },
    )
    assert chosen.ids[-1] == rejected.ids[-1] == tokenizer.eos_id
    assert tokenizer.eos_id not in [*chosen.ids[:-1], *rejected.ids[:-1]]


@pytest.mark.parametrize("answer", ["</s>", " </s>\n", "</s></s>"])
def test_an_end_alone_is_no_answer(answer: str, tmp_path: Path) -> None:
    tokenizer = write_tokenizer_of(tmp_path, "bytes")
    (rendering,) = renderer(tokenizer, "completion", train_on="last").render(
        [{"prompt": "the", "completion": answer}]
    )
    assert rendering.refused
