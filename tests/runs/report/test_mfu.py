"""Model FLOPs utilization: what is computed, by hand, and what GPUs can do, by data sheet."""

import dataclasses
import re
import time
from pathlib import Path

import pytest
import torch
from command import ROOT
from recorders import make_recorder, train

from ftkit.data.rendering import Rendered
from ftkit.data.samples.sample_set import SampleSet
from ftkit.models.flops import (
    ONLY_TRAINING,
    flops_per_token,
    further_passes,
    mean_flops_per_token,
)
from ftkit.models.language_model import LanguageModel, outline
from ftkit.models.pretrained.base_model import open_base
from ftkit.models.routing import Routing
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.recipe import Method
from ftkit.utils.accelerators.kinds import BEFORE_AMPERE_TFLOPS, TENSOR_CORE_TFLOPS, peak_flops

CARDS = ROOT / "docs" / "cards.md"

# --- What GPUs can do ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bf16", "fp16", "float32"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4, 989.4, 494.7),
        ("NVIDIA H100 PCIe", 756, 756, 378),
        ("NVIDIA H100 NVL", 835, 835, 417.5),
        ("NVIDIA H200", 989.4, 989.4, 494.7),
        ("NVIDIA GH200 480GB", 989.4, 989.4, 494.7),
        ("NVIDIA B200", 2250, 2250, 1125),
        ("NVIDIA A100-SXM4-80GB", 312, 312, 156),
        ("NVIDIA A100 80GB PCIe", 312, 312, 156),
        ("NVIDIA L4", 121, 121, 60.5),
        ("NVIDIA L40S", 362, 362, 181),
        ("NVIDIA A10G", 70, 70, 35),
        ("NVIDIA A10", 125, 125, 62.5),
        ("NVIDIA RTX A6000", 154.8, 154.8, 77.4),
        ("NVIDIA GeForce RTX 4090", 165.2, 165.2, 82.6),
        ("NVIDIA GeForce RTX 5090", 209.5, 209.5, 104.75),
        ("Tesla V100-SXM2-32GB", None, 125, 15.7),
        ("Tesla T4", None, 65, 8.1),
    ],
)
def test_the_peak_is_that_of_dense_products_added_up_in_float32(
    name: str, bf16: float | None, fp16: float, float32: float
) -> None:
    found = [peak_flops(name, kind) for kind in ("bf16", "16", "32")]
    expected = [bf16 and bf16 * 1e12, fp16 * 1e12, float32 * 1e12]
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA A10-24Q",
        "NVIDIA L400",
        "",
    ],
)
def test_a_gpu_that_is_not_in_the_table_has_no_peak(name: str) -> None:
    assert {peak_flops(name, kind) for kind in ("bf16", "16", "32")} == {None}


def test_the_peak_of_float32_is_that_of_what_computes_it() -> None:
    assert peak_flops("NVIDIA A100-SXM4-80GB", "32", tf32=False) is None
    assert peak_flops("Tesla T4", "32", tf32=False) == peak_flops("Tesla T4", "32")


@pytest.mark.parametrize(("name", "bf16"), [("v5e", 197), ("v5p", 459), ("v6e", 918), ("v7", None)])
def test_tpus_have_a_peak_in_bfloat16_alone(name: str, bf16: int | None) -> None:
    found = [peak_flops(f"TPU {name}", kind, tf32=False) for kind in ("bf16", "16", "32")]
    assert found == [bf16 and bf16 * 1e12, None, None]
    assert bf16 is None or f"`TPU {name}` {bf16}" in CARDS.read_text()


def test_the_document_shows_the_table() -> None:
    rows = re.findall(r"^\| (`.+?`) \| ([\d,.]+) \| ([\d,.]+) \|", CARDS.read_text(), re.MULTILINE)
    shown = {
        name: (float(half.replace(",", "")), float(single.replace(",", "")))
        for names, half, single in rows
        for name in re.findall(r"`(.+?)`", names)
    }
    ampere = {name: (half, half / 2) for name, half in TENSOR_CORE_TFLOPS.items()}
    assert shown == ampere | BEFORE_AMPERE_TFLOPS


# --- What is computed ---------------------------------------------------------------------------


def make_model(method: Method, **keys: str) -> LanguageModel:
    base = open_base("random:pythia-14m")
    pairs = [("checkpoint_dir", "random:pythia-14m"), *keys.items()]
    return outline(base, read_recipe([], pairs, method=method), torch.float32)


WIDTH, LAYERS, HEAD = 128, 6, 128 * 50304
BLOCKS = LAYERS * 12 * WIDTH**2
"""Of pythia-14m: weights of attention (4 x width^2) and MLP (8 x width^2)."""


@pytest.mark.extensions
def test_full_fine_tuning_takes_six_operations_for_each_weight_and_token() -> None:
    model = make_model("full")
    found = flops_per_token(model, attention_length=100, label_fraction=1)
    assert found == 6 * (BLOCKS + HEAD) + 6 * LAYERS * WIDTH * 100


@pytest.mark.extensions
def test_the_output_layer_counts_for_the_tokens_that_carry_loss() -> None:
    model = make_model("full")
    with_all = flops_per_token(model, attention_length=0, label_fraction=1)
    with_few = flops_per_token(model, attention_length=0, label_fraction=0.25)
    assert with_all - with_few == 0.75 * 6 * HEAD


