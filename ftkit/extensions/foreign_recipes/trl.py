"""Configuration files of `trl sft`, `dpo`, `kto` and `reward`. Defaults are those of TRL 1.16.

A file does not name its command, and the commands share most keys: see `readers_of`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ftkit.extensions.foreign_recipes import trainer
from ftkit.extensions.foreign_recipes.trainer import COST, FILES, LAYOUT, REMOTE_CODE, SERVICE
from ftkit.extensions.foreign_recipes.translation import (
    OFF,
    Program,
    Reading,
    Row,
    idle,
    missing,
    part,
    rows_by_key,
)
from ftkit.extensions.foreign_recipes.translation import same as same_as
from ftkit.extensions.foreign_recipes.value_types import Accepts
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
    *idle("the split val, validation, dev or test is used for validation", "dataset_test_split"),
    *idle(COST, "dataset_num_proc", "pad_to_multiple_of", "bnb_4bit_quant_storage",
          "use_reentrant"),
    *idle(LAYOUT, "ignore_bias_buffers", "env"),
    *idle(REMOTE_CODE, "trust_remote_code"),
    *idle(FILES, "lora_task_type"),
    *idle(SERVICE, "gradient_checkpointing_use_reentrant"),
    *missing("streaming data", "dataset_streaming", "streaming"),
    *missing("settings of the model's class", "model_init_kwargs"),
    part("model_revision", "text", "checkpoint_dir", "main", "behind the name and @"),
    *missing("LoRA for parameters by name", "lora_target_parameters"),
]  # fmt: skip

_TRUNCATION = part("truncation_mode", "text", "data.overlong", "keep_start", "truncate")
_TEMPLATE = part("chat_template_path", "text", "data.chat_template", None,
                 "a file; the model's own without it")  # fmt: skip
_ROUTER = part("router_aux_loss_coef", "number>=0", "router_aux_loss_coef", 0.001,
               "for models that have one")  # fmt: skip
_NO_DROPOUT = part("disable_dropout", "flag", "lora_dropout", True, "0")
_REFERENCE = [
    *idle("ftkit computes them before the first step, or below the adapter",
          "precompute_ref_log_probs", "precompute_ref_batch_size"),
    *missing("a reference that follows the model", "sync_ref_model"),
    *idle("only with the key that switches it on", "ref_model_mixup_alpha", "ref_model_sync_steps"),
]  # fmt: skip

SFT_ROWS = rows_by_key(
    _SHARED,
    _TRUNCATION,
    _TEMPLATE,
    _ROUTER,
    part("learning_rate", "number>=0", "optimizer.lr", 2e-5, ""),
    part("packing", "flag", ("train.global_batch_tokens", "train.micro_batch_tokens"), False, ""),
    part("packing_strategy", "text", "train.global_batch_tokens", "bfd", ""),
    part("assistant_only_loss", "flag", "data.train_on", False, "assistant, or all tokens"),
    part("completion_only_loss", "flag", "data.train_on", None, "for prompts with completions"),
    part("loss_type", "text", "objective", None, "nll, dft"),
    *idle("ftkit shuffles every epoch, as the Trainer does", "shuffle_dataset"),
    *idle(COST, "eval_packing", "padding_free", "pad_token"),
    *missing("another end of texts", "eos_token"),
    *missing("names of the texts' key", "dataset_text_field", harmless=("text",)),
    *missing("settings of the data's preparation", "dataset_kwargs"),
)
DPO_ROWS = rows_by_key(
    _SHARED,
    _TRUNCATION,
    _ROUTER,
    _NO_DROPOUT,
    _REFERENCE,
    part("learning_rate", "number>=0", "optimizer.lr", 1e-6, ""),
    part("beta", "number>0", "objective.beta", 0.1, ""),
    part("loss_type", "names", "objective.loss", ["sigmoid"], "sigmoid, hinge, ipo, robust"),
    part("label_smoothing", "number>=0<1", "objective.label_noise", 0.0, "loss: conservative"),
    *idle(COST, "padding_free", "pad_token"),
    *missing("several losses of DPO", "loss_weights"),
    *missing("log-probabilities that weigh the length", "ld_alpha"),
    *missing("another divergence", "f_divergence_type", harmless=("reverse_kl",)),
    *missing("weights of sequences in DPO", "use_weighting"),
    *idle("only with the key that switches it on", "f_alpha_divergence_coef", "discopop_tau"),
)  # fmt: skip
KTO_ROWS = rows_by_key(
    _SHARED,
    _ROUTER,
    _NO_DROPOUT,
    _REFERENCE,
    part("learning_rate", "number>=0", "optimizer.lr", 1e-6, ""),
    part("beta", "number>0", "objective.beta", 0.1, ""),
    part("desirable_weight", "number>=0", "objective.desirable_weight", 1.0, ""),
    part("undesirable_weight", "number>=0", "objective.undesirable_weight", 1.0, ""),
    part("loss_type", "text", "objective", "kto", "kto"),
    part("train_sampling_strategy", "text", "data.shuffle", "sequential", "random, sequential"),
)
REWARD_ROWS = rows_by_key(
    _SHARED,
    _TEMPLATE,
    _NO_DROPOUT,
    part("learning_rate", "number>=0", "optimizer.lr", 1e-4, ""),
    part("center_rewards_coefficient", "number>=0", "objective.center_weight", None, ""),
    *idle(COST, "pad_token"),
    *missing("another end of texts", "eos_token"),
)


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
    _drop_nothing(r)


def _finish_kto(r: Reading) -> None:
    _shared(r)
    _data(r)["overlong"] = "truncate"
    if r["loss_type"] != "kto":
        r.refuse("loss_type", f"the preference loss {r['loss_type']}")
    arguments = {key: r[key] for key in ("beta", "desirable_weight", "undesirable_weight")}
    r.recipe["objective"] = {"class_path": "kto", "init_args": arguments}
    if not r["use_peft"]:
        r.set(reference=r.recipe.get("checkpoint_dir"))
    _drop_nothing(r)
    r.tell(
        "per_device_train_batch_size: TRL has a reference point for each batch of a device, ftkit "
        "one for the step"
    )
    r.tell("max_length: TRL leaves out samples whose prompt alone is as long, ftkit cuts them")


def _finish_reward(r: Reading) -> None:
    _shared(r)
    _data(r)["overlong"] = "drop"
    weight = r["center_rewards_coefficient"]
    arguments = {} if weight is None else {"center_weight": weight}
    r.recipe["objective"] = {"class_path": "reward", "init_args": arguments}
    _drop_nothing(r)
    if r["use_peft"]:
        beside = [name for name in r["lora_modules_to_save"] or () if name != "score"]
        r.recipe.pop("lora_modules_to_save", None)
        r.set(lora_modules_to_save=beside or None)
        is_trained = "score" in (r["lora_modules_to_save"] or ())
        if not is_trained and r.values.get("lora_task_type") != "SEQ_CLS":
            r.tell(
                "lora_modules_to_save: without score or lora_task_type SEQ_CLS, TRL leaves the new "
                "head as it begins; ftkit trains it"
            )


def _drop_nothing(r: Reading) -> None:
    """Train without dropout, as preferences are trained by default."""
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
    trainer.in_order(r, options, default=r.rows["train_sampling_strategy"].default)
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


_LOSSES_OF = {
    "sft": ("nll", "chunked_nll", "dft"),
    "kto": ("kto", "apo_zero_unpaired"),
    "dpo": ("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard",
            "aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
}  # fmt: skip
"""Values of loss_type by command."""


def _command(name: str, rows: dict[str, Row], finish: Callable[[Reading], None]) -> Program:
    def may_be(values: Mapping[str, Any]) -> bool:
        losses = values.get("loss_type")
        if losses is not None and name in _LOSSES_OF:
            given = losses if isinstance(losses, list) else [losses]
            if not all(loss in _LOSSES_OF[name] for loss in given):
                return False
        path = values.get("dataset_name")
        record = trainer.first_record(trainer.local_data(path) if isinstance(path, str) else None)
        if record is None:
            return True
        # Pairs are no samples of sft; labels may stand beside them, and pairs become labelled ones.
        if "chosen" in record:
            return name != "sft"
        return name == "sft" or (name == "kto" and "label" in record)

    return Program(
        name=f"TRL (trl {name})",
        rows=rows,
        finish=finish,
        may_be=may_be,
    )


TRL_SFT = _command("sft", SFT_ROWS, _finish_sft)
"""`trl sft`."""
TRL_DPO = _command("dpo", DPO_ROWS, _finish_dpo)
"""`trl dpo`."""
TRL_KTO = _command("kto", KTO_ROWS, _finish_kto)
"""`trl kto`."""
TRL_REWARD = _command("reward", REWARD_ROWS, _finish_reward)
"""`trl reward`."""
