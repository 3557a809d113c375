"""Loggers over several sessions of one run, without training anything."""

import os
import shutil
import socket
import sqlite3
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.loggers.logger import Logger
from messages import says
from plugins import plugin_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from ftkit.errors import UserError
from ftkit.extensions.loggers.mlflow import MlflowLogger
from ftkit.recipe.loggers import check_loggers_installed
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.plugin import using
from ftkit.recipe.recipe import Recipe
from ftkit.training.loggers import Loggers, make_loggers


def make(logger: str, out_dir: Path, **more: str) -> Recipe:
    values = [("checkpoint_dir", "base"), ("out_dir", str(out_dir)), ("logger_name", logger)]
    values += [(key.replace("__", "."), value) for key, value in more.items()]
    return read_recipe([], values, method="lora")


def loggers_of(
    recipe: Recipe, *, start_step: int = 0, run_ids: dict[str, str]
) -> dict[str, Logger]:
    return make_loggers(
        recipe.extra_loggers, recipe.out_dir, recipe.log, start_step=start_step, run_ids=run_ids
    )


def session(
    recipe: Recipe, steps: range, run_ids: dict[str, str], *, start_step: int = 0
) -> Logger:
    (logger,) = loggers_of(recipe, start_step=start_step, run_ids=run_ids).values()
    if start_step == 0:
        logger.log_metrics({"val_loss": 9.0}, step=0)
    for step in steps:
        logger.log_metrics({"loss": start_step + 1 / step}, step=step)
        if step % 3 == 0:
            logger.log_metrics({"val_loss": 1 / step}, step=step)
    logger.finalize("success")
    return logger


def scalars(out_dir: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(out_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, pytest.approx(event.value)) for event in events.Scalars(tag)]  # type: ignore[misc]


def test_tensorboard_shows_every_step_once_where_sessions_overlap(tmp_path: Path) -> None:
    recipe = make("tensorboard", tmp_path)
    session(recipe, range(1, 10), {})
    session(recipe, range(7, 12), {}, start_step=6)
    session(recipe, range(9, 15), {}, start_step=8)
    expected = [(s, 1 / s) for s in range(1, 7)]
    expected += [(s, 6 + 1 / s) for s in (7, 8)] + [(s, 8 + 1 / s) for s in range(9, 15)]
    assert scalars(tmp_path, "loss") == expected
    assert [step for step, _ in scalars(tmp_path, "val_loss")] == [0, 3, 6, 9, 12]


def test_tensorboard_forgets_a_session_that_left_no_checkpoint(tmp_path: Path) -> None:
    recipe = make("tensorboard", tmp_path)
    for steps in (range(1, 6), range(1, 4)):
        session(recipe, steps, {})
    assert [step for step, _ in scalars(tmp_path, "loss")] == [1, 2, 3]
    assert [step for step, _ in scalars(tmp_path, "val_loss")] == [0, 3]


@pytest.mark.slow
def test_wandb_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    recipe = make("wandb", tmp_path)
    run_ids: dict[str, str] = {}
    seen = []
    for start_step, steps in ((0, range(1, 6)), (3, range(4, 8))):
        logger = session(recipe, steps, run_ids, start_step=start_step)
        seen.append((logger.experiment.id, logger._wandb_init["resume"]))  # type: ignore[attr-defined]
        wandb.finish()
    assert seen == [(run_ids["wandb"], "allow"), (run_ids["wandb"], "must")]
    assert len(bytes.fromhex(run_ids["wandb"])) == 4
    files = {path.name for path in (tmp_path / "wandb").glob("offline-run-*/*.wandb")}
    assert files == {f"run-{run_ids['wandb']}.wandb"}


