"""ftkit convert: the printed recipe is the one that ftkit finetune reads, and each key is told."""

from pathlib import Path

import pytest
import yaml
from messages import key_words, says

from ftkit.cli.app import run
from ftkit.errors import UserError
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


def test_the_recipe_comes_before_what_is_said_of_it(printed: str) -> None:
    recipe, _, notes = printed.partition("\n\n")
    assert yaml.safe_load(recipe) == yaml.safe_load(printed)
    assert all(line.startswith("#") for line in notes.splitlines())


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


SECRETS = {
    "wandb_api_key": "supersecret1",
    "hub_model_id": f"hf_{'aB3' * 11}",
    "hf_token": "two words supersecret2",
    "swanlab_api_key": "supersecret3",
    "model_config": {"api_key": "supersecret4"},
    "output_dir": "https://me:supersecret5@host/out",
}


@pytest.mark.parametrize("command", ["convert", "plan"])
@pytest.mark.parametrize("key", SECRETS)
def test_a_secret_of_a_file_is_neither_printed_nor_written(
    command: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "their.yml"
    entry = {"path": "https://me:supersecret6@host/d.json", "type": "chat_template"}
    keys = {k: v for k, v in KEYS.items() if k != "lisa_n_layers"} | {"datasets": [entry]}
    more: tuple[dict[str, str], ...] = ({}, {"learning_rate": "fast"})
    for extra in more:
        file.write_text(yaml.safe_dump(keys | extra | {key: SECRETS[key]}))
        message = ""
        try:
            run([command, str(file)])
        except UserError as error:
            message = str(error)
        printed = "".join(capsys.readouterr()) + message
        assert printed and "supersecret" not in printed and "aB3aB3" not in printed
    assert says(message, "learning_rate: fast")


def test_a_variable_is_named_in_the_place_of_a_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "their.yml"
    keys = {k: v for k, v in KEYS.items() if k != "lisa_n_layers"}
    file.write_text(yaml.safe_dump(keys | {"wandb_api_key": "supersecret1", "hf_token": "x y"}))
    with pytest.raises(UserError, match=key_words("HF_TOKEN ... WANDB_API_KEY")):
        run(["convert", str(file)])
    words = [*("--without", "wandb_api_key"), *("--without", "hf_token")]
    assert run(["convert", str(file), *words]) == 0
    assert says(capsys.readouterr().out, "wandb_api_key ... $WANDB_API_KEY")


def test_keys_and_values_of_a_file_move_nothing_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "their\x1b[31m.yml"
    odd = "a\x1b]0;owned\x07b\u202e"
    keys = {k: v for k, v in KEYS.items() if k != "lisa_n_layers"} | {"output_dir": odd}
    file.write_text(yaml.safe_dump(keys))
    assert run(["convert", str(file)]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said and "\u202e" not in said
    assert yaml.safe_load(said)["out_dir"] == odd
    file.write_text(yaml.safe_dump(keys | {odd: odd}))
    with pytest.raises(UserError) as caught:
        run(["convert", str(file)])
    assert "ab: ab:" in str(caught.value) and "owned" not in str(caught.value)
