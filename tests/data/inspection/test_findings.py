"""Each finding is raised by the data that ruin runs, by no others, and its advice removes it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chats import TOOLS, write_chat_tokenizer
from looks import chats, kinds, look, make_settings, questions, write_records
from messages import says

from ftkit.data.inspection.command import inspect_data
from ftkit.data.inspection.findings import REPORTED_BY_COUNTS
from ftkit.data.inspection.inspection import Finding, FindingKind, Inspection
from ftkit.recipe.parsing import Override


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_settings(tmp_path_factory.mktemp("model"))


def only(seen: Inspection, kind: FindingKind) -> Finding:
    (found,) = [finding for finding in seen.findings if finding.kind == kind]
    return found


def advised(finding: Finding) -> list[Override]:
    """The keys that its advice names, with their values."""
    found = re.findall(r"--(data\.\S+|train\.\S+) (\w+)", finding.advice)
    return [(key, value) for key, value in found]


def look_again(model: Path, data: Path, finding: Finding, **keys: Any) -> Inspection:
    """With what a finding advises."""
    changes = {key.replace(".", "__"): value for key, value in advised(finding)}
    assert changes, finding.advice
    return look(model, data, **keys | changes)


def test_nothing_is_found_in_good_data(model: Path, tmp_path: Path) -> None:
    data = write_records(tmp_path / "data.jsonl", questions(60))
    assert look(model, data).findings == []


# --- no end of turn -------------------------------------------------------------------------------


def test_answers_may_bring_their_own_end(model: Path, tmp_path: Path) -> None:
    records = questions(60)
    for record in records[::2]:
        record["output"] += "</s>"
    assert kinds(look(model, write_records(tmp_path / "data.jsonl", records))) == set()


CUT_SHORT = """{%- for message in messages -%}
<s>{{ message.role }}
{% if message.role == 'assistant' -%}
{% generation %}{{ message.content }}{% endgeneration %}</s>
{%- else %}{{ message.content }}</s>{% endif %}
{% endfor -%}"""


@pytest.mark.extensions
def test_a_template_that_marks_answers_without_their_end_teaches_no_end(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.jinja").write_text(CUT_SHORT)
    data = write_records(tmp_path / "data.jsonl", chats(40))
    template = str(tmp_path / "mine.jinja")
    found = only(look(model, data, data__chat_template=template), "no_end_of_turn")
    assert says(found.advice, "{% generation %}")
    assert kinds(look_again(model, data, found)) == set()


@pytest.mark.extensions
def test_an_end_outside_the_vocabulary_ends_nothing(model: Path, tmp_path: Path) -> None:
    """<|im_end|> is some letters for a model that does not have it."""
    data = write_records(tmp_path / "data.jsonl", chats(40))
    found = only(look(model, data, data__chat_template="chatml"), "no_end_of_turn")
    assert kinds(look_again(model, data, found)) == set()


# --- where prompts end ----------------------------------------------------------------------------


@pytest.mark.extensions
@pytest.mark.parametrize("end", [" ", ""])
def test_a_prompt_that_ends_in_a_space_is_a_finding(model: Path, tmp_path: Path, end: str) -> None:
    template = (
        "{% for m in messages %}{{ m.role + ':" + end + "' + m.content + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:" + end + "' }}{% endif %}"
    )
    records = [
        {"messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "red"}]}
        for i in range(40)
    ]
    data = write_records(tmp_path / "data.jsonl", records)
    seen = look(model, data, data__chat_template=template)
    assert ("prompt_divided" in kinds(seen)) is bool(end)
    if end:
        found = only(seen, "prompt_divided")
        assert says(found.text, "38 of 38 records ... apart, as at inference")
        assert says(found.advice, "end in a space ... template")


# --- BOS twice ------------------------------------------------------------------------------------


def test_bos_in_a_record_is_one_too_many(model: Path, tmp_path: Path) -> None:
    records = [{"instruction": f"<s><s>{i}", "output": f"red {i}"} for i in range(40)]
    data = write_records(tmp_path / "data.jsonl", records)
    style = {"data__prompt_style": "litgpt.prompts.Default"}
    found = only(look(model, data, **style), "bos_twice")
    assert says(found.text, "38 of 38 ... <s> twice")
    records = [record | {"instruction": record["instruction"][6:]} for record in records]
    good = write_records(tmp_path / "good.jsonl", records)
    assert kinds(look(model, good, **style)) == set()


# --- nothing trained ------------------------------------------------------------------------------


def test_records_without_an_answer_are_counted_with_their_reason(
    model: Path, tmp_path: Path
) -> None:
    records = questions(60)
    for i in range(0, 60, 3):
        records[i]["output"] = " "
    seen = look(model, write_records(tmp_path / "data.jsonl", records), data__seed=1)
    train = seen.sources[0].train
    (left_out,) = train.left_out
    assert left_out.reason == "no output" and left_out.records == train.records - train.used
    assert '"output": " "' in left_out.example
    found = only(seen, "nothing_trained")
    text = f"{left_out.records} of {train.records} records are left out"
    assert text in found.text


def test_a_few_records_without_an_answer_raise_no_finding(model: Path, tmp_path: Path) -> None:
    records = questions(300)
    records[7]["output"] = ""
    records[8]["output"] = ""
    assert kinds(look(model, write_records(tmp_path / "data.jsonl", records))) == set()


def test_answers_beyond_the_limit_suggest_a_limit_that_holds_them(
    model: Path, tmp_path: Path
) -> None:
    records = questions(40)
    for record in records[::2]:
        record["instruction"] += " red" * 60
    data = write_records(tmp_path / "data.jsonl", records)
    keys = {"train__max_seq_length": 130, "data__mask_prompt": True}
    found = only(look(model, data, **keys), "nothing_trained")
    again = look_again(model, data, found, **keys)
    assert kinds(again) == set()
    assert again.sources[0].train.left_out == []


@pytest.mark.extensions
def test_a_refusal_of_a_template_is_quoted_with_a_template_that_works(
    model: Path, tmp_path: Path
) -> None:
    records = chats(60)
    for record in records[::4]:
        record["messages"].insert(0, {"role": "user", "content": "Hello."})
    data = write_records(tmp_path / "data.jsonl", records)
    found = only(look(model, data, data__chat_template="gemma"), "nothing_trained")
    assert says(found.text, "gemma ... user and assistant by turns")
    assert kinds(look_again(model, data, found)) == set()


def test_answers_beyond_the_context_of_the_model_need_shorter_records(
    model: Path, tmp_path: Path
) -> None:
    records = questions(40)
    for record in records[::2]:
        record["instruction"] += " red" * 300
    data = write_records(tmp_path / "data.jsonl", records)
    found = only(look(model, data, data__mask_prompt=True), "nothing_trained")
    assert says(found.advice, "256 ... shorten")


# --- tools and reasoning --------------------------------------------------------------------------

PLAIN = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokenizer has the tokens of chats, and its own template leaves out tools and thoughts."""
    directory = make_settings(
        tmp_path_factory.mktemp("chat"), eos_token_id=[1, 3], max_position_embeddings=1024
    )
    write_chat_tokenizer(directory, chat_template=PLAIN)
    return directory


