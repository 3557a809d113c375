"""Another kind of device is a row in a table: runs on one that torch has no build for.

The simulated cards take the device type PrivateUse1 under the name sim, as a backend out of torch's
tree would, with a library of their own for messages between ranks; all that ftkit knows of them
is the row in `simulated_card.private`.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import command_environment, command_line
from messages import says
from on_card import OnCard, on_card
from preloaded import preloaded
from rank_jobs import Outcome
from simulated_card.build import needs_card
from simulated_card.machine import cards, with_cards

from ftkit.runs.report.report import read_report

pytestmark = needs_card

KIND = "sim"
ON_KIND = ("--accelerator", KIND)
ONE = (*ON_KIND, "--devices", "1")
DDP = (*ON_KIND, "--devices", "2", "--strategy", "ddp")
FSDP = (*ON_KIND, "--devices", "2", "--strategy", "fsdp")
ON_CPU = ("--accelerator", "cpu", "--devices", "1")


def environment() -> dict[str, str]:
    return with_cards(command_environment(), cards("h100", "h100", kind=KIND))


@pytest.fixture(scope="module")
def kind(
    tiny_base: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OnCard]:
    """Commands on a machine with two of these devices."""
    with preloaded(tmp_path_factory.mktemp("server"), environment()) as server:
        yield on_card(server, tmp_path_factory.mktemp("runs"), tiny_base, tiny_data)


@pytest.mark.parametrize(
    ("command", "words", "within"),
    [
        pytest.param("finetune", ONE, 1e-6, id="LoRA", marks=pytest.mark.slow),
        pytest.param("finetune_full", ONE, 1e-6, id="full", marks=pytest.mark.matrix),
        pytest.param("finetune_full", DDP, 1e-6, id="DDP", marks=pytest.mark.matrix),
        pytest.param("finetune_full", FSDP, 1e-6, id="FSDP", marks=pytest.mark.slow),
        pytest.param(
            "finetune",
            (*ONE, "--precision", "bf16-true", "--memory.activation_checkpointing", "true"),
            3e-3,
            id="LoRA, bf16-true, checkpointed",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            "finetune",
            (*ONE, "--precision", "bf16-mixed"),
            3e-3,
            id="LoRA, bf16-mixed",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            "finetune_full",
            (*FSDP, "--strategy.cpu_offload", "true"),
            1e-6,
            id="FSDP, in host memory",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            "finetune_full",
            (
                *(*ONE, "--memory.activation_checkpointing", "true"),
                *("--memory.offload_activations", "true"),
            ),
            1e-6,
            id="checkpointed in host memory",
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_a_run_on_another_kind_of_device_learns_what_one_on_a_cpu_learns(
    kind: OnCard, command: str, words: tuple[str, ...], within: float
) -> None:
    ranks = 2 if "2" in words else 1
    found = kind.completed(command, *words, ranks=ranks)
    assert found.losses == pytest.approx(kind.on_cpu(command, *words).losses, rel=within)
    report = read_report(found.out_dir)
    resolved = report.resolved
    assert resolved is not None
    assert (resolved.accelerator, resolved.device) == (KIND, "NVIDIA H100 80GB HBM3")
    assert resolved.communication == ("ring" if ranks == 2 else None)
    counted = kind.counts(found.out_dir)
    assert counted.contexts == [0]
    assert report.peak_memory is not None and report.peak_memory.allocated_bytes


@pytest.mark.extensions
def test_its_memory_is_followed_as_that_of_other_devices(kind: OnCard) -> None:
    """Bytes of the tracked tensors are those that its allocator counts, within 1 %."""
    _, out = kind.run("finetune_full", *ONE, follows_memory=True)
    measured = read_report(out).step_memory
    assert measured is not None
    (rank,) = measured.ranks
    assert rank.peak_breakdown_bytes.unattributed <= 0.01 * rank.peak_bytes


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(ON_CPU, FSDP, marks=pytest.mark.slow),
        pytest.param(FSDP, ON_CPU, marks=pytest.mark.matrix),
        pytest.param(ON_CPU, ONE, marks=pytest.mark.matrix),
        pytest.param(ONE, DDP, marks=pytest.mark.matrix),
    ],
)
def test_a_checkpoint_written_on_one_kind_of_device_continues_on_another(
    kind: OnCard, tmp_path: Path, source: tuple[str, ...], target: tuple[str, ...]
) -> None:
    whole = kind.on_cpu("finetune_full")
    out = tmp_path / "run"
    for place, more in ((source, ("--stop_after", "2")), (target, ("--resume", "auto"))):
        line = kind.words("finetune_full", *place, *more, "--out_dir", str(out))
        attempt = kind.server.run(*line)
        assert attempt.code == 0, attempt.output
    assert Outcome(out).losses == pytest.approx(whole.losses, rel=1e-5)


@pytest.mark.extensions
def test_a_result_answers_on_it_as_on_a_cpu(kind: OnCard) -> None:
    final = kind.completed("finetune", *ONE).out_dir / "final"
    words = ("generate", final, "--prompt", "what is the colour of cat", "--max_new_tokens", "4")
    answers = [kind.server.run(*words, *place[:2]) for place in (ONE, ON_CPU)]
    assert [answer.code for answer in answers] == [0, 0], answers[0].output
    ours, theirs = (answer.output.splitlines()[:-1] for answer in answers)  # the last: its speed
    assert ours == theirs


@pytest.mark.extensions
def test_unsupported_settings_are_refused_before_anything_starts(
    kind: OnCard, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    refused = {
        (*ON_KIND, "--devices", "2", "--strategy", "deepspeed"): (
            "strategy is deepspeed ... accelerator is sim ... --strategy fsdp, or --accelerator cpu"
        ),
        (
            *ON_KIND,
            "--devices",
            "3",
        ): "devices is 3 ... 2 card ... --devices 2 or",
        ("--accelerator", "xpu"): (
            "accelerator is xpu ... cpu and sim ... --accelerator sim or cpu"
        ),
    }
    for words, said in refused.items():
        attempt = kind.server.run(*kind.words("finetune_full", *words, "--out_dir", str(out)))
        assert attempt.code == 2 and not out.exists(), attempt.output
        assert says(" ".join(attempt.output.split()), said)


@pytest.mark.matrix
def test_a_whole_command_finds_it_in_a_process_of_its_own(kind: OnCard, tmp_path: Path) -> None:
    line = kind.words("finetune", *FSDP, "--out_dir", str(tmp_path / "run"))
    ended = subprocess.run(
        command_line(*line), env=environment(), capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    expected = kind.on_cpu("finetune").losses
    assert Outcome(tmp_path / "run").losses == pytest.approx(expected, rel=1e-6)
