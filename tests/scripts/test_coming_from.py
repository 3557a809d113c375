"""docs/coming-from.md is made from the tables by which files of other programs are translated."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.extensions
def test_the_document_is_what_the_tables_say() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "scripts/coming_from"], capture_output=True, text=True, check=True
    ).stdout
    assert (ROOT / "docs/coming-from.md").read_text() == made, "run scripts/coming_from --write"


def test_packing_is_found_by_its_name() -> None:
    assert "## Packing" in (ROOT / "docs/coming-from.md").read_text()


@pytest.mark.extensions
def test_examples_of_a_tool_are_counted_with_what_keeps_them_out(tmp_path: Path) -> None:
    examples = tmp_path / "examples"
    examples.mkdir()
    common = "base_model: org/x\nlearning_rate: 1e-4\nadapter: lora\nlora_target_linear: true\n"
    data = "datasets:\n  - {path: org/d, type: alpaca}\n"
    (examples / "good.yml").write_text(common + data)
    (examples / "bad.yaml").write_text(common + data + "lisa_n_layers: 4\n")
    (examples / "cloud.yaml").write_text("provider: x\n")
    script = ROOT / "scripts/convert_examples"
    command = [sys.executable, script, tmp_path]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[0] == "2 configurations: 1 converted, 1 planned"
    assert said.splitlines()[1].split() == ["1", "1", "LISA"]
