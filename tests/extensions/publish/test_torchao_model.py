"""Models that ftkit export writes as quantisation-aware training has rounded them."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import MAKERS, TOKENS, logits
from conversions import assert_equal, export, own_logits
from messages import message_of, says
from rank_jobs import NO_EVALUATION, Case, Outcome, chosen, make_run, repeated
from results import Ended
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ftkit.cli.app import run
from ftkit.evaluation.loading import load_result
from ftkit.evaluation.result import find_result
from ftkit.extensions.publish.torchao_model import TorchaoWeights
from ftkit.extensions.torchao.keys import Qat
from ftkit.models.pretrained.base_model import open_base, weights
from ftkit.models.pretrained.save import save_hf
from ftkit.recipe.recipe_sections import recipe_type

pytestmark = pytest.mark.slow
FORMS: dict[str, tuple[tuple[str, Any], ...]] = {
    "int4 and int8": (("qat.weights", "int4"), ("qat.activations", "int8")),
    "int4": (("qat.weights", "int4"), ("qat.group_size", 16)),
    "int3 by row": (("qat.weights", "int3"), ("qat.group_size", None)),
    "transformers": (("qat.weights", "int8"), ("model_implementation", "transformers")),
}
LOADED = """
import sys, torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
tokens = load_file(sys.argv[2])["tokens"]
blocks = model.base_model.layers.modules()
kinds = {type(m.weight).__name__ for m in blocks if isinstance(m, torch.nn.Linear)}
assert kinds == {"IntxUnpackedToInt8Tensor"}, kinds
with torch.no_grad():
    save_file({"logits": model(tokens).logits.float()}, sys.argv[3])
"""


def case_of(name: str, precision: str = "32-true") -> Case:
    steps = (*NO_EVALUATION, ("train.epochs", 1), ("train.max_steps", 2))
    return Case("single", "full", precision, (*steps, *FORMS[name]))


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[Case, Outcome]:
    selected = chosen(request, test_transformers_computes_what_training_did)
    names = sorted({"int4"} | {params["name"] for params in selected})
    cases = [case_of(name) for name in names] + [case_of("int4", "bf16-mixed")]
    found = make_run(tmp_path_factory)(1, cases)
    for outcome in found.values():
        outcome.complete()
    return found


def logits_in_transformers(directory: Path) -> Tensor:
    """Logits of a model, in a process that has none of ftkit's changes to its imports."""
    tokens, logits = directory.with_suffix(".in"), directory.with_suffix(".out")
    save_file({"tokens": TOKENS}, tokens)
    words = [sys.executable, "-c", LOADED, directory, tokens, logits]
    subprocess.run([str(word) for word in words], check=True)
    return load_file(logits)["logits"]


@pytest.mark.parametrize(
    "name", ["int4 and int8", "transformers", *repeated("int4", "int3 by row")]
)
def test_transformers_computes_what_training_did(
    trained: dict[Case, Outcome], name: str, tmp_path: Path
) -> None:
    out_dir = trained[case_of(name)].out_dir
    out = export(out_dir, "torchao", tmp_path / "out", "--max_shard_size", "0.05MiB")
    assert len(list(out.glob("*.safetensors"))) > 1
    assert not [*out.glob("*.bin"), *out.glob("*.pt*")]
    rounded, plain = own_logits(out_dir, rounds=True), own_logits(out_dir)
    assert_equal(logits_in_transformers(out), rounded, 2e-5)
    assert (rounded - plain).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["phi-3", *repeated("tied llama", "gpt-neox")])
def test_other_models_are_rounded_as_they_train(name: str, tmp_path: Path) -> None:
    """With one parameter for embedding and head, with biases, and with fused matrices."""
    directory, qat = MAKERS[name](tmp_path / "base"), Qat(weights="int4", group_size=16)
    base = open_base(str(directory))
    packing = TorchaoWeights(base, qat, torch.float32)
    save_hf(base, weights(base), tmp_path / "out", packing=packing)
    found = logits_in_transformers(tmp_path / "out")
    recipe = recipe_type("full")(checkpoint_dir=str(directory), qat=qat)  # type: ignore[call-arg]
    result = dataclasses.replace(find_result(str(directory)), recipe=recipe)
    cpu = torch.device("cpu")
    rounded = load_result(result, device=cpu, dtype=torch.float32, rounds=True).model
    assert_equal(found, logits(rounded), 2e-5)


def test_a_checkpoint_gives_what_its_result_gives(
    trained: dict[Case, Outcome], tmp_path: Path
) -> None:
    outcome = trained[case_of("int4")]
    one, other = (
        export(result, "torchao", tmp_path / str(number)) / "model.safetensors"
        for number, result in enumerate((outcome.out_dir, outcome.checkpoint))
    )
    assert one.read_bytes() == other.read_bytes()


def test_another_number_format_leaves_the_integers_as_they_were_trained(
    trained: dict[Case, Outcome], tmp_path: Path
) -> None:
    out_dir = trained[case_of("int4", "bf16-mixed")].out_dir
    whole = load_file(export(out_dir, "torchao", tmp_path / "32") / "model.safetensors")
    half_dir = export(out_dir, "torchao", tmp_path / "16", "--dtype", "bfloat16")
    half = load_file(half_dir / "model.safetensors")
    assert whole.keys() == half.keys()
    integers = [name for name, tensor in whole.items() if tensor.dtype == torch.int8]
    assert all(torch.equal(whole[name], half[name]) for name in integers)
    assert {t.dtype for t in half.values()} == {torch.int8, torch.bfloat16}
    # 4 bits in a byte each, and a scale and a zero point for 16 of them.
    settings = json.loads((half_dir / "config.json").read_text())
    assert settings["quantization_config"]["quant_method"] == "torchao"
    assert settings["quantization_config"]["modules_to_not_convert"] == ["lm_head"]
    with safe_open(half_dir / "model.safetensors", "pt") as file:
        described = json.loads(file.metadata()["model.layers.0.mlp.up_proj.weight"])
    assert described["_data"]["target_dtype"] == {"_type": "torch.dtype", "_data": "int4"}


def test_a_model_that_was_not_trained_for_it_is_refused(
    ended: dict[str, Ended], tmp_path: Path
) -> None:
    words = ["export", str(ended["full"].out_dir), "--format", "torchao", "--out", str(tmp_path)]
    assert says(message_of(run, words), "--format torchao ... without it ... --qat.weights int4")
