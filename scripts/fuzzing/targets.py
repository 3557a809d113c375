"""Every kind of file that ftkit reads: small real files, the command that reads them, result."""

import csv
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chats import said, write_chat_tokenizer
from foreign_checkpoints import BASE, KEPT, SHALLOW, recipe
from gguf_files import write_gguf
from object_servers import Bucket, Proxy
from PIL import Image
from safetensors.torch import load_file, save_file
from seeing_models import save_model
from tiny import make_data, make_llama, make_records

from ftkit.recipe.readers import READERS

Run = Callable[[Sequence[str], Path], None]
"""Runs a command that has to succeed, in a directory."""

LEARNING = (
    *("--train.epochs", "null", "--train.max_steps", "6", "--train.global_batch_size", "8"),
    *(
        "--train.micro_batch_size",
        "4",
        "--train.save_interval",
        "2",
        "--train.lr_warmup_steps",
        "1",
    ),
    *("--eval.interval", "0", "--eval.initial_validation", "false", "--eval.max_new_tokens", "0"),
    *("--eval.final_validation", "false", "--precision", "32-true", "--accelerator", "cpu"),
    *("--data", "JSON", "--data.path", "data.json", "--checkpoint.keep_last", "3"),
)
_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_URL = "s3://bucket/run"


@dataclass(frozen=True, kw_only=True)
class Target:
    """One kind of file."""

    name: str
    make: Callable[[Path, Run], None]
    """Writes sound files to a directory."""
    files: tuple[str, ...]
    """Patterns of the files that are damaged."""
    command: tuple[str, ...]
    """Arguments of `ftkit`, run in the directory."""
    result: Callable[[Path, str], str] | None = None
    """Result that damage must not change silently, from the directory and the output; None: other
    content may give another result, such as another learning rate in a recipe."""
    share: int = 1
    """Share of all mutations, relative to the other targets."""
    numbers_are_verified: bool = True
    """True if there are checksums of the numbers in its safetensors files."""
    at_url: bool = False
    """True if the directory "run" is uploaded to object storage before the command."""


def find_files(directory: Path, patterns: Iterable[str]) -> list[Path]:
    """The files that match, in a fixed order."""
    found = {path for pattern in patterns for path in directory.glob(pattern)}
    return sorted(path for path in found if path.is_file())


def upload_run(directory: Path, proxy: Proxy) -> None:
    """Replace the run at the url by the one in a directory."""
    bucket = Bucket(proxy)
    for name in bucket.names("run"):
        bucket.delete(f"run/{name}")
    for path in sorted((directory / "run").rglob("*")):
        if path.is_file():
            bucket.write(f"run/{path.relative_to(directory / 'run')}", path.read_bytes())


def fetch_metrics(directory: Path, proxy: Proxy) -> None:
    """Replace metrics.csv of the run in a directory by the one at the url."""
    (directory / "run" / "metrics.csv").write_bytes(Bucket(proxy).read("run/metrics.csv"))


def _make_model(directory: Path, _: Run) -> None:
    make_llama(directory / "base")
    make_data(directory / "data.json", 40)


def _make_split_model(directory: Path, run: Run) -> None:
    _make_model(directory, run)
    base = directory / "base"
    tensors = load_file(base / "model.safetensors")
    names = sorted(tensors)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    index: dict[str, Any] = {"metadata": {"total_size": 0}, "weight_map": {}}
    for number, half in enumerate(halves, 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in half}, base / file, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(half, file)
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    (base / "model.safetensors").unlink()


def _make_bin_model(directory: Path, run: Run) -> None:
    _make_model(directory, run)
    weights = directory / "base" / "model.safetensors"
    torch.save(load_file(weights), directory / "base" / "pytorch_model.bin")
    weights.unlink()


def _make_gguf_model(directory: Path, run: Run) -> None:
    _make_model(directory, run)
    write_gguf(directory / "base", directory / "model.gguf")


def _make_recipe(directory: Path, run: Run) -> None:
    _make_model(directory, run)
    values = {
        "checkpoint_dir": "base",
        "out_dir": "out",
        "precision": "32-true",
        "devices": 1,
        "lora_r": 4,
        "lora_query": True,
        "seed": 1337,
        "data": {"class_path": "litgpt.data.JSON", "init_args": {"path": "data.json"}},
        "train": {"global_batch_size": 8, "micro_batch_size": 4, "max_steps": 3, "epochs": None},
        "eval": {"interval": 100, "max_new_tokens": 0},
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.001}},
        "checkpoint": {"keep_last": 2},
    }
    # JSON is YAML; the mutations write it in YAML's own layout.
    (directory / "recipe.yaml").write_text(json.dumps(values))


