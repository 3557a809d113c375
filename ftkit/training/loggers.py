"""Loggers: TensorBoard, Weights & Biases, MLflow and Trackio, any of them at once."""

import os
import re
import secrets
import threading
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.loggers.logger import Logger
from lightning.fabric.loggers.tensorboard import TensorBoardLogger

from ftkit.recipe.parsing import recipe_as_dict
from ftkit.recipe.plugin import place_in_plugin, plugin_in_use
from ftkit.recipe.recipe import Log, LoggerName, Recipe
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
            loggers: from `make_loggers` and `own_loggers`, by name.
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
        # Services may fail in any way. TensorBoard writes to this disk, which may be full; its
        # other errors are ours.
        try:
            yield
        except Exception as error:
            # TensorBoard raises ValueError from OSError.
            cause = error if isinstance(error, OSError) else error.__context__
            if isinstance(cause, OSError) and cause.strerror:
                reason = cause.strerror
            elif name == "tensorboard":
                raise
            else:
                # Services quote their addresses, which may contain passwords.
                lines = redacted(str(error)).strip().splitlines() or [""]
                reason = f"{type(error).__name__}: {lines[0][:300]}"
            if (place := place_in_plugin(error)) is not None:
                reason = f"{reason}, in {place}"
            del self._loggers[name]
            self._warn(f"{name} gets no values any more ({reason}); metrics.csv has all of them")


def make_loggers(
    names: Iterable[LoggerName],
    out_dir: Path,
    log: Log,
    *,
    start_step: int,
    run_ids: dict[str, str],
) -> dict[str, Logger]:
    """Create the loggers beside metrics.csv; they continue the runs of earlier sessions.

    Args:
        names: of the loggers.
        out_dir: of the run.
        log: names of the run.
        start_step: optimizer steps already done. TensorBoard removes its values of later steps.
        run_ids: id of the run in each service, by name of the logger. New ids are added: that of
            W&B here, so that a checkpoint has it before W&B is contacted.

    Returns:
        Loggers by name; only rank 0 has any.
    """
    made: dict[str, Logger] = {}
    if rank() > 0:
        return made
    for name in names:
        if name == "tensorboard":
            first_step = start_step + 1 if start_step else 0  # 0: the validation before all steps
            made[name] = _TensorBoard(
                out_dir, name="tensorboard", version="", purge_step=first_step
            )
        elif name == "wandb":
            made[name] = _wandb(out_dir, log, run_ids)
        elif name == "mlflow":
            made[name] = MlflowLogger(out_dir, log, run_ids)
        elif name == "trackio":
            made[name] = TrackioLogger(out_dir, log, run_ids)
    return made


def own_loggers(out_dir: Path) -> dict[str, Logger]:
    """Make the loggers of the plugin in use, by name; only rank 0 has any.

    Args:
        out_dir: of the run, the one argument of each.

    Raises:
        UserError: one cannot be made.
    """
    plugin = plugin_in_use()
    if plugin is None or rank() > 0:
        return {}
    defined = plugin.of_kind("logger")
    return {one.name: plugin.make("logger", one.name, out_dir) for one in defined}


def _wandb(out_dir: Path, log: Log, run_ids: dict[str, str]) -> Logger:
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


class _TensorBoard(TensorBoardLogger):
    """Lightning's logger, which does not end a run if it cannot write the last values."""

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_: Any, **__: Any) -> None:
        """Do nothing: TensorBoard would show them as another run with a dummy metric."""

    def finalize(self, status: str) -> None:
        """Write all queued values."""
        with suppress(OSError):
            super().finalize(status)


# MLflow

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

    def __init__(self, out_dir: Path, log: Log, run_ids: dict[str, str]) -> None:
        """Prepare without contacting the server.

        Args:
            out_dir: of the run.
            log: names of the run.
            run_ids: id of the run, by name of the logger; the id of a new run is added.
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


# Trackio

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

    def __init__(self, out_dir: Path, log: Log, run_ids: dict[str, str]) -> None:
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