def test_a_run_without_an_id_begins_one_even_if_it_continues(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run_ids: dict[str, str] = {}
    (logger,) = loggers_of(make("wandb", tmp_path), start_step=5, run_ids=run_ids).values()
    assert logger._wandb_init["id"] == run_ids["wandb"]  # type: ignore[attr-defined]
    assert logger._wandb_init["resume"] == "allow"  # type: ignore[attr-defined]


OWN = """
import errno
from lightning.fabric.loggers.logger import Logger

class Own(Logger):
    name = version = None

    def __init__(self, out_dir): pass

    def log_hyperparams(self, params): pass

    def log_metrics(self, metrics, step=None):
        {fault}
"""


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise OSError(errno.ENOSPC, 'No space left on device')", "No space left on device"),
    ],
)
def test_a_logger_of_a_plugin_that_fails_is_dropped_and_its_line_named(
    fault: str, reason: str, tmp_path: Path
) -> None:
    warned: list[str] = []
    with using(plugin_of(tmp_path, OWN.replace("{fault}", fault))):
        recipe = make("csv", tmp_path)
        loggers = Loggers(loggers_of(recipe, run_ids={}), recipe, warned.append)
        for step in (1, 2):
            loggers.log({"loss": 1.0}, step)
    (said,) = warned
    assert says(said, "Own", reason, "my.py, line 13", "metrics.csv")


def test_only_rank_0_chooses_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("RANK", "1")
    run_ids: dict[str, str] = {}
    assert loggers_of(make("wandb", tmp_path), start_step=0, run_ids=run_ids) == {}
    assert run_ids == {}


def told(
    recipe: Recipe,
    steps: range,
    run_ids: dict[str, str],
    *,
    start_step: int = 0,
    factor: float = 1.0,
) -> list[str]:
    """Warnings of a session; every third step has a validation, logged after its loss."""
    warnings: list[str] = []
    loggers = Loggers(
        loggers_of(recipe, start_step=start_step, run_ids=run_ids), recipe, warnings.append
    )
    for step in steps:
        loggers.log({"loss": factor / step, "learning_rate": 0.1}, step)
        if step % 3 == 0:
            loggers.log({"val_loss": factor / step}, step)
    loggers.finalize("success")
    return warnings


def mlflow_run(out_dir: Path, run_id: str) -> Any:
    import mlflow

    return mlflow.MlflowClient((out_dir / "mlflow").as_uri()).get_run(run_id)


def mlflow_values(out_dir: Path, run_id: str, key: str) -> list[tuple[int, float]]:
    import mlflow

    client = mlflow.MlflowClient((out_dir / "mlflow").as_uri())
    return [(metric.step, metric.value) for metric in client.get_metric_history(run_id, key)]


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "TRACKIO_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name in (
        "MLFLOW_ALLOW_FILE_STORE",
        "MLFLOW_DISABLE_TELEMETRY",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES",
        "MLFLOW_HTTP_REQUEST_TIMEOUT",
    ):
        monkeypatch.setenv(name, "1")  # so that it is as before after the test


