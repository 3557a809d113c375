"""Command lines in documents are ones that the command understands."""

import re
import shlex
from pathlib import Path

import pytest
from command import ROOT

import ftkit.planner.command  # noqa: F401 (libraries set environment variables)
from ftkit.cli.app import run
from ftkit.config.recipe import FINETUNE
from ftkit.errors import UserError

DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    ROOT / "recipes/README.md",
    ROOT / "notebooks/README.md",
]
NOT_UNDERSTOOD = re.compile(
    r"is not an? (option|command|key)|needs a value|is missing: |does not belong|but must be|"
    r"does not exist\. (Did|Check)"
)


def command_lines(text: str) -> list[str]:
    """Those of `ftkit` in blocks of code, each on one line."""
    blocks = re.findall(r"^```(?:bash|console|sh)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    commands = [line.strip().removeprefix("$ ") for line in lines]
    return [command for command in commands if command.startswith("ftkit ")]


LINES = sorted({line for file in DOCUMENTS for line in command_lines(file.read_text())})


def test_documents_show_every_kind_of_command() -> None:
    shown = {line.split()[1] for line in LINES}
    assert shown >= {"finetune", "finetune_full", "plan", "sweep", "compare", "checkpoints"}
    assert shown >= {"download", "generate", "evaluate", "merge", "export"}


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_in_a_document_is_understood(
    line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is trained, fetched or written; runs that it names need not be there."""
    monkeypatch.setattr("ftkit.pretrained.hub.download", lambda *_, **__: tmp_path)
    monkeypatch.setattr("ftkit.planner.command.plan_all", lambda *_, **__: 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    name, *words = shlex.split(line, comments=True)[1:]
    if name in FINETUNE:
        own = f"recipes/tiny-llama-{FINETUNE[name]}.yaml"
        words = [own if word.startswith("out/") else word for word in words]
        words.append("--print_config")
    elif name == "sweep":
        words.append("--dry_run")
    try:
        code, refusal = run([name, *words]), ""
    except UserError as error:
        code, refusal = 2, str(error)
    assert not NOT_UNDERSTOOD.search(refusal)
    if name in (*FINETUNE, "sweep", "plan", "download"):
        assert (code, refusal) == (0, "")
    assert list(tmp_path.iterdir()) == [tmp_path / "recipes"]
