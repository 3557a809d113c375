"""The plan: a recipe resolved on given devices, once every rule without model and data allows it.

The rules stand with their subjects; `make_plan` asks them before anything is downloaded or started.
"""

import math
from dataclasses import dataclass
from typing import Any

from ftkit.errors import UserError
from ftkit.recipe.adapter_types import check_targets
from ftkit.recipe.batches import (
    MicroBatch,
    count_micro_steps,
    micro_batch,
    usual_micro_batch,
)
from ftkit.recipe.context import check_context
from ftkit.recipe.devices import Devices, ranks_of
from ftkit.recipe.facts import Facts, Rule, StrategyRules
from ftkit.recipe.kernels import check_kernels
from ftkit.recipe.mesh import Mesh
from ftkit.recipe.objectives import check_objective, model_beside, objective_rules
from ftkit.recipe.optimizers import check_optimizer, check_optimizer_bits
from ftkit.recipe.quantizations import check_quantize, check_shared_base
from ftkit.recipe.recipe import Precision, Recipe
from ftkit.recipe.recipe_sections import check_sections
from ftkit.recipe.sections import check_best, check_memory, check_ranges
from ftkit.recipe.strategies import check_float16, check_strategy, resolve_strategy
from ftkit.recipe.strategy_rows import strategy_rules
from ftkit.utils.accelerators.kinds import DeviceKind, device_kind


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A recipe resolved on given devices."""

    recipe: Recipe
    accelerator: str
    """Kind of device, as torch calls it."""
    precision: Precision
    strategy: str
    options: Any
    """Of the strategy."""
    devices: int
    """Ranks on this machine."""
    num_nodes: int
    """Machines."""
    micro_batch_size: int
    """Most sequences per forward pass on one rank, or on those that share rows; never more than the
    global batch."""
    micro_batch_tokens: int | None = None
    """Most tokens per forward pass on one rank, or on those that share rows, but for a longer
    sequence, which runs alone; None: as many as the sequences have."""
    chosen: MicroBatch | None = None
    """These limits, if ftkit chose them; None: the recipe names one."""
    has_flash: bool = False
    """Whether its devices have flash attention in its number format."""
    notices: tuple[str, ...] = ()
    """Notices to print before the run, one line each."""

    @property
    def world_size(self) -> int:
        """Number of ranks on all machines."""
        return self.devices * self.num_nodes

    @property
    def mesh(self) -> Mesh:
        """Which of the ranks share what."""
        return Mesh(world_size=self.world_size, context=self.rules.context(self.options))

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
        # The samples of a step are spread evenly over the ranks that have their own.
        of_rank = math.ceil(self.recipe.train.global_batch_size / self.mesh.data_ranks)
        return min(self.micro_batch_size, of_rank)

    @property
    def rows(self) -> int:
        """Samples of every micro-batch, fillers included, where all have the same shape."""
        samples = self.recipe.train.global_batch_size
        if self.recipe.train.global_batch_tokens is not None:
            return self.micro_batch_size
        # In as many micro-steps, with the fewest fillers.
        ranks = self.mesh.data_ranks
        places = count_micro_steps(samples, self.micro_batch_size, ranks)
        return math.ceil(samples / (places * ranks))

    @property
    def rules(self) -> StrategyRules:
        """Rules of its strategy."""
        return strategy_rules(self.strategy)

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
        ranks = self.mesh.data_ranks
        fewest = count_micro_steps(samples, self.micro_batch_size, ranks)
        most = count_micro_steps(samples, 1, ranks)
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
        return count_micro_steps(samples, self.sequences_of(tokens), self.mesh.data_ranks)


_RULES: tuple[Rule, ...] = (
    check_strategy,
    check_context,
    check_shared_base,
    check_optimizer,
    check_float16,
    check_targets,
    check_best,
    check_quantize,
    check_optimizer_bits,
    check_kernels,
    check_sections,
    check_memory,
)
"""In the order in which they are asked. The first rule that a recipe breaks refuses it."""


def make_plan(
    recipe: Recipe,
    devices: Devices,
    *,
    trains: bool = True,
    chosen: MicroBatch | None = None,
) -> Plan:
    """Resolve every "auto", check every rule that needs neither model nor data.

    Args:
        recipe: the recipe.
        devices: of this machine.
        trains: False: only answers and losses are computed.
        chosen: the micro-batch where the recipe leaves it open; None: the usual one.

    Raises:
        UserError: a value out of its range, or a setting that the devices cannot run.
    """
    check_ranges(recipe)
    if trains:  # answers of a result need no plugin
        check_objective(recipe)
    count, nodes = ranks_of(recipe, devices)
    strategy, options, precision, notices = resolve_strategy(recipe, devices, count, nodes)
    facts = Facts(
        recipe=recipe,
        devices=devices,
        strategy=strategy_rules(strategy),
        options=options,
        precision=precision,
        ranks_here=count,
        num_nodes=nodes,
        trains=trains,
    )
    notices += [devices.notice] * bool(devices.notice)
    for rule in _RULES:
        notices += rule(facts)
    if not recipe.train.is_open:
        chosen = None
    elif chosen is None:
        mesh = Mesh(world_size=facts.world_size, context=facts.strategy.context(options))
        chosen = usual_micro_batch(recipe.train, facts.kind, mesh)
    size, tokens, notes = micro_batch(facts, chosen)
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
        chosen=chosen,
        has_flash=facts.kind.has_flash
        and devices.bf16_native  # in the same generation of GPUs
        and precision != "32-true",
        notices=(*notices, *notes),
    )
    if trains and recipe.train.optimizer_in_backward:
        _check_in_backward(plan)
    return plan


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
        whole = math.ceil(train.global_batch_size / plan.mesh.data_ranks)
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
