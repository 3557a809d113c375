"""Optimizers without torch: what their state is of, and which strategies run them.

Strategies that shard update parts of a parameter, so an update has to be that of each number by
itself, or the strategy gathers what it needs. `tests/strategies/test_optimizers.py` compares every
row of the table with the optimizer itself. An optimizer without a row, such as one of a plugin or
of a newer library, is tried before anything is loaded (`ftkit/strategies/optimizer_trial.py`).
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ftkit.errors import UserError
from ftkit.recipe.facts import Facts
from ftkit.recipe.recipe import Component
from ftkit.recipe.strategy_rows import STRATEGIES

TORCH, BITSANDBYTES = "torch.optim", "bitsandbytes.optim"
TORCHAO, DEEPSPEED = "torchao.optim", "deepspeed.ops.adam"
MUON = f"{TORCH}.Muon"

State = Literal["number", "numbers", "factors"]
"""What a tensor of state has: a number for each number of the parameter, several for each, as in
[2, *shape], or one for each row and for each column."""


@dataclass(frozen=True, kw_only=True)
class OptimizerTraits:
    """What is known of an optimizer; by default it updates each number by itself."""

    state: State = "number"
    family: str = ""
    """Optimizers of one family keep the same state; empty: this one is alone."""
    whole: str = ""
    """What it needs whole parameters for; empty: it does not need them."""
    gathered_by: tuple[str, ...] = ()
    """Strategies that shard and gather whole parameters for it."""
    no_adapters: str = ""
    """Why it cannot train adapters; empty: it can."""
    needs_paging: bool = False
    """Whether its paged state can only be allocated where the driver pages it."""
    unusable: str = ""
    """Why it cannot fine-tune, and what to use instead; empty: it can."""


_ADAM = OptimizerTraits(family="Adam")
_ADEMAMIX = OptimizerTraits(family="AdEMAMix", state="numbers", needs_paging=True)
_BY_NORMS = "scales its updates by the norms of whole parameters"
_ADEMAMIX_32 = OptimizerTraits(
    unusable="for which bitsandbytes allocates half of its state. Try --optimizer "
    f"{BITSANDBYTES}.AdEMAMix, which keeps 32 bits too"
)
_NOT_QUANTISED = OptimizerTraits(
    unusable=f"which keeps no quantised state. Try --optimizer {TORCHAO}.AdamW8bit, or "
    "--optimizer AdamW"
)
_OF_ZENFLOW = OptimizerTraits(unusable="a part of DeepSpeed's ZenFlow. Try --optimizer AdamW")
_BITS = ("", "8bit", "32bit")

OPTIMIZERS: dict[str, OptimizerTraits] = {
    **{
        f"{TORCH}.{name}": OptimizerTraits()
        for name in (
            *("ASGD", "Adadelta", "Adagrad", "Adamax", "NAdam", "RAdam"),
            *("RMSprop", "Rprop", "SGD"),
        )
    },
    f"{TORCH}.Adam": _ADAM,
    f"{TORCH}.AdamW": _ADAM,
    f"{TORCH}.Adafactor": OptimizerTraits(
        state="factors", whole=f"has factors of rows and columns, and {_BY_NORMS}"
    ),
    MUON: OptimizerTraits(
        whole="orthogonalises updates of whole matrices",
        gathered_by=("fsdp",),
        no_adapters="LoRA trains two factors of each",
    ),
    f"{TORCH}.LBFGS": OptimizerTraits(
        unusable="which computes the loss of a step several times. Try --optimizer AdamW"
    ),
    f"{TORCH}.SparseAdam": OptimizerTraits(
        unusable="which needs sparse gradients, and those of these models are dense. Try "
        "--optimizer AdamW"
    ),
    **{
        f"{BITSANDBYTES}.{paged}{name}{bits}": traits
        for name, traits in (
            *(("Adam", _ADAM), ("AdamW", _ADAM), ("AdEMAMix", _ADEMAMIX)),
            ("Lion", OptimizerTraits(family="Lion")),
        )
        for paged in ("", "Paged")
        for bits in _BITS
    },
    **{
        f"{BITSANDBYTES}.{name}{bits}": OptimizerTraits(
            family=f"{BITSANDBYTES}.{name}", whole=_BY_NORMS if name in ("LAMB", "LARS") else ""
        )
        for name in ("Adagrad", "LAMB", "LARS", "RMSprop", "SGD")
        for bits in _BITS
    },
    f"{BITSANDBYTES}.AdEMAMix32bit": _ADEMAMIX_32,
    f"{BITSANDBYTES}.PagedAdEMAMix32bit": _ADEMAMIX_32,
    f"{BITSANDBYTES}.PytorchLARS": OptimizerTraits(whole=_BY_NORMS),
    **{
        f"{TORCHAO}.{name}{bits}": _ADAM
        for name in ("Adam", "AdamW")
        for bits in ("4bit", "8bit", "Fp8")
    },
    f"{TORCHAO}._AdamW": _NOT_QUANTISED,
    f"{TORCHAO}.CPUOffloadOptimizer": _NOT_QUANTISED,
    f"{DEEPSPEED}.DeepSpeedCPUAdam": _ADAM,
    f"{DEEPSPEED}.FusedAdam": _ADAM,
    f"{DEEPSPEED}.ZenFlowCPUAdam": _OF_ZENFLOW,
    f"{DEEPSPEED}.ZenFlowSelectiveAdamW": _OF_ZENFLOW,
    f"{DEEPSPEED}.ZenFlowSelectiveAdamW_stage3": _OF_ZENFLOW,
}
"""Optimizers by their class path."""


@dataclass(frozen=True, kw_only=True)
class OptimizerPackage:
    """What is known of all optimizers of a package."""

    strategy: str = ""
    """The only strategy that runs them; empty: others do."""
    of_slices: bool = True
    """Whether a strategy may keep their state itself, for slices of parameters."""
    few_bits: bool = False
    """Whether they need devices with numbers of 4 or 8 bits."""
    refuse: Callable[[Facts], None] | None = None
    """Refuses, by a UserError, arguments that do not suit a run; None: all do."""


def _refuse_of_torchao(facts: Facts) -> None:
    recipe, strategy = facts.recipe, facts.strategy.name
    optimizer, arguments = recipe.optimizer["class_path"], recipe.optimizer["init_args"]
    if importlib.util.find_spec("torchao") is None:
        raise UserError(
            f"optimizer is {optimizer}, but torchao is not installed. Try pip install "
            "'ftkit[torchao]', or --optimizer bitsandbytes.optim.AdamW8bit."
        )
    block = arguments.get("block_size", 256)
    if not (type(block) is int and block > 0 and block % 2 == 0):
        raise UserError(
            f"optimizer.block_size is {block!r}, but must be an even number of at least 2, because "
            f"a byte has two codes of 4 bits. Try --optimizer.block_size 256."
        )
    if arguments.get("amsgrad"):
        raise UserError(
            f"optimizer.amsgrad is true, but {optimizer} cannot compare quantised moments. Try "
            "--optimizer.amsgrad false, or --optimizer AdamW."
        )
    has_copies = strategy == "ddp" or "HYBRID_SHARD" in recipe.strategy["init_args"].values()
    if arguments.get("bf16_stochastic_round") and has_copies:
        raise UserError(
            "optimizer.bf16_stochastic_round is true, but several ranks have copies of the same "
            "weights, which each would round by chance. Try --optimizer.bf16_stochastic_round "
            "false, or --strategy fsdp --strategy.sharding FULL_SHARD."
        )


PACKAGES = {
    TORCH: OptimizerPackage(),
    BITSANDBYTES: OptimizerPackage(of_slices=False, few_bits=True),
    TORCHAO: OptimizerPackage(of_slices=False, few_bits=True, refuse=_refuse_of_torchao),
    DEEPSPEED: OptimizerPackage(strategy="deepspeed"),
}
"""Packages whose optimizers a recipe may name."""


def _package_of(class_path: str) -> OptimizerPackage:
    return PACKAGES.get(class_path.rpartition(".")[0], OptimizerPackage())


def strategies_of(class_path: str) -> tuple[str, ...]:
    """Strategies that run an optimizer; those that could, if it has no row."""
    traits = OPTIMIZERS.get(class_path, OptimizerTraits())
    package = _package_of(class_path)
    if traits.unusable:
        return ()
    return tuple(
        rules.name
        for rules in STRATEGIES
        if package.strategy in ("", rules.name)
        and (package.of_slices or not rules.updates_slices)
        and (not traits.whole or not rules.shares or rules.name in traits.gathered_by)
    )


def family_of(class_path: str) -> str:
    """Family of an optimizer: one of its members continues the state of another."""
    traits = OPTIMIZERS.get(class_path)
    return (traits.family if traits else "") or class_path


def is_paged(optimizer: Component) -> bool:
    """Whether the driver may move the state of a recipe's optimizer between device and host."""
    name = optimizer["class_path"].rpartition(".")[2]
    return name.startswith("Paged") or optimizer["init_args"].get("is_paged") is True


