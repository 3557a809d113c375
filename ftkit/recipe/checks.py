"""Range checks of the keys of a recipe, which need neither the model nor the data."""

import importlib.util
import math
import os
import shutil
from dataclasses import fields

from ftkit.errors import UserError
from ftkit.recipe.devices import Devices
from ftkit.recipe.recipe import LAYER_SWITCHES, LoggerName, LoraRecipe, Recipe
from ftkit.utils.accelerators.kinds import device_kind
from ftkit.utils.console.formatting import parse_duration
from ftkit.utils.remote.urls import display_path, url_of

_PACKAGE_OF: dict[LoggerName, str] = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow-skinny",
    "trackio": "trackio",
}
"""The package to install for a logger."""


def check_ranges(recipe: Recipe) -> None:
    """Refuse each value out of its range, with one in it."""
    train, evaluation = recipe.train, recipe.eval
    for key, value, least in (
        ("train.global_batch_size", train.global_batch_size, 1),
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
        ("checkpoint.keep_best", recipe.checkpoint.keep_best, 0),
        ("memory.activation_checkpointing", recipe.memory.activation_checkpointing or 1, 1),
        ("eval.interval", evaluation.interval, 0),
        ("eval.patience", evaluation.patience, 1),
        ("eval.max_iters", evaluation.max_iters, 1),
        ("eval.max_new_tokens", evaluation.max_new_tokens, 0),
        ("eval.exact_match", evaluation.exact_match, 0),
        ("eval.rouge_l", evaluation.rouge_l, 0),
        ("eval.limit", evaluation.limit, 1),
        ("eval.num_fewshot", evaluation.num_fewshot, 0),
        ("eval.evaluate_example", evaluation.evaluate_example, 0),
        ("devices", recipe.devices, 1),
        ("num_nodes", recipe.num_nodes, 1),
        ("seed", recipe.seed, 0),
    ):
        if isinstance(value, int) and value < least:
            raise UserError(f"{key} is {value}, but must be at least {least}. Try --{key} {least}.")
    for key, number in (("train.max_time", train.max_time), ("train.max_norm", train.max_norm)):
        if number is not None and not number > 0:
            raise UserError(
                f"{key} is {number:g}, but must be above 0. Try --{key} null for no limit."
            )
    factor = recipe.router_aux_loss_coef
    if factor is not None and not 0 <= factor < math.inf:
        rule = "be finite" if factor == math.inf else "not be negative"
        raise UserError(
            f"router_aux_loss_coef is {factor:g}, but must {rule}. "
            "Try --router_aux_loss_coef 0.001."
        )
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
    if not 0 <= train.min_lr < math.inf:
        raise UserError(
            f"train.min_lr is {train.min_lr:g}, but must be a number of at least 0. "
            "Try --train.min_lr 0."
        )
    if not 0 < train.lr_decay_fraction <= 1:
        raise UserError(
            f"train.lr_decay_fraction is {train.lr_decay_fraction:g}, but must be above 0 and at "
            "most 1. Try --train.lr_decay_fraction 0.1."
        )
    if not 0 <= train.label_smoothing < 1:
        raise UserError(
            f"train.label_smoothing is {train.label_smoothing:g}, but must lie in [0, 1). "
            "Try --train.label_smoothing 0.1."
        )
    alpha = train.neftune_noise_alpha
    if alpha is not None and not 0 < alpha < math.inf:
        raise UserError(
            f"train.neftune_noise_alpha is {alpha:g}, but must be above 0. "
            "Try --train.neftune_noise_alpha 5, or null for no noise."
        )
    decay = train.ema_decay
    if decay is not None and not 0 < decay < 1:
        raise UserError(
            f"train.ema_decay is {decay:g}, but must lie between 0 and 1. "
            "Try --train.ema_decay 0.999, or null for no average."
        )
    fraction = train.lr_warmup_fraction
    if fraction is not None and not 0 <= fraction <= 1:
        raise UserError(
            f"train.lr_warmup_fraction is {fraction:g}, but must lie between 0 and 1. "
            "Try --train.lr_warmup_fraction 0.1."
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
    if evaluation.patience is not None and not evaluation.interval:
        raise UserError(
            f"eval.patience is {evaluation.patience}, but eval.interval is 0: there is no "
            "validation while training. Try --eval.interval 100, or --eval.patience null."
        )
    if recipe.checkpoint.result == "best" and not recipe.checkpoint.save:
        raise UserError(
            "checkpoint.result is best, but checkpoint.save is false: no checkpoint is kept. "
            "Try --checkpoint.save true, or --checkpoint.result last."
        )
    if evaluation.rouge_l and not evaluation.max_new_tokens:
        raise UserError(
            f"eval.rouge_l is {evaluation.rouge_l}, but eval.max_new_tokens is "
            f"{'empty' if evaluation.max_new_tokens is None else 0}: how long may answers be? "
            "Try --eval.max_new_tokens 100."
        )
    example = evaluation.evaluate_example
    if isinstance(example, str) and example not in ("first", "random"):
        raise UserError(
            f'eval.evaluate_example is {example!r}, but must be "first", "random" or the index of '
            "a validation record. Try --eval.evaluate_example first."
        )
    if isinstance(recipe, LoraRecipe):
        _check_lora(recipe)


def check_best(recipe: Recipe, nodes: int) -> None:
    """Refuse a result that not all machines could read the checkpoint of.

    Args:
        recipe: what is asked.
        nodes: machines.
    """
    if recipe.checkpoint.result == "best" and nodes > 1 and url_of(recipe.out_dir):
        raise UserError(
            f"checkpoint.result is best and out_dir is {display_path(recipe.out_dir)}: each of the "
            f"{nodes} machines has shards of its own ranks there. Try --out_dir on a disk that all "
            "of them share, or --checkpoint.result last."
        )


def check_validations(recipe: Recipe, total_steps: int) -> list[str]:
    """What is asked of validations while a run trains, once its length is known; what to tell.

    Args:
        recipe: what is asked.
        total_steps: of the run.

    Raises:
        UserError: the best checkpoint is to be the result, and none is validated.
    """
    settings, patience = recipe.eval, recipe.eval.patience
    before_last = (total_steps - 1) // settings.interval if settings.interval else 0
    if recipe.checkpoint.result == "best" and not before_last and not settings.final_validation:
        raise UserError(
            f"checkpoint.result is best, but none of the {total_steps} steps is validated: "
            f"eval.interval is {settings.interval} and eval.final_validation is false. "
            f"Try --eval.interval {max(1, total_steps // 4)}, or --checkpoint.result last."
        )
    if patience is None or before_last >= patience:
        return []
    notice = (
        f"eval.patience {patience} cannot end this run of {total_steps} steps before its last one: "
        f"eval.interval is {settings.interval}. "
        f"Try --eval.interval {max(1, total_steps // (4 * patience))}."
    )
    return [notice]


def _intervals(keep_every: int | dict[int, int] | None) -> list[tuple[str, int | None, int]]:
    """The numbers of `checkpoint.keep_every` with their smallest values."""
    if not isinstance(keep_every, dict):
        return [("checkpoint.keep_every", keep_every, 1)]
    numbers = [number for pair in keep_every.items() for number in pair]
    if not numbers or min(numbers) < 1:
        raise UserError(
            f"checkpoint.keep_every is {keep_every}, but must have steps and intervals of at least "
            'one step. Try --checkpoint.keep_every "{1000: 100, 10000: 1000}".'
        )
    return []


def check_kernels(recipe: Recipe, devices: Devices, strategy: str, *, compiles: bool) -> None:
    """Refuse what cannot compute here.

    Args:
        recipe: its keys `compile` and `kernels`.
        devices: of this machine.
        strategy: what it came to.
        compiles: whether blocks may be compiled under it.
    """
    if recipe.kernels == "liger" and not device_kind(devices.accelerator).has_triton:
        raise UserError(
            f"kernels is liger, but the accelerator is {devices.accelerator} and these kernels are "
            "for CUDA. "
            "Try --kernels torch."
        )
    if recipe.kernels == "liger" and recipe.compile:
        raise UserError(
            "kernels is liger and compile is true, which have not been tried together; compiled "
            "blocks fuse the same operations. Try --kernels torch, or --compile false."
        )
    if recipe.kernels == "liger" and recipe.train.label_smoothing:
        raise UserError(
            f"train.label_smoothing is {recipe.train.label_smoothing:g} and kernels is liger, "
            "whose loss has not been tried with it. Try --kernels torch."
        )
    if recipe.compile and not compiles:
        raise UserError(
            f"compile is true, but {strategy} gathers the parameters of each layer in the middle "
            "of a block. Try --strategy fsdp, or --compile false."
        )


def check_kernels_installed(recipe: Recipe, accelerator: str) -> None:
    """Refuse a run whose kernels, or what compiles them, are missing.

    Raises:
        UserError: names what to install.
    """
    if recipe.kernels == "liger" and not has_liger():
        raise UserError(
            "kernels is liger, but Liger-Kernel is not installed. Try pip install "
            "'liger-kernel>=0.8.5', or --kernels torch."
        )
    variable, usual = ("CXX", "g++") if accelerator == "cpu" else ("CC", "gcc")
    compiler = os.environ.get(variable, usual)
    needs_compiler = recipe.compile or recipe.kernels == "liger"
    if needs_compiler and shutil.which(compiler) is None:
        key, off = ("compile", "false") if recipe.compile else ("kernels", "torch")
        raise UserError(
            f"{key} needs a compiler on this machine, but there is no {compiler}. Install it or "
            f"set ${variable}, or try --{key} {off}."
        )


def check_loggers_installed(recipe: Recipe) -> None:
    """Refuse a run whose loggers are missing.

    Raises:
        UserError: names what to install.
    """
    for name in recipe.extra_loggers:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"logger_name has {name}, but it is not installed. Try pip install "
                f"{_PACKAGE_OF[name]}, or --logger_name csv."
            )


