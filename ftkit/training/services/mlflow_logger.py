"""MLflow: a run of its tracking server, or of files in out_dir, that goes on over sessions."""

import os
import re
import threading
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import Logger

from ftkit.recipe.recipe import Log

_DIRECTORY = "mlflow"
"""In out_dir: where values go that are not sent to a server."""
_NAME = "mlflow"
_MOST_VALUES = 1000
"""In one request, as the server takes them."""
_MOST_PARAMETERS, _MOST_CHARACTERS = 100, 500
_UNFIT = re.compile(r"[^\w/.\- ]")
"""What no name in MLflow may have, though a source of data may be called c++."""
_WAIT_AT_END_S = 60.0
_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # of 7, and of 2 minutes each: training would wait
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Unless the environment says otherwise."""


class MlflowLogger(Logger):
    """Sends values in a thread: a slow server does not slow training down.

    MLflow takes nothing back. Where a run goes back to an earlier step, each series goes on after
    its last step there, so that no step is there twice.
    """

    def __init__(self, out_dir: Path, log: Log, run_ids: dict[str, str]) -> None:
        """Prepare; nothing is asked of the server.

        Args:
            out_dir: of the run.
            log: names of the run.
            run_ids: by which loggers know their run. That of a new run is added.
        """
        self._out_dir, self._log, self._run_ids = out_dir, log, run_ids
        self._client: Any = None
        self._last_steps: dict[str, int] = {}
        self._waiting: list[Any] = []
        self._lock = threading.Condition()
        self._ends = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._send, name="mlflow", daemon=True)

    @property
    def name(self) -> str:
        """Of the experiment."""
        return self._log.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "ftkit"

    @property
    def version(self) -> str | None:
        """Of the run, as MLflow calls it."""
        return self._run_ids.get(_NAME)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_: Any, **__: Any) -> None:
        """Begin the run, or go on with it, and tell the parameters that it does not have yet."""
        for key, value in _SETTINGS.items():
            os.environ.setdefault(key, value)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            uri = (self._out_dir / _DIRECTORY).absolute().as_uri()
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # they ask for a database otherwise
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(uri)
        known = self._go_on() or self._begin()
        values = params if isinstance(params, dict) else vars(params)
        named = {_name_of(key): str(value)[:_MOST_CHARACTERS] for key, value in values.items()}
        new = [Param(key, value) for key, value in named.items() if key not in known]
        for first in range(0, len(new), _MOST_PARAMETERS):
            part = new[first : first + _MOST_PARAMETERS]
            self._client.log_batch(self.version, params=part)
        self._thread.start()

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Have values sent.

        Raises:
            Exception: earlier ones could not be.
        """
        from mlflow.entities import Metric

        if self._failure is not None:
            raise self._failure
        now_ms, at = int(time.time() * 1000), step or 0
        named = {_name_of(key): value for key, value in metrics.items()}
        with self._lock:
            self._waiting += [
                Metric(key, value, now_ms, at)
                for key, value in named.items()
                if at > self._last_steps.get(key, -1)
            ]
            self._lock.notify()

    def finalize(self, status: str) -> None:
        """Wait until all values are there, and say how the run ended.

        Raises:
            Exception: they cannot be sent.
        """
        if not self._thread.is_alive() and self._failure is None:
            return
        with self._lock:
            self._ends = True
            self._lock.notify()
        self._thread.join(_WAIT_AT_END_S)
        if self._failure is not None:
            raise self._failure
        if self._thread.is_alive():
            raise TimeoutError(f"values were not sent within {_WAIT_AT_END_S:g} s")
        self._client.set_terminated(self.version, "FINISHED" if status == "success" else "FAILED")

    def _go_on(self) -> dict[str, str] | None:
        """Parameters of the run of earlier sessions; None: there is none at this server."""
        from mlflow.exceptions import MlflowException

        if self.version is None:
            return None
        try:
            run = self._client.get_run(self.version)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        for key in run.data.metrics:
            history = self._client.get_metric_history(self.version, key)
            self._last_steps[key] = max(value.step for value in history)
        self._client.update_run(self.version, status="RUNNING")
        return dict(run.data.params)

    def _begin(self) -> dict[str, str]:
        found = self._client.get_experiment_by_name(self.name)
        experiment = found.experiment_id if found else self._client.create_experiment(self.name)
        group = self._log.group
        run = self._client.create_run(
            experiment,
            tags={} if group is None else {"group": group},
            run_name=self._log.run or self._out_dir.name,
        )
        self._run_ids[_NAME] = run.info.run_id
        return {}

    def _send(self) -> None:
        """What the thread does."""
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._waiting or self._ends)
                part, self._waiting = self._waiting[:_MOST_VALUES], self._waiting[_MOST_VALUES:]
            if not part:
                return
            try:
                self._client.log_batch(self.version, metrics=part)
            except Exception as error:  # whatever it is, the next call tells it
                self._failure = error
                return


def _name_of(key: str) -> str:
    """How MLflow may call a metric or a parameter.

    It takes names for paths and has files of these names: none may be a directory of another.
    """
    if key.startswith("val_loss/"):  # of a set, beside val_loss
        key = key.replace("val_loss/", "val_losses/", 1)
    parts = _UNFIT.sub("_", key).split("/")
    return "/".join(part for part in parts if part not in ("", ".", ".."))
