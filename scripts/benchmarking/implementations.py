"""``scripts/benchmark implementations``: LitGPT's models and transformers', of the same weights."""

import argparse
import dataclasses
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarking.command import Figures, begun, keep, not_counted
from benchmarking.figures import (
    WARM_UP_STEPS,
    Measured,
    in_pairs,
    largest_difference,
    median_of,
    paired_ratio,
)
from benchmarking.ftkit_run import imports_bytes
from benchmarking.levers import (
    Lever,
    Method,
    Scene,
    keys_of,
    machine_of,
    measured_pair,
    scene_for,
)
from benchmarking.tables import draw_bars, gib, in_a_cell, number, table
from ftkit.utils.hardware import hardware, versions

LEVER = Lever(
    name="transformers",
    off={"model_implementation": "litgpt"},
    on={"model_implementation": "transformers"},
)
COLUMNS = (
    "model", "run", "precision", "tokens/s litgpt", "transformers", "ratio", "step litgpt",
    "transformers", "memory litgpt", "transformers", "ratio", "time to first step, litgpt",
    "transformers", "first loss", "last loss", "losses differ by",
)  # fmt: skip
MODELS: dict[str, tuple[tuple[str, Method], ...]] = {
    "cpu": (
        ("llama-34m", "full"), ("llama-34m", "lora"),
        ("gemma2-34m", "full"), ("gemma2-34m", "lora"),
        ("qwen3-34m", "full"), ("qwen3-34m", "lora"),
    ),
    "gpu": (
        ("tinyllama-1.1b", "full"), ("tinyllama-1.1b", "lora"), ("llama-7b", "lora"),
        ("gemma2-34m", "full"), ("qwen3-34m", "full"),
    ),
    "tiny": (("gemma2-1m", "full"), ("qwen3-1m", "lora")),
}  # fmt: skip
"""Models and methods by machine."""
PRECISIONS = {"cpu": ("32-true", "bf16-true"), "gpu": ("bf16-true",), "tiny": ("32-true",)}
STEPS = {"cpu": 8, "gpu": 20, "tiny": 4}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--pairs", type=int, default=3, help="of runs with each, for each row")


def exit_code(figures: Figures) -> int:  # as all commands have it
    """Return 0: either may be faster."""
    return 0


def scenes(machine: str) -> list[tuple[Method, Scene]]:
    """Scenes that are measured on a machine, one for each row of the table."""
    return [
        (
            method,
            Scene(
                model=model,
                precision=precision,
                micro_batch_size=8,
                global_batch_size=16,
                steps=STEPS[machine],
            ),
        )
        for model, method in MODELS[machine]
        for precision in PRECISIONS[machine]
    ]


def measure(options: argparse.Namespace) -> Figures:
    """Measure all pairs; the file is written after each."""
    machine = machine_of(options)
    figures = begun(options, {"pairs": []})
    done = {(_key(row), row["pair"]) for row in figures["pairs"]}
    figures |= {
        "machine": machine,
        "warm_up_steps": WARM_UP_STEPS,
        "hardware": dataclasses.asdict(hardware()),
        "versions": versions(),
    }
    imports = imports_bytes()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        for pair in range(options.pairs):
            for method, usual in scenes(machine):
                scene = scene_for(options, usual)
                row: dict[str, Any] = {
                    "pair": pair,
                    "method": method,
                    "scene": dataclasses.asdict(scene),
                }
                if (_key(row), pair) in done:
                    continue
                keys = keys_of(scene, method, place, options.models or place)
                keys["accelerator"] = "cuda" if machine == "gpu" else "cpu"
                # Each comes first in half of the pairs, so that a warm cache of files favours
                # neither.
                swap = pair % 2 == 1
                runs = measured_pair(LEVER, method, keys, place, options.limit_s, swap=swap)
                for kind, implementation in (("off", "litgpt"), ("on", "transformers")):
                    run = dataclasses.replace(runs[kind], imports_bytes=imports)
                    row[implementation] = dataclasses.asdict(run)
                row["load_average"] = os.getloadavg()[0]
                figures["pairs"].append(row)
                print(" ".join(row_cells([row])), flush=True)
                keep(figures, options)
    return figures


