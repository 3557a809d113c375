"""Rows of shapes: which one a record has, also where another package brings it."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from messages import message_of, says

from ftkit.data.records.forms import Form
from ftkit.data.records.record import Record
from ftkit.data.records.shape_rows import PREFERENCES, RECORD_SHAPES, PreferenceRow, ShapeRow
from ftkit.data.records.shapes import RecordReader, reader_of
from ftkit.data.sources import data_source
from ftkit.recipe.recipe import Component
from ftkit.utils.registry import Installed, imported

SAID = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]


def shape_of(row: Record) -> str:
    reader = RecordReader()
    reader.records([(1, row)], str)
    return reader.finish("here").shape


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("row", "shape"),
    [
        # Both texts of an instruction say what is meant, whatever else a table has.
        ({"instruction": "a", "output": "b", "messages": SAID, "text": "c"}, "instruction"),
        ({"messages": SAID, "output": "b", "text": "c"}, "messages"),
        ({"prompt": "a", "completion": "b", "text": "c"}, "completion"),
        ({"prompt": SAID[:1], "completion": SAID[1:]}, "messages"),
        ({"text": "c", "id": 1}, "text"),
    ],
)
def test_a_record_with_keys_of_several_shapes_has_the_first_of_them(
    row: Record, shape: str
) -> None:
    assert shape_of(row) == shape


VERSE = ShapeRow(
    name="verse",
    noun="verse",
    holds=("verse",),
    rule="A record has a verse.",
    keys=("verse",),
    precedence=(9, 9),
    form_place="their_shapes:verse_form",
    renderer_place="ftkit.data.rendering:TextRenderer",
    train_on="all",
    prompts=9,
)


def verse_form(row: dict[str, Any], columns: Mapping[str, str], *, answered: bool) -> Form:
    return Form(
        shape="verse",
        keys="verse",
        convert=lambda row: {"text": " / ".join(row["verse"])},
        used=frozenset({"verse"}),
    )


@pytest.fixture
def _verses_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = SimpleNamespace(VERSE=VERSE, verse_form=verse_form)
    monkeypatch.setitem(sys.modules, "their_shapes", theirs)
    one = Installed("record_shapes", "verse", "their_shapes:VERSE", "verses", "1.0", "Verses.")
    monkeypatch.setattr(RECORD_SHAPES, "installed", [one])
    monkeypatch.setattr(RECORD_SHAPES, "opened", {})


@pytest.mark.usefixtures("_verses_are_installed")
class TestAnotherPackage:
    def test_its_records_are_read(self) -> None:
        reader = RecordReader()
        rows = [(1, {"verse": ["so", "much"]}), (2, {"verse": ["depends"]})]
        assert reader.records(rows, str) == [{"text": "so / much"}, {"text": "depends"}]
        assert reader.finish("here").counted(2) == "2 verses (verse)"

    def test_it_takes_no_record_of_ours(self) -> None:
        assert shape_of({"text": "a", "verse": ["b"]}) == "text"


@pytest.mark.parametrize("row", [*RECORD_SHAPES, *PREFERENCES], ids=lambda row: row.name)
def test_a_row_names_what_is_there(row: ShapeRow | PreferenceRow) -> None:
    places = {k: v for k, v in dataclasses.asdict(row).items() if k.endswith("_place") and v}
    assert places
    for place in places.values():
        assert callable(imported(place)), place


def test_instructions_load_nothing_that_only_other_records_need() -> None:
    program = (
        "import sys\n"
        "from ftkit.data.sources import data_source\n"
        "data = {'class_path': 'JSON', 'init_args': {'path': 'embedded:quickstart'}}\n"
        "print(data_source(data).parts()[0].read().shape)\n"
        "rows = ('__init__', 'record_shapes', 'preferences')\n"
        "for name in sorted(sys.modules):\n"
        "    if name.startswith(('ftkit.extensions.chats.', 'ftkit.extensions.preference.')):\n"
        "        assert name.rpartition('.')[2] in rows, name\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "instruction\n"), ended.stderr


class TestWithoutTheExtension:
    """Of conversations: what needs it is refused, and names it."""

    @pytest.fixture(autouse=True)
    def _chats_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(RECORD_SHAPES, "_by_extension", {})
        monkeypatch.setattr(RECORD_SHAPES, "_of_extensions", {})

    @pytest.mark.parametrize(
        "row",
        [
            {"messages": SAID},
            {"conversations": [{"from": "human", "value": "?"}]},
            {"prompt": SAID[:1], "completion": SAID[1:]},
        ],
    )
    def test_conversations_are_refused(self, row: Record) -> None:
        message = message_of(shape_of, row)
        assert says(message, "needs", "extension chats", "Install")

    @pytest.mark.parametrize(
        ("row", "options", "by"),
        [
            ({"history": [["a", "b"]]}, {}, "history"),
            ({}, {"chat_template": "chatml"}, "data.chat_template"),
        ],
    )
    def test_instructions_that_become_conversations_are_refused(
        self, row: Record, options: dict[str, str], by: str, tmp_path: Path
    ) -> None:
        file = tmp_path / "a.json"
        file.write_text(json.dumps([{"instruction": "a", "output": "b"} | row] * 3))
        init_args = {"path": str(file), **options}
        (part,) = data_source(Component(class_path="JSON", init_args=init_args)).parts()
        assert says(message_of(part.read), by, "extension chats", "Install")

    def test_other_records_are_read(self) -> None:
        assert shape_of({"instruction": "a", "output": "b", "history": []}) == "instruction"

    def test_an_unknown_record_is_not_told_of_conversations(self) -> None:
        assert "messages" not in message_of(shape_of, {"a": 1})


def test_a_preference_without_its_extension_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PREFERENCES, "_of_extensions", {})
    assert says(message_of(reader_of, preference="pairs"), "pairs", "extension preference")
