"""torchtune's configuration files. Defaults are those of torchtune 0.6.1.

A file names its parts by `_component_`, and the command line the program that trains with them;
which of these it is, follows from the parts: a loss on pairs, a teacher, a quantizer.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ftkit.extensions.foreign_recipes import trainer
from ftkit.extensions.foreign_recipes.torchtune_chats import (
    TOKENIZERS,
    chat_template,
)
from ftkit.extensions.foreign_recipes.trainer import COST, FILES, LAYOUT, ON_RESUME, SERVICE, SHOWN
from ftkit.extensions.foreign_recipes.translation import (
    OFF,
    Program,
    Reading,
    Translation,
    idle,
    missing,
    part,
    rows_by_key,
    same,
    translate,
)
from ftkit.extensions.foreign_recipes.value_types import Accepts

_NAME: Accepts = {"_component_": "text"}
_MODEL: dict[str, Accepts] = {
    "_component_": "text",
    "lora_attn_modules": "texts",
    "apply_lora_to_mlp": "flag",
    "apply_lora_to_output": "flag",
    "lora_rank": "whole>=1",
    "lora_alpha": "number>0",
    "lora_dropout": "number>=0<1",
    "use_dora": "flag",
    "quantize_base": "flag",
}
_FAMILIES = r"code_llama2|gemma2?|llama2|llama3(?:_[123])?|mistral|phi3|phi4|qwen2(?:_5)?"
_SIZES = r"\d+(?:_\d)?b(?:_instruct)?|mini"
_BUILDER = re.compile(rf"torchtune\.models\.\w+\.(q?lora_)?(?:{_FAMILIES})_(?:{_SIZES})")
"""Functions that make a model of a published size; others make it of numbers."""
_LAYERS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "output_proj": "projection"}
"""Layers by torchtune's names, as ftkit's keys of LoRA name them in models of any family."""
_TOKENIZER: dict[str, Accepts] = {
    "_component_": "text",
    "max_seq_len": "whole>=2",
    "prompt_template": ("text", {"*": "any"}),
}
_OF_TOKENIZER = ("path", "merges_file", "merges_path", "vocab_path", "special_tokens_path")
_CHECKPOINTER: dict[str, Accepts] = {"_component_": "text", "checkpoint_dir": "text"}
_DATASET: dict[str, Accepts] = {
    "_component_": "text",
    "source": "text",
    "data_files": "text|texts",
    "data_dir": "text",
    "name": "text",
    "split": "text",
    "revision": "text",
    "packed": "flag",
    "split_across_pack": "flag",
    "train_on_input": "flag",
    "new_system_prompt": "text",
    "column_map": {"*": "text"},
    "column": "text",
    "add_eos": "flag",
    "conversation_column": "text",
    "conversation_style": "text",
}
_NEEDS = {"filter_fn": "data chosen by code", "streaming": "streaming data"}
"""Arguments of data sets that have no equal, and what they would need."""
_FORMATS = ("json", "csv", "parquet", "text")
"""Values of source with which data_files are files."""
_OPTIMIZER: dict[str, Accepts] = {
    "_component_": "text",
    "lr": "number>=0",
    "weight_decay": "number>=0",
    "betas": "any",
    "eps": "number>=0",
    "momentum": "number>=0",
    "nesterov": "flag",
    "block_size": "whole>=1",
}
_OF_OPTIMIZER = ("fused", "foreach", "capturable", "differentiable", "is_paged")
_DECAY = {
    "torch.optim.AdamW": 0.01,
    "torch.optim.Adam": 0.0,
    "torch.optim.SGD": 0.0,
    "bitsandbytes.optim.AdamW": 0.01,
    "bitsandbytes.optim.AdamW8bit": 0.01,
    "bitsandbytes.optim.PagedAdamW": 0.01,
    "bitsandbytes.optim.PagedAdamW8bit": 0.01,
    "torchao.optim.AdamW8bit": 0.01,
    "torchao.optim.AdamW4bit": 0.01,
    "torchao.optim.AdamWFp8": 0.01,
}
"""Optimizers with the weight decay that they have where the file names none."""
_LOSS: dict[str, Accepts] = {
    "_component_": "text",
    "beta": "number>0",
    "gamma": "number>0",
    "label_smoothing": "number>=0<1",
    "ignore_index": "whole",
}
_TOKEN_LOSSES = (
    "torchtune.modules.loss.CEWithChunkedOutputLoss",
    "torchtune.modules.loss.LinearCrossEntropyLoss",
    "torch.nn.CrossEntropyLoss",
)
_DIVERGENCES = {
    "ForwardKLLoss": "forward",
    "ForwardKLWithChunkedOutputLoss": "forward",
    "ReverseKLLoss": "reverse",
    "ReverseKLWithChunkedOutputLoss": "reverse",
}
_SCHEDULER: dict[str, Accepts] = {
    "_component_": "text",
    "num_warmup_steps": "whole>=0",
    "num_cycles": "number>=0",
}
_QUANTIZER: dict[str, Accepts] = {"_component_": "text", "groupsize": "whole>=2"}
_QAT = {"Int8DynActInt4WeightQATQuantizer": "int8", "Int4WeightOnlyQATQuantizer": None}
"""Quantizers of int4 weights in training, with the type of the activations."""


@dataclass(frozen=True, kw_only=True)
class _Builder:
    """A function of torchtune.datasets."""

    kind: str
    """What its records are: alpaca, instruct, chat, text or pairs."""
    source: str | None = None
    """Data set that it reads if the file names none."""
    columns: tuple[tuple[str, str], ...] = ()
    """Our names of columns, with those of its records."""
    trains_input: bool = False
    """Whether it trains prompts if the file does not say so."""
    data_files: str | None = None
    """Files of the data set that it reads."""


_BUILDERS = {
    "alpaca_dataset": _Builder(kind="alpaca", source="tatsu-lab/alpaca", trains_input=True),
    "alpaca_cleaned_dataset": _Builder(
        kind="alpaca", source="yahma/alpaca-cleaned", trains_input=True
    ),
    "instruct_dataset": _Builder(kind="instruct"),
    "grammar_dataset": _Builder(kind="instruct", source="liweili/c4_200m"),
    "samsum_dataset": _Builder(
        kind="instruct",
        source="Samsung/samsum",
        columns=(("instruction", "dialogue"), ("output", "summary")),
    ),
    "chat_dataset": _Builder(kind="chat"),
    "slimorca_dataset": _Builder(kind="chat", source="Open-Orca/SlimOrca-Dedup"),
    "text_completion_dataset": _Builder(kind="text"),
    "preference_dataset": _Builder(kind="pairs"),
    "hh_rlhf_helpful_dataset": _Builder(kind="pairs", source="RLHFlow/HH-RLHF-Helpful-standard"),
    "stack_exchange_paired_dataset": _Builder(
        kind="pairs",
        source="lvwerra/stack-exchange-paired",
        columns=(
            ("instruction", "question"),
            ("chosen", "response_j"),
            ("rejected", "response_k"),
        ),
        data_files="data/rl/*",
    ),
}
"""Data sets by the functions that make them."""
_OWN_NAMES = {"input": "instruction", "prompt": "instruction", "conversations": "messages"}
"""Names of columns in column_map that are others here; alpaca's input is ours, too."""