def _key(row: Figures) -> tuple[str, str, str]:
    """Model, method and precision of a pair, which identify a row of the table."""
    return row["scene"]["model"], row["method"], row["scene"]["precision"]


def pairs_by_row(figures: Figures) -> dict[tuple[str, str, str], list[Figures]]:
    """The pairs of each row of the table."""
    found: dict[tuple[str, str, str], list[Figures]] = {}
    for row in figures["pairs"]:
        found.setdefault(_key(row), []).append(row)
    return found


def _runs(pairs: Sequence[Figures]) -> tuple[list[Measured], list[Measured]]:
    """Runs of LitGPT's model and of transformers'."""
    return in_pairs(pairs, ("litgpt", "transformers"))


def markdown(figures: Figures) -> str:
    """A row for each model, method and precision."""
    rows = [row_cells(pairs) for pairs in pairs_by_row(figures).values()]
    machine = figures["hardware"]
    on = ", ".join(one["name"] for one in machine["gpus"]) or machine["cpu"]
    count = 1 + max((row["pair"] for row in figures["pairs"]), default=-1)
    of = "One pair of runs" if count == 1 else f"Medians of {count} pairs of runs"
    return (
        f"{table(COLUMNS, rows)}\n\n"
        f"{of} on {on}; ratios are transformers / litgpt; tokens without "
        f"padding; {not_counted(figures)} are not counted. Memory: allocated "
        "on the GPU, or of the largest process less what its imports hold. The losses are "
        "transformers'."
    )


def row_cells(pairs: Sequence[Figures]) -> list[str]:
    """A row of the table: medians over the pairs, or the message of a run that failed."""
    ours, theirs = _runs(pairs)
    head = list(_key(pairs[0]))
    if failed := next((run.failure for run in [*ours, *theirs] if not run.is_whole), None):
        return [*head, in_a_cell(failed), *[""] * (len(COLUMNS) - 4)]
    differ = max(largest_difference(a.steps, b.steps) for a, b in zip(ours, theirs, strict=True))
    steps = theirs[0].steps

    def both(name: str, form: str, unit: str) -> list[str]:
        return [number(median_of(runs, name), form) + unit for runs in (ours, theirs)]

    return [
        *head,
        *both("tokens_per_s", ",.0f", ""),
        number(paired_ratio(theirs, ours, "tokens_per_s"), ".2f"),
        *(number(median_of(runs, "step_s"), ",.0f", scale=1e-3) + " ms" for runs in (ours, theirs)),
        *(gib(median_of(runs, "peak_bytes")) + " GiB" for runs in (ours, theirs)),
        number(paired_ratio(theirs, ours, "peak_bytes"), ".2f"),
        *both("first_step_s", ".1f", " s"),
        f"{steps[0].loss:.4f}",
        f"{steps[-1].loss:.4f}",
        f"{differ:.0e}",
    ]


def draw(figures: Figures, picture: Path) -> None:
    """Draw speed and memory of transformers' models relative to LitGPT's, a panel for each."""
    panels: dict[str, dict[str, float]] = {"tokens/s": {}, "peak memory": {}}
    for key, pairs in pairs_by_row(figures).items():
        ours, theirs = _runs(pairs)
        for panel, name in (("tokens/s", "tokens_per_s"), ("peak memory", "peak_bytes")):
            ratio = paired_ratio(theirs, ours, name)
            if ratio is not None:
                panels[panel][", ".join(key)] = ratio
    known = {panel: bars for panel, bars in panels.items() if bars}
    if known:
        draw_bars(known, "transformers, relative to litgpt", "Two implementations", picture)
