"""Promise P2 on the same strategy and ranks: a run that stopped is equal to the last bit."""

import itertools
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_jobs import NO_EVALUATION, Case, Entries, Outcome, chosen, layouts, make_run
from tiny import make_labelled, make_pairs, make_records

from ftkit.recipe.recipe import Method

pytestmark = pytest.mark.slow
Changes = tuple[tuple[str, Any], ...]
Row = tuple[str, str]
Found = Mapping[tuple[str, Row], Outcome]
CUT = 2
"""Steps of the first session, of five: the first step of a process may differ from the others."""
KINDS: dict[str, tuple[Method, Changes]] = {
    "full": ("full", ()),
    "averaged, 16 bits": ("full", (("precision", "bf16-mixed"), ("train.ema_decay", 0.7))),
    "mixture, LoRA": ("lora", (("data.json_path", None), ("data.sources", "SOURCES"))),
    "DPO, LoRA": (
        "lora",
        (("objective", "dpo"), ("data.json_path", "DATA/pairs.json"), ("data.mask_prompt", None)),
    ),
    "KTO, LoRA": (
        "lora",
        (("objective", "kto"), ("data.json_path", "DATA/labels.json"), ("data.mask_prompt", None)),
    ),
    "DFT, VeRA": (
        "lora",
        (
            ("objective", "dft"),
            ("peft", "vera"),
            ("peft.r", 16),
            ("lora_dropout", 0.05),
            ("optimizer.lr", 0.1),
        ),
    ),
}
STRATEGIES: dict[str, tuple[str, Changes]] = {
    "single": ("single", ()),
    "ddp": ("ddp", ()),
    "fsdp": ("fsdp", ()),
    # The optimizer is DeepSpeed's for CPUs, and without offloading torch's.
    "ZeRO-2": ("deepspeed", (("strategy.stage", 2),)),
    "ZeRO-3": ("deepspeed", (("strategy.stage", 3),)),
    "ZeRO-3 on the device": (
        "deepspeed",
        (("strategy.stage", 3), ("strategy.offload_optimizer", False)),
    ),
}
OFTEN: list[Row] = [
    ("ddp x3", "mixture, LoRA"),
    ("single x1", "DPO, LoRA"),
    ("single x1", "DFT, VeRA"),
    ("fsdp x3", "full"),
    ("ZeRO-2 x2", "KTO, LoRA"),
    ("ZeRO-3 x2", "full"),
]
ROWS: list[Row] = [
    (f"{name} x{ranks}", kind)
    for name, kind in itertools.product(STRATEGIES, KINDS)
    for ranks in ((1,) if name == "single" else (2, 3))
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("records")
    records = make_records(60)
    files = {
        "some": records[:40],
        "others": records[40:],
        "pairs": make_pairs(60),
        "labels": make_labelled(60),
    }
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def case(row: Row, data: Path, **session: Any) -> Case:
    layout, kind = row
    strategy, of_strategy = STRATEGIES[layout.partition(" x")[0]]
    method, of_kind = KINDS[kind]
    sources = Entries(
        [
            {"path": str(data / "some.json"), "samples": 20},
            {"path": str(data / "others.json"), "weight": 2},
        ]
    )
    changes: dict[str, Any] = {
        **dict(NO_EVALUATION),
        "train.epochs": 1,
        "train.micro_batch_size": 2,
        **dict(of_strategy),
        **dict(of_kind),
    }
    for key, value in changes.items():
        if isinstance(value, str):
            changes[key] = sources if value == "SOURCES" else value.replace("DATA", str(data))
    return Case(strategy, method, changes=tuple(changes.items()), **session)


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, data: Path, request: pytest.FixtureRequest
) -> Found:
    """Runs of the selected rows: without a stop, up to it, and from there on."""
    run = make_run(tmp_path_factory)
    known: dict[tuple[str, Row], Outcome] = {}
    selected: dict[int, list[Row]] = defaultdict(list)
    for one in chosen(request, test_a_resumed_run_is_equal_to_the_last_bit):
        ranks = int(one["layout"].rpartition(" x")[2])
        selected[ranks].append((one["layout"], one["kind"]))
    for ranks, rows in selected.items():
        cases = {("whole", row): case(row, data) for row in rows}
        cases |= {("half", row): case(row, data, stop_after=CUT) for row in rows}
        outcomes = run(ranks, list(cases.values()))
        known |= {key: outcomes[one] for key, one in cases.items()}
        cases = {
            ("resumed", row): case(row, data, start=known["half", row].out_dir) for row in rows
        }
        outcomes = run(ranks, list(cases.values()))
        known |= {key: outcomes[one] for key, one in cases.items()}
    return known


@pytest.mark.parametrize(("layout", "kind"), layouts(ROWS, OFTEN))
def test_a_resumed_run_is_equal_to_the_last_bit(found: Found, layout: str, kind: str) -> None:
    row = (layout, kind)
    whole, resumed = found["whole", row], found["resumed", row]
    assert (len(found["half", row].rows), len(whole.rows)) == (CUT, 5)
    for column in ("loss", "grad_norm", "lr", "samples", "tokens"):
        assert [one[column] for one in resumed.rows] == [one[column] for one in whole.rows], column
    weights = resumed.weights()
    for name, tensor in whole.weights().items():
        assert torch.equal(weights.pop(name), tensor), name
    assert not weights
