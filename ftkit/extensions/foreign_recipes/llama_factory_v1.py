"""YAML files of LLaMA-Factory's newer format (`model`, `train_dataset`), as version 0.9.5 reads it.

Its trainer is not transformers': constant rates, torch's AdamW with its defaults, and a step's loss
divided by the label tokens of the step.
"""

from pathlib import Path
from typing import Any

from ftkit.errors import UserError
from ftkit.extensions.foreign_recipes import trainer
from ftkit.extensions.foreign_recipes.trainer import COST, LAYOUT, ON_RESUME, REMOTE_CODE, SHOWN
from ftkit.extensions.foreign_recipes.translation import (
    OFF,
    Program,
    Reading,
    idle,
    missing,
    part,
    rows_by_key,
    same,
)
from ftkit.extensions.foreign_recipes.value_types import Accepts, typed
from ftkit.utils.yaml_files import load_yaml

_LORA: dict[str, Any] = {
    "r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "target_modules": ["all"],
    "use_rslora": False,
    "use_dora": False,
    "modules_to_save": None,
    "adapter_name_or_path": None,
}
"""Keys of peft_config that train, and what is done without them."""
_FREEZE: dict[str, Any] = {
    "freeze_trainable_layers": 2,
    "freeze_trainable_modules": ["all"],
    "freeze_extra_modules": None,
    "cast_trainable_params_to_fp32": True,
}
"""The same with name: freeze."""
_EXPORT = {"name", "export_dir", "export_size", "export_hub_model_id", "infer_dtype",
           "export_legacy_format"}  # fmt: skip
_QUANT: dict[str, Any] = {
    "quantization_bit": 4,
    "double_quantization": True,
    "quantization_type": "nf4",
    "compute_dtype": "float16",
}
_MUON: dict[str, Any] = {
    "lr": 1e-3,
    "wd": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "ns_steps": 5,
    "adamw_betas": [0.9, 0.95],
    "adamw_eps": 1e-8,
}
"""Keys of optim_config with name: muon, and what is done without them."""
_PEFT: Accepts = {
    "name": "text", "r": "whole>=1", "lora_alpha": "number>0", "lora_dropout": "number>=0<1",
    "target_modules": "names", "use_rslora": "flag", "use_dora": "flag",
    "modules_to_save": "names", "adapter_name_or_path": "text|texts",
    "freeze_trainable_layers": "whole", "freeze_trainable_modules": "names",
    "freeze_extra_modules": "names",
}  # fmt: skip
_QUANT_CONFIG: Accepts = {
    "name": "text", "quantization_bit": "whole>=0", "double_quantization": "flag",
    "quantization_type": "fp4|nf4", "compute_dtype": "text",
}  # fmt: skip
_OPTIM: Accepts = {
    "name": "text", "lr": "number>=0", "wd": "number>=0", "momentum": "number>=0<1",
    "nesterov": "flag", "ns_steps": "whole>=1", "adamw_betas": ["number>=0<1"],
    "adamw_eps": "number>=0",
}  # fmt: skip
_DATA: dict[str, Accepts] = {
    "path": "text", "source": "text", "split": "text", "converter": "text", "size": "whole>=0",
    "weight": "number>=0", "streaming": "any",
}  # fmt: skip
"""Keys of a data set that are read."""