ROWS = rows_by_key(
    part("model", _MODEL, ("lora_r", "lora_alpha", "lora_dropout", "lora_query", "lora_key",
                           "lora_value", "lora_projection", "lora_mlp", "lora_head",
                           "lora_variant", "quantize"), None,
         "lora_..., qlora_..., use_dora, or full fine-tuning; its sizes are those of config.json"),
    part("checkpointer", _CHECKPOINTER, "checkpoint_dir", None,
         "its checkpoint_dir; of Meta's files in the folder original, the folder around it"),
    part("tokenizer", _TOKENIZER, ("data.chat_template", "train.max_seq_length"), None,
         "the tokenizer of the model, with the format in which torchtune writes conversations"),
    part("dataset", (_DATASET, [_DATASET]),
         ("data.path", "data.sources", "data.columns", "data.chat_template", "data.train_on",
          "data.split", "data.subset", "data.data_files", "data.revision", "data.overlong",
          "train.global_batch_tokens"), None,
         "by its function; packed: a step takes samples up to the tokens of its rows"),
    part("shuffle", "flag", "data.shuffle", True, ""),
    same("seed", "whole>=0", "seed", 0, "null is a random number there, and 0 here"),
    part("batch_size", "whole>=1", ("train.global_batch_size", "train.micro_batch_size"), 1,
         "times gradient_accumulation_steps and devices"),
    part("gradient_accumulation_steps", "whole>=1", "train.global_batch_size", 1, "see batch_size"),
    part("epochs", "whole>=1", "train.epochs", 1, ""),
    part("max_steps_per_epoch", "whole>=1", "train.max_steps", None, "with epochs 1"),
    part("optimizer", _OPTIMIZER, ("optimizer", "train.decay_norms_and_biases"), None,
         "norms and biases decay, too"),
    part("lr_scheduler", _SCHEDULER,
         ("train.lr_schedule", "train.lr_warmup_steps", "train.lr_ends", "train.min_lr"), None,
         "the cosine schedule; without it a constant rate"),
    same("clip_grad_norm", "number>0|inf", "train.max_norm", None, "inf: none",
         value=lambda x: None if x == "inf" else x),
    part("loss", _LOSS, ("objective", "train.label_smoothing"), None,
         "of tokens; DPOLoss and RSOLoss: dpo"),
    part("dtype", "text", "precision", "bf16", "bf16-true or 32-true, adapters too"),
    same("compile", "flag", "compile", False),
    part("enable_activation_checkpointing", "flag", "memory.activation_checkpointing", False, ""),
    part("enable_activation_offloading", "flag", "memory.offload_activations", False, ""),
    same("output_dir", "text", "out_dir", "torchtune-out"),
    part("ref_checkpointer", _CHECKPOINTER, "reference", None, "of DPO without an adapter"),
    part("teacher_checkpointer", _CHECKPOINTER, "teacher", None, ""),
    part("kd_loss", _NAME, "objective.divergence", None, "distill"),
    part("kd_ratio", "number>=0<=1", "objective.sft_weight", 0.5, "(1 - this) / this"),
    part("quantizer", _QUANTIZER, ("qat.weights", "qat.activations", "qat.group_size"), None,
         "in full fine-tuning"),
    *idle("teacher_checkpointer names it", "teacher_model"),
    *idle(ON_RESUME, "resume_from_checkpoint"),
    *idle(SHOWN, "log_every_n_steps", "log_peak_memory_stats", "log_level", "profiler"),
    *idle(SERVICE, "metric_logger"),
    *idle(FILES, "save_adapter_weights_only"),
    *idle(COST, "optimizer_in_bwd", "low_cpu_ram", "ac_mode", "ac_option", "collate_fn",
          "enable_async_checkpointing", "cudnn_deterministic_mode"),
    *idle(LAYOUT, "device", "fsdp", "fsdp_cpu_offload", "fsdp_reshard_after_forward",
          "fsdp_sharding_strategy", "custom_sharded_layers", "memory_efficient_fsdp_wrap",
          "tensor_parallel_dim", "tensor_parallel_plan", "data_parallel_replicate_dim",
          "data_parallel_shard_dim", "context_parallel_dim", "process_group_init_timeout"),
    *idle("ftkit validates on data that the recipe names: --eval.sets", "dataset_val",
          "batch_size_val", "run_val_every_n_steps", "max_validation_batches"),
    part("enable_fp8_training", "flag", "float8", False, "in full fine-tuning"),
    part("fp8_recipe_name", "text", "float8", "tensorwise",
         "with a scale for each token and row, whatever it says"),
    *missing("quantisation-aware training from a later step on", "fake_quant_after_n_steps"),
    *missing("data sets mixed by weights", "datasets"), *idle("see datasets", "dataloader"),
    *missing("online RL", "policy_model"),
    *idle("see policy_model", "reward_and_value_model", "ref_policy_checkpointer",
          "value_checkpointer", "reward_checkpointer", "forward_batch_size", "ppo_batch_size",
          "ppo_epochs", "gamma", "lmbda", "kl_coeff", "whiten_rewards", "penalise_no_eos",
          "reward_penalty", "min_response_length", "max_generated_tokens", "stop_token_ids",
          "num_steps", "temperature", "top_k"),
    *missing("early exits", "early_exit_loss"), *missing("layer dropout", "layer_dropout"),
    *missing("training in a file of an evaluation: see ftkit evaluate", "tasks"),
    *missing("training in a file of answers: see ftkit generate", "prompt"),
    *idle("answers, not training", "limit", "max_seq_length", "enable_kv_cache", "max_new_tokens"),
)  # fmt: skip


