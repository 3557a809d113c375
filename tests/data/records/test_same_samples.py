"""One data set gives the same samples, whatever format it is written in."""

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from ftkit.data.dataset import load_data
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.objectives import Preference
from ftkit.recipe.recipe import Component

Row = dict[str, Any]

TEMPLATE = (
    "{{ (tools or []) | tojson }}{{ mood }}{% for m in messages %}<{{ m.role }}>"
    "{{ m.reasoning_content }}{{ m.content }}{{ (m.tool_calls or []) | tojson }}</s>{% endfor %}"
)
# Texts that a reader of tables may take for something else.
TEXTS = ("red", "007", "true", "null", "[1, 2]", '{"a": null}', '"sun"', " 1,5 ", "a\nb", "NaN")


def tool(name: str, **properties: Any) -> Row:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def call(name: str, **arguments: Any) -> Row:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [
    tool("sun", city={"type": "string", "enum": ["red", "blue"]}),
    tool("moon", day={"type": "integer", "description": "of the month"}, far={"type": "boolean"}),
]


def user(draw: random.Random) -> Row:
    return {"role": "user", "content": draw.choice(TEXTS)}


def answer(draw: random.Random, **marks: Any) -> Row:
    said = {"role": "assistant", "content": f"{draw.choice(TEXTS)} {draw.random():.3f}"}
    return said | {key: value for key, value in marks.items() if draw.random() < 0.5}


def calling(draw: random.Random) -> list[Row]:
    city, day = call("sun", city=draw.choice(TEXTS)), call("moon", day=draw.randint(1, 31))
    done = {"role": "tool", "content": "blue", "name": "sun"}
    return [{"role": "assistant", "tool_calls": draw.sample([city, day], draw.randint(1, 2))}, done]


def instruction(draw: random.Random) -> Row:
    return {"instruction": f"{draw.choice(TEXTS)} {draw.random()}", "output": draw.choice(TEXTS)}


def pair(draw: random.Random, *before: Row) -> Row:
    return {name: [*before, answer(draw)] for name in ("chosen", "rejected")}


def sharegpt(draw: random.Random) -> list[Row]:
    return [{"from": "human", "value": draw.choice(TEXTS)}, {"from": "gpt", "value": "sun"}]


def maybe(draw: random.Random, **values: Any) -> Row:
    return {key: value for key, value in values.items() if draw.random() < 0.5}


NOTHING = ("instruction", "output", "messages", "prompt", "completion", "text")
WITHOUT_MESSAGES: dict[str, tuple[Preference | None, Callable[[random.Random], Row]]] = {
    "instructions": (
        None,
        lambda draw: (
            instruction(draw)
            | maybe(
                draw, input="blue", sys_prompt="Be sun.", history=[["red?", "yes"]], loss_weight=0.5
            )
        ),
    ),
    "completions": (
        None,
        lambda draw: {"prompt": f"{draw.choice(TEXTS)} ", "completion": f"sun {draw.random()}"},
    ),
    "documents": (None, lambda draw: {"text": draw.choice(TEXTS), "label": True}),
    "pairs of texts": (
        "pairs",
        lambda draw: {"prompt": draw.choice(TEXTS), "chosen": " sun", "rejected": " 7", "rank": 1},
    ),
    "pairs of instructions": (
        "pairs",
        lambda draw: (
            {"question": draw.choice(TEXTS), "chosen": "sun", "rejected": "007"}
            | maybe(draw, system="Be sun.")
        ),
    ),
    "labels": (
        "labels",
        lambda draw: {"prompt": "red", "completion": " sun", "label": draw.random() < 0.5},
    ),
}
WITH_MESSAGES: dict[str, tuple[Preference | None, Callable[[random.Random], Row]]] = {
    "conversations": (
        None,
        lambda draw: (
            {
                "messages": [
                    user(draw),
                    answer(draw, train=False),
                    user(draw),
                    answer(draw, weight=2),
                ]
            }
            | maybe(draw, system="Be sun.", chat_template_kwargs={"mood": "red"}, score=0.5)
        ),
    ),
    "tools and thoughts": (
        None,
        lambda draw: (
            {
                "messages": [user(draw), *calling(draw), answer(draw, reasoning_content="Hm.")],
                "tools": draw.sample(TOOLS, draw.randint(1, 2)),
            }
            | maybe(draw, enable_thinking=False)
        ),
    ),
    "ShareGPT": (None, lambda draw: {"conversations": sharegpt(draw)}),
    "prompts of messages": (
        None,
        lambda draw: {"prompt": [user(draw)], "completion": [answer(draw)]},
    ),
    "pairs behind a text": ("pairs", lambda draw: pair(draw) | {"prompt": f"sun {draw.random()}"}),
    "pairs of whole conversations": ("pairs", lambda draw: pair(draw, user(random.Random(1)))),
    "pairs of OpenAI": (
        "pairs",
        lambda draw: {
            "input": {"messages": [user(draw)], "tools": None},
            "preferred_output": [answer(draw)],
            "non_preferred_output": [answer(draw)],
        },
    ),
    "labels of conversations": (
        "labels",
        lambda draw: {"messages": [user(draw), answer(draw)], "kto_tag": draw.randint(0, 1)},
    ),
}


