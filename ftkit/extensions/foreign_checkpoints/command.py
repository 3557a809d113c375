"""`ftkit import`: a run of another program becomes a run that ftkit continues."""

import dataclasses
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ftkit.checkpoint.file_checks import describe_file
from ftkit.checkpoint.metadata import Layout, Metadata, shard_name
from ftkit.checkpoint.shards import Piece, write_shard
from ftkit.checkpoint.state import stored_name
from ftkit.checkpoint.store import Store
from ftkit.data.dataset import load_data
from ftkit.data.sources import check_data, check_run_length, data_source
from ftkit.errors import UserError
from ftkit.extensions.foreign_checkpoints.commands import ImportOptions
from ftkit.extensions.foreign_checkpoints.deepspeed import DeepSpeedRun, zero_directory
from ftkit.extensions.foreign_checkpoints.distributed import DCP_METADATA, DistributedRun
from ftkit.extensions.foreign_checkpoints.neox import position_of_neox
from ftkit.extensions.foreign_checkpoints.recipe import (
    ImportRecipe,
    continued_rate,
    optimizer_keys,
    position_in_data,
)
from ftkit.extensions.foreign_checkpoints.state import (
    ForeignRun,
    ForeignState,
    ForeignTensors,
    ParameterGroup,
    TrainedModel,
)
from ftkit.extensions.foreign_checkpoints.trainers import (
    LITGPT_ADAPTER,
    LITGPT_WEIGHTS,
    STATE,
    LightningRun,
    LitgptRun,
    TrainerRun,
    is_sharded,
)
from ftkit.extensions.neox_data.source import NeoxData
from ftkit.models.architectures.architecture import HEAD, ModelLayout
from ftkit.models.language_model import LanguageModel, outline
from ftkit.models.load_weights import kept_parameters
from ftkit.models.lora.adapter_files import check_adapter
from ftkit.models.lora.adapter_reading import adapter_tensors, unties
from ftkit.models.lora.targets import our_name
from ftkit.models.pretrained.base_model import BaseModel, checked_length, open_base, storage_of
from ftkit.recipe.devices import Devices
from ftkit.recipe.parsing import sorted_words, to_yaml
from ftkit.recipe.plan import make_plan
from ftkit.recipe.recipe import Component, LoraRecipe, Memory, Recipe
from ftkit.runs.directory import RunDirectory
from ftkit.runs.unfinished import continue_command
from ftkit.strategies.optimizers import base_learning_rate, resolve_optimizer
from ftkit.strategies.schedule import make_schedule
from ftkit.strategies.state import PARAMETER, state_kinds
from ftkit.strategies.strategy import compute_dtype, parameter_dtype
from ftkit.training.checkpointing import write_companions
from ftkit.training.setup import result_chat_files
from ftkit.training.start import identities
from ftkit.utils.confinement import checked_size, extend_limits, without_limits
from ftkit.utils.console.display import Display
from ftkit.utils.console.formatting import utc_now
from ftkit.utils.damaged_files import reading
from ftkit.utils.files import new_directory, sync, write_durably
from ftkit.utils.hardware import versions
from ftkit.utils.output_files import check_apart, check_space
from ftkit.utils.process import cleaning_up_on_signals
from ftkit.utils.progress import OnProgress, print_notice, print_shown

_IMPORTABLE = (
    "a checkpoint-N of transformers' Trainer, TRL or axolotl; a directory of DeepSpeed or of "
    "torch.distributed.checkpoint; a .ckpt of Lightning; or a step-N of LitGPT"
)
"""Formats that can be imported, for messages."""


def _open_run(source: Path) -> ForeignRun:
    """Open the foreign checkpoint in a directory or file; its files show its format."""
    if not source.exists():
        raise UserError(f"{source} does not exist. Give {_IMPORTABLE}.")
    with reading(source, _IMPORTABLE, advice="Copy the whole checkpoint again."):
        # The outer program first: a directory of the Trainer may hold DeepSpeed's files, and one of
        # Lightning has a .metadata of torch.distributed.checkpoint.
        if source.is_file():
            if source.suffix == ".ckpt":
                return LightningRun(source)
            if source.name in (LITGPT_WEIGHTS, LITGPT_ADAPTER):
                return LitgptRun(source.parent)
        elif (source / STATE).is_file():
            return TrainerRun(source)
        elif zero_directory(source) is not None:
            return DeepSpeedRun(source)
        elif is_sharded(source):
            return LightningRun(source)
        elif (source / DCP_METADATA).is_file():
            return DistributedRun(source)
        elif any((source / name).is_file() for name in (LITGPT_WEIGHTS, LITGPT_ADAPTER)):
            return LitgptRun(source)
        elif inside := list(source.glob(f"*/{STATE}")):
            # By time and not by number: a directory may hold the steps of several runs.
            newest = max(inside, key=lambda file: file.stat().st_mtime).parent
            raise UserError(f"{source} holds checkpoints, but is not one itself. Try {newest}.")
        raise UserError(f"{source} is not a checkpoint that ftkit knows. Give {_IMPORTABLE}.")


