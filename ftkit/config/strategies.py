"""Strategies and precisions: their names and options, which is chosen, what each cannot run."""

from dataclasses import dataclass
from typing import Literal, cast, get_args, get_type_hints

from ftkit.config.devices import Devices
from ftkit.config.recipe import LoraRecipe, Precision, Recipe
from ftkit.errors import UserError

Strategy = Literal["single", "ddp", "fsdp", "deepspeed"]

STRATEGIES = ("auto", "single", "ddp", "fsdp", "deepspeed")


WHOLE_NORM_OPTIMIZERS = ("LAMB", "LAMB8bit", "LAMB32bit", "LARS", "LARS8bit", "LARS32bit")
"""Optimizers of bitsandbytes whose update of a number depends on its whole parameter."""


@dataclass(frozen=True, kw_only=True)
class FsdpOptions:
    """Options of `strategy: fsdp`."""

    sharding: Literal["FULL_SHARD", "SHARD_GRAD_OP"] = "FULL_SHARD"
    """FULL_SHARD frees the gathered parameters of a block after its forward pass; SHARD_GRAD_OP
    keeps them until its backward pass."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""


@dataclass(frozen=True, kw_only=True)
class DeepSpeedOptions:
    """Options of `strategy: deepspeed`."""

    stage: Literal[1, 2, 3] = 3
    """What is sharded: 1 the optimizer state, 2 gradients too, 3 parameters too."""
    offload_optimizer: bool = True
    """Keep the optimizer state in host memory and update there."""
    offload_parameters: bool = False
    """Keep the parameters in host memory (stage 3)."""


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """Of strategies that take none."""


StrategyOptions = FsdpOptions | DeepSpeedOptions | NoOptions

OPTIONS_OF: dict[Strategy, type[StrategyOptions]] = {
    "single": NoOptions,
    "ddp": NoOptions,
    "fsdp": FsdpOptions,
    "deepspeed": DeepSpeedOptions,
}


def resolve_strategy(
    recipe: Recipe, devices: Devices, count: int
) -> tuple[Strategy, StrategyOptions, Precision, list[str]]:
    """Strategy, its options and the precision, and what to tell of the choice.

    What is auto follows what is given. Where nothing is, and GPUs compute bfloat16 in software
    only, FSDP would have to do without 16-bit arithmetic (it has no loss scaling here), which is
    what makes such GPUs fast: DeepSpeed takes its place, if it is there and can.
    """
    strategy, precision = _strategy(recipe, count), recipe.precision
    options = _options(recipe, strategy)
    if precision is None:
        precision = "bf16-mixed" if devices.bf16_native else "16-mixed"
    notices = _check_precision(precision, strategy, devices)
    if strategy != "fsdp" or precision != "16-mixed":
        return strategy, options, precision, notices
    why = "fsdp has no loss scaling for 16-mixed"
    if not devices.bf16_native:
        why = f"{_name(devices)} has no bfloat16 hardware, and {why}"
    suits_deepspeed = _suits_deepspeed(recipe)
    nothing_given = recipe.strategy["class_path"] == "auto" and not recipe.strategy["init_args"]
    if nothing_given and devices.deepspeed and suits_deepspeed:
        notices.append(f"{why}: deepspeed with 16-mixed is used.")
        # As with fsdp, everything is shared out among the GPUs, and nothing goes to the host.
        return "deepspeed", DeepSpeedOptions(offload_optimizer=False), precision, notices
    if recipe.precision is None:
        precision = "32-true"
        faster = "--strategy ddp, if the model fits on each GPU"
        if suits_deepspeed:
            faster = "--strategy deepspeed" + " with DeepSpeed installed" * (not devices.deepspeed)
        notices.append(
            f"{why}: fsdp with 32-true is used, which is several times slower. Try {faster}."
        )
    return strategy, options, precision, notices


def _name(devices: Devices) -> str:
    return devices.names[0] if devices.names else "This GPU"


def _suits_deepspeed(recipe: Recipe) -> bool:
    """Whether DeepSpeed can update with the recipe's optimizer."""
    return recipe.optimizer["class_path"].rpartition(".")[0] != "bitsandbytes.optim"


