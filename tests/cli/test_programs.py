"""docs/programs.md names every command that writes JSON, and keys that are in what it writes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from command import ROOT
from compared_runs import make_run
from looks import make_settings, questions, write_records

from ftkit.cli.app import run
from ftkit.cli.commands import FTKIT
from ftkit.cli.parser import declared

_ROW = re.compile(r"^\| `ftkit ([a-z ]+)` \| (.*) \|$", re.MULTILINE)
_KEY = re.compile(r"`([a-z_]+)`")
_NO_KEYS = {"true", "false", "null", "plan"}
"""Words of the page that are values, or names of commands."""


def documented() -> dict[str, set[str]]:
    """Keys that the page names of each command."""
    text = (ROOT / "docs/programs.md").read_text()
    return {name: {*_KEY.findall(said)} - _NO_KEYS for name, said in _ROW.findall(text)}


def keys_in(value: Any) -> set[str]:
    """All keys of a value, at any depth."""
    if isinstance(value, dict):
        return {*value} | {key for item in value.values() for key in keys_in(item)}
    return {key for item in value for key in keys_in(item)} if isinstance(value, list) else set()


@pytest.mark.extensions
def test_every_command_that_writes_json_is_there() -> None:
    writes = {
        command.name
        for command in FTKIT.commands()
        for item in declared(command.options)
        if item.name == "format" and "json" in item.choices
    }
    assert documented().keys() == writes


@pytest.mark.extensions
@pytest.mark.parametrize(
    "words",
    [
        ["compare", "runs"],
        ["extensions"],
        ["data", "model", "--data", "JSON", "--data.path", "data.jsonl", "--show", "1"],
        ["plan", "model", "--data", "JSON", "--data.path", "data.jsonl", "--gpu", "1MiB"],
    ],
    ids=lambda words: words[0],
)
def test_what_the_page_names_is_in_the_json(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    make_settings(Path("model"))
    records = questions(40)
    records[0]["output"] += " blue" * 300  # reason for a change, and for a finding
    write_records(Path("data.jsonl"), [*records * 2])
    for name in ("a", "b"):
        make_run(Path("runs") / name)
    Path("runs/c").mkdir()
    (Path("runs/c") / "recipe.yaml").write_text("checkpoint_dir: base\n")
    run([*words, "--format", "json"])
    found = keys_in(json.loads(capsys.readouterr().out))
    assert documented()[words[0]] - found <= _OF_OTHER_CASES.get(words[0], set())


_OF_OTHER_CASES = {"plan": {"changes", "title", "command"}}
"""Keys of `--fit`, which takes a minute: they are in `tests/planning/test_command.py`."""
