"""Measurements of a rank in a run of several sessions: of the whole run, and of one session."""

import dataclasses
import errno
import json
import math
import os
import time
from pathlib import Path

import pytest
import torch
from recorders import SAMPLES_PER_EPOCH, make_recorder, step_record, train
from torch import Tensor

from ftkit.checkpoint.metadata import BaseIdentity, DataIdentity, Layout, Metadata
from ftkit.data.records.media import ShownMedium
from ftkit.models.routing import RouterLoss, Routing
from ftkit.runs.report.answers import AnsweredExample, AnswerScore, ExactMatch
from ftkit.runs.report.meters import PARTS
from ftkit.runs.report.metrics import read_metrics, read_validation
from ftkit.runs.report.report import (
    ExpertLoad,
    Loss,
    Report,
    Spread,
    TermValues,
    read_report,
    write_report,
)
from ftkit.runs.report.table import measured_rows
from ftkit.training.recorder import Recorder
from ftkit.utils.files import make_reserve


def metadata_of(recorder: Recorder) -> Metadata:
    """State as read back from a checkpoint of this moment."""
    assert recorder.report.progress is not None
    return Metadata(
        method="lora",
        step=recorder.steps,
        samples=recorder.samples,
        tokens=recorder.tokens,
        epochs=recorder.epochs,
        training_s=recorder.training_s,
        total_steps=20,
        learning_rate=1e-3,
        schedule={},
        loss=None,
        validation_loss=None,
        max_seq_length=100,
        optimizer="torch.optim.AdamW",
        optimizer_scalars={},
        rng={},
        base=BaseIdentity(name="base", fingerprint=""),
        data=DataIdentity(fingerprint="", train_samples=SAMPLES_PER_EPOCH),
        layout=Layout(
            strategy="fsdp",
            world_size=2,
            devices=2,
            num_nodes=1,
            precision="32-true",
            micro_batch_size=1,
            accelerator="cpu",
        ),
        versions={},
        saved_at="",
        carried=json.loads(json.dumps(recorder.carried())),
    )


EXAMPLE = AnsweredExample(
    instruction="how?",
    expected="so",
    before="what",
    media=[
        ShownMedium(kind="image", name="a.png", size="2 x 2", first=0, end=4, picture="data:,a")
    ],
)


def first_session(tmp_path: Path) -> Metadata:
    with make_recorder(tmp_path) as recorder:
        recorder.on_validation(0, 5.0)
        recorder.note(
            exact_match=ExactMatch(samples=8, before=0.25),
            scores=[AnswerScore(name="close", samples=8, before=0.5, file="a.py", sha256="0")],
            examples=[EXAMPLE],
        )
        train(recorder, range(1, 9))
        recorder.on_validation(4, 1.5)
        recorder.on_validation(8, 2.0)
        return metadata_of(recorder)


@pytest.mark.extensions
def test_progress_and_loss_are_of_the_whole_run(tmp_path: Path) -> None:
    start = first_session(tmp_path)
    with make_recorder(tmp_path, start) as recorder:
        assert (recorder.steps, recorder.samples, recorder.epochs) == (8, 80, 0.8)
        train(recorder, range(9, 13))
        recorder.on_validation(12, 1.8)
    progress, loss = recorder.report.progress, recorder.report.loss
    assert dataclasses.astuple(progress) == (12, 120, 1.2)
    assert (loss.first, loss.last) == (10.0, 10.0 / 12)
    assert (loss.validation_first, loss.validation_last, loss.validation_best) == (5.0, 1.8, 1.5)
    assert (loss.validation_best_step, loss.validations_since_best) == (4, 2)
    assert [patience for patience in (None, 1, 2, 3) if loss.has_exhausted(patience)] == [1, 2]
    assert read_report(tmp_path / "out/.run/rank-0").loss == loss


