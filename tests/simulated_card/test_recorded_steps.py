"""Micro-steps that are recorded and replayed on a simulated card learn what computed ones learn.

Its graphs fail where a number of the host would be stale, memory was freed, or the host waits.
"""

from pathlib import Path

import pytest
from messages import says
from on_card import OnCard, on_card
from preloaded import Preloaded
from rank_jobs import Outcome
from safetensors.torch import load_file
from simulated_card.build import needs_card
from simulated_card.counts import WAITS

from ftkit.runs.report.report import RecordedSteps, Report, read_report

pytestmark = needs_card

STEPS = 16
RECORDED = ("--train.record_steps", "true")
MIXED = ("--precision", "bf16-mixed")
DDP = ("--devices", "2", "--strategy", "ddp")
EXACT = 1e-6
"""Largest relative difference of losses."""
ROUNDED_STEPS = 8
"""Steps compared in 16 bits: fillers round them elsewhere, and each update adds to that."""
ROUNDED = 3e-3
"""The same where 16 bits round what is added up in another order, as over the rows of fillers."""


@pytest.fixture(scope="module")
def machine(
    server_with_cards: Preloaded,
    tiny_base: Path,
    tiny_data: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> OnCard:
    directory = tmp_path_factory.mktemp("cards")
    changes = {"train__max_steps": STEPS, "devices": 1}
    return on_card(server_with_cards, directory, tiny_base, tiny_data, changes)


def report(found: Outcome) -> Report:
    return read_report(found.out_dir)


def replayed(found: Outcome) -> RecordedSteps:
    recorded = report(found).recorded_steps
    assert recorded is not None and recorded.replayed > 0
    assert not any("record_steps" in warning for warning in report(found).warnings)
    return recorded


CASES = {
    "LoRA with dropout, padded": ("finetune", (), EXACT),
    "full, padded": ("finetune_full", (), EXACT),
    "full in rows": ("finetune_full", MIXED, EXACT),
    "LoRA with dropout in rows": ("finetune", MIXED, ROUNDED),
    "LoRA with dropout in 16 bits": ("finetune", ("--precision", "bf16-true"), ROUNDED),
    "ddp, LoRA with dropout, padded": ("finetune", DDP, EXACT),
    "ddp, full in rows": ("finetune_full", (*DDP, *MIXED), EXACT),
}
OFTEN = ("LoRA with dropout, padded", "full, padded", "ddp, LoRA with dropout, padded")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in OFTEN else pytest.mark.matrix)
        for name in CASES
    ],
)
def test_losses_are_those_of_computed_steps(machine: OnCard, name: str) -> None:
    command, words, tolerance = CASES[name]
    ranks = 2 if "ddp" in words else 1
    expected = machine.completed(command, *words, ranks=ranks)
    found = machine.completed(command, *words, *RECORDED, ranks=ranks)
    compared = ROUNDED_STEPS if "--precision" in words else STEPS
    assert found.losses[:compared] == pytest.approx(expected.losses[:compared], rel=tolerance)
    norms = [
        [float(row["grad_norm"] or 0) for row in one.rows[:compared]] for one in (found, expected)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=max(1e-4, tolerance))

    recorded, before = replayed(found), report(expected)
    assert recorded.shapes <= 8 and recorded.recording_s > 0
    # Of 11 samples, up to four in each on every rank.
    assert recorded.micro_steps == (3 if ranks == 1 else 2) * STEPS
    # The third micro-batch of a shape is the first one that is replayed.
    assert recorded.replayed <= recorded.micro_steps - 2 * recorded.shapes
    throughput = report(found).throughput
    assert throughput is not None and throughput.compiled_graphs == recorded.shapes
    step = report(found).step_s
    assert step is not None and before.step_s is not None
    # Steps that recorded nothing are in the mean too, so that a replay has a time.
    assert (step.recorded or 0) > 1e-3 and not before.step_s.recorded
    # Fillers count for no token, and as padding.
    ours, theirs = report(found).tokens, before.tokens
    assert ours is not None and theirs is not None and before.recorded_steps is None
    assert (ours.real, ours.label) == (theirs.real, theirs.label)
    assert ours.padded is not None and theirs.padded is not None
    assert (ours.padded > theirs.padded) == (recorded.filled_fraction != 0)
    # No wait but those of every step, which are outside of the micro-steps, and of recording.
    counts, usual = (
        machine.counts(one.out_dir).of_step(STEPS - 2, *WAITS) for one in (found, expected)
    )
    counts.pop("synchronize device training/recorded_steps.py:_record", None)
    assert counts == usual