def cell(value: Any, booleans: tuple[str, str]) -> str:
    if isinstance(value, bool):
        return booleans[value]
    return (value or "") if value is None or isinstance(value, str) else json.dumps(value)


def write_table(
    file: Path, rows: list[Row], booleans: tuple[str, str], delimiter: str = ","
) -> None:
    with file.open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream, delimiter=delimiter)
        table.writerow(rows[0])
        table.writerows([cell(value, booleans) for value in row.values()] for row in rows)


def write_all(directory: Path, rows: list[Row]) -> list[Path]:
    """The data set in every format, and as JSON of a table that gives all objects all keys."""
    table = pyarrow.Table.from_pylist(rows)
    padded = table.to_pylist()
    (directory / "a.json").write_text(json.dumps(rows))
    (directory / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "padded.jsonl").write_text("".join(json.dumps(row) + "\n" for row in padded))
    write_table(directory / "json.csv", padded, ("false", "true"))
    write_table(directory / "pandas.csv", padded, ("False", "True"))
    write_table(directory / "a.tsv", padded, ("0", "1"), "\t")
    pyarrow.parquet.write_table(table, directory / "a.parquet")
    arrow = directory / "arrow"
    arrow.mkdir()
    with pyarrow.ipc.new_stream(str(arrow / "data.arrow"), table.schema) as stream:
        stream.write_table(table)
    (arrow / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    (arrow / "dataset_info.json").write_text("{}")
    return sorted(path for path in directory.iterdir())


@pytest.mark.extensions
@pytest.mark.parametrize("name", [*WITHOUT_MESSAGES, *WITH_MESSAGES])
def test_every_format_gives_the_same_samples(
    name: str, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "cache"))
    preference, make = (WITHOUT_MESSAGES | WITH_MESSAGES)[name]
    draw = random.Random(name)
    # Columns of the other shapes are null in all records.
    rows = [dict.fromkeys(NOTHING) | make(draw) for _ in range(8)]
    keys = dict.fromkeys(key for row in rows for key in row)
    options: dict[str, Any] = {"val_split_fraction": 0.25}
    if name in WITH_MESSAGES:
        options |= {"chat_template": TEMPLATE}
    (data := tmp_path / "data").mkdir()
    found = {}
    for path in write_all(data, [{key: row.get(key) for key in keys} for row in rows]):
        component = Component(class_path="JSON", init_args={"path": str(path), **options})
        loaded = load_data(component, Tokenizer(tiny_base), 2000, preference=preference)
        found[path.name] = loaded.fingerprint, loaded.parts[0].part.summary
        assert loaded.counts["train"].used == 6
    assert len({*found.values()}) == 1, found