@pytest.mark.extensions
def test_terms_of_an_objective_are_of_the_whole_run_and_in_both_tables(tmp_path: Path) -> None:
    names = "accuracy", "chosen_reward", "margin", "odds_ratio_loss", "rejected_reward", "sft_loss"
    with make_recorder(tmp_path, objective="orpo") as recorder:
        recorder.on_validation(0, 5.0, terms=dict.fromkeys(names, 0.5))
        recorder.enter("training")
        recorder.on_step(step_record(1, dict.fromkeys(names, 0.25)), None)
        start = dataclasses.replace(metadata_of(recorder), step=1)
    with make_recorder(tmp_path, start, objective="orpo") as recorder:
        recorder.enter("training")
        recorder.on_step(step_record(2, dict.fromkeys(names, 0.75)), None)
        recorder.on_validation(2, 4.0, terms=dict.fromkeys(names, 1.0))
    report = read_report(tmp_path / "out/.run/rank-0")
    assert report.terms["accuracy"] == TermValues(
        first=0.25, last=0.75, validation_first=0.5, validation_last=1.0, is_share=True
    )
    assert sorted(report.terms) == list(names) and not report.terms["margin"].is_share
    assert report.loss.perplexity is None, "the loss is no cross-entropy"
    assert dict(measured_rows(report))["accuracy"] == "25 % -> 75 %, validation 50 % -> 100 %"
    rows = read_metrics(tmp_path / "out/metrics.csv")
    assert [row["accuracy"] for row in rows] == [0.25, 0.75]
    validations = read_validation(tmp_path / "out/validation.csv")
    assert [(row["val_accuracy"], row["perplexity"]) for row in validations] == [
        (0.5, None),
        (1.0, None),
    ]


def test_a_validation_loss_that_is_no_number_is_no_better() -> None:
    loss = Loss().with_validation(5, math.nan)
    assert (loss.validation_best, loss.validations_since_best) == (None, 1)
    loss = loss.with_validation(10, 3.0).with_validation(15, 3.0).with_validation(20, math.nan)
    assert (loss.validation_best, loss.validation_best_step) == (3.0, 10)
    assert loss.validations_since_best == 2, "an equal one is no better"


@pytest.mark.extensions
def test_what_was_asked_before_training_is_still_known(tmp_path: Path) -> None:
    start = first_session(tmp_path)
    with make_recorder(tmp_path, start) as recorder:
        assert recorder.report.exact_match == ExactMatch(samples=8, before=0.25)
        close = AnswerScore(name="close", samples=8, before=0.5, file="a.py", sha256="0")
        assert recorder.report.scores == [close]
        assert recorder.report.examples == [EXAMPLE]


@pytest.mark.extensions
def test_tokens_times_and_throughput_are_of_the_session(tmp_path: Path) -> None:
    start = first_session(tmp_path)
    with make_recorder(tmp_path, start) as recorder:
        train(recorder, range(9, 13))
    report = recorder.report
    assert report.tokens.real == 4000
    assert report.throughput.tokens_per_s == pytest.approx(2000)
    assert report.throughput.window_steps == 3
    assert report.step_s.total == pytest.approx(0.5)
    assert recorder.tokens == 12_000


@pytest.mark.extensions
def test_a_step_in_which_memory_was_followed_counts_in_all_but_the_speed(tmp_path: Path) -> None:
    slow = {"duration_s": 5.0, "parts_s": dict.fromkeys(PARTS, 1.0)}
    with make_recorder(tmp_path) as recorder:
        recorder.enter("training")
        for step in range(1, 9):
            record = step_record(step)
            followed = step == 5
            if followed:
                record = dataclasses.replace(record, **slow)
            recorder.on_step(record, None, follows_memory=followed)
    report = recorder.report
    assert report.throughput.tokens_per_s == pytest.approx(2000)
    assert report.throughput.window_steps == 8 - 2 - 1
    assert report.step_s.total == pytest.approx(0.5)
    assert (report.progress.steps, report.tokens.real, report.loss.last) == (8, 8000, 10.0 / 8)
    rows = read_metrics(tmp_path / "out/metrics.csv")
    assert rows[4]["tokens_per_s"] == pytest.approx(200)


