"""Number of times that the host waits for a card: a stray `.item()` in a step fails a test.

While the host waits, the device runs dry: what is done in each micro-step must not wait at all, and
an optimizer step only where its numbers are read. The counts are of one step in the middle of a
run, on rank 0, without what the measurement of memory adds in the steps that it follows.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from on_card import OnCard, on_card
from preloaded import Preloaded
from rank_jobs import repeated, require_deepspeed
from simulated_card.build import needs_card
from simulated_card.counts import WAITS
from tiny import make_llama
from transformers_models import make_transformers_model

from ftkit.runs.report.report import read_report

pytestmark = needs_card

STEP = 4
"""Steps that count, of six: DDP has its buckets by then, and nothing is saved yet."""
ONE = ("--devices", "1")
DDP = ("--devices", "2", "--strategy", "ddp")
FSDP = ("--devices", "2", "--strategy", "fsdp")
ZERO = ("--devices", "2", "--strategy", "deepspeed", "--strategy.offload_optimizer", "false")
ZERO_2 = (*ZERO, "--strategy.stage", "2")
PLACES = {"single": ONE, "ddp": DDP, "fsdp": FSDP, "ZeRO-2": ZERO_2, "ZeRO-3": ZERO}

EVERY_STEP = {
    "to_host pageable training/step.py:_totals": 1,  # loss and counts
    "synchronize device training/step.py:_record": 1,  # before events are read
}
AMONG_RANKS = EVERY_STEP | {
    # Whether a signal or a callback asks to end.
    "to_host pageable strategies/distributed.py:max_over_ranks": 1,
}
NORM = {"item item strategies/strategy.py:gradient_norm": 1}  # shown and logged
FSDP_NORM = {"item item strategies/fsdp.py:gradient_norm": 1}
ZERO_NORM = {"item item extensions/deepspeed/deepspeed.py:gradient_norm": 1}
WAITS_IN_A_STEP = {
    "single": EVERY_STEP | NORM,
    "ddp": AMONG_RANKS | NORM,
    "fsdp": AMONG_RANKS | FSDP_NORM,
    # DeepSpeed's own: the norm, and whether gradients are finite.
    "ZeRO-2": AMONG_RANKS | ZERO_NORM | {"item item extensions/deepspeed/deepspeed.py:update": 2},
    "ZeRO-3": AMONG_RANKS
    | ZERO_NORM
    | {
        "item item extensions/deepspeed/deepspeed.py:update": 1,
        "synchronize device extensions/deepspeed/deepspeed.py:update": 1,
        "synchronize stream extensions/deepspeed/deepspeed.py:backward": 2,  # after reducing
    },
}
MICRO_STEPS = {"single": 3, "ddp": 2, "fsdp": 2, "ZeRO-2": 2, "ZeRO-3": 2}


def in_places(places: Iterable[str]) -> list[Any]:
    """Parameters of a test: several ranks are for the slow ones."""
    return [pytest.param(place, marks=[pytest.mark.slow] * (place != "single")) for place in places]


@pytest.fixture(scope="module")
def machine(
    server_with_cards: Preloaded,
    tiny_base: Path,
    tiny_data: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> OnCard:
    directory = tmp_path_factory.mktemp("cards")
    changes = {"train__max_steps": 6}
    return on_card(server_with_cards, directory, tiny_base, tiny_data, changes)


def counted(
    machine: OnCard, place: str, *kinds: str, faults: tuple[str, ...] = ()
) -> dict[str, int]:
    require_deepspeed(*PLACES[place])
    ranks = 1 if place == "single" else 2
    found = machine.completed("finetune", *PLACES[place], ranks=ranks, faults=faults)
    return machine.counts(found.out_dir).of_step(STEP, *kinds)


@pytest.mark.extensions
@pytest.mark.parametrize("place", in_places(PLACES))
def test_the_host_waits_where_numbers_are_read_and_nowhere_else(
    machine: OnCard, place: str
) -> None:
    assert counted(machine, place, *WAITS) == WAITS_IN_A_STEP[place]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [("--precision", "bf16-true"), ("--train.padding_free", "true")], ids=["varlen", "sdpa"]
)
def test_sequence_lengths_reach_the_card_without_a_wait(
    machine: OnCard, more: tuple[str, ...]
) -> None:
    found = machine.completed("finetune", *ONE, *more)
    resolved = read_report(found.out_dir).resolved
    assert resolved is not None and resolved.attention is not None
    assert resolved.attention.startswith("varlen" if "--precision" in more else "sdpa")
    counts = machine.counts(found.out_dir)
    assert counts.of_step(STEP, *WAITS) == WAITS_IN_A_STEP["single"]
    sent = counts.of_step(STEP, "to_device")
    positions, starts = MICRO_STEPS["single"], MICRO_STEPS["single"] * ("--precision" in more)
    assert sent.pop("to_device pinned models/bodies/attention.py:_copied") == positions + starts
    assert not any("language_model" in what for what in sent)


SHARED = (*FSDP, "--strategy.context", "2", "--precision", "bf16-true")


@pytest.mark.slow
def test_ranks_that_share_sequences_exchange_them_around_flash_attention_without_a_wait(
    machine: OnCard,
) -> None:
    found = machine.completed("finetune_full", *SHARED, ranks=2)
    resolved = read_report(found.out_dir).resolved
    assert resolved is not None and resolved.attention is not None
    assert resolved.attention.startswith("varlen") and resolved.context == 2
    counts = machine.counts(found.out_dir)
    assert counts.of_step(STEP, *WAITS) == WAITS_IN_A_STEP["fsdp"]
    exchanged = "collective alltoall_base models/bodies/exchange.py:sent"
    # Queries, keys, values and results of two layers, in both passes; the ranks are one of the
    # data, so that a step has as many micro-steps as on one card.
    assert counts.of_step(STEP, "collective")[exchanged] == 4 * 2 * 2 * MICRO_STEPS["single"]
    economy = ("--memory.activation_checkpointing", "true", "--memory.offload_activations", "true")
    offloaded = machine.completed("finetune_full", *SHARED, *economy, ranks=2)
    assert offloaded.losses == found.losses
    alone = machine.completed("finetune_full", *ONE, "--precision", "bf16-true")
    assert found.losses == pytest.approx(alone.losses, rel=2e-3)


@pytest.mark.slow
def test_activations_leave_the_card_and_come_back_without_a_wait(
    machine: OnCard, tmp_path: Path
) -> None:
    """Inputs of five checkpointed blocks, of which the last two stay on the card as well."""
    layers = 5
    base = make_llama(tmp_path / "base", num_hidden_layers=layers)
    words = (*ONE, "--checkpoint_dir", str(base), "--memory.activation_checkpointing", "true")
    expected = machine.completed("finetune", *words)
    found = machine.completed("finetune", *words, "--memory.offload_activations", "true")
    assert found.losses == expected.losses
    counts = machine.counts(found.out_dir)
    assert counts.of_step(STEP, *WAITS) == WAITS_IN_A_STEP["single"]
    copied = "pinned models/offloading.py:_copy"
    sent = counts.of_step(STEP, "to_host_async", "to_device")
    assert sent[f"to_host_async {copied}"] == layers * MICRO_STEPS["single"]
    assert sent[f"to_device {copied}"] == (layers - 2) * MICRO_STEPS["single"]


OFTEN = ("QLoRA", "experts, LoRA")
QLORA = ("--quantize", "bnb.nf4", "--precision", "bf16-true")
MODELS = {
    "full": ("finetune_full", None, ()),
    "full in bf16": ("finetune_full", None, ("--precision", "bf16-true")),
    "LoRA in bf16": ("finetune", None, ("--precision", "bf16-true")),
    "QLoRA": ("finetune", None, QLORA),
    "windows, full": ("finetune_full", "gemma3_text", ("--precision", "bf16-true")),
    "windows, LoRA": ("finetune", "gemma3_text", ()),
    "experts, full": ("finetune_full", "qwen3_moe", ("--precision", "bf16-true")),
    "experts, LoRA": ("finetune", "qwen3_moe", ("--precision", "bf16-true")),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.matrix] * (name not in OFTEN)) for name in MODELS],
)
def test_no_kind_of_model_lets_the_host_wait(machine: OnCard, name: str, tmp_path: Path) -> None:
    method, kind, words = MODELS[name]
    if kind is not None:
        base = make_transformers_model(tmp_path / "base", kind)
        words = ("--checkpoint_dir", str(base), *words)
    found = machine.completed(method, *ONE, *words)
    counts = machine.counts(found.out_dir).of_step(STEP, *WAITS)
    assert of_ours(counts) == WAITS_IN_A_STEP["single"]


def of_ours(counts: dict[str, int]) -> dict[str, int]:
    """Waits without those of torch in place of a grouped kernel, which no simulated card has."""
    others = {
        f"to_host pageable models/bodies/expert_products.py:{f}" for f in ("_products", "_sums")
    }
    # On a slow machine, the step may be one behind which the state of the run is written.
    load = "to_host pageable models/routing.py:load"
    others |= {load} if counts.get(load) == 1 else set()
    return {place: count for place, count in counts.items() if place not in others}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-true", *repeated("32-true")])  # with and without it
def test_the_host_waits_once_for_the_rows_of_quantised_experts_in_a_layer(
    machine: OnCard, precision: str, tmp_path: Path
) -> None:
    """In the forward pass; the backward pass knows them."""
    layers = 3
    base = make_transformers_model(tmp_path / "base", "qwen3_moe", num_hidden_layers=layers)
    words = ("--checkpoint_dir", str(base), "--quantize", "bnb.nf4", "--precision", precision)
    found = machine.completed("finetune", *ONE, *words)
    rows = "to_host pageable models/bodies/expert_products.py:rows_of_each"
    counts = of_ours(machine.counts(found.out_dir).of_step(STEP, *WAITS))
    assert counts == WAITS_IN_A_STEP["single"] | {rows: layers * MICRO_STEPS["single"]}


def of_check(counts: dict[str, int]) -> int:
    return sum(count for place, count in counts.items() if "training/finite.py:" in place)


@pytest.mark.extensions
@pytest.mark.parametrize(
    "place",
    [
        "single",
        *(pytest.param(place, marks=pytest.mark.slow) for place in ("fsdp", "ZeRO-3")),
        *repeated("ddp", "ZeRO-2"),
    ],
)
def test_a_save_waits_once_to_know_that_all_its_numbers_are_finite(
    machine: OnCard, place: str
) -> None:
    """However many tensors there are; ranks exchange one message more, so that all of them save."""
    require_deepspeed(*PLACES[place])
    ranks = 1 if place == "single" else 2
    words = (*PLACES[place], "--train.save_interval", str(STEP))
    found = machine.completed("finetune_full", *words, ranks=ranks)
    for rank in range(ranks):
        counts = machine.counts(found.out_dir, rank)
        before, saved = (counts.of_step(step, *WAITS) for step in (STEP - 1, STEP))
        assert (of_check(before), of_check(saved)) == (0, 1)
        before, saved = (counts.of_step(step, "collective") for step in (STEP - 1, STEP))
        agreement = {"collective allreduce strategies/distributed.py:max_over_ranks": 1}
        assert Counter(saved) - Counter(before) == (agreement if ranks > 1 else {})


@pytest.mark.slow
def test_a_number_read_in_each_micro_step_would_be_noticed(machine: OnCard) -> None:
    found = counted(machine, "single", *WAITS, faults=("reads_a_number_in_each_micro_step",))
    planted = "item item faults.py:reading"
    assert found.pop(planted) == MICRO_STEPS["single"]
    assert found == WAITS_IN_A_STEP["single"]


@pytest.mark.extensions
@pytest.mark.parametrize("place", in_places(PLACES))
def test_batches_come_from_pinned_memory(machine: OnCard, place: str) -> None:
    """Seven tensors in a micro-step, and the numbers of its tokens; else only single numbers."""
    found = counted(machine, place, "to_device")
    assert found.pop("to_device pinned training/step.py:run") == 7 * MICRO_STEPS[place]
    assert found.pop("to_device pinned models/token_numbers.py:_on") == MICRO_STEPS[place]
    assert sum(found.values()) <= 3


COLLECTIVES = {
    "single": {},
    # Gradients in one bucket, in the last micro-step; the step's numbers; signals and stops.
    "ddp": {"allreduce": 3},
    # Two blocks and the rest, in two micro-steps: gathered for the forward pass, the blocks again
    # for the backward pass, gradients of each reduced; the norm, and the same numbers.
    "fsdp": {"allgather_base": 12, "reduce_scatter_base": 6, "allreduce": 3},
    # Gradients in each micro-step, the norm, and the updated parts; and the same numbers.
    "ZeRO-2": {"allreduce": 5, "allgather_base": 1},
}


@pytest.mark.parametrize("place", in_places(COLLECTIVES))
def test_ranks_exchange_only_the_messages_of_a_step(machine: OnCard, place: str) -> None:
    found: Counter[str] = Counter()
    for key, count in counted(machine, place, "collective").items():
        found[key.split()[1]] += count
    assert found == COLLECTIVES[place]
