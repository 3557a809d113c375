"""Checkpoints of models that see: their language model is read alone, and written with the rest."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import ALL, build, export, logits, lora_recipe, train
from command import Command
from computed import assert_close, logits_by, opened, padded_logits, sequences
from messages import key_words
from multimodal_models import EACH, MODELS, SOME, make_multimodal_model, multimodal_model
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny import make_data
from torch import Tensor

from ftkit.errors import UserError
from ftkit.launch.preflight import rough_model
from ftkit.models.architectures.architecture import HEAD
from ftkit.models.architectures.transformers_architecture import TransformersArchitecture
from ftkit.models.architectures.transformers_reading import require_text_alone
from ftkit.models.lora.adapter_reading import read_adapter
from ftkit.models.pretrained.base_model import (
    fingerprint,
    open_base,
    open_without_weights,
    read_blueprint,
    save_without_weights,
    weights,
)
from ftkit.models.pretrained.save import save_hf

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def directory(model: str) -> Path:
        if model not in made:
            made[model] = make_multimodal_model(tmp_path_factory.mktemp("model"), model)
        return made[model]

    return directory


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    return make_multimodal_model(tmp_path / "gemma3", "gemma3")


def texts() -> list[Tensor]:
    return [sequence.clamp(max=390) for sequence in sequences()]


def settings_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def change_settings(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    settings = settings_of(directory)
    change(settings)
    (directory / "config.json").write_text(json.dumps(settings))


# Written as it was


@pytest.mark.parametrize("model", EACH)
def test_weights_that_were_not_changed_are_written_as_they_were(
    directory_of: Callable[[str], Path], model: str, tmp_path: Path
) -> None:
    base = open_base(str(directory_of(model)))
    save_hf(base, weights(base), tmp_path / "out")
    before, after = (load_file(d / WEIGHTS) for d in (directory_of(model), tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert settings_of(tmp_path / "out") == settings_of(directory_of(model))
    preprocessing = "preprocessor_config.json"
    assert (tmp_path / "out" / preprocessing).read_bytes() == (
        directory_of(model) / preprocessing
    ).read_bytes()


@pytest.mark.parametrize("model", SOME)
def test_a_trained_language_model_is_within_the_whole_again(
    directory_of: Callable[[str], Path], model: str, tmp_path: Path
) -> None:
    base, ours = opened(directory_of(model))
    trained = [(name, tensor * 1.5) for name, tensor in weights(base)]
    save_hf(base, trained, tmp_path / "out")
    _, ours = opened(tmp_path / "out")
    before, after = (multimodal_model(d) for d in (directory_of(model), tmp_path / "out"))
    assert type(after).__name__ == settings_of(tmp_path / "out")["architectures"][0]
    assert_close(padded_logits(ours, texts()), logits_by(after, texts()))
    rest = base.architecture.rest_shapes
    unchanged = before.state_dict()
    for name, tensor in after.state_dict().items():
        is_equal = torch.equal(tensor, unchanged[name])
        assert is_equal if name in rest else not is_equal or not tensor.any()
    assert len(rest) > 20


def test_the_rest_is_kept_to_the_byte_whatever_its_number_format(
    gemma: Path, tmp_path: Path
) -> None:
    stored = load_file(gemma / WEIGHTS)
    for name in stored:
        if "vision" in name:
            stored[name] = stored[name].bfloat16()
    odd = next(name for name in stored if name.endswith("post_layernorm.weight"))
    ids = odd.replace("post_layernorm.weight", "embeddings.position_ids")
    stored[ids] = torch.arange(4)
    stored[odd] = stored[odd].to(torch.float8_e4m3fn)
    save_file(stored, gemma / WEIGHTS, {"format": "pt"})
    base = open_base(str(gemma))
    half = [(name, tensor.half()) for name, tensor in weights(base)]
    save_hf(base, half, tmp_path / "out")
    after = load_file(tmp_path / "out" / WEIGHTS)
    assert after.keys() == stored.keys()
    assert after[ids].tolist() == [0, 1, 2, 3]
    for name in base.rest:
        assert after[name].dtype == stored[name].dtype
        assert after[name].view(torch.uint8).equal(stored[name].view(torch.uint8))
    assert base.extra_weights_bytes == sum(stored[name].nbytes for name in base.rest)
    assert settings_of(tmp_path / "out")["dtype"] == "float32"  # which holds both halves


def test_a_weight_of_the_language_model_in_another_format_is_refused(gemma: Path) -> None:
    stored = load_file(gemma / WEIGHTS)
    name = next(name for name in stored if "q_proj" in name and "vision" not in name)
    save_file(stored | {name: stored[name].to(torch.int8)}, gemma / WEIGHTS)
    with pytest.raises(UserError, match="is of type I8; weights must be one of"):
        open_base(str(gemma))


def test_files_deleted_after_the_start_are_still_written(gemma: Path, tmp_path: Path) -> None:
    base = open_base(str(gemma))
    tensors = [(name, tensor.clone()) for name, tensor in weights(base)]
    before = load_file(gemma / WEIGHTS)
    (gemma / WEIGHTS).unlink()
    save_hf(base, tensors, tmp_path / "out")
    after = load_file(tmp_path / "out" / WEIGHTS)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_checkpoint_has_the_language_model_alone_and_says_so(gemma: Path, tmp_path: Path) -> None:
    base = open_base(str(gemma))
    tensors = list(weights(base))
    save_without_weights(base, tmp_path)
    outlined = open_without_weights(tmp_path)
    assert (tmp_path / "preprocessor_config.json").is_file()
    with pytest.raises(UserError, match=r"parts beside its language model.*--checkpoint_dir"):
        save_hf(outlined, tensors, tmp_path / "out")
    save_hf(dataclasses.replace(outlined, rest=base.rest), tensors, tmp_path / "out")
    assert load_file(tmp_path / "out" / WEIGHTS).keys() == load_file(gemma / WEIGHTS).keys()


# Other names and settings for the same


@pytest.mark.parametrize("model", ["gemma3", "qwen2_5_vl", "mistral3"])
def test_files_by_the_names_of_any_time_hold_the_same_model(
    directory_of: Callable[[str], Path], model: str, tmp_path: Path
) -> None:
    old = directory_of(model)
    whole = multimodal_model(old)
    (tmp_path / "config.json").write_bytes((old / "config.json").read_bytes())
    tensors = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    if open_base(str(old)).tied:
        del tensors[HEAD]
    save_file(tensors, tmp_path / WEIGHTS)
    assert tensors.keys() != load_file(old / WEIGHTS).keys()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((old / name).read_bytes())
    now, then = open_base(str(tmp_path)), open_base(str(old))
    assert fingerprint(now) == fingerprint(then)
    assert now.extra_weights_bytes == then.extra_weights_bytes
    save_hf(now, weights(now), tmp_path / "out")
    assert_close(logits_by(multimodal_model(tmp_path / "out"), texts()), logits_by(whole, texts()))


def test_settings_of_the_language_model_may_lie_beside_those_of_the_vision(
    directory_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """As they do in the first files of Qwen2-VL."""
    directory = make_multimodal_model(tmp_path / "model", "qwen2_vl")

    def flatten(settings: dict[str, Any]) -> None:
        text = settings.pop("text_config")
        settings |= {key: value for key, value in text.items() if key != "model_type"}

    change_settings(directory, flatten)
    base, ours = opened(directory)
    expected = logits_by(multimodal_model(directory_of("qwen2_vl")), texts())
    assert_close(padded_logits(ours, texts()), expected)
    save_hf(base, weights(base), tmp_path / "out")
    assert settings_of(tmp_path / "out") == settings_of(directory)
    rough = rough_model(str(directory_of("qwen2_vl")))
    assert rough is not None and rough == rough_model(str(directory))


def test_a_head_that_settings_say_is_tied_and_files_do_not_is_untied(
    tmp_path: Path, directory_of: Callable[[str], Path]
) -> None:
    """Mistral 3's settings tie embedding and head unless they say otherwise."""
    directory = make_multimodal_model(tmp_path / "model", "mistral3")
    change_settings(directory, lambda settings: settings.pop("tie_word_embeddings"))
    base = open_base(str(directory))
    assert not base.tied
    save_hf(base, weights(base), tmp_path / "out")
    assert settings_of(tmp_path / "out")["tie_word_embeddings"] is False
    expected = logits_by(multimodal_model(directory_of("mistral3")), texts())
    assert_close(logits_by(multimodal_model(tmp_path / "out"), texts()), expected)


