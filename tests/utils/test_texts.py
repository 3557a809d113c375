"""Texts that are not UTF-8 are refused with byte, line and a command that converts them."""

import gzip
import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from messages import says

from ftkit.data.records.read import read_records
from ftkit.errors import UserError
from ftkit.evaluation.generate import records_of
from ftkit.models.chat_templates.template import read_template
from ftkit.recipe.options import GenerateOptions
from ftkit.utils.texts import explain_not_utf8
from ftkit.utils.yaml_files import load_yaml

RECORD = {"instruction": "Grüße", "output": "é"}
CONTENTS = {
    ".json": json.dumps([RECORD], ensure_ascii=False),
    ".jsonl": json.dumps(RECORD, ensure_ascii=False),
    ".csv": "instruction,output\nGrüße,é\n",
    ".tsv": "instruction\toutput\nGrüße\té\n",
}


def converted(message: str) -> None:
    """Run the command of a message."""
    subprocess.run(message.splitlines()[-1], shell=True, check=True)


@pytest.mark.parametrize(
    "encoding", ["latin-1", "cp1252", "utf-16", "utf-16-le", "utf-16-be", "utf-32"]
)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("ending", CONTENTS)
def test_a_file_of_records_can_be_read_after_the_command_of_the_message(
    tmp_path: Path, ending: str, packed: bool, encoding: str
) -> None:
    content = CONTENTS[ending].encode(encoding)
    file = tmp_path / f"my data{ending}{'.gz' * packed}"
    file.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(UserError) as error:
        read_records(file)
    assert says(str(error.value), file, "not UTF-8", "byte", "line")
    converted(str(error.value))
    assert read_records(tmp_path / f"my data.utf8{ending}") == [RECORD]


@pytest.mark.parametrize(
    ("content", "place", "command"),
    [
        (b"red\nGr\xfc\xdfe", "byte 6 is 0xfc (line 2)", "iconv -f WINDOWS-1252"),
        (b"Gr\x81\xfc", "byte 2 is 0x81 (line 1)", "iconv -f ISO-8859-1"),
        ("Grüße".encode() + b"\xff", "byte 7 is 0xff (line 1)", "-f UTF-8 -t UTF-8 -c"),
        (b"red\nblue\0", "byte 8 is NUL (line 2)", "tr -d"),
    ],
)
def test_the_command_is_for_what_is_wrong(content: bytes, place: str, command: str) -> None:
    assert says(explain_not_utf8(Path("a.txt"), io.BytesIO(content)), "a.txt", place, command)


@pytest.mark.parametrize("ending", [".csv", ".txt"])
def test_a_nul_byte_is_no_text(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"a{ending}"
    file.write_bytes(b"text\nred\0\n")
    with pytest.raises(UserError) as error:
        read_records(file)
    assert says(str(error.value), "byte 8 is NUL (line 2)")
    converted(str(error.value))
    assert read_records(tmp_path / f"a.utf8{ending}")[0]["text"].strip().endswith("red")


def _prompts(file: Path) -> object:
    return records_of(GenerateOptions(result="model", prompts=file))


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("recipe.yaml", load_yaml),
        ("template.jinja", read_template),
        ("prompts.txt", _prompts),
        ("prompts.md", _prompts),
        ("prompts.jsonl", _prompts),
    ],
)
def test_other_texts_too(tmp_path: Path, name: str, read: Callable[[Path], object]) -> None:
    file = tmp_path / name
    file.write_bytes(b"red\nGr\xfc\xdfe")
    with pytest.raises(UserError) as error:
        read(file)
    assert says(str(error.value), file, "byte 6 is 0xfc (line 2)", "iconv -f WINDOWS-1252")