def with_tools(count: int) -> list[dict[str, Any]]:
    """Conversations, each fourth of which has tools."""
    records = chats(count)
    for i in range(0, count, 4):
        records[i] = json.loads(json.dumps(TOOLS).replace("Bonn", f"No. {i}"))
    return records


def with_reasoning(count: int, *, turn: int) -> list[dict[str, Any]]:
    """Conversations, one turn of which has reasoning."""
    records = chats(count)
    for i, record in enumerate(records):
        record["messages"][turn]["reasoning_content"] = f"{i} it is"
    return records


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("kind", "records"),
    [("tools_dropped", with_tools(60)), ("reasoning_dropped", with_reasoning(60, turn=3))],
)
def test_a_template_that_leaves_something_out_suggests_one_that_does_not(
    kind: FindingKind, records: list[dict[str, Any]], chat_model: Path, tmp_path: Path
) -> None:
    data = write_records(tmp_path / "data.jsonl", records)
    found = only(look(chat_model, data), kind)
    assert found.severity == "warning" and found.kind not in REPORTED_BY_COUNTS
    assert advised(found) == [("data.chat_template", "qwen")]
    again = look_again(chat_model, data, found)
    assert kinds(again) == {"template_not_used"}
    assert again.sources[0].train.used == again.sources[0].train.records


