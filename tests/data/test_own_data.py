"""Data of one's own: options, what becomes of each shape of record, mixtures, and evaluation."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from messages import key_words, message_of, says

from ftkit.data.prepare import make_renderer
from ftkit.data.records.keys import UnusedKeys
from ftkit.data.records.read import RecordSet
from ftkit.data.records.record import Record
from ftkit.data.records.shapes import RecordReader
from ftkit.data.sources import data_source
from ftkit.data.spec import Part
from ftkit.errors import UserError
from ftkit.models.chat_templates.prompt_styles import resolve_prompt_style
from ftkit.recipe.hubs import HUBS, HubName
from ftkit.recipe.objectives import Preference
from ftkit.recipe.parsing import read_recipe, to_yaml
from ftkit.recipe.recipe import Component

SAID = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
ROWS: dict[str, Record] = {
    "instruction": {"instruction": "a", "input": "", "output": "b"},
    "completion": {"prompt": "a", "completion": "b"},
    "messages": {"messages": SAID},
    "text": {"text": "a"},
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, row: Record, count: int = 20) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text("\n".join(json.dumps(row | {"id": i}) for i in range(count)))
    return name


def of(**options: Any) -> Component:
    return Component(class_path="ftkit.data.JSON", init_args=options)


def parts(**options: Any) -> tuple[Part, ...]:
    return tuple(part.read() for part in data_source(of(**options)).parts())


def part(**options: Any) -> Part:
    (found,) = parts(**options)
    return found


def refusal(**options: Any) -> str:
    return message_of(parts, **options)


# Shapes


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("shape", "options", "expected"),
    [
        ("instruction", {}, ("instruction", None, "all", "truncate")),
        ("instruction", {"mask_prompt": True}, ("instruction", None, "last", "truncate")),
        ("instruction", {"train_on": "last"}, ("instruction", None, "last", "truncate")),
        ("completion", {}, ("completion", None, "last", "truncate")),
        ("completion", {"train_on": "all"}, ("completion", None, "all", "truncate")),
        ("messages", {}, ("messages", "tokenizer", "assistant", "truncate")),
        (
            "messages",
            {"train_on": "last", "chat_template": "chatml", "overlong": "drop"},
            ("messages", "chatml", "last", "drop"),
        ),
        ("text", {}, ("text", None, "all", "split")),
        ("text", {"overlong": "truncate"}, ("text", None, "all", "truncate")),
        (
            "instruction",
            {"chat_template": "chatml"},
            ("messages", "chatml", "assistant", "truncate"),
        ),
        (
            "instruction",
            {"chat_template": "chatml", "mask_prompt": False},
            ("messages", "chatml", "all", "truncate"),
        ),
    ],
)  # fmt: skip
def test_what_is_trained_follows_from_the_shape_and_the_options(
    shape: str, options: dict[str, Any], expected: tuple[str, str | None, str, str]
) -> None:
    found = part(path=write("a.jsonl", ROWS[shape]), **options)
    rules = found.rules
    assert (found.shape, rules.chat_template, rules.train_on, rules.overlong) == expected
    assert (rules.prompt_style == resolve_prompt_style("alpaca")) == (found.shape == "instruction")


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("shape", "description"),
    [
        ("instruction", "20 instructions (instruction, input, output), 5"),
        ("messages", "20 conversations (messages), 5"),
        ("text", "20 documents (text), 5"),
    ],
)
def test_the_description_counts_the_records(shape: str, description: str) -> None:
    path = write("a.jsonl", ROWS[shape])
    assert says(part(path=path, val_split_fraction=0.25).description, description)


@pytest.mark.extensions
def test_unused_keys_are_named() -> None:
    found = part(path=write("a.jsonl", ROWS["messages"] | {"source": "web", "score": None}))
    assert found.unused == UnusedKeys(names=("source", "id"))
    assert says(found.summary, "not used: source, id")
    write("b.jsonl", ROWS["text"])
    assert part(path="b.jsonl", columns={"text": "text"}).summary.endswith("; not used: id")


@pytest.mark.extensions
def test_a_history_in_a_prompt_style_is_a_conversation() -> None:
    history = {"history": [["q", "r"]], "input": "c", "sys_prompt": "d"}
    found = part(path=write("a.jsonl", ROWS["instruction"] | history))
    assert (found.shape, found.rules.chat_template, found.rules.train_on) == (
        "messages",
        None,
        "all",
    )
    assert found.rules.prompt_style == resolve_prompt_style("alpaca")
    assert [message["content"] for message in found.train[0]["messages"]] == list("dqrab")
    assert found.train[0]["messages"][3]["input"] == "c"


@pytest.mark.extensions
def test_a_directory_says_how_many_more_are_validated_on() -> None:
    write("d/train.jsonl", ROWS["messages"], 3)
    write("d/val.jsonl", ROWS["messages"], 2)
    found = part(path="d")
    assert says(found.description, "3 conversations (messages), 2")
    assert (len(found.train), len(found.val)) == (3, 2)


def test_without_a_share_to_hold_out_every_record_is_trained_and_validated_on() -> None:
    found = part(path=write("d.jsonl", ROWS["instruction"]), val_split_fraction=0)
    assert len(found.train) == 20 and list(found.val) == list(found.train)
    assert says(found.description, "20 ... also those to validate on")


@pytest.mark.extensions
def test_a_chat_template_makes_conversations_of_instructions() -> None:
    row = {"instruction": "Add.", "input": "1 and 2", "output": "3", "sys_prompt": "Be terse."}
    found = part(path=write("a.jsonl", row), chat_template="chatml")
    assert found.train[0] == {
        "messages": [
            {"role": "system", "content": "Be terse."},
            {"role": "user", "content": "Add.\n\n1 and 2"},
            {"role": "assistant", "content": "3"},
        ]
    }


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("shape", "options", "reason", "works"),
    [
        ("messages", {"mask_prompt": True}, "data.mask_prompt is True, but", "Set train_on"),
        ("messages", {"prompt_style": "phi-2"}, "data.prompt_style is phi-2", "chat_template"),
        ("completion", {"prompt_style": "phi-2"}, "holds completions", "--data.prompt_style null"),
        ("completion", {"chat_template": "chatml"}, "holds completions", "chat_template null"),
        (
            "text",
            {"chat_template_kwargs": {"a": 1}},
            "holds documents",
            "chat_template_kwargs null",
        ),
        (
            "instruction",
            {"chat_template_kwargs": {"a": 1}},
            "holds instructions",
            "Give chat_template",
        ),
        ("text", {"train_on": "last"}, "data.train_on is last", "set it to all"),
        ("messages", {"overlong": "split"}, "data.overlong is split", "--data.overlong drop"),
        ("text", {"drop_system": True}, "data.drop_system is True", "--data.drop_system null"),
        ("instruction", {"drop_system": True}, "holds instructions", "Give chat_template"),
    ],
)
def test_an_option_that_means_nothing_for_the_records_is_refused(
    shape: str, options: dict[str, Any], reason: str, works: str
) -> None:
    text, _, advice = refusal(path=write("a.jsonl", ROWS[shape]), **options).partition("\n")
    assert says(text, reason) and says(advice, works)


SYSTEM, ASKED, ANSWERED = (
    {"role": role, "content": "x"} for role in ("system", "user", "assistant")
)


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("row", "options", "preference"),
    [
        ({"messages": [SYSTEM, ASKED, ANSWERED]}, {}, None),
        ({"messages": [ASKED, ANSWERED], "system": "x"}, {}, None),
        ({"messages": [ASKED, ANSWERED]}, {}, None),
        ({"instruction": "x", "output": "x", "sys_prompt": "x"}, {"chat_template": "chatml"}, None),
        ({"messages": [SYSTEM, ASKED, ANSWERED], "label": True}, {}, "labels"),
        (
            {answer: [SYSTEM, ASKED, ANSWERED] for answer in ("chosen", "rejected")},
            {},
            "pairs",
        ),
    ],
)
def test_a_system_message_at_the_beginning_can_be_left_out(
    row: Record, options: dict[str, Any], preference: Preference | None
) -> None:
    asked = options | {"path": write("a.jsonl", row), "drop_system": True}
    (found,) = data_source(of(**asked), preference=preference).parts()
    (record, *_) = found.read().train
    for one in (record["chosen"], record["rejected"]) if preference == "pairs" else (record,):
        assert one["messages"] == [ASKED, ANSWERED]


@pytest.mark.extensions
def test_system_messages_can_be_left_out_of_one_source() -> None:
    path = write("a.jsonl", {"messages": [SYSTEM, ASKED, SYSTEM, ANSWERED]})
    kept, dropped = data_source(
        of(sources=[{"path": path}, {"path": path, "drop_system": True}])
    ).parts()
    assert len(kept.read().train[0]["messages"]) == 4
    assert dropped.read().train[0]["messages"] == [ASKED, SYSTEM, ANSWERED]


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("preference", "row"), [("pairs", PAIR), ("labels", ROWS["completion"] | {"label": True})]
)
def test_of_answers_that_are_compared_prompts_are_never_trained(
    preference: Preference, row: Record
) -> None:
    path = write("a.jsonl", row)

    def read(**options: Any) -> Part:
        source = data_source(of(path=path, **options)).of_preference(preference)
        (found,) = source.parts()
        return found.read()

    assert read().rules.train_on == read(mask_prompt=True).rules.train_on == "last"
    assert says(message_of(read, mask_prompt=False), "data.mask_prompt is False", "train_on")


@pytest.mark.extensions
def test_an_empty_option_counts_as_not_set() -> None:
    path = write("a.jsonl", ROWS["messages"])
    options = ("mask_prompt", "prompt_style", "subset", "columns", "sources", "overlong")
    assert part(path=path, **dict.fromkeys(options)).rules.train_on == "assistant"


# Options


def test_json_path_is_the_older_name_of_path() -> None:
    path = write("a.jsonl", ROWS["text"])
    assert part(json_path=path) == part(path=path)
    assert says(refusal(json_path="b.jsonl"), "data.json_path is b.jsonl")
    assert says(refusal(path="b.jsonl"), "data.path is b.jsonl")


def test_the_way_that_is_set_later_replaces_the_others() -> None:
    def data(*overrides: tuple[str, str]) -> dict[str, Any]:
        recipe = read_recipe([], [("checkpoint_dir", "base"), ("data", "JSON"), *overrides])
        return recipe.data["init_args"]

    assert data(("data.json_path", "a"), ("data.path", "b")) == {"path": "b"}
    assert data(("data.path", "a"), ("data.json_path", "b")) == {"json_path": "b"}
    assert data(("data.path", "a"), ("data.sources", "[{path: b}]")) == {"sources": [{"path": "b"}]}
    assert data(("data.path", "a"), ("data.json_path", "null"))["path"] == "a"


@pytest.mark.parametrize(
    "given",
    [
        "Q: {instruction}\nA: ",
        r"Q: {instruction}\nA: ",
        r'"Q: {instruction}\nA: "',
        """'Q: {instruction}

