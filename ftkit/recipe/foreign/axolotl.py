"""axolotl's configuration files. Defaults are those of axolotl 0.19."""

import math
import re
from typing import Any

from ftkit.recipe.foreign import trainer
from ftkit.recipe.foreign.table import OFF, Program, Reading, idle, missing, part, rows_by_key, same
from ftkit.recipe.foreign.trainer import (
    COST,
    FILES,
    LAYOUT,
    ON_HUB,
    ON_RESUME,
    REMOTE_CODE,
    SERVICE,
    SHOWN,
    number,
)

_TEMPLATES = {"chatml": "chatml", "llama3": "llama3", "tokenizer_default": "tokenizer"}
"""Chat templates of axolotl that ftkit has by a name."""
# The texts are axolotl's own format: AlpacaPrompter in src/axolotl/prompters.py of axolotl 0.19.
_TASK = "Below is an instruction that describes a task"
_WITH_INPUT = f"{_TASK}, paired with an input that provides further context. "
_RESPOND = "Write a response that appropriately completes the request."
_ALPACA = {
    "alpaca:chat": {
        "with_input": f"SYSTEM: {_WITH_INPUT}{_RESPOND}\n"
        "USER: {instruction}\n{input}\nASSISTANT:",
        "without_input": f"SYSTEM: {_TASK}. {_RESPOND}\nUSER: {{instruction}}\nASSISTANT:",
    },
    "alpaca:phi": {
        "with_input": f"<|system|>\n{_WITH_INPUT}{_RESPOND}<|end|>\n"
        "<|user|>\n{instruction}<|end|>{input}<|assistant|>",
        "without_input": f"<|system|>\n{_TASK}. {_RESPOND}<|end|>\n"
        "<|user|>\n{instruction}<|end|>\n<|assistant|>\n",
    },
}
"""Prompts of axolotl's types alpaca:STYLE."""
_RL = {"dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "kto": "kto", "simpo": "simpo"}
_KERNELS = ("liger", "cut_cross_entropy", "kernels")
_ENTRY = {"path", "type", "split", "name", "revision", "ds_type", "data_files", "chat_template",
          "field", "field_messages", "field_system", "field_tools", "field_thinking", "roles",
          "field_instruction", "field_input", "field_output", "template_thinking_key",
          "field_human",
          "message_property_mappings", "message_field_role", "message_field_content",
          "roles_to_train", "train_on_eos", "train_on_eot", "trust_remote_code", "field_chosen",
          "field_rejected", "preprocess_shards", "chat_template_jinja", "field_model",
          "message_field_training", "max_completion_length", "drop_system_message"}  # fmt: skip
"""Keys of an entry of datasets that are read."""

ROWS = rows_by_key(
    same("base_model", "checkpoint_dir", None),
    part("datasets", ("data.path", "data.sources", "data.columns", "data.chat_template",
                      "data.train_on", "data.prompt_style", "data.data_files",
                      "data.drop_system"), None,
         "each entry is a source"),
    part("val_set_size", "data.val_split_fraction", 0.0, "0: all records are trained on"),
    part("chat_template", "data.chat_template", "tokenizer_default",
         "chatml and llama3 by name, any other as the model's own template"),
    part("chat_template_jinja", "data.chat_template", None, ""),
    same("chat_template_kwargs", "data.chat_template_kwargs", None),
    part("train_on_inputs", ("data.train_on", "data.mask_prompt"), False, ""),
    same("sequence_len", "train.max_seq_length", 512),
    part("excess_length_strategy", "data.overlong", "drop", "raise becomes drop"),
    part("sample_packing", ("train.global_batch_tokens", "train.micro_batch_tokens"), False,
         "a step takes samples up to the tokens of its packed rows"),
    part("micro_batch_size", ("train.global_batch_size", "train.micro_batch_size"), 1,
         "times gradient_accumulation_steps and devices"),
    part("gradient_accumulation_steps", "train.global_batch_size", 1, "see micro_batch_size"),
    part("batch_size", "train.global_batch_size", None, "in the place of accumulation"),
    part("num_epochs", "train.epochs", 1.0, "whole numbers"),
    part("max_steps", "train.max_steps", None, "in the place of epochs, if it is smaller"),
    part("learning_rate", "optimizer.lr", None, ""),
    part("optimizer", "optimizer", "adamw_torch_fused", "by name"),
    part("weight_decay", ("optimizer.weight_decay", "train.decay_norms_and_biases"), 0.0,
         "norms and biases do not decay"),
    part("adam_beta1", "optimizer.betas", 0.9, ""),
    part("adam_beta2", "optimizer.betas", 0.999, ""),
    part("adam_epsilon", "optimizer.eps", 1e-8, ""),
    part("adam_eps", "optimizer.eps", None, "older name of adam_epsilon"),
    part("lr_scheduler", ("train.lr_schedule", "train.lr_ends", "train.min_lr"), "cosine", ""),
    part("cosine_min_lr_ratio", "train.min_lr", None, "times the learning rate"),
    part("warmup_steps", ("train.lr_warmup_steps", "train.lr_warmup_run_fraction"), None,
         "below 1 a share of the run"),
    part("warmup_ratio", ("train.lr_warmup_steps", "train.lr_warmup_run_fraction"), 0.03,
         "a share of all steps of the run, rounded up; axolotl rounds it down, and warms up for 2 "
         "steps where that is 1"),
    same("max_grad_norm", "train.max_norm", 1.0, value=lambda x: number(x) or None),
    same("seed", "seed", 42),
    same("neftune_noise_alpha", "train.neftune_noise_alpha", None),
    same("output_dir", "out_dir", "./model-out"),
    part("adapter", "quantize", None, "lora, qlora, or none: full fine-tuning"),
    part("load_in_4bit", "quantize", False, "bnb.nf4-dq"),
    part("load_in_8bit", "quantize", False, "bnb.int8"),
    part("quantize_moe_experts", "quantize", False, "ftkit quantises experts like other layers"),
    part("bnb_config_kwargs", "quantize", None, ""),
    part("lora_r", "lora_r", None, ""),
    part("lora_alpha", "lora_alpha", None, ""),
    part("lora_dropout", "lora_dropout", 0.0, ""),
    part("lora_target_modules", ("lora_targets", "lora_skip_missing"), None,
         "names that the model lacks are left out, with a warning"),
    part("lora_target_linear", "lora_targets", False, "all-linear"),
    part("lora_target_parameters", "lora_experts", None,
         "experts in one parameter; without other layers they alone are adapted"),
    part("lora_modules_to_save", "lora_modules_to_save", None, ""),
    part("lora_model_dir", "adapter", None, ""),
    part("peft_use_dora", "lora_variant", False, "dora"),
    part("peft_use_rslora", "lora_variant", False, "rslora"),
    part("peft_init_lora_weights", "lora_init", True, "pissa and olora"),
    part("loraplus_lr_ratio", "lora_plus_ratio", None, ""),
    part("unfrozen_parameters", "train.only", None, ""),
    part("bf16", "precision", None, "bf16-true, for adapters bf16-mixed"),
    part("fp16", "precision", None, "16-mixed"),
    part("bfloat16", "precision", None, "bf16-true"),
    part("float16", "precision", None, ""),
    part("gradient_checkpointing", ("memory.activation_checkpointing",
                                    "memory.offload_activations"), False, ""),
    part("activation_offloading", "memory.offload_activations", False, ""),
    same("torch_compile", "compile", False, value=lambda x: x is True),
    part("evals_per_epoch", "eval.interval_epochs", None, "1 / this"),
    part("saves_per_epoch", "train.save_interval_epochs", None, "1 / this"),
    part("eval_steps", "eval.interval", None, ""),
    part("save_steps", "train.save_interval", None, ""),
    part("eval_strategy", "eval.interval", None, ""),
    part("evaluation_strategy", "eval.interval", None, "older name of eval_strategy"),
    part("save_strategy", "train.save_interval", None, ""),
    same("save_total_limit", "checkpoint.keep_last", None, value=lambda x: max(1, int(x))),
    same("early_stopping_patience", "eval.patience", None),
    part("load_best_model_at_end", "checkpoint.result", False, ""),
    part("rl", "objective", None, "dpo, ipo, orpo, kto, simpo"),
    part("rl_beta", "objective.beta", None, ""),
    part("orpo_alpha", "objective.weight", 0.1, ""),
    part("simpo_gamma", "objective.margin", None, ""),
    part("dpo_label_smoothing", "objective.label_noise", None, "loss: conservative"),
    part("kto_desirable_weight", "objective.desirable_weight", 1.0, ""),
    part("kto_undesirable_weight", "objective.undesirable_weight", 1.0, ""),
    part("reward_model", "objective", False, "reward"),
    part("center_rewards_coefficient", "objective.center_weight", None, ""),
    part("use_eaft", "objective", False, "eaft"),
    part("eaft_alpha", "objective.alpha", 1.0, ""),
    part("model_config", "router_aux_loss_coef", None,
         "output_router_logits: the weight that config.json has"),
    part("plugins", "kernels", None, "kernels have no effect on what is learned"),
    part("special_tokens", "checkpoint_dir", None, "those of the model; padding is never computed"),
    *idle("the model's config.json says it", "model_type", "tokenizer_type",
          "is_llama_derived_model",
          "is_falcon_derived_model", "is_mistral_derived_model", "is_qwen_derived_model",
          "base_model_config", "tokenizer_use_fast", "tokenizer_legacy", "cls_model_config",
          "tokenizer_use_mistral_common", "base_model_ignore_patterns", "num_labels",
          "is_preprocess",
          "torch_dtype", "lora_fan_in_fan_out"),
    part("tokenizer_config", "checkpoint_dir", None, "the tokenizer of the model"),
    part("revision_of_model", "checkpoint_dir", None, "behind the name and @"),
    *idle(REMOTE_CODE, "trust_remote_code"),
    *idle(ON_RESUME, "resume_from_checkpoint", "auto_resume_from_checkpoints"),
    *idle(ON_HUB, "push_dataset_to_hub", "hub_model_id", "hub_strategy", "hf_use_auth_token",
          "push_to_hub", "hub_revision", "hub_private_repo"),
    *idle(SERVICE, "wandb_project", "wandb_entity", "wandb_watch", "wandb_name", "wandb_log_model",
          "wandb_run_id", "wandb_mode", "use_wandb", "use_mlflow", "mlflow_tracking_uri",
          "mlflow_experiment_name", "mlflow_run_name", "hf_mlflow_log_artifacts", "use_comet",
          "comet_project_name", "use_tensorboard", "use_swanlab", "swanlab_project",
          "swanlab_experiment_name", "swanlab_description", "swanlab_mode", "swanlab_workspace",
          "swanlab_log_completions", "swanlab_completion_log_interval", "swanlab_log_model",
          "swanlab_completion_max_buffer", "trackio_project_name", "trackio_run_name",
          "trackio_space_id", "use_otel_metrics", "otel_metrics_host", "otel_metrics_port"),
    *idle(SHOWN, "logging_steps", "debug", "eval_table_size", "eval_max_new_tokens",
          "eval_causal_lm_metrics", "do_causal_lm_eval", "include_tokens_per_second",
          "include_tkps",
          "profiler_steps", "do_bench_eval"),
    *idle("--eval.max_new_tokens shows an answer at each validation", "generate_samples",
          "num_generation_samples", "generation_max_new_tokens", "generation_temperature"),
    *idle(FILES, "dataset_prepared_path", "save_only_model", "save_safetensors", "save_first_step",
          "dataset_processes", "dataset_num_proc", "dataset_keep_in_memory", "dataset_shard_num"),
    *idle(COST, "flash_attention", "xformers_attention", "sdp_attention", "flex_attention",
          "sage_attention", "eager_attention", "attn_implementation", "flash_attn_cross_entropy",
          "flash_attn_fuse_mlp", "flash_attn_rms_norm", "flash_attn_fuse_qkv", "flash_optimum",
          "flex_attn_compile_kwargs", "gemma4_hybrid_attn_impl", "fused_attn_kernel", "use_kernels",
          "use_scattermoe", "use_sonicmoe", "experts_implementation", "use_dsv4_kernels",
          "use_glm_dsa_kernels", "dsv4_fp4_grouped_mode", "lora_mlp_kernel", "lora_qkv_kernel",
          "lora_o_kernel", "lora_embedding_kernel", "liger_rope", "liger_rms_norm",
          "liger_layer_norm", "liger_glu_activation", "liger_cross_entropy", "liger_swiglu",
          "liger_fused_linear_cross_entropy", "liger_rms_norm_gated", "cut_cross_entropy",
          "chunked_cross_entropy", "tiled_mlp", "tiled_mlp_num_shards",
          "gradient_checkpointing_kwargs", "torch_compile_mode", "torch_compile_backend", "tf32",
          "pad_to_sequence_len", "eval_sample_packing", "eval_batch_size", "low_cpu_mem_usage",
          "lora_on_cpu", "sample_packing_eff_est", "sample_packing_seq_len_multiplier",
          "total_num_tokens", "max_packed_sequence_len", "sample_packing_group_size",
          "sample_packing_bin_size", "remove_unused_columns", "dataloader_num_workers",
          "dataloader_pin_memory", "dataloader_prefetch_factor", "gc_steps", "gpu_memory_limit",
          "experimental_skip_move_to_device", "torchdistx_path", "resize_token_embeddings_to_32x",
          "multipack_real_batches", "batch_flattening", "streaming_multipack_buffer_size",
          "auto_find_batch_size", "llama4_linearized_experts"),
    *idle(LAYOUT, "fsdp", "fsdp_config", "fsdp_version", "fsdp_final_state_dict_type", "deepspeed",
          "ddp", "ddp_timeout", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "local_rank",
          "world_size", "device_map", "device", "max_memory", "dp_shard_size", "dp_replicate_size",
          "tensor_parallel_size", "context_parallel_size", "context_parapllel_size",
          "sequence_parallel_degree", "heads_k_stride", "ring_attn_func", "expert_parallel_size",
          "expert_parallel_num_nvl_bytes", "expert_parallel_token_capacity", "accelerator_config",
          "use_ray", "ray_num_workers", "resources_per_worker", "qlora_sharded_model_loading"),
    *idle("checks of axolotl's own", "strict", "loss_watchdog_threshold", "loss_watchdog_patience",
          "test_value", "gptq_model_v1"),
    *idle("ftkit unpacks and repacks the weights of published formats", "gptq", "gptq_groupsize",
          "gptq_disable_exllama", "nvfp4_merge_aware"),
    part("model_quantization_config", "quantize", None, "a model published packed is unpacked"),
    *idle("see model_quantization_config", "model_quantization_config_kwargs"),
    *missing("images or audio in training", "processor_type", "freeze_mm_modules"),
    *idle("only with images", "skip_prepare_dataset", "image_size", "image_resize_algorithm"),
    part("pretraining_dataset", ("data.path", "data.sources"), None,
         "documents, with sample_packing"),
    part("pretrain_multipack_attn", "train.padding_free", True, "no attention between documents"),
    *idle("how data are read does not change them", "streaming"),
    *missing("further test data", "test_datasets"),
    part("min_sample_len", "data.min_tokens", None, "axolotl reads it only with datasets"),
    part("dataset_exact_deduplication", "data.drop_equal", False,
         "records are compared, in axolotl their tokens"),
    *missing("batches of samples of similar length", "group_by_length"),
    *missing("training in the order of the file", "curriculum_sampling",
             "sample_packing_sequentially"),
    *idle("ftkit shuffles all sources together", "shuffle_merged_datasets",
          "shuffle_before_merging_datasets"),
    part("tokens", "data.add_tokens", None, "new rows begin as the mean of the others"),
    part("mean_resizing_embeddings", "data.add_tokens", False, "see tokens"),
    *missing("new texts of reserved tokens", "added_tokens_overrides"),
    part("reinit_weights", "train.from_scratch", False, "in full fine-tuning"),
    *missing("a rate of its own for embeddings", "embedding_lr", "embedding_lr_scale", "lr_groups"),
    part("lr_quadratic_warmup", "train.lr_warmup_curve", False, "only with cosine, down to 0"),
    *missing("a constant end of the learning rate", "cosine_constant_lr_ratio"),
    *missing("learning-rate restarts", "jagged_restart_steps", "jagged_restart_warmup_steps",
             "jagged_restart_anneal_steps"),
    *missing("settings of the schedule", "lr_scheduler_kwargs", "lr_div_factor"),
    *idle("axolotl does not read it", "eta_min"),
    *missing("settings of the optimizer", "optim_args", "optim_target_modules"),
    part("qat", ("qat.weights", "qat.activations", "qat.group_size"), None,
         "int4 weights with int8 activations"),
    *missing("quantisation after training", "quantization"),
    part("fp8", "float8", False, "in full fine-tuning, with a scale for each token and row"),
    *idle("see fp8", "fp8_enable_fsdp_float8_all_gather"),
    *missing("1.58-bit training", "use_onebitllms"),
    *missing("LISA", "lisa_n_layers"), *idle("see lisa_n_layers", "lisa_step_interval",
                                             "lisa_layers_attribute"),
    *missing("ReLoRA", "relora", "relora_steps"), *idle("see relora", "relora_prune_ratio",
                                                        "relora_cpu_offload"),
    *missing("LoftQ", "peft"),
    *missing("rank or scale by layer", "lora_rank_pattern", "lora_alpha_pattern",
             "peft_layers_to_transform", "peft_layers_pattern", "peft_layer_replication"),
    *missing("sparse fine-tuning", "llmcompressor"),
    *missing("online RL", "ebft"), *idle("see rl", "trl", "vllm", "ebft_mode"),
    *missing("diffusion language models", "diffusion"),
    *missing("process reward models", "process_reward_model"),
    *missing("a trainer class of its own", "trainer_cls"),
    *missing("weights of sequences in DPO", "dpo_use_weighting"),
    *missing("several losses of DPO", "dpo_loss_type", "dpo_loss_weights"),
    *idle("EAFT takes the entropy of all tokens; axolotl that of the k likeliest", "eaft_k"),
    *missing("untrained tokens", "fix_untrained_tokens"),
    *missing("a default system message", "default_system_message"),
    part("eot_tokens", "data.train_on", None, "turns end as the chat template ends them"),
    *idle("settings of a cloud", "provider", "node_count", "branch", "dockerfile_commands",
          "memory",
          "timeout", "memory_preprocess", "timeout_preprocess", "project_name", "secrets", "gpu",
          "gpu_count", "volumes"),
    *idle("see adapter", "full_finetune"),
)  # fmt: skip


def _finish(r: Reading) -> None:
    if r.has("base_model"):
        r.set(checkpoint_dir=trainer.of_version(r, "revision_of_model", str(r["base_model"])))
    trainer.from_scratch(r, "reinit_weights", is_adapter=r["adapter"] not in OFF)
    _adapter(r)
    _precision(r)
    _rounding(r)
    _length_and_batch(r)
    _rates(r)
    _objective(r)
    _data(r)
    _intervals(r)
    for name in r["plugins"] or ():
        known = next((word for word in _KERNELS if f".{word}." in name), None)
        if known is None and ".swanlab." not in name and ".expert_parallel." not in name:
            r.refuse("plugins", f"the plugin {name}")
    tokens = {k for k, v in (r["special_tokens"] or {}).items() if v and k != "pad_token"}
    if tokens:
        names = ", ".join(sorted(tokens))
        r.tell(f"special_tokens: ftkit reads {names} from the model, not from the file")
    if r.has("tokenizer_config") and r["tokenizer_config"] != r["base_model"]:
        r.refuse("tokenizer_config", "a tokenizer of another model")
    changes = dict(r["model_config"] or {})
    asks = changes.pop("output_router_logits", None)
    if changes:
        r.refuse("model_config", "changes of config.json")
    if asks is not None:
        r.set(router_aux_loss_coef="model" if asks else 0.0)


def _adapter(r: Reading) -> None:
    adapter = r["adapter"]
    if adapter in OFF:
        if r["load_in_4bit"] or r["load_in_8bit"]:
            r.tell("load_in_4bit, load_in_8bit: without an adapter the model is trained whole")
        if only := r["unfrozen_parameters"]:
            if any(re.search(r"\[\d*:\d*\]$", pattern) for pattern in only):
                r.refuse("unfrozen_parameters", "a part of a parameter that is trained")
            r.set(train__only="|".join(f"^(?:{pattern})" for pattern in only))
        return
    if adapter not in ("lora", "qlora"):
        r.refuse("adapter", f"adapter {adapter}")
    if only := r["unfrozen_parameters"]:
        # axolotl 0.19 matches patterns from the beginning of the names in PEFT's model.
        reaches = any(re.match(r"\^?(base_model|\.[*+])", pattern) for pattern in only)
        lacking = "a part of it" if reaches else "nothing, since its names begin with base_model"
        r.refuse("unfrozen_parameters", f"an adapter of which axolotl trains {lacking}")
    if r["load_in_4bit"] or (adapter == "qlora" and not r["load_in_8bit"]):
        options = r["bnb_config_kwargs"] or {}
        kind = str(options.get("bnb_4bit_quant_type", "nf4"))
        is_double = options.get("bnb_4bit_use_double_quant", True)
        r.set(quantize=f"bnb.{kind}{'-dq' if is_double else ''}")
    elif r["load_in_8bit"]:
        r.set(quantize="bnb.int8")
    r.set(adapter=r["lora_model_dir"])
    r.set(lora_r=r["lora_r"] or 8, lora_alpha=r["lora_alpha"] or 8)
    r.set(lora_dropout=number(r["lora_dropout"]))
    targets = r["lora_target_modules"]
    if r["lora_target_linear"]:
        trainer.adapt(r, "all-linear")
    elif targets:
        trainer.adapt(r, targets)
    elif r["lora_target_parameters"]:
        r.set(lora_targets=[])
    else:  # axolotl hands PEFT an empty list, which it refuses
        r.refuse("adapter", "an adapter of no layer")
    if parameters := r["lora_target_parameters"]:
        if not all("experts." in name for name in parameters):
            r.refuse("lora_target_parameters", "LoRA for parameters that are no experts")
        r.set(lora_experts=True)
    r.set(lora_modules_to_save=r["lora_modules_to_save"] or None)
    variants = [name for name in ("dora", "rslora") if r[f"peft_use_{name}"]]
    r.set(lora_variant=variants[0] if variants else "lora")
    start = r["peft_init_lora_weights"]
    if start in ("pissa", "olora"):
        r.set(lora_init=start)
    elif start not in (True, "default"):
        r.refuse("peft_init_lora_weights", f"initialisation {start}")
    if r.has("loraplus_lr_ratio"):
        r.set(lora_plus_ratio=number(r["loraplus_lr_ratio"]))


def _precision(r: Reading) -> None:
    if r["fp16"] or r["float16"]:
        r.set(precision="16-mixed")
    elif r["bf16"] in ("auto", True, "true", "full") or r["bfloat16"]:
        # Adapters are float32 below bfloat16 autocast; without one every weight has 16 bits.
        r.set(precision="bf16-true" if r["adapter"] in OFF else "bf16-mixed")
    elif r["fp8"]:  # accelerate computes the rest under bfloat16 autocast
        r.set(precision="bf16-mixed")
    else:
        r.set(precision="32-true")
    value = r["gradient_checkpointing"]
    trainer.checkpointing(r, value)
    if value not in OFF and (str(value).startswith("offload") or r["activation_offloading"]):
        r.set(memory__offload_activations=True)


def _rounding(r: Reading) -> None:
    is_adapter = r["adapter"] not in OFF
    trainer.float8(r, is_adapter=is_adapter, scales="a whole tensor")
    if not (qat := r["qat"]):
        return
    weights, activations = qat.get("weight_dtype", "int8"), qat.get("activation_dtype")
    lacking = None
    if (weights, activations) != ("int4", "int8"):
        lacking = f"for {weights} weights" + f" and {activations} activations" * bool(activations)
    elif qat.get("fake_quant_after_n_steps"):
        lacking = "from a later step on"
    elif qat.get("quantize_embedding"):
        lacking = "of the embedding"
    elif is_adapter:
        lacking = "of adapters"
    if lacking is not None:
        r.refuse("qat", f"quantisation-aware training {lacking}")
        return
    r.set(qat__weights="int4", qat__activations="int8", qat__group_size=qat.get("group_size") or 32)
    r.tell(
        "qat: axolotl trains with zero points of weights, and its quantize command has none; ftkit "
        "trains with what ftkit export --format torchao writes, without them"
    )


def _length_and_batch(r: Reading) -> None:
    steps, epochs = number(r["max_steps"]), number(r["num_epochs"])
    r.set(train__max_steps=int(steps) if steps else None)
    if epochs != int(epochs) and not steps:
        r.refuse("num_epochs", "a part of an epoch")
    # Without num_epochs, max_steps alone ends the run.
    r.recipe["train.epochs"] = None if steps else max(1, int(epochs))
    if epochs > 1 and not steps:
        r.tell(
            "num_epochs: where samples are no multiple of a step's, axolotl ends the last epoch "
            "early, after samples x epochs / batch steps; ftkit trains all epochs to their end"
        )
    micro = int(r["micro_batch_size"])
    accumulation = int(r["gradient_accumulation_steps"])
    if r.has("batch_size"):
        accumulation = max(1, int(r["batch_size"]) // micro)
    trainer.batch(r, micro, accumulation)
    if r["sample_packing"]:
        trainer.packing(r, micro, accumulation, int(r["sequence_len"]))
        r.tell(
            "sample_packing: axolotl fills rows of sequence_len tokens with the samples that fit "
            "best, and leaves a rest of each row empty; ftkit takes samples in order up to the "
            "same number of tokens"
        )


def _rates(r: Reading) -> None:
    name = str(r["optimizer"])
    if name.startswith("optimi_adamw"):
        name = "adamw_torch"
    trainer.optimizer(r, name, key="optimizer")
    if r.has("adam_eps"):
        r.recipe["optimizer"]["init_args"]["eps"] = number(r["adam_eps"])
    kind = str(r["lr_scheduler"])
    trainer.schedule(r, kind, name="lr_scheduler")
    if (ratio := r["cosine_min_lr_ratio"]) and kind == "cosine":
        r.set(train__min_lr=number(ratio) * number(r["learning_rate"]))
    if r["lr_quadratic_warmup"] and kind == "cosine":
        r.set(train__lr_warmup_curve="quadratic", train__min_lr=0.0)
    if kind == "constant":
        r.set(train__lr_warmup_steps=0)
        return
    given, total = r.values.get("warmup_steps"), r.recipe.get("train.max_steps")
    share = number(r["warmup_ratio"]) if given is None else number(given)
    if given is not None and (share >= 1 or share == 0):
        r.set(train__lr_warmup_steps=2 if share == 1 else int(share))
    elif total and given is None:
        steps = int(share * total) if r.has("warmup_ratio") else min(int(share * total), 100)
        r.set(train__lr_warmup_steps=2 if steps == 1 else steps)
    elif total:
        r.set(train__lr_warmup_steps=math.ceil(share * total))
    else:
        r.set(train__lr_warmup_run_fraction=share)


def _objective(r: Reading) -> None:
    kind = r["rl"]
    options: dict[str, Any] = {}
    beta = number(r["rl_beta"])
    if r["reward_model"]:
        kind, options = "reward", {"center_weight": number(r["center_rewards_coefficient"])}
    elif kind in OFF:
        if r["use_eaft"]:
            options = {"alpha": number(r["eaft_alpha"])}
            r.recipe["objective"] = {"class_path": "eaft", "init_args": options}
        return
    elif kind not in _RL:
        r.refuse("rl", "online RL")
        return
    elif kind in ("dpo", "ipo"):
        noise = number(r["dpo_label_smoothing"])
        loss = "ipo" if kind == "ipo" else "conservative" if noise else "sigmoid"
        options = {"loss": loss, "beta": beta or 0.1, "label_noise": noise}
    elif kind == "orpo":
        options = {"weight": number(r["orpo_alpha"])}
    elif kind == "simpo":
        options = {"beta": beta, "margin": number(r["simpo_gamma"])}
    else:
        options = {
            "beta": beta or 0.1,
            "desirable_weight": number(r["kto_desirable_weight"]),
            "undesirable_weight": number(r["kto_undesirable_weight"]),
        }
        if r["adapter"] in OFF:
            r.set(reference=r.recipe["checkpoint_dir"])
    given = {name: value for name, value in options.items() if value is not None}
    r.recipe["objective"] = {"class_path": _RL.get(kind, kind), "init_args": given}


def _data(r: Reading) -> None:
    entries = r["datasets"] or _documents(r)
    sources = [_source(r, entry) for entry in entries if isinstance(entry, dict)]
    if not sources:
        r.refuse("datasets", "no datasets")
        return
    if any("prompt_style" in source for source in sources):
        r.tell(
            "datasets.type: axolotl tokenises prompt and answer apart, ftkit together, which "
            "differs for tokenizers that begin a text with a space"
        )
    options: dict[str, Any] = {}
    if len(sources) == 1:
        options |= sources[0]
    else:
        options["sources"] = sources
    size = number(r["val_set_size"]) or 0
    if size > 1:
        r.refuse("val_set_size", "a number of validation records")
        size = 0.05
    options["val_split_fraction"] = size
    strategy = r["excess_length_strategy"]
    if all(source.get("columns", {}).get("text") is None for source in sources):
        options["overlong"] = "truncate" if strategy == "truncate" else "drop"
    if r["dataset_exact_deduplication"]:
        options["drop_equal"] = True
    is_paired = r["rl"] not in OFF or r["reward_model"]
    if r["min_sample_len"] and r["datasets"] and not is_paired:
        options["min_tokens"] = int(r["min_sample_len"])
    if r["tokens"]:
        options["add_tokens"] = list(r["tokens"])
        if not r["mean_resizing_embeddings"]:
            r.tell(
                "tokens: new rows begin as the mean of the others, in axolotl with random numbers"
            )
    if r.has("chat_template_kwargs"):
        options["chat_template_kwargs"] = r.recipe.pop("data.chat_template_kwargs")
    r.recipe["data"] = {"class_path": "JSON", "init_args": options}


def _documents(r: Reading) -> list[dict[str, Any]]:
    """pretraining_dataset as entries of datasets."""
    given = r["pretraining_dataset"]
    if not given:
        return []
    if not r["sample_packing"] or not r["pretrain_multipack_attn"]:
        r.refuse("pretraining_dataset", "attention from one document to another")
    r.tell(
        "pretraining_dataset: pieces of a document that is longer than sequence_len overlap by "
        "256 tokens in axolotl, and not in ftkit"
    )
    entries = [{"path": given}] if isinstance(given, str) else given
    return [
        {"type": "pretrain"}
        | {("field" if key == "text_column" else key): value for key, value in entry.items()}
        for entry in entries
    ]


def _source(r: Reading, entry: dict[str, Any]) -> dict[str, Any]:
    """One entry of datasets as options of a source."""
    for key in entry.keys() - _ENTRY:
        if entry[key] not in OFF:
            words = {
                "shards": "a part of a data set by number",
                "shards_idx": "a part of a data set by number",
                "input_transform": "data changed by code",
            }
            r.refuse(f"datasets.{key}", words.get(key, f"the setting {key} of a data set"))
    source: dict[str, Any] = {"path": trainer.local_data(entry.get("path"))}
    files = entry.get("data_files")
    if files:
        if entry.get("ds_type") or entry.get("path") in ("json", "csv", "parquet", "text"):
            source["path"] = files[0] if isinstance(files, list) else files
        elif isinstance(files, str) or len(files) == 1:
            source["data_files"] = files if isinstance(files, str) else files[0]
        else:
            r.refuse("datasets.data_files", "several files of a hub data set")
    if entry.get("split") and entry["split"] != "train":
        source["split"] = entry["split"]
    if entry.get("name"):
        source["subset"] = entry["name"]
    if entry.get("revision"):
        source["revision"] = entry["revision"]
    columns = _columns(entry)
    kind = entry.get("type")
    if isinstance(kind, dict):
        source |= _own_format(r, kind, columns)
    elif r["rl"] not in OFF or r["reward_model"]:
        source |= _of_pairs(r, str(kind), entry, columns)
    elif kind in (None, "chat_template"):
        source["chat_template"] = _template(r, entry)
        source["train_on"] = _trained(r, entry)
        if entry.get("drop_system_message"):
            source["drop_system"] = True
    elif kind == "alpaca":
        source |= {"prompt_style": "alpaca", "mask_prompt": not r["train_on_inputs"]}
    elif kind in _ALPACA:
        source |= {"prompt_style": _ALPACA[kind], "mask_prompt": not r["train_on_inputs"]}
    elif kind in ("completion", "pretrain"):
        columns["text"] = entry.get("field") or "text"
        if kind == "completion":
            r.tell(
                "datasets.type: a document that is longer than sequence_len becomes pieces whose "
                "first token axolotl does not train; ftkit trains it, after the one before"
            )
    else:
        r.refuse("datasets.type", f"the prompt format {str(kind).partition('.')[0]}")
    if columns:
        source["columns"] = columns
    return source


def _columns(entry: dict[str, Any]) -> dict[str, str]:
    mapped = entry.get("message_property_mappings") or {}
    named = {
        "messages": entry.get("field_messages"),
        "tools": entry.get("field_tools"),
        "system": entry.get("field_system"),
        "role": mapped.get("role") or entry.get("message_field_role"),
        "content": mapped.get("content") or entry.get("message_field_content"),
    }
    usual = {"messages": ("messages", "conversations"), "role": ("role", "from"),
             "content": ("content", "value")}  # fmt: skip
    return {
        name: column
        for name, column in named.items()
        if column and column != name and column not in usual.get(name, ())
    }


def _template(r: Reading, entry: dict[str, Any]) -> str:
    jinja = entry.get("chat_template_jinja") or r["chat_template_jinja"]
    if jinja:
        return str(jinja)
    name = str(entry.get("chat_template") or r["chat_template"])
    if name not in _TEMPLATES:
        r.tell(f"chat_template: the model's own template in the place of axolotl's {name}")
    return _TEMPLATES.get(name, "tokenizer")


def _trained(r: Reading, entry: dict[str, Any]) -> str:
    roles = entry.get("roles_to_train", ["assistant"])
    if roles not in (["assistant"], ["gpt"], ["assistant", "gpt"]):
        r.refuse("datasets.roles_to_train", "trained turns other than the assistant's")
    for key in ("train_on_eos", "train_on_eot"):
        # all: the ends of all turns; last, none: not all ends of the trained ones.
        if entry.get(key) not in (None, "turn"):
            r.refuse(f"datasets.{key}", "ends of turns that are trained apart from the turns")
    if entry.get("message_field_training"):
        r.refuse("datasets.message_field_training", "messages that say whether they are trained")
    if not r["eot_tokens"]:
        r.tell(
            "eot_tokens: where turns do not end with the tokenizer's EOS, axolotl trains no end of "
            "a turn without it; ftkit trains the end that the chat template writes"
        )
    if r["train_on_inputs"]:
        r.refuse("train_on_inputs", "trained turns of all roles without the headers between them")
    return "all" if r["train_on_inputs"] else "assistant"


def _own_format(r: Reading, kind: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    """A prompt that the file writes out."""
    for name, ours in (("instruction", "instruction"), ("input", "input"), ("output", "output"),
                       ("system", "sys_prompt")):  # fmt: skip
        if column := kind.get(f"field_{name}"):
            columns[ours] = column
    text = str(kind.get("format") or "{instruction}")
    without = kind.get("no_input_format")
    system = kind.get("system_prompt") or ""
    style: str | dict[str, str] = f"{system}{text}"
    if without is not None and str(without) != text:
        style = f"{system}{without}"
        if "{input}" in text and kind.get("field_input"):
            style = {"with_input": f"{system}{text}", "without_input": style}
    return {"prompt_style": style, "mask_prompt": not r["train_on_inputs"]}


def _of_pairs(
    r: Reading, kind: str, entry: dict[str, Any], columns: dict[str, str]
) -> dict[str, Any]:
    """Preference data: conversations as the template renders them."""
    head, _, form = kind.partition(".")
    if head == "bradley_terry":
        head, form = form, "default"
    # Pairs of conversations, whose question axolotl takes from the chosen one.
    is_pairs = r["rl"] == "orpo" and kind == "chat_template.argilla"
    is_labelled = r["rl"] == "kto" and head in _TEMPLATES and form == "ultra"
    is_usual = head in ("chat_template", "chatml", "llama3") and form in ("default", "")
    if not (is_usual or is_pairs or is_labelled):
        r.refuse("datasets.type", f"the preference format {kind}")
    if is_labelled:  # texts, which the template turns into a conversation
        columns |= {"instruction": "prompt", "output": "completion"}
    for name in ("chosen", "rejected"):
        if entry.get(f"field_{name}", name) != name:
            r.refuse(f"datasets.field_{name}", "names of the columns of pairs")
    if r["rl"] in ("dpo", "ipo"):
        r.tell(
            "datasets: axolotl puts the tokenizer's BOS in front of each pair, whether or not the "
            "chat template writes one; ftkit begins as the template does"
        )
    return {"chat_template": _template(r, entry if head == "chat_template" else entry | {
        "chat_template": head})}  # fmt: skip


def _intervals(r: Reading) -> None:
    total, epochs = r.recipe.get("train.max_steps"), number(r["num_epochs"])
    for name, ours in (("save", "train.save_interval"), ("eval", "eval.interval")):
        times, steps = number(r[f"{name}s_per_epoch"]), number(r[f"{name}_steps"])
        strategy = r[f"{name}_strategy"] or (r["evaluation_strategy"] if name == "eval" else None)
        share = None
        if times:
            share = 1 / times
        elif steps and steps < 1:
            share = steps * epochs
        if strategy in ("no", False) or (name == "eval" and times == 0):
            r.recipe[ours] = None if name == "save" else 0
        elif share is not None and total:
            r.recipe[ours] = max(1, math.ceil(share / epochs * total))
        elif share is not None:
            r.recipe[f"{ours}_epochs"] = share
        elif steps:
            r.recipe[ours] = int(steps)
        else:
            r.recipe[f"{ours}_epochs"] = 1.0
    r.empty("checkpoint.save_every")
    is_best = r["load_best_model_at_end"] or r["save_strategy"] == "best"
    r.set(checkpoint__result="best" if is_best else None)


AXOLOTL = Program(
    name="axolotl",
    short="axolotl",
    marks=(
        frozenset({"base_model", "datasets"}),
        frozenset({"base_model", "pretraining_dataset"}),
        frozenset({"base_model", "micro_batch_size"}),
    ),
    rows=ROWS,
    finish=_finish,
)
"""axolotl."""