@pytest.mark.extensions
def test_weights_that_are_not_trained_take_four() -> None:
    model = make_model("lora", lora_r="8", lora_query="true", lora_key="false", lora_value="false")
    adapters = LAYERS * 8 * (WIDTH + 3 * WIDTH)  # query, key and value are one layer
    found = flops_per_token(model, attention_length=0, label_fraction=1)
    assert found == 4 * (BLOCKS + HEAD) + 6 * adapters


ATTENTION, MLP = 4 * WIDTH**2, 8 * WIDTH**2
"""Weights of one layer."""


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("only", "operations"),
    [
        # Forward everywhere, and the gradient of the one weight.
        ("embed_out", 2 * BLOCKS + 4 * HEAD + 2 * LAYERS * WIDTH * 100),
        # The backward pass ends above the first trained matrix, and above its attention's scores.
        (
            "layers[.]5[.]",
            2 * 5 * (ATTENTION + MLP) + 6 * (ATTENTION + MLP) + 4 * HEAD
            + (2 * 5 + 6) * WIDTH * 100,
        ),
        (
            "layers[.]5[.].*dense_4h_to_h.weight",
            2 * 5 * (ATTENTION + MLP) + 2 * (ATTENTION + MLP // 2) + 4 * MLP // 2 + 4 * HEAD
            + (2 * 5 + 6) * WIDTH * 100,
        ),
        # All layers pass gradients on, and none has its own.
        ("embed_in", 4 * (BLOCKS + HEAD) + 6 * LAYERS * WIDTH * 100),
    ],
)  # fmt: skip
def test_below_what_is_trained_there_is_no_backward_pass(only: str, operations: int) -> None:
    model = make_model("full", **{"train.only": only})
    assert flops_per_token(model, attention_length=100, label_fraction=1) == operations


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("objective", "of_base", "of_adapter"), [("sft", 4, 6), ("dpo", 6, 6), ("kto", 10, 8)]
)
def test_forward_passes_of_a_reference_and_on_mismatched_sequences_count(
    objective: str, of_base: int, of_adapter: int
) -> None:
    keys = {"lora_r": "8", "lora_query": "true", "lora_key": "false", "lora_value": "false"}
    model = make_model("lora", **keys)
    pairs = [("checkpoint_dir", "random:pythia-14m"), ("objective", objective)]
    recipe = read_recipe([], pairs, method="lora")
    found = flops_per_token(
        model, attention_length=100, label_fraction=1, further=further_passes(recipe)
    )
    adapters, scores = LAYERS * 8 * (WIDTH + 3 * WIDTH), LAYERS * WIDTH * 100
    expected = of_base * (BLOCKS + HEAD) + of_adapter * adapters + (of_base + 2) * scores
    assert found == expected


@pytest.mark.extensions
def test_the_forward_pass_of_a_teacher_counts() -> None:
    """Two operations for each weight, trained or not, and a third of those of attention."""
    pairs = [("checkpoint_dir", "random:pythia-14m"), ("objective", "distill")]
    recipe = read_recipe([], pairs, method="full")
    model, lengths = make_model("full"), {"attention_length": 100, "label_fraction": 0.5}
    alone = flops_per_token(model, **lengths)
    found = flops_per_token(model, **lengths, further=further_passes(recipe, model))
    assert found == pytest.approx(alone * 4 / 3)
    assert further_passes(recipe, None) == ONLY_TRAINING


@pytest.mark.extensions
def test_attention_counts_the_square_of_every_length() -> None:
    """One sequence of 300 tokens takes more than three of 100, though the tokens are as many."""
    model = make_model("full")

    def of(*lengths: int, prompts: tuple[int, ...] = ()) -> float:
        samples = [
            Rendered([0] * (length + 1), ((prompt, length + 1),))
            for length, prompt in zip(lengths, prompts or [0] * len(lengths), strict=True)
        ]
        held = SampleSet.of(samples)
        return mean_flops_per_token(model, held.lengths, held.label_counts)

    per_length = 6 * LAYERS * WIDTH
    assert of(300) - of(100, 100, 100) == pytest.approx(per_length * 200)
    labels = (51 + 101) / 400
    expected = per_length * (100**2 + 300**2) / 400 + 6 * (BLOCKS + HEAD * labels)
    assert of(100, 300, prompts=(50, 200)) == pytest.approx(expected)


# --- Both ---------------------------------------------------------------------------------------


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("name", "mfu"),
    [("NVIDIA H200", 0.25), ("NVIDIA H200 MIG 1g.18gb", None)],
)
def test_the_report_has_the_share_of_the_peak_that_was_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mfu: float | None
) -> None:
    recorder = make_recorder(tmp_path)
    with recorder:
        train(recorder, range(1, 6))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
        recorder._device = torch.device("cuda")
        recorder._plan = dataclasses.replace(recorder._plan, precision="bf16-true")
        recorder.expect(lambda samples: samples / 100, 0.25 * 989.4e12 / 2000, Routing((), 0, None))
        time.sleep(0.01)  # the share of the CPU is over some time
    assert recorder.report.throughput is not None
    assert recorder.report.throughput.tokens_per_s == pytest.approx(2000)
    assert recorder.report.throughput.mfu == (mfu and pytest.approx(mfu))
