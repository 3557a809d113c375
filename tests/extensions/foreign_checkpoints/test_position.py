"""The position in the data at which a foreign run goes on: what its files say, and no more."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from foreign_checkpoints import KEPT, recipe
from messages import says

from ftkit.checkpoint.metadata import read_metadata
from ftkit.checkpoint.store import Store
from ftkit.extensions.foreign_checkpoints.command import import_run
from ftkit.extensions.foreign_checkpoints.commands import ImportOptions
from ftkit.extensions.foreign_checkpoints.recipe import _accumulated
from ftkit.extensions.foreign_checkpoints.trainers import LitgptRun
from ftkit.recipe.parsing import read_recipe


@pytest.mark.parametrize(
    ("state", "train", "samples", "batch", "words"),
    [
        ({}, {}, 18, 6, "sample 18 (after 3 epochs ... 6"),
        ({"train_batch_size": 2}, {}, 18, 6, "sample 18 (after 3 epochs"),
        # 2 steps of 1 sample, of other data: 16 samples an epoch.
        (
            {"global_step": 2, "train_batch_size": 1, "epoch": 0.125},
            {},
            *(2, 6),
            "sample 2 (2 steps of 1 ... 0.125 epochs of 6 samples are 0.75 batches of 1",
        ),
        # The recipe leaves the batch open.
        ({}, {"global_batch_size": None}, 18, 6, "sample 18"),
        ({"train_batch_size": 2}, {"global_batch_size": None}, 18, 6, "sample 18"),
        (
            {"global_step": 2, "train_batch_size": 1, "epoch": 0.125},
            {"global_batch_size": None},
            *(2, 1),
            "sample 2 ... differs ... 0.125 epochs of 6 samples are 0.75 batches of 1",
        ),
        # As many samples, but fewer steps than they are: whole batches, in steps of another size.
        (
            {"global_step": 2, "train_batch_size": 1, "epoch": 3.0},
            {},
            *(2, 6),
            "sample 2 ... differs ... 0.6667 steps ... 6 samples in steps of 6 are 1",
        ),
        # Files of older versions say less.
        ({"train_batch_size": None}, {}, 18, 6, "sample 18 (after 3 epochs"),
        ({"train_batch_size": None, "epoch": None}, {}, 18, 6, "3 steps ... global_batch_size"),
    ],
)
def test_the_position_follows_from_the_file_and_differences_are_reported(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    state: Mapping[str, Any],
    train: Mapping[str, Any],
    samples: int,
    batch: int,
    words: str,
) -> None:
    source, run = tmp_path / "checkpoint-3", tmp_path / "run"
    shutil.copytree(KEPT / "trainer/checkpoint-3", source)
    file = source / "trainer_state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(state)))
    config = recipe(tmp_path, **train)
    content = json.loads(config.read_text())
    if train:
        del content["train"]["global_batch_size"], content["train"]["micro_batch_size"]
    config.write_text(json.dumps(content))
    import_run(ImportOptions(source=source, out=run, config=(str(config),)))
    said = capsys.readouterr().out
    assert says(said, words)
    (step,) = Store(run / "checkpoints").steps()
    assert read_metadata(Store(run / "checkpoints").path(step)).samples == samples
    assert read_recipe([run / "recipe.yaml"], [], method="full").train.global_batch_size == batch


@pytest.mark.parametrize(
    ("step", "epochs", "micro_batch", "of_epoch", "accumulated"),
    [
        (2, 0.125, 1, 16, 1),
        (2, 0.125, 1, 257, None),
        (10, 10 * 8 / 250, 1, 250, 8),
        (32, 1.0, 1, 250, 8),  # the last step of the epoch has 2
        (31, 1.0, 1, 250, None),
        (31, 1.0, 1, 248, 8),
        (40, 1 + 8 * 8 / 250, 1, 250, 8),
        (7, 7 / 13, 4, 50, 1),
        (0, 0.0, 4, 50, None),
    ],
)
def test_the_accumulated_batches_follow_from_the_epoch_of_equal_data(
    step: int, epochs: float, micro_batch: int, of_epoch: int, accumulated: int | None
) -> None:
    assert _accumulated(step, epochs, micro_batch, of_epoch) == accumulated


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({"epochs": 2, "max_steps": 8}, (2, 8)),
        ({"epochs": 2, "max_steps": None}, (2, None)),
        ({"epochs": None, "max_steps": 8}, (None, 8)),
    ],
)
def test_a_run_of_litgpt_ends_at_the_first_of_its_two_limits(
    tmp_path: Path, train: Mapping[str, Any], expected: tuple[int | None, int | None]
) -> None:
    source = tmp_path / "step-000003"
    shutil.copytree(KEPT / "litgpt/step-000003", source)
    file = source / "hyperparameters.yaml"
    file.write_text(json.dumps(yaml.safe_load(file.read_text()) | {"train": train}))
    keys = LitgptRun(source).recipe_keys()["train"]
    assert (keys["epochs"], keys.get("max_steps")) == expected
