"""The average of the weights: what it is, where it is used, and that training is without it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_jobs import Case, Outcome, Run, make_run

from ftkit.checkpoint.metadata import read_metadata
from ftkit.checkpoint.state import trained_parameter
from ftkit.checkpoint.stored_state import StoredState
from ftkit.evaluation.loading import full_weights, open_result
from ftkit.evaluation.result import find_result
from ftkit.evaluation.validation import EvaluatedWeights
from ftkit.models.lora.adapter_reading import read_adapter
from ftkit.strategies.state import AVERAGE

DECAY = 0.7
EVERY_STEP = (
    ("train.max_steps", 5),
    ("train.epochs", None),
    ("train.save_interval", 1),
    ("checkpoint.keep_last", 9),
    ("eval.interval", 1),
    ("eval.rouge_l", 0),
)
AVERAGED = (*EVERY_STEP, ("train.ema_decay", DECAY))
QUANTIZED = (("quantize", "bnb.nf4"),)
PLAIN = Case("single", "full", changes=EVERY_STEP)
CASES = {
    "full": Case("single", "full", changes=AVERAGED),
    "full, 16 bits": Case("single", "full", "bf16-true", changes=AVERAGED),
    "QLoRA, 16 bits": Case("single", "lora", "bf16-true", changes=(*AVERAGED, *QUANTIZED)),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory)


@pytest.fixture(scope="module")
def outcomes(run: Run) -> dict[Case, Outcome]:
    return run(1, [PLAIN, *CASES.values()])


def stored(checkpoint: Path) -> StoredState:
    return StoredState.in_checkpoint(checkpoint, read_metadata(checkpoint))


def checkpoints(outcome: Outcome) -> list[Path]:
    return sorted((outcome.out_dir / "checkpoints").glob("step-*"))


def parameters(state: StoredState) -> list[str]:
    """Names of trained parameters."""
    return [name.partition("/")[2] for name in state.names() if name.startswith(f"{AVERAGE}/")]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_has_the_weights_and_their_average_over_the_steps_in_float32(
    outcomes: dict[Case, Outcome], name: str
) -> None:
    states = [stored(path) for path in checkpoints(outcomes[CASES[name]])]
    assert len(states) == 5 and parameters(states[0])
    for parameter in parameters(states[0]):
        average = trained_parameter(states[0], parameter)[:].float()
        for state in states[1:]:
            weight = trained_parameter(state, parameter)[:].float()
            average = DECAY * average + (1 - DECAY) * weight
            found = state[f"{AVERAGE}/{parameter}"][:]
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, average, rtol=1e-5, atol=1e-7)
        assert not torch.equal(found, weight)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_result_and_a_checkpoint_that_is_used_are_the_average(
    outcomes: dict[Case, Outcome], name: str
) -> None:
    outcome = outcomes[CASES[name]]
    last, final = outcome.checkpoint, outcome.out_dir / "final"
    state = stored(last)
    for used in (final, last):
        tensors = numbers_of(used)
        for parameter in parameters(state):
            average = state[f"{AVERAGE}/{parameter}"][:]
            assert torch.equal(tensors[parameter], average.to(tensors[parameter].dtype))


def numbers_of(place: Path) -> Mapping[str, torch.Tensor]:
    """Weights that `ftkit generate` reads, by our names."""
    result = find_result(str(place))
    base = open_result(result)
    if result.kind == "adapter":
        return read_adapter(result.directory, base).tensors
    return {name: value[:] for name, value in full_weights(result, base)}


@pytest.mark.slow
def test_training_is_as_without_it_and_validation_is_of_it(
    outcomes: dict[Case, Outcome],
) -> None:
    plain, averaged = outcomes[PLAIN], outcomes[CASES["full"]]
    assert averaged.losses == plain.losses, "to the bit"
    # There is none before the first step, and after it there is one weight to be averaged.
    assert averaged.validation_losses[:2] == plain.validation_losses[:2]
    assert all(
        a != b
        for a, b in zip(averaged.validation_losses[2:], plain.validation_losses[2:], strict=True)
    )


@pytest.mark.slow
def test_an_average_may_be_switched_on_or_off_or_changed_on_resume(run: Run) -> None:
    shorter = (*EVERY_STEP, ("train.max_steps", 3))
    without, beginning = (
        Case("single", "full", changes=changes, stop_after=2)
        for changes in (shorter, (*shorter, ("train.ema_decay", DECAY)))
    )
    began = run(1, [without, beginning])
    on = Case(
        "single",
        "full",
        changes=(*shorter, ("train.ema_decay", DECAY)),
        start=began[without].out_dir,
    )
    off = Case("single", "full", changes=shorter, start=began[beginning].out_dir)
    changed = Case(
        "single",
        "full",
        changes=(*shorter, ("train.ema_decay", 0.5)),
        start=began[beginning].out_dir,
    )
    found = run(1, [on, off, changed])
    said = {case: (found[case].out_dir / "run.log").read_text() for case in found}
    assert "notice: the checkpoint has no average of the weights" in said[on]
    assert "notice: train.ema_decay is empty: the checkpoint's average is dropped" in said[off]
    assert "average" not in said[changed]
    assert found[on].losses == found[off].losses == found[changed].losses
    assert parameters(stored(found[off].checkpoint)) == []
    new = stored(found[on].checkpoint)
    for name in parameters(new):  # it has begun with this step
        assert torch.equal(new[f"{AVERAGE}/{name}"][:], trained_parameter(new, name)[:])
    before, after = stored(began[beginning].checkpoint), stored(found[changed].checkpoint)
    for name in parameters(after):
        expected = (before[f"{AVERAGE}/{name}"][:] + trained_parameter(after, name)[:]) / 2
        torch.testing.assert_close(after[f"{AVERAGE}/{name}"][:], expected)


class Weights:
    """A strategy of one number, whose average is another one."""

    averages = object()
    number = 1.0

    def take_averages(self) -> Callable[[], None]:
        own, self.number = self.number, 0.5
        return lambda: setattr(self, "number", own)


def test_weights_are_restored_after_a_failure_and_copies_finish_before() -> None:
    strategy: Any = Weights()
    weights = EvaluatedWeights(strategy)
    seen: list[float] = []
    weights.before = lambda: seen.append(strategy.number)

    def fail() -> None:
        with weights.in_place():
            seen.append(strategy.number)
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert (seen, strategy.number) == ([1.0, 0.5], 1.0)
    weights.keep()
    with weights.in_place():
        assert seen == [1.0, 0.5, 1.0]
    assert strategy.number == 0.5