A: '""",
    ],
)
def test_a_custom_prompt_is_text_on_the_command_line(given: str) -> None:
    overrides = [("checkpoint_dir", "base"), ("data", "JSON"), ("data.prompt_style", given)]
    style = read_recipe([], overrides).data["init_args"]["prompt_style"]
    assert style == "Q: {instruction}\nA: "


INLINE = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"


@pytest.mark.extensions
@pytest.mark.parametrize("given", [INLINE, json.dumps(INLINE)])
def test_a_template_is_text_on_the_command_line_and_in_a_recipe(given: str) -> None:
    path = write("a.jsonl", ROWS["messages"])
    overrides = [("checkpoint_dir", "base"), ("data", "JSON"), ("data.path", path)]
    found = read_recipe([], [*overrides, ("data.chat_template", given)])
    Path("recipe.yaml").write_text(to_yaml(found))
    for recipe in (found, read_recipe([Path("recipe.yaml")], [])):
        (source,) = data_source(recipe.data).parts()
        assert data_source(recipe.data).files() == (Path(path),)
        made = make_renderer(source.read(), None).template
        assert (made.source, made.name) == (INLINE, "given as text")
        assert made.render(SAID) == "user: ?\nassistant: !\n"


@pytest.mark.extensions
def test_a_text_that_is_no_template_is_refused_with_its_line() -> None:
    found = part(
        path=write("a.jsonl", ROWS["messages"]), chat_template="{% for m in messages %}\n{{"
    )
    assert says(message_of(make_renderer, found, None), "given as text ... not a valid ... line")


