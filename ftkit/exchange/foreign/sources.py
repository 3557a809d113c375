"""Kinds of foreign checkpoints, told by the files that a directory holds."""

from pathlib import Path

from ftkit.errors import UserError
from ftkit.exchange.foreign.formats.distributed import DCP_METADATA, DistributedRun
from ftkit.exchange.foreign.formats.lightning import LightningRun, is_sharded
from ftkit.exchange.foreign.formats.litgpt import LITGPT_ADAPTER, LITGPT_WEIGHTS, LitgptRun
from ftkit.exchange.foreign.formats.trainer import STATE, TrainerRun
from ftkit.exchange.foreign.formats.zero import DeepSpeedRun, zero_directory
from ftkit.exchange.foreign.state import ForeignRun
from ftkit.utils.damaged_files import reading

IMPORTABLE = (
    "a checkpoint-N of transformers' Trainer, TRL or axolotl; a directory of DeepSpeed or of "
    "torch.distributed.checkpoint; a .ckpt of Lightning; or a step-N of LitGPT"
)
"""What can be imported, in words."""


def open_run(source: Path) -> ForeignRun:
    """The foreign checkpoint in a directory or file.

    Raises:
        UserError: there is none of a kind that is known, or its small files are damaged.
    """
    if not source.exists():
        raise UserError(f"{source} does not exist. Give {IMPORTABLE}.")
    with reading(source, IMPORTABLE, advice="Copy the whole checkpoint again."):
        return _opened(source)


def _opened(source: Path) -> ForeignRun:
    if source.is_file():
        if source.suffix == ".ckpt":
            return LightningRun(source)
        if source.name in (LITGPT_WEIGHTS, LITGPT_ADAPTER):
            return LitgptRun(source.parent)
    elif (source / STATE).is_file():
        return TrainerRun(source)
    elif zero_directory(source) is not None:
        return DeepSpeedRun(source)
    elif is_sharded(source):
        return LightningRun(source)
    elif (source / DCP_METADATA).is_file():
        return DistributedRun(source)
    elif any((source / name).is_file() for name in (LITGPT_WEIGHTS, LITGPT_ADAPTER)):
        return LitgptRun(source)
    elif inside := list(source.glob(f"*/{STATE}")):
        newest = max(inside, key=lambda file: file.stat().st_mtime).parent
        raise UserError(f"{source} holds checkpoints, and is none itself. Try {newest}.")
    raise UserError(f"{source} is no checkpoint that ftkit knows. Give {IMPORTABLE}.")