def check_optimizer(facts: Facts) -> list[str]:
    """Refuse an optimizer that cannot fine-tune, or not on a kind of device or under a strategy."""
    recipe, kind, strategy = facts.recipe, facts.kind, facts.strategy.name
    class_path = recipe.optimizer["class_path"]
    if not facts.trains:
        return []
    traits, package = OPTIMIZERS.get(class_path, OptimizerTraits()), _package_of(class_path)
    if traits.unusable:
        raise UserError(f"optimizer is {class_path}, {traits.unusable}.")
    pages = is_paged(recipe.optimizer) and not kind.pages_optimizer_state
    if traits.needs_paging and pages and kind.has_few_bits:
        instead = "--optimizer.is_paged false"
        if "Paged" in class_path:
            instead = f"--optimizer {class_path.replace('Paged', '')}"
        raise UserError(
            f"optimizer is {class_path} with paged state, but accelerator is {kind.name}, on which "
            f"bitsandbytes cannot allocate it. Try {instead}."
        )
    if traits.no_adapters and recipe.method == "lora":
        raise UserError(
            f"optimizer is {class_path}, which {traits.whole}, but {traits.no_adapters}. Try "
            "--optimizer AdamW, or ftkit finetune_full."
        )
    able = strategies_of(class_path)
    if strategy not in able:
        why = f"which {traits.whole}, but {facts.strategy.shares}"
        if not traits.whole:
            why = f"but {facts.strategy.updates_slices or f'the strategy is {strategy}'}"
        raise refused(class_path, strategy, why, able)
    if package.refuse is not None:
        package.refuse(facts)
    return []


