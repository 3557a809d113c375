"""TensorBoard and W&B over several sessions of one run, without training anything."""

from pathlib import Path

import pytest
from lightning.fabric.loggers.logger import Logger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from ftkit.config.devices import Devices
from ftkit.config.parsing import read_recipe
from ftkit.config.plan import Plan, make_plan
from ftkit.training.loggers import make_loggers


def make(logger: str, out_dir: Path) -> Plan:
    values = [("checkpoint_dir", "base"), ("out_dir", str(out_dir)), ("logger_name", logger)]
    recipe = read_recipe([], values, method="lora")
    return make_plan(recipe, Devices(accelerator="cpu", count=1))


def session(plan: Plan, steps: range, run_ids: dict[str, str], *, start_step: int = 0) -> Logger:
    (logger,) = make_loggers(plan, start_step=start_step, run_ids=run_ids)
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
    plan = make("tensorboard", tmp_path)
    session(plan, range(1, 10), {})
    session(plan, range(7, 12), {}, start_step=6)
    session(plan, range(9, 15), {}, start_step=8)
    expected = [(s, 1 / s) for s in range(1, 7)]
    expected += [(s, 6 + 1 / s) for s in (7, 8)] + [(s, 8 + 1 / s) for s in range(9, 15)]
    assert scalars(tmp_path, "loss") == expected
    assert [step for step, _ in scalars(tmp_path, "val_loss")] == [0, 3, 6, 9, 12]


def test_tensorboard_forgets_a_session_that_left_no_checkpoint(tmp_path: Path) -> None:
    plan = make("tensorboard", tmp_path)
    for steps in (range(1, 6), range(1, 4)):
        session(plan, steps, {})
    assert [step for step, _ in scalars(tmp_path, "loss")] == [1, 2, 3]
    assert [step for step, _ in scalars(tmp_path, "val_loss")] == [0, 3]


def test_wandb_goes_on_with_the_run_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    plan = make("wandb", tmp_path)
    run_ids: dict[str, str] = {}
    seen = []
    for start_step, steps in ((0, range(1, 6)), (3, range(4, 8))):
        logger = session(plan, steps, run_ids, start_step=start_step)
        seen.append((logger.experiment.id, logger._wandb_init["resume"]))  # type: ignore[attr-defined]
        wandb.finish()
    assert seen == [(run_ids["wandb"], "allow"), (run_ids["wandb"], "must")]
    assert len(bytes.fromhex(run_ids["wandb"])) == 4
    files = {path.name for path in (tmp_path / "wandb").glob("offline-run-*/*.wandb")}
    assert files == {f"run-{run_ids['wandb']}.wandb"}


def test_a_run_without_an_id_begins_one_even_if_it_continues(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run_ids: dict[str, str] = {}
    (logger,) = make_loggers(make("wandb", tmp_path), start_step=5, run_ids=run_ids)
    assert logger._wandb_init["id"] == run_ids["wandb"]  # type: ignore[attr-defined]
    assert logger._wandb_init["resume"] == "allow"  # type: ignore[attr-defined]


def test_only_rank_0_chooses_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("RANK", "1")
    run_ids: dict[str, str] = {}
    make_loggers(make("wandb", tmp_path), start_step=0, run_ids=run_ids)
    assert run_ids == {}
