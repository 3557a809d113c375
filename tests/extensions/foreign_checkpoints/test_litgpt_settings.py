"""LitGPT's `hyperparameters.yaml`: each of its keys is honoured, refused or named as not used."""

import inspect
import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from foreign_checkpoints import KEPT, recipe
from messages import key_words, says

from ftkit.errors import UserError
from ftkit.extensions.foreign_checkpoints.command import import_run
from ftkit.extensions.foreign_checkpoints.commands import ImportOptions
from ftkit.extensions.foreign_checkpoints.trainers import _KNOWN, LitgptRun

Settings = dict[str, Any]


def changed(directory: Path, case: str, change: Callable[[Settings], Any]) -> Path:
    """A copy of a checkpoint of LitGPT with other settings."""
    source = directory / case / "step-000003"
    shutil.copytree(KEPT / case / "step-000003", source)
    file = source / "hyperparameters.yaml"
    settings = yaml.safe_load(file.read_text())
    change(settings)
    file.write_text(json.dumps(settings))
    return source


def renamed(old: str, new: str) -> Callable[[Settings], Any]:
    def change(settings: Settings) -> None:
        group, _, name = old.rpartition(".")
        values = settings[group] if group else settings
        values[new.rpartition(".")[2]] = values.pop(name)

    return change


def given(key: str, value: Any) -> Callable[[Settings], Any]:
    group, _, name = key.rpartition(".")
    return lambda settings: (settings[group] if group else settings).update({name: value})


def imported(source: Path, directory: Path) -> None:
    config = (str(recipe(directory)),)
    import_run(ImportOptions(source=source, out=directory / "run", config=config))


def test_all_keys_of_the_installed_litgpt_are_known() -> None:
    from litgpt import pretrain
    from litgpt.args import TrainArgs
    from litgpt.finetune import full, lora

    setups = (full.setup, lora.setup, pretrain.setup)
    written = {name for setup in setups for name in inspect.signature(setup).parameters}
    assert written | {f"train.{field.name}" for field in fields(TrainArgs)} <= _KNOWN


@pytest.mark.parametrize(
    ("old", "new"),
    [("lora_mlp", "lora_mpl"), ("lora_alpha", "lora_alhpa"), ("lora_r", "lora_rank")],
)
def test_an_unknown_key_of_the_adapter_is_refused_with_the_nearest(
    tmp_path: Path, old: str, new: str
) -> None:
    source = changed(tmp_path, "litgpt-lora", renamed(old, new))
    with pytest.raises(UserError, match=key_words("hyperparameters.yaml", new, old)):
        LitgptRun(source)


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        ("litgpt-lora", renamed("optimizer", "optimiser"), ("optimiser", "optimizer")),
        (
            "litgpt",
            renamed("train.global_batch_size", "train.global_batchsize"),
            ("train.global_batchsize", "train.global_batch_size"),
        ),
        ("litgpt", given("train.max_tokens", 1000), ("not taken over: train.max_tokens 1000",)),
        ("litgpt", given("train.tie_embeddings", True), ("train.tie_embeddings true",)),
    ],
)
def test_another_key_that_is_not_used_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    case: str,
    change: Callable[[Settings], Any],
    words: tuple[str, ...],
) -> None:
    imported(changed(tmp_path, case, change), tmp_path)
    assert says(capsys.readouterr().out, *words)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lora_new", False),
        ("lora_new", None),
        ("train.new", 0),
        ("log.new", 1),
        ("eval.new", 1),
        ("data.new", 1),
    ],
)
def test_a_key_of_a_newer_version_that_is_off_or_plays_no_role_passes(
    tmp_path: Path, key: str, value: Any
) -> None:
    assert not LitgptRun(changed(tmp_path, "litgpt", given(key, value)))._notes


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantize", "bnb.nf4"),
        ("optimizer", "SGD"),
        ("optimizer", {"class_path": "bitsandbytes.optim.PagedAdamW", "init_args": {"lr": 0.1}}),
        ("lora_dropout", 0.5),
    ],
)
def test_what_an_adapter_is_trained_with_is_taken_over(
    tmp_path: Path, key: str, value: Any
) -> None:
    source = changed(tmp_path, "litgpt-lora", given(key, value))
    assert LitgptRun(source).recipe_keys()[key] == value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lora_dropout", "x"),
        ("lora_r", 4.5),
        ("train.max_steps", [8]),
        ("train.min_lr", "low"),
        ("train", [1]),
        ("optimizer", [1]),
        ("optimizer", {"class_path": "os.system", "init_args": {}}),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    source = changed(tmp_path, "litgpt-lora", given(key, value))
    with pytest.raises(UserError, match=key_words(key)):
        imported(source, tmp_path)


def test_an_adapter_of_layers_that_its_settings_leave_out_is_refused(tmp_path: Path) -> None:
    source = changed(tmp_path, "litgpt-lora", given("lora_mlp", False))
    with pytest.raises(UserError, match=key_words("fc_1", "not train")):
        imported(source, tmp_path)
    assert not (tmp_path / "run").exists()
