"""``scripts/benchmark scaling``: cost of training against length, model and ranks."""

import argparse
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarking.command import Figures, begun, keep, not_counted
from benchmarking.figures import WARM_UP_STEPS, Measured, median_of
from benchmarking.ftkit_run import SEED, imports_bytes, is_gpu_here, run_ftkit
from benchmarking.tables import draw_lines, gib, in_a_cell, number, table
from ftkit.utils.hardware import hardware, versions
from ftkit.utils.json_values import from_json

AXES = ("length", "size", "ranks")
COLUMNS = ("run", "tokens/s", "step", "peak memory", "time to first step")
VALIDATION_RECORDS = 2


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Models and lengths to measure on a kind of machine."""

    model: str
    """Model of the runs in which something else varies."""
    models: tuple[str, ...]
    precision: str
    lengths: tuple[int, ...]
    """Tokens of every sample."""
    length: int
    """Length of the runs in which something else varies."""
    tokens: int
    """Tokens of a micro-batch, which determine its number of samples."""
    steps: int


MACHINES = {
    "cpu": Machine(
        model="llama-34m",
        models=("llama-10m", "llama-34m", "llama-90m"),
        precision="32-true",
        lengths=(64, 128, 256, 512, 1024),
        length=128,
        tokens=1024,
        steps=8,
    ),
    "gpu": Machine(
        model="tinyllama-1.1b",
        models=("tinyllama-1.1b", "llama-3b", "llama-7b"),
        precision="bf16-true",
        lengths=(128, 512, 1024, 2048),
        length=512,
        tokens=4096,
        steps=12,
    ),
    "tiny": Machine(
        model="llama-1m",
        models=("llama-1m",),
        precision="32-true",
        lengths=(32,),
        length=32,
        tokens=64,
        steps=3,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run."""

    axis: str
    """Property that varies."""
    name: str
    x: float
    """Tokens of a sample, parameters, or ranks."""
    model: str
    length: int
    keys: dict[str, Any]
    """Further keys of the recipe."""


def points(machine: Machine, ranks: int) -> Iterator[Point]:
    """All runs of a machine.

    Args:
        machine: models and lengths to measure.
        ranks: number of ranks of the strategies; below 2 they are left out.
    """
    from benchmarking.workload import SIZES

    usual: dict[str, Any] = {"model": machine.model, "length": machine.length, "keys": {}}
    for length in machine.lengths:
        varied = usual | {"length": length}
        yield Point(axis="length", name=f"{length} tokens", x=length, **varied)
    for model in machine.models:
        yield Point(
            axis="size", name=model, x=SIZES[model].parameters, **(usual | {"model": model})
        )
    yield Point(axis="ranks", name="single", x=1, **usual)
    if ranks > 1:
        for strategy in ("ddp", "fsdp", "deepspeed"):
            varied = usual | {"keys": {"devices": ranks, "strategy": strategy}}
            yield Point(axis="ranks", name=f"{strategy} x{ranks}", x=ranks, **varied)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--axes", nargs="+", choices=AXES, default=AXES)
    parser.add_argument("--method", choices=("full", "lora"), default="full")
    parser.add_argument("--rounds", type=int, default=3)


def exit_code(figures: Figures) -> int:
    """Return 1 if nothing could be measured."""
    whole = [from_json(Measured, row["measured"]).is_whole for row in figures["runs"]]
    return 0 if any(whole) else 1


def measure(options: argparse.Namespace) -> Figures:
    """Measure all runs, round by round; the file is written after each."""
    kind = "tiny" if options.tiny else "gpu" if is_gpu_here() else "cpu"
    machine = MACHINES[kind]
    if options.steps:
        machine = dataclasses.replace(machine, steps=options.steps)
    figures = begun(options, {"runs": []})
    done = {(row["round"], row["axis"], row["name"]) for row in figures["runs"]}
    figures |= {
        "method": options.method,
        "machine": dataclasses.asdict(machine),
        "warm_up_steps": WARM_UP_STEPS,
        "hardware": dataclasses.asdict(hardware()),
        "versions": versions(),
    }
    ranks = {"cpu": 2, "gpu": len(figures["hardware"]["gpus"]), "tiny": 1}[kind]
    imports = None if kind == "gpu" else imports_bytes()
    with tempfile.TemporaryDirectory() as name:
        for number_ in range(options.rounds):
            for point in points(machine, ranks):
                if point.axis not in options.axes or (number_, point.axis, point.name) in done:
                    continue
                keys = keys_of(point, machine, Path(name), options.models or Path(name))
                keys["accelerator"] = "cuda" if kind == "gpu" else "cpu"
                out_dir = Path(tempfile.mkdtemp(dir=name)) / "out"
                run = run_ftkit(options.method, keys, out_dir, options.limit_s)
                run = dataclasses.replace(run, imports_bytes=imports)
                row = {"round": number_, "axis": point.axis, "name": point.name, "x": point.x}
                row |= {"load_average": os.getloadavg()[0], "measured": dataclasses.asdict(run)}
                figures["runs"].append(row)
                print(" ".join(row_cells(point.name, [run])), flush=True)
                keep(figures, options)
    return figures