def test_a_head_that_was_trained_apart_is_written_apart(gemma: Path, tmp_path: Path) -> None:
    base = open_base(str(gemma))
    tensors = [(name, tensor.clone()) for name, tensor in weights(base)]
    assert base.tied
    head = torch.randn(dict(tensors)[base.architecture.embedding].shape)
    save_hf(base, [*tensors, (HEAD, head)], tmp_path / "out")
    assert not open_base(str(tmp_path / "out")).tied
    whole = multimodal_model(tmp_path / "out")
    assert torch.equal(whole.get_output_embeddings().weight, head)


def test_a_plan_needs_the_settings_alone(gemma: Path) -> None:
    (gemma / WEIGHTS).unlink()
    base = read_blueprint(str(gemma))
    rest = base.architecture.rest_shapes
    assert base.extra_weights_bytes == 4 * sum(shape.numel() for shape in rest.values()) > 0


# Adapters


@pytest.mark.parametrize("model", ["gemma3", "llama4", "qwen3_vl", "mistral3", "idefics3"])
def test_an_adapter_is_one_of_the_whole_model(
    directory_of: Callable[[str], Path], model: str, tmp_path: Path
) -> None:
    base = open_base(str(directory_of(model)))
    keys = ALL | {"lora_head": False}
    recipe = lora_recipe(base, lora_r=3, **keys)
    ours = train(build(base, recipe))
    export(ours, base, recipe, tmp_path / "adapter")
    whole = multimodal_model(directory_of(model))
    adapted = PeftModel.from_pretrained(whole, tmp_path / "adapter")
    vision = [name for name in base.architecture.rest_shapes if name.endswith("q_proj.weight")]
    assert vision or model == "qwen3_vl"
    assert_close(padded_logits(ours.eval(), texts()), logits_by(adapted.eval(), texts()))
    found = read_adapter(tmp_path / "adapter", base)
    again = build(base, lora_recipe(base, adapter=tmp_path / "adapter"))
    assert set(found.tensors) == {
        name for name in found.tensors if not name.startswith(tuple(base.architecture.rest_shapes))
    }
    assert_close(logits(again), logits(ours))


