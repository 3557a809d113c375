"""Loggers: TensorBoard, Weights & Biases, MLflow and Trackio, any of them at once."""

import secrets
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

from lightning.fabric.loggers.logger import Logger
from lightning.fabric.loggers.tensorboard import TensorBoardLogger

from ftkit.recipe.parsing import to_dict
from ftkit.recipe.plan import Plan
from ftkit.recipe.recipe import LoggerName, Recipe
from ftkit.redaction import redacted
from ftkit.strategies.distributed import rank
from ftkit.training.journal import Journal
from ftkit.training.services.mlflow_logger import MlflowLogger
from ftkit.training.services.trackio_logger import TrackioLogger
from ftkit.utils.names import leaves


class _TensorBoard(TensorBoardLogger):
    """Does not end a run whose last values it cannot write."""

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_: Any, **__: Any) -> None:
        """Nothing: it has them as a run of its own, with a metric that is none."""

    def finalize(self, status: str) -> None:
        """Write what is not written yet."""
        with suppress(OSError):
            super().finalize(status)


class Loggers:
    """The loggers of a run; one that cannot write or send is left out from then on."""

    def __init__(self, loggers: dict[LoggerName, Logger], recipe: Recipe, journal: Journal) -> None:
        """Begin, each with the values of the recipe."""
        self._loggers, self._journal = loggers, journal
        values = {key: value for key, value in leaves(to_dict(recipe)) if key != "access_token"}
        for name, logger in list(loggers.items()):
            with self._left_out_if_it_fails(name):
                logger.log_hyperparams(values)
                logger.save()

    def log(self, values: dict[str, float], step: int) -> None:
        """Show values of a step."""
        for name, logger in list(self._loggers.items()):
            with self._left_out_if_it_fails(name):
                logger.log_metrics(values, step=step)

    def finalize(self, status: Literal["success", "failed"]) -> None:
        """Write or send what is not there yet."""
        for name, logger in list(self._loggers.items()):
            with self._left_out_if_it_fails(name):
                logger.finalize(status)

    @contextmanager
    def _left_out_if_it_fails(self, name: LoggerName) -> Iterator[None]:
        """A service may fail in any way; TensorBoard, which writes here, for want of space."""
        try:
            yield
        except Exception as error:
            # TensorBoard: ValueError from OSError
            cause = error if isinstance(error, OSError) else error.__context__
            if isinstance(cause, OSError) and cause.strerror:
                reason = cause.strerror
            elif name == "tensorboard":
                raise
            else:
                lines = redacted(str(error)).strip().splitlines() or [""]
                reason = f"{type(error).__name__}: {lines[0][:300]}"
            del self._loggers[name]
            self._journal.warn(
                f"{name} gets no values any more ({reason}); metrics.csv has all of them"
            )


def make_loggers(
    plan: Plan, *, start_step: int, run_ids: dict[str, str]
) -> dict[LoggerName, Logger]:
    """The loggers beside metrics.csv; they go on where an earlier session left off.

    Args:
        plan: names the loggers.
        start_step: steps done before. TensorBoard takes back what it shows of later ones.
        run_ids: how a logger knows the run, by its name. That of a new one is added, of W&B here,
            so that it can be saved before W&B is asked for anything.

    Returns:
        By their names; rank 0 alone has any.
    """
    recipe = plan.recipe
    made: dict[LoggerName, Logger] = {}
    if rank() > 0:
        return made
    for name in recipe.extra_loggers:
        if name == "tensorboard":
            first_step = start_step + 1 if start_step else 0  # 0: the validation before all steps
            made[name] = _TensorBoard(
                recipe.out_dir, name="tensorboard", version="", purge_step=first_step
            )
        elif name == "wandb":
            made[name] = _wandb(recipe, run_ids)
        elif name == "mlflow":
            made[name] = MlflowLogger(recipe.out_dir, recipe.log, run_ids)
        elif name == "trackio":
            made[name] = TrackioLogger(recipe.out_dir, recipe.log, run_ids)
    return made


def _wandb(recipe: Recipe, run_ids: dict[str, str]) -> Logger:
    from lightning.pytorch.loggers import WandbLogger  # with all of Lightning, in seconds

    is_known = "wandb" in run_ids
    if not is_known:
        run_ids["wandb"] = secrets.token_hex(4)
    return WandbLogger(
        save_dir=recipe.out_dir,
        project=recipe.log.project,
        name=recipe.log.run,
        group=recipe.log.group,
        id=run_ids["wandb"],
        resume="must" if is_known else "allow",
    )