def _make_chats(directory: Path, run: Run) -> None:
    _make_model(directory, run)
    write_chat_tokenizer(directory / "base")
    (directory / "base" / "chat_template.jinja").write_text(_TEMPLATE)
    config = directory / "base" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 512}))
    lines = [
        {
            "id": f"a{number}",
            "messages": [
                said("system", "Be brief."),
                said("user", record["instruction"]),
                said("assistant", record["output"]),
                said("user", record["input"] or "and now?"),
                said("assistant", record["output"]),
            ],
        }
        for number, record in enumerate(make_records(40))
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "chats.jsonl").write_text(text)


_PICTURES = ("a.png", "b.jpg", "c.webp", "d.gif")


def _make_pictures(directory: Path, _: Run) -> None:
    save_model("qwen2_5_vl", directory / "base")
    (directory / "pictures").mkdir()
    for number, name in enumerate(_PICTURES):
        noise = np.random.default_rng(number).integers(0, 255, (40, 60, 3)).astype(np.uint8)
        Image.fromarray(noise).save(directory / "pictures" / name)
    lines = [
        {
            "messages": [said("user", f"<image>{number}?"), said("assistant", "red")],
            "images": [f"pictures/{_PICTURES[number % len(_PICTURES)]}"],
        }
        for number in range(12)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "chats.jsonl").write_text(text)


