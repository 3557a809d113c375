"""A run that is out of memory says how much was missing, and what would fit."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from messages import says
from preloaded import SUPERVISOR, Attempt, Preloaded
from runs import WITHOUT_EVALUATION, options
from tiny import make_llama

from ftkit.runs.report.metrics import read_metrics
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


OPEN = WITHOUT_EVALUATION | {
    "train__micro_batch_size": "null",
    # Together more than 1,024 tokens, which is half of what is usual on CPUs.
    "train__global_batch_size": 16,
    "train__max_steps": 5,
    "train__save_interval": 1,
    "train__epochs": 50,
}


@pytest.fixture(scope="module")
def undisturbed(
    server: Preloaded, common: list[str], tmp_path_factory: pytest.TempPathFactory
) -> list[float]:
    """Losses of a run that leaves its micro-batches open, and has room for them."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    attempt = server.run("finetune_full", *common, *options(**OPEN), "--out_dir", out)
    report = read_report(out)
    assert attempt.code == 0 and report.resolved is not None
    chosen = (report.resolved.micro_batch_tokens, report.resolved.micro_batch_source)
    assert (chosen, report.micro_batch_halved) == ((2048, "usual"), 0)
    assert report.throughput and report.throughput.micro_steps_per_step == 1
    return losses(out)


def losses(out: Path) -> list[float]:
    return [row["loss"] or 0.0 for row in read_metrics(out / "metrics.csv")]


@pytest.mark.parametrize(
    ("faults", "keys"),
    [
        ({0: ["memory_for", 600, 3, "raise"]}, {}),
        ({0: ["memory_for", 600, 3, "kill"], SUPERVISOR: ["kernel_that_kills_for_memory"]}, {}),
        pytest.param(
            {1: ["memory_for", 600, 3, "raise"]},
            {"devices": 2, "strategy": "fsdp"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_micro_batch_that_ftkit_chose_is_halved_when_memory_runs_out(
    server: Preloaded,
    common: list[str],
    undisturbed: list[float],
    tmp_path: Path,
    faults: dict[int, list[object]],
    keys: dict[str, object],
) -> None:
    words = ["finetune_full", *common, *options(**OPEN | keys)]
    attempt = server.run(*words, "--out_dir", tmp_path / "out", faults=faults)
    report = read_report(tmp_path / "out")
    assert (attempt.code, report.micro_batch_halved) == (0, 2), attempt.output
    assert report.resolved and report.resolved.micro_batch_tokens == 512
    assert report.resolved.micro_batch_source == "memory"
    # From the last commit each time; what is learned is the same.
    first = report.restarts[0]
    assert (len(report.restarts), first.from_step + first.steps_lost) == (2, 2)
    assert losses(tmp_path / "out") == pytest.approx(undisturbed, rel=1e-5)
    assert says(attempt.output, "at most 2,048 tokens ... starting again with 1,024 tokens")
    # A later session keeps the number, so that the same layout gives the same bits.
    more = server.run(
        *words, "--resume", "true", "--train.max_steps", 6, "--out_dir", tmp_path / "out"
    )
    resolved = read_report(tmp_path / "out").resolved
    assert more.code == 0 and resolved is not None
    assert (resolved.micro_batch_tokens, resolved.micro_batch_source) == (512, "checkpoint")


@pytest.mark.parametrize(
    ("keys", "halved"),
    [
        ({}, 2),
        pytest.param({"train__micro_batch_tokens": "auto"}, 2, marks=pytest.mark.slow),
        ({"train__micro_batch_size": 2}, 0),
        ({"train__micro_batch_tokens": 2048}, 0),
        ({"train__optimizer_in_backward": True, "train__max_norm": "null"}, 0),
    ],
)
def test_it_is_halved_twice_at_most_and_never_a_number_that_the_recipe_names(
    server: Preloaded,
    common: list[str],
    tmp_path: Path,
    keys: dict[str, object],
    halved: int,
) -> None:
    faults: dict[int, list[object]] = {0: ["memory_for", 10, 1, "raise"]}
    if "auto" not in keys.values():  # which needs a prediction
        faults[SUPERVISOR] = ["no_advice"]
    words = ["finetune_full", *common, *options(**OPEN | keys)]
    attempt = server.run(*words, "--out_dir", tmp_path / "out", faults=faults)
    assert attempt.code == 3, attempt.output
    report = read_report(tmp_path / "out")
    assert report.outcome == "out_of_memory"
    assert (report.micro_batch_halved, len(report.restarts)) == (halved, halved)


@pytest.mark.slow
def test_a_branch_that_runs_out_of_memory_begins_again_at_its_checkpoint(
    server: Preloaded, common: list[str], undisturbed: list[float], tmp_path: Path
) -> None:
    words = ["finetune_full", *common, *options(**OPEN)]
    assert server.run(*words, "--out_dir", tmp_path / "a", "--train.max_steps", 2).code == 0
    faults: dict[int, list[object]] = {0: ["memory_for", 600, 1, "raise"]}
    branch = ["--out_dir", tmp_path / "b", "--resume", tmp_path / "a"]
    attempt = server.run(*words, *branch, faults=faults)
    report = read_report(tmp_path / "b")
    assert (attempt.code, report.micro_batch_halved) == (0, 2), attempt.output
    assert report.resumed and report.resumed.from_step == 2
    assert losses(tmp_path / "b") == pytest.approx(undisturbed, rel=1e-5)
    assert not (tmp_path / "b-2").exists()


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
