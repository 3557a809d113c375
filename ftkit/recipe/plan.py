"""The plan: a recipe resolved on given devices, and every rule that needs no model and no data.

These rules are checked before anything is downloaded or started.
"""

import importlib.util
import math
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from importlib import metadata

from ftkit.errors import UserError
from ftkit.recipe.devices import Devices
from ftkit.recipe.objectives import check_objective, model_beside, objective_rules
from ftkit.recipe.optimizers import BITSANDBYTES, TORCHAO, check_optimizer
from ftkit.recipe.peft_types import check_peft
from ftkit.recipe.recipe import (
    ALL_LINEAR,
    LAYER_SWITCHES,
    LOGGER_PACKAGES,
    PEFT_DEFAULT,
    Eval,
    Kernels,
    LoggerName,
    LoraRecipe,
    Memory,
    MicroBatchKey,
    Precision,
    Recipe,
    Train,
)
from ftkit.recipe.strategies import (
    RULES,
    StrategyName,
    StrategyOptions,
    StrategyRules,
    resolve_strategy,
    untrainable_float16,
)
from ftkit.utils.accelerators.kinds import HOST_KIND, USUAL_KIND, DeviceKind, device_kind
from ftkit.utils.console.formatting import parse_duration
from ftkit.utils.remote.urls import display_path, url_of

