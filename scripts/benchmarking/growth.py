"""``scripts/benchmark growth``: processor time for ten and a hundred times as much of something."""

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarking import MIB
from benchmarking.command import Figures, begun, keep
from benchmarking.ftkit_run import COMMON, FTKIT, words_of
from benchmarking.tables import draw_lines, in_a_cell, number, table
from benchmarking.watch import watch
from benchmarking.workload import Size, make_model, make_records, write_data, write_tokenizer
from ftkit.utils.files import CACHE_VARIABLE
from ftkit.utils.hardware import hardware, versions

COLUMNS = ("of", "how many", "processor time", "for one more", "growth", "memory")
SMALL = Size(layers=2, width=64, intermediate=128, heads=2, key_value_heads=1, positions=32768)
LLAMAS = {
    1e9: Size(layers=16, width=2048, intermediate=8192, heads=32, key_value_heads=8),
    8e9: Size(layers=32, width=4096, intermediate=14336, heads=32, key_value_heads=8),
    70e9: Size(layers=80, width=8192, intermediate=28672, heads=64, key_value_heads=8),
    405e9: Size(layers=126, width=16384, intermediate=53248, heads=128, key_value_heads=8),
}
"""Shapes of Llama 3 by its parameters."""
Words = Sequence[str | Path]


@dataclass(frozen=True)
class Axis:
    """What there is more and more of."""

    prepare: Callable[[int, Path], Words]
    """Makes what a command of a size needs in a directory; returns its words."""
    sizes: tuple[float, ...]
    tiny: tuple[float, ...]
    """Sizes with --tiny."""
    runs: tuple[str, ...] = ("",)
    """Names of runs of the same command one after the other, such as with an empty cache."""


