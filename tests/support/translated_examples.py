"""Small configurations of TRL, LLaMA-Factory, axolotl and torchtune, with all that they need.

Imports nothing but the standard library, because the programs themselves run it as well.
"""

import json
import random
from pathlib import Path
from typing import Any

QUICKSTART = Path(__file__).resolve().parents[2] / "ftkit/utils/embedded/quickstart/model"
MARKS = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}"
    "{% endgeneration %}{{ '\\n' }}{% else %}{{ message.content + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
RECORDS = 22
_TRL: dict[str, Any] = {
    "model_name_or_path": "base",
    "report_to": "none",
    "bf16": False,
    "max_length": 64,
    "use_cpu": True,
    "output_dir": "out",
    "save_strategy": "no",
}
TRL: dict[str, dict[str, Any]] = {
    "text": {"dataset_name": "texts", "per_device_train_batch_size": 4, "num_train_epochs": 2,
             "learning_rate": 1e-3},
    "messages": {"dataset_name": "messages", "per_device_train_batch_size": 2, "max_steps": 9,
                 "gradient_accumulation_steps": 3, "lr_scheduler_type": "cosine",
                 "warmup_steps": 3},
    "assistant": {"dataset_name": "messages", "assistant_only_loss": True, "num_train_epochs": 1,
                  "per_device_train_batch_size": 5, "lr_scheduler_type": "constant_with_warmup",
                  "warmup_steps": 0.3},
    "completion": {"dataset_name": "completion", "per_device_train_batch_size": 8,
                   "num_train_epochs": 3, "lr_scheduler_type": "cosine", "warmup_steps": 0.1,
                   "completion_only_loss": True},
    "dpo": {"dataset_name": "pairs", "per_device_train_batch_size": 4, "num_train_epochs": 1,
            "beta": 0.2, "lr_scheduler_type": "inverse_sqrt", "warmup_steps": 2},
}  # fmt: skip
"""Files of `trl sft`, and of `trl dpo` the one that is called so."""
_FACTORY: dict[str, Any] = {
    "model_name_or_path": "base",
    "do_train": True,
    "finetuning_type": "lora",
    "template": "chatml",
    "report_to": "none",
    "output_dir": "out",
    "overwrite_output_dir": True,
    "save_strategy": "no",
    "use_cpu": True,
    "cutoff_len": 512,
    "dataset_dir": ".",
    "learning_rate": 1e-3,
}
LLAMA_FACTORY: dict[str, dict[str, Any]] = {
    "instructions": {"dataset": "instructions", "per_device_train_batch_size": 1,
                     "gradient_accumulation_steps": 8, "num_train_epochs": 3.0, "warmup_ratio": 0.1,
                     "lr_scheduler_type": "cosine"},
    "chats": {"dataset": "chats", "template": "llama3", "num_train_epochs": 1.0,
              "per_device_train_batch_size": 4, "lr_scheduler_type": "linear", "warmup_steps": 2},
    "all_tokens": {"dataset": "instructions,chats", "train_on_prompt": True, "max_steps": 13,
                   "per_device_train_batch_size": 4, "lr_scheduler_type": "constant"},
    "last_turn": {"dataset": "chats", "mask_history": True, "finetuning_type": "full",
                  "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
                  "num_train_epochs": 2.0, "lr_scheduler_type": "cosine"},
    "preference": {"dataset": "ranked", "stage": "dpo", "pref_beta": 0.1,
                   "per_device_train_batch_size": 4, "num_train_epochs": 1.0,
                   "lr_scheduler_type": "cosine", "warmup_ratio": 0.2},
}  # fmt: skip
"""Files of LLaMA-Factory."""
_AXOLOTL: dict[str, Any] = {
    "base_model": "base",
    "sequence_len": 512,
    "learning_rate": 1e-3,
    "optimizer": "adamw_torch",
    "output_dir": "out",
    "save_strategy": "no",
    "bf16": False,
    "dataset_num_proc": 1,
    "special_tokens": {"pad_token": "<|eot_id|>"},
}
_CHATS: dict[str, Any] = {"path": "messages", "type": "chat_template"}
_PAIRS = {"path": "conversations", "type": "chat_template.default"}
AXOLOTL: dict[str, dict[str, Any]] = {
    "chats": {"datasets": [_CHATS], "chat_template": "chatml", "micro_batch_size": 2,
              "gradient_accumulation_steps": 3, "num_epochs": 2, "warmup_steps": 3},
    "own_template": {"datasets": [_CHATS | {"roles_to_train": ["assistant"],
                                            "train_on_eos": "turn"}],
                     "micro_batch_size": 4, "max_steps": 13, "lr_scheduler": "linear",
                     "warmup_ratio": 0.2},
    "llama3": {"datasets": [_CHATS], "chat_template": "llama3", "micro_batch_size": 4,
               "eot_tokens": ["<|eot_id|>"],
               "num_epochs": 1, "lr_scheduler": "constant_with_warmup", "warmup_steps": 2},
    "instructions": {"datasets": [{"path": "instructions", "type": "alpaca"}],
                     "micro_batch_size": 1, "num_epochs": 4, "warmup_ratio": 0.25,
                     "cosine_min_lr_ratio": 0.1, "val_set_size": 0.5, "evals_per_epoch": 1},
    "instructions_whole": {"datasets": [{"path": "instructions", "type": "alpaca"}],
                           "train_on_inputs": True, "micro_batch_size": 2, "num_epochs": 4},
    "packed": {"datasets": [{"path": "texts", "type": "completion"}], "micro_batch_size": 2,
               "sequence_len": 256, "sample_packing": True, "max_steps": 15,
               "warmup_steps": 2},
    "preference": {"datasets": [_PAIRS], "rl": "dpo", "chat_template": "chatml",
                   "micro_batch_size": 4, "num_epochs": 1, "warmup_ratio": 0.2},
    "text_pairs": {"datasets": [{"path": "questions", "type": "chatml.intel"}], "rl": "dpo",
                   "micro_batch_size": 4, "num_epochs": 1, "warmup_steps": 3},
    "questions": {"datasets": [{"path": "answers", "type": "alpaca_chat.load_qa"}],
                  "micro_batch_size": 4, "max_steps": 7, "lr_scheduler": "linear"},
    "pretraining": {"pretraining_dataset": [{"path": "texts", "type": "pretrain"}],
                    "sample_packing": True, "micro_batch_size": 2, "sequence_len": 256,
                    "max_steps": 25, "warmup_steps": 2, "streaming_multipack_buffer_size": 22},
}  # fmt: skip
"""Files of axolotl."""
_LLAMA3 = {
    "_component_": "torchtune.models.llama3.llama3_tokenizer",
    "path": "base/tokenizer.tiktoken",
    "special_tokens_path": "base/special_tokens.json",
    "max_seq_len": 512,
}
_QWEN = {
    "_component_": "torchtune.models.qwen2_5.qwen2_5_tokenizer",
    "path": "base/vocab.json",
    "merges_file": "base/merges.txt",
    "special_tokens_path": "base/special_tokens.json",
}
_COSINE = {
    "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "num_warmup_steps": 3,
}
_LORA = {
    "_component_": "torchtune.models.llama3_2.lora_llama3_2_1b",
    "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 8,
    "lora_alpha": 16,
}
_TORCHTUNE: dict[str, Any] = {
    "output_dir": "out",
    "tokenizer": _LLAMA3,
    "model": _LORA,
    "checkpointer": {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": "base",
        "checkpoint_files": ["model.safetensors"],
        "output_dir": "${output_dir}",
        "model_type": "LLAMA3_2",
    },
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3, "weight_decay": 0.01},
    "lr_scheduler": _COSINE,
    "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
    "metric_logger": {
        "_component_": "torchtune.training.metric_logging.DiskLogger",
        "log_dir": "${output_dir}/logs",
    },
    "resume_from_checkpoint": False,
    "seed": 3,
    "shuffle": True,
    "batch_size": 2,
    "gradient_accumulation_steps": 1,
    "epochs": 1,
    "max_steps_per_epoch": None,
    "clip_grad_norm": None,
    "optimizer_in_bwd": False,
    "enable_activation_checkpointing": False,
    "compile": False,
    "device": "cpu",
    "dtype": "fp32",
}


