"""axolotl's configuration files. Defaults are those of axolotl 0.19."""

import math
import re
from typing import Any

from ftkit.extensions.foreign_recipes import trainer
from ftkit.extensions.foreign_recipes.trainer import (
    BY_LENGTH,
    COST,
    FILES,
    LAYOUT,
    ON_HUB,
    ON_RESUME,
    REMOTE_CODE,
    SERVICE,
    SHOWN,
)
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
from ftkit.extensions.foreign_recipes.value_types import Accepts

_OF_LANGUAGE = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_SEEING: dict[str, frozenset[str]] = {
    "qwen2_vl": _OF_LANGUAGE,
    "qwen3_5": _OF_LANGUAGE | {"gate_proj", "up_proj", "down_proj"},
    "gemma3": frozenset(),
    "gemma4": frozenset(),
}
"""Templates of models that see of which axolotl 0.19 trains the assistant's turns alone
(processing_strategies.py), with names of layers that their language models have and towers lack."""
_TEMPLATES = {"chatml": "chatml", "llama3": "llama3", "tokenizer_default": "tokenizer"}
"""Chat templates of axolotl that ftkit has by a name."""
# The texts are axolotl's own format: src/axolotl/prompters.py, and alpaca_chat.py in
# src/axolotl/prompt_strategies of axolotl 0.19.
_TASK = "Below is an instruction that describes a task"
_FROM_USER = "Below is an instruction from a USER that describes a task"
_WITH_INPUT = ", paired with an input that provides further context."
_COMPLETES = "completes the request."
_RESPOND = f" Write a response that appropriately {_COMPLETES}"
_WRITES = "The ASSISTANT writes a response that"
_SYSTEMS = {
    "usual": (f"{_TASK}{_WITH_INPUT}{_RESPOND}", f"{_TASK}.{_RESPOND}"),
    "concise": (
        f"{_FROM_USER}{_WITH_INPUT} {_WRITES} concisely and appropriately {_COMPLETES}\n\n",
        f"{_FROM_USER}. {_WRITES} appropriately and concisely {_COMPLETES}\n\n",
    ),
    "none": ("", ""),
}
"""System prompts with an input and without."""
_FORMS = {
    "instruct": ("{}\n\n",
                 "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
                 "### Instruction:\n{instruction}\n\n### Response:\n"),
    "chat": ("SYSTEM: {}\n", "USER: {instruction}\n{input}\nASSISTANT:",
             "USER: {instruction}\nASSISTANT:"),
    "chatml": ("<|im_start|>system\n{}<|im_end|>\n",
               "<|im_start|>user\n{instruction}\n{input}<|im_end|>\n<|im_start|>assistant\n",
               "<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n"),
    "phi": ("<|system|>\n{}<|end|>\n", "<|user|>\n{instruction}<|end|>{input}<|assistant|>",
            "<|user|>\n{instruction}<|end|>\n<|assistant|>\n"),
}  # fmt: skip
"""What surrounds a system prompt, and the prompt with an input and without."""
_INSTRUCTIONS: dict[str, tuple[str, str, dict[str, str]]] = {
    "alpaca": ("instruct", "usual", {}),
    "gpteacher": ("instruct", "usual", {"output": "response"}),
    "oasst": ("instruct", "usual", {"instruction": "INSTRUCTION", "output": "RESPONSE"}),
    "alpaca_instruct": ("instruct", "usual", {}),
    "alpaca_instruct.load_no_prompt": ("instruct", "none", {}),
    "alpaca_chat": ("chat", "usual", {}),
    "alpaca_chat.load_no_prompt": ("chat", "none", {}),
    "alpaca_chat.load_concise": ("chat", "concise", {}),
    "alpaca_chat.load_qa": ("chat", "concise", {"instruction": "question", "output": "answer"}),
    "alpaca_chat.load_camel_ai": ("chat", "concise",
                                  {"instruction": "message_1", "output": "message_2"}),
}  # fmt: skip
"""Types of instructions: form, system prompt, and names of columns that are not ours."""
_PAIR_PROMPTS = {"prompt_pairs": "prompt", "icr": "input", "intel": "question"}
"""Types of pairs of texts, and the column of their question."""
_LABELLED_PROMPTS = {"prompt_pairs": "prompt", "ultra": "prompt", "intel": "question",
                     "argilla": "instruction"}  # fmt: skip