ROWS = rows_by_key(
    same("model", "text", "checkpoint_dir", "Qwen/Qwen3-4B-Instruct-2507"),
    part("train_dataset", "text", ("data.path", "data.sources", "objective"), None,
         "a data set, or a file that lists some; pairs are trained by dpo"),
    same("output_dir", "text", "out_dir", "outputs/llama-factory",
         "its own name has random characters"),
    part("custom_chat_template", "text", "data.chat_template", None, "without it the model's own"),
    part("peft_config", _PEFT, ("lora_r", "lora_alpha", "lora_dropout", "lora_targets", "adapter",
                         "train.only"), None, "name: lora or freeze; without it all is trained"),
    part("quant_config", _QUANT_CONFIG, "quantize", None, "name: bnb or auto"),
    part("micro_batch_size", "whole>=1", ("train.global_batch_size", "train.micro_batch_size"), 1,
         "without global_batch_size a step takes this x devices"),
    part("global_batch_size", "whole>=1", "train.global_batch_size", None, "of all devices"),
    same("cutoff_len", "whole>=1", "train.max_seq_length", 2048),
    part("batching_strategy", "text", ("train.global_batch_size", "train.global_batch_tokens"),
         "normal",
         "dynamic_*: a step takes samples up to micro_batch_size x cutoff_len tokens"),
    part("learning_rate", "number>=0", "optimizer.lr", 1e-4, "constant, without warm-up"),
    part("optim_config", _OPTIM, "optimizer", None,
         "name: muon; without it AdamW, weight decay 0.01 of everything"),
    part("num_train_epochs", "number>0", "train.epochs", 3, "whole numbers"),
    part("max_steps", "whole", "train.max_steps", None, "in the place of epochs"),
    same("max_grad_norm", "number>=0", "train.max_norm", 1.0),
    part("bf16", "flag", "precision", True, "bf16-mixed"),
    part("enable_activation_checkpointing", "flag", "memory.activation_checkpointing", True, ""),
    same("seed", "whole>=0", "seed", 42),
    part("save_steps", "whole>=0", "train.save_interval", None, ""),
    part("save_epochs", "number>=0", "train.save_interval_epochs", None, ""),
    same("save_total_limit", "whole", "checkpoint.keep_last", None, "ftkit keeps 3 by default",
         value=lambda x: max(1, x)),
    part("pref_loss", "text", "objective.loss", "sigmoid", "sigmoid, orpo, simpo"),
    part("pref_beta", "number>0", "objective.beta", 0.1, ""),
    part("pref_ftx", "number>=0", "objective.sft_weight", 0.0, ""),
    part("simpo_gamma", "number>=0", "objective.margin", 0.5, ""),
    part("dpo_label_smoothing", "number>=0<1", "objective.label_noise", 0.0, "loss: conservative"),
    *idle("LLaMA-Factory does not read it either", "eval_dataset"),
    *idle(REMOTE_CODE, "trust_remote_code"),
    *idle(ON_RESUME, "resume_from_checkpoint"),
    *idle(COST, "flash_attn", "kernel_config", "init_config", "batching_workers",
          "full_determinism"),
    *idle(LAYOUT, "dist_config", "dp_size", "cp_mode", "mp_replicate_size", "mp_shard_size",
          "dist_timeout"),
    part("cp_size", "whole>=1", "train.global_batch_size", 1,
         "so many devices train on the same samples"),
    *idle("ftkit's checkpoints continue on any devices", "save_ckpt_as_hf"),
    *idle(SHOWN, "logging_steps"),
    *idle("answers, not training", "sample_backend", "max_new_tokens"),
    *missing("classification (see --objective classify), and models of other kinds", "model_class",
             harmless=("llm",)),
    *missing("settings of the schedule", "lr_scheduler_config"),
    *missing("log-probabilities that weigh the length", "ld_alpha"),
)  # fmt: skip


def _finish(r: Reading) -> None:
    is_lora = _adapter(r)
    steps, epochs = r["max_steps"], r["num_train_epochs"]
    if steps is not None and steps > 0:
        r.set(train__max_steps=steps)
        r.empty("train.epochs")
    elif epochs != int(epochs):
        r.refuse("num_train_epochs", "a part of an epoch")
    else:
        r.set(train__epochs=int(epochs))
    _batch(r)
    _optimizer(r, is_lora=is_lora)
    r.set(train__lr_schedule="constant", train__lr_ends="around", train__lr_warmup_steps=0)
    trainer.checkpointing(r, r["enable_activation_checkpointing"])
    # Without dist_config nothing casts: full fine-tuning computes in float32, an adapter in the
    # dtype of its model.
    is_half = r["bf16"] if r.values.get("dist_config") else is_lora
    r.set(precision="bf16-mixed" if is_half else "32-true")
    if epochs := r["save_epochs"]:
        r.recipe["train.save_interval_epochs"] = float(epochs)
    else:
        r.recipe["train.save_interval"] = r["save_steps"]
    r.set(eval__interval=0, eval__final_validation=False)
    r.empty("checkpoint.save_every")
    pairs = _data(r)
    if pairs:
        _preference(r)


