"""ftkit convert: the printed recipe is the one that ftkit finetune reads, and each key is told."""

from pathlib import Path

import pytest
import yaml
from messages import says

from ftkit.cli.app import run
from ftkit.recipe.parsing import read_recipe, to_yaml

KEYS = {
    "base_model": "org/base",
    "datasets": [{"path": "org/data", "type": "chat_template"}],
    "learning_rate": "2e-4",
    "adapter": "qlora",
    "lora_r": 16,
    "lora_target_linear": True,
    "load_in_8bit": False,
    "lora_model_dir": None,
    "sample_packing": True,
    "wandb_project": "secret-plans",
    "lisa_n_layers": 4,
}


@pytest.fixture
def printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    file = tmp_path / "their.yml"
    file.write_text(yaml.safe_dump(KEYS))
    assert run(["convert", str(file), "--without", "lisa_n_layers", "--from_devices", "4"]) == 0
    return capsys.readouterr().out


def test_the_printed_recipe_trains_what_the_file_trains(printed: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(printed)
    read = read_recipe([recipe])
    assert read.train.global_batch_tokens == 4 * 512
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(read))
    assert read_recipe([again]) == read


@pytest.mark.parametrize(
    "told",
    [
        "base_model -> checkpoint_dir",
        "sample_packing -> train.global_batch_tokens",
        "wandb_project: ftkit logs to a service only if the command line says so",
        "as --without says: lisa_n_layers",
        "default of axolotl: load_in_8bit, lora_model_dir",
        "on 4 devices there",
        "What differs: ... sample_packing",
    ],
)
def test_every_key_is_told(printed: str, told: str) -> None:
    comments = " ".join(
        line.removeprefix("# ").strip() for line in printed.splitlines() if "#" in line
    )
    assert says(comments, told)