def test_a_class_with_arguments_is_not_taken_for_a_prompt() -> None:
    given = "{class_path: litgpt.prompts.ChatML, init_args: {system_message: '{instruction}'}}"
    overrides = [("checkpoint_dir", "base"), ("data", "JSON"), ("data.prompt_style", given)]
    style = read_recipe([], overrides).data["init_args"]["prompt_style"]
    assert style["class_path"] == "litgpt.prompts.ChatML"


@pytest.mark.extensions
def test_arguments_of_templates_are_named_on_the_command_line() -> None:
    write("a.jsonl", ROWS["messages"])
    overrides = {"data": "JSON", "data.path": "a.jsonl", "checkpoint_dir": "base"}
    overrides |= {"data.chat_template_kwargs.enable_thinking": "false"}
    overrides |= {"data.chat_template_kwargs.reasoning_effort": "high"}
    data = read_recipe([], list(overrides.items())).data
    (found,) = (part.read() for part in data_source(data).parts())
    expected = {"enable_thinking": False, "reasoning_effort": "high"}
    assert found.rules.chat_template_kwargs == expected


def test_columns_are_named_on_the_command_line() -> None:
    write("a.jsonl", {"question": "a", "answer": "b"})
    overrides = {"data": "JSON", "data.path": "a.jsonl", "data.columns.instruction": "question"}
    overrides |= {"data.columns.output": "answer", "checkpoint_dir": "base"}
    data = read_recipe([], list(overrides.items())).data
    (found,) = (part.read() for part in data_source(data).parts())
    assert found.train[0] == {"instruction": "a", "output": "b"}


