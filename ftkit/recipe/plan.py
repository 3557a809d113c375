"""The plan: a recipe resolved on given devices, by arithmetic alone.

Every rule that needs neither the model nor the data is checked here, before anything is
downloaded or started.
"""

import math
from dataclasses import dataclass

from ftkit.errors import UserError
from ftkit.recipe.checks import check_best, check_kernels, check_ranges, ignored_layers
from ftkit.recipe.devices import Devices
from ftkit.recipe.recipe import MicroBatchKey, Precision, Recipe, Train
from ftkit.recipe.strategies import (
    RULES,
    StrategyName,
    StrategyOptions,
    StrategyRules,
    resolve_strategy,
    untrainable_float16,
)
from ftkit.utils.accelerators.kinds import HOST_KIND, DeviceKind, device_kind


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A recipe resolved on given devices."""

    recipe: Recipe
    accelerator: str
    """Kind of device, as torch calls it."""
    precision: Precision
    strategy: StrategyName
    options: StrategyOptions
    devices: int
    """Ranks on this machine."""
    num_nodes: int
    """Machines."""
    micro_batch_size: int
    """Most sequences per forward pass on one rank; never more than the global batch."""
    micro_batch_tokens: int | None = None
    """Most tokens per forward pass on one rank, but for a longer sequence, which runs alone; None:
    as many as the sequences have."""
    has_flash: bool = False
    """Whether its devices have flash attention in its number format."""
    notices: tuple[str, ...] = ()
    """What a person should know before the run: one line each."""

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.devices * self.num_nodes

    @property
    def shards(self) -> int:
        """Ranks that have parts of one model, if the strategy shards parameters."""
        return self.rules.shards(self.options, self.devices, self.num_nodes)

    @property
    def rules(self) -> StrategyRules:
        """What is known of its strategy."""
        return RULES[self.strategy]

    @property
    def sharding(self) -> str:
        """What each rank has a part of, in words."""
        return self.rules.sharding(self.options)

    @property
    def kind(self) -> DeviceKind:
        """What is known of its kind of device."""
        return device_kind(self.accelerator)

    @property
    def communication(self) -> str | None:
        """The library that carries messages between ranks."""
        return self.kind.communication if self.rules.connects_ranks else None

    @property
    def micro_steps(self) -> int | None:
        """Forward and backward passes of each rank in one (full) optimizer step.

        None: as many as the tokens of its sequences need.
        """
        samples = self.recipe.train.global_batch_size
        fewest = count_micro_steps(samples, self.micro_batch_size, self.world_size)
        most = count_micro_steps(samples, 1, self.world_size)
        return fewest if self.micro_batch_tokens is None or fewest == most else None

    @property
    def accumulates(self) -> bool:
        """Whether a step may add up the gradients of several micro-steps."""
        return self.micro_steps is None or self.micro_steps > 1

    def sequences_of(self, tokens: int) -> int:
        """Sequences of so many tokens that have room in a micro-batch; at least one."""
        if self.micro_batch_tokens is None:
            return self.micro_batch_size
        return min(self.micro_batch_size, max(1, self.micro_batch_tokens // tokens))

    def most_micro_steps(self, tokens: int) -> int:
        """Those of a step, where no sequence has more tokens than these."""
        samples = self.recipe.train.global_batch_size
        return count_micro_steps(samples, self.sequences_of(tokens), self.world_size)


def count_micro_steps(samples: int, micro_batch_size: int, world_size: int) -> int:
    """Forward and backward passes that each rank makes for so many samples over all ranks."""
    return math.ceil(samples / (micro_batch_size * world_size))


def make_plan(recipe: Recipe, devices: Devices, *, trains: bool = True) -> Plan:
    """Resolve every "auto", check every rule that needs neither model nor data.

    Args:
        recipe: what is asked.
        devices: of this machine.
        trains: False: a model is only asked for answers and losses.

    Raises:
        UserError: a value out of its range, or a setting that the devices cannot run.
    """
    check_ranges(recipe)
    count = devices.count if recipe.devices == "auto" else recipe.devices
    if recipe.devices == "auto" and devices.accelerator == HOST_KIND:
        count = 1
    if devices.accelerator != HOST_KIND and count > devices.count:
        noun = device_kind(devices.accelerator).noun
        raise UserError(
            f"devices is {count}, but this machine shows {devices.count} {noun}(s). "
            f"Try --devices {devices.count} or --accelerator cpu."
        )
    nodes = 1 if recipe.num_nodes == "auto" else recipe.num_nodes
    strategy, options, precision, notices = resolve_strategy(recipe, devices, count, nodes)
    notices += _check_kind(devices, strategy)
    RULES[strategy].check(recipe, precision, devices)
    RULES[strategy].shards(options, count, nodes)
    if trains and precision == "16-true" and not RULES[strategy].keeps_masters:
        raise untrainable_float16(strategy, devices)
    notices += ignored_layers(recipe)
    check_best(recipe, nodes)
    check_kernels(recipe, devices, strategy, compiles=RULES[strategy].compiles)
    if trains and recipe.memory.offload_activations:
        notices += _check_offloading(recipe, devices)
    size, tokens = _micro_batch(recipe.train, notices)
    plan = Plan(
        recipe=recipe,
        accelerator=devices.accelerator,
        precision=precision,
        strategy=strategy,
        options=options,
        devices=count,
        num_nodes=nodes,
        micro_batch_size=size,
        micro_batch_tokens=tokens,
        has_flash=device_kind(devices.accelerator).has_flash
        and devices.bf16_native  # in the same generation of GPUs
        and precision != "32-true",
        notices=tuple(notices),
    )
    if trains and recipe.train.optimizer_in_backward:
        _check_in_backward(plan)
    return plan


KNOWN_MICRO_BATCH: dict[MicroBatchKey, int] = {"micro_batch_size": 1, "micro_batch_tokens": 4096}
"""Values to try where nothing is known of the device."""


def _micro_batch(train: Train, notices: list[str]) -> tuple[int, int | None]:
    """Most sequences and most tokens of a micro-batch; what a person should know of them is noted.

    Raises:
        UserError: they depend on what is not known here, or do not go together.
    """
    if (key := train.filled) is not None:
        raise UserError(
            f"train.{key} is auto, which depends on the free memory of a device. "
            f"Try --train.{key} {KNOWN_MICRO_BATCH[key]}, or ftkit plan with --gpu."
        )
    size, tokens, batch = train.micro_batch_size, train.micro_batch_tokens, train.global_batch_size
    assert tokens != "auto"
    if tokens is not None and train.padding_free is False:
        raise UserError(
            f"train.micro_batch_tokens is {tokens}, but train.padding_free is false: a number of "
            "tokens bounds rows without padding. Try --train.padding_free null, or "
            "--train.micro_batch_tokens null."
        )
    if size is None or size == "auto":
        return (1 if tokens is None else batch), tokens
    if size > batch:
        notices.append(
            f"train.micro_batch_size {size} is more than the global batch: {batch} is used."
        )
    if size == 1 and tokens is not None and batch > 1:
        notices.append(
            "train.micro_batch_size is 1: no micro-batch has more than one sequence, whatever "
            "train.micro_batch_tokens is. --train.micro_batch_size null lifts that bound."
        )
    return min(size, batch), tokens


def _check_kind(devices: Devices, strategy: StrategyName) -> list[str]:
    """Refuse what does not run on a kind of device; say so where nobody has tried it."""
    kind = device_kind(devices.accelerator)
    if strategy not in kind.strategies:
        known = " or ".join(kind.strategies)
        advice = f"--strategy {kind.strategies[-1]}"
        if kind.strategies == ("single",):
            advice = "--devices 1 --strategy single"
        raise UserError(
            f"strategy is {strategy}, but accelerator is {kind.name}, on which {known} alone runs. "
            f"Try {advice}, or --accelerator cpu."
        )
    if kind.tried:
        return []
    return [f"accelerator is {kind.name}: ftkit has not been tried on such devices."]


def _check_offloading(recipe: Recipe, devices: Devices) -> list[str]:
    if not recipe.memory.activation_checkpointing:
        raise UserError(
            "memory.offload_activations is true, but memory.activation_checkpointing is false: "
            "what goes to host memory are the inputs that it keeps. Try "
            "--memory.activation_checkpointing true."
        )
    on_cpu = devices.accelerator == HOST_KIND
    return ["memory.offload_activations has no effect: this is host memory."] * on_cpu


def _check_in_backward(plan: Plan) -> None:
    """Refuse to update parameters one by one where all gradients must be known before."""
    train, why = plan.recipe.train, ""
    if reason := plan.rules.needs_all_gradients(plan.options):
        why = f"{plan.strategy} {reason}"
    elif train.max_norm is not None:
        why = (
            f"train.max_norm is {train.max_norm:g}, and clipping needs the norm of all gradients "
            "before the first update. Try --train.max_norm null"
        )
    elif plan.micro_steps is None:
        why = (
            f"train.micro_batch_tokens is {plan.micro_batch_tokens}: steps may have several "
            "micro-batches, whose gradients are added up before the first update. Try "
            "--train.micro_batch_tokens null"
        )
    elif plan.micro_steps > 1:
        whole = math.ceil(train.global_batch_size / plan.world_size)
        why = (
            f"a step has {plan.micro_steps} micro-batches, whose gradients are added up before "
            f"the first update. Try --train.micro_batch_size {whole}"
        )
    elif plan.precision == "16-mixed":
        why = (
            "16-mixed leaves an update out if any gradient is infinite. Try --precision bf16-mixed"
        )
    if why:
        raise UserError(
            f"train.optimizer_in_backward is true, but {why}, or --train.optimizer_in_backward "
            "false."
        )
