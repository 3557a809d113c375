"""Recipe + Devices -> Plan: what will run, by arithmetic alone.

Every rule that needs neither the model nor the data is checked here, before anything is
downloaded or started.
"""

import math
from dataclasses import dataclass, fields
from typing import Literal, cast, get_args, get_type_hints

from ftkit.duration import parse_duration
from ftkit.errors import UserError
from ftkit.recipe import LAYER_SWITCHES, LoraRecipe, Precision, Recipe

Accelerator = Literal["cpu", "cuda"]
Strategy = Literal["single", "ddp", "fsdp", "deepspeed"]

STRATEGIES = ("auto", "single", "ddp", "fsdp", "deepspeed")


WHOLE_NORM_OPTIMIZERS = ("LAMB", "LAMB8bit", "LAMB32bit", "LARS", "LARS8bit", "LARS32bit")
"""Optimizers of bitsandbytes whose update of a number depends on its whole parameter."""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """What one machine offers."""

    accelerator: Accelerator
    count: int
    """Visible GPUs, or the CPU's logical cores."""
    names: tuple[str, ...] = ()
    """Product name of each GPU."""
    memory_bytes: tuple[int, ...] = ()
    """What CUDA offers to programs on each GPU; empty: not known."""
    bf16_native: bool = True
    """Whether bfloat16 runs in hardware (CUDA compute capability 8.0 and later; CPUs count)."""
    deepspeed: bool = True
    """Whether DeepSpeed is installed."""


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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A recipe resolved on given devices."""

    recipe: Recipe
    accelerator: Accelerator
    precision: Precision
    strategy: Strategy
    options: StrategyOptions
    devices: int
    """Ranks on this machine."""
    micro_batch_size: int
    """Sequences per forward pass on one rank; never more than the global batch."""
    notices: tuple[str, ...] = ()
    """What a person should know before the run: one line each."""

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.devices * self.recipe.num_nodes

    @property
    def sharding(self) -> str:
        """What each rank has a part of, in words."""
        options = self.options
        if isinstance(options, FsdpOptions):
            where = ", in host memory" if options.cpu_offload else ""
            return f"{options.sharding}: parameters, gradients, optimizer state{where}"
        if isinstance(options, DeepSpeedOptions):
            parts = ("optimizer state", "gradients", "parameters")[: options.stage]
            hosted = [
                name
                for name, offloaded in (
                    ("optimizer state", options.offload_optimizer),
                    ("parameters", options.offload_parameters and options.stage == 3),
                )
                if offloaded
            ]
            where = f"; in host memory: {', '.join(hosted)}" if hosted else ""
            return f"ZeRO-{options.stage}: {', '.join(parts)}{where}"
        return "nothing"

    @property
    def communication(self) -> Literal["nccl", "gloo"] | None:
        """The library that carries messages between ranks."""
        if self.strategy == "single":
            return None
        return "nccl" if self.accelerator == "cuda" else "gloo"

    @property
    def micro_steps(self) -> int:
        """Forward and backward passes of each rank in one (full) optimizer step."""
        per_pass = self.micro_batch_size * self.world_size
        return math.ceil(self.recipe.train.global_batch_size / per_pass)


def make_plan(recipe: Recipe, devices: Devices, *, trains: bool = True) -> Plan:
    """Resolve every "auto", check every rule that needs neither model nor data.

    Args:
        recipe: what is asked.
        devices: of this machine.
        trains: False: a model is only asked for answers and losses.

    Raises:
        UserError: a value out of its range, or a setting that the devices cannot run.
    """
    _check_ranges(recipe)
    count = devices.count if recipe.devices == "auto" else recipe.devices
    if recipe.devices == "auto" and devices.accelerator == "cpu":
        count = 1
    if devices.accelerator == "cuda" and count > devices.count:
        raise UserError(
            f"devices is {count}, but this machine shows {devices.count} GPU(s). "
            f"Try --devices {devices.count} or --accelerator cpu."
        )
    strategy, options, precision, notices = _resolve(recipe, devices, count)
    _check_supported(recipe, strategy, precision, devices)
    if trains and precision == "16-true" and strategy != "deepspeed":
        raise _untrainable_float16(strategy, devices)
    notices += _ignored_layers(recipe)
    train = recipe.train
    if train.micro_batch_size == "auto":
        raise UserError(
            "train.micro_batch_size is auto, which hangs on the free memory of a device. Try "
            "--train.micro_batch_size 1, or ftkit plan with --gpu."
        )
    micro_batch_size = min(train.micro_batch_size, train.global_batch_size)
    if micro_batch_size < train.micro_batch_size:
        notices.append(
            f"train.micro_batch_size {train.micro_batch_size} is more than the global batch: "
            f"{micro_batch_size} is used."
        )
    return Plan(
        recipe=recipe,
        accelerator=devices.accelerator,
        precision=precision,
        strategy=strategy,
        options=options,
        devices=count,
        micro_batch_size=micro_batch_size,
        notices=tuple(notices),
    )


def _resolve(
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


def _check_supported(
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


def _untrainable_float16(strategy: Strategy, devices: Devices) -> UserError:
    better = "bf16-true"
    if not devices.bf16_native:
        better = "32-true" if strategy == "fsdp" else "16-mixed"
    return UserError(
        f"precision is 16-true, but {strategy} would update weights in float16, in which small "
        f"gradients and AdamW's second moments become zero. Try --precision {better}."
    )


def _check_ranges(recipe: Recipe) -> None:
    train, evaluation = recipe.train, recipe.eval
    for key, value, least in (
        ("train.global_batch_size", train.global_batch_size, 1),
        ("train.micro_batch_size", train.micro_batch_size, 1),
        ("train.epochs", train.epochs, 1),
        ("train.max_steps", train.max_steps, 1),
        ("train.max_seq_length", train.max_seq_length, 2),
        ("train.lr_warmup_steps", train.lr_warmup_steps, 0),
        ("train.save_interval", train.save_interval, 1),
        ("train.log_interval", train.log_interval, 1),
        ("checkpoint.keep_last", recipe.checkpoint.keep_last, 1),
        ("checkpoint.keep_every", recipe.checkpoint.keep_every, 1),
        ("checkpoint.keep_best", recipe.checkpoint.keep_best, 0),
        ("eval.interval", evaluation.interval, 0),
        ("eval.max_iters", evaluation.max_iters, 1),
        ("eval.max_new_tokens", evaluation.max_new_tokens, 0),
        ("eval.exact_match", evaluation.exact_match, 0),
        ("eval.evaluate_example", evaluation.evaluate_example, 0),
        ("devices", recipe.devices, 1),
        ("num_nodes", recipe.num_nodes, 1),
        ("seed", recipe.seed, 0),
    ):
        if isinstance(value, int) and value < least:
            raise UserError(f"{key} is {value}, but must be at least {least}. Try --{key} {least}.")
    for key, number in (("train.max_time", train.max_time), ("train.max_norm", train.max_norm)):
        if number is not None and not number > 0:
            raise UserError(
                f"{key} is {number:g}, but must be above 0. Try --{key} null for no limit."
            )
    if recipe.checkpoint.save_every is not None:
        parse_duration(recipe.checkpoint.save_every)
    if recipe.seed >= 2**63:
        raise UserError(f"seed is {recipe.seed}, but must be below 2**63. Try --seed 1337.")
    if not train.min_lr >= 0:
        raise UserError(
            f"train.min_lr is {train.min_lr:g}, but must not be negative. Try --train.min_lr 0."
        )
    fraction = train.lr_warmup_fraction
    if fraction is not None and not 0 <= fraction <= 1:
        raise UserError(
            f"train.lr_warmup_fraction is {fraction:g}, but must lie between 0 and 1. "
            "Try --train.lr_warmup_fraction 0.1."
        )
    if train.epochs is None and train.max_steps is None:
        raise UserError(
            "train.epochs and train.max_steps are both empty: how long to train? "
            "Try --train.epochs 1."
        )
    if train.max_tokens is not None:
        raise UserError(
            f"train.max_tokens is {train.max_tokens}, but fine-tuning counts epochs or steps. "
            "Try --train.max_tokens null --train.max_steps 100."
        )
    example = evaluation.evaluate_example
    if isinstance(example, str) and example not in ("first", "random"):
        raise UserError(
            f'eval.evaluate_example is {example!r}, but must be "first", "random" or the index of '
            "a validation record. Try --eval.evaluate_example first."
        )
    if isinstance(recipe, LoraRecipe):
        _check_lora(recipe)


def _ignored_layers(recipe: Recipe) -> list[str]:
    """What chooses layers and is not looked at, because lora_targets does."""
    if not isinstance(recipe, LoraRecipe) or recipe.lora_targets is None:
        return []
    defaults = {field.name: field.default for field in fields(recipe)}
    ignored = [key for key in LAYER_SWITCHES if getattr(recipe, key) != defaults[key]]
    return [f"lora_targets chooses the layers: {', '.join(ignored)} has no effect."] * bool(ignored)


def _check_lora(recipe: LoraRecipe) -> None:
    if recipe.lora_r < 1:
        raise UserError(f"lora_r is {recipe.lora_r}, but must be at least 1. Try --lora_r 8.")
    if not recipe.lora_alpha > 0:
        raise UserError(
            f"lora_alpha is {recipe.lora_alpha:g}, but must be above 0. Try --lora_alpha 16."
        )
    if not 0 <= recipe.lora_dropout < 1:
        raise UserError(
            f"lora_dropout is {recipe.lora_dropout:g}, but must lie in [0, 1). "
            "Try --lora_dropout 0.05."
        )
    ratio = recipe.lora_plus_ratio
    if ratio is not None and not (0 < ratio < math.inf):
        raise UserError(
            f"lora_plus_ratio is {ratio:g}, but must be above 0. Try --lora_plus_ratio 16."
        )
    if recipe.lora_variant == "dora" and recipe.lora_init != "default":
        raise UserError(
            f"lora_init is {recipe.lora_init}, but lora_variant dora starts from the lengths of "
            "the base model's own rows. Try --lora_init default."
        )
    if recipe.lora_targets is not None:
        if not recipe.lora_targets:
            raise UserError(
                "lora_targets is empty: no layer is adapted. Try --lora_targets '[q_proj, v_proj]'."
            )
        return
    if not any(getattr(recipe, layer) for layer in LAYER_SWITCHES):
        raise UserError(
            "No layer is adapted: every one of lora_query, lora_key, lora_value, lora_projection, "
            "lora_mlp and lora_head is false. Try --lora_query true --lora_value true."
        )
