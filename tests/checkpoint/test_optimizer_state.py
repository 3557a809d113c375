"""Every kind of optimizer state resumes, exactly on the same layout, and on any other."""

from dataclasses import dataclass, replace

import pytest
import torch
from optimizers import DEEPSPEED, KNOWN
from rank_jobs import NO_EVALUATION, Case, Outcome, Run, make_run, needs_deepspeed

from ftkit.recipe.optimizers import strategies_of

CUT = 2
"""Steps of the first session, of 5."""

Changes = tuple[tuple[str, object], ...]

SGD: Changes = (("optimizer", "SGD"), ("optimizer.lr", 0.05), ("optimizer.momentum", 0.9))
AMSGRAD: Changes = (("optimizer.amsgrad", True),)
ADAFACTOR: Changes = (("optimizer", "Adafactor"), ("optimizer.lr", 0.02))
NADAM: Changes = (("optimizer", "NAdam"), ("optimizer.lr", 3e-3))
ADAM_8_BIT: Changes = (
    ("optimizer", "bitsandbytes.optim.AdamW8bit"),
    ("optimizer.lr", 3e-3),
    ("optimizer.weight_decay", 0.01),
)
PAGED: Changes = (("optimizer", "bitsandbytes.optim.PagedAdamW8bit"), *ADAM_8_BIT[1:])
ADAM_32_BIT: Changes = (("optimizer", "bitsandbytes.optim.AdamW32bit"), *ADAM_8_BIT[1:])
LION: Changes = (("optimizer", "bitsandbytes.optim.Lion8bit"), ("optimizer.lr", 3e-4))
ADEMAMIX: Changes = (("optimizer", "bitsandbytes.optim.AdEMAMix"), ("optimizer.lr", 1e-3))
ADEMAMIX_8_BIT: Changes = (("optimizer", "bitsandbytes.optim.AdEMAMix8bit"), *ADEMAMIX[1:])
LAMB: Changes = (("optimizer", "bitsandbytes.optim.LAMB"), ("optimizer.lr", 1e-3))
ADAMW: Changes = (("optimizer", "AdamW"), *ADAM_8_BIT[1:])
DROPOUT: Changes = (("lora_dropout", 0.2),)
QLORA: Changes = (("quantize", "bnb.nf4-dq"),)
TWO_NODES: Changes = (
    ("devices", 2),
    ("num_nodes", 2),
    ("strategy.sharding", "HYBRID_SHARD"),
)
MUON: Changes = (("optimizer", "Muon"), ("optimizer.lr", 1e-3))
TORCHAO_8_BIT: Changes = (("optimizer", "torchao.optim.AdamW8bit"), *ADAM_8_BIT[1:])
TORCHAO_4_BIT: Changes = (("optimizer", "torchao.optim.AdamW4bit"), *ADAM_8_BIT[1:])
TORCHAO_FP8: Changes = (("optimizer", "torchao.optim.AdamWFp8"), *ADAM_8_BIT[1:])
STAGE_1: Changes = (("strategy.stage", 1), ("strategy.offload_optimizer", False))
STAGE_2: Changes = (("strategy.stage", 2),)
ONE_MICRO_STEP: Changes = (("train.max_norm", None), ("train.micro_batch_size", 11))
AVERAGED: Changes = (("train.ema_decay", 0.7),)
ALONE: Changes = (("optimizer", "SGD"), ("optimizer.lr", 0.05), *AVERAGED)
"""Settings with no state besides the average."""
IN_BACKWARD: Changes = (*ONE_MICRO_STEP, ("train.optimizer_in_backward", True))


NOTHING_SAVED: Changes = (("checkpoint.save", False),)


@dataclass(frozen=True)
class Move:
    """Two sessions with different settings; the reference runs all steps with the first ones."""

    source: Case
    source_ranks: int
    target: Case
    target_ranks: int
    within: float = 1e-5
    """Largest relative difference of losses; 0: every column of every row is equal."""


def same(case: Case, ranks: int, within: float = 0.0) -> Move:
    return Move(case, ranks, case, ranks, within)


