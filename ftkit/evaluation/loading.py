"""Loading of a result: base model and adapter, or the weights of a checkpoint."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ftkit.checkpoint.metadata import BASE, CheckpointError
from ftkit.checkpoint.state import result_parameter, stored_name
from ftkit.checkpoint.stored_state import StoredState
from ftkit.errors import UserError
from ftkit.evaluation.prompting import Prompting, prompting_of
from ftkit.evaluation.result import Result
from ftkit.models.architectures.architecture import HEAD
from ftkit.models.language_model import LanguageModel, outline, outline_plain, round_layers
from ftkit.models.load_weights import Whole, fill
from ftkit.models.lora.adapter_reading import check_shapes, read_adapter
from ftkit.models.pretrained.added_tokens import with_added_tokens
from ftkit.models.pretrained.base_model import (
    BaseModel,
    fingerprint,
    implementation_of,
    open_base,
    open_without_weights,
    parameter_shapes,
    weight_reader,
    weights,
)
from ftkit.models.pretrained.recipe_model import with_named_parts, with_trained_parts
from ftkit.models.pretrained.scored_model import as_scored
from ftkit.recipe.devices import find_devices
from ftkit.recipe.peft_adapter import adapter_keys
from ftkit.recipe.peft_names import CONFIG
from ftkit.recipe.plan import Plan, make_plan
from ftkit.recipe.recipe import Component, LoraRecipe, Precision, Quantization, Recipe, Train
from ftkit.strategies.state import PARAMETER
from ftkit.utils.accelerators.kinds import HOST_KIND
from ftkit.utils.progress import OnProgress

ROPE_LENGTH = 4096
"""Most positions that a model is prepared for; longer texts make it prepare more."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A result in memory."""

    model: LanguageModel
    """Model in evaluation mode, on its device."""
    base: BaseModel
    """Base model, with architecture and tokenizer."""
    prompting: Prompting
    """Template of prompts and tokens that end answers."""


def plan_use(
    result: Result, accelerator: str | None = None, precision: Precision | None = None
) -> Plan:
    """Plan the use of a result on one device, in the precision of its run where possible.

    Args:
        result: what is to be used.
        accelerator: kind of device. Default: GPUs of NVIDIA or AMD where there are any.
        precision: default: that of its run; without a run, 16 bits on GPUs and 32 on CPUs.

    Raises:
        UserError: this machine does not support it.
    """
    # How the run computed is kept; how it was distributed and made faster is not needed on one
    # device.
    recipe = result.recipe or Recipe(checkpoint_dir=str(result.directory))
    recipe = dataclasses.replace(
        recipe,
        accelerator=accelerator or "auto",
        devices=1,
        num_nodes=1,
        strategy=Component(class_path="single", init_args={}),
        compile=False,
        kernels="torch",
    )
    devices = find_devices(recipe.accelerator, recipe.devices, here=True)
    # GPUs before Ampere have no arithmetic in bfloat16.
    half: Precision = "bf16-true" if devices.bf16_native else "16-true"
    # As the run computed, so that losses are those that it reported and answers those it has
    # learned.
    default = result.precision or ("32-true" if devices.accelerator == HOST_KIND else half)
    # CPUs have no fast kernels of float16.
    if devices.accelerator == "cpu" and default.startswith("16"):
        default = "32-true"
    recipe = dataclasses.replace(recipe, precision=precision or default)
    return make_plan(recipe, devices, trains=False)


def open_result(result: Result, base: str | None = None, option: str = "--base") -> BaseModel:
    """Open what a result needs: its base model, a model itself, or a checkpoint without weights.

    Input and output embeddings are tied if they are in the result.

    Args:
        result: from `find_result`.
        base: where the base model is, if not where the run had it.
        option: of the command line, by which that is given.

    Raises:
        UserError: it is not there, or is not the one that the result was made from.
    """
    if result.kind == "checkpoint" and not result.trains_part:
        # Tied weights are stored once, as those of the embedding.
        has_head = stored_name(PARAMETER, HEAD) in _stored(result)
        found = with_trained_parts(open_without_weights(result.directory / BASE), result.recipe)
        found = found if result.scores is None else as_scored(found, result.scores)
        return dataclasses.replace(found, tied=not has_head)
    if result.kind == "model":
        return open_base(str(result.directory))
    return base_of(result, base, option)


def with_extra_weights(
    base: BaseModel, result: Result, directory: str | None, option: str
) -> BaseModel:
    """Add the tensors that the base model has beside the language model, to be written.

    Args:
        base: from `open_result`.
        result: that it belongs to.
        directory: where the base model is, if not where the run had it.
        option: of the command line, by which that is given.

    Raises:
        UserError: the base model is needed for that and not there, or is another one.
    """
    if base.rest or not base.architecture.rest_shapes:
        return base
    return dataclasses.replace(base, rest=base_of(result, directory, option).rest)


