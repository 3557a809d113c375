"""Optimizers: the registry of their packages, what each keeps and cannot run; no torch.

Strategies that shard update parts of a parameter, so an update has to be that of each number by
itself, or the strategy gathers what it needs. `tests/strategies/test_optimizers.py` compares every
optimizer that a row lists with the optimizer itself. One that no row lists, such as one of a plugin
or of a newer library, is tried before anything is loaded (`ftkit/strategies/optimizer_trial.py`).
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ftkit.errors import UserError
from ftkit.recipe.facts import Facts
from ftkit.recipe.recipe import Component
from ftkit.recipe.strategy_rows import STRATEGIES
from ftkit.utils.registry import Registry

TORCH, BITSANDBYTES = "torch.optim", "bitsandbytes.optim"
MUON = f"{TORCH}.Muon"
BLOCK = 256
"""Numbers of an 8-bit state of bitsandbytes that share a scale."""

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
    further: tuple[str, ...] = ()
    """Arguments that it takes beside those of its class."""
    used: str = ""
    """MODULE:FUNCTION that returns the class that trains in the place of its class, which it gets;
    empty: its class itself trains."""
    over_rows: str = ""
    """MODULE:FUNCTION that returns a class for parameters of which a rank has some rows (fsdp) of
    the class that trains; empty: that takes them itself."""
    fuses_rows: bool = False
    """Whether torch's fused implementation takes such parameters."""
    in_8_bits: str = ""
    """Optimizer that keeps the same state in 8 bits; empty: there is none."""
    is_tried: bool = False
    """Whether nothing is known of it, so that it is tried before anything is loaded."""


_OVER_PLAIN_ROWS = "ftkit.strategies.fsdp:over_plain_rows"
UNKNOWN = OptimizerTraits(is_tried=True, over_rows=_OVER_PLAIN_ROWS)
"""An optimizer of which nothing is known."""


@dataclass(frozen=True, kw_only=True)
class OptimizerPackage:
    """A package whose optimizers a recipe may name, as NAME.CLASS."""

    name: str
    """The package, as it is imported: only where one of its optimizers is used."""
    optimizers: Mapping[str, OptimizerTraits] = field(default_factory=dict)
    """What is known of its optimizers, by the names of their classes."""
    others: OptimizerTraits = UNKNOWN
    """What is supposed of those that it has besides."""
    strategy: str = ""
    """The only strategy that runs them; empty: others do."""
    of_slices: bool = True
    """Whether a strategy may keep their state itself, for slices of parameters."""
    few_bits: bool = False
    """Whether they need devices with numbers of 4 or 8 bits."""
    number_bytes: Callable[[str, Mapping[str, Any]], float] | None = None
    """Bytes that a number of state takes in a checkpoint, by the class and the arguments; None: as
    many as the numbers that are updated."""
    kinds: Mapping[str, int] = field(default_factory=dict)
    """Kinds of state, with how many numbers of it there are for each number of a parameter; empty:
    a step with small parameters tells."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Classes by the names that transformers has for them."""
    refuse: Callable[[Facts], None] | None = None
    """Refuses, by a UserError, arguments that do not suit a run; None: all do."""

    def content(self) -> Mapping[str, Any]:
        """What it has by name: its optimizers, and more.

        Raises:
            ImportError: it is not installed.
        """
        return vars(importlib.import_module(self.name))


ADAM = OptimizerTraits(family="Adam")
_BY_NORMS = "scales its updates by the norms of whole parameters"
_BITS = ("", "8bit", "32bit")