"""Types of labelled answers that are texts, and the column of their question."""
_WARMUP_STEPS = 100
"""Of a warm-up that no key names, at most."""
_RL = {"dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "kto": "kto", "simpo": "simpo"}
_KERNELS = ("liger", "cut_cross_entropy", "kernels")
_BESIDE = ("swanlab", "expert_parallel", "lm_eval")
"""Plugins of axolotl that log, share the work, or evaluate the result."""
_FORMAT: Accepts = dict.fromkeys(
    ("field_instruction", "field_input", "field_output", "field_system", "format",
     "no_input_format", "system_prompt"), "text")  # fmt: skip
"""Keys of a prompt that the file writes out."""
_ENTRY: dict[str, Accepts] = {
    **dict.fromkeys(
        ("path", "split", "name", "revision", "ds_type", "chat_template", "field",
         "field_messages", "field_system", "field_tools", "message_field_role",
         "message_field_content", "field_chosen", "field_rejected", "chat_template_jinja"),
        "text"),
    **dict.fromkeys(
        ("field_thinking", "roles", "field_instruction", "field_input", "field_output",
         "template_thinking_key", "field_human", "train_on_eos", "train_on_eot",
         "trust_remote_code", "preprocess_shards", "field_model", "message_field_training",
         "max_completion_length"),
        "any"),
    "type": ("text", _FORMAT),
    "data_files": "text|texts",
    "message_property_mappings": {"*": "text"},
    "roles_to_train": "texts",
    "drop_system_message": "flag",
}  # fmt: skip
"""Keys of an entry of datasets that are read."""
_DOCUMENT = _ENTRY | {"text_column": "text"}
"""Keys of an entry of pretraining_dataset that are read."""
_BNB: Accepts = {"bnb_4bit_quant_type": "fp4|nf4", "bnb_4bit_use_double_quant": "flag"}
_MODEL_CONFIG: Accepts = {"output_router_logits": "flag"}
_QAT: Accepts = {"weight_dtype": "text", "activation_dtype": "text", "group_size": "whole>=1",
                 "fake_quant_after_n_steps": "whole>=0", "quantize_embedding": "flag"}  # fmt: skip

ROWS = rows_by_key(
    same("base_model", "text", "checkpoint_dir", None),
    part("datasets", [_ENTRY], ("data.path", "data.sources", "data.columns", "data.chat_template",
                      "data.train_on", "data.prompt_style", "data.data_files",
                      "data.drop_system"), None,
         "each entry is a source"),
    part("val_set_size", "number>=0", ("data.val_split_fraction", "eval.final_validation"), 0.0,
         "0: all records are trained on; axolotl rounds the number of records up, ftkit down"),
    part("chat_template", "text", "data.chat_template", "tokenizer_default",
         "chatml and llama3 by name, any other as the model's own template"),
    part("chat_template_jinja", "text", "data.chat_template", None, ""),
    same("chat_template_kwargs", {"*": "any"}, "data.chat_template_kwargs", None),
    part("train_on_inputs", "flag", ("data.train_on", "data.mask_prompt"), False, ""),
    same("sequence_len", "whole>=1", "train.max_seq_length", 512),
    part("excess_length_strategy", "text", "data.overlong", "drop", "raise becomes drop"),
    part("sample_packing", "flag", ("train.global_batch_tokens", "train.micro_batch_tokens"), False,
         "a step takes samples up to the tokens of its packed rows"),
    part("micro_batch_size", "whole>=1", ("train.global_batch_size", "train.micro_batch_size"), 1,
         "times gradient_accumulation_steps and devices"),
    part("gradient_accumulation_steps", "whole>=1", "train.global_batch_size", 1,
         "see micro_batch_size"),
    part("batch_size", "whole>=1", "train.global_batch_size", None, "in the place of accumulation"),
    part("num_epochs", "number>0", "train.epochs", 1.0, "whole numbers"),
    part("max_steps", "whole", "train.max_steps", None, "in the place of epochs"),
    part("learning_rate", "number>=0", "optimizer.lr", None, ""),
    part("optimizer", "text", "optimizer", "adamw_torch_fused", "by name"),
    part("weight_decay", "number>=0", ("optimizer.weight_decay", "train.decay_norms_and_biases"),
         0.0,
         "norms and biases do not decay"),
    part("adam_beta1", "number>=0<1", "optimizer.betas", 0.9, ""),
    part("adam_beta2", "number>=0<1", "optimizer.betas", 0.999, ""),
    part("adam_epsilon", "number>=0", "optimizer.eps", 1e-8, ""),
    part("adam_eps", "number>=0", "optimizer.eps", None, "older name of adam_epsilon"),
    part("lr_scheduler", "text", ("train.lr_schedule", "train.lr_ends", "train.min_lr"), "cosine",
         ""),
    part("cosine_min_lr_ratio", "number>=0", "train.min_lr", None, "times the learning rate"),
    part("warmup_steps", "number>=0", ("train.lr_warmup_steps", "train.lr_warmup_run_fraction"),
         None,
         "below 1 a share of the run"),
    part("warmup_ratio", "number>=0<=1", ("train.lr_warmup_steps", "train.lr_warmup_run_fraction"),
         0.03,
         "a share of all steps of the run, rounded up; axolotl rounds it down, and warms up for 2 "
         "steps where that is 1"),
    same("max_grad_norm", "number>=0", "train.max_norm", 1.0, value=lambda x: x or None),
    same("seed", "whole>=0", "seed", 42),
    same("neftune_noise_alpha", "number>=0", "train.neftune_noise_alpha", None),
    same("noisy_embedding_alpha", "number>=0", "train.neftune_noise_alpha", None,
         "older name of neftune_noise_alpha"),
    same("output_dir", "text", "out_dir", "./model-out"),
    part("adapter", "text|no", "quantize", None, "lora, qlora, or none: full fine-tuning"),
    part("load_in_4bit", "flag", "quantize", False, "bnb.nf4-dq"),
    part("load_in_8bit", "flag", "quantize", False, "bnb.int8"),
    part("quantize_moe_experts", "flag", "quantize", False,
         "ftkit quantises experts like other layers"),
    part("bnb_config_kwargs", _BNB, "quantize", None, ""),
    part("lora_r", "whole>=1", "lora_r", None, ""),
    part("lora_alpha", "number>0", "lora_alpha", None, ""),
    part("lora_dropout", "number>=0<1", "lora_dropout", 0.0, ""),
    part("lora_target_modules", "text|texts", ("lora_targets", "lora_skip_missing"), None,
         "names that the model lacks are left out, with a warning"),
    part("lora_target_linear", "flag", "lora_targets", False, "all-linear"),
    part("lora_target_parameters", "names", "lora_experts", None,
         "experts in one parameter; without other layers they alone are adapted"),
    part("lora_modules_to_save", "texts", "lora_modules_to_save", None, ""),
    part("lora_model_dir", "text", "adapter", None, ""),
    part("peft_use_dora", "flag", "lora_variant", False, "dora"),
    part("peft_use_rslora", "flag", "lora_variant", False, "rslora"),
    part("peft_init_lora_weights", "flag|text", "lora_init", True, "pissa and olora"),
    part("loraplus_lr_ratio", "number>0", "lora_plus_ratio", None, ""),
    part("unfrozen_parameters", "texts", "train.only", None, ""),
    part("bf16", "flag|auto|full", "precision", None, "bf16-true, for adapters bf16-mixed"),
    part("fp16", "flag", "precision", None, "16-mixed"),
    part("bfloat16", "flag", "precision", None, "bf16-true"),
    part("float16", "flag", "precision", None, ""),
    part("gradient_checkpointing", "flag|text", ("memory.activation_checkpointing",
                                    "memory.offload_activations"), False, ""),
    part("activation_offloading", "flag|text", "memory.offload_activations", False, ""),
    same("torch_compile", "flag|auto", "compile", False, value=lambda x: x is True),
    part("evals_per_epoch", "whole>=0", "eval.interval_epochs", None,
         "1 / this, in steps rounded up"),
    part("saves_per_epoch", "whole>=0", "train.save_interval_epochs", None,
         "1 / this, in steps rounded up"),
    part("eval_steps", "number>=0", "eval.interval", None, ""),
    part("save_steps", "number>=0", "train.save_interval", None, ""),
    part("eval_strategy", "text|no", "eval.interval", None, ""),
    part("evaluation_strategy", "text|no", "eval.interval", None, "older name of eval_strategy"),
    part("save_strategy", "text|no", "train.save_interval", None, ""),
    same("save_total_limit", "whole", "checkpoint.keep_last", 4, value=lambda x: max(1, x)),
    same("early_stopping_patience", "whole>=1", "eval.patience", None),
    part("load_best_model_at_end", "flag", "checkpoint.result", False, ""),
    part("rl", "text|no", "objective", None, "dpo, ipo, orpo, kto, simpo"),
    part("rl_beta", "number>0", ("objective.beta", "objective.weight"), 0.1, ""),
    part("trl", {"beta": "number>0"}, "objective.beta", None, "its beta, in the place of rl_beta"),
    part("orpo_alpha", "number>0", ("objective.weight", "objective.beta"), None, "without rl_beta"),
    part("simpo_gamma", "number>=0", "objective.margin", 0.5, "divided by beta"),
    part("cpo_alpha", "number>=0", "objective", 1.0, "only 0, without a further loss in simpo"),
    part("dpo_label_smoothing", "number>=0<1", "objective.label_noise", None, "loss: conservative"),
    part("kto_desirable_weight", "number>=0", "objective.desirable_weight", 1.0, ""),
    part("kto_undesirable_weight", "number>=0", "objective.undesirable_weight", 1.0, ""),
    part("reward_model", "flag", "objective", False, "reward"),
    part("center_rewards_coefficient", "number>=0", "objective.center_weight", None, ""),
    part("use_eaft", "flag", "objective", False, "eaft"),
    part("liger_use_token_scaling", "flag", "objective", False, "dft"),
    part("eaft_alpha", "number>=0", "objective.alpha", 1.0, ""),
    part("model_config", _MODEL_CONFIG, "router_aux_loss_coef", None,
         "output_router_logits: the weight that config.json has"),
    part("overrides_of_model_config", _MODEL_CONFIG, "router_aux_loss_coef", None,
         "another name of model_config"),
    part("plugins", "texts", "kernels", None, "kernels have no effect on what is learned"),
    part("special_tokens", {"*": "any"}, "checkpoint_dir", None,
         "those of the model; padding is never computed"),
    *idle("the model's config.json says it", "model_type", "type_of_model", "tokenizer_type",
          "is_llama_derived_model",
          "is_falcon_derived_model", "is_mistral_derived_model", "is_qwen_derived_model",
          "base_model_config", "tokenizer_use_fast", "tokenizer_legacy", "cls_model_config",
          "tokenizer_use_mistral_common", "base_model_ignore_patterns", "is_preprocess",
          "torch_dtype", "lora_fan_in_fan_out"),
    *idle("a reward model has one label; see --objective classify for others", "num_labels"),
    part("tokenizer_config", "text", "checkpoint_dir", None, "the tokenizer of the model"),
    part("revision_of_model", "text", "checkpoint_dir", None, "behind the name and @"),
    part("model_revision", "text", "checkpoint_dir", None, "another name of revision_of_model"),
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
          "trackio_space_id", "use_otel_metrics", "otel_metrics_host", "otel_metrics_port",
          "use_trackio", "comet_api_key", "comet_experiment_config", "comet_experiment_key",
          "comet_mode", "comet_online", "comet_workspace", "swanlab_api_host", "swanlab_api_key",
          "swanlab_lark_secret", "swanlab_lark_webhook_url", "swanlab_web_host"),
    *idle(SHOWN, "logging_steps", "debug", "eval_table_size", "eval_max_new_tokens",
          "eval_causal_lm_metrics", "do_causal_lm_eval", "include_tokens_per_second",
          "include_tkps", "profiler_steps", "profiler_steps_start", "do_bench_eval",
          "bench_dataset", "bench_split", "lm_eval_batch_size", "lm_eval_model",
          "lm_eval_post_train", "lm_eval_tasks"),
    *idle("the result is the one with the lowest validation loss", "metric_for_best_model",
          "greater_is_better"),
    *idle("validation takes samples up to train.max_seq_length", "eval_sequence_len"),
    *idle("--eval.max_new_tokens shows an answer at each validation", "generate_samples",
          "num_generation_samples", "generation_max_new_tokens", "generation_temperature",
          "generation_do_sample", "generation_prompt_ratio", "generation_top_k",
          "generation_top_p"),
    *idle("answers, not training", "gradio_title", "gradio_share", "gradio_server_name",
          "gradio_server_port", "gradio_max_new_tokens", "gradio_temperature"),
    *idle(FILES, "dataset_prepared_path", "save_only_model", "save_safetensors", "save_first_step",
          "dataset_processes", "dataset_num_proc", "dataset_keep_in_memory",
          "num_dataset_shards_to_save", "axolotl_config_path", "dynamic_checkpoint", "merge_lora",
          "merge_method", "tokenizer_save_jinja_files"),
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
          "auto_find_batch_size", "llama4_linearized_experts", "chunked_cross_entropy_num_chunks",
          "deepcompile", "dpo_padding_free", "dpo_use_liger_kernel", "flash_attn_d512",
          "gc_collect_steps", "large_head_attention", "layer_offloading", "pad_to_multiple_of",
          "ple_cpu_offload", "precompute_ref_log_probs", "preprocess_iterable",
          "pretrain_multipack_buffer_size", "sample_packing_mp_start_method", "sdpa_varlen",
          "selective_checkpointing", "tiled_mlp_use_original_mlp", "torch_compile_options",
          "torch_empty_cache_steps", "total_supervised_tokens", "liger_kernel_impl",
          "expert_backend", "moe_bnb_fast", "moe_dequant_chunk_size", "moe_grouped_backend",
          "dsv4_bf16_all", "dsv4_fp8_lora_kernel", "dsv4_shared_mlp_lora_kernel"),
    *idle("affects rounding alone", "embeddings_skip_upcast", "fp32_norms", "fp32_norm_classes",
          "float32"),
    *idle(LAYOUT, "fsdp", "fsdp_config", "fsdp_version", "fsdp_final_state_dict_type", "deepspeed",
          "ddp", "ddp_timeout", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "local_rank",
          "world_size", "device_map", "device", "max_memory", "dp_shard_size", "dp_replicate_size",
          "tensor_parallel_size", "context_parallel_size", "context_parapllel_size",
          "sequence_parallel_degree", "heads_k_stride", "ring_attn_func", "expert_parallel_size",
          "expert_parallel_num_nvl_bytes", "expert_parallel_token_capacity", "accelerator_config",
          "use_ray", "ray_num_workers", "ray_run_name", "resources_per_worker",
          "qlora_sharded_model_loading", "ddp_broadcast_buffers", "expert_parallel_backend",
          "expert_parallel_fallback_on_unsupported", "expert_parallel_num_rdma_bytes"),
    *idle("checks of axolotl's own", "strict", "loss_watchdog_threshold", "loss_watchdog_patience",
          "test_value", "gptq_model_v1", "capabilities", "env_capabilities"),
    *idle("ftkit unpacks and repacks the weights of published formats", "gptq", "gptq_groupsize",
          "gptq_disable_exllama", "nvfp4_merge_aware", "nvfp4_merge_aware_start_step"),
    *missing("quantisation of layers that are no experts", "nonexpert_quantization",
             "dsv4_fp8_nonexpert_mode", "gemma4_fp8_nonexpert", "gemma4_nf4_nonexpert",
             harmless=("none", "bf16")),
    part("model_quantization_config", "text", "quantize", None,
         "a model published packed is unpacked"),
    *idle("see model_quantization_config", "model_quantization_config_kwargs"),
    part("processor_type", "text", ("images.projector", "images.tower"), None,
         "images, with chat_template qwen2_vl, qwen3_5, gemma3 or gemma4"),
    part("freeze_mm_modules", "flag", ("images.projector", "images.tower"), False,
         "with images and without an adapter"),
    *missing("images of another size than the model's processor gives them", "image_size"),
    *idle("see image_size", "image_resize_algorithm"),
    *missing("other settings of the processor of images", "processor_kwargs"),
    *idle("only with images", "skip_prepare_dataset"),
    *missing("trained turns by marks in the text", "role_boundaries"),
    part("pretraining_dataset", ("text", [_DOCUMENT]), ("data.path", "data.sources"), None,
         "documents, with sample_packing"),
    part("pretrain_multipack_attn", "flag", "train.padding_free", True,
         "no attention between documents"),
    *idle("how data are read does not change them", "streaming"),
    *idle("without sample_packing, which pretraining_dataset needs here",
          "pretraining_sample_concatenation"),
    *missing("a part of a data set by number", "dataset_shard_num", "dataset_shard_idx"),
    *missing("further test data", "test_datasets"),
    part("min_sample_len", "whole>=0", "data.min_tokens", None,
         "axolotl reads it only with datasets"),
    part("dataset_exact_deduplication", "flag", "data.drop_equal", False,
         "records are compared, in axolotl their tokens"),
    *idle(BY_LENGTH, "group_by_length"),
    *missing("dropping the last incomplete batch", "dataloader_drop_last"),
    *missing("a limit of prompts beside that of samples", "max_prompt_len"),
    part("curriculum_sampling", "flag", "data.shuffle", False, "the order of the file"),
    *missing("rows packed in the order of the file", "sample_packing_sequentially"),
    *idle("ftkit shuffles all sources together", "shuffle_merged_datasets",
          "shuffle_before_merging_datasets"),
    part("tokens", "texts", "data.add_tokens", None, "new rows begin as the mean of the others"),
    part("mean_resizing_embeddings", "flag", "data.add_tokens", False, "see tokens"),
    *missing("new texts of reserved tokens", "added_tokens_overrides"),
    part("reinit_weights", "flag", "train.from_scratch", False, "in full fine-tuning"),
    *missing("a rate of its own for embeddings", "embedding_lr", "embedding_lr_scale", "lr_groups"),
    part("lr_quadratic_warmup", "flag", "train.lr_warmup_curve", False,
         "only with cosine, down to 0"),
    *missing("a rate of its own for embeddings", "loraplus_lr_embedding", harmless=(1e-6,)),
    *missing("embeddings as small as the tokenizer", "shrink_embeddings"),
    *missing("a constant end of the learning rate", "cosine_constant_lr_ratio"),
    *missing("learning-rate restarts", "jagged_restart_steps", "jagged_restart_warmup_steps",
             "jagged_restart_anneal_steps"),
    *missing("settings of the schedule", "lr_scheduler_kwargs", "lr_div_factor"),
    *idle("axolotl does not read it", "eta_min"),
    *missing("settings of the optimizer", "optim_args", "optim_target_modules"),
    *idle("see optimizer", "adam_beta3", "adam_epsilon2", "dion_lr", "dion_momentum",
          "dion_rank_fraction", "dion_rank_multiple_of", "qgalore_cos_threshold",
          "qgalore_gamma_proj", "qgalore_proj_bits", "qgalore_proj_group_size",
          "qgalore_proj_quant", "qgalore_proj_type", "qgalore_queue_size", "qgalore_rank",
          "qgalore_scale", "qgalore_update_proj_gap"),
    *idle("axolotl does not read it", "dpo_beta"),
    *idle("axolotl does not take it any more", "rope_scaling", "s2_attention", "rpo_alpha",
          "dpo_norm_loss", "dpo_use_logits_to_keep", "dpo_generate_during_eval"),
    *missing("settings of the model's class", "model_kwargs", "overrides_of_model_kwargs"),
    *missing("scaled softmax", "scaling_softmax"),
    *idle("see scaling_softmax", "scaling_softmax_factor", "scaling_softmax_bias"),
    *missing("PoSE", "use_pose"), *idle("see use_pose", "pose_max_context_len",
                                        "pose_num_chunks", "pose_split_on_token_ids"),
    *missing("MoRA", "mora", "use_mora"), *idle("see use_mora", "mora_type"),
    *missing("DenseMixer", "dense_mixer"), *missing("training by a service", "hatchery"),
    *missing("Grokfast", "grokfast_alpha", "grokfast_lamb"),
    *missing("Spectrum", "spectrum_top_fraction", "spectrum_model_name"),
    *missing("knowledge distillation from recorded probabilities", "kd_trainer"),
    *idle("see kd_trainer", "kd_alpha", "kd_beta", "kd_ce_alpha", "kd_normalize_topk",
          "kd_online_server", "kd_online_server_base_url", "kd_online_timeout", "kd_online_topk",
          "kd_temperature", "kd_temperature_min"),
    *missing("online RL", "nemo_gym_enabled"),
    *idle("see nemo_gym_enabled", "nemo_gym_auto_clone", "nemo_gym_auto_start",
          "nemo_gym_config_paths", "nemo_gym_datasets", "nemo_gym_dir", "nemo_gym_head_port",
          "nemo_gym_max_turns", "nemo_gym_model_name", "nemo_gym_multi_turn",
          "nemo_gym_run_timeout", "nemo_gym_server_timeout", "nemo_gym_verify_timeout"),
    part("qat", _QAT, ("qat.weights", "qat.activations", "qat.group_size"), None,
         "int4 weights with int8 activations"),
    *missing("quantisation after training", "quantization"),
    part("fp8", "flag", "float8", False,
         "in full fine-tuning, with a scale for each token and row"),
    *idle("see fp8", "fp8_enable_fsdp_float8_all_gather", "fp8_config"),
    *missing("1.58-bit training", "use_onebitllms"),
    *missing("LISA", "lisa_n_layers"), *idle("see lisa_n_layers", "lisa_step_interval",
                                             "lisa_layers_attribute"),
    *missing("ReLoRA", "relora", "relora_steps"), *idle("see relora", "relora_prune_ratio",
                                                        "relora_cpu_offload",
                                                        "relora_prune_method"),
    *missing("LoftQ", "peft"),
    *missing("rank or scale by layer", "lora_rank_pattern", "lora_alpha_pattern",
             "peft_layers_to_transform", "peft_layers_pattern", "peft_layer_replication"),
    *missing("trained rows of the embedding", "peft_trainable_token_indices"),
    *missing("tied layers that stay tied beside an adapter", "peft_ensure_weight_tying"),
    Row(key="peft_autocast_adapter_dtype", kind="not there", note="adapters in 16 bits",
        harmless=(None, True)),
    *missing("sparse fine-tuning", "llmcompressor"),
    *missing("online RL", "ebft"),
    *idle("see rl", "vllm", "ebft_mode", "ebft_adaptive_max_tokens", "ebft_alignment_coef",
          "ebft_ce_coef", "ebft_diversity_coef", "ebft_embed_method", "ebft_feature_layers",
          "ebft_gt_length_multiplier", "ebft_use_whitening", "ebft_advantage_estimator",
          "ebft_context_length", "ebft_generate_max_len", "ebft_min_completion_prefix",
          "ebft_n_samples_per_prompt", "ebft_rl_coef", "ebft_stride", "ebft_temperature",
          "ebft_top_p", "vllm_lora_sync"),
    *missing("diffusion language models", "diffusion"),
    *missing("process reward models", "process_reward_model"),
    *missing("a trainer class of its own", "trainer_cls"),
    *missing("weights of sequences in DPO", "dpo_use_weighting"),
    *missing("several losses of DPO", "dpo_loss_type", "dpo_loss_weights"),
    *idle("EAFT takes the entropy of all tokens; axolotl that of the k likeliest", "eaft_k"),
    *missing("untrained tokens", "fix_untrained_tokens"),
    *missing("a default system message", "default_system_message"),
    part("eot_tokens", "texts", "data.train_on", None, "turns end as the chat template ends them"),
    *idle("settings of a cloud", "provider", "node_count", "branch", "dockerfile_commands",
          "memory",
          "timeout", "memory_preprocess", "timeout_preprocess", "project_name", "secrets", "gpu",
          "gpu_count", "volumes"),
    *idle("see adapter", "full_finetune"),
)  # fmt: skip


