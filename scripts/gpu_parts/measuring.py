"""Parts that measure: memory against its prediction, speed, levers, scaling, other programs."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarking.figures import in_pairs

from ftkit.runs.report.report import read_report
from gpu_parts.correctness import PLAIN, summary_of
from gpu_parts.part import ROOT, Found, Scene, call, exit_summary, ftkit

PEERS = {"full": "tinyllama-1.1b, full", "lora": "llama-7b, lora", "qlora": "llama-7b, qlora"}
"""Cases of scripts/benchmark peers, by method."""
ALL_LAYERS: dict[str, Any] = {
    "lora_targets": "all-linear",
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
}
SPEEDS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "full": ("tiny-llama-1.1b", 8, {}),
    "full_2048": ("tiny-llama-1.1b", 4, {}),
    "full_8192": ("tiny-llama-1.1b", 16, {}),
    "lora": ("Llama-2-7b-hf", 8, ALL_LAYERS),
    "lora_2048": ("Llama-2-7b-hf", 4, ALL_LAYERS),
    "lora_8192": ("Llama-2-7b-hf", 16, ALL_LAYERS),
    "lora_8b": ("Llama-3-8B", 8, ALL_LAYERS),
    "lora_no_dropout": ("Llama-2-7b-hf", 8, ALL_LAYERS | {"lora_dropout": 0.0}),
    "lora_qv": ("Llama-2-7b-hf", 8, {"lora_query": True, "lora_r": 8, "lora_dropout": 0.05}),
    "qlora": ("Llama-2-7b-hf", 8, ALL_LAYERS | {"quantize": "bnb.nf4"}),
}
"""Model, sequences of a step and keys of runs in bf16-true."""
LENGTH, STEPS = 512, 12
"""Tokens of a sequence, and steps of a run."""


def calibration(recipe: int) -> Callable[[Scene, Found], None]:
    """Compare predicted and measured memory of this recipe of scripts/calibrate_memory."""

    def run(scene: Scene, found: Found) -> None:
        file = scene.results / f"memory-{recipe}-figures.json"
        words: list[object] = [sys.executable, ROOT / "scripts/calibrate_memory", "--output", file]
        words += ["--cpu", "--numbers", 0] if scene.dry else ["--numbers", recipe]
        done = call(words)
        figures = json.loads(file.read_text()) if file.exists() else {"recipes": []}
        for row in figures["recipes"]:
            name = f"{row['model']} {' '.join(map(str, row['settings'].values()))}"
            found.check(name, None if row["failure"] else True, row["failure"] or "")
        found.check("close enough", passed=done.returncode == 0, said=done.stdout.strip()[:400])
        found.figure("constants", figures.get("constants"))

    return run


def long_records(scene: Scene, count: int) -> Path:
    """Write records to train on that are longer than any sequence here: all are cut to its length.

    There are more than are trained on, because some are kept for validation.
    """
    record = {"instruction": "name colours", "input": "", "output": "red green " * LENGTH}
    file = scene.directory / "records.json"
    file.write_text(json.dumps([record] * (count + 40)))
    return file


def speed(name: str) -> Callable[[Scene, Found], None]:
    """Measure tokens per second and memory of one of SPEEDS, on random weights."""

    def run(scene: Scene, found: Found) -> None:
        model, sequences, keys = SPEEDS[name]
        sequences = 2 if scene.dry else sequences
        length = 32 if scene.dry else LENGTH
        steps = 3 if scene.dry else STEPS
        data = long_records(scene, sequences * steps)
        out = scene.directory / "out"
        done = ftkit(
            "finetune_full" if name.startswith("full") else "finetune",
            **PLAIN | {"data__path": data, "data__mask_prompt": False} | keys,
            out_dir=out,
            checkpoint_dir="random:pythia-14m" if scene.dry else f"random:{model}",
            accelerator=scene.accelerator,
            precision="bf16-true",
            train__global_batch_size=sequences,
            train__micro_batch_size=sequences,
            train__max_steps=steps,
            train__max_seq_length=length,
            checkpoint__save=False,
        )
        if done.returncode:
            found.check("run", passed=False, said=exit_summary(done))
            return
        found.check("run", passed=True)
        found.figure(name, summary_of(read_report(out)))

    return run


def lever(name: str, method: str, pair: int) -> Callable[[Scene, Found], None]:
    """Measure one lever of scripts/benchmark, off and on, until it has so many pairs."""

    def run(scene: Scene, found: Found) -> None:
        options: list[object] = ["--methods", method, "--pairs", pair, "--only", name]
        options += ["--models", scene.models]
        if scene.dry:
            options += ["--tiny", "--steps", 3]
        figures = _benchmark(scene, found, "levers", f"levers-{method}", options)
        for row in figures.get("pairs", []):
            if row["lever"] == name:
                if scene.dry and "refused" in row:  # it needs a GPU, so nothing was tried
                    found.check(row["lever"], None, row["refused"])
                    continue
                failed = row.get("refused") or row["on"]["failure"] or row["off"]["failure"]
                found.check(row["lever"], not failed, failed or _counted(row))

    return run


def _counted(row: dict[str, Any]) -> str:
    """How many steps of a pair count: not those that warmed up, compiled or were followed."""
    (off,), (on,) = in_pairs([row], ("off", "on"))
    return f"{len(off.window)} of {len(off.steps)} steps count off, {len(on.window)} on"


def scaling(axis: str) -> Callable[[Scene, Found], None]:
    """Measure cost against length, size or ranks."""

    def run(scene: Scene, found: Found) -> None:
        options: list[object] = ["--rounds", 1, "--axes", axis, "--models", scene.models]
        options += ["--tiny"] if scene.dry else []
        figures = _benchmark(scene, found, "scaling", f"scaling-{axis}", options)
        for row in figures.get("runs", []):
            failure = row["measured"]["failure"]
            found.check(f"{row['axis']}: {row['name']}", failure is None, failure or "")

    return run


def peer(program: str, method: str) -> Callable[[Scene, Found], None]:
    """Measure a program on a case of scripts/benchmark peers."""

    def run(scene: Scene, found: Found) -> None:
        options: list[object] = ["--rounds", 1, "--programs", program, "--installed"]
        options += ["--models", scene.models]
        options += ["--tiny", "--cases", "1m, full"] if scene.dry else ["--cases", PEERS[method]]
        figures = _benchmark(scene, found, "peers", f"peers-{method}", options)
        for row in figures.get("runs", []):
            if row["program"] == program:
                failure = row["measured"]["failure"]
                found.check(program, not failure, failure or "")

    return run


def _benchmark(
    scene: Scene, found: Found, command: str, name: str, options: list[object]
) -> dict[str, Any]:
    """Run scripts/benchmark; return its figures, whose file is beside those of the parts.

    Parts with the same name share it.
    """
    file = scene.results / f"{name}-figures.json"
    words: list[object] = [sys.executable, ROOT / "scripts/benchmark", command, "--out", file]
    done = call([*words, "--go_on", "--limit_s", scene.limit_s, *options])
    found.check(f"benchmark {command}", done.returncode == 0, exit_summary(done, 1))
    figures: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return figures