def _of_torchtune(function: str, data: str, **options: Any) -> dict[str, Any]:
    files = {"source": "json", "data_files": f"{data}/train.jsonl", "split": "train"}
    return {"_component_": f"torchtune.datasets.{function}"} | files | options


TORCHTUNE: dict[str, dict[str, Any]] = {
    "instructions": {"dataset": _of_torchtune("alpaca_dataset", "tasks"), "epochs": 2},
    "answers": {"dataset": _of_torchtune("alpaca_dataset", "tasks", train_on_input=False),
                "tokenizer": _QWEN, "batch_size": 11, "epochs": 3},
    "chats": {"dataset": _of_torchtune("chat_dataset", "messages", conversation_column="messages",
                                       conversation_style="openai"),
              "gradient_accumulation_steps": 11, "epochs": 3},
    "system": {"dataset": _of_torchtune("chat_dataset", "talks", conversation_style="sharegpt",
                                        conversation_column="conversations",
                                        new_system_prompt="green river"),
               "tokenizer": _QWEN, "batch_size": 11, "epochs": 4},
    "questions": {"dataset": _of_torchtune("instruct_dataset", "answers", train_on_input=True,
                                           column_map={"input": "question", "output": "answer"}),
                  "model": {"_component_": "torchtune.models.llama3_2.llama3_2_1b"},
                  "lr_scheduler": None},
    "texts": {"dataset": _of_torchtune("text_completion_dataset", "texts"), "shuffle": False,
              "tokenizer": _LLAMA3 | {"max_seq_len": 40}, "batch_size": 1},
    "cut": {"dataset": _of_torchtune("chat_dataset", "messages", conversation_column="messages",
                                     conversation_style="openai"),
            "tokenizer": _LLAMA3 | {"max_seq_len": 80}, "batch_size": 22, "epochs": 5},
    "pairs": {"dataset": _of_torchtune("preference_dataset", "compared"),
              "loss": {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.2}},
}  # fmt: skip
"""Files of torchtune; `pairs` is trained by lora_dpo_single_device."""
EXAMPLES = {
    "torchtune": {name: _TORCHTUNE | keys for name, keys in TORCHTUNE.items()},
    "trl": {name: _TRL | keys for name, keys in TRL.items()},
    "llama_factory": {name: {"stage": "sft"} | _FACTORY | k for name, k in LLAMA_FACTORY.items()},
    "axolotl": {name: _AXOLOTL | keys for name, keys in AXOLOTL.items()},
}