@pytest.mark.slow
def test_a_run_goes_on_recorded_and_computed_through_validations_saves_and_answers(
    machine: OnCard, tmp_path: Path
) -> None:
    evaluated = (
        *("--eval.interval", "2", "--eval.max_iters", "1", "--train.save_interval", "3"),
        *("--eval.initial_validation", "true", "--eval.max_new_tokens", "3"),
    )
    expected = machine.completed("finetune", *evaluated)
    out = tmp_path / "run"
    for more in (
        ("--stop_after", "1"),
        (*RECORDED, "--resume", "auto", "--stop_after", "6"),
        ("--train.record_steps", "false", "--resume", "auto"),
    ):
        line = machine.words("finetune", *evaluated, *more, "--out_dir", str(out))
        # A step that is followed rounds elsewhere on these cards.
        happens: list[object] = ["on_card", str(tmp_path), None, False]
        attempt = machine.server.run(*line, faults={0: happens})
        assert attempt.code == 0, attempt.output
        if more[:2] == RECORDED:
            replayed(Outcome(out))
    found = Outcome(out)
    assert found.losses == pytest.approx(expected.losses, rel=EXACT)
    assert found.validation_losses == pytest.approx(expected.validation_losses, rel=EXACT)
    assert report(found).examples == report(expected).examples


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_parameters_without_a_gradient_have_none_in_replays(
    machine: OnCard, tiny_base: Path, ranks: int
) -> None:
    """Weight decay would shrink them if it were zero; the memory of a step is measured beside."""
    # On two cards beside one, because torch's module refuses such parameters; in 16 bits these
    # round elsewhere.
    layout, precision, within = (DDP, (), 1e-5) if ranks == 2 else ((), MIXED, EXACT)
    words = (*precision, "--optimizer.weight_decay", "0.5")
    how = {"faults": ("skips_the_last_block",), "follows_memory": True}
    expected = machine.completed("finetune_full", *words, **how)
    found = machine.completed("finetune_full", *words, *layout, *RECORDED, ranks=ranks, **how)
    replayed(found)
    memory = report(found).step_memory
    assert memory is not None and memory.ranks[0].micro_step, "a step without replays"
    assert found.losses == pytest.approx(expected.losses, rel=within)
    before = load_file(tiny_base / "model.safetensors")
    ours, theirs = (
        load_file(one.out_dir / "final" / "model.safetensors") for one in (found, expected)
    )
    last = max(int(name.split(".")[2]) for name in ours if ".layers." in name)
    skipped = [name for name in ours if f".layers.{last}." in name]
    assert skipped and all(ours[name].equal(before[name]) for name in skipped)
    assert ours.keys() == theirs.keys()
    assert all((ours[name] - theirs[name]).abs().max() < 1e-5 for name in ours)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "word"),
    [("reads_a_number_in_each_micro_step", "capturing"), ("has_little_memory", "memory")],
)
def test_what_cannot_be_recorded_is_computed_and_a_line_says_why(
    machine: OnCard, fault: str, word: str
) -> None:
    expected = machine.completed("finetune")
    found = machine.completed("finetune", *RECORDED, faults=(fault,))
    recorded = report(found).recorded_steps
    assert recorded is not None and recorded.shapes == recorded.replayed == 0
    (warning,) = (one for one in report(found).warnings if "record_steps" in one)
    assert says(warning, "unrecorded", word)
    assert found.losses == pytest.approx(expected.losses, rel=EXACT)


@pytest.mark.slow
def test_a_cpu_ignores_the_key_and_says_so(machine: OnCard) -> None:
    words = ("--accelerator", "cpu", "--train.max_steps", "2")
    found = machine.completed("finetune", *words, *RECORDED)
    assert report(found).recorded_steps is None
    assert any(says(one, "record_steps", "unrecorded", "cpu") for one in report(found).warnings)
