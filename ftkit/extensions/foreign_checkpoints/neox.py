"""What a run of GPT-NeoX says of its data: the configuration beside its state, and its position.

GPT-NeoX counts micro-batches: it continues at micro-batch (iteration x gradient_accumulation_steps)
modulo those of an epoch of its loader (shift_and_wrap_data_loaders in megatron/data/data_utils.py).
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftkit.extensions.foreign_checkpoints.recipe import ImportRecipe, PositionInData
from ftkit.extensions.foreign_checkpoints.state import ForeignState
from ftkit.extensions.neox_data.source import NAME, NeoxOptions, foreign_keys
from ftkit.utils.yaml_files import load_yaml

_CONFIGURATION = "configs"
"""Directory beside the state into which GPT-NeoX copies the files of its configuration."""


def configured_keys(directory: Path, ranks: int) -> dict[str, Any]:
    """Keys of a recipe that follow from the configuration in a checkpoint; none without one.

    Args:
        directory: of the files of all ranks.
        ranks: among which a micro-batch was divided.

    Raises:
        UserError: a file of the configuration cannot be read.
    """
    settings: dict[str, Any] = {}
    for file in sorted((directory / _CONFIGURATION).glob("*")):
        settings |= {str(key).replace("-", "_"): value for key, value in load_yaml(file).items()}
    batches = _batches(settings, ranks)
    if batches is None:
        return {}
    train_batch_size, accumulated = batches
    train: dict[str, Any] = {"global_batch_size": train_batch_size}
    if isinstance(steps := settings.get("train_iters"), int):
        train |= {"max_steps": steps, "epochs": None}
    keys: dict[str, Any] = {"train": train}
    if settings.get("data_path") or settings.get("train_data_paths"):
        names = [field.name for field in dataclasses.fields(NeoxOptions)]
        given = {name: settings[name] for name in names if settings.get(name) is not None}
        given |= foreign_keys(settings)
        given |= {
            "train_batch_size": train_batch_size,
            "gradient_accumulation_steps": accumulated,
        }
        keys["data"] = {"class_path": NAME, "init_args": given}
    return keys


def _batches(settings: Mapping[str, Any], ranks: int) -> tuple[int, int] | None:
    """Samples of a step and its micro-batches, as GPT-NeoX derives them; None: it says neither."""
    whole, micro = settings.get("train_batch_size"), settings.get("train_micro_batch_size_per_gpu")
    accumulated = settings.get("gradient_accumulation_steps") or 1
    if any(type(one) not in (int, type(None)) for one in (whole, micro, accumulated)):
        return None
    if whole is None:
        return None if micro is None else (micro * accumulated * ranks, accumulated)
    return whole, accumulated


def position_of_neox(
    state: ForeignState, options: NeoxOptions, recipe_source: ImportRecipe, of_epoch: int
) -> PositionInData:
    """Position at which GPT-NeoX would have gone on, in samples of its own order.

    Args:
        state: of its run, with the iteration.
        options: of the data.
        recipe_source: what the user and the checkpoint say.
        of_epoch: samples of its loader.
    """
    assert state.iteration is not None
    batch, micro_batch = options.batch_size, options.micro_batch
    keys: dict[str, Any] = {}
    if not recipe_source.gives("global_batch_size"):
        keys = {"train": {"global_batch_size": batch}}
    taken = recipe_source.read().train.global_batch_size if not keys else batch
    samples = state.iteration * batch
    done = state.iteration * options.gradient_accumulation_steps
    of_loader = of_epoch // micro_batch
    place = (
        f"position in the data: sample {samples % of_epoch:,} of {of_epoch:,} (iteration "
        f"{state.iteration:,} x gradient_accumulation_steps {options.gradient_accumulation_steps}: "
        f"micro-batch {done % of_loader:,} of {of_loader:,}, each of {micro_batch:,} samples, as "
        "GPT-NeoX counts)"
    )
    order = (
        "taken over: the order of the samples. The next ones are those that GPT-NeoX would have "
        "taken"
    )
    lines = [place, order]
    if state.samples is not None and state.samples != samples:
        lines.append(
            f"differs: the steps so far took {state.samples:,} samples, of another batch size. "
            "GPT-NeoX counts all steps with its present one, so that some samples repeat or are "
            "skipped, and so they are here"
        )
    if taken != batch:
        lines.append(
            f"differs: train.global_batch_size is {taken:,}, but a step of GPT-NeoX took {batch:,} "
            "samples. Their order stays the same"
        )
    if options.eod_mask_loss:
        lines.append(
            "differs: GPT-NeoX averages the loss over the labels of each micro-batch, and ftkit "
            "over those of the whole step, which differ with eod_mask_loss"
        )
    return PositionInData(samples, lines, keys)
