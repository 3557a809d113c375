"""Weights & Biases: a run of its service."""

import secrets
from pathlib import Path

from lightning.fabric.loggers.logger import Logger

from ftkit.recipe.recipe import Log


def make(out_dir: Path, log: Log, run_ids: dict[str, str], start_step: int) -> Logger:
    """Make the logger; see `ftkit.recipe.loggers.LoggerRow`."""
    from lightning.pytorch.loggers import WandbLogger  # imports all of Lightning, in seconds

    is_known = "wandb" in run_ids
    if not is_known:
        run_ids["wandb"] = secrets.token_hex(4)
    return WandbLogger(
        save_dir=out_dir,
        project=log.project,
        name=log.run,
        group=log.group,
        id=run_ids["wandb"],
        # "must" fails if W&B does not have the run, instead of beginning an empty one of the same
        # id.
        resume="must" if is_known else "allow",
    )
