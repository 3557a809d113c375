"""LLaMA-Factory's YAML files. Defaults are those of LLaMA-Factory 0.9.5."""

import json
import re
from pathlib import Path
from typing import Any

from ftkit.extensions.foreign_recipes import trainer
from ftkit.extensions.foreign_recipes.trainer import COST, FILES, LAYOUT, ON_HUB, SERVICE, SHOWN
from ftkit.extensions.foreign_recipes.translation import (
    OFF,
    Program,
    Reading,
    Row,
    idle,
    missing,
    part,
    rows_by_key,
    same,
)
from ftkit.extensions.foreign_recipes.value_types import Accepts, typed

# Unlike the template that ftkit has by this name, it trains the line end after a turn.
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>\\n' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_TEMPLATES = {
    "llama3": "llama3",
    "chatml": _CHATML,
    "qwen3_nothink": _CHATML,
    "default": "",
    "empty": "",
}
_LOSSES = {"sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo"}
_OBJECTIVES = {"dpo": "dpo", "kto": "kto", "rm": "reward"}
_ADAPTERS = ("lora", "oft")
_TEXTS: Accepts = {"*": "text"}
_INFO: Accepts = {"*": {"file_name": "text", "hf_hub_url": "text", "split": "text",
                        "subset": "text", "formatting": "text", "columns": _TEXTS,
                        "tags": _TEXTS}}  # fmt: skip
"""Content of dataset_info.json."""
_LIST = "dataset_info.json"
_REMOTE = "REMOTE:"
"""Before the name of a data set of the hub, as dataset_dir."""

_PIECES = "images in several pieces"
_PARTS = {
    "freeze_multi_modal_projector": "images.projector",
    "freeze_vision_tower": "images.tower",
}
"""Keys of parts that see, which are trained where they are false."""
_OF_MODELS_THAT_SEE = {
    "image_do_pan_and_scan": (False, _PIECES),
    "crop_to_patches": (False, _PIECES),
}
"""Keys of models that see: their defaults, which alone are translated, and what others need."""