def _finish(r: Reading) -> None:
    if r.has("base_model"):
        key = "model_revision" if r.has("model_revision") else "revision_of_model"
        r.set(checkpoint_dir=trainer.of_version(r, key, r["base_model"]))
    if not r["reward_model"]:
        if r.has("num_labels"):
            r.refuse("num_labels", "classification without labelled data; see --objective classify")
        if "Classification" in str(r["model_type"]):
            r.refuse("model_type", "classification without labelled data; see --objective classify")
    trainer.from_scratch(r, "reinit_weights", is_adapter=r["adapter"] not in OFF)
    _adapter(r)
    _precision(r)
    _rounding(r)
    _length_and_batch(r)
    _rates(r)
    _objective(r)
    _data(r)
    if r.has("processor_type"):
        _with_images(r)
    _intervals(r)
    for name in r["plugins"] or ():
        known = next((word for word in _KERNELS if f".{word}." in name), None)
        if known is None and not any(f".{word}." in name for word in _BESIDE):
            r.refuse("plugins", f"the plugin {name}")
    tokens = {k for k, v in (r["special_tokens"] or {}).items() if v and k != "pad_token"}
    if tokens:
        names = ", ".join(sorted(tokens))
        r.tell(f"special_tokens: ftkit reads {names} from the model, not from the file")
    if r.has("tokenizer_config") and r["tokenizer_config"] != r["base_model"]:
        r.refuse("tokenizer_config", "a tokenizer of another model")
    key = "model_config" if r.has("model_config") else "overrides_of_model_config"
    changes = dict(r[key] or {})
    asks = changes.pop("output_router_logits", None)
    if changes:
        r.refuse(key, "changes of config.json")
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
        kind = options.get("bnb_4bit_quant_type", "nf4")
        is_double = options.get("bnb_4bit_use_double_quant", True)
        r.set(quantize=f"bnb.{kind}{'-dq' if is_double else ''}")
    elif r["load_in_8bit"]:
        r.set(quantize="bnb.int8")
    r.set(adapter=r["lora_model_dir"])
    r.set(lora_r=r["lora_r"] or 8, lora_alpha=r["lora_alpha"] or 8)
    r.set(lora_dropout=r["lora_dropout"])
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
        r.set(lora_plus_ratio=r["loraplus_lr_ratio"])