@pytest.mark.parametrize(
    ("options", "reason", "works"),
    [
        ({}, "data.path is missing", "--data.path FILE"),
        ({"path": ""}, "data.path is missing", "--data.path FILE"),
        ({"path": "a", "json_path": "a"}, "data.path is a ... data.json_path is a", "Remove"),
        ({"path": "a", "sources": [{"path": "a"}]}, "only one", "Remove"),
        (
            {"path": "a", "mask_prompt": False, "train_on": "last"},
            "data.mask_prompt is False ... data.train_on is last",
            "--data.train_on null",
        ),
        (
            {"path": "a", "prompt_style": "alpaca", "chat_template": "chatml"},
            "data.prompt_style is alpaca ... data.chat_template is chatml",
            "--data.chat_template null",
        ),
        (
            {"path": "a", "prompt_style": "alpaca", "chat_template_kwargs": {"a": 1}},
            "data.prompt_style is alpaca ... data.chat_template_kwargs is",
            "--data.chat_template_kwargs null",
        ),
        *(
            (
                {"path": "a", "chat_template_kwargs": value},
                f"data.chat_template_kwargs {why} ... object of",
                "--data.chat_template_kwargs.enable_thinking false",
            )
            for value, why in (
                ("high", "is not such"),
                ({"a b": 1}, "has 'a b'"),
                ({"tools": []}, "has tools, which"),
                ({"a": float("nan")}, "has a value ... under a"),
            )
        ),
        ({"path": "a", "train_on": "user"}, "assistant, last, all", "--data.train_on "),
        ({"path": "a", "reasoning": "keep"}, "one of split, refuse", "--data.reasoning refuse"),
        ({"path": "a", "overlong": "cut"}, "truncate, drop, split", "--data.overlong "),
        (
            {"path": "a", "columns": ["a"]},
            "mapping from ftkit's keys",
            "instruction: question",
        ),
        (
            {"path": "a", "columns": {"output": 5}},
            "mapping from ftkit's keys",
            "output: answer",
        ),
        (
            {"path": "a", "columns": {"instructions": "q"}},
            "data.columns.instructions is q",
            "--data.columns.instruction q",
        ),
        (
            {"path": "a", "columns": {"prompt": "q", "output": "a"}},
            "data.columns names output and prompt",
            "Keep those of one kind",
        ),
        ({"path": "a", "revision": 5}, "data.revision is 5 ... text", "'\"5\"'"),
        ({"path": "a", "chat_template": ""}, "has to be a text", "--data.chat_template"),
        ({"path": "a", "add_tokens": "<a>"}, "a list of different texts", "--data.add_tokens"),
        ({"path": "a", "add_tokens": []}, "a list of different texts", "--data.add_tokens"),
        ({"path": "a", "add_tokens": ["<a>", "<a>"]}, "different texts", "--data.add_tokens"),
        ({"path": "a", "add_tokens": [" <a>"]}, "without spaces", "--data.add_tokens"),
        ({"sources": []}, "data.sources is [] ... list", "path: a.jsonl"),
        ({"sources": ["a"]}, "data.sources[0] is 'a' ... object", "path: FILE"),
        ({"sources": [{"path": "a", "wieght": 2}]}, "[0] has no key wieght", "Write weight"),
        ({"sources": [{"path": "a", "weight": 0}]}, "data.sources[0].weight is 0", "to 1"),
        ({"sources": [{"path": "a", "samples": 1.5}]}, "[0].samples is 1.5", "1000"),
        (
            {"sources": [{"path": "a", "weight": 1, "samples": 1}]},
            "data.sources[0].weight is 1 ... data.sources[0].samples is 1",
            "Remove",
        ),
        ({"sources": [{"path": "a", "train_on": "x"}]}, "data.sources[0].train_on is 'x'", "Set "),
        ({"sources": [{"path": "a"}], "subset": "s"}, "data.subset is s, but", "Move it into"),
        ({"sources": [{"path": "a"}, {"path": "b.jsonl"}]}, "data.sources[0].path is a", "Set "),
    ],
)
def test_bad_options_are_refused_before_anything_is_read(
    options: dict[str, Any], reason: str, works: str
) -> None:
    text, _, advice = refusal(**options).partition("\n")
    assert says(text, reason) and says(advice, works)


