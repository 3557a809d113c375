"""Suggestions: the smallest changes that make a recipe fit a GPU, fastest first."""

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ftkit.errors import UserError
from ftkit.planning.gpus import HOST, Gpu
from ftkit.planning.predict import Planned, largest_that_fits
from ftkit.recipe.optimizers import strategies_of, traits_of
from ftkit.recipe.parsing import Override
from ftkit.recipe.plugin import plugin_in_use
from ftkit.recipe.readers import Terms
from ftkit.recipe.recipe import LoraRecipe
from ftkit.utils.json_values import without_tokens

Try = Callable[[Sequence[Override]], Planned]
"""The plan with some keys changed."""
# GPUs of one usual machine.
_DEVICES = (2, 4, 8)
_SHARDED, _SHARED = "FSDP on", "sequences over"
"""Beginnings of titles of changes that are tried with several numbers of ranks."""
_IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable", "maximize", "amsgrad")
"""Arguments of torch's optimizers that bitsandbytes' do not know or that mean something else."""
_FEWEST_TOKENS = 128
"""Fewest tokens that samples are cut to, as the last resort."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Changed keys of a recipe, and the resulting plan."""

    title: str
    overrides: tuple[Override, ...]
    planned: Planned

    def command(self, files: Sequence[str], given: Sequence[Override], terms: Terms) -> str:
        """The run with this change, as a line to copy."""
        return run_command(self.planned, files, [*given, *self.overrides], terms)


def run_command(
    planned: Planned, files: Sequence[str], keys: Sequence[Override], terms: Terms
) -> str:
    """Command line that runs the plan."""
    method = planned.plan.recipe.method
    words = ["ftkit", "finetune" if method == "lora" else "finetune_full"]
    for file in files:
        words += ["--config", file]
    for key, value in dict(keys).items():
        words += [f"--{key}", value]
    if (plugin := plugin_in_use()) is not None:
        words += ["--plugin", plugin.file]
    words += terms.words
    return shlex.join(without_tokens(words))


def changes_that_fit(planned: Planned, attempt: Try, *, most: int | None = None) -> list[Change]:
    """Changes after which the plan fits or may fit, one for each thing that is given up.

    Args:
        planned: a plan that does not fit, with its GPU.
        attempt: plans the recipe with some keys changed.
        most: look for no more than this many.
    """
    assert planned.gpu is not None
    if planned.fits:
        return []
    single = list(_single(planned, planned.gpu))
    found: list[Change] = []

    def enough() -> bool:
        return most is not None and sum(bool(change.planned.fits) for change in found) >= most

    # One change at a time, in the order of what they cost.
    for step in single:
        if enough():
            break
        counted = next((title for title in (_SHARDED, _SHARED) if title in step.title), None)
        if counted and any(c.planned.fits and counted in c.title for c in found):
            continue  # fewer are enough
        if change := _least(planned, [step], attempt):
            found.append(change)
    if not any(change.planned.fits for change in found):
        # Nothing is enough on its own: keep what is learned, give up one thing after the other.
        for steps in _together(single):
            change = _least(planned, steps, attempt)
            if change is not None:
                found.append(change)
                if change.planned.fits:
                    break
    if not enough() and (shorter := _shorter(planned, planned.gpu, attempt)):
        found.append(shorter)
    return found


@dataclass(frozen=True)
class _Step:
    title: str
    overrides: tuple[Override, ...]


def _single(planned: Planned, gpu: Gpu) -> Iterator[_Step]:
    """Single changes that save memory, fastest first."""
    plan, recipe = planned.plan, planned.plan.recipe
    if planned.micro_batch.full > planned.micro_batch.least:
        yield _Step("smaller micro-batch, same global batch", ())
    in_16_bits = _Step("16-bit numbers", (("precision", "bf16-true"),))
    is_16_bit, is_host = plan.precision == "bf16-true", gpu.name == HOST
    if gpu.bf16 and not is_16_bit:
        yield in_16_bits
    # GPUs without bfloat16 need a loss scale for 16 bits, which not every strategy has.
    elif not (gpu.bf16 or is_host) and plan.precision == "32-true" and plan.rules.scales_loss:
        yield _Step("16-bit arithmetic", (("precision", "16-mixed"),))
    if _could_update_in_backward(planned):
        keys = (("train.optimizer_in_backward", "true"),)
        yield _Step("updates in the backward pass", keys)
    optimizer = recipe.optimizer
    smaller = traits_of(optimizer["class_path"]).in_8_bits
    if smaller and plan.strategy in strategies_of(smaller):
        # Learning rate, betas and the like have the same names and meanings in both packages.
        kept = {k: v for k, v in optimizer["init_args"].items() if k not in _IMPLEMENTATION}
        yield _Step(
            "8-bit optimizer state",
            (
                ("optimizer", smaller),
                # Set again, because another class starts from its own defaults.
                *((f"optimizer.{key}", json.dumps(value)) for key, value in kept.items()),
            ),
        )
    if not recipe.memory.activation_checkpointing:
        yield _Step("activation checkpointing", (("memory.activation_checkpointing", "true"),))
    # Refused where strategy, model or data do not allow it.
    for count in _DEVICES:
        if count > plan.mesh.context and plan.world_size % count == 0:
            yield _shared_by(count)
    if planned.beside is not None and plan.shards_beside < plan.world_size and plan.shards == 1:
        yield _Step("frozen model sharded", (("memory.shard_model_beside", "true"),))
    if not isinstance(recipe, LoraRecipe):
        # Any LoRA key makes the recipe one of LoRA.
        yield _Step("LoRA", (("lora_r", "16"),))
    is_packed = isinstance(recipe, LoraRecipe) and recipe.quantize is not None
    if planned.can_stay and not is_packed:
        yield _Step("weights as published", (("quantize", "stored"),))
    if not is_packed:
        yield _Step("QLoRA", (("quantize", "bnb.nf4-dq"),))
    if is_host:  # which more ranks would share
        # A CPU that emulates bfloat16 is many times slower in it than with any other change.
        if not gpu.bf16 and not is_16_bit:
            yield in_16_bits
        return
    for count in _DEVICES:
        if plan.num_nodes == 1 and count > plan.devices:
            yield _Step(f"{_SHARDED} {count} GPUs", (("devices", str(count)), ("strategy", "fsdp")))
    if not plan.rules.offloads(plan.options):
        yield _Step(
            "parameters and optimizer in host memory",
            (("strategy", "fsdp"), ("strategy.cpu_offload", "true")),
        )