def _training(place: Path, size: Size, records: int, length: int, **keys: Any) -> Words:
    """A run of two steps of one sample, with what it needs."""
    make_model(place / "model", size, torch.float32)
    made = make_records([(length // 2, length - length // 2 - 1)] * records)
    write_data(place / "data", made, made[:1])
    usual = {
        "checkpoint_dir": place / "model",
        "data.path": place / "data",
        "out_dir": place / "out",
        "accelerator": "cpu",
        "precision": "32-true",
        "train.max_seq_length": length,
        "train.max_steps": 2,
        "train.micro_batch_size": 1,
        "train.global_batch_size": 1,
    }
    return [*words_of("full", COMMON | usual | keys), "--overwrite"]


def of_records(count: int, place: Path) -> Words:
    """A run on so many records of 64 tokens."""
    return _training(place, SMALL, count, 64)


def of_tokens(length: int, place: Path) -> Words:
    """A run on samples of so many tokens."""
    return _training(place, SMALL, 4, length)


def of_layers(layers: int, place: Path) -> Words:
    """A run of a model of so many layers."""
    return _training(place, dataclasses.replace(SMALL, layers=layers), 4, 64)


def of_ranks(ranks: int, place: Path) -> Words:
    """A run of so many ranks."""
    keys = {"devices": ranks, "strategy": "ddp", "train.global_batch_size": ranks}
    return _training(place, SMALL, 64, 64, **keys)


def of_files(files: int, place: Path) -> Words:
    """A run from weights in so many files."""
    from safetensors.torch import load_file, save_file

    words = _training(place, dataclasses.replace(SMALL, layers=20), 4, 64)
    tensors: dict[str, torch.Tensor] = {}
    for file in (place / "model").glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    where = {name: f"part-{count % files:03}.safetensors" for count, name in enumerate(tensors)}
    for part in set(where.values()):
        own = {name: tensor for name, tensor in tensors.items() if where[name] == part}
        save_file(own, place / "model" / part, {"format": "pt"})
    index = json.dumps({"metadata": {}, "weight_map": where})
    (place / "model/model.safetensors.index.json").write_text(index)
    return words


def of_parameters(parameters: float, place: Path) -> Words:
    """A plan for a Llama of so many parameters, of which there are no weights."""
    (place / "model").mkdir()
    settings = LLAMAS[parameters].settings | {"torch_dtype": "bfloat16"}
    (place / "model/config.json").write_text(json.dumps(settings))
    write_tokenizer(place / "model")
    options = ("--train.max_seq_length", "1024", "--precision", "bf16-true", "--gpu", "9999GiB")
    return [*FTKIT, "plan", "--checkpoint_dir", place / "model", *options]


def of_runs(count: int, place: Path) -> Words:
    """A comparison of so many runs of 100 steps, with a page."""
    keys = {"train.max_steps": 100, "train.epochs": None, "out_dir": place / "runs/0"}
    line = _training(place, SMALL, 100, 16, **keys)
    run = watch(line, limit_s=600, directory=place)
    assert run.exit_code == 0, run.output
    for copy in range(1, count):
        shutil.copytree(place / "runs/0", place / f"runs/{copy}")
    return [*FTKIT, "compare", place / "runs", "--plot", place / "table.html"]


AXES = {
    "records": Axis(of_records, (1e4, 1e5, 1e6), (10, 100), ("no cache", "cached")),
    "tokens of a sample": Axis(of_tokens, (512, 4096, 32768), (16, 160)),
    "layers": Axis(of_layers, (8, 80, 800), (2, 20)),
    "files of weights": Axis(of_files, (1, 10, 100), (1, 10)),
    "parameters of a plan": Axis(of_parameters, tuple(LLAMAS), (1e9, 8e9)),
    "ranks": Axis(of_ranks, (1, 2, 4, 8), (1, 2)),
    "runs of a comparison": Axis(of_runs, (10, 100, 1000), (1, 3)),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--axes", nargs="+", choices=tuple(AXES), default=tuple(AXES))
    parser.add_argument("--rounds", type=int, default=1)


def exit_code(figures: Figures) -> int:
    """Return 1 if something was not measured."""
    return 1 if any(row["failure"] for row in figures["runs"]) or not figures["runs"] else 0


def measure(options: argparse.Namespace) -> Figures:
    """Measure all sizes of the axes; the file is written after each."""
    figures = begun(options, {"runs": []})
    figures["runs"] = [row for row in figures["runs"] if not row["failure"]]
    done = {(row["axis"], row["size"], row["round"]) for row in figures["runs"]}
    figures |= {"hardware": dataclasses.asdict(hardware()), "versions": versions()}
    for round_ in range(options.rounds):
        for name in options.axes:
            for size in AXES[name].tiny if options.tiny else AXES[name].sizes:
                if (name, size, round_) in done:
                    continue
                for row in _measured(name, size, options.limit_s):
                    figures["runs"].append(row | {"round": round_})
                    print(*row.values(), flush=True)
                    keep(figures, options)
    return figures


def _measured(name: str, size: float, limit_s: float) -> Iterator[dict[str, Any]]:
    """The runs of a size."""
    axis = AXES[name]
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        words = axis.prepare(int(size), place)
        cache = {CACHE_VARIABLE: str(place / "cache")}
        for run in axis.runs:
            before = os.times()
            seen = watch(words, limit_s=limit_s, directory=place, environment=cache)
            after = os.times()
            user, system = after.children_user, after.children_system
            cpu_s = user + system - before.children_user - before.children_system
            failure = None if seen.exit_code == 0 else in_a_cell(seen.output[-150:] or "no end")
            yield {
                "axis": name,
                "size": size,
                "run": run,
                "failure": failure,
                "cpu_s": cpu_s,
                "host_bytes": seen.host_bytes,
            }


def points_of(figures: Figures, name: str, run: str) -> list[tuple[float, float, float]]:
    """Size, processor time in seconds and memory in bytes, as medians, by ascending size."""
    found = []
    own = [row for row in figures["runs"] if (row["axis"], row["run"]) == (name, run)]
    for size in sorted({row["size"] for row in own if not row["failure"]}):
        rows = [row for row in own if row["size"] == size and not row["failure"]]
        medians = (statistics.median(row[key] for row in rows) for key in ("cpu_s", "host_bytes"))
        found.append((size, *medians))
    return found


def rows_of(name: str, points: Sequence[tuple[float, float, float]]) -> list[list[str]]:
    """Rows of the table.

    What one more costs is the difference to the row before: start-up, which every size has, is not
    in it.
    """
    rows, smaller, before, each_before = [], 0.0, 0.0, 0.0
    for place, (size, cpu_s, memory) in enumerate(points):
        each = (cpu_s - before) / (size - smaller) if place else 0.0
        row = [name, f"{size:,.0f}", f"{cpu_s:.1f} s", _duration(each) if place else ""]
        row += [f"{each / each_before:.1f}" if min(each, each_before) > 0 else ""]
        rows.append([*row, number(memory, ",.0f", scale=MIB) + " MiB"])
        smaller, before, each_before = size, cpu_s, each
    return rows


def _duration(seconds: float) -> str:
    """A time of at least a picosecond, in three digits at most."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us"), (1e9, "ns")):
        if abs(seconds) * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e12:.3g} ps"


def markdown(figures: Figures) -> str:
    """One table of all axes."""
    rows = []
    for name, axis in AXES.items():
        for run in axis.runs:
            points = points_of(figures, name, run)
            rows += rows_of(f"{name}, {run}" if run else name, points)
    return (
        f"{table(COLUMNS, rows)}\n\nProcessor time of all processes of a command on "
        f"{figures['hardware']['cpu']}, and memory of the largest one. *For one more* is the time "
        "for each more than in the row before, *growth* how often that of the row before it."
    )


def draw(figures: Figures, picture: Path) -> None:
    """Draw processor time beyond that of the smallest size."""
    lines = {}
    for name, axis in AXES.items():
        points = points_of(figures, name, axis.runs[0])
        more = [(size, cpu_s - points[0][1]) for size, cpu_s, _ in points[1:]]
        if len(more) > 1 and all(cpu_s > 0 for _, cpu_s in more):
            lines[name] = more
    if lines:
        draw_lines(lines, ("how many", "s of a processor"), "Growth of the host's work", picture)