def has_liger() -> bool:
    """Whether Liger's kernels can be called."""
    return all(importlib.util.find_spec(name) for name in ("liger_kernel", "triton"))


def ignored_layers(recipe: Recipe) -> list[str]:
    """What chooses layers and is not looked at, because lora_targets does."""
    if not isinstance(recipe, LoraRecipe) or recipe.lora_targets is None:
        return []
    defaults = {field.name: field.default for field in fields(recipe)}
    ignored = [key for key in LAYER_SWITCHES if getattr(recipe, key) != defaults[key]]
    return [f"lora_targets chooses the layers: {', '.join(ignored)} has no effect."] * bool(ignored)


def _check_lora(recipe: LoraRecipe) -> None:
    if recipe.lora_r < 1:
        raise UserError(f"lora_r is {recipe.lora_r}, but must be at least 1. Try --lora_r 8.")
    if not recipe.lora_alpha > 0:
        raise UserError(
            f"lora_alpha is {recipe.lora_alpha:g}, but must be above 0. Try --lora_alpha 16."
        )
    if not 0 <= recipe.lora_dropout < 1:
        raise UserError(
            f"lora_dropout is {recipe.lora_dropout:g}, but must lie in [0, 1). "
            "Try --lora_dropout 0.05."
        )
    ratio = recipe.lora_plus_ratio
    if ratio is not None and not (0 < ratio < math.inf):
        raise UserError(
            f"lora_plus_ratio is {ratio:g}, but must be above 0. Try --lora_plus_ratio 16."
        )
    if recipe.lora_variant == "dora" and recipe.lora_init != "default":
        raise UserError(
            f"lora_init is {recipe.lora_init}, but lora_variant dora starts from the lengths of "
            "the base model's own rows. Try --lora_init default."
        )
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


def _check_lora_of_experts(recipe: LoraRecipe) -> None:
    """Refuse what PEFT's adapters of experts do not know."""
    for key, value, known in (
        ("lora_dropout", f"{recipe.lora_dropout:g}", ["0"]),
        ("lora_variant", recipe.lora_variant, ["lora", "rslora"]),
        ("lora_init", recipe.lora_init, ["default"]),
    ):
        if value not in known:
            raise UserError(
                f"{key} is {value}, but lora_experts is true, and a PEFT adapter of experts knows "
                f"{' and '.join(known)} alone. Try --{key} {known[0]}, or --lora_experts false."
            )