# What is refused


def test_a_model_that_sees_its_prompt_in_both_directions_needs_media(tmp_path: Path) -> None:
    settings = MODELS["llava"] | {"model_type": "paligemma", "projection_dim": 32}
    settings["text_config"] = settings["text_config"] | {"model_type": "gemma"}
    settings["vision_config"] = MODELS["gemma3"]["vision_config"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    base = read_blueprint(str(tmp_path))
    base.architecture.require_media(["image"], base.name)
    with pytest.raises(UserError, match="all of whose tokens see each other"):
        base.architecture.require_media([], base.name)
    architecture = TransformersArchitecture(settings)  # whatever its settings say of it
    with pytest.raises(UserError, match=r"PaliGemma.*(attend to later ones|position_ids)"):
        require_text_alone(architecture.build(), architecture.language_name, "it")


def test_a_model_whose_layers_have_experts_for_images_too_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "ernie4_5_vl_moe"}))
    with pytest.raises(UserError, match="experts of text and of images"):
        read_blueprint(str(tmp_path))


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("\nIt requires the X library.\nMore words.", "requires the X library"),
        (
            "\nIt lacks timm. You can:\n`pip install timm`. Please.",
            "needs ... Try pip install timm.",
        ),
    ],
)
def test_a_package_that_a_model_needs_is_named(
    said: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModel

    def lacking(*_: Any, **__: Any) -> None:
        raise ImportError(said)

    monkeypatch.setattr(AutoModel, "from_config", lacking)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "perception_lm"}))
    with pytest.raises(UserError, match=key_words(f"perception_lm ... {shown}")):
        read_blueprint(str(tmp_path))


def test_a_language_model_without_the_rest_that_its_settings_name_is_refused(gemma: Path) -> None:
    stored = {n: t for n, t in load_file(gemma / WEIGHTS).items() if "language_model" in n}
    save_file(stored, gemma / WEIGHTS)
    with pytest.raises(UserError, match=r"only a language model.*whole Gemma3For"):
        open_base(str(gemma))


def test_a_tensor_that_is_no_part_of_the_language_model_is_refused(gemma: Path) -> None:
    stored = load_file(gemma / WEIGHTS)
    strange = "language_model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file(stored | {strange: torch.ones(1)}, gemma / WEIGHTS)
    with pytest.raises(UserError, match=f"hold {strange}, which its settings do not explain"):
        open_base(str(gemma))


# The commands


@pytest.mark.slow
def test_a_full_run_that_goes_on_and_an_export_need_the_base_for_the_rest(
    gemma: Path, tmp_path: Path, ftkit: Command
) -> None:
    run = [
        *("--data", "JSON", "--data.path", make_data(tmp_path / "data.json"), "--out_dir", "out"),
        *("--train.max_steps", "2", "--train.global_batch_size", "4", "--accelerator", "cpu"),
        *("--precision", "32-true", "--eval.final_validation", "false"),
    ]
    begun = ftkit("finetune_full", gemma, *run, "--stop_after", "1")
    assert "only the language model is trained; " in begun.stdout, begun.stderr
    moved = gemma.rename(tmp_path / "moved")
    export = ("export", "out/checkpoints", "--format", "hf", "--out", "exported")
    for refused in (ftkit("finetune_full", gemma, *run, "--resume", "auto"), ftkit(*export)):
        assert refused.returncode == 2
        assert "--checkpoint_dir PATH" in refused.stderr and "Traceback" not in refused.stderr
    done = ftkit("finetune_full", moved, *run, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    done = ftkit(*export, "--checkpoint_dir", moved)
    assert done.returncode == 0, done.stderr
    before = load_file(moved / WEIGHTS)
    for directory in ("out/final", "exported"):
        after = load_file(tmp_path / directory / WEIGHTS)
        assert after.keys() == before.keys()
        for name in before:
            assert torch.equal(after[name], before[name]) == ("language_model" not in name)
