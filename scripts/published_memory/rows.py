"""The published figures, each with its source.

A row is listed before it is simulated, and stays whatever its error. Which rows of a source are
listed is a rule that stands beside them. What the source does not say, and the simulation needs,
is in `assumed`; it is not chosen by the error.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

GB = 10**9
GIB = 2**30

Measure = Literal["allocated", "reserved"]
"""What the source measured: peak bytes of tensors, or peak bytes that the allocator had taken from
the GPU, which is more by what it could not use."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published figure."""

    program: str
    """Name of the program in `programs.PROGRAMS`."""
    name: str
    """Name of the configuration in the source; unique among the rows of a program."""
    model: str
    sequences: int
    """Sequences in a micro-batch."""
    tokens: int
    """Tokens in each of them."""
    published_bytes: float
    measure: Measure = "allocated"
    source: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the program."""
    assumed: str = ""
    """What the source does not say."""


def rows() -> list[Row]:
    """All rows, in the order of the table."""
    return [
        *_litgpt_resource_table(),
        *_litgpt_config_hub(),
        *_fms_acceleration(),
        *_peft_method_comparison(),
        *_torchtune(),
        _TUTORIAL,
    ]


# LitGPT: "Finetuning with LoRA on 1 GPU", all rows with a figure.
def _litgpt_resource_table() -> Iterator[Row]:
    for model, tokens, sequences, quantize, gb in (
        ("phi-1_5", 1044, 1, None, 4.82),
        ("phi-1_5", 1044, 1, "nf4", 3.78),
        ("phi-1_5", 1044, 1, "nf4-dq", 3.72),
        ("phi-1_5", 1044, 2, None, 6.76),
        ("phi-1_5", 1044, 4, None, 10.68),
        ("stablelm-base-alpha-3b", 1034, 1, None, 9.69),
        ("stablelm-base-alpha-3b", 1034, 1, "nf4", 6.35),
        ("stablelm-base-alpha-3b", 1034, 1, "nf4-dq", 6.19),
        ("stablelm-base-alpha-3b", 1034, 2, None, 12.10),
        ("stablelm-base-alpha-3b", 1034, 4, None, 16.92),
        ("Llama-2-7b-hf", 1304, 1, None, 21.30),
        ("Llama-2-7b-hf", 1304, 1, "nf4", 14.14),
        ("Llama-2-7b-hf", 1304, 1, "nf4-dq", 13.84),
        ("Llama-2-7b-hf", 1304, 2, None, 29.07),
        ("Llama-2-13b-hf", 1304, 1, None, 38.12),
        ("Llama-2-13b-hf", 1304, 1, "nf4", 23.14),
        ("Llama-2-13b-hf", 1304, 1, "nf4-dq", 22.55),
    ):
        yield Row(
            program="litgpt-lora",
            name=f"{model}, {quantize or 'bf16'}, {sequences} sequences",
            model=model,
            sequences=sequences,
            tokens=tokens,
            published_bytes=gb * GB,
            source="github.com/Lightning-AI/litgpt: tutorials/resource-tables.md (A100)",
            settings={
                "rank": 8,
                "dropout": 0.05,
                "micro_batches": 128 // sequences,
                "quantize": quantize,
                "longest_is_first": True,
            },
        )


# LitGPT: all rows of one GPU with a figure. The settings are those of the YAML files.
def _litgpt_config_hub() -> Iterator[Row]:
    attention = {"rank": 32, "dropout": 0.05}
    every = {"layers": "all"}
    for name, model, sequences, step, settings, gb in (
        ("falcon-7b/lora", "falcon-7b", 1, 8, attention, 16.69),
        ("falcon-7b/qlora", "falcon-7b", 1, 8, attention, 9.44),
        ("gemma-2b/lora", "Gemma-2b", 2, 6, every | {"rank": 8, "dropout": 0.1}, 12.62),
        ("gemma-2b/qlora", "Gemma-2b", 2, 6, every | {"rank": 16, "dropout": 0.1}, 11.58),
        ("gemma-7b/qlora", "Gemma-7b", 1, 6, every | {"rank": 16, "dropout": 0.1}, 17.18),
        ("gemma2-2b/lora", "Gemma-2-2b", 2, 6, every | {"rank": 8, "dropout": 0.1}, 14.31),
        ("gemma2-2b/qlora", "Gemma-2-2b", 2, 6, every | {"rank": 16, "dropout": 0.1}, 13.52),
        ("gemma2-9b/qlora", "Gemma-2-9b", 1, 6, every | {"rank": 16, "dropout": 0.1}, 20.92),
        ("llama-2-7b/lora", "Llama-2-7b-hf", 2, 8, attention, 19.77),
        ("llama-2-7b/qlora", "Llama-2-7b-hf", 2, 8, attention, 13.68),
        ("llama-3-8b/lora", "Llama-3-8B", 1, 8, attention, 19.73),
        ("llama-3-8b/qlora", "Llama-3-8B", 2, 8, attention, 17.41),
        ("llama-3.1-8b/lora", "Llama-3.1-8B", 1, 8, attention, 19.73),
        ("llama-3.1-8b/qlora", "Llama-3.1-8B", 2, 8, attention, 17.41),
        ("llama-3.2-1b/full", "Llama-3.2-1B", 4, 64, None, 8.70),
        ("llama-3.2-1b/lora", "Llama-3.2-1B", 1, 8, attention, 4.49),
        ("llama-3.2-1b/qlora", "Llama-3.2-1B", 2, 8, attention, 5.53),
        ("llama-3.2-3b/full", "Llama-3.2-3B", 4, 64, None, 16.51),
        ("llama-3.2-3b/lora", "Llama-3.2-3B", 1, 8, attention, 9.67),
        ("llama-3.2-3b/qlora", "Llama-3.2-3B", 2, 8, attention, 10.30),
        ("mistral-7b-v0.2/lora", "Mistral-7B-v0.2", 2, 8, attention, 20.66),
        ("mistral-7b-v0.2/qlora", "Mistral-7B-v0.2", 2, 8, attention, 14.29),
        ("mistral-7b/lora", "Mistral-7B-v0.1", 2, 8, attention, 20.66),
        ("mistral-7b/qlora", "Mistral-7B-v0.1", 2, 8, attention, 14.29),
        ("phi-2/lora", "phi-2", 4, 8, every | {"rank": 8, "dropout": 0.05}, 13.98),
        ("phi-2/qlora", "phi-2", 4, 8, every | {"rank": 8, "dropout": 0.05}, 14.27),
        ("phi-3/full", "Phi-3-mini-4k-instruct", 4, 8, None, 17.01),
        (
            "phi-3/lora",
            "Phi-3-mini-4k-instruct",
            4,
            8,
            every | {"rank": 8, "dropout": 0.05},
            19.75,
        ),
        (
            "phi-3/qlora",
            "Phi-3-mini-4k-instruct",
            4,
            8,
            every | {"rank": 8, "dropout": 0.05},
            19.13,
        ),
        ("stablelm-base-alpha-3b/lora", "stablelm-base-alpha-3b", 1, 8, attention, 8.58),
        ("stablelm-base-alpha-3b/qlora", "stablelm-base-alpha-3b", 1, 8, attention, 5.24),
        ("tiny-llama/full", "tiny-llama-1.1b", 4, 32, None, 14.10),
        ("tiny-llama/lora", "tiny-llama-1.1b", 8, 8, every | {"rank": 32, "dropout": 0.05}, 13.50),
        ("tiny-llama/qlora", "tiny-llama-1.1b", 8, 8, every | {"rank": 32, "dropout": 0.05}, 16.24),
    ):
        given = dict(settings or {})
        if name.endswith("/qlora"):
            given["quantize"] = "nf4"
        yield Row(
            program="litgpt-full" if settings is None else "litgpt-lora",
            name=name,
            model=model,
            sequences=sequences,
            tokens=512,
            published_bytes=gb * GB,
            source="github.com/Lightning-AI/litgpt: config_hub/finetune/README.md (A10G)",
            settings=given | {"micro_batches": step // sequences},
            assumed="the longest batch has the 512 tokens at which the data is cut",
        )


# fms-acceleration: the rows of one GPU with a peak that torch reports, for models of transformers
# and its quantisation by bitsandbytes: no kernels of others, no GPTQ, and not the rows of
# gpt_bigcode. Packed to 4096 tokens, with activation checkpointing.
def _fms_acceleration() -> Iterator[Row]:
    for name, model, sequences, mode, peak in (
        ("full finetuning", "Mistral-7B-v0.1", 4, "full", 72434837504),
        ("full finetuning", "Mistral-7B-v0.1", 8, "full", 72435230720),
        ("standard-peft", "Mistral-7B-v0.1", 4, "lora", 26704571904),
        ("standard-peft", "Mistral-7B-v0.1", 8, "lora", 38742912512),
        ("baseline-peft-bnb", "Mistral-7B-v0.1", 4, "qlora-float32", 20669338112),
        ("baseline-peft-bnb", "Mistral-7B-v0.1", 8, "qlora-float32", 37002646016),
        ("baseline-peft-bnb", "Mixtral-8x7B-Instruct-v0.1", 4, "qlora-float32", 42794268160),
        ("baseline-peft-bnb", "Mixtral-8x7B-Instruct-v0.1", 8, "qlora-float32", 60545920512),
        ("accelerated-peft-bnb", "Mistral-7B-v0.1", 4, "qlora", 16373838336),
        ("accelerated-peft-bnb", "Mistral-7B-v0.1", 8, "qlora", 28412178944),
        ("accelerated-peft-bnb", "Mixtral-8x7B-Instruct-v0.1", 4, "qlora", 36731843072),
        ("accelerated-peft-bnb", "Mixtral-8x7B-Instruct-v0.1", 8, "qlora", 48770183680),
        ("accelerated-peft-bnb", "Llama-2-70b-hf", 4, "qlora", 68126381056),
    ):
        yield Row(
            program="transformers-trainer",
            name=f"{name}, {model}, {sequences} sequences",
            model=model,
            sequences=sequences,
            tokens=4096,
            published_bytes=peak,
            source="github.com/foundation-model-stack/fms-acceleration: "
            "scripts/benchmarks/refs/a100_80gb.csv, scenarios.yaml, defaults.yaml (A100 80 GB)",
            settings={"mode": mode},
            assumed="tokens are spread evenly over experts" if "Mixtral" in model else "",
        )


# PEFT: full fine-tuning and the methods that its library has had longest: LoRA's and IA3, tuned
# norms, VeRA. Llama-3.2-3B, bf16 with adapters in float32, no checkpointing, 4 sequences.
def _peft_method_comparison() -> Iterator[Row]:
    attention = ["q_proj", "v_proj"]
    norms = ["input_layernorm", "post_attention_layernorm", "norm"]
    for name, method, config, peak in (
        ("full-finetuning--llama-3.2-3B-lr_0.00001", None, {}, 38868615168),
        (
            "lora--llama-3.2-3B-rank32",
            "LoraConfig",
            {"r": 32, "target_modules": attention},
            22292725760,
        ),
        (
            "lora--llama-3.2-3B-rank64",
            "LoraConfig",
            {"r": 64, "target_modules": attention},
            22552772608,
        ),
        (
            "lora--llama-3.2-3B-rank64-rslora",
            "LoraConfig",
            {"r": 64, "use_rslora": True, "target_modules": attention},
            22561161216,
        ),
        (
            "lora--llama-3.2-3B-rank32-dora",
            "LoraConfig",
            {"r": 32, "use_dora": True, "target_modules": attention},
            24532484096,
        ),
        (
            "lora--llama-3.2-3B-rank10-target-mlp",
            "LoraConfig",
            {"r": 10, "target_modules": ["up_proj", "gate_proj", "down_proj"]},
            24698159104,
        ),
        (
            "ia3--llama-3.2-3B-default",
            "IA3Config",
            {
                "target_modules": ["k_proj", "v_proj", "down_proj"],
                "feedforward_modules": ["down_proj"],
            },
            23234347008,
        ),
        (
            "ln_tuning--llama-3.2-3B-default",
            "LNTuningConfig",
            {"target_modules": norms},
            21181235200,
        ),
        (
            "vera--llama-3.2-3B-default",
            "VeraConfig",
            {"r": 256, "target_modules": attention},
            21621637120,
        ),
    ):
        yield Row(
            program="transformers-peft",
            name=name,
            model="Llama-3.2-3B",
            sequences=4,
            tokens=768,
            published_bytes=peak,
            measure="reserved",
            source="github.com/huggingface/peft: method_comparison/MetaMathQA/results "
            "(accelerator_memory_max, L40S)",
            settings={"method": method, "config": config},
            assumed="the longest batch has the 768 tokens at which the data is cut",
        )


# torchtune: rows of one GPU whose settings are published, without those that torch.compile changes
# most: compiled, but without activation checkpointing.
def _torchtune() -> Iterator[Row]:
    compiled = "compiled, and simulated uncompiled but for the loss, whose chunks keep their logits"
    models = "github.com/pytorch/torchtune: README.md, Memory and training speed"
    flags = "github.com/pytorch/torchtune: README.md, Optimization flags (A100)"
    in_backward = {"optimizer": "AdamW", "in_backward": True}
    for name, model, tokens, gib, source, settings, assumed in (
        (
            "full, 4090",
            "Llama-3.1-8B",
            2048,
            18.9,
            models,
            {"optimizer": "PagedAdamW8bit", "in_backward": True},
            "optimizer, its steps in the backward pass and checkpointing are those of the recipe",
        ),
        (
            "LoRA, 4090",
            "Llama-3.1-8B",
            2048,
            16.2,
            models,
            {"rank": 8},
            "rank, layers and checkpointing are those of the recipe",
        ),
        (
            "QLoRA, 4090",
            "Llama-3.1-8B",
            2048,
            7.4,
            models,
            {"rank": 8, "quantize": True},
            "rank, layers and checkpointing are those of the recipe",
        ),
        (
            "+ packed dataset",
            "Llama-3.2-3B",
            4096,
            60.0,
            flags,
            {"optimizer": "AdamW", "checkpointing": False, "chunked": False},
            "",
        ),
        (
            "+ activation checkpointing",
            "Llama-3.2-3B",
            4096,
            24.9,
            flags,
            {"optimizer": "AdamW"},
            "",
        ),
        ("+ optimizer in backward", "Llama-3.2-3B", 4096, 23.1, flags, in_backward, ""),
        (
            "+ activation offloading",
            "Llama-3.2-3B",
            4096,
            21.8,
            flags,
            in_backward | {"offload": True},
            "",
        ),
        (
            "+ 8-bit AdamW",
            "Llama-3.2-3B",
            4096,
            17.6,
            flags,
            {"optimizer": "AdamW8bit", "in_backward": True, "offload": True},
            "",
        ),
        (
            "LoRA",
            "Llama-3.2-3B",
            4096,
            8.5,
            flags,
            {"rank": 64, "offload": True},
            "rank and layers are those of the recipe",
        ),
        (
            "QLoRA",
            "Llama-3.2-3B",
            4096,
            4.6,
            flags,
            {"rank": 64, "offload": True, "quantize": True},
            "rank and layers are those of the recipe",
        ),
    ):
        is_compiled = settings.get("chunked", True)
        yield Row(
            program="torchtune",
            name=name,
            model=model,
            sequences=2,
            tokens=tokens,
            published_bytes=gib * GIB,
            source=source,
            settings=settings,
            assumed="; ".join(part for part in (assumed, compiled if is_compiled else "") if part),
        )


_TUTORIAL = Row(
    program="lightning",
    name="open_llama_7b",
    model="open_llama_7b",
    sequences=4,
    tokens=512,
    published_bytes=62.0 * GIB,
    source="Chameleon tutorial on large-model training (A100 80 GB)",
    assumed="all batches have 512 tokens; those of the tutorial are shorter",
)
