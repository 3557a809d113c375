"""Plans as tables for people and as JSON for programs."""

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Literal

from rich.console import Console, Group
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ftkit.fit import Change
from ftkit.memory.live import CATEGORIES
from ftkit.prediction import Planned
from ftkit.recipe import LoraRecipe
from ftkit.report.formatting import bytes_text, percent_text
from ftkit.report.markup import block, escaped, grid, labelled, styled

_STYLES = {"fits": "bold green", "does not fit": "bold red", "UNCERTAIN": "bold yellow"}


def show(found: Sequence[Planned], form: Literal["table", "json"]) -> None:
    """Write plans to standard output: one as rows, several as a table."""
    if form == "json":
        values = [planned.as_dict() for planned in found]
        print(json.dumps(values[0] if len(values) == 1 else values, indent=2))
        return
    width = None if sys.stdout.isatty() else 160  # tables in files are not cut to 80 columns
    console = Console(width=width, highlight=False)
    console.print(_alone(found[0]) if len(found) == 1 else _several(found))


def as_html(found: Sequence[Planned]) -> str:
    """Plans as HTML for a notebook: one as rows, several as a table."""
    if len(found) == 1:
        (planned,) = found
        words = verdict(planned)
        needed = f"{styled(words, _STYLES[words])} {escaped(_needs(planned))}" if words else ""
        return block(f"<b>{escaped(_title(planned))}</b>", needed, labelled(_rows(planned)))
    table = _several(found)
    rows = [
        [styled(cell.plain, str(cell.style)) for cell in _cells(planned, asked=_asked(found))]
        for planned in found
    ]
    heads = [str(column.header) for column in table.columns]
    right = [i for i, column in enumerate(table.columns) if column.justify == "right"]
    return grid(heads, rows, right)


def show_changes(
    planned: Planned, changes: Sequence[tuple[Change, str]], form: Literal["table", "json"]
) -> None:
    """Write a plan with what makes it fit: each change with its command line."""
    if form == "json":
        described = [
            {"title": change.title, "command": command, "plan": change.planned.as_dict()}
            for change, command in changes
        ]
        print(json.dumps(planned.as_dict() | {"changes": described}, indent=2))
        return
    show([planned], form)
    print()
    if planned.fits:
        print("It fits as it is.")
    elif not changes:
        print("No change known to ftkit makes it fit. Choose a smaller model or a larger GPU.")
    else:
        print("What makes it fit, the cheapest in speed first:")
    for change, command in changes:
        memory = change.planned.memory
        needs = f"{memory.low_bytes / 2**30:.1f} to {memory.high_bytes / 2**30:.1f} GiB"
        print(f"\n{change.title}: needs {needs}, {verdict(change.planned)}\n  {command}")


def verdict(planned: Planned) -> str:
    """Whether it fits, in words; empty: not asked."""
    if planned.gpu is None:
        return ""
    return {True: "fits", False: "does not fit", None: "UNCERTAIN"}[planned.fits]


def _alone(planned: Planned) -> Group:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(overflow="fold")
    words = verdict(planned)
    if words:
        table.add_row(Text(words, _STYLES[words]), Text(_needs(planned)))
    for label, value in _rows(planned):
        table.add_row(label, Text(value))
    return Group(
        Rule(Text(_title(planned), "bold"), characters="-", align="left", style="dim"), table
    )


def _title(planned: Planned) -> str:
    return f"plan: {planned.plan.recipe.method} on {planned.base_model}"


def _needs(planned: Planned) -> str:
    assert planned.gpu is not None
    low, high = map(bytes_text, (planned.memory.low_bytes, planned.memory.high_bytes))
    there = bytes_text(planned.gpu.memory_bytes)
    return f"needs {low} to {high} of the {there} of {planned.gpu.name}"


def _asked(found: Sequence[Planned]) -> bool:
    """Whether any plan is for a device."""
    return any(planned.gpu is not None for planned in found)