def _finish(r: Reading) -> None:
    is_adapter = _model(r)
    r.set(checkpoint_dir=_folder(r, "checkpointer"))
    micro, accumulation = r["batch_size"], r["gradient_accumulation_steps"]
    trainer.batch(r, micro, accumulation)
    # What is left of an epoch fills no step of its own there.
    r.set(train__step_ends_with_epoch=False)
    r.tell(
        "batch_size: torchtune leaves out the samples at the end of an epoch that fill no batch, "
        "and adds the gradients of batches that fill no step to the next one; ftkit trains all, "
        "with the last step as large as they are"
    )
    r.set(train__epochs=r["epochs"], train__max_steps=r["max_steps_per_epoch"])
    if r["max_steps_per_epoch"] and r["epochs"] > 1:
        r.refuse("max_steps_per_epoch", "a part of each epoch")
    r.set(train__save_interval_epochs=1.0, eval__interval=0)
    r.empty("checkpoint.save_every")
    r.recipe.setdefault("train.max_norm", None)
    trainer.checkpointing(r, r["enable_activation_checkpointing"])
    if r["enable_activation_offloading"]:
        r.set(memory__offload_activations=True)
    precisions = {"bf16": "bf16-true", "fp32": "32-true"}
    if r["dtype"] not in precisions:
        r.refuse("dtype", f"weights in {r['dtype']}")
    r.set(precision=precisions.get(r["dtype"], "bf16-true"))
    _optimizer(r)
    _schedule(r)
    is_paired = _objective(r, is_adapter=is_adapter)
    _rounding(r, is_adapter=is_adapter)
    _data(r, is_paired=is_paired)