@pytest.mark.extensions
def test_a_device_is_sampled_for_its_use_in_steps_at_full_speed(tmp_path: Path) -> None:
    """Not in set-up and the first steps; after a validation it is another stretch of them."""
    found: list[int | None] = []
    with make_recorder(tmp_path) as recorder:
        train(recorder, range(1, 3))
        found.append(recorder.system._stretch())
        train(recorder, range(3, 9))
        for phase in ("training", "validation", "training"):
            recorder.enter(phase)
            found.append(recorder.system._stretch())
        recorder.end_phases()
        found.append(recorder.system._stretch())
    begun, first, validated, second, ended = found
    assert begun is validated is ended is None
    assert first is not None and second is not None and second > first


@pytest.mark.extensions
def test_the_imbalance_is_the_mean_of_the_session(tmp_path: Path) -> None:
    start = first_session(tmp_path)
    with make_recorder(tmp_path, start, devices=2) as recorder:
        train(recorder, range(9, 13), imbalance=1.25)
    assert recorder.report.throughput.rank_imbalance == pytest.approx(1.25)


@pytest.mark.extensions
def test_seconds_of_training_add_up_and_count_the_running_ones(tmp_path: Path) -> None:
    start = dataclasses.replace(first_session(tmp_path), training_s=100.0)
    with make_recorder(tmp_path, start) as recorder:
        assert recorder.training_s == 100.0
        recorder.enter("training")
        time.sleep(0.05)
        assert recorder.training_s >= 100.05
        recorder.enter("validation")
        held = recorder.training_s
        time.sleep(0.01)
        assert recorder.training_s == held


@pytest.mark.extensions
def test_time_after_the_run_counts_for_no_phase(tmp_path: Path) -> None:
    with make_recorder(tmp_path) as recorder:
        recorder.enter("saving")
        recorder.end_phases()
        before = recorder.report.phases_s
        time.sleep(0.02)
    after = recorder.report.phases_s
    assert before is not None and after is not None
    assert dataclasses.replace(after, total=before.total) == before
    assert recorder.report.phase == "saving"


@pytest.mark.extensions
def test_the_logs_have_every_step_once(tmp_path: Path) -> None:
    start = first_session(tmp_path)
    with make_recorder(tmp_path, start) as recorder:
        train(recorder, range(9, 13))
        recorder.on_validation(12, 1.8)
    rows = read_metrics(tmp_path / "out/metrics.csv")
    assert [(row["step"], row["samples"]) for row in rows] == [(s, 10 * s) for s in range(1, 13)]
    assert [row["step"] for row in read_validation(tmp_path / "out/validation.csv")] == [
        0,
        4,
        8,
        12,
    ]


class Experts(torch.nn.Module):
    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return hidden


@pytest.mark.extensions
def test_the_loss_of_routers_and_the_load_of_experts_are_told_where_there_are_any(
    tmp_path: Path,
) -> None:
    routing = Routing([1, 3], 2, RouterLoss(experts=2, chosen=1, coefficient=0.1))
    layers = [Experts(), Experts()]
    for number, layer in enumerate(layers):
        routing.watch_experts(layer, number)
    hidden, chosen = torch.zeros(4, 8), torch.tensor([[0], [0], [0], [1]])
    with make_recorder(tmp_path, routing=routing) as recorder:
        with routing.of(torch.ones(1, 4, dtype=torch.bool)):
            for layer, asked in zip(layers, (chosen, chosen % 1), strict=True):
                layer(hidden, asked, torch.ones(4, 1))
        recorder.on_step(dataclasses.replace(step_record(1), router_aux_loss=1.5), None)
    (row,) = read_metrics(tmp_path / "out/metrics.csv")
    assert (row["loss"], row["router_aux_loss"]) == (10.0, 1.5)
    assert recorder.report.loss.router_aux_loss == 1.5
    assert recorder.report.expert_load == ExpertLoad(
        layers=[1, 3],
        choices=4,
        fractions=[[0.75, 0.25], [1.0, 0.0]],
        even=0.5,
        lowest=0.0,
        highest=1.0,
        least_even_layer=3,
    )