LIGER = "liger-kernel>=0.8.5,<0.9"
"""Liger-Kernel that ftkit knows: its loss takes a private kernel, whose arguments may change."""


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
    """Notices to print before the run, one line each."""

    @property
    def world_size(self) -> int:
        """Number of ranks on all machines."""
        return self.devices * self.num_nodes

    @property
    def shards(self) -> int:
        """Number of ranks over which the parameters of one model are sharded."""
        return self.rules.shards(self.options, self.devices, self.num_nodes)

    @property
    def shards_beside(self) -> int:
        """Number of ranks over which a frozen model beside the trained one is sharded."""
        if self.shards > 1 or not self.recipe.memory.shard_model_beside:
            return self.shards
        return 1 if model_beside(self.recipe) is None else self.world_size

    @property
    def largest_micro_batch(self) -> int:
        """Samples of a micro-batch at most, where all have the same length."""
        if self.kind.compiles_shapes:
            return self.rows
        if self.recipe.train.global_batch_tokens is not None:
            return self.micro_batch_size
        # The samples of a step are spread evenly over its ranks.
        of_rank = math.ceil(self.recipe.train.global_batch_size / self.world_size)
        return min(self.micro_batch_size, of_rank)

    @property
    def rows(self) -> int:
        """Samples of every micro-batch, fillers included, where all have the same shape."""
        samples = self.recipe.train.global_batch_size
        if self.recipe.train.global_batch_tokens is not None:
            return self.micro_batch_size
        # In as many micro-steps, with the fewest fillers.
        places = count_micro_steps(samples, self.micro_batch_size, self.world_size)
        return math.ceil(samples / (places * self.world_size))

    @property
    def rules(self) -> StrategyRules:
        """Rules of its strategy."""
        return RULES[self.strategy]

    @property
    def sharding(self) -> str:
        """What is sharded, in words."""
        words = self.rules.sharding(self.options)
        if self.shards_beside == self.shards:
            return words
        beside = model_beside(self.recipe)
        assert beside is not None
        weights = f"weights of the {beside.key}"
        return weights if words == "nothing" else f"{words}; {weights}"

    @property
    def kind(self) -> DeviceKind:
        """Facts about its kind of device."""
        return device_kind(self.accelerator)

    @property
    def communication(self) -> str | None:
        """The library that carries messages between ranks."""
        return self.kind.communication if self.rules.connects_ranks else None

    @property
    def micro_steps(self) -> int | None:
        """Forward and backward passes of each rank in one full optimizer step.

        None: depends on the tokens of its sequences.
        """
        if self.recipe.train.global_batch_tokens is not None:
            return None
        samples = self.recipe.train.global_batch_size
        fewest = count_micro_steps(samples, self.micro_batch_size, self.world_size)
        most = count_micro_steps(samples, 1, self.world_size)
        return fewest if self.micro_batch_tokens is None or fewest == most else None

    @property
    def accumulates(self) -> bool:
        """Whether a step may add up the gradients of several micro-steps."""
        return self.micro_steps is None or self.micro_steps > 1

    def sequences_of(self, tokens: int) -> int:
        """Number of sequences of this many tokens that fit into a micro-batch; at least one."""
        if self.micro_batch_tokens is None:
            return self.micro_batch_size
        return min(self.micro_batch_size, max(1, self.micro_batch_tokens // tokens))

    def padded_samples(self, positions: int) -> int:
        """Most samples of a micro-batch that is padded to sequences of this many positions."""
        return self.sequences_of(positions * objective_rules(self.recipe.objective).sequences)

    def most_micro_steps(self, tokens: int) -> int:
        """Micro-steps of a step, if every sequence has this many tokens; fewer if they are shorter.

        With train.global_batch_tokens shorter sequences are more of them, and may need more.
        """
        of_step = self.recipe.train.global_batch_tokens
        samples = self.recipe.train.global_batch_size
        if of_step is not None:
            samples = max(1, of_step // tokens)
        return count_micro_steps(samples, self.sequences_of(tokens), self.world_size)


def count_micro_steps(samples: int, micro_batch_size: int, world_size: int) -> int:
    """Forward and backward passes of each rank for this many samples over all ranks."""
    return math.ceil(samples / (micro_batch_size * world_size))


def make_plan(recipe: Recipe, devices: Devices, *, trains: bool = True) -> Plan:
    """Resolve every "auto", check every rule that needs neither model nor data.

    Args:
        recipe: the recipe.
        devices: of this machine.
        trains: False: only answers and losses are computed.

    Raises:
        UserError: a value out of its range, or a setting that the devices cannot run.
    """
    check_ranges(recipe)
    if trains:  # answers of a result need no plugin
        check_objective(recipe)
    count = devices.count if recipe.devices == "auto" else recipe.devices
    # One process on CPUs: torch uses all of their cores in it.
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
    notices += [devices.notice] * bool(devices.notice)
    notices += _check_kind(devices, strategy, count, nodes, trains=trains)
    RULES[strategy].check(recipe, precision, devices)
    kind = device_kind(devices.accelerator)
    if trains:
        check_optimizer(recipe, kind, strategy, RULES[strategy].shares)
    shards = RULES[strategy].shards(options, count, nodes)
    if trains and precision == "16-true" and not RULES[strategy].keeps_masters:
        raise untrainable_float16(strategy, devices)
    notices += _ignored_layers(recipe)
    _check_best(recipe, nodes)
    _check_kernels(recipe, devices.accelerator, strategy)
    _check_rounding(recipe, precision, devices, strategy)
    if trains and recipe.memory.offload_activations:
        notices += _check_offloading(recipe.memory, devices.accelerator)
    if trains and recipe.memory.shard_model_beside:
        notices += _check_sharding_beside(recipe, strategy, shards, count * nodes)
    if trains:
        check_shapes(recipe.train, kind)
    size, tokens = _micro_batch(recipe.train, notices)
    if kind.compiles_shapes and tokens is not None:  # of a result, which was trained elsewhere
        size, tokens = size if isinstance(recipe.train.micro_batch_size, int) else 1, None
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
    """Most sequences and most tokens of a micro-batch; adds notices about them."""
    if (key := train.auto_key) is not None:
        raise UserError(
            f"train.{key} is auto, which depends on the free memory of a device. "
            f"Try --train.{key} {KNOWN_MICRO_BATCH[key]}, or ftkit plan with --gpu."
        )
    size, tokens, batch = train.micro_batch_size, train.micro_batch_tokens, train.global_batch_size
    if train.global_batch_tokens is not None:
        batch = train.global_batch_tokens  # a sample has one token at least
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


def _check_kind(
    devices: Devices, strategy: StrategyName, count: int, nodes: int, *, trains: bool
) -> list[str]:
    """Refuse strategies that a kind of device does not run; a notice for untested kinds."""
    kind = device_kind(devices.accelerator)
    if kind.strategies == ("single",) and count * nodes > 1:
        machines = f" and num_nodes is {nodes}" if nodes > 1 else ""
        one = " --num_nodes 1" if nodes > 1 else ""
        raise UserError(
            f"devices is {count}{machines}, but accelerator is {kind.name}, of which ftkit only "
            f"uses one {kind.noun} in a run. Try --devices 1{one}, or --accelerator cpu."
        )
    if strategy not in kind.strategies:
        known = " or ".join(kind.strategies)
        advice = f"--strategy {kind.strategies[-1]}"
        if kind.strategies == ("single",):
            advice = "--devices 1 --strategy single"
        raise UserError(
            f"strategy is {strategy}, but accelerator is {kind.name}, which only supports {known}. "
            f"Try {advice}, or --accelerator cpu."
        )
    if kind.tried:
        return []
    said = "ftkit has not been tested on such devices"
    if kind.rehearsed_on:
        said = f"ftkit was rehearsed on {kind.rehearsed_on}, and no {kind.noun} has run it yet"
    notices = [f"accelerator is {kind.name}: {said}."]
    if trains and kind.unpredicted_memory:
        notices.append(f"Memory of a {kind.noun} is predicted without {kind.unpredicted_memory}.")
    return notices


def check_shapes(train: Train, kind: DeviceKind) -> None:
    """Refuse rows without padding on devices that compile programs for each shape.

    Raises:
        UserError: the recipe asks for them.
    """
    if not kind.compiles_shapes:
        return
    for key, value, instead in (
        ("micro_batch_tokens", train.micro_batch_tokens, "null --train.micro_batch_size 4"),
        ("padding_free", train.padding_free or None, "null"),
    ):
        if value is not None:
            shown = str(value).lower()
            raise UserError(
                f"train.{key} is {shown}, but accelerator is {kind.name}, which compiles programs "
                "for every new shape: rows without padding have another one in each micro-batch. "
                f"Try --train.{key} {instead}, which pads them to a few lengths."
            )


def _check_offloading(memory: Memory, accelerator: str) -> list[str]:
    if not memory.activation_checkpointing:
        raise UserError(
            "memory.offload_activations is true, but memory.activation_checkpointing is false: it "
            "is the inputs kept by it that are offloaded. Try --memory.activation_checkpointing "
            "true."
        )
    on_cpu = accelerator == HOST_KIND
    return ["memory.offload_activations has no effect: this is host memory."] * on_cpu


def _check_sharding_beside(
    recipe: Recipe, strategy: StrategyName, shards: int, world_size: int
) -> list[str]:
    """Refuse a format that cannot be sharded; a notice where there is nothing more to shard."""
    why = ""
    if model_beside(recipe) is None:
        why = "no frozen model computes beside the trained one"
    elif world_size == 1:
        why = "there is one rank"
    elif shards > 1:
        why = f"{strategy} shards that model as it does the trained one"
    if why:  # not refused: a recipe may come from a machine where it had one
        return [f"memory.shard_model_beside has no effect: {why}."]
    if isinstance(recipe, LoraRecipe) and recipe.quantize == "bnb.int8":
        raise UserError(
            "memory.shard_model_beside is true, but quantize is bnb.int8: only the 4-bit kinds can "
            "be sharded. Try --quantize bnb.nf4-dq, or --memory.shard_model_beside false."
        )
    return []


def _check_in_backward(plan: Plan) -> None:
    """Refuse updates in the backward pass where the update needs all gradients."""
    train, why = plan.recipe.train, ""
    if reason := plan.rules.needs_all_gradients(plan.options):
        why = f"{plan.strategy} {reason}"
    elif train.max_norm is not None:
        why = (
            f"train.max_norm is {train.max_norm:g}, and clipping needs the norm of all gradients "
            "before the first update. Try --train.max_norm null"
        )
    elif plan.micro_steps is None:
        is_whole = train.global_batch_tokens is not None
        key = "global_batch_tokens" if is_whole else "micro_batch_tokens"
        why = (
            f"train.{key} is {getattr(train, key)}: steps may have several micro-batches, whose "
            f"gradients are added up before the first update. Try --train.{key} null"
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


def check_ranges(recipe: Recipe) -> None:
    """Refuse values out of their ranges, with a value that works."""
    train, evaluation = recipe.train, recipe.eval
    for key, value, least in (
        ("train.global_batch_size", train.global_batch_size, 1),
        ("train.global_batch_tokens", train.global_batch_tokens, 1),
        ("train.micro_batch_size", train.micro_batch_size, 1),
        ("train.micro_batch_tokens", train.micro_batch_tokens, 1),
        ("train.epochs", train.epochs, 1),
        ("train.max_steps", train.max_steps, 1),
        ("train.max_seq_length", train.max_seq_length, 2),
        ("train.lr_warmup_steps", train.lr_warmup_steps, 0),
        ("train.save_interval", train.save_interval, 1),
        ("train.log_interval", train.log_interval, 1),
        ("checkpoint.keep_last", recipe.checkpoint.keep_last, 1),
        *_intervals(recipe.checkpoint.keep_every),
        ("checkpoint.max_staged_bytes", recipe.checkpoint.max_staged_bytes, 2**20),
        ("qat.group_size", recipe.qat.group_size, 2),
        ("checkpoint.keep_best", recipe.checkpoint.keep_best, 0),
        ("memory.activation_checkpointing", recipe.memory.activation_checkpointing or 1, 1),
        ("eval.interval", evaluation.interval, 0),
        ("eval.patience", evaluation.patience, 1),
        ("eval.max_iters", evaluation.max_iters, 1),
        ("eval.max_new_tokens", evaluation.max_new_tokens, 0),
        *((f"eval.{name}", records, 0) for name, records in evaluation.metrics.items()),
        ("eval.limit", evaluation.limit, 1),
        ("eval.num_fewshot", evaluation.num_fewshot, 0),
        ("eval.evaluate_example", evaluation.evaluate_example, 0),
        ("devices", recipe.devices, 1),
        ("num_nodes", recipe.num_nodes, 1),
        ("seed", recipe.seed, 0),
    ):
        if isinstance(value, int) and value < least:
            raise UserError(f"{key} is {value}, but must be at least {least}. Try --{key} {least}.")
    _check_numbers(recipe)
    if recipe.checkpoint.save_every not in (None, "auto"):
        parse_duration(recipe.checkpoint.save_every)
    parse_duration(recipe.checkpoint.time_between_losses, "checkpoint.time_between_losses")
    if recipe.seed >= 2**63:
        raise UserError(f"seed is {recipe.seed}, but must be below 2**63. Try --seed 1337.")
    rate = recipe.optimizer["init_args"].get("lr")
    if rate is not None and (not isinstance(rate, int | float) or not 0 <= rate < math.inf):
        raise UserError(
            f"optimizer.lr is {rate!r}, but must be a number of at least 0. "
            "Try --optimizer.lr 2e-4."
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
    is_validated = evaluation.interval or evaluation.interval_epochs
    if evaluation.patience is not None and not is_validated:
        raise UserError(
            f"eval.patience is {evaluation.patience}, but eval.interval is 0: there is no "
            "validation during training. Try --eval.interval 100, or --eval.patience null."
        )
    if recipe.checkpoint.result == "best" and not recipe.checkpoint.save:
        raise UserError(
            "checkpoint.result is best, but checkpoint.save is false: no checkpoint is kept. "
            "Try --checkpoint.save true, or --checkpoint.result last."
        )
    for name, records in evaluation.metrics.items():
        # Exact match ends an answer with its first mistake.
        if name != "exact_match" and records and not evaluation.max_new_tokens:
            raise UserError(
                f"eval.{name} is {records}, but eval.max_new_tokens is "
                f"{'empty' if evaluation.max_new_tokens is None else 0}: how long may answers be? "
                "Try --eval.max_new_tokens 100."
            )
    example = evaluation.evaluate_example
    if isinstance(example, str) and example not in ("first", "random"):
        raise UserError(
            f'eval.evaluate_example is {example!r}, but must be "first", "random" or the index of '
            "a validation record. Try --eval.evaluate_example first."
        )
    if recipe.train.from_scratch:
        _check_from_scratch(recipe)
    if isinstance(recipe, LoraRecipe):
        _check_lora(recipe)


def _check_from_scratch(recipe: Recipe) -> None:
    """Refuse settings for which the weights of the base model are needed."""
    train, rules = recipe.train, objective_rules(recipe.objective)
    why = None
    if isinstance(recipe, LoraRecipe):
        why = "an adapter is trained beside given weights. Try ftkit finetune_full, or"
    elif train.trains_part:
        key = "only" if train.only is not None else "freeze"
        why = f"train.{key} keeps given weights as they are. Try --train.{key} null, or"
    elif rules.scores or (rules.needs_reference and recipe.reference is None):
        name = recipe.objective["class_path"]
        why = f"objective {name} begins at a language model. Try --objective sft, or"
    if why is not None:
        raise UserError(f"train.from_scratch is true, but {why} --train.from_scratch false.")


def _check_numbers(recipe: Recipe) -> None:
    """Refuse numbers out of their ranges; NaN is in none."""
    train = recipe.train
    ranges: list[tuple[str, float | None, Callable[[float], bool], str, str]] = [
        ("train.max_time", train.max_time, _above_0, "be above 0", "null for no limit"),
        ("train.max_norm", train.max_norm, _above_0, "be above 0", "null for no limit"),
        ("train.min_lr", train.min_lr, _at_least_0, "be a number of at least 0", "0"),
        (
            "train.lr_decay_fraction",
            train.lr_decay_fraction,
            lambda x: 0 < x <= 1,
            "be above 0 and at most 1",
            "0.1",
        ),
        ("train.label_smoothing", train.label_smoothing, _share, "lie in [0, 1)", "0.1"),
        (
            "train.neftune_noise_alpha",
            train.neftune_noise_alpha,
            lambda x: 0 < x < math.inf,
            "be above 0",
            "5, or null for no noise",
        ),
        (
            "train.ema_decay",
            train.ema_decay,
            lambda x: 0 < x < 1,
            "lie between 0 and 1",
            "0.999, or null for no average",
        ),
        (
            "train.lr_warmup_fraction",
            train.lr_warmup_fraction,
            lambda x: 0 <= x <= 1,
            "lie between 0 and 1",
            "0.1",
        ),
        (
            "train.lr_warmup_run_fraction",
            train.lr_warmup_run_fraction,
            lambda x: 0 <= x <= 1,
            "lie between 0 and 1",
            "0.1",
        ),
        *(
            (key, share, lambda x: 0 < x < math.inf, "be above 0", "0.25")
            for key, share in (
                ("train.save_interval_epochs", train.save_interval_epochs),
                ("eval.interval_epochs", recipe.eval.interval_epochs),
            )
        ),
        (
            "router_aux_loss_coef",
            None if recipe.router_aux_loss_coef == "model" else recipe.router_aux_loss_coef,
            _at_least_0,
            "be finite and not negative",
            "0.001",
        ),
    ]
    if isinstance(recipe, LoraRecipe):
        ranges += [
            ("lora_alpha", recipe.lora_alpha, _above_0, "be above 0", "16"),
            ("lora_dropout", recipe.lora_dropout, _share, "lie in [0, 1)", "0.05"),
            (
                "lora_plus_ratio",
                recipe.lora_plus_ratio,
                lambda x: 0 < x < math.inf,
                "be above 0",
                "16",
            ),
        ]
    for key, value, is_in_range, rule, example in ranges:
        if value is not None and not is_in_range(value):
            raise UserError(f"{key} is {value:g}, but must {rule}. Try --{key} {example}.")


def _above_0(number: float) -> bool:
    return number > 0


def _at_least_0(number: float) -> bool:
    return 0 <= number < math.inf


def _share(number: float) -> bool:
    return 0 <= number < 1


def _check_best(recipe: Recipe, nodes: int) -> None:
    """Refuse result: best where not all machines could read the best checkpoint."""
    if recipe.checkpoint.result == "best" and nodes > 1 and url_of(recipe.out_dir):
        raise UserError(
            f"checkpoint.result is best and out_dir is {display_path(recipe.out_dir)}: each of the "
            f"{nodes} machines has shards of its own ranks there. Try --out_dir on a disk that all "
            "of them share, or --checkpoint.result last."
        )


def check_validations(
    settings: Eval, interval: int, total_steps: int, *, takes_best: bool
) -> list[str]:
    """Check the validation settings against the length of the run; returns notices.

    Args:
        settings: section eval of the recipe.
        interval: steps between validations; 0: there are none before the end.
        total_steps: of the run.
        takes_best: whether the result is the best checkpoint.

    Raises:
        UserError: the result is the best checkpoint, but none is validated.
    """
    patience = settings.patience
    before_last = (total_steps - 1) // interval if interval else 0
    if takes_best and not before_last and not settings.final_validation:
        raise UserError(
            f"checkpoint.result is best, but none of the {total_steps} steps is validated: "
            f"there are {interval} steps between validations, and eval.final_validation is false. "
            f"Try --eval.interval {max(1, total_steps // 4)}, or --checkpoint.result last."
        )
    if patience is None or before_last >= patience:
        return []
    notice = (
        f"eval.patience {patience} cannot end this run of {total_steps} steps before its last one: "
        f"there are {interval} steps between validations. "
        f"Try --eval.interval {max(1, total_steps // (4 * patience))}."
    )
    return [notice]


def _intervals(keep_every: int | dict[int, int] | None) -> list[tuple[str, int | None, int]]:
    """Numbers of `checkpoint.keep_every` with their minima."""
    if not isinstance(keep_every, dict):
        return [("checkpoint.keep_every", keep_every, 1)]
    numbers = [number for pair in keep_every.items() for number in pair]
    if not numbers or min(numbers) < 1:
        raise UserError(
            f"checkpoint.keep_every is {keep_every}, but must have steps and intervals of at least "
            'one step. Try --checkpoint.keep_every "{1000: 100, 10000: 1000}".'
        )
    return []


def _check_kernels(recipe: Recipe, accelerator: str, strategy: StrategyName) -> None:
    """Refuse kernels and compilation that these devices or this strategy cannot run."""
    kind = device_kind(accelerator)
    if not kind.has_few_bits:
        optimizer = recipe.optimizer["class_path"]
        unusable = {"quantize": ("null", getattr(recipe, "quantize", None))}
        if optimizer.startswith((f"{BITSANDBYTES}.", f"{TORCHAO}.")):
            unusable["optimizer"] = ("AdamW", optimizer)
        for key, (other, value) in unusable.items():
            if value is not None:
                raise UserError(
                    f"{key} is {value}, but accelerator is {kind.name}, on which weights and "
                    "optimizer state of 4 or 8 bits do not run: bitsandbytes has no kernels for "
                    f"it. Try --{key} {other}, or --accelerator cpu."
                )
    if recipe.kernels == "liger" and not device_kind(accelerator).has_triton:
        raise UserError(
            f"kernels is liger, but the accelerator is {accelerator} and these kernels are "
            "for CUDA. "
            "Try --kernels torch."
        )
    if recipe.kernels == "liger" and recipe.compile:
        raise UserError(
            "kernels is liger and compile is true, which have not been tested together; compiled "
            "blocks fuse the same operations. Try --kernels torch, or --compile false."
        )
    if recipe.kernels == "liger" and recipe.train.label_smoothing:
        raise UserError(
            f"train.label_smoothing is {recipe.train.label_smoothing:g} and kernels is liger, "
            "whose loss has not been tested with it. Try --kernels torch."
        )
    if recipe.compile and not RULES[strategy].compiles:
        raise UserError(
            f"compile is true, but {strategy} gathers the parameters of each layer in the middle "
            "of a block. Try --strategy fsdp, or --compile false."
        )


def _check_rounding(
    recipe: Recipe, precision: Precision, devices: Devices, strategy: StrategyName
) -> None:
    """Refuse rounded products of linear layers that are not possible in this run."""
    qat, kind = recipe.qat, devices.accelerator
    if qat.activations is not None and qat.weights is None:
        raise UserError(
            f"qat.activations is {qat.activations}, but qat.weights is empty: weights are rounded "
            "too. Try --qat.weights int4, or --qat.activations null."
        )
    if recipe.rounding is None:
        return
    key, value, off = "qat.weights", str(qat.weights), "--qat.weights null"
    if recipe.float8:
        key, value, off = "float8", "true", "--float8 false"
    why = ""
    if recipe.float8 and qat.weights is not None:
        why = f"qat.weights is {qat.weights}, and a layer rounds in one way. Try"
    elif isinstance(recipe, LoraRecipe):
        why = "LoRA trains no weights of these layers. Try ftkit finetune_full, or"
        if not recipe.float8:
            why = (
                "LoRA trains an adapter beside weights that stay as they are, and rounds them with "
                "--quantize. Try ftkit finetune_full, or"
            )
    elif importlib.util.find_spec("torchao") is None:
        why = "torchao is not installed. Try pip install 'ftkit[torchao]', or"
    elif kind not in (HOST_KIND, USUAL_KIND):
        why = f"torchao's layers were not tried on accelerator {kind}. Try --accelerator cpu, or"
    elif strategy == "deepspeed":
        why = "torchao's layers were not tried with deepspeed. Try --strategy fsdp, or"
    elif recipe.float8 and kind == USUAL_KIND and not devices.float8_native:
        name = devices.names[0] if devices.names else "this GPU"
        why = f"{name} has no float8 arithmetic (compute capability below 8.9). Try"
    elif recipe.float8 and kind == USUAL_KIND and not precision.startswith("bf16"):
        why = (
            f"precision is {precision}: on GPUs products of float8 with a scale for each row have "
            "results in bfloat16. Try --precision bf16-mixed, or"
        )
    if why:
        raise UserError(f"{key} is {value}, but {why} {off}.")


def check_kernels_installed(kernels: Kernels, accelerator: str, *, compiles: bool) -> None:
    """Refuse a run whose kernels or compiler are not installed.

    Args:
        kernels: key of the recipe.
        accelerator: kind of device.
        compiles: its key `compile`.

    Raises:
        UserError: names what to install.
    """
    if kernels == "liger" and (obstacle := _liger_obstacle()) is not None:
        raise UserError(
            f"kernels is liger, but {obstacle}. Try pip install '{LIGER}', or --kernels torch."
        )
    # torch.compile writes C++ for CPUs; Triton compiles its launchers, which are C.
    variable, usual = ("CXX", "g++") if accelerator == "cpu" else ("CC", "gcc")
    compiler = os.environ.get(variable, usual)
    needs_compiler = compiles or kernels == "liger"
    if needs_compiler and shutil.which(compiler) is None:
        key, off = ("compile", "false") if compiles else ("kernels", "torch")
        raise UserError(
            f"{key} needs a compiler on this machine, but there is no {compiler}. Install it or "
            f"set ${variable}, or try --{key} {off}."
        )


def check_loggers_installed(names: Iterable[LoggerName]) -> None:
    """Refuse a run whose loggers are not installed.

    Args:
        names: loggers beside metrics.csv.

    Raises:
        UserError: names what to install.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"logger_name has {name}, but it is not installed. Try pip install "
                f"{LOGGER_PACKAGES.get(name, name)}, or --logger_name csv."
            )


def has_liger() -> bool:
    """Whether a Liger-Kernel that ftkit knows, and Triton, are installed."""
    return _liger_obstacle() is None


def _liger_obstacle() -> str | None:
    """Why Liger's kernels cannot run in this environment; None: they can."""
    from packaging.requirements import Requirement

    try:
        version = metadata.version("liger-kernel")
    except metadata.PackageNotFoundError:
        return "Liger-Kernel is not installed"
    if not Requirement(LIGER).specifier.contains(version, prereleases=True):
        return (
            f"Liger-Kernel {version} is installed, and ftkit uses a private kernel of it that it "
            "does not know in this version"
        )
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed, which compiles them"
    return None


def _ignored_layers(recipe: Recipe) -> list[str]:
    """Notices about layer switches that lora_targets overrides."""
    if not isinstance(recipe, LoraRecipe) or recipe.lora_targets is None:
        return []
    defaults = {field.name: field.default for field in fields(recipe)}
    ignored = [key for key in LAYER_SWITCHES if getattr(recipe, key) != defaults[key]]
    return [f"lora_targets chooses the layers: {', '.join(ignored)} has no effect."] * bool(ignored)


def _check_lora(recipe: LoraRecipe) -> None:
    check_peft(recipe)
    for key, pattern in (("only", recipe.train.only), ("freeze", recipe.train.freeze)):
        if pattern is not None:
            raise UserError(
                f"train.{key} is {pattern!r}, but LoRA freezes the whole base model. Choose the "
                "layers that it adapts with --lora_targets, train a part of the model itself with "
                f"ftkit finetune_full, or remove it with --train.{key} null."
            )
    if recipe.lora_targets == PEFT_DEFAULT and (kind := recipe.peft["class_path"]) != "lora":
        raise UserError(
            f"lora_targets is {PEFT_DEFAULT}, which names layers for LoRA, but peft is {kind}. Try "
            f"--lora_targets {ALL_LINEAR}."
        )
    if recipe.added_tokens and recipe.lora_targets is None and recipe.lora_head:
        raise UserError(
            "lora_head is true, but data.add_tokens trains the head itself, with rows for the new "
            "tokens. Try --lora_head false."
        )
    if recipe.lora_r < 1:
        raise UserError(f"lora_r is {recipe.lora_r}, but must be at least 1. Try --lora_r 8.")
    if recipe.lora_variant == "dora" and recipe.lora_init != "default":
        raise UserError(
            f"lora_init is {recipe.lora_init}, but lora_variant dora starts from the lengths of "
            "the base model's own rows. Try --lora_init default."
        )
    if recipe.lora_init == "loftq":
        _check_loftq(recipe)
    if recipe.lora_experts:
        _check_lora_of_experts(recipe)
        return
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


def _check_loftq(recipe: LoraRecipe) -> None:
    """Refuse LoftQ where nothing is quantised, or the model below the adapter is compared with."""
    if recipe.quantize in (None, "stored"):
        raise UserError(
            "lora_init is loftq, which begins with what quantisation has changed in the weights, "
            f"but quantize is {recipe.quantize or 'not set'}. Try --quantize bnb.nf4."
        )
    if objective_rules(recipe.objective).needs_reference and recipe.reference is None:
        raise UserError(
            f"lora_init is loftq, but objective is {recipe.objective['class_path']}, which "
            "compares with the model below the adapter, and loftq does not begin at that. Try "
            "--lora_init default."
        )


def _check_lora_of_experts(recipe: LoraRecipe) -> None:
    """Refuse settings that PEFT does not have for adapters of experts."""
    for key, value, known in (
        ("lora_dropout", f"{recipe.lora_dropout:g}", ["0"]),
        ("lora_variant", recipe.lora_variant, ["lora", "rslora"]),
        ("lora_init", recipe.lora_init, ["default"]),
    ):
        if value not in known:
            raise UserError(
                f"{key} is {value}, but lora_experts is true, and a PEFT adapter of experts only "
                f"supports {' and '.join(known)}. Try --{key} {known[0]}, or --lora_experts false."
            )
