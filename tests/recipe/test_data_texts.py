"""Options of data on the command line: each has the type of its field, as all keys have."""

import inspect
from pathlib import Path
from typing import Any

import pytest

from ftkit.data.source_rows import DATA_SOURCES
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.recipe import Recipe
from ftkit.recipe.recipe_keys import TEXTS_OF_DATA, accepted_types

TEXTS = ("007", "1e3", "0x10", "1_000", "true", "2024-01-01", "[a]")
"""Names of files, columns and versions; YAML makes of most of them something else."""


def read(*overrides: tuple[str, str]) -> Recipe:
    return read_recipe(
        [], [("checkpoint_dir", "base"), ("data", "JSON"), *overrides], method="lora"
    )


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_stays_as_it_is_typed(text: str) -> None:
    names = ("path", "json_path", "subset", "split", "revision", "data_files", "chat_template")
    for name in names:
        for key in (f"data.{name}", f"data.init_args.{name}"):
            assert read((key, text)).data["init_args"][name] == text
    assert read(("data.columns.output", text)).data["init_args"]["columns"] == {"output": text}
    sets = read(("eval.sets.short", text), ("eval.sets.long.path", text)).eval.sets
    assert sets is not None and sets["long"] == {"path": text}
    assert sets["short"] in (text, {"path": text})


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("path", "null", None),
        ("path", "'007'", "007"),
        ("seed", "007", 7),
        ("val_split_fraction", "1e-2", 0.01),
        ("mask_prompt", "true", True),
        ("sources", "[{path: a}]", [{"path": "a"}]),
        ("columns", "{output: a}", {"output": "a"}),
        ("chat_template_kwargs.thinking", "true", True),
    ],
)
def test_other_options_are_read_as_yaml(key: str, text: str, value: Any) -> None:
    found = read((f"data.{key}", text)).data["init_args"]
    for part in key.split("."):
        found = found[part]
    assert found == value


def test_a_set_may_be_an_object() -> None:
    assert read(("eval.sets.own", "{path: a.jsonl}")).eval.sets == {"own": {"path": "a.jsonl"}}


@pytest.mark.extensions
def test_every_text_option_of_every_kind_of_data_is_known() -> None:
    parameters = [
        parameter
        for row in DATA_SOURCES
        for parameter in inspect.signature(row.source.documented(row.name)).parameters.values()
    ]
    texts = {p.name for p in parameters if {*accepted_types(p.annotation)} <= {str, Path}}
    assert texts == TEXTS_OF_DATA
