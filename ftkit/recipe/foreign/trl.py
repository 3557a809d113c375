"""Configuration files of `trl sft` and `trl dpo`. Defaults are those of TRL 1.16."""

from typing import Any

from ftkit.recipe.foreign import trainer
from ftkit.recipe.foreign.table import OFF, Program, Reading, Row, idle, missing, part, rows_by_key
from ftkit.recipe.foreign.table import same as same_as
from ftkit.recipe.foreign.trainer import COST, FILES, LAYOUT, REMOTE_CODE, SERVICE
from ftkit.recipe.foreign.value_types import Accepts
from ftkit.recipe.recipe import PEFT_DEFAULT

_LOSSES = {"sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo", "robust": "robust"}

_DATASET: Accepts = {"path": "text", "name": "text", "split": "text"}
"""Keys of an entry of datasets."""

_SHARED: list[Row] = [
    *trainer.ROWS,
    part("gradient_checkpointing", "flag", "memory.activation_checkpointing", True, ""),
    part("bf16", "flag", "precision", None, "true unless fp16 is"),
    same_as("model_name_or_path", "text", "checkpoint_dir", None),
    part("dtype", "text", "precision", "float32", ""),
    part("use_peft", "flag", "quantize", False, "whether adapters are trained, or all weights"),
    part("lora_r", "whole>=1", "lora_r", 16, ""),
    part("lora_alpha", "number>0", "lora_alpha", 32, ""),
    part("lora_dropout", "number>=0<1", "lora_dropout", 0.05, ""),
    part("lora_target_modules", "text|texts", ("lora_targets", "lora_skip_missing"), None,
         "names that the model lacks are left out, with a warning; without it peft-default"),
    part("lora_modules_to_save", "names", "lora_modules_to_save", None, ""),
    part("use_dora", "flag", "lora_variant", False, ""),
    part("use_rslora", "flag", "lora_variant", False, ""),
    part("load_in_4bit", "flag", "quantize", False, ""),
    part("load_in_8bit", "flag", "quantize", False, "bnb.int8"),
    part("bnb_4bit_quant_type", "fp4|nf4", "quantize", "nf4", ""),
    part("use_bnb_nested_quant", "flag", "quantize", False, "-dq"),
    part("dataset_name", "text", "data.path", None, ""),
    part("dataset_config", "text", "data.subset", None, ""),
    part("dataset_train_split", "text", "data.split", "train", ""),
    part("datasets", [_DATASET], "data.sources", None, ""),
    part("test_split_size", "number>0", ("data.val_split_fraction", "eval.final_validation"), None,
         ""),
    same_as("max_length", "whole>=1", "train.max_seq_length", 1024),
    part("truncation_mode", "text", "data.overlong", "keep_start", "truncate"),
    part("chat_template_path", "text", "data.chat_template", None,
         "a file; the model's own without it"),
    part("router_aux_loss_coef", "number>=0", "router_aux_loss_coef", 0.001,
         "for models that have one"),
    *idle("the split val, validation, dev or test is used for validation", "dataset_test_split"),
    *idle(COST, "dataset_num_proc", "pad_to_multiple_of", "padding_free", "pad_token",
          "bnb_4bit_quant_storage", "use_reentrant"),
    *idle(LAYOUT, "ignore_bias_buffers", "env"),
    *idle(REMOTE_CODE, "trust_remote_code"),
    *idle(FILES, "lora_task_type"),
    *idle(SERVICE, "gradient_checkpointing_use_reentrant"),
    *missing("streaming data", "dataset_streaming", "streaming"),
    *missing("settings of the model's class", "model_init_kwargs"),
    part("model_revision", "text", "checkpoint_dir", "main", "behind the name and @"),
    *missing("LoRA for parameters by name", "lora_target_parameters"),
]  # fmt: skip

