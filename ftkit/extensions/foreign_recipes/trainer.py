"""Keys of transformers' TrainingArguments, which LLaMA-Factory and TRL share, and their meaning.

Learning rates, steps and batches follow transformers 5's Trainer.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

from ftkit.extensions.foreign_recipes.translation import (
    OFF,
    Reading,
    Row,
    idle,
    missing,
    part,
    same,
)
from ftkit.recipe.optimizers import names_elsewhere

SERVICE = "ftkit logs to a service only if the command line says so: --logger_name"
ON_HUB = "nothing is pushed: see ftkit push"
ON_RESUME = "a run is continued only if the command line says so: --resume auto"
REMOTE_CODE = "ftkit never executes the code of a model"
COST = "affects time and memory, never what is learned"
LAYOUT = "how devices share the work never changes what is learned: --strategy, --devices"
SHOWN = "ftkit shows and keeps every step"
FILES = "a matter of files"
BY_LENGTH = "it saves padding, of which there is none here, and is another order of samples"


SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_sqrt",
}
"""Schedules by their names in transformers."""


_DATA_ENDINGS = (".json", ".jsonl", ".csv", ".parquet")


def held_out(reading: Reading, key: str, share: Any, *, others: bool = False) -> None:
    """Tell how the validation records that a key holds out differ, and validate on nothing else.

    Args:
        reading: the file.
        key: of the file that says how many are held out.
        share: its number.
        others: whether the file names other records to validate on.
    """
    if share:
        reading.tell(
            f"{key}: the number of validation records is rounded up there and down here, and they "
            "are others"
        )
    elif not others:
        # The records to train on would be those to validate on, all of them.
        reading.set(eval__final_validation=False)


def adapt(reading: Reading, names: Any) -> None:
    """Set the layers to adapt. Of a list, PEFT leaves out names that the model does not have."""
    if names in ("all-linear", ["all-linear"]):
        names = "all-linear"
    reading.set(lora_targets=names)
    if isinstance(names, list) and len(names) > 1:
        reading.set(lora_skip_missing=True)


def train_layers(
    reading: Reading, key: str, layers: int, modules: list[str], extra: list[str] | None
) -> None:
    """Train a part of the model as LLaMA-Factory's freeze tuning chooses it.

    Args:
        reading: the file.
        key: of the file that asks for it.
        layers: as many of the last layers; negative: of the first.
        modules: parts of these layers; all: everything.
        extra: modules outside of the layers.
    """
    if layers == 0:
        reading.refuse(key, "training of no layer")
    which = f"last {layers}" if layers > 0 else f"first {-layers}"
    inside = "" if "all" in modules else f"(?:{'|'.join(map(re.escape, modules))})"
    # The first number in a name is that of a layer; others may be those of experts.
    chosen = [rf"^\D*[.]{{{which}}}[.]{inside}", *map(re.escape, extra or ())]
    reading.set(train__only="|".join(chosen))


ROWS: list[Row] = [
    part("learning_rate", "number>=0", "optimizer.lr", 5e-5, ""),
    part("weight_decay", "number>=0", ("optimizer.weight_decay", "train.decay_norms_and_biases"),
         0.0,
         "norms and biases do not decay"),
    part("adam_beta1", "number>=0<1", "optimizer.betas", 0.9, ""),
    part("adam_beta2", "number>=0<1", "optimizer.betas", 0.999, ""),
    part("adam_epsilon", "number>=0", "optimizer.eps", 1e-8, ""),
    part("optim", "text", "optimizer", "adamw_torch_fused", "by name"),
    part("lr_scheduler_type", "text", ("train.lr_schedule", "train.lr_ends", "train.min_lr"),
         "linear",
         "with lr_ends around, the rates of transformers step by step"),
    part("warmup_steps", "number>=0", ("train.lr_warmup_steps", "train.lr_warmup_run_fraction"), 0,
         "below 1 a share of the run"),
    part("warmup_ratio", "number>=0<=1", ("train.lr_warmup_steps", "train.lr_warmup_run_fraction"),
         None,
         "a share of all steps of the run, not of an epoch"),
    part("per_device_train_batch_size", "whole>=1",
         ("train.global_batch_size", "train.micro_batch_size"), 8,
         "times gradient_accumulation_steps and devices"),
    part("gradient_accumulation_steps", "whole>=1", "train.global_batch_size", 1,
         "samples of a step = this x per_device_train_batch_size x devices"),
    part("num_train_epochs", "number>0", "train.epochs", 3.0, "whole numbers"),
    part("max_steps", "whole", "train.max_steps", -1, "in the place of epochs"),
    same("max_grad_norm", "number>=0", "train.max_norm", 1.0, "0: no clipping",
         value=lambda x: x or None),
    same("seed", "whole>=0", "seed", 42),
    same("neftune_noise_alpha", "number>=0", "train.neftune_noise_alpha", None),
    same("label_smoothing_factor", "number>=0<1", "train.label_smoothing", 0.0),
    same("torch_compile", "flag", "compile", False),
    part("gradient_checkpointing", "flag", "memory.activation_checkpointing", False, ""),
    part("bf16", "flag", "precision", False, ""),
    part("fp16", "flag", "precision", False, ""),
    same("output_dir", "text", "out_dir", "trainer_output"),
    part("save_steps", "number>=0", ("train.save_interval", "train.save_interval_epochs"), 500, ""),
    part("save_strategy", "text|no", ("train.save_interval", "train.save_interval_epochs"),
         "steps", ""),
    same("save_total_limit", "whole", "checkpoint.keep_last", None, "ftkit keeps 3 by default",
         value=lambda x: max(1, x)),
    part("eval_steps", "number>=0", ("eval.interval", "eval.interval_epochs"), None, ""),
    part("eval_strategy", "text|no", ("eval.interval", "eval.final_validation"), "no", ""),
    same("eval_on_start", "flag", "eval.initial_validation", False),
    part("load_best_model_at_end", "flag", "checkpoint.result", False, "best or last"),
    *idle("the result is the one with the lowest validation loss", "metric_for_best_model",
          "greater_is_better"),
    *idle(SERVICE, "report_to", "run_name", "project", "trackio_space_id", "logging_dir",
          "use_swanlab", "swanlab_project", "swanlab_workspace", "swanlab_run_name", "swanlab_mode",
          "swanlab_api_key", "swanlab_logdir", "swanlab_lark_webhook_url", "swanlab_lark_secret",
          "trackio_bucket_id", "trackio_static_space_id"),
    *idle(ON_HUB, "push_to_hub", "hub_model_id", "hub_token", "hub_strategy", "hub_private_repo",
          "hub_always_push", "hub_revision"),
    *idle(ON_RESUME, "resume_from_checkpoint", "restore_callback_states_from_checkpoint",
          "ignore_data_skip", "enable_jit_checkpoint"),
    *idle(REMOTE_CODE, "trust_remote_code"),
    *idle(SHOWN, "logging_steps", "logging_first_step", "logging_strategy",
          "logging_nan_inf_filter",
          "log_level", "log_level_replica", "log_on_each_node", "disable_tqdm", "plot_loss",
          "include_num_input_tokens_seen", "include_tokens_per_second", "compute_accuracy",
          "include_for_metrics", "batch_eval_metrics", "debug"),
    *idle("ftkit validates from the first interval on", "eval_delay"),
    *idle(FILES, "overwrite_output_dir", "save_only_model", "save_safetensors",
          "save_on_each_node"),
    *idle(COST, "per_device_eval_batch_size", "dataloader_num_workers", "dataloader_pin_memory",
          "dataloader_persistent_workers", "dataloader_prefetch_factor", "tf32", "bf16_full_eval",
          "use_liger_kernel", "gradient_checkpointing_kwargs", "torch_compile_backend",
          "torch_compile_mode", "torch_empty_cache_steps", "remove_unused_columns",
          "full_determinism",
          "eval_accumulation_steps", "auto_find_batch_size", "attn_implementation", "use_cpu",
          "skip_memory_metrics", "activation_offloading", "prediction_loss_only",
          "fp16_full_eval", "liger_kernel_config", "use_cache", "eval_do_concat_batches",
          "eval_use_gather_object", "dataloader_multiprocessing_context", "dataloader_in_order",
          "label_names", "length_column_name"),
    *idle(LAYOUT, "deepspeed", "fsdp", "fsdp_config", "ddp_timeout", "ddp_backend",
          "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "local_rank",
          "accelerator_config", "parallelism_config", "data_seed", "ddp_static_graph"),
    *idle("every command trains", "do_train", "do_eval"),
    *missing("evaluation by generated answers of the Trainer", "predict_with_generate",
             "do_predict"),
    *missing("dropping the last incomplete batch", "dataloader_drop_last"),
    *idle(BY_LENGTH, "group_by_length"),
    part("train_sampling_strategy", "text", "data.shuffle", "random",
         "random, sequential; group_by_length is random here, where nothing is padded"),
    *missing("settings of the schedule", "lr_scheduler_kwargs"),
    *missing("settings of the optimizer", "optim_args", "optim_target_modules"),
    *missing("averaging the devices' losses without their tokens", "average_tokens_across_devices",
             harmless=(True,)),
]  # fmt: skip
"""Rows of TrainingArguments."""


def schedule(reading: Reading, kind: str, *, name: str = "lr_scheduler_type") -> None:
    """Set the learning rate of every step, as transformers has it."""
    if kind not in SCHEDULES:
        reading.refuse(name, "learning-rate schedule")
    reading.set(train__lr_schedule=SCHEDULES.get(kind, "cosine"))
    if kind in ("linear", "cosine", "inverse_sqrt"):
        reading.set(train__min_lr=0.0)
    reading.set(train__lr_ends="around")


def warm_up(reading: Reading, kind: str) -> None:
    """Set the warm-up from warmup_steps and warmup_ratio."""
    share = reading["warmup_steps"] or reading["warmup_ratio"] or 0
    steps = reading.recipe.get("train.max_steps")
    if kind == "constant":
        share = 0  # it has no warm-up, whatever the file says
    if share >= 1 or share == 0:
        reading.set(train__lr_warmup_steps=int(share))
    elif steps:
        reading.set(train__lr_warmup_steps=math.ceil(share * steps))
    else:
        reading.set(train__lr_warmup_run_fraction=share)


def length(reading: Reading, epochs_key: str = "num_train_epochs") -> None:
    """Set epochs or steps."""
    steps, epochs = reading["max_steps"], reading[epochs_key]
    if steps is not None and steps > 0:
        reading.set(train__max_steps=steps)
        reading.empty("train.epochs")
        return
    if epochs != int(epochs):
        reading.refuse(epochs_key, "a part of an epoch")
    reading.set(train__epochs=max(1, int(epochs)))


def batch(reading: Reading, micro: int, accumulation: int) -> None:
    """Set the samples of a step and of a forward pass."""
    reading.set(
        train__global_batch_size=micro * accumulation * reading.ranks,
        train__micro_batch_size=micro,
        train__step_ends_with_epoch=True,
    )


def packing(reading: Reading, micro: int, accumulation: int, row: int) -> None:
    """Set the tokens of a step and of a forward pass, for rows of so many tokens."""
    reading.set(
        train__global_batch_tokens=micro * accumulation * reading.ranks * row,
        train__micro_batch_tokens=micro * row,
    )
    reading.empty("train.micro_batch_size")


def optimizer(
    reading: Reading, name: str, *, key: str = "optim", learning_rate: Any = None
) -> None:
    """Set the optimizer with its arguments."""
    known = names_elsewhere()
    if name not in known:
        reading.refuse(key, OTHER_OPTIMIZERS.get(name, "optimizer"))
    class_path = known.get(name, "torch.optim.AdamW")
    rate = reading["learning_rate"] if learning_rate is None else learning_rate
    arguments: dict[str, Any] = {
        "lr": rate,
        "weight_decay": reading["weight_decay"],
    }
    if "Adam" in class_path:
        betas = [reading["adam_beta1"], reading["adam_beta2"]]
        arguments |= {"betas": betas, "eps": reading["adam_epsilon"]}
    if class_path.startswith("torchao."):
        arguments["block_size"] = 256  # the Trainer's, also with 4 bits
    reading.recipe["optimizer"] = {"class_path": class_path, "init_args": arguments}
    reading.set(train__decay_norms_and_biases=False)


def muon(
    reading: Reading, key: str, *, is_adapter: bool, rate: Any, decay: Any, **arguments: Any
) -> None:
    """Set the Muon of Moonlight, which LLaMA-Factory has and torch has too.

    Its updates have the size of AdamW's, which it uses for embeddings, head and vectors; the weight
    decay is that of all parameters. As in
    https://github.com/MoonshotAI/Moonlight/blob/master/examples/toy_train.py.

    Args:
        reading: the file.
        key: that asks for it.
        is_adapter: whether an adapter is trained.
        rate: learning rate.
        decay: weight decay.
        **arguments: others of torch's Muon, and betas of AdamW.
    """
    if is_adapter:
        reading.refuse(key, "Muon for adapters")
    given = {"lr": rate, "weight_decay": decay} | arguments
    reading.recipe["optimizer"] = {"class_path": "torch.optim.Muon", "init_args": given}
    reading.set(train__decay_norms_and_biases=True)


OTHER_OPTIMIZERS = {
    "muon": "Muon that leaves vectors untrained, or that of Dion",
    "adafactor": "Adafactor of transformers",
    "galore_adamw": "GaLore",
    "apollo_adamw": "APOLLO",
    "lomo": "LOMO",
    "schedule_free_adamw": "schedule-free AdamW",
}
"""Optimizers that ftkit does not have, in words."""


def of_version(reading: Reading, key: str, name: str) -> str:
    """Name a base model with its version, which a key of the file may say."""
    version = reading[key]
    # Programs take a directory as it is.
    if version in (None, "main") or name.count("/") != 1 or existing(name):
        return name
    if not re.fullmatch(r"\w[\w.-]*", version):
        reading.refuse(key, "a version of a hub model whose name has a slash")
        return name
    return f"{name}@{version}"


def existing(path: str | None) -> Path | None:
    """The path of a file or directory that is here; None: there is none, or no path is so long."""
    try:
        return Path(path) if path and Path(path).exists() else None
    except (OSError, ValueError):
        return None


def local_data(path: str | None) -> str | None:
    """The only file of training data in a directory, of which other programs name the directory."""
    folder = existing(path)
    if folder is None or not folder.is_dir():
        return path
    found = [file for file in sorted(folder.iterdir()) if file.suffix in _DATA_ENDINGS]
    return str(found[0]) if len(found) == 1 else path


def first_record(path: str | None) -> dict[str, Any] | None:
    """First record of a file of JSON objects; None: it is not one here."""
    file = existing(path)
    if file is None or file.suffix not in (".json", ".jsonl") or not file.is_file():
        return None
    with file.open(encoding="utf-8", errors="replace") as stream:
        text = stream.read(2**20)
    try:
        record, _ = json.JSONDecoder().raw_decode(text[text.index("{") :])
    except (ValueError, RecursionError):
        return None
    return dict(record)


def checkpoints(reading: Reading) -> None:
    """Set when to validate and to save."""
    epochs = reading["num_train_epochs"]
    for name, ours in (("save", "train.save_interval"), ("eval", "eval.interval")):
        strategy = reading[f"{name}_strategy"]
        steps = reading[f"{name}_steps"] or reading.rows["save_steps"].default
        if strategy in OFF:
            # Validation of held-out records after the last step is part of every report, and costs
            # little.
            reading.recipe[ours] = None if name == "save" else 0
        elif strategy == "epoch":
            reading.recipe[f"{ours}_epochs"] = 1.0
        elif steps < 1:
            total = reading.recipe.get("train.max_steps")
            if isinstance(total, int):
                reading.recipe[ours] = max(1, math.ceil(steps * total))
            else:
                reading.recipe[f"{ours}_epochs"] = steps * epochs
        else:
            reading.recipe[ours] = int(steps)
    reading.empty("checkpoint.save_every")
    reading.set(checkpoint__result="best" if reading["load_best_model_at_end"] else None)


def float8(r: Reading, *, is_adapter: bool, scales: str | None, key: str = "fp8") -> None:
    """Set products in float8.

    Args:
        r: the file.
        is_adapter: whether an adapter is trained.
        scales: what the program scales; None: what ftkit does.
        key: that asks for it.
    """
    if r[key] and is_adapter:
        r.refuse(key, "FP8 training of adapters")
    elif r[key]:
        r.set(float8=True)
        if scales is not None:
            r.tell(
                f"{key}: ftkit scales each token and each row of a weight, and not {scales}: a "
                "scale of a whole tensor would change losses with the micro-batch, by 1.5e-4 where "
                "it was tried"
            )


def in_order(r: Reading, options: dict[str, Any], *, default: str = "random") -> None:
    """Set the order of samples from train_sampling_strategy.

    Args:
        r: the file.
        options: of the data, to which it is added.
        default: order without the key.
    """
    kind = r.values.get("train_sampling_strategy", default)
    if kind == "sequential":
        options["shuffle"] = False
    elif kind not in ("random", "group_by_length"):
        r.refuse("train_sampling_strategy", f"the order {kind} of samples")


def from_scratch(reading: Reading, key: str, *, is_adapter: bool) -> None:
    """Set new weights in the place of those of the model."""
    if reading[key] and is_adapter:
        reading.refuse(key, "an adapter of a model with new weights")
    elif reading[key]:
        reading.set(train__from_scratch=True)


def checkpointing(reading: Reading, value: Any) -> None:
    """Set activation checkpointing."""
    reading.set(memory__activation_checkpointing=value not in OFF)