ROWS = rows_by_key(
    *trainer.ROWS,
    same("model_name_or_path", "text", "checkpoint_dir", None),
    same("output_dir", "text", "out_dir", "trainer_output"),
    part("stage", "text", ("objective", "data.chat_template"), "sft", "sft, pt, dpo, kto, rm"),
    part("finetuning_type", "text", ("peft", "quantize", "train.only"), "lora",
         "lora, oft, full or freeze"),
    part("lora_rank", "whole>=1", "lora_r", 8, ""),
    part("lora_alpha", "number>0", "lora_alpha", None, "twice lora_rank"),
    part("lora_dropout", "number>=0<1", "lora_dropout", 0.0, ""),
    part("lora_target", "names", ("lora_targets", "lora_skip_missing"), ["all"],
         "all: all-linear; names that the model lacks are left out, with a warning"),
    part("oft_rank", "whole>=0", "peft", 0, "r of oft"),
    part("oft_block_size", "whole>=0", "peft", 32, "oft_block_size of oft"),
    part("oft_target", "names", ("lora_targets", "lora_skip_missing"), ["all"],
         "all: all-linear; names that the model lacks are left out, with a warning"),
    part("additional_target", "names", "lora_modules_to_save", None, ""),
    part("use_rslora", "flag", "lora_variant", False, ""),
    part("use_dora", "flag", "lora_variant", False, ""),
    part("pissa_init", "flag", "lora_init", False, ""),
    part("pissa_iter", "whole>=1", "lora_init", 16, "ftkit takes the exact decomposition"),
    part("loraplus_lr_ratio", "number>0", "lora_plus_ratio", None, ""),
    part("adapter_name_or_path", "text", "adapter", None, ""),
    part("quantization_bit", "whole>=0", "quantize", None, ""),
    part("quantization_method", "text", "quantize", "bnb", ""),
    part("quantization_type", "fp4|nf4", "quantize", "nf4", ""),
    part("double_quantization", "flag", "quantize", True, ""),
    part("dataset", "names", ("data.path", "data.sources"), None, "found in dataset_info.json"),
    part("dataset_dir", "text", ("data.path", "data.sources"), "data", ""),
    part("eval_dataset", "names", "eval.sets", None, ""),
    part("val_size", "number>=0", ("data.val_split_fraction", "eval.final_validation"), 0.0,
         "0: all records are trained on"),
    part("max_samples", "whole>=1", "data.path", None, "of each data set, if it has more"),
    part("template", "text", "data.chat_template", None, "the model's own, or a name"),
    part("enable_thinking", "flag", "data.chat_template_kwargs", True, ""),
    part("train_on_prompt", "flag", "data.train_on", False, ""),
    part("mask_history", "flag", "data.train_on", False, ""),
    part("packing", "flag", "train.global_batch_tokens", None, ""),
    part("neat_packing", "flag", "train.global_batch_tokens", False, ""),
    same("cutoff_len", "whole>=1", "train.max_seq_length", 2048),
    part("disable_gradient_checkpointing", "flag", "memory.activation_checkpointing", False, ""),
    part("pure_bf16", "flag", "precision", False, "bf16-true"),
    part("pref_beta", "number>0", "objective.beta", 0.1, ""),
    part("pref_ftx", "number>=0", "objective.sft_weight", 0.0, ""),
    part("pref_loss", "text", "objective.loss", "sigmoid", ""),
    part("dpo_label_smoothing", "number>=0<1", "objective.label_noise", 0.0, "loss: conservative"),
    part("simpo_gamma", "number>=0", "objective.margin", 0.5, ""),
    part("kto_chosen_weight", "number>=0", "objective.desirable_weight", 1.0, ""),
    part("kto_rejected_weight", "number>=0", "objective.undesirable_weight", 1.0, ""),
    part("ref_model", "text", "reference", None, ""),
    part("use_dft_loss", "flag", "objective", False, "dft"),
    part("use_eaft_loss", "flag", "objective", False, "eaft"),
    part("eaft_alpha", "number>=0", "objective.alpha", 1.0, ""),
    part("early_stopping_steps", "whole>=1", "eval.patience", None, ""),
    same("moe_aux_loss_coef", "number>=0", "router_aux_loss_coef", None),
    part("freeze_trainable_layers", "whole", "train.only", 2,
         "with finetuning_type freeze; {last 2} counts the layers of the model"),
    part("freeze_trainable_modules", "names", "train.only", ["all"], ""),
    part("freeze_extra_modules", "names", "train.only", None, ""),
    *idle(COST, "flash_attn", "enable_liger_kernel", "use_unsloth", "use_unsloth_gc",
          "use_kv_cache", "block_diag_attn", "compute_dtype", "device_map",
          "use_reentrant_gc", "low_cpu_mem_usage", "upcast_layernorm", "use_fast_tokenizer",
          "preprocessing_num_workers", "preprocessing_batch_size", "use_v1_kernels",
          "quantization_device_map", "infer_dtype", "eval_num_beams", "offload_folder"),
    *idle(FILES, "overwrite_cache", "tokenized_path", "cache_dir", "media_dir", "export_dir",
          "data_shared_file_system", "export_size", "export_device", "export_legacy_format",
          "export_quantization_bit", "export_quantization_dataset", "export_quantization_maxlen",
          "export_quantization_nsamples", "adapter_folder"),
    *idle(ON_HUB, "export_hub_model_id"),
    *idle(LAYOUT, "use_ray", "ray_num_workers", "ray_run_name", "ray_storage_path",
          "ray_init_kwargs", "resources_per_worker", "placement_strategy", "master_addr",
          "master_port",
          "fsdp_transformer_layer_cls_to_wrap"),
    *idle(SERVICE, "hf_hub_token", "ms_hub_token", "om_hub_token"),
    *idle(SHOWN, "print_param_status", "include_effective_tokens_per_second",
          "eval_on_each_dataset", "enable_torch_profiler", "profile_modules",
          "profiler_active_steps", "profiler_output_dir", "profiler_profile_memory",
          "profiler_record_shapes", "profiler_repeat", "profiler_wait_steps",
          "profiler_warmup_steps", "profiler_with_stack"),
    *idle("affects rounding alone", "upcast_lmhead_output"),
    *idle("answers, not training", "infer_backend", "max_new_tokens", "temperature", "top_p",
          "top_k", "do_sample", "vllm_maxlen", "vllm_config", "vllm_enforce_eager",
          "vllm_gpu_util", "vllm_max_lora_rank", "sglang_config", "sglang_lora_backend",
          "sglang_maxlen", "sglang_mem_fraction", "sglang_tp_size", "length_penalty", "max_length",
          "num_beams", "repetition_penalty", "skip_special_tokens", "task", "task_dir", "lang",
          "n_shot", "batch_size", "save_dir", "download_mode"),
    *idle("the template's own", "tool_format"),
    part("image_max_pixels", "whole>=1", "data.image_max_pixels", 768 * 768, "with images"),
    part("image_min_pixels", "whole>=1", "data.image_min_pixels", 32 * 32, "with images"),
    *(
        part(key, "flag", ours, True, "with images and finetuning_type full")
        for key, ours in _PARTS.items()
    ),
    part("freeze_language_model", "flag", "train.freeze", False,
         "with images and finetuning_type full"),
    *(
        Row(key=key, kind="no effect", accepts="flag", default=default,
            note=f"with images, {str(not default).lower()} is refused")
        for key, (default, _) in _OF_MODELS_THAT_SEE.items()
    ),
    *idle("only with videos or sounds", "video_max_pixels", "video_min_pixels", "video_fps",
          "video_maxlen", "use_audio_in_video", "audio_sampling_rate"),
    *idle("the adapter is merged by ftkit merge", "pissa_convert", "create_new_adapter"),
    *missing("a default system message", "default_system"),
    *missing("streaming data", "streaming"), *idle("see streaming", "buffer_size"),
    *missing("thoughts of earlier answers in a conversation", "preserve_thinking"),
    *missing("special tokens read as text", "split_special_tokens"),
    Row(key="ignore_pad_token_for_loss", kind="not there", note="trained padding",
        harmless=(None, True)),
    *missing("mixing of data sets by probabilities", "mix_strategy", harmless=("concat",)),
    *missing("mixing of data sets by probabilities", "interleave_probs"),
    part("disable_shuffling", "flag", "data.shuffle", False, "the order of the file"),
    part("add_tokens", "names", "data.add_tokens", None,
         "new rows begin as the mean of the others"),
    part("resize_vocab", "flag", "data.add_tokens", False, "with add_tokens"),
    *missing("new special tokens", "add_special_tokens", "new_special_tokens_config"),
    part("train_from_scratch", "flag", "train.from_scratch", False, "in full fine-tuning"),
    *missing("mixture of depths", "mixture_of_depths"),
    *missing("another scale of rotary embeddings", "rope_scaling", "shift_attn",
             "model_max_length"),
    *missing("a rate of its own for embeddings", "loraplus_lr_embedding", harmless=(1e-6,)),
    *missing("log-probabilities that weigh the length", "ld_alpha"),
    *missing("the preference loss bco beside another", "pref_bco_weight"),
    *missing("an adapter or quantisation of the reference alone", "ref_model_adapters",
             "ref_model_quantization_bit"),
    *idle("see stage", "reward_model", "reward_model_adapters", "reward_model_quantization_bit",
          "reward_model_type", "ppo_buffer_size", "ppo_epochs", "ppo_score_norm", "ppo_target",
          "ppo_whiten_rewards"),
    *missing("LLaMA-Pro", "use_llama_pro"),
    *missing("GaLore", "use_galore"), *missing("APOLLO", "use_apollo"),
    *missing("BAdam", "use_badam"), *missing("Adam-mini", "use_adam_mini"),
    part("use_muon", "flag", "optimizer", False, "torch.optim.Muon"),
    part("use_asft_loss", "flag", ("objective", "teacher"), False,
         "asft; its reference is ref_model or the model itself"),
    part("asft_alpha", "number>=0", "objective.alpha", 0.1, ""),
    part("fp8", "flag", "float8", False,
         "in full fine-tuning, with a scale for each token and row"),
    *missing("KTransformers: adapters of experts on CPUs", "use_kt"),
    *missing("Megatron", "use_mca", "use_megatron_bridge", "tensor_model_parallel_size",
             "pipeline_model_parallel_size", "expert_model_parallel_size",
             "use_distributed_optimizer"),
    *idle("see use_megatron_bridge and use_mca", "megatron_bridge_args", "sequence_parallel",
          "context_parallel_size", "virtual_pipeline_model_parallel_size",
          "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
          "overlap_param_gather", "overlap_grad_reduce", "bias_activation_fusion",
          "apply_rope_fusion", "masked_softmax_fusion", "cross_entropy_loss_fusion",
          "moe_grouped_gemm", "moe_token_dispatcher_type", "recompute_granularity",
          "recompute_method", "recompute_num_layers", "mixed_precision", "use_packed_sequences",
          "calculate_per_token_loss", "megatron_pretrained_checkpoint", "export_hf_on_finish",
          "extra_config"),
    *missing("HyperParallel", "use_hyper_parallel"),
    *idle("see use_hyper_parallel", "hyper_parallel_args", "hyper_parallel_cp_size"),
    *idle("see the key that switches it on", "galore_layerwise", "galore_target", "galore_rank",
          "galore_scale", "galore_update_interval", "apollo_layerwise", "apollo_target",
          "apollo_rank", "apollo_scale", "apollo_scale_type", "badam_mode", "badam_switch_mode",
          "badam_switch_interval", "badam_verbose", "fp8_backend",
          "fp8_enable_fsdp_float8_all_gather", "galore_proj_type", "apollo_proj",
          "apollo_proj_type", "apollo_update_interval", "apollo_scale_front", "badam_start_block",
          "badam_update_ratio", "badam_mask_mode",
          "kt_cpu_activation", "kt_config", "kt_weight_path", "kt_non_expert_weight_path",
          "kt_expert_checkpoint_path", "kt_use_lora_experts", "kt_lora_expert_num",
          "kt_lora_expert_intermediate_size"),
    *missing("answers of the model that are compared", "do_predict"),
    part("model_revision", "text", "checkpoint_dir", "main", "behind the name and @"),
    *idle("a file of LLaMA-Factory's new format says no template", "init_special_tokens"),
    *idle("PEFT 0.21 does not apply it to linear layers", "module_dropout"),
)  # fmt: skip


