"""Promises P1 and P2 of what controls training: rates, noise, smoothing, average, end, result."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from losses import load, loss_of
from rank_jobs import (
    CONTROL,
    DEEPSPEED,
    HAS_DEEPSPEED,
    NO_EVALUATION,
    Case,
    Outcome,
    Run,
    assert_same_maths,
    chosen,
    layouts,
    make_run,
    repeated,
)

from ftkit.checkpoint.metadata import read_metadata

Changes = tuple[tuple[str, Any], ...]
STRATEGIES = ["ddp", "fsdp", DEEPSPEED]
SEVERAL = ["ddp", "fsdp", *(["deepspeed"] if HAS_DEEPSPEED else [])]
SETS = tuple(change for change in CONTROL if change[0].startswith("eval.sets."))
WITHOUT_SETS = tuple(change for change in CONTROL if change not in SETS)
PADDED: Changes = (("train.padding_free", False),)
PADDED_BY_3: Changes = (*PADDED, ("train.micro_batch_size", 3))
TOKENS: Changes = (("train.micro_batch_size", None), ("train.micro_batch_tokens", 400))
CONTROLLED = {name: Case(name, "full", changes=CONTROL) for name in ["single", *SEVERAL]}
SLOWER: Changes = (*CONTROL, ("optimizer.lr", 3e-3), ("train.epochs", 2))
"""For LoRA, whose losses go up and down at the higher rate, and rounding with them."""
QUANTIZED: Changes = (("quantize", "bnb.nf4"),)
ADAPTED = {
    "ddp": (TOKENS, ()),
    "fsdp": (PADDED, QUANTIZED),
    "deepspeed": ((), ()),
}
"""Settings that differ from the run on one rank, and settings of both."""
WITHOUT_AVERAGE = tuple(change for change in CONTROL if change[0] != "train.ema_decay")
CUT = 4
"""Steps of first sessions: one validation after the best, two before patience is at its end."""
MOVES = [
    *[("single", "ddp"), ("ddp", "fsdp"), ("fsdp", "single")],
    *[("single", "deepspeed"), ("deepspeed", "fsdp")],
]
OFTEN = [("ddp", "fsdp"), ("fsdp", "single"), ("single", "deepspeed")]
"""Moves outside the matrix: each strategy is a source or a target."""
OTHER_MICRO_BATCH: dict[str, Changes] = {
    "single": PADDED_BY_3,
    "ddp": TOKENS,
    "fsdp": PADDED,
    "deepspeed": (("train.micro_batch_size", None), ("train.micro_batch_tokens", 250)),
}
"""Micro-batch of a second session under another strategy."""
LONGER = {
    "constant": (),
    "inverse_sqrt": (),
    "wsd": (("train.lr_decay_fraction", 0.25),),
    "cosine": (),
    "linear": (),
}
"""Schedules of a run that is made longer after `CUT` of its 9 steps, with what they need."""
LONGER_OFTEN = [("wsd",), ("cosine",)]
"""Outside the matrix: one whose rate depends on the last step throughout, and one in its decay."""


def schedule(kind: str, epochs: int, **keys: Any) -> Case:
    """A run of 4.5 steps to an epoch; no rate is 0, from which rounding would be all."""
    rates = (("train.lr_schedule", kind), ("train.min_lr", 1e-4), ("train.epochs", epochs))
    return Case("single", "full", changes=(*NO_EVALUATION, *rates, *LONGER[kind]), **keys)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory)


@pytest.fixture(scope="module")
def alone(run: Run, request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """Runs on one rank: at once, in two sessions, and extended with the selected schedules."""
    extended = chosen(request, test_an_extended_run_continues_as_the_longer_run)
    kinds = [params["kind"] for params in extended]
    firsts = {
        "first": dataclasses.replace(CONTROLLED["single"], stop_after=CUT),
        **{f"{kind}, first": schedule(kind, 2, stop_after=CUT) for kind in kinds},
        **{f"{kind}, whole": schedule(kind, 3) for kind in kinds},
    }
    began = run(1, [CONTROLLED["single"], *firsts.values()])
    found = {name: began[case] for name, case in firsts.items()}
    seconds = {
        "resumed": dataclasses.replace(CONTROLLED["single"], start=found["first"].out_dir),
        **{
            f"{kind}, longer": schedule(kind, 3, start=found[f"{kind}, first"].out_dir)
            for kind in kinds
        },
    }
    ended = run(1, list(seconds.values()))
    found |= {name: ended[case] for name, case in seconds.items()}
    return found | {"single": began[CONTROLLED["single"]]}


def rates(outcome: Outcome) -> list[float]:
    return [float(row["lr"] or 0) for row in outcome.rows]


def near(loss: float | None) -> Any:
    return pytest.approx(loss, rel=1e-5)


def assert_goes_the_same_way(found: Outcome, expected: Outcome) -> None:
    """With equal losses to the same end, and with the same step as its result."""
    # The rate is 20 times that of the other tests, and so is what rounding does to weights.
    assert_same_maths(found, expected, weights_within=2e-4, validations=7)
    assert found.report.exit_reason == expected.report.exit_reason
    result = found.report.result
    assert result is not None and result.step == 3, "of 6; where it moved, of its origin"
    assert result.validation_loss == min(found.validation_losses)


def assert_equal(found: Outcome, expected: Outcome) -> None:
    """To the bit."""
    assert found.losses == expected.losses
    assert rates(found) == rates(expected)
    assert found.validation_losses == expected.validation_losses
    for of_set in ("many", "one"):
        assert found.losses_on(of_set) == expected.losses_on(of_set)
    weights = expected.weights()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in found.weights().items())


# --- On one rank --------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_recipe_of_these_tests_decays_and_ends_out_of_patience(
    alone: dict[str, Outcome],
) -> None:
    found = alone["single"]
    assert len(found.rows) == 6, "of 18"
    assert rates(found)[:3] == [0.03, 0.06, 0.06]
    assert 0.05 < rates(found)[4] < rates(found)[3] < 0.06
    assert "eval.patience of 3 reached: no validation loss below " in found.report.exit_reason
    assert found.report.exit_reason.endswith(", of step 3")


@pytest.mark.slow
def test_a_run_resumed_after_its_best_step_equals_the_uninterrupted_one(
    alone: dict[str, Outcome],
) -> None:
    """One of three validations without a lower loss was before it stopped."""
    first, found, expected = alone["first"], alone["resumed"], alone["single"]
    assert first.report.loss is not None and first.report.loss.validations_since_best == 1
    assert_goes_the_same_way(found, expected)
    assert_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", layouts([(kind,) for kind in LONGER], LONGER_OFTEN))
def test_an_extended_run_continues_as_the_longer_run(alone: dict[str, Outcome], kind: str) -> None:
    found, whole = alone[f"{kind}, longer"], alone[f"{kind}, whole"]
    assert len(found.rows) == 14 and rates(found)[CUT:] == rates(whole)[CUT:]
    if kind in ("cosine", "linear"):
        assert rates(found)[CUT - 1] < rates(whole)[CUT - 1], "was on its way to an earlier end"
    else:
        assert rates(found) == rates(whole) and found.losses == whole.losses


# --- On several ---------------------------------------------------------------------------------


MORE_LAYOUTS = repeated("padded", "tokens")


@pytest.fixture(scope="module")
def controlled(
    run: Run, alone: dict[str, Outcome], request: pytest.FixtureRequest
) -> dict[str, Outcome]:
    """Runs by strategy, and one that moved away from fsdp after 3 of its 6 steps.

    There it has another set to validate on in place of one. In the matrix, also other layouts.
    """
    tests = (
        test_training_control_is_equal_everywhere,
        test_each_set_has_the_same_losses_everywhere,
    )
    names = {params["name"] for test in tests for params in chosen(request, test)}
    first = dataclasses.replace(CONTROLLED["fsdp"], stop_after=3)
    tokens = Case("ddp", "full", changes=(*CONTROL, *TOKENS))
    found = run(
        2, [*(CONTROLLED[name] for name in SEVERAL), first, *([tokens] * ("tokens" in names))]
    )
    other_sets = (*WITHOUT_SETS, SETS[0], ("eval.sets.further", "BESIDE/one.json"))
    moved = Case("single", "full", changes=other_sets, start=found[first].out_dir)
    without_sets = Case("single", "full", changes=WITHOUT_SETS)
    padded = Case("single", "full", changes=(*CONTROL, *PADDED_BY_3))
    compiled = Case("single", "full", changes=(*CONTROL, ("compile", True)))
    others = {"padded": padded, "compiled": compiled}
    found |= run(1, [moved, without_sets, *(others[name] for name in names & others.keys())])
    assert len(found[first].rows) == 3 and found[first].report.outcome == "stopped"
    others |= {"moved": moved, "tokens": tokens, "without_sets": without_sets}
    by_strategy = {name: CONTROLLED[name] for name in SEVERAL}
    all_cases = (by_strategy | others).items()
    return {name: found[case] for name, case in all_cases if case in found} | {
        "single": alone["single"]
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", [*STRATEGIES, "moved", *MORE_LAYOUTS, *repeated("compiled")])
def test_training_control_is_equal_everywhere(controlled: dict[str, Outcome], name: str) -> None:
    assert_goes_the_same_way(controlled[name], controlled["single"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*STRATEGIES, *MORE_LAYOUTS])
def test_each_set_has_the_same_losses_everywhere(controlled: dict[str, Outcome], name: str) -> None:
    found, expected = controlled[name], controlled["single"]
    for of_set in ("many", "one"):
        losses = expected.losses_on(of_set)
        assert None not in losses and len(losses) == 7
        assert found.losses_on(of_set) == pytest.approx(losses, rel=1e-5)
        told = found.report.sets[of_set]
        assert told.validation_first == found.losses_on(of_set)[0]
        assert told.validation_last == found.losses_on(of_set)[-1]
        assert told.validation_best == min(filter(None, found.losses_on(of_set)))
    counts = (found.report.sets[of_set].data["val"].records for of_set in ("many", "one"))
    assert tuple(counts) == (25, 1), "all of them are held out"
    best = found.report.result
    assert best is not None and best.losses == {
        of_set: found.losses_on(of_set)[best.step] for of_set in ("many", "one")
    }


@pytest.mark.slow
def test_sets_to_validate_on_change_nothing_else(controlled: dict[str, Outcome]) -> None:
    found, without = controlled["single"], controlled["without_sets"]
    assert found.losses == without.losses
    assert found.validation_losses == without.validation_losses
    assert found.report.result.step == without.report.result.step
    assert found.report.exit_reason == without.report.exit_reason
    weights = without.weights()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in found.weights().items())
    metadata = (read_metadata(outcome.checkpoint) for outcome in (found, without))
    assert len({(one.data, one.base) for one in metadata}) == 1, "what decides whether it goes on"
    assert without.report.sets == {}


@pytest.mark.slow
def test_a_run_resumed_with_other_sets_has_columns_of_all(
    controlled: dict[str, Outcome],
) -> None:
    moved, whole = controlled["moved"], controlled["single"]
    assert moved.losses_on("many") == pytest.approx(whole.losses_on("many"), rel=1e-5)
    of_one = whole.losses_on("one")
    assert moved.losses_on("one") == [*map(near, of_one[:4]), *[None] * 3]
    assert moved.losses_on("further") == [None] * 4 + [*map(near, of_one[4:])]
    first = moved.report.sets["many"].validation_first
    assert first == pytest.approx(whole.report.sets["many"].validation_first, rel=1e-5)
    assert moved.report.sets["further"].validation_first is None
    assert list(moved.report.sets) == ["many", "further"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*STRATEGIES, "single", "moved"])
def test_the_result_is_made_of_the_best_checkpoint(
    controlled: dict[str, Outcome], name: str
) -> None:
    from transformers import LlamaForCausalLM

    found = controlled[name]
    final = found.out_dir / "final"
    written = yaml.safe_load((found.checkpoint / "recipe.yaml").read_text())
    data = load(final, Path(written["data"]["init_args"]["json_path"]))
    model = LlamaForCausalLM.from_pretrained(final)
    loss = loss_of(model, data.val, range(len(data.val)))
    assert loss == pytest.approx(min(found.validation_losses), rel=1e-5)
    assert loss < found.validation_losses[-1] - 0.05


@pytest.fixture(scope="module")
def moves(
    run: Run, alone: dict[str, Outcome], request: pytest.FixtureRequest
) -> dict[tuple[str, str], Outcome]:
    """Runs that stopped after `CUT` steps under one strategy and resumed under another."""
    elsewhere = chosen(request, test_average_patience_and_best_step_resume_under_another_strategy)
    again = chosen(request, test_resuming_under_the_same_strategy_is_exact)
    wanted = [(params["source"], params["target"]) for params in elsewhere]
    wanted += [(params["strategy"],) * 2 for params in again]
    wanted = [move for move in wanted if HAS_DEEPSPEED or "deepspeed" not in move]
    sources = {
        source: Case(source, "full", changes=CONTROL, stop_after=CUT)
        for source, _ in wanted
        if source != "single"
    }
    began = run(2, list(sources.values()))
    starts = {"single": alone["first"].out_dir} | {
        source: began[case].out_dir for source, case in sources.items()
    }
    cases = {
        (source, target): Case(
            target,
            "full",
            changes=CONTROL if source == target else (*CONTROL, *OTHER_MICRO_BATCH[target]),
            start=starts[source],
        )
        for source, target in wanted
    }
    found: dict[tuple[str, str], Outcome] = {}
    for world_size, is_single in ((1, True), (2, False)):
        here = {move: case for move, case in cases.items() if (move[1] == "single") is is_single}
        ended = run(world_size, list(here.values()))
        found |= {move: ended[case] for move, case in here.items()}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), layouts(MOVES, OFTEN))
def test_average_patience_and_best_step_resume_under_another_strategy(
    moves: dict[tuple[str, str], Outcome],
    controlled: dict[str, Outcome],
    source: str,
    target: str,
) -> None:
    found, expected = moves[source, target], controlled["single"]
    assert_goes_the_same_way(found, expected)
    for of_set in ("many", "one"):
        assert found.losses_on(of_set) == pytest.approx(expected.losses_on(of_set), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", repeated("ddp", "fsdp", "deepspeed"))
def test_resuming_under_the_same_strategy_is_exact(
    moves: dict[tuple[str, str], Outcome], controlled: dict[str, Outcome], strategy: str
) -> None:
    assert_equal(moves[strategy, strategy], controlled[strategy])


@pytest.fixture(scope="module")
def begun(run: Run) -> dict[str, Outcome]:
    """Runs that have an average from their third step on, by the strategy there; before: fsdp."""
    first = Case("fsdp", "full", changes=WITHOUT_AVERAGE, stop_after=2)
    start = run(2, [first])[first].out_dir
    cases = {name: dataclasses.replace(CONTROLLED[name], start=start) for name in CONTROLLED}
    found = run(2, [cases[name] for name in SEVERAL]) | run(1, [cases["single"]])
    return {name: found[case] for name, case in cases.items()}


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_average_may_begin_on_resume(
    begun: dict[str, Outcome], controlled: dict[str, Outcome], strategy: str
) -> None:
    found, expected = begun[strategy], begun["single"]
    assert_same_maths(found, expected, weights_within=2e-4, validations=len(expected.rows) + 1)
    whole = controlled["single"].validation_losses
    assert found.validation_losses[2] != near(whole[2]), "of the weights themselves"


# --- LoRA ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapted(run: Run) -> dict[str, tuple[Outcome, Outcome]]:
    """Adapters of all layers with the head, by strategy, with the expected run."""
    cases = {
        name: Case(name, "lora", changes=(*SLOWER, *how, *what))
        for name, (how, what) in ADAPTED.items()
        if name in SEVERAL
    }
    expected = {
        name: Case("single", "lora", changes=(*SLOWER, *ADAPTED[name][1])) for name in cases
    }
    found = run(2, list(cases.values())) | run(1, list(dict.fromkeys(expected.values())))
    return {name: (found[cases[name]], found[expected[name]]) for name in cases}


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_of_adapters_too(adapted: dict[str, tuple[Outcome, Outcome]], strategy: str) -> None:
    found, expected = adapted[strategy]
    assert_same_maths(found, expected, validations=10)
    for of_set in ("many", "one"):
        assert found.losses_on(of_set) == pytest.approx(expected.losses_on(of_set), rel=1e-5)
