"""Files of DeepSpeed: in bfloat16, of older versions, and with GPT-NeoX's names."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_checkpoints import BASE, KEPT, SHALLOW, recipe, stored_of
from messages import key_words
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from ftkit.checkpoint.metadata import read_metadata
from ftkit.checkpoint.store import Store
from ftkit.errors import UserError
from ftkit.extensions.foreign_checkpoints.command import import_run
from ftkit.extensions.foreign_checkpoints.commands import ImportOptions
from ftkit.extensions.foreign_checkpoints.deepspeed import NeoxNames
from ftkit.extensions.foreign_checkpoints.state import TrainedModel
from ftkit.extensions.foreign_checkpoints.unpickling import (
    IN_DEEPSPEED,
    Inert,
    held,
    load_torch_file,
)
from ftkit.extensions.litgpt.architecture import LitgptArchitecture
from ftkit.models.pretrained.base_model import open_base, storage_of

KINDS = ("parameter", "exp_avg", "exp_avg_sq")


def imported(source: Path, out: Path, base: Path = BASE) -> dict[str, dict[str, Tensor]]:
    """Tensors of an imported checkpoint of three steps, by kind and ftkit's names."""
    out.mkdir()
    config = recipe(out, base)
    import_run(ImportOptions(source=source, out=out / "run", config=(str(config),)))
    checkpoint = Store(out / "run/checkpoints").path(3)
    assert read_metadata(checkpoint).optimizer_scalars == {"step": 3.0}
    return {kind: stored_of(checkpoint, kind) for kind in KINDS}


def rewritten(source: Path, copy: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy with something else in the files of all ranks, and without objects of classes."""
    shutil.copytree(source, copy)
    for file in copy.rglob("*.pt"):
        content = _plain(load_torch_file(file, IN_DEEPSPEED))
        change(content)
        file.unlink()  # which is mapped into memory
        torch.save(content, file)
    return copy


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(of_key) for key, of_key in value.items()}
    if type(value) in (list, tuple):  # not torch.Size
        return [_plain(item) for item in value]
    return None if isinstance(value, Inert) else value


def without_places(content: dict[str, Any]) -> None:
    """As DeepSpeed wrote before its files said where each parameter lies."""
    content.get("optimizer_state_dict", {}).pop("param_slice_mappings", None)


def test_masters_and_moments_of_a_run_in_bfloat16_are_those_that_the_engine_held(
    tmp_path: Path,
) -> None:
    found = imported(KEPT / "deepspeed-bf16", tmp_path / "out", SHALLOW)
    theirs = json.loads((KEPT / "deepspeed-bf16/next.json").read_text())["weights"]
    architecture = open_base(str(SHALLOW), None).architecture
    assert isinstance(architecture, LitgptArchitecture)
    compared = 0
    for kind, tensors in found.items():
        for name, tensor in storage_of(architecture, "hf").written(tensors.items()):
            noted = theirs[f"{kind}/{name}"]
            flat = tensor.flatten()
            places = [i * (flat.numel() - 1) // (len(noted) - 1) for i in range(len(noted))]
            assert flat.dtype == torch.float32
            assert flat[places].tolist() == pytest.approx(noted, rel=1e-6, abs=0)
            compared += 1
    assert compared == len(theirs)


@pytest.mark.parametrize("case", ["deepspeed-zero1", "trainer-deepspeed/checkpoint-3"])
def test_older_files_that_do_not_say_where_a_parameter_lies_are_read_by_the_shapes(
    tmp_path: Path, case: str
) -> None:
    older = rewritten(KEPT / case, tmp_path / "older", without_places)
    new, old = imported(KEPT / case, tmp_path / "new"), imported(older, tmp_path / "old")
    for kind in KINDS:
        assert new[kind].keys() == old[kind].keys()
        assert all(torch.equal(new[kind][name], old[kind][name]) for name in new[kind])


def test_a_model_that_gpt_neox_made_sequential_is_read_as_the_one_of_its_pipeline(
    tmp_path: Path,
) -> None:
    def made_sequential(content: dict[str, Any]) -> None:
        without_places(content)
        shapes = content.get("param_shapes") or []
        renamed = [{f"sequential.{name}": size for name, size in of.items()} for of in shapes]
        content["param_shapes"] = renamed

    source = KEPT / "gpt-neox"
    sequential = rewritten(source, tmp_path / "sequential", made_sequential)
    pipeline, found = imported(source, tmp_path / "a"), imported(sequential, tmp_path / "b")
    for kind in KINDS:
        assert all(torch.equal(pipeline[kind][name], found[kind][name]) for name in pipeline[kind])


@pytest.mark.parametrize("old", [False, True])
def test_every_parameter_of_a_gpt_neox_has_its_name_in_transformers(
    tmp_path: Path, old: bool
) -> None:
    config = GPTNeoXConfig(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(BASE / name, tmp_path / name)
    mlp = ("dense_h_to_4h", "dense_4h_to_h") if old else ("linear1", "linear2")
    block = ("input_layernorm", "post_attention_layernorm", "attention.query_key_value")
    layers = (*block, "attention.dense", *(f"mlp.{layer}" for layer in mlp))
    names = ["0.word_embeddings.weight", "5.norm.weight", "5.norm.bias", "6.final_linear.weight"]
    names += [
        f"{place}.{layer}.{kind}"
        for place in (2, 3)
        for layer in layers
        for kind in ("weight", "bias")
    ]
    base = open_base(str(tmp_path), None)
    of_neox = NeoxNames(base)
    found = of_neox.held({name: held(torch.zeros(1)) for name in names})
    wanted = load_file(tmp_path / "model.safetensors").keys()
    assert found.keys() == wanted
    assert {one.name for one in TrainedModel(base).parameters} == wanted


def test_a_checkpoint_of_gpt_neox_with_other_layers_is_refused_by_the_name_of_one(
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError, match=key_words("base-shallow (1 layers)")):
        imported(KEPT / "gpt-neox", tmp_path / "out", SHALLOW)


def test_files_without_the_shapes_of_parameters_are_refused_with_what_to_do(
    tmp_path: Path,
) -> None:
    def much_older(content: dict[str, Any]) -> None:
        content.pop("param_shapes", None)

    source = rewritten(KEPT / "deepspeed-zero1", tmp_path / "older", much_older)
    with pytest.raises(UserError, match=key_words("param_shapes ... newer DeepSpeed")):
        imported(source, tmp_path / "out")