def _finish(r: Reading) -> None:
    if r.has("model_name_or_path"):
        r.set(checkpoint_dir=_named(r, r["model_name_or_path"]))
    if r["finetuning_type"] == "freeze":
        layers, modules = r["freeze_trainable_layers"], r["freeze_trainable_modules"]
        trainer.train_layers(
            r, "freeze_trainable_layers", layers, modules, r["freeze_extra_modules"]
        )
    elif r["finetuning_type"] not in (*_ADAPTERS, "full"):
        r.refuse("finetuning_type", r["finetuning_type"].upper())
    is_adapter = r["finetuning_type"] in _ADAPTERS
    if is_adapter:
        _adapter(r)
    trainer.from_scratch(r, "train_from_scratch", is_adapter=is_adapter)
    trainer.float8(r, is_adapter=is_adapter, scales="all tokens together")
    trainer.length(r)
    micro, accumulation = r["per_device_train_batch_size"], r["gradient_accumulation_steps"]
    trainer.batch(r, micro, accumulation)
    trainer.optimizer(r, r["optim"])
    if r["use_muon"]:
        betas = [r["adam_beta1"], r["adam_beta2"]]
        rate, decay = r["learning_rate"], r["weight_decay"]
        trainer.muon(r, "use_muon", is_adapter=is_adapter, rate=rate, decay=decay, betas=betas)
    kind = r["lr_scheduler_type"]
    trainer.schedule(r, kind)
    trainer.warm_up(r, kind)
    trainer.checkpoints(r)
    trainer.checkpointing(r, not r["disable_gradient_checkpointing"])
    if r["pure_bf16"]:
        r.set(precision="bf16-true")
    elif r["bf16"]:
        r.set(precision="bf16-mixed")
    else:
        r.set(precision="16-mixed" if r["fp16"] else "32-true")
    if r["packing"] or r["neat_packing"] or (r["packing"] is None and r["stage"] == "pt"):
        trainer.packing(r, micro, accumulation, r["cutoff_len"])
        if r["stage"] != "pt":
            r.tell(
                "packing: LLaMA-Factory fills rows of cutoff_len tokens; ftkit takes samples in "
                "order up to the same number of tokens"
            )
            if not r["neat_packing"]:
                r.refuse("packing", "attention from one sample to another")
    if r.has("early_stopping_steps"):
        r.set(eval__patience=r["early_stopping_steps"])
    _objective(r)
    _data(r)