@pytest.mark.parametrize("key", ["subset", "split", "revision"])
def test_options_of_hub_data_sets_are_refused_for_files(key: str) -> None:
    reason = refusal(path=write("a.jsonl", ROWS["text"]), **{key: "x"})
    assert f"data.{key} is x, but a.jsonl" in reason


# Mixtures


@pytest.mark.extensions
def test_each_source_is_read_and_split_by_itself() -> None:
    write("chats.jsonl", ROWS["messages"], 10)
    write("d/train.jsonl", {"q": "a", "output": "b"}, 4)
    write("d/val.jsonl", {"q": "a", "output": "b"}, 2)
    sources = [
        {"path": "chats.jsonl", "weight": 2},
        {"path": "d", "samples": 3, "columns": {"instruction": "q"}, "mask_prompt": True},
    ]
    data = data_source(of(sources=sources, val_split_fraction=0.2))
    chats, others = (part.read() for part in data.parts())
    assert [found.name for found in (chats, others)] == ["chats.jsonl", "d"]
    assert [len(found.train) for found in (chats, others)] == [8, 4]
    assert [len(found.val) for found in (chats, others)] == [2, 2]
    assert (chats.shape, chats.rules.train_on) == ("messages", "assistant")
    assert (others.shape, others.rules.train_on) == ("instruction", "last")
    shares = [(one.weight, one.samples) for one in data.parts()]
    assert shares == [(2, None), (None, 3)]
    files = data.files()
    assert files is not None
    assert list(map(str, files)) == ["chats.jsonl", "d/train.jsonl", "d/val.jsonl"]


def test_a_fraction_is_refused_where_no_source_would_be_split() -> None:
    for name in ("d/train.jsonl", "d/val.jsonl", "e/train.jsonl", "e/val.jsonl"):
        write(name, ROWS["text"])
    data = of(sources=[{"path": "d"}, {"path": "e"}], val_split_fraction=0.2)
    with pytest.raises(
        UserError, match=key_words("val_split_fraction is 0.2 ... data.sources[0].path")
    ):
        data_source(data).files()


