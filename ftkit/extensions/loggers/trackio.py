"""Trackio: a database in the directory of a run, or a server."""

import os
import secrets
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import Logger

from ftkit.recipe.recipe import Log

_TRACKIO = "trackio"
"""Key in run_ids, and directory in out_dir for values that are not sent to a server."""
_TRACKIO_LOSSES = frozenset({"local-sender-loop", "persist-logs-locally", "write-logs-to-sqlite"})
"""Warnings that mean lost values; private, seen in Trackio 0.43."""
_TRACKIO_PLACES = ("TRACKIO_DIR", "TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID")


class TrackioLogger(Logger):
    """A run in a database in out_dir, or of a server, that continues over sessions.

    Trackio sends values in its own thread, and only warns if it cannot. It cannot delete values:
    if a run returns to an earlier step, values continue after the last step, so that no step
    appears twice.
    """

    def __init__(self, out_dir: Path, log: Log, run_ids: dict[str, str], start_step: int) -> None:
        """Prepare without contacting a server; see `MlflowLogger`."""
        self._out_dir, self._log, self._run_ids = out_dir, log, run_ids
        self._run: Any = None
        self._last_step = -1

    @property
    def name(self) -> str:
        """Name of the project."""
        return self._log.project or "ftkit"

    @property
    def version(self) -> str | None:
        """Name of the run, unique because Trackio continues runs by name."""
        return self._run_ids.get(_TRACKIO)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_: Any, **__: Any) -> None:
        """Start or continue the run, with its parameters."""
        if not any(os.environ.get(place) for place in _TRACKIO_PLACES):
            os.environ["TRACKIO_DIR"] = str((self._out_dir / _TRACKIO).absolute())
        import trackio

        is_known = self.version is not None
        if not is_known:
            name = self._log.run or self._out_dir.name
            self._run_ids[_TRACKIO] = f"{name}-{secrets.token_hex(4)}"
        self._run = trackio.init(
            project=self.name,
            name=self.version,
            group=self._log.group,
            config=dict(params if isinstance(params, dict) else vars(params)),
            resume="allow" if is_known else "never",
            # Otherwise it starts a dashboard in the cell of a notebook.
            embed=False,
            auto_log_gpu=False,  # ftkit logs its own system metrics
            auto_log_cpu=False,
        )
        self._last_step = self._run._next_step - 1  # private; seen in 0.43

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Queue values for sending.

        Raises:
            OSError: earlier values could not be written.
        """
        self._check()
        at = step or 0
        # A validation is logged after the loss of its step, and may be what is missing.
        if at > self._last_step or (at == self._last_step and "loss" not in metrics):
            self._run.log(metrics, step=at)

    def finalize(self, status: str) -> None:
        """Wait until values are written or sent, for at most half a minute.

        Raises:
            OSError: they cannot be written or sent.
        """
        if self._run is None:
            return
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", UserWarning)
            self._run.finish()
        for warning in said:
            if issubclass(warning.category, UserWarning):
                raise OSError(str(warning.message).removeprefix("* "))
        self._check()

    def _check(self) -> None:
        if _TRACKIO_LOSSES & getattr(self._run, "_warned_failures", set()):
            raise OSError("values could not be written, see its warning")