def _model(r: Reading) -> bool:
    """Set the adapter; return whether there is one."""
    model = r["model"] or {}
    name = model.get("_component_", "")
    found = _BUILDER.fullmatch(name)
    if found is None and not r.has("policy_model"):
        sees = "models that see as torchtune trains them"
        r.refuse("model", sees if "_vision." in name else f"the model {name or 'without a name'}")
        return False
    _refuse_others(r, "model", model, _MODEL)
    kind = (found and found[1]) or ""
    if not kind:
        return False
    r.set(lora_r=model.get("lora_rank", 8), lora_alpha=model.get("lora_alpha", 16))
    r.set(lora_dropout=model.get("lora_dropout", 0.0))
    adapted = model.get("lora_attn_modules", [])
    for layer in (one for one in adapted if one not in _LAYERS):
        r.refuse("model.lora_attn_modules", f"a layer {layer}")
    for layer, ours in _LAYERS.items():
        r.recipe[f"lora_{ours}"] = layer in adapted
    r.set(
        lora_mlp=model.get("apply_lora_to_mlp", False),
        lora_head=model.get("apply_lora_to_output", False),
        lora_variant="dora" if model.get("use_dora") else "lora",
    )
    if model.get("quantize_base", kind == "qlora_"):
        r.set(quantize="bnb.nf4-dq")
        r.tell(
            "model: torchao rounds to NF4 with scales of its own, ftkit as bitsandbytes does; "
            "blocks have 64 weights in both"
        )
    return True


def _folder(r: Reading, key: str) -> str | None:
    """Folder of the model that a checkpointer reads."""
    given = r[key] or {}
    name, folder = _last(given), given.get("checkpoint_dir", "").rstrip("/")
    if not folder:
        r.refuse(key, "a checkpointer without checkpoint_dir")
        return None
    if name == "FullModelMetaCheckpointer":
        around, _, last = folder.rpartition("/")
        if last != "original" or not around:
            r.refuse(key, "a model in Meta's layout outside of a folder named original")
        return around or folder
    if name != "FullModelHFCheckpointer":
        r.refuse(key, f"weights that {name or 'no component'} reads")
    return str(folder)