def base_of(result: Result, base: str | None, option: str) -> BaseModel:
    """Open the model that a result was made from.

    Args:
        result: an adapter, or a checkpoint of a fine-tune of all or part of the weights.
        base: where the base model is, if not where the run had it.
        option: of the command line, by which that is given.

    Raises:
        UserError: it is not there, or is not the one that the result was made from.
    """
    name = base or result.base
    if name is None:
        raise UserError(
            f"{result.directory / CONFIG} does not say which base model the adapter "
            f"belongs to. Try {option} PATH."
        )
    try:
        # With the implementation that the fingerprint names: others give other fingerprints.
        known = result.fingerprint
        found = open_base(name, None if known is None else implementation_of(known))
        found = with_added_tokens(found, result.added_tokens)
    except UserError as error:
        if base is not None:
            raise
        raise UserError(f"{error}\nSay where the base model is with {option} PATH.") from None
    # An adapter on other weights gives answers, only bad ones: nothing else would show the mistake.
    if result.fingerprint is not None and result.fingerprint != fingerprint(found):
        known = f" ({result.metadata.base.name})" if result.metadata else ""
        raise UserError(
            f"{name} is not the model that {result.name} was made from{known}: its weights "
            f"differ. Try {option} PATH with that model."
        )
    if (scores := result.scores) is not None:
        return as_scored(found, scores)
    if result.kind == "adapter":  # of any program: it names what is trained whole
        whole = adapter_keys(result.directory)["lora_modules_to_save"]
        return with_named_parts(found, whole or ())
    return with_trained_parts(found, result.recipe)


@dataclass(frozen=True, kw_only=True)
class OpenAdapter:
    """An adapter that was read, and the model that it adapts, which has no values yet."""

    base: BaseModel
    model: LanguageModel
    """Outlined and adapted."""
    tensors: Mapping[str, Tensor]
    """Values of what was trained, by our names."""


def open_adapter(
    result: Result,
    *,
    dtype: torch.dtype,
    compute_dtype: torch.dtype | None = None,
    quantize: Quantization | None = None,
    base: str | None = None,
    option: str = "--base",
) -> OpenAdapter:
    """Read an adapter and outline the adapted model.

    Args:
        result: an adapter.
        dtype: number format of the parameters that are not quantised.
        compute_dtype: number format of the arithmetic of quantised layers. Default: dtype.
        quantize: how the weights of the blocks are stored; None: in `dtype`.
        base: where the base model is, if not where the run had it.
        option: of the command line, by which that is given.

    Raises:
        UserError: something is missing or damaged, or the adapter belongs to another model.
    """
    found = open_result(result, base, option)
    train = Train() if result.recipe is None else result.recipe.train
    try:
        adapter = read_adapter(result.directory, found)
        if adapter.unties:
            train = dataclasses.replace(train, tie_embeddings=False)
        recipe = LoraRecipe(
            checkpoint_dir=found.name, train=train, quantize=quantize, **adapter.changes
        )
        model = outline(found, recipe, dtype, compute_dtype)
        check_shapes(adapter, model, result.directory)
    except UserError as error:
        raise UserError(f"{error}\nTo use another base model, try {option} PATH.") from None
    return OpenAdapter(base=found, model=model, tensors=adapter.tensors)


def full_weights(result: Result, base: BaseModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a model or of a full fine-tune's checkpoint, by our names.

    Args:
        result: no adapter.
        base: from `open_result`.

    Raises:
        UserError: they are missing or damaged.
    """
    if result.kind == "model":
        yield from weights(base)
        return
    stored = _stored(result)
    read = weight_reader(base) if result.trains_part else None
    try:
        for name in parameter_shapes(base):
            if read is not None and stored_name(PARAMETER, name) not in stored:
                yield name, read(name)  # frozen: the base model has it
            else:
                yield name, result_parameter(stored, name)[:]
    except CheckpointError as error:
        raise UserError(f"{result.directory} is damaged: {error}.") from None


def load_result(
    result: Result,
    *,
    device: torch.device,
    dtype: torch.dtype,
    compute_dtype: torch.dtype | None = None,
    quantize: Quantization | None = None,
    rounds: bool = False,
    base: str | None = None,
    progress: OnProgress = lambda *_: None,
) -> Loaded:
    """Read a result into memory.

    Args:
        result: from `find_result`.
        device: where it is to compute.
        dtype: number format of the parameters that are not quantised.
        compute_dtype: number format of the arithmetic of quantised layers. Default: dtype.
        quantize: how the weights of the blocks are stored; None: in `dtype`.
        rounds: whether a full fine-tune computes from the rounded numbers of its run.
        base: where the base model is, if not where the run had it.
        progress: called with (parts done, parts in all).

    Raises:
        UserError: something is missing or damaged, or the adapter belongs to another model.
    """
    if result.kind == "adapter":
        adapter = open_adapter(
            result, dtype=dtype, compute_dtype=compute_dtype, quantize=quantize, base=base
        )
        found, model, source, tensors = adapter.base, adapter.model, None, adapter.tensors
    else:
        found = open_result(result, base)
        model = outline_plain(found, dtype, compute_dtype, tied=found.tied, kind=quantize)
        if rounds and result.recipe is not None:
            round_layers(model.body, found, result.recipe, trains=False)
        model.requires_grad_(False)
        # Weights stream from the files into the model: no second copy in memory.
        source = None if result.kind == "model" else full_weights(result, found)
        tensors = {}
    fill(
        model,
        found,
        sharding=Whole(),
        device=device,
        rope_length=min(found.architecture.context_length, ROPE_LENGTH),
        # Has no effect: no parameter is drawn at random.
        seed=0,
        adapter=tensors,
        source=source,
        progress=progress,
    )
    return Loaded(model=model.eval(), base=found, prompting=prompting_of(result, found))


def _stored(result: Result) -> StoredState:
    assert result.metadata is not None
    try:
        return StoredState.in_checkpoint(result.directory, result.metadata)
    except CheckpointError as error:
        raise UserError(f"{result.directory} is damaged: {error}.") from None
