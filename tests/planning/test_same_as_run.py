"""A plan predicts the run of the same words: both say the same number of bytes."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from runs import WITHOUT_EVALUATION, Run, command_of
from tiny import make_records
from warm import WHOLE

from ftkit.cli.app import run
from ftkit.runs.report.report import read_report

QUICKSTART: dict[str, object] = {
    "config": "embedded:quickstart.yaml",
    "checkpoint_dir": "embedded:quickstart",
}
TWO: dict[str, object] = {"devices": 2, "train__micro_batch_size": 3}
CASES: dict[str, dict[str, object]] = {
    "LoRA": {},
    "full, accumulated, cut": {
        "command": "finetune_full",
        "train__micro_batch_size": 1,
        "train__max_seq_length": 40,
    },
    "padded, answers alone": {"train__padding_free": False, "data__mask_prompt": True},
    "a number of tokens": {"train__micro_batch_tokens": 150, "precision": "bf16-mixed"},
    "quickstart": QUICKSTART | {"data__json_path": "embedded:quickstart"},
    "dft": {"objective": "dft"},
    "added tokens": {"data__add_tokens": "[colour of, red cat]"},
    "ddp": TWO | {"strategy": "ddp", "lora_mlp": True},
    "sequences over two ranks": TWO | {"strategy": "ddp", "strategy__context": 2},
    "fsdp": TWO | {"strategy": "fsdp", "command": "finetune_full"},
}
WEIGHTED = "weights of records"
OFTEN = ("LoRA", "full, accumulated, cut", "fsdp", WEIGHTED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in OFTEN else pytest.mark.matrix)
        for case in (*CASES, WEIGHTED)
    ],
)
def test_plan_and_report_give_the_same_peak(
    start: Callable[..., AbstractContextManager[Run]],
    common: list[str],
    tmp_path: Path,
    case: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(WHOLE, "yes")
    changes = CASES.get(case, {})
    if case == WEIGHTED:
        data = tmp_path / "weighted.json"
        records = [row | {"loss_weight": 1 + i} for i, row in enumerate(make_records(30))]
        data.write_text(json.dumps(records))
        changes = {"data__json_path": data}
    settings = {"checkpoint__save": False, "train__max_steps": 2}
    batch = {"train__global_batch_size": 6, "train__micro_batch_size": 6}
    keys = WITHOUT_EVALUATION | settings | batch | changes
    out = tmp_path / "out"
    with start(out, **keys) as started:
        assert started.end()[0] == 0
    assert run(["plan", *command_of(out, common, **keys), "--format", "json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    report = read_report(out / "report.json")
    assert report.step_memory and report.resolved
    heaviest, predicted = report.step_memory.heaviest, report.step_memory.predicted
    assert heaviest and predicted
    assert planned["peak_bytes"] == heaviest.peak_bytes
    assert heaviest.micro_batch.weighted == (case == WEIGHTED)
    same = ("accelerator", "precision", "strategy", "world_size", "micro_batch_size")
    for key in (*same, "longest_sample_tokens"):
        assert planned[key] == getattr(report.resolved, key)
    assert predicted.peak_bytes <= heaviest.peak_bytes, "no step is heavier"