@pytest.mark.usefixtures("no_server")
class TestMlflow:
    """Its client, with its files in out_dir."""

    @pytest.fixture(autouse=True)
    def _client(self) -> None:
        pytest.importorskip("mlflow")

    def test_a_continued_run_has_every_step_once(self, tmp_path: Path) -> None:
        recipe = make("mlflow", tmp_path, log__project="pets", log__run="cats", log__group="a")
        run_ids: dict[str, str] = {}
        assert told(recipe, range(1, 10), run_ids) == []
        first = dict(run_ids)
        # The step that was taken back has the value that was shown of it.
        assert told(recipe, range(7, 12), run_ids, start_step=6, factor=2.0) == []
        assert run_ids == first
        expected = [(s, 1 / s) for s in range(1, 10)] + [(s, 2 / s) for s in (10, 11)]
        assert mlflow_values(tmp_path, run_ids["mlflow"], "loss") == expected
        run = mlflow_run(tmp_path, run_ids["mlflow"])
        assert (run.info.run_name, run.info.status, run.data.tags["group"]) == (
            "cats", "FINISHED", "a",
        )  # fmt: skip

    def test_the_next_session_logs_a_missing_validation(self, tmp_path: Path) -> None:
        recipe, run_ids = make("mlflow", tmp_path), dict[str, str]()
        told(recipe, range(1, 3), run_ids)
        warnings: list[str] = []
        loggers = Loggers(
            loggers_of(recipe, start_step=2, run_ids=run_ids), recipe, warnings.append
        )
        loggers.log({"val_loss": 0.5}, 2)
        loggers.finalize("success")
        assert mlflow_values(tmp_path, run_ids["mlflow"], "val_loss") == [(2, 0.5)]

    def test_losses_of_sets_are_there_beside_the_loss_whatever_the_sets_are_called(
        self, tmp_path: Path
    ) -> None:
        recipe, run_ids, warnings = make("mlflow", tmp_path), dict[str, str](), list[str]()
        for start_step in (0, 3):
            made = loggers_of(recipe, start_step=start_step, run_ids=run_ids)
            loggers = Loggers(made, recipe, warnings.append)
            losses = {
                "val_loss": 3.0,
                "val_loss/code": 1.0,
                "val_loss/c++": 2.0,
                "val_loss/../a": 4,
            }
            for step in range(1, 4 + start_step):
                loggers.log(losses, step)
            loggers.finalize("success")
        assert warnings == []
        assert mlflow_run(tmp_path, run_ids["mlflow"]).data.metrics == {
            "val_loss": 3.0, "val_losses/code": 1.0, "val_losses/c__": 2.0, "val_losses/a": 4.0,
        }  # fmt: skip
        assert mlflow_values(tmp_path, run_ids["mlflow"], "val_losses/code") == [
            (step, 1.0) for step in range(1, 7)
        ]

    def test_a_run_that_branches_off_is_another_one(self, tmp_path: Path) -> None:
        origin, branch = dict[str, str](), dict[str, str]()
        told(make("mlflow", tmp_path), range(1, 5), origin)
        told(make("mlflow", tmp_path), range(4, 6), branch, start_step=3)
        assert origin["mlflow"] != branch["mlflow"]
        assert [step for step, _ in mlflow_values(tmp_path, branch["mlflow"], "loss")] == [4, 5]

    def test_the_recipe_is_there_and_no_token_is(self, tmp_path: Path) -> None:
        run_ids: dict[str, str] = {}
        tokens = {"access_token": "hf_secret", "data__access_token": "hf_secret"}
        told(make("mlflow", tmp_path, data="LIMA", lora_r="4", **tokens), range(1, 2), run_ids)
        params = mlflow_run(tmp_path, run_ids["mlflow"]).data.params
        assert (params["lora_r"], params["train.global_batch_size"]) == ("4", "16")
        assert params["data.class_path"] == "litgpt.data.LIMA"
        assert not [key for key in params if key.endswith("access_token")]
        written = [path for path in (tmp_path / "mlflow").rglob("*") if path.is_file()]
        assert not any(b"hf_secret" in path.read_bytes() for path in written)

    def test_one_warning_for_an_unreachable_server_while_other_loggers_continue(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:secret@{address}")
        (said,) = told(make("[mlflow, tensorboard]", tmp_path), range(1, 6), {})
        assert said.startswith("mlflow gets no values any more (MlflowException")
        assert said.endswith("); metrics.csv has all of them") and "secret" not in said
        assert [step for step, _ in scalars(tmp_path, "loss")] == [1, 2, 3, 4, 5]

    def test_one_warning_for_a_server_that_becomes_unreachable(self, tmp_path: Path) -> None:
        recipe, run_ids, warnings = make("mlflow", tmp_path), dict[str, str](), list[str]()
        made = loggers_of(recipe, start_step=0, run_ids=run_ids)
        (logger,) = made.values()
        loggers = Loggers(made, recipe, warnings.append)
        shutil.rmtree(tmp_path / "mlflow")
        loggers.log({"loss": 1.0}, 1)
        assert isinstance(logger, MlflowLogger)
        logger._thread.join(30)
        for step in (2, 3):
            loggers.log({"loss": 1.0}, step)
        loggers.finalize("success")
        (said,) = warnings
        assert "mlflow gets no values any more" in said

    def test_a_run_that_the_server_does_not_know_begins_anew(self, tmp_path: Path) -> None:
        run_ids = {"mlflow": "0" * 32}
        assert told(make("mlflow", tmp_path), range(3, 5), run_ids, start_step=2) == []
        assert [s for s, _ in mlflow_values(tmp_path, run_ids["mlflow"], "loss")] == [3, 4]


class TrackioRun:
    """Stands in for a run of Trackio: its rows, and what it warns of."""

    def __init__(self, rows: list[tuple[int, dict[str, float]]]) -> None:
        self.rows = rows
        self.warning = ""
        self._next_step = 1 + max((step for step, _ in rows), default=-1)
        self._warned_failures: set[str] = set()

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, metrics))

    def finish(self) -> None:
        if self.warning:
            warnings.warn(self.warning, UserWarning, stacklevel=1)