def _with_images(r: Reading) -> None:
    """What axolotl trains of a model that sees."""
    if (names := _SEEING.get(r["chat_template"])) is None:
        r.refuse("processor_type", "the loss on images where axolotl decides it by the processor")
        return
    if r["rl"] not in OFF or r["reward_model"]:
        r.refuse("processor_type", "images in preference pairs")
    targets = r["lora_target_modules"]
    if r["adapter"] in OFF:
        if not r["freeze_mm_modules"]:
            r.set(images__projector=True, images__tower=True)
    elif r["lora_target_linear"] or not (
        names.issuperset(targets)
        if isinstance(targets, list)
        else isinstance(targets, str) and "language_model" in targets
    ):
        r.refuse("lora_target_modules", "adapters in parts that see")
    r.tell(
        "processor_type: axolotl takes the first image of a column alone, and puts it behind the "
        "text where no part stands for it; ftkit refuses such records. It trains on samples that "
        "are longer than sequence_len, too"
    )


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
    # transformers takes -1 as none.
    steps, epochs = max(r["max_steps"] or 0, 0), r["num_epochs"]
    r.set(train__max_steps=steps or None)
    if epochs != int(epochs) and not steps:
        r.refuse("num_epochs", "a part of an epoch")
    # Without num_epochs, max_steps alone ends the run.
    r.recipe["train.epochs"] = None if steps else max(1, int(epochs))
    if epochs > 1 and not steps:
        r.tell(
            "num_epochs: where samples are no multiple of a step's, axolotl ends the last epoch "
            "early, after samples x epochs / batch steps; ftkit trains all epochs to their end"
        )
    micro = r["micro_batch_size"]
    accumulation = r["gradient_accumulation_steps"]
    if r.has("batch_size"):
        accumulation = max(1, r["batch_size"] // micro)
    trainer.batch(r, micro, accumulation)
    if r.ranks > 1:
        r.tell(
            "micro_batch_size: axolotl weighs the losses of devices equally, ftkit every token of "
            "a step"
        )
    if r["sample_packing"]:
        trainer.packing(r, micro, accumulation, r["sequence_len"])
        r.tell(
            "sample_packing: axolotl fills rows of sequence_len tokens with the samples that fit "
            "best, and leaves a rest of each row empty; ftkit takes samples in order up to the "
            "same number of tokens"
        )


def _rates(r: Reading) -> None:
    name = r["optimizer"]
    if name.startswith("optimi_adamw"):
        name = "adamw_torch"
    trainer.optimizer(r, name, key="optimizer")
    if r.has("adam_eps"):
        r.recipe["optimizer"]["init_args"]["eps"] = r["adam_eps"]
    kind = r["lr_scheduler"]
    trainer.schedule(r, kind, name="lr_scheduler")
    if (ratio := r["cosine_min_lr_ratio"]) and kind == "cosine":
        r.set(train__min_lr=ratio * (r["learning_rate"] or 0.0))
    if r["lr_quadratic_warmup"] and kind == "cosine":
        r.set(train__lr_warmup_curve="quadratic", train__min_lr=0.0)
    if kind == "constant":
        r.set(train__lr_warmup_steps=0)
        return
    given, total = r.values.get("warmup_steps"), r.recipe.get("train.max_steps")
    share = r["warmup_ratio"] if given is None else given
    if given is not None and (share >= 1 or share == 0):
        r.set(train__lr_warmup_steps=2 if share == 1 else int(share))
    elif total and given is None:
        most = total if r.has("warmup_ratio") else _WARMUP_STEPS
        steps = min(int(share * total), most)
        r.set(train__lr_warmup_steps=2 if steps == 1 else steps)
        if not r.has("pretraining_dataset"):
            r.tell(
                "warmup_ratio: of max_steps; axolotl takes the steps of num_epochs if the data "
                "have fewer, and trains max_steps"
            )
    elif total:
        r.set(train__lr_warmup_steps=math.ceil(share * total))
    else:
        r.set(train__lr_warmup_run_fraction=share)
        if given is None:
            r.tell(
                "warmup_ratio: axolotl rounds the steps of the warm-up down, and takes 2 where "
                "that is 1; ftkit rounds them up"
            )
        if given is None and not r.has("warmup_ratio"):
            r.tell(
                f"warmup_ratio: without it, axolotl warms up for at most {_WARMUP_STEPS} steps; "
                f"for a longer run add --train.lr_warmup_steps {_WARMUP_STEPS}"
            )


def _objective(r: Reading) -> None:
    kind = r["rl"]
    options: dict[str, Any] = {}
    if r["reward_model"]:
        kind, options = "reward", {"center_weight": r["center_rewards_coefficient"]}
    elif kind in OFF:
        if r["use_eaft"]:
            options = {"alpha": r["eaft_alpha"]}
            r.recipe["objective"] = {"class_path": "eaft", "init_args": options}
        elif r["liger_use_token_scaling"]:
            r.recipe["objective"] = {"class_path": "dft", "init_args": {}}
        return
    elif kind not in _RL:
        r.refuse("rl", "online RL")
        return
    else:
        options = _preference(r, kind)
    given = {name: value for name, value in options.items() if value is not None}
    r.recipe["objective"] = {"class_path": _RL.get(kind, kind), "init_args": given}


def _preference(r: Reading, kind: str) -> dict[str, Any]:
    """Options of an objective of rl, whose beta has several names."""
    beta = (r["trl"] or {}).get("beta")
    if beta is None:
        alone = not r.has("rl_beta") and r.has("orpo_alpha")
        beta = r["orpo_alpha" if alone else "rl_beta"]
    if kind == "dpo":
        noise = r["dpo_label_smoothing"]
        return {"loss": "conservative" if noise else "sigmoid", "beta": beta, "label_noise": noise}
    if kind == "ipo":
        return {"loss": "ipo", "beta": beta}
    if kind == "orpo":
        return {"weight": beta}
    if kind == "simpo":
        if r["cpo_alpha"]:
            key = "cpo_alpha" if r.has("cpo_alpha") else "rl"
            r.refuse(key, "a further loss beside that of pairs, which cpo_alpha 0 leaves out")
        return {"beta": beta, "margin": r["simpo_gamma"] / beta}
    if r["adapter"] in OFF:
        r.set(reference=r.recipe.get("checkpoint_dir"))
    return {
        "beta": beta,
        "desirable_weight": r["kto_desirable_weight"],
        "undesirable_weight": r["kto_undesirable_weight"],
    }


def _data(r: Reading) -> None:
    entries = r["datasets"] or _documents(r)
    sources = [_source(r, entry) for entry in entries]
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
    size = r["val_set_size"] or 0
    if size > 1:
        r.refuse("val_set_size", "a number of validation records")
        size = 0.05
    options["val_split_fraction"] = size
    trainer.held_out(r, "val_set_size", size)
    strategy = r["excess_length_strategy"]
    if all(source.get("columns", {}).get("text") is None for source in sources):
        options["overlong"] = "truncate" if strategy == "truncate" else "drop"
    if r["dataset_exact_deduplication"]:
        options["drop_equal"] = True
    is_paired = r["rl"] not in OFF or r["reward_model"]
    if r["min_sample_len"] and r["datasets"] and not is_paired:
        options["min_tokens"] = r["min_sample_len"]
    if r["tokens"]:
        options["add_tokens"] = list(r["tokens"])
        if not r["mean_resizing_embeddings"]:
            r.tell(
                "tokens: new rows begin as the mean of the others, in axolotl with random numbers"
            )
    if r["curriculum_sampling"]:
        options["shuffle"] = False
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
        source |= _of_pairs(r, kind or "", entry, columns)
    elif kind in (None, "chat_template"):
        source["chat_template"] = _template(r, entry)
        source["train_on"] = _trained(r, entry)
        if entry.get("drop_system_message"):
            source["drop_system"] = True
    elif (style := _instruction_style(kind, columns)) is not None:
        source |= {"prompt_style": style, "mask_prompt": not r["train_on_inputs"]}
    elif kind in ("completion", "pretrain"):
        columns["text"] = entry.get("field") or "text"
        if kind == "completion":
            r.tell(
                "datasets.type: a document that is longer than sequence_len becomes pieces whose "
                "first token axolotl does not train; ftkit trains it, after the one before"
            )
    else:
        r.refuse("datasets.type", f"the prompt format {kind.partition('.')[0]}")
    if columns:
        source["columns"] = columns
    return source


def _instruction_style(kind: str, columns: dict[str, str]) -> str | dict[str, str] | None:
    """Prompt style of a type of instructions, whose columns are added; None: it is none."""
    name, _, own = kind.partition(":")
    if name not in _INSTRUCTIONS or (own and own not in _FORMS):
        return None
    form, systems, named = _INSTRUCTIONS[name]
    columns |= named
    if (own or form, systems) == ("instruct", "usual"):
        return "alpaca"
    around, *turns = _FORMS[own or form]
    texts = [
        (around.replace("{}", system) if system else "") + turn
        for system, turn in zip(_SYSTEMS[systems], turns, strict=True)
    ]
    return dict(zip(("with_input", "without_input"), texts, strict=True))


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
    name: str = entry.get("chat_template") or r["chat_template"]
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
    if not r["eot_tokens"] and not r.has("processor_type"):
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
    text = kind.get("format") or "{instruction}"
    without = kind.get("no_input_format")
    system = kind.get("system_prompt") or ""
    style: str | dict[str, str] = f"{system}{text}"
    if without is not None and without != text:
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
    is_named, is_kto = head in ("chatml", "llama3"), r["rl"] == "kto"
    if is_named and is_kto and form in _LABELLED_PROMPTS:
        # Texts, which the template turns into a conversation.
        columns |= {"instruction": _LABELLED_PROMPTS[form], "output": "completion"}
    elif is_named and not is_kto and form in ("default", "", *_PAIR_PROMPTS):
        columns["instruction"] = _PAIR_PROMPTS.get(form) or _question(r, entry)
    elif not (
        is_pairs
        or (is_named and form in ("argilla_chat", "ultra") and not is_kto)  # conversations
        or (head == "chat_template" and form in ("default", ""))
    ):
        r.refuse("datasets.type", f"the preference format {kind}")
    if columns.get("instruction") == "instruction":
        del columns["instruction"]
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


def _question(r: Reading, entry: dict[str, Any]) -> str:
    """Column of the question of pairs, of which axolotl takes the first that they have."""
    names = ("prompt", "input", "question", "instruction")
    record = trainer.first_record(trainer.local_data(entry.get("path")))
    if record is None:
        r.tell(
            f"datasets.type: the question is read from prompt, in axolotl from {', '.join(names)}, "
            "whatever is there: if it is another one, add --data.columns.instruction"
        )
        return names[0]
    return next((name for name in names if name in record), names[0])


def _intervals(r: Reading) -> None:
    total, epochs = r.recipe.get("train.max_steps"), r["num_epochs"]
    for name, ours in (("save", "train.save_interval"), ("eval", "eval.interval")):
        times, steps = r[f"{name}s_per_epoch"], r[f"{name}_steps"]
        strategy = r[f"{name}_strategy"] or (r["evaluation_strategy"] if name == "eval" else None)
        share = None
        if times:
            share = 1 / times
        elif steps and steps < 1:
            share = steps * epochs
        # axolotl validates only where a key says when, and records are held out.
        is_asked = (times or steps or strategy) and r["val_set_size"]
        is_off = name == "eval" and not is_asked
        if strategy == "no" or is_off:
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
    rows=ROWS,
    finish=_finish,
)
"""axolotl."""