def _optimizer(r: Reading) -> None:
    given = r["optimizer"] or {}
    name = given.get("_component_", "torch.optim.AdamW")
    name = name.replace("torchao.prototype.low_bit_optim.", "torchao.optim.")
    if name not in _DECAY:
        r.refuse("optimizer", f"the optimizer {name}")
    _refuse_others(r, "optimizer", given, {*_OPTIMIZER, *_OF_OPTIMIZER})
    arguments = {key: given[key] for key in ("momentum", "nesterov", "block_size") if key in given}
    arguments |= {"lr": given.get("lr", 1e-3)}
    arguments |= {"weight_decay": given.get("weight_decay", _DECAY.get(name, 0.0))}
    if "Adam" in name:
        arguments |= {"betas": given.get("betas", [0.9, 0.999]), "eps": given.get("eps", 1e-8)}
    if name.startswith("torchao."):
        arguments.setdefault("block_size", 128 if name.endswith("4bit") else 256)
    r.recipe["optimizer"] = {"class_path": name, "init_args": arguments}
    r.set(train__decay_norms_and_biases=True)


def _schedule(r: Reading) -> None:
    given = r["lr_scheduler"] or {}
    r.set(train__lr_ends="around")
    if not given:
        r.set(train__lr_schedule="constant", train__lr_warmup_steps=0)
        return
    if _last(given) != "get_cosine_schedule_with_warmup":
        r.refuse("lr_scheduler", f"the learning-rate schedule {_last(given)}")
    if given.get("num_cycles", 0.5) != 0.5:
        r.refuse("lr_scheduler.num_cycles", "learning-rate restarts")
    _refuse_others(r, "lr_scheduler", given, _SCHEDULER)
    r.set(train__lr_schedule="cosine", train__min_lr=0.0)
    r.set(train__lr_warmup_steps=given.get("num_warmup_steps", 0))


def _objective(r: Reading, *, is_adapter: bool) -> bool:
    """Set the loss; return whether it compares pairs."""
    given = r["loss"] or {}
    name, noise = _last(given), given.get("label_smoothing", 0.0)
    if given.get("reduction", "mean") != "mean":
        r.refuse("loss.reduction", "a loss that is not the mean over tokens")
    if name in ("DPOLoss", "RSOLoss"):
        _refuse_others(r, "loss", given, _LOSS)
        loss = "conservative" if noise else "sigmoid"
        if name == "RSOLoss":
            loss, noise = "hinge", 0.0
        scale = given.get("gamma" if name == "RSOLoss" else "beta", 0.1)
        arguments = {"loss": loss, "beta": scale, "label_noise": noise}
        r.recipe["objective"] = {"class_path": "dpo", "init_args": arguments}
        if not is_adapter:
            reference = _folder(r, "ref_checkpointer") if r.has("ref_checkpointer") else None
            r.set(reference=reference or r.recipe.get("checkpoint_dir"))
        return True
    if given.get("_component_", _TOKEN_LOSSES[0]) not in _TOKEN_LOSSES:
        r.refuse("loss", f"the loss {name}")
        return False
    _refuse_others(r, "loss", given, {*_LOSS, "num_output_chunks", "reduction"})
    r.set(train__label_smoothing=noise)
    if r.has("kd_loss"):
        _distill(r)
    return False


def _distill(r: Reading) -> None:
    name, ratio = _last(r["kd_loss"]), r["kd_ratio"]
    if name not in _DIVERGENCES:
        r.refuse("kd_loss", f"the divergence {name}")
    if not ratio:
        r.refuse("kd_ratio", "a teacher that counts for nothing")
    weight = (1 - ratio) / ratio if ratio else 0.0
    options = {"divergence": _DIVERGENCES.get(name, "forward"), "sft_weight": weight}
    r.recipe["objective"] = {"class_path": "distill", "init_args": {**options, "temperature": 1.0}}
    r.set(teacher=_folder(r, "teacher_checkpointer"))
    r.tell(
        "kd_ratio: the loss here is torchtune's divided by kd_ratio, and torchtune divides "
        "gradients by the number of tokens twice: Adam's steps have the same size with both, but "
        "for eps and clip_grad_norm"
    )


def _rounding(r: Reading, *, is_adapter: bool) -> None:
    by_row = str(r["fp8_recipe_name"]).startswith("rowwise")
    scales = None if by_row else "a whole tensor"
    trainer.float8(r, is_adapter=is_adapter, scales=scales, key="enable_fp8_training")
    given = r["quantizer"] or {}
    if not given:
        return
    name = _last(given)
    if name not in _QAT:
        r.refuse("quantizer", f"the quantizer {name}")
        return
    if is_adapter:
        r.refuse("quantizer", "quantisation-aware training of adapters")
    r.set(qat__weights="int4", qat__activations=_QAT[name])
    r.set(qat__group_size=given.get("groupsize", 256))
    r.tell(
        "quantizer: torchtune rounds the output layer too, where it is not tied to the embedding; "
        "ftkit the layers in the blocks"
    )