class TestTrackio:
    """Calls of a stand-in; the next test uses Trackio itself, if it is installed."""

    @pytest.fixture(autouse=True)
    def runs(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, TrackioRun]:
        """By their names, as `trackio.init` finds them."""
        made: dict[str, TrackioRun] = {}

        def init(*, project: str, name: str, resume: str, **more: Any) -> TrackioRun:
            assert (name in made) == (resume == "allow") and project == "pets"
            assert "access_token" not in more["config"] and more["config"]["lora_r"] == 16
            made[name] = TrackioRun(made[name].rows if name in made else [])
            return made[name]

        module = types.ModuleType("trackio")
        module.init = init  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "trackio", module)
        monkeypatch.setenv("TRACKIO_DIR", "")  # so that it is as before after the test
        return made

    def test_a_continued_run_has_each_step_once_and_a_branch_is_another_run(
        self, tmp_path: Path, runs: dict[str, TrackioRun]
    ) -> None:
        recipe = make(
            "trackio", tmp_path, log__project="pets", log__run="cats", access_token="hf_x"
        )
        run_ids: dict[str, str] = {}
        assert told(recipe, range(1, 10), run_ids) == []
        assert told(recipe, range(7, 12), run_ids, start_step=6) == []
        assert os.environ["TRACKIO_DIR"] == str(tmp_path / "trackio")
        assert told(recipe, range(7, 9), {}, start_step=6) == []
        first, second = runs.items()
        assert first[0] == run_ids["trackio"] and first[0].startswith("cats-")
        assert [step for step, row in first[1].rows if "loss" in row] == list(range(1, 12))
        assert [step for step, row in second[1].rows if "loss" in row] == [7, 8]

    def test_one_warning_for_values_that_are_lost(
        self, tmp_path: Path, runs: dict[str, TrackioRun]
    ) -> None:
        recipe, warned = make("trackio", tmp_path, log__project="pets"), list[str]()
        for failure in ("write-logs-to-sqlite", "", "local-sender-loop"):
            made = loggers_of(recipe, start_step=0, run_ids={})
            loggers = Loggers(made, recipe, warned.append)
            loggers.log({"loss": 1.0}, 1)
            (*_, run) = runs.values()
            run.warning = "" if failure else "* Some logs could not be sent to the remote server"
            run._warned_failures |= {failure}
            if failure == "write-logs-to-sqlite":
                loggers.log({"loss": 1.0}, 2)
                loggers.log({"loss": 1.0}, 3)
            loggers.finalize("success")
        begun, ended = (
            "trackio gets no values any more (OSError: ",
            "); metrics.csv has all of them",
        )
        assert warned == [
            f"{begun}values could not be written, see its warning{ended}",
            f"{begun}Some logs could not be sent to the remote server{ended}",
            f"{begun}values could not be written, see its warning{ended}",
        ]


def test_real_trackio_has_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", "")  # so that it is as before after the test
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    recipe, run_ids = make("trackio", tmp_path, log__project="pets"), dict[str, str]()
    assert told(recipe, range(1, 10), run_ids) == []
    first = dict(run_ids)
    assert told(recipe, range(7, 12), run_ids, start_step=6) == []
    assert run_ids == first
    with sqlite3.connect(tmp_path / "trackio" / "pets.db") as database:
        rows = database.execute(
            "SELECT run_name, step, metrics FROM metrics ORDER BY id"
        ).fetchall()
    assert {name for name, _, _ in rows} == {run_ids["trackio"]}
    assert [step for _, step, values in rows if b'"loss"' in values] == list(range(1, 12))


@pytest.mark.parametrize("logger", ["mlflow", "trackio", "wandb"])
def test_a_logger_that_is_not_installed_is_refused_before_anything_starts(
    logger: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == logger else name)
    recipe = make(f"[tensorboard, {logger}]", tmp_path)
    with pytest.raises(UserError, match=f"logger_name has {logger}, .*Try pip install {logger}"):
        check_loggers_installed(recipe.extra_loggers)


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        ("csv", []),
        ("[]", []),
        ("tensorboard", ["tensorboard"]),
        ("[csv, mlflow]", ["mlflow"]),
        ("[wandb, csv, tensorboard, wandb]", ["wandb", "tensorboard"]),
    ],
)
def test_each_logger_is_made_once_and_csv_needs_none(
    asked: str, made: list[str], tmp_path: Path
) -> None:
    assert list(loggers_of(make(asked, tmp_path), start_step=0, run_ids={})) == made
