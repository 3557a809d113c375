"""What rules look at: a recipe, and what it was resolved to on devices.

A rule stands with its subject: a strategy, an optimizer, a type of adapter, a section of the
recipe. `make_plan` asks them all, before anything is downloaded or started.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from ftkit.errors import UserError
from ftkit.recipe.devices import Devices
from ftkit.recipe.recipe import Precision, Recipe
from ftkit.utils.accelerators.kinds import DeviceKind, device_kind


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """Options of strategies that take none."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A recipe resolved on devices, before any rule was asked."""

    recipe: Recipe
    devices: Devices
    """Of this machine."""
    strategy: "StrategyRules"
    options: Any
    """Of the strategy."""
    precision: Precision
    ranks_here: int
    """Ranks on this machine."""
    num_nodes: int
    """Machines."""
    trains: bool
    """Whether anything is trained; else answers and losses are computed."""

    @property
    def kind(self) -> DeviceKind:
        """Facts about its kind of device."""
        return device_kind(self.devices.accelerator)

    @property
    def world_size(self) -> int:
        """Number of ranks on all machines."""
        return self.ranks_here * self.num_nodes

    @property
    def shards(self) -> int:
        """Number of ranks over which the parameters of one model are sharded."""
        return self.strategy.shards(self.options, self.ranks_here, self.num_nodes)

    def require_few_bits(self, key: str, value: str, other: str) -> None:
        """Refuse what needs numbers of 4 or 8 bits where a kind of device has none.

        Args:
            key: of the recipe.
            value: of it.
            other: value that works.

        Raises:
            UserError: the kind has none.
        """
        if not self.kind.has_few_bits:
            raise UserError(
                f"{key} is {value}, but accelerator is {self.kind.name}, on which weights and "
                "optimizer state of 4 or 8 bits do not run: bitsandbytes has no kernels for "
                f"it. Try --{key} {other}, or --accelerator cpu."
            )


Rule = Callable[[Facts], list[str]]
"""Refuses, by a UserError, what a recipe asks of a subject and it cannot do; returns notices."""


class StrategyRules:
    """Rules of a strategy, known before torch is loaded; the base class shards nothing."""

    name: ClassVar[str]
    class_path: ClassVar[str]
    """Module and class that runs it: imported only where it is used, because it needs torch."""
    options: ClassVar[type[Any]] = NoOptions
    """Its options, which are the keys below `strategy`."""
    connects_ranks: ClassVar[bool] = True
    """Whether ranks communicate."""
    scales_loss: ClassVar[bool] = True
    """Whether it trains in 16-mixed, where small gradients need a loss scale."""
    keeps_masters: ClassVar[bool] = False
    """Whether it updates float32 copies beside weights of 16 bits, in mixed precision too."""
    shards_base: ClassVar[bool] = False
    """Whether ranks share the weights of a frozen base model."""
    uncompiled: ClassVar[str] = ""
    """Why blocks may not be compiled, and an alternative; empty: they may."""
    rounds: ClassVar[bool] = True
    """Whether torchao's layers, which round their products, were tried with it."""
    shares: ClassVar[str] = ""
    """Why an update does not see whole parameters, in words; empty: it does."""

    waits_for_every_gradient: ClassVar[bool] = False
    """Whether ranks wait for a gradient of every parameter, also of modules that a pass skips."""
    updates_slices: ClassVar[str] = ""
    """That it keeps optimizer state of its own, in words; empty: it does not."""
    for_float16: ClassVar[Any] = None
    """Options with which it is used where numbers of 16 bits need a loss scale, which fsdp has
    not, and no strategy was chosen; None: it is not."""

    @property
    def is_installed(self) -> bool:
        """Whether its library is there."""
        return True

    def context(self, options: Any) -> int:
        """Number of neighbouring ranks that share rows of tokens."""
        return 1

    def sharding(self, options: Any) -> str:
        """Return which state is sharded over the ranks, in words."""
        return "nothing"

    def offloads(self, options: Any) -> bool:
        """Return whether optimizer state is kept in host memory."""
        return False

    def shards(self, options: Any, devices: int, num_nodes: int) -> int:
        """Number of ranks over which the parameters of one model are sharded."""
        return 1

    def needs_all_gradients(self, options: Any) -> str:
        """Return why an update needs all gradients, and an alternative; empty: it does not."""
        return ""

    def refuse(self, facts: Facts) -> None:
        """Refuse what the strategy cannot run, with what to use instead."""

    def check_installed(self) -> None:
        """Refuse a strategy whose library is missing."""

    def environment(self, accelerator: str) -> dict[str, str]:
        """Variables that a rank needs before its first import."""
        return {}
