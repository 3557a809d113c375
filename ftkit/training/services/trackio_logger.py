"""Trackio: a run in a database in out_dir, or of a server, that goes on over sessions."""

import os
import secrets
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import Logger

from ftkit.recipe.recipe import Log

_DIRECTORY = "trackio"
"""In out_dir: where values go that are not sent to a server."""
_NAME = "trackio"
_LOST = frozenset({"local-sender-loop", "persist-logs-locally", "write-logs-to-sqlite"})
"""What it has warned of if values are lost; private, seen in 0.43."""
_PLACES = ("TRACKIO_DIR", "TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID")


class TrackioLogger(Logger):
    """Trackio sends values in a thread of its own, and warns where it cannot.

    It takes nothing back. Where a run goes back to an earlier step, values go on after the last
    step there, so that no step is there twice.
    """

    def __init__(self, out_dir: Path, log: Log, run_ids: dict[str, str]) -> None:
        """Prepare; nothing is asked of a server.

        Args:
            out_dir: of the run.
            log: names of the run.
            run_ids: by which loggers know their run. That of a new run is added.
        """
        self._out_dir, self._log, self._run_ids = out_dir, log, run_ids
        self._run: Any = None
        self._last_step = -1

    @property
    def name(self) -> str:
        """Of the project."""
        return self._log.project or "ftkit"

    @property
    def version(self) -> str | None:
        """Of the run. Trackio goes on with a run by its name, so each has one of its own."""
        return self._run_ids.get(_NAME)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_: Any, **__: Any) -> None:
        """Begin the run, or go on with it, with its parameters."""
        if not any(os.environ.get(place) for place in _PLACES):
            os.environ["TRACKIO_DIR"] = str((self._out_dir / _DIRECTORY).absolute())
        import trackio

        is_known = self.version is not None
        if not is_known:
            name = self._log.run or self._out_dir.name
            self._run_ids[_NAME] = f"{name}-{secrets.token_hex(4)}"
        self._run = trackio.init(
            project=self.name,
            name=self.version,
            group=self._log.group,
            config=dict(params if isinstance(params, dict) else vars(params)),
            resume="allow" if is_known else "never",
            embed=False,
            auto_log_gpu=False,  # ftkit's own system metrics are told
            auto_log_cpu=False,
        )
        self._last_step = self._run._next_step - 1  # private; seen in 0.43

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Have values sent.

        Raises:
            OSError: earlier ones could not be written.
        """
        self._check()
        at = step or 0
        # What belongs to a step after its loss, as its validation, may have been missing.
        if at > self._last_step or (at == self._last_step and "loss" not in metrics):
            self._run.log(metrics, step=at)

    def finalize(self, status: str) -> None:
        """Wait until values are written or sent, half a minute at most.

        Raises:
            OSError: they cannot be; Trackio only warns.
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
        if _LOST & getattr(self._run, "_warned_failures", set()):
            raise OSError("values could not be written, see its warning")
