"""Parts that check training on a GPU: tests, quick starts, limits, checkpoints."""

import os
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ftkit.checkpoint.store import Store
from ftkit.runs.report.metrics import read_metrics
from ftkit.runs.report.report import Report, read_report
from gpu_parts.part import Found, Scene, call, exit_summary, ftkit, python_path

PLAIN: dict[str, Any] = {
    "data": "JSON",
    "data__path": "embedded:quickstart",
    "data__mask_prompt": True,
    "eval__interval": 0,
    "eval__final_validation": False,
    "eval__max_new_tokens": 0,
    "train__lr_warmup_steps": 1,
}
"""Training on the data of the quick start, without evaluation."""
BESIDE_TRAINING = """
import os, sys
if "ftkit.training.rank" in sys.orig_argv:
    import ftkit.checkpoint.host_copies
    ftkit.checkpoint.host_copies.COPIES_BESIDE_TRAINING = True
"""
CLOSE = 2e-3
"""Largest relative difference of losses of 16-bit runs that should be equal."""


def tests(scene: Scene, found: Found) -> None:
    """Run the tests for GPUs; without one they are skipped."""
    file = scene.directory / "tests.xml"
    words: list[object] = [sys.executable, "-m", "pytest", "tests/gpu", "-q", f"--junitxml={file}"]
    # Most of their time goes into starting processes.
    if find_spec("xdist") and (processes := (os.cpu_count() or 1) // 2) > 1:
        words += ["-n", min(processes, 8)]
    done = call([*words, "-p", "no:cacheprovider"])
    (scene.results / "tests.txt").write_text(done.stdout + done.stderr)
    if not file.exists():
        found.check("pytest", passed=False, said=exit_summary(done))
        return
    for case in ET.parse(file).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        skipped = "skipped" in kinds
        passed = None if skipped else not kinds & {"failure", "error"}
        found.check(str(case.get("name")), passed, "skipped" if skipped else "")
    found.figure("exit_code", done.returncode)


def quick_start(kind: str | None) -> Callable[[Scene, Found], None]:
    """Run the quick start, unchanged or on quantised weights."""

    def run(scene: Scene, found: Found) -> None:
        out = scene.directory / "out"
        keys: dict[str, Any] = {"config": "recipes/quickstart.yaml", "out_dir": out}
        if kind is not None:
            keys |= {"quantize": kind}
        if scene.dry:
            keys |= {"train__max_steps": 2, "train__global_batch_size": 2}
            keys |= {"train__micro_batch_size": 2, "eval__exact_match": 2, "eval__max_iters": 1}
            keys |= {"eval__max_new_tokens": 0}
        done = ftkit("finetune", **keys, accelerator=scene.accelerator)
        name = f"quick start, {kind or 'not quantised'}"
        if done.returncode:
            found.check(name, passed=False, said=exit_summary(done))
            return
        report = read_report(out)
        assert report.exact_match and report.throughput
        after = report.exact_match.after or 0.0
        found.check(name, passed=scene.dry or after > 0.9, said=f"exact match {after:.0%}")
        found.figure(name, summary_of(report))

    return run


def fullest(key: str) -> Callable[[Scene, Found], None]:
    """Check that a micro-batch chosen by prediction runs, and note how much memory it leaves."""

    def run(scene: Scene, found: Found) -> None:
        out = scene.directory / "out"
        keys: dict[str, Any] = {f"train__{key}": "auto"}
        if key == "micro_batch_tokens":
            keys["train__micro_batch_size"] = 512
        done = ftkit(
            "finetune_full",
            **PLAIN,
            **keys,
            out_dir=out,
            checkpoint_dir="random:pythia-14m" if scene.dry else "random:tiny-llama-1.1b",
            accelerator=scene.accelerator,
            precision="32-true" if scene.dry else "bf16-true",
            train__global_batch_size=4 if scene.dry else 512,
            train__max_steps=2 if scene.dry else 4,
            train__max_seq_length=64 if scene.dry else 2048,
            checkpoint__save=False,
        )
        if done.returncode:
            found.check(f"{key} auto", passed=False, said=exit_summary(done))
            return
        found.check(f"{key} auto", passed=True)
        found.figure(f"{key} auto", summary_of(read_report(out)))

    return run


def saves(scene: Scene, found: Found) -> None:
    """Check that asynchronous checkpoints have the same bytes as synchronous ones."""
    site = scene.directory / "site"
    site.mkdir()
    # Every Python with this directory on its path runs the file at its start; it changes ranks
    # only.
    (site / "sitecustomize.py").write_text(BESIDE_TRAINING)
    model = made_model(scene)
    checksums: dict[str, list[str]] = {}
    for name, asynchronous, path in (
        ("synchronous", False, []),
        ("asynchronous", True, []),
        ("copied beside training", True, [site]),
    ):
        out = scene.directory / name.replace(" ", "-")
        words: list[object] = [sys.executable, "-m", "ftkit", "finetune_full"]
        keys = PLAIN | {
            "out_dir": out,
            "checkpoint_dir": model,
            "accelerator": scene.accelerator,
            "precision": "bf16-true",
            "deterministic": "true",
            "train__global_batch_size": 2 if scene.dry else 16,
            "train__micro_batch_size": 2 if scene.dry else 16,
            "train__max_steps": 3 if scene.dry else 8,
            "train__max_seq_length": 128,
            "train__save_interval": 1,
            "checkpoint__keep_last": 8,
            "checkpoint__asynchronous": str(asynchronous).lower(),
        }
        for key, value in keys.items():
            text = str(value).lower() if isinstance(value, bool) else value
            words += [f"--{key.replace('__', '.')}", text]
        done = call(words, PYTHONPATH=python_path(*path))
        if done.returncode:
            found.check(name, passed=False, said=exit_summary(done))
            continue
        checksums[name] = _checksums(out)
        report = read_report(out)
        stall = report.checkpoints.stall_s if report.checkpoints else None
        shards = len(checksums[name])
        same = shards > 0 and checksums[name] == checksums.get("synchronous")
        found.check(f"{name}: the same bytes", passed=same, said=f"{shards} shards")
        found.figure(f"stall_s, {name}", stall.mean if stall else None)


def recorded_steps(scene: Scene, found: Found) -> None:
    """Check that recorded steps have the losses of computed ones, before any pair is timed."""
    model = made_model(scene)
    for name, command, keys in (
        ("full", "finetune_full", {"precision": "bf16-true"}),
        ("full, bf16-mixed", "finetune_full", {"precision": "bf16-mixed"}),
        ("full, padded", "finetune_full", {"precision": "32-true"}),
        ("LoRA", "finetune", {"precision": "bf16-true", "lora_dropout": 0.05, "lora_mlp": True}),
    ):
        runs: dict[bool, Report] = {}
        losses: dict[bool, list[float]] = {}
        for is_recorded in (False, True):
            out = scene.directory / f"{name} {is_recorded}".replace(" ", "-").replace(",", "")
            done = ftkit(
                command,
                **PLAIN,
                **keys,
                out_dir=out,
                checkpoint_dir=model,
                accelerator=scene.accelerator,
                train__record_steps=is_recorded,
                train__global_batch_size=2 if scene.dry else 16,
                train__micro_batch_size=2 if scene.dry else 8,
                train__max_steps=3 if scene.dry else 40,
                train__max_seq_length=128,
                checkpoint__save=False,
            )
            if done.returncode:
                found.check(name, passed=False, said=exit_summary(done))
                break
            runs[is_recorded] = read_report(out)
            rows = read_metrics(out / "metrics.csv")
            losses[is_recorded] = [float(row["loss"] or "nan") for row in rows]
        else:
            pairs = zip(losses[False], losses[True], strict=True)
            apart = max(abs(a / b - 1) for a, b in pairs)
            found.check(f"{name}: losses", passed=apart < CLOSE, said=f"differ by {apart:.0e}")
            recorded = runs[True].recorded_steps
            replayed = recorded.replayed if recorded else 0
            # A CPU has nothing to record.
            said = "; ".join([f"{replayed} replays", *runs[True].warnings])
            found.check(f"{name}: replayed", passed=scene.dry or replayed > 0, said=said)
            found.figure(name, asdict(recorded) if recorded else None)


def paged_optimizer(scene: Scene, found: Found) -> None:
    """Check that a paged 8-bit optimizer resumes as if it had not stopped."""
    model = made_model(scene)
    losses: dict[str, list[float]] = {}
    sessions: dict[str, list[dict[str, Any]]] = {
        "whole": [{}],
        "resumed": [{"stop_after": 2}, {"resume": "true"}],
    }
    for name, options in sessions.items():
        out = scene.directory / name
        for more in options:
            optimizer = "AdamW8bit" if scene.dry else "PagedAdamW8bit"
            done = ftkit(
                "finetune_full",
                **PLAIN,
                **more,
                out_dir=out,
                checkpoint_dir=model,
                accelerator=scene.accelerator,
                precision="bf16-true",
                optimizer=f"bitsandbytes.optim.{optimizer}",
                train__global_batch_size=2 if scene.dry else 16,
                train__micro_batch_size=2 if scene.dry else 16,
                train__max_steps=4,
                train__max_seq_length=128,
            )
            if done.returncode:
                found.check(name, passed=False, said=exit_summary(done))
                return
        losses[name] = [float(row["loss"] or "nan") for row in read_metrics(out / "metrics.csv")]
    pairs = zip(losses["whole"], losses["resumed"], strict=True)
    apart = max(abs(a / b - 1) for a, b in pairs)
    found.check("losses continue", passed=apart < CLOSE, said=f"differ by {apart:.0e}")


def made_model(scene: Scene) -> Path:
    """Make a model with weights in files: runs of models named `random:` save no checkpoints."""
    import torch
    from benchmarking.workload import SIZES, make_model

    directory = scene.directory / "model"
    make_model(directory, SIZES["llama-1m" if scene.dry else "llama-90m"], torch.bfloat16)
    return directory


def summary_of(report: Report) -> dict[str, Any]:
    """Numbers of a report to keep."""
    throughput, peak, step = report.throughput, report.peak_memory, report.step_s
    resolved = report.resolved
    return {
        "tokens_per_s": throughput.tokens_per_s if throughput else None,
        "mfu": throughput.mfu if throughput else None,
        "device_utilization": throughput.device_utilization if throughput else None,
        "step_s": step.total if step else None,
        "allocated_bytes": peak.allocated_bytes if peak else None,
        "reserved_bytes": peak.reserved_bytes if peak else None,
        "micro_batch_size": resolved.micro_batch_size if resolved else None,
        "padding_fraction": report.tokens.padding_fraction if report.tokens else None,
        "warnings": report.warnings,
        "set_up_s": report.phases_s.set_up if report.phases_s else None,
        "loss": report.loss.last if report.loss else None,
    }


def _checksums(out: Path) -> list[str]:
    """Checksums of the shards of all checkpoints, step by step."""
    store = Store(out / "checkpoints")
    return [
        f"{step} {name} {entry.sha256}"
        for step in sorted(store.steps())
        for name, entry in sorted(store.metadata(step).files.items())
        if name.startswith("shard-")
    ]