def write_examples(directory: Path) -> None:
    """Write base model (without weights) and data for all examples."""
    base = directory / "base"
    base.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads((QUICKSTART / "tokenizer.json").read_text("utf-8"))
    first = 1 + max(tokenizer["model"]["vocab"].values())
    first = max(first, 1 + max(token["id"] for token in tokenizer["added_tokens"]))
    tokenizer["added_tokens"] += [
        {"id": first + i, "content": mark, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for i, mark in enumerate(MARKS)
    ]  # fmt: skip
    (base / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    settings = json.loads((QUICKSTART / "tokenizer_config.json").read_text("utf-8"))
    settings |= {"chat_template": CHATML, "eos_token": "<|im_end|>"}
    (base / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    config = json.loads((QUICKSTART / "config.json").read_text("utf-8"))
    config |= {"vocab_size": first + len(MARKS), "hidden_size": 32, "intermediate_size": 64,
               "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
               "head_dim": 16}  # fmt: skip
    (base / "config.json").write_text(json.dumps(config), "utf-8")
    for name, records in _data().items():
        (directory / name).mkdir()
        lines = "\n".join(json.dumps(record) for record in records)
        (directory / name / "train.jsonl").write_text(lines, "utf-8")
    chats = {"messages": "messages"}
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user",
            "assistant_tag": "assistant", "system_tag": "system"}  # fmt: skip
    info = {
        "instructions": {"file_name": "instructions/train.jsonl"},
        "chats": {"file_name": "messages/train.jsonl", "formatting": "sharegpt", "columns": chats,
                  "tags": tags},
        "ranked": {"file_name": "ranked/train.jsonl", "ranking": True,
                   "columns": {"prompt": "instruction", "chosen": "chosen",
                               "rejected": "rejected"}},
    }  # fmt: skip
    (directory / "dataset_info.json").write_text(json.dumps(info), "utf-8")


def _data() -> dict[str, list[dict[str, Any]]]:
    """Records of each kind."""
    numbers = random.Random(3)
    words = [
        "river",
        "stone",
        "seven",
        "green",
        "light",
        "paper",
        "quiet",
        "north",
        "under",
        "walk",
    ]

    def text(most: int) -> str:
        return " ".join(numbers.choices(words, k=numbers.randint(1, most)))

    def said(role: str, most: int) -> dict[str, str]:
        return {"role": role, "content": text(most)}

    def chat(turns: int) -> dict[str, Any]:
        messages = [said("system", 3)] if numbers.random() < 0.4 else []
        for _ in range(turns):
            messages += [said("user", 6), said("assistant", 5)]
        return {"messages": messages}

    found: dict[str, list[dict[str, Any]]] = {
        "texts": [{"text": text(60)} for _ in range(RECORDS)],
        "messages": [chat(numbers.randint(1, 3)) for _ in range(RECORDS)],
        "completion": [
            {"prompt": f"{text(8)}:", "completion": f" {text(8)}"} for _ in range(RECORDS)
        ],
        "instructions": [
            {"instruction": text(8), "input": "", "output": text(8)}
            for _ in range(RECORDS)
        ],
        "ranked": [
            {"instruction": text(8), "chosen": text(6), "rejected": text(6)} for _ in range(RECORDS)
        ],
        "pairs": [
            {"prompt": f"{text(6)}:", "chosen": f" {text(5)}", "rejected": f" {text(5)}"}
            for _ in range(RECORDS)
        ],
        "conversations": [
            {"messages": [said("user", 6)], "chosen": said("assistant", 5),
             "rejected": said("assistant", 5)}
            for _ in range(RECORDS)
        ],
        "questions": [
            {"system": "", "question": text(6), "chosen": text(5), "rejected": text(5)}
            for _ in range(RECORDS)
        ],
        "answers": [{"question": text(8), "answer": text(8)} for _ in range(RECORDS)],
        "tasks": [
            {"instruction": text(8), "input": text(4) if i % 3 else "", "output": text(8)}
            for i in range(RECORDS)
        ],
        "talks": [
            {"conversations": [{"from": "human", "value": text(6)},
                               {"from": "gpt", "value": text(5)}]}
            for _ in range(RECORDS)
        ],
        "compared": [
            {name: [asked, said("assistant", 5)] for name in ("chosen", "rejected")}
            for asked in (said("user", 6) for _ in range(RECORDS))
        ],
    }  # fmt: skip
    return found
