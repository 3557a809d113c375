"""`ftkit merge`: an adapter and its base model as one Hugging Face model.

Weights are read, changed and written one after the other. So is the model whose logits are
compared with the result's: no model is in memory as a whole.
"""

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ftkit.data.dataset import load_held_out
from ftkit.data.sources import data_source
from ftkit.errors import UserError
from ftkit.evaluation.loading import OpenAdapter, open_adapter
from ftkit.evaluation.prompting import prompting_of
from ftkit.evaluation.result import Result
from ftkit.extensions.publish.commands import MergeOptions
from ftkit.extensions.publish.model_card import card_files
from ftkit.extensions.publish.peft_reading import PeftReading, Values, compare_with_peft
from ftkit.models.architectures.architecture import HEAD
from ftkit.models.bodies.experts import PAIRS, packed_in
from ftkit.models.language_model import LanguageModel, outline_plain
from ftkit.models.lora.adapter_files import of_layer
from ftkit.models.lora.experts import expert_pairs, merged_experts
from ftkit.models.lora.peft_layers import layers_of, tuner_layers
from ftkit.models.lora.targets import TRAINED, our_name
from ftkit.models.pretrained.base_model import BaseModel, weight_reader
from ftkit.models.pretrained.save import save_hf
from ftkit.recipe.adapter_types import is_adapter
from ftkit.recipe.implementations import layout_in
from ftkit.recipe.objectives import Preference, objective_rules
from ftkit.recipe.recipe import Component, Quantization
from ftkit.utils.console.display import Display
from ftkit.utils.console.formatting import bytes_text, number_text, percent_text
from ftkit.utils.console.terminal import labelled_grid
from ftkit.utils.imports import silence_libraries
from ftkit.utils.output_files import as_written, check_apart, check_space
from ftkit.utils.process import cleaning_up_on_signals
from ftkit.utils.progress import OnProgress, print_next

_CPU = torch.device("cpu")