_SHARD_BYTES = 2**31
"""Size of a shard, which is held in memory until it is written."""
_NO_OPTIMIZER = (
    "not taken over: the optimizer's state, which this checkpoint does not hold. The optimizer "
    "starts fresh, so its first steps are those of a new run; a few steps of warm-up "
    "(train.lr_warmup_steps) keep them small"
)


def import_run(options: ImportOptions) -> int:
    """Make a run of a foreign checkpoint; return the exit code.

    Raises:
        UserError: it is of no known kind, damaged, unsafe or of another model than the recipe's, or
            there is no room; nothing is left behind.
    """
    source, out = options.source.expanduser(), options.out.expanduser()
    run = _open_run(source)
    check_apart(out, source)
    files, overrides = sorted_words((), options.config, options.keys)
    recipe_source = ImportRecipe(run, files, overrides, out)
    with (
        cleaning_up_on_signals(),
        Display(None, stream=sys.stderr) as display,
    ):
        # All of it is checked before anything is written.
        imported = _read(run, recipe_source, display)
        with display.phase(f"writing {out}", brief=True) as phase:
            _write(imported, out, options.overwrite, phase.advance)
    step, recipe = imported.metadata.step, imported.recipe
    print_shown(f"{out} has step {step:,} of a run that {run.program} began")
    for line in imported.lines:
        print_shown(f"  {line}")
    print_notice(f"continue with: {continue_command(out, recipe.method)}")
    return 0


def import_in_child(
    source: str,
    out: str,
    config: Sequence[str],
    overwrite: bool,
    keys: Sequence[tuple[str, str]],
) -> int:
    """Run `import_run` with options that arrived as JSON, for `confined`."""
    return import_run(
        ImportOptions(
            source=Path(source),
            out=Path(out),
            config=tuple(config),
            overwrite=overwrite,
            keys=tuple((key, value) for key, value in keys),
        )
    )


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor of our checkpoint."""

    name: str
    """Name in checkpoints: parameter/NAME, exp_avg/NAME, ..."""
    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """Returns a tensor of this shape, or raises UserError."""


def placed_tensors(
    state: ForeignState,
    model: LanguageModel,
    base: BaseModel,
    adapter: Path | None,
    source: Path,
    begun: Iterable[str] = (),
) -> list[PlacedTensor]:
    """All tensors of our checkpoint, taken from a foreign one; each is read when needed.

    Args:
        state: of the foreign run.
        model: outlined, adapted as the recipe says.
        base: that it is made of.
        adapter: directory of PEFT's settings, where an adapter is trained.
        source: the foreign checkpoint, for messages.
        begun: kinds of optimizer state that begin at zero.

    Raises:
        UserError: a tensor is missing, without a parameter, or of another shape or another model.
    """
    kept = {our_name(name): parameter for name, parameter in kept_parameters(model).items()}
    trained = {name: p for name, p in kept.items() if p.requires_grad}
    placed = []
    dtypes: dict[str, torch.dtype] = {}
    for kind, tensors in {PARAMETER: state.parameters, **(state.moments or {})}.items():
        # Frozen parameters that are kept have weights, and no optimizer state.
        wanted = kept if kind == PARAMETER else trained
        if state.layout == "ftkit":
            found = {name: (tensor.dtype, tensor.read) for name, tensor in tensors.items()}
        elif adapter is None:
            found = _of_model(tensors, base, state.layout)
        else:
            found = _of_adapter(tensors, base, adapter)
        for ours, parameter in wanted.items():
            if ours not in found:
                what = "weights" if kind == PARAMETER else f"optimizer state ({kind})"
                raise UserError(
                    f"{source} has no {what} for {ours}, which the recipe trains. Give the base "
                    "model, the method and the adapter's settings of this very run."
                )
            dtype, read = found[ours]
            # State that begins at zero gets the format of its parameter, which comes first.
            dtypes.setdefault(ours, dtype)
            name = stored_name(kind, ours)
            placed.append(
                PlacedTensor(name, parameter.shape, dtype, _checked(read, name, parameter, source))
            )
        if kind == PARAMETER:
            _require_none_lost(state, found, wanted, base, adapter, source)
    for kind in begun:
        for ours, parameter in trained.items():
            shape, dtype = parameter.shape, dtypes[ours]
            zeros = partial(torch.zeros, shape, dtype=dtype)
            placed.append(PlacedTensor(stored_name(kind, ours), shape, dtype, zeros))
    return placed


_Found = dict[str, tuple[torch.dtype, Callable[[], Tensor]]]
"""Tensors of a foreign checkpoint by our names: formats, and functions that read them."""


def _require_none_lost(
    state: ForeignState,
    found: _Found,
    wanted: Collection[str],
    base: BaseModel,
    adapter: Path | None,
    source: Path,
) -> None:
    """Refuse trained weights without a parameter in the model: they would be lost."""
    if state.layout != "ftkit" and adapter is None:
        holders = storage_of(base.architecture, state.layout).holders(state.parameters)
        unknown = set(state.parameters).difference(*(held.names for held in holders.values()))
        if state.moments is not None:  # others are buffers, or of a model that is not trained
            unknown &= set().union(*state.moments.values())
        for name in sorted(unknown):
            raise UserError(
                f"{source} has trained {name}, which {base.name} does not have. Give the base "
                "model of this very run."
            )
    embedding = base.architecture.embedding
    for name in sorted(found.keys() - wanted):
        if name != HEAD or embedding not in wanted:
            raise UserError(
                f"{source} holds {name}, which the recipe does not train. Give the base model, the "
                "method and the adapter's settings of this very run."
            )
        # Programs write a tied head beside its embedding, or untie both when they train them.
        if not torch.equal(found[name][1](), found[embedding][1]()):
            raise UserError(
                f"{source} has trained embedding and head apart, but {base.name} ties them. Try "
                "--train.tie_embeddings false."
            )


def _of_model(tensors: ForeignTensors, base: BaseModel, layout: ModelLayout) -> _Found:
    """Tensors by our names; the layout's own rules split and join matrices."""
    holders = storage_of(base.architecture, layout).holders(tensors)
    return {name: (holder.dtype, holder.read) for name, holder in holders.items()}