SFT_ROWS = rows_by_key(
    _SHARED,
    part("learning_rate", "number>=0", "optimizer.lr", 2e-5, ""),
    part("packing", "flag", ("train.global_batch_tokens", "train.micro_batch_tokens"), False, ""),
    part("packing_strategy", "text", "train.global_batch_tokens", "bfd", ""),
    part("assistant_only_loss", "flag", "data.train_on", False, "assistant, or all tokens"),
    part("completion_only_loss", "flag", "data.train_on", None, "for prompts with completions"),
    part("loss_type", "text", "objective", None, "nll, dft"),
    *idle("ftkit shuffles every epoch, as the Trainer does", "shuffle_dataset"),
    *idle(COST, "eval_packing"),
    *missing("another end of texts", "eos_token"),
    *missing("names of the texts' key", "dataset_text_field", harmless=("text",)),
    *missing("settings of the data's preparation", "dataset_kwargs"),
)
DPO_ROWS = rows_by_key(
    _SHARED,
    part("learning_rate", "number>=0", "optimizer.lr", 1e-6, ""),
    part("beta", "number>0", "objective.beta", 0.1, ""),
    part("loss_type", "names", "objective.loss", ["sigmoid"], "sigmoid, hinge, ipo, robust"),
    part("label_smoothing", "number>=0<1", "objective.label_noise", 0.0, "loss: conservative"),
    part("disable_dropout", "flag", "lora_dropout", True, "0"),
    *idle("ftkit computes them before the first step, or below the adapter",
          "precompute_ref_log_probs", "precompute_ref_batch_size"),
    *missing("several losses of DPO", "loss_weights"),
    *missing("log-probabilities that weigh the length", "ld_alpha"),
    *missing("another divergence", "f_divergence_type", harmless=("reverse_kl",)),
    *missing("weights of sequences in DPO", "use_weighting"),
    *missing("a reference that follows the model", "sync_ref_model"),
    *idle("only with the key that switches it on", "f_alpha_divergence_coef", "discopop_tau",
          "ref_model_mixup_alpha", "ref_model_sync_steps"),
)  # fmt: skip


def _finish_sft(r: Reading) -> None:
    _shared(r)
    options = _data(r)
    if r["truncation_mode"] != "keep_start":
        r.refuse("truncation_mode", "cutting off the beginning of samples")
    if r["assistant_only_loss"]:
        options["train_on"] = "assistant"
    elif _shape(options) == "completion":
        is_whole = r["completion_only_loss"] is False
        options["train_on"] = "all" if is_whole else "last"
    else:
        options["train_on"] = "all"
        if _shape(options) is None:
            r.tell(
                "completion_only_loss: if the records have a prompt and a completion, TRL trains "
                "the completion alone: --data.train_on last"
            )
    options["overlong"] = "truncate"
    loss = r["loss_type"]
    if loss == "dft":
        r.recipe["objective"] = {"class_path": "dft", "init_args": {}}
    elif loss not in (None, "nll", "chunked_nll"):
        r.refuse("loss_type", f"the loss {loss}")
    if r["packing"]:
        row = r["max_length"]
        micro = r["per_device_train_batch_size"]
        steps = r["gradient_accumulation_steps"]
        trainer.packing(r, micro, steps, row)
        if r["packing_strategy"] == "wrapped":
            r.refuse("packing_strategy", "samples that go on in the next row")
        r.tell(
            "packing: TRL fills rows of max_length tokens with the samples that fit best; ftkit "
            "takes samples in order up to the same number of tokens"
        )


def _finish_dpo(r: Reading) -> None:
    _shared(r)
    options = _data(r)
    options["overlong"] = "truncate"
    r.tell(
        "conversations: TRL also compares what the template has behind the end of an answer, such "
        "as a line end; ftkit ends with the answer"
    )
    losses, noise = r["loss_type"], r["label_smoothing"]
    if len(losses) != 1:
        r.refuse("loss_type", "several losses of DPO")
    loss = losses[0] if losses else "sigmoid"
    if loss not in _LOSSES:
        r.refuse("loss_type", f"the preference loss {loss}")
    kind = _LOSSES.get(loss, "sigmoid")
    if kind == "sigmoid" and noise:
        kind = "conservative"
    arguments = {"loss": kind, "beta": r["beta"], "label_noise": noise}
    r.recipe["objective"] = {"class_path": "dpo", "init_args": arguments}
    if r["disable_dropout"] and "lora_dropout" in r.recipe:
        r.set(lora_dropout=0.0)


