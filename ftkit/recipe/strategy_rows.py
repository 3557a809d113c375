"""Strategies without torch: names, options, and what each cannot run."""

import math
from dataclasses import dataclass
from typing import Literal

from ftkit.errors import UserError
from ftkit.recipe.facts import Facts, StrategyRules
from ftkit.utils.registry import Registry


@dataclass(frozen=True, kw_only=True)
class DdpOptions:
    """Options of `strategy: ddp`, which fsdp has too."""

    context: int = 1
    """Neighbouring ranks that share the sequences of each micro-batch: each has a piece of its
    tokens, so that activations take 1 / context of the memory. The loss stays the same."""


@dataclass(frozen=True, kw_only=True)
class FsdpOptions(DdpOptions):
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


class SingleRules(StrategyRules):
    """Rules of training on one rank."""

    name = "single"
    class_path = "ftkit.strategies.strategy.Single"
    connects_ranks = False


class DdpRules(StrategyRules):
    """Rules of DDP: every rank has the whole model and optimizer state."""

    name = "ddp"
    class_path = "ftkit.strategies.strategy.Ddp"
    options = DdpOptions

    def context(self, options: DdpOptions) -> int:
        return options.context

    def needs_all_gradients(self, options: DdpOptions) -> str:
        return "keeps memory for all gradients, in which ranks add them up. Try --strategy fsdp"


class FsdpRules(StrategyRules):
    """Rules of FSDP: every rank has rows of each parameter."""

    name = "fsdp"
    class_path = "ftkit.strategies.fsdp.Fsdp"
    options = FsdpOptions
    shares = "with fsdp a rank only has some rows of each"
    scales_loss = False
    shards_base = True

    def context(self, options: FsdpOptions) -> int:
        return options.context

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
        # On one node it is FULL_SHARD, and with one device for each node it is DDP.
        is_hybrid = facts.options.sharding == "HYBRID_SHARD"
        if is_hybrid and min(facts.ranks_here, facts.num_nodes) == 1:
            raise UserError(
                "strategy.sharding is HYBRID_SHARD, which shards among the devices of each node, "
                f"but devices is {facts.ranks_here} and num_nodes is {facts.num_nodes}: both must "
                "be at least 2. Try --strategy.sharding FULL_SHARD."
            )
        if is_hybrid and facts.ranks_here % facts.options.context:
            raise UserError(
                f"strategy.context is {facts.options.context} and strategy.sharding is "
                f"HYBRID_SHARD, but devices is {facts.ranks_here}: ranks that share sequences must "
                "be of one node. Try --strategy.sharding FULL_SHARD, or --strategy.context "
                f"{math.gcd(facts.ranks_here, facts.options.context)}."
            )


STRATEGIES = Registry("strategies", (StrategyRules,), core=(SingleRules(), DdpRules(), FsdpRules()))


def strategy_rules(name: str) -> StrategyRules:
    """Return the rules of a strategy.

    Raises:
        UserError: there is none of this name.
    """
    rules = STRATEGIES.get(name)
    if rules is None:
        raise UserError(
            f"strategy is {name!r}, but must be one of: {', '.join(strategy_names())}. "
            "Try --strategy auto."
        )
    return rules


def strategy_names() -> list[str]:
    """Names that a recipe may give."""
    return ["auto", *STRATEGIES.names]
