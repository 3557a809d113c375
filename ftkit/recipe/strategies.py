"""Strategies without torch: names, options, rules, and the choice of strategy and precision."""

from dataclasses import dataclass
from typing import Literal, cast, get_args, get_type_hints

from ftkit.errors import UserError
from ftkit.recipe.devices import Devices, has_deepspeed
from ftkit.recipe.facts import Facts, NoOptions, StrategyName, StrategyRules
from ftkit.recipe.optimizers import strategies_of
from ftkit.recipe.recipe import Precision, Recipe
from ftkit.utils.accelerators.kinds import HOST_KIND, USUAL_KIND, device_kind


@dataclass(frozen=True, kw_only=True)
class FsdpOptions:
    """Options of `strategy: fsdp`."""

    sharding: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"] = "FULL_SHARD"
    """FULL_SHARD frees the gathered parameters of a block after its forward pass; SHARD_GRAD_OP
    keeps them until its backward pass. HYBRID_SHARD applies FULL_SHARD within each node, and each
    node has the whole model: only gradients travel between nodes."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    prefetch: Literal[0, 1, 2] = 0
    """Number of blocks whose parameters are gathered ahead of the running one; each takes memory.
    0: gather the next block when the host reaches it."""
    sync_every_micro_step: bool = True
    """Reduce gradients over the ranks in every micro-step, so that each rank keeps only its shard.
    false: reduce once per step, after the last micro-step: less communication, but memory for all
    gradients."""


@dataclass(frozen=True, kw_only=True)
class DeepSpeedOptions:
    """Options of `strategy: deepspeed`."""

    stage: Literal[1, 2, 3] = 3
    """ZeRO stage. 1 shards the optimizer state, 2 also gradients, 3 also parameters."""
    offload_optimizer: bool = True
    """Keep the optimizer state in host memory and update on the CPU."""
    offload_parameters: bool = False
    """Keep the parameters in host memory (stage 3)."""


StrategyOptions = NoOptions | FsdpOptions | DeepSpeedOptions


class SingleRules(StrategyRules):
    """Rules of training on one rank."""

    name = "single"
    class_path = "ftkit.strategies.strategy.Single"
    connects_ranks = False


class DdpRules(StrategyRules):
    """Rules of DDP: every rank has the whole model and optimizer state."""

    name = "ddp"
    class_path = "ftkit.strategies.strategy.Ddp"

    def needs_all_gradients(self, options: NoOptions) -> str:
        return "keeps memory for all gradients, in which ranks add them up. Try --strategy fsdp"


class FsdpRules(StrategyRules):
    """Rules of FSDP: every rank has rows of each parameter."""

    name = "fsdp"
    class_path = "ftkit.strategies.fsdp.Fsdp"
    options = FsdpOptions
    shares = "with fsdp a rank only has some rows of each"
    scales_loss = False
    shards_base = True

    def sharding(self, options: FsdpOptions) -> str:
        where = ", in host memory" if options.cpu_offload else ""
        return f"{options.sharding}: parameters, gradients, optimizer state{where}"

    def offloads(self, options: FsdpOptions) -> bool:
        return options.cpu_offload

    def shards(self, options: FsdpOptions, devices: int, num_nodes: int) -> int:
        return devices if options.sharding == "HYBRID_SHARD" else devices * num_nodes

    def needs_all_gradients(self, options: FsdpOptions) -> str:
        if not options.cpu_offload:
            return ""
        return "keeps all gradients in host memory. Try --strategy.cpu_offload false"

    def refuse(self, facts: Facts) -> None:
        if facts.precision == "16-mixed":
            other = "bf16-mixed" if facts.devices.bf16_native else "32-true"
            able = strategies_of(facts.recipe.optimizer["class_path"])
            suits = facts.devices.deepspeed and "deepspeed" in able
            raise UserError(
                "precision is 16-mixed, but fsdp has no loss scaling in ftkit. Try --precision "
                f"{other}, or --strategy {'deepspeed' if suits else 'ddp'}."
            )
        # On one node it is FULL_SHARD, and with one device for each node it is DDP.
        is_hybrid = facts.options.sharding == "HYBRID_SHARD"
        if is_hybrid and min(facts.ranks_here, facts.num_nodes) == 1:
            raise UserError(
                "strategy.sharding is HYBRID_SHARD, which shards among the devices of each node, "
                f"but devices is {facts.ranks_here} and num_nodes is {facts.num_nodes}: both must "
                "be at least 2. Try --strategy.sharding FULL_SHARD."
            )


class DeepSpeedRules(StrategyRules):
    """Rules of DeepSpeed: every rank has equal parts of what the ZeRO stage shards."""

    name = "deepspeed"
    class_path = "ftkit.strategies.deepspeed.DeepSpeed"
    options = DeepSpeedOptions
    keeps_masters = True
    shards_base = True
    uncompiled = (
        "gathers the parameters of each layer in the middle of a block. Try --strategy fsdp"
    )
    rounds = False
    shares = "DeepSpeed updates slices of them, which have no shape"

    def sharding(self, options: DeepSpeedOptions) -> str:
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

    def offloads(self, options: DeepSpeedOptions) -> bool:
        return options.offload_optimizer

    def shards(self, options: DeepSpeedOptions, devices: int, num_nodes: int) -> int:
        return devices * num_nodes if options.stage == 3 else 1

    def needs_all_gradients(self, options: DeepSpeedOptions) -> str:
        return "updates slices of all parameters at once. Try --strategy fsdp"

    def check_installed(self) -> None:
        if not has_deepspeed():
            raise UserError(
                "strategy is deepspeed, but DeepSpeed is not installed. Install g++ and try "
                "DS_BUILD_OPS=0 pip install --no-build-isolation ninja deepspeed, or "
                "--strategy fsdp."
            )

    def environment(self, accelerator: str) -> dict[str, str]:
        # DeepSpeed chooses the device itself when it is imported, unless this is set.
        return {"DS_ACCELERATOR": "cpu"} if accelerator == "cpu" else {}


RULES: dict[str, StrategyRules] = {
    rules.name: rules for rules in (SingleRules(), DdpRules(), FsdpRules(), DeepSpeedRules())
}
STRATEGIES = ("auto", *RULES)


def check_strategy(facts: Facts) -> list[str]:
    """Refuse a strategy that a kind of device, or what it shards, does not allow."""
    strategy, kind = facts.strategy, facts.kind
    if kind.strategies == ("single",) and facts.world_size > 1:
        nodes = facts.num_nodes
        machines = f" and num_nodes is {nodes}" if nodes > 1 else ""
        one = " --num_nodes 1" if nodes > 1 else ""
        raise UserError(
            f"devices is {facts.ranks_here}{machines}, but accelerator is {kind.name}, of which "
            f"ftkit only uses one {kind.noun} in a run. Try --devices 1{one}, or --accelerator cpu."
        )
    if strategy.name not in kind.strategies:
        known = " or ".join(kind.strategies)
        advice = f"--strategy {kind.strategies[-1]}"
        if kind.strategies == ("single",):
            advice = "--devices 1 --strategy single"
        raise UserError(
            f"strategy is {strategy.name}, but accelerator is {kind.name}, which only supports "
            f"{known}. Try {advice}, or --accelerator cpu."
        )
    notices = []
    if not kind.tried:
        said = "ftkit has not been tested on such devices"
        if kind.rehearsed_on:
            said = f"ftkit was rehearsed on {kind.rehearsed_on}, and no {kind.noun} has run it yet"
        notices.append(f"accelerator is {kind.name}: {said}.")
        if facts.trains and (left_out := kind.unpredicted_memory):
            notices.append(f"Memory of a {kind.noun} is predicted without {left_out}.")
    strategy.refuse(facts)
    return notices


def resolve_strategy(
    recipe: Recipe, devices: Devices, count: int, nodes: int
) -> tuple[StrategyName, StrategyOptions, Precision, list[str]]:
    """Resolve strategy, its options and precision; also returns notices about the choice."""
    # FSDP has no loss scaling here. GPUs without bfloat16 need it for fast 16-bit arithmetic, so
    # DeepSpeed is used there if nothing was chosen and it is installed.
    strategy, precision = _strategy(recipe, count * nodes), recipe.precision
    options = _options(recipe, strategy)
    if precision is None:
        precision = "bf16-mixed" if devices.bf16_native else "16-mixed"
    notices = _check_precision(precision, strategy, devices)
    if RULES[strategy].scales_loss or precision != "16-mixed":
        return strategy, options, precision, notices
    why = f"{strategy} has no loss scaling for 16-mixed"
    if not devices.bf16_native:
        why = f"{_name(devices)} has no bfloat16 hardware, and {why}"
    suits = "deepspeed" in strategies_of(recipe.optimizer["class_path"])
    # Options such as strategy.sharding also show that a strategy was chosen.
    nothing_given = recipe.strategy["class_path"] == "auto" and not recipe.strategy["init_args"]
    if nothing_given and devices.deepspeed and suits:
        notices.append(f"{why}: deepspeed with 16-mixed is used.")
        # As with fsdp, everything is shared out among the GPUs, and nothing goes to the host.
        return "deepspeed", DeepSpeedOptions(offload_optimizer=False), precision, notices
    # Not chosen: float32 works. A recipe that sets 16-mixed is refused by `check`.
    if recipe.precision is None:
        precision = "32-true"
        faster = "--strategy ddp, if the model fits on each GPU"
        if suits:
            faster = "--strategy deepspeed" + " with DeepSpeed installed" * (not devices.deepspeed)
        notices.append(
            f"{why}: {strategy} with 32-true is used, which is several times slower. Try {faster}."
        )
    return strategy, options, precision, notices


def _name(devices: Devices) -> str:
    return devices.names[0] if devices.names else "This GPU"


def _check_precision(precision: Precision, strategy: StrategyName, devices: Devices) -> list[str]:
    """Refuse precisions that the devices cannot compute; notices about slow ones."""
    if precision.startswith("16") and devices.accelerator == HOST_KIND:
        raise UserError(
            f"precision is {precision}, but float16 training needs a CUDA GPU: CPUs lack its fast "
            f"kernels and its range underflows. Try --precision {precision.replace('16', 'bf16')}."
        )
    kind = device_kind(devices.accelerator)
    if precision.startswith("16") and not kind.has_float16:
        raise UserError(
            f"precision is {precision}, but accelerator is {kind.name}: a {kind.noun} computes 16 "
            f"bits as bfloat16. Try --precision {precision.replace('16', 'bf16')}."
        )
    if precision.startswith("bf16") and not devices.bf16_native:
        others = "16-mixed or 32-true" if RULES[strategy].scales_loss else "32-true"
        why = " (compute capability below 8.0)" if devices.accelerator == USUAL_KIND else ""
        notice = (
            f"{_name(devices)} has no bfloat16 hardware{why}: it is "
            f"emulated and slow. Try --precision {others}."
        )
        return [notice]
    return []


def _strategy(recipe: Recipe, world_size: int) -> StrategyName:
    name = recipe.strategy["class_path"]
    if name == "auto":
        if world_size == 1:
            return "single"
        # LoRA keeps little state beside the model; that of a full fine-tune is worth sharding.
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
    return cast(StrategyName, name)


def _options(recipe: Recipe, strategy: StrategyName) -> StrategyOptions:
    """The strategy's options, checked against the fields of its dataclass."""
    options_class = RULES[strategy].options
    kinds = get_type_hints(options_class)
    given = recipe.strategy["init_args"]
    for key, value in given.items():
        if key not in kinds:
            known = f"It takes {', '.join(kinds)}." if kinds else "It takes none; remove it."
            raise UserError(f"strategy.{key} is not an option of {strategy}. {known}")
        choices = get_args(kinds[key]) or (True, False)
        # The second condition, because True equals 1 in Python.
        if value not in choices or isinstance(value, bool) != isinstance(choices[0], bool):
            words = ["true", "false"] if kinds[key] is bool else [str(c) for c in choices]
            raise UserError(
                f"strategy.{key} is {value!r}, but must be one of: {', '.join(words)}. "
                f"Try --strategy.{key} {words[0]}."
            )
    return options_class(**given)


def check_float16(facts: Facts) -> list[str]:
    """Refuse 16-true, in which training diverges, with what to use instead."""
    strategy, native = facts.strategy, facts.devices.bf16_native
    if facts.trains and facts.precision == "16-true" and not strategy.keeps_masters:
        better = "bf16-true" if native else "16-mixed" if strategy.scales_loss else "32-true"
        raise UserError(
            f"precision is 16-true, but {strategy.name} would update weights in float16, in which "
            "small gradients and AdamW's second moments become zero. Try --precision "
            f"{better}."
        )
    return []