@pytest.mark.extensions
def test_records_with_reasoning_that_is_left_out_are_counted(
    chat_model: Path, tmp_path: Path
) -> None:
    records = [*with_reasoning(10, turn=1), *chats(60)[10:]]
    seen = look(chat_model, write_records(tmp_path / "data.jsonl", records), data__seed=3)
    found = re.search(r"in (\d+) of (\d+) records", only(seen, "reasoning_dropped").text)
    assert found is not None and 7 <= int(found[1]) <= 10 and int(found[2]) == 57


@pytest.mark.extensions
def test_reasoning_of_turns_that_are_not_trained_may_be_left_out(
    chat_model: Path, tmp_path: Path
) -> None:
    data = write_records(tmp_path / "data.jsonl", with_reasoning(60, turn=1))
    assert kinds(look(chat_model, data, data__train_on="last")) == set()
    qwen = {"data__chat_template": "qwen"}
    assert kinds(look(chat_model, data, **qwen)) == {"template_not_used"}


# --- many cut -------------------------------------------------------------------------------------


def test_many_samples_cut_off_suggest_a_limit_that_cuts_none(model: Path, tmp_path: Path) -> None:
    records = questions(40)
    for record in records[::2]:
        record["output"] += " blue" * 60
    data = write_records(tmp_path / "data.jsonl", records)
    seen = look(model, data, train__max_seq_length=150)
    found = only(seen, "many_cut")
    assert seen.lengths.over == seen.sources[0].train.truncated > 0
    again = look_again(model, data, found, train__max_seq_length=150)
    assert kinds(again) == set() and again.lengths.over == 0


def test_samples_longer_than_the_model_takes_are_better_dropped(
    model: Path, tmp_path: Path
) -> None:
    records = questions(40)
    for record in records[::2]:
        record["output"] += " blue" * 300
    data = write_records(tmp_path / "data.jsonl", records)
    found = only(look(model, data), "many_cut")
    assert advised(found) == [("data.overlong", "drop")]
    again = look_again(model, data, found)
    assert again.sources[0].train.truncated == 0
    assert "takes 256 tokens at most" in only(again, "many_cut").advice


def test_a_few_samples_cut_off_raise_no_finding(model: Path, tmp_path: Path) -> None:
    records = questions(100)
    records[50]["output"] += " blue" * 300
    assert kinds(look(model, write_records(tmp_path / "data.jsonl", records))) == set()


# --- train in validation --------------------------------------------------------------------------


def test_duplicates_that_fall_into_both_splits_are_found(model: Path, tmp_path: Path) -> None:
    records = questions(30) * 2
    seen = look(
        model, write_records(tmp_path / "data.jsonl", records), data__val_split_fraction=0.3
    )
    found = only(seen, "train_in_validation")
    shared = seen.duplicates.val_in_train
    assert found.text.startswith(f"{shared} of 18 validation samples")
    assert seen.duplicates.val_in_train_examples[0].startswith("<s>Below is an instruction")
    assert "What is number" in seen.duplicates.val_in_train_examples[0]
    assert "val_split_fraction" not in found.advice
    assert says(found.advice, "--data.drop_equal true")
    assert look_again(model, tmp_path / "data.jsonl", found).duplicates.val_in_train == 0


