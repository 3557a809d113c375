"""Where LitGPT is not installed, its recipes run through transformers, and the rest is refused."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from command import command_environment, command_line
from runs import TIMEOUT_S, rows, start
from tiny import make_data, make_litgpt_only, make_llama

Ftkit = Callable[..., subprocess.CompletedProcess[str]]
RECIPE = {
    "data": {
        "class_path": "litgpt.data.JSON",
        "init_args": {
            "json_path": "data.json",
            "val_split_fraction": 0.1,
            "prompt_style": "alpaca",
            "mask_prompt": False,
        },
    },
    "precision": "32-true",
    "devices": 1,
    "lora_r": 4,
    "lora_query": True,
    "lora_value": True,
    "train": {
        "global_batch_size": 4,
        "micro_batch_size": 2,
        "max_steps": 3,
        "save_interval": 3,
        "max_seq_length": 128,
    },
}
"""As LitGPT's recipes are written."""
ABSENT = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "litgpt"]:
    del sys.modules[name]  # which a fork has from the process that it is one of
sys.modules["litgpt"] = None
"""
INSTALL = "pip install --no-deps litgpt"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("recipes")
    make_llama(directory / "base")
    make_litgpt_only(directory / "theirs", "phi-2")
    make_data(directory / "data.json")
    (directory / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    (directory / "absent").mkdir()
    (directory / "absent" / "sitecustomize.py").write_text(ABSENT)
    return directory


@pytest.fixture
def ftkit(place: Path) -> Ftkit:
    def run(*arguments: str, absent: bool = True) -> subprocess.CompletedProcess[str]:
        environment = command_environment()
        if absent:
            environment["PYTHONPATH"] = f"{place / 'absent'}:{environment['PYTHONPATH']}"
        process = start(command_line(*arguments), place, environment)
        out, err = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode is not None
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    return run


def finetune(out: str, *more: str) -> tuple[str, ...]:
    line = ("finetune", "--config", "recipe.yaml", "--checkpoint_dir", "base")
    return (*line, "--accelerator", "cpu", "--out_dir", out, *more)


@pytest.mark.slow
def test_recipes_run_through_transformers_with_the_same_losses(place: Path, ftkit: Ftkit) -> None:
    ended = ftkit(*finetune("absent-run"))
    assert ended.returncode == 0, ended.stderr
    asked = ftkit(*finetune("asked", "--model_implementation", "transformers"), absent=False)
    assert asked.returncode == 0, asked.stderr
    losses = [[row["loss"] for row in rows(place / run)] for run in ("absent-run", "asked")]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    with_litgpt = ftkit(*finetune("with"), absent=False)
    assert with_litgpt.returncode == 0, with_litgpt.stderr
    of_litgpt = [float(row["loss"]) for row in rows(place / "with")]
    assert of_litgpt == pytest.approx([float(loss) for loss in losses[0]], rel=1e-5)

    more = ("--resume", "auto", "--train.max_steps", "5")
    refused = ftkit(*finetune("with", *more))
    assert refused.returncode == 2 and INSTALL in refused.stderr
    assert "Traceback" not in refused.stderr
    on = ftkit(*finetune("with", *more), absent=False)
    assert on.returncode == 0, on.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "theirs"),
        ("plan", "base", "--model_implementation", "litgpt"),
        ("plan", "random:phi-2", "--model_implementation", "litgpt"),
        ("evaluate", "theirs", "--data", "JSON", "--data.path", "data.json"),
    ],
    ids=" ".join,
)
def test_what_needs_litgpt_is_refused_with_what_installs_it(
    ftkit: Ftkit, arguments: tuple[str, ...]
) -> None:
    ended = ftkit(*arguments)
    assert ended.returncode == 2
    assert "LitGPT is not installed" in ended.stderr and INSTALL in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_name_that_litgpt_would_know_is_not_said_to_be_unknown_to_it(ftkit: Ftkit) -> None:
    ended = ftkit("plan", "microsoft/phi-2")
    assert ended.returncode == 2
    assert "LitGPT, which knows many models by name, is not installed" in ended.stderr