def _make_tables(directory: Path, run: Run) -> None:
    import pyarrow
    import pyarrow.parquet

    _make_model(directory, run)
    records = make_records(30)
    with (directory / "data.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(records)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), directory / "data.parquet")
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (directory / "data.jsonl").write_text(lines)


def _make_run(directory: Path, run: Run) -> None:
    _make_model(directory, run)
    line = ("finetune", "base", *LEARNING, "--out_dir", "run")
    run((*line, "--stop_after", "4"), directory)


def _make_claimed_run(directory: Path, run: Run) -> None:
    from ftkit.extensions.object_storage.claim import ClaimHolder

    _make_run(directory, run)
    (directory / "run" / ".run").mkdir()
    (directory / "run" / ".run" / "claim-00000001").write_bytes(ClaimHolder.here().to_bytes())


def _make_adapter(directory: Path, run: Run) -> None:
    _make_run(directory, run)
    step = directory / "run" / "checkpoints" / "step-00000004"
    shutil.copytree(step / "adapter", directory / "adapter")
    shutil.rmtree(directory / "run")


def _make_foreign(name: str, base: Path) -> Callable[[Path, Run], None]:
    def make(directory: Path, _: Run) -> None:
        shutil.copytree(KEPT / name, directory / "theirs")
        shutil.copytree(base, directory / "base")
        file = recipe(directory, directory / "base")
        text = file.read_text().replace(f"{directory}/", "")
        file.write_text(text)

    return make


def _digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    found = hashlib.sha256()
    for name, tensor in tensors:
        plain = tensor.contiguous().view(torch.uint8).numpy() if tensor.numel() else np.empty(0)
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(plain.tobytes())
    return found.hexdigest()


def _imported_tensors(directory: Path, _: str) -> str:
    """Weights and state of the optimizer as they were imported."""
    shards = sorted((directory / "out").rglob("*.safetensors"))
    tensors = {f"{s.name} {name}": t for s in shards for name, t in load_file(s).items()}
    return _digest(sorted(tensors.items()))


def _losses(directory: Path, output: str) -> str:
    """Loss and learning rate of the last step, which a resumed run must reproduce."""
    with (directory / "run" / "metrics.csv").open() as file:
        rows = [(row["step"], row["loss"], row["lr"]) for row in csv.DictReader(file)]
    return repr(rows[-1:])


def _answer(_: Path, output: str) -> str:
    return output


_GENERATE = ("--prompt", "red cat", "--max_new_tokens", "8", "--precision", "32-true", "--quiet")
_DATA = ("--show", "1", "--format", "json", "--data", "JSON", "--data.path")
_RESUME = ("finetune", "base", *LEARNING, "--resume", "auto", "--quiet")
_FOREIGN = {
    "trainer": ("checkpoint-3", BASE),
    "trainer-deepspeed": ("checkpoint-3", BASE),
    "trainer-fsdp": ("checkpoint-3", SHALLOW),
    "trainer-fsdp-gathered": ("checkpoint-3", BASE),
    "trl-lora": ("checkpoint-3", BASE),
    "deepspeed-zero1": ("", BASE),
    "deepspeed-zero3": ("", BASE),
    "deepspeed-bf16": ("", SHALLOW),
    "gpt-neox": ("", BASE),
    "distributed": ("checkpoint", SHALLOW),
    "lightning": ("checkpoint.ckpt", BASE),
    "lightning-sharded": ("checkpoint.ckpt", SHALLOW),
    "litgpt": ("step-000003", BASE),
    "litgpt-lora": ("step-000003", BASE),
}
_SHARES_OF_FOREIGN = 5


def _foreign_target(name: str) -> Target:
    inside, base = _FOREIGN[name]
    return Target(
        name=f"foreign: {name}",
        make=_make_foreign(name, base),
        files=("theirs/**/*",),
        command=(
            *("import", f"theirs/{inside}".rstrip("/"), "--out", "out"),
            *("--config", "recipe.yaml", "--quiet"),
        ),
        result=_imported_tensors,
        share=_SHARES_OF_FOREIGN,
        numbers_are_verified=False,  # other programs write no checksums
    )


_TRL = {"model_name_or_path": "base", "dataset_name": "data.json"}
_CHAT = {"path": "data.json", "type": "chat_template"}
_CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "axolotl": {
        "base_model": "base", "datasets": [{"path": "data.json", "type": "alpaca"}],
        "adapter": "qlora", "lora_r": 8, "lora_target_modules": ["q_proj", "v_proj"],
        "learning_rate": 2e-4, "cosine_min_lr_ratio": 0.1, "max_steps": 9, "warmup_ratio": 0.1,
        "val_set_size": 0.1, "evals_per_epoch": 2, "saves_per_epoch": 2, "sample_packing": True,
        "bnb_config_kwargs": {"bnb_4bit_quant_type": "fp4"}, "special_tokens": {"pad_token": "p"},
        "model_config": {"output_router_logits": True},
    },
    "axolotl, pairs": {
        "base_model": "base", "datasets": [_CHAT | {"type": "chatml.default"}], "rl": "simpo",
        "cpo_alpha": 0, "simpo_gamma": 0.5, "trl": {"beta": 0.2}, "num_epochs": 2,
        "qat": {"weight_dtype": "int4", "activation_dtype": "int8"},
    },
    "axolotl, conversations": {
        "base_model": "base", "num_epochs": 1, "warmup_steps": 0.1, "save_steps": 0.5,
        "datasets": [_CHAT | {"message_property_mappings": {"role": "who"}, "split": "train",
                              "roles_to_train": ["assistant"], "train_on_eos": "turn"},
                     {"path": "data.json", "type": {"format": "{instruction} {input}",
                                                    "field_input": "input"}}],
    },
    "llama-factory": {
        "model_name_or_path": "base", "finetuning_type": "lora", "stage": "dpo",
        "pref_loss": "simpo", "dataset": "own", "dataset_dir": ".", "template": "llama3",
        "lora_target": "q_proj,v_proj", "max_steps": 9, "save_steps": 0.5, "max_samples": 99,
        "quantization_bit": 4, "warmup_ratio": 0.1,
    },
    "llama-factory-v1": {
        "model": "base", "train_dataset": "sets.yaml", "max_steps": 9,
        "peft_config": {"name": "lora", "r": 4}, "quant_config": {"name": "bnb"},
    },
    "llama-factory-v1, muon": {
        "model": "base", "train_dataset": "data.json", "batching_strategy": "dynamic_batching",
        "optim_config": {"name": "muon", "lr": 1e-3}, "num_train_epochs": 1,
    },
    "trl-sft": _TRL | {"packing": True, "use_peft": True, "load_in_4bit": True, "max_steps": 9,
                       "lora_target_modules": ["q_proj"], "warmup_steps": 0.1},
    "trl-dpo": _TRL | {"beta": 0.2, "loss_type": ["sigmoid"], "label_smoothing": 0.1},
    "trl-kto": _TRL | {"desirable_weight": 1.5, "use_peft": True, "eval_strategy": "epoch"},
    "trl-reward": _TRL | {"center_rewards_coefficient": 0.01, "datasets": [{"path": "data.json"}]},
}  # fmt: skip
"""Files of other programs, by the program as `--tool` names it."""


def _make_configuration(name: str) -> Callable[[Path, Run], None]:
    reader = READERS.get(name.partition(",")[0])
    assert reader is not None
    rows = reader.opened.rows

    def make(directory: Path, _: Run) -> None:
        make_data(directory / "data.json", 40)
        own = {"own": {"file_name": "data.json", "columns": {"prompt": "instruction"}}}
        (directory / "dataset_info.json").write_text(json.dumps(own))
        sets = {"own": {"path": "data.json", "source": "local", "converter": "alpaca"}}
        (directory / "sets.yaml").write_text(json.dumps(sets))
        # Every key of the program has a place, so that it can be given a value.
        values = dict.fromkeys(rows) | _CONFIGURATIONS[name]
        (directory / "their.yaml").write_text(json.dumps(values))

    return make


