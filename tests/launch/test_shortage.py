"""A run that is out of memory says how much was missing, and what would fit."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from messages import says
from preloaded import SUPERVISOR, Attempt, Preloaded
from runs import WITHOUT_EVALUATION, options
from tiny import make_llama

from ftkit.runs.report.report import Report, read_report

MIB = 2**20


@pytest.fixture
def run(
    server: Preloaded, common: list[str], tmp_path: Path
) -> Callable[..., tuple[Attempt, Report]]:
    """Runs the command with faults; what it showed, and its report."""

    def run(faults: dict[int, list[object]], **keys: object) -> tuple[Attempt, Report]:
        words = ["finetune_full", *common, *options(**WITHOUT_EVALUATION | keys)]
        attempt = server.run(*words, "--force", "--out_dir", tmp_path / "out", faults=faults)
        return attempt, read_report(tmp_path / "out")

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "phase"),
    [
        pytest.param(16 * MIB, "set_up", id="a file is mapped", marks=pytest.mark.matrix),
        pytest.param(48 * MIB, "set_up", id="the model is made", marks=pytest.mark.matrix),
        pytest.param(120 * MIB, "training", id="the first step"),
    ],
)
def test_a_limit_on_host_memory_is_named(
    run: Callable[..., tuple[Attempt, Report]], tmp_path: Path, more: int, phase: str
) -> None:
    base = make_llama(tmp_path / "base", hidden_size=512, intermediate_size=2048)
    large = {"checkpoint_dir": base, "train__micro_batch_size": 2, "precision": "32-true"}
    attempt, report = run({SUPERVISOR: ["little_memory", more]}, **large)
    assert (attempt.code, report.outcome, report.exit_code) == (3, "out_of_memory", 3)
    missing = report.shortage
    assert missing and missing.held_bytes and missing.available_bytes
    assert missing.predicted_peak_bytes and missing.predicted_peak_bytes > 16 * MIB
    assert report.phase == phase
    if phase == "training":
        held = report.step_memory
        assert held and held.fullest.peak_breakdown_bytes.parameters > 16 * MIB
    assert says(attempt.output, "free for each rank")
    assert "in tensors (sequences: " in attempt.output
    assert missing.predicted_for and missing.predicted_for.endswith("tokens: the longest sample")


@pytest.mark.slow
def test_runs_that_would_fit_are_listed_as_command_lines(
    run: Callable[..., tuple[Attempt, Report]],
) -> None:
    keys = {"train__micro_batch_size": 2, "precision": "32-true"}
    attempt, report = run({0: ["out_of_memory", "forward"]}, **keys)
    missing = report.shortage
    assert attempt.code == 3 and missing is not None and 1 <= len(missing.changes) <= 3
    lines = attempt.output.partition(
        "changes that would make it fit, those that cost the least speed first:"
    )[2]
    for change in missing.changes:
        title, _, command = change.partition(": ")
        assert title in lines and "FSDP" not in title, "ranks on one machine share its memory"
        assert "finetune" in shlex.split(command)[1]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_size_in_torchs_message_is_compared_with_the_memory_there_is(
    run: Callable[..., tuple[Attempt, Report]], where: str
) -> None:
    attempt, report = run({SUPERVISOR: ["no_advice"], 0: ["out_of_memory", where]})
    assert (attempt.code, report.outcome, report.phase) == (3, "out_of_memory", "training")
    assert report.shortage and report.shortage.asked_bytes == 2 * 2**30
    assert "2.0 GiB more were requested" in attempt.output
    assert "what would fit" not in attempt.output.replace(
        "searching for changes that would make it fit", ""
    )


def test_a_drivers_message_without_sizes_is_shown_with_known_sizes(
    run: Callable[..., tuple[Attempt, Report]],
) -> None:
    words = "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable assertions."
    attempt, report = run({SUPERVISOR: ["no_advice"], 0: ["out_of_memory", "backward", words]})
    assert (attempt.code, report.outcome, report.phase) == (3, "out_of_memory", "training")
    assert says(report.exit_reason, "CUDA error: out of memory")
    missing = report.shortage
    assert missing and missing.held_bytes and missing.available_bytes and not missing.asked_bytes
    assert says(attempt.output, "free for each rank ... driver ... no memory")


@pytest.mark.parametrize("words", [None, "CUDA error: out of memory"])
def test_running_out_of_memory_in_the_optimizer_is_not_a_wrong_argument(
    run: Callable[..., tuple[Attempt, Report]], words: str | None
) -> None:
    faults = {SUPERVISOR: ["no_advice"], 0: ["out_of_memory", "optimizer", words]}
    attempt, report = run(faults, checkpoint__save=False)
    assert (attempt.code, report.outcome, report.phase) == (3, "out_of_memory", "set_up")


def test_a_rank_that_a_library_ends_for_memory_is_out_of_memory(
    run: Callable[..., tuple[Attempt, Report]],
) -> None:
    words = "Error out of memory at line 78 in file /src/csrc/ops.cu"
    attempt, report = run({SUPERVISOR: ["no_advice"], 0: ["ended_by_a_library", words]})
    assert (attempt.code, report.outcome) == (3, "out_of_memory")
    assert report.exit_reason.endswith(f"its last line: {words}")


def test_a_rank_that_the_kernel_kills_for_memory_is_out_of_memory(
    run: Callable[..., tuple[Attempt, Report]],
) -> None:
    faults = {SUPERVISOR: ["kernel_that_kills_for_memory"], 0: ["killed_in_training"]}
    attempt, report = run(faults)
    assert (attempt.code, report.outcome, report.phase) == (3, "out_of_memory", "training")
    assert says(report.exit_reason, "kernel killed ... host")
    assert report.shortage and report.shortage.available_bytes