def _of_adapter(tensors: ForeignTensors, base: BaseModel, adapter: Path) -> _Found:
    """Tensors of an adapter by our names."""
    # An adapter is small: it is read whole, to be renamed by the rules of its files.
    read = {name: tensor.read() for name, tensor in tensors.items()}
    found = adapter_tensors(read, adapter, base)
    if unties(read, adapter, base):
        raise UserError(
            f"The adapter in {adapter} trains embedding or head of {base.name} alone, in which "
            "both are one. Start a new run from its weights with --adapter and "
            "--train.tie_embeddings false."
        )
    if len(found) > len(read):
        raise UserError(
            f"The adapter in {adapter} is of layers that hold several of ours ({base.name} joins "
            "query, key and value), which ftkit trains apart: its optimizer state is of other "
            "matrices. Start a new run from its weights with --adapter."
        )
    return {name: (tensor.dtype, _itself(tensor)) for name, tensor in found.items()}


def _itself(tensor: Tensor) -> Callable[[], Tensor]:
    # A function of its own: a lambda in the loop would return the last tensor.
    return lambda: tensor


def _checked(
    read: Callable[[], Tensor], name: str, parameter: Tensor, source: Path
) -> Callable[[], Tensor]:
    def checked() -> Tensor:
        with reading(source, f"{name} of {list(parameter.shape)} numbers", key=name):
            tensor = read()
        if tensor.shape != parameter.shape:
            raise UserError(
                f"{source}: {name} has shape {list(tensor.shape)}, but the model's is "
                f"{list(parameter.shape)}. Give the base model and the recipe of this very run."
            )
        return tensor

    return checked


@dataclass(frozen=True, kw_only=True)
class _Imported:
    """Everything of a run that is to be written."""

    recipe: Recipe
    base: BaseModel
    chat_files: dict[str, bytes]
    """Files that say how the result is prompted."""
    metadata: Metadata
    placed: Sequence[PlacedTensor]
    lines: Sequence[str]
    """Report lines about what was taken over, and what was not."""