def test_duplicates_that_are_kept_in_spite_of_the_setting_get_other_advice(
    model: Path, tmp_path: Path
) -> None:
    records = [{"instruction": "red", "output": f"{'sun ' * 300}{i}"} for i in range(40)]
    data = write_records(tmp_path / "data.jsonl", records)
    seen = look(model, data, data__drop_equal=True)
    found = only(seen, "train_in_validation")
    assert says(found.advice, "data.drop_equal is true ... train.max_seq_length")


def test_validation_on_training_data_is_found(model: Path, tmp_path: Path) -> None:
    data = write_records(tmp_path / "data.jsonl", questions(30))
    found = only(look(model, data, data__val_split_fraction=0), "train_in_validation")
    assert says(found.advice, "is 0 ... data.val_split_fraction 0.05")
    assert "drop_equal" not in found.advice
    never = {"eval__interval": 0, "eval__final_validation": False}
    assert kinds(look(model, data, data__val_split_fraction=0, **never)) == set()


def test_duplicates_within_train_are_counted_without_a_finding(model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    write_records(directory / "train.jsonl", questions(30) * 2)
    write_records(directory / "val.jsonl", questions(40)[30:])
    seen = look(model, directory)
    assert (seen.duplicates.train, seen.duplicates.val_in_train) == (30, 0)
    assert kinds(seen) == set()


# --- system messages ------------------------------------------------------------------------------


@pytest.mark.extensions
def test_a_style_without_a_place_for_system_messages_drops_them(
    model: Path, tmp_path: Path
) -> None:
    records = [record | {"sys_prompt": "Answer in rhyme."} for record in questions(40)]
    data = write_records(tmp_path / "data.jsonl", records)
    found = only(look(model, data, data__prompt_style="phi-1"), "system_message_dropped")
    assert "2 of 2" in found.text and "system messages" in found.text
    again = look_again(model, data, found)
    assert kinds(again) == set() == kinds(look(model, data, data__prompt_style="qwen2.5"))


@pytest.mark.extensions
def test_a_template_that_drops_system_messages_suggests_one_that_does_not(
    model: Path, tmp_path: Path
) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text(
        "{%- for message in messages if message.role != 'system' -%}"
        "{{ message.role }}: {{ message.content }}</s>\n{% endfor -%}"
        "{%- if add_generation_prompt %}assistant: {% endif -%}"
    )
    data = write_records(tmp_path / "data.jsonl", chats(60, system="Answer in rhyme."))
    found = only(look(model, data, data__chat_template=str(template)), "system_message_dropped")
    assert "3 of 3" in found.text and "system messages" in found.text
    assert kinds(look_again(model, data, found)) == set()
    without = write_records(tmp_path / "without.jsonl", chats(60))
    assert kinds(look(model, without, data__chat_template=str(template))) == set()


# --- templates that are not used ------------------------------------------------------------------

OWN = """{{- bos_token }}{%- for message in messages -%}
[{{ message.role }}] {{ message.content }}{{ eos_token }}
{% endfor -%}{%- if add_generation_prompt %}[assistant] {% endif -%}"""


@pytest.mark.extensions
def test_an_unused_chat_template_of_the_base_model_is_named_with_its_key(
    tmp_path: Path,
) -> None:
    model = make_settings(tmp_path / "model")
    (model / "chat_template.jinja").write_text(OWN)
    instructions = write_records(tmp_path / "instructions.jsonl", questions(40))
    conversations = write_records(tmp_path / "conversations.jsonl", chats(40))
    found = only(look(model, instructions), "template_not_used")
    assert found.severity == "notice" and says(found.text, "prompt style alpaca")
    assert advised(found) == [("data.chat_template", "tokenizer")]
    assert kinds(look_again(model, instructions, found)) == set()
    found = only(look(model, conversations, data__chat_template="zephyr"), "template_not_used")
    assert kinds(look_again(model, conversations, found)) == set()
    assert kinds(look(model, conversations)) == set()


# --- ends that are not known ----------------------------------------------------------------------


def test_an_end_token_unknown_to_the_base_model_is_a_finding(tmp_path: Path) -> None:
    model = make_settings(tmp_path / "model", eos_token_id=7)
    data = write_records(tmp_path / "data.jsonl", questions(40))
    found = only(look(model, data), "end_of_turn_not_known")
    assert found.severity == "notice"
    assert "end with </s> (1)" in found.text and found.advice.endswith("need eos_token_id 1.")
    (model / "generation_config.json").write_text('{"eos_token_id": [7, 1]}')
    assert kinds(look(model, data)) == set()


def test_each_source_is_named_where_there_are_several(model: Path, tmp_path: Path) -> None:
    write_records(tmp_path / "good.jsonl", questions(40))
    bad = questions(90)[50:]
    bad[3]["output"] = ""
    write_records(tmp_path / "bad.jsonl", bad)
    sources = [{"path": str(tmp_path / name)} for name in ("good.jsonl", "bad.jsonl")]
    overrides = [("checkpoint_dir", str(model)), ("data", "JSON"), ("data.sources", str(sources))]
    seen = inspect_data([], overrides, show=4, progress=lambda *_: None)
    assert [source.train.records for source in seen.sources] == [38, 38]
    assert says(only(seen, "nothing_trained").text, "records of bad ... left out")
    assert {sample.source for sample in seen.samples} == {source.name for source in seen.sources}
    assert [sample.number for sample in seen.samples] == [0, 19, 0, 18]


def pairs(count: int, equal: int, system: str = "") -> list[dict[str, Any]]:
    """Pairs of conversations, some of which have the same answer twice."""
    before = [{"role": "system", "content": system}] if system else []

    def said(i: int, colour: str) -> list[dict[str, str]]:
        return [
            *before,
            {"role": "user", "content": f"What is number {i}?"},
            {"role": "assistant", "content": f"Number {i} is {colour}."},
        ]

    return [
        {"chosen": said(i, "red"), "rejected": said(i, "red" if i < equal else "blue")}
        for i in range(count)
    ]


@pytest.mark.extensions
def test_pairs_with_the_same_answer_twice_are_counted(model: Path, tmp_path: Path) -> None:
    data = write_records(tmp_path / "pairs.jsonl", pairs(40, equal=3))
    keys = {"objective": "orpo", "data__chat_template": "zephyr", "data__val_split_fraction": 0.5}
    seen = look(model, data, **keys)
    found = only(seen, "equal_answers")
    assert says(found.text, "of 20 examined pairs") and says(found.advice, "Remove them")
    assert not look(model, write_records(data, pairs(40, equal=0)), **keys).findings


@pytest.mark.extensions
@pytest.mark.parametrize(("labels", "remedy"), [([True], "false"), ([False], "true"), ([1, 0], "")])
def test_answers_with_one_label_alone_are_a_finding(
    model: Path, tmp_path: Path, labels: list[bool], remedy: str
) -> None:
    rows = [row | {"label": labels[i % len(labels)]} for i, row in enumerate(questions(40))]
    seen = look(model, write_records(tmp_path / "labelled.jsonl", rows), objective="kto", show=1)
    assert kinds(seen) == ({"one_label"} if remedy else set())
    if remedy:
        assert says(only(seen, "one_label").advice, f"label is {remedy}")
    numbers = seen.sources[0].train
    assert numbers.labels == {
        "false": {"desirable": 38},
        "true": {"undesirable": 38},
    }.get(remedy, numbers.labels)
    shown = seen.samples[0]
    number = re.search(r"number (\d+)", "".join(shown.texts))
    assert number is not None
    label = labels[int(number[1]) % len(labels)]
    assert shown.label == ("desirable" if label else "undesirable")


@pytest.mark.extensions
def test_system_messages_of_pairs_are_looked_for(model: Path, tmp_path: Path) -> None:
    data = write_records(tmp_path / "pairs.jsonl", pairs(40, equal=0, system="Be brief."))
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    seen = look(model, data, objective="orpo", data__chat_template=str(template))
    assert says(only(seen, "system_message_dropped").text, "drops")