_OF_TORCH = OptimizerPackage(
    name=TORCH,
    optimizers={
        **dict.fromkeys(
            ("ASGD", "Adadelta", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD"),
            OptimizerTraits(),
        ),
        **{
            name: replace(ADAM, fuses_rows=True, in_8_bits=f"{BITSANDBYTES}.{name}8bit")
            for name in ("Adam", "AdamW")
        },
        # It has operations that DTensor does not have.
        "Rprop": OptimizerTraits(over_rows=_OVER_PLAIN_ROWS),
        "Adafactor": OptimizerTraits(
            state="factors", whole=f"has factors of rows and columns, and {_BY_NORMS}"
        ),
        "Muon": OptimizerTraits(
            whole="orthogonalises updates of whole matrices",
            gathered_by=("fsdp",),
            no_adapters="LoRA trains two factors of each",
            further=("betas",),  # of AdamW, which it has beside it
            used="ftkit.strategies.optimizers:with_adamw",
            over_rows="ftkit.strategies.fsdp:gathering",
            fuses_rows=True,
        ),
        "LBFGS": OptimizerTraits(
            unusable="which computes the loss of a step several times. Try --optimizer AdamW"
        ),
        "SparseAdam": OptimizerTraits(
            unusable="which needs sparse gradients, and those of these models are dense. Try "
            "--optimizer AdamW"
        ),
    },
    elsewhere={
        "adamw_torch": "AdamW",
        "adamw_torch_fused": "AdamW",
        "adamw_hf": "AdamW",
        "sgd": "SGD",
        "adagrad": "Adagrad",
        "rmsprop": "RMSprop",
    },
)


def _of_bitsandbytes() -> OptimizerPackage:
    rows = OptimizerTraits(over_rows="ftkit.strategies.local_rows:over_local_rows")
    adam = replace(rows, family="Adam")
    mixed = replace(rows, family="AdEMAMix", state="numbers", needs_paging=True)
    half = OptimizerTraits(
        unusable="for which bitsandbytes allocates half of its state. Try --optimizer "
        f"{BITSANDBYTES}.AdEMAMix, which keeps 32 bits too"
    )
    families = {
        "Adam": adam,
        "AdamW": adam,
        "AdEMAMix": mixed,
        "Lion": replace(rows, family="Lion"),
    }
    optimizers = {
        f"{paged}{name}{bits}": traits
        for name, traits in families.items()
        for paged in ("", "Paged")
        for bits in _BITS
    }
    for name in ("Adagrad", "LAMB", "LARS", "RMSprop", "SGD"):
        whole = _BY_NORMS if name in ("LAMB", "LARS") else ""
        traits = replace(rows, family=f"{BITSANDBYTES}.{name}", whole=whole)
        optimizers |= {f"{name}{bits}": traits for bits in _BITS}
    return OptimizerPackage(
        name=BITSANDBYTES,
        optimizers=optimizers
        | {"AdEMAMix32bit": half, "PagedAdEMAMix32bit": half}
        | {"PytorchLARS": replace(rows, whole=_BY_NORMS)},
        others=replace(rows, is_tried=True),
        of_slices=False,
        few_bits=True,
        number_bytes=_bytes_of_bitsandbytes,
        elsewhere={
            "adamw_bnb_8bit": "AdamW8bit",
            "adamw_8bit": "AdamW8bit",
            "paged_adamw": "PagedAdamW32bit",
            "paged_adamw_32bit": "PagedAdamW32bit",
            "paged_adamw_8bit": "PagedAdamW8bit",
            "lion_32bit": "Lion32bit",
            "lion_8bit": "Lion8bit",
            "paged_lion_32bit": "PagedLion32bit",
            "paged_lion_8bit": "PagedLion8bit",
        },
    )


def _bytes_of_bitsandbytes(name: str, arguments: Mapping[str, Any]) -> float:
    # A byte for each number and a float32 scale for each block.
    return 1 + 4 / BLOCK if name.endswith("8bit") or arguments.get("optim_bits") == 8 else 4


OPTIMIZERS = Registry("optimizers", (OptimizerPackage,), core=[_OF_TORCH, _of_bitsandbytes()])
"""Packages by name. A new one is a row with what is known of its optimizers."""


def package_of(class_path: str) -> OptimizerPackage:
    """The package of a class path; one without rules, where no row has this name."""
    name = class_path.rpartition(".")[0]
    return OPTIMIZERS.get(name) or OptimizerPackage(name=name)


def traits_of(class_path: str) -> OptimizerTraits:
    """What is known of an optimizer."""
    package = package_of(class_path)
    return package.optimizers.get(class_path.rpartition(".")[2], package.others)


def names_elsewhere() -> dict[str, str]:
    """Class paths of optimizers by their names in transformers."""
    return {
        name: f"{package.name}.{of_class}"
        for package in OPTIMIZERS
        for name, of_class in package.elsewhere.items()
    }


def strategies_of(class_path: str) -> tuple[str, ...]:
    """Strategies that run an optimizer; those that could, if it has no row."""
    traits, package = traits_of(class_path), package_of(class_path)
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
    return traits_of(class_path).family or class_path


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
    traits, package = traits_of(class_path), package_of(class_path)
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
    if package_of(class_path).few_bits:
        facts.require_few_bits("optimizer", class_path, "AdamW")
    return []
