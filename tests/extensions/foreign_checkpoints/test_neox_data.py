"""A run of GPT-NeoX goes on here with the very samples that GPT-NeoX would have taken next."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Command
from foreign_checkpoints import KEPT, SHALLOW, stored_of
from messages import key_words, says
from neox_orders import CORPORA, options_of, taken_by_neox
from transformers import AutoModelForCausalLM

from ftkit.checkpoint.metadata import read_metadata
from ftkit.checkpoint.store import Store
from ftkit.data.dataset import load_data
from ftkit.errors import UserError
from ftkit.extensions.foreign_checkpoints.command import import_run
from ftkit.extensions.foreign_checkpoints.commands import ImportOptions
from ftkit.models.pretrained.base_model import open_base, storage_of
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.parsing import read_recipe

STEP, RANKS = 3, 2
"""Steps after which the run of GPT-NeoX was stopped, and its ranks, under ZeRO 1."""
RATE, STEPS = 3e-3, 3
"""Learning rate, and steps that are compared."""


def stopped(place: Path, **settings: Any) -> Path:
    """A run of GPT-NeoX that was stopped, with its configuration beside its state."""
    source = place / "neox"
    shutil.copytree(KEPT / "deepspeed-bf16", source)
    configs = source / f"global_step{STEP}" / "configs"
    configs.mkdir()
    of_data = {
        "data-path": str(CORPORA / "a"),
        "split": "8,1,1",
        "seq_length": 8,
        "eod_mask_loss": False,
        "train-iters": 30,
    }
    batches = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1}
    changed = {key: value for key, value in settings.items() if key in of_data}
    others = {key: value for key, value in settings.items() if key not in of_data}
    # Two files, as GPT-NeoX's users have them, with comments and commas at the end.
    for name, values in (("data.yml", of_data | changed), ("model.yml", batches | others)):
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in values.items()]
        (configs / name).write_text("\n".join(["{", "  # of the run", *lines, "}"]))
    return source


def imported(place: Path, *keys: tuple[str, str], **settings: Any) -> Path:
    """The run, imported."""
    config = place / "recipe.yaml"
    content = {
        "checkpoint_dir": str(SHALLOW),
        "precision": "32-true",
        "accelerator": "cpu",
        "train": {"max_norm": 0.5, "micro_batch_size": 2},
        "eval": {"final_validation": False, "initial_validation": False, "max_new_tokens": 0},
    }
    config.write_text(json.dumps(content))
    source, out = stopped(place, **settings), place / "run"
    import_run(ImportOptions(source=source, out=out, config=(str(config),), keys=keys))
    return out


def position_of(run: Path) -> int:
    return read_metadata(Store(run / "checkpoints").path(STEP)).samples


def test_the_next_samples_are_those_that_gpt_neox_would_have_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = imported(tmp_path)
    said = capsys.readouterr().out
    assert says(said, "sample 18 of", "iteration 3", "taken over: the order of the samples")
    assert not says(said, "not taken over: the order") and not says(said, "differs")
    recipe = read_recipe([run / "recipe.yaml"], [], method="full")
    assert (recipe.train.global_batch_size, recipe.train.max_steps) == (6, 30)
    given = {**options_of("one"), "gradient_accumulation_steps": 1, "eod_mask_loss": False}
    assert recipe.data["init_args"] == {k: v for k, v in given.items() if k != "seed"}

    data = load_data(recipe.data, Tokenizer(SHALLOW), 64)
    order = data.epochs(recipe.seed).of(0)[position_of(run) :]
    theirs = taken_by_neox("one")[f"from_{STEP}_on_1"].tolist()
    assert [data.train[number].ids.tolist() for number in order] == theirs


@pytest.mark.parametrize(
    ("settings", "keys", "samples", "words"),
    [
        # The batch was larger before: GPT-NeoX counts all iterations with the present one.
        (
            {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 1},
            (),
            12,
            ("sample 12 of", "each of 2 samples", "differs ... took 18 samples"),
        ),
        (
            {"train_batch_size": 6, "train_micro_batch_size_per_gpu": None},
            (),
            18,
            ("each of 6 samples",),
        ),
        ({"eod_mask_loss": True}, (), 18, ("eod_mask_loss",)),
        (
            {},
            (("train.global_batch_size", "9"),),
            18,
            ("differs ... train.global_batch_size is 9 ... took 6 samples",),
        ),
        # The data may lie elsewhere here.
        ({"data-path": "/nowhere/a"}, (("data.data_path", str(CORPORA / "a")),), 18, ("18 of",)),
    ],
)
def test_the_position_is_counted_as_gpt_neox_counts_it(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, Any],
    keys: tuple[tuple[str, str], ...],
    samples: int,
    words: tuple[str, ...],
) -> None:
    run = imported(tmp_path, *keys, **settings)
    assert position_of(run) == samples
    assert says(capsys.readouterr().out, *words)


def test_data_of_another_kind_may_stand_in_their_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = imported(tmp_path, ("data", "JSON"), ("data.path", str(SHALLOW / "data")))
    assert position_of(run) == 18
    assert says(capsys.readouterr().out, "not taken over: the order of the samples")


def test_data_that_are_not_read_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=key_words("data.train_label_data_paths", "JSON")):
        imported(tmp_path, train_label_data_paths=["labels"])


def plain_losses(run: Path, samples: list[list[int]]) -> list[float]:
    """Losses of the next steps on these samples, by transformers and torch with the same state."""
    checkpoint = Store(run / "checkpoints").path(STEP)
    architecture = open_base(str(SHALLOW), None).architecture

    def of_kind(kind: str) -> dict[str, torch.Tensor]:
        return dict(storage_of(architecture, "hf").written(stored_of(checkpoint, kind).items()))

    model = AutoModelForCausalLM.from_pretrained(SHALLOW, dtype=torch.float32)
    model.load_state_dict(of_kind("parameter"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    for kind in ("exp_avg", "exp_avg_sq"):
        for name, values in of_kind(kind).items():
            state = optimizer.state[model.get_parameter(name)]
            state["step"], state[kind] = torch.tensor(float(STEP)), values.clone()
    losses = []
    for step in range(STEPS):
        ids = torch.tensor(samples[6 * step : 6 * (step + 1)])
        # All of a sample are inputs, but for its last token.
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_its_losses_go_on_on_any_ranks_as_in_a_plain_loop(ftkit: Command, tmp_path: Path) -> None:
    run = imported(tmp_path)
    expected = plain_losses(run, taken_by_neox("one")[f"from_{STEP}_on_1"].tolist())
    # Layouts by name, each with the steps that it does; the first run moves while it goes on.
    layouts: dict[str, list[tuple[int, tuple[object, ...]]]] = {
        "one, then two": [(STEPS - 1, ()), (1, ("--devices", 2))],
        "three": [(STEPS, ("--devices", 3, "--train.micro_batch_size", 1))],
        "fsdp": [(STEPS, ("--devices", 2, "--strategy", "fsdp"))],
    }
    for name, sessions in layouts.items():
        copy = tmp_path / name
        shutil.copytree(run, copy)
        resume = ("--config", copy / "recipe.yaml", "--out_dir", copy, "--resume", "auto")
        for steps, words in sessions:
            ended = ftkit("finetune_full", *resume, "--stop_after", steps, *words)
            assert ended.returncode == 0, ended.stdout + ended.stderr
        with (copy / "metrics.csv").open() as file:
            losses = [float(row["loss"]) for row in csv.DictReader(file)]
        assert losses == pytest.approx(expected, abs=1e-5), name
