"""MLflow: a run of its server, or of files in the directory of a run."""

import os
import re
import threading
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import Logger

from ftkit.recipe.recipe import Log

_MLFLOW = "mlflow"
"""Key in run_ids, and directory in out_dir for values that are not sent to a server."""
_MLFLOW_BATCH = 1000
"""Most values in one request to an MLflow server."""
# Limits of MLflow's log_batch, and of the value of a parameter in older servers.
_MLFLOW_PARAMETERS, _MLFLOW_CHARACTERS = 100, 500
_NOT_IN_MLFLOW = re.compile(r"[^\w/.\- ]")
"""Characters that MLflow refuses in names; a data source may be called c++."""
# Longest wait at the end of a run for a server that does not answer.
_MLFLOW_END_S = 60.0
_MLFLOW_SETTINGS = {
    # MLflow's own are 7 retries and 120 s each, for which training would wait.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Defaults for variables that the environment does not set."""


class MlflowLogger(Logger):
    """A run of an MLflow server, or of files in out_dir, that continues over sessions.

    Values are sent in a thread, so that a slow server does not slow down training. MLflow cannot
    delete values: if a run returns to an earlier step, each series continues after its last step
    on the server, so that no step appears twice.
    """

    def __init__(self, out_dir: Path, log: Log, run_ids: dict[str, str], start_step: int) -> None:
        """Prepare without contacting the server.

        Args:
            out_dir: of the run.
            log: names of the run.
            run_ids: id of the run, by name of the logger; the id of a new run is added.
            start_step: optimizer steps already done; the server says which it has.
        """
        self._out_dir, self._log, self._run_ids = out_dir, log, run_ids
        self._client: Any = None
        self._last_steps: dict[str, int] = {}
        self._waiting: list[Any] = []
        self._lock = threading.Condition()
        self._ends = False
        self._failure: Exception | None = None
        # A daemon: a server that does not answer must not keep the process alive.
        self._thread = threading.Thread(target=self._send, name="mlflow", daemon=True)

    @property
    def name(self) -> str:
        """Name of the experiment."""
        return self._log.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "ftkit"

    @property
    def version(self) -> str | None:
        """Id of the run."""
        return self._run_ids.get(_MLFLOW)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_: Any, **__: Any) -> None:
        """Start or continue the run, and send the parameters that it does not have yet."""
        for key, value in _MLFLOW_SETTINGS.items():
            os.environ.setdefault(key, value)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            uri = (self._out_dir / _MLFLOW).absolute().as_uri()
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # otherwise MLflow wants a database
        # MLflow's own client: Lightning's logger imports all of Lightning, sends values in the
        # training loop, and leaves a run that continues marked as finished.
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(uri)
        known = self._go_on() or self._begin()
        values = params if isinstance(params, dict) else vars(params)
        named = {
            _mlflow_name(key): str(value)[:_MLFLOW_CHARACTERS] for key, value in values.items()
        }
        # MLflow refuses to change a parameter, and a run that continues may have another recipe.
        new = [Param(key, value) for key, value in named.items() if key not in known]
        for first in range(0, len(new), _MLFLOW_PARAMETERS):
            part = new[first : first + _MLFLOW_PARAMETERS]
            self._client.log_batch(self.version, params=part)
        self._thread.start()

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Queue values for sending.

        Raises:
            Exception: earlier values could not be sent.
        """
        from mlflow.entities import Metric

        # Raised here, in the training loop: an exception in the thread would not reach it.
        if self._failure is not None:
            raise self._failure
        now_ms, at = int(time.time() * 1000), step or 0
        named = {_mlflow_name(key): value for key, value in metrics.items()}
        with self._lock:
            self._waiting += [
                Metric(key, value, now_ms, at)
                for key, value in named.items()
                # -1: step 0 is the validation before training.
                if at > self._last_steps.get(key, -1)
            ]
            self._lock.notify()

    def finalize(self, status: str) -> None:
        """Wait until all values are sent, and set the status of the run.

        Raises:
            Exception: they cannot be sent.
        """
        # Never started, or finalized before.
        if not self._thread.is_alive() and self._failure is None:
            return
        with self._lock:
            self._ends = True
            self._lock.notify()
        self._thread.join(_MLFLOW_END_S)
        if self._failure is not None:
            raise self._failure
        if self._thread.is_alive():
            raise TimeoutError(f"values were not sent within {_MLFLOW_END_S:g} s")
        self._client.set_terminated(self.version, "FINISHED" if status == "success" else "FAILED")

    def _go_on(self) -> dict[str, str] | None:
        """Parameters of the run of earlier sessions; None: this server does not have it."""
        from mlflow.exceptions import MlflowException

        if self.version is None:
            return None
        try:
            run = self._client.get_run(self.version)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        # MLflow keeps every value of a step that is sent twice, and draws both.
        for key in run.data.metrics:
            history = self._client.get_metric_history(self.version, key)
            self._last_steps[key] = max(value.step for value in history)
        # Its earlier session left it as ended.
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
        self._run_ids[_MLFLOW] = run.info.run_id
        return {}

    def _send(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._waiting or self._ends)
                part, self._waiting = self._waiting[:_MLFLOW_BATCH], self._waiting[_MLFLOW_BATCH:]
            # Nothing is left and the run ends.
            if not part:
                return
            try:
                self._client.log_batch(self.version, metrics=part)
            except Exception as error:  # any kind; the next call raises it
                self._failure = error
                return


def _mlflow_name(key: str) -> str:
    # MLflow stores values in files of these names: no name may be a directory of another one.
    if key.startswith("val_loss/"):  # of a set, beside val_loss
        key = key.replace("val_loss/", "val_losses/", 1)
    parts = _NOT_IN_MLFLOW.sub("_", key).split("/")
    return "/".join(part for part in parts if part not in ("", ".", ".."))
