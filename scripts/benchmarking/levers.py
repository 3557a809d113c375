"""``scripts/benchmark levers``: each setting that saves time or memory, off and on, in pairs."""

import argparse
import dataclasses
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarking.command import Figures, begun, keep, not_counted
from benchmarking.figures import (
    WARM_UP_STEPS,
    Measured,
    in_pairs,
    largest_difference,
    median_of,
    paired_ratio,
)
from benchmarking.ftkit_run import SEED, imports_bytes, is_gpu_here, run_ftkit
from benchmarking.tables import draw_bars, gib, in_a_cell, number, table
from ftkit.utils.hardware import hardware, versions

Method = Literal["full", "lora", "qlora"]
COLUMNS = (
    "lever", "run", "tokens/s off", "on", "ratio", "memory off", "on", "ratio",
    "time to first step, off", "on", "losses differ by",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Lever:
    """A setting, and what it is compared with."""

    name: str
    on: dict[str, Any]
    """Keys of the recipe."""
    off: dict[str, Any] = field(default_factory=dict)
    """Keys of the run beside it."""
    methods: tuple[Method, ...] = ("full",)
    """Methods with which it is measured."""
    gpu_only: bool = False
    """True if it needs a GPU."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Model and batch on which all levers of a machine are measured."""

    model: str
    """One of the sizes of the workload."""
    precision: str
    micro_batch_size: int
    global_batch_size: int
    steps: int


SCENES: dict[tuple[str, str], Scene] = {
    (machine, method): Scene(
        model=model, precision=precision, micro_batch_size=8, global_batch_size=16, steps=steps
    )
    for machine, method, model, precision, steps in (
        ("cpu", "full", "llama-34m", "32-true", 8),
        ("cpu", "lora", "llama-34m", "32-true", 8),
        ("cpu", "qlora", "llama-34m", "bf16-true", 8),
        ("gpu", "full", "tinyllama-1.1b", "bf16-true", 20),
        ("gpu", "lora", "llama-7b", "bf16-true", 12),
        ("gpu", "qlora", "llama-7b", "bf16-true", 12),
        ("tiny", "full", "llama-1m", "32-true", 4),
        ("tiny", "lora", "llama-1m", "32-true", 4),
        ("tiny", "qlora", "llama-1m", "bf16-true", 4),
    )
}
BOTH: tuple[Method, ...] = ("full", "lora")
EVERY: tuple[Method, ...] = ("full", "lora", "qlora")
TWO_RANKS = {"strategy": "fsdp", "devices": 2}
ONE_MICRO_STEP = {"train.micro_batch_size": 8, "train.global_batch_size": 8}

MANY_STEPS = {"train.max_steps": 60}
"""Of a setting that only has its effect after some steps."""


def _optimizer(name: str, **arguments: Any) -> dict[str, Any]:
    return {"optimizer": name} | {f"optimizer.{key}": value for key, value in arguments.items()}


LEVERS = [
    Lever(
        name="padding_free",
        off={"train.padding_free": False},
        on={"train.padding_free": True},
        methods=EVERY,
    ),
    Lever(
        name="micro_batch_tokens 1024",
        off={"train.micro_batch_size": 8},
        on={"train.micro_batch_size": 16, "train.micro_batch_tokens": 1024},
        methods=BOTH,
    ),
    Lever(name="compile", on={"compile": True}, methods=EVERY),
    Lever(
        name="record_steps",
        off=MANY_STEPS,
        on=MANY_STEPS | {"train.record_steps": True},
        methods=BOTH,
        gpu_only=True,
    ),
    Lever(
        name="kernels liger",
        off={"kernels": "torch"},
        on={"kernels": "liger"},
        methods=EVERY,
        gpu_only=True,
    ),
    Lever(
        name="activation_checkpointing",
        on={"memory.activation_checkpointing": True},
        methods=EVERY,
    ),
    Lever(
        name="activation_checkpointing, every 2nd block",
        on={"memory.activation_checkpointing": 2},
        methods=BOTH,
    ),
    Lever(
        name="offload_activations",
        off={"memory.activation_checkpointing": True},
        on={"memory.activation_checkpointing": True, "memory.offload_activations": True},
        methods=BOTH,
        gpu_only=True,
    ),
    Lever(
        name="optimizer_in_backward",
        off=ONE_MICRO_STEP,
        on=ONE_MICRO_STEP | {"train.optimizer_in_backward": True},
    ),
    Lever(
        name="AdamW fused",
        off=_optimizer("AdamW", foreach=True),
        on=_optimizer("AdamW", fused=True),
    ),
    Lever(name="AdamW8bit", on=_optimizer("bitsandbytes.optim.AdamW8bit")),
    Lever(
        name="PagedAdamW8bit", on=_optimizer("bitsandbytes.optim.PagedAdamW8bit"), gpu_only=True
    ),
    Lever(name="Muon", on=_optimizer("torch.optim.Muon")),
    Lever(
        name="fsdp, prefetch", off=TWO_RANKS, on=TWO_RANKS | {"strategy.prefetch": 1}
    ),
    Lever(
        name="fsdp, one exchange a step",
        off=TWO_RANKS | {"train.micro_batch_size": 4},
        on=TWO_RANKS | {"train.micro_batch_size": 4, "strategy.sync_every_micro_step": False},
    ),
    Lever(name="bf16-mixed", off={"precision": "32-true"}, on={"precision": "bf16-mixed"}),
    Lever(
        name="bf16-true",
        off={"precision": "32-true"},
        on={"precision": "bf16-true"},
        methods=BOTH,
    ),
    Lever(name="float8", on={"float8": True}, gpu_only=True),
    Lever(
        name="qat of int4 and int8", on={"qat.weights": "int4", "qat.activations": "int8"}
    ),
    Lever(name="deterministic", on={"deterministic": True}),
    Lever(name="lora_variant dora", on={"lora_variant": "dora"}, methods=("lora",)),
    Lever(name="lora_init pissa", on={"lora_init": "pissa"}, methods=("lora",)),
    Lever(name="lora_init olora", on={"lora_init": "olora"}, methods=("lora",)),
    Lever(
        name="LoRA of all layers",
        on=dict.fromkeys(("lora_key", "lora_projection", "lora_mlp"), True),
        methods=("lora", "qlora"),
    ),
    Lever(name="lora_dropout 0.05", on={"lora_dropout": 0.05}, methods=("lora",)),
    *(
        Lever(name=f"quantize {kind}", off={"quantize": None}, on={"quantize": kind},
              methods=("qlora",))
        for kind in ("bnb.nf4", "bnb.nf4-dq", "bnb.int8")
    ),
]  # fmt: skip
"""All levers, including those that are expected to cost something."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--pairs", type=int, default=3, help="of runs off and on, for each lever")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT",
        help="levers with one of these texts in their names",
    )  # fmt: skip
    parser.add_argument("--methods", nargs="+", choices=EVERY, default=EVERY)


def exit_code(figures: Figures) -> int:  # as all commands have it
    """Return 0: a lever may help or not."""
    return 0


def chosen(only: Sequence[str], methods: Sequence[str]) -> list[tuple[Lever, Method]]:
    """Levers with a method each, by method: its model then stays in the cache of files."""
    return [
        (lever, method)
        for method in EVERY
        for lever in LEVERS
        if method in methods
        and method in lever.methods
        and any(text in lever.name for text in only)
    ]


def measure(options: argparse.Namespace) -> Figures:
    """Measure all pairs; the file is written after each."""
    machine = machine_of(options)
    figures = begun(options, {"pairs": []})
    done = {(row["lever"], row["method"], row["pair"]) for row in figures["pairs"]}
    figures |= {
        "machine": machine,
        "scenes": {f"{a} {b}": dataclasses.asdict(one) for (a, b), one in SCENES.items()},
        "warm_up_steps": WARM_UP_STEPS,
        "hardware": dataclasses.asdict(hardware()),
        "versions": versions(),
    }
    imports = None if machine == "gpu" else imports_bytes()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        for pair in range(options.pairs):
            for lever, method in chosen(options.only, options.methods):
                if (lever.name, method, pair) in done:
                    continue
                row = {"lever": lever.name, "method": method, "pair": pair}
                if lever.gpu_only and machine != "gpu":
                    row["refused"] = "needs a GPU"
                else:
                    scene = scene_for(options, SCENES[machine, method])
                    keys = keys_of(scene, method, place, options.models or place)
                    keys["accelerator"] = "cuda" if machine == "gpu" else "cpu"
                    # Each comes first in half of the pairs, so that a warm cache of files favours
                    # neither.
                    swap = pair % 2 == 1
                    runs = measured_pair(lever, method, keys, place, options.limit_s, swap=swap)
                    for kind, run in runs.items():
                        run = dataclasses.replace(run, imports_bytes=imports)
                        row[kind] = dataclasses.asdict(run)
                row["load_average"] = os.getloadavg()[0]
                figures["pairs"].append(row)
                print(" ".join(row_cells(lever.name, method, [row])), flush=True)
                keep(figures, options)
    return figures


def machine_of(options: argparse.Namespace) -> str:
    """Kind of machine to measure: tiny, gpu or cpu."""
    return "tiny" if options.tiny else "gpu" if is_gpu_here() else "cpu"


def scene_for(options: argparse.Namespace, usual: Scene) -> Scene:
    """The scene with the number of steps of --steps, if it is given."""
    return dataclasses.replace(usual, steps=options.steps) if options.steps else usual


def measured_pair(
    lever: Lever, method: Method, keys: dict[str, Any], place: Path, limit_s: float, *, swap: bool
) -> dict[str, Measured]:
    """Measure a run without the lever and one with it.

    Args:
        lever: what differs.
        method: what is trained.
        keys: of both runs.
        place: for their files.
        limit_s: of one run.
        swap: whether the run with the lever comes first.
    """
    runs: dict[str, Measured] = {}
    for kind in ("on", "off") if swap else ("off", "on"):
        out_dir = Path(tempfile.mkdtemp(dir=place)) / "out"
        with_lever = keys | (lever.on if kind == "on" else lever.off)
        how = "full" if method == "full" else "lora"
        runs[kind] = run_ftkit(how, with_lever, out_dir, limit_s)
    return runs


def keys_of(scene: Scene, method: Method, place: Path, models: Path) -> dict[str, Any]:
    """Keys of a run on a scene; model and records are made if they are missing."""
    from benchmarking import workload

    model = workload.model_in(models.absolute(), scene.model, scene.precision)
    count = scene.steps * scene.global_batch_size
    data = place / f"records-{count}"
    if not data.is_dir():
        records = workload.make_records(workload.alpaca_lengths(count))
        # Placed in the file so that ftkit trains on them in the order of `records`.
        order = workload.order_of_ftkit(count, SEED)
        workload.write_data(data, workload.in_file_order(records, order), records[:2])
    keys = {
        "checkpoint_dir": model,
        "precision": scene.precision,
        "data.path": data,
        "train.max_seq_length": workload.LONGEST,
        "train.micro_batch_size": scene.micro_batch_size,
        "train.global_batch_size": scene.global_batch_size,
        "train.max_steps": scene.steps,
    }
    return keys | ({"quantize": "bnb.nf4"} if method == "qlora" else {})


def markdown(figures: Figures) -> str:
    """A row for each lever, in the order in which they were measured."""
    keys = dict.fromkeys((row["lever"], row["method"]) for row in figures["pairs"])
    rows = [row_cells(*key, rows_of(figures, *key)) for key in keys]
    machine = figures["hardware"]
    on = ", ".join(one["name"] for one in machine["gpus"]) or machine["cpu"]
    pairs = 1 + max((row["pair"] for row in figures["pairs"]), default=-1)
    said = (
        f"Medians of {pairs} pairs on {on}; tokens without padding; "
        f"{not_counted(figures)} are not counted. Memory: allocated on the GPU, or of "
        "the largest process less what its imports hold."
    )
    return f"{table(COLUMNS, rows)}\n\n{said}"


def rows_of(figures: Figures, lever: str, method: str) -> list[Figures]:
    """The pairs of a lever."""
    rows = figures["pairs"]
    return [row for row in rows if (row["lever"], row["method"]) == (lever, method)]


def row_cells(lever: str, method: str, pairs: Sequence[Figures]) -> list[str]:
    """A row of the table: medians over the pairs, or the message of a run that failed."""
    if refused := next((row["refused"] for row in pairs if "refused" in row), None):
        return [lever, method, refused, *[""] * (len(COLUMNS) - 3)]
    off, on = in_pairs(pairs, ("off", "on"))
    if failed := next((run.failure for run in [*on, *off] if not run.is_whole), None):
        return [lever, method, in_a_cell(failed), *[""] * (len(COLUMNS) - 3)]
    both = [pair for pair in zip(off, on, strict=True) if all(run.is_whole for run in pair)]
    differ = max(largest_difference(a.steps, b.steps) for a, b in both)
    return [
        lever,
        method,
        *_compared(off, on, "tokens_per_s", lambda value: number(value, ",.0f")),
        *_compared(off, on, "peak_bytes", lambda value: gib(value) + " GiB"),
        *_compared(off, on, "first_step_s", lambda value: number(value, ".1f") + " s")[:2],
        f"{differ:.0e}",
    ]


def _compared(off: Sequence[Measured], on: Sequence[Measured], name: str, cell: Any) -> list[str]:
    """Cells of a property without and with the lever, and the ratio of the pairs."""
    ratio = number(paired_ratio(on, off, name), ".2f")
    return [cell(median_of(off, name)), cell(median_of(on, name)), ratio]


def draw(figures: Figures, picture: Path) -> None:
    """Draw the effect of each lever on speed and memory, a panel for each."""
    panels: dict[str, dict[str, float]] = {"tokens/s": {}, "peak memory": {}}
    for lever, method in dict.fromkeys((row["lever"], row["method"]) for row in figures["pairs"]):
        pairs = [row for row in rows_of(figures, lever, method) if "on" in row]
        off, on = in_pairs(pairs, ("off", "on"))
        for panel, name in (("tokens/s", "tokens_per_s"), ("peak memory", "peak_bytes")):
            ratio = paired_ratio(on, off, name)
            if ratio is not None:
                panels[panel][f"{lever}, {method}"] = ratio
    known = {panel: bars for panel, bars in panels.items() if bars}
    if known:
        draw_bars(known, "with the lever, relative to without", "Levers of ftkit", picture)
