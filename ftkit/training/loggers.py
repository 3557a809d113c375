"""Loggers: TensorBoard and Weights & Biases."""

import importlib.util
import secrets
from contextlib import suppress
from typing import Literal

from lightning.fabric.loggers.logger import Logger
from lightning.fabric.loggers.tensorboard import TensorBoardLogger

from ftkit.config.plan import Plan
from ftkit.errors import UserError
from ftkit.strategies.distributed import rank
from ftkit.training.journal import Journal


class _TensorBoard(TensorBoardLogger):
    """Does not end a run whose last values it cannot write."""

    def finalize(self, status: str) -> None:
        """Write what is not written yet."""
        with suppress(OSError):
            super().finalize(status)


class Loggers:
    """The loggers of a run; one that cannot write is left out from then on."""

    def __init__(self, loggers: list[Logger], name: str, journal: Journal) -> None:
        """Begin; `name` is what the recipe calls them."""
        self._loggers, self._name, self._journal = loggers, name, journal
        for logger in loggers:
            logger.save()

    def log(self, values: dict[str, float], step: int) -> None:
        """Show values of a step."""
        if rank() > 0:
            return
        for logger in list(self._loggers):
            try:
                logger.log_metrics(values, step=step)
            except (OSError, ValueError) as error:  # TensorBoard: ValueError from OSError
                cause = error.__context__ or error
                if not isinstance(cause, OSError):
                    raise
                self._loggers.remove(logger)
                self._journal.warn(
                    f"{self._name} gets no values any more ({cause.strerror}); "
                    "metrics.csv has all of them"
                )

    def finalize(self, status: Literal["success", "failed"]) -> None:
        """Write what is not written yet."""
        for logger in self._loggers:
            logger.finalize(status)


def make_loggers(plan: Plan, *, start_step: int, run_ids: dict[str, str]) -> list[Logger]:
    """The loggers beside metrics.csv; they go on where an earlier session left off.

    Args:
        plan: names the logger.
        start_step: steps done before. TensorBoard takes back what it shows of later ones.
        run_ids: how a logger knows the run, by its name. On rank 0, that of a new W&B run is
            added, so that it can be saved before W&B is asked for anything.
    """
    recipe = plan.recipe
    if recipe.logger_name == "tensorboard":
        first_step = start_step + 1 if start_step else 0  # 0: the validation before all steps
        return [_TensorBoard(recipe.out_dir, name="tensorboard", version="", purge_step=first_step)]
    if recipe.logger_name == "wandb":
        if importlib.util.find_spec("wandb") is None:
            raise UserError(
                "logger_name is wandb, but W&B is not installed. Try pip install wandb, or "
                "--logger_name tensorboard."
            )
        from lightning.pytorch.loggers import WandbLogger  # with all of Lightning, in seconds

        is_known = "wandb" in run_ids
        if not is_known and rank() == 0:
            run_ids["wandb"] = secrets.token_hex(4)
        return [
            WandbLogger(
                save_dir=recipe.out_dir,
                project=recipe.log.project,
                name=recipe.log.run,
                group=recipe.log.group,
                id=run_ids.get("wandb"),
                resume="must" if is_known else "allow",
            )
        ]
    return []