def _named(r: Reading, model: str) -> str:
    """A model, with the version that holds for all of a file."""
    return trainer.of_version(r, "model_revision", model)


def _adapter(r: Reading) -> None:
    kind = r["finetuning_type"]
    names = r[f"{kind}_target"]
    trainer.adapt(r, "all-linear" if names == ["all"] else names)
    if kind == "lora":
        _lora(r)
    else:
        options = {"r": r["oft_rank"], "oft_block_size": r["oft_block_size"]}
        r.recipe["peft"] = {"class_path": kind, "init_args": options}
    r.set(lora_modules_to_save=r["additional_target"])
    r.set(adapter=r["adapter_name_or_path"])
    bits = r["quantization_bit"]
    if bits in OFF:
        return
    if r["quantization_method"] not in ("bnb", "bitsandbytes"):
        r.refuse("quantization_method", f"quantisation by {r['quantization_method']}")
    double = "-dq" if r["double_quantization"] else ""
    r.set(quantize="bnb.int8" if bits == 8 else f"bnb.{r['quantization_type']}{double}")


def _lora(r: Reading) -> None:
    rank = r["lora_rank"]
    r.set(lora_r=rank, lora_alpha=r["lora_alpha"] or 2 * rank)
    r.set(lora_dropout=r["lora_dropout"])
    r.set(lora_variant="dora" if r["use_dora"] else "rslora" if r["use_rslora"] else "lora")
    r.set(lora_init="pissa" if r["pissa_init"] else "default")
    if r.has("loraplus_lr_ratio"):
        r.set(lora_plus_ratio=r["loraplus_lr_ratio"])