def _check_precision(precision: Precision, strategy: Strategy, devices: Devices) -> list[str]:
    """Refuse what the devices cannot compute, and tell what is slow there."""
    if precision.startswith("16") and devices.accelerator == "cpu":
        raise UserError(
            f"precision is {precision}, but float16 training needs a CUDA GPU: CPUs lack its fast "
            f"kernels and its range underflows. Try --precision {precision.replace('16', 'bf16')}."
        )
    if precision.startswith("bf16") and not devices.bf16_native:
        others = "32-true" if strategy == "fsdp" else "16-mixed or 32-true"
        notice = (
            f"{_name(devices)} has no bfloat16 hardware (compute capability below 8.0): it is "
            f"emulated and slow. Try --precision {others}."
        )
        return [notice]
    return []


def _strategy(recipe: Recipe, count: int) -> Strategy:
    name = recipe.strategy["class_path"]
    world_size = count * recipe.num_nodes
    if name == "auto":
        if world_size == 1:
            return "single"
        return "ddp" if recipe.method == "lora" else "fsdp"
    if name not in STRATEGIES:
        raise UserError(
            f"strategy is {name!r}, but must be one of: {', '.join(STRATEGIES)}. "
            "Try --strategy auto."
        )
    if name == "single" and world_size > 1:
        raise UserError(
            f"strategy is single, but devices x num_nodes is {world_size}. "
            "Try --strategy auto or --devices 1."
        )
    return cast(Strategy, name)


def _options(recipe: Recipe, strategy: Strategy) -> StrategyOptions:
    """The strategy's options, checked against the fields of its dataclass."""
    options_class = OPTIONS_OF[strategy]
    kinds = get_type_hints(options_class)
    given = recipe.strategy["init_args"]
    for key, value in given.items():
        if key not in kinds:
            known = f"It takes {', '.join(kinds)}." if kinds else "It takes none; remove it."
            raise UserError(f"strategy.{key} is not an option of {strategy}. {known}")
        choices = get_args(kinds[key]) or (True, False)
        if value not in choices or isinstance(value, bool) != isinstance(choices[0], bool):
            words = ["true", "false"] if kinds[key] is bool else [str(c) for c in choices]
            raise UserError(
                f"strategy.{key} is {value!r}, but must be one of: {', '.join(words)}. "
                f"Try --strategy.{key} {words[0]}."
            )
    return options_class(**given)


def check_supported(
    recipe: Recipe, strategy: Strategy, precision: Precision, devices: Devices
) -> None:
    """Refuse what a strategy cannot run, with what to use instead."""
    optimizer = recipe.optimizer["class_path"]
    package = optimizer.rpartition(".")[0]
    if strategy == "fsdp" and precision == "16-mixed":
        other = "bf16-mixed" if devices.bf16_native else "32-true"
        scaling = "deepspeed" if devices.deepspeed and _suits_deepspeed(recipe) else "ddp"
        raise UserError(
            "precision is 16-mixed, but fsdp has no loss scaling here. "
            f"Try --precision {other}, or --strategy {scaling}."
        )
    if strategy == "deepspeed" and not _suits_deepspeed(recipe):
        raise UserError(
            f"optimizer is {optimizer}, but DeepSpeed keeps its own optimizer state. "
            "Try --optimizer AdamW, or --strategy fsdp."
        )
    if strategy != "deepspeed" and package == "deepspeed.ops.adam":
        raise UserError(
            f"optimizer is {optimizer}, but the strategy is {strategy}. "
            "Try --optimizer AdamW, or --strategy deepspeed."
        )
    whole_norm = [f"bitsandbytes.optim.{name}" for name in WHOLE_NORM_OPTIMIZERS]
    if strategy == "fsdp" and optimizer in whole_norm:
        raise UserError(
            f"optimizer is {optimizer}, but it scales by the norm of whole parameters, of which "
            "fsdp leaves a rank some rows. Try --optimizer bitsandbytes.optim.AdamW8bit, or "
            "--strategy ddp."
        )
    quantize = recipe.quantize if isinstance(recipe, LoraRecipe) else None
    if quantize == "bnb.int8" and strategy in ("fsdp", "deepspeed"):
        raise UserError(
            f"quantize is bnb.int8, but {strategy} shards the base model and supports the 4-bit "
            "kinds alone. Try --quantize bnb.nf4-dq, or --strategy ddp."
        )


def untrainable_float16(strategy: Strategy, devices: Devices) -> UserError:
    """What is said of 16-true, in which training goes wrong, and what to use instead."""
    better = "bf16-true"
    if not devices.bf16_native:
        better = "32-true" if strategy == "fsdp" else "16-mixed"
    return UserError(
        f"precision is 16-true, but {strategy} would update weights in float16, in which small "
        f"gradients and AdamW's second moments become zero. Try --precision {better}."
    )