def _configuration_target(name: str) -> Target:
    tool = name.partition(",")[0]
    accepted = {"dataset", "datasets", "optim_config", "packing", "pref_loss", "stage"}
    without = sorted((accepted | {"train_dataset"}) & _CONFIGURATIONS[name].keys())
    return Target(
        name=f"configuration: {name}",
        make=_make_configuration(name),
        files=("their.yaml", "their.yaml", "dataset_info.json", "sets.yaml"),
        command=("convert", "their.yaml", "--tool", tool,
                 *(word for key in without for word in ("--without", key))),
        share=6,
    )  # fmt: skip


TARGETS: tuple[Target, ...] = (
    *map(_configuration_target, _CONFIGURATIONS),
    Target(
        name="recipe",
        make=_make_recipe,
        files=("recipe.yaml",),
        command=("plan", "recipe.yaml", "--format", "json"),
        share=10,
    ),
    Target(
        name="data: instructions.json",
        make=_make_tables,
        files=("data.json",),
        command=("data", "base", *_DATA, "data.json"),
        share=5,
    ),
    *(
        Target(
            name=f"data: table{suffix}",
            make=_make_tables,
            files=(f"data{suffix}",),
            command=("data", "base", *_DATA, f"data{suffix}"),
            share=5,
        )
        for suffix in (".jsonl", ".csv", ".parquet")
    ),
    Target(
        name="data: conversations.jsonl",
        make=_make_chats,
        files=("chats.jsonl",),
        command=("data", "base", *_DATA, "chats.jsonl"),
        share=8,
    ),
    Target(
        name="images",
        make=_make_pictures,
        files=("pictures/*",),
        command=("data", "base", *_DATA, "chats.jsonl", "--data.val_split_fraction", "0.5"),
        share=8,
    ),
    Target(
        name="chat template",
        make=_make_chats,
        files=("base/chat_template.jinja",),
        command=("data", "base", *_DATA, "chats.jsonl"),
        share=12,
    ),
    Target(
        name="tokenizer",
        make=_make_chats,
        files=("base/tokenizer.json", "base/tokenizer_config.json"),
        command=("data", "base", *_DATA, "chats.jsonl"),
        share=10,
    ),
    Target(
        name="config.json",
        make=_make_model,
        files=("base/config.json", "base/generation_config.json"),
        command=("generate", "base", *_GENERATE),
        share=12,
    ),
    Target(
        name="safetensors",
        make=_make_model,
        files=("base/model.safetensors",),
        command=("generate", "base", *_GENERATE),
        share=8,
    ),
    Target(
        name="index",
        make=_make_split_model,
        files=("base/model.safetensors.index.json",),
        command=("generate", "base", *_GENERATE),
        result=_answer,
        share=8,
    ),
    Target(
        name="pytorch_model.bin",
        make=_make_bin_model,
        files=("base/pytorch_model.bin",),
        command=("generate", "base", *_GENERATE),
        share=8,
    ),
    Target(
        name="GGUF",
        make=_make_gguf_model,
        files=("model.gguf",),
        command=("generate", "model.gguf", *_GENERATE),
        share=10,
    ),
    Target(
        name="adapter",
        make=_make_adapter,
        files=("adapter/*.json", "adapter/*.safetensors"),
        command=("generate", "adapter", "--base", "base", *_GENERATE),
        share=8,
    ),
    *(_foreign_target(name) for name in _FOREIGN),
    Target(
        name="checkpoint",
        make=_make_run,
        files=("run/checkpoints/step-00000004/**/*",),
        command=(*_RESUME, "--out_dir", "run"),
        result=_losses,
        share=10,
    ),
    Target(
        name="checkpoint at a url",
        make=_make_run,
        files=("run/checkpoints/step-00000004/**/*",),
        command=(*_RESUME, "--out_dir", _URL),
        share=6,
        at_url=True,
    ),
    Target(
        name="claim on a url",
        make=_make_claimed_run,
        files=("run/.run/claim-*",),
        command=("watch", _URL, "--once"),
        share=3,
        at_url=True,
    ),
    Target(
        name="files of a run",
        make=_make_run,
        files=("run/*.*",),
        command=("compare", "run", "--format", "json"),
        share=6,
    ),
    Target(
        name="files of a run, watched",
        make=_make_run,
        files=("run/*.csv", "run/report.json"),
        command=("watch", "run", "--once"),
        share=4,
    ),
    Target(
        name="files of a run, continued",
        make=_make_run,
        files=("run/*.csv", "run/report.json"),
        command=(*_RESUME, "--out_dir", "run"),
        share=4,
    ),
)