def _read(run: ForeignRun, recipe_source: ImportRecipe, display: Display) -> _Imported:
    recipe = recipe_source.read()
    check_data(recipe.data, recipe.eval.sets)
    check_run_length(recipe)
    with without_limits():  # those are for the checkpoint
        base = open_base(recipe.checkpoint_dir, recipe.implementation, token=recipe.access_token)
    # The limits are for the checkpoint; the base model, whose size is checked, comes on top.
    if base.directory is not None:
        extend_limits(2 * checked_size(base.directory))
    adapter = recipe_source.adapter if isinstance(recipe, LoraRecipe) else None
    if isinstance(recipe, LoraRecipe):
        check_adapter(base, recipe)
        if adapter is None and run.method is None:
            raise run.broken("it does not describe its adapter: --adapter DIR has to")
    with display.phase("reading the checkpoint", brief=True):
        state = run.state(TrainedModel(base, adapter))
    # Keys that only the state shows; those of the user still win.
    recipe_source.add(optimizer_keys(state))
    max_seq_length = checked_length(base, recipe.train.max_seq_length)
    with display.phase("reading data", brief=True) as phase, without_limits():
        data = load_data(
            recipe.data,
            base.tokenizer,
            max_seq_length,
            progress=lambda _, done, total: phase.advance(done, total),
        )
    of_epoch = data.samples_per_epoch
    source = data_source(recipe.data)
    if isinstance(source, NeoxData) and state.iteration is not None:
        position = position_of_neox(state, source.options, recipe_source, of_epoch)
    else:
        position = position_in_data(state, recipe_source, of_epoch)
    recipe_source.add(position.keys)
    samples, lines = position.samples, position.lines
    # After the position: the schedule of the learning rate depends on the batch size.
    recipe, rate, words = continued_rate(recipe_source, state, of_epoch, samples)
    begun = _begun(recipe, state, run)
    # Nothing is trained here: the plan of one CPU is enough for names and shapes.
    plan = make_plan(_alone(recipe), Devices(accelerator="cpu", count=1), trains=False)
    model = outline(base, recipe, parameter_dtype(plan), compute_dtype(plan))
    with run.reading():
        placed = placed_tensors(state, model, base, adapter, run.directory, begun)
    schedule, notices = make_schedule(
        recipe.train,
        of_epoch,
        base_learning_rate(recipe.optimizer),
        start_step=state.step,
        start_samples=samples,
    )
    of_base, of_data = identities(recipe, base, data, None)
    metadata = Metadata(
        method=recipe.method,
        step=state.step,
        samples=samples,
        tokens=0,
        epochs=samples / of_epoch,
        training_s=0.0,
        total_steps=schedule.total_steps,
        learning_rate=rate,
        schedule=schedule.numbers(),
        lr_schedule=schedule.kind,
        loss=state.loss,
        validation_loss=None,
        max_seq_length=max_seq_length,
        optimizer=recipe.optimizer["class_path"],
        # A fresh optimizer counts its own steps from 0, whatever the step of the run.
        optimizer_scalars=dict(state.scalars) if state.moments is not None else {"step": 0.0},
        rng={"seed": recipe.seed, "rule": "every step seeds from (seed, step, rank)"},
        seed_names="model",
        base=of_base,
        data=of_data,
        # As if one rank had written it; any layout continues from it.
        layout=Layout(
            strategy=plan.strategy,
            world_size=1,
            devices=1,
            num_nodes=1,
            precision=plan.precision,
            micro_batch_size=1,
            accelerator="cpu",
        ),
        versions=versions(),
        saved_at=utc_now(),
        changes=[f"began with {run.program}; its checkpoint was {run.directory.name}"],
    )
    decays_all = (
        bool(recipe.optimizer["init_args"].get("weight_decay"))
        and recipe.train.decay_norms_and_biases
    )
    decay_lines = _decay_lines(state.groups, decays_all=decays_all)
    taken = f"taken over: {len(placed):,} tensors by name, step, the optimizer's state"
    if state.moments is None:
        taken = f"taken over: {len(state.parameters):,} tensors by name"
    return _Imported(
        recipe=recipe,
        base=base,
        chat_files=result_chat_files(base, data),
        metadata=metadata,
        placed=placed,
        lines=[taken, f"learning rate of the next step: {rate:.6g}"]
        + [line for line in (words, *lines, *decay_lines) if line]
        + [_NO_OPTIMIZER] * (state.moments is None)
        + [*state.notes, *notices],
    )


def _decay_lines(groups: Sequence[ParameterGroup], *, decays_all: bool) -> list[str]:
    """Report line where weight decay left out parameters, and the recipe decays all of them."""
    decays = {float(group.settings.get("weight_decay") or 0.0) for group in groups}
    if len(decays) < 2 or not decays_all:
        return []
    spared = sum(len(group.names) for group in groups if not group.settings.get("weight_decay"))
    words = (
        f"weight decay left out {spared:,} parameters (norms, biases), and is applied to all now; "
        "--train.decay_norms_and_biases false leaves them out"
    )
    return [words]