def move(
    source: tuple[str, int, Changes],
    target: tuple[str, int, Changes],
    *,
    method: str = "full",
    precision: str = "32-true",
    within: float = 1e-5,
) -> Move:
    def case(end: tuple[str, int, Changes]) -> Case:
        return Case(end[0], method, precision, end[2])

    return Move(case(source), source[1], case(target), target[1], within)


MOVES = {
    "dropout, single": same(Case("single", "lora", changes=DROPOUT), 1),
    "dropout, ddp x2": same(Case("ddp", "lora", changes=DROPOUT), 2),
    "dropout, fsdp x2": same(Case("fsdp", "lora", changes=DROPOUT), 2),
    "dropout, deepspeed x2": same(Case("deepspeed", "lora", changes=DROPOUT), 2),
    "bf16-mixed, single": same(Case("single", "full", "bf16-mixed"), 1),
    "bf16-true, fsdp x2": same(Case("fsdp", "full", "bf16-true"), 2),
    "bf16-true, deepspeed x2": same(Case("deepspeed", "full", "bf16-true"), 2),
    "bf16-mixed, deepspeed x2": same(Case("deepspeed", "lora", "bf16-mixed"), 2),
    "SGD, single": same(Case("single", "full", changes=SGD), 1),
    "AdamW, single, to a session that saves nothing": move(
        ("single", 1, ()), ("single", 1, NOTHING_SAVED), within=0.0
    ),
    "SGD, single to fsdp x2": move(("single", 1, SGD), ("fsdp", 2, SGD)),
    "in backward, fsdp x2": same(Case("fsdp", "full", changes=IN_BACKWARD), 2),
    "in backward, single to fsdp x2": move(("single", 1, IN_BACKWARD), ("fsdp", 2, IN_BACKWARD)),
    "in backward, fsdp x2 to after it, ddp x2": move(
        ("fsdp", 2, IN_BACKWARD), ("ddp", 2, ONE_MICRO_STEP)
    ),
    "8-bit in backward to after it, single": move(
        ("single", 1, (*IN_BACKWARD, *ADAM_8_BIT)),
        ("single", 1, (*ONE_MICRO_STEP, *ADAM_8_BIT)),
        within=0.0,
    ),
    "SGD, fsdp x2 to deepspeed x2": move(("fsdp", 2, SGD), ("deepspeed", 2, SGD)),
    "amsgrad, ddp x2 to single": move(("ddp", 2, AMSGRAD), ("single", 1, AMSGRAD)),
    "NAdam, single to fsdp x2": move(("single", 1, NADAM), ("fsdp", 2, NADAM)),
    "Adafactor, single to ddp x2": move(("single", 1, ADAFACTOR), ("ddp", 2, ADAFACTOR)),
    "Muon, single": same(Case("single", "full", changes=MUON), 1),
    "Muon, ddp x2 to single": move(("ddp", 2, MUON), ("single", 1, MUON)),
    "Muon, fsdp x3": same(Case("fsdp", "full", changes=MUON), 3),
    "Muon, single to fsdp x2": move(("single", 1, MUON), ("fsdp", 2, MUON)),
    "Muon, fsdp x3 to single": move(("fsdp", 3, MUON), ("single", 1, MUON)),
    "8-bit, single": same(Case("single", "full", changes=ADAM_8_BIT), 1),
    "8-bit, fsdp x2": same(Case("fsdp", "full", changes=ADAM_8_BIT), 2),
    "8-bit, single to fsdp x2": move(("single", 1, ADAM_8_BIT), ("fsdp", 2, ADAM_8_BIT)),
    "8-bit, ddp x2 to single": move(("ddp", 2, ADAM_8_BIT), ("single", 1, ADAM_8_BIT)),
    "8-bit, fsdp x3 to single": move(
        ("fsdp", 3, ADAM_8_BIT), ("single", 1, ADAM_8_BIT), within=1e-3
    ),
    "paged to 8-bit": move(("single", 1, PAGED), ("single", 1, ADAM_8_BIT), within=0.0),
    "32-bit of bitsandbytes to torch": move(("single", 1, ADAM_32_BIT), ("single", 1, ADAMW)),
    "torch to 32-bit of bitsandbytes, fsdp x2": move(
        ("single", 1, ADAMW), ("fsdp", 2, ADAM_32_BIT)
    ),
    "8-bit to torch": move(("single", 1, ADAM_8_BIT), ("single", 1, ADAMW), within=3e-3),
    "torch to 8-bit": move(("single", 1, ADAMW), ("single", 1, ADAM_8_BIT), within=3e-3),
    "8-bit to deepspeed x2": move(("single", 1, ADAM_8_BIT), ("deepspeed", 2, ADAMW), within=3e-3),
    "8 bits of torchao, single": same(Case("single", "full", changes=TORCHAO_8_BIT), 1),
    "8 bits of torchao, single to fsdp x2": move(
        ("single", 1, TORCHAO_8_BIT), ("fsdp", 2, TORCHAO_8_BIT)
    ),
    "8 bits of torchao, fsdp x3 to single": move(
        ("fsdp", 3, TORCHAO_8_BIT), ("single", 1, TORCHAO_8_BIT), within=3e-4
    ),
    "4 bits of torchao, fsdp x2": same(Case("fsdp", "full", changes=TORCHAO_4_BIT), 2),
    "4 bits of torchao, ddp x2 to fsdp x2": move(
        ("ddp", 2, TORCHAO_4_BIT), ("fsdp", 2, TORCHAO_4_BIT)
    ),
    "4 bits of torchao, fsdp x3 to single": move(
        ("fsdp", 3, TORCHAO_4_BIT), ("single", 1, TORCHAO_4_BIT), within=3e-4
    ),
    "FP8 of torchao, ddp x2": same(Case("ddp", "full", changes=TORCHAO_FP8), 2),
    "FP8 of torchao, single to ddp x2": move(("single", 1, TORCHAO_FP8), ("ddp", 2, TORCHAO_FP8)),
    "8 bits of torchao to 4 bits of it": move(
        ("single", 1, TORCHAO_8_BIT), ("single", 1, TORCHAO_4_BIT), within=2e-2
    ),
    "8 bits of bitsandbytes to FP8 of torchao": move(
        ("single", 1, ADAM_8_BIT), ("single", 1, TORCHAO_FP8), within=3e-4
    ),
    "8 bits of bitsandbytes to those of torchao": move(
        ("single", 1, ADAM_8_BIT), ("single", 1, TORCHAO_8_BIT), within=3e-4
    ),
    "4 bits of torchao to torch": move(
        ("single", 1, TORCHAO_4_BIT), ("single", 1, ADAMW), within=1e-2
    ),
    "torch to 8 bits of torchao, fsdp x2": move(
        ("single", 1, ADAMW), ("fsdp", 2, TORCHAO_8_BIT), within=3e-4
    ),
    "average, 4 bits of torchao, fsdp x2": same(
        Case("fsdp", "full", changes=(*TORCHAO_4_BIT, *AVERAGED)), 2
    ),
    "two moments in one tensor, fsdp x2 to single": move(
        ("fsdp", 2, ADEMAMIX), ("single", 1, ADEMAMIX)
    ),
    "two moments in one tensor, 8 bits, single to fsdp x2": move(
        ("single", 1, ADEMAMIX_8_BIT), ("fsdp", 2, ADEMAMIX_8_BIT)
    ),
    "norms of parameters, ddp x2 to single": move(("ddp", 2, LAMB), ("single", 1, LAMB)),
    "Lion, single to ddp x2": move(("single", 1, LION), ("ddp", 2, LION)),
    "ZeRO-1 to single": move(("deepspeed", 2, STAGE_1), ("single", 1, ())),
    "single to ZeRO-1": move(("single", 1, ()), ("deepspeed", 2, STAGE_1)),
    "ZeRO-2 x3 to ZeRO-3 x2": move(("deepspeed", 3, STAGE_2), ("deepspeed", 2, ())),
    "ZeRO-3 to ZeRO-2, LoRA": move(("deepspeed", 2, ()), ("deepspeed", 2, STAGE_2), method="lora"),
    "ZeRO-1 in bf16-true": same(Case("deepspeed", "full", "bf16-true", STAGE_1), 2),
    "fsdp x2 that keeps gathered parameters": move(
        ("fsdp", 2, (("strategy.sharding", "SHARD_GRAD_OP"),)), ("single", 1, ())
    ),
    "fsdp on 2 nodes to fsdp x2": move(("fsdp", 4, TWO_NODES), ("fsdp", 2, ())),
    "8-bit, single to fsdp on 2 nodes": move(
        ("single", 1, ADAM_8_BIT), ("fsdp", 4, (*TWO_NODES, *ADAM_8_BIT))
    ),
    "QLoRA, single to fsdp x2": move(("single", 1, QLORA), ("fsdp", 2, QLORA), method="lora"),
    "QLoRA, deepspeed x2 to single": move(
        ("deepspeed", 2, QLORA), ("single", 1, QLORA), method="lora"
    ),
    "bf16-true, deepspeed x2 to single": move(
        ("deepspeed", 2, ()), ("single", 1, ()), precision="bf16-true", within=2e-2
    ),
    "average alone, single to deepspeed x2": move(("single", 1, ALONE), ("deepspeed", 2, ALONE)),
    "average alone, ZeRO-2 x2 to single": move(
        ("deepspeed", 2, (*ALONE, *STAGE_2)), ("single", 1, ALONE)
    ),
    "average, 8-bit, fsdp x2": same(Case("fsdp", "full", changes=(*ADAM_8_BIT, *AVERAGED)), 2),
    "average, 8-bit, single to fsdp x2": move(
        ("single", 1, (*ADAM_8_BIT, *AVERAGED)), ("fsdp", 2, (*ADAM_8_BIT, *AVERAGED))
    ),
    "average, in backward, fsdp x2 to single": move(
        ("fsdp", 2, (*IN_BACKWARD, *AVERAGED)), ("single", 1, (*IN_BACKWARD, *AVERAGED))
    ),
    "average, Muon, ddp x2": same(Case("ddp", "full", changes=(*MUON, *AVERAGED)), 2),
    "average, ZeRO-1 in bf16-true": same(
        Case("deepspeed", "full", "bf16-true", (*STAGE_1, *AVERAGED)), 2
    ),
    "tied, fsdp x2 to deepspeed x2": Move(
        Case("fsdp", "full", tied=True), 2, Case("deepspeed", "full", tied=True), 2
    ),
}


