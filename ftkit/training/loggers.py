"""Loggers of a run beside metrics.csv, any number of them at once."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from lightning.fabric.loggers.logger import Logger

from ftkit.recipe.loggers import LOGGERS
from ftkit.recipe.parsing import recipe_as_dict
from ftkit.recipe.plugin import place_in_plugin
from ftkit.recipe.recipe import Log, Recipe
from ftkit.redaction import redacted
from ftkit.strategies.distributed import rank
from ftkit.utils.names import leaves


class Loggers:
    """Loggers of a run; one that cannot write or send is dropped with a warning."""

    def __init__(
        self, loggers: Mapping[str, Logger], recipe: Recipe, warn: Callable[[str], None]
    ) -> None:
        """Start each logger with the values of the recipe.

        Args:
            loggers: from `make_loggers`, by name.
            recipe: of the run, of which all values are logged.
            warn: called if a logger fails.
        """
        self._loggers, self._warn = dict(loggers), warn
        values = dict(leaves(recipe_as_dict(recipe)))
        for name, logger in loggers.items():
            with self._dropped_on_failure(name):
                logger.log_hyperparams(values)
                logger.save()

    def log(self, values: dict[str, float], step: int) -> None:
        """Log values of a step."""
        # A copy, because a logger that fails is removed meanwhile.
        for name, logger in list(self._loggers.items()):
            with self._dropped_on_failure(name):
                logger.log_metrics(values, step=step)

    def finalize(self, status: Literal["success", "failed"]) -> None:
        """Write or send all queued values."""
        for name, logger in list(self._loggers.items()):
            with self._dropped_on_failure(name):
                logger.finalize(status)

    @contextmanager
    def _dropped_on_failure(self, name: str) -> Iterator[None]:
        # Services may fail in any way, and the disk that one writes to may be full.
        try:
            yield
        except Exception as error:
            # TensorBoard raises ValueError from OSError.
            cause = error if isinstance(error, OSError) else error.__context__
            if isinstance(cause, OSError) and cause.strerror:
                reason = cause.strerror
            else:
                # Services quote their addresses, which may contain passwords.
                lines = redacted(str(error)).strip().splitlines() or [""]
                reason = f"{type(error).__name__}: {lines[0][:300]}"
            if (place := place_in_plugin(error)) is not None:
                reason = f"{reason}, in {place}"
            del self._loggers[name]
            self._warn(f"{name} gets no values any more ({reason}); metrics.csv has all of them")


def make_loggers(
    names: Iterable[str],
    out_dir: Path,
    log: Log,
    *,
    start_step: int,
    run_ids: dict[str, str],
) -> dict[str, Logger]:
    """Create the loggers beside metrics.csv, also those of the plugin in use.

    They continue the runs of earlier sessions.

    Args:
        names: of the loggers.
        out_dir: of the run.
        log: names of the run.
        start_step: optimizer steps already done.
        run_ids: id of the run in each service, by name of the logger. New ids are added: that of
            W&B here, so that a checkpoint has it before W&B is contacted.

    Returns:
        Loggers by name; only rank 0 has any.

    Raises:
        UserError: one of the plugin cannot be made.
    """
    made: dict[str, Logger] = {}
    if rank() > 0:
        return made
    rows = [LOGGERS.get(name) for name in names]
    for row in (*rows, *LOGGERS.held.values()):
        assert row is not None, "a recipe names no other"
        made[row.name] = row.made(out_dir, log, run_ids, start_step)
    return made
