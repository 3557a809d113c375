"""The choice of strategy and precision, and what refuses it."""

from typing import Any, get_args, get_type_hints

from ftkit.errors import UserError
from ftkit.recipe.devices import Devices
from ftkit.recipe.facts import Facts, StrategyRules
from ftkit.recipe.optimizers import strategies_of
from ftkit.recipe.recipe import Precision, Recipe
from ftkit.recipe.strategy_rows import STRATEGIES, strategy_rules
from ftkit.utils.accelerators.kinds import HOST_KIND, USUAL_KIND, device_kind


def check_strategy(facts: Facts) -> list[str]:
    """Refuse a strategy that a kind of device, or what it shards, does not allow."""
    recipe, strategy, kind = facts.recipe, facts.strategy, facts.kind
    if kind.strategies == ("single",) and facts.world_size > 1:
        nodes = facts.num_nodes
        machines = f" and num_nodes is {nodes}" if nodes > 1 else ""
        one = " --num_nodes 1" if nodes > 1 else ""
        raise UserError(
            f"devices is {facts.ranks_here}{machines}, but accelerator is {kind.name}, of which "
            f"ftkit only uses one {kind.noun} in a run. Try --devices 1{one}, or --accelerator cpu."
        )
    if kind.strategies is not None and strategy.name not in kind.strategies:
        known = " or ".join(kind.strategies)
        advice = f"--strategy {kind.strategies[-1]}"
        if kind.strategies == ("single",):
            advice = "--devices 1 --strategy single"
        raise UserError(
            f"strategy is {strategy.name}, but accelerator is {kind.name}, which only supports "
            f"{known}. Try {advice}, or --accelerator cpu."
        )
    if facts.precision == "16-mixed" and not strategy.scales_loss:
        other = "bf16-mixed" if facts.devices.bf16_native else "32-true"
        able = _scaling(recipe)
        instead = able.name if able is not None and able.is_installed else "ddp"
        raise UserError(
            f"precision is 16-mixed, but {strategy.name} has no loss scaling in ftkit. Try "
            f"--precision {other}, or --strategy {instead}."
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
) -> tuple[str, Any, Precision, list[str]]:
    """Resolve strategy, its options and precision; also returns notices about the choice."""
    # FSDP has no loss scaling here. GPUs without bfloat16 need it for fast 16-bit arithmetic, so
    # another strategy is used there if nothing was chosen and its library is installed.
    rules, precision = _strategy(recipe, count * nodes), recipe.precision
    strategy, options = rules.name, _options(recipe, rules)
    if precision is None:
        # What the devices multiply fast; CPUs have no fast kernels of float16.
        other: Precision = "32-true" if devices.accelerator == HOST_KIND else "16-mixed"
        precision = "bf16-mixed" if devices.bf16_native else other
    notices = _check_precision(precision, rules, devices)
    if rules.scales_loss or precision != "16-mixed":
        return strategy, options, precision, notices
    why = f"{strategy} has no loss scaling for 16-mixed"
    if not devices.bf16_native:
        why = f"{_name(devices)} has no bfloat16 hardware, and {why}"
    scaling = _scaling(recipe)
    # Options such as strategy.sharding also show that a strategy was chosen.
    nothing_given = recipe.strategy["class_path"] == "auto" and not recipe.strategy["init_args"]
    if scaling is not None and nothing_given and scaling.is_installed:
        notices.append(f"{why}: {scaling.name} with 16-mixed is used.")
        return scaling.name, scaling.for_float16, precision, notices
    # Not chosen: float32 works. A recipe that sets 16-mixed is refused by `check`.
    if recipe.precision is None:
        precision = "32-true"
        faster = "--strategy ddp, if the model fits on each GPU"
        if scaling is not None:
            installed = "" if scaling.is_installed else " with its library installed"
            faster = f"--strategy {scaling.name}{installed}"
        notices.append(
            f"{why}: {strategy} with 32-true is used, which is several times slower. Try {faster}."
        )
    return strategy, options, precision, notices


def _scaling(recipe: Recipe) -> StrategyRules | None:
    """The strategy that shards, scales the loss and runs the optimizer of a recipe; None: none."""
    able = strategies_of(recipe.optimizer["class_path"])
    rows = (rules for rules in STRATEGIES if rules.for_float16 is not None)
    return next((rules for rules in rows if rules.name in able), None)


def emulates_bf16(precision: Precision, devices: Devices) -> bool:
    """Whether a run multiplies in bfloat16 on devices without hardware for it."""
    return precision.startswith("bf16") and not devices.bf16_native


def _name(devices: Devices) -> str:
    return devices.names[0] if devices.names else f"This {device_kind(devices.accelerator).noun}"


def _check_precision(precision: Precision, rules: StrategyRules, devices: Devices) -> list[str]:
    """Refuse precisions that the devices cannot compute; notices about slow ones."""
    kind, is_host = device_kind(devices.accelerator), devices.accelerator == HOST_KIND
    if precision.startswith("16") and is_host:
        other = precision.replace("16", "bf16") if devices.bf16_native else "32-true"
        raise UserError(
            f"precision is {precision}, but float16 training needs a CUDA GPU: CPUs lack its fast "
            f"kernels and its range underflows. Try --precision {other}."
        )
    if precision.startswith("16") and not kind.has_float16:
        raise UserError(
            f"precision is {precision}, but accelerator is {kind.name}: a {kind.noun} computes 16 "
            f"bits as bfloat16. Try --precision {precision.replace('16', 'bf16')}."
        )
    if emulates_bf16(precision, devices):
        if is_host:  # a run measures how many times: `ftkit.strategies.strategy.bf16_cost`
            notice = (
                f"precision is {precision}, but this CPU has no instructions for bfloat16 (AMX, "
                "AVX-512 BF16, Arm's BF16): its products are emulated, which takes several times "
                "as long as in float32. Try --precision 32-true."
            )
            return [notice]
        others = "16-mixed or 32-true" if rules.scales_loss else "32-true"
        why = " (compute capability below 8.0)" if devices.accelerator == USUAL_KIND else ""
        notice = (
            f"{_name(devices)} has no bfloat16 hardware{why}: it is "
            f"emulated and slow. Try --precision {others}."
        )
        return [notice]
    return []


def _strategy(recipe: Recipe, world_size: int) -> StrategyRules:
    name = recipe.strategy["class_path"]
    if name == "auto":
        # LoRA keeps little state beside the model; that of a full fine-tune is worth sharding.
        several = "ddp" if recipe.method == "lora" else "fsdp"
        return strategy_rules("single" if world_size == 1 else several)
    rules = strategy_rules(name)
    if not rules.connects_ranks and world_size > 1:
        raise UserError(
            f"strategy is {name}, but devices x num_nodes is {world_size}. "
            "Try --strategy auto or --devices 1."
        )
    return rules


def _options(recipe: Recipe, rules: StrategyRules) -> Any:
    """The strategy's options, checked against the fields of its dataclass."""
    options_class = rules.options
    kinds = get_type_hints(options_class)
    given = recipe.strategy["init_args"]
    for key, value in given.items():
        if key not in kinds:
            known = f"It takes {', '.join(kinds)}." if kinds else "It takes none; remove it."
            raise UserError(f"strategy.{key} is not an option of {rules.name}. {known}")
        if kinds[key] is int:
            if type(value) is not int or value < 1:
                raise UserError(
                    f"strategy.{key} is {value!r}, but must be a whole number of at least 1. "
                    f"Try --strategy.{key} 2."
                )
            continue
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