@torch.no_grad()
def logits_of(
    model: LanguageModel,
    values: Values,
    sequences: Sequence[Sequence[int]],
    progress: OnProgress = lambda *_: None,
) -> Tensor:
    """Compute logits on the CPU: [tokens of all sequences, vocabulary] float32.

    Args:
        model: outlined in float32, without numbers; it has none afterwards.
        values: its parameters; those of quantised layers as numbers.
        sequences: token ids.
        progress: called with (parts done, parts in all).
    """
    longest = max(map(len, sequences))
    tokens = torch.zeros(len(sequences), longest, dtype=torch.long)
    is_real = torch.zeros(len(sequences), longest, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
        is_real[row, : len(sequence)] = True
    model.eval().body.build_rope_cache(_CPU, longest)
    if model.lora is not None:
        layers_of(model.lora).fill(model, _CPU)
    with _filled_when_needed(model, values, progress):
        # Only real tokens: padding on the right changes none of them, and has no logits to compare.
        result: Tensor = model(tokens, is_real.flatten().nonzero().squeeze(1))
    return result


@contextmanager
def _filled_when_needed(
    model: LanguageModel, values: Values, progress: OnProgress
) -> Iterator[None]:
    """Give each part of the model its numbers while it computes.

    The embedding has them from the start: some models ask for its device when they begin. So have
    the few parameters outside of all parts.
    """
    # The order in which the forward pass reaches them: each is dropped before the next is filled.
    body = model.body
    parts: list[nn.Module] = [body.embedding, *body.blocks, *body.others, model.head]
    outlined: list[tuple[nn.Module, str, nn.Parameter]] = []
    beside: list[tuple[nn.Module, str, nn.Parameter]] = []
    done = 0

    def fill(part: nn.Module, *_: object) -> None:
        for module in part.modules():
            fill_own(module, outlined)

    def fill_own(module: Any, outlined: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
        for kind, parameter in list(module.named_parameters(recurse=False)):
            value = values(our_name(f"{names[module]}.{kind}"))
            # A quantised layer packs the numbers again, as it did in training.
            if kind == "weight" and hasattr(module, "pack"):
                value = module.pack(value)
            elif kind in packed_in(module):
                value = packed_in(module)[kind].pack(value)
            else:
                value = value.float()
            outlined.append((module, kind, parameter))
            setattr(module, kind, nn.Parameter(value, requires_grad=False))

    def drop(*_: object) -> None:
        nonlocal done
        _restore(outlined)
        done += 1
        progress(done, len(parts))

    # By module, because hooks only get the module.
    names = {module: name for name, module in model.named_modules()}
    inside = {module for part in parts for module in part.modules()}
    # Hooks, so that the forward pass is the model's own, whatever its body does between parts.
    hooks = [part.register_forward_pre_hook(fill) for part in parts[1:]]
    hooks += [part.register_forward_hook(drop) for part in parts]
    try:
        for module in names.keys() - inside:
            fill_own(module, beside)
        fill(parts[0])
        yield
    finally:
        for hook in hooks:
            hook.remove()
        _restore(beside)


def _restore(outlined: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
    """Give modules their parameters without numbers again, and forget them."""
    while outlined:
        module, kind, parameter = outlined.pop()
        setattr(module, kind, parameter)


SAMPLES, SAMPLE_TOKENS = 4, 128
"""Validation records that are compared, and how much of each at most."""
_PROMPT = "Instruction: Tell me what a base model is, and what fine-tuning adds to it. Answer:"


@dataclass(frozen=True)
class _Difference:
    """Distance of a merged model's logits from those of the result itself."""

    mean: float
    largest: float
    same_token: float
    """Fraction of positions at which both give the same token the highest logit."""


def merge(result: Result, options: MergeOptions) -> int:
    """Write an adapter and its base model as one model; return the exit code.

    Args:
        result: the adapter.
        options: where to, and into which weights.

    Raises:
        UserError: it is not an adapter, or of another model, or there is no room.
    """
    if result.kind != "adapter":
        layout = layout_in(result.directory)
        raise UserError(
            f"{result.name} is a whole model, so there is nothing to merge. "
            f"Try ftkit export {result.name} --format {layout} --out {options.directory}."
        )
    if options.base == "quantized" and result.quantize in (None, "stored"):
        raise UserError(
            f"--base is quantized, but {result.name} does not say that its base model was "
            "quantised in training. Leave --base out."
        )
    silence_libraries()
    with cleaning_up_on_signals(), Display(None, stream=sys.stderr) as display:
        with display.phase(f"reading {result.name}", brief=True):
            adapter = open_adapter(
                result,
                # Logits are compared in float32, and sums are rounded only when they are written.
                dtype=torch.float32,
                quantize=result.quantize,
                base=options.checkpoint_dir,
                option="--checkpoint_dir",
            )
        _merge(result, adapter, options, display)
    return 0


def _merge(result: Result, adapter: OpenAdapter, options: MergeOptions, display: Display) -> None:
    out, base = options.directory, adapter.base
    check_apart(out, result.directory, base.directory)
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    choices: dict[str, Quantization | None] = {"original": None}
    # Dequantised weights come first, as the default: the adapter was trained to correct exactly
    # these. On the quickstart logits then differ by 2e-6 in the mean, with the original weights by
    # 0.9.
    if result.quantize not in (None, "stored"):  # whose numbers are the original ones
        choices = {"quantized": result.quantize, "original": None}
    chosen: str = options.base or next(iter(choices))
    # Each reads headers alone; weights are computed when they are called for.
    merged = {name: Merged(adapter, kind, dtype) for name, kind in choices.items()}
    written = merged[chosen]
    written_bytes = base.extra_weights_bytes + sum(
        shape.numel() * written.dtype_of(name).itemsize for name, shape in written.shapes.items()
    )
    # Before the sample is tokenised, which may take minutes.
    check_space(out, written_bytes)
    sequences, sample = _sample(result, base, display)
    rows, differences = {"sample": sample}, dict[str, _Difference]()

    def tensors() -> Iterator[tuple[str, Tensor]]:
        with display.phase("comparing with PEFT", brief=True) as phase:
            reading = _compare_with_peft(result, adapter, sequences, phase.advance)
        rows["compared"] = reading.what
        with display.phase("comparing logits", brief=True) as phase:
            differences.update(
                _compare_all(result, adapter, reading, merged, sequences, phase.advance)
            )
        with display.phase(f"writing {out}", brief=True) as phase:
            yield from written.all(phase.advance)

    # Compared when the first tensor is asked for: after the directory is known to be free, and
    # before anything is written that PEFT does not compute.
    save_hf(
        base,
        tensors(),
        out,
        max_shard_bytes=options.max_shard_bytes,
        overwrite=options.overwrite,
        others={
            **prompting_of(result, base).files(base),
            **card_files(result, base.directory, "hf"),
        },
    )
    _show(result, adapter, options, chosen, written_bytes, differences, rows)


def _compare_with_peft(
    result: Result,
    adapter: OpenAdapter,
    sequences: Sequence[Sequence[int]],
    progress: OnProgress,
) -> PeftReading:
    """Compare with PEFT what would be written without any rounding."""
    base = adapter.base
    exact = Merged(adapter, None, torch.float32)
    return compare_with_peft(
        base,
        result.directory,
        exact,
        base_reader(base),
        lambda: logits_of(_outline(base), exact, sequences, progress),
        sequences,
    )


def _compare_all(
    result: Result,
    adapter: OpenAdapter,
    reading: PeftReading,
    merged: Mapping[str, "Merged"],
    sequences: Sequence[Sequence[int]],
    progress: OnProgress,
) -> Iterator[tuple[str, _Difference]]:
    """Compare logits of each choice with those of the result itself.

    Both are compared, so that the user sees what the other one would have given.
    """
    models = 1 + len(merged)

    def in_all(before: int, done: int, total: int) -> None:
        progress(before * total + done, models * total)

    expected = reading.logits
    if expected is None or result.quantize not in (None, "stored"):  # PEFT's are of plain weights
        values = _adapted_values(adapter)
        expected = logits_of(adapter.model, values, sequences, partial(in_all, 0))
    for number, (name, one) in enumerate(merged.items(), start=1):
        found = logits_of(_outline(adapter.base), one, sequences, partial(in_all, number))
        yield name, _difference(found, expected)


def _outline(base: BaseModel) -> LanguageModel:
    # Not tied: an adapted head has weights of its own.
    return outline_plain(base, torch.float32, tied=False)


class Merged:
    """Parameters of the merged model as they are written, computed one at a time."""

    def __init__(
        self, adapter: OpenAdapter, kind: Quantization | None, dtype: torch.dtype | None
    ) -> None:
        """Read headers.

        Args:
            adapter: what is merged.
            kind: the base model's weights are rounded to what this stores; None: they are not.
            dtype: of the files; None: each as the base model has it.
        """
        base, model = adapter.base, adapter.model
        self._base, self._kind, self._dtype, self._tensors = base, kind, dtype, adapter.tensors
        self._layers = {our_name(name): layer for name, layer in tuner_layers(model)}
        assert model.lora is not None
        self._of_type = layers_of(model.lora)
        self._values: dict[str, dict[str, Tensor]] = {}
        for name, value in adapter.tensors.items():
            if is_adapter(name):
                layer, parameter = of_layer(name)
                self._values.setdefault(layer, {})[parameter] = value
        self._rounded = {
            # An adapted layer holds the quantised one as its base_layer.
            our_name(name).removesuffix(".base_layer")
            for name, module in model.named_modules()
            if kind is not None and hasattr(module, "pack")
        }
        self._experts = {
            our_name(f"{name}.{matrix}"): packed
            for name, module in model.named_modules()
            for matrix, packed in packed_in(module).items()
            if kind is not None
        }
        self._pairs = dict(expert_pairs(model))
        self._tied = model.tied
        self._read = base_reader(base)
        shapes = base.architecture.parameter_shapes(tied=False)
        # An adapted head differs from the embedding after the merge, so that it is stored.
        if model.tied and "lm_head" not in self._layers:
            shapes.pop(HEAD, None)
        self.shapes = shapes
        """Shapes of all parameters, by our names. An adapted head is no longer tied."""

    def dtype_of(self, name: str) -> torch.dtype:
        """Number format of a parameter in its file."""
        source = self._source(name)
        if source == HEAD and self._base.source is not None:  # it is new
            source = self._base.architecture.embedding
        return self._dtype or self._read(source).dtype

    def __call__(self, name: str) -> Tensor:
        """Return a parameter of the merged model by our name."""
        source = self._source(name)
        dtype = self.dtype_of(name)
        # Trained whole (lora_modules_to_save): nothing is added, the tensor itself is taken.
        if source in self._tensors:
            return as_written(name, self._tensors[source], dtype)
        layer, _, kind = name.rpartition(".")
        value = self._read(source)
        if kind == "weight" and layer in self._rounded:
            # Imported here: it imports bitsandbytes, which other merges do without.
            assert self._kind is not None
            from ftkit.models.quantization import rounded

            value = rounded(value, self._kind)
        elif name in self._experts:
            assert self._kind is not None
            from ftkit.models.quantization import rounded_of_each

            transposed = self._experts[name].transposed
            value = rounded_of_each(value, self._kind, transposed=transposed)
        if layer in self._layers and kind in self._of_type.merged_kinds:
            value = self._of_type.merged(self._layers[layer], self._values[layer], kind, value)
        elif name in self._pairs:
            a, b = (self._tensors[f"{name}{PAIRS}.lora_{m}.{TRAINED}.weight"] for m in "AB")
            value = merged_experts(value, a, b, self._pairs[name])
        return as_written(name, value, dtype)

    def all(self, progress: OnProgress) -> Iterator[tuple[str, Tensor]]:
        """Iterate over all parameters with their names."""
        for done, name in enumerate(self.shapes, start=1):
            yield name, self(name)
            progress(done, len(self.shapes))

    def _source(self, name: str) -> str:
        """The parameter of the adapted model that this one comes from."""
        return self._base.architecture.embedding if name == HEAD and self._tied else name


def base_reader(base: BaseModel) -> Callable[[str], Tensor]:
    """The base model's weights by our names; a tied head is its embedding."""
    read, embedding = weight_reader(base), base.architecture.embedding
    return lambda name: read(embedding if name == HEAD and base.tied else name)


def _adapted_values(adapter: OpenAdapter) -> Callable[[str], Tensor]:
    """The parameters of the adapted model itself."""
    read = base_reader(adapter.base)

    def value(name: str) -> Tensor:
        if name == HEAD and adapter.model.tied:
            name = adapter.base.architecture.embedding
        found = adapter.tensors.get(name)
        return read(name) if found is None else found

    return value


def _sample(result: Result, base: BaseModel, display: Display) -> tuple[list[list[int]], str]:
    """Token ids of what is compared, and what it is."""
    recipe = result.recipe
    sequences: list[list[int]] = []
    with suppress(UserError):  # the files are not here
        # Others than files may need a download.
        if recipe is not None and data_source(recipe.data).files() is not None:
            max_seq_length = recipe.train.max_seq_length
            preference = objective_rules(recipe.objective).preference
            sequences = _validation_samples(
                recipe.data, max_seq_length, base, display, preference=preference
            )
    what = f"{len(sequences)} validation records" if sequences else "a fixed prompt"
    sequences = sequences or [base.tokenizer.encode(_PROMPT).tolist()]
    # A small model may have fewer positions than that.
    most = min(SAMPLE_TOKENS, base.architecture.context_length)
    cut = [sequence[:most] for sequence in sequences]
    return cut, f"{what}, {sum(map(len, cut))} tokens"


def _validation_samples(
    data: Component,
    max_seq_length: int | None,
    base: BaseModel,
    display: Display,
    *,
    preference: Preference | None,
) -> list[list[int]]:
    """Token ids of the first records that the run was validated on."""
    with display.phase("reading data", brief=True) as phase:
        samples = load_held_out(
            data,
            base.tokenizer,
            max_seq_length or base.architecture.context_length,
            preference=preference,
            progress=lambda _, done, total: phase.advance(done, total),
        ).samples
    return [samples[i].ids.tolist() for i in range(min(SAMPLES, len(samples)))]


def _difference(found: Tensor, expected: Tensor) -> _Difference:
    apart = (found - expected).abs()
    same = found.argmax(dim=1) == expected.argmax(dim=1)
    return _Difference(apart.mean().item(), apart.max().item(), same.double().mean().item())


def _show(
    result: Result,
    adapter: OpenAdapter,
    options: MergeOptions,
    chosen: str,
    written_bytes: int,
    differences: dict[str, _Difference],
    rows: Mapping[str, str],
) -> None:
    names = {"original": f"the original weights of {adapter.base.name}"}
    names["quantized"] = f"the weights of {adapter.base.name} as {result.quantize} held them"
    grid = labelled_grid(
        [
            ("merged", f"{result.directory} into {names[chosen]}"),
            ("model", f"{options.directory}, {bytes_text(written_bytes)}"),
            *rows.items(),
        ]
    )
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for title in ("merged into", "mean logit difference", "largest", "same token", ""):
        table.add_column(Text(title))
    for name, one in differences.items():
        table.add_row(
            Text(name),
            Text(number_text(one.mean)),
            Text(number_text(one.largest)),
            Text(percent_text(one.same_token)),
            Text("written" if name == chosen else f"--base {name}"),
        )
    with Display(None) as display:
        display.show(grid)
        display.show(table)
    written = shlex.quote(str(options.directory))
    use = "evaluate" if result.scores else "chat"
    print_next(f"ftkit {use} {written}", f"ftkit push {written} ORG/NAME")
