"""Parts for several GPUs: strategies give the same losses, and a killed rank ends the run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from ftkit.runs.report.metrics import read_metrics
from ftkit.runs.report.report import read_report
from gpu_parts.correctness import PLAIN
from gpu_parts.part import ROOT, Found, Scene, exit_summary, ftkit

STEPS = 40
CLOSE = 5e-3
"""Largest relative difference of losses between strategies in bf16-true."""
PATIENCE_S = 60
"""Time within which a run with a killed rank must end."""
KEYS = PLAIN | {
    "precision": "bf16-true",
    "train__global_batch_size": 16,
    "train__micro_batch_size": 4,
    "train__max_steps": STEPS,
    "train__max_seq_length": 128,
}


def strategies(scene: Scene, found: Found) -> None:
    """Compare each strategy on two GPUs with one GPU."""
    _compare(scene, found, ("ddp", "fsdp", "deepspeed"))


def shared_sequences(scene: Scene, found: Found) -> None:
    """Compare two GPUs that share the sequences of micro-batches with one GPU."""
    _compare(scene, found, ("ddp", "fsdp"), strategy__context=2)


def recorded_ddp(scene: Scene, found: Found) -> None:
    """Compare two GPUs that replay recorded steps with one GPU that computes them."""
    _compare(scene, found, ("ddp",), train__record_steps=True)
    recorded = read_report(scene.directory / "ddp").recorded_steps
    replayed = recorded.replayed if recorded else 0
    # A CPU has nothing to record.
    found.check("replayed", passed=scene.dry or replayed > 0, said=f"{replayed} replays")


def _compare(scene: Scene, found: Found, names: tuple[str, ...], **keys: object) -> None:
    losses: dict[str, list[float]] = {}
    for name in ("single", *names):
        out = scene.directory / name
        done = ftkit(
            "finetune_full",
            **KEYS,
            out_dir=out,
            checkpoint_dir="random:pythia-410m",
            accelerator=scene.accelerator,
            strategy=name,
            devices=1 if name == "single" else 2,
            checkpoint__save=False,
            **({} if name == "single" else keys),
        )
        if done.returncode:
            found.check(name, passed=False, said=exit_summary(done))
            continue
        losses[name] = [float(r["loss"] or "nan") for r in read_metrics(out / "metrics.csv")]
        pairs = zip(losses[name], losses.get("single", losses[name]), strict=True)
        apart = max(abs(a / b - 1) for a, b in pairs)
        found.check(name, passed=apart < CLOSE, said=f"differs by {apart:.0e}")


def dead_rank(scene: Scene, found: Found) -> None:
    """Check that a run ends after one of its ranks is killed."""
    out = scene.directory / "out"
    words = [sys.executable, "-m", "ftkit", "finetune_full", "--out_dir", str(out)]
    # So many steps that it cannot end by itself.
    keys = KEYS | {"strategy": "fsdp", "devices": 2, "train__max_steps": 100_000}
    keys |= {"checkpoint_dir": "random:pythia-410m", "accelerator": scene.accelerator}
    keys |= {"train__epochs": 100_000}
    for key, value in keys.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        words += [f"--{key.replace('__', '.')}", text]
    run = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if not _has_steps(out / "metrics.csv", run):
        found.check("training began", passed=False, said=f"exit code {run.poll()}")
        return
    ranks = psutil.Process(run.pid).children()
    os.kill(ranks[-1].pid, signal.SIGKILL)
    killed_s = time.monotonic()
    try:
        code = run.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        run.kill()
        found.check("ends", passed=False, said=f"still running after {PATIENCE_S} s")
        return
    found.check("ends", passed=code != 0, said=f"{time.monotonic() - killed_s:.0f} s, code {code}")
    left = [rank for rank in ranks if rank.is_running()]
    found.check("leaves no process", passed=not left, said=left)


def _has_steps(metrics: Path, run: "subprocess.Popen[bytes]") -> bool:
    """Wait for the first rows; return False if the run ends before."""
    while run.poll() is None:
        if metrics.exists() and metrics.read_text().count("\n") > 3:
            return True
        time.sleep(0.2)
    return False