def _optimizer(r: Reading, *, is_lora: bool) -> None:
    # The defaults of torch's AdamW, of which the file can set the rate alone.
    arguments = {"lr": r["learning_rate"], "weight_decay": 0.01, "betas": [0.9, 0.999],
                 "eps": 1e-8}  # fmt: skip
    r.recipe["optimizer"] = {"class_path": "torch.optim.AdamW", "init_args": arguments}
    r.set(train__decay_norms_and_biases=True)
    config = dict(r["optim_config"] or {})
    if not config:
        return
    if (name := config.pop("name", None)) != "muon":
        r.refuse("optim_config", f"the optimizer {name}")
        return
    given = _MUON | config
    for key in given.keys() - _MUON.keys():
        r.refuse(f"optim_config.{key}", "a key that ftkit does not know of LLaMA-Factory")
    if given["adamw_eps"] != _MUON["adamw_eps"]:
        r.refuse("optim_config.adamw_eps", "Muon with another eps of AdamW")
    if "lr" not in config:
        r.tell("optim_config: without lr, LLaMA-Factory trains Muon at 1e-3, not learning_rate")
    trainer.muon(
        r, "optim_config", is_adapter=is_lora, rate=given["lr"], decay=given["wd"],
        momentum=given["momentum"], nesterov=given["nesterov"], ns_steps=given["ns_steps"],
        betas=given["adamw_betas"],
    )  # fmt: skip


def _adapter(r: Reading) -> bool:
    """Set the adapter; returns whether there is one."""
    config = r["peft_config"]
    if not config:
        if r["quant_config"]:
            r.refuse("quant_config", "a quantised model that is trained whole")
        return False
    if config.get("name") == "freeze":
        given = _FREEZE | config
        for key in given.keys() - _FREEZE.keys() - {"name"}:
            r.refuse(f"peft_config.{key}", "a key that ftkit does not know of LLaMA-Factory")
        layers, modules = given["freeze_trainable_layers"], given["freeze_trainable_modules"]
        trainer.train_layers(r, "peft_config", layers, modules, given["freeze_extra_modules"])
        if r["quant_config"]:
            r.refuse("quant_config", "a quantised model that is trained in part")
        return False
    if config.get("name") != "lora":
        r.refuse("peft_config", config.get("name", "no name").upper())
    for key in config.keys() - _LORA.keys() - _EXPORT:
        r.refuse(f"peft_config.{key}", "a key that ftkit does not know of LLaMA-Factory")
    given = _LORA | config
    r.set(lora_r=given["r"], lora_alpha=given["lora_alpha"])
    r.set(lora_dropout=given["lora_dropout"])
    names = given["target_modules"]
    trainer.adapt(r, "all-linear" if names == ["all"] else names)
    r.set(lora_variant="dora" if given["use_dora"] else "rslora" if given["use_rslora"] else "lora")
    r.set(lora_modules_to_save=given["modules_to_save"])
    adapters = given["adapter_name_or_path"]
    r.set(adapter=adapters[0] if isinstance(adapters, list) and adapters else adapters or None)
    if r["quant_config"]:
        quant = _QUANT | r["quant_config"]
        double = "-dq" if quant["double_quantization"] else ""
        is_8_bit = quant["quantization_bit"] == 8
        r.set(quantize="bnb.int8" if is_8_bit else f"bnb.{quant['quantization_type']}{double}")
        if quant["compute_dtype"] != "bfloat16" and not is_8_bit:
            r.tell(
                f"quant_config: LLaMA-Factory computes 4-bit layers in {quant['compute_dtype']}, "
                "ftkit in the precision of the recipe"
            )
    return True