def _data(r: Reading, *, is_paired: bool) -> None:
    given = r["dataset"]
    entries = given if isinstance(given, list) else [given] if given else []
    if not entries:
        r.refuse("dataset", "no dataset")
    sources = [_source(r, entry, is_paired=is_paired) for entry in entries]
    tokenizer = r["tokenizer"] or {}
    _refuse_others(r, "tokenizer", tokenizer, {*_TOKENIZER, *_OF_TOKENIZER})
    length = tokenizer.get("max_seq_len")
    form = TOKENIZERS.get(_last(tokenizer))
    of_texts = all(_last(entry) == "text_completion_dataset" for entry in entries)
    # Texts are cut before it, and the last token of a conversation becomes EOS without a loss.
    ends_untrained = of_texts or (form is not None and form.cuts_before_last)
    r.recipe["train.max_seq_length"] = length
    if length is not None and ends_untrained:
        r.recipe["train.max_seq_length"] = length - 1
    if any(entry.get("packed") for entry in entries):
        if length is None:
            r.refuse("dataset.packed", "rows without a length, which is max_seq_len of tokenizer")
        micro, accumulation = r["batch_size"], r["gradient_accumulation_steps"]
        trainer.packing(r, micro, accumulation, length or 2048)
        r.tell(
            "dataset: packed: torchtune fills rows of max_seq_len tokens in the order of the file "
            "and shuffles the rows; ftkit takes shuffled samples up to the same number of tokens"
        )
    if length is not None and not ends_untrained:
        r.tell(
            "tokenizer: max_seq_len: with it torchtune does not train the end of the last answer "
            "with Qwen's tokenizers, and with others puts EOS in the place of the last token of a "
            "sample that it cuts; ftkit trains the tokens of the text"
        )
    options: dict[str, Any] = {"sources": sources}
    if len(sources) < 2:
        options = dict(sources[0]) if sources else {}
    options |= {"overlong": "truncate", "val_split_fraction": 0.0}
    trainer.held_out(r, "dataset", 0)
    if not r["shuffle"]:
        options["shuffle"] = False
    r.recipe["data"] = {"class_path": "JSON", "init_args": options}


def _source(r: Reading, entry: dict[str, Any], *, is_paired: bool) -> dict[str, Any]:
    """One data set as options of a source."""
    name, component = _last(entry), entry.get("_component_", "")
    builder = _BUILDERS.get(name)
    if builder is None or component.rpartition(".")[0] != "torchtune.datasets":
        sees = ".multimodal." in component
        r.refuse("dataset", "images in data sets of torchtune" if sees else f"the data set {name}")
        return {}
    _refuse_others(r, "dataset", entry, _DATASET, _NEEDS)
    if (builder.kind == "pairs") is not is_paired:
        r.refuse("dataset", f"{name} with a loss of {'pairs' if is_paired else 'tokens'}")
    source = _place(r, entry, builder)
    if columns := _columns(r, entry, builder):
        source["columns"] = columns
    if builder.kind == "text":
        if entry.get("add_eos") is False:
            r.refuse("dataset.add_eos", "texts that do not end with EOS")
        if entry.get("packed") and entry.get("split_across_pack", True):
            r.refuse("dataset.split_across_pack", "samples that go on in the next row")
        return source
    system = entry.get("new_system_prompt")
    tokenizer = r["tokenizer"] or {}
    kind = _last(tokenizer)
    if kind not in TOKENIZERS:
        r.refuse("tokenizer", f"conversations as {kind or 'no component'} writes them")
        return source
    form = TOKENIZERS[kind]
    if tokenizer.get("prompt_template", form.prompt_template) != form.prompt_template:
        r.refuse("tokenizer.prompt_template", "another prompt template than the tokenizer's own")
    if form.told:
        r.tell(f"tokenizer: {form.told}")
    source["chat_template"] = chat_template(form, is_alpaca=builder.kind == "alpaca", system=system)
    trains_input = entry.get("train_on_input", builder.trains_input)
    if trains_input and system:
        r.refuse("dataset.new_system_prompt", "an untrained system message in trained prompts")
    if trains_input and is_paired:
        r.refuse("dataset.train_on_input", "log-probabilities of prompts in pairs")
    source["train_on"] = "all" if trains_input else "messages"
    return source


