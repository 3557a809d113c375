"""TensorBoard: files in the directory of a run."""

from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import Logger
from lightning.fabric.loggers.tensorboard import TensorBoardLogger

from ftkit.recipe.recipe import Log


def make(out_dir: Path, log: Log, run_ids: dict[str, str], start_step: int) -> Logger:
    """Make the logger; see `ftkit.recipe.loggers.LoggerRow`. Values of later steps are removed."""
    first_step = start_step + 1 if start_step else 0  # 0: the validation before all steps
    return _TensorBoard(out_dir, name="tensorboard", version="", purge_step=first_step)


class _TensorBoard(TensorBoardLogger):
    """Lightning's logger, which does not end a run if it cannot write the last values."""

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_: Any, **__: Any) -> None:
        """Do nothing: TensorBoard would show them as another run with a dummy metric."""

    def finalize(self, status: str) -> None:
        """Write all queued values."""
        with suppress(OSError):
            super().finalize(status)