def refused(class_path: str, strategy: str, why: str, able: tuple[str, ...]) -> UserError:
    """The error for an optimizer that the strategy of a run does not suit.

    Args:
        class_path: of the optimizer.
        strategy: of the run.
        why: continues "optimizer is NAME, ".
        able: strategies that suit it.
    """
    other = f"{BITSANDBYTES}.AdamW8bit"
    if not class_path.endswith("8bit") or strategy not in strategies_of(other):
        other = "AdamW"
    return UserError(
        f"optimizer is {class_path}, {why}. Try --optimizer {other}, or --strategy {able[-1]}."
    )


def check_optimizer_bits(facts: Facts) -> list[str]:
    """Refuse state of 4 or 8 bits where a kind of device has no such numbers."""
    class_path = facts.recipe.optimizer["class_path"]
    if _package_of(class_path).few_bits:
        facts.require_few_bits("optimizer", class_path, "AdamW")
    return []


NAMES_ELSEWHERE = {
    "adamw_torch": "torch.optim.AdamW",
    "adamw_torch_fused": "torch.optim.AdamW",
    "adamw_hf": "torch.optim.AdamW",
    "adamw_torch_4bit": "torchao.optim.AdamW4bit",
    "adamw_torch_8bit": "torchao.optim.AdamW8bit",
    "adamw_bnb_8bit": "bitsandbytes.optim.AdamW8bit",
    "adamw_8bit": "bitsandbytes.optim.AdamW8bit",
    "paged_adamw": "bitsandbytes.optim.PagedAdamW32bit",
    "paged_adamw_32bit": "bitsandbytes.optim.PagedAdamW32bit",
    "paged_adamw_8bit": "bitsandbytes.optim.PagedAdamW8bit",
    "lion_32bit": "bitsandbytes.optim.Lion32bit",
    "lion_8bit": "bitsandbytes.optim.Lion8bit",
    "paged_lion_32bit": "bitsandbytes.optim.PagedLion32bit",
    "paged_lion_8bit": "bitsandbytes.optim.PagedLion8bit",
    "sgd": "torch.optim.SGD",
    "adagrad": "torch.optim.Adagrad",
    "rmsprop": "torch.optim.RMSprop",
}
"""Optimizers by their names in transformers."""