def _place(r: Reading, entry: dict[str, Any], builder: _Builder) -> dict[str, Any]:
    """Where the records of a data set lie."""
    path, files = entry.get("source") or builder.source, entry.get("data_files")
    if isinstance(files, list) and len(files) == 1:
        (files,) = files
    if isinstance(files, list):
        r.refuse("dataset.data_files", "several files")
        files = None
    if entry.get("data_dir"):
        r.refuse("dataset.data_dir", "a folder of a data set")
    split = entry.get("split", "train")
    if path in _FORMATS:
        if split != "train":
            r.refuse("dataset.split", "a part of a file")
        if not files:
            r.refuse("dataset.source", "files without data_files")
        return {"path": files or path}
    if not path:
        r.refuse("dataset.source", "data without source")
    source: dict[str, Any] = {"path": path or "none"}
    if files or builder.data_files:
        source["data_files"] = files or builder.data_files
    elif split != "train":
        source["split"] = split
    source |= {ours: entry[key] for key, ours in (("name", "subset"), ("revision", "revision"))
               if entry.get(key)}  # fmt: skip
    return source


def _columns(r: Reading, entry: dict[str, Any], builder: _Builder) -> dict[str, str]:
    """Names of columns that are not ours."""
    if builder.kind == "text":
        named = {"text": entry.get("column", "text")}
    elif builder.kind == "chat":
        style = entry.get("conversation_style", "sharegpt")
        if style not in ("sharegpt", "openai"):
            r.refuse("dataset.conversation_style", f"conversations of the style {style}")
        column = entry.get("conversation_column") or (entry.get("column_map") or {}).get(
            "conversations", "conversations"
        )
        named = {"messages": column}
    else:
        given = entry.get("column_map") or {}
        ours = {} if builder.kind == "alpaca" else _OWN_NAMES
        named = {ours.get(key, key): column for key, column in given.items()}
        if builder.kind == "instruct":
            named = {"instruction": "input"} | dict(builder.columns) | named
        named = named or dict(builder.columns)
    usual = {"messages": ("messages", "conversations")}
    return {
        name: column
        for name, column in named.items()
        if column != name and column not in usual.get(name, ())
    }


def _refuse_others(
    r: Reading,
    key: str,
    given: Mapping[str, Any],
    known: Iterable[str],
    needs: Mapping[str, str] | None = None,
) -> None:
    """Refuse arguments of a part that are not known and ask for something."""
    for name in given.keys() - {*known}:
        if given[name] not in OFF:
            why = (needs or {}).get(name, f"the argument {name}")
            r.refuse(f"{key}.{name}", why)


def _last(given: Mapping[str, Any]) -> str:
    """Name of a component without its module."""
    return str(given.get("_component_", "")).rpartition(".")[2]


_PLACE = re.compile(r"\$\{([\w.]+)\}")


def _resolved(value: Any, whole: Mapping[Any, Any], depth: int = 0) -> Any:
    """Replace ${NAME} by the value of that key, as OmegaConf does for the first lines of files."""
    if isinstance(value, dict):
        return {key: _resolved(one, whole, depth) for key, one in value.items()}
    if isinstance(value, list):
        return [_resolved(one, whole, depth) for one in value]
    if not isinstance(value, str) or depth > _MOST_PLACES:
        return value

    def found(place: re.Match[str]) -> str:
        there: Any = whole
        for name in place[1].split("."):
            there = there.get(name) if isinstance(there, dict) else None
        if isinstance(there, str | int | float):
            return str(_resolved(there, whole, depth + 1))
        return place[0]

    return _PLACE.sub(found, value)


_MOST_PLACES = 8


@dataclass(frozen=True, kw_only=True)
class _Torchtune(Program):
    def translate(
        self, values: Mapping[Any, Any], *, file: str, without: Iterable[str], ranks: int
    ) -> Translation:
        resolved = _resolved(dict(values), values)
        return translate(self, resolved, file=file, without=without, ranks=ranks)


TORCHTUNE = _Torchtune(name="torchtune", rows=ROWS, finish=_finish)
"""torchtune."""
