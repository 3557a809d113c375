"""Paths of results and the weights that they stand for, which are those that a run has learned."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from litgpt.utils import save_config
from messages import key_words, message_of, says
from results import CASES, Ended
from safetensors.torch import load_file, save_file
from tiny import make_llama

from ftkit.errors import UserError
from ftkit.evaluation.loading import Loaded, load_result, plan_use
from ftkit.evaluation.result import Result, base_result, find_result
from ftkit.models.pretrained.base_model import open_base, weights
from ftkit.recipe.devices import Devices
from ftkit.recipe.recipe import Quantization

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def loaded(name: object, **settings: object) -> Loaded:
    settings = {"device": torch.device("cpu"), "dtype": torch.float32} | settings
    result = name if isinstance(name, Result) else find_result(str(name))
    return load_result(result, **settings)


def logits(of: Loaded) -> torch.Tensor:
    tokens = torch.arange(2, 40)[None]
    with torch.no_grad():
        return of.model(tokens, torch.arange(tokens.numel()))


def mistake(name: object) -> str:
    return message_of(loaded, name)


def copy_of(directory: Path, to: Path) -> Path:
    return Path(shutil.copytree(directory, to))


def describe(result: Result) -> tuple[str, Path]:
    return result.kind, result.directory


# --- What a path stands for -----------------------------------------------------------------------


@pytest.mark.extensions
@pytest.mark.parametrize("name", ["lora", "qlora"])
def test_a_lora_run_is_its_adapter(ended: dict[str, Ended], name: str) -> None:
    run = ended[name]
    for path in (run.out_dir, run.final):
        result = find_result(str(path))
        assert describe(result) == ("adapter", run.final)
        assert result.method == "lora"
        assert result.base == result.recipe.checkpoint_dir
        assert result.fingerprint and result.precision == "32-true"
    assert result.quantize == (None if name == "lora" else "bnb.nf4-dq")


@pytest.mark.extensions
def test_a_full_run_is_its_model(ended: dict[str, Ended]) -> None:
    run = ended["full"]
    for path in (run.out_dir, run.final):
        result = find_result(str(path))
        assert describe(result) == ("model", run.final)
        assert result.method == "full" and result.recipe is not None


@pytest.mark.extensions
@pytest.mark.parametrize("name", ["lora", "full"])
def test_a_checkpoint_is_that_checkpoint_and_all_of_them_are_the_newest(
    ended: dict[str, Ended], name: str
) -> None:
    run = ended[name]
    expected = {
        "lora": ("adapter", run.checkpoint / "adapter"),
        "full": ("checkpoint", run.checkpoint),
    }
    for path in (run.checkpoint, run.out_dir / "checkpoints"):
        result = find_result(str(path))
        assert describe(result) == expected[name]
        assert result.metadata.step == run.report.progress.steps
        assert result.recipe is not None


@pytest.mark.extensions
def test_a_run_without_a_result_is_its_newest_checkpoint(
    ended: dict[str, Ended], tmp_path: Path
) -> None:
    run = ended["full"]
    copy = copy_of(run.out_dir, tmp_path / "run")
    shutil.rmtree(copy / "final")
    (copy / "final").mkdir()  # as a crash may leave it
    assert describe(find_result(str(copy))) == (
        "checkpoint",
        copy / "checkpoints" / run.checkpoint.name,
    )


@pytest.mark.extensions
def test_the_present_directory_can_be_meant(
    ended: dict[str, Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ended["lora"].out_dir)
    assert describe(find_result(".")) == ("adapter", ended["lora"].final)


@pytest.mark.extensions
def test_an_adapter_alone_names_its_base(ended: dict[str, Ended], tmp_path: Path) -> None:
    run = ended["lora"]
    result = find_result(str(copy_of(run.final, tmp_path / "adapter")))
    assert (result.kind, result.recipe, result.metadata) == ("adapter", None, None)
    assert result.base == find_result(str(run.out_dir)).base


def test_models_are_models(tiny_base: Path) -> None:
    assert describe(find_result(str(tiny_base))) == ("model", tiny_base)
    embedded = find_result("embedded:quickstart")
    assert (embedded.kind, embedded.recipe) == ("model", None)
    assert (embedded.directory / "config.json").is_file()


@pytest.mark.extensions
def test_the_base_of_a_result_answers_as_its_run_would(ended: dict[str, Ended]) -> None:
    result = find_result(str(ended["lora"].out_dir))
    base = base_result(result)
    assert (base.kind, str(base.directory)) == ("model", result.base)
    assert base.recipe == result.recipe and base.precision == result.precision


# --- What cannot be used --------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["nowhere/at/all", "out/lora", "recipe.yaml"])
def test_nothing_there_is_a_mistake_without_a_look_at_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    Path("nowhere").mkdir()
    Path("recipe.yaml").touch()
    what = "is a file" if path == "recipe.yaml" else "does not exist"
    assert says(mistake(path), f"{path} {what} ... out_dir")


def test_a_directory_of_something_else_is_a_mistake(tmp_path: Path) -> None:
    assert says(mistake(tmp_path), "no run and no checkpoint")


@pytest.mark.extensions
def test_a_run_that_has_saved_nothing_yet_is_a_mistake(
    ended: dict[str, Ended], tmp_path: Path
) -> None:
    shutil.copy(ended["lora"].out_dir / "recipe.yaml", tmp_path)
    assert says(mistake(tmp_path), "neither a result nor a checkpoint")


def test_a_model_that_is_not_complete_is_a_mistake(tiny_base: Path, tmp_path: Path) -> None:
    copy = copy_of(tiny_base, tmp_path / "model")
    (copy / "model.safetensors").unlink()
    assert says(mistake(copy), "weights (model.safetensors) is missing")


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("lora", "adapter/adapter_model.safetensors"),
        ("full", "base/config.json"),
        ("full", "shard-00000-of-00001.safetensors"),
    ],
)
@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_a_damaged_checkpoint_is_refused_and_another_one_offered(
    ended: dict[str, Ended], tmp_path: Path, name: str, file: str, damage: str
) -> None:
    out_dir = copy_of(ended[name].out_dir, tmp_path / "run")
    newest = out_dir / "checkpoints" / ended[name].checkpoint.name
    if damage == "gone":
        (newest / file).unlink()
    else:
        content = bytearray((newest / file).read_bytes())
        content[9] ^= 1  # of a shard: in its header
        (newest / file).write_bytes(content)
    message = mistake(newest)
    assert message.startswith(f"{newest} is damaged: ") and file in message


@pytest.mark.extensions
def test_an_adapter_is_not_put_on_another_model(ended: dict[str, Ended], tmp_path: Path) -> None:
    run = ended["lora"]
    other = make_llama(tmp_path / "other", initializer_range=0.5)
    with pytest.raises(UserError, match=key_words("is not the model")) as error:
        loaded(run.out_dir, base=str(other))
    assert "--base PATH" in str(error.value)


@pytest.mark.extensions
def test_an_adapter_made_elsewhere_is_not_put_on_a_model_of_another_size(
    ended: dict[str, Ended], tmp_path: Path
) -> None:
    adapter = copy_of(ended["lora"].final, tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt"})  # notes no base model
    wider = make_llama(tmp_path / "wider", hidden_size=128)
    deeper = make_llama(tmp_path / "deeper", num_hidden_layers=3)
    shallower = make_llama(tmp_path / "shallower", num_hidden_layers=1)
    for base, words in (
        (wider, "needs"),
        (deeper, "lacks transformer.h.2"),
        (shallower, "has no layer model.layers.1"),
    ):
        with pytest.raises(UserError, match=words) as error:
            loaded(adapter, base=str(base))
        assert "--base PATH" in str(error.value)


@pytest.mark.extensions
def test_an_adapter_that_names_no_base_needs_one(ended: dict[str, Ended], tmp_path: Path) -> None:
    adapter = copy_of(ended["lora"].final, tmp_path / "adapter")
    base = find_result(str(adapter)).base
    file = adapter / "adapter_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"base_model_name_or_path": None}))
    assert "Try --base PATH" in mistake(adapter)
    file.write_text(json.dumps(settings | {"base_model_name_or_path": str(tmp_path / "moved")}))
    assert "moved" in mistake(adapter) and "--base PATH" in mistake(adapter)
    assert torch.equal(logits(loaded(adapter, base=base)), logits(loaded(ended["lora"].out_dir)))


# --- The weights ----------------------------------------------------------------------------------


@pytest.mark.extensions
@pytest.mark.parametrize("name", list(CASES))
def test_result_and_last_checkpoint_are_one_model(ended: dict[str, Ended], name: str) -> None:
    run = ended[name]
    quantize = find_result(str(run.out_dir)).quantize
    final = logits(loaded(run.out_dir, quantize=quantize))
    checkpoint = logits(loaded(run.checkpoint, quantize=quantize))
    assert torch.equal(final, checkpoint)
    base = logits(loaded(base_result(find_result(str(run.out_dir))), quantize=quantize))
    assert (final - base).abs().max() > 1e-3


@pytest.mark.extensions
def test_a_peft_adapter_gives_the_logits_of_peft(ended: dict[str, Ended]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    result = find_result(str(ended["lora"].out_dir))
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(result.base, dtype=torch.float32), result.directory
    ).eval()
    with torch.no_grad():
        expected = theirs(torch.arange(2, 40)[None]).logits[0]
    torch.testing.assert_close(logits(loaded(result)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.extensions
def test_a_litgpt_directory_is_the_same_model(tiny_base: Path, tmp_path: Path) -> None:
    base = open_base(str(tiny_base))
    copy = copy_of(tiny_base, tmp_path / "tiny")
    (copy / "model.safetensors").unlink()
    architecture: Any = base.architecture
    assert architecture.implementation == "litgpt"
    save_config(architecture.config, copy)
    state = dict(weights(base))
    for layer in range(base.architecture.layers):
        qkv = f"transformer.h.{layer}.attn.qkv"
        state[f"{qkv}.weight"] = torch.cat([state.pop(f"{qkv}.{p}_proj.weight") for p in "qkv"])
    torch.save(state, copy / "lit_model.pth")
    assert torch.equal(logits(loaded(copy)), logits(loaded(tiny_base)))


@pytest.mark.extensions
@pytest.mark.parametrize("kind", ["bnb.nf4", "bnb.int8"])
def test_a_full_fine_tune_can_be_quantised_when_it_is_used(
    ended: dict[str, Ended], kind: Quantization
) -> None:
    run = ended["full"]
    plain, final = loaded(run.out_dir), loaded(run.out_dir, quantize=kind)
    assert final.model.quantized == kind
    assert torch.equal(logits(final), logits(loaded(run.checkpoint, quantize=kind)))
    assert not torch.equal(logits(final), logits(plain))


@pytest.mark.extensions
def test_the_prompt_style_is_that_of_the_run(ended: dict[str, Ended], tiny_base: Path) -> None:
    assert loaded(ended["lora"].out_dir).prompting.style.class_name == "Alpaca"
    assert loaded(tiny_base).prompting.style.class_name == "Default"


@pytest.mark.extensions
def test_a_model_without_a_recipe_uses_the_style_file_in_its_directory(
    tiny_base: Path, tmp_path: Path
) -> None:
    copy = copy_of(tiny_base, tmp_path / "model")
    (copy / "prompt_style.yaml").write_text("class_path: litgpt.prompts.TinyLlama\n")
    assert loaded(copy).prompting.style.class_name == "TinyLlama"
    (copy / "prompt_style.yaml").write_text("class_path: os.system\n")
    assert "os.system" in mistake(copy)


# --- How it computes ------------------------------------------------------------------------------


@pytest.mark.extensions
@pytest.mark.parametrize("name", ["lora", "mixed", "bf16"])
def test_a_result_computes_as_its_run_did(ended: dict[str, Ended], name: str) -> None:
    result = find_result(str(ended[name].out_dir))
    plan = plan_use(result, "cpu")
    assert plan.precision == result.precision == ended[name].report.resolved.precision
    assert (plan.strategy, plan.world_size, plan.accelerator) == ("single", 1, "cpu")
    assert plan_use(result, "cpu", "bf16-true").precision == "bf16-true"


def test_a_model_of_no_run_computes_in_32_bits_on_a_cpu(tiny_base: Path) -> None:
    assert plan_use(find_result(str(tiny_base)), "cpu").precision == "32-true"


def test_a_gpu_without_bfloat16_computes_in_float16_which_it_would_not_train_in(
    tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Devices(accelerator="cuda", count=1, names=("V100",), bf16_native=False)
    monkeypatch.setattr("ftkit.evaluation.loading.find_devices", lambda *_, **__: old)
    assert plan_use(find_result(str(tiny_base))).precision == "16-true"


@pytest.mark.extensions
def test_a_run_in_float16_computes_in_32_bits_on_a_cpu(ended: dict[str, Ended]) -> None:
    result = dataclasses.replace(find_result(str(ended["lora"].out_dir)), precision="16-mixed")
    assert plan_use(result, "cpu").precision == "32-true"
    with pytest.raises(UserError, match="float16"):
        plan_use(result, "cpu", "16-mixed")
