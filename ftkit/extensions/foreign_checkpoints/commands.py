"""Commands of the extension, with their options."""

from dataclasses import dataclass
from pathlib import Path

from ftkit.cli.command import Command
from ftkit.recipe.options import CommonOptions, keys_beside, option, word
from ftkit.recipe.parsing import Override


@dataclass(frozen=True, kw_only=True)
class ImportOptions(CommonOptions):
    """Options of ftkit import."""

    source: Path = word("SOURCE", ask="which checkpoint to import?")
    """Checkpoint of the other program: its directory or file."""
    out: Path = option(ask="where to write the run? Try --out out/imported.", placeholder="DIR")
    """Directory of the new run."""
    config: tuple[str, ...] = option((), placeholder="RECIPE.yaml")
    """Recipes with the data and everything else that the checkpoint does not contain. Later ones
    override earlier ones, and options override all of them. -: standard input."""
    overwrite: bool = False
    """Replace the contents of DIR."""
    keys: tuple[Override, ...] = keys_beside()
    """Keys of the recipe; keys that are not set are read from the checkpoint."""


ROWS = (
    Command(
        name="import",
        summary="continue training from a checkpoint of another program",
        text="Turn a checkpoint of another program into a run: transformers' Trainer, TRL or "
        "axolotl, DeepSpeed (ZeRO 1 to 3, any number of ranks), torch.distributed.checkpoint, "
        "LitGPT, or a .ckpt file of Lightning. Weights and optimizer state are matched by "
        "parameter name; step, learning rate and position in the data are kept; a message "
        "lists what is not. No code in the checkpoint is executed. Continue the run with "
        "--resume auto, on any hardware.",
        options=ImportOptions,
        function="ftkit.extensions.foreign_checkpoints.confined:import_confined",
        usage=("SOURCE --out DIR [--config RECIPE.yaml] [--KEY VALUE ...]",),
        examples=(
            "trl-out/checkpoint-500 --out out/imported --config RECIPE.yaml",
            "trl-out/checkpoint-500 --out out/imported --data JSON --data.path FILE",
        ),
    ),
)
