"""Training on a GPU: the losses of a CPU, device memory, 16-bit formats."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from command import command_environment, command_line
from tiny import make_llama

from ftkit.runs.report.metrics import read_metrics
from ftkit.runs.report.report import Report, read_report

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")

KEYS = {
    "data": "JSON",
    "data.mask_prompt": "true",
    "data.val_split_fraction": "0.2",
    "train.global_batch_size": "10",
    "train.micro_batch_size": "4",
    "train.max_steps": "6",
    "train.max_norm": "0.5",
    "train.max_seq_length": "200",
    "eval.interval": "3",
    "eval.max_new_tokens": "4",
    "optimizer.lr": "3e-3",
}


def run(base: Path, data: Path, out_dir: Path, method: str, **keys: Any) -> Report:
    values = KEYS | {
        "checkpoint_dir": base,
        "data.json_path": data,
        "out_dir": out_dir,
        **{key.replace("__", "."): value for key, value in keys.items()},
    }
    options = [word for key, value in values.items() for word in (f"--{key}", value)]
    done = subprocess.run(
        command_line(method, *options), capture_output=True, text=True, env=command_environment()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read_report(out_dir)


def losses(out_dir: Path) -> list[Any]:
    return [row["loss"] for row in read_metrics(out_dir / "metrics.csv")]


@pytest.mark.parametrize("method", ["finetune", "finetune_full"])
def test_a_gpu_learns_as_a_cpu_does(
    tiny_base: Path, tiny_data: Path, tmp_path: Path, method: str
) -> None:
    for accelerator in ("cpu", "cuda"):
        run(
            tiny_base,
            tiny_data,
            tmp_path / accelerator,
            method,
            accelerator=accelerator,
            precision="32-true",
            deterministic="true",  # TF32 would differ by as much as is allowed here
        )
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-3)


def test_a_deterministic_run_repeats_to_the_last_bit(
    tiny_base: Path, tiny_data: Path, tmp_path: Path
) -> None:
    for name in ("once", "again"):
        run(
            tiny_base,
            tiny_data,
            tmp_path / name,
            "finetune_full",
            precision="bf16-true",
            deterministic="true",
        )
    assert losses(tmp_path / "once") == losses(tmp_path / "again")


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_device_memory_and_time_are_in_the_report(
    tiny_base: Path, tiny_data: Path, tmp_path: Path, strategy: str, precision: str
) -> None:
    out_dir = tmp_path / "out"
    report = run(
        tiny_base, tiny_data, out_dir, "finetune_full", strategy=strategy, precision=precision
    )
    assert report.peak_memory is not None and report.step_s is not None
    assert report.peak_memory.allocated_bytes and report.peak_memory.reserved_bytes
    assert report.peak_memory.allocated_bytes <= report.peak_memory.reserved_bytes
    assert report.step_memory
    assert 0 < report.step_memory.fullest.peak_bytes <= report.peak_memory.allocated_bytes
    assert report.step_s.forward and report.step_s.backward and report.step_s.optimizer
    assert losses(out_dir)[-1] < losses(out_dir)[0]


@pytest.mark.parametrize("method", ["finetune", "finetune_full"])
def test_rows_without_padding_learn_as_padded_micro_batches(
    tiny_base: Path, tiny_data: Path, tmp_path: Path, method: str
) -> None:
    paths = {}
    for free in ("true", "false"):
        report = run(
            tiny_base,
            tiny_data,
            tmp_path / free,
            method,
            precision="bf16-mixed",
            train__padding_free=free,
        )
        assert report.resolved is not None and report.tokens is not None
        paths[report.resolved.attention] = report.tokens.padded
    in_row, padded = (losses(tmp_path / free) for free in ("true", "false"))
    assert in_row == pytest.approx(padded, rel=3e-3)
    rows = "varlen" if torch.cuda.get_device_capability() >= (8, 0) else "sdpa per sequence"
    assert paths.keys() == {rows, "padded"}
    assert paths[rows] == 0 and paths["padded"]


@pytest.mark.parametrize(
    "rounding",
    [
        pytest.param(
            {"float8": "true"},
            marks=pytest.mark.skipif(
                torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
                reason="this GPU has no float8",
            ),
        ),
        {"qat__weights": "int4", "qat__activations": "int8"},
    ],
)
def test_rounded_products_learn_as_on_a_cpu(
    tiny_base: Path, tiny_data: Path, tmp_path: Path, rounding: dict[str, str]
) -> None:
    for accelerator in ("cpu", "cuda"):
        run(
            tiny_base,
            tiny_data,
            tmp_path / accelerator,
            "finetune_full",
            accelerator=accelerator,
            precision="bf16-mixed",
            **rounding,
        )
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-2)


def test_offloaded_activations_come_back_unchanged(tiny_data: Path, tmp_path: Path) -> None:
    """Copies run beside the computation: one that is read or overwritten early would show."""
    base = make_llama(tmp_path / "deep", num_hidden_layers=12, hidden_size=512)
    for name in ("true", "false"):
        run(
            base,
            tiny_data,
            tmp_path / name,
            "finetune_full",
            precision="bf16-true",
            deterministic="true",
            memory__activation_checkpointing="true",
            memory__offload_activations=name,
        )
    assert losses(tmp_path / "true") == losses(tmp_path / "false")


def test_16_mixed_scales_its_loss(tiny_base: Path, tiny_data: Path, tmp_path: Path) -> None:
    run(tiny_base, tiny_data, tmp_path / "half", "finetune_full", precision="16-mixed")
    run(tiny_base, tiny_data, tmp_path / "full", "finetune_full", precision="32-true")
    assert losses(tmp_path / "half") == pytest.approx(losses(tmp_path / "full"), rel=0.02)


def test_device_memory_that_runs_out_ends_with_3_and_a_report(
    tiny_base: Path, tiny_data: Path, tmp_path: Path
) -> None:
    limit = "import torch; torch.cuda.set_per_process_memory_fraction(1e-5)"
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(limit)
    options = [word for key, value in KEYS.items() for word in (f"--{key}", value)]
    paths = ["--checkpoint_dir", tiny_base, "--data.json_path", tiny_data]
    environment = command_environment()
    environment["PYTHONPATH"] += f":{site}"
    done = subprocess.run(
        command_line("finetune_full", *options, *paths, "--out_dir", tmp_path / "out"),
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 3, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["outcome"] == "out_of_memory"