def _rows(planned: Planned) -> Iterator[tuple[str, str]]:
    plan, memory = planned.plan, planned.memory
    train = plan.recipe.train
    share = percent_text(memory.trained_parameters / memory.parameters)
    counts = f"{memory.trained_parameters:,} of {memory.parameters:,}"
    yield "parameters", f"{counts} trained ({share})"
    device = "CPU" if plan.accelerator == "cpu" else "GPU"
    quantize = getattr(plan.recipe, "quantize", None)
    settings = [f"{plan.world_size} x {device}", plan.strategy, plan.precision]
    if quantize:
        settings.append(quantize)
    if plan.recipe.memory.activation_checkpointing:
        settings.append("activation checkpointing")
    settings.append(plan.recipe.optimizer["class_path"].rpartition(".")[2])
    yield "devices", ", ".join(settings)
    where = "host memory" if plan.accelerator == "cpu" else "device memory"
    peak = bytes_text(memory.peak_bytes)
    yield "peak", f"{peak} of {where} in tensors of each rank ({memory.moment})"
    for category in CATEGORIES:
        if memory.breakdown_bytes[category]:
            words = category.replace("_", " ")
            yield f"  {words}", bytes_text(memory.breakdown_bytes[category])
    if plan.accelerator == "cuda":
        yield "reserved", f"about {bytes_text(memory.reserved_bytes)}, with torch's cache"
    hosted = ", ".join(
        f"{category.replace('_', ' ')} {bytes_text(count)}"
        for category, count in memory.offloaded_bytes.items()
    )
    hosted = f", of it offloaded: {hosted}" if hosted else ""
    yield "host", f"{bytes_text(memory.host_bytes)} for each rank{hosted}"
    yield "disk", bytes_text(planned.disk_bytes) if planned.disk_bytes else "nothing is saved"
    yield (
        "batch",
        (
            f"{train.global_batch_size} sequences of at most {planned.max_seq_length} tokens in a "
            f"step ({plan.micro_steps} x {plan.micro_batch_size} on {plan.world_size}), at most "
            f"{planned.tokens_per_step:,} tokens"
        ),
    )
    if planned.steps is None:
        yield "steps", "not known until the data is on this machine"
    elif planned.samples is None:
        yield "steps", f"at most {planned.steps:,}"
    else:
        yield "steps", f"{planned.steps:,} at most, {planned.samples:,} samples per epoch at most"


def _several(found: Sequence[Planned]) -> Table:
    table = Table(
        box=None,
        padding=(0, 2, 0, 0),
        header_style="cyan",
        caption="GiB of each rank; batch: sequences of a step / of a forward pass",
        caption_justify="left",
    )
    table.add_column("plan", overflow="fold", min_width=24)
    for title in ("devices", "precision", "batch"):
        table.add_column(title, no_wrap=True)
    parts = ("parameters", "gradients", "optimizer", "activations", "temporary")
    for title in ("peak", *parts, "host"):
        table.add_column(title, justify="right", no_wrap=True)
    asked = _asked(found)
    if asked:
        table.add_column("needs", justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
    for planned in found:
        table.add_row(*_cells(planned, asked=asked))
    return table


def _cells(planned: Planned, *, asked: bool) -> Iterator[Text]:
    plan, memory = planned.plan, planned.memory
    yield Text(planned.name)
    yield Text(f"{plan.world_size} {plan.strategy}")
    quantize = plan.recipe.quantize if isinstance(plan.recipe, LoraRecipe) else None
    yield Text(f"{plan.precision} {quantize}" if quantize else plan.precision)
    yield Text(f"{plan.recipe.train.global_batch_size}/{plan.micro_batch_size}")
    yield Text(_gib(memory.peak_bytes))
    for category in CATEGORIES[:5]:
        yield Text(_gib(memory.breakdown_bytes[category]))
    yield Text(_gib(memory.host_bytes))
    if asked:
        yield Text(f"{memory.low_bytes / 2**30:.1f}-{memory.high_bytes / 2**30:.1f}")
        words = verdict(planned)
        yield Text(words, _STYLES.get(words, ""))


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f}"
