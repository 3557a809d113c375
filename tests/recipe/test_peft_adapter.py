"""A foreign adapter_config.json: what is used, what is ignored, and what is refused by name."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from messages import key_words

from ftkit.errors import UserError
from ftkit.recipe.peft_adapter import adapter_keys, peft_arguments, read_notes, with_adapter
from ftkit.recipe.recipe import LoraRecipe

SOUND: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "v_proj"],
}
OF_OTHERS: dict[str, Any] = {
    "auto_mapping": {"base_model_class": "Own", "parent_library": "own_code"},
    "megatron_core": "own_code",
    "runtime_config": {"ephemeral_gpu_offload": False},
    "revision": "main",
    "task_type": "OWN",
    "inference_mode": True,
    "eva_config": None,
    "use_kasa": False,
    "of_tomorrow": 3,
}


def adapter(directory: Path, **values: Any) -> Path:
    (directory / "adapter_config.json").write_text(json.dumps(SOUND | values))
    return directory


@pytest.mark.parametrize(
    ("given", "there", "meant"),
    [
        ("run/final", ["final"], "run/final"),
        ("run", ["final", "checkpoints/step-00000002/adapter"], "run/final"),
        ("run", ["checkpoints/step-00000009/adapter", "checkpoints/step-00000010/adapter"],
         "run/checkpoints/step-00000010/adapter"),
        ("run", ["checkpoints/step-99999999/adapter", "checkpoints/step-100000000/adapter"],
         "run/checkpoints/step-100000000/adapter"),
        ("run/checkpoints", ["checkpoints/step-00000003/adapter"],
         "run/checkpoints/step-00000003/adapter"),
        ("run/checkpoints/step-00000002",
         ["checkpoints/step-00000002/adapter", "checkpoints/step-00000003/adapter"],
         "run/checkpoints/step-00000002/adapter"),
    ],
)  # fmt: skip
def test_an_adapter_is_found_in_whatever_has_one(
    given: str, there: list[str], meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in there:
        (tmp_path / "run" / place).mkdir(parents=True)
        adapter(tmp_path / "run" / place)
    recipe = with_adapter(LoraRecipe(checkpoint_dir="base", adapter=Path(given)))
    assert isinstance(recipe, LoraRecipe)
    assert (recipe.adapter, recipe.lora_r) == (Path(meant), 8)


def test_what_has_no_adapter_is_named_with_what_has_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=key_words(f"{tmp_path} ... run ... --checkpoint_dir")):
        with_adapter(LoraRecipe(checkpoint_dir="base", adapter=tmp_path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("r", 0), ("r", "8"), ("r", True), ("r", 10**9), ("lora_alpha", "16"), ("lora_alpha", [1]),
        ("lora_dropout", 2), ("target_modules", 5), ("target_modules", [1]),
        ("target_parameters", "x"), ("modules_to_save", {"a": 1}), ("use_dora", "yes"),
        ("rank_pattern", {"q_proj": "8"}), ("alpha_pattern", [1]), ("peft_type", ["LORA"]),
        ("base_model_name_or_path", 7), ("init_lora_weights", 1),
    ],
)  # fmt: skip
def test_a_value_of_another_kind_is_named(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=key_words(f"adapter_config.json ... {key} is")):
        adapter_keys(adapter(tmp_path, **{key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bias", "all"), ("layers_to_transform", [1]), ("megatron_config", {"a": 1}),
        ("use_qalora", True), ("arrow_config", {"top_k": 2}), ("init_lora_weights", "pissa"),
        ("use_method_of_tomorrow", True), ("tomorrow_config", {"a": 1}),
    ],
)  # fmt: skip
def test_keys_that_change_the_maths_are_refused_by_name(
    key: str, value: Any, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=key):
        adapter_keys(adapter(tmp_path, **{key: value}))


def test_keys_without_effect_are_ignored_and_unknown_ones_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert adapter_keys(adapter(tmp_path, **OF_OTHERS))["lora_r"] == 8
    assert "of_tomorrow" in caplog.text and "megatron_core" not in caplog.text


def test_nothing_that_names_a_module_or_place_reaches_peft(tmp_path: Path) -> None:
    kind, arguments = peft_arguments(adapter(tmp_path, **OF_OTHERS))
    assert kind == "LORA"
    assert arguments == {key: SOUND[key] for key in ("r", "lora_alpha", "target_modules")}


@pytest.mark.parametrize("content", [b"{", b"[]", b"[" * 100_000, b"\xff"])
def test_invalid_adapter_settings_are_refused_by_file_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes(content)
    with pytest.raises(UserError, match=r"adapter_config\.json"):
        adapter_keys(tmp_path)


@pytest.mark.parametrize(
    "notes", ['{"parts": 5}', '{"lora_r": "8"}', '{"lora_r": -1}', '{"lora_targets": [1]}', "{"]
)
def test_damaged_notes_of_an_adapter_are_named(notes: str, tmp_path: Path) -> None:
    header = json.dumps({"__metadata__": {"ftkit": notes}}).encode()
    file = adapter(tmp_path) / "adapter_model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(UserError, match=r"adapter_model\.safetensors is damaged"):
        read_notes(tmp_path)


def test_notes_decide_nothing_but_what_ftkit_notes(tmp_path: Path) -> None:
    header = json.dumps({"__metadata__": {"ftkit": '{"lora_r": 4, "checkpoint_dir": "/x"}'}})
    file = adapter(tmp_path) / "adapter_model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    assert "checkpoint_dir" not in adapter_keys(tmp_path)
