"""Models of transformers that cannot be trained are refused before anything is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from command import Command
from messages import key_words, says
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers_models import MORE_MODELS, NEWEST, SIZES, settings_of

from ftkit.errors import UserError
from ftkit.models.architectures.transformers_architecture import TransformersArchitecture
from ftkit.models.architectures.transformers_reading import read_transformers_architecture
from ftkit.models.dry_run import require_trainable, try_architecture
from ftkit.models.pretrained.base_model import read_blueprint

UPDATE = "pip install -U transformers"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bert": ({}, "is an encoder, whose tokens attend"),
    "bert as a decoder": ({"is_decoder": True}, "has layers between its last block and its head"),
    "bart": ({}, "is an encoder-decoder model"),
    "gpt2": ({"add_cross_attention": True}, "needs the output of an encoder"),
    "xlnet": ({}, "on both sides"),
    "musicgen": ({}, "needs inputs beside tokens"),
    "gemma4_text": ({"use_bidirectional_attention": "all"}, "attend to later ones"),
    "qwen4_exp_text": ({}, "one by one"),
    "gemma4_assistant": ({}, "of another model"),
    "hrm_text": ({}, "some of the times without gradients"),
    "rwkv": ({}, "overwrites states"),
    "dory": ({}, "more than a linear layer"),
}


@pytest.mark.parametrize("model", [name for name in REFUSED if name.split()[0] in CONFIG_MAPPING])
def test_models_that_are_not_causal_language_models_are_refused(model: str) -> None:
    settings, reason = REFUSED[model]
    with pytest.raises(UserError, match=reason):
        read_transformers_architecture({"model_type": model.split()[0], **settings}, "it")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"transformers_version": "99.1.0"}, ("saved with transformers 99.1.0", UPDATE)),
        ({"transformers_version": "4.50.0"}, ("If a newer version does", UPDATE)),
        ({"transformers_version": [1]}, ("If a newer version does", UPDATE)),
        ({}, ("If a newer version does", UPDATE)),
        ({"auto_map": {}, "transformers_version": "99.1.0"}, ("code of its own", "another model")),
    ],
)
def test_a_family_that_transformers_lacks_is_refused_with_what_has_it(
    settings: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as error:
        read_transformers_architecture({"model_type": "newest", **settings}, "it")
    assert says(str(error.value), "'newest'", transformers.__version__, *words)


@pytest.mark.parametrize("model", ["dbrx", "nemotron_h", "recurrent_gemma"])
def test_a_family_that_was_computed_in_another_way_needs_a_newer_transformers(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = f"{read_transformers_architecture.__module__}.transformers.__version__"
    monkeypatch.setattr(seen, "5.3.0")
    with pytest.raises(UserError) as error:
        read_transformers_architecture({"model_type": model}, "it")
    assert says(str(error.value), repr(model), "5.24 or newer", "5.3.0", UPDATE)


def test_a_family_of_a_newer_transformers_is_trained_without_a_change_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NewestConfig(transformers.LlamaConfig):
        model_type = "newest"

    class NewestForCausalLM(transformers.LlamaForCausalLM):
        config_class = NewestConfig

    # What a newer version has: the names of the family, and its classes.
    monkeypatch.setitem(CONFIG_MAPPING._extra_content, "newest", NewestConfig)
    monkeypatch.setitem(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "newest", "NewestForCausalLM")
    # By name: where another test imported transformers anew, that is another module.
    seen = f"{TransformersArchitecture.__module__}.transformers.NewestForCausalLM"
    monkeypatch.setattr(seen, NewestForCausalLM, raising=False)
    found = read_transformers_architecture({"model_type": "newest", **SIZES}, "it")
    assert (found.class_name, found.layers) == ("NewestForCausalLM", SIZES["num_hidden_layers"])
    try_architecture(found)  # raises if it has no loss or its blocks no gradients


def directory_with(settings: dict[str, Any], directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(settings))
    return directory


def test_a_model_whose_code_fails_on_its_settings_is_refused(tmp_path: Path) -> None:
    settings = {"model_type": "deepseek_v2", **settings_of("deepseek_v2")}
    settings["num_experts_per_tok"] = None
    base = read_blueprint(str(directory_with(settings, tmp_path / "m")), "transformers")
    with pytest.raises(UserError, match=r"DeepseekV2ForCausalLM of transformers fails .*TypeError"):
        require_trainable(base, "single")


@pytest.mark.slow
@pytest.mark.skipif("deepseek_v4" not in NEWEST, reason="needs a newer transformers")
def test_a_model_that_skips_modules_is_refused_where_ranks_would_wait(tmp_path: Path) -> None:
    settings = {"model_type": "deepseek_v4", **settings_of("deepseek_v4")}
    base = read_blueprint(str(directory_with(settings, tmp_path / "m")))
    with pytest.raises(UserError, match=key_words("--strategy fsdp")):
        require_trainable(base, "deepspeed")
    require_trainable(base, "fsdp")


@pytest.mark.slow
@pytest.mark.skipif("inkling2_loop_text" not in MORE_MODELS, reason="needs a newer transformers")
def test_a_model_that_torch_cannot_compile_is_refused_with_compile(tmp_path: Path) -> None:
    settings = {"model_type": "inkling2_loop_text", **settings_of("inkling2_loop_text")}
    base = read_blueprint(str(directory_with(settings, tmp_path / "m")))
    with pytest.raises(UserError, match=key_words("--compile false")):
        require_trainable(base, "single", compiles=True)
    require_trainable(base, "single")


def test_a_block_of_each_kind_is_tried() -> None:
    settings = {"model_type": "deepseek_v3", **settings_of("deepseek_v3")}
    settings |= {"num_hidden_layers": 6, "first_k_dense_replace": 3}
    architecture = read_transformers_architecture(settings, "it")
    assert isinstance(architecture, TransformersArchitecture)
    assert architecture.depth_of_all_kinds == 4


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"model_type": "bert"}, {"model_type": "whisper"}])
def test_a_plan_of_such_a_model_ends_with_one_message(
    settings: dict[str, Any], tmp_path: Path, ftkit: Command
) -> None:
    directory = directory_with(settings, tmp_path / "m")
    ran = ftkit("plan", "--checkpoint_dir", directory)
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr
    assert "ftkit trains causal language models" in ran.stderr