def _begun(recipe: Recipe, state: ForeignState, run: ForeignRun) -> list[str]:
    """Kinds of optimizer state that begin at zero, as the checkpoint has none."""
    chosen, arguments = resolve_optimizer(recipe.optimizer, may_fuse=False)
    kinds = state_kinds(chosen, arguments, torch.device("cpu"))
    if state.moments is None:
        # Zeros have the shape of the parameter, which not all kinds of state have.
        if any(count != 1 for count in kinds.values()):
            raise UserError(
                f"{run.directory} has no optimizer state, and that of "
                f"{recipe.optimizer['class_path']} cannot be begun at a step of a run. Try "
                "--optimizer AdamW."
            )
        return list(kinds)
    if kinds.keys() != state.moments.keys():
        raise UserError(
            f"optimizer {recipe.optimizer['class_path']} keeps {', '.join(sorted(kinds)) or 'none'}"
            f", but {run.directory} has {', '.join(sorted(state.moments)) or 'no state'}. Give the "
            "optimizer that this run had, as --optimizer NAME."
        )
    return []


def _alone(recipe: Recipe) -> Recipe:
    """Move the recipe to one CPU for the import: its hardware matters only when it runs."""
    return dataclasses.replace(
        recipe,
        accelerator="cpu",
        devices=1,
        num_nodes=1,
        strategy=Component(class_path="single", init_args={}),
        train=dataclasses.replace(recipe.train, micro_batch_size=1, micro_batch_tokens=None),
        kernels="auto",
        compile=False,
        memory=Memory(),
    )


def _write(imported: _Imported, out: Path, overwrite: bool, progress: OnProgress) -> None:
    total = sum(tensor.shape.numel() * tensor.dtype.itemsize for tensor in imported.placed)
    check_space(out, total)
    try:
        with new_directory(out, overwrite=overwrite) as partial:
            run = RunDirectory(partial)
            write_durably(run.recipe, to_yaml(imported.recipe))
            _write_checkpoint(imported, run.store, progress)
    # An OSError itself, so it comes first.
    except FileExistsError:
        raise UserError(
            f"--out {out} is not empty. Name a directory that is not there yet, or try --overwrite."
        ) from None
    except OSError as error:
        raise UserError(
            f"--out {out} cannot be written ({error.strerror}). Try another directory."
        ) from error


def _write_checkpoint(imported: _Imported, store: Store, progress: OnProgress) -> None:
    partial = store.partial(imported.metadata.step)
    partial.mkdir(parents=True)
    # The number of shards is part of their names, so the groups are made first.
    groups = list(_shards(imported.placed))
    adapter: list[tuple[str, Tensor]] = []
    written = []
    for number, group in enumerate(groups):
        pieces = []
        for tensor in group:
            # A copy of its own: what is read may be a view into a mapped file of another layout.
            values = tensor.read().detach().to("cpu").clone(memory_format=torch.contiguous_format)
            # A LoRA checkpoint also has its adapter as files for PEFT.
            kind, _, name = tensor.name.partition("/")
            if kind == PARAMETER and imported.recipe.method == "lora":
                adapter.append((name, values))
            flat = values.view(-1)
            pieces.append(Piece(name=tensor.name, shape=values.shape, start=0, values=flat))
        shard = partial / shard_name(number, len(groups))
        write_shard(shard, pieces)
        written.append(shard)
        progress(number + 1, len(groups))
    written += write_companions(
        partial,
        imported.recipe,
        imported.base,
        imported.chat_files,
        adapter=adapter,
        fingerprint=imported.metadata.base.fingerprint,
    )
    entries = {}
    # The files before the metadata, which makes the checkpoint complete.
    for path in written:
        sync(path)
        entries[path.relative_to(partial).as_posix()] = describe_file(path)
    store.commit(dataclasses.replace(imported.metadata, files=entries))


def _shards(placed: Sequence[PlacedTensor]) -> Iterator[list[PlacedTensor]]:
    """The tensors in groups that fit into memory."""
    group: list[PlacedTensor] = []
    held_bytes = 0
    for tensor in placed:
        size = tensor.shape.numel() * tensor.dtype.itemsize
        # A tensor larger than a shard has one to itself.
        if group and held_bytes + size > _SHARD_BYTES:
            yield group
            group, held_bytes = [], 0
        group.append(tensor)
        held_bytes += size
    if group:
        yield group
