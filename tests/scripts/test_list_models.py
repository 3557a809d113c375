"""The list of models in docs/models.md is what comes out of trying them."""

import re
import subprocess
import sys

import pytest
from command import ROOT, command_environment

TEXT = (ROOT / "docs/models.md").read_text()


def lines(*types: str) -> list[str]:
    """Lines that the script prints."""
    script = ROOT / "scripts/list_models"
    ran = subprocess.run(
        [sys.executable, script, *types],
        capture_output=True,
        text=True,
        check=True,
        env=command_environment(),
    )
    return [line for line in ran.stdout.splitlines() if line.startswith("| `")]


def test_every_causal_language_model_of_transformers_is_in_the_list() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    assert re.findall(r"^\| `([\w.-]+)` \|", TEXT, re.MULTILINE) == sorted(KNOWN)


def test_the_numbers_above_the_list_are_those_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from benchmarking.model_list import START, counted

    rows = [line for line in TEXT.partition(START)[2].splitlines() if line.startswith("| `")]
    assert f"\n{counted(rows)}\n" in TEXT


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ("mixtral", "mamba"),
        pytest.param(("llama", "gpt2", "hy_v4"), marks=pytest.mark.matrix),
    ],
    ids=["an adapted mixture, and a model that is none of attention", "others"],
)
def test_models_do_what_the_list_says(names: tuple[str, ...]) -> None:
    found = lines(*names)
    assert len(found) == len(names)
    assert all(line in TEXT for line in found)


@pytest.mark.matrix
def test_the_list_is_what_comes_out_now() -> None:
    assert "\n".join(lines()) in TEXT