def _could_update_in_backward(planned: Planned) -> bool:
    """Return whether gradients take much memory, and nothing needs all of them at once."""
    plan, train = planned.plan, planned.plan.recipe.train
    return (
        not isinstance(plan.recipe, LoraRecipe)
        and not train.optimizer_in_backward
        and train.max_norm is None
        and plan.micro_steps == 1
        and plan.precision != "16-mixed"
        and not plan.rules.needs_all_gradients(plan.options)
    )


def _shared_by(ranks: int) -> _Step:
    return _Step(f"{_SHARED} {ranks} ranks", (("strategy.context", str(ranks)),))


def _together(single: Sequence[_Step]) -> Iterator[list[_Step]]:
    """Several changes at once, more and more of them."""
    by_title = {step.title: step for step in single}
    gentle = [by_title[title] for title in _GENTLE if title in by_title]
    # The gentle changes first, more and more of them; later attempts begin with all of them.
    for count in range(2, len(gentle) + 1):
        yield gentle[:count]
    for title in ("LoRA", "QLoRA"):
        if title in by_title:
            yield [*gentle, by_title[title]]
    for count in _DEVICES:
        if step := by_title.get(f"{_SHARED} {count} ranks"):
            yield [*gentle, step]
    for count in _DEVICES:
        if step := by_title.get(f"{_SHARDED} {count} GPUs"):
            yield [*gentle, step]
            if "QLoRA" in by_title:
                yield [*gentle, by_title["QLoRA"], step]
            yield [*gentle, step, _shared_by(count)]


_GENTLE = (
    "16-bit numbers",
    "16-bit arithmetic",
    "activation checkpointing",
    "8-bit optimizer state",
    "frozen model sharded",
)


def _least(planned: Planned, steps: Sequence[_Step], attempt: Try) -> Change | None:
    """The changes with the largest micro-batch that fits; None: not even one sequence does."""
    overrides = tuple(pair for step in steps for pair in step.overrides)
    title = " + ".join(step.title for step in steps)
    try:
        # With the full micro-batch first, because a smaller one is slower.
        whole = attempt(overrides) if overrides else planned
        if whole.fits:
            return Change(title=title, overrides=overrides, planned=whole)
        key = f"train.{whole.micro_batch.key}"
        fitting = largest_that_fits(whole, lambda bound: attempt((*overrides, (key, str(bound)))))
    except UserError:  # the recipe's other settings do not go with it
        return None
    if fitting is None:
        return (
            Change(title=title, overrides=overrides, planned=whole) if whole.fits is None else None
        )
    return Change(
        title=f"{title}, smaller micro-batch" if overrides else title,
        overrides=(*overrides, (key, str(fitting.micro_batch.full))),
        planned=fitting,
    )


def _shorter(planned: Planned, gpu: Gpu, attempt: Try) -> Change | None:
    """Samples cut to the most tokens that fit, a power of two; None: not even the fewest fit.

    This is the last resort, because only it changes what is learned.
    """
    whole = planned.length.tokens
    if whole <= _FEWEST_TOKENS:
        return None

    def cut_to(tokens: int) -> Change:
        title = f"samples cut to {tokens:,} tokens, which changes training"
        overrides = (("train.max_seq_length", str(tokens)),)
        return Change(title=title, overrides=overrides, planned=attempt(overrides))

    # If even the fewest tokens do not fit, nothing between them and all does.
    fewest = cut_to(_FEWEST_TOKENS)
    if not fewest.planned.fits:
        return None
    there = fewest.planned.memory.high_bytes
    # A straight line between both ends tells which lengths need not be simulated.
    token_bytes = (planned.memory.high_bytes - there) / (whole - _FEWEST_TOKENS)
    tokens = 2 ** ((whole - 1).bit_length() - 1)  # the highest below it
    while tokens > _FEWEST_TOKENS:
        if there + (tokens - _FEWEST_TOKENS) * token_bytes <= gpu.memory_bytes:
            found = cut_to(tokens)
            if found.planned.fits:
                return found
        tokens //= 2
    return fewest