def keys_of(point: Point, machine: Machine, place: Path, models: Path) -> dict[str, Any]:
    """Keys of a run; model and records are made if they are missing.

    Every rank computes one micro-batch a step.
    """
    from benchmarking import workload

    model = workload.model_in(models.absolute(), point.model, machine.precision)
    micro = max(1, machine.tokens // point.length)
    batch = micro * int(point.keys.get("devices", 1))
    count = machine.steps * batch
    data = place / f"records-{point.length}-{count}"
    if not data.is_dir():
        prompt = point.length // 2
        # One less, for the end-of-text token.
        lengths = [(prompt, point.length - prompt - 1)] * count
        records = workload.make_records(lengths)
        workload.write_data(data, records, records[:VALIDATION_RECORDS])
    keys: dict[str, Any] = {
        "checkpoint_dir": model,
        "precision": machine.precision,
        "seed": SEED,
        "data.path": data,
        "train.max_seq_length": point.length,
        "train.micro_batch_size": micro,
        "train.global_batch_size": batch,
        "train.max_steps": machine.steps,
    }
    return keys | point.keys


def runs_of(figures: Figures, axis: str) -> dict[str, list[Measured]]:
    """The runs of an axis by name."""
    found: dict[str, list[Measured]] = {}
    for row in figures["runs"]:
        if row["axis"] == axis:
            found.setdefault(row["name"], []).append(from_json(Measured, row["measured"]))
    return found


def markdown(figures: Figures) -> str:
    """A table for each axis."""
    parts = []
    for axis in AXES:
        runs = runs_of(figures, axis)
        if runs:
            rows = [row_cells(name, own) for name, own in runs.items()]
            parts.append(f"**{axis}**\n\n{table(COLUMNS, rows)}")
    machine = figures["hardware"]
    on = ", ".join(one["name"] for one in machine["gpus"]) or machine["cpu"]
    rounds = 1 + max((row["round"] for row in figures["runs"]), default=-1)
    parts.append(
        f"Medians of {rounds} rounds of {figures['method']} fine-tuning on {on}, "
        f"{figures['machine']['precision']}; {not_counted(figures)} are not "
        "counted. Memory: allocated on the GPU, or of the largest process less what its imports "
        "hold."
    )
    return "\n\n".join(parts)


def row_cells(name: str, runs: list[Measured]) -> list[str]:
    """A row of a table."""
    if failed := next((run.failure for run in runs if not run.is_whole), None):
        return [name, in_a_cell(failed), "", "", ""]
    return [
        name,
        number(median_of(runs, "tokens_per_s"), ",.0f"),
        number(median_of(runs, "step_s"), ".2f") + " s",
        gib(median_of(runs, "peak_bytes")) + " GiB",
        number(median_of(runs, "first_step_s"), ".1f") + " s",
    ]


def draw(figures: Figures, picture: Path) -> None:
    """Draw tokens per second and memory against length."""
    x_of = {row["name"]: row["x"] for row in figures["runs"] if row["axis"] == "length"}
    lines: dict[str, list[tuple[float, float]]] = {"tokens/s": [], "peak memory in MiB": []}
    for name, runs in runs_of(figures, "length").items():
        speed, memory = (median_of(runs, one) for one in ("tokens_per_s", "peak_bytes"))
        if speed is not None and memory is not None:
            lines["tokens/s"].append((x_of[name], speed))
            lines["peak memory in MiB"].append((x_of[name], memory / 2**20))
    if lines["tokens/s"]:
        draw_lines(lines, ("tokens of a sample", ""), "Cost against length", picture)