def changes_of(class_path: str) -> Changes:
    """A recipe with an optimizer; with momentum, without which some refuse to update."""
    rate = 0.05 if class_path.rpartition(".")[2].startswith("SGD") else 1e-3
    changes: Changes = (("optimizer", class_path), ("optimizer.lr", rate))
    needs_momentum = any(name in class_path for name in (".SGD", "LARS", "RMSprop"))
    return (*changes, ("optimizer.momentum", 0.9)) if needs_momentum else changes


def within_of(class_path: str) -> float:
    """Largest difference where blocks of few bits begin elsewhere, or small numbers have signs."""
    return 1e-3 if class_path.endswith(("bit", "Fp8")) else 1e-5


MOVES |= {
    # All names, under all strategies that run them, beginning elsewhere.
    f"{name}, {strategy} x2": move(
        ("single" if strategy != "single" else "ddp", 1 if strategy != "single" else 2, changes),
        (strategy, 1 if strategy == "single" else 2, changes),
        within=within_of(name),
    )
    for name, traits in KNOWN.items()
    for changes in [changes_of(name)]
    for strategy in strategies_of(name)
    if not name.startswith(DEEPSPEED) and not (traits.family == "AdEMAMix" and "Paged" in name)
}
QUICK = {
    "AdamW, single, to a session that saves nothing",
    "dropout, single",
    "dropout, fsdp x2",
    "8-bit, single to fsdp x2",
    "8-bit to torch",
    "SGD, single to fsdp x2",
}
ONE_OF_EACH_KIND = {
    "Muon, fsdp x3 to single",
    "fsdp on 2 nodes to fsdp x2",
    "in backward, single to fsdp x2",
    "bf16-true, fsdp x2",
    "Adafactor, single to ddp x2",
    "two moments in one tensor, fsdp x2 to single",
    "norms of parameters, ddp x2 to single",
    "4 bits of torchao, fsdp x3 to single",
    "ZeRO-1 to single",
    "QLoRA, single to fsdp x2",
    "tied, fsdp x2 to deepspeed x2",
    "average alone, single to deepspeed x2",
    "torch.optim.Adagrad, deepspeed x2",  # whose state exists before the first step
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory)