@pytest.mark.extensions
def test_without_experts_there_is_neither(tmp_path: Path) -> None:
    with make_recorder(tmp_path) as recorder:
        train(recorder, range(1, 3))
    assert "router_aux_loss" not in read_metrics(tmp_path / "out/metrics.csv")[0]
    assert recorder.report.expert_load is None
    assert recorder.report.loss.router_aux_loss is None


@pytest.mark.extensions
def test_a_third_session_carries_all_of_the_two_before(tmp_path: Path) -> None:
    start = first_session(tmp_path)
    with make_recorder(tmp_path, start) as recorder:
        train(recorder, range(9, 13))
        start = metadata_of(recorder)
    assert (start.step, start.tokens, start.carried["loss"]["first"]) == (12, 12_000, 10.0)
    with make_recorder(tmp_path, start) as recorder:
        pass
    assert recorder.report.progress.steps == 12
    assert recorder.report.loss.last == 10.0 / 12


@pytest.mark.extensions
def test_a_checkpoint_holds_the_loss_of_its_own_step(tmp_path: Path) -> None:
    with make_recorder(tmp_path) as recorder:
        train(recorder, range(1, 4))
        assert recorder.carried()["loss"]["last"] == 10.0 / 3
        assert recorder.carried()["exact_match"] is None


@pytest.mark.extensions
@pytest.mark.parametrize("inside", [True, False])
def test_the_report_says_where_the_session_went_on_from(inside: bool, tmp_path: Path) -> None:
    start = first_session(tmp_path)
    checkpoint = tmp_path / ("out" if inside else "other") / "checkpoints/step-00000008"
    changes = ("optimizer.lr: 0.001 -> 0.002",)
    with make_recorder(tmp_path, start, checkpoint=checkpoint, changes=changes) as recorder:
        pass
    resumed = recorder.report.resumed
    assert resumed.checkpoint == ("checkpoints/step-00000008" if inside else str(checkpoint))
    assert (resumed.from_step, resumed.strategy, resumed.world_size) == (8, "fsdp", 2)
    assert resumed.changes == ["optimizer.lr: 0.001 -> 0.002"]


@pytest.mark.extensions
def test_a_full_disk_stops_nothing_and_the_last_report_has_reserved_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = tmp_path / "out/.run/reserve"
    reserve.parent.mkdir(parents=True)

    def write(report: Report, directory: Path) -> None:
        if reserve.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_report(report, directory)

    monkeypatch.setattr("ftkit.training.recorder.write_report", write)
    make_reserve(reserve)
    with make_recorder(tmp_path) as recorder:
        recorder.enter("training")
        train(recorder, range(1, 4))
        assert not (tmp_path / "out/.run/rank-0/report.json").exists()
    assert read_report(tmp_path / "out/.run/rank-0").progress.steps == 3


@pytest.mark.extensions
def test_checkpoints_are_counted_and_timed(tmp_path: Path) -> None:
    with make_recorder(tmp_path) as recorder:
        assert recorder.report.checkpoints is None
        directory = tmp_path / "out/checkpoints"
        recorder.on_save(directory / "step-00000002", size_bytes=10, stall_s=0.1, write_s=1.0)
        recorder.on_failed_save()
        recorder.on_save(directory / "step-00000004", size_bytes=20, stall_s=0.3, write_s=4.0)
    checkpoints = recorder.report.checkpoints
    assert (checkpoints.saved, checkpoints.failed) == (2, 1)  # type: ignore[attr-defined]
    assert (checkpoints.last, checkpoints.last_bytes) == ("checkpoints/step-00000004", 20)  # type: ignore[attr-defined]
    assert checkpoints.stall_s == Spread(mean=0.2, max=0.3)  # type: ignore[attr-defined]
    assert checkpoints.write_s == Spread(mean=2.5, max=4.0)  # type: ignore[attr-defined]