@pytest.mark.extensions
def test_options_for_all_sources_hold_unless_a_source_sets_its_own() -> None:
    write("a.jsonl", ROWS["instruction"])
    write("b.jsonl", ROWS["instruction"])
    write("c.jsonl", ROWS["messages"])
    sources = [{"path": "a.jsonl"}, {"path": "b.jsonl", "train_on": "all"}, {"path": "c.jsonl"}]
    found = parts(sources=sources, mask_prompt=True, prompt_style="phi-2")
    assert [one.rules.train_on for one in found] == ["last", "all", "assistant"]
    styles = [one.rules.prompt_style for one in found]
    assert styles == [resolve_prompt_style("phi-2"), resolve_prompt_style("phi-2"), None]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["x/a.jsonl"], ["JSON"]),
        (["x/a.jsonl", "x/b.jsonl"], ["a.jsonl", "b.jsonl"]),
        (["x/a.jsonl", "y/a.jsonl"], ["x/a.jsonl", "y/a.jsonl"]),
        (["x/a.jsonl", "x/a.jsonl"], ["x/a.jsonl (1)", "x/a.jsonl (2)"]),
    ],
)
def test_sources_have_names_that_tell_them_apart(paths: list[str], names: list[str]) -> None:
    found = parts(sources=[{"path": write(path, ROWS["text"])} for path in paths])
    assert [one.name for one in found] == names


# The hub


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("path", "is_hub"),
    [
        ("org/chats", True),
        ("org/chats.v2", True),
        ("./org/chats", False),
        ("org/chats.jsonl", False),
        ("org/chats.jsonl.gz", False),
        ("org/sheet.xlsx", False),
        ("chats", False),
        ("a/b/c", False),
        ("~/chats", False),
        ("../chats", False),
    ],
)
def test_a_name_with_an_owner_that_is_not_a_path_is_of_the_hub(path: str, is_hub: bool) -> None:
    source = data_source(of(path=path))
    if is_hub:
        assert source.files() is None
        Path(path).mkdir(parents=True)
    with pytest.raises(UserError, match=r"data.path is "):
        source.files()


def test_a_name_that_only_a_hub_knows_needs_the_extension(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HUBS, "_of_extensions", {})
    with pytest.raises(UserError, match=key_words("data.path ... extension hub, which is missing")):
        data_source(of(path="org/chats")).files()
    with pytest.raises(UserError, match=key_words("[0].path ... extension hub")):
        data_source(of(sources=[{"path": "org/chats"}])).files()


@pytest.mark.extensions
def test_hub_data_are_requested_with_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def read_hub(
        name: HubName, columns: object, *, whole: bool, preference: object, skips_bad: bool
    ) -> RecordSet:
        assert preference is None and not skips_bad
        requests.append((name, columns, whole))
        reader = RecordReader()
        train = reader.records(enumerate([ROWS["messages"]] * 10), str)
        val = None if whole else train[:1]
        return RecordSet(
            form=reader.finish(""),
            where=name.name,
            train=train,
            val=val,
            version="abc1234",
            val_split="test",
        )

    monkeypatch.setattr("ftkit.data.own_data.read_hub", read_hub)
    options = {"subset": "s", "split": "train", "revision": "abc1234"}
    found = part(path="org/chats", **options)
    assert requests.pop() == (HubName(name="org/chats", **options), None, False)
    assert says(found.description, "10 conversations (messages) ... abc1234, 1 ... split test")
    found = part(path="org/chats", val_split_fraction=0.5)
    assert requests.pop()[2] is True
    assert (len(found.train), len(found.val)) == (5, 5)


# Evaluation


def evaluated(given: Sequence[str], **options: Any) -> tuple[int, int]:
    source = data_source(of(**options)).for_evaluation(given)
    (found,) = (part.read() for part in source.parts())
    return len(found.train), len(found.val)


def test_data_named_for_an_evaluation_only_are_used_whole() -> None:
    path = write("a.jsonl", ROWS["text"])
    assert evaluated(["path"], path=path, val_split_fraction=0.5) == (0, 20)
    assert evaluated(["sources"], sources=[{"path": path}]) == (0, 20)
    assert evaluated(["train_on"], path=path, val_split_fraction=0.5) == (10, 10)
    assert evaluated(["path", "val_split_fraction"], path=path, val_split_fraction=0.5) == (10, 10)