@pytest.fixture(scope="module")
def results(run: Run, request: pytest.FixtureRequest) -> dict[str, tuple[Outcome, Outcome]]:
    """Run in two sessions and uninterrupted run of each selected move."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    names = [values["name"] for values in params if values.get("name") in MOVES]
    moves = {name: _without_evaluation(MOVES[name]) for name in names}  # type: ignore[index]
    whole = _in_groups(run, [(m.source_ranks, m.source) for m in moves.values()])
    firsts = {m: _stopping(m.source) for m in moves.values()}
    stopped = _in_groups(run, [(m.source_ranks, firsts[m]) for m in moves.values()])
    seconds = {m: _starting(m.target, stopped[m.source_ranks, firsts[m]]) for m in moves.values()}
    continued = _in_groups(run, [(m.target_ranks, seconds[m]) for m in moves.values()])
    return {
        name: (continued[m.target_ranks, seconds[m]], whole[m.source_ranks, m.source])  # type: ignore[misc]
        for name, m in moves.items()
    }


def _without_evaluation(move: Move) -> Move:
    source, target = (
        replace(case, changes=(*NO_EVALUATION, ("train.epochs", 1), *case.changes))
        for case in (move.source, move.target)
    )
    return replace(move, source=source, target=target)


def _in_groups(run: Run, cases: list[tuple[int, Case]]) -> dict[tuple[int, Case], Outcome]:
    found = {}  # type: ignore[var-annotated]
    for ranks in sorted({ranks for ranks, _ in cases}):
        group = list(dict.fromkeys(case for count, case in cases if count == ranks))
        found |= {(ranks, case): outcome for case, outcome in run(ranks, group).items()}
    return found


def _stopping(case: Case) -> Case:
    return replace(case, stop_after=CUT)


def _starting(case: Case, outcome: Outcome) -> Case:
    return replace(case, start=outcome.out_dir)


def params() -> list[object]:
    found: list[object] = []
    for name, m in MOVES.items():
        uses_deepspeed = "deepspeed" in (m.source.strategy, m.target.strategy)
        more = pytest.mark.slow if name in ONE_OF_EACH_KIND else pytest.mark.matrix
        marks = [pytest.mark.slow if name in QUICK else more]
        if uses_deepspeed:
            marks.append(needs_deepspeed)
        found.append(pytest.param(name, marks=marks))
    return found


@pytest.mark.parametrize("name", params())
def test_optimizer_state_resumes(results: dict[str, tuple[Outcome, Outcome]], name: str) -> None:
    found, expected = results[name]
    within = MOVES[name].within
    if within:
        weights = found.weights()
        assert found.losses == pytest.approx(expected.losses, rel=within)
        assert [row["lr"] for row in found.rows] == [row["lr"] for row in expected.rows]
        if "average" in name:  # which no loss of training shows
            for key, value in expected.weights().items():
                torch.testing.assert_close(weights[key], value, rtol=0, atol=2e-5)
        return
    for column in ("step", "samples", "loss", "lr", "grad_norm", "tokens"):
        assert [row[column] for row in found.rows] == [row[column] for row in expected.rows]
    if not set(NOTHING_SAVED) <= set(MOVES[name].target.changes):
        weights = found.weights()
        assert all(weights[key].equal(value) for key, value in expected.weights().items())