def _objective(r: Reading) -> None:
    stage = r["stage"]
    if stage == "ppo":
        r.refuse("stage", "online RL")
    elif stage not in ("sft", "pt", *_OBJECTIVES):
        r.refuse("stage", f"the stage {stage}")
    if stage == "sft":
        name = "dft" if r["use_dft_loss"] else "eaft" if r["use_eaft_loss"] else None
        if name is not None:
            alpha = {"alpha": r["eaft_alpha"]} if name == "eaft" else {}
            r.recipe["objective"] = {"class_path": name, "init_args": alpha}
        elif r["use_asft_loss"]:
            _anchor(r)
    if stage not in _OBJECTIVES:
        return
    name, beta = _OBJECTIVES[stage], r["pref_beta"]
    options: dict[str, Any] = {}
    loss = r["pref_loss"]
    if name == "dpo" and loss == "orpo":
        name, options = "orpo", {"weight": beta}
    elif name == "dpo" and loss == "simpo":
        name, options = "simpo", {"beta": beta, "margin": r["simpo_gamma"] / beta}
    elif name == "dpo":
        if loss not in _LOSSES:
            r.refuse("pref_loss", f"the preference loss {loss}")
        noise = r["dpo_label_smoothing"]
        options = {
            "loss": "conservative" if noise else _LOSSES.get(loss, "sigmoid"),
            "beta": beta,
            "label_noise": noise,
            "sft_weight": r["pref_ftx"],
        }
    elif name == "kto":
        options = {
            "beta": beta,
            "desirable_weight": r["kto_chosen_weight"],
            "undesirable_weight": r["kto_rejected_weight"],
        }
        if r["finetuning_type"] != "lora":
            r.set(reference=_named(r, r["ref_model"] or r["model_name_or_path"]))
    if name == "dpo" and r.has("ref_model"):
        r.set(reference=_named(r, r["ref_model"]))
    r.recipe["objective"] = {"class_path": name, "init_args": options}


def _anchor(r: Reading) -> None:
    r.recipe["objective"] = {"class_path": "asft", "init_args": {"alpha": r["asft_alpha"]}}
    r.set(teacher=_named(r, r["ref_model"] or r["model_name_or_path"] or ""))
    r.tell(
        "use_asft_loss: LLaMA-Factory takes the mean over the tokens of each micro-batch, ftkit "
        "over those of the step"
    )


