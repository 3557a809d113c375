"""Records with images as people have them: which image stands where, and what is refused."""

import base64
import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from messages import says
from PIL import Image
from stand_in_hub import NAME, DataHub, serving_data

from ftkit.data.own_data import OwnData
from ftkit.data.records.media import MEDIA, PLACES, number_of
from ftkit.data.records.read import read_hub, read_records
from ftkit.data.records.record import Record
from ftkit.data.records.shapes import RecordReader
from ftkit.errors import UserError
from ftkit.recipe.hubs import HubName
from ftkit.recipe.recipe import Component

Row = dict[str, Any]
FILES = ("a.png", "b.jpg", "c.webp")


def _content(number: int) -> bytes:
    stream = io.BytesIO()
    kind = FILES[number].rpartition(".")[2].replace("jpg", "jpeg")
    Image.new("RGB", (8 + number, 4), (80 * number, 0, 0)).save(stream, kind)
    return stream.getvalue()


CONTENTS = tuple(map(_content, range(len(FILES))))
DIGESTS = {hashlib.sha256(content).hexdigest(): i for i, content in enumerate(CONTENTS)}
DATA_URL = f"data:image/png;base64,{base64.b64encode(CONTENTS[0]).decode()}"
BASE64 = base64.b64encode(CONTENTS[0]).decode()
ANSWER: Row = {"role": "assistant", "content": "red"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of records with pictures beside them."""
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    _draw(folder / "pictures")
    return folder


def _draw(pictures: Path) -> None:
    pictures.mkdir(parents=True)
    for name, content in zip(FILES, CONTENTS, strict=True):
        (pictures / name).write_bytes(content)


def _write(file: Path, *rows: Row) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _said(record: Record) -> list[str]:
    """Texts of the messages with the number of the picture at each place."""
    media = [DIGESTS[medium["sha256"]] for medium in record.get(MEDIA, ())]
    return [
        PLACES.sub(lambda place: f"[{media[number_of(place.group())]}]", message["content"])
        for message in record["messages"]
    ]


def _parts(*parts: Row, **columns: Any) -> Row:
    return {"messages": [{"role": "user", "content": [*parts]}, ANSWER], **columns}


def _marks(text: str, **columns: Any) -> Row:
    return {"messages": [{"role": "user", "content": text}, ANSWER], **columns}


def _text(text: str) -> Row:
    return {"type": "text", "text": text}


A, B, C = (f"pictures/{name}" for name in FILES)
OF_ONE = ["[0]what is it", "red"]
FORMS: dict[str, tuple[Row, list[str]]] = {
    "OpenAI, url": (
        _parts({"type": "image_url", "image_url": {"url": A}}, _text("what is it")),
        OF_ONE,
    ),
    "OpenAI, data url": (
        _parts(
            {"type": "image_url", "image_url": {"url": DATA_URL, "detail": "low"}},
            _text("what is it"),
        ),
        OF_ONE,
    ),
    "OpenAI, a url that is a text": (
        _parts({"type": "image_url", "image_url": A}, _text("what is it")),
        OF_ONE,
    ),
    **{
        f"a part with its picture as {key}": (
            _parts({"type": "image", key: value}, _text("what is it")),
            OF_ONE,
        )
        for key, value in {
            "image": A,
            "url": A,
            "path": A,
            "base64": DATA_URL,
            "image_url": {"url": A},
            "value": A,
            "content": A,
        }.items()
    },
    "axolotl, base64 alone": (
        _parts({"type": "image", "base64": BASE64}, _text("what is it")),
        OF_ONE,
    ),
    "a part with bytes and path of a table": (
        _parts({"type": "image", "image": {"bytes": None, "path": A}}, _text("what is it")),
        OF_ONE,
    ),
    "several parts, in their order": (
        _parts(
            {"type": "image", "image": B}, _text("and "), {"type": "image", "image": A}, _text("?")
        ),
        ["[1]and [0]?", "red"],
    ),
    "the same picture twice": (
        _parts({"type": "image", "image": A}, {"type": "image", "image": A}),
        ["[0][0]", "red"],
    ),
    "TRL, a column": (
        _parts({"type": "image"}, _text("or "), {"type": "image"}, images=[C, A]),
        ["[2]or [0]", "red"],
    ),
    "TRL, nulls of a table": (
        _parts({"type": "image", "text": None}, {"type": "text", "text": "what is it"}, images=[A]),
        OF_ONE,
    ),
    "TRL, prompt and completion": (
        {
            "prompt": [{"role": "user", "content": [{"type": "image"}, _text("what is it")]}],
            "completion": [ANSWER],
            "images": [A],
        },
        OF_ONE,
    ),
    "parts with a picture, and a column": (
        _parts({"type": "image", "image": B}, {"type": "image"}, images=[A]),
        ["[1][0]", "red"],
    ),
    "ms-swift": (_marks("<image>what is it", images=[A]), OF_ONE),
    "ms-swift, one path": (_marks("<image>what is it", images=A), OF_ONE),
    "ms-swift, objects": (_marks("<image>what is it", images=[{"bytes": None, "path": A}]), OF_ONE),
    "a column of one": (_marks("<image>what is it", image=A), OF_ONE),
    "marks in the middle": (
        _marks("see <image>, not <image>!", images=[B, C]),
        ["see [1], not [2]!", "red"],
    ),
    "LLaMA-Factory, ShareGPT": (
        {
            "conversations": [
                {"from": "human", "value": "<image>what is it"},
                {"from": "gpt", "value": "red"},
            ],
            "images": [A],
        },
        OF_ONE,
    ),
    "turns of several pictures": (
        {
            "messages": [
                {"role": "user", "content": "<image>a"},
                ANSWER,
                {"role": "user", "content": "<image>b"},
                ANSWER,
            ],
            "images": [A, B],
        },
        ["[0]a", "red", "[1]b", "red"],
    ),
    "in the system message": (
        {
            "messages": [
                {"role": "system", "content": "like <image>"},
                {"role": "user", "content": "<image>?"},
                ANSWER,
            ],
            "images": [A, B],
        },
        ["like [0]", "[1]?", "red"],
    ),
    "in a system prompt beside the turns": (
        _marks("<image>?", images=[A, B], system="like <image>"),
        ["like [0]", "[1]?", "red"],
    ),
    "in an answer": (
        {
            "messages": [
                {"role": "user", "content": "draw"},
                {"role": "assistant", "content": "<image>done"},
            ],
            "images": [B],
        },
        ["draw", "[1]done"],
    ),
    "a mark is a text beside parts": (
        _parts({"type": "image", "image": A}, _text("write <image>")),
        ["[0]write <image>", "red"],
    ),
    "a mark is a text without pictures": (_marks("write <image>"), ["write <image>", "red"]),
    "no pictures": (_marks("what is it", images=[]), ["what is it", "red"]),
    "a file url": (
        _parts({"type": "image", "image": "file://FOLDER/pictures/a.png"}),
        ["[0]", "red"],
    ),
    "an absolute path": (
        _parts({"type": "image", "image": "FOLDER/pictures/a.png"}),
        ["[0]", "red"],
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_records(name: str, folder: Path) -> None:
    row, expected = FORMS[name]
    row = json.loads(json.dumps(row).replace("FOLDER", str(folder)))
    reader = RecordReader()
    (record,) = reader.records([((folder / "chats.jsonl", 1), row)], str)
    assert _said(record) == expected
    assert reader.unused.names == ()


def test_keys_of_parts_that_are_not_used_are_named(folder: Path) -> None:
    row = _parts({"type": "image", "image": A, "resized_height": 28})
    reader = RecordReader()
    reader.records([((folder / "chats.jsonl", 1), row)], str)
    assert reader.unused.names == ("messages.content.resized_height",)


ALPACA: dict[str, tuple[Row, list[str]]] = {
    "LLaMA-Factory": (
        {"instruction": "<image>what", "input": "", "output": "red", "images": [A]},
        ["[0]what", "red"],
    ),
    "an input": (
        {"instruction": "<image>what", "input": "or <image>", "output": "red", "images": [B, A]},
        ["[1]what\n\nor [0]", "red"],
    ),
    "turns before, and a system prompt": (
        {
            "instruction": "<image>what",
            "output": "red",
            "history": [["<image>", "blue"]],
            "system": "like <image>",
            "images": [A, B, C],
        },
        ["like [0]", "[1]", "blue", "[2]what", "red"],
    ),
    "one picture": (
        {"instruction": "<image>what", "output": "red", "image": A},
        ["[0]what", "red"],
    ),
    "no picture": ({"instruction": "what", "output": "red", "image": A}, ["what", "red"]),
}


@pytest.mark.parametrize("name", ALPACA)
def test_instructions_are_conversations_where_a_chat_template_writes_them(
    name: str, folder: Path
) -> None:
    row, expected = ALPACA[name]
    args = {"path": str(_write(folder / "a.jsonl", row, row)), "val_split_fraction": 0}
    args["chat_template"] = "chatml"
    (source,) = OwnData.of(Component(class_path="JSON", init_args=args)).parts()
    part = source.read()
    assert _said(part.train[0]) == expected
    assert part.unused.names == (("image",) if name == "no picture" else ())


def test_a_system_message_is_left_out_with_its_picture(folder: Path) -> None:
    row, _ = FORMS["in the system message"]
    file = _write(folder / "a.jsonl", row, row)
    args = {"path": str(file), "val_split_fraction": 0, "drop_system": True}
    (source,) = OwnData.of(Component(class_path="JSON", init_args=args)).parts()
    assert _said(source.read().train[0]) == ["[1]?", "red"]


PICTURE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
TABLES: dict[str, list[Mapping[str, Any]]] = {
    "bytes": [{"bytes": CONTENTS[0], "path": "a.png"}],
    "bytes without a name": [{"bytes": CONTENTS[0], "path": None}],
    "paths": [{"bytes": None, "path": A}],
}


@pytest.mark.parametrize("name", TABLES)
def test_structs_of_tables(name: str, folder: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "<image>what is it"}, ANSWER]}]
    messages = pyarrow.array([row["messages"] for row in rows])
    images = pyarrow.array([TABLES[name]], pyarrow.list_(PICTURE))
    file = folder / "chats.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"messages": messages, "images": images}), file)
    (record,) = read_records(file)
    assert _said(record) == OF_ONE


def _parquet(images: list[Mapping[str, Any]]) -> bytes:
    messages = [[{"role": "user", "content": "<image>what is it"}, ANSWER]] * 4
    columns = {
        "messages": pyarrow.array(messages),
        "images": pyarrow.array([images] * 4, pyarrow.list_(PICTURE)),
    }
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), stream)
    return stream.getvalue()


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DataHub]:
    served = DataHub({})
    with serving_data(served, monkeypatch, folder):
        yield served


def test_data_sets_of_the_hub_hold_their_images(hub: DataHub) -> None:
    hub.files = {"train.parquet": _parquet(TABLES["bytes"])}
    for record in read_hub(HubName(name=NAME), None).train:
        assert _said(record) == OF_ONE


@pytest.mark.parametrize("is_absolute", [False, True])
def test_data_sets_of_the_hub_name_no_files_of_this_machine(
    is_absolute: bool, hub: DataHub, folder: Path
) -> None:
    path = str(folder / A) if is_absolute else A
    hub.files = {"train.parquet": _parquet([{"bytes": None, "path": path}])}
    with pytest.raises(UserError) as refused:
        read_hub(HubName(name=NAME), None)
    assert says(
        str(refused.value), f"{NAME}, train record 1", "its image is the path", "hold their images"
    )


def test_paths_begin_in_the_folder_of_their_own_file(folder: Path) -> None:
    for number, name in enumerate(("one", "two")):
        (folder / name).mkdir()
        (folder / name / "x.png").write_bytes(CONTENTS[number])
        _write(folder / name / "chats.jsonl", *[_marks("<image>?", images=["x.png"])] * 4)
    data = Component(
        class_path="JSON",
        init_args={"path": str(folder / "*" / "*.jsonl"), "val_split_fraction": 0.5},
    )
    (source,) = OwnData.of(data).parts()
    part = source.read()
    found = [medium["file"] for one in (*part.train, *part.val) for medium in one[MEDIA]]
    assert sorted(found) == sorted(
        str(folder / name / "x.png") for name in ("one", "two") for _ in range(4)
    )
    assert part.media == ("image",)


def test_equal_pictures_of_other_files_make_equal_records(folder: Path) -> None:
    (folder / "copy.png").write_bytes(CONTENTS[0])
    rows = [_marks("<image>?", images=[name]) for name in (A, "copy.png", B, A)]
    args = {"path": str(_write(folder / "a.jsonl", *rows)), "val_split_fraction": 0}
    (source,) = OwnData.of(
        Component(class_path="JSON", init_args={**args, "drop_equal": True})
    ).parts()
    assert [_said(record) for record in source.read().train] == [["[0]?", "red"], ["[1]?", "red"]]


BAD: dict[str, tuple[Row, tuple[str, ...]]] = {
    "more marks": (_marks("<image><image>?", images=[A]), ("images", "1", "2 places")),
    "fewer marks": (_marks("<image>?", images=[A, B, C]), ("images", "3", "1 place")),
    "no marks": (_marks("?", images=[A]), ("images", "1", "0 places")),
    "more parts": (
        _parts({"type": "image"}, {"type": "image"}, images=[A]),
        ("images", "1", "2 places"),
    ),
    "a part without a picture": (
        _parts({"type": "image"}),
        ("message 1, part 1", "without a file"),
    ),
    "a url": (
        _parts({"type": "image_url", "image_url": {"url": "https://a.org/a.png"}}),
        ("message 1, part 1", "https://a.org/a.png", "curl"),
    ),
    "a url in a column": (
        _marks("<image>?", images=["http://a.org/a.png"]),
        ("fetches no images",),
    ),
    "a missing file": (
        _marks("<image>?", images=["pictures/no.png"]),
        ("pictures/no.png", "is not there"),
    ),
    "no image": (_marks("<image>?", images=["chats.jsonl"]), ("chats.jsonl", "none of PNG")),
    "a video": (_parts({"type": "video", "video": "a.mp4"}), ("'video'",)),
    "a column of videos": (_marks("<video>?", videos=["a.mp4"]), ("videos",)),
    "an instruction with fewer marks": (
        {"instruction": "<image>", "output": "red", "images": [A, B]},
        ("images", "2", "1 place"),
    ),
    "a character of a place": (
        _parts({"type": "image", "image": A}, _text("\U000f0001")),
        ("U+F0000",),
    ),
    "weights of characters beside marks": (
        {
            "messages": [
                {"role": "user", "content": "?"},
                {
                    "role": "assistant",
                    "content": "<image> red",
                    "train_detail": [{"begin_offset": 0, "end_offset": 2, "train": False}],
                },
            ],
            "images": [A],
        },
        ("weights", "content parts"),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_records_name_file_and_line_and_may_be_skipped(name: str, folder: Path) -> None:
    row, words = BAD[name]
    good = [_marks(f"<image>{i}?", images=[A]) for i in range(4)]
    if "instruction" in row:
        good = [row | {"images": [A]}] * 4
    file = _write(folder / "chats.jsonl", *good, row)
    data = Component(class_path="JSON", init_args={"path": str(file), "val_split_fraction": 0.5})
    (source,) = OwnData.of(data).parts()
    with pytest.raises(UserError) as refused:
        source.read()
    assert says(str(refused.value), f"{file}, line 5", "--data.skip_bad_records true", *words)
    data["init_args"]["skip_bad_records"] = True
    (source,) = OwnData.of(data).parts()
    part = source.read()
    assert len(part.train) + len(part.val) == 4
    ((kind,),) = part.bad.values()
    assert kind.count == 1