def _batch(r: Reading) -> None:
    micro = r["micro_batch_size"]
    ranks = max(1, r.ranks // r["cp_size"])
    total = r["global_batch_size"]
    if total is not None and total % (micro * ranks):
        r.refuse("global_batch_size", f"no whole number of {micro} samples on {ranks} devices")
    size = micro * ranks if total is None else total
    r.set(
        train__global_batch_size=size,
        train__micro_batch_size=micro,
        train__step_ends_with_epoch=True,
    )
    if size > 1:
        r.tell(
            "samples at the end of an epoch that do not fill a step: LLaMA-Factory leaves them "
            "out, in ftkit they are a smaller step"
        )
    strategy = r["batching_strategy"]
    if strategy.startswith("dynamic"):
        length = r["cutoff_len"]
        r.set(train__global_batch_tokens=size * length, train__micro_batch_tokens=micro * length)
        r.empty("train.micro_batch_size")
        if strategy == "dynamic_batching":
            r.tell(
                "batching_strategy: LLaMA-Factory counts padding too, so its steps have fewer "
                "samples than these"
            )
    elif strategy not in ("normal", "padding_free"):
        r.refuse("batching_strategy", f"the batches {strategy}")


def _data(r: Reading) -> bool:
    """Set the data; returns whether they are pairs."""
    r.recipe["data"] = {"class_path": "JSON", "init_args": {}}
    name: str | None = r["train_dataset"]
    infos: dict[str, Any] = {"default": {"path": name, "source": "local"}}
    if name is not None and name.endswith((".yaml", ".yml")):
        try:
            content = load_yaml(Path(name))
        except (OSError, UserError):
            r.refuse("train_dataset", f"{name} cannot be read here")
            return False
        infos = typed(content, {"*": _DATA}, name)
    entries = list(infos.values())
    sources = [_source(r, entry) for entry in entries]
    are_pairs = {entry.get("converter") == "pair" for entry in entries}
    if len(are_pairs) > 1:
        r.refuse("train_dataset", "conversations and pairs together")
    pairs = are_pairs == {True}
    options: dict[str, Any] = {
        "chat_template": r["custom_chat_template"] or "tokenizer",
        "overlong": "truncate",
        "val_split_fraction": 0.0,
    }
    if not pairs:
        options["train_on"] = "last"
    model = r["model"].lower()
    if r.has("custom_chat_template") or "qwen3" not in model or "2507" in model:
        r.tell(
            "answers without thinking: LLaMA-Factory renders them with enable_thinking false; if "
            "the template reads it, add --data.chat_template_kwargs.enable_thinking false"
        )
    else:  # ftkit refuses a value that the template does not read
        options["chat_template_kwargs"] = {"enable_thinking": False}
    alone = len(sources) == 1 and not sources[0].keys() & {"samples", "weight"}
    options |= sources[0] if alone else {"sources": sources}
    r.recipe["data"]["init_args"] = options
    r.tell("answers: LLaMA-Factory also trains what the template has behind their end, such as a "
           "line end; ftkit ends with the answer")  # fmt: skip
    if pairs:
        r.tell("cutoff_len: LLaMA-Factory cuts both answers of a pair together, ftkit each")
    return pairs


def _source(r: Reading, entry: dict[str, Any]) -> dict[str, Any]:
    for key in entry.keys() - _DATA:
        r.refuse("train_dataset", f"the setting {key} of a data set")
    source: dict[str, Any] = {"path": trainer.local_data(entry.get("path"))}
    split = entry.get("split") or "train"
    if split != "train":
        source["split"] = split
    converter = entry.get("converter")
    if converter == "alpaca":
        r.tell(
            "train_dataset: the input of an instruction stands below it behind an empty line, in "
            "LLaMA-Factory right behind it"
        )
    elif converter == "sharegpt":
        r.refuse("train_dataset", "one sample for each turn of a conversation")
    elif converter != "pair":
        why = "records of LLaMA-Factory's newer format"
        r.refuse("train_dataset", "images or audio in training" if _has_media(source) else why)
    for theirs, ours in (("size", "samples"), ("weight", "weight")):
        if entry.get(theirs):
            source[ours] = entry[theirs]
            r.tell(
                f"{theirs} of a data set: LLaMA-Factory draws the records once, with repetitions; "
                "in ftkit no record comes again before all others of its source have come"
            )
    # Where its records come from does not change them: `streaming` has no effect.
    return source


def _has_media(source: dict[str, Any]) -> bool:
    """Whether the first record of a file has an image, a video or a sound in a message."""
    file = trainer.existing(source["path"])
    if file is None or not file.is_file():
        return False
    with file.open(encoding="utf-8", errors="replace") as stream:
        first = stream.readline()
    return any(f'"{kind}_url"' in first for kind in ("image", "video", "audio"))


def _preference(r: Reading) -> None:
    loss, beta = r["pref_loss"], r["pref_beta"]
    noise, sft = r["dpo_label_smoothing"], r["pref_ftx"]
    options: dict[str, Any]
    if loss == "orpo":
        name, options = "orpo", {"weight": beta}
    elif loss == "simpo":
        name, options = "simpo", {"beta": beta, "margin": r["simpo_gamma"] / beta}
    else:
        kind = "conservative" if noise else "sigmoid"
        name, options = "dpo", {"loss": kind, "beta": beta, "label_noise": noise, "sft_weight": sft}
    if name != "dpo" and sft not in OFF:
        r.refuse("pref_ftx", "a further loss beside that of pairs")
    r.recipe["objective"] = {"class_path": name, "init_args": options}
    if r.recipe["train.global_batch_size"] > 1:
        r.tell(
            "pairs: LLaMA-Factory weighs micro-batches of a step by their tokens, ftkit every pair "
            "equally"
        )


LLAMA_FACTORY_V1 = Program(
    name="LLaMA-Factory (newer format)",
    rows=ROWS,
    finish=_finish,
)
"""`llamafactory-cli sft` and `dpo` of its newer code."""