def _data(r: Reading) -> None:
    options: dict[str, Any] = {}
    stage, name = r["stage"], r["template"]
    if stage != "pt":
        if name is None:
            r.tell("template: the model's own, as LLaMA-Factory takes it from the tokenizer")
        elif name not in _TEMPLATES:
            r.tell(f"template: the model's own template in the place of LLaMA-Factory's {name}")
        elif not _TEMPLATES[name]:
            r.refuse("template", f"the template {name}")
        options["chat_template"] = _TEMPLATES.get(name, "tokenizer") or "tokenizer"
        if stage in ("sft", "kto"):
            on = "all" if r["train_on_prompt"] else "last" if r["mask_history"] else "assistant"
            if stage == "sft":
                options["train_on"] = on
        r.tell(
            "dataset: the input of an instruction stands below it behind an empty line, in "
            "LLaMA-Factory behind a line end"
        )
        r.tell(
            "cutoff_len: LLaMA-Factory shortens question and answer of a longer sample, ftkit "
            "cuts off its end"
        )
        options["overlong"] = "truncate"
    size = r["val_size"] or 0
    if size > 1:
        r.refuse("val_size", "a number of validation records")
        size = 0.05
    options["val_split_fraction"] = size
    trainer.held_out(r, "val_size", size, others=r.has("eval_dataset"))
    trainer.in_order(r, options)
    if r["disable_shuffling"]:
        options["shuffle"] = False
    options |= _new_tokens(r)
    sources = _sources(r, r["dataset"], options)
    if r.has("eval_dataset"):
        further = _sources(r, r["eval_dataset"], options)
        r.set(eval__sets={f"set_{i}": source for i, source in enumerate(further, 1)})
    options |= sources[0] if len(sources) == 1 else {"sources": sources}
    r.recipe["data"] = {"class_path": "JSON", "init_args": options}


def _new_tokens(r: Reading) -> dict[str, Any]:
    tokens = r["add_tokens"]
    if not tokens:
        if r["resize_vocab"]:
            r.refuse("resize_vocab", "embeddings trained beside an adapter without new tokens")
        return {}
    if r["finetuning_type"] in _ADAPTERS and r.has("additional_target"):
        r.refuse("add_tokens", "new tokens beside an adapter that trains other layers")
    r.tell("add_tokens: new rows begin as the mean of the others, in LLaMA-Factory with noise")
    return {"add_tokens": tokens}


