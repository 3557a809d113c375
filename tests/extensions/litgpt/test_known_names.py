"""`random:NAME`: whatever LitGPT or transformers knows by name has a size, and is computed."""

from typing import Any

import pytest
from litgpt.config import Config, configs

from ftkit.errors import UserError
from ftkit.extensions.litgpt.architecture import find_by_hub_name
from ftkit.extensions.litgpt.families import litgpt_config
from ftkit.models.architectures.architecture import Implementation
from ftkit.models.architectures.read import known_architecture
from ftkit.models.dry_run import try_architecture
from ftkit.models.pretrained.base_model import (
    BaseModel,
    open_base,
    parameter_shapes,
    read_blueprint,
)

NAMES = list(dict.fromkeys(config["name"] for config in configs))


def parameters(base: BaseModel) -> int:
    return sum(shape.numel() for shape in parameter_shapes(base).values())


def settings_of(name: str) -> dict[str, Any]:
    """What transformers is given as its config.json."""
    architecture: Any = open_base(f"random:{name}").architecture
    return dict(architecture.settings)


@pytest.mark.parametrize(
    ("name", "implementation", "positions", "count"),
    [
        ("pythia-14m", "transformers", 512, 14_067_712),
        ("Mixtral-8x7B-v0.1", "transformers", 32_768, 46_702_792_704),
        ("Qwen3-30B-A3B", "transformers", 40_960, 30_532_122_624),
        ("Gemma-3-1b-it", "transformers", 131_072, 999_885_952),
        ("Gemma-2-2b", "transformers", 8192, 2_614_341_888),
        ("OLMo-2-1124-7B", "transformers", 4096, 7_298_617_344),
        ("Mistral-7B-v0.1", "transformers", 4096, 7_241_732_096),
        ("Phi-3-mini-4k-instruct", "transformers", 4096, 3_821_079_552),
        ("falcon-7b", "litgpt", 2048, None),
    ],
)
def test_a_name_has_the_size_of_its_model_and_its_whole_context(
    name: str, implementation: str, positions: int, count: int | None
) -> None:
    base = open_base(f"random:{name}")
    assert base.architecture.implementation == implementation
    assert base.architecture.context_length == positions
    assert count is None or parameters(base) == count
    try_architecture(base.architecture.with_layers(1))
    assert open_base(base.name).architecture == base.architecture, "a run that goes on finds it"


def test_a_hub_name_without_files_is_the_same_architecture_as_random() -> None:
    for name in ("allenai/OLMo-2-1124-7B", "google/gemma-2-2b", "tiiuae/falcon-7b"):
        found = read_blueprint(name)
        assert found.architecture == open_base(f"random:{name}").architecture
        assert found.layout == ("litgpt" if "falcon" in name else "hf")


@pytest.mark.parametrize(
    "name",
    [
        *("Gemma-2-9b", "Mathstral-7B-v0.1", "Phi-3-mini-4k-instruct"),
        *("phi-4", "Phi-4-mini-instruct", "pythia-14m"),
    ],
)
def test_a_config_json_that_is_made_says_what_litgpt_knows(name: str) -> None:
    read, known = litgpt_config(settings_of(name), name), Config.from_name(name)
    assert known is not None
    size = known.sliding_window_size
    assert settings_of(name).get("sliding_window") == size
    assert read.block_size == min(known.block_size, size or known.block_size)
    for field in (
        *("n_layer", "n_embd", "n_head", "n_query_groups", "head_size", "intermediate_size"),
        *("padded_vocab_size", "norm_eps", "rope_base", "rope_adjustments", "rotary_percentage"),
        *("post_attention_norm", "post_mlp_norm", "attention_scores_scalar", "scale_embeddings"),
        *("attention_logit_softcapping", "final_logit_softcapping", "mlp_class_name", "bias"),
        *("gelu_approximate", "parallel_residual", "norm_class_name"),
    ):
        assert getattr(read, field) == getattr(known, field), field


def test_gemma_3_has_its_pattern_of_layers_and_both_of_its_rotary_embeddings() -> None:
    settings = settings_of("Gemma-3-4b-it")
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    assert settings["layer_types"] == (kinds * 6)[:34]
    assert settings["sliding_window"] == 1024
    architecture: Any = open_base("random:Gemma-3-4b-it").architecture
    rope = architecture.config.rope_parameters
    whole, local = rope["full_attention"], rope["sliding_attention"]
    assert (whole["rope_type"], whole["factor"], whole["rope_theta"]) == ("linear", 8.0, 1e6)
    assert (local["rope_type"], local["rope_theta"]) == ("default", 1e4)


@pytest.mark.parametrize(
    ("name", "implementation", "found"),
    [
        ("Gemma-3-1b-it", "litgpt", "litgpt"),
        ("Mixtral-8x7B-v0.1", "litgpt", "litgpt"),
        ("Llama-3.2-1B", None, "litgpt"),
        ("Llama-3.2-1B", "transformers", "transformers"),
    ],
)
def test_whose_code_computes_it_can_be_asked_for(
    name: str, implementation: Implementation | None, found: Implementation
) -> None:
    architecture = open_base(f"random:{name}", implementation).architecture
    assert architecture.implementation == found


def test_an_implementation_that_a_name_does_not_have_is_an_error() -> None:
    with pytest.raises(UserError, match=r"falcon-7b is known to LitGPT.*_implementation litgpt"):
        open_base("random:falcon-7b", "transformers")
    with pytest.raises(UserError, match=r"qwen3 is a model type of transformers\. Leave"):
        open_base("random:qwen3", "litgpt")


def test_default_settings_that_make_no_whole_model_are_one_error() -> None:
    with pytest.raises(UserError, match=r"default settings of emu3 do not describe a whole model"):
        open_base("random:emu3")


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_litgpt_gives_a_loss_and_gradients(name: str) -> None:
    base = open_base(f"random:{name}")
    assert parameters(base) > 10_000_000
    few = base.architecture.with_layers(2)
    try_architecture(few)
    own = find_by_hub_name(name)
    assert own is not None and known_architecture(name) is not None

    def size(shapes: dict[str, Any]) -> int:
        return sum(shape.numel() for shape in shapes.values())

    assert size(few.untied_shapes) == size(own[1].with_layers(2).untied_shapes)