def _shared(r: Reading) -> None:
    if r.has("model_name_or_path"):
        name = r["model_name_or_path"]
        r.set(checkpoint_dir=trainer.of_version(r, "model_revision", name))
    is_lora = bool(r["use_peft"])
    if is_lora:
        r.set(lora_r=r["lora_r"], lora_alpha=r["lora_alpha"])
        r.set(lora_dropout=r["lora_dropout"])
        trainer.adapt(r, r["lora_target_modules"] or PEFT_DEFAULT)
        r.set(lora_modules_to_save=r["lora_modules_to_save"])
        r.set(lora_variant="dora" if r["use_dora"] else "rslora" if r["use_rslora"] else "lora")
        if r["load_in_4bit"]:
            double = "-dq" if r["use_bnb_nested_quant"] else ""
            r.set(quantize=f"bnb.{r['bnb_4bit_quant_type']}{double}")
        elif r["load_in_8bit"]:
            r.set(quantize="bnb.int8")
    trainer.length(r)
    micro, accumulation = r["per_device_train_batch_size"], r["gradient_accumulation_steps"]
    trainer.batch(r, micro, accumulation)
    trainer.optimizer(r, r["optim"])
    kind = r["lr_scheduler_type"]
    trainer.schedule(r, kind)
    trainer.warm_up(r, kind)
    trainer.checkpoints(r)
    trainer.checkpointing(r, r["gradient_checkpointing"])
    is_half = r["dtype"] in ("bfloat16", "bf16")
    if r["fp16"]:
        r.set(precision="16-mixed")
    elif is_half and not is_lora:
        r.set(precision="bf16-true")
    else:
        r.set(precision="32-true" if r.values.get("bf16") is False else "bf16-mixed")


def _data(r: Reading) -> dict[str, Any]:
    """Options of the data, which are already in the recipe."""
    options: dict[str, Any] = {}
    if r.has("datasets"):
        options["sources"] = [_source(r, entry) for entry in r["datasets"]]
    elif r.has("dataset_name"):
        options["path"] = trainer.local_data(r["dataset_name"])
        if r["dataset_train_split"] != "train":
            options["split"] = r["dataset_train_split"]
        if r.has("dataset_config"):
            options["subset"] = r["dataset_config"]
    else:
        r.refuse("dataset_name", "no dataset")
    share = r["test_split_size"]
    has_split = r["eval_strategy"] not in OFF
    options["val_split_fraction"] = share if share else None if has_split else 0.0
    trainer.held_out(r, "test_split_size", share, others=has_split)
    if r.has("chat_template_path"):
        options["chat_template"] = r["chat_template_path"]
    # An empty option is one that the recipe leaves to the data.
    options = {key: value for key, value in options.items() if value is not None}
    r.recipe["data"] = {"class_path": "JSON", "init_args": options}
    return options


def _source(r: Reading, entry: dict[str, Any]) -> dict[str, Any]:
    source: dict[str, Any] = {"path": trainer.local_data(entry.get("path"))}
    words = {"name": "subset", "split": "split"}
    source |= {ours: entry[key] for key, ours in words.items() if entry.get(key)}
    for key in ("data_dir", "data_files", "columns", "fraction"):
        if entry.get(key):
            r.refuse("datasets", f"{key} of a data set")
    return source


def _shape(options: dict[str, Any]) -> str | None:
    """Shape of the first record, if the data are a file here: messages, completion or text."""
    record = trainer.first_record(options.get("path"))
    if record is None:
        return None
    return next((name for name in ("completion", "messages", "text") if name in record), None)


TRL_SFT = Program(
    name="TRL (trl sft)",
    short="trl-sft",
    marks=(frozenset({"model_name_or_path", "dataset_name"}),),
    rows=SFT_ROWS,
    finish=_finish_sft,
)
"""`trl sft`."""
TRL_DPO = Program(
    name="TRL (trl dpo)",
    short="trl-dpo",
    marks=tuple(
        frozenset({"model_name_or_path", "dataset_name", key})
        for key in ("beta", "precompute_ref_log_probs", "f_divergence_type", "disable_dropout")
    ),
    rows=DPO_ROWS,
    finish=_finish_dpo,
)
"""`trl dpo`."""