def _sources(r: Reading, names: list[str] | None, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Data sets by their names in dataset_info.json, or on the hub; options of all are added."""
    folder, found = r["dataset_dir"], names or []
    if not found:
        r.refuse("dataset", "no dataset")
    if folder == "ONLINE":
        return [_of_hub(r, {"hf_hub_url": name}) for name in found]
    info = _info(r, folder)
    if info is None:
        # By the key that files have: --without cannot name dataset_dir where it is the default.
        file = f"{folder}/{_LIST}"
        place = file if folder.startswith(_REMOTE) else Path(file).absolute()
        r.refuse(
            "dataset",
            f"{', '.join(found)} would be an entry of {place}, which cannot be read here; "
            "dataset_dir names its folder",
        )
    sources = []
    for name in found:
        entry = (info or {}).get(name)
        if entry is None:
            if info is not None:
                r.refuse("dataset", f"{name} is not in {folder}/{_LIST}")
            sources.append({"path": f"{folder}/{name}.json"})
            continue
        sources.append(_source(r, entry, folder))
        if (entry.get("columns") or {}).get("images"):
            options |= _with_images(r, entry)
    return sources or [{"path": folder}]


def _info(r: Reading, folder: str) -> dict[str, Any] | None:
    """Content of dataset_info.json, which may be in a data set of the hub; None: it is not here."""
    file, hub = f"{folder}/{_LIST}", folder.removeprefix(_REMOTE)
    try:
        if hub != folder:
            from huggingface_hub import hf_hub_download

            file = hf_hub_download(hub, _LIST, repo_type="dataset")
        found = trainer.existing(file)
        info = json.loads(found.read_text("utf-8")) if found and found.is_file() else None
    except (OSError, ValueError, RecursionError):  # those of the hub are the first two
        return None
    return typed({"": info}, {"": _INFO}, file).get("")


def _of_hub(r: Reading, entry: dict[str, Any]) -> dict[str, Any]:
    """Where a data set of the hub lies."""
    source = {"path": entry["hf_hub_url"]}
    split, limit = entry.get("split") or "train", r["max_samples"]
    source["split"] = f"{split}[:{limit}]" if limit else split
    return source | ({"subset": entry["subset"]} if entry.get("subset") else {})


def _source(r: Reading, entry: dict[str, Any], folder: str) -> dict[str, Any]:
    source: dict[str, Any] = {}
    columns, tags = entry.get("columns") or {}, entry.get("tags") or {}
    if "file_name" in entry and folder.startswith(_REMOTE):
        source = _of_hub(r, {"hf_hub_url": folder.removeprefix(_REMOTE)})
        source["data_files"] = entry["file_name"]
    elif "file_name" in entry:
        source["path"] = f"{folder}/{entry['file_name']}"
        _limit_file(r, source["path"])
    elif "hf_hub_url" in entry:
        source = _of_hub(r, entry)
    else:
        r.refuse("dataset", "a data set of ModelScope, or one that is code")
        source["path"] = folder
    for medium in ("videos", "audios"):
        if medium in columns:
            r.refuse("dataset", "audio or video in training")
    if entry.get("num_samples"):
        r.refuse("dataset", "num_samples of dataset_info.json")
    ours = _columns(columns, tags, is_chat=entry.get("formatting", "alpaca") != "alpaca")
    if r["stage"] == "pt":  # documents, whose text is the prompt
        text = columns.get("prompt") or "instruction"
        ours = {} if text == "text" else {"text": text}
    if ours:
        source["columns"] = ours
    return source


def _with_images(r: Reading, entry: dict[str, Any]) -> dict[str, Any]:
    """Options of data with images."""
    if entry["columns"]["images"] not in ("images", "image"):
        r.refuse("dataset", "images under another key")
    # Their paths begin in media_dir, ours beside the records.
    elsewhere = "images in another folder than the records"
    if "/" in entry.get("file_name", ""):
        r.refuse("dataset", elsewhere)
    if r["media_dir"] not in (None, r["dataset_dir"]):
        r.refuse("media_dir", elsewhere)
    if r["stage"] != "sft":
        r.refuse("stage", "images in preference pairs")
    for key, (default, why) in _OF_MODELS_THAT_SEE.items():
        if r[key] is not default:
            r.refuse(key, why)
    parts = [key for key in _PARTS if not r[key]]
    for key in parts:
        r.recipe[_PARTS[key]] = True
    if r["freeze_language_model"]:
        r.recipe["train.freeze"] = "{language}"
    if r["finetuning_type"] != "full":
        for key in (*parts, *["freeze_language_model"] * r["freeze_language_model"]):
            r.refuse(key, "adapters in parts that see")
    if len(parts) == 1:
        r.tell(
            f"{parts[0]}: Qwen3-VL's deepstack_merger_list is part of the projector here, and "
            "of the tower in LLaMA-Factory"
        )
    return {key: r[key] for key in ("image_max_pixels", "image_min_pixels")}


def _columns(columns: dict[str, str], tags: dict[str, str], *, is_chat: bool) -> dict[str, str]:
    if not is_chat:
        words = {"prompt": "instruction", "query": "input", "response": "output",
                 "system": "sys_prompt", "history": "history"}  # fmt: skip
        named = {ours: columns[theirs] for theirs, ours in words.items() if columns.get(theirs)}
    else:
        named = {
            name: columns[name] for name in ("messages", "tools", "system") if columns.get(name)
        }
        words = {"role_tag": "role", "content_tag": "content", "user_tag": "user_role",
                 "assistant_tag": "assistant_role", "system_tag": "system_role",
                 "observation_tag": "tool_role"}  # fmt: skip
        named |= {ours: tags[theirs] for theirs, ours in words.items() if tags.get(theirs)}
    usual = {"messages": ("conversations",), "role": ("from",), "content": ("value",),
             "user_role": ("user", "human"), "assistant_role": ("assistant", "gpt"),
             "system_role": ("system",), "tool_role": ("tool", "observation"),
             "sys_prompt": ("system",)}  # fmt: skip
    return {
        name: column
        for name, column in named.items()
        if column != name and column not in usual.get(name, ())
    }


def _limit_file(r: Reading, path: str) -> None:
    """Refuse max_samples of a file that has more records: ftkit has no such bound for files."""
    limit, file = r["max_samples"], trainer.existing(path)
    if limit is None or file is None or not file.is_file():
        return
    text = file.read_text("utf-8", "replace")
    records = text.count("\n") if file.suffix == ".jsonl" else _array_length(text)
    if records > limit:
        r.refuse("max_samples", "the first records of a file")


def _array_length(text: str) -> int:
    try:
        return len(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return len(re.findall(r"^\s*\{", text, re.MULTILINE))


LLAMA_FACTORY = Program(
    name="LLaMA-Factory",
    rows=ROWS,
    finish=_finish,
)
"""LLaMA-Factory."""
