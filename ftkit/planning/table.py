"""Tables of plans for people, and JSON for programs."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Group
from rich.measure import Measurement
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ftkit.models.pretrained.single_file import Conversion
from ftkit.models.pretrained.stored_forms import published_text
from ftkit.planning.gpus import HOST
from ftkit.planning.predict import Planned, PlannedBeside, PlannedReference
from ftkit.planning.suggest import Change
from ftkit.recipe.adapter_types import method_text
from ftkit.recipe.batches import SOURCE_WORDS
from ftkit.recipe.lora_layers import adapted_text
from ftkit.recipe.objectives import ObjectiveRules, objective_rules
from ftkit.recipe.recipe import LoraRecipe, Recipe
from ftkit.recipe.recipe_sections import rounding_of
from ftkit.strategies.step_memory import CATEGORIES
from ftkit.utils.console.formatting import bytes_text, count_text, percent_text
from ftkit.utils.console.html import block, escaped, grid, labelled, styled
from ftkit.utils.console.terminal import (
    REPORT_WIDTH,
    SafeConsole,
    fitted,
    labelled_grid,
    plain_text,
)
from ftkit.utils.progress import print_shown

_ANY_WIDTH = 1000
"""Width of tables in a file, where many columns are neither folded nor cut."""
_STYLES = {"fits": "bold green", "does not fit": "bold red", "UNCERTAIN": "bold yellow"}


def show(found: Sequence[Planned], form: Literal["table", "json"]) -> None:
    """Write plans to standard output: one as rows, several as a table."""
    if form == "json":
        # One plan is an object, several are a list.
        values = [planned.as_dict() for planned in found]
        print(json.dumps(values[0] if len(values) == 1 else values, indent=2))
        return
    terminal = SafeConsole(highlight=False)
    if len(found) == 1:
        content: Group | Table = plan_table(found[0])
        width = REPORT_WIDTH
    else:
        width = terminal.width if sys.stdout.isatty() else _ANY_WIDTH
        content = side_by_side(found, width)
    # Without colours in a file or a pipe.
    if sys.stdout.isatty():
        terminal.print(content)
    else:
        print(plain_text(content, width))


def plans_as_html(found: Sequence[Planned]) -> str:
    """Plans as HTML for a notebook: one as rows, several as a table."""
    if len(found) == 1:
        (planned,) = found
        words = verdict(planned)
        needed = f"{styled(words, _STYLES[words])} {escaped(_needs(planned))}" if words else ""
        return block(f"<b>{escaped(plan_title(planned))}</b>", needed, labelled(_rows(planned)))
    columns = _columns(found)
    rows = [
        [styled(column.cells[i].plain, str(column.cells[i].style)) for column in columns]
        for i in range(len(found))
    ]
    right = [i for i, column in enumerate(columns) if column.is_number]
    table = grid([column.head for column in columns], rows, right)
    return table + block(_caption(found), *map(escaped, _notes(found)))


def side_by_side(found: Sequence[Planned], width: int) -> Table:
    """Several plans as a table.

    Args:
        found: the plans.
        width: characters in a line; where they are few, parts of the memory are left out first.
    """
    columns = _columns(found)
    terminal = SafeConsole(width=_ANY_WIDTH)
    caption, notes = _caption(found), _notes(found)
    table = _table(columns, [], caption, notes)
    # Leave out columns, the least important first, until the table fits.
    for place in range(max(column.place for column in columns), 0, -1):
        if Measurement.get(terminal, terminal.options, table).maximum <= width:
            break
        left_out = [column.head for column in columns if column.place >= place]
        kept = [column for column in columns if column.place < place]
        table = _table(kept, left_out, caption, notes)
    return table


def show_changes(
    planned: Planned, changes: Sequence[tuple[Change, str]], form: Literal["table", "json"]
) -> None:
    """Write the changes that make a plan fit, each with its command line; as JSON with the plan."""
    if form == "json":
        described = [
            {"title": change.title, "command": command, "plan": change.planned.as_dict()}
            for change, command in changes
        ]
        print(json.dumps(planned.as_dict() | {"changes": described}, indent=2))
        return
    print()
    if planned.fits:
        print("It fits without changes.")
    elif not changes:
        print("No change known to ftkit makes it fit. Choose a smaller model or a larger GPU.")
    else:
        print("Changes that make it fit, those that cost the least speed first:")
    for change, command in changes:
        least, high = change.planned.least_bytes, change.planned.high_bytes
        needs = f"{least / 2**30:.1f} to {high / 2**30:.1f} GiB"
        head = f"{change.title}: needs {needs}, {verdict(change.planned)}"
        print_shown(f"\n{fitted(head, sys.stdout)}\n  {command}")


def verdict(planned: Planned) -> str:
    """Verdict on a plan: fits, does not fit, UNCERTAIN; empty: device memory is not known."""
    if planned.gpu is None:
        return ""
    return {True: "fits", False: "does not fit", None: "UNCERTAIN"}[planned.fits]


def _notes(found: Sequence[Planned]) -> list[str]:
    """What sweeps say about their runs, a line each."""
    return [f"{planned.name}: {planned.note}" for planned in found if planned.note]


def plan_table(planned: Planned) -> Group:
    """One plan as labelled rows, below a title."""
    words = verdict(planned)
    head = [(Text(words, _STYLES[words]), _needs(planned))] if words else []
    return Group(
        Rule(Text(plan_title(planned), "bold"), characters="-", align="left", style="dim"),
        labelled_grid([*head, *_rows(planned)]),
    )


def plan_title(planned: Planned) -> str:
    """Title of a plan: method and base model."""
    recipe = planned.plan.recipe
    method = method_text(recipe.method, getattr(recipe, "peft", None))
    return f"plan: {method} on {planned.base_model}"


def _needs(planned: Planned) -> str:
    assert planned.gpu is not None
    low, high = map(bytes_text, (planned.least_bytes, planned.high_bytes))
    there = bytes_text(planned.gpu.memory_bytes)
    # The memory of a machine is divided among its ranks, so the figure alone would surprise.
    each = " for each rank" * (planned.gpu.name == HOST and planned.plan.devices > 1)
    words = f"needs {low} to {high} of the {there} of {planned.gpu.name}{each}"
    if planned.gpu.host_bytes is not None and planned.memory.host_bytes > planned.gpu.host_bytes:
        words += f", and host memory: there are {bytes_text(planned.gpu.host_bytes)} for each rank"
    return ", ".join(filter(None, (words, planned.other_model_words)))


def _rows(planned: Planned) -> Iterator[tuple[str, str]]:
    plan, memory = planned.plan, planned.memory
    train = plan.recipe.train
    if planned.note:
        yield "note", planned.note
    # Nothing in the command says so: the user may have meant LoRA.
    if planned.method_source == "recipe" and plan.recipe.method == "full":
        yield "method", "full: the recipe has no LoRA keys; ftkit plan finetune plans LoRA"
    if isinstance(plan.recipe, LoraRecipe):
        yield "adapter", adapted_text(plan.recipe)
    if planned.left_out is not None:
        yield "left out", planned.left_out
    share = percent_text(memory.trained_parameters / memory.parameters)
    counts = f"{memory.trained_parameters:,} of {memory.parameters:,}"
    yield "parameters", f"{counts} trained ({share})"
    if planned.known_as:
        yield "sizes", f"those of LitGPT's {planned.known_as}, because config.json was not found"
    if planned.kept_bytes:
        use = "not loaded" if planned.length.media is None else "frozen, whole on each rank"
        yield "kept", f"{bytes_text(planned.kept_bytes)} of other parts of the model, {use}"
    quantize = getattr(plan.recipe, "quantize", None)
    if planned.published:
        yield "published", published_text(planned.published, quantize)
    settings = [f"{plan.world_size} x {plan.kind.noun}", plan.strategy, plan.precision]
    if (ranks := plan.mesh.context) > 1:
        settings.insert(2, f"sequences over {ranks} ranks")
    if quantize:
        settings.append(quantize)
    settings += [rounded] if (rounded := rounding_of(plan.recipe)) else []
    if every := int(plan.recipe.memory.activation_checkpointing):
        blocks = f" of 1 block in {every}" if every > 1 else ""
        where = " in host memory" * plan.recipe.memory.offload_activations
        settings.append(f"activation checkpointing{blocks}{where}")
    if plan.recipe.compile:
        settings.append("compiled")
    if plan.recipe.kernels == "liger":
        settings.append("kernels of Liger")
    settings.append(plan.recipe.optimizer["class_path"].rpartition(".")[2])
    yield "devices", ", ".join(settings)
    where = "host memory" if plan.accelerator == "cpu" else "device memory"
    peak = bytes_text(memory.peak_bytes)
    yield "peak", f"{peak} of {where} in tensors of each rank ({_moment_text(memory.moment)})"
    for category in CATEGORIES:
        if memory.breakdown_bytes[category]:
            words = category.replace("_", " ")
            yield f"  {words}", bytes_text(memory.breakdown_bytes[category])
    if memory.is_more_because:
        yield "at most", f"the run needs less: {memory.is_more_because}"
    if plan.kind.unpredicted_memory:
        yield "not counted", plan.kind.unpredicted_memory
    if plan.kind.counts_memory:
        yield "reserved", f"about {bytes_text(memory.reserved_bytes)}, with torch's cache"
    hosted = ", ".join(
        f"{category.replace('_', ' ')} {bytes_text(count)}"
        for category, count in memory.offloaded_bytes.items()
    )
    hosted = f", of it offloaded: {hosted}" if hosted else ""
    yield "host", f"{bytes_text(memory.host_bytes)} for each rank{hosted}"
    if (conversion := planned.conversion) is not None:
        yield "conversion", _conversion_text(conversion)
    yield "disk", bytes_text(planned.disk_bytes) if planned.disk_bytes else "nothing is saved"
    if planned.result_layout == "litgpt":
        words = "a LitGPT directory: ftkit cannot write this architecture for Hugging Face"
        yield "result", words
    batch = train.global_batch_size
    rules = objective_rules(planned.plan.recipe.objective)
    samples = _samples_text(batch, rules)
    tokens = f"at most {planned.tokens_per_step:,} tokens"
    if train.global_batch_tokens is None:
        yield "batch", f"{samples} in a step ({_micro_steps(planned)}), {tokens}"
    else:
        yield "batch", f"{tokens} in a step ({_micro_steps(planned)})"
    yield "sequences", planned.length.words
    if planned.reference is not None:
        yield "reference", _reference_text(planned.reference, planned.plan.recipe)
    if planned.beside is not None:
        yield planned.beside.key, _beside_text(planned.beside, planned.plan.recipe)
    if planned.steps is None:
        yield "steps", "not known until the data are on this machine"
    elif planned.samples is None:
        yield "steps", f"at most {planned.steps:,}"
    else:
        yield "steps", f"{planned.steps:,} at most, {planned.samples:,} samples per epoch at most"


def _samples_text(count: int, rules: ObjectiveRules) -> str:
    """Samples of a step in words."""
    if rules.sequences == 1:
        return count_text(count, "sequence")
    if rules.preference == "pairs":
        return count_text(count, "pair")
    return f"{count_text(count, 'sample')} of {rules.sequences} sequences each"


def _reference_text(reference: PlannedReference, recipe: Recipe) -> str:
    more = percent_text(reference.more_fraction)
    if reference.in_every_step:
        passes = "one more forward pass in each step"
        if objective_rules(recipe.objective).observes == "joined":
            passes = (
                "two more forward passes in each step, and one of the model itself: on prompts "
                "with the answers to others too"
            )
        return f"the model without its adapter: {passes} ({more} more operations)"
    words = "computed once before the first step"
    if reference.other_bytes is not None:
        loaded = f"{bytes_text(reference.other_bytes)} of weights"
        words = f"{recipe.reference}, {loaded}, loaded and {words}"
    words += f", in about {more} of the time of an epoch"
    if reference.high_bytes:
        low, high = map(bytes_text, (reference.least_bytes, reference.high_bytes))
        words += f"; needs {low} to {high} on each rank"
    if reference.sequences is None or reference.kept_bytes is None:
        return words
    sequences = f"{reference.sequences:,} sequences to train on at most"
    return f"{words} ({sequences}); {bytes_text(reference.kept_bytes)} in each checkpoint"


def _beside_text(beside: PlannedBeside, recipe: Recipe) -> str:
    passes = "its forward pass is"
    if objective_rules(recipe.objective).observes == "joined":
        passes = (
            "its two forward passes, on prompts with the answers to others too, and one more of "
            "the trained model are"
        )
    return (
        f"{beside.name}, {beside.parameters:,} parameters, {bytes_text(beside.rank_bytes)} on "
        f"each rank; {passes} {percent_text(beside.more_fraction)} more operations in each step"
    )


def _moment_text(moment: str) -> str:
    """The highest moment of a step in words: blocks are counted from either end."""
    where, _, pass_ = moment.partition(", ")
    if not where.startswith("block "):
        return moment
    # Blocks of the simulated model stand for those of any depth, so the last ones have negative
    # numbers.
    number = int(where.removeprefix("block "))
    place = f"block {number + 1}" if number >= 0 else f"block {-number} from the end"
    place = {0: "first block", -1: "last block"}.get(number, place)
    return f"{place}, {pass_}"


def _conversion_text(conversion: Conversion) -> str:
    disk = f"{bytes_text(conversion.disk_bytes)} on the disk, in {conversion.place}"
    if conversion.is_made:
        return f"made before: {disk}"
    memory = bytes_text(conversion.memory_bytes)
    return f"once, before the run: {disk}, and {memory} of host memory"


@dataclass(frozen=True)
class _Column:
    head: str
    cells: list[Text]
    is_number: bool = False
    place: int = 0
    """Columns with the highest place are the first that are left out on a narrow terminal."""


@dataclass(frozen=True)
class _Unit:
    name: str
    bytes: int
    digits: int

    def text(self, count: int, digits: int) -> str:
        return f"{count / self.bytes:.{digits}f}"


def _unit(found: Sequence[Planned]) -> _Unit:
    """Unit of all numbers of a table: those of small models would be 0.00 GiB."""
    is_small = max(planned.memory.peak_bytes for planned in found) < 2**30
    return _Unit("MiB", 2**20, 1) if is_small else _Unit("GiB", 2**30, 2)


def _caption(found: Sequence[Planned]) -> str:
    batch = "batch: sequences of a step / of a forward pass (t: its tokens)"
    return f"{_unit(found).name} of each rank; {batch}"


def _columns(found: Sequence[Planned]) -> list[_Column]:
    unit = _unit(found)

    def numbers(head: str, counts: Sequence[int], place: int) -> _Column:
        cells = [Text(unit.text(count, unit.digits)) for count in counts]
        return _Column(head, cells, is_number=True, place=place)

    columns = [
        _Column("plan", [Text(planned.name) for planned in found]),
        _Column("devices", [Text(_devices(planned)) for planned in found], place=2),
        _Column("precision", [Text(_precision(planned)) for planned in found], place=1),
        _Column("batch", [Text(_batch(planned)) for planned in found], place=1),
        numbers("peak", [planned.memory.peak_bytes for planned in found], 0),
    ]
    heads = ("parameters", "gradients", "optimizer", "activations", "temporary")
    # The last category, unattributed, only exists in measurements.
    for head, category in zip(heads, CATEGORIES, strict=False):
        parts = [planned.memory.breakdown_bytes[category] for planned in found]
        columns.append(numbers(head, parts, 3))
    columns.append(numbers("host", [planned.memory.host_bytes for planned in found], 4))
    if any(planned.gpu is not None for planned in found):
        needs = [
            Text("-".join(unit.text(n, unit.digits - 1) for n in (one.least_bytes, one.high_bytes)))
            for one in found
        ]
        words = [verdict(planned) for planned in found]
        columns.append(_Column("needs", needs, is_number=True))
        columns.append(_Column("", [Text(word, _STYLES.get(word, "")) for word in words]))
    return columns


def _table(
    columns: Sequence[_Column], left_out: Sequence[str], caption: str, notes: Sequence[str]
) -> Table:
    if left_out:
        caption += f"\ncolumns without room here: {', '.join(left_out)}"
    caption = "\n".join([caption, *notes])
    table = Table(
        box=None,
        padding=(0, 2, 0, 0),
        header_style="cyan",
        caption=caption,
        caption_justify="left",
    )
    for column in columns:
        table.add_column(
            column.head,
            justify="right" if column.is_number else "left",
            no_wrap=column.head != "plan",
            overflow="fold",
        )
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*cells)
    return table


def _devices(planned: Planned) -> str:
    return f"{planned.plan.world_size} {planned.plan.strategy}"


def _precision(planned: Planned) -> str:
    recipe = planned.plan.recipe
    quantize = recipe.quantize if isinstance(recipe, LoraRecipe) else None
    return " ".join(filter(None, (planned.plan.precision, quantize, rounding_of(recipe))))


def _batch(planned: Planned) -> str:
    train, tokens = planned.plan.recipe.train, planned.plan.micro_batch_tokens
    of_step = train.global_batch_tokens
    batch = f"{train.global_batch_size}" if of_step is None else f"{of_step:,}t"
    return f"{batch}/{planned.plan.micro_batch_size}" if tokens is None else f"{batch}/{tokens:,}t"


def _micro_steps(planned: Planned) -> str:
    plan, tokens = planned.plan, planned.plan.micro_batch_tokens
    steps, ranks = (
        count_text(planned.micro_steps, "micro-step"),
        count_text(plan.world_size, "rank"),
    )
    if tokens is None:
        return f"{steps} of {plan.micro_batch_size} on {ranks}"
    why = ""
    if plan.chosen is not None and planned.fits is not False:
        why = f" ({SOURCE_WORDS[plan.chosen.source]})"
    return f"at most {steps} of {tokens:,} tokens{why} on {ranks}"
